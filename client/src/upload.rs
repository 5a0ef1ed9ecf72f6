//! Moving the bytes of one import to its nodes: several connections side by side, each with its own share of the source,
//! and the checksum of every unit computed from the source meanwhile. On one host the node reads the files itself. What the
//! base of a replacement has already is not sent: the node copies it.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ballast_schemas::frame::{ByteRange, OFFERS_MAX, OfferedFragment, Offers, SourceRange};
use ballast_schemas::manifest::Manifest;
use ballast_schemas::{BallastError, Digest, ErrorCode, NodeEndpoint, NodeId};
use ballast_transfer::{DeriveUnit, UnitPatch, checksum};
use bytes::Bytes;
use serde_json::json;

use crate::base::{Base, BaseUse};
use crate::checksums::{StopOnDrop, blake3_of_file, of_file};
use crate::gateway::Gateway;
use crate::lane::Lane;
use crate::nodes::{Transport, lanes};
use crate::progress::{Phase, Progress};
use crate::session::ImportToken;
use crate::source::{Data, SourceFile, UnitSource};

/// Bytes of one share: small enough that lanes end together, large enough that requests do not matter.
const BATCH_BYTES: u64 = 64 << 20;
/// Bytes hashed at a time.
const HASH_BYTES: usize = 16 << 20;
/// Units of one share.
const BATCH_UNITS: usize = 4096;
/// Names listed in one error's sentence, and in its details.
const NAMES_SHOWN: usize = 3;
const NAMES_DETAILED: usize = 100;

/// The nodes of one import, each with room taken.
#[derive(Debug)]
pub(crate) struct Upload {
    nodes: Vec<Target>,
    base: Option<Box<Base>>,
    /// Bytes that are not sent because the base has them.
    reused_bytes: AtomicU64,
    /// How bytes went over connections that are closed again.
    went: Mutex<Option<Transport>>,
}

#[derive(Debug)]
struct Target {
    /// The connection that took the room and will seal.
    control: Lane,
}

/// A unit that is made out of the base's.
struct OfBase {
    unit: u32,
    name: String,
    base_unit: u32,
    bytes: u64,
    patch: Option<Arc<UnitPatch>>,
}

impl OfBase {
    fn asked(&self) -> DeriveUnit<'_> {
        let Self { unit, base_unit, bytes, .. } = *self;
        DeriveUnit { unit, base_unit, bytes, blake3: None, patch: self.patch.as_deref() }
    }
}

/// Units that one lane sends in one go.
enum Batch {
    Bytes { unit: u32, bytes: Bytes },
    File { file: Arc<SourceFile>, ranges: Vec<SourceRange> },
    Base(Vec<OfBase>),
}

impl Upload {
    /// Connects to every node of the placement and takes room there.
    pub(crate) async fn begin(
        gateway: &Gateway,
        endpoints: &[NodeEndpoint],
        token: &ImportToken,
        extents: &[u64],
    ) -> Result<Self, BallastError> {
        let mut upload =
            Self { nodes: Vec::new(), base: None, reused_bytes: AtomicU64::new(0), went: Mutex::new(None) };
        for endpoint in endpoints {
            let mut control = Lane::connect(endpoint, token, gateway.route()).await?;
            control.connection.allocate(extents).await?;
            upload.nodes.push(Target { control });
        }
        if upload.nodes.is_empty() {
            return Err(BallastError::new(ErrorCode::Unavailable, "the import was placed on no node; begin it again"));
        }
        Ok(upload)
    }

    /// Acquires a lease on what the import takes from. After room was taken: a base that gives way to its target is not held.
    pub(crate) async fn open_base(&mut self, gateway: &Gateway, base: &BaseUse) -> Result<(), BallastError> {
        self.base = Base::open(gateway, base).await?.map(Box::new);
        Ok(())
    }

    /// Lets go of the base.
    pub(crate) async fn release_base(&mut self) {
        if let Some(base) = self.base.take() {
            base.release().await;
        }
    }

    /// The unit of the base that may have these bytes.
    pub(crate) fn candidate(&self, bytes: u64, crc64: u64) -> Option<u32> {
        self.base.as_ref()?.candidate(bytes, crc64)
    }

    /// Bytes that were not sent because the base has them.
    pub(crate) fn reused_bytes(&self) -> u64 {
        self.reused_bytes.load(Ordering::Relaxed)
    }

    /// How the bytes go.
    pub(crate) fn transport(&self) -> Transport {
        let went = *self.went.lock().unwrap_or_else(PoisonError::into_inner);
        self.nodes.iter().map(|node| node.control.transport()).chain(went).max().unwrap_or(Transport::Local)
    }

    /// Writes stretches of units from memory. Where `candidates` names a unit of the base, the stretch is a whole unit, which
    /// is sent only if it is not the same.
    pub(crate) async fn write(
        &mut self,
        ranges: &[ByteRange],
        buffers: &[&[u8]],
        candidates: &[Option<u32>],
    ) -> Result<(), BallastError> {
        let mut alike = Vec::new();
        for ((range, buffer), candidate) in ranges.iter().zip(buffers).zip(candidates) {
            if let Some(base_unit) = *candidate {
                let blake3 = Some(blake3_of(buffer).await);
                alike.push(DeriveUnit { unit: range.unit, base_unit, bytes: range.bytes, blake3, patch: None });
            }
        }
        for (number, node) in self.nodes.iter_mut().enumerate() {
            node.control.keep_usable().await?;
            let same = match &self.base {
                Some(base) => node.control.reuse(base, &alike).await?,
                None => HashSet::new(),
            };
            let (mut left, mut bytes) = (Vec::with_capacity(ranges.len()), Vec::with_capacity(ranges.len()));
            for ((range, buffer), candidate) in ranges.iter().zip(buffers).zip(candidates) {
                if candidate.is_some() && same.contains(&range.unit) {
                    self.reused_bytes.fetch_add(if number == 0 { range.bytes } else { 0 }, Ordering::Relaxed);
                } else {
                    left.push(*range);
                    bytes.push(*buffer);
                }
            }
            let written = node.control.connection.write_ranges(&left, &bytes).await;
            written.map_err(|error| node.control.explained(error.into()))?;
        }
        Ok(())
    }

    /// Offers fragments of a participant's part, and sends those that are wanted. Answers how many bytes.
    pub(crate) async fn offer(
        &mut self,
        fragments: &[OfferedFragment],
        buffers: &[&[u8]],
    ) -> Result<u64, BallastError> {
        let mut sent = 0;
        for node in &mut self.nodes {
            node.control.keep_usable().await?;
            let wanted = node.control.offer(fragments).await?;
            let ranges: Vec<ByteRange> = wanted.iter().map(|at| range_of(&fragments[at as usize])).collect();
            let buffers: Vec<&[u8]> = wanted.iter().map(|at| buffers[at as usize]).collect();
            if !ranges.is_empty() {
                let written = node.control.connection.write_ranges(&ranges, &buffers).await;
                written.map_err(|error| node.control.explained(error.into()))?;
                sent += ranges.iter().map(|range| range.bytes).sum::<u64>();
            }
        }
        Ok(sent)
    }

    /// Has every node compare what it got of these fragments. Answers those that are not there as they were offered, and which
    /// run of each node's process has compared.
    pub(crate) async fn missing(
        &mut self,
        fragments: &[OfferedFragment],
    ) -> Result<(Vec<OfferedFragment>, BTreeMap<NodeId, String>), BallastError> {
        let (mut missing, mut incarnations) = (Vec::new(), BTreeMap::new());
        for node in &mut self.nodes {
            node.control.keep_usable().await?;
            let hello = node.control.connection.hello();
            incarnations.insert(hello.node.clone(), hello.incarnation.clone());
            for offered in fragments.chunks(OFFERS_MAX) {
                let wanted = node.control.offer(offered).await?;
                missing.extend(wanted.iter().map(|at| offered[at as usize]));
            }
        }
        missing.sort_unstable_by_key(|fragment| (fragment.unit, fragment.offset));
        missing.dedup();
        Ok((missing, incarnations))
    }

    /// By node, the run of its process that the bytes are with.
    pub(crate) async fn incarnations(&mut self) -> Result<BTreeMap<NodeId, String>, BallastError> {
        let mut found = BTreeMap::new();
        for node in &mut self.nodes {
            node.control.keep_usable().await?;
            let hello = node.control.connection.hello();
            found.insert(hello.node.clone(), hello.incarnation.clone());
        }
        Ok(found)
    }

    /// What the participants have offered to each node that has not sealed the import.
    pub(crate) async fn offers(&mut self, conflicts: bool) -> Result<Vec<Offers>, BallastError> {
        let mut all = Vec::with_capacity(self.nodes.len());
        for node in &mut self.nodes {
            if !node.control.describe().await?.sealed {
                let offers = node.control.connection.read_offers(conflicts).await;
                all.push(offers.map_err(|error| node.control.explained(error.into()))?);
            }
        }
        Ok(all)
    }

    /// The manifest that every node has sealed the import with, by an earlier coordinator; `None` while one has not.
    pub(crate) async fn sealed(&mut self) -> Result<Option<Digest>, BallastError> {
        let mut found = Vec::with_capacity(self.nodes.len());
        for node in &mut self.nodes {
            found.push(node.control.describe().await?.manifest_sha256);
        }
        // Nodes that were sealed with different manifests refuse the seal, or the commit.
        Ok(found.iter().all(Option::is_some).then(|| found.first().copied().flatten()).flatten())
    }

    /// Sends every unit whose bytes are at hand and answers the checksums of all.
    pub(crate) async fn run(
        &mut self,
        units: &[UnitSource],
        known: Vec<Option<u64>>,
        progress: &Progress,
        bytes: u64,
    ) -> Result<Vec<u64>, BallastError> {
        let mut checksums = known;
        for unit in units.iter().filter(|unit| unit.bytes == 0) {
            checksums[unit.unit as usize] = Some(checksum(&[]));
        }
        let found = Mutex::new(checksums);
        for node in 0..self.nodes.len() {
            let meter = progress.meter(Phase::Writing, bytes);
            let queue = Mutex::new(batches(units));
            let lane_count = lanes().min(queue.lock().unwrap_or_else(PoisonError::into_inner).len());
            // The source's checksums do not depend on where it goes.
            let found = (node == 0).then_some(&found);
            let mut lanes = Vec::with_capacity(lane_count);
            for lane in 0..lane_count {
                let (queue, meter, control, went) = (&queue, &meter, &self.nodes[node].control, &self.went);
                let base = self.base.as_deref().map(|base| (base, &self.reused_bytes));
                lanes.push(async move {
                    let mut connection = control.another().await?;
                    tracing::trace!(lane, node = %connection.connection.hello().node, "a lane is open");
                    let take = |lane: &Lane| {
                        let batch = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                        batch.map(|batch| Share::begin(batch, lane, base.map(|(base, _)| base))).transpose()
                    };
                    let mut next = take(&connection)?;
                    while let Some(share) = next {
                        connection.keep_usable().await?;
                        // What the next one's checksums cost is paid while this one is sent.
                        next = take(&connection)?;
                        let sent = send(&mut connection, share, base, found, &|bytes| meter.add(bytes)).await;
                        sent.map_err(|error| connection.explained(error))?;
                    }
                    let mut went = went.lock().unwrap_or_else(PoisonError::into_inner);
                    *went = (*went).max(Some(connection.transport()));
                    Ok::<(), BallastError>(())
                });
            }
            futures::future::try_join_all(lanes).await?;
        }
        let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        let missing = |unit: &UnitSource| BallastError::invalid(format!("{:?} of the source has no bytes", unit.name));
        found.into_iter().zip(units).map(|(checksum, unit)| checksum.ok_or_else(|| missing(unit))).collect()
    }

    /// Has every node check what it got and keep the manifest.
    pub(crate) async fn seal(&mut self, manifest: &Manifest) -> Result<(), BallastError> {
        let document = manifest.to_canonical_bytes();
        for node in &mut self.nodes {
            node.control.keep_usable().await?;
        }
        let seals = self.nodes.iter_mut().map(async |node| {
            let sealed = node.control.connection.seal(&document).await;
            sealed.map_err(|error| node.control.explained(error.into()))
        });
        futures::future::try_join_all(seals).await?;
        Ok(())
    }
}

fn range_of(fragment: &OfferedFragment) -> ByteRange {
    ByteRange { unit: fragment.unit, offset: fragment.offset, bytes: fragment.bytes }
}

/// The source in shares, each file from front to back.
fn batches(units: &[UnitSource]) -> VecDeque<Batch> {
    let mut batches = VecDeque::new();
    let mut in_files: Vec<(&Arc<SourceFile>, u64, &UnitSource)> = Vec::new();
    let (mut of_base, mut of_base_bytes) = (Vec::new(), 0_u64);
    for unit in units.iter().filter(|unit| unit.bytes > 0) {
        match &unit.data {
            Data::Bytes(bytes) => batches.push_back(Batch::Bytes { unit: unit.unit, bytes: bytes.clone() }),
            Data::File { file, offset } => in_files.push((file, *offset, unit)),
            Data::Later => {}
            Data::Base { unit: base_unit, patch } => {
                let (name, base_unit, patch) = (unit.name.clone(), *base_unit, patch.clone());
                of_base.push(OfBase { unit: unit.unit, name, base_unit, bytes: unit.bytes, patch });
                of_base_bytes += unit.bytes;
                if of_base_bytes >= BATCH_BYTES || of_base.len() >= BATCH_UNITS {
                    batches.push_back(Batch::Base(std::mem::take(&mut of_base)));
                    of_base_bytes = 0;
                }
            }
        }
    }
    if !of_base.is_empty() {
        batches.push_back(Batch::Base(of_base));
    }
    in_files.sort_by(|a, b| (&a.0.path, a.1).cmp(&(&b.0.path, b.1)));
    let mut share: Option<(Arc<SourceFile>, Vec<SourceRange>)> = None;
    let mut bytes = 0;
    for (file, offset, unit) in in_files {
        let range = SourceRange { source_offset: offset, unit: unit.unit, unit_offset: 0, bytes: unit.bytes };
        match &mut share {
            Some((open, ranges))
                if Arc::ptr_eq(open, file) && bytes + unit.bytes <= BATCH_BYTES && ranges.len() < BATCH_UNITS =>
            {
                ranges.push(range);
                bytes += unit.bytes;
            }
            _ => {
                let full = share.replace((file.clone(), vec![range]));
                batches.extend(full.map(|(file, ranges)| Batch::File { file, ranges }));
                bytes = unit.bytes;
            }
        }
    }
    batches.extend(share.map(|(file, ranges)| Batch::File { file, ranges }));
    batches
}

/// A share whose turn comes soon.
struct Share {
    batch: Batch,
    /// Of a file that may be the base's: checksums of its units, which say what has to be sent.
    sums: Option<Computing>,
}

/// Checksums being computed. Dropped, it stops.
struct Computing {
    opened: Arc<File>,
    sums: tokio::task::JoinHandle<Result<Vec<(u32, u64)>, BallastError>>,
    stop: StopOnDrop,
}

impl Computing {
    fn begin(file: &Arc<SourceFile>, opened: Arc<File>, ranges: &[SourceRange]) -> Self {
        let stop = StopOnDrop::default();
        let sums = compute(file.clone(), opened.clone(), ranges.to_vec(), &stop);
        Self { opened, sums, stop }
    }
}

impl Share {
    fn begin(batch: Batch, lane: &Lane, base: Option<&Base>) -> Result<Self, BallastError> {
        let sums = match (&batch, base) {
            // On one host the bytes are not sent anyway: to compare them would cost more than to copy them.
            (Batch::File { file, ranges }, Some(base))
                if lane.transport() != Transport::Local && ranges.iter().any(|range| base.has_size(range.bytes)) =>
            {
                Some(Computing::begin(file, Arc::new(file.open()?), ranges))
            }
            _ => None,
        };
        Ok(Self { batch, sums })
    }
}

/// Sends one share over one connection, and computes its checksums at the same time where they are wanted.
async fn send(
    lane: &mut Lane,
    share: Share,
    base: Option<(&Base, &AtomicU64)>,
    found: Option<&Mutex<Vec<Option<u64>>>>,
    sent: &(dyn Fn(u64) + Sync),
) -> Result<(), BallastError> {
    let note = |checksums: &[(u32, u64)]| {
        let Some(found) = found else { return };
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        for (unit, checksum) in checksums {
            found[*unit as usize] = Some(*checksum);
        }
    };
    // Counted for the first node alone, as the source's checksums are computed for it alone.
    let count = |bytes| {
        if let Some((_, reused)) = base.filter(|_| found.is_some()) {
            reused.fetch_add(bytes, Ordering::Relaxed);
        }
    };
    let reused = |bytes| {
        count(bytes);
        sent(bytes);
    };
    match share.batch {
        Batch::Bytes { unit, bytes } => {
            let sum = checksum(&bytes);
            note(&[(unit, sum)]);
            let size = bytes.len() as u64;
            if let Some((base, _)) = base
                && let Some(base_unit) = base.candidate(size, sum)
            {
                let blake3 = Some(blake3_of(&bytes).await);
                let alike = DeriveUnit { unit, base_unit, bytes: size, blake3, patch: None };
                if lane.reuse(base, &[alike]).await?.contains(&unit) {
                    reused(size);
                    return Ok(());
                }
            }
            lane.connection.write(unit, 0, &bytes).await.map_err(|error| lane.explained(error.into()))?;
            sent(size);
        }
        Batch::File { file, mut ranges } => {
            let mut computing = None;
            let opened = match (share.sums, base) {
                (Some(Computing { opened, sums, stop }), Some((base, _))) => {
                    let sums = joined(sums.await)?;
                    note(&sums);
                    let same = reuse_file(lane, base, &file, &opened, &ranges, &sums, &stop).await?;
                    ranges.retain(|range| {
                        let again = !same.contains(&range.unit);
                        if !again {
                            reused(range.bytes);
                        }
                        again
                    });
                    opened
                }
                _ => {
                    let opened = Arc::new(file.open()?);
                    computing = found.map(|_| Computing::begin(&file, opened.clone(), &ranges));
                    opened
                }
            };
            let written = lane.connection.write_from_file(opened.as_fd(), &ranges, sent).await;
            written.map_err(|error| lane.explained(error.into()))?;
            if let Some(computing) = computing {
                note(&joined(computing.sums.await)?);
            }
        }
        Batch::Base(units) => {
            let Some((base, _)) = base else {
                return Err(BallastError::invalid("a delta has no base to be applied to"));
            };
            let asked: Vec<DeriveUnit<'_>> = units.iter().map(OfBase::asked).collect();
            let derived = lane.make(base, &asked, sent).await.map_err(|error| underived(error, &units))?;
            let changed = |of: &OfBase| of.patch.as_ref().map_or(0, |patch| patch.values.len() as u64);
            count(units.iter().map(|of| of.bytes.saturating_sub(changed(of))).sum());
            note(&derived.iter().map(|unit| (unit.unit, unit.crc64)).collect::<Vec<_>>());
        }
    }
    Ok(())
}

/// In pieces, between which others have their turn: renewals of leases among them.
async fn blake3_of(bytes: &[u8]) -> Digest {
    let mut hash = blake3::Hasher::new();
    for piece in bytes.chunks(HASH_BYTES) {
        hash.update(piece);
        tokio::task::yield_now().await;
    }
    Digest::from_bytes(*hash.finalize().as_bytes())
}

/// Units in a file that the base has too, taken from it.
async fn reuse_file(
    lane: &mut Lane,
    base: &Base,
    file: &Arc<SourceFile>,
    opened: &Arc<File>,
    ranges: &[SourceRange],
    sums: &[(u32, u64)],
    stop: &StopOnDrop,
) -> Result<HashSet<u32>, BallastError> {
    let alike = ranges.iter().zip(sums);
    let alike = alike.filter_map(|(range, (_, sum))| Some((*range, base.candidate(range.bytes, *sum)?)));
    let alike: Vec<(SourceRange, u32)> = alike.collect();
    let (file, opened, stop) = (file.clone(), opened.clone(), stop.0.clone());
    let hashing = tokio::task::spawn_blocking(move || {
        let one = |(range, base_unit): (SourceRange, u32)| {
            let blake3 = Some(blake3_of_file(&opened, &file, range.source_offset, range.bytes, &stop)?);
            Ok(DeriveUnit { unit: range.unit, base_unit, bytes: range.bytes, blake3, patch: None })
        };
        alike.into_iter().map(one).collect::<Result<Vec<DeriveUnit<'static>>, BallastError>>()
    });
    lane.reuse(base, &joined(hashing.await)?).await
}

/// A delta that failed on the way names the tensors that were being made.
fn underived(mut error: BallastError, units: &[OfBase]) -> BallastError {
    let names: Vec<&str> = units.iter().map(|of| of.name.as_str()).take(NAMES_DETAILED).collect();
    let shown = names[..names.len().min(NAMES_SHOWN)].join(", ");
    let more = if units.len() > NAMES_SHOWN { ", …" } else { "" };
    error.message =
        format!("{} tensors could not be made out of the base ({shown}{more}): {}", units.len(), error.message);
    error.with_details(json!({ "tensors": names }))
}

fn joined<T>(done: Result<Result<T, BallastError>, tokio::task::JoinError>) -> Result<T, BallastError> {
    done.map_err(|error| BallastError::invalid(format!("reading the source failed: {error}")))?
}

fn compute(
    file: Arc<SourceFile>,
    opened: Arc<File>,
    ranges: Vec<SourceRange>,
    stop: &StopOnDrop,
) -> tokio::task::JoinHandle<Result<Vec<(u32, u64)>, BallastError>> {
    let stop = stop.0.clone();
    tokio::task::spawn_blocking(move || {
        let one = |range: &SourceRange| {
            let checksum = of_file(&opened, &file, range.source_offset, range.bytes, &stop, None)?;
            Ok((range.unit, checksum))
        };
        ranges.iter().map(one).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::source_file;

    #[test]
    fn a_source_is_shared_out_file_by_file_from_front_to_back() {
        let first = tempfile::NamedTempFile::new().unwrap();
        let second = tempfile::NamedTempFile::new().unwrap();
        let (_, one) = source_file(first.path()).unwrap();
        let (_, two) = source_file(second.path()).unwrap();
        let unit = |unit, file: &Arc<SourceFile>, offset, bytes| UnitSource {
            unit,
            name: unit.to_string(),
            bytes,
            data: Data::File { file: file.clone(), offset },
        };
        let units = [
            unit(0, &one, 500, 10),
            unit(1, &two, 0, 10),
            unit(2, &one, 100, BATCH_BYTES),
            unit(3, &one, 600, 10),
            unit(4, &one, 0, 0),
        ];
        let mut shares: Vec<Vec<u32>> = batches(&units)
            .iter()
            .map(|batch| match batch {
                Batch::File { ranges, .. } => ranges.iter().map(|range| range.unit).collect(),
                Batch::Bytes { unit, .. } => vec![*unit],
                Batch::Base(units) => units.iter().map(|of| of.unit).collect(),
            })
            .collect();
        shares.sort();
        assert_eq!(shares, [vec![0, 3], vec![1], vec![2]]);
    }
}

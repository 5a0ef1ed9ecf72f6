//! The cold tier in object storage: every copy goes into an object of its own, a *pack*, that holds a run of a segment as it
//! lies there, and an index written last says which packs count (see ARCHITECTURE.md, The cold tier's back-ends). Keys and
//! index are in `bucket_index`, requests in `bucket`; which units are cold is the node store's matter.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path as FsPath, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use ballast_schemas::frame::Tier;
use ballast_schemas::{ClusterId, InstanceId, NodeId};
use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use uuid::Uuid;

use crate::bucket::{Bucket, BucketUrl, PART_BYTES};
use crate::bucket_index::{
    self, Index, MANIFEST, PACKS, Pack, RECORDS, SealedRecord, UPLOADS, mark_key, marked_by, newest, replica_key,
    version_key, versions,
};
use crate::budget::Budget;
use crate::cold::{
    ColdBytes, ColdFailure, ColdReplica, ColdReport, ColdTier, ColdTierError, FoundReplica, Gone, Scan, Watch,
};
use crate::error::Mismatch;
use crate::folder::{OnPath, PathError};
use crate::instance_records::{Found, InstanceRecords};
use crate::layout::{Extent, GROUP_BYTES_MAX, GroupLayout, Run};
use crate::memory_tier::{MemorySegments, instance_folder};
use crate::node_store::DamagedFolder;
use crate::record::{self, StateRecord};
use crate::unit_check::UnitCheck;

/// Bytes of one read: large enough to make the round trip cheap.
const CHUNK_BYTES: u64 = PART_BYTES;
/// Reads, and packs, under way for one job.
const AT_ONCE: usize = 8;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these mutexes hold is changed in single statements; a panic elsewhere can not leave it torn.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The cold tier of a node, in a bucket.
#[derive(Debug)]
pub(crate) struct BucketTier {
    bucket: Bucket,
    node: NodeId,
    incarnation: String,
    cluster: Mutex<Option<ClusterId>>,
    report: ColdReport,
    budget: Budget,
}

impl BucketTier {
    /// Opens the tier: the bucket must answer.
    pub(crate) fn open(
        url: &BucketUrl,
        quota_bytes: Option<u64>,
        node: &NodeId,
        incarnation: Uuid,
    ) -> Result<Self, ColdTierError> {
        let place = PathBuf::from(url.to_string());
        let bucket = Bucket::open(url).on("use", &place)?;
        Ok(Self::on(bucket, quota_bytes, node, incarnation)?)
    }

    /// The tier on a bucket.
    pub(crate) fn on(
        bucket: Bucket,
        quota_bytes: Option<u64>,
        node: &NodeId,
        incarnation: Uuid,
    ) -> Result<Self, PathError> {
        let cluster = bucket_index::cluster(&bucket)?;
        bucket_index::check_server(&bucket, node)?;
        let quota_bytes = quota_bytes.unwrap_or(GROUP_BYTES_MAX);
        let report =
            ColdReport { place: bucket.place().to_owned(), quota_bytes, how: "object storage (S3 API)".to_owned() };
        Ok(Self {
            bucket,
            node: node.clone(),
            incarnation: incarnation.to_string(),
            cluster: Mutex::new(cluster),
            report,
            budget: Budget::new(Tier::Cold, quota_bytes),
        })
    }

    fn place_of(&self, replica: &str) -> PathBuf {
        self.bucket.path_of(&replica_key(&self.bucket, replica, []))
    }

    fn replica_named(self: &Arc<Self>, name: String, layout: &Arc<GroupLayout>) -> BucketReplica {
        BucketReplica {
            place: self.place_of(&name),
            tier: self.clone(),
            layout: layout.clone(),
            index: Mutex::default(),
            packs: RwLock::new(Packs::new(name, layout)),
        }
    }

    /// Takes a replica for this run of the node, with all that its index says. `None` when it is somebody else's, or there is
    /// none; `from` says whose it may be.
    fn take(self: &Arc<Self>, name: &str, from: &dyn Fn(&NodeId) -> bool) -> Result<Option<Taken>, PathError> {
        let mark = mark_key(&self.bucket, &self.node, name);
        loop {
            let Some((version, index)) = newest(&self.bucket, name)? else { return Ok(None) };
            let index = match index {
                Ok(index) if from(&index.owner) => index,
                Ok(_) => return Ok(None),
                Err(reason) => return Ok(Some(Taken::Damaged(reason))),
            };
            let found = match self.read_records(name, &index)? {
                Ok(found) => found,
                Err(reason) => return Ok(Some(Taken::Damaged(reason))),
            };
            self.bucket.put(&mark, Vec::new())?;
            let before = index.owner.clone();
            let replica = self.replica_named(name.to_owned(), &found.layout);
            let mine = Index { owner: self.node.clone(), incarnation: self.incarnation.clone(), ..index };
            replica.packs().set(&found.layout, mine.packs.clone());
            {
                let mut written = lock(&replica.index);
                written.version = version;
                // Another writer was faster: what it wrote is looked at.
                if !replica.write_version(&mut written, mine)? {
                    self.bucket.remove(std::slice::from_ref(&mark))?;
                    continue;
                }
            }
            if before != self.node {
                self.bucket.remove(&[mark_key(&self.bucket, &before, name)])?;
            }
            replica.clean()?;
            return Ok(Some(Taken::Whole(Box::new((found, Box::new(replica))))));
        }
    }

    fn read_records(&self, name: &str, index: &Index) -> Result<Result<Found, String>, PathError> {
        let key = |part| replica_key(&self.bucket, name, [part]);
        let (records, manifest) = (self.bucket.get(&key(RECORDS))?, self.bucket.get(&key(MANIFEST))?);
        let (Some(records), Some(manifest)) = (records, manifest) else {
            return Ok(Err("its records or its manifest are missing".to_owned()));
        };
        let path = self.bucket.path_of(&key(RECORDS));
        let found = record::decode::<SealedRecord>(&records, &path).map_err(|error| error.to_string());
        Ok(found.and_then(|SealedRecord { layout, seal }| {
            Found::new(InstanceRecords { layout, seal, manifest }, index.state.clone())
        }))
    }

    /// Removes what this node's mark stands for when it could not take that: another node's replica has only the mark from
    /// it, one without an index nothing else.
    fn drop_stale(&self, name: &str) -> Result<(), PathError> {
        match newest(&self.bucket, name)? {
            Some(_) => self.bucket.remove(&[mark_key(&self.bucket, &self.node, name)]),
            None => self.remove_remains(name),
        }
    }

    /// Removes a replica that never had an index, or has none any more.
    fn remove_remains(&self, name: &str) -> Result<(), PathError> {
        self.abort_uploads(name)?;
        let left = self.bucket.list(&replica_key(&self.bucket, name, []))?;
        self.bucket.remove(&left.into_iter().map(|meta| meta.location).collect::<Vec<_>>())?;
        self.bucket.remove(&[mark_key(&self.bucket, &self.node, name)])
    }

    /// Gives up the uploads in parts that are noted for a replica.
    fn abort_uploads(&self, name: &str) -> Result<(), PathError> {
        for meta in self.bucket.list(&replica_key(&self.bucket, name, [UPLOADS]))? {
            let Some(pack) = meta.location.filename() else { continue };
            if let Some(id) = self.bucket.get(&meta.location)? {
                let key = replica_key(&self.bucket, name, [PACKS, pack]);
                self.bucket.abort(&key, &String::from_utf8_lossy(&id))?;
            }
            self.bucket.remove(std::slice::from_ref(&meta.location))?;
        }
        Ok(())
    }
}

/// A replica that was taken.
enum Taken {
    Whole(Box<FoundReplica>),
    /// Its records make no sense.
    Damaged(String),
}

impl ColdTier for BucketTier {
    fn report(&self) -> &ColdReport {
        &self.report
    }

    fn cluster(&self) -> Option<ClusterId> {
        lock(&self.cluster).clone()
    }

    fn set_cluster(&self, cluster: &ClusterId) -> Result<(), PathError> {
        let found = match self.cluster() {
            Some(found) => found,
            None => bucket_index::set_cluster(&self.bucket, cluster)?,
        };
        if found != *cluster {
            let message = format!("it holds the bytes of cluster {found}, not of {cluster}; name another prefix");
            return Err(PathError::new("use", self.bucket.place(), io::Error::other(message)));
        }
        *lock(&self.cluster) = Some(found);
        Ok(())
    }

    fn budget(&self) -> &Budget {
        &self.budget
    }

    fn replica(self: Arc<Self>, instance: &InstanceId, layout: &Arc<GroupLayout>) -> Box<dyn ColdReplica> {
        Box::new(self.replica_named(fresh_name(&instance_folder(instance)), layout))
    }

    fn left_of(&self, instance: &InstanceId) -> Result<Option<PathBuf>, PathError> {
        let folder = instance_folder(instance);
        for name in marked_by(&self.bucket, &self.node)? {
            if instance_of(&name) != Some(&folder) {
                continue;
            }
            // A mark can outlive what it speaks of, where another node took that over.
            let mine =
                newest(&self.bucket, &name)?.is_none_or(|(_, index)| index.is_ok_and(|index| index.owner == self.node));
            if mine {
                return Ok(Some(self.place_of(&name)));
            }
        }
        Ok(None)
    }

    fn scan(self: Arc<Self>) -> Result<Scan, PathError> {
        let mut scan = Scan::default();
        for name in marked_by(&self.bucket, &self.node)? {
            let reason = match self.take(&name, &|owner| *owner == self.node)? {
                Some(Taken::Whole(found)) => {
                    let instance = found.0.records.layout.instance.clone();
                    if let Entry::Vacant(vacant) = scan.found.entry(instance) {
                        vacant.insert(*found);
                        continue;
                    }
                    // Not reached by anything this program writes: a node begins a second one when it has lost the first.
                    "it is a second replica of its instance".to_owned()
                }
                Some(Taken::Damaged(reason)) => reason,
                None => {
                    self.drop_stale(&name)?;
                    continue;
                }
            };
            let all = self.bucket.list(&replica_key(&self.bucket, &name, []))?;
            let charge = self.budget.charge(all.iter().map(|meta| meta.size).sum());
            scan.damaged.push((DamagedFolder { path: self.place_of(&name), reason }, charge));
        }
        Ok(scan)
    }

    fn outlives_node(&self) -> bool {
        true
    }

    fn adopt(
        self: Arc<Self>,
        is_away: &dyn Fn(&NodeId) -> bool,
        held: &dyn Fn() -> BTreeSet<String>,
    ) -> Result<Vec<FoundReplica>, PathError> {
        let mut adopted: Vec<FoundReplica> = Vec::new();
        for node in bucket_index::nodes(&self.bucket)? {
            let is_own = node == self.node;
            if !is_own && !is_away(&node) {
                continue;
            }
            let marked = marked_by(&self.bucket, &node)?;
            // Asked for after the marks: what this node makes itself is held before it is marked.
            let mut held = held();
            held.extend(adopted.iter().map(|(found, _)| found.instance_folder()));
            for name in marked {
                if instance_of(&name).is_none_or(|folder| held.contains(folder)) {
                    continue;
                }
                match self.take(&name, &|owner| *owner == node)? {
                    Some(Taken::Whole(found)) => {
                        tracing::info!(%node, replica = name, "took over a cold replica");
                        held.insert(found.0.instance_folder());
                        adopted.push(*found);
                    }
                    Some(Taken::Damaged(_)) if is_own => {}
                    Some(Taken::Damaged(reason)) => {
                        tracing::warn!(%node, replica = name, reason, "a cold replica can not be taken over; it is kept");
                    }
                    None if is_own => self.drop_stale(&name)?,
                    None => {}
                }
            }
        }
        Ok(adopted)
    }
}

/// A name for a replica that nobody has.
fn fresh_name(instance_folder: &str) -> String {
    format!("{instance_folder}_{}", Uuid::now_v7().simple())
}

/// The instance's part of a replica's name.
fn instance_of(name: &str) -> Option<&str> {
    name.rsplit_once('_').map(|(instance, _)| instance)
}

/// What is known of the index.
#[derive(Debug, Default)]
struct Written {
    /// The version that this run has written or found last; 0 when there is none.
    version: u64,
    /// What this run has written last.
    index: Option<Index>,
    /// A later try ended without an answer: what was written then may count.
    uncertain: bool,
}

/// The packs of a replica, those included that no index speaks of yet.
#[derive(Debug)]
struct Packs {
    /// The replica's name: another one once it was taken over.
    name: String,
    all: Vec<Pack>,
    /// For each unit the pack that holds it: the latest, of several.
    of_unit: Vec<Option<u32>>,
    /// How each pack looked when it was marked.
    marks: Vec<Option<String>>,
}

impl Packs {
    fn new(name: String, layout: &GroupLayout) -> Self {
        Self { name, all: Vec::new(), of_unit: vec![None; layout.unit_count() as usize], marks: Vec::new() }
    }

    fn set(&mut self, layout: &GroupLayout, packs: Vec<Pack>) {
        let before = std::mem::replace(self, Self::new(self.name.clone(), layout));
        let mut marks: BTreeMap<String, Option<String>> =
            before.all.into_iter().map(|pack| pack.name).zip(before.marks).collect();
        for pack in packs {
            let mark = marks.remove(&pack.name).flatten();
            self.add(layout, pack, mark);
        }
    }

    fn add(&mut self, layout: &GroupLayout, pack: Pack, mark: Option<String>) {
        let number = self.all.len() as u32;
        for (unit, extent) in extents_in(layout, pack.segment, &(pack.start..pack.start + pack.bytes)) {
            let range = extent.padded_range();
            if range.start >= pack.start && range.end <= pack.start + pack.bytes {
                self.of_unit[unit as usize] = Some(number);
            }
        }
        self.all.push(pack);
        self.marks.push(mark);
    }

    fn of(&self, unit: u32) -> Option<u32> {
        self.of_unit.get(unit as usize).copied().flatten()
    }

    /// The packs that hold these units, each once.
    fn holding(&self, units: impl IntoIterator<Item = u32>) -> Vec<u32> {
        let mut numbers: Vec<u32> = units.into_iter().filter_map(|unit| self.of(unit)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    fn units_in(&self, numbers: &[u32]) -> Vec<u32> {
        let in_them = |held: &Option<u32>| held.is_some_and(|number| numbers.binary_search(&number).is_ok());
        (0..).zip(&self.of_unit).filter(|(_, held)| in_them(held)).map(|(unit, _)| unit).collect()
    }
}

/// The units with bytes in a range of a segment.
fn extents_in<'a>(
    layout: &'a GroupLayout,
    segment: u32,
    range: &Range<u64>,
) -> impl Iterator<Item = (u32, Extent)> + use<'a> {
    let units = layout.units_of(segment);
    let extents = &layout.extents()[units.start as usize..units.end as usize];
    let first = extents.partition_point(|extent| extent.padded_range().end <= range.start);
    let end = range.end;
    let found = (units.start + first as u32..).zip(&extents[first..]).map(|(unit, extent)| (unit, *extent));
    found.take_while(move |(_, extent)| extent.offset < end).filter(|(_, extent)| extent.bytes > 0)
}

/// Bytes of a segment, and the object that holds them.
struct Piece {
    /// `None`: nothing does, and nobody asks for them.
    held: Option<(Path, Range<u64>)>,
    segment: u32,
    range: Range<u64>,
}

/// The objects of one instance.
#[derive(Debug)]
struct BucketReplica {
    tier: Arc<BucketTier>,
    layout: Arc<GroupLayout>,
    place: PathBuf,
    /// Held while the index is written. Never taken while `packs` is held.
    index: Mutex<Written>,
    packs: RwLock<Packs>,
}

impl BucketReplica {
    fn bucket(&self) -> &Bucket {
        &self.tier.bucket
    }

    fn packs(&self) -> std::sync::RwLockWriteGuard<'_, Packs> {
        // As for `lock`.
        self.packs.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_packs(&self) -> std::sync::RwLockReadGuard<'_, Packs> {
        self.packs.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> String {
        self.read_packs().name.clone()
    }

    fn pack_key(&self, name: &str, pack: &Pack) -> Path {
        replica_key(self.bucket(), name, [PACKS, &pack.name])
    }

    fn is_mine(&self, index: &Index) -> bool {
        index.owner == self.tier.node && index.incarnation == self.tier.incarnation
    }

    /// Writes the next version. Tells whether it is the newest then: not when another run or node has written one.
    fn write_version(&self, written: &mut Written, index: Index) -> Result<bool, PathError> {
        let (bucket, name) = (self.bucket(), self.name());
        let bytes = record::encode(&index);
        written.uncertain = true;
        loop {
            let version = written.version + 1;
            let created = bucket.create(&version_key(bucket, &name, version), bytes.clone())?;
            let all = versions(bucket, &name)?;
            let last = all.last().copied().unwrap_or(0);
            if created && last == version {
                let old = all.into_iter().filter(|old| *old < version);
                let old: Vec<Path> = old.map(|old| version_key(bucket, &name, old)).collect();
                // What stays counts no more.
                if let Err(error) = bucket.remove(&old) {
                    tracing::warn!(%error, "an old index is not removed");
                }
                *written = Written { version, index: Some(index), uncertain: false };
                return Ok(true);
            }
            // An answer that was lost left a version of this run's own; any other is somebody else's.
            match newest(bucket, &name)? {
                Some((found, Ok(newest))) if self.is_mine(&newest) && found >= version => written.version = found,
                _ => return Ok(false),
            }
        }
    }

    /// Where the bytes of a range lie, in pieces of at most `piece_bytes`.
    fn pieces(&self, name: &str, segment: u32, range: Range<u64>, piece_bytes: u64) -> Vec<Piece> {
        let packs = self.read_packs();
        let mut pieces: Vec<Piece> = Vec::new();
        for (unit, extent) in extents_in(&self.layout, segment, &range) {
            let unit_range = extent.padded_range();
            let (mut start, end) = (unit_range.start.max(range.start), unit_range.end.min(range.end));
            let pack = packs.of(unit).and_then(|number| packs.all.get(number as usize));
            while start < end {
                let key = pack.map(|pack| self.pack_key(name, pack));
                let at = pack.map_or(0, |pack| start - pack.start);
                // What lies next to the last piece in the same object is read with it.
                if let Some(last) = pieces.last_mut()
                    && last.range.end == start
                    && last.range.end - last.range.start < piece_bytes
                    && last.held.as_ref().map(|(key, _)| key) == key.as_ref()
                {
                    let take = (end - start).min(piece_bytes - (last.range.end - last.range.start));
                    last.range.end += take;
                    if let Some((_, held)) = &mut last.held {
                        held.end += take;
                    }
                    start += take;
                    continue;
                }
                let take = (end - start).min(piece_bytes);
                let held = key.map(|key| (key, at..at + take));
                pieces.push(Piece { held, segment, range: start..start + take });
                start += take;
            }
        }
        pieces
    }

    /// Reads runs, several pieces at a time, and hands them to `consume` in order.
    fn stream(
        &self,
        runs: &[Run],
        watch: &Watch<'_>,
        mut consume: impl FnMut(&Piece, &[u8]) -> Result<(), PathError>,
    ) -> Result<(), ColdFailure> {
        let name = self.name();
        let runs = runs.iter().filter(|run| !run.range.is_empty());
        let pieces: Vec<Piece> =
            runs.flat_map(|run| self.pieces(&name, run.segment, run.range.clone(), CHUNK_BYTES)).collect();
        let read = async {
            let reads = pieces.iter().map(|piece| async move {
                let (key, range) = piece.held.clone().ok_or_else(|| self.nowhere())?;
                Ok::<_, PathError>((piece, self.bucket().read(&key, range).await?))
            });
            let mut reads = futures::stream::iter(reads).buffered(AT_ONCE);
            while let Some((piece, bytes)) = reads.try_next().await? {
                consume(piece, &bytes)?;
                watch.progress.add_bytes(bytes.len() as u64);
            }
            Ok::<_, PathError>(())
        };
        self.bucket().block_while(watch.wanted, read).ok_or(ColdFailure::Unwanted)?.map_err(ColdFailure::from)
    }

    fn nowhere(&self) -> PathError {
        let source = io::Error::new(io::ErrorKind::NotFound, "no object holds the unit");
        PathError::new("read", &self.place, source)
    }

    /// Removes the packs that hold nothing of what the last index says.
    fn collect(&self) -> Result<(), PathError> {
        let (name, kept) = {
            let written = lock(&self.index);
            (self.name(), written.index.as_ref().map(|index| index.packs.clone()).unwrap_or_default())
        };
        let unused: Vec<Path> = {
            let mut packs = self.packs();
            let names: BTreeSet<&str> = kept.iter().map(|pack| pack.name.as_str()).collect();
            let unused = packs.all.iter().filter(|pack| !names.contains(pack.name.as_str()));
            let unused = unused.map(|pack| self.pack_key(&name, pack)).collect();
            packs.set(&self.layout, kept);
            unused
        };
        self.bucket().remove(&unused)
    }

    /// Removes what an earlier run left behind: uploads that never ended, and objects of which the index says nothing.
    fn clean(&self) -> Result<(), PathError> {
        let name = &self.name();
        self.tier.abort_uploads(name)?;
        let written = lock(&self.index);
        let Some(index) = &written.index else { return Ok(()) };
        let kept: BTreeSet<Path> = index.packs.iter().map(|pack| self.pack_key(name, pack)).collect();
        let found = self.bucket().list(&replica_key(self.bucket(), name, [PACKS]))?;
        let orphans: Vec<Path> =
            found.into_iter().map(|meta| meta.location).filter(|found| !kept.contains(found)).collect();
        if !orphans.is_empty() {
            tracing::info!(replica = name, objects = orphans.len(), "removed objects that an earlier run left behind");
        }
        self.bucket().remove(&orphans)
    }

    async fn upload(
        &self,
        name: &str,
        pack: &Pack,
        memory: &MemorySegments,
        watch: &Watch<'_>,
    ) -> Result<(), PathError> {
        let bucket = self.bucket();
        let note_key = replica_key(bucket, name, [UPLOADS, &pack.name]);
        let piece = |range: Range<u64>| {
            let not_in_memory = || io::Error::other("the segment is not in memory");
            let segment = memory.get(pack.segment).ok_or_else(not_in_memory)?;
            // SAFETY: the callers of `write` answer for nobody writing or freeing these bytes.
            let bytes = unsafe { segment.bytes(pack.start + range.start..pack.start + range.end) }?;
            // A request that is given up may still be read from for a moment, when the memory is no longer guarded.
            Ok(bytes.to_vec())
        };
        let note = async |id: &str| bucket.put_now(&note_key, id.as_bytes().to_vec()).await;
        let moved = |bytes| watch.progress.add_bytes(bytes);
        if bucket.upload(&self.pack_key(name, pack), pack.bytes, piece, note, moved).await? {
            bucket.remove_now(&note_key).await?;
        }
        Ok(())
    }
}

impl ColdReplica for BucketReplica {
    fn place(&self) -> &FsPath {
        &self.place
    }

    fn holds(&self) -> Result<bool, PathError> {
        let written = lock(&self.index);
        if written.index.is_none() {
            return Ok(false);
        }
        let name = self.name();
        if versions(self.bucket(), &name)?.last() == Some(&written.version) {
            return Ok(true);
        }
        let newest = newest(self.bucket(), &name)?;
        Ok(newest.is_some_and(|(_, index)| index.is_ok_and(|index| self.is_mine(&index))))
    }

    fn start_over(&self) {
        *lock(&self.index) = Written::default();
        let mut packs = self.packs();
        let instance = instance_of(&packs.name).unwrap_or(&packs.name).to_owned();
        *packs = Packs::new(fresh_name(&instance), &self.layout);
    }

    fn begin(&self, records: &InstanceRecords, state: &StateRecord) -> Result<(), PathError> {
        let (bucket, name) = (self.bucket(), self.name());
        // The mark first: whatever comes of the rest is found by it.
        bucket.put(&mark_key(bucket, &self.tier.node, &name), Vec::new())?;
        let sealed = SealedRecord { layout: records.layout.clone(), seal: records.seal.clone() };
        bucket.put(&replica_key(bucket, &name, [RECORDS]), record::encode(&sealed))?;
        bucket.put(&replica_key(bucket, &name, [MANIFEST]), records.manifest.to_vec())?;
        self.save(state)
    }

    fn save(&self, state: &StateRecord) -> Result<(), PathError> {
        let held: Vec<Pack> = {
            let packs = self.read_packs();
            let numbers = packs.holding(state.held.iter());
            numbers.into_iter().filter_map(|number| packs.all.get(number as usize).cloned()).collect()
        };
        let mut written = lock(&self.index);
        let same = |index: &Index| {
            // A fence that was raised goes with the next change: what it keeps out is told to the node's memory too.
            let StateRecord { fence: _, deleting, held, resident } = &index.state;
            (*deleting, held, resident) == (state.deleting, &state.held, &state.resident)
        };
        if !written.uncertain && written.index.as_ref().is_some_and(|index| same(index) && index.packs == held) {
            return Ok(());
        }
        let (owner, incarnation) = (self.tier.node.clone(), self.tier.incarnation.clone());
        let index = Index { owner, incarnation, state: state.clone(), packs: held };
        match self.write_version(&mut written, index)? {
            true => Ok(()),
            false => {
                let source = io::Error::other("another node, or another run of this one, has taken it over");
                Err(PathError::new("write the index of", &self.place, source))
            }
        }
    }

    fn write(&self, memory: &MemorySegments, runs: &[Run], watch: &Watch<'_>) -> Result<(), ColdFailure> {
        let name = self.name();
        let runs = runs.iter().filter(|run| !run.range.is_empty());
        let packs: Vec<Pack> = runs
            .map(|run| Pack {
                name: format!("{:06}-{:013}-{}", run.segment, run.range.start, Uuid::now_v7().simple()),
                segment: run.segment,
                start: run.range.start,
                bytes: run.range.end - run.range.start,
            })
            .collect();
        // Known before they are there, so that what comes of them is removed whatever happens.
        packs.iter().for_each(|pack| self.packs().add(&self.layout, pack.clone(), None));
        let uploads = packs.iter().map(|pack| self.upload(&name, pack, memory, watch));
        let all = futures::stream::iter(uploads).buffer_unordered(AT_ONCE).try_collect::<()>();
        let done = self.bucket().block_while(watch.wanted, all);
        if !matches!(done, Some(Ok(())))
            && let Err(error) = self.tier.abort_uploads(&name)
        {
            tracing::warn!(%error, "an upload in parts is not given up; the next start does it");
        }
        done.ok_or(ColdFailure::Unwanted)?.map_err(ColdFailure::from)
    }

    fn verify(
        &self,
        runs: &[Run],
        checksum_of: &dyn Fn(u32) -> u64,
        watch: &Watch<'_>,
    ) -> Result<Vec<Mismatch>, ColdFailure> {
        let mut check = UnitCheck::new(&self.layout, runs, checksum_of);
        self.stream(runs, watch, |_, bytes| {
            check.take(bytes);
            Ok(())
        })?;
        Ok(check.finish())
    }

    fn fill(
        &self,
        memory: &MemorySegments,
        runs: &[Run],
        checksum_of: &dyn Fn(u32) -> u64,
        watch: &Watch<'_>,
    ) -> Result<Vec<Mismatch>, ColdFailure> {
        let mut check = UnitCheck::new(&self.layout, runs, checksum_of);
        self.stream(runs, watch, |piece, bytes| {
            let segment = memory.get_or_create(piece.segment)?;
            segment.take_room(&piece.range).on("reserve memory for", &self.place)?;
            segment.write(piece.range.start, bytes).on("fill memory from", &self.place)?;
            check.take(bytes);
            Ok(())
        })?;
        Ok(check.finish())
    }

    fn read(&self, segment: u32, range: Range<u64>) -> Result<ColdBytes, PathError> {
        let name = self.name();
        let pieces = self.pieces(&name, segment, range.clone(), u64::MAX);
        let read = |piece: &Piece| {
            let held = piece.held.clone();
            let bytes = piece.range.end - piece.range.start;
            async move {
                match held {
                    Some((key, range)) => self.bucket().read(&key, range).await,
                    // Between two units that were asked for lies one that is not cold.
                    None => Ok(Bytes::from(vec![0; bytes as usize])),
                }
            }
        };
        let mut all: Vec<Bytes> = self.bucket().block(futures::future::try_join_all(pieces.iter().map(read)))?;
        if let [one] = all.as_mut_slice() {
            return Ok(ColdBytes::new(std::mem::take(one)));
        }
        let mut together = BytesMut::with_capacity((range.end - range.start) as usize);
        all.iter().for_each(|bytes| together.extend_from_slice(bytes));
        Ok(ColdBytes::new(together.freeze()))
    }

    fn gone(&self, units: &[u32]) -> Result<Vec<Gone>, PathError> {
        let name = self.name();
        let (numbers, keys, sizes, nowhere) = {
            let packs = self.read_packs();
            let has_bytes = |unit: &u32| self.layout.extent(*unit).is_some_and(|extent| extent.bytes > 0);
            let nowhere: Vec<u32> =
                units.iter().copied().filter(has_bytes).filter(|&unit| packs.of(unit).is_none()).collect();
            let numbers = packs.holding(units.iter().copied());
            let held = || numbers.iter().map(|&number| &packs.all[number as usize]);
            let keys: Vec<Path> = held().map(|pack| self.pack_key(&name, pack)).collect();
            let sizes: Vec<u64> = held().map(|pack| pack.bytes).collect();
            (numbers, keys, sizes, nowhere)
        };
        let found = self.bucket().look_at(&keys)?;
        let mut gone = Vec::new();
        if !nowhere.is_empty() {
            gone.push(Gone { units: nowhere, why: self.nowhere() });
        }
        for (((number, expected), meta), key) in numbers.into_iter().zip(sizes).zip(found).zip(&keys) {
            let why = match meta {
                Some(meta) if meta.size == expected => continue,
                Some(meta) => io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    format!("the object has {} bytes, expected {expected}", meta.size),
                ),
                None => io::Error::new(io::ErrorKind::NotFound, "there is no such object"),
            };
            let why = PathError::new("read", &self.bucket().path_of(key), why);
            gone.push(Gone { units: self.read_packs().units_in(&[number]), why });
        }
        Ok(gone)
    }

    fn mark(&self, runs: &[Run]) {
        for (number, look) in self.looks(runs) {
            if let Some(mark) = self.packs().marks.get_mut(number as usize) {
                *mark = look;
            }
        }
    }

    fn changed(&self, runs: &[Run]) -> Vec<u32> {
        let looks = self.looks(runs);
        let packs = self.read_packs();
        let changed = looks.into_iter().filter(|(number, look)| {
            look.is_none() || packs.marks.get(*number as usize).is_none_or(|mark| mark != look)
        });
        packs.units_in(&changed.map(|(number, _)| number).collect::<Vec<_>>())
    }

    fn discard(&self, _runs: &[Run]) {
        if let Err(error) = self.collect() {
            tracing::warn!(%error, "space on the cold tier is not given back");
        }
    }

    fn free(&self, _run: &Run, _is_last: bool) -> Result<(), PathError> {
        self.collect()
    }

    fn file(&self, _segment: u32) -> Result<Option<Arc<File>>, PathError> {
        Ok(None)
    }

    fn remove(&self) -> Result<(), PathError> {
        let bucket = self.bucket();
        let name = &self.name();
        // What another node has taken over is not this one's to remove.
        if let Some((_, Ok(newest))) = newest(bucket, name)?
            && !self.is_mine(&newest)
        {
            return bucket.remove(&[mark_key(bucket, &self.tier.node, name)]);
        }
        self.tier.abort_uploads(name)?;
        let list = |part| -> Result<Vec<Path>, PathError> {
            let found = bucket.list(&replica_key(bucket, name, [part]))?;
            Ok(found.into_iter().map(|meta| meta.location).collect())
        };
        // The index goes after what it speaks of and before the records, so that at no moment it speaks of a replica without
        // records; the mark is the last.
        bucket.remove(&list(PACKS)?)?;
        let indexes = versions(bucket, name)?;
        bucket.remove(&indexes.into_iter().map(|version| version_key(bucket, name, version)).collect::<Vec<_>>())?;
        self.tier.remove_remains(name)
    }
}

impl BucketReplica {
    /// How the packs of runs look now.
    fn looks(&self, runs: &[Run]) -> Vec<(u32, Option<String>)> {
        let name = self.name();
        let (numbers, keys): (Vec<u32>, Vec<Path>) = {
            let packs = self.read_packs();
            let numbers = packs.holding(runs.iter().flat_map(|run| run.units.iter().copied()));
            let keys = numbers.iter().map(|&number| self.pack_key(&name, &packs.all[number as usize])).collect();
            (numbers, keys)
        };
        let found = self.bucket().look_at(&keys).unwrap_or_else(|_| vec![None; keys.len()]);
        let look = |meta: object_store::ObjectMeta| {
            format!("{} {} {}", meta.size, meta.last_modified.timestamp_millis(), meta.e_tag.unwrap_or_default())
        };
        numbers.into_iter().zip(found.into_iter().map(|meta| meta.map(look))).collect()
    }
}

//! One instance's copies in a bucket: every copy goes into an object of its own, a *pack*, and an index written last says which
//! packs count (see ARCHITECTURE.md, The cold tier's back-ends). Who may have a replica is `cold_bucket`'s matter.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path as FsPath, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use uuid::Uuid;

use crate::bucket::{Bucket, PART_BYTES};
use crate::bucket_index::{
    Index, MANIFEST, PACKS, Pack, RECORDS, SealedRecord, UPLOADS, mark_key, newest, replica_key, version_key, versions,
};
use crate::bucket_packs::{Packs, Piece};
use crate::cold::{ColdBytes, ColdFailure, ColdReplica, Gone, Watch};
use crate::cold_bucket::{BucketTier, fresh_name, instance_of, lock};
use crate::error::Mismatch;
use crate::folder::{OnPath, PathError};
use crate::instance_records::InstanceRecords;
use crate::layout::{GroupLayout, Run};
use crate::memory_tier::MemorySegments;
use crate::record::{self, StateRecord};
use crate::unit_check::UnitCheck;

/// Bytes of one read: large enough to make the round trip cheap.
const CHUNK_BYTES: u64 = PART_BYTES;
/// Reads, and packs, under way for one job.
const AT_ONCE: usize = 8;

/// What is known of the index.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// The version that this run has written or found last; 0 when there is none.
    version: u64,
    /// What this run has written last.
    index: Option<Index>,
    /// A later try ended without an answer: what was written then may count.
    uncertain: bool,
}

/// The objects of one instance.
#[derive(Debug)]
pub(crate) struct BucketReplica {
    tier: Arc<BucketTier>,
    layout: Arc<GroupLayout>,
    place: PathBuf,
    /// Held while the index is written. Never taken while `packs` is held.
    index: Mutex<Written>,
    packs: RwLock<Packs>,
}

impl BucketReplica {
    /// A replica of which nothing is known yet.
    pub(crate) fn new(tier: Arc<BucketTier>, name: String, layout: &Arc<GroupLayout>) -> Self {
        Self {
            place: tier.bucket().path_of(&replica_key(tier.bucket(), &name, [])),
            tier,
            layout: layout.clone(),
            index: Mutex::default(),
            packs: RwLock::new(Packs::new(name, layout)),
        }
    }

    /// Makes what was `found` in a version of the index this run's own. Tells whether it is: not when another writer was faster.
    pub(crate) fn take(&self, version: u64, found: Index) -> Result<bool, PathError> {
        let (owner, incarnation) = (self.tier.node().clone(), self.tier.incarnation().to_owned());
        let mine = Index { owner, incarnation, ..found };
        self.packs().set(&self.layout, mine.packs.clone());
        let mut written = lock(&self.index);
        written.version = version;
        self.write_version(&mut written, mine)
    }

    fn bucket(&self) -> &Bucket {
        self.tier.bucket()
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

    fn pack_key(&self, name: &str, pack: &str) -> Path {
        replica_key(self.bucket(), name, [PACKS, pack])
    }

    fn is_mine(&self, index: &Index) -> bool {
        self.tier.is_of_this_run(index)
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

    fn pieces(&self, segment: u32, range: &Range<u64>, piece_bytes: u64) -> Vec<Piece> {
        self.read_packs().pieces(&self.layout, segment, range, piece_bytes)
    }

    /// Reads runs, several pieces at a time, and hands them to `consume` in order.
    fn stream(
        &self,
        runs: &[Run],
        watch: &Watch<'_>,
        mut consume: impl FnMut(&Piece, &[u8]) -> Result<(), PathError>,
    ) -> Result<(), ColdFailure> {
        let name = &self.name();
        let runs = runs.iter().filter(|run| !run.range.is_empty());
        let pieces: Vec<Piece> = runs.flat_map(|run| self.pieces(run.segment, &run.range, CHUNK_BYTES)).collect();
        let read = async {
            let reads = pieces.iter().map(|piece| async move {
                let (pack, range) = piece.held.clone().ok_or_else(|| self.nowhere())?;
                Ok::<_, PathError>((piece, self.bucket().read(&self.pack_key(name, &pack), range).await?))
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
            // What got no answer may count. The next change says what does, or the next start.
            if written.uncertain {
                return Ok(());
            }
            (self.name(), written.index.as_ref().map(|index| index.packs.clone()).unwrap_or_default())
        };
        let unused: Vec<Path> = {
            let mut packs = self.packs();
            let names: BTreeSet<&str> = kept.iter().map(|pack| pack.name.as_str()).collect();
            let unused = packs.all().iter().filter(|pack| !names.contains(pack.name.as_str()));
            let unused = unused.map(|pack| self.pack_key(&name, &pack.name)).collect();
            packs.set(&self.layout, kept);
            unused
        };
        self.bucket().remove(&unused)
    }

    /// Removes what an earlier run left behind: uploads that never ended, and objects of which the index says nothing.
    pub(crate) fn clean(&self) -> Result<(), PathError> {
        let name = &self.name();
        self.tier.abort_uploads(name)?;
        let written = lock(&self.index);
        let Some(index) = &written.index else { return Ok(()) };
        let kept: BTreeSet<Path> = index.packs.iter().map(|pack| self.pack_key(name, &pack.name)).collect();
        let found = self.bucket().list(&replica_key(self.bucket(), name, [PACKS]))?;
        let orphans: Vec<Path> =
            found.into_iter().map(|meta| meta.location).filter(|found| !kept.contains(found)).collect();
        if !orphans.is_empty() {
            tracing::info!(replica = name, objects = orphans.len(), "removed objects that an earlier run left behind");
        }
        self.bucket().remove(&orphans)
    }

    /// How the packs of runs look now.
    fn looks(&self, runs: &[Run]) -> Vec<(u32, Option<String>)> {
        let name = self.name();
        let (numbers, keys): (Vec<u32>, Vec<Path>) = {
            let packs = self.read_packs();
            let numbers = packs.holding(runs.iter().flat_map(|run| run.units.iter().copied()));
            let held = numbers.iter().filter_map(|&number| packs.get(number));
            let keys = held.map(|pack| self.pack_key(&name, &pack.name)).collect();
            (numbers, keys)
        };
        let found = self.bucket().look_at(&keys).unwrap_or_else(|_| vec![None; keys.len()]);
        let look = |meta: object_store::ObjectMeta| {
            format!("{} {} {}", meta.size, meta.last_modified.timestamp_millis(), meta.e_tag.unwrap_or_default())
        };
        numbers.into_iter().zip(found.into_iter().map(|meta| meta.map(look))).collect()
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
        if bucket.upload(&self.pack_key(name, &pack.name), pack.bytes, piece, note, moved).await? {
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

    fn start_over(&self) -> Result<(), PathError> {
        let mut written = lock(&self.index);
        let name = self.name();
        // One whose first index got no answer is begun again under its name, or there could be two.
        let is_new = written.index.is_none();
        if is_new
            && newest(self.bucket(), &name)?.is_none_or(|(_, index)| index.is_ok_and(|index| self.is_mine(&index)))
        {
            return Ok(());
        }
        *written = Written::default();
        *self.packs() = Packs::new(fresh_name(instance_of(&name).unwrap_or(&name)), &self.layout);
        Ok(())
    }

    fn begin(&self, records: &InstanceRecords, state: &StateRecord) -> Result<(), PathError> {
        let (bucket, name) = (self.bucket(), self.name());
        let mark = mark_key(bucket, self.tier.node(), &name);
        let keys = [mark, replica_key(bucket, &name, [RECORDS]), replica_key(bucket, &name, [MANIFEST])];
        let sealed = SealedRecord { layout: records.layout.clone(), seal: records.seal.clone() };
        let contents = [Vec::new(), record::encode(&sealed), records.manifest.to_vec()];
        // The mark first: whatever comes of the rest is found by it.
        keys.iter().zip(contents).try_for_each(|(key, content)| bucket.put(key, content))?;
        self.save(state)?;
        // A later run of this node that found them without an index has removed them.
        if bucket.look_at(&keys)?.iter().all(Option::is_some) {
            return Ok(());
        }
        let source = io::Error::other("another run of this node has removed its records");
        Err(PathError::new("begin", &self.place, source))
    }

    /// A server may take its time, and whom a fence keeps out hears it from the node's memory too.
    fn writes_fences_at_once(&self) -> bool {
        false
    }

    fn save(&self, state: &StateRecord) -> Result<(), PathError> {
        let held: Vec<Pack> = {
            let packs = self.read_packs();
            let numbers = packs.holding(state.held.iter());
            numbers.into_iter().filter_map(|number| packs.get(number).cloned()).collect()
        };
        let mut written = lock(&self.index);
        let same = |index: &Index| {
            let StateRecord { fence: _, deleting, held, resident } = &index.state;
            (*deleting, held, resident) == (state.deleting, &state.held, &state.resident)
        };
        if !written.uncertain && written.index.as_ref().is_some_and(|index| same(index) && index.packs == held) {
            return Ok(());
        }
        let (owner, incarnation) = (self.tier.node().clone(), self.tier.incarnation().to_owned());
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
        let pieces = self.pieces(segment, &range, u64::MAX);
        let read = |piece: &Piece| {
            let held = piece.held.clone().map(|(pack, range)| (self.pack_key(&name, &pack), range));
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
            let held = || numbers.iter().filter_map(|&number| packs.get(number));
            let keys: Vec<Path> = held().map(|pack| self.pack_key(&name, &pack.name)).collect();
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
            self.packs().mark(number, look);
        }
    }

    fn changed(&self, runs: &[Run]) -> Vec<u32> {
        let looks = self.looks(runs);
        let packs = self.read_packs();
        let changed =
            looks.into_iter().filter(|(number, look)| look.is_none() || packs.mark_of(*number) != look.as_ref());
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
        let (bucket, name) = (self.bucket(), &self.name());
        // What another node, or a later run of this one, has taken over is not this one's to remove.
        match newest(bucket, name)? {
            Some((_, Ok(newest))) if newest.owner != *self.tier.node() => {
                return bucket.remove(&[mark_key(bucket, self.tier.node(), name)]);
            }
            Some((_, Ok(newest))) if !self.is_mine(&newest) => return Ok(()),
            _ => {}
        }
        self.tier.abort_uploads(name)?;
        let packs = bucket.list(&replica_key(bucket, name, [PACKS]))?;
        // The index goes after what it speaks of and before the records, so that at no moment it speaks of a replica without
        // records.
        bucket.remove(&packs.into_iter().map(|meta| meta.location).collect::<Vec<_>>())?;
        let indexes = versions(bucket, name)?;
        bucket.remove(&indexes.into_iter().map(|version| version_key(bucket, name, version)).collect::<Vec<_>>())?;
        self.tier.remove_remains(name)
    }
}

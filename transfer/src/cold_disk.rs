//! The cold tier on local disk: the same segments at the same offsets as sparse files, written and read with `O_DIRECT`
//! straight from and into mapped memory (see ARCHITECTURE.md, One layout, two tiers). Knows files, budgets and checksums;
//! which units are cold is the node store's matter.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ballast_schemas::frame::Tier;
use ballast_schemas::{ClusterId, InstanceId, NodeId};
use rustix::fs::Advice;
use uuid::Uuid;

use crate::budget::Budget;
use crate::cold::{
    ColdBytes, ColdFailure, ColdReplica, ColdReport, ColdTier, ColdTierError, Gone, READ_BYTES_MAX, Scan, Watch,
};
use crate::cold_engine::{Answer, ColdEngine, IoDone, IoKind, IoMemory, IoRequest};
use crate::cold_files::{ColdSegments, probe_direct};
use crate::error::Mismatch;
use crate::folder::{
    Folder, FolderOptions, OnPath, PathError, create_folder, remove_folder, rename, rename_if_there, replace_file,
    space, sync_folder, used_bytes,
};
use crate::instance_records::{FRESH, Found, GONE, InstanceRecords, STATE, write_records};
use crate::layout::{GroupLayout, Run, UNIT_ALIGN_BYTES};
use crate::memory_tier::{MemorySegments, instance_folder};
use crate::node_store::DamagedFolder;
use crate::record::{self, StateRecord};
use crate::segment::{Mapping, lock_out_readers, punch, take_room};
use crate::unit_check::UnitCheck;

const FLAG: &str = "--cold";
/// Bytes of one read or write: large enough for the disk, small enough to stay in a core's cache for its checksum.
const CHUNK_BYTES: u64 = 2 << 20;
// A read fits a buffer wherever it starts.
const _: () = assert!(READ_BYTES_MAX == CHUNK_BYTES - 2 * UNIT_ALIGN_BYTES);
/// Reads or writes under way for one job: more gains nothing on any disk measured.
const DEPTH: usize = 8;
/// Room in memory is taken this far ahead of a promotion's reads: a few huge pages.
const ROOM_AHEAD_BYTES: u64 = 8 << 20;
/// Buffers kept for the next read.
const BUFFERS_KEPT_MAX: usize = 2 * DEPTH;

/// A page-aligned buffer for reads that do not go into a segment.
#[derive(Debug)]
pub(crate) struct Buffer(Mapping);

/// The cold tier of a node, on local disk.
#[derive(Debug)]
pub(crate) struct DiskTier {
    folder: Mutex<Folder>,
    path: PathBuf,
    engine: Box<dyn ColdEngine>,
    direct: bool,
    report: ColdReport,
    budget: Budget,
    buffers: Mutex<Vec<Arc<Buffer>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these mutexes hold is changed in single statements; a panic elsewhere can not leave it torn.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DiskTier {
    /// Opens the tier and takes its folder for this process. `start` starts the engine.
    pub(crate) fn open(
        path: &Path,
        quota_bytes: Option<u64>,
        node: &NodeId,
        incarnation: Uuid,
        start: impl FnOnce() -> io::Result<Box<dyn ColdEngine>>,
    ) -> Result<Self, ColdTierError> {
        let folder = Folder::open(FolderOptions { what: "cold", flag: FLAG, path, durable: true }, node, incarnation)?;
        let direct = probe_direct(path)?;
        let engine = start().map_err(ColdTierError::Engine)?;
        let available = space(path)?.free_bytes + used_bytes(&folder.instances())?;
        let quota_bytes = quota_bytes.unwrap_or(available);
        let past_the_cache =
            if direct { "O_DIRECT" } else { "through the page cache: the file system has no O_DIRECT" };
        let how = format!("{}, {past_the_cache}", engine.describe());
        let report = ColdReport { place: path.to_owned(), quota_bytes, how };
        Ok(Self {
            folder: Mutex::new(folder),
            path: path.to_owned(),
            engine,
            direct,
            report,
            budget: Budget::new(Tier::Cold, quota_bytes),
            buffers: Mutex::default(),
        })
    }

    fn instances(&self) -> PathBuf {
        self.path.join("instances")
    }

    fn replica_of(self: &Arc<Self>, instance: &InstanceId, layout: &Arc<GroupLayout>) -> Box<dyn ColdReplica> {
        let folder = self.instances().join(instance_folder(instance));
        Box::new(DiskReplica {
            files: ColdSegments::new(folder, layout.clone(), self.direct),
            layout: layout.clone(),
            marks: Mutex::new(vec![None; layout.segment_count() as usize]),
            tier: self.clone(),
        })
    }

    /// Writes runs from memory to disk and syncs them. They are not verified yet.
    ///
    /// The caller answers for the units being hot and guarded: nobody writes or frees them meanwhile.
    fn write(
        &self,
        files: &ColdSegments,
        memory: &MemorySegments,
        runs: &[Run],
        watch: &Watch<'_>,
    ) -> Result<(), ColdFailure> {
        let mut chunks = Vec::new();
        let mut touched = BTreeMap::new();
        for run in runs.iter().filter(|run| !run.range.is_empty()) {
            let file = files.get_or_create(run.segment)?;
            take_room(&file, &run.range).on("reserve space in", &files.path(run.segment))?;
            chunks.extend(chunks_of(run, &file));
            touched.insert(run.segment, file);
        }
        let memory_of = |chunk: &Chunk, _: usize| memory_at(memory, chunk);
        self.pipeline(IoKind::Write, files, &chunks, memory_of, watch, |_, _| {})?;
        for (segment, file) in &touched {
            file.sync_data().on("sync", &files.path(*segment))?;
            if !self.direct {
                // What is read back next must come from the disk and not from the cache.
                rustix::fs::fadvise(file, 0, None, Advice::DontNeed).on("drop the cache of", &files.path(*segment))?;
            }
        }
        // The files themselves must be found again before any record says that they hold something.
        Ok(sync_folder(files.folder())?)
    }

    /// Reads runs back from disk and compares each unit with its checksum.
    fn verify(
        &self,
        files: &ColdSegments,
        layout: &GroupLayout,
        runs: &[Run],
        checksum_of: &dyn Fn(u32) -> u64,
        watch: &Watch<'_>,
    ) -> Result<Vec<Mismatch>, ColdFailure> {
        let chunks = self.read_chunks(files, runs)?;
        let buffers: Vec<Arc<Buffer>> =
            (0..DEPTH.min(chunks.len())).map(|_| self.take_buffer()).collect::<Result<_, _>>()?;
        let memory_of = |chunk: &Chunk, slot: usize| {
            let bytes = (chunk.range.end - chunk.range.start) as usize;
            let start = buffers[slot].0.address(&(0..bytes as u64))?;
            // SAFETY: a slot is used again only after its chunk was consumed, and nobody else has this buffer.
            Ok(unsafe { IoMemory::new(start, bytes, buffers[slot].clone()) })
        };
        let mut check = UnitCheck::new(layout, runs, checksum_of);
        self.pipeline(IoKind::Read, files, &chunks, memory_of, watch, |_, bytes| check.take(bytes))?;
        buffers.into_iter().for_each(|buffer| self.put_buffer(buffer));
        Ok(check.finish())
    }

    /// Reads runs from disk into memory and compares each unit with its checksum.
    ///
    /// Room is taken a little ahead of the disk, so that page faults and reads overlap. The caller answers for nobody
    /// reading or writing these units meanwhile, and gives up what was taken when this fails.
    fn fill(
        &self,
        files: &ColdSegments,
        memory: &MemorySegments,
        layout: &GroupLayout,
        runs: &[Run],
        checksum_of: &dyn Fn(u32) -> u64,
        watch: &Watch<'_>,
    ) -> Result<Vec<Mismatch>, ColdFailure> {
        let chunks = self.read_chunks(files, runs)?;
        for run in runs.iter().filter(|run| !run.range.is_empty()) {
            memory.get_or_create(run.segment)?;
        }
        // Up to where room was taken in the run that is being read.
        let mut ready = 0;
        let memory_of = |chunk: &Chunk, _: usize| {
            if chunk.range.start == chunk.run.start {
                ready = chunk.run.start;
            }
            if chunk.range.end > ready {
                let end = (chunk.range.end + ROOM_AHEAD_BYTES).next_multiple_of(ROOM_AHEAD_BYTES).min(chunk.run.end);
                let segment = memory.get(chunk.segment).ok_or_else(not_in_memory)?;
                segment.take_room(&(ready..end))?;
                segment.fault_in(&(ready..end))?;
                ready = end;
            }
            memory_at(memory, chunk)
        };
        let mut check = UnitCheck::new(layout, runs, checksum_of);
        self.pipeline(IoKind::Read, files, &chunks, memory_of, watch, |_, bytes| check.take(bytes))?;
        Ok(check.finish())
    }

    /// Reads at most [`READ_BYTES_MAX`] bytes of a segment into a buffer.
    fn read(self: &Arc<Self>, files: &ColdSegments, segment: u32, range: Range<u64>) -> Result<ColdBytes, PathError> {
        let aligned = range.start / UNIT_ALIGN_BYTES * UNIT_ALIGN_BYTES..range.end.next_multiple_of(UNIT_ALIGN_BYTES);
        let bytes = aligned.end - aligned.start;
        let path = files.path(segment);
        let file = files.get(segment)?;
        let buffer = self.take_buffer()?;
        let start = buffer.0.address(&(0..bytes)).on("read", &path)?;
        // SAFETY: the buffer was just taken: nobody else has it.
        let memory = unsafe { IoMemory::new(start, bytes as usize, buffer.clone()) };
        let (done, answers) = channel();
        let answer = Answer::new(0, done);
        self.engine.submit(IoRequest { kind: IoKind::Read, file, offset: aligned.start, memory, answer });
        // A lost request is answered too, so that there is always one answer.
        let done = answers.recv().map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe)).on("read", &path)?;
        done.result.on("read", &path)?;
        let start = range.start - aligned.start;
        let range = start..start + (range.end - range.start);
        Ok(ColdBytes::new(BufferedBytes { tier: self.clone(), buffer: Some(buffer), range }))
    }

    fn read_chunks(&self, files: &ColdSegments, runs: &[Run]) -> Result<Vec<Chunk>, PathError> {
        let mut chunks = Vec::new();
        for run in runs.iter().filter(|run| !run.range.is_empty()) {
            let file = files.get(run.segment)?;
            chunks.extend(chunks_of(run, &file));
        }
        Ok(chunks)
    }

    fn take_buffer(&self) -> Result<Arc<Buffer>, PathError> {
        if let Some(buffer) = lock(&self.buffers).pop() {
            return Ok(buffer);
        }
        Mapping::anonymous(CHUNK_BYTES).map(|mapping| Arc::new(Buffer(mapping))).on("get a buffer for", &self.path)
    }

    fn put_buffer(&self, buffer: Arc<Buffer>) {
        let mut buffers = lock(&self.buffers);
        // One that an engine still refers to is left to it.
        if Arc::strong_count(&buffer) == 1 && buffers.len() < BUFFERS_KEPT_MAX {
            buffers.push(buffer);
        }
    }

    /// Runs chunks through the engine, several at a time, and hands them to `consume` in order.
    fn pipeline(
        &self,
        kind: IoKind,
        files: &ColdSegments,
        chunks: &[Chunk],
        mut memory_of: impl FnMut(&Chunk, usize) -> io::Result<IoMemory>,
        watch: &Watch<'_>,
        mut consume: impl FnMut(&Chunk, &[u8]),
    ) -> Result<(), ColdFailure> {
        let action = if kind == IoKind::Read { "read" } else { "write" };
        let failed = |tag: usize, error: io::Error| {
            let path = files.path(chunks[tag].segment);
            ColdFailure::Path(PathError::new(action, &path, error))
        };
        let (done, answers) = channel();
        let mut failure = None;
        let (mut submitted, mut consumed, mut under_way) = (0, 0, 0);
        let mut waiting: BTreeMap<usize, IoMemory> = BTreeMap::new();
        loop {
            while failure.is_none() && submitted < chunks.len() && submitted < consumed + DEPTH {
                if !(watch.wanted)() {
                    failure = Some(ColdFailure::Unwanted);
                    break;
                }
                let chunk = &chunks[submitted];
                match memory_of(chunk, submitted % DEPTH) {
                    Ok(memory) => {
                        let answer = Answer::new(submitted, done.clone());
                        let (file, offset) = (chunk.file.clone(), chunk.range.start);
                        self.engine.submit(IoRequest { kind, file, offset, memory, answer });
                        submitted += 1;
                        under_way += 1;
                    }
                    Err(error) => failure = Some(failed(submitted, error)),
                }
            }
            // What is under way is waited for in any case: it refers to memory that the caller frees next.
            if under_way == 0 {
                return failure.map_or(Ok(()), Err);
            }
            let Ok(IoDone { tag, memory, result }) = answers.recv() else {
                // Not reached while `done` lives here.
                return Err(failed(consumed, io::ErrorKind::BrokenPipe.into()));
            };
            under_way -= 1;
            match (result, memory) {
                (Ok(()), Some(memory)) => {
                    waiting.insert(tag, memory);
                }
                (Err(error), _) => failure = failure.or(Some(failed(tag, error))),
                (Ok(()), None) => failure = failure.or(Some(failed(tag, io::ErrorKind::BrokenPipe.into()))),
            }
            while let Some(memory) = waiting.remove(&consumed) {
                if failure.is_none() {
                    consume(&chunks[consumed], memory.bytes());
                    watch.progress.add_bytes(memory.bytes().len() as u64);
                }
                consumed += 1;
            }
        }
    }
}

impl ColdTier for DiskTier {
    fn report(&self) -> &ColdReport {
        &self.report
    }

    fn cluster(&self) -> Option<ClusterId> {
        lock(&self.folder).identity().cluster.clone()
    }

    fn set_cluster(&self, cluster: &ClusterId) -> Result<(), PathError> {
        lock(&self.folder).set_cluster(cluster)
    }

    fn budget(&self) -> &Budget {
        &self.budget
    }

    fn replica(self: Arc<Self>, instance: &InstanceId, layout: &Arc<GroupLayout>) -> Box<dyn ColdReplica> {
        self.replica_of(instance, layout)
    }

    fn left_of(&self, instance: &InstanceId) -> Result<Option<PathBuf>, PathError> {
        Ok(Some(self.instances().join(instance_folder(instance))).filter(|folder| folder.exists()))
    }

    fn scan(self: Arc<Self>) -> Result<Scan, PathError> {
        let folder = self.instances();
        let mut scan = Scan::default();
        for entry in fs::read_dir(&folder).on("list", &folder)? {
            let path = entry.on("list", &folder)?.path();
            let extension = path.extension().and_then(|extension| extension.to_str());
            if matches!(extension, Some(FRESH | GONE)) {
                remove_folder(&path)?;
                continue;
            }
            let reason = match Found::in_folder(&path) {
                Ok(Some(found)) => {
                    let instance = found.records.layout.instance.clone();
                    let replica = self.replica_of(&instance, &found.layout);
                    scan.found.insert(instance, (found, replica));
                    continue;
                }
                Ok(None) => "it has no seal record".to_owned(),
                Err(reason) => reason,
            };
            let charge = self.budget.charge(used_bytes(&path)?);
            scan.damaged.push((DamagedFolder { path, reason }, charge));
        }
        Ok(scan)
    }
}

/// The files of one instance.
#[derive(Debug)]
struct DiskReplica {
    tier: Arc<DiskTier>,
    files: ColdSegments,
    layout: Arc<GroupLayout>,
    /// When each segment was last changed by this node.
    marks: Mutex<Vec<Option<(i64, i64)>>>,
}

impl DiskReplica {
    fn punch(&self, run: &Run) -> Result<(), PathError> {
        let path = self.files.path(run.segment);
        let file = self.files.get(run.segment)?;
        match lock_out_readers(&file).on("lock", &path)? {
            Some(_no_readers) => punch(&file, &run.range).on("free space in", &path),
            // A reader has it: the room is overwritten by the next copy.
            None => Ok(()),
        }
    }

    /// Segments of these units that can not be read, and why.
    fn unusable(&self, units: &[u32]) -> Vec<Gone> {
        // Units of no bytes need no file.
        let with_bytes = units.iter().copied().filter(|&unit| self.layout.extent(unit).is_some_and(|e| e.bytes > 0));
        let mut segments: Vec<u32> = self.layout.runs(with_bytes).into_iter().map(|run| run.segment).collect();
        segments.dedup();
        let look = |segment| {
            let why = self.files.check(segment).err()?;
            Some(Gone { units: self.layout.units_of(segment).collect(), why })
        };
        segments.into_iter().filter_map(look).collect()
    }
}

impl ColdReplica for DiskReplica {
    fn place(&self) -> &Path {
        self.files.folder()
    }

    fn begin(&self, records: &InstanceRecords, state: &StateRecord) -> Result<(), PathError> {
        // Made under another name and renamed: the folder is whole or not there. What an earlier attempt left holds no bytes.
        let folder = self.files.folder();
        let fresh = folder.with_extension(FRESH);
        let made = remove_folder(folder)
            .and_then(|()| remove_folder(&fresh))
            .and_then(|()| create_folder(&fresh))
            .and_then(|()| write_records(&fresh, records, state, true))
            .and_then(|()| sync_folder(&fresh))
            .and_then(|()| rename(&fresh, folder))
            .and_then(|()| sync_folder(&self.tier.instances()));
        made.inspect_err(|_| {
            // The error that matters is the first one; what is left is removed at the next start.
            let _ = remove_folder(&fresh);
        })
    }

    fn save(&self, state: &StateRecord) -> Result<(), PathError> {
        replace_file(&self.files.folder().join(STATE), &record::encode(state), true)
    }

    fn write(&self, memory: &MemorySegments, runs: &[Run], watch: &Watch<'_>) -> Result<(), ColdFailure> {
        self.tier.write(&self.files, memory, runs, watch)
    }

    fn verify(
        &self,
        runs: &[Run],
        checksum_of: &dyn Fn(u32) -> u64,
        watch: &Watch<'_>,
    ) -> Result<Vec<Mismatch>, ColdFailure> {
        self.tier.verify(&self.files, &self.layout, runs, checksum_of, watch)
    }

    fn fill(
        &self,
        memory: &MemorySegments,
        runs: &[Run],
        checksum_of: &dyn Fn(u32) -> u64,
        watch: &Watch<'_>,
    ) -> Result<Vec<Mismatch>, ColdFailure> {
        self.tier.fill(&self.files, memory, &self.layout, runs, checksum_of, watch)
    }

    fn read(&self, segment: u32, range: Range<u64>) -> Result<ColdBytes, PathError> {
        self.tier.read(&self.files, segment, range)
    }

    /// A segment that is gone or cut off holds nothing.
    fn gone(&self, units: &[u32]) -> Result<Vec<Gone>, PathError> {
        let (gone, unknown): (Vec<Gone>, Vec<Gone>) =
            self.unusable(units).into_iter().partition(|gone| is_missing(&gone.why));
        unknown.into_iter().next().map_or(Ok(gone), |unknown| Err(unknown.why))
    }

    /// One segment that can not be opened keeps nobody from the others.
    fn gone_at_start(&self, units: &[u32]) -> Result<Vec<Gone>, PathError> {
        Ok(self.unusable(units))
    }

    fn mark(&self, runs: &[Run]) {
        for run in runs {
            let changed = self.files.change_time(run.segment);
            if let Some(mark) = lock(&self.marks).get_mut(run.segment as usize) {
                *mark = changed;
            }
        }
    }

    fn changed(&self, runs: &[Run]) -> Vec<u32> {
        let mut changed = Vec::new();
        for run in runs {
            let mark = lock(&self.marks).get(run.segment as usize).copied().flatten();
            if mark.is_none() || mark != self.files.change_time(run.segment) {
                changed.extend(self.layout.units_of(run.segment));
            }
        }
        changed
    }

    fn discard(&self, runs: &[Run]) {
        for run in runs {
            if let Err(error) = self.punch(run) {
                tracing::warn!(%error, "space on the cold tier is not given back");
            }
        }
    }

    fn free(&self, run: &Run, is_last: bool) -> Result<(), PathError> {
        if is_last {
            return self.files.unlink(run.segment);
        }
        self.discard(std::slice::from_ref(run));
        Ok(())
    }

    fn file(&self, segment: u32) -> Result<Option<Arc<File>>, PathError> {
        self.files.get(segment).map(Some)
    }

    fn remove(&self) -> Result<(), PathError> {
        self.files.forget_all();
        let (folder, gone) = (self.files.folder(), self.files.folder().with_extension(GONE));
        rename_if_there(folder, &gone)?;
        remove_folder(&gone)?;
        sync_folder(&self.tier.instances())
    }
}

fn is_missing(error: &PathError) -> bool {
    use io::ErrorKind;
    matches!(error.source.kind(), ErrorKind::NotFound | ErrorKind::UnexpectedEof | ErrorKind::InvalidData)
}

/// Bytes read from a cold segment. Their buffer goes back to the tier.
#[derive(Debug)]
struct BufferedBytes {
    tier: Arc<DiskTier>,
    /// Taken out only by `drop`.
    buffer: Option<Arc<Buffer>>,
    range: Range<u64>,
}

impl AsRef<[u8]> for BufferedBytes {
    fn as_ref(&self) -> &[u8] {
        let Some(buffer) = &self.buffer else { return &[] };
        // SAFETY: the read is done, and nobody else has the buffer. The range lies in it: it was read there.
        unsafe { buffer.0.bytes(self.range.clone()) }.unwrap_or_default()
    }
}

impl Drop for BufferedBytes {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.tier.put_buffer(buffer);
        }
    }
}

struct Chunk {
    segment: u32,
    file: Arc<File>,
    range: Range<u64>,
    /// The run that it is a part of.
    run: Range<u64>,
}

fn chunks_of(run: &Run, file: &Arc<File>) -> impl Iterator<Item = Chunk> {
    let (segment, run, file) = (run.segment, run.range.clone(), file.clone());
    run.clone().step_by(CHUNK_BYTES as usize).map(move |start| Chunk {
        segment,
        file: file.clone(),
        range: start..run.end.min(start + CHUNK_BYTES),
        run: run.clone(),
    })
}

fn not_in_memory() -> io::Error {
    io::Error::other("the segment is not in memory")
}

fn memory_at(memory: &MemorySegments, chunk: &Chunk) -> io::Result<IoMemory> {
    let segment = memory.get(chunk.segment).ok_or_else(not_in_memory)?;
    let start = segment.address(&chunk.range)?;
    let bytes = (chunk.range.end - chunk.range.start) as usize;
    // SAFETY: the mapping lives as long as the segment, and the callers of `write` and `fill` answer for the rest.
    Ok(unsafe { IoMemory::new(start, bytes, segment) })
}

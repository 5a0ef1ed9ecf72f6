//! The cold tier: the same segments at the same offsets as sparse files on local disk, written and read with
//! `O_DIRECT` straight from and into mapped memory (see ARCHITECTURE.md, One layout, two tiers). Knows files, budgets
//! and checksums; which units are cold is the node store's matter.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ballast_schemas::frame::Tier;
use ballast_schemas::{ClusterId, NodeId};
use rustix::fs::Advice;
use uuid::Uuid;

use crate::budget::{Budget, CapacityExhausted, Charge, Usage};
use crate::cold_engine::{Answer, ColdEngine, EngineChoice, IoDone, IoKind, IoMemory, IoRequest};
use crate::cold_files::{ColdSegments, probe_direct};
use crate::error::Mismatch;
use crate::folder::{
    Folder, FolderError, FolderIdentity, FolderOptions, OnPath, PathError, space, sync_folder, used_bytes,
};
use crate::layout::{GroupLayout, Run, UNIT_ALIGN_BYTES};
use crate::memory_tier::MemorySegments;
use crate::segment::{Mapping, take_room};
use crate::unit_check::UnitCheck;

const FLAG: &str = "--cold";
/// Bytes of one read or write: large enough for the disk, small enough to stay in a core's cache for its checksum.
const CHUNK_BYTES: u64 = 2 << 20;
/// Reads or writes under way for one job: more gains nothing on any disk measured.
const DEPTH: usize = 8;
/// Room in memory is taken this far ahead of a promotion's reads: a few huge pages.
const ROOM_AHEAD_BYTES: u64 = 8 << 20;
/// Buffers kept for the next read.
const BUFFERS_KEPT_MAX: usize = 2 * DEPTH;

/// How to open a cold tier.
#[derive(Clone, Debug)]
pub struct ColdOptions {
    /// The folder, which must exist.
    pub folder: PathBuf,
    /// Bytes that the tier may use; `None` for what its file system has free.
    pub quota_bytes: Option<u64>,
    /// Which engine moves the bytes.
    pub engine: EngineChoice,
}

/// Why a cold tier can not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ColdTierError {
    /// The folder can not be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// No engine starts.
    #[error("can not start an I/O engine for the cold tier: {0}")]
    Engine(io::Error),
    /// Another operation failed.
    #[error(transparent)]
    Path(#[from] PathError),
}

/// What a cold tier runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColdReport {
    /// The folder.
    pub folder: PathBuf,
    /// Bytes that the tier may use.
    pub quota_bytes: u64,
    /// The engine, and why it is not the first choice if it is not.
    pub engine: String,
    /// Whether reads and writes go past the page cache.
    pub direct: bool,
}

impl std::fmt::Display for ColdReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = if self.direct { "O_DIRECT" } else { "through the page cache: the file system has no O_DIRECT" };
        write!(f, "{}, {how}", self.engine)
    }
}

/// How far a long effect has come. Shared with whoever reports it.
#[derive(Default)]
pub struct Progress {
    bytes: std::sync::atomic::AtomicU64,
    units: std::sync::atomic::AtomicU32,
    look: Option<Box<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Progress").field("bytes", &self.bytes()).field("units", &self.units()).finish_non_exhaustive()
    }
}

impl Progress {
    /// One that calls `look` in the middle of the work, whenever some more of it is done.
    #[must_use]
    pub fn watched(look: impl Fn() + Send + Sync + 'static) -> Self {
        Self { look: Some(Box::new(look)), ..Self::default() }
    }

    /// Bytes moved or checked so far. Work that is done in passes counts each of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Units done so far.
    #[must_use]
    pub fn units(&self) -> u32 {
        self.units.load(std::sync::atomic::Ordering::Relaxed)
    }

    pub(crate) fn add_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
        self.tell(bytes > 0);
    }

    pub(crate) fn add_units(&self, units: u32) {
        self.units.fetch_add(units, std::sync::atomic::Ordering::Relaxed);
        self.tell(units > 0);
    }

    fn tell(&self, moved: bool) {
        if let Some(look) = self.look.as_ref().filter(|_| moved) {
            look();
        }
    }
}

/// What a long job asks and tells between two chunks.
pub(crate) struct Watch<'a> {
    pub progress: &'a Progress,
    /// Whether the job is still wanted.
    pub wanted: &'a dyn Fn() -> bool,
}

/// Why a job on cold files ended early.
#[derive(Debug)]
pub(crate) enum ColdFailure {
    /// A file operation failed.
    Path(PathError),
    /// The job is no longer wanted.
    Unwanted,
}

impl From<PathError> for ColdFailure {
    fn from(error: PathError) -> Self {
        Self::Path(error)
    }
}

/// A page-aligned buffer for reads that do not go into a segment.
#[derive(Debug)]
pub(crate) struct Buffer(Mapping);

/// The cold tier of a node.
#[derive(Debug)]
pub(crate) struct ColdTier {
    folder: Mutex<Folder>,
    path: PathBuf,
    identity: FolderIdentity,
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

impl ColdTier {
    /// Opens the tier and takes its folder for this process. `start` starts the engine.
    pub(crate) fn open(
        options: &ColdOptions,
        node: &NodeId,
        incarnation: Uuid,
        start: impl Fn(EngineChoice) -> io::Result<Box<dyn ColdEngine>>,
    ) -> Result<Self, ColdTierError> {
        let path = &options.folder;
        let folder = Folder::open(FolderOptions { what: "cold", flag: FLAG, path, durable: true }, node, incarnation)?;
        let direct = probe_direct(path)?;
        let engine = start(options.engine).map_err(ColdTierError::Engine)?;
        let available = space(path)?.free_bytes + used_bytes(&folder.instances())?;
        let quota_bytes = options.quota_bytes.unwrap_or(available);
        let report = ColdReport { folder: path.clone(), quota_bytes, engine: engine.describe(), direct };
        Ok(Self {
            identity: folder.identity().clone(),
            folder: Mutex::new(folder),
            path: path.clone(),
            engine,
            direct,
            report,
            budget: Budget::new(Tier::Cold, quota_bytes),
            buffers: Mutex::default(),
        })
    }

    pub(crate) fn report(&self) -> &ColdReport {
        &self.report
    }

    /// Who the folder belonged to when it was opened.
    pub(crate) fn identity(&self) -> &FolderIdentity {
        &self.identity
    }

    pub(crate) fn set_cluster(&self, cluster: &ClusterId) -> Result<(), PathError> {
        lock(&self.folder).set_cluster(cluster)
    }

    pub(crate) fn instances(&self) -> PathBuf {
        self.path.join("instances")
    }

    pub(crate) fn direct(&self) -> bool {
        self.direct
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    pub(crate) fn usage(&self) -> Usage {
        self.budget.usage()
    }

    pub(crate) fn reserve(&self, bytes: u64) -> Result<Charge, CapacityExhausted> {
        self.budget.reserve(bytes)
    }

    /// Writes runs from memory to disk and syncs them. They are not verified yet.
    ///
    /// The caller answers for the units being hot and guarded: nobody writes or frees them meanwhile.
    pub(crate) fn write(
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
    pub(crate) fn verify(
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
    pub(crate) fn fill(
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

    /// Reads at most [`ColdTier::READ_BYTES_MAX`] bytes of a segment into a buffer.
    pub(crate) fn read(
        self: &Arc<Self>,
        files: &ColdSegments,
        segment: u32,
        range: Range<u64>,
    ) -> Result<ColdBytes, PathError> {
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
        Ok(ColdBytes { tier: self.clone(), buffer: Some(buffer), range: start..start + (range.end - range.start) })
    }

    /// Most bytes that one [`ColdTier::read`] may ask for, wherever they start.
    pub(crate) const READ_BYTES_MAX: u64 = CHUNK_BYTES - 2 * UNIT_ALIGN_BYTES;

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

/// Bytes read from a cold segment.
#[derive(Debug)]
pub(crate) struct ColdBytes {
    tier: Arc<ColdTier>,
    /// Taken out only by `drop`.
    buffer: Option<Arc<Buffer>>,
    range: Range<u64>,
}

impl ColdBytes {
    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        let Some(buffer) = &self.buffer else { return &[] };
        // SAFETY: the read is done, and nobody else has the buffer. The range lies in it: it was read there.
        unsafe { buffer.0.bytes(self.range.clone()) }.unwrap_or_default()
    }
}

impl Drop for ColdBytes {
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

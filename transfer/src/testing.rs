//! What the tests of this crate share: identities, stores in scratch folders, and content that is easy to recognise.

use std::io;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use ballast_schemas::{
    AffinityIndex, AffinityUnit, Digest, GroupId, InstanceId, LogPosition, ManifestRef, NodeId, Receipt, SessionId,
    UnitEffect, UnitRange,
};
use tempfile::TempDir;

use crate::checksum::checksum;
use crate::cold::{ColdOptions, ColdPlace};
use crate::cold_engine::{ColdEngine, EngineChoice, IoKind, IoMemory, IoRequest};
use crate::error::StoreError;
use crate::memory_tier::{HugePages, MemoryOptions};
use crate::node_store::{NodeStore, NodeStoreOptions, SealDocument};

pub(crate) fn group(number: u64) -> GroupId {
    let text = format!("\"weight:{}\"", Digest::of(&number.to_le_bytes()));
    serde_json::from_str(&text).unwrap()
}

pub(crate) fn instance(number: u64) -> InstanceId {
    InstanceId { group_id: group(number), position: at(number) }
}

pub(crate) fn at(seq: u64) -> LogPosition {
    LogPosition { seq, index: 0 }
}

pub(crate) fn session() -> SessionId {
    SessionId::new("session-1").unwrap()
}

/// The content of a unit: no two units look alike, nor two places of one. Made of stamped blocks, because tests run
/// without optimisation.
pub(crate) fn content(unit: u32, bytes: u64) -> Vec<u8> {
    let mut state = u64::from(unit).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut block = [0; 1000];
    for piece in block.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        piece.copy_from_slice(&state.to_le_bytes());
    }
    let mut content = vec![0; bytes as usize];
    for (number, piece) in content.chunks_mut(block.len()).enumerate() {
        block[..8].copy_from_slice(&(number as u64).to_le_bytes());
        piece.copy_from_slice(&block[..piece.len()]);
    }
    content
}

/// A node's folders: memory on tmpfs, cold on disk.
pub(crate) struct Folders {
    pub memory: TempDir,
    pub cold: TempDir,
}

impl Folders {
    pub(crate) fn new() -> Self {
        let cold = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR").to_owned() + "/../target").unwrap();
        Self { memory: tempfile::tempdir_in("/dev/shm").unwrap(), cold }
    }

    pub(crate) fn options(&self) -> NodeStoreOptions {
        options(self.memory.path(), Some(self.cold.path()))
    }

    pub(crate) fn open(&self) -> Arc<NodeStore> {
        NodeStore::open(&self.options()).unwrap()
    }

    /// Opens the store and says that the log knows everything in it.
    pub(crate) fn reopen(&self) -> Arc<NodeStore> {
        let store = self.open();
        for instance in store.instances() {
            store.set_standing(&instance, ballast_schemas::InstanceStanding::Known).unwrap();
        }
        store
    }
}

pub(crate) fn options(memory: &Path, cold: Option<&Path>) -> NodeStoreOptions {
    NodeStoreOptions {
        node: NodeId::new("node-1").unwrap(),
        memory: MemoryOptions { folder: memory.to_owned(), budget_bytes: 256 << 20, huge_pages: HugePages::Off },
        cold: cold.map(|folder| ColdOptions {
            place: ColdPlace::Disk { folder: folder.to_owned(), engine: EngineChoice::Auto },
            quota_bytes: None,
        }),
    }
}

/// A manifest as far as the store looks at it.
pub(crate) fn document(id: &InstanceId, sizes: &[u64]) -> SealDocument {
    let units = sizes.iter().enumerate().map(|(unit, &bytes)| AffinityUnit {
        affinity_id: Digest::of(&(unit as u32).to_le_bytes()),
        extent_bytes: bytes,
        logical_bytes: bytes,
        crc64: checksum(&content(unit as u32, bytes)),
    });
    let affinity = AffinityIndex { units: units.collect() };
    let manifest = format!("manifest of {id} with {sizes:?}").into_bytes();
    let reference = ManifestRef {
        key: "weights/x".into(),
        sha256: Digest::of(&manifest),
        group_id: id.group_id.clone(),
        payload_keys_sha256: Digest::of(b""),
        payload_count: sizes.len() as u64,
        logical_bytes: sizes.iter().sum(),
        affinity_count: sizes.len() as u32,
        affinity_digest: Digest::of(b""),
    };
    SealDocument { manifest: manifest.into(), reference, affinity }
}

pub(crate) fn seal(store: &NodeStore, id: &InstanceId, sizes: &[u64]) -> Result<Receipt, StoreError> {
    store.seal_document(id, &session(), document(id, sizes))
}

/// Imports an instance whose units have their [`content`].
pub(crate) fn import(store: &NodeStore, id: &InstanceId, sizes: &[u64]) -> Receipt {
    try_import(store, id, sizes).unwrap()
}

pub(crate) fn try_import(store: &NodeStore, id: &InstanceId, sizes: &[u64]) -> Result<Receipt, StoreError> {
    store.allocate(id, &session(), sizes)?;
    for (unit, &bytes) in sizes.iter().enumerate() {
        store.write(id, &session(), unit as u32, 0, &content(unit as u32, bytes))?;
    }
    seal(store, id, sizes)
}

pub(crate) fn effect(id: &InstanceId, fence: u64, units: std::ops::Range<u32>) -> UnitEffect {
    let units = vec![UnitRange { start: units.start, end: units.end }];
    UnitEffect { instance: id.clone(), fence: at(fence), units }
}

/// Waits until something comes about.
pub(crate) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !so() {
        assert!(std::time::Instant::now() < deadline, "{what}: not within 30 s");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// How a request of a cold engine goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It ends in an error.
    Error,
    /// It is never carried out.
    Lost,
    /// A bit of what it writes is flipped on the way.
    Flipped,
}

pub(crate) const FAULTS: [Fault; 3] = [Fault::Error, Fault::Lost, Fault::Flipped];

/// Which requests of a cold engine go wrong, and how. Shared by the test and what stands in for the engine.
#[derive(Debug)]
pub(crate) struct Faults {
    /// Requests until the fault; negative when there is none to come.
    requests_left: AtomicIsize,
    fault: AtomicU8,
    /// Whether every request after the fault fails too.
    for_good: AtomicBool,
    held: Mutex<bool>,
    let_go: Condvar,
    /// Requests until all are held; negative when none is to be.
    until_held: AtomicIsize,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            requests_left: AtomicIsize::new(-1),
            fault: AtomicU8::new(0),
            for_good: AtomicBool::new(false),
            held: Mutex::new(false),
            let_go: Condvar::new(),
            until_held: AtomicIsize::new(-1),
        }
    }
}

impl Faults {
    /// The request after the next `after` ones goes wrong.
    pub(crate) fn set(&self, after: isize, fault: Fault) {
        self.fault.store(fault as u8, Ordering::SeqCst);
        self.requests_left.store(after, Ordering::SeqCst);
    }

    /// The peer dies: after the next `after` requests none is answered.
    pub(crate) fn die(&self, after: isize) {
        self.for_good.store(true, Ordering::SeqCst);
        self.set(after, Fault::Error);
    }

    /// Whether the fault came; none comes afterwards.
    pub(crate) fn clear(&self) -> bool {
        self.for_good.store(false, Ordering::SeqCst);
        self.requests_left.swap(-1, Ordering::SeqCst) < 0
    }

    /// What becomes of the next request.
    pub(crate) fn next(&self) -> Option<Fault> {
        let left = self.requests_left.load(Ordering::SeqCst);
        if self.for_good.load(Ordering::SeqCst) && left <= 0 {
            self.requests_left.store(-1, Ordering::SeqCst);
            return Some(Fault::Error);
        }
        let left = self.requests_left.fetch_sub(1, Ordering::SeqCst);
        (left == 0).then(|| FAULTS[self.fault.load(Ordering::SeqCst) as usize])
    }

    /// From now on every request waits, until [`Faults::release`].
    pub(crate) fn hold(&self) {
        *self.held.lock().unwrap() = true;
    }

    /// Every request after the next `after` ones waits, until [`Faults::release`].
    pub(crate) fn hold_after(&self, after: isize) {
        self.until_held.store(after, Ordering::SeqCst);
    }

    /// Counts a request, which may be the one from which on all are held.
    pub(crate) fn come(&self) {
        if self.until_held.load(Ordering::SeqCst) >= 0 && self.until_held.fetch_sub(1, Ordering::SeqCst) == 0 {
            self.hold();
        }
    }

    pub(crate) fn release(&self) {
        self.until_held.store(-1, Ordering::SeqCst);
        *self.held.lock().unwrap() = false;
        self.let_go.notify_all();
    }

    pub(crate) fn is_held(&self) -> bool {
        *self.held.lock().unwrap()
    }

    /// Waits while requests are held.
    pub(crate) fn pass(&self) {
        drop(self.let_go.wait_while(self.held.lock().unwrap(), |held| *held).unwrap());
    }
}

/// An engine for files whose disk can be made to fail.
#[derive(Debug)]
pub(crate) struct FaultyEngine {
    pub inner: Box<dyn ColdEngine>,
    pub faults: Arc<Faults>,
}

impl ColdEngine for FaultyEngine {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn submit(&self, mut request: IoRequest) {
        self.faults.come();
        self.faults.pass();
        match self.faults.next() {
            None => self.inner.submit(request),
            Some(Fault::Error) => request.answer.send(request.memory, Err(io::Error::from_raw_os_error(5))),
            Some(Fault::Lost) => drop(request),
            Some(Fault::Flipped) if request.kind == IoKind::Write => {
                // Page-aligned like the original, because the file may be open for direct I/O.
                let mut copy = vec![0_u8; request.memory.bytes().len() + 4096];
                let skip = copy.as_ptr().align_offset(4096);
                let bytes = request.memory.bytes().len();
                copy[skip..skip + bytes].copy_from_slice(request.memory.bytes());
                copy[skip + bytes / 2] ^= 1;
                let start = NonNull::new(copy[skip..].as_mut_ptr()).unwrap();
                // SAFETY: the vector is kept by the mutex, which nobody locks, and moving it does not move its content.
                request.memory = unsafe { IoMemory::new(start, bytes, Arc::new(Mutex::new(copy))) };
                self.inner.submit(request);
            }
            // What a disk delivers wrongly is tested by flipping bytes in its files.
            Some(Fault::Flipped) => self.inner.submit(request),
        }
    }
}

//! What the tests of this crate share: identities, stores in scratch folders, and content that is easy to recognise.

use std::path::Path;
use std::sync::Arc;

use ballast_schemas::{
    AffinityIndex, AffinityUnit, Digest, GroupId, InstanceId, LogPosition, ManifestRef, NodeId, Receipt, SessionId,
    UnitEffect, UnitRange,
};
use tempfile::TempDir;

use crate::checksum::checksum;
use crate::cold_engine::EngineChoice;
use crate::cold_tier::ColdOptions;
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
            folder: folder.to_owned(),
            quota_bytes: None,
            engine: EngineChoice::Auto,
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
    store.allocate(id, &session(), sizes).unwrap();
    for (unit, &bytes) in sizes.iter().enumerate() {
        store.write(id, &session(), unit as u32, 0, &content(unit as u32, bytes)).unwrap();
    }
    seal(store, id, sizes).unwrap()
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

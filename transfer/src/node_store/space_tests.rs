//! Tiers that fill up, are full, or can not be written at all.

use std::fs;
use std::path::Path;

use ballast_schemas::{ErrorCode, InstanceStanding};

use super::tests::{SIZES, check_readable, to_cold};
use super::{MemoryOptions, NodeStore, NodeStoreOptions};
use crate::cold::Progress;
use crate::error::StoreError;
use crate::testing::*;

/// A small tmpfs to fill up, or a printed reason why there is none.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(bytes: u64) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        match rustix::mount::mount("small", folder.path(), "tmpfs", flags, options.as_c_str()) {
            Ok(()) => Some(Self(folder)),
            Err(error) => {
                println!("skipped: can not mount a small tmpfs here: {error}");
                None
            }
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn a_full_disk_is_an_error_with_a_name_and_hurts_no_readable_copy() {
    let Some(disk) = SmallDisk::new(2 << 20) else { return };
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut wanted = options(memory.path(), Some(disk.path()));
    // The quota lets it through, so that the file system itself says no.
    wanted.cold.as_mut().unwrap().quota_bytes = Some(1 << 30);
    let store = NodeStore::open(&wanted).unwrap();
    let id = instance(1);
    import(&store, &id, &SIZES);
    let refused = to_cold(&store, &id, 2, 0..5).unwrap_err();
    assert!(matches!(&refused, StoreError::Full { .. }), "{refused}");
    assert_eq!(refused.code(), ErrorCode::CapacityExhausted);
    let inventory = check_readable(&store, &id, &SIZES);
    assert!(inventory.hot.is_full() && inventory.cold.is_empty());
    assert_eq!(store.usage().cold.unwrap().used_bytes, 0);
    to_cold(&store, &id, 2, 0..3).unwrap();
    check_readable(&store, &id, &SIZES);
    drop(store);

    wanted.cold.as_mut().unwrap().quota_bytes = Some(20_000);
    let store = NodeStore::open(&wanted).unwrap();
    store.set_standing(&id, InstanceStanding::Known).unwrap();
    let refused = to_cold(&store, &id, 2, 0..5).unwrap_err();
    assert!(refused.to_string().contains("--cold-quota"), "{refused}");
}

#[test]
fn a_cold_folder_that_can_not_be_used_says_why_at_start() {
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let missing = memory.path().join("missing");
    let error = NodeStore::open(&options(memory.path(), Some(&missing))).unwrap_err();
    assert!(error.to_string().contains("does not exist; create it or name another with --cold"), "{error}");

    let Some(disk) = SmallDisk::new(64 << 10) else { return };
    let filler = fs::write(disk.path().join("filler"), vec![1; 1 << 20]);
    assert!(filler.is_err(), "the disk is full now");
    let error = NodeStore::open(&options(memory.path(), Some(disk.path()))).unwrap_err();
    assert!(error.to_string().contains("full file system"), "{error}");
    fs::remove_file(disk.path().join("filler")).unwrap();

    let flags = rustix::mount::MountFlags::RDONLY;
    rustix::mount::mount_remount(disk.path(), flags, c"size=64k").unwrap();
    let error = NodeStore::open(&options(memory.path(), Some(disk.path()))).unwrap_err();
    assert!(error.to_string().contains("not writable") && error.to_string().contains("--cold"), "{error}");
}

#[test]
fn a_full_tmpfs_is_an_error_and_never_a_signal() {
    let Some(disk) = SmallDisk::new(8 << 20) else { return };
    let mut wanted = options(disk.path(), None);
    wanted.memory.budget_bytes = 8 << 20;
    let store = NodeStore::open(&NodeStoreOptions {
        memory: MemoryOptions { budget_bytes: 6 << 20, ..wanted.memory },
        ..wanted
    });
    let store = store.unwrap();
    let id = instance(1);
    store.allocate(&id, &session(), &[4 << 20]).unwrap();
    // Somebody else fills the tmpfs after the room was reserved.
    let filled = fs::write(disk.path().join("filler"), vec![1; 8 << 20]);
    assert!(filled.is_err());
    let refused = store.write(&id, &session(), 0, 0, &content(0, 4 << 20)).unwrap_err();
    assert!(matches!(refused, StoreError::Full { .. }), "{refused}");
    let refused = seal(&store, &id, &[4 << 20]).unwrap_err();
    assert!(matches!(refused, StoreError::Full { .. }), "{refused}");
    fs::remove_file(disk.path().join("filler")).unwrap();
    store.write(&id, &session(), 0, 0, &content(0, 4 << 20)).unwrap();
    seal(&store, &id, &[4 << 20]).unwrap();
    check_readable(&store, &id, &[4 << 20]);
}

/// Imports and deletes, and waits for the spare segments that come of it.
fn leave_spares(store: &NodeStore, number: u64, sizes: &[u64]) -> u64 {
    let id = instance(number);
    import(store, &id, sizes);
    store.delete_instance(&id, at(1000 + number), &Progress::default()).unwrap();
    let bytes = crate::layout::GroupLayout::new(sizes).unwrap().segment_bytes(0);
    eventually("a spare is made", || {
        assert_eq!(store.usage().memory.used_bytes, 0);
        store.memory.spare_bytes() == Some(bytes)
    });
    bytes
}

#[test]
fn the_next_import_of_the_same_sizes_begins_with_room_that_is_ready() {
    let folders = Folders::new();
    let store = folders.open();
    let bytes = leave_spares(&store, 1, &SIZES);
    assert_eq!(store.usage().memory.used_bytes, 0, "spares are nobody's");
    let id = instance(2);
    store.allocate(&id, &session(), &SIZES).unwrap();
    assert_eq!(store.memory.spare_bytes(), Some(0));
    let segment = store.served(&id).unwrap().memory.get(0).unwrap();
    assert_eq!(segment.taken_bytes(), bytes);
    // SAFETY: nobody writes yet.
    let found = unsafe { segment.bytes(0..bytes) }.unwrap();
    assert!(found.iter().all(|byte| *byte == 0), "nothing of the last one is left");
    import(&store, &id, &SIZES);
    check_readable(&store, &id, &SIZES);
}

#[test]
fn spare_segments_give_way_to_an_import_and_to_a_file_system_that_others_fill() {
    let Some(disk) = SmallDisk::new(24 << 20) else { return };
    let mut wanted = options(disk.path(), None);
    wanted.memory.budget_bytes = 16 << 20;
    let store = NodeStore::open(&wanted).unwrap();
    leave_spares(&store, 1, &[9 << 20]);
    // Not with the spare beside it.
    let id = instance(2);
    import(&store, &id, &[12 << 20]);
    assert_eq!(store.memory.spare_bytes(), Some(0));
    check_readable(&store, &id, &[12 << 20]);
    store.delete_instance(&id, at(1002), &Progress::default()).unwrap();
    leave_spares(&store, 3, &[9 << 20]);
    fs::write(disk.path().join("filler"), vec![1; 6 << 20]).unwrap();
    let id = instance(4);
    import(&store, &id, &[14 << 20]);
    check_readable(&store, &id, &[14 << 20]);
}

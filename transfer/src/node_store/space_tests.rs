//! Tiers that fill up, are full, or can not be written at all.

use std::fs;
use std::path::Path;

use ballast_schemas::{ErrorCode, InstanceStanding};

use super::tests::{SIZES, check_readable, to_cold};
use super::{MemoryOptions, NodeStore, NodeStoreOptions};
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

//! A disk that fails: requests that end in an I/O error, that are lost, or whose bytes are flipped on the way. Each is
//! an error with a name, hurts no readable copy, and is over when the disk is well again.

use std::sync::Arc;

use ballast_schemas::{ErrorCode, InstanceId, NodeId};

use super::NodeStore;
use super::tests::{check_readable, release, to_cold, to_memory};
use crate::cold::{ColdOptions, ColdPlace, ColdTier};
use crate::cold_disk::DiskTier;
use crate::cold_engine::{ColdEngine, EngineChoice, start};
use crate::error::StoreError;
use crate::testing::*;

const SIZES: [u64; 4] = [10_000, 5 << 20, 4096, 3 << 20];

fn open(folders: &Folders, faults: &Arc<Faults>) -> Arc<NodeStore> {
    let faults = faults.clone();
    faults.clear();
    let start = || {
        Ok(Box::new(FaultyEngine { inner: start(EngineChoice::Auto)?, faults: faults.clone() }) as Box<dyn ColdEngine>)
    };
    let open_cold = |options: &ColdOptions, node: &NodeId, incarnation| {
        let disk = DiskTier::open(folders.cold.path(), options.quota_bytes, node, incarnation, start)?;
        Ok(Arc::new(disk) as Arc<dyn ColdTier>)
    };
    NodeStore::open_with(&folders.options(), open_cold).unwrap()
}

fn fail_at_every_request(
    prepare: impl Fn(&NodeStore, &InstanceId),
    act: impl Fn(&NodeStore, &InstanceId) -> Result<ballast_schemas::NodeInventory, StoreError>,
    writes: isize,
) {
    let id = instance(1);
    for fault in FAULTS {
        let mut failures = 0;
        for after in 0.. {
            assert!(after < 100);
            let folders = Folders::new();
            let faults = Arc::new(Faults::default());
            let store = open(&folders, &faults);
            import(&store, &id, &SIZES);
            prepare(&store, &id);
            let used = store.usage();
            faults.set(after, fault);
            let result = act(&store, &id);
            let came = faults.clear();
            if let Err(error) = result {
                failures += 1;
                assert!(came, "{error}");
                let wanted =
                    if fault == Fault::Flipped { ErrorCode::ChecksumMismatch } else { ErrorCode::DurabilityFailed };
                assert_eq!(error.code(), wanted, "{fault:?} after {after}: {error}");
                assert_eq!(store.usage(), used, "{fault:?} after {after}: nothing stays reserved");
            }
            let inventory = check_readable(&store, &id, &SIZES);
            for unit in 0..SIZES.len() as u32 {
                assert!(
                    inventory.hot.get(unit) || inventory.cold.get(unit),
                    "{fault:?} after {after}: unit {unit} is lost"
                );
            }
            act(&store, &id).unwrap();
            check_readable(&store, &id, &SIZES);
            if !came {
                // Every request was made to fail once, and every one of them mattered.
                let wanted = if fault == Fault::Flipped { writes } else { after };
                assert_eq!(failures, wanted, "{fault:?}");
                break;
            }
        }
    }
}

#[test]
fn a_disk_that_fails_while_units_are_copied_to_it_hurts_nothing() {
    fail_at_every_request(|_, _| {}, |store, id| to_cold(store, id, 2, 0..4), 5);
}

#[test]
fn a_disk_that_fails_while_units_are_copied_from_it_hurts_nothing() {
    let prepare = |store: &NodeStore, id: &InstanceId| {
        to_cold(store, id, 2, 0..4).unwrap();
        release(store, id, 2, 0..4).unwrap();
    };
    fail_at_every_request(prepare, |store, id| to_memory(store, id, 3, 0..4), 0);
}

#[test]
fn without_io_uring_the_positioned_engine_does_the_same() {
    let folders = Folders::new();
    let mut options = folders.options();
    options.cold.as_mut().unwrap().place =
        ColdPlace::Disk { folder: folders.cold.path().to_owned(), engine: EngineChoice::Positioned };
    let store = NodeStore::open(&options).unwrap();
    let report = store.cold_report().unwrap().to_string();
    assert!(report.starts_with("positioned I/O (io_uring is switched off)"), "{report}");
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..4).unwrap();
    release(&store, &id, 2, 0..4).unwrap();
    check_readable(&store, &id, &SIZES);
    to_memory(&store, &id, 2, 0..4).unwrap();
    assert!(check_readable(&store, &id, &SIZES).hot.is_full());
}

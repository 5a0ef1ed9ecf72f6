//! What every cold engine keeps, whatever it moves bytes with: one body for each promise, one instance for each engine
//! (io_uring, positioned files, object storage in memory and in a folder).

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use ballast_schemas::frame::ReadRange;
use ballast_schemas::{ErrorCode, InstanceId, InstanceStanding, NodeId};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use tempfile::TempDir;

use super::tests::{check_readable, release, to_cold, to_memory};
use super::{Adoption, InstanceReader, NodeStore};
use crate::bucket_testing::TestStore;
use crate::cold::{ColdTier, Progress};
use crate::cold_bucket::BucketTier;
use crate::cold_disk::DiskTier;
use crate::cold_engine::{self, ColdEngine, EngineChoice};
use crate::error::{Mismatch, StoreError};
use crate::layout::GroupLayout;
use crate::testing::*;

/// Runs of several units, a unit of no bytes, one that goes up in parts, and one that crosses many reads.
const SIZES: [u64; 7] = [10_000, 0, 4096, 3 << 20, 1, 9 << 20, 70_000];
const UNITS: std::ops::Range<u32> = 0..SIZES.len() as u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Uring,
    Positioned,
    BucketInMemory,
    BucketInFolder,
}

const ENGINES: [Engine; 4] = [Engine::Uring, Engine::Positioned, Engine::BucketInMemory, Engine::BucketInFolder];

/// A node with a cold tier on one engine, and the hand that makes its peer fail.
struct World {
    engine: Engine,
    folders: Folders,
    faults: Arc<Faults>,
    bucket: Option<Arc<TestStore>>,
    _objects: Option<TempDir>,
}

enum Damage {
    FlippedByte,
    CutOff,
    Gone,
}

impl World {
    fn new(engine: Engine) -> Self {
        let faults = Arc::new(Faults::default());
        let objects = (engine == Engine::BucketInFolder).then(|| tempfile::tempdir().unwrap());
        let inner: Option<Arc<dyn object_store::ObjectStore>> = match (engine, &objects) {
            (Engine::BucketInMemory, _) => Some(Arc::new(InMemory::new())),
            (_, Some(folder)) => Some(Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap())),
            _ => None,
        };
        let bucket = inner.map(|inner| TestStore::new(inner, faults.clone()));
        Self { engine, folders: Folders::new(), faults, bucket, _objects: objects }
    }

    /// Opens the node, which says that the log knows everything on it.
    fn open(&self) -> Arc<NodeStore> {
        self.open_as("node-1", &self.folders)
    }

    fn open_as(&self, name: &str, folders: &Folders) -> Arc<NodeStore> {
        self.open_on(self.bucket.as_ref(), name, folders)
    }

    fn open_on(&self, bucket: Option<&Arc<TestStore>>, name: &str, folders: &Folders) -> Arc<NodeStore> {
        let mut options = folders.options();
        options.node = NodeId::new(name).unwrap();
        let store = NodeStore::open_with(&options, |options, node, incarnation| {
            if let Some(bucket) = bucket {
                let tier = BucketTier::on(bucket.bucket(), options.quota_bytes, node, incarnation)?;
                return Ok(Arc::new(tier) as Arc<dyn ColdTier>);
            }
            let choice = if self.engine == Engine::Positioned { EngineChoice::Positioned } else { EngineChoice::Auto };
            let start = || {
                let inner = cold_engine::start(choice)?;
                Ok(Box::new(FaultyEngine { inner, faults: self.faults.clone() }) as Box<dyn ColdEngine>)
            };
            let tier = DiskTier::open(folders.cold.path(), options.quota_bytes, node, incarnation, start)?;
            Ok(Arc::new(tier) as Arc<dyn ColdTier>)
        })
        .unwrap();
        for instance in store.instances() {
            store.set_standing(&instance, InstanceStanding::Known).unwrap();
        }
        store
    }

    /// What the node's memory held is gone, as after a loss of power.
    fn lose_memory(&self) {
        for entry in fs::read_dir(self.folders.memory.path().join("instances")).unwrap() {
            fs::remove_dir_all(entry.unwrap().path()).unwrap();
        }
    }

    /// Where the unit lies on disk.
    fn segment_path(&self, id: &InstanceId, unit: u32) -> std::path::PathBuf {
        let segment = GroupLayout::new(&SIZES).unwrap().extent(unit).unwrap().segment;
        let folder = self.folders.cold.path().join("instances").join(crate::memory_tier::instance_folder(id));
        folder.join(crate::memory_tier::segment_file(segment))
    }

    /// Damages what holds a unit on the cold tier, past the engine.
    fn damage(&self, id: &InstanceId, unit: u32, damage: &Damage) {
        let extent = GroupLayout::new(&SIZES).unwrap().extent(unit).unwrap();
        let Some(bucket) = &self.bucket else {
            let path = self.segment_path(id, unit);
            match damage {
                Damage::Gone => fs::remove_file(path).unwrap(),
                Damage::CutOff => fs::File::options().write(true).open(path).unwrap().set_len(extent.offset).unwrap(),
                Damage::FlippedByte => {
                    let file = fs::File::options().read(true).write(true).open(path).unwrap();
                    let mut byte = [0];
                    file.read_exact_at(&mut byte, extent.offset).unwrap();
                    file.write_all_at(&[byte[0] ^ 1], extent.offset).unwrap();
                    file.sync_all().unwrap();
                }
            }
            return;
        };
        let (key, at) = bucket.pack_at(extent.segment, extent.offset);
        let mut content = bucket.content(&key);
        match damage {
            Damage::Gone => return bucket.delete_object(&key),
            Damage::CutOff => content.truncate(at as usize),
            Damage::FlippedByte => content[at as usize] ^= 1,
        }
        bucket.replace(&key, content);
    }

    /// What of a bucket no index speaks of.
    fn leftovers(&self) -> Vec<String> {
        let Some(bucket) = &self.bucket else { return Vec::new() };
        assert_eq!(bucket.open_uploads(), 0, "uploads in parts are still open");
        let keys = bucket.keys();
        let mut left: Vec<String> = keys.iter().filter(|key| key.contains("/uploads/")).cloned().collect();
        for replica in keys.iter().filter_map(|key| key.split_once("/index/")).map(|(replica, _)| replica) {
            let indexes: Vec<&String> =
                keys.iter().filter(|key| key.starts_with(&format!("{replica}/index/"))).collect();
            let newest = bucket.content(indexes.last().unwrap());
            let index: crate::bucket_index::Index =
                crate::record::decode(&newest, std::path::Path::new("index")).unwrap();
            let packs = keys.iter().filter(|key| key.starts_with(&format!("{replica}/packs/")));
            left.extend(packs.filter(|key| !index.packs.iter().any(|pack| key.ends_with(&pack.name))).cloned());
        }
        left
    }
}

fn on_every_engine(test: impl Fn(&World)) {
    for engine in ENGINES {
        println!("on {engine:?}");
        test(&World::new(engine));
    }
}

/// Imports an instance and moves all of it to the cold tier.
fn cold(store: &NodeStore, id: &InstanceId) {
    import(store, id, &SIZES);
    to_cold(store, id, 2, UNITS).unwrap();
    release(store, id, 2, UNITS).unwrap();
}

fn code<T: std::fmt::Debug>(result: Result<T, StoreError>) -> ErrorCode {
    result.unwrap_err().code()
}

#[test]
fn units_come_back_from_the_cold_tier_as_they_went() {
    on_every_engine(|world| {
        let store = world.open();
        let id = instance(1);
        cold(&store, &id);
        let inventory = check_readable(&store, &id, &SIZES);
        assert!(inventory.cold.is_full() && inventory.hot.is_empty());
        assert_eq!(store.usage().memory.used_bytes, 0);
        to_memory(&store, &id, 3, UNITS).unwrap();
        assert!(check_readable(&store, &id, &SIZES).hot.is_full());
        let found = store.verify(&id, 0, &Progress::default()).unwrap();
        assert_eq!((found.memory.right, found.cold.right), (UNITS.end, UNITS.end));
        // A part of them leaves memory again: the copies are still there, and none is made anew.
        let before = world.bucket.as_ref().map(|bucket| bucket.keys());
        to_cold(&store, &id, 4, 2..5).unwrap();
        release(&store, &id, 4, 2..5).unwrap();
        assert_eq!(world.bucket.as_ref().map(|bucket| bucket.keys()), before);
        check_readable(&store, &id, &SIZES);
        assert_eq!(world.leftovers(), [""; 0]);
    });
}

#[test]
fn any_range_reads_as_the_reference_has_it() {
    on_every_engine(|world| {
        let store = world.open();
        let id = instance(1);
        import(&store, &id, &SIZES);
        // In several rounds, so that neighbours are not always copied together.
        for units in [0..3, 3..4, 4..7] {
            to_cold(&store, &id, 2, units).unwrap();
        }
        release(&store, &id, 2, UNITS).unwrap();
        let reader = store.reader(&id).unwrap();
        let mut state = 0x1234_5678_9abc_def1_u64;
        let mut below = |end: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            if end == 0 { 0 } else { state % end }
        };
        let wholes: Vec<Vec<u8>> = UNITS.map(|unit| content(unit, SIZES[unit as usize])).collect();
        for _ in 0..200 {
            let mut ranges: Vec<ReadRange> = Vec::new();
            for unit in UNITS {
                let size = SIZES[unit as usize];
                let offset = below(size + 1);
                let bytes = below((size - offset).min(200_000) + 1);
                if below(2) == 0 {
                    ranges.push(ReadRange { unit, offset, bytes });
                }
            }
            let mut rest = ranges.as_slice();
            while !rest.is_empty() {
                let (now, later) = rest.split_at(reader.one_read(rest));
                for (range, piece) in now.iter().zip(reader.cold(now).unwrap()) {
                    let wanted = &wholes[range.unit as usize][range.offset as usize..][..range.bytes as usize];
                    assert!(piece.bytes() == wanted, "{range:?}");
                }
                rest = later;
            }
        }
    });
}

#[test]
fn what_can_not_be_done_is_refused_with_the_same_code() {
    on_every_engine(|world| {
        let store = world.open();
        let id = instance(1);
        import(&store, &id, &SIZES);
        to_cold(&store, &id, 5, 0..4).unwrap();
        let reader = store.reader(&id).unwrap();
        let read = |unit, offset, bytes| reader.cold(&[ReadRange { unit, offset, bytes }]);
        assert_eq!(code(read(4, 0, 1)), ErrorCode::Unavailable, "a unit that is not cold");
        assert_eq!(code(read(2, 4000, 97)), ErrorCode::InvalidArgument, "past the end of its unit");
        assert_eq!(code(read(99, 0, 1)), ErrorCode::InvalidArgument, "no unit");
        assert_eq!(code(read(3, 0, InstanceReader::COLD_BYTES_MAX + 1)), ErrorCode::InvalidArgument, "too long");
        assert_eq!(code(to_cold(&store, &id, 4, UNITS)), ErrorCode::Conflict, "an older fence");
        assert_eq!(code(release(&store, &id, 5, UNITS)), ErrorCode::NotReady, "the last copy of some units");
        assert!(check_readable(&store, &id, &SIZES).hot.is_full(), "nothing was freed");
        assert_eq!(code(to_cold(&store, &id, 5, 0..99)), ErrorCode::InvalidArgument);
    });
}

#[test]
fn memory_that_a_reader_holds_is_not_freed_whatever_is_cold() {
    on_every_engine(|world| {
        let store = world.open();
        let id = instance(1);
        import(&store, &id, &SIZES);
        to_cold(&store, &id, 2, UNITS).unwrap();
        let reader = store.reader(&id).unwrap();
        let held = reader.hot(&ReadRange { unit: 3, offset: 0, bytes: SIZES[3] }).unwrap().unwrap();
        assert_eq!(code(release(&store, &id, 2, UNITS)), ErrorCode::Busy);
        assert!(held.bytes() == content(3, SIZES[3]));
        drop(held);
        let inventory = release(&store, &id, 2, UNITS).unwrap();
        assert!(inventory.hot.is_empty() && inventory.cold.is_full());
    });
}

#[test]
fn a_corrupted_byte_is_never_handed_on_and_its_copy_never_counts_again() {
    on_every_engine(|world| {
        let store = world.open();
        let id = instance(1);
        import(&store, &id, &SIZES);
        to_cold(&store, &id, 2, UNITS).unwrap();
        world.damage(&id, 3, &Damage::FlippedByte);
        // The witness is looked at once more before memory goes.
        assert_eq!(code(release(&store, &id, 2, UNITS)), ErrorCode::ChecksumMismatch);
        let inventory = check_readable(&store, &id, &SIZES);
        assert!(inventory.hot.is_full() && !inventory.cold.get(3) && inventory.cold_lost.get(3));
        to_cold(&store, &id, 3, UNITS).unwrap();
        release(&store, &id, 3, UNITS).unwrap();
        let inventory = check_readable(&store, &id, &SIZES);
        assert!(inventory.cold.is_full() && inventory.cold_lost.is_empty());

        // Without a copy in memory a scrub finds it, and so does the way back.
        world.damage(&id, 5, &Damage::FlippedByte);
        let found = store.verify(&id, 0, &Progress::default()).unwrap();
        assert_eq!(found.cold.wrong, [5]);
        world.damage(&id, 6, &Damage::FlippedByte);
        assert_eq!(code(to_memory(&store, &id, 4, 6..7)), ErrorCode::ChecksumMismatch);
        let inventory = check_readable(&store, &id, &SIZES);
        assert!(!inventory.hot.get(6) && !inventory.cold.get(6), "a unit that is lost is said to be lost");
        assert_eq!(inventory.cold_lost.iter().collect::<Vec<_>>(), [5, 6]);
        assert_eq!(world.leftovers(), [""; 0]);
    });
}

#[test]
fn a_copy_that_is_gone_or_cut_off_is_lost_and_the_others_are_not() {
    on_every_engine(|world| {
        for damage in [Damage::Gone, Damage::CutOff] {
            let store = world.open();
            let id = instance(if matches!(damage, Damage::Gone) { 1 } else { 2 });
            import(&store, &id, &SIZES);
            // A copy each, so that in a bucket they are objects of their own.
            UNITS.for_each(|unit| drop(to_cold(&store, &id, 2, unit..unit + 1).unwrap()));
            release(&store, &id, 2, UNITS).unwrap();
            world.damage(&id, 6, &damage);
            let found = store.verify(&id, 0, &Progress::default()).unwrap();
            assert!(found.cold.wrong.contains(&6), "{found:?}");
            let inventory = check_readable(&store, &id, &SIZES);
            assert!(!inventory.cold.get(6) && inventory.cold_lost.get(6));
            assert_eq!(inventory.cold.get(3), world.bucket.is_some(), "units of one file go together, objects do not");
            drop(store);
            // A restart believes what was found, and looks for itself.
            let store = world.open();
            assert_eq!(store.adoption().damaged, []);
            assert!(!store.inventory(&id).unwrap().unwrap().cold.get(6));
            store.delete_instance(&id, at(9), &Progress::default()).unwrap();
        }
    });
}

#[test]
fn a_segment_on_disk_that_can_not_be_opened_keeps_no_node_from_starting() {
    let world = World::new(Engine::Positioned);
    let store = world.open();
    let (damaged, whole) = (instance(1), instance(2));
    cold(&store, &damaged);
    cold(&store, &whole);
    drop(store);
    world.damage(&damaged, 3, &Damage::Gone);
    fs::create_dir(world.segment_path(&damaged, 3)).unwrap();
    let store = world.open();
    let inventory = store.inventory(&damaged).unwrap().unwrap();
    assert!(inventory.cold_lost.get(3) && !inventory.cold.get(3));
    assert!(check_readable(&store, &whole, &SIZES).cold.is_full());
}

#[test]
fn cold_units_outlive_the_process_and_its_memory() {
    on_every_engine(|world| {
        let store = world.open();
        let id = instance(1);
        cold(&store, &id);
        store.set_cluster(&ballast_schemas::ClusterId::new("cluster-1").unwrap()).unwrap();
        drop(store);
        world.lose_memory();
        let store = world.open();
        assert_eq!(store.adoption().damaged, []);
        assert_eq!((store.adoption().instances, store.adoption().lost_units), (1, 0));
        assert_eq!(store.cluster().unwrap().as_str(), "cluster-1");
        let inventory = check_readable(&store, &id, &SIZES);
        assert!(inventory.cold.is_full() && inventory.manifest);
        assert!(inventory.fence >= at(2), "the fence under which they were copied is known");
        to_memory(&store, &id, 3, UNITS).unwrap();
        assert!(check_readable(&store, &id, &SIZES).hot.is_full());
    });
}

#[test]
fn what_is_deleted_leaves_nothing_behind() {
    on_every_engine(|world| {
        let store = world.open();
        let id = instance(1);
        import(&store, &id, &SIZES);
        to_cold(&store, &id, 2, 0..3).unwrap();
        to_cold(&store, &id, 2, 3..7).unwrap();
        let inventory = super::tests::delete(&store, &id, 4, 0..2).unwrap().unwrap();
        assert!(inventory.cold.get(2) && !inventory.cold.get(0));
        super::tests::delete(&store, &id, 4, 2..7).unwrap();
        store.delete_instance(&id, at(4), &Progress::default()).unwrap();
        store.verify_empty(&id).unwrap();
        assert_eq!(store.usage().cold.unwrap().used_bytes, 0);
        let left = world.bucket.as_ref().map(|bucket| bucket.keys()).unwrap_or_default();
        assert_eq!(left, [""; 0]);
        drop(store);
        assert_eq!(world.open().instances(), []);
    });
}

#[test]
fn a_peer_that_dies_in_the_middle_of_a_copy_loses_nothing() {
    for engine in ENGINES {
        let mut deaths = 0;
        for after in 0.. {
            assert!(after < 200, "the copy never ends");
            let world = World::new(engine);
            let store = world.open();
            let id = instance(1);
            import(&store, &id, &SIZES);
            world.faults.die(after);
            let copied = to_cold(&store, &id, 2, UNITS);
            let died = world.faults.clear();
            if let Err(error) = &copied {
                assert!(died, "{engine:?} after {after}: {error}");
                deaths += 1;
                assert_eq!(error.code(), ErrorCode::DurabilityFailed, "{engine:?} after {after}: {error}");
                // Memory goes only for what is verified on the cold tier.
                let refused = release(&store, &id, 2, UNITS).unwrap_err();
                assert_eq!(refused.code(), ErrorCode::NotReady, "{engine:?} after {after}: {refused}");
            }
            assert!(check_readable(&store, &id, &SIZES).hot.is_full(), "{engine:?} after {after}");
            drop(store);

            let store = world.open();
            let Adoption { wrong_units, damaged, .. } = store.adoption();
            assert!(*wrong_units == 0 && damaged.is_empty(), "{engine:?} after {after}: {:?}", store.adoption());
            assert!(check_readable(&store, &id, &SIZES).hot.is_full(), "{engine:?} after {after}");
            assert_eq!(world.leftovers(), [""; 0], "{engine:?} after {after}: a restart cleans up");
            to_cold(&store, &id, 3, UNITS).unwrap();
            release(&store, &id, 3, UNITS).unwrap();
            assert!(check_readable(&store, &id, &SIZES).cold.is_full(), "{engine:?} after {after}");
            if !died {
                break;
            }
        }
        assert!(deaths > 3, "{engine:?}: every request mattered");
    }
}

#[test]
fn a_request_that_fails_hurts_nothing_and_is_over_when_the_peer_is_well_again() {
    for engine in ENGINES {
        for fault in FAULTS {
            let world = World::new(engine);
            let store = world.open();
            let id = instance(1);
            import(&store, &id, &SIZES);
            let used = store.usage();
            let mut came = true;
            for after in 0.. {
                world.faults.set(after, fault);
                let copied = to_cold(&store, &id, 2, UNITS);
                came &= world.faults.clear();
                if let Err(error) = copied {
                    let codes = [ErrorCode::DurabilityFailed, ErrorCode::ChecksumMismatch];
                    assert!(came && codes.contains(&error.code()), "{engine:?} {fault:?} after {after}: {error}");
                    assert_eq!(store.usage(), used, "{engine:?} {fault:?} after {after}: nothing stays reserved");
                    let inventory = check_readable(&store, &id, &SIZES);
                    assert!(inventory.hot.is_full() && inventory.cold.is_empty(), "{engine:?} {fault:?} after {after}");
                } else if came {
                    // One whose failure does not matter, or a flip of what carries no payload: once more from the start.
                    check_readable(&store, &id, &SIZES);
                    store.delete_instance(&id, at(3), &Progress::default()).unwrap();
                    break;
                } else {
                    break;
                }
            }
        }
    }
}

#[test]
fn a_slow_peer_keeps_no_fence_from_rising_and_its_copy_ends_at_it() {
    on_every_engine(|world| {
        let store = world.open();
        let id = instance(1);
        import(&store, &id, &SIZES);
        world.faults.hold();
        let copying = std::thread::spawn({
            let (store, id) = (store.clone(), id.clone());
            move || to_cold(&store, &id, 2, UNITS)
        });
        // The copy has begun once its own fence is in force.
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while store.inventory(&id).unwrap().unwrap().fence < at(2) {
            assert!(std::time::Instant::now() < deadline, "the copy never begins");
            std::thread::sleep(Duration::from_millis(2));
        }
        // Neither a fence nor a reader of memory waits for the peer: it still gives no answer.
        store.raise_fence(&id, at(7)).unwrap();
        let reader = store.reader(&id).unwrap();
        assert!(reader.hot(&ReadRange { unit: 3, offset: 0, bytes: SIZES[3] }).unwrap().is_some());
        assert!(world.faults.is_held());
        world.faults.release();
        assert_eq!(code(copying.join().unwrap()), ErrorCode::Conflict, "an effect that is no longer wanted ends");
        let inventory = check_readable(&store, &id, &SIZES);
        assert!(inventory.hot.is_full() && inventory.cold.is_empty());
        to_cold(&store, &id, 7, UNITS).unwrap();
        // A request that was given up may be carried out all the same; the next start finds what it made.
        drop((store, reader));
        world.open();
        assert_eq!(world.leftovers(), [""; 0]);
    });
}

#[test]
fn a_peer_that_hangs_at_any_request_keeps_nobody_else_waiting() {
    type Step = fn(&NodeStore, &InstanceId) -> Result<(), StoreError>;
    let steps: [(&str, Step); 4] = [
        ("copy", |store, id| to_cold(store, id, 3, UNITS).map(drop)),
        ("give up a wrong copy", |store, id| {
            to_cold(store, id, 3, 0..4)?;
            let mismatch = Mismatch { unit: 3, expected: 1, found: 2 };
            store.report_bad_cold(id, mismatch);
            Ok(())
        }),
        ("delete units", |store, id| {
            to_cold(store, id, 3, 0..4)?;
            super::tests::delete(store, id, 3, UNITS).map(drop)
        }),
        ("delete all", |store, id| {
            to_cold(store, id, 3, 0..4)?;
            store.delete_instance(id, at(3), &Progress::default())
        }),
    ];
    for engine in ENGINES {
        for (name, step) in steps {
            for after in 0.. {
                let world = World::new(engine);
                let store = world.open();
                let (id, other) = (instance(1), instance(2));
                import(&store, &id, &SIZES);
                import(&store, &other, &SIZES);
                world.faults.hold_after(after);
                let working = std::thread::spawn({
                    let (store, id) = (store.clone(), id.clone());
                    move || step(&store, &id)
                });
                eventually("the step hangs or ends", || world.faults.is_held() || working.is_finished());
                let held = world.faults.is_held();
                let (done, asked) = std::sync::mpsc::channel();
                std::thread::spawn({
                    let (store, id) = (store.clone(), id.clone());
                    move || {
                        // What a node says of itself every second, and what other revisions and readers of memory ask for.
                        let _ = (store.usage(), store.inventories(), store.highest_seen(), store.cluster());
                        store.raise_fence(&other, at(7)).unwrap();
                        // The instance itself may be on its way out.
                        let _ = (store.raise_fence(&id, at(7)), store.describe(&id));
                        if let Ok(reader) = store.reader(&id) {
                            let _ = reader.hot(&ReadRange { unit: 3, offset: 0, bytes: SIZES[3] });
                        }
                        done.send(()).unwrap();
                    }
                });
                let answered = asked.recv_timeout(Duration::from_secs(60));
                world.faults.release();
                assert!(answered.is_ok(), "{engine:?}, {name}, held after {after}: somebody waits for the peer");
                // It ends well or at the fence that was raised meanwhile.
                let _ = working.join().unwrap();
                if !held {
                    break;
                }
            }
        }
    }
}

#[test]
fn a_seal_that_waits_for_the_peer_keeps_nobody_else_waiting() {
    on_every_engine(|world| {
        let store = world.open();
        world.faults.hold();
        let sealing = std::thread::spawn({
            let store = store.clone();
            move || drop(import(&store, &instance(1), &SIZES))
        });
        let (done, asked) = std::sync::mpsc::channel();
        std::thread::spawn({
            let store = store.clone();
            move || {
                eventually("the import has begun", || !store.instances().is_empty());
                // As often as it takes to meet the seal, which ends only once the peer answers.
                for _ in 0..200 {
                    let _ = (store.usage(), store.inventories(), store.describe(&instance(1)));
                    std::thread::sleep(Duration::from_millis(1));
                }
                done.send(()).unwrap();
            }
        });
        let answered = asked.recv_timeout(Duration::from_secs(60));
        world.faults.release();
        assert!(answered.is_ok(), "somebody waits for the seal");
        sealing.join().unwrap();
        check_readable(&store, &instance(1), &SIZES);
    });
}

/// Only object storage outlives its node.
mod buckets {
    use super::*;

    fn worlds(test: impl Fn(&World, &Arc<TestStore>)) {
        for engine in [Engine::BucketInMemory, Engine::BucketInFolder] {
            println!("on {engine:?}");
            let world = World::new(engine);
            let bucket = world.bucket.clone().unwrap();
            test(&world, &bucket);
        }
    }

    fn away(name: &'static str) -> impl Fn(&NodeId) -> bool {
        move |node| node.as_str() == name
    }

    fn serve(store: &NodeStore) {
        for instance in store.instances() {
            store.set_standing(&instance, InstanceStanding::Known).unwrap();
        }
    }

    #[test]
    fn a_revision_survives_the_loss_of_its_node() {
        worlds(|world, _| {
            let (id, second) = (instance(1), Folders::new());
            let lost = world.open();
            cold(&lost, &id);
            drop(lost);
            let other = world.open_as("node-2", &second);
            assert_eq!(other.adopt_from(&away("node-3")).unwrap(), [], "only nodes that are away are taken from");
            assert_eq!(other.adopt_from(&away("node-1")).unwrap(), std::slice::from_ref(&id));
            assert_eq!(code(other.reader(&id)), ErrorCode::NotReady, "the log has not been asked about it yet");
            serve(&other);
            let inventory = check_readable(&other, &id, &SIZES);
            assert!(inventory.cold.is_full() && inventory.manifest && inventory.sealed);
            assert_eq!(other.adopt_from(&away("node-1")).unwrap(), [], "it is taken over once");
            to_memory(&other, &id, 3, UNITS).unwrap();
            assert!(check_readable(&other, &id, &SIZES).hot.is_full());
            drop(other);
            let other = world.open_as("node-2", &second);
            assert!(check_readable(&other, &id, &SIZES).cold.is_full(), "it is the other node's own from now on");
        });
    }

    #[test]
    fn a_node_that_comes_back_harms_nothing_that_was_taken_over() {
        worlds(|world, bucket| {
            let (id, second) = (instance(1), Folders::new());
            let first = world.open();
            import(&first, &id, &SIZES);
            to_cold(&first, &id, 2, UNITS).unwrap();
            release(&first, &id, 2, 0..3).unwrap();
            // It was only cut off: it still runs, and still has units in memory.
            let other = world.open_as("node-2", &second);
            assert_eq!(other.adopt_from(&away("node-1")).unwrap(), std::slice::from_ref(&id));
            serve(&other);
            let refused = release(&first, &id, 3, 3..7).unwrap_err();
            assert_eq!(refused.code(), ErrorCode::NotReady, "{refused}");
            let inventory = check_readable(&first, &id, &SIZES);
            assert!(
                inventory.cold.is_empty() && inventory.cold_lost.is_empty(),
                "what it has there is the other's now"
            );
            assert!(inventory.hot.get(3) && inventory.hot.get(6));
            assert_eq!(first.usage().cold.unwrap().used_bytes, 0);
            // It makes copies of its own, and deleting them is not deleting the other's.
            to_cold(&first, &id, 3, 3..7).unwrap();
            release(&first, &id, 3, 3..7).unwrap();
            check_readable(&first, &id, &SIZES);
            first.delete_instance(&id, at(4), &Progress::default()).unwrap();
            first.verify_empty(&id).unwrap();
            assert!(check_readable(&other, &id, &SIZES).cold.is_full());
            other.delete_instance(&id, at(4), &Progress::default()).unwrap();
            assert_eq!(bucket.keys(), [""; 0]);
        });
    }

    #[test]
    fn of_a_node_that_was_away_when_another_took_over_only_memory_is_adopted() {
        worlds(|world, _| {
            let (id, second) = (instance(1), Folders::new());
            let first = world.open();
            import(&first, &id, &SIZES);
            to_cold(&first, &id, 2, UNITS).unwrap();
            drop(first);
            let other = world.open_as("node-2", &second);
            other.adopt_from(&away("node-1")).unwrap();
            serve(&other);
            let first = world.open();
            assert_eq!((first.adoption().lost_units, first.adoption().damaged.len()), (0, 0));
            let inventory = check_readable(&first, &id, &SIZES);
            assert!(inventory.hot.is_full() && inventory.cold.is_empty());
            assert!(check_readable(&other, &id, &SIZES).cold.is_full());
        });
    }

    #[test]
    fn of_two_nodes_that_take_over_one_does() {
        worlds(|world, _| {
            let (id, second, third) = (instance(1), Folders::new(), Folders::new());
            let lost = world.open();
            cold(&lost, &id);
            drop(lost);
            let nodes = [world.open_as("node-2", &second), world.open_as("node-3", &third)];
            let takers = nodes.each_ref().map(|node| {
                let node = node.clone();
                std::thread::spawn(move || node.adopt_from(&away("node-1")).unwrap().len())
            });
            let taken: usize = takers.into_iter().map(|taker| taker.join().unwrap()).sum();
            assert_eq!(taken, 1);
            nodes.iter().for_each(|node| serve(node));
            let holders = nodes.iter().filter(|node| !node.instances().is_empty());
            holders.for_each(|node| assert!(check_readable(node, &id, &SIZES).cold.is_full()));
        });
    }

    #[test]
    fn a_take_over_that_fails_anywhere_is_gone_on_with() {
        for after in 0.. {
            assert!(after < 100, "the take-over never ends");
            let world = World::new(Engine::BucketInMemory);
            let (id, second) = (instance(1), Folders::new());
            let lost = world.open();
            cold(&lost, &id);
            drop(lost);
            let other = world.open_as("node-2", &second);
            world.faults.set(after, Fault::Error);
            // What was adopted shows below, whether all of it went well or not.
            let _ = other.adopt_from(&away("node-1"));
            let came = world.faults.clear();
            other.adopt_from(&away("node-1")).unwrap();
            assert_eq!(other.instances(), std::slice::from_ref(&id), "after {after}");
            serve(&other);
            assert!(check_readable(&other, &id, &SIZES).cold.is_full(), "after {after}");
            other.delete_instance(&id, at(4), &Progress::default()).unwrap();
            let left = world.bucket.as_ref().unwrap().keys();
            assert!(left.iter().all(|key| key.contains("/nodes/node-1/")), "after {after}: {left:?}");
            if !came {
                assert!(after > 5 && left.is_empty(), "every request of the take-over failed once: {after}");
                break;
            }
        }
    }

    #[test]
    fn a_later_run_of_a_node_shuts_an_earlier_one_out() {
        worlds(|world, _| {
            let (id, second) = (instance(1), Folders::new());
            let earlier = world.open();
            import(&earlier, &id, &SIZES);
            to_cold(&earlier, &id, 2, 0..4).unwrap();
            // On another machine, so that no lock on a folder keeps it from starting.
            let later = world.open_as("node-1", &second);
            assert_eq!(check_readable(&later, &id, &SIZES).cold.count(), 4);
            assert_eq!(code(release(&earlier, &id, 3, 0..4)), ErrorCode::NotReady);
            assert!(check_readable(&earlier, &id, &SIZES).hot.is_full());
            check_readable(&later, &id, &SIZES);
        });
    }

    #[test]
    fn uploads_that_fail_are_given_up_and_those_of_a_dead_run_at_the_next_start() {
        worlds(|world, bucket| {
            let store = world.open();
            let id = instance(1);
            import(&store, &id, &SIZES);
            for after in 0.. {
                world.faults.set(after, Fault::Error);
                let copied = to_cold(&store, &id, 2, UNITS);
                let came = world.faults.clear();
                assert_eq!(bucket.open_uploads(), 0, "{after}: an upload in parts is given up");
                if copied.is_ok() {
                    assert!(after > 6, "every request of the upload failed once");
                    break;
                }
                assert!(came, "{after}: {copied:?}");
            }
            // A run that dies leaves its upload open.
            super::super::tests::delete(&store, &id, 3, UNITS).unwrap();
            store.delete_instance(&id, at(3), &Progress::default()).unwrap();
            let id = instance(2);
            import(&store, &id, &SIZES);
            world.faults.die(4);
            to_cold(&store, &id, 2, UNITS).unwrap_err();
            world.faults.clear();
            assert_eq!(bucket.open_uploads(), 1);
            drop(store);
            let store = world.open();
            assert_eq!(world.leftovers(), [""; 0]);
            to_cold(&store, &id, 3, UNITS).unwrap();
        });
    }

    #[test]
    fn a_bucket_of_another_cluster_is_refused() {
        worlds(|world, _| {
            let cluster = |name: &str| ballast_schemas::ClusterId::new(name).unwrap();
            let first = world.open();
            first.set_cluster(&cluster("cluster-1")).unwrap();
            let second = Folders::new();
            let other = world.open_as("node-2", &second);
            let refused = other.set_cluster(&cluster("cluster-2")).unwrap_err();
            assert_eq!(refused.code(), ErrorCode::Conflict, "{refused}");
            other.set_cluster(&cluster("cluster-1")).unwrap();
        });
    }

    #[test]
    fn a_server_that_overwrites_what_it_should_leave_alone_is_refused() {
        worlds(|_, bucket| {
            bucket.overwrites.store(true, std::sync::atomic::Ordering::SeqCst);
            let node = NodeId::new("node-1").unwrap();
            let refused = BucketTier::on(bucket.bucket(), None, &node, uuid::Uuid::now_v7()).unwrap_err();
            assert!(refused.to_string().contains("If-None-Match"), "{refused}");
            assert_eq!(bucket.keys(), [""; 0]);
        });
    }

    #[test]
    fn records_that_are_damaged_are_kept_and_said() {
        for part in ["/records", "/manifest", "/index/"] {
            let world = World::new(Engine::BucketInMemory);
            let bucket = world.bucket.clone().unwrap();
            let store = world.open();
            let id = instance(1);
            cold(&store, &id);
            drop(store);
            world.lose_memory();
            let key = bucket.keys().into_iter().find(|key| key.contains(part)).unwrap();
            let mut content = bucket.content(&key);
            content[12] ^= 1;
            bucket.replace(&key, content);
            let before = bucket.keys();
            let store = world.open();
            assert_eq!(store.adoption().damaged.len(), 1, "{part}");
            assert_eq!(store.instances(), [], "{part}");
            assert!(store.usage().cold.unwrap().used_bytes >= SIZES.iter().sum(), "{part}: its bytes are counted");
            assert_eq!(bucket.keys(), before, "{part}: everything is kept");
        }
    }

    #[test]
    fn no_segment_of_a_bucket_is_handed_out_and_its_units_are_read_as_ranges() {
        worlds(|world, _| {
            let store = world.open();
            let id = instance(1);
            import(&store, &id, &SIZES);
            to_cold(&store, &id, 2, UNITS).unwrap();
            release(&store, &id, 2, 0..3).unwrap();
            let granted = store.reader(&id).unwrap().grant_segments(true, true).unwrap();
            let tiers: Vec<_> = granted.grants.iter().map(|(grant, _)| grant.tier).collect();
            assert_eq!(tiers, [ballast_schemas::frame::Tier::Memory]);
            check_readable(&store, &id, &SIZES);
        });
    }

    #[test]
    fn a_node_takes_nothing_before_it_knows_whose_the_bucket_is() {
        worlds(|world, bucket| {
            let cluster = |name: &str| ballast_schemas::ClusterId::new(name).unwrap();
            let (id, second, third) = (instance(1), Folders::new(), Folders::new());
            let lives = world.open();
            lives.set_cluster(&cluster("cluster-1")).unwrap();
            import(&lives, &id, &SIZES);
            to_cold(&lives, &id, 2, 0..4).unwrap();
            let before = bucket.keys();
            // A node of the same name that begins anew, and turns out to be of another cluster.
            let stranger = world.open_as("node-1", &second);
            assert_eq!(stranger.instances(), []);
            assert!(!stranger.adopt_own().unwrap());
            assert_eq!(code(stranger.set_cluster(&cluster("cluster-2"))), ErrorCode::Conflict);
            drop(stranger);
            assert_eq!(bucket.keys(), before);
            release(&lives, &id, 3, 0..4).unwrap();
            assert_eq!(check_readable(&lives, &id, &SIZES).cold.count(), 4);
            drop(lives);
            // One of this cluster adopts what it made before, once.
            let again = world.open_as("node-1", &third);
            assert_eq!(again.instances(), []);
            again.set_cluster(&cluster("cluster-1")).unwrap();
            assert!(again.adopt_own().unwrap() && !again.adopt_own().unwrap());
            serve(&again);
            assert_eq!(again.inventory(&id).unwrap().unwrap().cold.count(), 4);
        });
    }

    #[test]
    fn a_beginning_whose_answer_was_lost_is_gone_on_with_and_leaves_no_second_replica() {
        for after in 0.. {
            let world = World::new(Engine::BucketInMemory);
            let bucket = world.bucket.clone().unwrap();
            let (id, second) = (instance(1), Folders::new());
            let first = world.open();
            import(&first, &id, &SIZES);
            to_cold(&first, &id, 2, UNITS).unwrap();
            let other = world.open_as("node-2", &second);
            other.adopt_from(&away("node-1")).unwrap();
            serve(&other);
            // The first finds out, and begins a replica of its own, with requests whose answers get lost.
            bucket.lose_answers(after);
            let mut copied = to_cold(&first, &id, 3, UNITS);
            let came = bucket.lose_answers(-1);
            if copied.is_err() {
                copied = to_cold(&first, &id, 4, UNITS);
            }
            copied.unwrap();
            release(&first, &id, 5, UNITS).unwrap();
            drop(first);
            world.lose_memory();
            let first = world.open();
            assert_eq!(first.adoption().damaged, [], "after {after}");
            assert!(check_readable(&first, &id, &SIZES).cold.is_full(), "after {after}");
            assert!(check_readable(&other, &id, &SIZES).cold.is_full(), "after {after}");
            if !came {
                assert!(after > 4, "each answer got lost once: {after}");
                break;
            }
        }
    }

    #[test]
    fn of_two_replicas_of_one_instance_the_fuller_one_is_adopted_and_the_other_kept() {
        worlds(|world, bucket| {
            let (id, second) = (instance(1), Folders::new());
            let earlier = world.open();
            import(&earlier, &id, &SIZES);
            to_cold(&earlier, &id, 2, 0..2).unwrap();
            // A later run of the same name, on another machine, takes it; the earlier one makes another.
            let later = world.open_as("node-1", &second);
            to_cold(&earlier, &id, 3, UNITS).unwrap();
            release(&earlier, &id, 3, UNITS).unwrap();
            drop((earlier, later));
            world.lose_memory();
            let store = world.open();
            assert!(check_readable(&store, &id, &SIZES).cold.is_full());
            assert_eq!(store.adoption().damaged.len(), 1, "{:?}", store.adoption());
            let records = bucket.keys().iter().filter(|key| key.ends_with("/records")).count();
            assert_eq!(records, 2, "nothing is removed");
        });
    }

    #[test]
    fn an_earlier_run_takes_nothing_from_a_later_one_of_its_name() {
        worlds(|world, _| {
            let (id, second) = (instance(1), Folders::new());
            let earlier = world.open();
            let later = world.open_as("node-1", &second);
            import(&later, &id, &SIZES);
            to_cold(&later, &id, 2, UNITS).unwrap();
            assert_eq!(earlier.adopt_from(&away("node-3")).unwrap(), []);
            release(&later, &id, 3, UNITS).unwrap();
            assert!(check_readable(&later, &id, &SIZES).cold.is_full());
        });
    }

    #[test]
    fn a_seal_during_which_a_later_run_starts_counts_wholly_or_not_at_all() {
        for after in 0.. {
            let world = World::new(Engine::BucketInMemory);
            let (id, second, third) = (instance(1), Folders::new(), Folders::new());
            let earlier = world.open();
            world.faults.hold_after(after);
            let sealing = std::thread::spawn({
                let (earlier, id) = (earlier.clone(), id.clone());
                move || try_import(&earlier, &id, &SIZES)
            });
            eventually("the seal hangs or ends", || world.faults.is_held() || sealing.is_finished());
            let held = world.faults.is_held();
            // The later run is not held: it looks at the bucket while the earlier one waits.
            let later = world.open_on(Some(&world.bucket.as_ref().unwrap().unhindered()), "node-1", &second);
            world.faults.release();
            let sealed = sealing.join().unwrap();
            drop(later);
            if sealed.is_ok() {
                // Whatever is copied then is found by the next run, with no memory left.
                to_cold(&earlier, &id, 2, UNITS).unwrap();
                release(&earlier, &id, 2, UNITS).unwrap();
                drop(earlier);
                let next = world.open_as("node-1", &third);
                assert!(check_readable(&next, &id, &SIZES).cold.is_full(), "after {after}");
            }
            if !held {
                assert!(after > 4, "each request of the seal was held once: {after}");
                break;
            }
        }
    }

    #[test]
    fn a_listing_of_what_is_not_there_ends_in_an_error() {
        let world = World::new(Engine::BucketInMemory);
        let bucket = world.bucket.clone().unwrap();
        let store = world.open();
        let id = instance(1);
        cold(&store, &id);
        drop(store);
        let key = bucket.keys().into_iter().find(|key| key.contains("/index/")).unwrap();
        bucket.hide(&key);
        let node = NodeId::new("node-1").unwrap();
        let tier = Arc::new(BucketTier::on(bucket.bucket(), None, &node, uuid::Uuid::now_v7()).unwrap());
        let error = tier.scan().unwrap_err().to_string();
        assert!(error.contains("lists it"), "{error}");
    }
}

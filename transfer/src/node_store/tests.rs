//! The node's store on real folders: imports, moves between the tiers, deletion, restarts, and what goes wrong.

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ballast_schemas::frame::{ReadRange, SourceRange};
use ballast_schemas::{ErrorCode, InstanceId, InstanceStanding, NodeInventory, SessionId};

use super::*;
use crate::cold::Progress;
use crate::layout::GroupLayout;
use crate::testing::*;

const NO_WAIT: Duration = Duration::ZERO;
pub(super) const SIZES: [u64; 5] = [10_000, 0, 4096, 3 << 20, 1];

/// Every unit that the inventory says is readable, read and compared.
pub(super) fn check_readable(store: &NodeStore, id: &InstanceId, sizes: &[u64]) -> NodeInventory {
    let inventory = store.inventory(id).unwrap().unwrap();
    let reader = store.reader(id).unwrap();
    for (unit, &bytes) in sizes.iter().enumerate() {
        let unit = unit as u32;
        let whole = ReadRange { unit, offset: 0, bytes };
        if inventory.hot.get(unit) {
            let hot = reader.hot(&whole).unwrap().expect("a hot unit is in memory");
            assert!(hot.bytes() == content(unit, bytes), "unit {unit} in memory");
        }
        if inventory.cold.get(unit) {
            let mut done = 0;
            while done < bytes {
                let part = (bytes - done).min(InstanceReader::COLD_BYTES_MAX);
                let pieces = reader.cold(&[ReadRange { unit, offset: done, bytes: part }]).unwrap();
                let wanted = &content(unit, bytes)[done as usize..(done + part) as usize];
                assert!(pieces[0].bytes() == wanted, "unit {unit} on disk");
                done += part;
            }
        }
    }
    inventory
}

pub(super) fn to_cold(
    store: &NodeStore,
    id: &InstanceId,
    fence: u64,
    units: std::ops::Range<u32>,
) -> Result<NodeInventory, StoreError> {
    store.copy_to_cold(&effect(id, fence, units), &Progress::default())
}

pub(super) fn release(
    store: &NodeStore,
    id: &InstanceId,
    fence: u64,
    units: std::ops::Range<u32>,
) -> Result<NodeInventory, StoreError> {
    store.release_memory(&effect(id, fence, units), NO_WAIT, &Progress::default())
}

pub(super) fn to_memory(
    store: &NodeStore,
    id: &InstanceId,
    fence: u64,
    units: std::ops::Range<u32>,
) -> Result<NodeInventory, StoreError> {
    store.copy_to_memory(&effect(id, fence, units), &Progress::default())
}

pub(super) fn delete(
    store: &NodeStore,
    id: &InstanceId,
    fence: u64,
    units: std::ops::Range<u32>,
) -> Result<Option<NodeInventory>, StoreError> {
    store.delete_units(&effect(id, fence, units), &Progress::default())
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path));
            files.push(path);
        } else {
            files.push(path);
        }
    }
    files
}

fn segment_on(folder: &Path, id: &InstanceId) -> PathBuf {
    folder.join("instances").join(crate::memory_tier::instance_folder(id)).join("segment-000000")
}

fn flip_byte(path: &Path, at: u64) {
    let mut file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.seek(SeekFrom::Start(at)).unwrap();
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte[0] ^ 1]).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn units_move_between_the_tiers_and_keep_their_bytes() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    let receipt = import(&store, &id, &SIZES);
    assert_eq!(receipt.layout_digest, GroupLayout::new(&SIZES).unwrap().digest());
    assert!(check_readable(&store, &id, &SIZES).hot.is_full());
    let used = store.usage().memory.used_bytes;

    let inventory = to_cold(&store, &id, 2, 0..5).unwrap();
    assert!(inventory.hot.is_full() && inventory.cold.is_full());
    let inventory = release(&store, &id, 2, 0..5).unwrap();
    assert!(inventory.hot.is_empty() && inventory.cold.is_full());
    assert_eq!(store.usage().memory.used_bytes, 0);
    check_readable(&store, &id, &SIZES);

    let inventory = to_memory(&store, &id, 3, 1..4).unwrap();
    assert_eq!(inventory.hot.iter().collect::<Vec<_>>(), [1, 2, 3]);
    check_readable(&store, &id, &SIZES);
    to_memory(&store, &id, 3, 0..5).unwrap();
    assert!(check_readable(&store, &id, &SIZES).hot.is_full());
    assert_eq!(store.usage().memory.used_bytes, used);
    let found = store.verify(&id, 0, &Progress::default()).unwrap();
    assert_eq!((found.memory.right, found.cold.right), (5, 5));
    assert!(found.memory.wrong.is_empty() && found.cold.wrong.is_empty());

    // Every effect can be repeated.
    to_cold(&store, &id, 3, 0..5).unwrap();
    to_memory(&store, &id, 3, 0..5).unwrap();
    release(&store, &id, 3, 0..5).unwrap();
    release(&store, &id, 3, 0..5).unwrap();
    assert_eq!(store.usage().cold.unwrap().used_bytes, used);
}

#[test]
fn a_restart_readopts_both_tiers_and_starts_a_new_incarnation() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    let receipt = import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..3).unwrap();
    release(&store, &id, 7, 0..1).unwrap();
    let before = store.inventory(&id).unwrap().unwrap();
    let usage = store.usage();
    drop(store);

    let store = folders.open();
    assert_eq!(store.adoption().instances, 1);
    let refused = store.inventory(&id).unwrap_err();
    assert!(matches!(refused, StoreError::NotServed { .. }), "nothing is served before the log was asked: {refused}");
    store.set_standing(&id, InstanceStanding::Known).unwrap();
    let after = check_readable(&store, &id, &SIZES);
    assert_ne!(after.incarnation, before.incarnation);
    assert_eq!(after, NodeInventory { incarnation: after.incarnation.clone(), ..before });
    assert_eq!(after.fence, at(7));
    assert_eq!(store.usage().memory, usage.memory);
    assert_eq!(store.usage().cold.unwrap().used_bytes, usage.cold.unwrap().used_bytes);
    assert_eq!(store.receipt(&id, &session()).unwrap().manifest, receipt.manifest);
    assert_eq!(store.reader(&id).unwrap().manifest(), document(&id, &SIZES).manifest);
}

#[test]
fn a_lost_memory_tier_leaves_what_was_cold_and_the_manifest() {
    let folders = Folders::new();
    let id = instance(1);
    let store = folders.open();
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..4).unwrap();
    drop(store);
    fs::remove_dir_all(folders.memory.path().join("instances")).unwrap();

    let store = folders.reopen();
    let inventory = check_readable(&store, &id, &SIZES);
    assert!(inventory.hot.is_empty() && inventory.manifest);
    assert_eq!(inventory.cold.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
    let refused = store.receipt(&id, &session()).unwrap_err();
    assert!(matches!(refused, StoreError::NotHere { unit: 4, .. }), "no receipt for bytes that are gone: {refused}");
    to_memory(&store, &id, 2, 0..4).unwrap();
    check_readable(&store, &id, &SIZES);
}

#[test]
fn an_import_that_never_ended_is_discarded_at_restart() {
    let folders = Folders::new();
    let id = instance(1);
    let store = folders.open();
    store.allocate(&id, &session(), &SIZES).unwrap();
    store.write(&id, &session(), 0, 0, &content(0, SIZES[0])).unwrap();
    drop(store);
    let store = folders.open();
    assert_eq!(store.adoption().discarded_imports, 1);
    assert_eq!((store.usage().memory.used_bytes, store.instances().len()), (0, 0));
    store.verify_empty(&id).unwrap();
}

#[test]
fn wrong_bytes_are_not_sealed_and_can_be_written_again() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    store.allocate(&id, &session(), &SIZES).unwrap();
    for (unit, &bytes) in SIZES.iter().enumerate().filter(|(unit, _)| *unit != 2) {
        store.write(&id, &session(), unit as u32, 0, &content(unit as u32, bytes)).unwrap();
    }
    let StoreError::Checksum { units, .. } = seal(&store, &id, &SIZES).unwrap_err() else { panic!("a missing unit") };
    assert_eq!(units.iter().map(|m| m.unit).collect::<Vec<_>>(), [2]);
    store.write(&id, &session(), 2, 0, &content(9, SIZES[2])).unwrap();
    assert_eq!(seal(&store, &id, &SIZES).unwrap_err().code(), ErrorCode::ChecksumMismatch);
    store.write(&id, &session(), 2, 0, &content(2, SIZES[2])).unwrap();
    let receipt = seal(&store, &id, &SIZES).unwrap();
    assert_eq!(seal(&store, &id, &SIZES).unwrap(), receipt, "a seal can be repeated");
    let late = store.write(&id, &session(), 2, 0, &content(2, SIZES[2])).unwrap_err();
    assert!(matches!(late, StoreError::Sealed { .. }), "{late}");
    let mut other = document(&id, &SIZES);
    other.reference.sha256 = ballast_schemas::Digest::of(b"another");
    let refused = store.seal_document(&id, &session(), other).unwrap_err();
    assert!(matches!(refused, StoreError::OtherManifest { .. }), "{refused}");
}

#[test]
fn bytes_may_come_in_any_order_and_from_several_writers() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    store.allocate(&id, &session(), &SIZES).unwrap();
    let whole = content(3, SIZES[3]);
    let half = whole.len() / 2;
    std::thread::scope(|scope| {
        for (start, end) in [(0, half), (half, whole.len())] {
            let (store, id, whole) = (&store, &id, &whole);
            scope.spawn(move || {
                for at in (start..end).step_by(50_000) {
                    let piece = &whole[at..end.min(at + 50_000)];
                    store.write(id, &session(), 3, at as u64, piece).unwrap();
                }
            });
        }
    });
    let first = content(0, SIZES[0]);
    store.write(&id, &session(), 0, 5000, &first[5000..]).unwrap();
    store.write(&id, &session(), 0, 0, &first[..5000]).unwrap();
    store.write(&id, &session(), 2, 0, &content(2, SIZES[2])).unwrap();
    store.write(&id, &session(), 4, 0, &content(4, SIZES[4])).unwrap();
    seal(&store, &id, &SIZES).unwrap();
    check_readable(&store, &id, &SIZES);
}

#[test]
fn a_writer_that_comes_back_over_checksummed_bytes_is_not_believed() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    store.allocate(&id, &session(), &[8192]).unwrap();
    let right = content(0, 8192);
    store.write(&id, &session(), 0, 0, &right[..4096]).unwrap();
    store.write(&id, &session(), 0, 100, b"spoiled").unwrap();
    store.write(&id, &session(), 0, 4096, &right[4096..]).unwrap();
    assert_eq!(seal(&store, &id, &[8192]).unwrap_err().code(), ErrorCode::ChecksumMismatch);
    store.write(&id, &session(), 0, 0, &right[..4096]).unwrap();
    store.write(&id, &session(), 0, 100, &right[4096..]).unwrap();
    let misplaced = seal(&store, &id, &[8192]).unwrap_err();
    assert_eq!(misplaced.code(), ErrorCode::ChecksumMismatch, "the right bytes at the wrong place: {misplaced}");
    store.write(&id, &session(), 0, 0, &right).unwrap();
    seal(&store, &id, &[8192]).unwrap();
}

#[test]
fn a_file_is_copied_into_units_and_a_pipe_or_a_short_file_is_refused() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    store.allocate(&id, &session(), &SIZES).unwrap();
    let mut source = tempfile::tempfile().unwrap();
    let mut ranges = Vec::new();
    source.write_all(b"header").unwrap();
    let mut source_offset = 6;
    for (unit, &bytes) in SIZES.iter().enumerate() {
        source.write_all(&content(unit as u32, bytes)).unwrap();
        ranges.push(SourceRange { source_offset, unit: unit as u32, unit_offset: 0, bytes });
        source_offset += bytes;
    }
    let progress = Progress::default();
    let copied = store.write_from_fd(&id, &session(), None, source.as_fd(), &ranges, &progress).unwrap();
    assert_eq!((copied, progress.bytes()), (SIZES.iter().sum(), SIZES.iter().sum()));

    let past = [SourceRange { source_offset: source_offset - 1, unit: 0, unit_offset: 0, bytes: 2 }];
    let short = store.write_from_fd(&id, &session(), None, source.as_fd(), &past, &progress).unwrap_err();
    assert_eq!(short.code(), ErrorCode::InvalidArgument, "{short}");
    let (pipe, _other) = std::io::pipe().unwrap();
    let refused = store.write_from_fd(&id, &session(), None, pipe.as_fd(), &past, &progress).unwrap_err();
    assert!(refused.to_string().contains("not a regular file"), "{refused}");
    for wrong in [
        SourceRange { source_offset: 0, unit: 5, unit_offset: 0, bytes: 1 },
        SourceRange { source_offset: 0, unit: 2, unit_offset: 4096, bytes: 1 },
        SourceRange { source_offset: 0, unit: 2, unit_offset: u64::MAX, bytes: 2 },
    ] {
        let refused = store.write_from_fd(&id, &session(), None, source.as_fd(), &[wrong], &progress).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::InvalidArgument, "{refused}");
    }
    seal(&store, &id, &SIZES).unwrap();
    check_readable(&store, &id, &SIZES);
}

#[test]
fn room_is_reserved_before_any_byte_moves() {
    let folders = Folders::new();
    let store = folders.open();
    let first = store.allocate(&instance(1), &session(), &[200 << 20]).unwrap();
    assert_eq!((first.reserved_bytes, first.sealed), (200 << 20, false));
    assert_eq!(store.allocate(&instance(1), &session(), &[200 << 20]).unwrap(), first, "again is the same");
    let refused = store.allocate(&instance(2), &session(), &[100 << 20]).unwrap_err();
    let error = refused.to_error();
    assert_eq!(error.code, ErrorCode::CapacityExhausted);
    assert_eq!(error.details["asked_bytes"], 100 << 20);
    assert_eq!(error.details["limit_bytes"], 256 << 20);
    assert!(error.message.contains("58.7 MB are free"), "{error}");
    let other = SessionId::new("session-2").unwrap();
    let refused = store.allocate(&instance(1), &other, &[200 << 20]).unwrap_err();
    assert!(matches!(refused, StoreError::OtherSession { .. }), "{refused}");
    let refused = store.allocate(&instance(1), &session(), &[1]).unwrap_err();
    assert!(matches!(refused, StoreError::OtherLayout { .. }), "{refused}");
    store.delete_instance(&instance(1), at(5), &Progress::default()).unwrap();
    store.allocate(&instance(2), &session(), &[100 << 20]).unwrap();
}

#[test]
fn effects_with_a_lower_fence_are_refused_also_after_a_restart() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 9, 0..5).unwrap();
    drop(store);
    let store = folders.reopen();
    let refusals = [
        store.raise_fence(&id, at(8)).unwrap_err(),
        to_cold(&store, &id, 8, 0..5).unwrap_err(),
        to_memory(&store, &id, 8, 0..5).unwrap_err(),
        release(&store, &id, 8, 0..5).unwrap_err(),
        delete(&store, &id, 8, 0..5).unwrap_err(),
        store.delete_instance(&id, at(8), &Progress::default()).unwrap_err(),
    ];
    for refusal in refusals {
        assert!(matches!(refusal, StoreError::Fence(_)), "{refusal}");
        assert_eq!(refusal.to_error().details["reason"], "FENCED");
    }
    assert!(check_readable(&store, &id, &SIZES).hot.is_full());
    assert_eq!(store.raise_fence(&id, at(12)).unwrap().fence, at(12));
    drop(store);
    let store = folders.reopen();
    assert!(matches!(to_cold(&store, &id, 11, 0..5), Err(StoreError::Fence(_))), "a raised fence is durable by itself");
    assert_eq!(store.highest_seen(), at(12));
}

#[test]
fn what_has_no_copy_on_disk_is_not_released_nor_promoted() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..2).unwrap();
    let refused = release(&store, &id, 2, 0..5).unwrap_err();
    assert!(matches!(refused, StoreError::NoWitness(crate::guard::NoWitness { unit: 2 })), "{refused}");
    assert!(check_readable(&store, &id, &SIZES).hot.is_full(), "nothing is released of a refused batch");

    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let memory_only = NodeStore::open(&options(memory.path(), None)).unwrap();
    import(&memory_only, &id, &SIZES);
    let refused = to_cold(&memory_only, &id, 2, 0..1).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::PolicyUnsatisfiable, "{refused}");
}

#[test]
fn a_flipped_byte_on_disk_is_noticed_before_memory_goes() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..5).unwrap();
    let offset = GroupLayout::new(&SIZES).unwrap().extent(3).unwrap().offset;
    flip_byte(&segment_on(folders.cold.path(), &id), offset + 1_000_000);
    let refused = release(&store, &id, 2, 0..5).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::ChecksumMismatch, "{refused}");
    let inventory = check_readable(&store, &id, &SIZES);
    assert!(inventory.hot.is_full());
    assert_eq!(inventory.cold.iter().collect::<Vec<_>>(), [0, 1, 2, 4], "the wrong copy no longer counts");
    to_cold(&store, &id, 2, 0..5).unwrap();
    release(&store, &id, 2, 0..5).unwrap();
    assert!(check_readable(&store, &id, &SIZES).cold.is_full());
}

#[test]
fn a_flipped_byte_on_disk_is_noticed_at_promotion_and_never_handed_out() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..5).unwrap();
    release(&store, &id, 2, 0..5).unwrap();
    flip_byte(&segment_on(folders.cold.path(), &id), 17);
    let refused = to_memory(&store, &id, 3, 0..5).unwrap_err();
    let StoreError::Checksum { units, .. } = &refused else { panic!("{refused}") };
    assert_eq!(units.iter().map(|mismatch| mismatch.unit).collect::<Vec<_>>(), [0]);
    let inventory = check_readable(&store, &id, &SIZES);
    assert_eq!(inventory.hot.iter().collect::<Vec<_>>(), [1, 2, 3, 4], "the others are promoted");
    assert!(!inventory.cold.get(0));
    let gone = to_memory(&store, &id, 3, 0..1).unwrap_err();
    assert!(matches!(gone, StoreError::NotHere { unit: 0, .. }), "{gone}");
    drop(store);
    let store = folders.reopen();
    assert_eq!(store.adoption().wrong_units, 0, "no record ever spoke of the wrong bytes");
    assert_eq!(check_readable(&store, &id, &SIZES).hot.count(), 4);
}

#[test]
fn a_segment_that_vanished_from_disk_is_noticed() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..5).unwrap();
    let segment = segment_on(folders.cold.path(), &id);
    fs::File::options().write(true).open(&segment).unwrap().set_len(4096).unwrap();
    let refused = release(&store, &id, 2, 0..5).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::ChecksumMismatch, "{refused}");
    assert!(check_readable(&store, &id, &SIZES).hot.is_full());
    drop(store);
    fs::remove_file(&segment).unwrap();
    let store = folders.reopen();
    let inventory = check_readable(&store, &id, &SIZES);
    assert!(inventory.hot.is_full() && inventory.cold.count() == 0);
}

#[test]
fn a_flipped_byte_in_memory_is_noticed_at_adoption_and_on_a_scrub() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..1).unwrap();
    drop(store);
    flip_byte(&segment_on(folders.memory.path(), &id), 0);
    let store = folders.reopen();
    assert_eq!(store.adoption().wrong_units, 1);
    let inventory = check_readable(&store, &id, &SIZES);
    assert_eq!(inventory.hot.iter().collect::<Vec<_>>(), [1, 2, 3, 4]);
    to_memory(&store, &id, 2, 0..1).unwrap();
    assert!(check_readable(&store, &id, &SIZES).hot.is_full(), "and repaired from disk");

    flip_byte(&segment_on(folders.memory.path(), &id), 12_288);
    let found = store.verify(&id, 0, &Progress::default()).unwrap();
    assert_eq!((found.memory.wrong, found.cold.wrong, found.next), (vec![2], vec![], None));
    let refused = to_cold(&store, &id, 2, 2..3).unwrap_err();
    assert!(matches!(refused, StoreError::NotHere { unit: 2, .. }), "{refused}");
}

#[test]
fn a_unit_is_not_freed_while_it_is_read_or_mapped() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..5).unwrap();
    let reader = store.reader(&id).unwrap();

    let read = reader.hot(&ReadRange { unit: 0, offset: 10, bytes: 20 }).unwrap().unwrap();
    let busy = release(&store, &id, 2, 0..5).unwrap_err();
    assert!(matches!(busy, StoreError::Busy { units: 1, .. }), "{busy}");
    assert!(read.bytes() == &content(0, SIZES[0])[10..30]);
    assert!(reader.hot(&ReadRange { unit: 0, offset: 0, bytes: 1 }).unwrap().is_none(), "nobody new gets it");
    drop(read);
    release(&store, &id, 2, 0..5).unwrap();

    to_memory(&store, &id, 3, 0..5).unwrap();
    let granted = reader.grant_segments(true, true).unwrap();
    assert!(granted.holdings.hot.is_full());
    assert_eq!(granted.grants.len(), 2, "one segment, on each tier");
    let busy = release(&store, &id, 3, 0..5).unwrap_err();
    assert!(matches!(busy, StoreError::Busy { .. }), "{busy}");
    assert!(store.inventory(&id).unwrap().unwrap().hot.is_empty());
    assert!(store.usage().memory.used_bytes > 0, "still charged");
    // A migration that turned round takes back what is still there without reading the disk.
    to_memory(&store, &id, 4, 0..5).unwrap();
    assert!(check_readable(&store, &id, &SIZES).hot.is_full());
    assert!(release(&store, &id, 4, 0..5).is_err());
    drop(granted);
    release(&store, &id, 4, 0..5).unwrap();
    assert_eq!(store.usage().memory.used_bytes, 0);
}

#[test]
fn a_guard_outlives_the_node() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..5).unwrap();
    let granted = store.reader(&id).unwrap().grant_segments(true, false).unwrap();
    assert!(release(&store, &id, 2, 0..5).is_err());
    drop(store);
    let store = folders.reopen();
    assert!(store.usage().memory.used_bytes > 0, "what is mapped is still charged");
    assert!(matches!(release(&store, &id, 2, 0..5), Err(StoreError::Busy { .. })));
    drop(granted);
    release(&store, &id, 2, 0..5).unwrap();
    assert_eq!(store.usage().memory.used_bytes, 0);
}

#[test]
fn deletion_leaves_no_byte_and_the_instance_can_not_come_back() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..4).unwrap();
    release(&store, &id, 2, 2..3).unwrap();
    let inventory = delete(&store, &id, 5, 0..2).unwrap().unwrap();
    assert!(!inventory.manifest);
    assert!(matches!(store.reader(&id), Err(StoreError::Deleting { .. })));
    assert!(matches!(to_memory(&store, &id, 5, 2..3), Err(StoreError::Deleting { .. })));
    assert!(matches!(store.verify_empty(&id), Err(StoreError::NotEmpty { .. })));
    delete(&store, &id, 5, 2..5).unwrap();
    let usage = store.usage();
    assert_eq!((usage.memory.used_bytes, usage.cold.unwrap().used_bytes), (0, 0));
    store.delete_instance(&id, at(5), &Progress::default()).unwrap();
    store.delete_instance(&id, at(5), &Progress::default()).unwrap();
    assert!(delete(&store, &id, 5, 0..5).unwrap().is_none());
    store.verify_empty(&id).unwrap();
    for folder in [folders.memory.path(), folders.cold.path()] {
        assert_eq!(files_below(&folder.join("instances")), Vec::<PathBuf>::new());
    }
    assert!(matches!(store.allocate(&id, &session(), &SIZES), Err(StoreError::Deleted { .. })));
    assert!(matches!(store.reader(&id), Err(StoreError::Deleted { .. })));
}

#[test]
fn deletion_under_a_mapping_leaves_the_view_valid_and_the_bytes_charged() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..5).unwrap();
    let granted = store.reader(&id).unwrap().grant_segments(true, true).unwrap();
    let (grants, holdings) = (granted.grants, granted.holdings);
    let layout = Arc::new(GroupLayout::new(&SIZES).unwrap());
    let mapped = crate::mapped::MappedInstance::new(id.clone(), layout, grants, holdings).unwrap();
    for units in [0..2, 2..5] {
        delete(&store, &id, 5, units).unwrap();
    }
    store.delete_instance(&id, at(5), &Progress::default()).unwrap();
    store.verify_empty(&id).unwrap();
    for (unit, &bytes) in SIZES.iter().enumerate() {
        assert!(mapped.view(unit as u32).unwrap() == content(unit as u32, bytes), "unit {unit}");
    }
    let usage = store.usage();
    assert!(usage.memory.used_bytes > 0 && usage.lingering_bytes == usage.memory.used_bytes);
    drop(mapped);
    assert_eq!(store.usage().memory.used_bytes, 0);
}

#[test]
fn an_abandoned_import_is_deleted_like_anything_else() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    store.allocate(&id, &session(), &SIZES).unwrap();
    store.write(&id, &session(), 3, 0, &content(3, SIZES[3])).unwrap();
    delete(&store, &id, 5, 0..5).unwrap();
    let late = store.write(&id, &session(), 3, 0, &content(3, SIZES[3])).unwrap_err();
    assert!(matches!(late, StoreError::Deleting { .. }), "{late}");
    assert!(matches!(seal(&store, &id, &SIZES), Err(StoreError::Deleting { .. })));
    store.delete_instance(&id, at(5), &Progress::default()).unwrap();
    assert_eq!(store.usage().memory.used_bytes, 0);
    assert_eq!(files_below(&folders.memory.path().join("instances")), Vec::<PathBuf>::new());
}

#[test]
fn the_log_decides_what_adopted_bytes_are_for() {
    let folders = Folders::new();
    let store = folders.open();
    for number in 1..=3 {
        import(&store, &instance(number), &SIZES);
    }
    drop(store);
    let store = folders.open();
    assert_eq!(store.usage().quarantined, 3);
    store.set_standing(&instance(1), InstanceStanding::Known).unwrap();
    store.set_standing(&instance(2), InstanceStanding::Unknown).unwrap();
    store.set_standing(&instance(3), InstanceStanding::Deleted).unwrap();
    check_readable(&store, &instance(1), &SIZES);
    let kept = store.reader(&instance(2)).unwrap_err();
    assert!(kept.to_string().contains("the log does not know it"), "{kept}");
    assert!(matches!(
        store.delete_instance(&instance(2), at(9), &Progress::default()),
        Err(StoreError::NotServed { .. })
    ));
    store.verify_empty(&instance(3)).unwrap();
    assert_eq!((store.usage().instances, store.usage().quarantined), (2, 1));
    assert!(matches!(store.allocate(&instance(3), &session(), &SIZES), Err(StoreError::Deleted { .. })));

    let cluster = ClusterId::new("cluster-a").unwrap();
    store.set_cluster(&cluster).unwrap();
    let other = store.set_cluster(&ClusterId::new("cluster-b").unwrap()).unwrap_err();
    assert!(matches!(other, StoreError::OtherCluster { .. }), "{other}");
    drop(store);
    assert_eq!(folders.open().cluster(), Some(cluster));
}

#[test]
fn a_damaged_record_keeps_the_bytes_and_stops_nobody_else() {
    let folders = Folders::new();
    let store = folders.open();
    import(&store, &instance(1), &SIZES);
    import(&store, &instance(2), &SIZES);
    to_cold(&store, &instance(1), 2, 0..5).unwrap();
    drop(store);
    let name = crate::memory_tier::instance_folder(&instance(1));
    flip_byte(&folders.memory.path().join("instances").join(&name).join("state"), 12);
    let store = folders.reopen();
    assert_eq!(store.adoption().damaged.len(), 1);
    assert!(store.adoption().damaged[0].reason.contains("checksum"), "{:?}", store.adoption());
    check_readable(&store, &instance(2), &SIZES);
}

#[test]
fn twenty_thousand_units_are_a_handful_of_files() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    let sizes: Vec<u64> = (0..20_000).map(|unit| 64 + unit % 5000).collect();
    import(&store, &id, &sizes);
    for first in (0..20_000).step_by(5000) {
        to_cold(&store, &id, 2, first..first + 5000).unwrap();
        release(&store, &id, 2, first..first + 5000).unwrap();
    }
    assert!(files_below(&folders.cold.path().join("instances")).len() < 10);
    assert!(files_below(&folders.memory.path().join("instances")).len() < 10);
    // Every other unit: the worst case for runs.
    let odd: Vec<_> = (0..10_000).map(|n| ballast_schemas::UnitRange { start: n * 2 + 1, end: n * 2 + 2 }).collect();
    let effect_odd = ballast_schemas::UnitEffect { instance: id.clone(), fence: at(3), units: odd };
    let inventory = store.copy_to_memory(&effect_odd, &Progress::default()).unwrap();
    assert_eq!(inventory.hot.count(), 10_000);
    check_readable(&store, &id, &sizes);
    delete(&store, &id, 4, 0..20_000).unwrap();
    store.delete_instance(&id, at(4), &Progress::default()).unwrap();
    assert_eq!(store.usage().memory.used_bytes, 0);
}

#[test]
fn a_raised_fence_stops_a_copy_that_is_under_way() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    let sizes = vec![1 << 20; 64];
    import(&store, &id, &sizes);
    std::thread::scope(|scope| {
        let copy = scope.spawn(|| to_cold(&store, &id, 2, 0..64));
        store.raise_fence(&id, at(3)).unwrap();
        // It was refused, stopped, or had ended before: in no case does it go on under the old fence.
        let ended = copy.join().unwrap();
        assert!(ended.is_ok() || matches!(ended, Err(StoreError::Fence(_))), "{ended:?}");
    });
    assert!(check_readable(&store, &id, &sizes).hot.is_full());
    to_cold(&store, &id, 3, 0..64).unwrap();
    assert!(check_readable(&store, &id, &sizes).cold.is_full());
}

#[test]
fn a_copy_on_disk_that_was_lost_is_remembered_until_it_is_made_again() {
    let folders = Folders::new();
    let store = folders.open();
    let id = instance(1);
    import(&store, &id, &SIZES);
    to_cold(&store, &id, 2, 0..5).unwrap();
    flip_byte(&segment_on(folders.cold.path(), &id), 12_288);
    let found = store.verify(&id, 0, &Progress::default()).unwrap();
    assert_eq!((found.memory.right, found.cold.right, found.cold.wrong), (5, 4, vec![2]));
    drop(store);
    let store = folders.reopen();
    let inventory = store.inventory(&id).unwrap().unwrap();
    assert_eq!((inventory.cold.get(2), inventory.cold_lost.iter().collect::<Vec<_>>()), (false, vec![2]));
    let inventory = to_cold(&store, &id, 3, 2..3).unwrap();
    assert!(inventory.cold.is_full() && inventory.cold_lost.is_empty());

    // All of a file that is cut off, found at the next start.
    drop(store);
    let segment = segment_on(folders.cold.path(), &id);
    std::fs::OpenOptions::new().write(true).open(&segment).unwrap().set_len(4_096).unwrap();
    let store = folders.reopen();
    let inventory = store.inventory(&id).unwrap().unwrap();
    assert!(inventory.cold.is_empty() && inventory.cold_lost.is_full() && inventory.hot.is_full());
    drop(store);
    let store = folders.reopen();
    assert!(store.inventory(&id).unwrap().unwrap().cold_lost.is_full(), "written down");
    let inventory = to_cold(&store, &id, 4, 0..5).unwrap();
    assert!(inventory.cold.is_full() && inventory.cold_lost.is_empty(), "into the same file");
}

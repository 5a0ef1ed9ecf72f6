//! Several participants write into one import: who sends what, and what is refused.

use ballast_schemas::frame::OfferedFragment;
use ballast_schemas::{ErrorCode, ParticipantId, TokenPart};

use super::tests::{SIZES, check_readable};
use super::*;
use crate::checksum::checksum;
use crate::cold::Progress;
use crate::testing::*;

/// Where the first unit is cut in two.
const CUT: u64 = 5120;

fn rank(n: u32, epoch: u64) -> TokenPart {
    TokenPart { participant: ParticipantId::new(format!("rank{n}")).unwrap(), epoch }
}

fn bytes_of(unit: u32, range: std::ops::Range<u64>) -> Vec<u8> {
    content(unit, SIZES[unit as usize])[range.start as usize..range.end as usize].to_vec()
}

fn fragment(unit: u32, range: std::ops::Range<u64>) -> OfferedFragment {
    let crc64 = checksum(&bytes_of(unit, range.clone()));
    OfferedFragment { unit, offset: range.start, bytes: range.end - range.start, crc64 }
}

fn offer(
    store: &NodeStore,
    id: &InstanceId,
    part: &TokenPart,
    own: &[OfferedFragment],
) -> Result<Vec<u32>, StoreError> {
    store.offer(id, &session(), part, own).map(|wanted| wanted.iter().collect())
}

/// Sends fragments from the right content.
fn send(store: &NodeStore, id: &InstanceId, part: &TokenPart, own: &[OfferedFragment]) -> Result<(), StoreError> {
    own.iter().try_for_each(|own| {
        let bytes = bytes_of(own.unit, own.offset..own.offset + own.bytes);
        store.write_as(id, &session(), Some(part), own.unit, own.offset, &bytes)
    })
}

fn opened(folders: &Folders) -> (Arc<NodeStore>, InstanceId) {
    let (store, id) = (folders.open(), instance(1));
    store.allocate(&id, &session(), &SIZES).unwrap();
    (store, id)
}

/// The fragments of two ranks; both hold the last one.
fn halves() -> [Vec<OfferedFragment>; 2] {
    let shared = fragment(4, 0..1);
    [
        vec![fragment(0, 0..CUT), fragment(2, 0..4096), shared],
        vec![fragment(0, CUT..SIZES[0]), fragment(3, 0..3 << 20), shared],
    ]
}

#[test]
fn two_ranks_write_their_fragments_and_what_both_hold_is_sent_once() {
    let folders = Folders::new();
    let (store, id) = opened(&folders);
    let [first, second] = halves();
    assert_eq!(offer(&store, &id, &rank(0, 1), &first).unwrap(), [0, 1, 2]);
    assert_eq!(offer(&store, &id, &rank(1, 1), &second).unwrap(), [0, 1], "the other rank brings the last one");
    send(&store, &id, &rank(0, 1), &first).unwrap();
    send(&store, &id, &rank(1, 1), &second[..2]).unwrap();
    let listed = store.offers(&id, &session(), false).unwrap();
    assert!(listed.fragments.iter().all(|own| !own.held), "nothing counts before it was compared");
    for (part, own) in [(rank(0, 1), &first), (rank(1, 1), &second)] {
        assert!(offer(&store, &id, &part, own).unwrap().is_empty(), "all of it is here");
    }
    let listed = store.offers(&id, &session(), false).unwrap();
    assert_eq!(listed.participants, [rank(0, 1).participant, rank(1, 1).participant]);
    assert_eq!(listed.fragments.len(), 5);
    assert!(listed.fragments.iter().all(|own| own.held && own.differs.is_none()));
    assert!(store.offers(&id, &session(), true).unwrap().fragments.is_empty());
    seal(&store, &id, &SIZES).unwrap();
    assert!(check_readable(&store, &id, &SIZES).hot.is_full());
    // A late run of a rank finds its bytes there, and can not change them.
    assert!(offer(&store, &id, &rank(1, 2), &second).unwrap().is_empty());
    let other = OfferedFragment { crc64: 7, ..second[0] };
    let refused = offer(&store, &id, &rank(1, 2), &[other]).unwrap_err().to_error();
    assert_eq!((refused.code, refused.details["offset"].as_u64()), (ErrorCode::Conflict, Some(CUT)), "{refused}");
    // And an earlier run is still refused, as is whoever asks what was offered: nothing is left of that.
    let refused = offer(&store, &id, &rank(1, 1), &second).unwrap_err();
    assert!(matches!(refused, StoreError::Superseded { .. }), "{refused}");
    for refused in [
        store.offers(&id, &session(), false).map(drop),
        store.write(&id, &session(), 0, 0, b"x"),
        send(&store, &id, &rank(1, 2), &second[..1]),
    ] {
        assert!(matches!(refused.unwrap_err(), StoreError::Sealed { .. }));
    }
}

#[test]
fn different_bytes_for_one_fragment_name_both_participants_until_they_agree() {
    let folders = Folders::new();
    let (store, id) = opened(&folders);
    let [first, _] = halves();
    offer(&store, &id, &rank(0, 1), &first).unwrap();
    send(&store, &id, &rank(0, 1), &first).unwrap();
    offer(&store, &id, &rank(0, 1), &first).unwrap();
    let other = OfferedFragment { crc64: 7, ..first[2] };
    let also = fragment(3, 0..3 << 20);
    let refused = offer(&store, &id, &rank(1, 1), &[other, also]).unwrap_err().to_error();
    assert_eq!(refused.code, ErrorCode::Conflict);
    assert_eq!(refused.details["participants"], serde_json::json!(["rank0", "rank1"]));
    assert_eq!((refused.details["unit"].as_u64(), refused.details["offset"].as_u64()), (Some(4), Some(0)));
    let conflicts = store.offers(&id, &session(), true).unwrap();
    assert_eq!((conflicts.fragments.len(), conflicts.fragments[0].differs), (1, Some(1)));
    assert!(conflicts.fragments[0].held, "what the first one has sent is unharmed");
    // The other fragment of the same request was noted all the same.
    assert_eq!(offer(&store, &id, &rank(1, 1), &[also]).unwrap(), [0]);
    assert!(offer(&store, &id, &rank(1, 2), &[first[2]]).unwrap().is_empty());
    assert!(store.offers(&id, &session(), true).unwrap().fragments.is_empty());
}

#[test]
fn a_run_that_was_replaced_is_refused_and_the_next_one_sends_only_what_is_missing() {
    let folders = Folders::new();
    let (store, id) = opened(&folders);
    let [first, _] = halves();
    offer(&store, &id, &rank(0, 1), &first).unwrap();
    send(&store, &id, &rank(0, 1), &first[..1]).unwrap();
    // Half of the second fragment, and then the process is killed.
    store.write_as(&id, &session(), Some(&rank(0, 1)), 2, 0, &bytes_of(2, 0..1000)).unwrap();
    assert_eq!(offer(&store, &id, &rank(0, 2), &first).unwrap(), [1, 2]);
    for refused in [send(&store, &id, &rank(0, 1), &first[1..2]), offer(&store, &id, &rank(0, 1), &first).map(drop)] {
        let refused = refused.unwrap_err().to_error();
        assert_eq!((refused.code, refused.details["epoch"].as_u64()), (ErrorCode::Conflict, Some(2)));
    }
    send(&store, &id, &rank(0, 2), &first[1..]).unwrap();
    assert!(offer(&store, &id, &rank(0, 2), &first).unwrap().is_empty());
}

#[test]
fn nobody_writes_what_it_does_not_bring() {
    let folders = Folders::new();
    let (store, id) = opened(&folders);
    let [first, second] = halves();
    offer(&store, &id, &rank(0, 1), &first).unwrap();
    offer(&store, &id, &rank(1, 1), &second).unwrap();
    for wrong in [&first[0], &second[2], &fragment(3, 0..10)] {
        let refused = send(&store, &id, &rank(1, 1), &[*wrong]);
        if wrong.unit == 3 {
            refused.unwrap();
        } else {
            assert_eq!(refused.unwrap_err().code(), ErrorCode::InvalidArgument);
        }
    }
    let past = store.write_as(&id, &session(), Some(&rank(0, 1)), 0, CUT - 1, &[0; 2]);
    assert_eq!(past.unwrap_err().code(), ErrorCode::InvalidArgument);
    assert_eq!(store.write(&id, &session(), 0, 0, b"x").unwrap_err().code(), ErrorCode::InvalidArgument);
    // Other cuts of the same unit, and what does not fit or is nothing.
    let refused = offer(&store, &id, &rank(1, 1), &[OfferedFragment { bytes: CUT - 1, ..first[0] }]).unwrap_err();
    assert_eq!(refused.to_error().details["participants"], serde_json::json!(["rank0", "rank1"]), "{refused}");
    for wrong in [
        OfferedFragment { unit: 0, offset: 100, bytes: 10, crc64: 0 },
        OfferedFragment { unit: 0, offset: CUT, bytes: SIZES[0], crc64: 0 },
        OfferedFragment { unit: 9, offset: 0, bytes: 1, crc64: 0 },
        OfferedFragment { unit: 1, offset: 0, bytes: 0, crc64: 0 },
    ] {
        let refused = offer(&store, &id, &rank(1, 1), &[wrong]).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::InvalidArgument, "{refused}");
    }
}

#[test]
fn bytes_that_arrive_otherwise_than_offered_are_wanted_again_and_never_sealed() {
    let folders = Folders::new();
    let (store, id) = opened(&folders);
    let [first, second] = halves();
    for (part, own) in [(rank(0, 1), &first), (rank(1, 1), &second)] {
        offer(&store, &id, &part, own).unwrap();
        send(&store, &id, &part, &own[..2]).unwrap();
    }
    send(&store, &id, &rank(0, 1), &first[2..]).unwrap();
    for damage in [(0, CUT + 9), (2, 0)] {
        let part = if damage.0 == 0 { rank(1, 1) } else { rank(0, 1) };
        store.write_as(&id, &session(), Some(&part), damage.0, damage.1, b"!").unwrap();
    }
    assert_eq!(offer(&store, &id, &rank(0, 1), &first).unwrap(), [1]);
    assert_eq!(offer(&store, &id, &rank(1, 1), &second).unwrap(), [0]);
    let refused = seal(&store, &id, &SIZES).unwrap_err();
    assert!(matches!(&refused, StoreError::Checksum { units, .. } if units.len() == 2), "{refused}");
    send(&store, &id, &rank(0, 1), &first[1..2]).unwrap();
    send(&store, &id, &rank(1, 1), &second[..1]).unwrap();
    seal(&store, &id, &SIZES).unwrap();
    check_readable(&store, &id, &SIZES);
}

#[test]
fn reading_back_what_was_half_sent_takes_no_room() {
    let folders = Folders::new();
    let (store, id) = (folders.open(), instance(1));
    let bytes = 66 << 20;
    store.allocate(&id, &session(), &[bytes]).unwrap();
    let own = OfferedFragment { unit: 0, offset: 0, bytes, crc64: 7 };
    assert_eq!(offer(&store, &id, &rank(0, 1), &[own]).unwrap(), [0]);
    store.write_as(&id, &session(), Some(&rank(0, 1)), 0, 0, b"the first bytes").unwrap();
    let taken = || store.served(&id).unwrap().memory.get(0).unwrap().taken_bytes();
    let before = taken();
    assert!(before < bytes, "the room of the last block was not taken yet");
    assert_eq!(offer(&store, &id, &rank(0, 2), &[own]).unwrap(), [0]);
    assert_eq!(taken(), before);
}

#[test]
fn a_write_that_failed_before_there_was_a_segment_is_asked_for_again() {
    let folders = Folders::new();
    let (store, id) = opened(&folders);
    let own = fragment(3, 0..3 << 20);
    offer(&store, &id, &rank(0, 1), &[own]).unwrap();
    let served = store.served(&id).unwrap();
    drop(super::offers::PartWrite::begin(&served, Some(&rank(0, 1)), 3, 0, 10).unwrap());
    assert_eq!(offer(&store, &id, &rank(0, 1), &[own]).unwrap(), [0]);
    send(&store, &id, &rank(0, 1), &[own]).unwrap();
    assert!(offer(&store, &id, &rank(0, 1), &[own]).unwrap().is_empty());
}

#[test]
fn bytes_that_came_before_the_first_offer_are_read_by_the_seal() {
    let folders = Folders::new();
    let (store, id) = opened(&folders);
    let own: Vec<OfferedFragment> = [0, 2, 3, 4].map(|unit| fragment(unit, 0..SIZES[unit as usize])).to_vec();
    let bring = |part: &TokenPart| {
        offer(&store, &id, part, &own).unwrap();
        send(&store, &id, part, &own).unwrap();
        assert!(offer(&store, &id, part, &own).unwrap().is_empty());
    };
    store.write(&id, &session(), 0, 9, b"!").unwrap();
    bring(&rank(0, 1));
    let served = store.served(&id).unwrap();
    assert_eq!(lock(&served.writes).offers.checksum_of(0, SIZES[0]), None, "who wrote first may still be writing");
    seal(&store, &id, &SIZES).unwrap();
    check_readable(&store, &id, &SIZES);
}

#[test]
fn the_memory_of_offers_is_paid_for_and_comes_back() {
    let folders = Folders::new();
    let (store, id) = (folders.open(), instance(1));
    let bytes = 1 << 20;
    store.allocate(&id, &session(), &[bytes]).unwrap();
    let used = || store.memory.budget().usage().used_bytes;
    let reserved = used();
    let tiny: Vec<OfferedFragment> =
        (0..bytes / 256).map(|at| OfferedFragment { unit: 0, offset: at * 256, bytes: 1, crc64: at }).collect();
    offer(&store, &id, &rank(0, 1), &tiny[..100]).unwrap();
    assert_eq!(used(), reserved, "a few cost nothing");
    offer(&store, &id, &rank(0, 1), &tiny).unwrap();
    let all = used();
    assert!(all > reserved + 100 * tiny.len() as u64, "{all}");
    offer(&store, &id, &rank(0, 1), &tiny).unwrap();
    assert_eq!(used(), all, "the same again costs nothing");
    let rest = store.memory.reserve(store.memory.budget().usage().free_bytes()).unwrap();
    let mut refused = (1..100).filter_map(|number| offer(&store, &id, &rank(number, 1), &tiny).err());
    assert_eq!(refused.next().unwrap().code(), ErrorCode::CapacityExhausted);
    drop(rest);
    store.delete_instance(&id, at(9), &Progress::default()).unwrap();
    assert_eq!(used(), 0);
}

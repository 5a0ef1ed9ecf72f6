//! Units made out of those of a base, over the real protocol: from memory, from disk, from another node, and what is refused.

use std::time::{Duration, Instant};

use ballast_schemas::frame::{
    DERIVE_BYTES_MAX, DERIVED_RANGES_MAX, DerivedRange, Description, Number, Patch, PatchRule,
};
use ballast_schemas::{Digest, ErrorCode, InstanceId, TokenRight};

use crate::checksum::checksum;
use crate::client_end::*;
use crate::cold::Progress;
use crate::patch::{DeriveUnit, UnitPatch};
use crate::protocol_tests::{Node, SIZES, named, token, token_of, token_until};
use crate::server::DataPlaneOptions;
use crate::testing::*;
use crate::token::{TOKEN_LEEWAY_MS, now_unix_ms};

fn blake3_of(bytes: &[u8]) -> Option<Digest> {
    Some(Digest::from_bytes(*blake3::hash(bytes).as_bytes()))
}

fn copy(unit: u32) -> DeriveUnit<'static> {
    DeriveUnit { unit, base_unit: unit, bytes: SIZES[unit as usize], blake3: None, patch: None }
}

async fn target(node: &Node, number: u64, route: Route) -> (InstanceId, NodeConnection) {
    let id = named(number);
    let mut importer = node.connect(&id, TokenRight::Import, route).await;
    importer.allocate(&SIZES).await.unwrap();
    (id, importer)
}

/// What the target holds, sealed.
async fn sealed(node: &Node, id: &InstanceId, expected: &[Vec<u8>]) {
    let units = expected.iter().map(|bytes| checksum(bytes));
    let mut document = document(id, &SIZES);
    document.affinity.units.iter_mut().zip(units).for_each(|(unit, crc64)| unit.crc64 = crc64);
    node.store.seal_document(id, &session(), document).unwrap();
    let mut reader = node.connect(id, TokenRight::Read, Route::Tcp).await;
    for (unit, expected) in (0..).zip(expected) {
        let mut found = vec![0; expected.len()];
        let range = ballast_schemas::frame::ReadRange { unit, offset: 0, bytes: expected.len() as u64 };
        reader.read_ranges(&[range], &mut [found.as_mut_slice()]).await.unwrap();
        assert!(found == *expected, "unit {unit}");
    }
}

fn contents() -> Vec<Vec<u8>> {
    (0..).zip(SIZES).map(|(unit, bytes)| content(unit, bytes)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn units_are_copied_and_patched_from_memory_and_from_disk() {
    let node = Node::start().await;
    let base = named(1);
    import(&node.store, &base, &SIZES);
    let mut expected = contents();
    let elements: Vec<u64> = (0..3 << 20).step_by(4).filter(|at| at % 999 < 40).map(|at| at / 4).collect();
    let values: Vec<u8> = (0..elements.len() as u32).flat_map(u32::to_le_bytes).collect();
    for (element, value) in elements.iter().zip(values.chunks(4)) {
        expected[1][*element as usize * 4..][..4].copy_from_slice(value);
    }
    let patch = UnitPatch { rule: PatchRule::Overwrite { item_bytes: 4 }, elements, values };
    for (number, route, cold) in [(2, Route::Tcp, 0..0), (3, Route::Unix, 1..3), (4, Route::Best, 0..4)] {
        node.demote(&base, cold);
        let (id, mut importer) = target(&node, number, route).await;
        assert!(importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap(), "it is here");
        let mut told = 0;
        let units = [copy(0), DeriveUnit { patch: Some(&patch), ..copy(1) }, copy(2), copy(3)];
        let derived = importer.derive(&units, |bytes| told += bytes).await.unwrap();
        let sums: Vec<u64> = derived.iter().map(|unit| unit.crc64).collect();
        assert_eq!(sums, expected.iter().map(|bytes| checksum(bytes)).collect::<Vec<_>>());
        assert!(derived.iter().all(|unit| unit.same) && told == SIZES.iter().sum::<u64>());
        sealed(&node, &id, &expected).await;
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_unit_with_the_blake3_asked_for_is_the_same() {
    let node = Node::start().await;
    let base = named(1);
    import(&node.store, &base, &SIZES);
    let (id, mut importer) = target(&node, 2, Route::Tcp).await;
    importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap();
    let mut contents = contents();
    contents[3].reverse();
    let asked = |unit: u32| DeriveUnit { blake3: blake3_of(&contents[unit as usize]), ..copy(unit) };
    let derived = importer.derive(&[asked(0), asked(1), asked(3)], |_| {}).await.unwrap();
    assert_eq!(derived.iter().map(|unit| unit.same).collect::<Vec<_>>(), [true, true, false]);
    // What was not the same is written, and so is what was never asked for.
    for unit in [2, 3] {
        importer.write(unit, 0, &contents[unit as usize]).await.unwrap();
    }
    sealed(&node, &id, &contents).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_additive_patch_that_is_sent_again_gives_the_same_bytes() {
    let node = Node::start().await;
    let base = named(1);
    import(&node.store, &base, &SIZES);
    let (id, mut importer) = target(&node, 2, Route::Tcp).await;
    let mut expected = contents();
    let elements: Vec<u64> = (0..70_000 / 2).step_by(7).collect();
    let values: Vec<u8> = elements.iter().flat_map(|element| (*element as u16).to_le_bytes()).collect();
    for element in &elements {
        let at = *element as usize * 2;
        let before = u16::from_le_bytes(expected[3][at..at + 2].try_into().unwrap());
        expected[3][at..at + 2].copy_from_slice(&before.wrapping_add(*element as u16).to_le_bytes());
    }
    let patch = UnitPatch { rule: PatchRule::Add { number: Number::U16 }, elements, values };
    for _ in 0..2 {
        importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap();
        let units = [copy(0), copy(1), copy(2), DeriveUnit { patch: Some(&patch), ..copy(3) }];
        importer.derive(&units, |_| {}).await.unwrap();
        importer = node.connect(&id, TokenRight::Import, Route::Tcp).await;
    }
    sealed(&node, &id, &expected).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_base_may_be_on_another_node() {
    let node = Node::start().await;
    let other = Node::start_named("node-2", DataPlaneOptions::default()).await;
    let base = named(1);
    import(&other.store, &base, &SIZES);
    other.demote(&base, 1..2);
    let (id, mut importer) = target(&node, 2, Route::Tcp).await;
    let holders = [node.endpoint.clone(), other.endpoint.clone()];
    let open = token_of(&base, &holders);
    let error = importer.open_base(&open, std::slice::from_ref(&node.endpoint)).await.unwrap_err();
    assert!(error.code() == ErrorCode::Unavailable && error.to_string().contains("node-1"), "{error}");
    for not_vouched_for in [token(&base, TokenRight::Read), token_of(&base, &holders[..1])] {
        let error = importer.open_base(&not_vouched_for, &holders).await.unwrap_err();
        assert!(error.code() == ErrorCode::Unauthorized && error.to_string().contains("vouches"), "{error}");
    }
    assert!(!importer.open_base(&open, &holders).await.unwrap(), "it is not here");
    let derived = importer.derive(&[copy(0), copy(1), copy(2), copy(3)], |_| {}).await.unwrap();
    assert_eq!(derived.len(), 4);
    sealed(&node, &id, &contents()).await;

    // It goes away in the middle.
    let (_, mut importer) = target(&node, 3, Route::Tcp).await;
    importer.open_base(&open, &holders).await.unwrap();
    importer.derive(&[copy(0)], |_| {}).await.unwrap();
    other.stop().await;
    let error = importer.derive(&[copy(1)], |_| {}).await.unwrap_err();
    assert!(error.code() == ErrorCode::Unavailable && error.to_string().contains("node-2"), "{error}");
    assert!(!importer.describe().await.unwrap().sealed, "the connection to this node goes on");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_base_that_is_deleted_in_the_middle_is_an_error_and_not_bytes() {
    let node = Node::start().await;
    let base = named(1);
    import(&node.store, &base, &SIZES);
    let (_, mut importer) = target(&node, 2, Route::Tcp).await;
    importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap();
    importer.derive(&[copy(0)], |_| {}).await.unwrap();
    node.store.delete_instance(&base, at(2_000), &Progress::default()).unwrap();
    let error = importer.derive(&[copy(1)], |_| {}).await.unwrap_err();
    assert!(error.to_string().contains("deleted"), "{error}");
    let error = importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap_err();
    assert!(error.code() == ErrorCode::Unavailable && error.to_string().contains("deleted"), "{error}");
    // It can still be written in full.
    importer.write(1, 0, &content(1, SIZES[1])).await.unwrap();
    node.stop().await;
}

/// Changes bytes of unit 1 behind the node's back.
fn spoil(tier: &std::path::Path, base: &InstanceId) {
    let folder = tier.join("instances").join(crate::memory_tier::instance_folder(base));
    let segment = std::fs::File::options().write(true).open(folder.join("segment-000000")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&segment, b"spoiled", 12_288 + 2_000_000).unwrap();
    segment.sync_all().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_of_a_base_are_noticed_and_no_longer_count() {
    let node = Node::start().await;
    let patch = UnitPatch { rule: PatchRule::Overwrite { item_bytes: 1 }, elements: vec![2_500_000], values: vec![1] };
    for (number, cold, patch) in [(1, true, None), (3, true, Some(&patch)), (5, false, None), (7, false, Some(&patch))]
    {
        let base = named(number);
        import(&node.store, &base, &SIZES);
        if cold {
            node.demote(&base, 0..4);
        }
        spoil(if cold { node.folders.cold.path() } else { node.folders.memory.path() }, &base);
        let (_, mut importer) = target(&node, number + 1, Route::Tcp).await;
        importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap();
        let error = importer.derive(&[copy(0), DeriveUnit { patch, ..copy(1) }], |_| {}).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::ChecksumMismatch, "{error}");
        let left = node.store.describe(&base).unwrap();
        assert!(!left.cold.get(1) && !left.hot.get(1), "the wrong copy no longer counts");
        let error = importer.derive(&[copy(1)], |_| {}).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
        importer.derive(&[copy(2)], |_| {}).await.unwrap();
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_told_of_a_wrong_unit_looks_at_every_copy_of_its_own() {
    let node = Node::start().await;
    for (number, cold) in [(1, true), (2, false)] {
        let base = named(number);
        import(&node.store, &base, &SIZES);
        if cold {
            node.demote(&base, 0..4);
        }
        let mut reader = node.connect(&base, TokenRight::Read, Route::Tcp).await;
        let held = |description: &Description, unit| description.hot.get(unit) || description.cold.get(unit);
        assert!(held(&reader.check(1).await.unwrap(), 1), "nobody's word is taken");
        spoil(if cold { node.folders.cold.path() } else { node.folders.memory.path() }, &base);
        let after = reader.check(1).await.unwrap();
        assert!(!held(&after, 1) && held(&after, 2), "{after:?}");
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_somebody_else_disturbs_the_target_of_is_not_blamed() {
    let node = Node::start().await;
    let base = named(1);
    import(&node.store, &base, &SIZES);
    node.demote(&base, 0..4);
    let (id, mut importer) = target(&node, 2, Route::Tcp).await;
    importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap();
    importer.derive_bytes = 1 << 20;
    let mut steps = 0;
    let derived = importer
        .derive(&[copy(1)], |_| {
            steps += 1;
            if steps == 1 {
                // As many bytes, and in order: only the checksum shows them.
                node.store.write(&id, &session(), 1, 0, &vec![7; 1 << 20]).unwrap();
            }
        })
        .await;
    assert_eq!(derived.unwrap_err().code(), ErrorCode::InvalidArgument);
    assert!(node.store.describe(&base).unwrap().cold.get(1), "the base is right");
    importer.derive(&[copy(1)], |_| {}).await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_may_take_many_requests_and_begin_to_differ_in_any_of_them() {
    let node = Node::start().await;
    let other = Node::start_named("node-2", DataPlaneOptions::default()).await;
    let base = named(1);
    import(&other.store, &base, &SIZES);
    let holders = [other.endpoint.clone()];
    let mut expected = contents();
    let elements = vec![700_000, 700_001, 1_300_000];
    for element in &elements {
        expected[1][*element as usize * 2..][..2].copy_from_slice(&[1, 2]);
    }
    let patch = UnitPatch { rule: PatchRule::Overwrite { item_bytes: 2 }, elements, values: [1, 2].repeat(3) };
    for number in 2..5 {
        // From another node, then from memory, then from disk.
        match number {
            3 => drop(import(&node.store, &base, &SIZES)),
            4 => node.demote(&base, 0..4),
            _ => {}
        }
        let (id, mut importer) = target(&node, number, Route::Tcp).await;
        importer.open_base(&token_of(&base, &holders), &holders).await.unwrap();
        importer.derive_bytes = 100_000;
        let units = [copy(0), DeriveUnit { patch: Some(&patch), ..copy(1) }, copy(2), copy(3)];
        let mut requests = 0;
        let derived = importer.derive(&units, |_| requests += 1).await.unwrap();
        assert!(requests > 30);
        let of_base: Vec<u64> = derived.iter().map(|unit| unit.base_crc64).collect();
        assert_eq!(of_base, contents().iter().map(|bytes| checksum(bytes)).collect::<Vec<_>>());
        sealed(&node, &id, &expected).await;
    }
    for node in [node, other] {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_stays_with_the_copy_that_it_began_with() {
    let node = Node::start().await;
    let base = named(1);
    import(&node.store, &base, &SIZES);
    let (_, mut importer) = target(&node, 2, Route::Tcp).await;
    importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap();
    importer.derive_bytes = 1 << 20;
    // Out of memory in the middle.
    let (unit, mut steps) = ([copy(1)], 0);
    let derived = importer.derive(&unit, |_| {
        steps += 1;
        if steps == 1 {
            node.demote(&base, 1..2);
        }
    });
    assert_eq!(derived.await.unwrap_err().code(), ErrorCode::Unavailable);
    importer.derive(&[copy(1)], |_| {}).await.unwrap();
    // Into memory in the middle, from a copy on disk that is wrong behind the middle: that one is to blame, and no other.
    let promote = |units| {
        node.store.copy_to_memory(&effect(&base, 2_000, units), &Progress::default()).unwrap();
    };
    let mut steps = 0;
    let derived = importer.derive(&unit, |_| {
        steps += 1;
        if steps == 1 {
            promote(1..2);
            spoil(node.folders.cold.path(), &base);
        }
    });
    assert_eq!(derived.await.unwrap_err().code(), ErrorCode::ChecksumMismatch);
    let left = node.store.describe(&base).unwrap();
    assert!(!left.cold.get(1) && left.hot.get(1));
    importer.derive(&[copy(1)], |_| {}).await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_base_may_be_in_pieces_and_a_copy_that_is_wrong_is_replaced_by_another() {
    let node = Node::start().await;
    let others = [
        Node::start_named("node-2", DataPlaneOptions::default()).await,
        Node::start_named("node-3", DataPlaneOptions::default()).await,
    ];
    let base = named(1);
    for other in &others {
        import(&other.store, &base, &SIZES);
    }
    let holders = others.each_ref().map(|other| other.endpoint.clone());
    // Nobody looks: it is found by the checksum.
    spoil(others[0].folders.memory.path(), &base);
    let (id, mut importer) = target(&node, 2, Route::Tcp).await;
    assert!(!importer.open_base(&token_of(&base, &holders), &holders).await.unwrap());
    let all = [copy(0), copy(1), copy(2), copy(3)];
    let error = importer.derive(&all, |_| {}).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::ChecksumMismatch, "{error}");
    // The node that had it wrong was told, and has given it up, as after a reader of its own.
    let holdings = others[0].store.describe(&base).unwrap();
    let lost: Vec<u32> = (0..4).filter(|unit| SIZES[*unit as usize] > 0 && !holdings.hot.get(*unit)).collect();
    assert_eq!(lost.len(), 1, "{holdings:?}");
    importer.derive(&all, |_| {}).await.unwrap();
    sealed(&node, &id, &contents()).await;
    // Who is right looks, and keeps what it has.
    let mut reader = others[1].connect(&base, TokenRight::Read, Route::Tcp).await;
    for unit in 0..4 {
        assert!(reader.check(unit).await.unwrap().hot.get(unit));
    }
    assert_eq!(reader.check(99).await.unwrap_err().code(), ErrorCode::InvalidArgument);
    let mut writer = others[1].connect(&base, TokenRight::Import, Route::Tcp).await;
    assert_eq!(writer.check(0).await.unwrap_err().code(), ErrorCode::Unauthorized);

    // Then neither has all of it.
    let (id, mut importer) = target(&node, 3, Route::Tcp).await;
    importer.open_base(&token_of(&base, &holders), &holders).await.unwrap();
    importer.derive(&all, |_| {}).await.unwrap();
    sealed(&node, &id, &contents()).await;
    let mut one_left = target(&node, 4, Route::Tcp).await.1;
    let first = &holders[..1];
    let error = one_left.open_base(&token_of(&base, first), first).await.unwrap_err();
    assert!(error.code() == ErrorCode::Unavailable && error.to_string().contains("node-2"), "{error}");
    for node in others.into_iter().chain([node]) {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_never_answers_is_left_for_the_next_one() {
    let node = Node::start().await;
    let other = Node::start_named("node-2", DataPlaneOptions::default()).await;
    let base = named(1);
    import(&other.store, &base, &SIZES);
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mute = ballast_schemas::NodeEndpoint {
        node: ballast_schemas::NodeId::new("node-3").unwrap(),
        host_id: String::new(),
        unix_socket: None,
        tcp: Some(silent.local_addr().unwrap().to_string()),
    };
    let (_, mut importer) = target(&node, 2, Route::Tcp).await;
    let alone = std::slice::from_ref(&mute);
    let error = importer.open_base(&token_of(&base, alone), alone).await.unwrap_err();
    assert!(error.code() == ErrorCode::Unavailable && error.to_string().contains("did not answer"), "{error}");
    let both = [mute, other.endpoint.clone()];
    importer.open_base(&token_of(&base, &both), &both).await.unwrap();
    importer.derive(&[copy(1)], |_| {}).await.unwrap();
    for node in [node, other] {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_base_whose_token_has_ended_is_opened_again_with_another() {
    let node = Node::start().await;
    let base = named(1);
    import(&node.store, &base, &SIZES);
    let (id, mut importer) = target(&node, 2, Route::Tcp).await;
    // Valid for a moment, by the leeway that clocks are given.
    importer.open_base(&token_until(&base, now_unix_ms() + 300 - TOKEN_LEEWAY_MS), &[]).await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let error = loop {
        match importer.derive(&[copy(2)], |_| {}).await {
            Ok(_) => assert!(Instant::now() < deadline, "the token does not end"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), ErrorCode::Unauthorized, "{error}");
    assert_eq!(importer.derive(&[copy(2)], |_| {}).await.unwrap_err().code(), ErrorCode::Unauthorized, "as before");
    importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap();
    importer.derive(&[copy(0), copy(1), copy(2), copy(3)], |_| {}).await.unwrap();
    sealed(&node, &id, &contents()).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_no_client_of_ours_makes_are_refused_before_a_byte_is_written() {
    let node = Node::start().await;
    let base = named(1);
    import(&node.store, &base, &SIZES);
    let (id, mut importer) = target(&node, 2, Route::Tcp).await;
    importer.write(1, 0, &content(9, SIZES[1])).await.unwrap();
    importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap();
    let whole = |unit: u32| DerivedRange {
        unit,
        base_unit: unit,
        offset: 0,
        bytes: SIZES[unit as usize],
        blake3: None,
        patch: None,
    };
    let patched = |entries, index_bytes| DerivedRange {
        patch: Some(Patch { rule: PatchRule::Overwrite { item_bytes: 4 }, entries, index_bytes }),
        ..whole(1)
    };
    let many = DERIVE_BYTES_MAX.div_ceil(SIZES[1]) as usize + 1;
    for (ranges, payload, why) in [
        (vec![whole(1); many], vec![], "fit one request"),
        (vec![whole(2); DERIVED_RANGES_MAX + 1], vec![], "fit one request"),
        (vec![DerivedRange { offset: 100, bytes: 100, ..whole(1) }], vec![], "does not follow"),
        (
            vec![DerivedRange { bytes: 100, ..whole(1) }, DerivedRange { offset: 99, bytes: 9, ..whole(1) }],
            vec![],
            "does not follow",
        ),
        (vec![DerivedRange { offset: 1, bytes: u64::MAX, ..whole(1) }], vec![], "fit one request"),
        (vec![DerivedRange { offset: u64::MAX, bytes: 9, ..whole(1) }], vec![], "do not lie in unit 1"),
        (vec![DerivedRange { base_unit: 3, ..whole(1) }], vec![], "can not be made out of unit 3"),
        (vec![whole(1)], vec![1], "belong to no patch"),
        (vec![patched(1, 1)], vec![1, 2, 3, 4, 5, 6], "belong to no patch"),
        (vec![patched(1, 0)], vec![1, 2, 3, 4], "no number"),
        (vec![patched(1, 9)], vec![1, 2, 3, 4], "ends too early"),
        (vec![patched(u32::MAX, 1)], vec![1], "ends too early"),
        (vec![patched(1, 2)], vec![1, 1, 1, 2, 3, 4], "too many"),
        (vec![patched(1, 1), whole(0), patched(1, 1)], vec![1, 0, 0, 0, 0], "ends too early"),
    ] {
        let error = importer.derive_ranges(ranges, &payload).await.unwrap_err();
        assert!(error.code() == ErrorCode::InvalidArgument && error.to_string().contains(why), "{why}: {error}");
    }
    let written = node.store.written_checksum(&id, &session(), 1).unwrap();
    assert_eq!(written, checksum(&content(9, SIZES[1])));
    // What was under way goes on after a request that was refused.
    importer.derive_ranges(vec![DerivedRange { bytes: 1 << 20, ..whole(1) }], &[]).await.unwrap();
    importer.derive_ranges(vec![whole(0)], &[1]).await.unwrap_err();
    let rest = DerivedRange { offset: 1 << 20, bytes: 2 << 20, ..whole(1) };
    assert_eq!(importer.derive_ranges(vec![rest], &[]).await.unwrap()[0].crc64, checksum(&content(1, SIZES[1])));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_refused_and_leaves_the_connection_usable() {
    let node = Node::start().await;
    let base = named(1);
    import(&node.store, &base, &SIZES);
    let mut reader = node.connect(&base, TokenRight::Read, Route::Tcp).await;
    let open = token(&base, TokenRight::Read);
    assert_eq!(reader.open_base(&open, &[]).await.unwrap_err().code(), ErrorCode::Unauthorized);

    let (_, mut importer) = target(&node, 2, Route::Tcp).await;
    assert_eq!(importer.derive(&[copy(0)], |_| {}).await.unwrap_err().code(), ErrorCode::InvalidArgument);
    for (wrong, code) in [
        (String::new(), ErrorCode::Unauthorized),
        (token(&base, TokenRight::Import), ErrorCode::Unauthorized),
        (token(&named(9), TokenRight::Read), ErrorCode::Unavailable),
        (token(&named(2), TokenRight::Read), ErrorCode::Unavailable),
    ] {
        assert_eq!(importer.open_base(&wrong, &[]).await.unwrap_err().code(), code);
    }
    importer.open_base(&open, &[]).await.unwrap();
    let patch = UnitPatch { rule: PatchRule::Overwrite { item_bytes: 4 }, elements: vec![2_500], values: vec![0; 4] };
    let twice = UnitPatch { elements: vec![7, 7], values: vec![0; 8], ..patch.clone() };
    let odd = UnitPatch { rule: PatchRule::Overwrite { item_bytes: 3 }, values: vec![0; 3], ..patch.clone() };
    for (wrong, why) in [
        (DeriveUnit { base_unit: 4, ..copy(0) }, "not in the base"),
        (DeriveUnit { unit: 4, ..copy(0) }, "there are 4 units"),
        (DeriveUnit { bytes: 10_001, ..copy(0) }, "do not lie in unit 0"),
        (DeriveUnit { patch: Some(&patch), ..copy(0) }, "does not fit its 10000 bytes"),
        (DeriveUnit { patch: Some(&twice), ..copy(0) }, "twice"),
        (DeriveUnit { patch: Some(&odd), ..copy(0) }, "elements of 3 bytes"),
        (DeriveUnit { base_unit: 1, bytes: 3 << 20, ..copy(0) }, "can not be made out of unit 1"),
    ] {
        let error = importer.derive(&[wrong], |_| {}).await.unwrap_err();
        assert!(error.code() == ErrorCode::InvalidArgument && error.to_string().contains(why), "{why}: {error}");
    }
    importer.derive(&[copy(0), copy(3)], |_| {}).await.unwrap();
    node.stop().await;
}

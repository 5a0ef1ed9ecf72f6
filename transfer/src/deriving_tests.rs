//! Units made out of those of a base, over the real protocol: from memory, from disk, from another node, and what is refused.

use ballast_schemas::frame::{Number, PatchRule};
use ballast_schemas::{Digest, ErrorCode, InstanceId, TokenRight};

use crate::checksum::checksum;
use crate::client_end::*;
use crate::cold::Progress;
use crate::patch::{DeriveUnit, UnitPatch};
use crate::protocol_tests::{Node, SIZES, named, token};
use crate::server::DataPlaneOptions;
use crate::testing::*;

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
    let open = token(&base, TokenRight::Read);
    let error = importer.open_base(&open, std::slice::from_ref(&node.endpoint)).await.unwrap_err();
    assert!(error.code() == ErrorCode::Unavailable && error.to_string().contains("node-1"), "{error}");
    let holders = [node.endpoint.clone(), other.endpoint.clone()];
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

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_of_a_base_are_noticed_and_no_longer_count() {
    let node = Node::start().await;
    let base = named(1);
    import(&node.store, &base, &SIZES);
    node.demote(&base, 0..4);
    let folder = node.folders.cold.path().join("instances").join(crate::memory_tier::instance_folder(&base));
    let segment = std::fs::File::options().write(true).open(folder.join("segment-000000")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&segment, b"spoiled", 12_288 + 2_000_000).unwrap();
    segment.sync_all().unwrap();
    let (_, mut importer) = target(&node, 2, Route::Tcp).await;
    importer.open_base(&token(&base, TokenRight::Read), &[]).await.unwrap();
    let error = importer.derive(&[copy(0), copy(1)], |_| {}).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::ChecksumMismatch, "{error}");
    assert!(!node.store.describe(&base).unwrap().cold.get(1), "the wrong copy no longer counts");
    let error = importer.derive(&[copy(1)], |_| {}).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
    importer.derive(&[copy(2)], |_| {}).await.unwrap();
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
        (DeriveUnit { base_unit: 1, bytes: 3 << 20, ..copy(0) }, "do not fit"),
    ] {
        let error = importer.derive(&[wrong], |_| {}).await.unwrap_err();
        assert!(error.code() == ErrorCode::InvalidArgument && error.to_string().contains(why), "{why}: {error}");
    }
    importer.derive(&[copy(0), copy(3)], |_| {}).await.unwrap();
    node.stop().await;
}

//! One-sided transfers, where there is RDMA: `make rdma-test` runs these in a virtual machine. Elsewhere they say that they were
//! skipped. What every transport has to do is in `protocol_tests`, which the lab runs over RDMA too.

use std::time::{Duration, Instant};

use ballast_schemas::frame::{ReadRange, RemoteMemory, Request, SLOT_BYTES, SLOTS};
use ballast_schemas::{ErrorCode, InstanceId, TokenRight};

use super::one_sided::OneSided;
use super::*;
use crate::protocol_tests::{Node, named, read_all, token, token_until, whole};
use crate::rdma::{Link, LinkError};
use crate::testing::*;
use crate::token::{TOKEN_LEEWAY_MS, now_unix_ms};

const SIZES: [u64; 4] = [10_000, 3 << 20, 1, 70_000];
const STALL: Duration = Duration::from_secs(20);

/// A node that RDMA reaches; `None` where there is none, which only the lab does not take.
async fn node() -> Option<Node> {
    if std::env::var_os("BALLAST_RDMA_LAB").is_some() {
        return Some(Node::start().await);
    }
    println!("skipped: no RDMA lab here");
    None
}

async fn reader(node: &Node, token: &str) -> NodeConnection {
    let options = ConnectOptions { route: Route::Rdma, ..ConnectOptions::default() };
    NodeConnection::connect(&node.endpoint, token, &options).await.unwrap()
}

pub(super) fn link(connection: &mut NodeConnection) -> &mut Link {
    match &mut connection.one_sided {
        OneSided::On { link, .. } => link,
        OneSided::Off(why) => panic!("{why}"),
    }
}

/// Where a unit lies, as a connection was told.
pub(super) async fn place(connection: &mut NodeConnection, unit: u32) -> Option<RemoteMemory> {
    let found = connection.call(Request::LocateUnits { units: vec![unit] }, &[], &[], STALL).await.unwrap().body;
    let Response::Located { units } = found else { panic!("{found:?}") };
    units[0]
}

pub(super) fn read(link: &mut Link, place: RemoteMemory) -> Result<Vec<u8>, LinkError> {
    let mut buffer = vec![0xee; place.bytes as usize];
    tokio::task::block_in_place(|| link.read(vec![(place, &mut buffer)], STALL))?;
    Ok(buffer)
}

fn release(node: &Node, id: &InstanceId, wait: Duration) -> Result<(), crate::StoreError> {
    let effect = effect(id, 1_000, 0..SIZES.len() as u32);
    node.store.copy_to_cold(&effect, &Default::default()).unwrap();
    node.store.release_memory(&effect, wait, &Default::default()).map(|_| ())
}

#[tokio::test(flavor = "multi_thread")]
async fn units_that_a_reader_reaches_stay_in_memory_until_it_is_gone() {
    let Some(node) = node().await else { return };
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let mut first = reader(&node, &token(&id, TokenRight::Read)).await;
    let mut second = reader(&node, &token(&id, TokenRight::Read)).await;
    let places = [place(&mut first, 1).await.unwrap(), place(&mut second, 1).await.unwrap()];
    assert_eq!(places[0], places[1], "both read the same region");
    drop(first);
    let busy = release(&node, &id, Duration::from_millis(200));
    assert!(matches!(busy, Err(crate::StoreError::Busy { .. })), "{busy:?}");
    // What it reaches is right although it is on its way out.
    assert!(read(link(&mut second), places[1]).unwrap() == content(1, SIZES[1]));
    assert_eq!(place(&mut second, 3).await, None, "nobody gets more of it");
    drop(second);
    let deadline = Instant::now() + STALL;
    while release(&node, &id, Duration::from_secs(1)).is_err() {
        assert!(Instant::now() < deadline, "memory does not come back");
    }
    assert_eq!(node.store.usage().memory.used_bytes, 0);
    let mut third = reader(&node, &token(&id, TokenRight::Read)).await;
    assert!(read(link(&mut third), places[0]).is_err(), "the region is gone, not its memory alone");
    let mut fourth = reader(&node, &token(&id, TokenRight::Read)).await;
    read_all(&mut fourth, &SIZES).await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_token_opened_ends_with_it() {
    let Some(node) = node().await else { return };
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let soon = now_unix_ms() + 1_500 - TOKEN_LEEWAY_MS;
    let mut ending = reader(&node, &token_until(&id, soon)).await;
    let mut renewed = reader(&node, &token_until(&id, soon)).await;
    renewed.renew(&token(&id, TokenRight::Read)).await.unwrap();
    let there = place(&mut ending, 1).await.unwrap();
    place(&mut renewed, 1).await.unwrap();
    let deadline = Instant::now() + STALL;
    loop {
        match read(link(&mut ending), there) {
            Ok(bytes) => assert!(bytes == content(1, SIZES[1])),
            Err(error) => break assert!(matches!(error, LinkError::NoAnswer | LinkError::NoAccess), "{error}"),
        }
        assert!(Instant::now() < deadline, "it never ends");
    }
    let refused = read_all(&mut ending, &SIZES).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Unauthorized, "{refused}");
    assert!(ending.why_not_rdma().is_some());
    read_all(&mut renewed, &SIZES).await.unwrap();
    assert_eq!(renewed.transport(), Transport::Rdma);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_reaches_more_than_its_own() {
    let Some(node) = node().await else { return };
    let (mine, other, new) = (named(1), named(2), named(3));
    import(&node.store, &mine, &SIZES);
    import(&node.store, &other, &SIZES);
    let token_of = |id| token(id, TokenRight::Read);
    let mut own = reader(&node, &token_of(&other)).await;
    let foreign = place(&mut own, 1).await.unwrap();
    assert!(read(link(&mut own), foreign).unwrap() == content(1, SIZES[1]));
    // A reader of another instance, who knows the key.
    let mut thief = reader(&node, &token_of(&mine)).await;
    assert!(matches!(read(link(&mut thief), foreign), Err(LinkError::NoAccess)));
    // Past the end of what is registered.
    let mut beyond = reader(&node, &token_of(&other)).await;
    let all = place(&mut beyond, 1).await.unwrap();
    let past = RemoteMemory { address: all.address + (64 << 20), bytes: 4096, ..all };
    assert!(matches!(read(link(&mut beyond), past), Err(LinkError::NoAccess)));
    // An importer reaches its window, and no other importer's; a reader writes nothing.
    let mut importer = reader(&node, &token(&new, TokenRight::Import)).await;
    let mut second = reader(&node, &token(&new, TokenRight::Import)).await;
    let window = link(&mut importer).window.unwrap();
    assert_eq!(window.bytes, u64::from(SLOTS) * SLOT_BYTES);
    link(&mut second).window = Some(window);
    let written = tokio::task::block_in_place(|| link(&mut second).write(0, &[b"mine"], STALL));
    assert!(matches!(written, Err(LinkError::NoAccess)), "{written:?}");
    let mut writer = reader(&node, &token_of(&other)).await;
    let target = place(&mut writer, 1).await.unwrap();
    link(&mut writer).window = Some(target);
    let written = tokio::task::block_in_place(|| link(&mut writer).write(0, &[b"mine"], STALL));
    assert!(written.is_err());
    let mut after = reader(&node, &token_of(&other)).await;
    read_all(&mut after, &SIZES).await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_land_and_a_slot_is_copied_before_it_is_checked() {
    let Some(node) = node().await else { return };
    let (id, sizes) = (named(1), [0, 5, 9 << 20, 100_000, SLOT_BYTES, 70]);
    let mut importer = reader(&node, &token(&id, TokenRight::Import)).await;
    importer.allocate(&sizes).await.unwrap();
    let (ranges, _) = whole(&sizes);
    let contents: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(unit, &bytes)| content(unit as u32, bytes)).collect();
    let slices: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
    importer.write_ranges(&ranges, &slices).await.unwrap();
    assert_eq!(importer.transport(), Transport::Rdma);
    // What lies in a slot later does not change what was written from it.
    tokio::task::block_in_place(|| link(&mut importer).write(0, &[&[0xff; 100]], STALL)).unwrap();
    seal(&node.store, &id, &sizes).unwrap();
    let mut after = reader(&node, &token(&id, TokenRight::Read)).await;
    read_all(&mut after, &sizes).await.unwrap();
    let late = importer.write_ranges(&ranges[1..2], &slices[1..2]).await.unwrap_err();
    assert!(!matches!(late, TransferError::Broken { .. }), "{late}");
    read_all(&mut after, &sizes).await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_ranges_are_those_of_a_reference() {
    let Some(node) = node().await else { return };
    let (id, sizes) = (named(1), [1 << 20, 4097, 3, 600_000, 17 << 20]);
    import(&node.store, &id, &sizes);
    node.demote(&id, 3..4);
    let contents: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(unit, &bytes)| content(unit as u32, bytes)).collect();
    let mut connection = reader(&node, &token(&id, TokenRight::Read)).await;
    read_at_random(&mut connection, &contents, 30).await;
    assert_eq!(connection.transport(), Transport::Rdma);
    node.stop().await;
}

/// Reads random ranges, and compares each with what it should be.
pub(super) async fn read_at_random(connection: &mut NodeConnection, contents: &[Vec<u8>], rounds: u32) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |end: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % end.max(1)
    };
    for _ in 0..rounds {
        let mut range = || {
            let unit = below(contents.len() as u64) as u32;
            let size = contents[unit as usize].len() as u64;
            let offset = below(size);
            let long = if below(4) == 0 { size } else { 5000 };
            ReadRange { unit, offset, bytes: below((size - offset).min(long) + 1) }
        };
        let first = range();
        let ranges: Vec<ReadRange> = std::iter::once(first).chain((0..first.offset % 40).map(|_| range())).collect();
        let mut buffers: Vec<Vec<u8>> = ranges.iter().map(|range| vec![0xee; range.bytes as usize]).collect();
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        connection.read_ranges(&ranges, &mut slices).await.unwrap();
        for (range, buffer) in ranges.iter().zip(&buffers) {
            let wanted = &contents[range.unit as usize][range.offset as usize..(range.offset + range.bytes) as usize];
            assert!(buffer == wanted, "{range:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_goes_in_the_middle_is_noticed_and_named() {
    let Some(node) = node().await else { return };
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let mut connection = reader(&node, &token(&id, TokenRight::Read)).await;
    read_all(&mut connection, &SIZES).await.unwrap();
    node.stop().await;
    let error = read_all(&mut connection, &SIZES).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    assert!(connection.why_not_rdma().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_instance_is_charged_until_nobody_reaches_it() {
    let Some(node) = node().await else { return };
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let mut connection = reader(&node, &token(&id, TokenRight::Read)).await;
    let there = place(&mut connection, 1).await.unwrap();
    node.store.delete_instance(&id, at(2_000), &Default::default()).unwrap();
    assert!(node.store.usage().lingering_bytes > 0);
    assert!(read(link(&mut connection), there).unwrap() == content(1, SIZES[1]), "no other bytes come there");
    drop(connection);
    eventually("the bytes come back", || node.store.usage().memory.used_bytes == 0);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_leave_nothing_behind() {
    let Some(node) = node().await else { return };
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let locked = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status.lines().find(|line| line.starts_with("VmPin")).map(ToOwned::to_owned)
    };
    let round = async || {
        let mut connection = reader(&node, &token(&id, TokenRight::Read)).await;
        read_all(&mut connection, &SIZES).await.unwrap();
    };
    round().await;
    let settled = |wanted: (usize, Option<String>)| {
        eventually("all is given back", || descriptors() <= wanted.0 && locked() == wanted.1);
    };
    tokio::time::sleep(Duration::from_millis(200)).await;
    let before = (descriptors(), locked());
    for _ in 0..100 {
        round().await;
    }
    settled(before);
    node.stop().await;
}

#[tokio::test]
async fn a_host_without_rdma_says_why_and_goes_on_over_tcp() {
    if std::env::var_os("BALLAST_RDMA_LAB").is_some() {
        return;
    }
    let node = Node::start().await;
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let options = ConnectOptions { route: Route::Rdma, ..ConnectOptions::default() };
    let error = NodeConnection::connect(&node.endpoint, &token(&id, TokenRight::Read), &options).await.unwrap_err();
    assert!(error.to_string().contains("RDMA"), "{error}");
    let endpoint = NodeEndpoint { unix_socket: None, ..node.endpoint.clone() };
    let connected = NodeConnection::connect(&endpoint, &token(&id, TokenRight::Read), &ConnectOptions::default()).await;
    let mut connection = connected.unwrap();
    read_all(&mut connection, &SIZES).await.unwrap();
    assert_eq!(connection.transport(), Transport::Tcp);
    assert!(connection.why_not_rdma().unwrap().contains("RDMA"), "{:?}", connection.why_not_rdma());
    node.stop().await;
}

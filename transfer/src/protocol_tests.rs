//! Server and client end together, over Unix sockets and TCP, within this process.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_schemas::frame::{
    PROTOCOL_VERSION, RANGES_MAX, ReadRange, Request, RequestHeader, Response, ResponseHeader, SourceRange,
};
use ballast_schemas::manifest::{Manifest, ManifestPlan, Tensor};
use ballast_schemas::{
    ErrorCode, InstanceId, NodeEndpoint, NodeId, ParticipantId, RevisionIdentity, TokenClaims, TokenPart, TokenRight,
    UnitEffect, UnitRange, holders_digest,
};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::oneshot;

use crate::client_end::*;
use crate::cold::Progress;
use crate::layout::GroupLayout;
use crate::node_store::{NodeStore, NodeStoreOptions};
use crate::patch::DeriveUnit;
use crate::server::{DataPlane, DataPlaneOptions};
use crate::testing::*;
use crate::token::{TokenGate, TokenKey, now_unix_ms};
use crate::transfer_error::TransferError;
use crate::wire::{Socket, Wire};

pub(crate) const SIZES: [u64; 4] = [10_000, 3 << 20, 1, 70_000];

fn key() -> TokenKey {
    TokenKey::new(&[7; 32]).unwrap()
}

pub(crate) fn token(id: &InstanceId, right: TokenRight) -> String {
    key().sign(&claims(id, right))
}

fn token_of_part(id: &InstanceId, right: TokenRight, part: Option<TokenPart>) -> String {
    key().sign(&TokenClaims { part, ..claims(id, right) })
}

/// A token for reading what these nodes hold.
pub(crate) fn token_of(id: &InstanceId, holders: &[NodeEndpoint]) -> String {
    key().sign(&TokenClaims { holders: Some(holders_digest(holders)), ..claims(id, TokenRight::Read) })
}

/// A token for reading, with this end.
pub(crate) fn token_until(id: &InstanceId, expires_unix_ms: u64) -> String {
    key().sign(&TokenClaims { expires_unix_ms, ..claims(id, TokenRight::Read) })
}

fn claims(id: &InstanceId, right: TokenRight) -> TokenClaims {
    TokenClaims {
        instance: id.clone(),
        right,
        subject: session().to_string(),
        part: None,
        holders: None,
        expires_unix_ms: now_unix_ms() + 600_000,
    }
}

fn identity() -> RevisionIdentity {
    RevisionIdentity::new("default", "default", "model", "main", 1).unwrap()
}

pub(crate) fn named(number: u64) -> InstanceId {
    InstanceId { group_id: identity().group_id(), position: at(number) }
}

pub(crate) fn manifest(sizes: &[u64]) -> Manifest {
    let tensors = sizes
        .iter()
        .enumerate()
        .map(|(unit, &bytes)| Tensor::plain(format!("t{unit:06}"), "U8", 1, vec![bytes]).into());
    let plan = ManifestPlan::new(&identity(), tensors.collect(), Vec::new()).unwrap();
    assert_eq!(plan.extents(), sizes);
    let sums: Vec<u64> = sizes.iter().enumerate().map(|(unit, &b)| crate::checksum(&content(unit as u32, b))).collect();
    plan.seal(&sums).unwrap()
}

/// The address on which tests talk over TCP. In the RDMA lab it is one that RDMA has too, and everything for TCP is then asked of
/// RDMA beside TCP.
fn lab_address() -> Option<String> {
    let address = std::env::var("BALLAST_RDMA_LAB").ok().filter(|_| cfg!(feature = "rdma"))?;
    let port = std::env::var("BALLAST_RDMA_PORT").unwrap_or_else(|_| "0".to_owned());
    Some(format!("{address}:{port}"))
}

/// The route of a test, in the RDMA lab.
fn here(route: Route) -> Route {
    if route == Route::Tcp && lab_address().is_some() { Route::Rdma } else { route }
}

/// A node with its data plane.
pub(crate) struct Node {
    pub(crate) store: Arc<NodeStore>,
    pub(crate) endpoint: NodeEndpoint,
    stop: Option<oneshot::Sender<()>>,
    running: Option<tokio::task::JoinHandle<()>>,
    pub(crate) folders: Folders,
}

impl Node {
    pub(crate) async fn start() -> Self {
        Self::start_with(DataPlaneOptions::default()).await
    }

    pub(crate) async fn start_with(options: DataPlaneOptions) -> Self {
        Self::start_named("node-1", options).await
    }

    pub(crate) async fn start_named(name: &str, options: DataPlaneOptions) -> Self {
        let folders = Folders::new();
        let store =
            NodeStore::open(&NodeStoreOptions { node: NodeId::new(name).unwrap(), ..folders.options() }).unwrap();
        let options = DataPlaneOptions {
            unix_socket: Some(folders.cold.path().join("data.sock")),
            tcp: Some(lab_address().unwrap_or_else(|| "127.0.0.1:0".to_owned()).parse().unwrap()),
            ..options
        };
        let gate = TokenGate::closed();
        gate.set(key());
        let plane = DataPlane::bind(options, store.clone(), gate).await.unwrap();
        let endpoint = NodeEndpoint {
            node: store.node().clone(),
            host_id: host_id().unwrap(),
            unix_socket: plane.unix_socket().map(|path| path.display().to_string()),
            tcp: plane.tcp_address().map(|address| address.to_string()),
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(plane.run(async move {
            let _ = stopped.await;
        }));
        Self { store, endpoint, stop: Some(stop), running: Some(running), folders }
    }

    pub(crate) async fn connect(&self, id: &InstanceId, right: TokenRight, route: Route) -> NodeConnection {
        let options = ConnectOptions { route: here(route), ..ConnectOptions::default() };
        NodeConnection::connect(&self.endpoint, &token(id, right), &options).await.unwrap()
    }

    /// Connects once the node has noticed that earlier peers are gone.
    async fn connect_when_free(&self, id: &InstanceId, right: TokenRight, route: Route) -> NodeConnection {
        let options = ConnectOptions { route: here(route), ..ConnectOptions::default() };
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match NodeConnection::connect(&self.endpoint, &token(id, right), &options).await {
                Ok(connection) => return connection,
                Err(error) => assert!(Instant::now() < deadline, "no place comes back: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Moves units to disk alone.
    pub(crate) fn demote(&self, id: &InstanceId, units: std::ops::Range<u32>) {
        let effect = UnitEffect {
            instance: id.clone(),
            fence: at(1_000),
            units: vec![UnitRange { start: units.start, end: units.end }],
        };
        self.store.copy_to_cold(&effect, &Progress::default()).unwrap();
        self.store.release_memory(&effect, Duration::from_secs(10), &Progress::default()).unwrap();
    }

    pub(crate) async fn stop(mut self) {
        drop(self.stop.take());
        self.running.take().unwrap().await.unwrap();
        assert!(!Path::new(self.endpoint.unix_socket.as_ref().unwrap()).exists());
    }
}

pub(crate) fn whole(sizes: &[u64]) -> (Vec<ReadRange>, Vec<Vec<u8>>) {
    let range = |(unit, &bytes): (usize, &u64)| ReadRange { unit: unit as u32, offset: 0, bytes };
    (sizes.iter().enumerate().map(range).collect(), sizes.iter().map(|&bytes| vec![0; bytes as usize]).collect())
}

pub(crate) async fn read_all(connection: &mut NodeConnection, sizes: &[u64]) -> Result<(), TransferError> {
    let (ranges, mut buffers) = whole(sizes);
    let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    connection.read_ranges(&ranges, &mut slices).await?;
    for (unit, buffer) in buffers.iter().enumerate() {
        assert!(*buffer == content(unit as u32, buffer.len() as u64), "unit {unit}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_takes_an_import_and_gives_the_same_bytes_back() {
    let node = Node::start().await;
    for (number, route) in [(1, Route::Tcp), (2, Route::Unix), (3, Route::Best)] {
        let id = named(number);
        let mut importer = node.connect(&id, TokenRight::Import, route).await;
        let over_tcp = if here(Route::Tcp) == Route::Rdma { Transport::Rdma } else { Transport::Tcp };
        let wanted = if route == Route::Tcp { over_tcp } else { Transport::Unix };
        assert_eq!(importer.transport(), wanted);
        let allocated = importer.allocate(&SIZES).await.unwrap();
        assert!(!allocated.sealed && allocated.reserved_bytes >= SIZES.iter().sum());
        importer.write(0, 0, &content(0, SIZES[0])).await.unwrap();
        importer.write(1, 0, &content(1, SIZES[1])).await.unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let bytes = [vec![0; 7], content(2, SIZES[2]), content(3, SIZES[3])].concat();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        let ranges = [
            SourceRange { source_offset: 7, unit: 2, unit_offset: 0, bytes: SIZES[2] },
            SourceRange { source_offset: 8, unit: 3, unit_offset: 0, bytes: SIZES[3] },
        ];
        let mut told = 0;
        importer.write_from_file(file.as_fd(), &ranges, |bytes| told += bytes).await.unwrap();
        assert_eq!(told, SIZES[2] + SIZES[3]);
        let manifest = manifest(&SIZES);
        let receipt = importer.seal(&manifest.to_canonical_bytes()).await.unwrap();
        assert_eq!(receipt.manifest.sha256, manifest.sha256());
        assert!(importer.allocate(&SIZES).await.unwrap().sealed);

        for cold in [false, true] {
            if cold {
                node.demote(&id, 1..4);
            }
            for route in [Route::Tcp, Route::Unix] {
                let mut reader = node.connect(&id, TokenRight::Read, route).await;
                read_all(&mut reader, &SIZES).await.unwrap();
                assert_eq!(reader.read_manifest().await.unwrap(), manifest.to_canonical_bytes());
                assert_eq!(reader.read_affinity().await.unwrap(), manifest.affinity_index());
                let described = reader.describe().await.unwrap();
                assert_eq!((described.hot.count(), described.cold.count()), if cold { (1, 3) } else { (4, 0) });
                assert_eq!(described.manifest_sha256, Some(manifest.sha256()));
            }
            let mut reader = node.connect(&id, TokenRight::Read, Route::Unix).await;
            let mapped = Arc::new(reader.map(Arc::new(GroupLayout::new(&SIZES).unwrap())).await.unwrap());
            mapped.populate().unwrap();
            for (unit, &bytes) in SIZES.iter().enumerate() {
                let (unit, wanted) = (unit as u32, content(unit as u32, bytes));
                assert_eq!(mapped.view(unit).is_some(), !cold || unit == 0);
                if let Some(view) = mapped.shared_view(unit) {
                    assert!(*view == wanted[..]);
                    mapped.verify(unit, crate::checksum(&wanted)).unwrap();
                }
                let mut buffer = vec![0; bytes as usize];
                mapped.read_unit_into(unit, &mut buffer, Some(crate::checksum(&wanted))).unwrap();
                assert!(buffer == wanted);
                let wrong = mapped.read_unit_into(unit, &mut buffer, Some(0)).unwrap_err();
                assert_eq!(wrong.code(), ErrorCode::ChecksumMismatch);
            }
            assert!(mapped.read_into(0, SIZES[0] - 1, &mut [0; 2]).is_err());
        }
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_come_in_order_over_one_connection_or_several() {
    let node = Node::start().await;
    let id = named(1);
    let sizes: Vec<u64> = (0..3000).map(|unit| 1 + unit * 37 % 9000).chain([5 << 20]).collect();
    import(&node.store, &id, &sizes);
    node.demote(&id, 1000..3001);
    let mut connections = Vec::new();
    for _ in 0..3 {
        connections.push(node.connect(&id, TokenRight::Read, Route::Tcp).await);
    }
    read_all(&mut connections[0], &sizes).await.unwrap();
    let (ranges, mut buffers) = whole(&sizes);
    let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    read_ranges_side_by_side(&mut connections, &ranges, &mut slices).await.unwrap();
    for (unit, buffer) in buffers.iter().enumerate() {
        assert!(*buffer == content(unit as u32, sizes[unit]), "unit {unit}");
    }
    // Parts, backwards, from both tiers, and one of no bytes.
    let parts: Vec<ReadRange> = (0..3000_u32)
        .rev()
        .map(|unit| ReadRange { unit, offset: sizes[unit as usize] / 3, bytes: sizes[unit as usize] / 2 })
        .chain([ReadRange { unit: 3000, offset: 12_345, bytes: 3 << 20 }, ReadRange { unit: 0, offset: 1, bytes: 0 }])
        .collect();
    let mut buffers: Vec<Vec<u8>> = parts.iter().map(|part| vec![0; part.bytes as usize]).collect();
    let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    connections[1].read_ranges(&parts, &mut slices).await.unwrap();
    for (part, buffer) in parts.iter().zip(&buffers) {
        let wanted = content(part.unit, sizes[part.unit as usize]);
        assert!(buffer[..] == wanted[part.offset as usize..(part.offset + part.bytes) as usize], "{part:?}");
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_small_units_travel_in_a_few_frames() {
    let node = Node::start().await;
    let sizes: Vec<u64> = (0..5000).map(|unit| 1 + unit * 31 % 3000).chain([9 << 20, 0, 5]).collect();
    let contents: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(unit, &b)| content(unit as u32, b)).collect();
    let id = named(1);
    let mut importer = node.connect(&id, TokenRight::Import, Route::Tcp).await;
    importer.allocate(&sizes).await.unwrap();
    let (ranges, _) = whole(&sizes);
    let slices: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
    importer.write_ranges(&ranges, &slices).await.unwrap();
    importer.seal(&manifest(&sizes).to_canonical_bytes()).await.unwrap();
    let mut reader = node.connect(&id, TokenRight::Read, Route::Tcp).await;
    read_all(&mut reader, &sizes).await.unwrap();

    // The same from a file in which the units lie in another order.
    let mut file = tempfile::tempfile().unwrap();
    let mut source = Vec::new();
    let mut source_offset = 0;
    for unit in (0..sizes.len()).rev() {
        std::io::Write::write_all(&mut file, &contents[unit]).unwrap();
        source.push(SourceRange { source_offset, unit: unit as u32, unit_offset: 0, bytes: sizes[unit] });
        source_offset += sizes[unit];
    }
    source.sort_by_key(|range| range.unit % 7);
    for (number, route) in [(2, Route::Tcp), (3, Route::Unix)] {
        let id = named(number);
        let mut importer = node.connect(&id, TokenRight::Import, route).await;
        importer.allocate(&sizes).await.unwrap();
        let mut told = 0;
        importer.write_from_file(file.as_fd(), &source, |bytes| told += bytes).await.unwrap();
        assert_eq!(told, sizes.iter().sum::<u64>());
        importer.seal(&manifest(&sizes).to_canonical_bytes()).await.unwrap();
        let mut reader = node.connect(&id, TokenRight::Read, route).await;
        read_all(&mut reader, &sizes).await.unwrap();
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn units_of_no_bytes_travel_too() {
    let node = Node::start().await;
    let id = named(1);
    let sizes = [0, 0, 0];
    import(&node.store, &id, &sizes);
    for cold in [false, true] {
        if cold {
            node.demote(&id, 0..3);
        }
        let mut reader = node.connect(&id, TokenRight::Read, Route::Unix).await;
        read_all(&mut reader, &sizes).await.unwrap();
        let mapped = reader.map(Arc::new(GroupLayout::new(&sizes).unwrap())).await.unwrap();
        (0..3).for_each(|unit| mapped.read_unit_into(unit, &mut [], Some(crate::checksum(b""))).unwrap());
    }
    node.store.delete_instance(&id, at(2_000), &Progress::default()).unwrap();
    // One of them goes to disk from a segment whose other bytes stay in memory.
    let (id, sizes) = (named(2), [0, 5_000]);
    import(&node.store, &id, &sizes);
    node.demote(&id, 0..1);
    assert!(node.store.inventory(&id).unwrap().unwrap().cold.get(0));
    assert!(node.store.verify(&id, 0, &Progress::default()).unwrap().cold.wrong.is_empty());
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_copy_on_disk_is_an_error_and_not_bytes() {
    let node = Node::start().await;
    let id = named(1);
    import(&node.store, &id, &SIZES);
    node.demote(&id, 0..4);
    let folder = node.folders.cold.path().join("instances").join(crate::memory_tier::instance_folder(&id));
    let segment = std::fs::File::options().write(true).open(folder.join("segment-000000")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&segment, b"spoiled", 12_288 + 2_000_000).unwrap();
    segment.sync_all().unwrap();
    let mut reader = node.connect(&id, TokenRight::Read, Route::Tcp).await;
    let error = read_all(&mut reader, &SIZES).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::ChecksumMismatch, "{error}");
    let described = reader.describe().await.unwrap();
    assert!(!described.cold.get(1), "the wrong copy no longer counts, and the connection goes on");
    let error = read_all(&mut reader, &SIZES).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_decide_what_a_connection_may_do() {
    let node = Node::start().await;
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let connect = async |token: &str| NodeConnection::connect(&node.endpoint, token, &ConnectOptions::default()).await;
    for wrong in ["", "b1.00.00"] {
        assert_eq!(connect(wrong).await.unwrap_err().code(), ErrorCode::Unauthorized);
    }
    let claims = |expires_unix_ms| TokenClaims {
        instance: id.clone(),
        right: TokenRight::Read,
        subject: "lease".into(),
        part: None,
        holders: None,
        expires_unix_ms,
    };
    let foreign = TokenKey::new(&[1; 32]).unwrap().sign(&claims(u64::MAX));
    assert_eq!(connect(&foreign).await.unwrap_err().code(), ErrorCode::Unauthorized);
    let old = connect(&key().sign(&claims(1_000))).await.unwrap_err();
    assert!(old.code() == ErrorCode::Unauthorized && old.to_string().contains("expired"), "{old}");

    let mut reader = node.connect(&id, TokenRight::Read, Route::Best).await;
    let error = reader.allocate(&SIZES).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unauthorized, "{error}");
    assert_eq!(reader.write(0, 0, b"x").await.unwrap_err().code(), ErrorCode::Unauthorized);
    assert_eq!(reader.seal(b"{}").await.unwrap_err().code(), ErrorCode::Unauthorized);
    let error = reader.renew(&token(&named(2), TokenRight::Read)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unauthorized, "another instance: {error}");
    reader.renew(&token(&id, TokenRight::Read)).await.unwrap();
    read_all(&mut reader, &SIZES).await.unwrap();

    let mut importer = node.connect(&id, TokenRight::Import, Route::Best).await;
    let error = importer.read_manifest().await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unauthorized, "{error}");
    let mut unknown = node.connect(&named(9), TokenRight::Read, Route::Best).await;
    assert_eq!(unknown.describe().await.unwrap_err().code(), ErrorCode::NotFound);

    let gate = TokenGate::closed();
    let options = DataPlaneOptions { tcp: Some("127.0.0.1:0".parse().unwrap()), ..DataPlaneOptions::default() };
    let plane = DataPlane::bind(options, node.store.clone(), gate).await.unwrap();
    let endpoint = NodeEndpoint {
        unix_socket: None,
        tcp: plane.tcp_address().map(|address| address.to_string()),
        ..node.endpoint.clone()
    };
    let serving = tokio::spawn(plane.run(std::future::pending()));
    let early = NodeConnection::connect(&endpoint, &token(&id, TokenRight::Read), &ConnectOptions::default()).await;
    assert_eq!(early.unwrap_err().code(), ErrorCode::Unavailable);
    serving.abort();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_requests_leave_the_connection_usable() {
    let node = Node::start().await;
    let id = named(2);
    for (number, route) in [(1, Route::Tcp), (2, Route::Unix)] {
        let mut importer = node.connect(&named(number), TokenRight::Import, route).await;
        assert_eq!(importer.write(0, 0, b"early").await.unwrap_err().code(), ErrorCode::NotFound);
        let error = importer.allocate(&[1 << 40]).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::CapacityExhausted, "{error}");
        importer.allocate(&SIZES).await.unwrap();
        // Several frames are under way when the first is refused.
        let beyond = vec![1; 30 << 20];
        assert_eq!(importer.write(1, 0, &beyond).await.unwrap_err().code(), ErrorCode::InvalidArgument);
        assert_eq!(importer.write(77, 0, b"x").await.unwrap_err().code(), ErrorCode::InvalidArgument);
        for wrong in [&b"not json"[..], b"{}"] {
            assert_eq!(importer.seal(wrong).await.unwrap_err().code(), ErrorCode::InvalidArgument);
        }
        let error = importer.seal(&manifest(&SIZES).to_canonical_bytes()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::ChecksumMismatch, "{error}");
        let error = importer.seal(&manifest(&[1, 2, 3]).to_canonical_bytes()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
        importer.write(2, 0, &content(2, SIZES[2])).await.unwrap();
        let described = importer.describe().await.unwrap();
        assert!(!described.sealed && described.manifest_sha256.is_none());
    }
    let mut reader = node.connect(&id, TokenRight::Read, Route::Tcp).await;
    assert_eq!(reader.read_manifest().await.unwrap_err().code(), ErrorCode::NotReady);
    let error = reader.map(Arc::new(GroupLayout::new(&SIZES).unwrap())).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_breaks_the_protocol_is_cut_off_alone() {
    let stall = Duration::from_millis(200);
    let node = Node::start_with(DataPlaneOptions { stall, connections_max: 4, ..DataPlaneOptions::default() }).await;
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let path = node.endpoint.unix_socket.clone().unwrap();
    let raw = async || Wire::new(Socket::Unix(UnixStream::connect(&path).await.unwrap()), Duration::from_secs(20));
    let wait = Duration::from_secs(20);
    let hello = |token: String| RequestHeader {
        payload_bytes: 0,
        descriptors: 0,
        body: Request::Hello { protocol: PROTOCOL_VERSION, token },
    };

    // A request before hello is refused; a payload where none belongs ends the connection.
    let mut peer = raw().await;
    let describe = RequestHeader { payload_bytes: 0, descriptors: 0, body: Request::Describe };
    peer.write_frame(&describe, &[], &[]).await.unwrap();
    let answer: ResponseHeader = peer.read_header(wait).await.unwrap();
    assert!(matches!(&answer.body, Response::Error(error) if error.code == ErrorCode::Unauthorized), "{answer:?}");
    peer.write_frame(&RequestHeader { payload_bytes: 1 << 60, ..describe.clone() }, &[], &[]).await.unwrap();
    let answer: ResponseHeader = peer.read_header(wait).await.unwrap();
    assert!(matches!(answer.body, Response::Error(_)));
    assert!(peer.read_header::<ResponseHeader>(wait).await.is_err(), "closed");

    // A payload of another length than its ranges is read and refused.
    let mut peer = raw().await;
    peer.write_frame(&hello(token(&id, TokenRight::Import)), &[], &[]).await.unwrap();
    let _: ResponseHeader = peer.read_header(wait).await.unwrap();
    for bytes in [0, 2, u64::MAX] {
        let ranges = vec![ReadRange { unit: 0, offset: 0, bytes }, ReadRange { unit: 0, offset: 0, bytes }];
        let short = RequestHeader { payload_bytes: 1, body: Request::Write { ranges }, ..describe.clone() };
        peer.write_frame(&short, &[b"x"], &[]).await.unwrap();
        let answer: ResponseHeader = peer.read_header(wait).await.unwrap();
        assert!(matches!(&answer.body, Response::Error(error) if error.code == ErrorCode::InvalidArgument));
    }

    // Another protocol, and more ranges than one request may have.
    let mut peer = raw().await;
    let newer = RequestHeader { body: Request::Hello { protocol: 99, token: String::new() }, ..describe.clone() };
    peer.write_frame(&newer, &[], &[]).await.unwrap();
    let answer: ResponseHeader = peer.read_header(wait).await.unwrap();
    assert!(matches!(&answer.body, Response::Error(error) if error.message.contains("protocol 1")), "{answer:?}");
    peer.write_frame(&hello(token(&id, TokenRight::Read)), &[], &[]).await.unwrap();
    let _: ResponseHeader = peer.read_header(wait).await.unwrap();
    let ranges = vec![ReadRange { unit: 0, offset: 0, bytes: 1 }; RANGES_MAX + 1];
    let many = RequestHeader { body: Request::ReadRanges { ranges }, ..describe.clone() };
    peer.write_frame(&many, &[], &[]).await.unwrap();
    let answer: ResponseHeader = peer.read_header(wait).await.unwrap();
    assert!(matches!(&answer.body, Response::Error(error) if error.code == ErrorCode::InvalidArgument));

    // Peers that stop in the middle of a frame, or never read what they asked for, are given up; others go on.
    let mut slow = raw().await;
    slow.write_frame(&hello(token(&id, TokenRight::Read)), &[], &[]).await.unwrap();
    let _: ResponseHeader = slow.read_header(wait).await.unwrap();
    let big = ReadRange { unit: 1, offset: 0, bytes: SIZES[1] };
    let greedy = RequestHeader { body: Request::ReadRanges { ranges: vec![big; 100] }, ..describe.clone() };
    slow.write_frame(&greedy, &[], &[]).await.unwrap();
    let half = TcpStream::connect(node.endpoint.tcp.as_ref().unwrap()).await.unwrap();
    half.try_write(&[200, 0, 0, 0, 1, 2]).unwrap();
    drop(peer);
    let mut reader = node.connect_when_free(&id, TokenRight::Read, Route::Tcp).await;
    read_all(&mut reader, &SIZES).await.unwrap();

    // The slow reader's guard goes with its connection, so that the unit can be freed. (Over RDMA, the other's does too.)
    drop(reader);
    let effect = UnitEffect { instance: id.clone(), fence: at(50), units: vec![UnitRange { start: 0, end: 4 }] };
    let store = node.store.clone();
    let freed = tokio::task::spawn_blocking(move || {
        store.copy_to_cold(&effect, &Progress::default())?;
        store.release_memory(&effect, Duration::from_secs(20), &Progress::default())
    });
    assert!(freed.await.unwrap().unwrap().hot.is_empty());
    drop((slow, half));
    node.stop().await;
}

// On one thread the node can not answer before the call is dropped.
#[tokio::test]
async fn a_call_that_was_dropped_half_way_ends_its_connection_and_no_other() {
    let node = Node::start().await;
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let mut reader = node.connect(&id, TokenRight::Read, Route::Tcp).await;
    let mut buffer = vec![0; SIZES[1] as usize];
    let range = [ReadRange { unit: 1, offset: 0, bytes: SIZES[1] }];
    {
        let mut slices = [buffer.as_mut_slice()];
        let mut read = std::pin::pin!(reader.read_ranges(&range, &mut slices));
        // Polled once: the request is on its way.
        assert!(futures::poll!(&mut read).is_pending());
    }
    assert!(!reader.is_usable());
    let error = reader.describe().await.unwrap_err();
    assert!(error.to_string().contains("dropped half-way") && error.is_retryable(), "{error}");
    let mut reader = node.connect(&id, TokenRight::Read, Route::Tcp).await;
    read_all(&mut reader, &SIZES).await.unwrap();
    assert!(reader.is_usable());
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_from_a_short_file_names_the_byte_and_can_be_repeated() {
    let node = Node::start().await;
    for (number, route) in [(1, Route::Tcp), (2, Route::Unix)] {
        let mut importer = node.connect(&named(number), TokenRight::Import, route).await;
        importer.allocate(&SIZES).await.unwrap();
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &content(0, SIZES[0])).unwrap();
        let whole = SourceRange { source_offset: 0, unit: 0, unit_offset: 0, bytes: SIZES[0] };
        let past = SourceRange { source_offset: 0, unit: 1, unit_offset: 0, bytes: SIZES[1] };
        let error = importer.write_from_file(file.as_fd(), &[whole, past], |_| {}).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
        assert!(error.to_string().contains("byte 0"), "{error}");
        importer.write_from_file(file.as_fd(), &[whole], |_| {}).await.unwrap();
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_limit_are_told_to_come_again() {
    let node = Node::start_with(DataPlaneOptions { connections_max: 2, ..DataPlaneOptions::default() }).await;
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let held =
        [node.connect(&id, TokenRight::Read, Route::Tcp).await, node.connect(&id, TokenRight::Read, Route::Unix).await];
    let options = ConnectOptions::default();
    let error = NodeConnection::connect(&node.endpoint, &token(&id, TokenRight::Read), &options).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable);
    assert!(error.is_retryable(), "{error}");
    drop(held);
    let deadline = Instant::now() + Duration::from_secs(20);
    while NodeConnection::connect(&node.endpoint, &token(&id, TokenRight::Read), &options).await.is_err() {
        assert!(Instant::now() < deadline, "the places never come back");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let nowhere = NodeEndpoint { unix_socket: Some("/nonexistent".into()), tcp: None, ..node.endpoint.clone() };
    let error = NodeConnection::connect(&nowhere, "", &options).await.unwrap_err();
    assert!(error.to_string().contains("/nonexistent"), "{error}");
    node.stop().await;
}

#[tokio::test]
async fn a_participant_speaks_for_its_own_fragments_alone() {
    let node = Node::start().await;
    let id = named(1);
    let mut whole = node.connect(&id, TokenRight::Import, Route::Best).await;
    whole.allocate(&SIZES).await.unwrap();
    let part = TokenPart { participant: ParticipantId::new("rank0").unwrap(), epoch: 1 };
    let own = token_of_part(&id, TokenRight::Import, Some(part));
    let mut own = NodeConnection::connect(&node.endpoint, &own, &ConnectOptions::default()).await.unwrap();
    let base = token(&named(2), TokenRight::Read);
    let unit = DeriveUnit { unit: 0, base_unit: 0, bytes: SIZES[0], blake3: None, patch: None };
    for refused in [
        own.open_base(&base, &[]).await.map(drop),
        own.derive(&[unit], |_| {}).await.map(drop),
        own.read_offers(false).await.map(drop),
        own.seal(b"{}").await.map(drop),
        whole.offer(&[]).await.map(drop),
    ] {
        let TransferError::Refused(refused) = refused.unwrap_err() else { panic!("the node has not spoken") };
        assert_eq!(refused.code, ErrorCode::Unauthorized, "{refused}");
    }
    node.stop().await;
}

#[tokio::test]
async fn a_connection_knows_that_the_node_has_closed_it() {
    let node = Node::start_with(DataPlaneOptions { idle: Duration::from_millis(50), ..Default::default() }).await;
    for route in [Route::Unix, Route::Tcp] {
        let connection = node.connect(&named(1), TokenRight::Import, route).await;
        let deadline = Instant::now() + Duration::from_secs(20);
        while connection.is_open() {
            assert!(Instant::now() < deadline, "an idle connection stays open");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let patient = Node::start().await;
    let mut connection = patient.connect(&named(1), TokenRight::Import, Route::Tcp).await;
    assert!(connection.is_open());
    connection.allocate(&SIZES).await.unwrap();
    assert!(connection.is_open());
    node.stop().await;
    patient.stop().await;
}

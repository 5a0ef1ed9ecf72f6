//! Both ends on machines of their own: the RDMA lab runs the node of these tests on one and the client on the other. Elsewhere they
//! say that they were skipped.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ballast_schemas::frame::{ReadRange, SourceRange};
use ballast_schemas::{ErrorCode, InstanceId, NodeEndpoint, NodeId, TokenRight};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::one_sided_tests::{link, place, read, read_at_random};
use super::*;
use crate::protocol_tests::{Node, manifest, named, read_all, token, token_until, whole};
use crate::rdma::LinkError;
use crate::testing::*;
use crate::token::{TOKEN_LEEWAY_MS, now_unix_ms};

const SIZES: [u64; 6] = [10_000, 3 << 20, 1, 70_000, 0, 17 << 20];
const CONTROL_PORT: u16 = 7701;
const PATIENCE: Duration = Duration::from_secs(60);

fn is_role(role: &str) -> bool {
    let is = std::env::var("BALLAST_RDMA_ROLE").is_ok_and(|own| own == role);
    if !is {
        println!("skipped: this is not the {role} of an RDMA lab");
    }
    is
}

/// Does what the client asks for, one word for each connection.
#[tokio::test(flavor = "multi_thread")]
async fn the_node_of_two_machines() {
    if !is_role("node") {
        return;
    }
    let mut node = Some(Node::start().await);
    let control = TcpListener::bind(("0.0.0.0", CONTROL_PORT)).await.unwrap();
    loop {
        let (mut socket, _) = control.accept().await.unwrap();
        let word = socket.read_u8().await.unwrap();
        match (word, &node) {
            (b'd', Some(node)) => node.demote(&named(1), 1..3),
            (b's', _) => node.take().unwrap().stop().await,
            _ => {}
        }
        socket.write_u8(word).await.unwrap();
        if word == b'e' {
            return;
        }
    }
}

struct Far {
    address: String,
    endpoint: NodeEndpoint,
}

impl Far {
    async fn reach() -> Self {
        let address = std::env::var("BALLAST_RDMA_NODE").unwrap();
        let endpoint = NodeEndpoint {
            node: NodeId::new("node-1").unwrap(),
            host_id: "another".to_owned(),
            unix_socket: None,
            tcp: Some(format!("{address}:{}", std::env::var("BALLAST_RDMA_PORT").unwrap())),
        };
        Self { address, endpoint }
    }

    async fn ask(&self, word: u8) {
        let deadline = Instant::now() + PATIENCE;
        let mut socket = loop {
            match TcpStream::connect((self.address.as_str(), CONTROL_PORT)).await {
                Ok(socket) => break socket,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        socket.write_u8(word).await.unwrap();
        assert_eq!(socket.read_u8().await.unwrap(), word);
    }

    async fn connect(&self, token: &str) -> NodeConnection {
        // The best way: that is RDMA, from another host.
        let connected = NodeConnection::connect(&self.endpoint, token, &ConnectOptions::default()).await.unwrap();
        assert_eq!(connected.transport(), Transport::Rdma, "{:?}", connected.why_not_rdma());
        connected
    }

    async fn read(&self, id: &InstanceId) -> NodeConnection {
        self.connect(&token(id, TokenRight::Read)).await
    }

    /// An import, half of it from memory and half from a file.
    async fn import(&self, id: &InstanceId, contents: &[Vec<u8>]) {
        let mut importer = self.connect(&token(id, TokenRight::Import)).await;
        importer.allocate(&SIZES).await.unwrap();
        let (ranges, _) = whole(&SIZES);
        let slices: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
        importer.write_ranges(&ranges[..4], &slices[..4]).await.unwrap();
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &contents[5]).unwrap();
        let source = SourceRange { source_offset: 0, unit: 5, unit_offset: 0, bytes: SIZES[5] };
        importer.write_from_file(file.as_fd(), &[source], |_| {}).await.unwrap();
        assert_eq!(importer.transport(), Transport::Rdma, "{:?}", importer.why_not_rdma());
        importer.seal(&manifest(&SIZES).to_canonical_bytes()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_of_two_machines() {
    if !is_role("client") {
        return;
    }
    let far = Far::reach().await;
    far.ask(b'?').await;
    let contents: Vec<Vec<u8>> = SIZES.iter().enumerate().map(|(unit, &bytes)| content(unit as u32, bytes)).collect();
    let (mine, other) = (named(1), named(2));
    far.import(&mine, &contents).await;
    far.import(&other, &contents).await;

    // The same bytes come back: over one connection, over several, in random ranges.
    let mut connection = far.read(&mine).await;
    read_all(&mut connection, &SIZES).await.unwrap();
    read_at_random(&mut connection, &contents, 20).await;
    let mut several = [far.read(&mine).await, far.read(&mine).await, far.read(&mine).await];
    let (ranges, mut buffers) = whole(&SIZES);
    let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    read_ranges_side_by_side(&mut several, &ranges, &mut slices).await.unwrap();
    assert!(buffers == contents);

    // What makes no sense is refused, and the connection goes on.
    for (unit, offset) in [(1, SIZES[1]), (99, 0), (0, u64::MAX)] {
        let wrong = connection.read_ranges(&[ReadRange { unit, offset, bytes: 1 }], &mut [&mut [0]]).await.unwrap_err();
        assert_eq!(wrong.code(), ErrorCode::InvalidArgument, "{wrong}");
    }
    read_all(&mut connection, &SIZES).await.unwrap();
    assert_eq!(connection.transport(), Transport::Rdma);

    // A key of another instance opens nothing, and what a token opened ends with it.
    let mut owner = far.read(&other).await;
    let foreign = place(&mut owner, 1).await.unwrap();
    assert!(matches!(read(link(&mut connection), foreign), Err(LinkError::NoAccess)));
    read_all(&mut connection, &SIZES).await.unwrap();
    assert_eq!(connection.transport(), Transport::Tcp, "the queue pair failed, the connection did not");
    let mut ending = far.connect(&token_until(&other, now_unix_ms() + 5_000 - TOKEN_LEEWAY_MS)).await;
    let there = place(&mut ending, 1).await.unwrap();
    let deadline = Instant::now() + PATIENCE;
    while let Ok(bytes) = read(link(&mut ending), there) {
        assert!(bytes == contents[1]);
        assert!(Instant::now() < deadline, "it never ends");
    }
    assert_eq!(read_all(&mut ending, &SIZES).await.unwrap_err().code(), ErrorCode::Unauthorized);

    // Units on disk come over TCP, the others beside them over RDMA.
    drop((connection, several));
    far.ask(b'd').await;
    let mut mixed = far.read(&mine).await;
    read_all(&mut mixed, &SIZES).await.unwrap();
    read_at_random(&mut mixed, &contents, 10).await;
    assert_eq!(mixed.transport(), Transport::Rdma);

    // The node goes in the middle of reads: nothing but right bytes, then an error within the time, and no hang.
    let reading = tokio::spawn(async move {
        loop {
            if let Err(error) = read_all(&mut mixed, &SIZES).await {
                return error;
            }
        }
    });
    far.ask(b's').await;
    let error = tokio::time::timeout(PATIENCE, reading).await.expect("it hangs").unwrap();
    assert!(error.is_retryable(), "{error}");
    far.ask(b'e').await;
}

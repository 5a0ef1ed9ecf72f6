//! The data-plane server of a node: listeners, limits and what each request does. A connection is served by its own
//! task and holds a bounded number of bytes, so that an idle or slow peer stands in nobody's way; frames are in `wire`.

mod one_sided;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ballast_schemas::frame::{
    ByteRange, DATA_BYTES_MAX, DERIVE_BYTES_MAX, DERIVED_RANGES_MAX, DESCRIPTORS_MAX, DOCUMENT_BYTES_MAX, DerivedRange,
    HOLDERS_MAX, HelloReply, OFFERS_MAX, OfferedFragment, PROTOCOL_VERSION, RANGES_MAX, ReadRange, Request,
    RequestHeader, Response, ResponseHeader, SegmentGrant, SourceRange,
};
use ballast_schemas::{BallastError, Digest, ErrorCode, NodeEndpoint, SessionId, TokenClaims, TokenRight, UNITS_MAX};
use bytes::{Bytes, BytesMut};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::cold::Progress;
use crate::deriving::{Base, Deriving};
use crate::error::StoreError;
use crate::layout::GroupLayout;
use crate::node_store::NodeStore;
use crate::rdma::Service;
use crate::sending::{Batch, produce};
use crate::token::{TokenGate, check_time, now_unix_ms};
use crate::wire::{Socket, Wire, WireError};
use one_sided::OneSided;

/// Bytes of a `Write` payload that are in hand at once, twice: one piece is written while the next comes in.
const PIECE_BYTES: u64 = 1 << 20;
/// Large documents (manifests, size lists) that are in hand at once, over all connections.
const DOCUMENTS_MAX: usize = 8;
/// Reads from disk ahead of need, over all connections; one more for each connection is always allowed.
const READ_AHEAD_MAX: usize = 64;
/// Pieces of derivations that block for disk or memory at once, over all connections and for each core. The threads that may
/// block are shared with everything else that a node does.
const DERIVATIONS_PER_CORE: usize = 2;
/// How long a new connection may take to say hello.
const HELLO_WAIT: Duration = Duration::from_secs(10);

/// How a node's data plane listens.
#[derive(Clone, Debug)]
pub struct DataPlaneOptions {
    /// Path of the Unix socket; a stale one is replaced.
    pub unix_socket: Option<PathBuf>,
    /// Address of the TCP listener; port 0 lets the system choose.
    pub tcp: Option<SocketAddr>,
    /// Connections served at once; further ones are told to come again.
    pub connections_max: usize,
    /// Longest time without progress inside a frame.
    pub stall: Duration,
    /// Longest time between two requests.
    pub idle: Duration,
    /// Whether peers may use RDMA where this host has it.
    pub rdma: bool,
}

impl Default for DataPlaneOptions {
    fn default() -> Self {
        Self {
            unix_socket: None,
            tcp: None,
            connections_max: 512,
            stall: Duration::from_secs(30),
            idle: Duration::from_secs(600),
            rdma: true,
        }
    }
}

/// A listener can not be opened.
#[derive(Debug, thiserror::Error)]
#[error("can not listen on {address}: {source}")]
pub struct BindError {
    /// Where.
    pub address: String,
    /// What the system said.
    pub source: std::io::Error,
}

/// A node's data plane, bound and ready to run.
#[derive(Debug)]
pub struct DataPlane {
    shared: Arc<Shared>,
    unix: Option<UnixListener>,
    unix_path: Option<PathBuf>,
    tcp: Option<TcpListener>,
    tcp_address: Option<SocketAddr>,
}

#[derive(Debug)]
struct Shared {
    store: Arc<NodeStore>,
    gate: TokenGate,
    options: DataPlaneOptions,
    connections: Arc<Semaphore>,
    documents: Semaphore,
    /// Reads from disk ahead of the one that a connection waits for, over all connections.
    read_ahead: Arc<Semaphore>,
    derivations: Arc<Semaphore>,
    /// One-sided transfers; `None` where they are switched off.
    rdma: Option<Arc<Service>>,
}

impl DataPlane {
    /// Opens the listeners.
    ///
    /// # Errors
    /// When one can not be opened.
    pub async fn bind(options: DataPlaneOptions, store: Arc<NodeStore>, gate: TokenGate) -> Result<Self, BindError> {
        let unix = match &options.unix_socket {
            Some(path) => {
                let failed = |source| BindError { address: path.display().to_string(), source };
                Some(bind_unix(path).map_err(failed)?)
            }
            None => None,
        };
        let (tcp, tcp_address) = match options.tcp {
            Some(address) => {
                let failed = |source| BindError { address: address.to_string(), source };
                let listener = TcpListener::bind(address).await.map_err(failed)?;
                let bound = listener.local_addr().map_err(failed)?;
                (Some(listener), Some(bound))
            }
            None => (None, None),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            store,
            gate,
            connections: Arc::new(Semaphore::new(options.connections_max)),
            documents: Semaphore::new(DOCUMENTS_MAX),
            read_ahead: Arc::new(Semaphore::new(READ_AHEAD_MAX)),
            derivations: Arc::new(Semaphore::new(DERIVATIONS_PER_CORE * cores)),
            rdma: options.rdma.then(Arc::default),
            options,
        });
        let unix_path = shared.options.unix_socket.clone();
        Ok(Self { shared, unix, unix_path, tcp, tcp_address })
    }

    /// Path of the Unix socket, if there is one.
    #[must_use]
    pub fn unix_socket(&self) -> Option<&Path> {
        self.unix_path.as_deref()
    }

    /// Address of the TCP listener, if there is one.
    #[must_use]
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.tcp_address
    }

    /// Serves until `shutdown` is done, then drops what is still connected.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let Self { shared, unix, unix_path, tcp, .. } = self;
        let mut connections = JoinSet::new();
        tokio::pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                () = &mut shutdown => break,
                accepted = accept_unix(unix.as_ref()) => accepted,
                accepted = accept_tcp(tcp.as_ref()) => accepted,
                Some(_) = connections.join_next() => continue,
            };
            match accepted {
                Ok(socket) => {
                    let shared = shared.clone();
                    connections.spawn(async move { shared.serve(socket).await });
                }
                Err(error) => {
                    // Out of descriptors, most likely: the ones in use come back with time.
                    tracing::warn!(%error, "can not accept a data-plane connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        connections.shutdown().await;
        if let Some(path) = unix_path {
            // A socket that stays is replaced at the next start.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn bind_unix(path: &Path) -> std::io::Result<UnixListener> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => match std::os::unix::net::UnixStream::connect(path) {
            Ok(_) => return Err(std::io::ErrorKind::AddrInUse.into()),
            Err(_) => std::fs::remove_file(path)?,
        },
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    // Who may connect is decided by tokens, as for TCP.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

async fn accept_unix(listener: Option<&UnixListener>) -> std::io::Result<Socket> {
    match listener {
        Some(listener) => listener.accept().await.map(|(socket, _)| Socket::Unix(socket)),
        None => std::future::pending().await,
    }
}

async fn accept_tcp(listener: Option<&TcpListener>) -> std::io::Result<Socket> {
    let Some(listener) = listener else { return std::future::pending().await };
    let (socket, _) = listener.accept().await?;
    socket.set_nodelay(true)?;
    Ok(Socket::Tcp(socket))
}

/// Why a connection ends, or a request fails.
enum Failure {
    /// The connection can not go on.
    Wire(WireError),
    /// The request is refused; the connection goes on.
    Refused(BallastError),
}

impl From<WireError> for Failure {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Refused(error.to_error())
    }
}

impl From<BallastError> for Failure {
    fn from(error: BallastError) -> Self {
        Self::Refused(error)
    }
}

fn invalid(reason: impl Into<String>) -> Failure {
    Failure::Refused(BallastError::invalid(reason))
}

fn unauthorized(reason: impl Into<String>) -> Failure {
    Failure::Refused(BallastError::new(ErrorCode::Unauthorized, reason))
}

fn respond(body: Response) -> ResponseHeader {
    ResponseHeader { payload_bytes: 0, descriptors: 0, body }
}

/// One connection.
struct Connection<'a> {
    shared: &'a Arc<Shared>,
    wire: Wire,
    claims: Option<TokenClaims>,
    /// What units are derived from.
    base: Option<Base>,
    /// What the peer reaches by one-sided transfers.
    one_sided: Option<OneSided>,
}

impl Shared {
    async fn serve(self: Arc<Self>, socket: Socket) {
        let wire = Wire::new(socket, self.options.stall);
        let mut connection = Connection { shared: &self, wire, claims: None, base: None, one_sided: None };
        let Ok(_permit) = self.connections.clone().try_acquire_owned() else {
            let message = format!("the node serves {} connections already; try again", self.options.connections_max);
            let error = BallastError::new(ErrorCode::Unavailable, message);
            // The peer that is turned away may be gone already.
            let _ = connection.wire.write_frame(&respond(Response::Error(error)), &[], &[]).await;
            return;
        };
        loop {
            match connection.serve_one().await {
                Ok(()) => {}
                Err(WireError::Closed) => return,
                Err(error) => {
                    tracing::debug!(%error, "a data-plane connection ended");
                    if let WireError::Malformed(_) = &error {
                        let error = respond(Response::Error(BallastError::invalid(error.to_string())));
                        // A courtesy to whoever debugs the peer.
                        let _ = connection.wire.write_frame(&error, &[], &[]).await;
                    }
                    return;
                }
            }
        }
    }
}

/// A piece on its way into memory; its buffer comes back with the result.
type PieceWrite = tokio::task::JoinHandle<(Vec<u8>, Result<(), StoreError>)>;

/// Payload of a request that has not been read yet.
struct Payload {
    left: u64,
}

impl Connection<'_> {
    async fn serve_one(&mut self) -> Result<(), WireError> {
        let idle = if self.claims.is_some() { self.shared.options.idle } else { HELLO_WAIT };
        let RequestHeader { payload_bytes, descriptors, body } = self.wire.read_header(idle).await?;
        let descriptors = self.wire.take_descriptors(descriptors)?;
        let limit = match &body {
            Request::Allocate { .. } => u64::from(UNITS_MAX) * 8,
            Request::Write { .. } | Request::Derive { .. } => DATA_BYTES_MAX,
            Request::Seal => DOCUMENT_BYTES_MAX,
            _ => 0,
        };
        if payload_bytes > limit {
            return Err(WireError::Malformed(format!("{payload_bytes} bytes of payload; this request takes {limit}")));
        }
        let mut payload = Payload { left: payload_bytes };
        match self.handle(body, &mut payload, descriptors).await {
            Ok(()) => Ok(()),
            Err(Failure::Wire(error)) => Err(error),
            Err(Failure::Refused(error)) => {
                // What was announced is read in any case, so that the next request is found.
                self.wire.skip(payload.left).await?;
                self.send(Response::Error(error)).await
            }
        }
    }

    async fn send(&mut self, body: Response) -> Result<(), WireError> {
        self.wire.write_frame(&respond(body), &[], &[]).await
    }

    async fn handle(
        &mut self,
        request: Request,
        payload: &mut Payload,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), Failure> {
        match request {
            Request::Hello { protocol, token } => self.hello(protocol, &token).await,
            Request::Allocate { unit_count, layout_digest } => self.allocate(unit_count, layout_digest, payload).await,
            Request::Write { ranges } => self.write(ranges, payload).await,
            Request::WriteFd { ranges } => self.write_from_descriptor(ranges, descriptors).await,
            Request::OpenBase { token, holders } => self.open_base(&token, &holders).await,
            Request::Derive { ranges } => self.derive(ranges, payload).await,
            Request::Offer { fragments } => self.offer(fragments).await,
            Request::ReadOffers { conflicts } => self.read_offers(conflicts).await,
            Request::Seal => self.seal(payload).await,
            Request::Describe => {
                let claims = self.claims()?;
                let description = self.shared.store.describe(&claims.instance)?;
                Ok(self.send(Response::Described(description)).await?)
            }
            Request::Check { unit } => self.check(unit).await,
            Request::ReadManifest => {
                let claims = self.allowed(TokenRight::Read)?;
                let manifest = self.shared.store.reader(&claims.instance)?.manifest();
                self.send_document(&manifest).await
            }
            Request::ReadAffinity => {
                let claims = self.allowed(TokenRight::Read)?;
                let index = self.shared.store.affinity_index(&claims.instance)?;
                let index = rmp_serde::to_vec_named(&index);
                let index = index.map_err(|error| invalid(format!("the affinity index does not encode: {error}")))?;
                self.send_document(&index).await
            }
            Request::ReadRanges { ranges } => self.read_ranges(ranges).await,
            Request::MapSegments { memory, cold } => self.map_segments(memory, cold).await,
            Request::OpenRdma { peer } => self.open_rdma(peer).await,
            Request::LocateUnits { units } => self.locate_units(units).await,
            Request::WriteLanded { slot, ranges } => self.write_landed(slot, ranges).await,
        }
    }

    async fn hello(&mut self, protocol: u32, token: &str) -> Result<(), Failure> {
        if protocol != PROTOCOL_VERSION {
            let message =
                format!("this node speaks protocol {PROTOCOL_VERSION}, the caller {protocol}; upgrade the older");
            return Err(invalid(message));
        }
        let claims = self.verify(token)?;
        if let Some(before) = self.claims.as_ref().filter(|before| before.instance != claims.instance) {
            return Err(unauthorized(format!(
                "this connection acts for {}, the token is for another",
                before.instance
            )));
        }
        let store = &self.shared.store;
        let reply = HelloReply {
            protocol: PROTOCOL_VERSION,
            node: store.node().clone(),
            incarnation: store.incarnation().to_owned(),
            instance: claims.instance.clone(),
        };
        if let Some(one_sided) = &self.one_sided {
            one_sided.extend(&claims);
        }
        self.claims = Some(claims);
        Ok(self.send(Response::Hello(reply)).await?)
    }

    fn verify(&self, token: &str) -> Result<TokenClaims, Failure> {
        let Some(key) = self.shared.gate.key() else {
            let message = "this node has not been introduced to its cluster yet; try again";
            return Err(BallastError::new(ErrorCode::Unavailable, message).into());
        };
        key.verify(token, now_unix_ms()).map_err(|error| unauthorized(error.to_string()))
    }

    fn claims(&self) -> Result<TokenClaims, Failure> {
        let claims = self.claims.clone().ok_or_else(|| unauthorized("say hello with a token first"))?;
        check_time(&claims, now_unix_ms()).map_err(|error| unauthorized(error.to_string()))?;
        Ok(claims)
    }

    fn allowed(&self, right: TokenRight) -> Result<TokenClaims, Failure> {
        let claims = self.claims()?;
        if claims.right == right {
            return Ok(claims);
        }
        let (has, needs) = match right {
            TokenRight::Read => ("import", "reading"),
            TokenRight::Import => ("read", "importing"),
        };
        Err(unauthorized(format!("the token allows {has}; this request needs one for {needs}")))
    }

    async fn offer(&mut self, fragments: Vec<OfferedFragment>) -> Result<(), Failure> {
        let (claims, session) = self.importer()?;
        if fragments.len() > OFFERS_MAX {
            return Err(invalid(format!("{} fragments; at most {OFFERS_MAX} fit one request", fragments.len())));
        }
        let Some(part) = claims.part else {
            return Err(unauthorized("only a participant of an import offers fragments; join it first"));
        };
        let store = self.shared.store.clone();
        let wanted = blocking(move || store.offer(&claims.instance, &session, &part, &fragments)).await?;
        Ok(self.send(Response::Offered { wanted }).await?)
    }

    async fn read_offers(&mut self, conflicts: bool) -> Result<(), Failure> {
        let (claims, session) = self.whole_importer()?;
        let store = self.shared.store.clone();
        let offers = blocking(move || store.offers(&claims.instance, &session, conflicts)).await?;
        let offers = rmp_serde::to_vec(&offers);
        let offers = offers.map_err(|error| invalid(format!("the offers do not encode: {error}")))?;
        self.send_document(&offers).await
    }

    /// As [`Connection::importer`], of somebody who imports more than a part.
    fn whole_importer(&self) -> Result<(TokenClaims, SessionId), Failure> {
        let (claims, session) = self.importer()?;
        match &claims.part {
            None => Ok((claims, session)),
            Some(part) => Err(unauthorized(format!(
                "the token allows the part of {}; this request needs one for the whole import",
                part.participant
            ))),
        }
    }

    /// Claims of an importer, and its session.
    fn importer(&self) -> Result<(TokenClaims, SessionId), Failure> {
        let claims = self.allowed(TokenRight::Import)?;
        let session = SessionId::new(claims.subject.clone()).map_err(|error| invalid(error.to_string()))?;
        Ok((claims, session))
    }

    async fn allocate(&mut self, unit_count: u32, layout_digest: Digest, payload: &mut Payload) -> Result<(), Failure> {
        let (claims, session) = self.importer()?;
        if payload.left != u64::from(unit_count) * 8 {
            return Err(invalid(format!("{} bytes of sizes for {unit_count} units", payload.left)));
        }
        let sizes = self.read_document(payload).await?;
        let sizes: Vec<u64> =
            sizes.chunks_exact(8).filter_map(|size| size.try_into().ok()).map(u64::from_le_bytes).collect();
        let store = self.shared.store.clone();
        let allocated = blocking(move || {
            let found = GroupLayout::new(&sizes)?.digest();
            if found != layout_digest {
                let (instance, expected, found) = (claims.instance, found, layout_digest);
                return Err(StoreError::OtherLayout { instance, expected, found });
            }
            store.allocate(&claims.instance, &session, &sizes)
        })
        .await?;
        Ok(self
            .send(Response::Allocated { reserved_bytes: allocated.reserved_bytes, sealed: allocated.sealed })
            .await?)
    }

    async fn write(&mut self, ranges: Vec<ByteRange>, payload: &mut Payload) -> Result<(), Failure> {
        let (claims, session) = self.importer()?;
        check_count(ranges.len())?;
        let total = payload.left;
        let wanted = ranges.iter().fold(0_u64, |sum, range| sum.saturating_add(range.bytes));
        if wanted != total {
            return Err(invalid(format!("{total} bytes of payload for ranges of {wanted}")));
        }
        let claims = Arc::new((claims, session));
        let mut ranges = VecDeque::from(ranges);
        let mut spare = Vec::new();
        let mut writing: Option<PieceWrite> = None;
        let result = loop {
            let mut piece = std::mem::take(&mut spare);
            piece.resize(payload.left.min(PIECE_BYTES) as usize, 0);
            self.wire.read_exact(&mut piece).await?;
            payload.left -= piece.len() as u64;
            if let Some(before) = writing.take() {
                let (buffer, result) = joined(before.await)?;
                spare = buffer;
                if result.is_err() {
                    break result;
                }
            }
            let targets = take_front(&mut ranges, piece.len() as u64);
            let (store, claims) = (self.shared.store.clone(), claims.clone());
            let handle = tokio::task::spawn_blocking(move || {
                let mut rest = piece.as_slice();
                let result = targets.iter().try_for_each(|target| {
                    let (bytes, later) = rest.split_at((target.bytes as usize).min(rest.len()));
                    rest = later;
                    let (claims, session) = (&claims.0, &claims.1);
                    let part = claims.part.as_ref();
                    store.write_as(&claims.instance, session, part, target.unit, target.offset, bytes)
                });
                (piece, result)
            });
            if payload.left == 0 {
                break joined(handle.await)?.1;
            }
            writing = Some(handle);
        };
        result?;
        Ok(self.send(Response::Written { bytes: total }).await?)
    }

    async fn write_from_descriptor(
        &mut self,
        ranges: Vec<SourceRange>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), Failure> {
        let (claims, session) = self.importer()?;
        let source: [OwnedFd; 1] = descriptors
            .try_into()
            .map_err(|found: Vec<OwnedFd>| invalid(format!("one source descriptor is needed, {} came", found.len())))?;
        check_count(ranges.len())?;
        let store = self.shared.store.clone();
        let bytes = blocking(move || {
            let part = claims.part.as_ref();
            store.write_from_fd(&claims.instance, &session, part, source[0].as_fd(), &ranges, &Progress::default())
        })
        .await?;
        Ok(self.send(Response::Written { bytes }).await?)
    }

    async fn open_base(&mut self, token: &str, holders: &[NodeEndpoint]) -> Result<(), Failure> {
        self.whole_importer()?;
        let claims = self.verify(token)?;
        if claims.right != TokenRight::Read {
            return Err(unauthorized("the token of a base must allow reading it"));
        }
        if holders.len() > HOLDERS_MAX {
            return Err(invalid(format!("{} holders; at most {HOLDERS_MAX} fit one request", holders.len())));
        }
        self.base = None;
        let base = Base::open(&self.shared.store, claims, token, holders).await?;
        let here = base.is_here();
        self.base = Some(base);
        Ok(self.send(Response::BaseOpened { here }).await?)
    }

    async fn derive(&mut self, ranges: Vec<DerivedRange>, payload: &mut Payload) -> Result<(), Failure> {
        let (claims, session_id) = self.whole_importer()?;
        if ranges.len() > DERIVED_RANGES_MAX {
            return Err(invalid(format!("{} ranges; at most {DERIVED_RANGES_MAX} fit one request", ranges.len())));
        }
        let bytes = ranges.iter().fold(0_u64, |sum, range| sum.saturating_add(range.bytes));
        if bytes > DERIVE_BYTES_MAX {
            return Err(invalid(format!("{bytes} bytes to make; at most {DERIVE_BYTES_MAX} fit one request")));
        }
        let expired = |base: &Base| check_time(&base.claims, now_unix_ms()).err();
        if let Some(error) = self.base.as_ref().and_then(expired) {
            return Err(unauthorized(error.to_string()));
        }
        let payload = self.read_payload(payload).await?;
        let Some(base) = &mut self.base else {
            return Err(invalid("open the base first"));
        };
        let work =
            Deriving { store: self.shared.store.clone(), instance: claims.instance, session_id, ranges, payload };
        let units = tokio::select! {
            made = base.derive(work, &self.shared.derivations) => made?,
            () = self.wire.closed() => return Err(WireError::Closed.into()),
        };
        Ok(self.send(Response::Derived { units }).await?)
    }

    /// In one of the places for work that blocks for long, as a derivation: whoever asks has read as much before.
    async fn check(&mut self, unit: u32) -> Result<(), Failure> {
        let claims = self.allowed(TokenRight::Read)?;
        let store = self.shared.store.clone();
        let place =
            self.shared.derivations.clone().acquire_owned().await.map_err(|_| invalid("the node is stopping"))?;
        let holdings = blocking(move || {
            let _place = place;
            store.check_copies(&claims.instance, unit)?;
            store.describe(&claims.instance)
        });
        let holdings = holdings.await?;
        Ok(self.send(Response::Described(holdings)).await?)
    }

    async fn seal(&mut self, payload: &mut Payload) -> Result<(), Failure> {
        let (claims, session) = self.whole_importer()?;
        let manifest = self.read_document(payload).await?;
        let store = self.shared.store.clone();
        let receipt = blocking(move || store.seal(&claims.instance, &session, manifest)).await?;
        Ok(self.send(Response::Sealed(receipt)).await?)
    }

    /// Reads a payload that may be large: few of them are in hand at once.
    async fn read_document(&mut self, payload: &mut Payload) -> Result<Bytes, Failure> {
        let _permit = self.shared.documents.acquire().await.map_err(|_| invalid("the node is stopping"))?;
        Ok(self.read_payload(payload).await?)
    }

    /// Reads a whole payload. Its buffer grows with what comes, not with what was announced.
    async fn read_payload(&mut self, payload: &mut Payload) -> Result<Bytes, WireError> {
        let mut document = BytesMut::new();
        while payload.left > 0 {
            let have = document.len();
            document.resize(have + payload.left.min(PIECE_BYTES) as usize, 0);
            self.wire.read_exact(&mut document[have..]).await?;
            payload.left -= (document.len() - have) as u64;
        }
        Ok(document.freeze())
    }

    async fn send_document(&mut self, document: &[u8]) -> Result<(), Failure> {
        let body = Response::Document { sha256: Digest::of(document) };
        let header = ResponseHeader { payload_bytes: document.len() as u64, descriptors: 0, body };
        Ok(self.wire.write_frame(&header, &[document], &[]).await?)
    }

    async fn read_ranges(&mut self, ranges: Vec<ReadRange>) -> Result<(), Failure> {
        let claims = self.allowed(TokenRight::Read)?;
        check_count(ranges.len())?;
        let store = self.shared.store.clone();
        let reader = store.reader(&claims.instance)?;
        for range in &ranges {
            reader.check(range)?;
        }
        let (batches, mut ready) = tokio::sync::mpsc::channel::<Result<Batch, StoreError>>(1);
        let ahead = self.shared.read_ahead.clone();
        let producer = tokio::spawn(produce(store, claims.instance, reader, ranges, ahead, batches));
        let mut sent = 0;
        let result = loop {
            match ready.recv().await {
                None => break Ok(()),
                Some(Err(error)) => break Err(Failure::from(error)),
                Some(Ok(batch)) => {
                    let payload = batch.slices();
                    let payload_bytes = batch.bytes();
                    let header = ResponseHeader { payload_bytes, descriptors: 0, body: Response::Data };
                    if let Err(error) = self.wire.write_frame(&header, &payload, &[]).await {
                        break Err(Failure::from(error));
                    }
                    sent += payload_bytes;
                }
            }
        };
        // A producer whose channel is closed ends by itself.
        drop(ready);
        let produced = producer.await;
        result?;
        joined(produced)?;
        Ok(self.send(Response::End { bytes: sent }).await?)
    }

    async fn map_segments(&mut self, memory: bool, cold: bool) -> Result<(), Failure> {
        let claims = self.allowed(TokenRight::Read)?;
        if !self.wire.is_unix() {
            return Err(invalid("segments are handed out over the Unix socket only; read ranges instead"));
        }
        let store = self.shared.store.clone();
        let granted = blocking(move || store.reader(&claims.instance)?.grant_segments(memory, cold)).await?;
        let mut holdings = Some(granted.holdings);
        let mut rest = granted.grants.as_slice();
        loop {
            let (now, later) = rest.split_at(rest.len().min(DESCRIPTORS_MAX));
            rest = later;
            let grants: Vec<SegmentGrant> = now.iter().map(|(grant, _)| *grant).collect();
            let descriptors: Vec<_> = now.iter().map(|(_, descriptor)| descriptor.as_fd()).collect();
            let holdings = if rest.is_empty() { holdings.take() } else { None };
            let last = holdings.is_some();
            let body = Response::Segments { grants, holdings };
            let header = ResponseHeader { payload_bytes: 0, descriptors: descriptors.len() as u32, body };
            self.wire.write_frame(&header, &[], &descriptors).await?;
            if last {
                return Ok(());
            }
        }
    }
}

/// Takes the ranges of the next `bytes` bytes off the front, cutting the last one if need be.
fn take_front(ranges: &mut VecDeque<ByteRange>, mut bytes: u64) -> Vec<ByteRange> {
    let mut taken = Vec::new();
    while let Some(range) = ranges.front_mut().filter(|range| range.bytes <= bytes || bytes > 0) {
        let take = range.bytes.min(bytes);
        taken.push(ByteRange { bytes: take, ..*range });
        bytes -= take;
        if take == range.bytes {
            ranges.pop_front();
        } else {
            *range = ByteRange { offset: range.offset.saturating_add(take), bytes: range.bytes - take, ..*range };
        }
    }
    taken
}

fn check_count(ranges: usize) -> Result<(), Failure> {
    if ranges > RANGES_MAX {
        Err(invalid(format!("{ranges} ranges; at most {RANGES_MAX} fit one request")))
    } else {
        Ok(())
    }
}

fn joined<T>(result: Result<T, tokio::task::JoinError>) -> Result<T, Failure> {
    result.map_err(|error| {
        BallastError::new(ErrorCode::Unavailable, format!("the node failed at this request: {error}")).into()
    })
}

/// Runs work that blocks for disk or memory on a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, Failure> {
    Ok(joined(tokio::task::spawn_blocking(work).await)??)
}

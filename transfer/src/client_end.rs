//! The client's end of the data plane: a connection to one node for one instance, over the Unix socket of the same host
//! or TCP, with a typed call for each request (see ARCHITECTURE.md, Transfer protocol). Leases, manifests and plans are
//! the client crate's matter.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ballast_schemas::frame::{
    ByteRange, DATA_BYTES_MAX, DERIVE_BYTES_MAX, DOCUMENT_BYTES_MAX, DerivedRange, DerivedUnit, Description,
    HOLDERS_MAX, HelloReply, OfferedFragment, Offers, PROTOCOL_VERSION, RANGES_MAX, ReadRange, Request, RequestHeader,
    Response, ResponseHeader, SourceRange,
};
use ballast_schemas::{AffinityIndex, BallastError, Bitmap, Digest, NodeEndpoint, NodeId, Receipt};
use bytes::Bytes;
use tokio::net::{TcpStream, UnixStream};

use crate::batching::{batches, read_batch, targets};
use crate::layout::GroupLayout;
use crate::mapped::MappedInstance;
use crate::node_store::Allocated;
use crate::patch::{DeriveUnit, requests};
use crate::transfer_error::TransferError;
use crate::wire::{Socket, Wire, WireError};

/// Bytes of one `Write` frame.
const WRITE_BYTES: u64 = DATA_BYTES_MAX / 2;
/// Bytes of one `WriteFd` request: an answer, and so progress, every fraction of a second.
const WRITE_FD_BYTES: u64 = 256 << 20;
/// Frames sent ahead of their answers.
const WRITES_AHEAD: usize = 4;

/// How a connection may be made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Route {
    /// The Unix socket when the node is on this host and it can be reached, TCP otherwise.
    #[default]
    Best,
    /// The Unix socket or nothing.
    Unix,
    /// TCP or nothing.
    Tcp,
}

/// What a connection runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A Unix socket, which passes descriptors: segments can be mapped.
    Unix,
    /// TCP.
    Tcp,
}

/// How to connect.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Which way.
    pub route: Route,
    /// Longest time without progress while bytes move or an answer is awaited that needs no long work.
    pub stall: Duration,
    /// Longest wait for an answer that may need long work on the node: a seal that checks every byte.
    pub patience: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { route: Route::Best, stall: Duration::from_secs(30), patience: Duration::from_secs(600) }
    }
}

/// The id of this host: equal ids of node and client mean that the node's Unix socket may be reachable.
///
/// # Errors
/// When the system does not tell.
pub fn host_id() -> std::io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// A connection to one node for one instance. Calls go one after the other; several connections go side by side.
#[derive(Debug)]
pub struct NodeConnection {
    wire: Wire,
    hello: HelloReply,
    options: ConnectOptions,
    /// Answers that are still to come. More than none between two calls means that one was dropped half-way.
    outstanding: u32,
    /// Bytes that one `Derive` request makes.
    pub(crate) derive_bytes: u64,
}

impl NodeConnection {
    /// Connects and says hello with a token.
    ///
    /// # Errors
    /// When no way leads to the node, it refuses the token, or it is another node than expected.
    pub async fn connect(
        endpoint: &NodeEndpoint,
        token: &str,
        options: &ConnectOptions,
    ) -> Result<Self, TransferError> {
        let node = &endpoint.node;
        let mut tried = Vec::new();
        let same_host = host_id().is_ok_and(|host| host == endpoint.host_id);
        let unix = endpoint.unix_socket.as_ref().filter(|_| match options.route {
            Route::Best => same_host,
            Route::Unix => true,
            Route::Tcp => false,
        });
        if let Some(path) = unix {
            match in_time(options.stall, UnixStream::connect(PathBuf::from(path))).await {
                Ok(socket) => match Self::greet(Socket::Unix(socket), node, token, options).await {
                    // The node has spoken, or there is no other way.
                    Err(error) if options.route == Route::Best && !matches!(error, TransferError::Refused(_)) => {
                        tried.push(format!("{path}: {error}"));
                    }
                    greeted => return greeted,
                },
                Err(error) => tried.push(format!("{path}: {error}")),
            }
        }
        if let Some(address) = endpoint.tcp.as_ref().filter(|_| options.route != Route::Unix) {
            match in_time(options.stall, TcpStream::connect(address)).await {
                Ok(socket) => {
                    // Answers are small and awaited; a socket without the option still works.
                    let _ = socket.set_nodelay(true);
                    return Self::greet(Socket::Tcp(socket), node, token, options).await;
                }
                Err(error) => tried.push(format!("{address}: {error}")),
            }
        }
        let tried = if tried.is_empty() { "it has no address for this route".to_owned() } else { tried.join("; ") };
        Err(TransferError::Unreachable { node: node.clone(), tried })
    }

    async fn greet(
        socket: Socket,
        node: &NodeId,
        token: &str,
        options: &ConnectOptions,
    ) -> Result<Self, TransferError> {
        let wire = Wire::new(socket, options.stall);
        let broken = |error: WireError| TransferError::Broken { node: node.clone(), reason: error.to_string() };
        let protocol = |reason: String| TransferError::Protocol { node: node.clone(), reason };
        let mut wire = wire;
        let body = Request::Hello { protocol: PROTOCOL_VERSION, token: token.to_owned() };
        wire.write_frame(&RequestHeader { payload_bytes: 0, descriptors: 0, body }, &[], &[]).await.map_err(broken)?;
        let header: ResponseHeader = wire.read_header(options.stall).await.map_err(broken)?;
        match header.body {
            Response::Hello(hello) if hello.node == *node => {
                Ok(Self { wire, hello, options: options.clone(), outstanding: 0, derive_bytes: DERIVE_BYTES_MAX })
            }
            Response::Hello(hello) => Err(protocol(format!("node {} answers there", hello.node))),
            Response::Error(error) => Err(error.into()),
            other => Err(protocol(format!("unexpected answer to hello: {}", name(&other)))),
        }
    }

    /// What the node said to hello.
    #[must_use]
    pub fn hello(&self) -> &HelloReply {
        &self.hello
    }

    /// What the connection runs over.
    #[must_use]
    pub fn transport(&self) -> Transport {
        if self.wire.is_unix() { Transport::Unix } else { Transport::Tcp }
    }

    /// Whether the connection can take another call: not after it broke, or a call was dropped half-way.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.outstanding == 0
    }

    /// Whether the node has not closed the connection, as it does when nothing was asked for long. Then connect again.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.wire.is_open()
    }

    /// Goes on under a newer token for the same instance.
    ///
    /// # Errors
    /// When the node refuses it.
    pub async fn renew(&mut self, token: &str) -> Result<(), TransferError> {
        let body = Request::Hello { protocol: PROTOCOL_VERSION, token: token.to_owned() };
        match self.call(body, &[], &[], self.options.stall).await?.body {
            Response::Hello(hello) => {
                self.hello = hello;
                Ok(())
            }
            other => Err(self.unexpected(&other)),
        }
    }

    /// Reserves memory for units of these sizes.
    ///
    /// # Errors
    /// `CAPACITY_EXHAUSTED` with numbers when there is no room; otherwise when the node refuses.
    pub async fn allocate(&mut self, unit_sizes: &[u64]) -> Result<Allocated, TransferError> {
        let layout = GroupLayout::new(unit_sizes)?;
        let payload: Vec<u8> = unit_sizes.iter().flat_map(|size| size.to_le_bytes()).collect();
        let body = Request::Allocate { unit_count: layout.unit_count(), layout_digest: layout.digest() };
        match self.call(body, &[&payload], &[], self.options.stall).await?.body {
            Response::Allocated { reserved_bytes, sealed } => Ok(Allocated { reserved_bytes, sealed }),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Writes bytes into a unit.
    ///
    /// # Errors
    /// When the node refuses, or the connection breaks; some of the bytes may be written then.
    pub async fn write(&mut self, unit: u32, offset: u64, bytes: &[u8]) -> Result<(), TransferError> {
        self.write_ranges(&[ByteRange { unit, offset, bytes: bytes.len() as u64 }], &[bytes]).await
    }

    /// Writes buffers into ranges of the same lengths, many in one frame.
    ///
    /// # Errors
    /// When the node refuses, or the connection breaks; some of the bytes may be written then.
    pub async fn write_ranges(&mut self, ranges: &[ByteRange], buffers: &[&[u8]]) -> Result<(), TransferError> {
        let fits = ranges.len() == buffers.len() && ranges.iter().zip(buffers).all(|(r, b)| r.bytes == b.len() as u64);
        if !fits {
            return Err(BallastError::invalid("every range needs a buffer of its length").into());
        }
        self.check_usable()?;
        let mut ahead = 0;
        let mut failure = None;
        // Units are cut as a file with all buffers one after the other would be: `source_offset` counts in it.
        let mut end = 0;
        let sources = ranges.iter().map(|range| {
            let source_offset = end;
            end += range.bytes;
            SourceRange { source_offset, unit: range.unit, unit_offset: range.offset, bytes: range.bytes }
        });
        let sources: Vec<SourceRange> = sources.collect();
        let mut current = 0;
        for batch in batches(&sources, WRITE_BYTES) {
            let mut payload = Vec::with_capacity(batch.len());
            for piece in &batch {
                while sources[current].source_offset + sources[current].bytes < piece.source_offset + piece.bytes {
                    current += 1;
                }
                let start = (piece.source_offset - sources[current].source_offset) as usize;
                payload.push(&buffers[current][start..start + piece.bytes as usize]);
            }
            self.send(Request::Write { ranges: targets(&batch) }, &payload, &[]).await?;
            ahead += 1;
            if ahead > WRITES_AHEAD {
                ahead -= 1;
                failure = self.written(self.options.stall).await?;
                if failure.is_some() {
                    break;
                }
            }
        }
        for _ in 0..ahead {
            let next = self.written(self.options.stall).await?;
            failure = failure.or(next);
        }
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    /// One answer to a write; a refusal is a value, so that the other answers are still read.
    async fn written(&mut self, wait: Duration) -> Result<Option<BallastError>, TransferError> {
        match self.answer(wait).await {
            Ok(ResponseHeader { body: Response::Written { .. }, .. }) => Ok(None),
            Ok(other) => Err(self.unexpected(&other.body)),
            Err(TransferError::Refused(error)) => Ok(Some(error)),
            Err(error) => Err(error),
        }
    }

    /// Writes ranges of a regular file or memfd into units: on the same host the node copies them itself, over TCP they
    /// are read here and sent. `progress` is told the bytes of each step.
    ///
    /// # Errors
    /// When the node refuses, the source can not be read, or the connection breaks; some may be written then.
    pub async fn write_from_file(
        &mut self,
        source: BorrowedFd<'_>,
        ranges: &[SourceRange],
        mut progress: impl FnMut(u64),
    ) -> Result<(), TransferError> {
        if self.wire.is_unix() {
            for batch in batches(ranges, WRITE_FD_BYTES) {
                let bytes = batch.iter().map(|range| range.bytes).sum();
                match self.call(Request::WriteFd { ranges: batch }, &[], &[source], self.options.patience).await?.body {
                    Response::Written { .. } => progress(bytes),
                    other => return Err(self.unexpected(&other)),
                }
            }
            return Ok(());
        }
        self.check_usable()?;
        let failed = |offset, source| TransferError::Source { offset, source };
        let source = Arc::new(File::from(source.try_clone_to_owned().map_err(|error| failed(0, error))?));
        let mut ahead = std::collections::VecDeque::new();
        let mut failure: Option<TransferError> = None;
        let mut batches = batches(ranges, WRITE_BYTES);
        loop {
            // After a failure nothing more is sent, but the answers under way are still read.
            let batch = if failure.is_none() { batches.next() } else { None };
            let last = batch.is_none();
            if let Some(batch) = batch {
                let (file, ranges) = (source.clone(), targets(&batch));
                let bytes: u64 = ranges.iter().map(|range| range.bytes).sum();
                let read = tokio::task::spawn_blocking(move || read_batch(&file, &batch)).await;
                match read.unwrap_or_else(|error| Err((0, std::io::Error::other(error)))) {
                    Ok(buffer) => {
                        self.send(Request::Write { ranges }, &[&buffer], &[]).await?;
                        ahead.push_back(bytes);
                    }
                    Err((offset, error)) => failure = Some(failed(offset, error)),
                }
            }
            if ahead.len() > WRITES_AHEAD || last {
                match ahead.pop_front() {
                    None => return failure.map_or(Ok(()), Err),
                    Some(bytes) => match self.written(self.options.stall).await? {
                        None => progress(bytes),
                        Some(error) => failure = failure.or(Some(error.into())),
                    },
                }
            }
        }
    }

    /// Names the instance that units are derived from, by a token to read it, and other nodes that hold it. Answers whether
    /// this node has it itself. Stays in force for the life of the connection.
    ///
    /// # Errors
    /// `UNAVAILABLE` when it can be read nowhere; otherwise when the node refuses.
    pub async fn open_base(&mut self, token: &str, holders: &[NodeEndpoint]) -> Result<bool, TransferError> {
        let body =
            Request::OpenBase { token: token.to_owned(), holders: holders.iter().take(HOLDERS_MAX).cloned().collect() };
        match self.call(body, &[], &[], self.options.stall).await?.body {
            Response::BaseOpened { here } => Ok(here),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Says which fragments the caller's participant holds; answers which of them it has to send, by their place.
    ///
    /// # Errors
    /// `CONFLICT` when another participant offers other bytes for one of them, or another run of this one has come.
    pub async fn offer(&mut self, fragments: &[OfferedFragment]) -> Result<Bitmap, TransferError> {
        let body = Request::Offer { fragments: fragments.to_vec() };
        // The node may have to read back what was sent.
        match self.call(body, &[], &[], self.options.patience).await?.body {
            Response::Offered { wanted } if wanted.len() as usize == fragments.len() => Ok(wanted),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Makes units out of those of the base, and answers what became of each. `progress` is told the bytes of each step.
    ///
    /// # Errors
    /// `CHECKSUM_MISMATCH` when the base's bytes are wrong; otherwise when the node refuses, or the connection breaks. Units
    /// that are not answered for must be made again, or written.
    pub async fn derive(
        &mut self,
        units: &[DeriveUnit<'_>],
        mut progress: impl FnMut(u64),
    ) -> Result<Vec<DerivedUnit>, TransferError> {
        for unit in units {
            unit.check().map_err(BallastError::invalid)?;
        }
        let mut derived = Vec::with_capacity(units.len());
        for request in requests(units, self.derive_bytes) {
            derived.extend(self.derive_ranges(request.ranges, &request.payload).await?);
            progress(request.bytes);
        }
        if derived.len() == units.len() && derived.iter().zip(units).all(|(made, asked)| made.unit == asked.unit) {
            Ok(derived)
        } else {
            Err(self.protocol(format!("{} units were derived, {} were asked for", derived.len(), units.len())))
        }
    }

    pub(crate) async fn derive_ranges(
        &mut self,
        ranges: Vec<DerivedRange>,
        payload: &[u8],
    ) -> Result<Vec<DerivedUnit>, TransferError> {
        match self.call(Request::Derive { ranges }, &[payload], &[], self.options.patience).await?.body {
            Response::Derived { units } => Ok(units),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What all participants of the import have offered to the node, or only what they do not agree on.
    ///
    /// # Errors
    /// When the node refuses.
    pub async fn read_offers(&mut self, conflicts: bool) -> Result<Offers, TransferError> {
        let bytes = self.document(Request::ReadOffers { conflicts }).await?;
        ballast_schemas::from_messagepack(&bytes).map_err(|error| self.protocol(error.to_string()))
    }

    /// Ends the import: the node checks every unit against the manifest.
    ///
    /// # Errors
    /// `CHECKSUM_MISMATCH` naming units that differ (they can be written again); otherwise when the node refuses.
    pub async fn seal(&mut self, manifest: &[u8]) -> Result<Receipt, TransferError> {
        match self.call(Request::Seal, &[manifest], &[], self.options.patience).await?.body {
            Response::Sealed(receipt) => Ok(receipt),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What the node holds at this moment.
    ///
    /// # Errors
    /// When the node refuses.
    pub async fn describe(&mut self) -> Result<Description, TransferError> {
        match self.call(Request::Describe, &[], &[], self.options.stall).await?.body {
            Response::Described(description) => Ok(description),
            other => Err(self.unexpected(&other)),
        }
    }

    /// The manifest's bytes, as the node has them: compare their SHA-256 with the metadata's.
    ///
    /// # Errors
    /// When the node refuses.
    pub async fn read_manifest(&mut self) -> Result<Bytes, TransferError> {
        self.document(Request::ReadManifest).await
    }

    /// The affinity index.
    ///
    /// # Errors
    /// When the node refuses.
    pub async fn read_affinity(&mut self) -> Result<AffinityIndex, TransferError> {
        let bytes = self.document(Request::ReadAffinity).await?;
        ballast_schemas::from_messagepack(&bytes).map_err(|error| self.protocol(error.to_string()))
    }

    async fn document(&mut self, request: Request) -> Result<Bytes, TransferError> {
        let header = self.call(request, &[], &[], self.options.stall).await?;
        let Response::Document { sha256 } = header.body else { return Err(self.unexpected(&header.body)) };
        if header.payload_bytes > DOCUMENT_BYTES_MAX {
            return Err(self.protocol(format!("a document of {} bytes", header.payload_bytes)));
        }
        let mut document = Vec::new();
        while (document.len() as u64) < header.payload_bytes {
            let have = document.len();
            document.resize(have + (header.payload_bytes - have as u64).min(DATA_BYTES_MAX) as usize, 0);
            self.wire.read_exact(&mut document[have..]).await.map_err(|error| broken(&self.hello.node, &error))?;
        }
        let found = Digest::of(&document);
        self.outstanding -= 1;
        if found == sha256 {
            Ok(document.into())
        } else {
            Err(self.protocol(format!("a document {found} instead of {sha256}")))
        }
    }

    /// Reads ranges into buffers of the same lengths, in order.
    ///
    /// # Errors
    /// When the node refuses or the connection breaks. Bytes in the buffers mean nothing then, also where they are filled.
    pub async fn read_ranges(&mut self, ranges: &[ReadRange], buffers: &mut [&mut [u8]]) -> Result<(), TransferError> {
        let fits =
            ranges.len() == buffers.len() && ranges.iter().zip(&*buffers).all(|(r, b)| r.bytes == b.len() as u64);
        if !fits {
            return Err(BallastError::invalid("every range needs a buffer of its length").into());
        }
        self.check_usable()?;
        for (ranges, buffers) in ranges.chunks(RANGES_MAX).zip(buffers.chunks_mut(RANGES_MAX)) {
            self.send(Request::ReadRanges { ranges: ranges.to_vec() }, &[], &[]).await?;
            self.receive_ranges(buffers).await?;
        }
        Ok(())
    }

    async fn receive_ranges(&mut self, buffers: &mut [&mut [u8]]) -> Result<(), TransferError> {
        let expected: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        let (mut current, mut filled, mut received) = (0, 0, 0);
        loop {
            let header = self.answer(self.options.stall).await?;
            match header.body {
                Response::Data if received + header.payload_bytes <= expected => {
                    received += header.payload_bytes;
                    let mut left = header.payload_bytes as usize;
                    while left > 0 {
                        // More is expected (checked above), so that there is a buffer with room.
                        let Some(buffer) = buffers.get_mut(current) else { break };
                        let take = left.min(buffer.len() - filled);
                        let target = &mut buffer[filled..filled + take];
                        self.wire.read_exact(target).await.map_err(|error| broken(&self.hello.node, &error))?;
                        filled += take;
                        left -= take;
                        if filled == buffer.len() {
                            (current, filled) = (current + 1, 0);
                        }
                    }
                }
                Response::End { bytes } if bytes == expected && received == expected => return Ok(()),
                Response::Data => return Err(self.protocol(format!("more than the {expected} bytes asked for"))),
                Response::End { .. } => return Err(self.protocol(format!("{received} of {expected} bytes"))),
                other => return Err(self.unexpected(&other)),
            }
        }
    }

    /// Maps the instance's segments, on the same host. What is hot in the answer stays in memory for as long as the
    /// mapping lives.
    ///
    /// # Errors
    /// When the connection is no Unix socket, the layout is not the node's, the node refuses, or mapping fails.
    pub async fn map(&mut self, layout: Arc<GroupLayout>) -> Result<MappedInstance, TransferError> {
        self.check_usable()?;
        let mut segments = Vec::new();
        self.send(Request::MapSegments { memory: true, cold: true }, &[], &[]).await?;
        loop {
            let header = self.answer(self.options.stall).await?;
            let Response::Segments { grants, holdings } = header.body else {
                return Err(self.unexpected(&header.body));
            };
            let descriptors =
                self.wire.take_descriptors(header.descriptors).map_err(|e| broken(&self.hello.node, &e))?;
            if descriptors.len() != grants.len() {
                return Err(self.protocol(format!("{} descriptors for {} segments", descriptors.len(), grants.len())));
            }
            segments.extend(grants.into_iter().zip(descriptors));
            if let Some(holdings) = holdings {
                return Ok(MappedInstance::new(self.hello.instance.clone(), layout, segments, holdings)?);
            }
        }
    }

    async fn call(
        &mut self,
        body: Request,
        payload: &[&[u8]],
        descriptors: &[BorrowedFd<'_>],
        wait: Duration,
    ) -> Result<ResponseHeader, TransferError> {
        self.check_usable()?;
        self.send(body, payload, descriptors).await?;
        self.answer(wait).await
    }

    async fn send(
        &mut self,
        body: Request,
        payload: &[&[u8]],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), TransferError> {
        let payload_bytes = payload.iter().map(|piece| piece.len() as u64).sum();
        let header = RequestHeader { payload_bytes, descriptors: descriptors.len() as u32, body };
        self.outstanding += 1;
        self.wire.write_frame(&header, payload, descriptors).await.map_err(|error| broken(&self.hello.node, &error))
    }

    async fn answer(&mut self, wait: Duration) -> Result<ResponseHeader, TransferError> {
        let header: ResponseHeader =
            self.wire.read_header(wait).await.map_err(|error| broken(&self.hello.node, &error))?;
        // What is followed by more counts as answered when that has been read too.
        if !matches!(
            header.body,
            Response::Data | Response::Document { .. } | Response::Segments { holdings: None, .. }
        ) {
            self.outstanding = self.outstanding.saturating_sub(1);
        }
        match header.body {
            Response::Error(error) => Err(error.into()),
            _ => Ok(header),
        }
    }

    fn check_usable(&self) -> Result<(), TransferError> {
        match self.is_usable() {
            true => Ok(()),
            false => {
                let reason = "an earlier call broke or was dropped half-way; connect again".to_owned();
                Err(TransferError::Broken { node: self.hello.node.clone(), reason })
            }
        }
    }

    fn protocol(&self, reason: String) -> TransferError {
        TransferError::Protocol { node: self.hello.node.clone(), reason }
    }

    fn unexpected(&self, response: &Response) -> TransferError {
        self.protocol(format!("unexpected answer {}", name(response)))
    }
}

/// Reads ranges over several connections at once, each taking a part of about the same size.
///
/// # Errors
/// As [`NodeConnection::read_ranges`], from the first connection that failed.
pub async fn read_ranges_side_by_side(
    connections: &mut [NodeConnection],
    ranges: &[ReadRange],
    buffers: &mut [&mut [u8]],
) -> Result<(), TransferError> {
    if ranges.len() != buffers.len() {
        return Err(BallastError::invalid("every range needs a buffer of its length").into());
    }
    let total: u64 = ranges.iter().map(|range| range.bytes).sum();
    let share = total.div_ceil(connections.len().max(1) as u64).max(1);
    let mut shares: Vec<(Vec<ReadRange>, Vec<&mut [u8]>)> = vec![Default::default()];
    let mut in_share = 0;
    for (range, buffer) in ranges.iter().zip(buffers) {
        let (mut range, mut buffer) = (*range, &mut **buffer);
        // A range that crosses a share's end is cut there.
        while range.bytes > share - in_share {
            let bytes = share - in_share;
            let (head, tail) = buffer.split_at_mut((bytes as usize).min(buffer.len()));
            if let Some((ranges, buffers)) = shares.last_mut() {
                ranges.push(ReadRange { bytes, ..range });
                buffers.push(head);
            }
            range = ReadRange { offset: range.offset + bytes, bytes: range.bytes - bytes, ..range };
            buffer = tail;
            shares.push(Default::default());
            in_share = 0;
        }
        in_share += range.bytes;
        if let Some((ranges, buffers)) = shares.last_mut() {
            ranges.push(range);
            buffers.push(buffer);
        }
    }
    if connections.len() < shares.len() {
        return Err(BallastError::invalid("there is no connection to read over").into());
    }
    let reads = connections.iter_mut().zip(&mut shares);
    let reads = reads.map(|(connection, (ranges, buffers))| connection.read_ranges(ranges, buffers));
    futures::future::try_join_all(reads).await.map(|_| ())
}

fn broken(node: &NodeId, error: &WireError) -> TransferError {
    TransferError::Broken { node: node.clone(), reason: error.to_string() }
}

async fn in_time<T>(wait: Duration, connecting: impl Future<Output = std::io::Result<T>>) -> std::io::Result<T> {
    tokio::time::timeout(wait, connecting).await.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

fn name(response: &Response) -> &'static str {
    match response {
        Response::Hello(_) => "Hello",
        Response::Allocated { .. } => "Allocated",
        Response::Written { .. } => "Written",
        Response::BaseOpened { .. } => "BaseOpened",
        Response::Derived { .. } => "Derived",
        Response::Offered { .. } => "Offered",
        Response::Sealed(_) => "Sealed",
        Response::Described(_) => "Described",
        Response::Document { .. } => "Document",
        Response::Data => "Data",
        Response::End { .. } => "End",
        Response::Segments { .. } => "Segments",
        Response::Error(_) => "Error",
    }
}

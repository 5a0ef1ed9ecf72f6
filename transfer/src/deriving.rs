//! Units made out of those of a base: read here (from memory under a guard, or from disk) or from the node that holds
//! them, patched on the way, written like any upload, and compared with the base's checksum (ARCHITECTURE.md, Deltas and
//! reuse). The base is protected by the caller's lease; what is read of it here is guarded piece by piece besides.

use std::sync::Arc;

use ballast_schemas::frame::{DerivedRange, DerivedUnit, Description, ReadRange};
use ballast_schemas::{
    AffinityIndex, BallastError, Digest, ErrorCode, InstanceId, NodeEndpoint, SessionId, TokenClaims,
};
use bytes::Bytes;
use tokio::runtime::Handle;

use crate::checksum::RunningChecksum;
use crate::client_end::{ConnectOptions, NodeConnection, Route};
use crate::error::{Mismatch, StoreError};
use crate::node_store::{InstanceReader, NodeStore};
use crate::patch::RangePatch;
use crate::transfer_error::TransferError;

/// Bytes in hand at a time: small enough to be hashed, patched and written while they are in a core's cache.
const PIECE_BYTES: u64 = 256 << 10;
/// Bytes asked of another node at a time.
const REMOTE_BYTES: u64 = 8 << 20;

/// What a connection derives from.
#[derive(Debug)]
pub(crate) struct Base {
    /// What the token allows.
    pub claims: TokenClaims,
    affinity: AffinityIndex,
    source: Source,
    /// The unit that is being made.
    open: Option<OpenUnit>,
}

#[derive(Debug)]
enum Source {
    Here(InstanceReader),
    Elsewhere(Box<NodeConnection>),
}

/// Where units go, and which.
#[derive(Debug)]
pub(crate) struct Deriving {
    pub store: Arc<NodeStore>,
    pub instance: InstanceId,
    pub session_id: SessionId,
    pub ranges: Vec<DerivedRange>,
    /// The patches of all ranges.
    pub payload: Bytes,
}

/// A unit between its first range and its last.
#[derive(Debug)]
struct OpenUnit {
    unit: u32,
    base_unit: u32,
    done: u64,
    /// Of the base's bytes.
    sum: RunningChecksum,
    /// Some of it differs from the base.
    changed: bool,
    hash: Option<(Digest, Box<blake3::Hasher>)>,
    /// Some of it was read from disk here.
    from_disk: bool,
}

/// One range being made.
struct Step<'a> {
    range: DerivedRange,
    patch: Option<RangePatch<'a>>,
    /// Entries of the patch that were applied.
    applied: usize,
}

impl Base {
    /// Opens the instance that a token allows to read: here if all of it is, else on the first of `holders` that has it.
    pub(crate) async fn open(
        store: &Arc<NodeStore>,
        claims: TokenClaims,
        token: &str,
        holders: &[NodeEndpoint],
    ) -> Result<Self, BallastError> {
        let complete = |holdings: &Description| {
            (0..holdings.unit_count).all(|unit| holdings.hot.get(unit) || holdings.cold.get(unit))
        };
        let mut reason = match store.reader(&claims.instance) {
            Ok(reader) if complete(&reader.describe()) => {
                let affinity = reader.affinity().clone();
                return Ok(Self { claims, affinity, source: Source::Here(reader), open: None });
            }
            Ok(_) => format!("node {} has lost some of it", store.node()),
            Err(error) => format!("node {}: {error}", store.node()),
        };
        // A path that a client names is never opened: other nodes are reached over TCP alone.
        let options = ConnectOptions { route: Route::Tcp, ..ConnectOptions::default() };
        for endpoint in holders.iter().filter(|endpoint| endpoint.node != *store.node()) {
            let opened = async {
                let mut connection = NodeConnection::connect(endpoint, token, &options).await?;
                let affinity = connection.read_affinity().await?;
                let holdings = connection.describe().await?;
                Ok::<_, TransferError>((connection, affinity, holdings))
            };
            match opened.await {
                Ok((connection, affinity, holdings)) if complete(&holdings) => {
                    return Ok(Self { claims, affinity, source: Source::Elsewhere(Box::new(connection)), open: None });
                }
                Ok(_) => reason = format!("{reason}; node {} has lost some of it", endpoint.node),
                Err(error) => reason = format!("{reason}; node {}: {error}", endpoint.node),
            }
        }
        let message = format!("the base {} can not be read: {reason}", claims.instance);
        Err(BallastError::new(ErrorCode::Unavailable, message))
    }

    /// Whether the base is on this node.
    pub(crate) fn is_here(&self) -> bool {
        matches!(self.source, Source::Here(_))
    }

    /// Makes ranges, in order, and answers for the units whose last one was among them. After an error, the unit that it
    /// befell must be made again from its first byte. Blocks for disk, memory and other nodes, on a thread of a runtime.
    pub(crate) fn derive(&mut self, work: &Deriving) -> Result<Vec<DerivedUnit>, BallastError> {
        let open = self.open.take();
        let mut steps = self.plan(work, open.as_ref()).map_err(BallastError::invalid)?;
        self.open = open;
        let mut units = Vec::new();
        let mut buffer = Vec::new();
        for step in &mut steps {
            if step.range.offset == 0 {
                self.open = Some(OpenUnit::new(&step.range));
            }
            self.make(work, step, &mut buffer).inspect_err(|_| self.open = None)?;
            if self.open.as_ref().is_some_and(|open| open.done == self.unit_bytes(open.base_unit)) {
                units.extend(self.finish(work)?);
            }
        }
        Ok(units)
    }

    fn unit_bytes(&self, unit: u32) -> u64 {
        self.affinity.units.get(unit as usize).map_or(0, |unit| unit.extent_bytes)
    }

    /// Reads every patch and checks every range before the first byte is written.
    fn plan<'a>(&self, work: &'a Deriving, open: Option<&OpenUnit>) -> Result<Vec<Step<'a>>, String> {
        let mut payload = &*work.payload;
        let mut steps = Vec::with_capacity(work.ranges.len());
        // What comes next of the unit that is being made.
        let mut next = open.map(|open| (open.unit, open.base_unit, open.done));
        for range in &work.ranges {
            let DerivedRange { unit, base_unit, offset, bytes, .. } = *range;
            let size = self.affinity.units.get(base_unit as usize).map(|unit| unit.extent_bytes);
            let size = size.ok_or_else(|| format!("unit {base_unit} is not in the base {}", self.claims.instance))?;
            let end = offset.checked_add(bytes).filter(|end| *end <= size).ok_or_else(|| {
                format!("{bytes} bytes at {offset} do not lie in unit {base_unit} of the base, which has {size}")
            })?;
            if offset > 0 && next != Some((unit, base_unit, offset)) {
                return Err(format!("unit {unit} goes on at byte {offset}, which does not follow what came before"));
            }
            next = (end < size).then_some((unit, base_unit, end));
            steps.push(Step { range: *range, patch: RangePatch::take(range, &mut payload)?, applied: 0 });
        }
        match payload.len() {
            0 => Ok(steps),
            left => Err(format!("{left} bytes of payload belong to no patch")),
        }
    }

    fn make(&mut self, work: &Deriving, step: &mut Step<'_>, buffer: &mut Vec<u8>) -> Result<(), BallastError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let DerivedRange { base_unit, offset, bytes, .. } = step.range;
        let refuse = |error: StoreError| error.to_error();
        let mut done = 0;
        while done < bytes {
            let at = offset + done;
            let piece = |longest: u64| ReadRange { unit: base_unit, offset: at, bytes: longest.min(bytes - done) };
            done += match &mut self.source {
                Source::Here(reader) => {
                    let range = piece(PIECE_BYTES);
                    match reader.hot(&range).map_err(refuse)? {
                        Some(hot) => open.take(work, step, at, hot.bytes(), buffer).map_err(refuse)?,
                        None => {
                            open.from_disk = true;
                            let read = reader.cold(&[range]).inspect_err(|error| {
                                tracing::warn!(%error, base = %self.claims.instance, "a read from disk failed");
                                work.store.report_unreadable_cold(&self.claims.instance, base_unit);
                            });
                            for cold in &read.map_err(refuse)? {
                                open.take(work, step, at, cold.bytes(), buffer).map_err(refuse)?;
                            }
                        }
                    }
                    range.bytes
                }
                Source::Elsewhere(connection) => {
                    let range = piece(REMOTE_BYTES);
                    let mut read = vec![0; range.bytes as usize];
                    Handle::current().block_on(connection.read_ranges(&[range], &mut [read.as_mut_slice()]))?;
                    for (number, piece) in (0_u64..).zip(read.chunks(PIECE_BYTES as usize)) {
                        open.take(work, step, at + number * PIECE_BYTES, piece, buffer).map_err(refuse)?;
                    }
                    range.bytes
                }
            };
        }
        open.done += bytes;
        Ok(())
    }

    /// Compares the base's bytes, all of which have passed by, with their checksum.
    fn finish(&mut self, work: &Deriving) -> Result<Option<DerivedUnit>, BallastError> {
        let Some(open) = self.open.take() else { return Ok(None) };
        let expected = self.affinity.units.get(open.base_unit as usize).map_or(0, |unit| unit.crc64);
        let found = open.sum.value();
        if found != expected {
            let mismatch = Mismatch { unit: open.base_unit, expected, found };
            let base = &self.claims.instance;
            let error = match self.is_here() {
                true if open.from_disk => work.store.report_bad_cold(base, mismatch),
                true => work.store.report_bad_hot(base, mismatch),
                false => StoreError::Checksum { instance: base.clone(), place: "another node", units: vec![mismatch] },
            };
            return Err(error.to_error());
        }
        let same = open.hash.is_none_or(|(wanted, hash)| wanted.as_bytes() == hash.finalize().as_bytes());
        let crc64 = match open.changed {
            true => {
                let written = work.store.written_checksum(&work.instance, &work.session_id, open.unit);
                written.map_err(|error| error.to_error())?
            }
            false => found,
        };
        Ok(Some(DerivedUnit { unit: open.unit, crc64, same }))
    }
}

impl OpenUnit {
    fn new(range: &DerivedRange) -> Self {
        Self {
            unit: range.unit,
            base_unit: range.base_unit,
            done: 0,
            sum: RunningChecksum::default(),
            changed: false,
            hash: range.blake3.map(|wanted| (wanted, Box::default())),
            from_disk: false,
        }
    }

    /// Takes a piece of the base's unit: what is made of it is written at the same place.
    fn take(
        &mut self,
        work: &Deriving,
        step: &mut Step<'_>,
        start: u64,
        piece: &[u8],
        buffer: &mut Vec<u8>,
    ) -> Result<(), StoreError> {
        if let Some((_, hash)) = &mut self.hash {
            hash.update(piece);
        }
        let end = start + piece.len() as u64;
        let entries = step.patch.as_ref().map(|patch| patch.within(step.applied, &(start..end)));
        let made = match (&step.patch, entries.filter(|entries| !entries.is_empty())) {
            (Some(patch), Some(entries)) => {
                step.applied = entries.end;
                buffer.clear();
                buffer.extend_from_slice(piece);
                patch.apply(entries, start, buffer);
                self.changed = true;
                buffer.as_slice()
            }
            _ => piece,
        };
        self.sum.update(piece);
        work.store.write(&work.instance, &work.session_id, self.unit, start, made)
    }
}

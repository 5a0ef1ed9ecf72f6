//! Units made out of those of a base: read here (from memory under a guard, or from disk) or from a node that holds
//! them, patched on the way, written like any upload, and compared with the base's checksum (ARCHITECTURE.md, Deltas and
//! reuse). The base is protected by the caller's lease; what is read of it here is guarded piece by piece besides.
//!
//! Other nodes are read in the connection's own task, and only what they have sent is handed to a thread that may block: no
//! thread ever waits for a network.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_schemas::frame::{DerivedRange, DerivedUnit, Description, ReadRange, Tier};
use ballast_schemas::{
    AffinityIndex, BallastError, Bitmap, Digest, ErrorCode, InstanceId, NodeEndpoint, SessionId, TokenClaims,
    holders_digest,
};
use bytes::Bytes;
use tokio::sync::Semaphore;

use crate::checksum::{RunningChecksum, checksum};
use crate::client_end::{ConnectOptions, NodeConnection, Route};
use crate::error::{Mismatch, StoreError};
use crate::layout::GroupLayout;
use crate::node_store::{ColdPiece, HotPiece, InstanceReader, NodeStore};
use crate::patch::RangePatch;
use crate::transfer_error::TransferError;

/// Bytes in hand at a time: the base's, the buffer's and the target's stay in a core's cache while they are hashed, patched and
/// written.
const PIECE_BYTES: usize = 256 << 10;
/// Bytes read of a base here at a time.
const READ_BYTES: u64 = 1 << 20;
/// Bytes asked of another node at a time, and the longest wait for them.
const REMOTE_BYTES: u64 = 8 << 20;
const REMOTE_WAIT: Duration = Duration::from_secs(15);
/// Longest wait for one other node to say what it holds, and for all of them together.
const HOLDER_WAIT: Duration = Duration::from_secs(3);
const HOLDERS_WAIT: Duration = Duration::from_secs(10);

/// What a connection derives from.
#[derive(Debug)]
pub(crate) struct Base {
    /// What the token allows.
    pub claims: TokenClaims,
    token: String,
    units: Units,
    /// The manifest's digest: what another one belongs to is something else.
    manifest: Option<Digest>,
    /// Other nodes that were opened.
    holders: Vec<Holder>,
    /// Those that were not needed yet.
    further: VecDeque<NodeEndpoint>,
    /// Why what is not held can not be had.
    reasons: Vec<String>,
    /// The unit that is being made.
    open: Option<OpenUnit>,
}

/// The base's units, from here or from another node.
#[derive(Clone, Debug)]
enum Units {
    Here(InstanceReader),
    Told(Arc<AffinityIndex>),
}

/// Another node that holds some of the base.
#[derive(Debug)]
struct Holder {
    connection: NodeConnection,
    held: Bitmap,
    /// Units whose bytes it had wrong.
    wrong: HashSet<u32>,
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

/// Where a unit is read. It stays there to its end, so that the copy that is wrong is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Here(Tier),
    /// By its place among the holders.
    Holder(usize),
}

/// A unit between its first range and its last.
#[derive(Debug)]
struct OpenUnit {
    unit: u32,
    base_unit: u32,
    origin: Origin,
    done: u64,
    /// Of the base's bytes, from where they begin to differ on: until then it is that of what was written.
    sum: Option<RunningChecksum>,
    hash: Option<(Digest, Box<blake3::Hasher>)>,
}

/// One range to be made.
#[derive(Debug)]
struct Step {
    range: DerivedRange,
    patch: Option<RangePatch>,
    /// Entries of the patch that were applied.
    applied: usize,
}

/// Makes units on a thread that may block.
#[derive(Debug)]
struct Maker {
    store: Arc<NodeStore>,
    instance: InstanceId,
    session_id: SessionId,
    base: InstanceId,
    units: Units,
    open: Option<OpenUnit>,
    step: Option<Step>,
    buffer: Vec<u8>,
    made: Vec<DerivedUnit>,
    stop: Arc<AtomicBool>,
}

/// Ends the work on blocking threads when nobody waits for it any more.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Units {
    fn index(&self) -> &AffinityIndex {
        match self {
            Self::Here(reader) => reader.affinity(),
            Self::Told(index) => index,
        }
    }

    fn bytes(&self, unit: u32) -> u64 {
        self.index().units.get(unit as usize).map_or(0, |unit| unit.extent_bytes)
    }

    fn tier(&self, unit: u32) -> Option<Tier> {
        match self {
            Self::Here(reader) => reader.tier(unit),
            Self::Told(_) => None,
        }
    }
}

impl Base {
    /// Opens the instance that a token allows to read: here, and where some of it is missing on those of `holders` that
    /// have it. All of them together get [`HOLDERS_WAIT`].
    pub(crate) async fn open(
        store: &Arc<NodeStore>,
        claims: TokenClaims,
        token: &str,
        holders: &[NodeEndpoint],
    ) -> Result<Self, BallastError> {
        let deadline = Instant::now() + HOLDERS_WAIT;
        let mut reasons = Vec::new();
        let here = match store.reader(&claims.instance) {
            Ok(reader) => {
                let held = held(&reader.describe(), reader.affinity());
                if held.is_full() {
                    return Ok(Self::of(claims, token, Units::Here(reader)));
                }
                reasons.push(format!("node {} has lost some of it", store.node()));
                Some((reader, held))
            }
            Err(error) => {
                reasons.push(format!("node {}: {error}", store.node()));
                None
            }
        };
        let mut further: VecDeque<NodeEndpoint> =
            holders.iter().filter(|endpoint| endpoint.node != *store.node()).cloned().collect();
        if !further.is_empty() && claims.holders != Some(holders_digest(holders)) {
            let message = format!(
                "the token vouches for other holders of the base {} than those named; ask the gateway for both again",
                claims.instance
            );
            return Err(BallastError::new(ErrorCode::Unauthorized, message));
        }
        let (mut base, mut covered) = match here {
            Some((reader, held)) => (Self::of(claims, token, Units::Here(reader)), held),
            None => {
                let (connection, index, holdings) = loop {
                    let Some(endpoint) = further.pop_front() else { return Err(nowhere(&claims.instance, &reasons)) };
                    match open_holder(&endpoint, token, deadline, true).await {
                        Ok((connection, Some(index), holdings)) => break (connection, index, holdings),
                        Ok(_) => {}
                        Err(reason) => reasons.push(reason),
                    }
                };
                let covered = held(&holdings, &index);
                let mut base = Self::of(claims, token, Units::Told(Arc::new(index)));
                base.manifest = holdings.manifest_sha256;
                if !covered.is_full() {
                    reasons.push(format!("node {} has lost some of it", connection.hello().node));
                }
                base.holders.push(Holder { connection, held: covered.clone(), wrong: HashSet::new() });
                (base, covered)
            }
        };
        (base.further, base.reasons) = (further, reasons);
        while !covered.is_full() && base.open_next(deadline).await {
            base.holders.iter().for_each(|holder| covered.union_with(&holder.held));
        }
        if covered.is_full() { Ok(base) } else { Err(nowhere(&base.claims.instance, &base.reasons)) }
    }

    fn of(claims: TokenClaims, token: &str, units: Units) -> Self {
        let manifest = match &units {
            Units::Here(reader) => Some(reader.reference().sha256),
            Units::Told(_) => None,
        };
        let (holders, further, reasons) = (Vec::new(), VecDeque::new(), Vec::new());
        Self { claims, token: token.to_owned(), units, manifest, holders, further, reasons, open: None }
    }

    /// Whether all of the base is on this node.
    pub(crate) fn is_here(&self) -> bool {
        self.holders.is_empty()
    }

    /// Opens the next holder that holds some of the same; whether there was one.
    async fn open_next(&mut self, deadline: Instant) -> bool {
        while let Some(endpoint) = self.further.pop_front() {
            match open_holder(&endpoint, &self.token, deadline, false).await {
                Ok((connection, _, holdings)) if holdings.manifest_sha256 == self.manifest => {
                    let held = held(&holdings, self.units.index());
                    self.holders.push(Holder { connection, held, wrong: HashSet::new() });
                    return true;
                }
                Ok(_) => self.reasons.push(format!("node {} holds another manifest", endpoint.node)),
                Err(reason) => self.reasons.push(reason),
            }
        }
        false
    }

    /// Where a unit of the base is read that begins now.
    async fn origin(&mut self, unit: u32) -> Result<Origin, BallastError> {
        if let Some(tier) = self.units.tier(unit) {
            return Ok(Origin::Here(tier));
        }
        let deadline = Instant::now() + HOLDERS_WAIT;
        loop {
            let has = |holder: &Holder| {
                holder.held.get(unit) && !holder.wrong.contains(&unit) && holder.connection.is_usable()
            };
            if let Some(at) = self.holders.iter().position(has) {
                return Ok(Origin::Holder(at));
            }
            if !self.open_next(deadline).await {
                let message = format!(
                    "unit {unit} of the base {} can not be read anywhere any more: {}",
                    self.claims.instance,
                    self.reasons.join("; ")
                );
                return Err(BallastError::new(ErrorCode::Unavailable, message));
            }
        }
    }

    /// Makes ranges, in order, and answers for the units whose last one was among them. After an error, the unit that it
    /// befell must be made again from its first byte; a request that makes no sense befalls none. Takes one of `places` for
    /// each piece of work that blocks.
    pub(crate) async fn derive(
        &mut self,
        work: Deriving,
        places: &Arc<Semaphore>,
    ) -> Result<Vec<DerivedUnit>, BallastError> {
        let stop = StopOnDrop(Arc::default());
        let Deriving { store, instance, session_id, ranges, payload } = work;
        // What comes next of the unit that is being made.
        let next = self.open.as_ref().map(|open| (open.unit, open.base_unit, open.done));
        let (units, base) = (self.units.clone(), self.claims.instance.clone());
        let plan_in = (store.clone(), instance.clone(), session_id.clone());
        let planned = blocking(places, move || {
            let (store, instance, session_id) = plan_in;
            let layout = store.import_layout(&instance, &session_id).map_err(|error| error.to_error())?;
            plan(units.index(), &base, &layout, next, &ranges, payload).map_err(BallastError::invalid)
        });
        let mut steps = VecDeque::from(planned.await??);
        let mut maker = Maker {
            store,
            instance,
            session_id,
            base: self.claims.instance.clone(),
            units: self.units.clone(),
            open: self.open.take(),
            step: None,
            buffer: Vec::new(),
            made: Vec::new(),
            stop: stop.0.clone(),
        };
        while let Some(step) = steps.pop_front() {
            let base_unit = step.range.base_unit;
            let origin = match maker.open.as_ref().filter(|_| step.range.offset > 0) {
                Some(open) => open.origin,
                None => self.origin(base_unit).await?,
            };
            maker = match origin {
                Origin::Here(_) => {
                    let mut own = vec![step];
                    // What goes on with it, and further units that are here.
                    let is_here =
                        |step: &Step| step.range.offset > 0 || self.units.tier(step.range.base_unit).is_some();
                    while steps.front().is_some_and(is_here) {
                        own.extend(steps.pop_front());
                    }
                    maker.run(places, move |maker| own.into_iter().try_for_each(|step| maker.make_here(step))).await?
                }
                Origin::Holder(at) => {
                    let made = self.make_from(at, maker, step, places).await;
                    made.inspect_err(|error| {
                        if error.code == ErrorCode::ChecksumMismatch
                            && let Some(holder) = self.holders.get_mut(at)
                        {
                            holder.wrong.insert(base_unit);
                            self.reasons.push(format!("node {} has it wrong", holder.connection.hello().node));
                        }
                    })?
                }
            };
        }
        self.open = maker.open;
        Ok(maker.made)
    }

    /// Makes a range of what another node sends; while one part is made, the next one comes.
    async fn make_from(
        &mut self,
        at: usize,
        mut maker: Maker,
        step: Step,
        places: &Arc<Semaphore>,
    ) -> Result<Maker, BallastError> {
        let Some(Holder { connection, .. }) = self.holders.get_mut(at) else { return Ok(maker) };
        let range = step.range;
        maker.begin(step, Ok(Origin::Holder(at)))?;
        let mut part = read_part(connection, &range, 0).await?;
        let mut done = 0;
        loop {
            let start = range.offset + done;
            done += part.len() as u64;
            let making = maker.run(places, move |maker| maker.take(start, &part));
            let (made, next) = tokio::join!(making, read_part(connection, &range, done));
            (maker, part) = (made?, next?);
            if part.is_empty() {
                return maker.run(places, Maker::close).await;
            }
        }
    }
}

/// The units that a node holds in either tier.
fn held(holdings: &Description, index: &AffinityIndex) -> Bitmap {
    let mut held = Bitmap::empty(index.units.len() as u32);
    held.union_with(&holdings.hot);
    held.union_with(&holdings.cold);
    held
}

/// Connects to a node that a token vouches for, and asks what it holds.
async fn open_holder(
    endpoint: &NodeEndpoint,
    token: &str,
    deadline: Instant,
    with_index: bool,
) -> Result<(NodeConnection, Option<AffinityIndex>, Description), String> {
    // A path that a client names is never opened: other nodes are reached over TCP alone.
    let options = ConnectOptions { route: Route::Tcp, stall: REMOTE_WAIT, ..ConnectOptions::default() };
    let opening = async {
        let mut connection = NodeConnection::connect(endpoint, token, &options).await?;
        let index = if with_index { Some(connection.read_affinity().await?) } else { None };
        let holdings = connection.describe().await?;
        Ok::<_, TransferError>((connection, index, holdings))
    };
    let wait = HOLDER_WAIT.min(deadline.saturating_duration_since(Instant::now()));
    match tokio::time::timeout(wait, opening).await {
        Ok(Ok(opened)) => Ok(opened),
        Ok(Err(error)) => Err(format!("node {}: {error}", endpoint.node)),
        Err(_) => Err(format!("node {} did not answer within {} ms", endpoint.node, wait.as_millis())),
    }
}

/// Reads what follows of a range, of which this much is done; nothing when that is all.
async fn read_part(connection: &mut NodeConnection, range: &DerivedRange, done: u64) -> Result<Vec<u8>, BallastError> {
    let bytes = REMOTE_BYTES.min(range.bytes - done);
    let mut part = vec![0; bytes as usize];
    if bytes > 0 {
        let node = connection.hello().node.clone();
        let wanted = [ReadRange { unit: range.base_unit, offset: range.offset + done, bytes }];
        let mut buffers = [part.as_mut_slice()];
        let reading = tokio::time::timeout(REMOTE_WAIT, connection.read_ranges(&wanted, &mut buffers));
        reading.await.map_err(|_| {
            let message = format!("node {node} did not send {bytes} bytes within {} s", REMOTE_WAIT.as_secs());
            BallastError::new(ErrorCode::Unavailable, message)
        })??;
    }
    Ok(part)
}

fn nowhere(base: &InstanceId, reasons: &[String]) -> BallastError {
    BallastError::new(ErrorCode::Unavailable, format!("the base {base} can not be read: {}", reasons.join("; ")))
}

/// Does work that blocks, on a thread of its own and in one of the places for it, which it keeps to its end.
async fn blocking<T: Send + 'static>(
    places: &Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, BallastError> {
    let stopped = |reason: String| {
        BallastError::new(ErrorCode::Unavailable, format!("the node failed at this request: {reason}"))
    };
    let place = places.clone().acquire_owned().await.map_err(|error| stopped(error.to_string()))?;
    let done = tokio::task::spawn_blocking(move || {
        let _place = place;
        work()
    });
    done.await.map_err(|error| stopped(error.to_string()))
}

/// Reads every patch and checks every range before the first byte is written. `next` is what comes next of the unit that is
/// being made: its number, the base's, and a byte.
fn plan(
    index: &AffinityIndex,
    base: &InstanceId,
    target: &GroupLayout,
    mut next: Option<(u32, u32, u64)>,
    ranges: &[DerivedRange],
    mut payload: Bytes,
) -> Result<Vec<Step>, String> {
    let mut steps = Vec::with_capacity(ranges.len());
    for range in ranges {
        let DerivedRange { unit, base_unit, offset, bytes, .. } = *range;
        let size = index.units.get(base_unit as usize).map(|unit| unit.extent_bytes);
        let size = size.ok_or_else(|| format!("unit {base_unit} is not in the base {base}"))?;
        let extent = target.extent(unit);
        let extent = extent.ok_or_else(|| format!("there are {} units, and no unit {unit}", target.unit_count()))?;
        if extent.bytes != size {
            return Err(format!(
                "unit {unit} has {} bytes and can not be made out of unit {base_unit} of the base, which has {size}",
                extent.bytes
            ));
        }
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

impl Maker {
    async fn run(
        mut self,
        places: &Arc<Semaphore>,
        work: impl FnOnce(&mut Self) -> Result<(), BallastError> + Send + 'static,
    ) -> Result<Self, BallastError> {
        blocking(places, move || work(&mut self).map(|()| self)).await?
    }

    /// Begins a range, and with the first one its unit.
    fn begin(&mut self, step: Step, origin: Result<Origin, BallastError>) -> Result<(), BallastError> {
        if step.range.offset == 0 {
            self.open = Some(OpenUnit::new(&step.range, origin?));
        }
        self.step = Some(step);
        Ok(())
    }

    /// Makes a range of what is here.
    fn make_here(&mut self, step: Step) -> Result<(), BallastError> {
        let DerivedRange { base_unit, offset, bytes, .. } = step.range;
        let Units::Here(reader) = self.units.clone() else { return Ok(()) };
        let lost = || StoreError::NotHere { instance: self.base.clone(), unit: base_unit }.to_error();
        let origin = reader.tier(base_unit).map(Origin::Here).ok_or_else(lost);
        self.begin(step, origin)?;
        let Some(Origin::Here(tier)) = self.open.as_ref().map(|open| open.origin) else { return Ok(()) };
        let mut done = 0;
        while done < bytes {
            let range = ReadRange { unit: base_unit, offset: offset + done, bytes: READ_BYTES.min(bytes - done) };
            let read = self.read_here(&reader, tier, range)?;
            self.take(range.offset, read.bytes())?;
            done += range.bytes;
        }
        self.close()
    }

    /// Reads some bytes of the base here, from the tier that its unit began with.
    fn read_here(&self, reader: &InstanceReader, tier: Tier, range: ReadRange) -> Result<Read, BallastError> {
        let gone = || StoreError::NotHere { instance: self.base.clone(), unit: range.unit };
        let read = match tier {
            Tier::Memory => reader.hot(&range).and_then(|hot| hot.map(Read::Hot).ok_or_else(gone)),
            Tier::Cold => {
                let read = reader.cold(&[range]).inspect_err(|error| {
                    tracing::warn!(%error, base = %self.base, "a read from disk failed");
                    self.store.report_unreadable_cold(&self.base, range.unit);
                });
                read.and_then(|mut read| read.pop().map(Read::Cold).ok_or_else(gone))
            }
        };
        read.map_err(|error| error.to_error())
    }

    /// Takes the next bytes of the base's unit: what is made of them is written at the same place.
    fn take(&mut self, start: u64, bytes: &[u8]) -> Result<(), BallastError> {
        for (number, piece) in (0_u64..).zip(bytes.chunks(PIECE_BYTES)) {
            if self.stop.load(Ordering::Relaxed) {
                return Err(BallastError::new(ErrorCode::Unavailable, "the caller is gone"));
            }
            let (Some(open), Some(step)) = (&mut self.open, &mut self.step) else { return Ok(()) };
            let start = start + number * PIECE_BYTES as u64;
            let end = start + piece.len() as u64;
            if let Some((_, hash)) = &mut open.hash {
                hash.update(piece);
            }
            let entries = step.patch.as_ref().map(|patch| patch.within(step.applied, &(start..end)));
            let mut made = piece;
            if let (Some(patch), Some(entries)) = (&step.patch, entries.filter(|entries| !entries.is_empty())) {
                step.applied = entries.end;
                if open.sum.is_none() {
                    let before = self.store.checksum_so_far(&self.instance, &self.session_id, open.unit, start);
                    open.sum = Some(before.map_err(|error| error.to_error())?);
                }
                self.buffer.clear();
                self.buffer.extend_from_slice(piece);
                patch.apply(entries, start, &mut self.buffer);
                made = &self.buffer;
            }
            if let Some(sum) = &mut open.sum {
                sum.update(piece);
            }
            let written = self.store.write(&self.instance, &self.session_id, open.unit, start, made);
            written.map_err(|error| error.to_error())?;
            open.done = end;
        }
        Ok(())
    }

    /// Ends a range. After the last one of a unit, the base's bytes, all of which have passed by, are compared with their
    /// checksum.
    fn close(&mut self) -> Result<(), BallastError> {
        let bytes = |open: &OpenUnit| self.units.bytes(open.base_unit);
        let Some(open) = self.open.take_if(|open| open.done == bytes(open)) else { return Ok(()) };
        let crc64 = match open.done {
            0 => checksum(&[]),
            _ => self
                .store
                .written_checksum(&self.instance, &self.session_id, open.unit)
                .map_err(|error| error.to_error())?,
        };
        let base_crc64 = open.sum.as_ref().map_or(crc64, RunningChecksum::value);
        let expected = self.units.index().units.get(open.base_unit as usize).map_or(0, |unit| unit.crc64);
        if base_crc64 != expected {
            let mismatch = Mismatch { unit: open.base_unit, expected, found: base_crc64 };
            return Err(self.wrong(&open, mismatch)?.to_error());
        }
        let same = open.hash.is_none_or(|(wanted, hash)| wanted.as_bytes() == hash.finalize().as_bytes());
        self.made.push(DerivedUnit { unit: open.unit, crc64, base_crc64, same });
        Ok(())
    }

    /// Gives up the copy of the base that was wrong.
    fn wrong(&self, open: &OpenUnit, mismatch: Mismatch) -> Result<StoreError, BallastError> {
        let place = match (open.origin, &self.units) {
            (Origin::Here(Tier::Memory), _) => return Ok(self.store.report_bad_hot(&self.base, mismatch)),
            (Origin::Here(Tier::Cold), Units::Here(reader)) => {
                // Somebody who writes the same unit of the target changes its checksum as well: then the base is right.
                if open.sum.is_none() && self.sum_on_disk(reader, open.base_unit)? == mismatch.expected {
                    let message = format!("unit {} is being written by somebody else as well", open.unit);
                    return Err(BallastError::invalid(message));
                }
                return Ok(self.store.report_bad_cold(&self.base, mismatch));
            }
            _ => "another node",
        };
        Ok(StoreError::Checksum { instance: self.base.clone(), place, units: vec![mismatch] })
    }

    fn sum_on_disk(&self, reader: &InstanceReader, unit: u32) -> Result<u64, BallastError> {
        let (mut sum, size) = (RunningChecksum::default(), self.units.bytes(unit));
        for offset in (0..size).step_by(READ_BYTES as usize) {
            let range = ReadRange { unit, offset, bytes: READ_BYTES.min(size - offset) };
            sum.update(self.read_here(reader, Tier::Cold, range)?.bytes());
        }
        Ok(sum.value())
    }
}

/// Some bytes of a base here.
enum Read {
    Hot(HotPiece),
    Cold(ColdPiece),
}

impl Read {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Hot(piece) => piece.bytes(),
            Self::Cold(piece) => piece.bytes(),
        }
    }
}

impl OpenUnit {
    fn new(range: &DerivedRange, origin: Origin) -> Self {
        let hash = range.blake3.map(|wanted| (wanted, Box::default()));
        Self { unit: range.unit, base_unit: range.base_unit, origin, done: 0, sum: None, hash }
    }
}

#[cfg(test)]
mod tests {
    use ballast_schemas::AffinityUnit;
    use ballast_schemas::frame::{Number, Patch, PatchRule};
    use proptest::prelude::*;

    use super::*;
    use crate::patch::{DeriveUnit, UnitPatch, requests};
    use crate::testing::instance;

    const SIZES: [u64; 3] = [1_000, 64, 1_000];

    proptest! {
        /// Real requests, of which one thing is changed.
        #[test]
        fn whatever_a_request_holds_its_plan_lies_in_its_units_or_is_refused(
            chosen in prop::collection::btree_set(0_u64..250, 0..30),
            bytes_max in (1_u64..40).prop_map(|elements| elements * 8),
            at in any::<prop::sample::Index>(),
            change in 0_u8..8,
            number in prop_oneof![0_u64..2_000, any::<u64>()],
        ) {
            let elements: Vec<u64> = chosen.into_iter().collect();
            let values = elements.iter().flat_map(|element| (*element as u32).to_le_bytes()).collect();
            let patch = UnitPatch { rule: PatchRule::Add { number: Number::U32 }, elements, values };
            let unit = |unit: u32, patch| {
                DeriveUnit { unit, base_unit: unit, bytes: SIZES[unit as usize], blake3: None, patch }
            };
            let units = [unit(0, None), unit(1, None), unit(2, Some(&patch))];
            let made = requests(&units, bytes_max);
            let mut ranges: Vec<DerivedRange> = made.iter().flat_map(|request| request.ranges.clone()).collect();
            let mut payload: Vec<u8> = made.iter().flat_map(|request| request.payload.clone()).collect();
            let range = at.get_mut(&mut ranges);
            let asked = range.patch.get_or_insert(Patch {
                rule: PatchRule::Overwrite { item_bytes: 4 }, entries: 0, index_bytes: 0,
            });
            match change {
                0 => range.offset = number,
                1 => range.bytes = number,
                2 => range.unit = number as u32,
                3 => range.base_unit = number as u32,
                4 => asked.entries = number as u32,
                5 => asked.index_bytes = number as u32,
                6 => asked.rule = PatchRule::Overwrite { item_bytes: number as u32 },
                _ if payload.is_empty() => {}
                _ => *at.get_mut(&mut payload) = number as u8,
            }
            let unit = |bytes: u64| {
                AffinityUnit { affinity_id: Digest::of(b""), extent_bytes: bytes, logical_bytes: bytes, crc64: 0 }
            };
            let index = AffinityIndex { units: SIZES.map(unit).to_vec() };
            let target = GroupLayout::new(&SIZES).unwrap();
            let planned = plan(&index, &instance(1), &target, None, &ranges, payload.into());
            for step in planned.unwrap_or_default() {
                let DerivedRange { unit, base_unit, offset, bytes, .. } = step.range;
                let end = offset + bytes;
                prop_assert_eq!(SIZES[unit as usize], SIZES[base_unit as usize]);
                prop_assert!(end <= SIZES[unit as usize]);
                if let Some(patch) = step.patch {
                    let mut piece = vec![0; bytes as usize];
                    patch.apply(patch.within(0, &(offset..end)), offset, &mut piece);
                }
            }
        }
    }
}

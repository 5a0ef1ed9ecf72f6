//! Reading a revision in another shape than it was stored in: the boxes of a target placement, each into a buffer of the
//! caller's (RFC, Relationship to Reshard, Transfer Engine, and DTensor). The planner says which bytes go where; here they are
//! fetched: copied with strides out of mapped memory, or asked for in ranges and put in place on arrival.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::marker::PhantomData;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use ballast_schemas::frame::ReadRange;
use ballast_schemas::manifest::{Manifest, Tensor};
use ballast_schemas::placement::{
    AxisSizes, ParallelTopology, Placement, PlacementFragment, PlacementIdentity, PlacementPart,
};
use ballast_schemas::{BallastError, ErrorCode};
use ballast_transfer::{MappedInstance, NodeConnection, checksum};
use serde_json::json;

use crate::fetch::compare;
use crate::get::Verify;
use crate::nodes::lanes;
use crate::progress::Meter;
use crate::reading::{Attempt, Failure, Holder, Reading, Rounds};
use crate::reshard::{
    Coalescing, CopyOptions, Limits, Plan, PlanCache, PlanSource, PlanTarget, Region, Request, SourceFragment,
    SourcePlace, Targets, WirePlan, copy_mapped, copy_region,
};
use crate::source::user_shape;

/// Ranges and bytes of one request.
const RANGES_MAX: usize = 4096;
const REQUEST_BYTES: u64 = 8 << 20;
/// Bytes that are copied before other tasks get their turn.
const COPY_BYTES: u64 = 256 << 20;
/// Bytes read from disk at a time.
const PIECE_BYTES: u64 = 4 << 20;
/// Element types that a buffer of plain bytes may stand for, by how their names begin.
const BYTES_STAND_FOR: &[&str] = &["BF16", "F8_", "F6_", "F4"];
const PLAIN_BYTES: &str = "U8";
/// Names listed in an error's sentence, and in its details.
const NAMES_SHOWN: usize = 3;
const NAMES_DETAILED: usize = 100;

/// A process loads the same generation into the same placement again and again, in all of its stores.
static PLANS: LazyLock<PlanCache> = LazyLock::new(PlanCache::default);

/// A buffer for one box of one tensor.
#[derive(Debug)]
pub struct PlacedBuffer<'a> {
    /// Whose box, where the target is a placement of several participants; `None` where that is plain.
    pub participant: Option<String>,
    /// The tensor.
    pub tensor: String,
    /// First element of the box and its extent; `None`: the whole tensor.
    pub region: Option<(Vec<u64>, Vec<u64>)>,
    /// Element type, if it is to be compared with the tensor's. Plain bytes stand for types that few frameworks have.
    pub dtype: Option<String>,
    /// Shape of a buffer for a whole tensor, if it is to be compared with the tensor's.
    pub shape: Option<Vec<u64>>,
    address: *mut u8,
    bytes: usize,
    held: PhantomData<&'a mut [u8]>,
}

// SAFETY: like the `&mut [u8]` that it stands for.
unsafe impl Send for PlacedBuffer<'_> {}

impl<'a> PlacedBuffer<'a> {
    /// A buffer for a whole tensor.
    #[must_use]
    pub fn new(tensor: impl Into<String>, buffer: &'a mut [u8]) -> Self {
        let (address, bytes) = (buffer.as_mut_ptr(), buffer.len());
        let tensor = tensor.into();
        Self { participant: None, tensor, region: None, dtype: None, shape: None, address, bytes, held: PhantomData }
    }

    /// A buffer by its address. Declared aliases may share one.
    ///
    /// # Safety
    /// The memory may be written for `'a`, and nobody else reads or writes it.
    #[must_use]
    pub unsafe fn from_raw(tensor: impl Into<String>, address: *mut u8, bytes: usize) -> Self {
        let tensor = tensor.into();
        Self { participant: None, tensor, region: None, dtype: None, shape: None, address, bytes, held: PhantomData }
    }
}

/// Fills the buffers of a target; without one, of every tensor as a whole.
pub(crate) async fn fill_placed(
    reading: &mut Reading,
    target: Option<PlanTarget<'_>>,
    buffers: Vec<PlacedBuffer<'_>>,
    verify: Verify,
    meter: impl FnOnce(u64) -> Meter,
) -> Result<Rounds, BallastError> {
    let manifest = reading.manifest().clone();
    let source = PlanSource::Stored(&manifest);
    let whole;
    let target = match target {
        Some(target) => target,
        None => {
            whole = whole_placement(&manifest)?;
            PlanTarget::Whole(&whole)
        }
    };
    let plan = PLANS.plan(source, target)?;
    let raw = in_order(&manifest, &plan, target, buffers)?;
    // SAFETY: as whoever made the buffers promised.
    let mut targets = unsafe { Targets::from_raw(&plan, &raw.0) }?;
    let job = Job { manifest: manifest.clone(), regions: by_unit(&plan), plan: &plan, buffers: raw, verify };
    let meter = meter(plan.bytes());
    let mut rounds = Rounds::new(job.regions.keys().copied());
    while !rounds.is_done() {
        for (holder, units) in rounds.shares(reading).await {
            let (holdings, way) = (holder.holdings.clone(), holder.way());
            let attempt = job.read(holder, &units, &mut targets, &meter).await;
            let noted = rounds.note(reading, &holdings, way, attempt);
            noted.map_err(|error| job.with_written(&rounds, error))?;
        }
        let next = rounds.next(reading).await;
        next.map_err(|error| job.with_written(&rounds, error))?;
    }
    Ok(rounds)
}

/// Every tensor of a revision as one box, alias groups as they are.
fn whole_placement(manifest: &Manifest) -> Result<Placement, BallastError> {
    let identity = PlacementIdentity {
        resource_id: manifest.resource_id().to_owned(),
        revision: manifest.revision().to_owned(),
        weight_generation: manifest.weight_generation(),
        placement_set_id: "whole".to_owned(),
    };
    let topology = ParallelTopology::grid(AxisSizes::default())?;
    let participant = topology.participants().first().cloned();
    let participant = participant.ok_or_else(|| BallastError::invalid("a topology of nobody"))?;
    let mut fragments = Vec::with_capacity(manifest.tensors().len());
    for tensor in manifest.tensors() {
        let plain = Tensor { shard_dims: Vec::new(), parallel_axes: Vec::new(), ..tensor.clone() };
        let aliases = manifest.fragments_of(&tensor.tensor_id).next().map(|fragment| fragment.aliases.clone());
        let (offset, shape) = (vec![0; plain.global_shape.len()], plain.global_shape.clone());
        let rank = participant.rank;
        fragments.push(PlacementFragment::new(Arc::new(plain), offset, shape, rank, aliases.unwrap_or_default())?);
    }
    let part = PlacementPart::new(identity.clone(), topology.topology_id(), participant, fragments)?;
    Ok(Placement::assemble(identity, topology, vec![part])?)
}

type Raw = Vec<(*mut u8, usize)>;

/// The buffers in the order of the plan's targets.
struct Addresses(Raw);

// SAFETY: they are the buffers', which may be sent, and which are held for as long as these.
unsafe impl Send for Addresses {}
// SAFETY: through a shared reference they are only read from, by those who wrote them.
unsafe impl Sync for Addresses {}

/// Finds the buffer of every target fragment.
fn in_order(
    manifest: &Manifest,
    plan: &Plan,
    target: PlanTarget<'_>,
    buffers: Vec<PlacedBuffer<'_>>,
) -> Result<Addresses, BallastError> {
    let about =
        |tensor: &str, message: String| Err(BallastError::invalid(message).with_details(json!({"tensor": tensor})));
    type Key = (String, Option<String>, Option<(Vec<u64>, Vec<u64>)>);
    let mut given: HashMap<Key, (*mut u8, usize)> = HashMap::with_capacity(buffers.len());
    for buffer in buffers {
        let name = &buffer.tensor;
        let Some(tensor) = manifest.tensor(name) else {
            return about(name, format!("the target adds tensor {name:?}, which the revision does not hold"));
        };
        if let Some(found) = buffer.dtype.as_deref()
            && found != tensor.dtype
            && !(found == PLAIN_BYTES && BYTES_STAND_FOR.iter().any(|kind| tensor.dtype.starts_with(kind)))
        {
            let expected = &tensor.dtype;
            return about(
                name,
                format!(
                    "tensor {name:?}: the buffer has dtype {found}, the revision {expected}; bytes are copied, never converted"
                ),
            );
        }
        if let Some(found) = &buffer.shape
            && buffer.dtype.as_ref() == Some(&tensor.dtype)
            && *found != user_shape(tensor)
        {
            return about(
                name,
                format!("tensor {name:?}: the buffer has shape {found:?}, the revision {:?}", user_shape(tensor)),
            );
        }
        let key = (buffer.tensor, buffer.participant, buffer.region);
        if let Some((name, ..)) = given.contains_key(&key).then_some(&key) {
            return about(name, format!("tensor {name:?} has two buffers for one box"));
        }
        given.insert(key, (buffer.address, buffer.bytes));
    }
    let mut raw = Vec::with_capacity(plan.targets().len());
    for wanted in plan.targets() {
        let name = plan.tensors().get(wanted.tensor as usize).map_or("", |tensor| &tensor.tensor_id);
        let (participant, fragment) = match target {
            PlanTarget::Whole(placement) | PlanTarget::Local(placement, _) => (
                placement.parts().get(wanted.place.part as usize).map(|part| part.participant().participant_id.clone()),
                placement.fragment(wanted.place),
            ),
            PlanTarget::Part(part) => (None, part.fragments().get(wanted.place.fragment as usize)),
        };
        let region = fragment.map(|own| (own.global_offset.clone(), own.local_shape.clone()));
        // As closely named as the caller has named it.
        let keys = [
            (name.to_owned(), participant, region.clone()),
            (name.to_owned(), None, region.clone()),
            (name.to_owned(), None, None),
        ];
        let is_whole = region
            .as_ref()
            .is_none_or(|(_, shape)| manifest.tensor(name).is_some_and(|tensor| *shape == tensor.global_shape));
        let found = keys.iter().take(if is_whole { 3 } else { 2 }).find_map(|key| given.remove(key));
        let Some((address, bytes)) = found else {
            if wanted.nbytes == 0 {
                raw.push((std::ptr::null_mut(), 0));
                continue;
            }
            let at = region.map_or_else(String::new, |(offset, shape)| match is_whole {
                true => String::new(),
                false => format!(" for the box of {shape:?} at {offset:?}"),
            });
            return about(name, format!("the target omits tensor {name:?}: there is no buffer{at}"));
        };
        if bytes as u64 != wanted.nbytes {
            return about(name, format!("tensor {name:?}: the buffer has {bytes} bytes, its box {}", wanted.nbytes));
        }
        raw.push((address, bytes));
    }
    // Buffers of empty boxes that nobody planned for do no harm.
    if let Some(((name, _, region), _)) = given.iter().find(|(_, (_, bytes))| *bytes > 0) {
        let shape = manifest.tensor(name).map(user_shape).unwrap_or_default();
        let box_text = region
            .as_ref()
            .map_or_else(String::new, |(offset, shape)| format!(" for the box of {shape:?} at {offset:?}"));
        return about(name, format!("tensor {name:?} {shape:?} has a buffer{box_text} that is not in the target"));
    }
    Ok(Addresses(raw))
}

fn unit_of(fragment: &SourceFragment) -> Option<(u32, u64)> {
    match fragment.place {
        SourcePlace::Unit { unit, offset, .. } => Some((unit, offset)),
        SourcePlace::Object { .. } | SourcePlace::Held(_) => None,
    }
}

/// For every unit the regions that read from it.
fn by_unit(plan: &Plan) -> HashMap<u32, Vec<u32>> {
    let mut regions: HashMap<u32, Vec<u32>> = HashMap::new();
    for (at, region) in plan.regions().iter().enumerate() {
        if let Some((unit, _)) = plan.sources().get(region.source as usize).and_then(unit_of) {
            regions.entry(unit).or_default().push(at as u32);
        }
    }
    regions
}

struct Job<'p> {
    manifest: Arc<Manifest>,
    regions: HashMap<u32, Vec<u32>>,
    plan: &'p Plan,
    buffers: Addresses,
    verify: Verify,
}

impl Job<'_> {
    async fn read(&self, holder: Holder, units: &[u32], targets: &mut Targets<'_>, meter: &Meter) -> Attempt {
        let mut attempt = Attempt::default();
        let mapped = holder.mapped.clone();
        let (hot, rest): (Vec<u32>, Vec<u32>) =
            units.iter().partition(|unit| mapped.as_ref().is_some_and(|mapped| mapped.view(**unit).is_some()));
        if let Some(mapped) = &mapped {
            self.copy(mapped, hot, targets, meter, &mut attempt).await;
        }
        // What comes from a disk is compared with its checksum, which covers the unit as a whole.
        let (checked, ranged): (Vec<u32>, Vec<u32>) = rest.into_iter().partition(|unit| match self.verify {
            Verify::Always => true,
            Verify::Never => false,
            Verify::Auto => !holder.holdings.hot.get(*unit) || self.whole(*unit).is_some(),
        });
        match mapped {
            Some(mapped) => {
                for unit in checked.into_iter().chain(ranged) {
                    let bytes = self.bytes_of(unit);
                    let read = {
                        let mapped = mapped.clone();
                        tokio::task::spawn_blocking(move || read_unit(&mapped, unit, bytes)).await
                    };
                    let read = read.unwrap_or_else(|error| Err(thread_failed(&error)));
                    self.take_unit(unit, read, meter, &mut attempt);
                    tokio::task::yield_now().await;
                }
            }
            None => self.receive(holder, checked, ranged, targets, meter, &mut attempt).await,
        }
        attempt
    }

    fn bytes_of(&self, unit: u32) -> u64 {
        self.manifest.units().get(unit as usize).map_or(0, |unit| unit.extent_bytes)
    }

    fn wanted_of(&self, unit: u32) -> u64 {
        let regions = self.regions.get(&unit).into_iter().flatten();
        regions.filter_map(|at| self.plan.regions().get(*at as usize)).map(Region::bytes).sum()
    }

    /// The one region that takes a unit as it is.
    fn whole(&self, unit: u32) -> Option<&Region> {
        let [only] = self.regions.get(&unit)?.as_slice() else { return None };
        let region = self.plan.regions().get(*only as usize)?;
        (region.loops.is_empty() && region.inner_bytes == self.bytes_of(unit)).then_some(region)
    }

    /// Copies units out of mapped memory. What is mapped hot was checked at the seal and never moved.
    async fn copy(
        &self,
        mapped: &Arc<MappedInstance>,
        units: Vec<u32>,
        targets: &mut Targets<'_>,
        meter: &Meter,
        attempt: &mut Attempt,
    ) {
        let mut left = units.into_iter().peekable();
        while left.peek().is_some() {
            let (mut batch, mut bytes) = (HashSet::new(), 0);
            while let Some(unit) = left.next_if(|unit| batch.is_empty() || bytes + self.wanted_of(*unit) <= COPY_BYTES)
            {
                if self.verify == Verify::Always
                    && let Err(error) = compare(&self.manifest, unit, checksum(mapped.view(unit).unwrap_or_default()))
                {
                    attempt.failed.push((unit, Failure::Unit(error)));
                    continue;
                }
                bytes += self.wanted_of(unit);
                batch.insert(unit);
            }
            let source = |fragment: &SourceFragment| {
                let (unit, offset) = unit_of(fragment).filter(|(unit, _)| batch.contains(unit))?;
                let offset = usize::try_from(offset).ok()?;
                mapped.view(unit)?.get(offset..offset.checked_add(usize::try_from(fragment.nbytes).ok()?)?)
            };
            let count = |bytes: u64| meter.add(bytes);
            let options = CopyOptions { progress: Some(&count), ..CopyOptions::default() };
            let copied = in_place(|| copy_mapped(self.plan, source, targets, &options));
            match copied {
                Ok(_) => attempt.done.extend(batch),
                Err(error) => {
                    let error = BallastError::from(error);
                    attempt.failed.extend(batch.into_iter().map(|unit| (unit, Failure::Fatal(error.clone()))));
                    return;
                }
            }
            tokio::task::yield_now().await;
        }
    }

    /// Takes what was read of a whole unit, once its checksum is right.
    fn take_unit(&self, unit: u32, read: Result<Vec<u8>, BallastError>, meter: &Meter, attempt: &mut Attempt) {
        let right = read.and_then(|bytes| {
            if self.verify != Verify::Never {
                compare(&self.manifest, unit, checksum(&bytes))?;
            }
            Ok(bytes)
        });
        match right {
            Err(error) => attempt.failed.push((unit, Failure::Unit(error))),
            Ok(bytes) => match self.place(unit, &bytes) {
                Ok(()) => {
                    meter.add(self.wanted_of(unit));
                    attempt.done.push(unit);
                }
                Err(error) => attempt.failed.push((unit, Failure::Fatal(error))),
            },
        }
    }

    /// Copies the regions of one unit out of its bytes.
    fn place(&self, unit: u32, bytes: &[u8]) -> Result<(), BallastError> {
        for at in self.regions.get(&unit).into_iter().flatten() {
            let Some(region) = self.plan.regions().get(*at as usize) else { continue };
            let Some((source, (_, offset))) = self
                .plan
                .sources()
                .get(region.source as usize)
                .and_then(|source| unit_of(source).map(|place| (source, place)))
            else {
                continue;
            };
            let source = bytes.get(offset as usize..(offset + source.nbytes) as usize).unwrap_or_default();
            let Some((address, room)) = self.buffers.0.get(region.target as usize).copied() else { continue };
            // SAFETY: the buffer is held by this job for as long as it runs, and no other copy is under way: units are
            // taken one at a time, between the awaits of one task.
            let target = unsafe { std::slice::from_raw_parts_mut(address, room) };
            copy_region(source, target, region)?;
        }
        Ok(())
    }

    /// Reads over several connections: `checked` units as a whole, of the others what is wanted.
    async fn receive(
        &self,
        holder: Holder,
        checked: Vec<u32>,
        ranged: Vec<u32>,
        targets: &mut Targets<'_>,
        meter: &Meter,
        attempt: &mut Attempt,
    ) {
        let mut connections = Vec::new();
        while connections.len() + 1 < lanes() {
            match holder.again().await {
                Ok(connection) => connections.push(connection),
                // Fewer will do.
                Err(_) => break,
            }
        }
        connections.push(holder.connection);
        let Some(first) = connections.last_mut() else { return };
        let mut checked = checked.into_iter();
        while let Some(unit) = checked.next() {
            match receive_unit(first, unit, self.bytes_of(unit)).await {
                Ok(bytes) => self.take_unit(unit, Ok(bytes), meter, attempt),
                Err(error) => {
                    let left = std::iter::once(unit).chain(checked).chain(ranged);
                    attempt.failed.extend(left.map(|unit| (unit, Failure::Unit(error.clone()))));
                    return;
                }
            }
        }
        attempt.came_over(first);
        if ranged.is_empty() {
            return;
        }
        let wanted: HashSet<u32> = ranged.iter().copied().collect();
        let is_wanted = |source: u32| {
            let unit = self.plan.sources().get(source as usize).and_then(unit_of);
            unit.is_some_and(|(unit, _)| wanted.contains(&unit))
        };
        let fatal =
            |error: BallastError| ranged.iter().map(|unit| (*unit, Failure::Fatal(error.clone()))).collect::<Vec<_>>();
        let wire = match WirePlan::new(self.plan, is_wanted, &Coalescing::default(), &Limits::default()) {
            Ok(wire) => wire,
            Err(error) => return attempt.failed.extend(fatal(error.into())),
        };
        let requests = match wire.requests(targets, RANGES_MAX, REQUEST_BYTES) {
            Ok(requests) => Mutex::new(requests),
            Err(error) => return attempt.failed.extend(fatal(error.into())),
        };
        let next = || requests.lock().unwrap_or_else(PoisonError::into_inner).next();
        let next = &next;
        let lanes = connections.into_iter().map(|mut connection| async move {
            while let Some(mut request) = next() {
                if let Err(error) = answer(&mut connection, &mut request).await {
                    let units: BTreeSet<u32> = request.ranges().iter().map(|range| range.unit).collect();
                    return (connection, Some((error, units)));
                }
                meter.add(request.bytes());
            }
            (connection, None)
        });
        let (connections, failures): (Vec<_>, Vec<_>) = futures::future::join_all(lanes).await.into_iter().unzip();
        connections.iter().for_each(|connection| attempt.came_over(connection));
        let failures: Vec<_> = failures.into_iter().flatten().collect();
        let Some((error, _)) = failures.first() else { return attempt.done.extend(ranged) };
        let error = error.clone();
        let mut failed: BTreeSet<u32> = failures.into_iter().flat_map(|(_, units)| units).collect();
        while let Some(request) = next() {
            failed.extend(request.ranges().iter().map(|range| range.unit));
        }
        let (failed, done): (Vec<u32>, Vec<u32>) = ranged.iter().partition(|unit| failed.contains(unit));
        attempt.done.extend(done);
        attempt.failed.extend(failed.into_iter().map(|unit| (unit, Failure::Unit(error.clone()))));
    }

    /// The error with the tensors that were written completely and those that were not, for whoever wants to go on from
    /// there.
    fn with_written(&self, rounds: &Rounds, error: BallastError) -> BallastError {
        let mut incomplete = HashSet::new();
        for unit in rounds.pending_units() {
            for at in self.regions.get(&unit).into_iter().flatten() {
                incomplete.extend(self.plan.regions().get(*at as usize).map(|region| region.tensor));
            }
        }
        let names = |wanted: bool| -> Vec<&str> {
            let tensors = self.plan.tensors().iter().zip(0_u32..);
            let chosen = tensors.filter(|(_, at)| incomplete.contains(at) == wanted);
            chosen.map(|(tensor, _)| tensor.tensor_id.as_str()).collect()
        };
        let (written, unread) = (names(false), names(true));
        let mut details = match error.details {
            serde_json::Value::Object(fields) => fields,
            _ => serde_json::Map::new(),
        };
        // Whoever gave up on the way may not have said on what.
        let message = match details.contains_key("unread") {
            true => error.message,
            false => {
                let shown = unread[..unread.len().min(NAMES_SHOWN)].join(", ");
                let more = if unread.len() > NAMES_SHOWN { ", …" } else { "" };
                let all = self.plan.tensors().len();
                format!("{} of {all} tensors could not be read ({shown}{more}): {}", unread.len(), error.message)
            }
        };
        for (field, names) in [("written", &written), ("unread", &unread)] {
            details.insert(format!("{field}_count"), json!(names.len()));
            details.insert(field.to_owned(), json!(names[..names.len().min(NAMES_DETAILED)]));
        }
        BallastError { code: error.code, message, details: details.into() }
    }
}

/// Runs something that keeps the thread busy, without keeping other tasks from running where that can be had.
fn in_place<T>(work: impl FnOnce() -> T) -> T {
    match tokio::runtime::Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(tokio::runtime::RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

/// One request over one connection: a single range straight into its buffer, several through one of ours.
async fn answer(connection: &mut NodeConnection, request: &mut Request<'_>) -> Result<(), BallastError> {
    let ranges = request.ranges().to_vec();
    let bytes = request.bytes();
    if let [only] = ranges.as_slice()
        && let Some(memory) = request.landing(0).filter(|memory| memory.len() as u64 == only.bytes)
    {
        connection.read_ranges(&ranges, &mut [memory]).await?;
        request.landed(0, bytes)?;
        return Ok(());
    }
    let mut buffer = vec![0; usize::try_from(bytes).unwrap_or(0)];
    let mut slices = Vec::with_capacity(ranges.len());
    let mut rest = buffer.as_mut_slice();
    for range in &ranges {
        let (slice, after) = rest.split_at_mut((range.bytes as usize).min(rest.len()));
        slices.push(slice);
        rest = after;
    }
    connection.read_ranges(&ranges, &mut slices).await?;
    request.deliver(0, &buffer)?;
    Ok(())
}

async fn receive_unit(connection: &mut NodeConnection, unit: u32, bytes: u64) -> Result<Vec<u8>, BallastError> {
    let mut buffer = vec![0; usize::try_from(bytes).unwrap_or(0)];
    connection.read_ranges(&[ReadRange { unit, offset: 0, bytes }], &mut [buffer.as_mut_slice()]).await?;
    Ok(buffer)
}

/// Reads a whole unit from this host's disk. Blocks.
fn read_unit(mapped: &MappedInstance, unit: u32, bytes: u64) -> Result<Vec<u8>, BallastError> {
    let mut buffer = vec![0; usize::try_from(bytes).unwrap_or(0)];
    for (index, piece) in buffer.chunks_mut(PIECE_BYTES as usize).enumerate() {
        let read = mapped.read_into(unit, index as u64 * PIECE_BYTES, piece);
        read.map_err(|error| BallastError::new(error.code(), error.to_string()))?;
    }
    Ok(buffer)
}

fn thread_failed(error: &tokio::task::JoinError) -> BallastError {
    BallastError::new(ErrorCode::Unavailable, format!("a reading thread failed: {error}"))
}

//! One run of a node: what it knows, how it obeys fences, what it writes down, and the report of every replica that ends.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ballast_schemas::{BallastError, Bitmap, ErrorCode, InstanceId, LogPosition, NodeInventory, SessionId, UnitRange};
use ballast_transfer::{FenceStep, PartOffers, UnitStates, check_fence};

use super::Node;
use super::disks::{MemoryFolder, SEGMENT_UNITS, Tier};
use crate::sim::bugs::Bug;
use crate::sim::content::Content;
use crate::sim::faults::Target;
use crate::sim::invariants;
use crate::sim::net::Service;
use crate::sim::runtime::{ProcessId, Signal, Turnstile};
use crate::sim::world::{W, short};

/// Why a replica ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Released under this fence.
    Release(LogPosition),
    /// Deleted under this fence.
    Delete(LogPosition),
    /// Dropped because the log knows it to be deleted.
    Drop,
    /// Dropped because the log did not know it.
    Unknown,
    /// The eviction of ordinary objects.
    Evict,
    /// The environment's doing.
    Loss,
}

/// Whether an instance may be read and acted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Serving,
    Quarantined,
}

/// What a run knows of one instance.
pub(crate) struct Live {
    pub id: InstanceId,
    pub session_id: SessionId,
    pub count: u32,
    pub standing: Cell<Standing>,
    pub fence: Cell<LogPosition>,
    pub deleting: Cell<bool>,
    pub content: RefCell<Option<Rc<Content>>>,
    pub sealing: Cell<bool>,
    pub writers: Cell<u32>,
    pub units: RefCell<UnitStates>,
    /// Of an import with several writers.
    pub offers: RefCell<PartOffers>,
    /// Copies on disk that were found wrong and have not been made again.
    pub cold_lost: RefCell<Bitmap>,
    /// Copies on disk that this run has read back, with the change time at which they were right.
    pub verified: RefCell<BTreeMap<u32, u64>>,
    pub queue: Turnstile,
    /// Told when a writer or a guard goes.
    pub eased: Signal,
    /// Readers that map a segment, as far as this process knows (a planted bug relies on it).
    pub mapped: RefCell<BTreeMap<u32, u32>>,
}

pub(crate) struct Store {
    pub w: W,
    pub node: Rc<Node>,
    pub incarnation: String,
    pub process: ProcessId,
    pub instances: RefCell<BTreeMap<InstanceId, Rc<Live>>>,
    pub tombstones: RefCell<BTreeSet<InstanceId>>,
    /// When the log last said what it knows of an instance.
    pub introduced_at: Cell<u64>,
}

impl Service for Store {
    fn process(&self) -> ProcessId {
        self.process
    }
}

pub(crate) fn refuse<T>(code: ErrorCode, message: impl Into<String>) -> Result<T, BallastError> {
    Err(BallastError::new(code, message))
}

impl Store {
    pub fn trace(&self, text: &str) {
        self.w.trace(format!("{} {text}", self.node.id));
    }

    /// Work of about this long; the process may die in it.
    pub async fn step(&self, mean_ns: u64) {
        self.w.work(mean_ns).await;
        self.w.may_die(&self.node.slot, Target::Node(self.node.at)).await;
    }

    /// An instance that is here and served.
    pub fn served(&self, id: &InstanceId) -> Result<Rc<Live>, BallastError> {
        match self.find(id) {
            Some(live) if live.standing.get() == Standing::Serving => Ok(live),
            Some(_) => refuse(ErrorCode::NotReady, format!("{id} is kept but not served")),
            None if self.tombstones.borrow().contains(id) => refuse(ErrorCode::Conflict, format!("{id} was deleted")),
            None => refuse(ErrorCode::NotFound, format!("nothing of {id} is here")),
        }
    }

    pub fn find(&self, id: &InstanceId) -> Option<Rc<Live>> {
        let instances = self.instances.borrow();
        if self.w.bug(Bug::LooksUpByGroup) {
            return instances.values().find(|live| live.id.group_id == id.group_id).cloned();
        }
        instances.get(id).cloned()
    }

    /// What it says it holds of an instance.
    pub fn inventory_of(&self, live: &Live, asked: &InstanceId) -> NodeInventory {
        invariants::identity_of_bytes(&self.w, &self.node, asked, &live.id);
        let sealed = live.content.borrow().is_some();
        let units = live.units.borrow();
        NodeInventory {
            node: self.node.id.clone(),
            incarnation: self.incarnation.clone(),
            instance: asked.clone(),
            fence: live.fence.get(),
            sealed,
            manifest: sealed && !live.deleting.get(),
            hot: if sealed { units.hot().clone() } else { Bitmap::empty(live.count) },
            cold: units.cold().clone(),
            cold_lost: live.cold_lost.borrow().clone(),
        }
    }

    /// Obeys a fence or refuses it; a higher one is durable before anything follows from it.
    pub fn obey(&self, live: &Live, fence: LogPosition) -> Result<(), BallastError> {
        match check_fence(live.fence.get(), fence) {
            Ok(FenceStep::Same) => Ok(()),
            Ok(FenceStep::Raise(fence)) => {
                live.fence.set(fence);
                self.save(live);
                Ok(())
            }
            Err(refused) => {
                self.w.fault("effect fenced off");
                refuse(ErrorCode::Conflict, refused.to_string())
            }
        }
    }

    pub fn is_current(live: &Live, fence: LogPosition) -> bool {
        live.fence.get() <= fence
    }

    pub fn sealed(live: &Live) -> Result<Rc<Content>, BallastError> {
        if live.deleting.get() {
            return refuse(ErrorCode::NotReady, format!("{} is being deleted", live.id));
        }
        let content = live.content.borrow().clone();
        content.ok_or_else(|| BallastError::new(ErrorCode::NotReady, format!("{} is still imported", live.id)))
    }

    /// Makes the state durable on both tiers.
    pub fn save(&self, live: &Live) {
        self.save_cold(live);
        self.save_memory(live);
    }

    pub fn save_memory(&self, live: &Live) {
        let mut disks = self.node.disks.borrow_mut();
        let Some(folder) = disks.memory.get_mut(&live.id) else { return };
        let units = live.units.borrow();
        if !self.w.bug(Bug::FencesForgotten) {
            folder.fence = live.fence.get();
        }
        folder.deleting = live.deleting.get();
        if folder.content.is_some() {
            folder.held = units.hot().clone();
        }
        folder.resident = units.resident().clone();
    }

    pub fn save_cold(&self, live: &Live) {
        let mut disks = self.node.disks.borrow_mut();
        let Some(folder) = disks.cold.get_mut(&live.id) else { return };
        if !self.w.bug(Bug::FencesForgotten) {
            folder.fence = live.fence.get();
        }
        folder.deleting = live.deleting.get();
        folder.held = live.units.borrow().cold().clone();
        folder.lost = live.cold_lost.borrow().clone();
    }

    /// A replica is about to end; reported before it does.
    pub fn ends(&self, live: &InstanceId, tier: Tier, unit: u32, cause: Cause) {
        invariants::replica_ends(&self.w, &self.node, live, tier, unit, cause);
    }

    pub fn units_of(live: &Live, ranges: &[UnitRange]) -> Result<Vec<u32>, BallastError> {
        let mut units: Vec<u32> = ranges.iter().flat_map(|range| range.iter()).collect();
        units.sort_unstable();
        units.dedup();
        match units.last() {
            Some(last) if *last >= live.count => {
                refuse(ErrorCode::InvalidArgument, format!("unit {last} is not in {}", live.id))
            }
            _ => Ok(units),
        }
    }

    pub fn segments(live: &Live) -> std::ops::Range<u32> {
        0..live.count.div_ceil(SEGMENT_UNITS)
    }

    pub fn segment_units(live: &Live, segment: u32) -> std::ops::Range<u32> {
        segment * SEGMENT_UNITS..live.count.min((segment + 1) * SEGMENT_UNITS)
    }

    /// Whether nobody maps a segment, as the kernel's lock says (or, planted, as this process remembers).
    pub fn is_unmapped(&self, live: &Live, segment: u32) -> bool {
        if self.w.bug(Bug::WorkerKilledUnderMapping) {
            return live.mapped.borrow().get(&segment).copied().unwrap_or_default() == 0;
        }
        self.node.disks.borrow().memory.get(&live.id).is_none_or(|folder| folder.locks(segment) == 0)
    }

    /// Removes everything of an instance from both tiers and from memory.
    pub fn remove(&self, live: &Live, cause: Cause) {
        let held = self.node.disks.borrow().replicas(&live.id);
        for (tier, unit) in held {
            self.ends(&live.id, tier, unit, cause);
        }
        let mut disks = self.node.disks.borrow_mut();
        disks.cold.remove(&live.id);
        // Unlinked: readers keep what they map.
        disks.memory.remove(&live.id);
        drop(disks);
        self.tombstones.borrow_mut().insert(live.id.clone());
        self.instances.borrow_mut().remove(&live.id);
        self.trace(&format!("removed {}: {cause:?}", short(&live.id)));
    }

    /// The eviction of ordinary objects under pressure. It skips managed groups.
    pub fn evict(&self) {
        if !self.w.bug(Bug::EvictionTakesManaged) {
            return;
        }
        let hot: Vec<(Rc<Live>, u32)> = {
            let instances = self.instances.borrow();
            let of = |live: &Rc<Live>| {
                let live = Rc::clone(live);
                let hot: Vec<u32> = live.units.borrow().hot().iter().collect();
                hot.into_iter().map(move |unit| (Rc::clone(&live), unit))
            };
            instances.values().filter(|live| live.content.borrow().is_some()).flat_map(of).collect()
        };
        let Some((live, unit)) = self.w.draw(|rng| rng.pick(&hot).cloned()) else { return };
        self.ends(&live.id, Tier::Memory, unit, Cause::Evict);
        live.units.borrow_mut().finish_release(unit);
        if let Some(folder) = self.node.disks.borrow_mut().memory.get_mut(&live.id) {
            folder.write(unit, None);
        }
        self.save_memory(&live);
    }
}

impl Live {
    pub fn new(id: &InstanceId, session_id: &SessionId, count: u32, standing: Standing) -> Self {
        Self {
            id: id.clone(),
            session_id: session_id.clone(),
            count,
            standing: Cell::new(standing),
            fence: Cell::new(LogPosition::ZERO),
            deleting: Cell::new(false),
            content: RefCell::new(None),
            sealing: Cell::new(false),
            writers: Cell::new(0),
            units: RefCell::new(UnitStates::new(count)),
            offers: RefCell::default(),
            cold_lost: RefCell::new(Bitmap::empty(count)),
            verified: RefCell::default(),
            queue: Turnstile::default(),
            eased: Signal::default(),
            mapped: RefCell::default(),
        }
    }
}

/// An empty folder of an import.
pub(super) fn new_folder(session_id: &SessionId, count: u32, now_ns: u64) -> MemoryFolder {
    MemoryFolder {
        session_id: session_id.clone(),
        count,
        content: None,
        fence: LogPosition::ZERO,
        deleting: false,
        held: Bitmap::empty(count),
        resident: Bitmap::full(count),
        segments: BTreeMap::new(),
        allocated_at: now_ns,
    }
}

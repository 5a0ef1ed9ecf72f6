//! A node (transfer worker): what its disks and its kernel keep over a crash, and what one run of its process knows. Fences
//! and guards are the product's own rules ([`ballast_transfer::UnitStates`], [`ballast_transfer::check_fence`]); around them
//! stands a model of segments, locks, records and copies that loses what a real machine would lose.

mod control;
mod disks;
mod effects;
mod import;
mod membership;
mod reading;
mod store;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use ballast_schemas::{InstanceId, NodeId};

use super::world::Slot;

pub(crate) use disks::{Disks, SEGMENT_UNITS, Tier};
pub(crate) use membership::start;
pub(crate) use reading::Mapped;
pub(crate) use store::{Cause, Live, Store};

/// A machine with a node on it.
pub(crate) struct Node {
    pub at: usize,
    pub id: NodeId,
    pub slot: Rc<Slot<Store>>,
    pub has_cold: bool,
    pub memory_units: u64,
    /// What outlives the node's process.
    pub disks: RefCell<Disks>,
    /// Instances that it published an inventory of.
    pub published: RefCell<BTreeSet<InstanceId>>,
    /// The next run finds the cold segments unreadable.
    pub cold_offline: Cell<bool>,
    runs: Cell<u64>,
}

impl Node {
    pub fn new(at: usize, has_cold: bool, memory_units: u64) -> Rc<Self> {
        let name = format!("n{at}");
        Rc::new(Self {
            at,
            id: NodeId::new(name.clone()).expect("a short ASCII name is a node id"),
            slot: Slot::new(name),
            has_cold,
            memory_units,
            disks: RefCell::default(),
            published: RefCell::default(),
            cold_offline: Cell::new(false),
            runs: Cell::new(0),
        })
    }

    /// The name of a new run.
    fn next_incarnation(&self) -> String {
        self.runs.set(self.runs.get() + 1);
        format!("{}-run{}", self.id, self.runs.get())
    }
}

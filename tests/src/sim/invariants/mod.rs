//! What must hold beyond what the log alone can show: the RFC's safety invariants as far as they speak of bytes, readers and
//! nodes, one file each, named as in the RFC. The invariants that a state shows by itself are in `ballast_workflows` and are
//! checked after every entry as well.

mod active_head;
mod actual_replicas;
mod complete_publication;
mod generic_lifecycle;
mod identity_of_bytes;
mod last_replica;
mod leases_protect;
mod light_metadata;
mod nothing_left;
mod once;
mod participants;
mod pressure;
mod readers;
mod replacement_order;

use std::collections::{BTreeMap, BTreeSet};

use ballast_schemas::{
    Bitmap, CommandId, Envelope, GroupInventory, InstanceId, LeaseId, ListRequest, LogPosition, NodeInventory,
    OperationId, Outcome, SessionId, TenantId, WeightRevisionMetadata,
};
use ballast_workflows::State;

use super::node::{Cause, Disks, Node, Tier};
use super::world::W;

pub(crate) use active_head::no_active_head;
pub(crate) use identity_of_bytes::identity_of_bytes;
pub(crate) use nothing_left::nothing_left;
pub(crate) use readers::{counted, saw};

/// An entry that was folded.
pub(crate) struct Folded<'a> {
    pub before: &'a State,
    pub after: &'a State,
    pub envelope: &'a Envelope,
    pub outcomes: &'a [Outcome],
    /// Every revision after the entry.
    pub records: Vec<WeightRevisionMetadata>,
}

impl Folded<'_> {
    /// The commands that were accepted, with their ids.
    pub fn accepted(&self) -> impl Iterator<Item = (&CommandId, &ballast_schemas::Command)> {
        let commands = self.envelope.commands().iter().zip(self.outcomes);
        commands.filter(|(_, outcome)| outcome.is_ok()).map(|(record, _)| (&record.id, &record.command))
    }
}

/// What the checks remember from entry to entry.
#[derive(Default)]
pub(crate) struct Watch {
    leases: BTreeMap<LeaseId, leases_protect::Protected>,
    /// Leases that have ended, and whether they lapsed.
    ended: BTreeMap<LeaseId, bool>,
    authorised: BTreeMap<OperationId, leases_protect::Authorised>,
    /// Units whose last replica the environment took.
    lost: BTreeSet<(InstanceId, u32)>,
    /// When the environment last took from, or gave back to, an instance, or a reader found that it had.
    struck: BTreeMap<InstanceId, u64>,
    outcomes: BTreeMap<CommandId, Outcome>,
    /// When the nodes were looked at for a command.
    looked: BTreeMap<CommandId, Option<u64>>,
    deleting_since: BTreeMap<InstanceId, u64>,
    rounds: pressure::Rounds,
    sessions: BTreeMap<SessionId, participants::Declared>,
    /// What was accepted of participants and coordinators: the next entry with one of these is a repeat.
    heard: BTreeSet<CommandId>,
}

/// After every entry.
pub(crate) fn check_entry(w: &W, folded: &Folded<'_>) {
    let mut watch = w.watch.borrow_mut();
    let watch = &mut *watch;
    once::check(w, watch, folded);
    leases_protect::check(w, watch, folded);
    complete_publication::check(w, watch, folded);
    participants::check(w, watch, folded);
    actual_replicas::check(w, watch, folded);
    replacement_order::check(w, watch, folded);
    light_metadata::check(w, folded);
    nothing_left::check(w, watch, folded);
    last_replica::check(w, watch, folded);
    pressure::check(w, watch, folded);
}

/// Before a good replica ends.
pub(crate) fn replica_ends(w: &W, node: &Node, instance: &InstanceId, tier: Tier, unit: u32, cause: Cause) {
    if !node.disks.borrow().has_good(instance, tier, unit) {
        return;
    }
    let mut watch = w.watch.borrow_mut();
    let watch = &mut *watch;
    if cause == Cause::Loss {
        watch.struck.insert(instance.clone(), w.now());
        last_replica::lost(w, watch, node, instance, tier, unit);
        return;
    }
    generic_lifecycle::check(w, node, instance, unit, cause);
    leases_protect::replica_ends(w, watch, node, instance, tier, unit, cause);
    last_replica::replica_ends(w, watch, node, instance, tier, unit, cause);
    nothing_left::replica_ends(w, node, instance, cause);
}

/// The environment gave something back.
pub(crate) fn restored(w: &W, instance: &InstanceId) {
    let mut watch = w.watch.borrow_mut();
    watch.struck.insert(instance.clone(), w.now());
    let units: Vec<u32> = {
        let of = (instance.clone(), 0)..=(instance.clone(), u32::MAX);
        watch.lost.range(of).map(|(_, unit)| *unit).collect()
    };
    for unit in units.into_iter().filter(|unit| has_good(w, instance, *unit)) {
        watch.lost.remove(&(instance.clone(), unit));
    }
}

/// A reader found a copy wrong that had decayed before: what the node records has changed since anybody looked at it.
pub(crate) fn found_by_reader(w: &W, instance: &InstanceId) {
    w.watch.borrow_mut().struck.insert(instance.clone(), w.now());
}

/// A command rests on a look at the nodes at this time (`None`: on none).
pub(crate) fn looked_at(w: &W, id: &CommandId, at_ns: Option<u64>) {
    w.watch.borrow_mut().looked.insert(id.clone(), at_ns);
}

impl Watch {
    /// Whether the environment struck an instance since the look that a command rests on.
    fn struck_since_look(&self, id: &CommandId, instance: &InstanceId) -> bool {
        let looked = self.looked.get(id).copied().flatten();
        let struck = self.struck.get(instance).copied();
        looked.zip(struck).is_some_and(|(looked, struck)| struck >= looked)
    }
}

/// Whether any node would hand out good bytes of a unit.
fn has_good(w: &W, instance: &InstanceId, unit: u32) -> bool {
    w.nodes.iter().any(|node| {
        let disks = node.disks.borrow();
        disks.has_good(instance, Tier::Memory, unit) || disks.has_good(instance, Tier::Cold, unit)
    })
}

/// What the nodes hold of an instance: of good bytes, or (what a node that was asked could know) by their records.
fn held(w: &W, instance: &InstanceId, units: u32, is_held: impl Fn(&Disks, Tier, u32) -> bool) -> GroupInventory {
    let mut inventory = GroupInventory::default();
    for node in &w.nodes {
        let disks = node.disks.borrow();
        if !disks.memory.contains_key(instance) && !disks.cold.contains_key(instance) {
            continue;
        }
        let (mut hot, mut cold) = (Bitmap::empty(units), Bitmap::empty(units));
        for unit in 0..units {
            hot.set(unit, is_held(&disks, Tier::Memory, unit));
            cold.set(unit, is_held(&disks, Tier::Cold, unit));
        }
        let held = NodeInventory {
            node: node.id.clone(),
            incarnation: String::new(),
            instance: instance.clone(),
            fence: LogPosition::ZERO,
            sealed: true,
            manifest: disks.has_manifest(instance),
            hot,
            cold,
            cold_lost: disks.cold.get(instance).map_or_else(|| Bitmap::empty(units), |folder| folder.lost.clone()),
        };
        inventory.nodes.insert(node.id.clone(), held);
    }
    inventory
}

fn really_held(w: &W, instance: &InstanceId, units: u32) -> GroupInventory {
    held(w, instance, units, |disks, tier, unit| disks.has_good(instance, tier, unit))
}

pub(crate) fn recorded(w: &W, instance: &InstanceId, units: u32) -> GroupInventory {
    held(w, instance, units, |disks, tier, unit| disks.has_recorded(instance, tier, unit))
}

/// Whether the environment took some unit of an instance for good. (Bytes on their way out of memory may have come back.)
pub(crate) fn is_lost(w: &W, instance: &InstanceId) -> bool {
    w.watch.borrow().lost.iter().any(|(of, unit)| of == instance && !has_good(w, of, *unit))
}

/// Every revision of the one tenant there is, tombstones too.
pub(crate) fn every_revision(state: &State) -> Vec<WeightRevisionMetadata> {
    let request = ListRequest {
        namespace: None,
        resource_id: None,
        resource_prefix: None,
        revision: None,
        all: true,
        page_token: String::new(),
        limit: 1_000,
    };
    state.list(&TenantId::default_tenant(), &request).map(|page| page.revisions).unwrap_or_default()
}

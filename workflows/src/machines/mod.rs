//! Step machines: what a worker does next for an operation, from the folded state and from what the nodes hold now.
//! Pure; the worker executes the step and comes back (RFC, Safety Invariant 10; ARCHITECTURE.md, Operations).
//!
//! How to drive them:
//! * Claim the operation, then call [`next_step`] until it says [`Step::Done`].
//! * [`Step::NeedIndex`]: ask every holder of that instance (the nodes of its revision's placement, and any other that
//!   published an inventory of it) and make an [`Observation`]. A holder that does not answer is a failure, not an absence;
//!   an observation without an index says that no holder has the manifest.
//! * [`Step::Effect`]: send it, put the node's final answer into the observation ([`Observation::answered`]), call again. The
//!   machines read what was done from inventories alone, so an effect that was lost, repeated or half done is just a state.
//!   The same effect again after a good answer means that the node did not do it: treat it as a failure.
//! * [`Step::Append`]: append it, wait for its outcome, call again with the state after it. If it was rejected and the machine
//!   asks for the same again, treat the rejection as a failure.
//! * A failure of any step: append what [`after_failure`] says; the operation waits or backs off in the log.

mod delete_first;
mod deletion;
mod migration;
mod put_first;
mod repair;
mod work_list;

pub(crate) use work_list::hot_ppm;

use std::collections::BTreeSet;
use std::sync::OnceLock;

use ballast_schemas::{
    AffinityIndex, BallastError, Command, ErrorCode, GroupInventory, InstanceId, LogPosition, NodeEvidence, NodeId,
    NodeInventory, NodeReply, NodeRequest, OperationAdvanced, OperationAttemptFailed, OperationError, OperationId,
    OperationKind, OperationStatus, ParkOperation, ParkReason, RevisionDegraded, UnitEffect, UnitRange, UpsertMode,
    WeightOperation, WeightRevisionMetadata,
};

use crate::operation::{Operation, OperationKey};
use crate::state::State;

/// Memory is full: the promotion looks again after this long.
const MEMORY_WAIT_MS: u64 = 5_000;
/// A reader maps what is to be released: look again after this long.
const READERS_WAIT_MS: u64 = 1_000;
/// A node does not answer: look again after this long.
const NODE_WAIT_MS: u64 = 2_000;

/// What to do next for an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Observe this instance, then ask again. It need not be the operation's own: a replacement looks at its target.
    NeedIndex {
        /// Whose inventories and affinity index.
        instance: InstanceId,
    },
    /// Ask a node for an effect, put its answer into the observation, then ask again.
    Effect {
        /// Which node.
        node: NodeId,
        /// What it is asked to do.
        request: NodeRequest,
    },
    /// Append this, then ask again with the state after it.
    Append(Command),
    /// Nothing more for this worker: the operation has ended, waits, is paused, or its claim is lost.
    Done,
}

/// What was found on the nodes about one instance.
#[derive(Debug)]
pub struct Observation {
    /// Whose bytes.
    pub instance: InstanceId,
    /// What each holder answered; a node that answered ABSENT is not in it.
    pub inventory: GroupInventory,
    /// The units, if any holder could say.
    pub index: Option<AffinityIndex>,
    /// Nodes that have a cold tier.
    pub cold_nodes: BTreeSet<NodeId>,
    /// The plan that follows from the index, made once.
    work: OnceLock<work_list::WorkList>,
}

impl Observation {
    /// What the holders of `instance` answered.
    #[must_use]
    pub fn new(
        instance: InstanceId,
        inventory: GroupInventory,
        index: Option<AffinityIndex>,
        cold_nodes: BTreeSet<NodeId>,
    ) -> Self {
        Self { instance, inventory, index, cold_nodes, work: OnceLock::new() }
    }

    /// Takes in a node's final answer to an effect. Answers that say nothing of what it holds change nothing.
    pub fn answered(&mut self, node: &NodeId, reply: &NodeReply) {
        match reply {
            NodeReply::Inventory(inventory) if inventory.instance == self.instance => {
                self.inventory.nodes.insert(node.clone(), (**inventory).clone());
            }
            NodeReply::Absent => {
                self.inventory.nodes.remove(node);
            }
            _ => {}
        }
    }

    /// The first holder that has not obeyed `fence` yet, asked to do so: whatever older effects are still under way
    /// somewhere are refused from then on.
    fn raise_fence(&self, fence: LogPosition) -> Option<Step> {
        let (node, _) = self.inventory.nodes.iter().find(|(_, inventory)| inventory.fence < fence)?;
        Some(Step::Effect {
            node: node.clone(),
            request: NodeRequest::RaiseFence { instance: self.instance.clone(), fence },
        })
    }

    fn effect(
        &self,
        node: &NodeId,
        fence: LogPosition,
        units: Vec<u32>,
        request: impl FnOnce(UnitEffect) -> NodeRequest,
    ) -> Step {
        let effect = UnitEffect { instance: self.instance.clone(), fence, units: runs(units) };
        Step::Effect { node: node.clone(), request: request(effect) }
    }

    fn evidence(&self) -> Vec<NodeEvidence> {
        let evidence = |(node, inventory): (&NodeId, &NodeInventory)| NodeEvidence {
            node: node.clone(),
            incarnation: inventory.incarnation.clone(),
            fence: inventory.fence,
        };
        self.inventory.nodes.iter().map(evidence).collect()
    }
}

/// What the worker that holds the claim `epoch` on `op` does next. `seen` is its latest observation, if it made one.
#[must_use]
pub fn next_step(state: &State, seen: Option<&Observation>, op: &OperationId, epoch: u64) -> Step {
    let found = OperationKey::of(op).and_then(|key| state.record.operations.get(&key));
    let Some(operation) = found else { return Step::Done };
    if operation.view.status != OperationStatus::Claimed || operation.view.epoch != epoch {
        return Step::Done;
    }
    match operation.view.kind {
        OperationKind::Migrating => migration::next(state, operation, seen),
        OperationKind::Deleting => deletion::next(state, operation, seen),
        OperationKind::Replacing => {
            let claim = state.claim(&operation.view.identity.lineage()).filter(|claim| claim.operation_id == *op);
            match claim {
                Some(claim) if claim.mode == UpsertMode::PutFirst => put_first::next(state, operation, claim, seen),
                Some(claim) => delete_first::next(operation, claim),
                None => Step::Done,
            }
        }
        OperationKind::Repairing => repair::next(state, operation, seen),
    }
}

/// What to append after a step of `op` failed: waiting where time may help without anybody's doing, else a failed attempt.
/// `request` is the effect that failed, if it was one.
#[must_use]
pub fn after_failure(op: &WeightOperation, epoch: u64, request: Option<&NodeRequest>, error: &BallastError) -> Command {
    let park = |reason, wake_after_ms| {
        Command::ParkOperation(ParkOperation {
            operation_id: op.operation_id.clone(),
            epoch,
            reason,
            wake_after_ms: Some(wake_after_ms),
        })
    };
    match (error.code, request) {
        (ErrorCode::Busy, _) => park(ParkReason::Readers, READERS_WAIT_MS),
        (ErrorCode::CapacityExhausted, Some(NodeRequest::CopyToMemory(_))) => park(ParkReason::Memory, MEMORY_WAIT_MS),
        (ErrorCode::Unavailable, _) => park(ParkReason::Node, NODE_WAIT_MS),
        (code, _) => failed(op, epoch, code, error.message.clone()),
    }
}

fn failed(op: &WeightOperation, epoch: u64, code: ErrorCode, message: String) -> Command {
    Command::OperationAttemptFailed(OperationAttemptFailed {
        operation_id: op.operation_id.clone(),
        epoch,
        error: OperationError { code, message },
        permanent: code == ErrorCode::PolicyUnsatisfiable,
    })
}

/// Some unit, or the manifest, is readable nowhere: every holder has said so under `fence`.
fn lost(metadata: &WeightRevisionMetadata, seen: &Observation, fence: LogPosition) -> Step {
    let units = seen.index.as_ref().map_or(0, AffinityIndex::len);
    let reason = crate::repair::what_is_lost(&seen.inventory, units);
    let mut evidence = seen.evidence();
    let absent = metadata.placement.iter().filter(|node| !seen.inventory.nodes.contains_key(*node));
    // A node that holds nothing has no fence of its own any more; it was asked under this one.
    evidence.extend(absent.map(|node| NodeEvidence { node: node.clone(), incarnation: String::new(), fence }));
    Step::Append(Command::RevisionDegraded(RevisionDegraded {
        identity: metadata.identity.clone(),
        instance: metadata.instance.clone(),
        evidence,
        reason,
    }))
}

/// A step forward, with progress as it was unless the caller changes it.
fn advanced(operation: &Operation, to_cursor: u64) -> OperationAdvanced {
    let view = &operation.view;
    OperationAdvanced {
        operation_id: view.operation_id.clone(),
        epoch: view.epoch,
        from_cursor: view.cursor,
        to_cursor,
        processed_units: view.processed_units,
        total_units: view.total_units,
        processed_bytes: view.processed_bytes,
        total_bytes: view.total_bytes,
        observed_hot_ppm: view.observed_hot_ppm,
        released: view.release_outstanding,
    }
}

fn parked(operation: &Operation, reason: ParkReason, wake_after_ms: Option<u64>) -> Step {
    Step::Append(Command::ParkOperation(ParkOperation {
        operation_id: operation.view.operation_id.clone(),
        epoch: operation.view.epoch,
        reason,
        wake_after_ms,
    }))
}

/// Units as maximal runs.
fn runs(mut units: Vec<u32>) -> Vec<UnitRange> {
    units.sort_unstable();
    units.dedup();
    let mut runs: Vec<UnitRange> = Vec::new();
    for unit in units {
        let end = unit.saturating_add(1);
        match runs.last_mut() {
            Some(run) if run.end == unit => run.end = end,
            _ => runs.push(UnitRange { start: unit, end }),
        }
    }
    runs
}

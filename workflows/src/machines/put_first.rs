//! PUT_FIRST (RFC, Generation Replacement): target READY → target safe → fence the base → drain its leases → delete it. The
//! fold ends the claim when the base is gone.
//!
//! Safe means: where a cold tier exists, every unit of the target has a copy on disk or two in memory. The fold keeps the
//! target's own operations parked until the claim ends, so this machine is the only one with effects on the target and two
//! fences can never refuse each other in turns.

use ballast_schemas::{
    AffinityIndex, Availability, ClaimPhase, Command, NodeId, NodeRequest, ParkReason, ReplacementAdvanced,
    ReplacementClaim,
};

use super::work_list::{hot_ppm, logical_bytes};
use super::{Observation, Step, advanced, parked};
use crate::operation::Operation;
use crate::state::State;

pub(super) fn next(state: &State, operation: &Operation, claim: &ReplacementClaim, seen: Option<&Observation>) -> Step {
    match claim.phase {
        ClaimPhase::PreparingTarget | ClaimPhase::TargetImporting => {
            secure_target(state, operation, claim, seen).unwrap_or_else(|| advance(operation, ClaimPhase::RetiringBase))
        }
        ClaimPhase::RetiringBase => {
            let base = state.record.revisions.get(&claim.base);
            if base.is_some_and(|base| !base.leases.is_empty() || base.metadata.operation_id.is_some()) {
                return parked(operation, ParkReason::LeaseDrain, None);
            }
            // Leases may have taken long to drain: look at the target once more before the base goes.
            secure_target(state, operation, claim, seen).unwrap_or_else(|| advance(operation, ClaimPhase::DeletingBase))
        }
        ClaimPhase::DeletingBase => parked(operation, ParkReason::BaseDeletion, None),
        ClaimPhase::Completed | ClaimPhase::Aborted => Step::Done,
    }
}

fn advance(operation: &Operation, to: ClaimPhase) -> Step {
    Step::Append(Command::ReplacementAdvanced(ReplacementAdvanced {
        operation_id: operation.view.operation_id.clone(),
        epoch: operation.view.epoch,
        to,
    }))
}

/// What is still to be done until the target is safe; `None` when it is.
fn secure_target(
    state: &State,
    operation: &Operation,
    claim: &ReplacementClaim,
    seen: Option<&Observation>,
) -> Option<Step> {
    let view = &operation.view;
    let target = state.revision(&claim.target).filter(|target| target.availability == Availability::Ready);
    let Some(target) = target else { return Some(parked(operation, ParkReason::TargetImport, None)) };
    let Some(seen) = seen.filter(|seen| seen.instance == target.instance) else {
        return Some(Step::NeedIndex { instance: target.instance.clone() });
    };
    if let Some(step) = seen.raise_fence(view.fence) {
        return Some(step);
    }
    // A target that lost bytes is not READY: saying so gives the base back.
    let Some(index) = seen.index.as_ref().filter(|index| seen.inventory.is_readable(index.len())) else {
        return Some(super::lost(target, seen, view.fence));
    };
    let unsafe_units: Vec<u32> = (0..index.len()).filter(|unit| !is_safe(seen, *unit)).collect();
    if let Some(step) = progress(operation, seen, index, &unsafe_units) {
        return Some(step);
    }
    let first = *unsafe_units.first()?;
    let (node, inventory) = seen
        .inventory
        .nodes
        .iter()
        .find(|(node, inventory)| seen.cold_nodes.contains(*node) && inventory.hot.get(first))?;
    let config = state.config();
    let mut bytes = 0u64;
    let fits = |unit: &u32| {
        // One unit at least, however large.
        let begins = bytes == 0;
        bytes = bytes.saturating_add(logical_bytes(index, *unit));
        begins || bytes <= config.migration_max_bytes_per_round
    };
    let members = usize::try_from(config.migration_max_members_per_round).unwrap_or(usize::MAX);
    let batch =
        unsafe_units.into_iter().filter(|unit| inventory.hot.get(*unit)).take(members).take_while(fits).collect();
    Some(seen.effect(node, view.fence, batch, NodeRequest::CopyToCold))
}

/// On some disk, in two memories, or nowhere near a disk.
fn is_safe(seen: &Observation, unit: u32) -> bool {
    let hot: Vec<&NodeId> =
        seen.inventory.nodes.iter().filter(|(_, inventory)| inventory.hot.get(unit)).map(|(node, _)| node).collect();
    seen.inventory.nodes.values().any(|inventory| inventory.cold.get(unit))
        || hot.len() >= 2
        || !hot.iter().any(|node| seen.cold_nodes.contains(*node))
}

fn progress(operation: &Operation, seen: &Observation, index: &AffinityIndex, unsafe_units: &[u32]) -> Option<Step> {
    let view = &operation.view;
    let units = u64::from(index.len());
    let done = units.saturating_sub(u64::try_from(unsafe_units.len()).unwrap_or(u64::MAX));
    if done <= view.processed_units && view.total_units == units {
        return None;
    }
    let left = unsafe_units.iter().fold(0u64, |sum, unit| sum.saturating_add(logical_bytes(index, *unit)));
    let mut step = advanced(operation, view.cursor.saturating_add(1));
    step.processed_units = done;
    step.total_units = units;
    step.processed_bytes = index.logical_bytes().saturating_sub(left);
    step.total_bytes = index.logical_bytes();
    step.observed_hot_ppm = hot_ppm(index, &seen.inventory.hot(index.len()));
    Some(Step::Append(Command::OperationAdvanced(step)))
}

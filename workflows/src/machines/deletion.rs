//! The deletion machine (RFC, Delete and Ordinary Eviction): payloads in batches on every holder, then the manifest with
//! whatever is left of the instance, then the tombstone. The cursor only counts batches; what is left to do is what the
//! inventories still show.
//!
//! A holder that does not answer keeps the operation waiting: its copies are not forgotten while somebody may still
//! come back with them.

use ballast_schemas::{Command, DeletionFinished, NodeRequest};

use super::work_list::logical_bytes;
use super::{Observation, Step, advanced};
use crate::operation::Operation;
use crate::state::State;

pub(super) fn next(state: &State, operation: &Operation, seen: Option<&Observation>) -> Step {
    let view = &operation.view;
    let Some(seen) = seen.filter(|seen| seen.instance == view.instance) else {
        return Step::NeedIndex { instance: view.instance.clone() };
    };
    if let Some(step) = seen.raise_fence(view.fence) {
        return step;
    }
    if let Some(step) = progress(operation, seen) {
        return step;
    }
    let members = usize::try_from(state.config().deletion_max_members_per_round).unwrap_or(usize::MAX);
    for (node, inventory) in &seen.inventory.nodes {
        let mut held = inventory.hot.clone();
        held.union_with(&inventory.cold);
        // An import that was never sealed has no units yet, whatever was written.
        if inventory.sealed && !held.is_empty() {
            let batch = held.iter().take(members).collect();
            return seen.effect(node, view.fence, batch, NodeRequest::DeleteUnits);
        }
    }
    // The manifest goes last: until here every holder could still say what it has.
    if let Some((node, _)) = seen.inventory.nodes.iter().next() {
        let request = NodeRequest::DeleteInstance { instance: view.instance.clone(), fence: view.fence };
        return Step::Effect { node: node.clone(), request };
    }
    Step::Append(Command::DeletionFinished(DeletionFinished {
        operation_id: view.operation_id.clone(),
        epoch: view.epoch,
        owed: Vec::new(),
    }))
}

/// Reports the units that are gone everywhere, once there are more of them than the log knows.
fn progress(operation: &Operation, seen: &Observation) -> Option<Step> {
    let view = &operation.view;
    let index = seen.index.as_ref().filter(|index| u64::from(index.len()) == view.total_units)?;
    let mut held = seen.inventory.hot(index.len());
    held.union_with(&seen.inventory.cold(index.len()));
    let gone = u64::from(index.len()).saturating_sub(held.count().into());
    if gone <= view.processed_units {
        return None;
    }
    let mut step = advanced(operation, view.cursor.saturating_add(1));
    step.processed_units = gone;
    let left = held.iter().fold(0u64, |sum, unit| sum.saturating_add(logical_bytes(index, unit)));
    step.processed_bytes = index.logical_bytes().saturating_sub(left);
    step.total_bytes = index.logical_bytes();
    Some(Step::Append(Command::OperationAdvanced(step)))
}

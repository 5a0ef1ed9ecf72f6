//! The repair machine (RFC, State Model): makes the copies that a revision lacks from those that it has, a round at a time, then
//! reports the whole group as found under the last fence, which makes a DEGRADED revision READY again. A unit that is readable
//! nowhere is named, and the operation fails; the revision says DEGRADED until somebody brings the unit back.
//!
//! What is lacking follows from the inventories alone, so that the cursor only counts the steps. A source is any replica that
//! an effect can copy from; today that is the other tier of the same node.

use ballast_schemas::{
    AffinityIndex, Availability, Bitmap, Command, ErrorCode, NodeId, NodeRequest, OperationAttemptFailed,
    OperationError, OperationFinished, Residency, UnitEffect,
};

use super::work_list::{hot_ppm, logical_bytes};
use super::{Observation, Step, advanced, failed};
use crate::operation::Operation;
use crate::repair::{Lacking, what_is_lost};
use crate::state::State;

pub(super) fn next(state: &State, operation: &Operation, seen: Option<&Observation>) -> Step {
    let view = &operation.view;
    let Some(metadata) = state.revision(&view.identity).filter(|metadata| metadata.instance == view.instance) else {
        return Step::Done;
    };
    let Some(seen) = seen.filter(|seen| seen.instance == view.instance) else {
        return Step::NeedIndex { instance: view.instance.clone() };
    };
    if !matches!(metadata.availability, Availability::Ready | Availability::Degraded) {
        let message = format!("revision {} is {}, expected READY or DEGRADED", view.identity, metadata.availability);
        return Step::Append(failed(view, view.epoch, ErrorCode::NotReady, message));
    }
    if let Some(step) = seen.raise_fence(view.fence) {
        return step;
    }
    let units = metadata.manifest.as_ref().map_or(0, |manifest| manifest.affinity_count);
    let readable = seen.inventory.is_readable(units);
    if metadata.availability == Availability::Ready && !readable {
        return super::lost(metadata, seen, view.fence);
    }
    let Some(index) = &seen.index else { return hopeless(operation, seen, units) };
    let lacking = Lacking::of(view.target.unwrap_or(Residency::Mixed), &seen.inventory, index.len());
    if let Some(step) = progress(operation, seen, index, &lacking) {
        return step;
    }
    if let Some(step) = copy(state, operation, seen, index, &lacking) {
        return step;
    }
    if !readable {
        return hopeless(operation, seen, units);
    }
    if metadata.availability == Availability::Ready && !lacking.cold.is_empty() {
        return diskless(operation, &lacking.cold);
    }
    Step::Append(Command::OperationFinished(OperationFinished {
        operation_id: view.operation_id.clone(),
        epoch: view.epoch,
        residency: seen.inventory.residency(index.len()),
        observed_hot_ppm: hot_ppm(index, &seen.inventory.hot(index.len())),
        evidence: seen.evidence(),
        note: None,
    }))
}

/// Nothing that is here can bring back what is lost.
fn hopeless(operation: &Operation, seen: &Observation, units: u32) -> Step {
    let view = &operation.view;
    let reason = what_is_lost(&seen.inventory, units);
    let message = format!("{reason}; bring back a node that holds them, or publish the revision again");
    Step::Append(Command::OperationAttemptFailed(OperationAttemptFailed {
        operation_id: view.operation_id.clone(),
        epoch: view.epoch,
        error: OperationError { code: ErrorCode::NotReady, message },
        permanent: true,
    }))
}

/// What is lacking on disk is in memory on nodes alone that have no disk.
fn diskless(operation: &Operation, lacking: &Bitmap) -> Step {
    let view = &operation.view;
    let (count, first) = (lacking.count(), lacking.iter().next().unwrap_or_default());
    let message = format!(
        "{count} units (first {first}) have lost their copy on disk, and no node that has them in memory has a cold tier; \
         the copies in memory are served, publish the revision again to have both"
    );
    Step::Append(failed(view, view.epoch, ErrorCode::PolicyUnsatisfiable, message))
}

/// The next round of copies, if one is lacking whose source is readable.
fn copy(
    state: &State,
    operation: &Operation,
    seen: &Observation,
    index: &AffinityIndex,
    lacking: &Lacking,
) -> Option<Step> {
    let fence = operation.view.fence;
    let to_memory = lacking.memory.iter().filter_map(|unit| Some((unit, memory_source(seen, unit)?)));
    if let Some((node, batch)) = round(state, index, to_memory) {
        return Some(seen.effect(node, fence, batch, NodeRequest::CopyToMemory as fn(UnitEffect) -> NodeRequest));
    }
    let to_cold = lacking.cold.iter().filter_map(|unit| Some((unit, cold_source(seen, unit)?)));
    let (node, batch) = round(state, index, to_cold)?;
    Some(seen.effect(node, fence, batch, NodeRequest::CopyToCold as fn(UnitEffect) -> NodeRequest))
}

/// A node that can put a unit into memory.
fn memory_source(seen: &Observation, unit: u32) -> Option<&NodeId> {
    seen.inventory.nodes.iter().find(|(_, held)| held.cold.get(unit)).map(|(node, _)| node)
}

/// A node that can put a unit on disk.
fn cold_source(seen: &Observation, unit: u32) -> Option<&NodeId> {
    let mut holders = seen.inventory.nodes.iter();
    holders.find(|(node, held)| held.hot.get(unit) && seen.cold_nodes.contains(*node)).map(|(node, _)| node)
}

/// Units of one node, as many as a migration's round may have; one at least, however large.
fn round<'a>(
    state: &State,
    index: &AffinityIndex,
    units: impl Iterator<Item = (u32, &'a NodeId)>,
) -> Option<(&'a NodeId, Vec<u32>)> {
    let config = state.config();
    let members = usize::try_from(config.migration_max_members_per_round).unwrap_or(usize::MAX);
    let (mut at, mut batch, mut bytes) = (None, Vec::new(), 0u64);
    for (unit, node) in units {
        if at.is_some_and(|at| at != node) {
            continue;
        }
        bytes = bytes.saturating_add(logical_bytes(index, unit));
        let full = batch.len() >= members || bytes > config.migration_max_bytes_per_round;
        if full && !batch.is_empty() {
            break;
        }
        at = Some(node);
        batch.push(unit);
    }
    Some((at?, batch))
}

fn progress(operation: &Operation, seen: &Observation, index: &AffinityIndex, lacking: &Lacking) -> Option<Step> {
    let view = &operation.view;
    let left = lacking.all();
    let done = u64::from(index.len().saturating_sub(left.count()));
    if done <= view.processed_units {
        return None;
    }
    let left_bytes = left.iter().fold(0u64, |sum, unit| sum.saturating_add(logical_bytes(index, unit)));
    let mut step = advanced(operation, view.cursor.saturating_add(1));
    step.processed_units = done;
    step.total_units = index.len().into();
    step.processed_bytes = index.logical_bytes().saturating_sub(left_bytes);
    step.total_bytes = index.logical_bytes();
    step.observed_hot_ppm = hot_ppm(index, &seen.inventory.hot(index.len()));
    Some(Step::Append(Command::OperationAdvanced(step)))
}

//! The migration machine (RFC, Residency Migration). The cursor counts units of the [`WorkList`]:
//!
//! * among those to be hot: copy a round to memory → go on;
//! * among those to be cold: copy a round to disk where it lacks a copy → ask the log for leave → release memory → go on;
//! * at the end: whatever does not fit the plan is put right, then the whole group as found under the last fence is reported.
//!
//! Units that fit already are passed over and cost nothing. COLD and MIXED never release a unit that is not on the same
//! node's disk (RFC, safety invariant 6).

use ballast_schemas::{
    AffinityIndex, AuthorizeRelease, Availability, Bitmap, Command, ErrorCode, NodeRequest, OperationFinished,
    Residency, WeightRevisionMetadata,
};

use super::work_list::{WorkList, hot_ppm, logical_bytes};
use super::{Observation, Step, advanced, failed};
use crate::operation::{Authorization, Operation};
use crate::state::State;

/// A split further from what was asked than this is said to be the nearest there is, in parts per million.
const NEAR_PPM: u32 = 10_000;

pub(super) fn next(state: &State, operation: &Operation, seen: Option<&Observation>) -> Step {
    let view = &operation.view;
    let Some(metadata) = state.revision(&view.identity).filter(|metadata| metadata.instance == view.instance) else {
        return Step::Done;
    };
    let Some(seen) = seen.filter(|seen| seen.instance == view.instance) else {
        return Step::NeedIndex { instance: view.instance.clone() };
    };
    if view.ending.is_some() {
        return fence_off(operation, seen);
    }
    if metadata.availability != Availability::Ready {
        let message = format!("revision {} is {}, expected READY", view.identity, metadata.availability);
        return Step::Append(failed(view, view.epoch, ErrorCode::NotReady, message));
    }
    let Some(index) = &seen.index else {
        // Nobody holds the manifest: once every holder has said so under this fence, that is what is to be told.
        return seen.raise_fence(view.fence).unwrap_or_else(|| super::lost(metadata, seen, view.fence));
    };
    let target = view.target.unwrap_or(Residency::Mixed);
    let made;
    let work = match seen.work.get_or_init(|| WorkList::new(index, target, view.target_hot_ratio)) {
        work if work.is_for(target, view.target_hot_ratio) => work,
        _ => {
            made = WorkList::new(index, target, view.target_hot_ratio);
            &made
        }
    };
    Migration {
        state,
        operation,
        metadata,
        seen,
        index,
        work,
        hot: seen.inventory.hot(index.len()),
        cold: seen.inventory.cold(index.len()),
    }
    .next()
}

/// The operation is to end with a release outstanding: once every holder has obeyed a later fence, that release can not
/// happen any more.
fn fence_off(operation: &Operation, seen: &Observation) -> Step {
    if let Some(step) = seen.raise_fence(operation.view.fence) {
        return step;
    }
    Step::Append(Command::OperationAdvanced(advanced(operation, operation.view.cursor)))
}

struct Migration<'a> {
    state: &'a State,
    operation: &'a Operation,
    metadata: &'a WeightRevisionMetadata,
    seen: &'a Observation,
    index: &'a AffinityIndex,
    work: &'a WorkList,
    hot: Bitmap,
    cold: Bitmap,
}

impl Migration<'_> {
    fn next(&self) -> Step {
        if let Some(step) = self.raise_fences() {
            return step;
        }
        if !self.seen.inventory.is_readable(self.index.len()) {
            return super::lost(self.metadata, self.seen, self.operation.view.fence);
        }
        let cursor = usize::try_from(self.operation.view.cursor).unwrap_or(usize::MAX);
        if let Some(authorized) = self.operation.authorized {
            return self.release(&authorized);
        }
        if cursor < self.work.promote {
            // A round's worth of units that are there is told before the next round: the operation's progress is what people
            // and a successor see.
            let there = self.units(cursor, self.work.promote).iter().take_while(|unit| self.hot.get(**unit)).count();
            let there = cursor.saturating_add(there);
            if there >= self.round(cursor, self.work.promote, |_| true) {
                return self.advance(there);
            }
            let to = self.round(cursor, self.work.promote, |unit| !self.hot.get(unit));
            return self.promote(cursor, to).unwrap_or_else(|| self.advance(to));
        }
        if cursor < self.work.units.len() {
            let to = self.round(cursor, self.work.units.len(), |unit| self.hot.get(unit) || !self.cold.get(unit));
            return self.demote(cursor, to).unwrap_or_else(|| self.advance(to));
        }
        self.finish()
    }

    /// A new claim's first step. With a release outstanding, the nodes it concerns obey its fence by executing it.
    fn raise_fences(&self) -> Option<Step> {
        let view = &self.operation.view;
        let Some(authorized) = self.operation.authorized else { return self.seen.raise_fence(view.fence) };
        let batch = self.authorized_units(&authorized);
        let idle =
            self.seen.inventory.nodes.iter().find(|(_, inventory)| {
                inventory.fence < view.fence && !batch.iter().any(|unit| inventory.cold.get(*unit))
            });
        let (node, _) = idle?;
        let request = NodeRequest::RaiseFence { instance: self.seen.instance.clone(), fence: view.fence };
        Some(Step::Effect { node: node.clone(), request })
    }

    /// Where the round that begins at `from` ends: it takes as many units with something to do as the limits allow, one at
    /// least, and those without anything to do for free.
    fn round(&self, from: usize, end: usize, has_work: impl Fn(u32) -> bool) -> usize {
        let config = self.state.config();
        let (mut members, mut bytes) = (0u32, 0u64);
        let mut to = from;
        for unit in self.work.units.get(from..end).unwrap_or_default() {
            if has_work(*unit) {
                let with = bytes.saturating_add(logical_bytes(self.index, *unit));
                let full =
                    members >= config.migration_max_members_per_round || with > config.migration_max_bytes_per_round;
                if full && members > 0 {
                    break;
                }
                (members, bytes) = (members.saturating_add(1), with);
            }
            to = to.saturating_add(1);
        }
        to
    }

    fn units(&self, from: usize, to: usize) -> &[u32] {
        self.work.units.get(from..to.min(self.work.units.len())).unwrap_or_default()
    }

    /// Copies to memory what lacks a memory replica, on a node that has it on disk.
    fn promote(&self, from: usize, to: usize) -> Option<Step> {
        let missing: Vec<u32> = self.units(from, to).iter().copied().filter(|unit| !self.hot.get(*unit)).collect();
        let first = *missing.first()?;
        let (node, inventory) = self.seen.inventory.nodes.iter().find(|(_, inventory)| inventory.cold.get(first))?;
        let here = missing.into_iter().filter(|unit| inventory.cold.get(*unit)).collect();
        Some(self.seen.effect(node, self.operation.view.fence, here, NodeRequest::CopyToMemory))
    }

    /// Copies to disk what would lose its last replica on its node, then asks for leave to release.
    fn demote(&self, from: usize, to: usize) -> Option<Step> {
        let units = self.units(from, to);
        if let Some(step) = self.copy_to_cold(units) {
            return Some(step);
        }
        if !units.iter().any(|unit| self.hot.get(*unit)) {
            return None;
        }
        Some(self.ask_for_leave(to.saturating_sub(from)))
    }

    fn copy_to_cold(&self, units: &[u32]) -> Option<Step> {
        self.seen.inventory.nodes.iter().find_map(|(node, inventory)| {
            let here: Vec<u32> =
                units.iter().copied().filter(|unit| inventory.hot.get(*unit) && !inventory.cold.get(*unit)).collect();
            (!here.is_empty()).then(|| self.seen.effect(node, self.operation.view.fence, here, NodeRequest::CopyToCold))
        })
    }

    fn ask_for_leave(&self, units: usize) -> Step {
        let view = &self.operation.view;
        Step::Append(Command::AuthorizeRelease(AuthorizeRelease {
            operation_id: view.operation_id.clone(),
            epoch: view.epoch,
            cursor: view.cursor,
            unit_count: u32::try_from(units).unwrap_or(u32::MAX),
        }))
    }

    /// Exactly the units that the log gave leave for, whatever the inventories say by now. At the end of the list it is every
    /// unit that is to be cold.
    fn authorized_units(&self, authorized: &Authorization) -> &[u32] {
        let from = usize::try_from(authorized.cursor).unwrap_or(usize::MAX);
        let count = usize::try_from(authorized.unit_count).unwrap_or(usize::MAX);
        let all = self.work.units.len();
        match from < all {
            true => self.units(from.max(self.work.promote), from.saturating_add(count)),
            false => self.units(self.work.promote, all),
        }
    }

    /// Executes an authorised release on every node that may still hold some of it in memory. A node that was asked before
    /// and found readers hands the units out no more, but keeps their bytes: only a good answer under the present fence
    /// says that they are gone.
    fn release(&self, authorized: &Authorization) -> Step {
        let fence = self.operation.view.fence;
        let units = self.authorized_units(authorized);
        // A copy that was lost since the leave was given is made again first.
        if let Some(step) = self.copy_to_cold(units) {
            return step;
        }
        let holder = self.seen.inventory.nodes.iter().find_map(|(node, inventory)| {
            let here: Vec<u32> = units.iter().copied().filter(|unit| inventory.cold.get(*unit)).collect();
            let open = inventory.fence < fence || here.iter().any(|unit| inventory.hot.get(*unit));
            (open && !here.is_empty()).then_some((node, here))
        });
        match holder {
            Some((node, here)) => self.seen.effect(node, fence, here, NodeRequest::ReleaseMemory),
            None => {
                let end = authorized.cursor.saturating_add(authorized.unit_count.into());
                self.advance(usize::try_from(end).unwrap_or(usize::MAX).min(self.work.units.len()))
            }
        }
    }

    fn advance(&self, to: usize) -> Step {
        let done = to.min(self.work.units.len());
        let mut step = advanced(self.operation, u64::try_from(done).unwrap_or(u64::MAX));
        step.processed_units = u64::try_from(done).unwrap_or(u64::MAX);
        step.total_units = self.index.len().into();
        step.processed_bytes = self.work.bytes_before.get(done).copied().unwrap_or_default();
        step.total_bytes = self.work.total_bytes();
        step.observed_hot_ppm = hot_ppm(self.index, &self.hot);
        Step::Append(Command::OperationAdvanced(step))
    }

    /// The whole group, as every holder reported it under the last fence.
    fn finish(&self) -> Step {
        let view = &self.operation.view;
        let all = self.work.units.len();
        if let Some(step) = self.promote(0, self.round(0, self.work.promote, |unit| !self.hot.get(unit))) {
            return step;
        }
        if let Some(step) = self.demote(self.work.promote, all) {
            return step;
        }
        let observed_hot_ppm = hot_ppm(self.index, &self.hot);
        let residency = self.seen.inventory.residency(self.index.len());
        Step::Append(Command::OperationFinished(OperationFinished {
            operation_id: view.operation_id.clone(),
            epoch: view.epoch,
            residency,
            observed_hot_ppm,
            evidence: self.seen.evidence(),
            note: self.note(residency),
        }))
    }

    /// Says so when whole units can not come nearer to the share that was asked for.
    fn note(&self, reached: Residency) -> Option<String> {
        let asked = self.operation.view.target_hot_ratio?.ppm();
        let planned = self.work.planned_ppm;
        (reached != Residency::Mixed || planned.abs_diff(asked) > NEAR_PPM).then(|| {
            format!(
                "a hot ratio of {} was asked for; the nearest that {} whole units allow is {} ({reached})",
                ratio_text(asked),
                self.index.len(),
                ratio_text(planned)
            )
        })
    }
}

/// Parts per million as the number between 0 and 1 that people give.
fn ratio_text(ppm: u32) -> String {
    let text = format!("{}.{:06}", ppm / 1_000_000, ppm % 1_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_reads_as_it_is_given() {
        assert_eq!([0, 1, 500_000, 662_917, 1_000_000].map(ratio_text), ["0", "0.000001", "0.5", "0.662917", "1"]);
    }
}

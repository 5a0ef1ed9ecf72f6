//! Loss and repair as the log sees them: what a published revision lacks, what follows from that, and the start of a REPAIRING
//! operation (RFC, State Model). How it is carried out is in `machines/repair.rs`; that a revision degraded or recovered is
//! folded in `revision.rs`.

use ballast_schemas::{
    AffinityIndex, Availability, Bitmap, ClaimPhase, Command, EventBody, GroupInventory, MigrationTrigger,
    NodeEvidence, OperationFinished, OperationId, OperationKind, OperationStatus, Outcome, Residency, RevisionDegraded,
    RevisionIdentity, RevisionRecovered, StartRepair, WeightRevisionMetadata,
};

use crate::fold::Fold;
use crate::machines::hot_ppm;
use crate::operation::{End, NewOperation, OperationKey};
use crate::revision::{Settled, claim_busy, expect_evidence, expect_readable, not_ready};
use crate::state::State;

/// Units named in a message; the others are counted.
const UNITS_NAMED: usize = 16;

/// What a group lacks of what its residency promises: HOT a memory copy of every unit, COLD one on disk, MIXED one of either
/// kind; and always a copy on disk that was there before it was found wrong.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lacking {
    /// Units to copy to memory.
    pub memory: Bitmap,
    /// Units to copy to disk.
    pub cold: Bitmap,
    /// Units that are readable nowhere.
    pub lost: Bitmap,
}

impl Lacking {
    pub fn of(promised: Residency, held: &GroupInventory, units: u32) -> Self {
        let (hot, cold) = (held.hot(units), held.cold(units));
        let mut cold_lost = Bitmap::empty(units);
        held.nodes.values().for_each(|node| cold_lost.union_with(&node.cold_lost));
        let of = |is_lacking: &dyn Fn(u32) -> bool| {
            let mut lacking = Bitmap::empty(units);
            (0..units).filter(|unit| is_lacking(*unit)).for_each(|unit| lacking.set(unit, true));
            lacking
        };
        Self {
            memory: of(&|unit| promised == Residency::Hot && !hot.get(unit) && cold.get(unit)),
            cold: of(&|unit| (promised == Residency::Cold || cold_lost.get(unit)) && !cold.get(unit) && hot.get(unit)),
            lost: of(&|unit| !hot.get(unit) && !cold.get(unit)),
        }
    }

    /// Whether a copy can be made of something that is here.
    pub fn is_repairable(&self) -> bool {
        !self.memory.is_empty() || !self.cold.is_empty()
    }

    /// Every unit with something to do.
    pub fn all(&self) -> Bitmap {
        let mut all = self.memory.clone();
        all.union_with(&self.cold);
        all.union_with(&self.lost);
        all
    }
}

/// Why a group is not readable.
pub(crate) fn what_is_lost(held: &GroupInventory, units: u32) -> String {
    let lost = Lacking::of(Residency::Mixed, held, units).lost;
    let count = lost.count();
    if count == 0 {
        return "the manifest is readable on no node".to_owned();
    }
    let named: Vec<String> = lost.iter().take(UNITS_NAMED).map(|unit| unit.to_string()).collect();
    let more = usize::try_from(count).unwrap_or(usize::MAX).saturating_sub(named.len());
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{count} of {units} units have no readable replica on any node: {}{more}", named.join(", "))
}

/// What is to be told to the log of a published revision, after its nodes were looked at: that it degraded or recovered, or
/// that it wants repair. `held` is what the nodes that answered hold, `evidence` who was asked; `index` makes the hot share
/// exact. `None` when all is as the log says, or the operation at work sees to it.
#[must_use]
pub fn verdict(
    state: &State,
    metadata: &WeightRevisionMetadata,
    held: &GroupInventory,
    evidence: Vec<NodeEvidence>,
    index: Option<&AffinityIndex>,
) -> Option<Command> {
    let units = metadata.manifest.as_ref()?.affinity_count;
    let (identity, instance) = (metadata.identity.clone(), metadata.instance.clone());
    match (metadata.availability, held.is_readable(units)) {
        (Availability::Ready, false) => {
            let reason = what_is_lost(held, units);
            return Some(Command::RevisionDegraded(RevisionDegraded { identity, instance, evidence, reason }));
        }
        (Availability::Degraded, true) => {
            let residency = held.residency(units);
            let hot = held.hot(units);
            let by_count = || {
                let ppm = u64::from(hot.count()).saturating_mul(1_000_000).checked_div(units.into());
                u32::try_from(ppm.unwrap_or_default()).unwrap_or(1_000_000)
            };
            let observed_hot_ppm = index.map_or_else(by_count, |index| hot_ppm(index, &hot));
            return Some(Command::RevisionRecovered(RevisionRecovered {
                identity,
                instance,
                evidence,
                residency,
                observed_hot_ppm,
            }));
        }
        (Availability::Ready | Availability::Degraded, _) => {}
        _ => return None,
    }
    let reserved = metadata.availability == Availability::Ready
        && state.claim(&identity.lineage()).is_some_and(|claim| claim.target == identity && !is_over(claim.phase));
    let free = metadata.operation_id.is_none() && !metadata.retired && !reserved;
    let wanted = free && Lacking::of(metadata.residency, held, units).is_repairable();
    let expected_metadata_generation = metadata.metadata_generation;
    wanted.then_some(Command::StartRepair(StartRepair { identity, expected_metadata_generation }))
}

fn is_over(phase: ClaimPhase) -> bool {
    matches!(phase, ClaimPhase::Completed | ClaimPhase::Aborted)
}

impl Fold<'_> {
    pub fn start_repair(&mut self, command: &StartRepair) -> Outcome {
        let identity = &command.identity;
        let expected = command.expected_metadata_generation;
        let revision = self.revision(identity)?;
        let availability = revision.metadata.availability;
        if !matches!(availability, Availability::Ready | Availability::Degraded) {
            return Err(not_ready(identity, availability, "READY or DEGRADED"));
        }
        self.expect_not_retired(revision)?;
        if let Some(operation_id) = revision.metadata.operation_id.clone() {
            let (_, operation) = self.operation(&operation_id)?;
            if operation.view.kind == OperationKind::Repairing {
                if !revision.is_repeat_of_last_change(expected) {
                    revision.expect_generation(expected)?;
                }
                return self.operation_reply(&operation_id);
            }
            self.expect_free(revision)?;
        }
        let reserved = self.open_claim(identity).filter(|claim| claim.target == *identity);
        if let Some(claim) = reserved.filter(|_| availability == Availability::Ready) {
            return Err(claim_busy(claim, "its target is repaired once the replacement has ended"));
        }
        let promised = revision.metadata.residency;
        revision.expect_generation(expected)?;
        self.step_aside(identity);
        let operation_id = self.add_repair(identity, promised);
        self.change_revision(identity, |revision| revision.metadata.operation_id = Some(operation_id.clone()));
        self.emit_started(Some(&operation_id));
        self.operation_reply(&operation_id)
    }

    /// Records a REPAIRING operation towards what the revision's residency promises.
    fn add_repair(&mut self, identity: &RevisionIdentity, promised: Residency) -> OperationId {
        let Some(revision) = self.state.record.revisions.get(identity) else {
            // Callers have looked it up; an id that names nothing is refused everywhere.
            return OperationId::at(self.position, u32::MAX);
        };
        let manifest = revision.metadata.manifest.as_ref();
        let operation = NewOperation {
            target: Some(promised),
            total_units: manifest.map_or(0, |manifest| manifest.affinity_count.into()),
            total_bytes: manifest.map_or(0, |manifest| manifest.logical_bytes),
            ..NewOperation::on(&revision.metadata, OperationKind::Repairing)
        };
        self.add_operation(operation)
    }

    /// Everything that could be made is there, and every unit is readable.
    pub fn repair_finished(&mut self, key: OperationKey, command: &OperationFinished) -> Outcome {
        let id = &command.operation_id;
        let view = &self.operation(id)?.1.view;
        let (identity, instance) = (view.identity.clone(), view.instance.clone());
        expect_readable(command.residency)?;
        let revision = self.revision(&identity)?;
        let availability = revision.metadata.availability;
        if !matches!(availability, Availability::Ready | Availability::Degraded) {
            return Err(not_ready(&identity, availability, "READY or DEGRADED"));
        }
        expect_evidence(revision, &instance, &command.evidence)?;
        let ppm = command.observed_hot_ppm.min(1_000_000);
        self.edit_operation(key, |operation| operation.view.observed_hot_ppm = ppm);
        let end = End { note: command.note.clone(), ..End::new(OperationStatus::Succeeded) };
        self.end_operation(key, end, |revision| {
            revision.metadata.residency = command.residency;
            revision.metadata.observed_hot_ppm = ppm;
        });
        if availability == Availability::Degraded {
            self.recover(&identity, command.residency, ppm);
        }
        self.operation_reply(id)
    }

    /// A DEGRADED revision is readable again. What the loss cut short goes on: the initial convergence, or else the way back
    /// to the residency that it had.
    pub fn recover(&mut self, identity: &RevisionIdentity, residency: Residency, observed_hot_ppm: u32) {
        let Some(revision) = self.state.record.revisions.get(identity) else { return };
        let goal = Settled::preferred(&revision.metadata.policy);
        let (free, converged, promised) =
            (revision.metadata.operation_id.is_none(), revision.converged, revision.metadata.residency);
        let operation_id = match promised {
            _ if !free => None,
            _ if !converged && goal.target != residency => {
                Some(self.add_migration(identity, goal, MigrationTrigger::Initial))
            }
            Residency::Hot | Residency::Cold if promised != residency => Some(self.add_repair(identity, promised)),
            _ => None,
        };
        self.change_revision(identity, |revision| {
            revision.metadata.availability = Availability::Ready;
            revision.metadata.residency = residency;
            revision.metadata.observed_hot_ppm = observed_hot_ppm.min(1_000_000);
            if operation_id.is_some() {
                revision.metadata.operation_id = operation_id.clone();
            }
        });
        self.emit_revision(identity, |revision| EventBody::RevisionReady { revision });
        self.emit_started(operation_id.as_ref());
        self.target_ready(identity);
    }
}

#[cfg(test)]
mod tests;

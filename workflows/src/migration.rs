//! Residency migration as the log sees it: its start, the leave to release memory, its end (RFC, Residency Migration;
//! Automatic Migration). How it is carried out is in `machines/migration.rs`.

use ballast_schemas::{
    AuthorizeRelease, ErrorCode, MigrationMode, MigrationTrigger, OperationFinished, OperationId, OperationKind,
    OperationStatus, Outcome, ParkReason, Rejection, Residency, RevisionIdentity, StartMigration,
};

use crate::fold::{Fold, details, reject};
use crate::operation::{Authorization, End, NewOperation, OperationKey};
use crate::revision::{Revision, Settled, claim_busy, expect_evidence, expect_readable};

impl Fold<'_> {
    pub fn start_migration(&mut self, command: &StartMigration) -> Outcome {
        let identity = &command.identity;
        let expected = command.expected_metadata_generation;
        let goal = self.goal(command)?;
        let revision = self.revision(identity)?;
        revision.expect_ready()?;
        self.expect_not_retired(revision)?;
        let waiting = self.waiting_automatic(revision).filter(|_| !is_automatic(command.trigger));
        if let Some(operation_id) = revision.metadata.operation_id.clone() {
            let (_, operation) = self.operation(&operation_id)?;
            let same = operation.view.kind == OperationKind::Migrating
                && operation.view.ending.is_none()
                && operation.view.target == Some(goal.target)
                && operation.view.target_hot_ratio == goal.ratio;
            if !same && waiting.is_none() {
                revision.expect_no_operation()?;
            }
            if same {
                if !revision.is_repeat_of_last_change(expected) {
                    revision.expect_generation(expected)?;
                }
                if let Some(key) = waiting {
                    // Asked for now: the cooldown holds for automatic migrations only.
                    self.edit_operation(key, |operation| operation.view.trigger = Some(command.trigger));
                    self.make_runnable(key);
                }
                return self.operation_reply(&operation_id);
            }
        }
        if let Some(claim) = self.open_claim(identity).filter(|claim| claim.target == *identity) {
            return Err(claim_busy(claim, "its target is migrated once the replacement has ended"));
        }
        let metadata = &revision.metadata;
        let mode = metadata.policy.migration_mode;
        if mode == MigrationMode::Pinned && (revision.converged || goal != Settled::preferred(&metadata.policy)) {
            let message =
                format!("revision {identity} is PINNED at {}; change its policy to migrate it", metadata.residency);
            return reject(ErrorCode::PolicyUnsatisfiable, message);
        }
        if is_automatic(command.trigger) && mode != MigrationMode::Auto {
            let message = format!("revision {identity} is {mode}; a migration by {} needs AUTO", command.trigger);
            return reject(ErrorCode::PolicyUnsatisfiable, message);
        }
        if command.trigger == MigrationTrigger::Pressure {
            revision.expect_no_lease(self.clock())?;
        }
        revision.expect_generation(expected)?;
        self.step_aside(identity);
        let operation_id = self.add_migration(identity, goal, command.trigger);
        self.change_revision(identity, |revision| revision.metadata.operation_id = Some(operation_id.clone()));
        self.emit_started(Some(&operation_id));
        self.operation_reply(&operation_id)
    }

    /// BUSY with the active operation named, unless that is an automatic migration which still waits for its cooldown: it
    /// has done nothing yet, and steps aside for what a person asks.
    pub fn expect_free(&self, revision: &Revision) -> Result<(), Rejection> {
        match self.waiting_automatic(revision) {
            Some(_) => Ok(()),
            None => revision.expect_no_operation(),
        }
    }

    fn waiting_automatic(&self, revision: &Revision) -> Option<OperationKey> {
        let key = revision.operation_key()?;
        let view = &self.state.record.operations.get(&key)?.view;
        let waits = view.status == OperationStatus::Parked && view.park_reason == Some(ParkReason::Cooldown);
        let untouched = view.epoch == 0 && view.ending.is_none();
        if view.kind == OperationKind::Repairing {
            // Nothing is lost by giving up one that finds no memory.
            let stuck = view.status == OperationStatus::Parked && view.park_reason == Some(ParkReason::Memory);
            return stuck.then_some(key);
        }
        (view.trigger.is_some_and(is_automatic) && waits && untouched).then_some(key)
    }

    /// Ends what [`Fold::expect_free`] passed over. The record changes once, by the command that follows in the same entry.
    pub fn step_aside(&mut self, identity: &RevisionIdentity) {
        let waiting = self.state.record.revisions.get(identity).and_then(|revision| self.waiting_automatic(revision));
        if let Some(key) = waiting {
            self.edit_revision(identity, |revision| revision.metadata.operation_id = None);
            self.end_operation(key, End::new(OperationStatus::Superseded), |_| {});
        }
    }

    /// What a migration command asks for; the policy's ratio when a MIXED one names none.
    fn goal(&self, command: &StartMigration) -> Result<Settled, Rejection> {
        match (command.target, command.target_hot_ratio) {
            (Residency::Hot | Residency::Cold, Some(_)) => {
                let message = format!("a hot ratio goes with target MIXED only, not {}; leave it out", command.target);
                Err(Rejection::new(ErrorCode::InvalidArgument, message))
            }
            (Residency::Hot | Residency::Cold, None) => Ok(Settled { target: command.target, ratio: None }),
            (Residency::Mixed, ratio) => {
                let policy = self.revision(&command.identity)?.metadata.policy;
                Ok(Settled { target: Residency::Mixed, ratio: Some(ratio.unwrap_or(policy.mixed_hot_ratio)) })
            }
            (target, _) => Err(Rejection::new(
                ErrorCode::InvalidArgument,
                format!("target {target} can not be migrated to; expected HOT, COLD or MIXED"),
            )),
        }
    }

    /// Records a MIGRATING operation. An automatic one inside the cooldown is persisted at once and waits for its end.
    pub fn add_migration(
        &mut self,
        identity: &RevisionIdentity,
        goal: Settled,
        trigger: MigrationTrigger,
    ) -> OperationId {
        let clock = self.clock();
        let cooldown_ms = self.state.config().migration_cooldown_ms;
        let Some(revision) = self.state.record.revisions.get(identity) else {
            // Callers have looked it up; an id that names nothing is refused everywhere.
            return OperationId::at(self.position, u32::MAX);
        };
        let allowed_at =
            revision.last_migration.map(|at| at.plus_ms(cooldown_ms)).filter(|at| *at > clock && is_automatic(trigger));
        let manifest = revision.metadata.manifest.as_ref();
        let operation = NewOperation {
            target: Some(goal.target),
            ratio: goal.ratio,
            trigger: Some(trigger),
            parked: allowed_at.map(|at| (ParkReason::Cooldown, Some(at))),
            total_units: manifest.map_or(0, |manifest| manifest.affinity_count.into()),
            total_bytes: manifest.map_or(0, |manifest| manifest.logical_bytes),
            ..NewOperation::on(&revision.metadata, OperationKind::Migrating)
        };
        self.add_operation(operation)
    }

    /// Leave to release memory replicas: never while a lease is active (RFC, safety invariant 5).
    pub fn authorize_release(&mut self, command: &AuthorizeRelease) -> Outcome {
        let id = &command.operation_id;
        let (key, operation) = self.claimed(id, command.epoch)?;
        let view = &operation.view;
        if view.kind != OperationKind::Migrating {
            return reject(
                ErrorCode::Conflict,
                format!("operation {id} is {}; only a MIGRATING one releases memory", view.kind),
            );
        }
        if command.cursor != view.cursor {
            let message =
                format!("operation {id} stands at cursor {}, expected {}; look again", view.cursor, command.cursor);
            return reject(ErrorCode::Conflict, message);
        }
        if view.ending.is_some() {
            return reject(ErrorCode::Conflict, format!("operation {id} is about to end; it releases nothing more"));
        }
        if let Some(authorized) = operation.authorized {
            if authorized.cursor == command.cursor && authorized.unit_count == command.unit_count {
                // A repeat after a lost reply.
                return self.operation_reply(id);
            }
            return reject(
                ErrorCode::Conflict,
                format!("operation {id} has another release outstanding; execute that first"),
            );
        }
        if command.unit_count == 0 {
            return reject(ErrorCode::InvalidArgument, "a release of no units needs no leave");
        }
        let identity = view.identity.clone();
        let revision = self.revision(&identity)?;
        revision.expect_ready()?;
        if let Err(busy) = revision.expect_no_lease(self.clock()) {
            self.park(key, ParkReason::LeaseDrain, None);
            return Err(busy);
        }
        let fence = self.position;
        self.edit_operation(key, |operation| {
            operation.view.fence = operation.view.fence.max(fence);
            operation.view.release_outstanding = true;
            operation.authorized =
                Some(Authorization { position: fence, cursor: command.cursor, unit_count: command.unit_count });
        });
        self.note_effect(key);
        self.emit_progress(key);
        self.operation_reply(id)
    }

    pub fn operation_finished(&mut self, command: &OperationFinished) -> Outcome {
        let id = &command.operation_id;
        if let Ok((_, operation)) = self.operation(id)
            && operation.view.status == OperationStatus::Succeeded
            && operation.view.epoch == command.epoch
        {
            return self.operation_reply(id);
        }
        let (key, operation) = self.claimed(id, command.epoch)?;
        let view = &operation.view;
        if view.kind == OperationKind::Repairing {
            return self.repair_finished(key, command);
        }
        if view.kind != OperationKind::Migrating {
            return reject(
                ErrorCode::Conflict,
                format!("operation {id} is {}; OperationFinished ends only a MIGRATING or REPAIRING one", view.kind),
            );
        }
        if view.release_outstanding {
            return reject(ErrorCode::NotReady, format!("operation {id} has a release outstanding; report it first"));
        }
        let goal = Settled { target: view.target.unwrap_or(Residency::Mixed), ratio: view.target_hot_ratio };
        let initial = view.trigger == Some(MigrationTrigger::Initial);
        if goal.target != Residency::Mixed && command.residency != goal.target {
            let message =
                format!("operation {id} is to reach {}, the nodes hold {}; go on", goal.target, command.residency);
            return Err(Rejection::new(ErrorCode::Conflict, message)
                .with_details(details([("residency", command.residency.name().into())])));
        }
        expect_readable(command.residency)?;
        let identity = view.identity.clone();
        let revision = self.revision(&identity)?;
        revision.expect_ready()?;
        expect_evidence(revision, &view.instance, &command.evidence)?;
        let (before, after) = (revision.metadata.observed_hot_ppm, command.observed_hot_ppm.min(1_000_000));
        let trigger = view.trigger;
        self.edit_operation(key, |operation| operation.view.observed_hot_ppm = after);
        if let Some(trigger) = trigger.filter(|trigger| is_automatic(*trigger)) {
            let count = self.state.record.automatic.entry(trigger).or_default();
            count.promotions = count.promotions.saturating_add(u64::from(after > before));
            count.demotions = count.demotions.saturating_add(u64::from(after < before));
        }
        let end = End { note: command.note.clone(), ..End::new(OperationStatus::Succeeded) };
        self.end_operation(key, end, |revision| {
            revision.metadata.residency = command.residency;
            revision.metadata.observed_hot_ppm = after;
            revision.settled = Some(goal);
            revision.stays_hot = false;
            revision.on_disk |= command.residency == Residency::Cold;
            revision.pressed &= trigger == Some(MigrationTrigger::Pressure);
            revision.converged |= initial || goal == Settled::preferred(&revision.metadata.policy);
        });
        self.operation_reply(id)
    }
}

/// Whether the cooldown holds for a migration, and AUTO is needed for it.
fn is_automatic(trigger: MigrationTrigger) -> bool {
    match trigger {
        MigrationTrigger::Access
        | MigrationTrigger::Pressure
        | MigrationTrigger::PressureRelief
        | MigrationTrigger::Policy => true,
        MigrationTrigger::Initial | MigrationTrigger::Explicit => false,
    }
}

#[cfg(test)]
mod tests;

//! Background operations: their record, their life from RUNNABLE to an end, and the commands of the worker that drives one:
//! claim, progress, failure, parking (RFC, Concurrency, Consistency, and Error Handling; ARCHITECTURE.md, Operations).
//!
//! Not here: what people ask of an operation (`control.rs`), and the residency commands (`migration.rs`).

use ballast_schemas::{
    BACK_OFF_MS_MAX, BACK_OFF_MS_MIN, CLAIM_TTL_MS, ClaimOperation, ClaimPhase, ErrorCode, EventBody, HotRatio,
    InstanceId, LogPosition, LogTime, MigrationTrigger, NodeId, OperationAdvanced, OperationAttemptFailed,
    OperationError, OperationId, OperationKind, OperationStatus, Outcome, ParkOperation, ParkReason, RETRY_BUDGET,
    Rejection, RenewClaim, Reply, Residency, RevisionIdentity, Shared, UpsertMode, WeightOperation,
    WeightRevisionMetadata,
};
use serde::{Deserialize, Serialize};

use crate::fold::{Fold, details, reject};
use crate::revision::Revision;
use crate::table::Settle;

/// Ended operations that stay queryable, per tenant; the oldest are forgotten first.
const ENDED_OPERATIONS_KEPT: usize = 10_000;
/// The longest claim of a worker without a sign of life.
const CLAIM_TTL_MS_MAX: u64 = CLAIM_TTL_MS * 10;
/// The longest park timer.
const PARK_MS_MAX: u64 = 3_600_000;
/// A park timer that the worker left out for a condition that the fold can not see.
const PARK_MS_DEFAULT: u64 = 2_000;

/// An operation's place in the order of all operations: the log position that created it and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct OperationKey(u64, u32, u32);

impl OperationKey {
    /// The key behind an id; `None` for an id that this fold never gave.
    pub fn of(id: &OperationId) -> Option<Self> {
        let (position, n) = id.parts()?;
        Some(Self(position.seq, position.index, n))
    }
}

/// An operation with what only the fold and the machines need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Operation {
    pub view: Shared<WeightOperation>,
    /// What a sign of life extends the claim by.
    pub claim_ttl_ms: u64,
    /// The release that is outstanding.
    pub authorized: Option<Authorization>,
    /// The node in whose round it was started.
    #[serde(default)]
    pub relieves: Option<NodeId>,
    /// When the clock looks at it next: never after its [`Operation::deadline`]. A sign of life leaves that moment where it was.
    pub next_look: Option<LogTime>,
}

impl Settle<OperationKey> for Operation {}

/// Leave to release the memory replicas of some units, given by the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Authorization {
    /// Of the entry that gave it: leases granted later do not protect these units.
    pub position: LogPosition,
    /// The batch begins at this cursor; the machine's work list says which units those are.
    pub cursor: u64,
    /// Units in the batch.
    pub unit_count: u32,
}

impl Operation {
    /// When time alone changes it.
    pub fn deadline(&self) -> Option<LogTime> {
        match self.view.status {
            OperationStatus::Claimed => self.view.claim_expires_at,
            OperationStatus::Parked | OperationStatus::BackingOff => self.view.wake_at,
            _ => None,
        }
    }
}

/// What a new operation is about.
pub(crate) struct NewOperation {
    pub kind: OperationKind,
    pub identity: RevisionIdentity,
    pub instance: InstanceId,
    pub target: Option<Residency>,
    pub ratio: Option<HotRatio>,
    pub trigger: Option<MigrationTrigger>,
    pub fenced_generation: u64,
    pub parked: Option<(ParkReason, Option<LogTime>)>,
    pub total_units: u64,
    pub total_bytes: u64,
}

impl NewOperation {
    /// An operation on a revision's current bytes.
    pub fn on(metadata: &WeightRevisionMetadata, kind: OperationKind) -> Self {
        Self {
            kind,
            identity: metadata.identity.clone(),
            instance: metadata.instance.clone(),
            target: None,
            ratio: None,
            trigger: None,
            fenced_generation: metadata.metadata_generation,
            parked: None,
            total_units: 0,
            total_bytes: 0,
        }
    }
}

/// How an operation ends.
pub(crate) struct End {
    pub status: OperationStatus,
    pub error: Option<OperationError>,
    pub note: Option<String>,
}

impl End {
    pub fn new(status: OperationStatus) -> Self {
        Self { status, error: None, note: None }
    }
}

impl Fold<'_> {
    /// Records a new operation, RUNNABLE unless it is to be parked. The caller names it in its revision and emits the event.
    pub fn add_operation(&mut self, new: NewOperation) -> OperationId {
        let operation_id = OperationId::at(self.position, self.operations_here);
        let key = OperationKey(self.position.seq, self.position.index, self.operations_here);
        self.operations_here = self.operations_here.saturating_add(1);
        let parked = new.parked.or_else(|| self.must_wait(&new.identity, new.kind).map(|reason| (reason, None)));
        let view = WeightOperation {
            operation_id: operation_id.clone(),
            kind: new.kind,
            identity: new.identity,
            instance: new.instance,
            target: new.target,
            target_hot_ratio: new.ratio,
            trigger: new.trigger,
            fenced_generation: new.fenced_generation,
            status: if parked.is_some() { OperationStatus::Parked } else { OperationStatus::Runnable },
            park_reason: parked.map(|(reason, _)| reason),
            wake_at: parked.and_then(|(_, wake_at)| wake_at),
            worker: None,
            epoch: 0,
            claim_expires_at: None,
            fence: self.position,
            release_outstanding: false,
            cursor: 0,
            processed_units: 0,
            total_units: new.total_units,
            processed_bytes: 0,
            total_bytes: new.total_bytes,
            observed_hot_ppm: 0,
            attempts: 0,
            last_error: None,
            ending: None,
            note: None,
            started_unix_ms: self.unix_ms,
            updated_unix_ms: self.unix_ms,
        };
        let operation = Operation {
            next_look: view.wake_at,
            view: Shared::new(view),
            claim_ttl_ms: CLAIM_TTL_MS,
            authorized: None,
            relieves: None,
        };
        self.state.index.add_operation(key, &operation);
        self.state.record.operations.insert(key, operation);
        operation_id
    }

    /// The effects on a replacement's target belong to its REPLACING operation until the claim ends: one fence at a time
    /// moves on an instance, so two operations can never refuse each other in turns.
    fn must_wait(&self, identity: &RevisionIdentity, kind: OperationKind) -> Option<ParkReason> {
        if !matches!(kind, OperationKind::Migrating | OperationKind::Repairing) {
            return None;
        }
        let claim = self.open_claim(identity)?;
        if kind == OperationKind::Repairing && !self.is_ready(identity) {
            // The replacement itself waits for this one: it does nothing to a target that is not READY.
            return None;
        }
        (claim.mode == UpsertMode::PutFirst && claim.target == *identity).then_some(ParkReason::BaseDeletion)
    }

    /// The operation with this id, or NOT_FOUND.
    pub fn operation(&self, id: &OperationId) -> Result<(OperationKey, &Operation), Rejection> {
        let found = OperationKey::of(id).and_then(|key| Some((key, self.state.record.operations.get(&key)?)));
        found.ok_or_else(|| {
            Rejection::new(
                ErrorCode::NotFound,
                format!("operation {id} does not exist, or ended long ago and was forgotten"),
            )
        })
    }

    /// The operation, if the command comes from the worker that holds its claim.
    pub fn claimed(&self, id: &OperationId, epoch: u64) -> Result<(OperationKey, &Operation), Rejection> {
        let (key, operation) = self.operation(id)?;
        let view = &operation.view;
        if view.status == OperationStatus::Claimed && view.epoch == epoch {
            return Ok((key, operation));
        }
        let message = format!(
            "claim lost: operation {id} is {} at epoch {}, the step came from epoch {epoch}; drop it",
            view.status, view.epoch
        );
        Err(Rejection::new(ErrorCode::Conflict, message)
            .with_details(details([("epoch", view.epoch.into()), ("status", view.status.name().into())])))
    }

    pub fn operation_reply(&self, id: &OperationId) -> Outcome {
        Ok(Reply::Operation(self.operation(id)?.1.view.clone()))
    }

    pub fn emit_operation(&mut self, key: OperationKey, body: impl FnOnce(Shared<WeightOperation>) -> EventBody) {
        let view = self.state.record.operations.get(&key).map(|operation| operation.view.clone());
        if let Some(view) = view {
            self.emit(body(view));
        }
    }

    pub fn emit_progress(&mut self, key: OperationKey) {
        self.emit_operation(key, |operation| EventBody::OperationProgress { operation });
    }

    /// OPERATION_STARTED for an operation just added.
    pub fn emit_started(&mut self, id: Option<&OperationId>) {
        if let Some(key) = id.and_then(OperationKey::of) {
            self.emit_operation(key, |operation| EventBody::OperationStarted { operation });
        }
    }

    /// Wants a worker again, or waits for the end of a replacement; ends instead if that was asked for and nothing is
    /// outstanding.
    pub fn make_runnable(&mut self, key: OperationKey) {
        let Some(operation) = self.state.record.operations.get(&key) else { return };
        if operation.view.status.is_terminal() {
            return;
        }
        if let Some(status) = operation.view.ending.filter(|_| !operation.view.release_outstanding) {
            self.end_operation(key, End::new(status), |_| {});
            return;
        }
        let waits =
            self.must_wait(&operation.view.identity, operation.view.kind).filter(|_| operation.view.ending.is_none());
        self.edit_operation(key, |operation| {
            operation.view.status = if waits.is_some() { OperationStatus::Parked } else { OperationStatus::Runnable };
            operation.view.park_reason = waits;
            operation.view.wake_at = None;
            drop_claim(&mut operation.view);
        });
        self.emit_progress(key);
    }

    /// Waits; costs no attempt.
    pub fn park(&mut self, key: OperationKey, reason: ParkReason, wake_at: Option<LogTime>) {
        self.edit_operation(key, |operation| {
            operation.view.status = OperationStatus::Parked;
            operation.view.park_reason = Some(reason);
            operation.view.wake_at = wake_at;
            drop_claim(&mut operation.view);
        });
        self.emit_progress(key);
    }

    /// Wakes an operation that waits for `reason`.
    pub fn wake(&mut self, key: OperationKey, reason: ParkReason) {
        let parked = self.state.record.operations.get(&key).is_some_and(|operation| {
            operation.view.status == OperationStatus::Parked && operation.view.park_reason == Some(reason)
        });
        if parked {
            self.make_runnable(key);
        }
    }

    /// Ends it now, or, while a release is outstanding, as soon as that was executed or fenced off: nothing that could
    /// still happen on a node may outlive its operation.
    pub fn end_or_request(&mut self, key: OperationKey, end: End) {
        let Some(operation) = self.state.record.operations.get(&key) else { return };
        if operation.view.status.is_terminal() {
            return;
        }
        if !operation.view.release_outstanding {
            self.end_operation(key, end, |_| {});
            return;
        }
        // A fence above that of the release lets the worker close it out.
        let fence = self.position;
        self.edit_operation(key, |operation| {
            operation.view.ending = operation.view.ending.or(Some(end.status));
            operation.view.fence = operation.view.fence.max(fence);
            if end.error.is_some() {
                operation.view.last_error = end.error;
            }
        });
        self.note_effect(key);
        if self
            .state
            .record
            .operations
            .get(&key)
            .is_some_and(|operation| operation.view.status != OperationStatus::Claimed)
        {
            self.make_runnable(key);
        } else {
            self.emit_progress(key);
        }
    }

    /// The end. The revision forgets its active operation and takes `settle`'s change in the same change of its record.
    pub fn end_operation(&mut self, key: OperationKey, end: End, settle: impl FnOnce(&mut Revision)) {
        let Some(operation) = self.state.record.operations.get(&key) else { return };
        let (id, identity, kind) =
            (operation.view.operation_id.clone(), operation.view.identity.clone(), operation.view.kind);
        let impossible = operation.view.trigger == Some(MigrationTrigger::Pressure)
            && end.error.as_ref().is_some_and(|error| error.code == ErrorCode::PolicyUnsatisfiable);
        self.edit_operation(key, |operation| {
            operation.view.status = end.status;
            operation.view.park_reason = None;
            operation.view.wake_at = None;
            operation.view.ending = None;
            operation.view.release_outstanding = false;
            operation.authorized = None;
            drop_claim(&mut operation.view);
            if end.error.is_some() {
                operation.view.last_error = end.error;
            }
            if end.note.is_some() {
                operation.view.note = end.note;
            }
        });
        let clock = self.clock();
        let current =
            self.state.revision(&identity).is_some_and(|metadata| metadata.operation_id.as_ref() == Some(&id));
        if current {
            self.change_revision(&identity, |revision| {
                settle(revision);
                revision.metadata.operation_id = None;
                if kind == OperationKind::Migrating {
                    revision.last_migration = Some(clock);
                    revision.stays_hot |= impossible;
                }
            });
        }
        self.emit_operation(key, |operation| EventBody::OperationEnded { operation });
        self.forget_oldest_ended(&identity);
        if current {
            self.base_may_be_free(&identity);
        }
    }

    fn forget_oldest_ended(&mut self, identity: &RevisionIdentity) {
        let ended = self.state.index.tenants.get(&identity.tenant_id).map(|keys| &keys.ended);
        let oldest = ended.filter(|ended| ended.len() > ENDED_OPERATIONS_KEPT).and_then(|ended| ended.first().copied());
        if let Some(key) = oldest
            && self.state.record.operations.remove(&key).is_some()
        {
            self.state.index.remove_ended_operation(key, &identity.tenant_id);
        }
    }

    /// The fence of a revision's own operation is the last authorised effect on its bytes.
    pub fn note_effect(&mut self, key: OperationKey) {
        let Some(operation) = self.state.record.operations.get(&key) else { return };
        if operation.view.kind == OperationKind::Replacing {
            return;
        }
        let fence = operation.view.fence;
        if let Some(revision) = self.state.record.revisions.get_mut(&operation.view.identity)
            && revision.metadata.instance == operation.view.instance
        {
            revision.effect_fence = revision.effect_fence.max(fence);
        }
    }

    /// A claim, a back-off or a park timer is looked at: it has run out, or was set anew and is looked at again then.
    pub fn operation_timer(&mut self, key: OperationKey, at: LogTime) {
        let Some(operation) = self.state.record.operations.get_mut(&key) else { return };
        if let Some(end) = operation.deadline().filter(|end| *end > at) {
            let before = operation.place();
            operation.next_look = Some(end);
            self.state.index.move_operation(key, operation, &before);
            return;
        }
        self.make_runnable(key);
    }

    pub fn claim_operation(&mut self, command: &ClaimOperation) -> Outcome {
        let id = &command.operation_id;
        if !(1..=CLAIM_TTL_MS_MAX).contains(&command.ttl_ms) {
            return reject(
                ErrorCode::InvalidArgument,
                format!(
                    "a claim of {} ms is not possible; give 1 to {CLAIM_TTL_MS_MAX} ms (default {CLAIM_TTL_MS})",
                    command.ttl_ms
                ),
            );
        }
        let expires_at = self.clock().plus_ms(command.ttl_ms);
        let fence = self.position;
        let (key, operation) = self.operation(id)?;
        let view = &operation.view;
        match view.status {
            OperationStatus::Runnable => {}
            OperationStatus::Claimed if view.worker.as_ref() == Some(&command.worker) => {
                // A repeat after a lost reply: the same epoch again, under a fence of its own, so that a step that this
                // worker lost track of can not be mistaken for done.
                self.edit_operation(key, |operation| {
                    extend_claim(&mut operation.view, expires_at);
                    operation.view.fence = operation.view.fence.max(fence);
                });
                self.note_effect(key);
                return self.operation_reply(id);
            }
            OperationStatus::Claimed => {
                let worker = view.worker.as_ref().map(ToString::to_string).unwrap_or_default();
                return Err(Rejection::new(
                    ErrorCode::Busy,
                    format!("operation {id} is claimed by worker {worker} at epoch {}; leave it", view.epoch),
                )
                .with_details(details([("worker", worker.into()), ("epoch", view.epoch.into())])));
            }
            status => {
                return Err(Rejection::new(
                    ErrorCode::NotReady,
                    format!("operation {id} is {status} and wants no worker; leave it"),
                )
                .with_details(details([("status", status.name().into())])));
            }
        }
        self.edit_operation(key, |operation| {
            let view = &mut operation.view;
            view.status = OperationStatus::Claimed;
            view.epoch = view.epoch.saturating_add(1);
            view.worker = Some(command.worker.clone());
            view.claim_expires_at = Some(expires_at);
            view.fence = view.fence.max(fence);
            operation.claim_ttl_ms = command.ttl_ms;
        });
        self.note_effect(key);
        self.emit_progress(key);
        self.operation_reply(id)
    }

    pub fn renew_claim(&mut self, command: &RenewClaim) -> Outcome {
        let (key, _) = self.claimed(&command.operation_id, command.epoch)?;
        let expires_at = self.clock().plus_ms(command.ttl_ms.min(CLAIM_TTL_MS_MAX));
        self.edit_operation(key, |operation| extend_claim(&mut operation.view, expires_at));
        self.operation_reply(&command.operation_id)
    }

    pub fn operation_advanced(&mut self, command: &OperationAdvanced) -> Outcome {
        let id = &command.operation_id;
        let (key, operation) = self.claimed(id, command.epoch)?;
        let view = &operation.view;
        let closes_release = command.released && view.release_outstanding;
        if view.cursor == command.to_cursor && command.from_cursor < command.to_cursor && !closes_release {
            // A repeat of the last step.
            return self.operation_reply(id);
        }
        let forward =
            command.to_cursor > command.from_cursor || (closes_release && command.to_cursor == command.from_cursor);
        if command.from_cursor != view.cursor || !forward {
            let message = format!(
                "operation {id} stands at cursor {}; a step from {} to {} does not follow; look again",
                view.cursor, command.from_cursor, command.to_cursor
            );
            return Err(
                Rejection::new(ErrorCode::Conflict, message).with_details(details([("cursor", view.cursor.into())]))
            );
        }
        if view.release_outstanding && !command.released {
            let message =
                format!("operation {id} has a release outstanding; execute it or fence it off before the next step");
            return reject(ErrorCode::NotReady, message);
        }
        let clock = self.clock();
        self.edit_operation(key, |operation| {
            let view = &mut operation.view;
            view.cursor = command.to_cursor;
            // Progress is monotonic across retries, restarts and failover (RFC, Concurrency).
            view.processed_units = view.processed_units.max(command.processed_units);
            view.total_units = command.total_units.max(view.processed_units);
            view.processed_bytes = view.processed_bytes.max(command.processed_bytes);
            view.total_bytes = command.total_bytes.max(view.processed_bytes);
            view.observed_hot_ppm = command.observed_hot_ppm.min(1_000_000);
            // The budget is for attempts without progress between them.
            if command.to_cursor > command.from_cursor {
                view.attempts = 0;
            }
            if command.released {
                view.release_outstanding = false;
                operation.authorized = None;
            }
            let expires_at = clock.plus_ms(operation.claim_ttl_ms);
            extend_claim(&mut operation.view, expires_at);
        });
        let ending = self.state.record.operations.get(&key).and_then(|operation| operation.view.ending);
        match ending {
            Some(status) => self.end_operation(key, End::new(status), |_| {}),
            None => self.emit_progress(key),
        }
        self.operation_reply(id)
    }

    pub fn operation_attempt_failed(&mut self, command: &OperationAttemptFailed) -> Outcome {
        let id = &command.operation_id;
        let (key, operation) = self.claimed(id, command.epoch)?;
        let attempts = operation.view.attempts.saturating_add(1);
        // A deletion or replacement that has begun is never given up by itself: what it began must be ended, by it or by
        // a person.
        let may_fail = matches!(operation.view.kind, OperationKind::Migrating | OperationKind::Repairing);
        let gives_up = may_fail && operation.view.ending.is_none() && (command.permanent || attempts >= RETRY_BUDGET);
        let doublings = 2u64.saturating_pow(attempts.saturating_sub(1));
        let back_off = BACK_OFF_MS_MIN.saturating_mul(doublings).min(BACK_OFF_MS_MAX);
        let wake_at = self.clock().plus_ms(back_off);
        self.edit_operation(key, |operation| {
            operation.view.attempts = attempts;
            operation.view.last_error = Some(command.error.clone());
            operation.view.status = OperationStatus::BackingOff;
            operation.view.wake_at = Some(wake_at);
            drop_claim(&mut operation.view);
        });
        if gives_up {
            let end = End { error: Some(command.error.clone()), ..End::new(OperationStatus::Failed) };
            self.end_or_request(key, end);
            return self.operation_reply(id);
        }
        self.emit_progress(key);
        if attempts == RETRY_BUDGET / 2 {
            self.emit_operation(key, |operation| EventBody::OperationStuck { operation });
        }
        self.operation_reply(id)
    }

    pub fn park_operation(&mut self, command: &ParkOperation) -> Outcome {
        let id = &command.operation_id;
        let (key, operation) = self.claimed(id, command.epoch)?;
        let timer = match command.reason {
            // The fold sees these end by itself; a timer is for what it can not see.
            ParkReason::LeaseDrain | ParkReason::TargetImport | ParkReason::BaseDeletion => command.wake_after_ms,
            ParkReason::Cooldown | ParkReason::Memory | ParkReason::Readers | ParkReason::Node => {
                Some(command.wake_after_ms.unwrap_or(PARK_MS_DEFAULT))
            }
        };
        let holds = self.still_waits(operation, command.reason);
        let wake_at = timer.map(|ms| self.clock().plus_ms(ms.clamp(1, PARK_MS_MAX)));
        if holds {
            self.park(key, command.reason, wake_at);
        } else {
            // It ended between the worker's look and this entry: nothing would wake the operation any more.
            self.make_runnable(key);
        }
        self.operation_reply(id)
    }

    /// Whether what an operation wants to wait for is still to come.
    fn still_waits(&self, operation: &Operation, reason: ParkReason) -> bool {
        let view = &operation.view;
        let claim = self.open_claim(&view.identity);
        match (reason, view.kind) {
            (ParkReason::LeaseDrain, OperationKind::Replacing) => claim.is_some_and(|claim| !self.is_free(&claim.base)),
            (ParkReason::LeaseDrain, _) => {
                self.state.record.revisions.get(&view.identity).is_some_and(|revision| !revision.leases.is_empty())
            }
            (ParkReason::TargetImport, OperationKind::Replacing) => {
                claim.is_some_and(|claim| !self.is_ready(&claim.target))
            }
            (ParkReason::BaseDeletion, OperationKind::Replacing) => {
                claim.is_some_and(|claim| claim.phase == ClaimPhase::DeletingBase)
            }
            (ParkReason::TargetImport | ParkReason::BaseDeletion, _) => false,
            (ParkReason::Cooldown | ParkReason::Memory | ParkReason::Readers | ParkReason::Node, _) => true,
        }
    }
}

/// No worker holds it any more.
fn drop_claim(view: &mut WeightOperation) {
    view.worker = None;
    view.claim_expires_at = None;
}

/// Never shortens.
fn extend_claim(view: &mut WeightOperation, expires_at: LogTime) {
    view.claim_expires_at = Some(view.claim_expires_at.map_or(expires_at, |at| at.max(expires_at)));
}

#[cfg(test)]
mod tests;

//! Lineages: watermark and the single replacement claim, and what the fates of base and target do to it
//! (RFC, Generation Replacement; Safety Invariants 11 and 12). The worker's part is in `machines/put_first.rs`.
//!
//! The watermark orders and fences; it never says which generation is being served.

use ballast_schemas::{
    AbortReplacement, Availability, BeginReplacement, ClaimPhase, ErrorCode, EventBody, LineageKey, OperationError,
    OperationKind, OperationStatus, Outcome, ParkReason, Rejection, ReplacementAdvanced, ReplacementClaim, Reply,
    RevisionIdentity, TEXT_BYTES_MAX, UpsertMode,
};
use serde::{Deserialize, Serialize};

use crate::fold::{Fold, details, reject};
use crate::operation::{End, NewOperation, OperationKey};
use crate::revision::{Revision, claim_busy, not_ready};

/// What a lineage remembers beside its revisions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lineage {
    /// The highest generation whose publication is complete. Never falls, not even when its tombstone is purged.
    pub watermark: u64,
    /// The latest claim, ended or not.
    pub claim: Option<Box<ReplacementClaim>>,
}

impl Fold<'_> {
    /// The claim on a revision's lineage, unless it has ended.
    pub fn open_claim(&self, identity: &RevisionIdentity) -> Option<&ReplacementClaim> {
        if self.state.index.open_claims == 0 {
            return None;
        }
        self.state.claim(&identity.lineage()).filter(|claim| !claim.phase.is_terminal())
    }

    /// The open claim that a revision is the target of.
    fn claim_on_target(&self, identity: &RevisionIdentity) -> Option<ReplacementClaim> {
        self.open_claim(identity).filter(|claim| claim.target == *identity).cloned()
    }

    /// The open claim that a revision is the base of.
    fn claim_on_base(&self, identity: &RevisionIdentity) -> Option<ReplacementClaim> {
        self.open_claim(identity).filter(|claim| claim.base == *identity).cloned()
    }

    /// NOT_READY naming the successor, once a replacement has fenced the revision.
    pub fn expect_not_retired(&self, revision: &Revision) -> Result<(), Rejection> {
        if !revision.metadata.retired {
            return Ok(());
        }
        let identity = &revision.metadata.identity;
        let successor = self.state.claim(&identity.lineage()).map(|claim| claim.target.clone());
        let named = successor.as_ref().map_or_else(|| "its successor".to_owned(), ToString::to_string);
        let generation = successor.map_or(0, |successor| successor.weight_generation);
        Err(Rejection::new(
            ErrorCode::NotReady,
            format!("revision {identity} is retired: {named} takes its place; read that instead"),
        )
        .with_details(details([("successor_generation", generation.into())])))
    }

    pub fn is_ready(&self, identity: &RevisionIdentity) -> bool {
        self.state.revision(identity).is_some_and(|metadata| metadata.availability == Availability::Ready)
    }

    /// Whether nothing protects a revision any more.
    pub fn is_free(&self, identity: &RevisionIdentity) -> bool {
        self.state
            .record
            .revisions
            .get(identity)
            .is_none_or(|revision| revision.leases.is_empty() && revision.metadata.operation_id.is_none())
    }

    fn raise_watermark(&mut self, identity: &RevisionIdentity) {
        let lineage = self.state.record.lineages.entry(identity.lineage()).or_default();
        lineage.watermark = lineage.watermark.max(identity.weight_generation);
    }

    /// Replaces the lineage's claim and tells orchestrators.
    fn put_claim(&mut self, claim: ReplacementClaim) {
        let lineage = self.state.record.lineages.entry(claim.lineage.clone()).or_default();
        if let Some(before) = &lineage.claim {
            self.state.index.remove_claim(before);
        }
        self.state.index.add_claim(&claim);
        lineage.claim = Some(Box::new(claim.clone()));
        self.emit(EventBody::ClaimPhase { claim: Box::new(claim) });
    }

    fn enter_phase(&mut self, claim: &ReplacementClaim, phase: ClaimPhase) {
        self.put_claim(ReplacementClaim { phase, updated_unix_ms: self.unix_ms, ..claim.clone() });
    }

    /// The claim's end, that of its operation, and the end of the wait of its target's own operation.
    fn end_claim(&mut self, claim: &ReplacementClaim, phase: ClaimPhase, end: End) {
        self.enter_phase(claim, phase);
        if let Some(key) = OperationKey::of(&claim.operation_id) {
            self.end_operation(key, end, |_| {});
        }
        let target = self.state.record.revisions.get(&claim.target).and_then(|revision| revision.operation_key());
        if let Some(key) = target {
            self.wake(key, ParkReason::BaseDeletion);
        }
    }

    /// Parks the REPLACING operation, unless a person paused it or it has ended.
    fn park_replacing(&mut self, claim: &ReplacementClaim, reason: ParkReason) {
        let Some(key) = OperationKey::of(&claim.operation_id) else { return };
        let may = self.state.record.operations.get(&key).is_some_and(|operation| {
            !operation.view.status.is_terminal() && operation.view.status != OperationStatus::Paused
        });
        if may {
            self.park(key, reason, None);
        }
    }

    fn wake_replacing(&mut self, claim: &ReplacementClaim, reason: ParkReason) {
        if let Some(key) = OperationKey::of(&claim.operation_id) {
            self.wake(key, reason);
        }
    }

    /// What a REPLACING operation that is resumed has to wait for.
    pub fn replacement_wait(&self, key: OperationKey) -> Option<ParkReason> {
        let operation = self
            .state
            .record
            .operations
            .get(&key)
            .filter(|operation| operation.view.kind == OperationKind::Replacing)?;
        let claim = self.open_claim(&operation.view.identity)?;
        match (claim.mode, claim.phase) {
            (_, ClaimPhase::DeletingBase) => Some(ParkReason::BaseDeletion),
            (UpsertMode::DeleteFirst, _) => Some(ParkReason::TargetImport),
            (UpsertMode::PutFirst, ClaimPhase::RetiringBase) => {
                (!self.is_free(&claim.base)).then_some(ParkReason::LeaseDrain)
            }
            (UpsertMode::PutFirst, _) => (!self.is_ready(&claim.target)).then_some(ParkReason::TargetImport),
        }
    }

    // What happens to base and target.

    /// The target's import began.
    pub fn target_begun(&mut self, identity: &RevisionIdentity) {
        if let Some(claim) = self.claim_on_target(identity).filter(|claim| claim.phase == ClaimPhase::PreparingTarget) {
            self.enter_phase(&claim, ClaimPhase::TargetImporting);
        }
    }

    /// A revision was published. A plain put raises the watermark; so does the target of a DELETE_FIRST, whose base is
    /// gone; that of a PUT_FIRST does not before its base is deleted (RFC, Generation Replacement).
    pub fn published(&mut self, identity: &RevisionIdentity) {
        match self.claim_on_target(identity) {
            None => self.raise_watermark(identity),
            Some(claim) if claim.mode == UpsertMode::PutFirst => self.wake_replacing(&claim, ParkReason::TargetImport),
            Some(claim) => {
                self.raise_watermark(identity);
                self.end_claim(&claim, ClaimPhase::Completed, End::new(OperationStatus::Succeeded));
            }
        }
    }

    /// The target is READY again.
    pub fn target_ready(&mut self, identity: &RevisionIdentity) {
        if let Some(claim) = self.claim_on_target(identity) {
            self.wake_replacing(&claim, ParkReason::TargetImport);
        }
    }

    /// The base is not given up for an unsafe target: it is readable again.
    pub fn target_degraded(&mut self, identity: &RevisionIdentity) {
        let Some(claim) = self.claim_on_target(identity).filter(|claim| claim.phase == ClaimPhase::RetiringBase) else {
            return;
        };
        self.change_revision(&claim.base, |revision| revision.metadata.retired = false);
        self.enter_phase(&claim, ClaimPhase::TargetImporting);
        self.park_replacing(&claim, ParkReason::TargetImport);
    }

    /// The target's import ended without a commit: PUT_FIRST leaves the base as it was; DELETE_FIRST can not roll back and
    /// waits for the next import.
    pub fn target_given_up(&mut self, identity: &RevisionIdentity, why: &str) {
        let Some(claim) = self.claim_on_target(identity).filter(|claim| claim.mode == UpsertMode::PutFirst) else {
            return;
        };
        let message = format!(
            "the import of target {identity} ended: {why}; send the same request again once its remains are deleted"
        );
        let error = OperationError { code: ErrorCode::LeaseExpired, message };
        self.end_claim(&claim, ClaimPhase::Aborted, End { error: Some(error), ..End::new(OperationStatus::Failed) });
    }

    /// A base lost its last lease or its operation.
    pub fn base_may_be_free(&mut self, identity: &RevisionIdentity) {
        if let Some(claim) = self
            .claim_on_base(identity)
            .filter(|claim| claim.phase == ClaimPhase::RetiringBase && self.is_free(&claim.base))
        {
            self.wake_replacing(&claim, ParkReason::LeaseDrain);
        }
    }

    /// The base is gone: PUT_FIRST is complete in this entry, DELETE_FIRST may import its target.
    pub fn base_deleted(&mut self, identity: &RevisionIdentity) {
        let Some(claim) = self.claim_on_base(identity).filter(|claim| claim.phase == ClaimPhase::DeletingBase) else {
            return;
        };
        match claim.mode {
            UpsertMode::PutFirst => {
                self.raise_watermark(&claim.target);
                self.end_claim(&claim, ClaimPhase::Completed, End::new(OperationStatus::Succeeded));
            }
            UpsertMode::DeleteFirst => {
                self.enter_phase(&claim, ClaimPhase::TargetImporting);
                self.park_replacing(&claim, ParkReason::TargetImport);
            }
        }
    }

    // Commands.

    pub fn begin_replacement(&mut self, command: &BeginReplacement) -> Outcome {
        let (base, target) = (&command.base, &command.target);
        let lineage = base.lineage();
        expect_arguments(command)?;
        let before = self.state.claim(&lineage).cloned();
        let mut attempt = 1;
        let mut reopens = false;
        match &before {
            Some(claim) if claim.request_id == command.request_id => {
                if !is_same_request(claim, command) {
                    let message = format!(
                        "replacement {:?} was begun with other arguments; choose a new request id",
                        command.request_id
                    );
                    return reject(ErrorCode::Conflict, message);
                }
                if claim.phase != ClaimPhase::Aborted {
                    return Ok(Reply::Claim(Box::new(claim.clone())));
                }
                attempt = claim.attempt.saturating_add(1);
                reopens = true;
            }
            Some(claim) if !claim.phase.is_terminal() => return Err(claim_busy(claim, "wait for its end or abort it")),
            _ => {}
        }
        let metadata = &self.revision(base)?.metadata;
        // A DELETE_FIRST that was given up after its base had gone waits for its target once more.
        let base_is_gone =
            reopens && command.mode == UpsertMode::DeleteFirst && metadata.availability == Availability::Deleted;
        if !base_is_gone && !matches!(metadata.availability, Availability::Ready | Availability::Degraded) {
            return Err(not_ready(base, metadata.availability, "READY or DEGRADED"));
        }
        self.expect_free_target(target, reopens && command.mode == UpsertMode::PutFirst)?;
        if !base_is_gone {
            let base = self.revision(base)?;
            if command.mode == UpsertMode::DeleteFirst {
                base.expect_no_lease(self.clock())?;
                self.expect_free(base)?;
            }
            base.expect_generation(command.expected_metadata_generation)?;
        }
        if command.mode == UpsertMode::DeleteFirst {
            self.step_aside(base);
        }
        let base_metadata = &self.revision(base)?.metadata;
        let (phase, waits) = match command.mode {
            UpsertMode::DeleteFirst if base_is_gone => (ClaimPhase::TargetImporting, Some(ParkReason::TargetImport)),
            UpsertMode::DeleteFirst => (ClaimPhase::DeletingBase, Some(ParkReason::BaseDeletion)),
            UpsertMode::PutFirst if self.is_ready(target) => (ClaimPhase::TargetImporting, None),
            UpsertMode::PutFirst if self.state.index.listed.contains(target) => {
                (ClaimPhase::TargetImporting, Some(ParkReason::TargetImport))
            }
            UpsertMode::PutFirst => (ClaimPhase::PreparingTarget, Some(ParkReason::TargetImport)),
        };
        let operation_id = self.add_operation(NewOperation {
            identity: target.clone(),
            parked: waits.map(|reason| (reason, None)),
            ..NewOperation::on(base_metadata, OperationKind::Replacing)
        });
        let claim = ReplacementClaim {
            lineage: lineage.clone(),
            request_id: command.request_id.clone(),
            base: base.clone(),
            target: target.clone(),
            mode: command.mode,
            phase,
            expected_base_generation: command.expected_metadata_generation,
            policy: command.policy,
            operation_id: operation_id.clone(),
            attempt,
            started_unix_ms: before.filter(|_| reopens).map_or(self.unix_ms, |claim| claim.started_unix_ms),
            updated_unix_ms: self.unix_ms,
        };
        self.put_claim(claim);
        self.emit_started(Some(&operation_id));
        if phase == ClaimPhase::DeletingBase {
            self.start_deletion(base);
        }
        self.claim_reply(&lineage)
    }

    /// Nothing may stand where the target will stand, and nobody else may be entering the lineage.
    fn expect_free_target(&self, target: &RevisionIdentity, may_be_published: bool) -> Result<(), Rejection> {
        let lineage = target.lineage();
        let (first, last) = (target.with_generation(0), target.with_generation(u64::MAX));
        if let Some(importing) = self.state.index.importing.range(first..=last).next() {
            let message = format!("revision {importing} is being imported; replace when its import has ended");
            return Err(Rejection::new(ErrorCode::Busy, message)
                .with_details(details([("importing_generation", importing.weight_generation.into())])));
        }
        if let Some(revision) = self.state.record.revisions.get(target) {
            let found = revision.metadata.availability;
            match found {
                Availability::Ready | Availability::Degraded if may_be_published => {
                    return revision.expect_no_operation();
                }
                Availability::Deleted if revision.published.is_none() => {}
                Availability::Deleting if revision.published.is_none() => {
                    let message = format!(
                        "the remains of target {target} are being deleted; send the request again when they are gone"
                    );
                    return Err(Rejection::new(ErrorCode::Busy, message));
                }
                _ => {
                    let message = format!("target {target} exists ({found}); replace by a higher generation");
                    return Err(Rejection::new(ErrorCode::Conflict, message));
                }
            }
        }
        let watermark = self.state.watermark(&lineage);
        if target.weight_generation <= watermark {
            let message = format!(
                "target generation {} of lineage {lineage} is not above the watermark {watermark}; replace by a higher generation",
                target.weight_generation
            );
            return Err(
                Rejection::new(ErrorCode::Conflict, message).with_details(details([("watermark", watermark.into())]))
            );
        }
        Ok(())
    }

    pub fn replacement_advanced(&mut self, command: &ReplacementAdvanced) -> Outcome {
        let (key, operation) = self.claimed(&command.operation_id, command.epoch)?;
        let lineage = operation.view.identity.lineage();
        let claim = self
            .open_claim(&operation.view.identity)
            .filter(|claim| claim.operation_id == command.operation_id && claim.mode == UpsertMode::PutFirst);
        let Some(claim) = claim.cloned() else {
            let message = format!(
                "operation {} drives no PUT_FIRST replacement; only those are advanced by a worker",
                command.operation_id
            );
            return reject(ErrorCode::Conflict, message);
        };
        let order = |phase: ClaimPhase| match phase {
            ClaimPhase::RetiringBase => 1,
            ClaimPhase::DeletingBase => 2,
            _ => 0,
        };
        let (from, to) = (order(claim.phase), order(command.to));
        if to == 0 {
            let message =
                format!("a worker advances a replacement to RETIRING_BASE or DELETING_BASE, not to {}", command.to);
            return reject(ErrorCode::InvalidArgument, message);
        }
        if from >= to {
            // A repeat.
            return self.claim_reply(&lineage);
        }
        if (from, to) == (0, 2) {
            let message = format!("the claim is in {}; RETIRING_BASE comes before DELETING_BASE", claim.phase);
            return reject(ErrorCode::Conflict, message);
        }
        // The base is never given up for a target that is not READY (RFC, safety invariant 12).
        self.revision(&claim.target)?.expect_ready()?;
        if command.to == ClaimPhase::RetiringBase {
            self.retire_base(&claim, key);
        } else if self.is_free(&claim.base) {
            self.enter_phase(&claim, ClaimPhase::DeletingBase);
            self.start_deletion(&claim.base);
            self.park(key, ParkReason::BaseDeletion, None);
        } else {
            self.park(key, ParkReason::LeaseDrain, None);
            let base = self.revision(&claim.base)?;
            base.expect_no_lease(self.clock())?;
            base.expect_no_operation()?;
        }
        self.claim_reply(&lineage)
    }

    /// Fences the base: it stays READY for the leases it has, which run out; its operation is superseded.
    fn retire_base(&mut self, claim: &ReplacementClaim, key: OperationKey) {
        let base = &claim.base;
        self.change_revision(base, |revision| revision.metadata.retired = true);
        self.enter_phase(claim, ClaimPhase::RetiringBase);
        self.emit_revision(base, |revision| EventBody::RevisionRetired { revision });
        let operation = self.state.record.revisions.get(base).and_then(|revision| revision.operation_key());
        if let Some(operation) = operation {
            let message = format!("revision {base} is being replaced by {}", claim.target);
            let error = OperationError { code: ErrorCode::Conflict, message };
            self.end_or_request(operation, End { error: Some(error), ..End::new(OperationStatus::Superseded) });
        }
        if !self.is_free(base) {
            self.park(key, ParkReason::LeaseDrain, None);
        }
    }

    pub fn abort_replacement(&mut self, command: &AbortReplacement) -> Outcome {
        let lineage = &command.lineage;
        let claim = self.state.claim(lineage).filter(|claim| claim.request_id == command.request_id).cloned();
        let Some(claim) = claim else {
            return reject(
                ErrorCode::NotFound,
                format!("lineage {lineage} has no replacement {:?}", command.request_id),
            );
        };
        match (claim.mode, claim.phase) {
            (_, ClaimPhase::Aborted) => return self.claim_reply(lineage),
            (_, ClaimPhase::Completed) => {
                return reject(
                    ErrorCode::Conflict,
                    format!("replacement {:?} is complete; there is nothing to abort", claim.request_id),
                );
            }
            (UpsertMode::DeleteFirst, ClaimPhase::DeletingBase) => {
                return Err(claim_busy(&claim, "it can be aborted once its base is deleted"));
            }
            (UpsertMode::PutFirst, ClaimPhase::RetiringBase | ClaimPhase::DeletingBase) => {
                let message = format!(
                    "replacement {:?} has fenced its base ({}); it can only go forward",
                    claim.request_id, claim.phase
                );
                return reject(ErrorCode::Conflict, message);
            }
            _ => {}
        }
        let target = self.state.revision(&claim.target).map(|metadata| metadata.availability);
        match target {
            Some(Availability::Importing) => self.start_deletion(&claim.target),
            // Published it stays, as if it had been put by itself.
            Some(Availability::Ready | Availability::Degraded) => self.raise_watermark(&claim.target),
            _ => {}
        }
        self.end_claim(&claim, ClaimPhase::Aborted, End::new(OperationStatus::Cancelled));
        self.claim_reply(lineage)
    }

    fn claim_reply(&self, lineage: &LineageKey) -> Outcome {
        match self.state.claim(lineage) {
            Some(claim) => Ok(Reply::Claim(Box::new(claim.clone()))),
            None => reject(ErrorCode::NotFound, format!("lineage {lineage} has no replacement")),
        }
    }
}

fn expect_arguments(command: &BeginReplacement) -> Result<(), Rejection> {
    let (base, target) = (&command.base, &command.target);
    let invalid = |message: String| Err(Rejection::new(ErrorCode::InvalidArgument, message));
    if base.lineage() != target.lineage() {
        return invalid(format!(
            "base {base} and target {target} are of different lineages; a replacement stays in one"
        ));
    }
    if target.weight_generation <= base.weight_generation {
        return invalid(format!(
            "target generation {} is not above base generation {}; replace by a higher one",
            target.weight_generation, base.weight_generation
        ));
    }
    if command.request_id.is_empty() || command.request_id.len() > TEXT_BYTES_MAX {
        return invalid(format!("the request id has {} bytes; give 1 to {TEXT_BYTES_MAX}", command.request_id.len()));
    }
    Ok(())
}

/// One that was given up begins anew, on the base as it is by then: a generation is compared with the base's, and not with what
/// it was before.
fn is_same_request(claim: &ReplacementClaim, command: &BeginReplacement) -> bool {
    claim.base == command.base
        && claim.target == command.target
        && claim.mode == command.mode
        && (claim.phase == ClaimPhase::Aborted
            || claim.expected_base_generation == command.expected_metadata_generation)
        && claim.policy == command.policy
}

#[cfg(test)]
mod tests;

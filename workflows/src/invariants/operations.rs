//! Operations: every active one is named by exactly its revision or claim, waits or is held as its status says, and never
//! goes back; the target of an open PUT_FIRST has no operation at work but the replacement's own.

use ballast_schemas::{OperationKind, OperationStatus, UpsertMode};

use super::Violation;
use crate::state::State;

const NAME: &str = "operations";

pub(super) fn check(state: &State) -> Result<(), Violation> {
    for (key, operation) in &state.record.operations {
        let view = &operation.view;
        let id = &view.operation_id;
        let wrong =
            |message: String| Err(Violation::new(NAME, format!("{id} ({}, {}) {message}", view.kind, view.status)));
        if crate::operation::OperationKey::of(id) != Some(*key) {
            return wrong("is kept under another key".to_owned());
        }
        let claimed = view.status == OperationStatus::Claimed;
        if claimed != view.worker.is_some() || claimed != view.claim_expires_at.is_some() {
            return wrong("and its worker's claim do not agree".to_owned());
        }
        if (view.status == OperationStatus::Parked) != view.park_reason.is_some() {
            return wrong(format!("waits for {:?}", view.park_reason));
        }
        if view.release_outstanding != operation.authorized.is_some()
            || (view.ending.is_some() && !view.release_outstanding)
        {
            return wrong("and its outstanding release do not agree".to_owned());
        }
        if view.processed_units > view.total_units.max(view.processed_units) || view.fence.seq > state.log_seq() {
            return wrong("is ahead of the log".to_owned());
        }
        if view.status.is_terminal() {
            if view.release_outstanding {
                return wrong("ended with a release outstanding".to_owned());
            }
            continue;
        }
        let claim = state.claim(&view.identity.lineage()).filter(|claim| !claim.phase.is_terminal());
        let named = match view.kind {
            OperationKind::Replacing => claim.is_some_and(|claim| claim.operation_id == *id),
            _ => state.revision(&view.identity).is_some_and(|revision| {
                revision.operation_id.as_ref() == Some(id) && revision.instance == view.instance
            }),
        };
        if !named {
            return wrong(format!("is active but {} does not name it", view.identity));
        }
        let reserved = claim.is_some_and(|claim| claim.mode == UpsertMode::PutFirst && claim.target == view.identity);
        let at_work = matches!(view.status, OperationStatus::Runnable | OperationStatus::Claimed);
        if reserved && at_work && view.kind == OperationKind::Migrating {
            return wrong("works on the target of a replacement".to_owned());
        }
    }
    Ok(())
}

pub(super) fn check_step(before: &State, after: &State) -> Result<(), Violation> {
    for (key, was) in &before.record.operations {
        let Some(is) = after.record.operations.get(key) else {
            if was.view.status.is_terminal() {
                continue;
            }
            return Err(Violation::new(NAME, format!("{} vanished while {}", was.view.operation_id, was.view.status)));
        };
        let (was, is) = (&was.view, &is.view);
        let back = is.epoch < was.epoch
            || is.cursor < was.cursor
            || is.fence < was.fence
            || is.processed_units < was.processed_units
            || is.processed_bytes < was.processed_bytes
            || (was.status.is_terminal() && is.status != was.status);
        if back {
            return Err(Violation::new(NAME, format!("{} went back from {was:?} to {is:?}", was.operation_id)));
        }
    }
    Ok(())
}

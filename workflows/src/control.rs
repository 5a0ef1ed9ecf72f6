//! What people ask of an operation: pause, resume, cancel, retry (ARCHITECTURE.md, Operations).

use ballast_schemas::{ErrorCode, OperationId, OperationKind, OperationStatus, Outcome, ParkReason};

use crate::fold::{Fold, reject};
use crate::operation::End;

impl Fold<'_> {
    /// Stops it where it stands. A worker's step in flight is refused; what it began on a node is harmless (copies) or was
    /// authorised, and the next claim finishes it.
    pub fn pause_operation(&mut self, id: &OperationId) -> Outcome {
        let (key, operation) = self.operation(id)?;
        match operation.view.status {
            OperationStatus::Paused => {}
            status if status.is_terminal() => return ended(id, status),
            _ => {
                self.edit_operation(key, |operation| {
                    let view = &mut operation.view;
                    view.status = OperationStatus::Paused;
                    view.park_reason = None;
                    view.wake_at = None;
                    view.worker = None;
                    view.claim_expires_at = None;
                });
                self.emit_progress(key);
            }
        }
        self.operation_reply(id)
    }

    /// Goes on. Without effect on an operation that is not paused.
    pub fn resume_operation(&mut self, id: &OperationId) -> Outcome {
        let (key, operation) = self.operation(id)?;
        match operation.view.status {
            OperationStatus::Paused => self.resume(key),
            status if status.is_terminal() => return ended(id, status),
            _ => {}
        }
        self.operation_reply(id)
    }

    /// Ends it as CANCELLED: at once, or, with a release outstanding, as soon as that was executed or fenced off.
    pub fn cancel_operation(&mut self, id: &OperationId) -> Outcome {
        let (key, operation) = self.operation(id)?;
        match (operation.view.kind, operation.view.status) {
            (_, OperationStatus::Cancelled) => {}
            (_, status) if status.is_terminal() => return ended(id, status),
            (OperationKind::Deleting, _) => {
                return reject(
                    ErrorCode::Conflict,
                    format!("operation {id} deletes a revision; a deletion that began can not be taken back"),
                );
            }
            (OperationKind::Replacing, _) => {
                return reject(
                    ErrorCode::Conflict,
                    format!("operation {id} drives a replacement; abort the replacement instead"),
                );
            }
            _ => self.end_or_request(key, End::new(OperationStatus::Cancelled)),
        }
        self.operation_reply(id)
    }

    /// Ends a back-off, or a wait for something only a node can say, at once and with a fresh budget.
    pub fn retry_operation(&mut self, id: &OperationId) -> Outcome {
        let (key, operation) = self.operation(id)?;
        let wakes = match (operation.view.status, operation.view.park_reason) {
            (status, _) if status.is_terminal() => return ended(id, status),
            (OperationStatus::Paused, _) => {
                return reject(ErrorCode::NotReady, format!("operation {id} is paused; resume it"));
            }
            (OperationStatus::BackingOff, _) => true,
            (OperationStatus::Parked, Some(ParkReason::Memory | ParkReason::Readers | ParkReason::Node)) => true,
            _ => false,
        };
        if wakes {
            self.edit_operation(key, |operation| operation.view.attempts = 0);
            self.make_runnable(key);
        }
        self.operation_reply(id)
    }

    /// A paused operation goes on where its condition allows it.
    fn resume(&mut self, key: crate::operation::OperationKey) {
        match self.replacement_wait(key) {
            Some(reason) => self.park(key, reason, None),
            None => self.make_runnable(key),
        }
    }
}

fn ended(id: &OperationId, status: OperationStatus) -> Outcome {
    reject(ErrorCode::Conflict, format!("operation {id} has ended as {status}; start a new one"))
}

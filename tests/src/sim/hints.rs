//! The queue of work hints: one per operation, refusing doubles; taken hints come again after five seconds unless they are
//! acknowledged. Lives in the server's memory: a fault empties it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use ballast_schemas::OperationId;

use super::runtime::{SECOND, Signal};

/// A worker that says nothing about a hint for this long is taken for dead.
const WORKER_SILENCE: u64 = 5 * SECOND;

#[derive(Clone, Debug)]
struct Queued {
    message: u64,
    /// Not delivered before.
    due_ns: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Hint {
    pub operation_id: OperationId,
    message: u64,
}

#[derive(Default)]
pub(crate) struct HintQueue {
    queued: RefCell<BTreeMap<OperationId, Queued>>,
    messages: Cell<u64>,
    changed: Signal,
}

impl HintQueue {
    /// Queues a hint unless one is there.
    pub fn publish(&self, operation_id: &OperationId, now_ns: u64) {
        let mut queued = self.queued.borrow_mut();
        if queued.contains_key(operation_id) {
            return;
        }
        let message = self.messages.get() + 1;
        self.messages.set(message);
        queued.insert(operation_id.clone(), Queued { message, due_ns: now_ns });
        drop(queued);
        self.changed.notify();
    }

    /// A hint that is due, if there is one; `skip` picks among several.
    pub fn take(&self, now_ns: u64, skip: impl FnOnce(usize) -> usize) -> Option<Hint> {
        let mut queued = self.queued.borrow_mut();
        let due: Vec<OperationId> =
            queued.iter().filter(|(_, hint)| hint.due_ns <= now_ns).map(|(id, _)| id.clone()).collect();
        let operation_id = due.get(skip(due.len().max(1)))?.clone();
        let hint = queued.get_mut(&operation_id)?;
        hint.due_ns = now_ns + WORKER_SILENCE;
        Some(Hint { operation_id, message: hint.message })
    }

    fn settle(&self, hint: &Hint, settle: impl FnOnce(&mut Queued) -> bool) {
        let mut queued = self.queued.borrow_mut();
        let found = queued.get_mut(&hint.operation_id).filter(|queued| queued.message == hint.message);
        if found.is_some_and(settle) {
            queued.remove(&hint.operation_id);
        }
    }

    pub fn acknowledge(&self, hint: &Hint) {
        self.settle(hint, |_| true);
    }

    /// Gives it back; it comes again later.
    pub fn retry_at(&self, hint: &Hint, at_ns: u64) {
        self.settle(hint, |queued| {
            queued.due_ns = at_ns;
            false
        });
        self.changed.notify();
    }

    /// The server restarted.
    pub fn lose_all(&self) {
        self.queued.borrow_mut().clear();
    }
}

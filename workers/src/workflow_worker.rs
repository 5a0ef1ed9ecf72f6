//! The workflow worker: takes work hints, claims the operations they name, and drives each to its end or to the point
//! where it has to wait. What happens to one operation is in `executor`; which step comes next is decided by
//! `ballast_workflows::next_step` (RFC, Residency Migration; ARCHITECTURE.md, Step machines).
//!
//! It keeps nothing that matters: killed at any moment, another worker goes on from what the log and the nodes say.

use std::collections::HashSet;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ballast_journal::nodes::{Directory, NodeClient};
use ballast_journal::{Hint, HintReader, Replica, Streams};
use ballast_schemas::{OperationId, WorkerId};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::executor::{ClaimAnswer, Executor};
use crate::failpoint::{Failpoint, FailpointError};
use crate::loss_watch::LossWatch;
use crate::reconciler::reconcile;

/// Operations that one worker drives at a time unless told otherwise.
pub const CONCURRENCY_DEFAULT: usize = 4;
/// A hint whose operation this worker still drives, or whose claim got no answer, comes again after this long.
const RETRY_HINT_AFTER: Duration = Duration::from_millis(500);
/// How long a stopping worker lets the steps that it is in finish. What is not finished then is given up: the claim lapses.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// What a workflow worker needs.
#[derive(Clone, Debug)]
pub struct WorkflowWorkerOptions {
    /// Where the hints are.
    pub streams: Streams,
    /// The folded log; it may be shared with other services of the process.
    pub replica: Replica,
    /// Who the nodes are and what they hold; it may be shared as well.
    pub directory: Directory,
    /// This run of this worker: another run is another worker.
    pub worker: WorkerId,
    /// Operations driven at a time.
    pub concurrency: usize,
}

/// Why a workflow worker can not start.
#[derive(Debug, thiserror::Error)]
pub enum WorkflowWorkerError {
    /// It would never do anything.
    #[error("the concurrency of a workflow worker is 0; it must be at least 1")]
    NoConcurrency,
    /// A test aid makes no sense.
    #[error(transparent)]
    Failpoint(#[from] FailpointError),
}

/// The service. Any number may run, in any processes.
#[derive(Debug)]
pub struct WorkflowWorker {
    hints: HintReader,
    executor: Arc<Executor>,
    replica: Replica,
    directory: Directory,
    watch: LossWatch,
    concurrency: usize,
    driven: Driven,
}

impl WorkflowWorker {
    /// A worker that has not begun.
    ///
    /// # Errors
    /// When the concurrency is 0 or the environment asks for an impossible test aid.
    pub fn new(options: WorkflowWorkerOptions) -> Result<Self, WorkflowWorkerError> {
        if options.concurrency == 0 {
            return Err(WorkflowWorkerError::NoConcurrency);
        }
        let nodes = NodeClient::new(options.streams.client().clone());
        let (replica, directory) = (options.replica.clone(), options.directory.clone());
        let failpoint = Failpoint::from_env()?;
        let watch = LossWatch::new(replica.clone(), directory.clone(), nodes.clone(), failpoint.clone());
        let executor = Executor::new(options.replica, options.directory, nodes, options.worker, failpoint);
        Ok(Self {
            hints: HintReader::new(&options.streams),
            executor: Arc::new(executor),
            replica,
            directory,
            watch,
            concurrency: options.concurrency,
            driven: Driven::default(),
        })
    }

    /// Works until `shutdown` resolves, then lets the steps in progress finish for a moment and appends nothing more.
    pub async fn run(mut self, shutdown: impl Future<Output = ()> + Send) {
        let (stop, stopped) = watch::channel(false);
        // They end with the set, however this ends.
        let mut watching = JoinSet::new();
        watching.spawn(reconcile(self.replica.clone(), self.directory.clone()));
        watching.spawn(self.watch.run());
        let slots = Arc::new(Semaphore::new(self.concurrency));
        let mut tasks = JoinSet::new();
        tokio::pin!(shutdown);
        loop {
            // A hint is taken only with a free slot in hand: what this worker can not begin stays for the others.
            let next = async {
                let slot = Arc::clone(&slots).acquire_owned().await;
                (slot, self.hints.next().await)
            };
            let (slot, hint) = tokio::select! {
                () = &mut shutdown => break,
                next = next => next,
            };
            while tasks.try_join_next().is_some() {}
            let executor = Arc::clone(&self.executor);
            let (driven, stopped) = (self.driven.clone(), stopped.clone());
            tasks.spawn(async move {
                follow_hint(&executor, &driven, hint, stopped).await;
                drop(slot);
            });
        }
        // Nobody listening means that nothing is driven.
        let _ = stop.send(true);
        drop(watching);
        let finished = tokio::time::timeout(STOP_GRACE, async { while tasks.join_next().await.is_some() {} }).await;
        if finished.is_err() {
            tracing::info!(
                operations = tasks.len(),
                "stopping in the middle of a step: another worker goes on when the claim lapses"
            );
        }
    }
}

/// Claims what the hint names, takes the hint off the queue once that is settled, and drives the operation.
async fn follow_hint(executor: &Executor, driven: &Driven, hint: Hint, stopped: watch::Receiver<bool>) {
    let operation = hint.operation_id.clone();
    let Some(_mark) = driven.mark(&operation) else {
        // The run that is about to end may be what made it runnable again: look once more.
        return hint.retry_after(RETRY_HINT_AFTER).await;
    };
    match executor.claim(&operation, hint.kind).await {
        ClaimAnswer::Granted(claim) => {
            hint.ack().await;
            let ended = executor.drive(&claim, stopped).await;
            tracing::debug!(%operation, epoch = claim.epoch, ?ended, "left");
        }
        ClaimAnswer::NotWanted(reason) => {
            tracing::debug!(%operation, reason, "hint without work");
            hint.ack().await;
        }
        ClaimAnswer::Unanswered(reason) => {
            tracing::warn!(%operation, reason, "could not ask for the claim; trying again");
            hint.retry_after(RETRY_HINT_AFTER).await;
        }
    }
}

/// Operations that this worker is at: never twice the same.
#[derive(Clone, Debug, Default)]
struct Driven(Arc<Mutex<HashSet<OperationId>>>);

impl Driven {
    fn lock(&self) -> MutexGuard<'_, HashSet<OperationId>> {
        // A set changed in single statements can not be torn by a panic elsewhere.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the operation for as long as the mark lives; `None` when it is marked already.
    fn mark(&self, operation: &OperationId) -> Option<Mark> {
        self.lock().insert(operation.clone()).then(|| Mark { driven: self.clone(), operation: operation.clone() })
    }
}

struct Mark {
    driven: Driven,
    operation: OperationId,
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.driven.lock().remove(&self.operation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_never_driven_twice_at_once() {
        let driven = Driven::default();
        let operation = OperationId::new("op-1.0").unwrap();
        let mark = driven.mark(&operation).unwrap();
        assert!(driven.mark(&operation).is_none());
        drop(mark);
        assert!(driven.mark(&operation).is_some());
    }
}

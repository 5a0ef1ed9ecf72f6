//! Drives one operation: claims it, executes the step that follows from the folded state and the nodes' inventories, appends what
//! was done, and asks again, until nothing is left to do for this worker (ARCHITECTURE.md, Operations).
//!
//! Which step follows is decided by `ballast_workflows::next_step`; what is held where is looked at in `observing`. Nothing here
//! survives the process, and nothing has to: a step done twice is a step done once.

use std::time::Duration;

use ballast_journal::nodes::{Directory, NodeClient};
use ballast_journal::{Replica, SubmitError};
use ballast_schemas::{
    BallastError, CLAIM_TTL_MS, ClaimOperation, Command, ErrorCode, InstanceId, NodeId, NodeReply, NodeRequest,
    OperationId, OperationKind, OperationStatus, RenewClaim, Reply, WeightOperation, WorkerId,
};
use ballast_workflows::{Observation, Step, after_failure, next_step};
use tokio::sync::watch;

use crate::failpoint::{Failpoint, Side, command_name, machine_name, request_name};
use crate::observing::Observer;

/// A claim is renewed every third of its life.
const RENEW_EVERY: Duration = Duration::from_millis(CLAIM_TTL_MS / 3);
/// How long to wait before the log is asked again after it gave no answer.
const LOG_RETRY_AFTER: Duration = Duration::from_millis(500);

/// The answer to a wish for an operation.
#[derive(Debug)]
pub(crate) enum ClaimAnswer {
    /// This worker has it.
    Granted(Claim),
    /// It has ended, waits for something, or is another worker's.
    NotWanted(String),
    /// The log gave no answer.
    Unanswered(String),
}

/// A claim that the log granted.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub operation_id: OperationId,
    pub kind: OperationKind,
    pub epoch: u64,
}

/// How the work on a claimed operation came to its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Nothing more to do for this worker: it has ended, waits, or is not this worker's any more.
    Done,
    /// The log refused to renew the claim.
    ClaimLost,
    /// The worker is stopping.
    Stopped,
    /// The replica has stopped; nothing can be decided any more.
    ReplicaStopped,
}

/// Drives operations for one worker.
#[derive(Debug)]
pub(crate) struct Executor {
    replica: Replica,
    observer: Observer,
    nodes: NodeClient,
    worker: WorkerId,
    failpoint: Failpoint,
}

impl Executor {
    pub(crate) fn new(
        replica: Replica,
        directory: Directory,
        nodes: NodeClient,
        worker: WorkerId,
        failpoint: Failpoint,
    ) -> Self {
        let observer = Observer { replica: replica.clone(), directory, nodes: nodes.clone() };
        Self { replica, observer, nodes, worker, failpoint }
    }

    /// Asks the log for an operation.
    pub(crate) async fn claim(&self, operation_id: &OperationId, kind: OperationKind) -> ClaimAnswer {
        let command = Command::ClaimOperation(ClaimOperation {
            operation_id: operation_id.clone(),
            worker: self.worker.clone(),
            ttl_ms: CLAIM_TTL_MS,
        });
        self.strike(kind, command_name(&command), Side::Before);
        let answered = self.replica.submit(command).await;
        let answer = match answered {
            Ok((_, Ok(Reply::Operation(operation)))) if operation.status == OperationStatus::Claimed => {
                ClaimAnswer::Granted(Claim {
                    operation_id: operation.operation_id.clone(),
                    kind: operation.kind,
                    epoch: operation.epoch,
                })
            }
            Ok((_, Ok(other))) => ClaimAnswer::NotWanted(format!("the claim was answered with {other:?}")),
            Ok((_, Err(rejection))) => ClaimAnswer::NotWanted(rejection.message),
            Err(error) => ClaimAnswer::Unanswered(error.to_string()),
        };
        if let ClaimAnswer::Granted(claim) = &answer {
            tracing::info!(operation = %claim.operation_id, kind = %claim.kind, epoch = claim.epoch, "claimed");
            self.strike(kind, "claim", Side::After);
        }
        answer
    }

    /// Works on a claimed operation until there is nothing left to do, the claim is lost, or `stopping` turns true.
    pub(crate) async fn drive(&self, claim: &Claim, stopping: watch::Receiver<bool>) -> Ended {
        // When the claim is lost the step is dropped where it stands: what it began on a node is fenced off by the next claim,
        // and what it appends carries an epoch that the fold refuses.
        tokio::select! {
            biased;
            ended = self.keep(claim) => ended,
            ended = Drive::new(self, claim).run(stopping) => ended,
        }
    }

    /// Renews the claim until that is refused.
    async fn keep(&self, claim: &Claim) -> Ended {
        let command = Command::RenewClaim(RenewClaim {
            operation_id: claim.operation_id.clone(),
            epoch: claim.epoch,
            ttl_ms: CLAIM_TTL_MS,
        });
        loop {
            tokio::time::sleep(RENEW_EVERY).await;
            self.strike(claim.kind, command_name(&command), Side::Before);
            match self.replica.submit(command.clone()).await {
                Ok((_, Ok(_))) => self.strike(claim.kind, command_name(&command), Side::After),
                Ok((_, Err(rejection))) => {
                    tracing::info!(operation = %claim.operation_id, epoch = claim.epoch, reason = rejection.message, "claim not renewed");
                    return Ended::ClaimLost;
                }
                Err(error) if error.is_retryable() => {
                    // The log's clock stands still while nothing is stored: the claim does not run out meanwhile.
                    tracing::debug!(operation = %claim.operation_id, %error, "claim not renewed yet");
                }
                Err(_) => return Ended::ReplicaStopped,
            }
        }
    }

    fn strike(&self, kind: OperationKind, step: &str, side: Side) {
        self.failpoint.strike(machine_name(kind), step, side);
    }
}

/// One run on one claim.
struct Drive<'a> {
    executor: &'a Executor,
    claim: &'a Claim,
    seen: Option<Observation>,
    /// The last step that came to an end, and why it may not follow itself.
    last: Option<(Step, BallastError)>,
}

/// What executing a step has led to.
enum Turn {
    /// Look again at what comes next.
    Next,
    /// The end.
    End(Ended),
}

impl<'a> Drive<'a> {
    fn new(executor: &'a Executor, claim: &'a Claim) -> Self {
        Self { executor, claim, seen: None, last: None }
    }

    async fn run(mut self, stopping: watch::Receiver<bool>) -> Ended {
        loop {
            self.executor.failpoint.pause().await;
            if *stopping.borrow() {
                return Ended::Stopped;
            }
            let (operation_id, epoch) = (&self.claim.operation_id, self.claim.epoch);
            let (step, operation) = self.executor.replica.read(|state| {
                (next_step(state, self.seen.as_ref(), operation_id, epoch), state.operation(operation_id).cloned())
            });
            let Some(operation) = operation else { return Ended::Done };
            match self.execute(step, &operation).await {
                Turn::Next => {}
                Turn::End(ended) => return ended,
            }
        }
    }

    async fn execute(&mut self, step: Step, operation: &WeightOperation) -> Turn {
        if let Some((_, error)) = self.last.take_if(|(last, _)| *last == step) {
            return self.failed(operation, request_of(&step), error).await;
        }
        match &step {
            Step::Done => Turn::End(Ended::Done),
            Step::NeedIndex { instance } => self.observe(&step, instance, operation).await,
            Step::Effect { node, request } => self.effect(&step, node, request, operation).await,
            Step::Append(command) => self.append(&step, command.clone()).await,
        }
    }

    async fn observe(&mut self, step: &Step, instance: &InstanceId, operation: &WeightOperation) -> Turn {
        let known = self.seen.take().filter(|seen| seen.instance == *instance).and_then(|seen| seen.index);
        match self.executor.observer.observe(operation, instance, known).await {
            Ok(seen) => {
                self.seen = Some(seen);
                let again = format!("looking at instance {instance} does not lead on");
                self.last = Some((step.clone(), BallastError::new(ErrorCode::Conflict, again)));
                Turn::Next
            }
            Err(error) => self.failed(operation, None, error).await,
        }
    }

    async fn effect(&mut self, step: &Step, node: &NodeId, request: &NodeRequest, operation: &WeightOperation) -> Turn {
        let name = request_name(request);
        self.executor.strike(self.claim.kind, name, Side::Before);
        tracing::debug!(operation = %operation.operation_id, %node, effect = name, "asking");
        let answered = self.executor.nodes.call(node, request, |progress| {
            tracing::trace!(operation = %operation.operation_id, %node, effect = name, units = progress.units, bytes = progress.bytes, "working");
        });
        let reply = match answered.await {
            Ok(reply @ (NodeReply::Inventory(_) | NodeReply::Absent)) => reply,
            Ok(_) => {
                let message = format!("node {node} answered {name} with something else than what it holds");
                return self.failed(operation, Some(request), BallastError::new(ErrorCode::Unavailable, message)).await;
            }
            Err(error) => {
                tracing::info!(operation = %operation.operation_id, %node, effect = name, %error, "effect failed");
                return self.failed(operation, Some(request), error.into()).await;
            }
        };
        self.executor.strike(self.claim.kind, name, Side::After);
        if let Some(seen) = &mut self.seen {
            seen.answered(node, &reply);
        }
        let message = format!("node {node} says that {name} is done, and what it holds says otherwise");
        self.last = Some((step.clone(), BallastError::new(ErrorCode::Conflict, message)));
        Turn::Next
    }

    async fn append(&mut self, step: &Step, command: Command) -> Turn {
        match self.submit(command).await {
            Submitted::Accepted => {
                let message = "the log accepted a step that leads to itself".to_owned();
                self.last = Some((step.clone(), BallastError::new(ErrorCode::Conflict, message)));
                Turn::Next
            }
            Submitted::Rejected(error) => {
                self.last = Some((step.clone(), error));
                Turn::Next
            }
            Submitted::Unanswered => Turn::Next,
            Submitted::ReplicaStopped => Turn::End(Ended::ReplicaStopped),
        }
    }

    /// Tells the log that a step failed: the operation waits or backs off there, and the next look says that this worker is done.
    async fn failed(
        &mut self,
        operation: &WeightOperation,
        request: Option<&NodeRequest>,
        error: BallastError,
    ) -> Turn {
        tracing::info!(operation = %operation.operation_id, %error, "step failed");
        let command = after_failure(operation, self.claim.epoch, request, &error);
        match self.submit(command).await {
            Submitted::Accepted => Turn::Next,
            // Only the holder of the claim may say so: somebody else has it, or the operation has ended.
            Submitted::Rejected(_) => Turn::End(Ended::Done),
            Submitted::Unanswered => Turn::Next,
            Submitted::ReplicaStopped => Turn::End(Ended::ReplicaStopped),
        }
    }

    async fn submit(&self, command: Command) -> Submitted {
        let (kind, name) = (self.claim.kind, command_name(&command));
        self.executor.strike(kind, name, Side::Before);
        let submitted = self.executor.replica.submit(command).await;
        match submitted {
            Ok((_, Ok(_))) => {
                self.executor.strike(kind, name, Side::After);
                Submitted::Accepted
            }
            Ok((_, Err(rejection))) => {
                tracing::debug!(operation = %self.claim.operation_id, command = name, reason = rejection.message, "rejected");
                Submitted::Rejected(rejection.into())
            }
            // Stored or not: the state will show it, and the same command again is refused or a repeat.
            Err(
                error @ (SubmitError::NotStored(_)
                | SubmitError::OutcomeUnknown { .. }
                | SubmitError::NearlyFull { .. }),
            ) => {
                tracing::warn!(operation = %self.claim.operation_id, command = name, %error, "no answer from the log");
                tokio::time::sleep(LOG_RETRY_AFTER).await;
                Submitted::Unanswered
            }
            Err(error) => {
                tracing::error!(operation = %self.claim.operation_id, command = name, %error, "cannot go on");
                Submitted::ReplicaStopped
            }
        }
    }
}

/// What became of a command.
enum Submitted {
    Accepted,
    Rejected(BallastError),
    Unanswered,
    ReplicaStopped,
}

fn request_of(step: &Step) -> Option<&NodeRequest> {
    match step {
        Step::Effect { request, .. } => Some(request),
        _ => None,
    }
}

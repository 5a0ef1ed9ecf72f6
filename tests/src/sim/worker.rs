//! A workflow worker: takes hints, claims operations, and drives each through `next_step`, as the product's executor does:
//! one step at a time, a step that leads to itself is a failure, a claim that can not be renewed ends the drive.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use ballast_schemas::{
    BallastError, CLAIM_TTL_MS, ClaimOperation, ClaimPhase, Command, ErrorCode, GroupInventory, InstanceId, NodeId,
    NodeReply, NodeRequest, OperationId, OperationKind, OperationStatus, RenewClaim, ReplacementAdvanced, Reply,
    UpsertMode, WeightOperation, WorkerId,
};
use ballast_workflows::{Observation, State, Step, after_failure, next_step};

use super::bugs::Bug;
use super::faults::Target;
use super::gateway::{call_node, unavailable};
use super::hints::Hint;
use super::invariants;
use super::loss_watch::watch_losses;
use super::net::Service;
use super::reconciler::reconcile;
use super::replica::Replica;
use super::runtime::{Either, MS, ProcessId, either};
use super::world::{Slot, W};

/// A claim is renewed every third of its life.
const RENEW_EVERY: u64 = CLAIM_TTL_MS * MS / 3;
const LOG_RETRY_AFTER: u64 = 500 * MS;
const RETRY_HINT_AFTER: u64 = 500 * MS;
/// Operations driven at a time.
const CONCURRENCY: usize = 4;

pub(crate) struct Worker {
    slot: Rc<Slot<Worker>>,
    at: usize,
    pub replica: Rc<Replica>,
    worker: WorkerId,
    driven: RefCell<BTreeSet<OperationId>>,
}

impl Service for Worker {
    fn process(&self) -> ProcessId {
        self.replica.process
    }
}

/// Starts a run.
pub(crate) fn start(w: &W, slot: &Rc<Slot<Worker>>) {
    let process = w.rt.start_process();
    slot.process.set(Some(process));
    let (world, slot) = (Rc::clone(w), Rc::clone(slot));
    w.rt.spawn(process, async move {
        let w = world;
        w.work(50 * MS).await;
        let replica = Replica::start(&w, &slot.name, process, &slot.link);
        let head = w.log.last_seq();
        replica.folded.wait_for(|| replica.read(|state| state.log_seq() >= head).then_some(())).await;
        let name = w.name(&format!("{}-run", slot.name));
        let worker = WorkerId::new(name).expect("a short ASCII name is a worker id");
        let at = w.workers.iter().position(|other| Rc::ptr_eq(other, &slot)).unwrap_or_default();
        let worker = Rc::new(Worker { slot: Rc::clone(&slot), at, replica, worker, driven: RefCell::default() });
        w.rt.spawn(process, reconcile(Rc::clone(&w), Rc::clone(&worker.replica)));
        w.rt.spawn(process, watch_losses(Rc::clone(&w), Rc::clone(&worker.replica)));
        for _ in 0..CONCURRENCY {
            w.rt.spawn(process, Rc::clone(&worker).follow_hints());
        }
        *slot.current.borrow_mut() = Some(worker);
    });
}

/// One run on one claim.
struct Drive {
    operation_id: OperationId,
    epoch: u64,
    seen: Option<Observation>,
    /// When the nodes were looked at.
    seen_at: Cell<Option<u64>>,
    /// The last step that came to an end, and why it may not follow itself.
    last: Option<(Step, BallastError)>,
}

enum Turn {
    Next,
    End,
}

impl Worker {
    fn w(&self) -> &W {
        &self.replica.w
    }

    async fn follow_hints(self: Rc<Self>) {
        let w = Rc::clone(self.w());
        loop {
            let hint = if self.replica.link.is_cut(w.now()) {
                None
            } else {
                w.hints.take(w.now(), |due| w.draw(|rng| rng.index(due)))
            };
            match hint {
                Some(hint) => self.follow(hint).await,
                None => w.work(120 * MS).await,
            }
        }
    }

    async fn follow(&self, hint: Hint) {
        let w = self.w();
        let id = hint.operation_id.clone();
        if !self.driven.borrow_mut().insert(id.clone()) {
            return w.hints.retry_at(&hint, w.now() + RETRY_HINT_AFTER);
        }
        let late = w.bug(Bug::HintAckedAfterItsWakeUp);
        let command = Command::ClaimOperation(ClaimOperation {
            operation_id: id.clone(),
            worker: self.worker.clone(),
            ttl_ms: CLAIM_TTL_MS,
        });
        match self.replica.submit(command).await {
            Some((_, Ok(Reply::Operation(operation)))) if operation.status == OperationStatus::Claimed => {
                self.may_die().await;
                if !late {
                    self.acknowledge(&hint);
                }
                self.drive(&operation.operation_id, operation.epoch).await;
                if late {
                    self.acknowledge(&hint);
                }
            }
            Some(_) => self.acknowledge(&hint),
            None => w.hints.retry_at(&hint, w.now() + RETRY_HINT_AFTER),
        }
        self.driven.borrow_mut().remove(&id);
    }

    fn acknowledge(&self, hint: &Hint) {
        let w = self.w();
        if self.replica.link.is_cut(w.now()) || w.strikes(w.plan.network.lose, "hint acknowledgement lost") {
            return;
        }
        w.hints.acknowledge(hint);
    }

    /// Works until there is nothing left to do or the claim is lost; what it began on a node goes on there.
    async fn drive(&self, operation_id: &OperationId, epoch: u64) {
        let drive =
            Drive { operation_id: operation_id.clone(), epoch, seen: None, seen_at: Cell::new(None), last: None };
        match either(self.keep(operation_id, epoch), self.run(drive)).await {
            Either::First(()) => self.w().fault("claim lost"),
            Either::Second(()) => {}
        }
    }

    /// Renews the claim until that is refused.
    async fn keep(&self, operation_id: &OperationId, epoch: u64) {
        loop {
            self.w().rt.sleep(RENEW_EVERY).await;
            let operation_id = operation_id.clone();
            let command = Command::RenewClaim(RenewClaim { operation_id, epoch, ttl_ms: CLAIM_TTL_MS });
            if let Some((_, Err(_))) = self.replica.submit(command).await {
                return;
            }
        }
    }

    async fn run(&self, mut drive: Drive) {
        loop {
            self.w().work(MS).await;
            let (step, operation) = self.replica.read(|state| {
                let step = next_step(state, drive.seen.as_ref(), &drive.operation_id, drive.epoch);
                (self.misstep(state, &drive, step), state.operation(&drive.operation_id).cloned())
            });
            let Some(operation) = operation else { return };
            match self.execute(&mut drive, step, &operation).await {
                Turn::Next => {}
                Turn::End => return,
            }
        }
    }

    /// Each step has a before and an after; the process may end at either.
    async fn execute(&self, drive: &mut Drive, step: Step, operation: &WeightOperation) -> Turn {
        self.may_die().await;
        let turn = self.take_step(drive, step, operation).await;
        self.may_die().await;
        turn
    }

    async fn may_die(&self) {
        self.w().may_die(&self.slot, Target::Worker(self.at)).await;
    }

    async fn take_step(&self, drive: &mut Drive, step: Step, operation: &WeightOperation) -> Turn {
        if let Some((_, error)) = drive.last.take_if(|(last, _)| *last == step) {
            return self.failed(drive, operation, request_of(&step), error).await;
        }
        match &step {
            Step::Done => Turn::End,
            Step::NeedIndex { instance } => match self.observe(drive, operation, instance).await {
                Ok(seen) => {
                    drive.seen = Some(seen);
                    let again = BallastError::new(ErrorCode::Conflict, "looking does not lead on");
                    drive.last = Some((step, again));
                    Turn::Next
                }
                Err(error) => self.failed(drive, operation, None, error).await,
            },
            Step::Effect { node, request } => {
                let reply = match self.effect(node, request, operation).await {
                    Ok(reply @ (NodeReply::Inventory(_) | NodeReply::Absent)) => reply,
                    Ok(other) => {
                        let error = unavailable(format!("node {node} answered {other:?}"));
                        return self.failed(drive, operation, Some(request), error).await;
                    }
                    Err(error) => return self.failed(drive, operation, Some(request), error).await,
                };
                if let Some(seen) = &mut drive.seen {
                    seen.answered(node, &reply);
                }
                let again = BallastError::new(ErrorCode::Conflict, "done, and what it holds says otherwise");
                drive.last = Some((step, again));
                Turn::Next
            }
            Step::Append(command) => {
                let again = match self.append(drive, command.clone()).await {
                    None => {
                        self.w().rt.sleep(LOG_RETRY_AFTER).await;
                        return Turn::Next;
                    }
                    Some(Ok(())) => BallastError::new(ErrorCode::Conflict, "accepted, and it leads to itself"),
                    Some(Err(error)) => error,
                };
                drive.last = Some((step, again));
                Turn::Next
            }
        }
    }

    /// What the nodes hold of an instance. A holder that does not answer is a failure, never an absence.
    async fn observe(
        &self,
        drive: &Drive,
        operation: &WeightOperation,
        instance: &InstanceId,
    ) -> Result<Observation, BallastError> {
        let w = self.w();
        drive.seen_at.set(Some(w.now()));
        let mut holders = self.replica.read(|state| placement(state, operation, instance));
        for node in w.nodes.iter().filter(|node| node.slot.get().is_some()) {
            if node.published.borrow().contains(instance) {
                holders.insert(node.id.clone());
            }
        }
        if w.bug(Bug::DeletionForgetsHolder) && operation.kind == OperationKind::Deleting {
            holders = holders.into_iter().take(1).collect();
        }
        let mut inventory = GroupInventory::default();
        for node in &holders {
            let request = NodeRequest::Inventory { instance: instance.clone() };
            match call_node(&self.replica, node, request).await.map_err(|error| unavailable(error.message))? {
                NodeReply::Inventory(held) => drop(inventory.nodes.insert(node.clone(), *held)),
                NodeReply::Absent => {}
                other => return Err(unavailable(format!("node {node} answered {other:?}"))),
            }
        }
        let has_cold = |id: &&NodeId| w.node_named(id).is_some_and(|node| node.has_cold);
        let cold_nodes = inventory.nodes.keys().filter(has_cold).cloned().collect();
        let known = drive.seen.as_ref().filter(|seen| seen.instance == *instance).and_then(|seen| seen.index.clone());
        let mut index = known;
        for node in inventory.nodes.iter().filter(|(_, held)| held.manifest).map(|(node, _)| node) {
            if index.is_some() {
                break;
            }
            let request = NodeRequest::AffinityIndex { instance: instance.clone() };
            match call_node(&self.replica, node, request).await.map_err(|error| unavailable(error.message))? {
                NodeReply::AffinityIndex(found) => index = Some(*found),
                other => return Err(unavailable(format!("node {node} answered {other:?}"))),
            }
        }
        let mut seen = Observation::new(instance.clone(), inventory, index, cold_nodes);
        if w.bug(Bug::TrustsRecordedProgress) {
            trust_progress(&mut seen, operation);
        }
        Ok(seen)
    }

    async fn effect(
        &self,
        node: &NodeId,
        request: &NodeRequest,
        operation: &WeightOperation,
    ) -> Result<NodeReply, BallastError> {
        if let NodeRequest::RaiseFence { instance, fence } = request
            && self.w().bug(Bug::StaleReleaseAfterCancel)
            && operation.ending.is_some()
        {
            // As if every node had obeyed.
            let request = NodeRequest::Inventory { instance: instance.clone() };
            let reply = call_node(&self.replica, node, request).await?;
            return Ok(match reply {
                NodeReply::Inventory(mut held) => {
                    held.fence = held.fence.max(*fence);
                    NodeReply::Inventory(held)
                }
                other => other,
            });
        }
        call_node(&self.replica, node, request.clone()).await
    }

    /// Appends a step. `None`: unknown.
    async fn append(&self, drive: &Drive, command: Command) -> Option<Result<(), BallastError>> {
        let id = self.w().command_id();
        invariants::looked_at(self.w(), &id, drive.seen_at.get());
        let (_, outcome) = self.replica.submit_as(id, None, command).await?;
        Some(outcome.map(drop).map_err(BallastError::from))
    }

    /// Tells the log that a step failed: the operation waits or backs off there.
    async fn failed(
        &self,
        drive: &Drive,
        operation: &WeightOperation,
        request: Option<&NodeRequest>,
        error: BallastError,
    ) -> Turn {
        let command = after_failure(operation, drive.epoch, request, &error);
        match self.replica.submit(command).await {
            Some((_, Err(_))) => Turn::End,
            Some((_, Ok(_))) => Turn::Next,
            None => {
                self.w().rt.sleep(LOG_RETRY_AFTER).await;
                Turn::Next
            }
        }
    }

    /// The steps that planted bugs take instead.
    fn misstep(&self, state: &State, drive: &Drive, step: Step) -> Step {
        let w = self.w();
        match &step {
            Step::Append(Command::AuthorizeRelease(_)) if w.bug(Bug::ReleaseWithoutLeave) => {
                let Some(seen) = &drive.seen else { return step };
                let Some(operation) = state.operation(&drive.operation_id) else { return step };
                let release = seen.inventory.nodes.iter().find_map(|(node, held)| {
                    let units: Vec<_> =
                        held.hot.runs().into_iter().filter(|run| run.iter().all(|it| held.cold.get(it))).collect();
                    let effect =
                        ballast_schemas::UnitEffect { instance: seen.instance.clone(), fence: operation.fence, units };
                    (!effect.units.is_empty())
                        .then(|| Step::Effect { node: node.clone(), request: NodeRequest::ReleaseMemory(effect) })
                });
                release.unwrap_or(step)
            }
            Step::Append(Command::OperationFinished(finished)) if w.bug(Bug::UnitsInMetadata) => {
                let mut finished = finished.clone();
                let units = drive.seen.as_ref().and_then(|seen| seen.index.as_ref()).map_or(0, |index| index.len());
                let names: Vec<String> =
                    (0..units).map(|unit| format!("model.layers.{unit}.self_attn.q_proj.weight")).collect();
                finished.note = Some(names.join(","));
                Step::Append(Command::OperationFinished(finished))
            }
            Step::NeedIndex { .. } if w.bug(Bug::TargetLostWhileBaseDrains) => {
                let Some(operation) = state.operation(&drive.operation_id) else { return step };
                let claim = state.claim(&operation.identity.lineage());
                let drained = claim.filter(|claim| {
                    claim.mode == UpsertMode::PutFirst
                        && claim.phase == ClaimPhase::RetiringBase
                        && claim.operation_id == drive.operation_id
                });
                if drained.is_none() {
                    return step;
                }
                Step::Append(Command::ReplacementAdvanced(ReplacementAdvanced {
                    operation_id: drive.operation_id.clone(),
                    epoch: drive.epoch,
                    to: ClaimPhase::DeletingBase,
                }))
            }
            _ => step,
        }
    }
}

/// Everything before the cursor is taken for done.
fn trust_progress(seen: &mut Observation, operation: &WeightOperation) {
    let Some(units) = seen.index.as_ref().map(|index| index.len()) else { return };
    let done = operation.cursor > 0 && operation.target == Some(ballast_schemas::Residency::Cold);
    if operation.kind != OperationKind::Migrating || !done {
        return;
    }
    for held in seen.inventory.nodes.values_mut() {
        held.fence = operation.fence;
        held.hot = ballast_schemas::Bitmap::empty(units);
        held.cold = ballast_schemas::Bitmap::full(units);
    }
}

/// Where an instance was placed: the operation's own, or one of the replacement that it drives.
fn placement(state: &State, operation: &WeightOperation, instance: &InstanceId) -> BTreeSet<NodeId> {
    let claim = state.claim(&operation.identity.lineage());
    let of_claim = claim.into_iter().flat_map(|claim| [&claim.target, &claim.base]);
    let mut candidates = std::iter::once(&operation.identity).chain(of_claim);
    let found = candidates.find_map(|identity| state.revision(identity).filter(|record| record.instance == *instance));
    found.map(|record| record.placement.iter().cloned().collect()).unwrap_or_default()
}

fn request_of(step: &Step) -> Option<&NodeRequest> {
    match step {
        Step::Effect { request, .. } => Some(request),
        _ => None,
    }
}

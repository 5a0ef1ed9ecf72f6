//! A gateway: places imports, takes receipts from nodes, appends commands, introduces nodes, publishes hints. As the product's
//! gateway, with the same order of looks and appends.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ballast_schemas::{
    AcquireLease, Availability, BallastError, BeginImport, BeginSharedImport, Command, CommandId, CommitImport, Digest,
    ErrorCode, ImportSession, InstanceId, InstanceStanding, LeaseGrant, LogPosition, LogTime, MigrationTrigger, NodeId,
    NodeReply, NodeRequest, OperationId, ParticipantId, Receipt, RelievePressure, Reply, RevisionIdentity, SessionId,
    WeightRevisionMetadata, WriterId,
};
use ballast_workflows::State;

use super::bugs::Bug;
use super::faults::Target;
use super::net::{Patience, Service, ask};
use super::node::Node;
use super::reconciler::UNIT_BYTES;
use super::replica::Replica;
use super::runtime::{MS, ProcessId, SECOND};
use super::world::{Slot, W};

/// Hints of runnable operations are repeated this often.
const REPEAT_EVERY: u64 = 2 * SECOND;
const SETTLE: u64 = 5 * MS;
/// How long a replica that is behind what a node has seen gets to catch up.
const CATCH_UP: u64 = 3 * SECOND;
const NODE_CALL: Patience = Patience { lively: true, may_double: true, ..Patience::new(5 * SECOND) };

pub(crate) struct Gateway {
    slot: Rc<Slot<Gateway>>,
    at: usize,
    pub replica: Rc<Replica>,
    sent: RefCell<BTreeMap<OperationId, u64>>,
}

impl Service for Gateway {
    fn process(&self) -> ProcessId {
        self.replica.process
    }
}

/// Starts a run.
pub(crate) fn start(w: &W, slot: &Rc<Slot<Gateway>>) {
    let process = w.rt.start_process();
    slot.process.set(Some(process));
    let (world, slot) = (Rc::clone(w), Rc::clone(slot));
    w.rt.spawn(process, async move {
        let w = world;
        w.work(50 * MS).await;
        let replica = Replica::start(&w, &slot.name, process, &slot.link);
        let head = w.log.last_seq();
        replica.folded.wait_for(|| replica.read(|state| state.log_seq() >= head).then_some(())).await;
        let at = w.gateways.iter().position(|other| Rc::ptr_eq(other, &slot)).unwrap_or_default();
        let (own, sent) = (Rc::clone(&slot), RefCell::default());
        let gateway = Rc::new(Gateway { slot: own, at, replica: Rc::clone(&replica), sent });
        w.rt.spawn(process, Rc::clone(&gateway).publish_hints());
        w.rt.spawn(process, replica.keep_snapshots());
        *slot.current.borrow_mut() = Some(gateway);
    });
}

pub(crate) fn unavailable(message: impl Into<String>) -> BallastError {
    BallastError::new(ErrorCode::Unavailable, message)
}

impl Gateway {
    fn w(&self) -> &W {
        &self.replica.w
    }

    /// Appends and answers with what the fold says. `until` is the end that the client gave its request.
    pub async fn submit(&self, id: CommandId, until: LogTime, command: Command) -> Result<Reply, BallastError> {
        // The planted bug: good for a window from whenever it was read.
        let until = Some(until).filter(|_| !self.w().bug(Bug::LateRequestStampedAfresh));
        let answer = self.replica.submit_as(id, until, command).await;
        // Folded, and nobody has been told.
        self.w().may_die(&self.slot, Target::Gateway(self.at)).await;
        match answer {
            Some((_, Ok(reply))) => Ok(reply),
            Some((_, Err(rejection))) => Err(rejection.into()),
            None => Err(unavailable("the outcome is unknown")),
        }
    }

    pub fn metadata(&self, identity: &RevisionIdentity) -> Option<WeightRevisionMetadata> {
        self.replica.read(|state| state.revision(identity).cloned())
    }

    /// Opens an import session somewhere with room. `shared`: the participants, and the run of their coordinator.
    pub async fn begin_import(
        &self,
        mut command: BeginImport,
        shared: Option<(Vec<ParticipantId>, WriterId)>,
        until: LogTime,
    ) -> Result<ImportSession, BallastError> {
        let standing = self.metadata(&command.identity).filter(|found| found.availability != Availability::Deleted);
        command.placement = match standing {
            Some(found) => found.placement,
            None => match self.place(command.unit_count.into()) {
                Ok(placement) => placement,
                Err(error) => {
                    self.make_room(command.unit_count.into()).await;
                    return Err(error);
                }
            },
        };
        let id = self.w().command_id();
        let command = match shared {
            None => Command::BeginImport(command),
            Some((participants, writer_id)) => {
                Command::BeginSharedImport(BeginSharedImport { import: command, participants, writer_id })
            }
        };
        match self.submit(id, until, command).await? {
            Reply::Import(session) => Ok(*session),
            other => Err(BallastError::invalid(format!("not a session: {other:?}"))),
        }
    }

    /// Has AUTO revisions demoted somewhere; the importer asks again later.
    async fn make_room(&self, units: u64) {
        let w = self.w();
        let Some(node) = w.draw(|rng| rng.pick(&w.nodes).cloned()).filter(|node| node.has_cold) else { return };
        let (trigger, bytes, cold_free_bytes) = (MigrationTrigger::Pressure, units * UNIT_BYTES, u64::MAX);
        let round = self.replica.read(|state| state.plan_round(&node.id, trigger, bytes, cold_free_bytes).round);
        let command = RelievePressure { node: node.id.clone(), round, trigger, bytes, cold_free_bytes };
        // Its outcome shows in the memory that is free later.
        drop(self.replica.submit(Command::RelievePressure(command)).await);
    }

    fn place(&self, units: u64) -> Result<Vec<NodeId>, BallastError> {
        let w = self.w();
        let has_room = |node: &&Rc<Node>| {
            node.slot.get().is_some() && node.disks.borrow().memory_used() + units <= node.memory_units
        };
        let mut fit: Vec<NodeId> = w.nodes.iter().filter(has_room).map(|node| node.id.clone()).collect();
        let wanted = if w.draw(|rng| rng.chance(w.plan.two_holders)) { 2 } else { 1 };
        let mut placement = Vec::new();
        while placement.len() < wanted && !fit.is_empty() {
            placement.push(fit.remove(w.draw(|rng| rng.index(fit.len()))));
        }
        match placement.is_empty() {
            true => Err(BallastError::new(ErrorCode::CapacityExhausted, "no node has room")),
            false => Ok(placement),
        }
    }

    /// Publishes an import on the nodes' receipts.
    pub async fn commit_import(
        &self,
        importing: &ImportSession,
        sha256: Digest,
        until: LogTime,
    ) -> Result<WeightRevisionMetadata, BallastError> {
        let ImportSession { identity, session_id, .. } = importing;
        let look = |state: &State| (state.revision(identity).cloned(), state.import(identity).cloned());
        let (record, session) = self.replica.read(look);
        let record =
            record.ok_or_else(|| BallastError::new(ErrorCode::NotFound, format!("{identity} does not exist")))?;
        if let Some(manifest) = &record.manifest {
            return match manifest.sha256 == sha256 && record.availability == Availability::Ready {
                true => Ok(record),
                false => Err(BallastError::new(ErrorCode::Conflict, format!("{identity} was committed otherwise"))),
            };
        }
        if session.is_none_or(|session| session.session_id != *session_id) {
            return Err(BallastError::new(ErrorCode::LeaseExpired, format!("the session of {identity} has ended")));
        }
        let mut receipts = Vec::new();
        for node in &record.placement {
            let receipt = self.receipt(node, &record.instance, session_id, sha256).await?;
            if receipt.manifest.sha256 != sha256 || receipt.node != *node {
                return Err(BallastError::new(ErrorCode::ChecksumMismatch, format!("the receipt of {node} differs")));
            }
            receipts.push(receipt);
        }
        let manifest = receipts.first().map(|receipt| receipt.manifest.clone());
        let manifest = manifest.ok_or_else(|| BallastError::invalid("a placement of no nodes"))?;
        let (identity, session_id, coordinator) = (identity.clone(), session_id.clone(), importing.coordinator());
        let command = Command::CommitImport(CommitImport { identity, session_id, manifest, receipts, coordinator });
        match self.submit(self.w().command_id(), until, command).await? {
            Reply::Revision(revision) => Ok(*revision),
            other => Err(BallastError::invalid(format!("not a revision: {other:?}"))),
        }
    }

    async fn receipt(
        &self,
        node: &NodeId,
        instance: &InstanceId,
        session_id: &SessionId,
        sha256: Digest,
    ) -> Result<Receipt, BallastError> {
        if self.w().bug(Bug::CommitWithoutReceipts) {
            // The importer's word for it.
            let content = self.w().content(&sha256).ok_or_else(|| unavailable("an unknown manifest"))?;
            return Ok(Receipt {
                node: node.clone(),
                incarnation: String::new(),
                instance: instance.clone(),
                session_id: session_id.clone(),
                layout_digest: sha256,
                checksums_digest: sha256,
                manifest: content.manifest.clone(),
            });
        }
        let request = NodeRequest::Receipt { instance: instance.clone(), session_id: session_id.clone() };
        match call_node(&self.replica, node, request).await? {
            NodeReply::Receipt(receipt) => Ok(*receipt),
            other => Err(unavailable(format!("not a receipt: {other:?}"))),
        }
    }

    /// Grants a lease; the record goes with it.
    pub async fn acquire_lease(
        &self,
        command: AcquireLease,
        until: LogTime,
    ) -> Result<(LeaseGrant, WeightRevisionMetadata), BallastError> {
        let identity = command.identity.clone();
        let grant = match self.submit(self.w().command_id(), until, Command::AcquireLease(command)).await? {
            Reply::Lease(grant) => grant.into_inner(),
            other => return Err(BallastError::invalid(format!("not a lease: {other:?}"))),
        };
        let record = self.metadata(&identity).filter(|record| record.instance == grant.instance);
        record.map(|record| (grant, record)).ok_or_else(|| unavailable(format!("{identity} is gone already")))
    }

    /// The newest generation of a lineage that is served now.
    pub fn discover(&self, any: &RevisionIdentity) -> Option<RevisionIdentity> {
        let lineage = any.lineage();
        let found = self.replica.read(|state| {
            if self.w().bug(Bug::WatermarkAsHead) {
                let weight_generation = state.watermark(&lineage);
                return (weight_generation > 0).then(|| any.with_generation(weight_generation));
            }
            let generations = (1..200).map(|weight_generation| any.with_generation(weight_generation));
            let ready = |identity: &RevisionIdentity| {
                state.revision(identity).is_some_and(|record| record.availability == Availability::Ready)
            };
            generations.rev().find(ready)
        });
        if let Some(identity) = &found {
            super::invariants::no_active_head(self.w(), &self.replica, identity);
        }
        found
    }

    /// What the log knows of a node's instances. `None`: this replica can not say.
    pub async fn welcome(&self, held: &[InstanceId], seen: LogPosition) -> Option<(u64, Vec<InstanceStanding>)> {
        let seen = held.iter().map(|instance| instance.position).chain([seen]).max()?.seq;
        let caught_up =
            self.replica.folded.wait_for(|| self.replica.read(|state| state.log_seq() >= seen).then_some(()));
        // The planted bug answers from wherever it stands.
        if !self.w().bug(Bug::UnknownIsDropped) {
            self.w().rt.timeout(CATCH_UP, caught_up).await?;
        }
        Some(
            self.replica.read(|state| {
                (state.log_seq(), held.iter().map(|instance| state.instance_standing(instance)).collect())
            }),
        )
    }

    async fn publish_hints(self: Rc<Self>) {
        let w = Rc::clone(self.w());
        let trusts_the_queue = w.bug(Bug::HintAckedAfterItsWakeUp);
        loop {
            let runnable: Vec<OperationId> =
                self.replica.read(|state| state.runnable_operations().map(|it| it.operation_id.clone()).collect());
            let known: BTreeSet<&OperationId> = runnable.iter().collect();
            self.sent.borrow_mut().retain(|id, _| known.contains(id));
            for id in &runnable {
                let last = self.sent.borrow().get(id).copied();
                let due = last.is_none_or(|at| w.now() >= at + REPEAT_EVERY && !trusts_the_queue);
                if due && !self.replica.link.is_cut(w.now()) {
                    if !w.strikes(w.plan.network.lose, "hint lost") {
                        w.hints.publish(id, w.now());
                    }
                    self.sent.borrow_mut().insert(id.clone(), w.now());
                }
            }
            let seen = self.replica.read(State::log_seq);
            let changed = self.replica.folded.wait_for(|| (self.replica.read(State::log_seq) > seen).then_some(()));
            w.rt.timeout(REPEAT_EVERY / 2, changed).await;
            w.rt.sleep(SETTLE).await;
        }
    }
}

/// One control request to a node, from a gateway or a worker.
pub(crate) async fn call_node(
    replica: &Replica,
    node: &NodeId,
    request: NodeRequest,
) -> Result<NodeReply, BallastError> {
    let w = &replica.w;
    let Some(found) = w.node_named(node) else { return Err(unavailable(format!("{node} does not exist"))) };
    let releases = matches!(request, NodeRequest::ReleaseMemory(_));
    let late = releases && w.strikes(w.plan.network.release_late, "release request late");
    let late_ns = late.then(|| w.draw(|rng| rng.between(5, 50)) * SECOND);
    let patience = Patience { late_ns, ..NODE_CALL };
    let answer = ask(w, &replica.link, &found.slot, patience, move |store| store.control(request.clone())).await;
    match answer {
        Some(NodeReply::Failed(error)) => {
            Err(BallastError { message: format!("node {node}: {}", error.message), ..error })
        }
        Some(reply) => Ok(reply),
        None => Err(unavailable(format!("node {node} does not answer"))),
    }
}

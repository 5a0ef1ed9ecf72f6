//! A world in memory for the machines: a log with its fold, nodes that hold bits instead of bytes and obey fences as the
//! transfer worker does, and workers that drive operations by `next_step`. Every entry and every effect is checked.
#![allow(dead_code, reason = "each test binary uses its own part of the world")]

use std::collections::{BTreeMap, BTreeSet};

use ballast_schemas::*;
use ballast_workflows::{Observation, State, Step, after_failure, check_group, check_step, fold, next_step};

/// What one node holds of one instance.
#[derive(Clone, Debug)]
pub struct Held {
    pub fence: LogPosition,
    pub sealed: bool,
    pub hot: Bitmap,
    /// In memory, handed out or on its way out.
    pub resident: Bitmap,
    pub cold: Bitmap,
}

/// A node.
#[derive(Clone, Debug, Default)]
pub struct FakeNode {
    pub cold_tier: bool,
    pub up: bool,
    pub held: BTreeMap<InstanceId, Held>,
    /// A reader maps everything of these.
    pub mapped: BTreeSet<InstanceId>,
    /// Refuses that many more promotions for want of memory.
    pub memory_full: u32,
    /// Fails that many more effects half way.
    pub disk_errors: u32,
    /// What it was asked, for tests.
    pub asked: Vec<NodeRequest>,
}

/// Protects what existed when a lease was granted, less what the log had given leave to release.
#[derive(Debug)]
struct Protected {
    identity: RevisionIdentity,
    instance: InstanceId,
    replicas: BTreeMap<NodeId, Bitmap>,
}

pub struct World {
    pub state: State,
    pub now_ms: u64,
    pub nodes: BTreeMap<NodeId, FakeNode>,
    pub indexes: BTreeMap<InstanceId, AffinityIndex>,
    /// Every entry so far.
    pub log: Vec<(u64, Envelope)>,
    protected: BTreeMap<LeaseId, Protected>,
    ids: u64,
    pub entries: u64,
}

pub fn identity(resource: &str, generation: u64) -> RevisionIdentity {
    RevisionIdentity::new("default", "ns", resource, "main", generation).unwrap()
}

pub fn policy(preferred: Residency, ppm: u32, mode: MigrationMode) -> WeightStoragePolicy {
    WeightStoragePolicy::new(preferred, HotRatio::from_ppm(ppm).unwrap(), mode).unwrap()
}

fn digest(text: &str) -> Digest {
    Digest::of(text.as_bytes())
}

pub fn node_id(n: usize) -> NodeId {
    NodeId::new(format!("n{n}")).unwrap()
}

impl World {
    pub fn new(nodes: usize, config: ClusterConfig) -> Self {
        let mut world = Self {
            state: State::new(),
            now_ms: 1_800_000_000_000,
            nodes: (0..nodes)
                .map(|n| (node_id(n), FakeNode { cold_tier: true, up: true, ..FakeNode::default() }))
                .collect(),
            indexes: BTreeMap::new(),
            log: Vec::new(),
            protected: BTreeMap::new(),
            ids: 0,
            entries: 0,
        };
        world
            .append(Command::CreateCluster(CreateCluster {
                cluster_id: ClusterId::new("c").unwrap(),
                incarnation: 1,
                config,
                capabilities: Capability::ALL.to_vec(),
            }))
            .unwrap();
        world
    }

    pub fn record(&mut self, command: Command) -> CommandRecord {
        self.ids += 1;
        let id = CommandId::new(format!("c{}", self.ids)).unwrap();
        CommandRecord { id, not_after: self.state.log_clock().plus_ms(COMMAND_WINDOW_MS), command }
    }

    pub fn append(&mut self, command: Command) -> Outcome {
        let record = self.record(command);
        self.append_records(vec![record]).remove(0)
    }

    /// Folds one entry and checks everything that must hold after it.
    pub fn append_records(&mut self, commands: Vec<CommandRecord>) -> Vec<Outcome> {
        self.entries += 1;
        let envelope = Envelope { id: format!("e{}", self.entries), commands };
        let before = self.state.clone();
        let ns = self.now_ms * 1_000_000;
        let applied = fold(&mut self.state, before.log_seq() + 1, ns, &envelope).unwrap();
        self.state.check_invariants().unwrap_or_else(|violation| panic!("{violation}\nafter {envelope:?}"));
        check_step(&before, &self.state).unwrap_or_else(|violation| panic!("{violation}\nafter {envelope:?}"));
        self.log.push((ns, envelope));
        self.protect(&applied.outcomes);
        self.check_nodes();
        applied.outcomes
    }

    pub fn pass(&mut self, ms: u64) {
        let mut left = ms;
        while left > 0 {
            let step = left.min(CLOCK_STEP_MS_MAX);
            self.now_ms += step;
            self.append(Command::Tick).unwrap();
            left -= step;
        }
    }

    /// Remembers what a new lease protects.
    fn protect(&mut self, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let Ok(Reply::Lease(grant)) = outcome else { continue };
            if self.protected.contains_key(&grant.lease_id) {
                continue;
            }
            let operation = self.state.revision(&grant.identity).and_then(|revision| revision.operation_id.as_ref());
            // Which units a release may still take is the machine's knowledge; such a lease protects the rest, and that
            // is checked by the leases that are granted without one.
            if operation.and_then(|id| self.state.operation(id)).is_some_and(|operation| operation.release_outstanding)
            {
                continue;
            }
            let replicas = self
                .nodes
                .iter()
                .filter_map(|(node, fake)| Some((node.clone(), fake.held.get(&grant.instance)?.hot.clone())));
            let protected = Protected {
                identity: grant.identity.clone(),
                instance: grant.instance.clone(),
                replicas: replicas.collect(),
            };
            self.protected.insert(grant.lease_id.clone(), protected);
        }
        let state = &self.state;
        self.protected.retain(|lease, protected| state.lease(&protected.identity, lease).is_some());
    }

    /// Safety invariants 5 and 6 on what the nodes hold.
    pub fn check_nodes(&self) {
        for identity in self.identities() {
            let revision = self.state.revision(&identity).unwrap();
            if revision.availability == Availability::Ready {
                let inventory = self.inventory(&revision.instance);
                let units = self.indexes[&revision.instance].len();
                check_group(&self.state, &identity, &inventory, units)
                    .unwrap_or_else(|violation| panic!("{violation}"));
            }
        }
        self.check_replacements();
        for (lease, protected) in &self.protected {
            for (node, hot) in &protected.replicas {
                let now = self.nodes[node].held.get(&protected.instance);
                for unit in hot.iter() {
                    let kept = now.is_some_and(|held| held.hot.get(unit));
                    assert!(kept, "unit {unit} on {node} was released under lease {lease} of {}", protected.identity);
                }
            }
        }
    }

    /// PUT_FIRST never gives up the base for an unsafe target: where a cold tier exists, every unit of the target has a copy
    /// on disk or two in memory before the base's deletion begins.
    fn check_replacements(&self) {
        for identity in self.identities() {
            let Some(claim) = self.state.claim(&identity.lineage()).filter(|claim| claim.target == identity) else {
                continue;
            };
            if claim.mode != UpsertMode::PutFirst || claim.phase != ClaimPhase::DeletingBase {
                continue;
            }
            let instance = &self.state.revision(&identity).unwrap().instance;
            for unit in 0..self.indexes[instance].len() {
                let holders = || self.nodes.values().filter_map(|fake| Some((fake, fake.held.get(instance)?)));
                let hot = holders().filter(|(_, held)| held.hot.get(unit)).count();
                let cold = holders().any(|(_, held)| held.cold.get(unit));
                let could_be_cold = holders().any(|(fake, held)| fake.cold_tier && held.hot.get(unit));
                assert!(
                    cold || hot >= 2 || !could_be_cold,
                    "the base of {identity} is deleted while unit {unit} is in one memory only"
                );
            }
        }
    }

    pub fn identities(&self) -> Vec<RevisionIdentity> {
        let request = ListRequest {
            namespace: None,
            resource_id: None,
            resource_prefix: None,
            revision: None,
            all: true,
            page_token: String::new(),
            limit: 1000,
        };
        let page = self.state.list(&TenantId::default_tenant(), &request).unwrap();
        page.revisions.into_iter().map(|revision| revision.identity).collect()
    }

    pub fn inventory(&self, instance: &InstanceId) -> GroupInventory {
        let nodes = self.nodes.iter().filter_map(|(node, fake)| Some((node.clone(), fake.inventory(node, instance)?)));
        GroupInventory { nodes: nodes.collect() }
    }

    // What clients do.

    pub fn begin(
        &mut self,
        identity: &RevisionIdentity,
        session: &str,
        units: &[u64],
        policy: Option<WeightStoragePolicy>,
        nodes: &[NodeId],
    ) -> Outcome {
        let outcome = self.append(Command::BeginImport(BeginImport {
            identity: identity.clone(),
            session_id: SessionId::new(session).unwrap(),
            ttl_ms: 15_000,
            policy,
            placement_digest: digest("geometry"),
            placement: nodes.to_vec(),
            logical_bytes: units.iter().sum(),
            unit_count: units.len() as u32,
        }));
        if let Ok(Reply::Import(session)) = &outcome {
            for node in &session.placement {
                let fake = self.nodes.get_mut(node).unwrap();
                fake.held.entry(session.instance.clone()).or_insert(Held {
                    fence: session.instance.position,
                    sealed: false,
                    hot: Bitmap::empty(0),
                    resident: Bitmap::empty(0),
                    cold: Bitmap::empty(0),
                });
            }
            let unit = |(n, bytes): (usize, &u64)| AffinityUnit {
                affinity_id: digest(&format!("unit {n}")),
                extent_bytes: *bytes,
                logical_bytes: *bytes,
                crc64: n as u64,
            };
            let index = AffinityIndex { units: units.iter().enumerate().map(unit).collect() };
            self.indexes.insert(session.instance.clone(), index);
        }
        outcome
    }

    /// Seals on every node of the placement and commits.
    pub fn commit(&mut self, identity: &RevisionIdentity) -> Outcome {
        let Some(session) = self.state.import(identity).cloned() else {
            return Err(Rejection::new(ErrorCode::NotFound, "no session"));
        };
        let index = &self.indexes[&session.instance];
        let manifest = ManifestRef {
            key: identity.manifest_key(),
            sha256: digest(&session.instance.to_string()),
            group_id: identity.group_id(),
            payload_keys_sha256: digest("keys"),
            payload_count: index.len().into(),
            logical_bytes: index.logical_bytes(),
            affinity_count: index.len(),
            affinity_digest: digest("affinity"),
        };
        let mut receipts = Vec::new();
        for node in &session.placement {
            let fake = self.nodes.get_mut(node).unwrap();
            let Some(held) = fake.held.get_mut(&session.instance) else { continue };
            if !held.sealed {
                held.sealed = true;
                held.hot = Bitmap::full(index.len());
                held.resident = Bitmap::full(index.len());
                held.cold = Bitmap::empty(index.len());
            }
            receipts.push(Receipt {
                node: node.clone(),
                incarnation: "i".into(),
                instance: session.instance.clone(),
                session_id: session.session_id.clone(),
                layout_digest: digest("layout"),
                checksums_digest: digest("checksums"),
                manifest: manifest.clone(),
            });
        }
        self.append(Command::CommitImport(CommitImport {
            identity: identity.clone(),
            session_id: session.session_id,
            manifest,
            receipts,
        }))
    }

    pub fn put(
        &mut self,
        identity: &RevisionIdentity,
        units: &[u64],
        policy: WeightStoragePolicy,
    ) -> WeightRevisionMetadata {
        let nodes = [node_id(0)];
        self.begin(identity, &format!("s{}", self.entries), units, Some(policy), &nodes).unwrap();
        self.commit(identity).unwrap();
        self.state.revision(identity).unwrap().clone()
    }

    pub fn migrate(&mut self, identity: &RevisionIdentity, target: Residency) -> OperationId {
        let expected_metadata_generation = self.state.revision(identity).unwrap().metadata_generation;
        let outcome = self.append(Command::StartMigration(StartMigration {
            identity: identity.clone(),
            target,
            target_hot_ratio: None,
            expected_metadata_generation,
            trigger: MigrationTrigger::Explicit,
        }));
        match outcome {
            Ok(Reply::Operation(operation)) => operation.operation_id,
            other => panic!("{other:?}"),
        }
    }

    pub fn acquire(&mut self, identity: &RevisionIdentity, lease: &str, ttl_ms: u64) -> Outcome {
        self.append(Command::AcquireLease(AcquireLease {
            identity: identity.clone(),
            lease_id: LeaseId::new(lease).unwrap(),
            holder: "reader".into(),
            ttl_ms,
        }))
    }

    pub fn release(&mut self, identity: &RevisionIdentity, lease: &str) -> Outcome {
        self.append(Command::ReleaseLease(ReleaseLease {
            identity: identity.clone(),
            lease_id: LeaseId::new(lease).unwrap(),
        }))
    }

    pub fn remove(&mut self, identity: &RevisionIdentity) -> Outcome {
        let expected_metadata_generation =
            self.state.revision(identity).map_or(1, |revision| revision.metadata_generation);
        self.append(Command::Remove(Remove { identity: identity.clone(), expected_metadata_generation }))
    }

    pub fn replace(
        &mut self,
        base: &RevisionIdentity,
        target: &RevisionIdentity,
        mode: UpsertMode,
        request: &str,
    ) -> Outcome {
        let expected_metadata_generation = self.state.revision(base).map_or(1, |revision| revision.metadata_generation);
        self.append(Command::BeginReplacement(BeginReplacement {
            base: base.clone(),
            target: target.clone(),
            mode,
            expected_metadata_generation,
            request_id: request.into(),
            policy: None,
        }))
    }

    /// The revision's active operation.
    pub fn active(&self, identity: &RevisionIdentity) -> Option<OperationId> {
        self.state.revision(identity)?.operation_id.clone()
    }

    /// The active operation of the revision that a request is about.
    pub fn active_on(&self, sent: Option<&InFlight>) -> Option<OperationId> {
        let Some(InFlight::Request(_, NodeRequest::ReleaseMemory(effect))) = sent else { return None };
        let current = |identity: &RevisionIdentity| {
            self.state.revision(identity).is_some_and(|found| found.instance == effect.instance)
        };
        self.active(&self.identities().into_iter().find(current)?)
    }

    pub fn operation(&self, id: &OperationId) -> WeightOperation {
        self.state.operation(id).unwrap().clone()
    }

    /// Sends a request to a node as its own network would.
    pub fn ask(&mut self, node: &NodeId, request: &NodeRequest) -> NodeReply {
        let indexes = &self.indexes;
        let reply = match self.nodes.get_mut(node) {
            Some(fake) if fake.up => fake.answer(node, indexes, request),
            _ => NodeReply::Failed(BallastError::new(ErrorCode::Unavailable, format!("node {node} does not answer"))),
        };
        self.check_nodes();
        reply
    }
}

impl FakeNode {
    fn inventory(&self, node: &NodeId, instance: &InstanceId) -> Option<NodeInventory> {
        let held = self.held.get(instance)?;
        Some(NodeInventory {
            node: node.clone(),
            incarnation: "i".into(),
            instance: instance.clone(),
            fence: held.fence,
            sealed: held.sealed,
            manifest: held.sealed,
            hot: held.hot.clone(),
            cold: held.cold.clone(),
        })
    }

    fn answer(
        &mut self,
        node: &NodeId,
        indexes: &BTreeMap<InstanceId, AffinityIndex>,
        request: &NodeRequest,
    ) -> NodeReply {
        self.asked.push(request.clone());
        let refuse = |code, text: &str| NodeReply::Failed(BallastError::new(code, text));
        let (instance, fence) = match request {
            NodeRequest::Inventory { instance } => (instance, None),
            NodeRequest::AffinityIndex { instance } => {
                return match (self.held.get(instance).filter(|held| held.sealed), indexes.get(instance)) {
                    (Some(_), Some(index)) => NodeReply::AffinityIndex(Box::new(index.clone())),
                    _ => refuse(ErrorCode::NotReady, "not sealed"),
                };
            }
            NodeRequest::RaiseFence { instance, fence } | NodeRequest::DeleteInstance { instance, fence } => {
                (instance, Some(*fence))
            }
            NodeRequest::CopyToCold(effect)
            | NodeRequest::CopyToMemory(effect)
            | NodeRequest::ReleaseMemory(effect)
            | NodeRequest::DeleteUnits(effect)
            | NodeRequest::Verify(effect) => (&effect.instance, Some(effect.fence)),
            NodeRequest::Receipt { .. } => return refuse(ErrorCode::InvalidArgument, "not asked in this world"),
        };
        let Some(held) = self.held.get_mut(instance) else { return NodeReply::Absent };
        if let Some(fence) = fence {
            if fence < held.fence {
                return refuse(ErrorCode::Conflict, "an older fence");
            }
            held.fence = fence;
        }
        let half_way = |errors: &mut u32, units: Vec<u32>| -> (Vec<u32>, bool) {
            if *errors > 0 && units.len() > 1 {
                *errors -= 1;
                let half = units.len() / 2;
                return (units[..half].to_vec(), true);
            }
            (units, false)
        };
        let units_of = |effect: &UnitEffect| effect.units.iter().flat_map(|range| range.iter()).collect::<Vec<u32>>();
        match request {
            NodeRequest::CopyToCold(effect) => {
                if !self.cold_tier {
                    return refuse(ErrorCode::PolicyUnsatisfiable, "no cold tier");
                }
                let (units, fails) = half_way(&mut self.disk_errors, units_of(effect));
                for unit in units {
                    if !held.cold.get(unit) && !held.hot.get(unit) {
                        return refuse(ErrorCode::Unavailable, "not here");
                    }
                    held.cold.set(unit, true);
                }
                if fails {
                    return refuse(ErrorCode::DurabilityFailed, "i/o error");
                }
            }
            NodeRequest::CopyToMemory(effect) => {
                if self.memory_full > 0 {
                    self.memory_full -= 1;
                    return refuse(ErrorCode::CapacityExhausted, "memory is full");
                }
                let (units, fails) = half_way(&mut self.disk_errors, units_of(effect));
                for unit in units {
                    if !held.cold.get(unit) && !held.resident.get(unit) {
                        return refuse(ErrorCode::Unavailable, "not here");
                    }
                    held.hot.set(unit, true);
                    held.resident.set(unit, true);
                }
                if fails {
                    return refuse(ErrorCode::DurabilityFailed, "i/o error");
                }
            }
            NodeRequest::ReleaseMemory(effect) => {
                let units = units_of(effect);
                if units.iter().any(|unit| held.resident.get(*unit) && !held.cold.get(*unit)) {
                    return refuse(ErrorCode::Conflict, "no witness");
                }
                units.iter().for_each(|unit| held.hot.set(*unit, false));
                if self.mapped.contains(instance) {
                    return refuse(ErrorCode::Busy, "a reader maps it");
                }
                units.iter().for_each(|unit| held.resident.set(*unit, false));
            }
            NodeRequest::DeleteUnits(effect) => {
                for unit in units_of(effect) {
                    held.hot.set(unit, false);
                    held.resident.set(unit, false);
                    held.cold.set(unit, false);
                }
            }
            NodeRequest::DeleteInstance { .. } => {
                self.held.remove(instance);
                return NodeReply::Absent;
            }
            _ => {}
        }
        match self.inventory(node, instance) {
            Some(inventory) => NodeReply::Inventory(Box::new(inventory)),
            None => NodeReply::Absent,
        }
    }
}

/// What can go wrong around one step of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mishap {
    #[default]
    None,
    /// The worker forgets everything.
    Crash,
    /// The step happens, its answer is lost.
    LostReply,
    /// The step happens twice.
    Twice,
    /// The step happens, and once more much later.
    Echo,
    /// The step happens much later; the worker takes it for failed.
    Late,
}

/// Something on its way that arrives late.
#[derive(Clone, Debug)]
pub enum InFlight {
    Request(NodeId, NodeRequest),
    Command(Box<CommandRecord>),
}

#[derive(Debug)]
struct Job {
    operation: OperationId,
    epoch: u64,
    seen: Option<Observation>,
    last: Option<Step>,
}

/// A workflow worker.
#[derive(Debug)]
pub struct Worker {
    pub id: WorkerId,
    job: Option<Job>,
}

impl Worker {
    pub fn new(name: &str) -> Self {
        Self { id: WorkerId::new(name).unwrap(), job: None }
    }

    pub fn is_idle(&self) -> bool {
        self.job.is_none()
    }

    pub fn forget(&mut self) {
        self.job = None;
    }

    /// What it is at.
    pub fn operation(&self) -> Option<&OperationId> {
        self.job.as_ref().map(|job| &job.operation)
    }

    pub fn claim(&mut self, world: &mut World, operation: &OperationId) -> bool {
        let command = ClaimOperation { operation_id: operation.clone(), worker: self.id.clone(), ttl_ms: CLAIM_TTL_MS };
        match world.append(Command::ClaimOperation(command)) {
            Ok(Reply::Operation(claimed)) => {
                self.job = Some(Job { operation: operation.clone(), epoch: claimed.epoch, seen: None, last: None });
                true
            }
            _ => false,
        }
    }

    /// One step of its operation, or of a runnable one. `false` when there is nothing to do.
    pub fn step(&mut self, world: &mut World, mishap: Mishap) -> Option<InFlight> {
        if mishap == Mishap::Crash {
            self.job = None;
            return None;
        }
        let job = self.job.as_mut()?;
        let step = next_step(&world.state, job.seen.as_ref(), &job.operation, job.epoch);
        let stuck = job.last.as_ref() == Some(&step);
        job.last = Some(step.clone());
        if stuck {
            let error =
                BallastError::new(ErrorCode::DurabilityFailed, format!("asked for twice without effect: {step:?}"));
            self.fail(world, None, &error);
            return None;
        }
        match step {
            Step::Done => self.job = None,
            Step::NeedIndex { instance } => match observe(world, &instance) {
                Ok(seen) => job.seen = Some(seen),
                Err(error) => self.fail(world, None, &error),
            },
            Step::Effect { node, request } => {
                if mishap == Mishap::Late {
                    let error = BallastError::new(ErrorCode::Unavailable, "no answer");
                    self.fail(world, Some(&request), &error);
                    return Some(InFlight::Request(node, request));
                }
                let mut reply = world.ask(&node, &request);
                if mishap == Mishap::Twice {
                    reply = world.ask(&node, &request);
                }
                let echo = (mishap == Mishap::Echo).then(|| InFlight::Request(node.clone(), request.clone()));
                if mishap == Mishap::LostReply {
                    reply = NodeReply::Failed(BallastError::new(ErrorCode::Unavailable, "no answer"));
                }
                match &reply {
                    NodeReply::Failed(error) => self.fail(world, Some(&request), error),
                    reply => {
                        if let Some(seen) = &mut job.seen {
                            seen.answered(&node, reply);
                        }
                    }
                }
                return echo;
            }
            Step::Append(command) => {
                let record = world.record(command);
                match mishap {
                    Mishap::Late => return Some(InFlight::Command(Box::new(record))),
                    Mishap::Twice => {
                        // The same command once more under another id, as a worker that lost the answer would.
                        world.append_records(vec![record.clone()]);
                        let _ = world.append(record.command);
                    }
                    Mishap::Echo => {
                        let again = CommandRecord {
                            id: CommandId::new(format!("{}-again", record.id)).unwrap(),
                            ..record.clone()
                        };
                        world.append_records(vec![record]);
                        return Some(InFlight::Command(Box::new(again)));
                    }
                    _ => drop(world.append_records(vec![record])),
                }
            }
        }
        None
    }

    fn fail(&mut self, world: &mut World, request: Option<&NodeRequest>, error: &BallastError) {
        let Some(job) = self.job.take() else { return };
        let operation = world.operation(&job.operation);
        let command = after_failure(&operation, job.epoch, request, error);
        // Refused when the claim is lost, and then there is nothing to report.
        let _ = world.append(command);
    }
}

fn observe(world: &mut World, instance: &InstanceId) -> Result<Observation, BallastError> {
    let nodes: Vec<NodeId> = world.nodes.keys().cloned().collect();
    let mut inventory = GroupInventory::default();
    let mut index = None;
    for node in nodes {
        match world.ask(&node, &NodeRequest::Inventory { instance: instance.clone() }) {
            NodeReply::Inventory(found) => {
                inventory.nodes.insert(node.clone(), *found);
                if let NodeReply::AffinityIndex(found) =
                    world.ask(&node, &NodeRequest::AffinityIndex { instance: instance.clone() })
                {
                    index = Some(*found);
                }
            }
            NodeReply::Failed(error) => return Err(error),
            _ => {}
        }
    }
    let cold_nodes = world.nodes.iter().filter(|(_, fake)| fake.cold_tier).map(|(node, _)| node.clone()).collect();
    Ok(Observation::new(instance.clone(), inventory, index, cold_nodes))
}

/// Lets one worker drive everything that is runnable, letting time pass when nothing is, until nothing changes any more.
pub fn settle(world: &mut World, worker: &mut Worker) {
    let mut quiet = 0;
    for _ in 0..200_000 {
        if worker.is_idle() {
            let next = world.state.runnable_operations().next().map(|operation| operation.operation_id.clone());
            match next {
                Some(operation) => {
                    quiet = 0;
                    worker.claim(world, &operation);
                }
                // Back-offs and park timers are at most half a minute.
                None if quiet < 40 => {
                    quiet += 1;
                    world.pass(1_000);
                }
                None => return,
            }
        } else {
            worker.step(world, Mishap::None);
        }
    }
    panic!("never settles: {:?}", world.state.operations(&TenantId::default_tenant(), false, 10));
}

//! A world in memory for the machines: a log with its fold, nodes that hold bits instead of bytes and obey fences as the
//! transfer worker does, and workers that drive operations by `next_step`. Every entry and every effect is checked.
#![allow(dead_code, unused_imports, reason = "each test binary uses its own part of the world")]

mod node;
mod worker;

use std::collections::BTreeMap;

use ballast_schemas::*;
use ballast_workflows::{State, check_group, check_step, fold};

pub use node::{FakeNode, Held};
pub use worker::{InFlight, Mishap, Worker, settle};

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
        let (envelope, _) = Envelope::seal(format!("e{}", self.entries), commands).unwrap();
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
            coordinator: None,
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
            Ok(Reply::Operation(operation)) => operation.operation_id.clone(),
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

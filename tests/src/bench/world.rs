//! What the benchmarks fold and send: a cluster with published revisions, and the commands that a busy site sends about them.

use ballast_schemas::*;
use ballast_workflows::{Applied, State, fold};
use uuid::Builder;

use super::Error;

/// Any moment will do; the log only measures what lies between two.
const START_UNIX_NS: u64 = 1_800_000_000_000_000_000;
/// Of one revision.
pub(super) const MODEL_BYTES: u64 = 64 << 20;
/// What a command leaves behind against its repeats is remembered for so long.
const REMEMBERED_MS: u64 = 2 * COMMAND_WINDOW_MS;
/// Commands of one envelope while the world is built: a commit with its receipt has some 1,400 bytes.
const BUILD_COMMANDS: usize = 100;

/// A log without a server: whatever is appended is folded at once.
pub(super) struct World {
    pub state: State,
    unix_ns: u64,
    ids: u64,
}

/// An entry as it stands in the log.
pub(super) struct Entry {
    pub seq: u64,
    pub unix_ns: u64,
    pub envelope: Envelope,
    /// As the log stores it.
    pub bytes: Vec<u8>,
}

pub(super) fn create() -> CreateCluster {
    CreateCluster {
        cluster_id: name("bench-cluster"),
        incarnation: 1,
        config: ClusterConfig::default(),
        capabilities: Capability::ALL.to_vec(),
    }
}

/// A name that is short and plain enough to be one.
pub(super) fn name<N: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> N {
    text.parse().expect("a name of the benchmark is visible ASCII")
}

pub(super) fn identity(n: usize) -> RevisionIdentity {
    RevisionIdentity::new("default", "models", &format!("llm-{n:07}"), "main", 1).expect("a plain identity")
}

/// As ids of the client and the replica look.
pub(super) fn uuid_of(n: u64) -> String {
    // Spread over the whole range, as random ids are.
    let high = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let low = high.rotate_left(31).wrapping_mul(0xd134_2543_de82_ef95);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&high.to_be_bytes());
    bytes[8..].copy_from_slice(&low.to_be_bytes());
    Builder::from_random_bytes(bytes).into_uuid().to_string()
}

pub(super) fn policy(migration_mode: MigrationMode) -> WeightStoragePolicy {
    WeightStoragePolicy { preferred_residency: Residency::Hot, migration_mode, ..WeightStoragePolicy::default() }
}

/// Opens the import of a revision in 300 units.
pub(super) fn begin(identity: &RevisionIdentity, node: &NodeId, mode: MigrationMode) -> Command {
    Command::BeginImport(BeginImport {
        identity: identity.clone(),
        session_id: name("session-1"),
        ttl_ms: IMPORT_TTL_MS_MAX,
        policy: Some(policy(mode)),
        placement_digest: Digest::of(b"geometry"),
        placement: vec![node.clone()],
        logical_bytes: MODEL_BYTES,
        unit_count: 300,
    })
}

/// Publishes it.
pub(super) fn commit(identity: &RevisionIdentity, instance: &InstanceId, node: &NodeId) -> Command {
    let manifest = ManifestRef {
        key: identity.manifest_key(),
        sha256: Digest::of(identity.resource_id.as_str().as_bytes()),
        group_id: identity.group_id(),
        payload_keys_sha256: Digest::of(b"keys"),
        payload_count: 300,
        logical_bytes: MODEL_BYTES,
        affinity_count: 300,
        affinity_digest: Digest::of(b"affinity"),
    };
    let receipt = Receipt {
        node: node.clone(),
        incarnation: "first".into(),
        instance: instance.clone(),
        session_id: name("session-1"),
        layout_digest: Digest::of(b"layout"),
        checksums_digest: Digest::of(b"checksums"),
        manifest: manifest.clone(),
    };
    let (identity, session_id) = (identity.clone(), name("session-1"));
    Command::CommitImport(CommitImport { identity, session_id, manifest, receipts: vec![receipt], coordinator: None })
}

pub(super) fn acquire(identity: &RevisionIdentity, lease_id: &str) -> Command {
    let (identity, lease_id) = (identity.clone(), name(lease_id));
    Command::AcquireLease(AcquireLease { identity, lease_id, holder: "serving-7".into(), ttl_ms: LEASE_TTL_MS_DEFAULT })
}

pub(super) fn renew(identity: &RevisionIdentity, lease_id: &str) -> Command {
    let (identity, lease_id) = (identity.clone(), name(lease_id));
    Command::RenewLease(RenewLease { identity, lease_id, ttl_ms: LEASE_TTL_MS_DEFAULT })
}

pub(super) fn release(identity: &RevisionIdentity, lease_id: &str) -> Command {
    let (identity, lease_id) = (identity.clone(), name(lease_id));
    Command::ReleaseLease(ReleaseLease { identity, lease_id })
}

/// One command of a lease's life, by its number: granted, renewed twice, released.
pub(super) fn of_a_lease(identity: &RevisionIdentity, lease_id: &str, n: usize) -> Command {
    match n % LEASE_LIFE {
        0 => acquire(identity, lease_id),
        3 => release(identity, lease_id),
        _ => renew(identity, lease_id),
    }
}

/// Commands of one lease.
pub(super) const LEASE_LIFE: usize = 4;
/// Commands of one operation: started, claimed, three steps, finished.
pub(super) const OPERATION_LIFE: usize = 6;

/// Where an operation moves a revision next.
pub(super) fn next_target(metadata: &WeightRevisionMetadata) -> Residency {
    if metadata.residency == Residency::Cold { Residency::Hot } else { Residency::Cold }
}

pub(super) fn start(identity: &RevisionIdentity, target: Residency, expected: u64) -> Command {
    Command::StartMigration(StartMigration {
        identity: identity.clone(),
        target,
        target_hot_ratio: None,
        expected_metadata_generation: expected,
        trigger: MigrationTrigger::Explicit,
    })
}

/// What the worker says next of an operation: the claim, three steps that have nothing to do, the end.
pub(super) fn of_an_operation(operation: &WeightOperation, node: &NodeId) -> Command {
    let (operation_id, epoch) = (operation.operation_id.clone(), operation.epoch);
    if operation.status == OperationStatus::Runnable {
        return Command::ClaimOperation(ClaimOperation {
            operation_id,
            worker: name("worker-1"),
            ttl_ms: CLAIM_TTL_MS,
        });
    }
    let target = operation.target.unwrap_or(Residency::Hot);
    let observed_hot_ppm = if target == Residency::Hot { 1_000_000 } else { 0 };
    if operation.cursor < 3 {
        let done = operation.cursor + 1;
        return Command::OperationAdvanced(OperationAdvanced {
            operation_id,
            epoch,
            from_cursor: operation.cursor,
            to_cursor: done,
            processed_units: done * 100,
            total_units: 300,
            processed_bytes: done * (MODEL_BYTES / 3),
            total_bytes: MODEL_BYTES,
            observed_hot_ppm,
            released: false,
        });
    }
    let evidence = vec![NodeEvidence { node: node.clone(), incarnation: "first".into(), fence: operation.fence }];
    let (residency, note) = (target, None);
    Command::OperationFinished(OperationFinished { operation_id, epoch, residency, observed_hot_ppm, evidence, note })
}

pub(super) fn node(n: usize) -> NodeId {
    name(&format!("node-{n:02}"))
}

impl World {
    /// A new cluster with `revisions` published ones of `mode`, spread over `nodes` nodes.
    pub fn with(revisions: usize, nodes: usize, mode: MigrationMode) -> Result<Self, Error> {
        let (mut world, _) = Self::new()?;
        world.publish(revisions, nodes, mode, drop)?;
        Ok(world)
    }

    /// A new cluster, and its log's first entry.
    pub fn new() -> Result<(Self, Entry), Error> {
        let mut world = Self { state: State::new(), unix_ns: START_UNIX_NS, ids: 0 };
        let (first, _) = world.append(1, vec![Command::CreateCluster(create())])?;
        Ok((world, first))
    }

    /// Publishes `revisions` revisions of `mode`, spread over `nodes` nodes; `keep` gets the entries that did.
    pub fn publish(
        &mut self,
        revisions: usize,
        nodes: usize,
        mode: MigrationMode,
        mut keep: impl FnMut(Entry),
    ) -> Result<(), Error> {
        for first in (0..revisions).step_by(BUILD_COMMANDS) {
            let batch: Vec<(RevisionIdentity, NodeId)> =
                (first..revisions.min(first + BUILD_COMMANDS)).map(|n| (identity(n), node(n % nodes))).collect();
            // Far enough apart that what is remembered of the imports is forgotten as it would be.
            let begun = batch.iter().map(|(identity, node)| begin(identity, node, mode)).collect();
            keep(self.append(1_000, begun)?.0);
            let instances = batch.iter().filter_map(|(identity, _)| self.state.revision(identity));
            let committed =
                instances.zip(&batch).map(|(found, (identity, node))| commit(identity, &found.instance, node));
            let committed = committed.collect();
            keep(self.append(1_000, committed)?.0);
        }
        Ok(())
    }

    /// Lets the log clock pass until what is remembered against repeats is forgotten; the entries that did.
    pub fn come_to_rest(&mut self) -> Result<Vec<Entry>, Error> {
        let ticks = 2 * REMEMBERED_MS / CLOCK_STEP_MS_MAX;
        (0..ticks).map(|_| Ok(self.append(CLOCK_STEP_MS_MAX, vec![Command::Tick])?.0)).collect()
    }

    /// Folds an envelope stored `after_ms` after the last one; every command must be accepted.
    pub fn append(&mut self, after_ms: u64, commands: Vec<Command>) -> Result<(Entry, Applied), Error> {
        self.unix_ns += after_ms * 1_000_000;
        let not_after = self.state.log_clock().plus_ms(COMMAND_WINDOW_MS);
        let records = commands.into_iter().map(|command| {
            self.ids += 1;
            // As `fresh_command_id` makes them: ordered by time.
            let id = name(&format!("{:08x}-{:04x}-7000-8000-{:012x}", self.ids >> 16, self.ids & 0xffff, self.ids));
            CommandRecord { id, not_after, command }
        });
        let (envelope, bytes) = Envelope::seal(uuid_of(self.state.log_seq()), records.collect())?;
        let (seq, unix_ns) = (self.state.log_seq() + 1, self.unix_ns);
        let applied = fold(&mut self.state, seq, unix_ns, &envelope)?;
        if let Some(rejection) = applied.outcomes.iter().find_map(|outcome| outcome.as_ref().err()) {
            return Err(
                format!("a command of the benchmark was refused: {}: {}", rejection.code, rejection.message).into()
            );
        }
        Ok((Entry { seq, unix_ns, envelope, bytes }, applied))
    }
}

//! A log in memory for unit tests: every entry is folded, and every invariant is checked after it.

use ballast_schemas::*;

use crate::state::State;
use crate::{Applied, check_step, fold};

pub(crate) struct Log {
    pub state: State,
    pub now_ms: u64,
    ids: u64,
}

pub(crate) const START_MS: u64 = 1_800_000_000_000;

pub(crate) fn identity(generation: u64) -> RevisionIdentity {
    RevisionIdentity::new("default", "ns", "model", "main", generation).unwrap()
}

pub(crate) fn policy(preferred: Residency, mode: MigrationMode) -> WeightStoragePolicy {
    WeightStoragePolicy::new(preferred, HotRatio::HALF, mode).unwrap()
}

pub(crate) fn hot() -> WeightStoragePolicy {
    policy(Residency::Hot, MigrationMode::Manual)
}

pub(crate) fn session(text: &str) -> SessionId {
    SessionId::new(text).unwrap()
}

pub(crate) fn lease(text: &str) -> LeaseId {
    LeaseId::new(text).unwrap()
}

pub(crate) fn node() -> NodeId {
    NodeId::new("n1").unwrap()
}

pub(crate) fn worker(text: &str) -> WorkerId {
    WorkerId::new(text).unwrap()
}

pub(crate) fn create() -> Command {
    Command::CreateCluster(CreateCluster {
        cluster_id: ClusterId::new("c1").unwrap(),
        incarnation: 1,
        config: ClusterConfig::default(),
        capabilities: Capability::ALL.to_vec(),
    })
}

pub(crate) fn begin(generation: u64, policy: WeightStoragePolicy) -> BeginImport {
    BeginImport {
        identity: identity(generation),
        session_id: session(&format!("s{generation}")),
        ttl_ms: 15_000,
        policy: Some(policy),
        placement_digest: Digest::of(b"geometry"),
        placement: vec![node()],
        logical_bytes: 400,
        unit_count: 4,
    }
}

pub(crate) fn manifest(generation: u64) -> ManifestRef {
    ManifestRef {
        key: identity(generation).manifest_key(),
        sha256: Digest::of(format!("manifest {generation}").as_bytes()),
        group_id: identity(generation).group_id(),
        payload_keys_sha256: Digest::of(b"keys"),
        payload_count: 4,
        logical_bytes: 400,
        affinity_count: 4,
        affinity_digest: Digest::of(b"affinity"),
    }
}

pub(crate) fn commit(session: &ImportSession, manifest: ManifestRef) -> CommitImport {
    let receipt = |node: &NodeId| Receipt {
        node: node.clone(),
        incarnation: "i1".into(),
        instance: session.instance.clone(),
        session_id: session.session_id.clone(),
        layout_digest: Digest::of(b"layout"),
        checksums_digest: Digest::of(b"checksums"),
        manifest: manifest.clone(),
    };
    CommitImport {
        identity: session.identity.clone(),
        session_id: session.session_id.clone(),
        receipts: session.placement.iter().map(receipt).collect(),
        manifest,
        coordinator: session.coordinator(),
    }
}

pub(crate) fn acquire(generation: u64, id: &str, ttl_ms: u64) -> Command {
    Command::AcquireLease(AcquireLease {
        identity: identity(generation),
        lease_id: lease(id),
        holder: "reader".into(),
        ttl_ms,
    })
}

pub(crate) fn release(generation: u64, id: &str) -> Command {
    Command::ReleaseLease(ReleaseLease { identity: identity(generation), lease_id: lease(id) })
}

pub(crate) fn renew(generation: u64, id: &str, ttl_ms: u64) -> Command {
    Command::RenewLease(RenewLease { identity: identity(generation), lease_id: lease(id), ttl_ms })
}

pub(crate) fn migrate(generation: u64, target: Residency, expected: u64) -> Command {
    Command::StartMigration(StartMigration {
        identity: identity(generation),
        target,
        target_hot_ratio: None,
        expected_metadata_generation: expected,
        trigger: MigrationTrigger::Explicit,
    })
}

pub(crate) fn remove(generation: u64, expected: u64) -> Command {
    Command::Remove(Remove { identity: identity(generation), expected_metadata_generation: expected })
}

pub(crate) fn replace(base: u64, target: u64, mode: UpsertMode, expected: u64, request_id: &str) -> Command {
    Command::BeginReplacement(BeginReplacement {
        base: identity(base),
        target: identity(target),
        mode,
        expected_metadata_generation: expected,
        request_id: request_id.into(),
        policy: Some(hot()),
    })
}

pub(crate) fn claim(operation_id: &OperationId, worker_name: &str) -> Command {
    Command::ClaimOperation(ClaimOperation {
        operation_id: operation_id.clone(),
        worker: worker(worker_name),
        ttl_ms: CLAIM_TTL_MS,
    })
}

pub(crate) fn step(operation: &WeightOperation, to_cursor: u64, released: bool) -> Command {
    Command::OperationAdvanced(OperationAdvanced {
        operation_id: operation.operation_id.clone(),
        epoch: operation.epoch,
        from_cursor: operation.cursor,
        to_cursor,
        processed_units: to_cursor,
        total_units: 4,
        processed_bytes: to_cursor * 100,
        total_bytes: 400,
        observed_hot_ppm: 500_000,
        released,
    })
}

pub(crate) fn leave(operation: &WeightOperation, unit_count: u32) -> Command {
    Command::AuthorizeRelease(AuthorizeRelease {
        operation_id: operation.operation_id.clone(),
        epoch: operation.epoch,
        cursor: operation.cursor,
        unit_count,
    })
}

pub(crate) fn attempt_failed(operation: &WeightOperation, permanent: bool) -> Command {
    Command::OperationAttemptFailed(OperationAttemptFailed {
        operation_id: operation.operation_id.clone(),
        epoch: operation.epoch,
        error: OperationError { code: ErrorCode::DurabilityFailed, message: "disk full".into() },
        permanent,
    })
}

pub(crate) fn park(operation: &WeightOperation, reason: ParkReason, wake_after_ms: Option<u64>) -> Command {
    Command::ParkOperation(ParkOperation {
        operation_id: operation.operation_id.clone(),
        epoch: operation.epoch,
        reason,
        wake_after_ms,
    })
}

pub(crate) fn evidence(fence: LogPosition) -> Vec<NodeEvidence> {
    vec![NodeEvidence { node: node(), incarnation: "i1".into(), fence }]
}

impl Log {
    /// An empty cluster with every family confirmed.
    pub fn new() -> Self {
        let mut log = Self { state: State::new(), now_ms: START_MS, ids: 0 };
        log.entry(vec![create()]);
        log
    }

    pub fn record(&mut self, command: Command) -> CommandRecord {
        self.ids += 1;
        CommandRecord {
            id: CommandId::new(format!("cmd-{}", self.ids)).unwrap(),
            not_after: self.state.log_clock().plus_ms(COMMAND_WINDOW_MS),
            command,
        }
    }

    /// Folds records as one entry and checks everything after it.
    pub fn fold(&mut self, commands: Vec<CommandRecord>) -> Applied {
        let (envelope, _) = Envelope::seal(format!("e{}", self.state.log_seq()), commands).unwrap();
        let before = self.state.clone();
        let applied = fold(&mut self.state, before.log_seq() + 1, self.now_ms * 1_000_000, &envelope).unwrap();
        self.state.check_invariants().unwrap_or_else(|violation| panic!("{violation} after {envelope:?}"));
        check_step(&before, &self.state).unwrap_or_else(|violation| panic!("{violation} after {envelope:?}"));
        assert_eq!(applied.outcomes.len(), envelope.commands().len());
        applied
    }

    pub fn entry(&mut self, commands: Vec<Command>) -> Applied {
        let records = commands.into_iter().map(|command| self.record(command)).collect();
        self.fold(records)
    }

    /// One command in an entry of its own.
    pub fn send(&mut self, command: Command) -> Outcome {
        self.entry(vec![command]).outcomes.remove(0)
    }

    /// A command that must be accepted; its events by name.
    pub fn events(&mut self, command: Command) -> Vec<&'static str> {
        let applied = self.entry(vec![command]);
        assert!(applied.outcomes[0].is_ok(), "{:?}", applied.outcomes[0]);
        applied.events.iter().map(|event| event.body.name()).collect()
    }

    pub fn refused(&mut self, command: Command) -> Rejection {
        self.send(command.clone()).expect_err(&format!("{command:?} was accepted"))
    }

    pub fn code(&mut self, command: Command) -> ErrorCode {
        self.refused(command).code
    }

    /// Lets log time pass; the events by name.
    pub fn pass(&mut self, mut ms: u64) -> Vec<&'static str> {
        let mut events = Vec::new();
        while ms > 0 {
            let step = ms.min(CLOCK_STEP_MS_MAX);
            self.now_ms += step;
            events.extend(self.entry(vec![Command::Tick]).events.iter().map(|event| event.body.name()));
            ms -= step;
        }
        events
    }

    pub fn import(&mut self, command: BeginImport) -> ImportSession {
        match self.send(Command::BeginImport(command)) {
            Ok(Reply::Import(session)) => *session,
            other => panic!("not a session: {other:?}"),
        }
    }

    pub fn accept_revision(&mut self, command: Command) -> WeightRevisionMetadata {
        match self.send(command) {
            Ok(Reply::Revision(revision)) => *revision,
            other => panic!("not a revision: {other:?}"),
        }
    }

    pub fn accept_operation(&mut self, command: Command) -> WeightOperation {
        match self.send(command) {
            Ok(Reply::Operation(operation)) => operation.into_inner(),
            other => panic!("not an operation: {other:?}"),
        }
    }

    pub fn accept_claim(&mut self, command: Command) -> ReplacementClaim {
        match self.send(command) {
            Ok(Reply::Claim(claim)) => *claim,
            other => panic!("not a claim: {other:?}"),
        }
    }

    /// Published, HOT.
    pub fn put(&mut self, generation: u64, policy: WeightStoragePolicy) -> WeightRevisionMetadata {
        let session = self.import(begin(generation, policy));
        self.accept_revision(Command::CommitImport(commit(&session, manifest(generation))))
    }

    pub fn revision(&self, generation: u64) -> &WeightRevisionMetadata {
        self.state.revision(&identity(generation)).unwrap()
    }

    pub fn generation(&self, generation: u64) -> u64 {
        self.revision(generation).metadata_generation
    }

    /// The revision's active operation.
    pub fn active(&self, generation: u64) -> WeightOperation {
        self.operation(self.revision(generation).operation_id.as_ref().unwrap())
    }

    pub fn operation(&self, id: &OperationId) -> WeightOperation {
        self.state.operation(id).unwrap().clone()
    }

    pub fn claimed(&mut self, generation: u64, worker_name: &str) -> WeightOperation {
        let operation = self.active(generation);
        self.accept_operation(claim(&operation.operation_id, worker_name))
    }

    /// The deletion of a revision, carried out.
    pub fn finish_deletion(&mut self, generation: u64) -> Vec<&'static str> {
        let operation = self.claimed(generation, "w1");
        self.events(Command::DeletionFinished(DeletionFinished {
            operation_id: operation.operation_id,
            epoch: operation.epoch,
            owed: vec![],
        }))
    }

    /// The active migration of a revision, carried out.
    pub fn finish_migration(&mut self, generation: u64, residency: Residency, ppm: u32) -> WeightOperation {
        let operation = self.claimed(generation, "w1");
        self.accept_operation(finished(&operation, residency, ppm))
    }

    pub fn clock(&self) -> u64 {
        self.state.log_clock().0
    }
}

pub(crate) fn finished(operation: &WeightOperation, residency: Residency, ppm: u32) -> Command {
    Command::OperationFinished(OperationFinished {
        operation_id: operation.operation_id.clone(),
        epoch: operation.epoch,
        residency,
        observed_hot_ppm: ppm,
        evidence: evidence(operation.fence),
        note: None,
    })
}

pub(crate) fn degraded(metadata: &WeightRevisionMetadata, fence: LogPosition) -> Command {
    Command::RevisionDegraded(RevisionDegraded {
        identity: metadata.identity.clone(),
        instance: metadata.instance.clone(),
        evidence: evidence(fence),
        reason: "unit 3 is readable nowhere".into(),
    })
}

pub(crate) fn recovered(metadata: &WeightRevisionMetadata, fence: LogPosition, residency: Residency) -> Command {
    Command::RevisionRecovered(RevisionRecovered {
        identity: metadata.identity.clone(),
        instance: metadata.instance.clone(),
        evidence: evidence(fence),
        residency,
        observed_hot_ppm: 1_000_000,
    })
}

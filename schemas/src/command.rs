//! Commands: everything that can stand in the log. Their effect is the deterministic result of folding them in
//! log order; a command that can not be accepted folds to a rejection (see ARCHITECTURE.md, The log and the fold).

use serde::{Deserialize, Serialize};

use crate::config::ClusterConfig;
use crate::digest::Digest;
use crate::identity::{LineageKey, RevisionIdentity, TenantId};
use crate::limits::{IMPORT_TTL_MS_DEFAULT, LEASE_TTL_MS_DEFAULT};
use crate::metadata::{ManifestRef, OperationError};
use crate::policy::{HotRatio, WeightStoragePolicy};
use crate::position::{
    ClusterId, CommandId, InstanceId, LeaseId, LogPosition, NodeId, OperationId, ParticipantId, ReplicaId, SessionId,
    WorkerId, WriterId,
};
use crate::state::{Capability, ClaimPhase, MigrationTrigger, ParkReason, Residency, UpsertMode};
use crate::time::LogTime;

/// A command with what makes it safe to repeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandRecord {
    /// Idempotency key, remembered by the fold until `not_after`.
    pub id: CommandId,
    /// The fold rejects the command after this moment of the log clock.
    pub not_after: LogTime,
    /// What to do.
    pub command: Command,
}

/// What a log entry asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each variant is documented on its struct")]
pub enum Command {
    // Cluster: family 0, never gated.
    CreateCluster(CreateCluster),
    Tick,
    Barrier,
    SetConfig(ClusterConfig),
    AnnounceReplica(AnnounceReplica),
    ConfirmCapability(ConfirmCapability),
    SnapshotCommitted(SnapshotCommitted),
    RaiseFoldVersion(RaiseFoldVersion),
    // Revision metadata: family 8; what a coordinator says: family 13.
    BeginImport(BeginImport),
    RenewImport(RenewImport),
    CommitImport(CommitImport),
    AbortImport(AbortImport),
    UpdatePolicy(UpdatePolicy),
    Remove(Remove),
    RevisionDegraded(RevisionDegraded),
    RevisionRecovered(RevisionRecovered),
    // Leases: family 9.
    AcquireLease(AcquireLease),
    RenewLease(RenewLease),
    ReleaseLease(ReleaseLease),
    // Operations: family 10.
    StartMigration(StartMigration),
    StartRepair(StartRepair),
    RelievePressure(RelievePressure),
    ClaimOperation(ClaimOperation),
    RenewClaim(RenewClaim),
    OperationAdvanced(OperationAdvanced),
    OperationAttemptFailed(OperationAttemptFailed),
    ParkOperation(ParkOperation),
    AuthorizeRelease(AuthorizeRelease),
    OperationFinished(OperationFinished),
    PauseOperation(OperationId),
    ResumeOperation(OperationId),
    CancelOperation(OperationId),
    RetryOperation(OperationId),
    // Deletion: family 11.
    DeletionFinished(DeletionFinished),
    PurgeTombstone(PurgeTombstone),
    // Lineage: family 12.
    BeginReplacement(BeginReplacement),
    ReplacementAdvanced(ReplacementAdvanced),
    AbortReplacement(AbortReplacement),
    // Imports with several writers: family 13.
    BeginSharedImport(BeginSharedImport),
    JoinImport(JoinImport),
    RenewPart(PartWriter),
    FinishPart(PartWriter),
}

impl Command {
    /// The command family (the RFC's OpType): 0, 8, 9, 10, 11 or 12; ours is 13, imports with several writers.
    #[must_use]
    pub fn family(&self) -> u8 {
        use Command as C;
        match self {
            C::CreateCluster(_)
            | C::Tick
            | C::Barrier
            | C::SetConfig(_)
            | C::AnnounceReplica(_)
            | C::ConfirmCapability(_)
            | C::SnapshotCommitted(_)
            | C::RaiseFoldVersion(_) => 0,
            C::BeginSharedImport(_)
            | C::JoinImport(_)
            | C::RenewPart(_)
            | C::FinishPart(_)
            | C::RenewImport(RenewImport { coordinator: Some(_), .. })
            | C::CommitImport(CommitImport { coordinator: Some(_), .. })
            | C::AbortImport(AbortImport { coordinator: Some(_), .. }) => 13,
            C::BeginImport(_)
            | C::RenewImport(_)
            | C::CommitImport(_)
            | C::AbortImport(_)
            | C::UpdatePolicy(_)
            | C::Remove(_)
            | C::RevisionDegraded(_)
            | C::RevisionRecovered(_) => 8,
            C::AcquireLease(_) | C::RenewLease(_) | C::ReleaseLease(_) => 9,
            C::StartMigration(_)
            | C::StartRepair(_)
            | C::RelievePressure(_)
            | C::ClaimOperation(_)
            | C::RenewClaim(_)
            | C::OperationAdvanced(_)
            | C::OperationAttemptFailed(_)
            | C::ParkOperation(_)
            | C::AuthorizeRelease(_)
            | C::OperationFinished(_)
            | C::PauseOperation(_)
            | C::ResumeOperation(_)
            | C::CancelOperation(_)
            | C::RetryOperation(_) => 10,
            C::DeletionFinished(_) | C::PurgeTombstone(_) => 11,
            C::BeginReplacement(_) | C::ReplacementAdvanced(_) | C::AbortReplacement(_) => 12,
        }
    }
}

/// The first entry of every log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateCluster {
    /// Chosen once.
    pub cluster_id: ClusterId,
    /// 1; one more each time the log is restored from a backup.
    pub incarnation: u64,
    /// The cluster's settings.
    pub config: ClusterConfig,
    /// Families confirmed at creation (`ballast dev` confirms all).
    pub capabilities: Vec<Capability>,
}

/// A replica says which families it can fold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnnounceReplica {
    /// Which replica.
    pub replica_id: ReplicaId,
    /// The families it folds.
    pub families: Vec<u8>,
    /// Its build.
    pub version: String,
    /// The newest rules it knows. Left out of the log while it is 1, so that every build digests such an entry alike.
    #[serde(default = "first_fold_version", skip_serializing_if = "is_first_fold_version")]
    pub fold_version: u32,
}

/// The rules that every log begins with.
pub const FOLD_VERSION_FIRST: u32 = 1;

/// What a replica knows that did not say: the first rules.
#[must_use]
pub fn first_fold_version() -> u32 {
    FOLD_VERSION_FIRST
}

/// Whether a version is left out.
#[must_use]
pub fn is_first_fold_version(version: &u32) -> bool {
    *version == FOLD_VERSION_FIRST
}

/// Folds every later entry by newer rules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RaiseFoldVersion {
    /// Which.
    pub fold_version: u32,
}

/// Opens a gate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfirmCapability {
    /// Which.
    pub capability: Capability,
}

/// A snapshot was written and read back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotCommitted {
    /// It holds the state after this sequence.
    pub seq: u64,
    /// Digest of that state.
    pub digest: Digest,
}

/// Opens an import session. The instance is (group id, position of this command).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginImport {
    /// What is imported.
    pub identity: RevisionIdentity,
    /// Chosen by the importer; a repeat with the same content returns the same session.
    pub session_id: SessionId,
    /// Without a renewal the session ends after this long.
    pub ttl_ms: u64,
    /// `None`: the cluster's default at this entry.
    pub policy: Option<WeightStoragePolicy>,
    /// Digest of the geometry to be imported.
    pub placement_digest: Digest,
    /// Nodes that take the units; decided once by the gateway.
    pub placement: Vec<NodeId>,
    /// Logical payload bytes announced.
    pub logical_bytes: u64,
    /// Units announced.
    pub unit_count: u32,
}

/// Opens an import session for several writers, each with its part. A kind of its own: a replica that knows nothing of
/// participants has to stop at it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginSharedImport {
    /// What every import has.
    pub import: BeginImport,
    /// Who has to bring a part before the commit, in any order.
    pub participants: Vec<ParticipantId>,
    /// The run of the coordinator, chosen by it: a repeat with the same one finds its session again, another one takes the
    /// place of the run before it, under a higher epoch.
    pub writer_id: WriterId,
}

/// Which run speaks for a session with several writers: one under an older epoch than the session's is refused, and so is
/// what was meant for other bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coordinator {
    /// Whose bytes, as its begin answered.
    pub instance: InstanceId,
    /// As its begin answered.
    pub epoch: u64,
}

/// A participant begins to write its part. Another run of the same participant takes its place, under a higher epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinImport {
    /// What is imported.
    pub identity: RevisionIdentity,
    /// The session.
    pub session_id: SessionId,
    /// Which of the declared participants.
    pub participant: ParticipantId,
    /// Its run; a repeat with the same one returns the same epoch.
    pub writer_id: WriterId,
    /// Digest of the whole geometry, which all participants have to agree on.
    pub placement_digest: Digest,
}

/// What a participant says of itself: `RenewPart`, it is at work, which also keeps the session open; `FinishPart`, it has
/// nothing more to send (what others bring for it may still be on its way). Refused under an older epoch than the
/// participant's, and for other bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartWriter {
    /// What is imported.
    pub identity: RevisionIdentity,
    /// The session.
    pub session_id: SessionId,
    /// The participant.
    pub participant: ParticipantId,
    /// Whose bytes, as its join answered.
    pub instance: InstanceId,
    /// As its join answered.
    pub epoch: u64,
}

/// Keeps a session open while bytes move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenewImport {
    /// What is imported.
    pub identity: RevisionIdentity,
    /// The session.
    pub session_id: SessionId,
    /// Which run says so; left out where there is one writer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<Coordinator>,
}

/// What a node answers to a seal: proof that it holds the whole import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// The node.
    pub node: NodeId,
    /// The run of its process.
    pub incarnation: String,
    /// Whose bytes.
    pub instance: InstanceId,
    /// The session it sealed.
    pub session_id: SessionId,
    /// Digest of the layout it computed.
    pub layout_digest: Digest,
    /// H over the unit checksums, 8 big-endian bytes each.
    pub checksums_digest: Digest,
    /// What the node itself found in the manifest.
    pub manifest: ManifestRef,
}

/// Publishes READY + HOT, and the initial MIGRATING operation in the same entry when the policy prefers another residency.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitImport {
    /// What was imported.
    pub identity: RevisionIdentity,
    /// The session.
    pub session_id: SessionId,
    /// The manifest reference, checked by the gateway against every receipt.
    pub manifest: ManifestRef,
    /// One per node of the placement.
    pub receipts: Vec<Receipt>,
    /// Which run says so; left out where there is one writer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<Coordinator>,
}

/// Gives an import up; its bytes are deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortImport {
    /// What was being imported.
    pub identity: RevisionIdentity,
    /// The session.
    pub session_id: SessionId,
    /// Which run says so; left out where there is one writer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<Coordinator>,
}

/// Changes the policy, and nothing else of the record. Does not start a migration by itself unless AUTO wants one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdatePolicy {
    /// Whose.
    pub identity: RevisionIdentity,
    /// To what.
    pub policy: WeightStoragePolicy,
    /// Fence.
    pub expected_metadata_generation: u64,
}

/// Starts the deletion of the whole group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remove {
    /// Whose.
    pub identity: RevisionIdentity,
    /// Fence.
    pub expected_metadata_generation: u64,
}

/// Evidence from one node about one instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeEvidence {
    /// The node.
    pub node: NodeId,
    /// The run of its process; empty when it held nothing, or did not answer for longer than the grace period.
    pub incarnation: String,
    /// The highest fence it had obeyed when it was asked, or under which it was asked in vain.
    pub fence: LogPosition,
}

/// A required member has lost all readable replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevisionDegraded {
    /// Whose.
    pub identity: RevisionIdentity,
    /// Which bytes.
    pub instance: InstanceId,
    /// Who was asked.
    pub evidence: Vec<NodeEvidence>,
    /// What is missing, in one sentence.
    pub reason: String,
}

/// Every required member is readable again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevisionRecovered {
    /// Whose.
    pub identity: RevisionIdentity,
    /// Which bytes.
    pub instance: InstanceId,
    /// Who was asked.
    pub evidence: Vec<NodeEvidence>,
    /// What was found.
    pub residency: Residency,
    /// Hot share found, in parts per million.
    pub observed_hot_ppm: u32,
}

/// Protects the readable replicas of a revision while it is read. Idempotent by lease id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcquireLease {
    /// Whose.
    pub identity: RevisionIdentity,
    /// Chosen by the holder.
    pub lease_id: LeaseId,
    /// Who reads, for people.
    pub holder: String,
    /// Without a renewal the lease ends after this long.
    pub ttl_ms: u64,
}

/// Extends a lease, never shortens it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenewLease {
    /// Whose.
    pub identity: RevisionIdentity,
    /// Which.
    pub lease_id: LeaseId,
    /// From now.
    pub ttl_ms: u64,
}

/// Ends a lease. Its outcome says whether the lease had lapsed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseLease {
    /// Whose.
    pub identity: RevisionIdentity,
    /// Which.
    pub lease_id: LeaseId,
}

/// Persists a residency migration before any physical side effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartMigration {
    /// Whose.
    pub identity: RevisionIdentity,
    /// HOT, COLD or MIXED.
    pub target: Residency,
    /// MIXED only; `None`: the policy's.
    pub target_hot_ratio: Option<HotRatio>,
    /// Fence.
    pub expected_metadata_generation: u64,
    /// What started it.
    pub trigger: MigrationTrigger,
}

/// Starts a round of migrations because of a node's memory (RFC, Automatic Migration). Which AUTO revisions move, and one step
/// of how far, follows from the state alone; of commands that race, one takes effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelievePressure {
    /// Whose memory.
    pub node: NodeId,
    /// The node's round that the sender saw; when another began since, nothing happens.
    pub round: u64,
    /// PRESSURE: a step towards COLD, oldest access first. `PRESSURE_RELIEF`: back to what is preferred, newest first.
    pub trigger: MigrationTrigger,
    /// Bytes of memory to release, or to fill at most.
    pub bytes: u64,
    /// Bytes that the node's cold tier has free.
    pub cold_free_bytes: u64,
}

/// Starts making the replicas that a revision should have and lacks, from those that it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartRepair {
    /// Whose.
    pub identity: RevisionIdentity,
    /// Fence.
    pub expected_metadata_generation: u64,
}

/// A worker takes an operation: the answer is an epoch and a lease in log time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimOperation {
    /// Which.
    pub operation_id: OperationId,
    /// By whom.
    pub worker: WorkerId,
    /// For how long without a sign of life.
    pub ttl_ms: u64,
}

/// A sign of life from the worker that holds the claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenewClaim {
    /// Which.
    pub operation_id: OperationId,
    /// The claim's epoch.
    pub epoch: u64,
    /// For how long.
    pub ttl_ms: u64,
}

/// A step was done. Accepted only if epoch and cursor are the operation's own; duplicates and zombies are no-ops.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationAdvanced {
    /// Which.
    pub operation_id: OperationId,
    /// The claim's epoch.
    pub epoch: u64,
    /// Where the operation stood.
    pub from_cursor: u64,
    /// Where it stands now; greater.
    pub to_cursor: u64,
    /// Units done in all, never less than before.
    pub processed_units: u64,
    /// Units to do in all.
    pub total_units: u64,
    /// Logical bytes done in all, never less than before.
    pub processed_bytes: u64,
    /// Logical bytes to do in all.
    pub total_bytes: u64,
    /// Hot share now, in parts per million.
    pub observed_hot_ppm: u32,
    /// The outstanding release was executed.
    pub released: bool,
}

/// An attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationAttemptFailed {
    /// Which.
    pub operation_id: OperationId,
    /// The claim's epoch.
    pub epoch: u64,
    /// Why.
    pub error: OperationError,
    /// No further attempt can succeed.
    pub permanent: bool,
}

/// Nothing to do until a condition holds; costs no attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParkOperation {
    /// Which.
    pub operation_id: OperationId,
    /// The claim's epoch.
    pub epoch: u64,
    /// What it waits for.
    pub reason: ParkReason,
    /// For conditions the fold can not see: wake after this long.
    pub wake_after_ms: Option<u64>,
}

/// Asks the fold for leave to release memory replicas. Refused with BUSY while a lease is active; the operation is parked then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorizeRelease {
    /// Which.
    pub operation_id: OperationId,
    /// The claim's epoch.
    pub epoch: u64,
    /// The batch begins at this cursor.
    pub cursor: u64,
    /// Units in the batch.
    pub unit_count: u32,
}

/// The operation reached its target, verified on the whole group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationFinished {
    /// Which.
    pub operation_id: OperationId,
    /// The claim's epoch.
    pub epoch: u64,
    /// What was found.
    pub residency: Residency,
    /// Hot share found, in parts per million.
    pub observed_hot_ppm: u32,
    /// Who was asked.
    pub evidence: Vec<NodeEvidence>,
    /// For people: that the nearest split was taken, say.
    pub note: Option<String>,
}

/// Payloads and manifest are gone from every reachable node: DELETED + ABSENT.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeletionFinished {
    /// Which DELETING operation.
    pub operation_id: OperationId,
    /// The claim's epoch.
    pub epoch: u64,
    /// Lost nodes that still owe their copies' deletion.
    pub owed: Vec<NodeId>,
}

/// Forgets a tombstone; the watermark stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PurgeTombstone {
    /// Whose.
    pub identity: RevisionIdentity,
}

/// Claims a lineage for one successor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginReplacement {
    /// What is replaced.
    pub base: RevisionIdentity,
    /// By what: same lineage, higher generation.
    pub target: RevisionIdentity,
    /// How.
    pub mode: UpsertMode,
    /// Fence on the base.
    pub expected_metadata_generation: u64,
    /// Idempotency key of the replacement.
    pub request_id: String,
    /// The target's policy; `None`: the base's.
    pub policy: Option<WeightStoragePolicy>,
}

/// A step of a replacement was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplacementAdvanced {
    /// Which REPLACING operation.
    pub operation_id: OperationId,
    /// The claim's epoch.
    pub epoch: u64,
    /// RETIRING_BASE (fence the base) or DELETING_BASE (start its deletion). COMPLETED follows by itself when the base is gone
    /// (PUT_FIRST) or the target READY (DELETE_FIRST).
    pub to: ClaimPhase,
}

/// Gives a replacement up while that loses nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortReplacement {
    /// Which lineage.
    pub lineage: LineageKey,
    /// Which claim.
    pub request_id: String,
}

impl Command {
    /// The tenant whose data the command touches; `None` for cluster and worker commands.
    #[must_use]
    pub fn tenant(&self) -> Option<&TenantId> {
        use Command as C;
        let identity = match self {
            C::BeginImport(c) => &c.identity,
            C::BeginSharedImport(c) => &c.import.identity,
            C::JoinImport(c) => &c.identity,
            C::RenewPart(c) | C::FinishPart(c) => &c.identity,
            C::RenewImport(c) => &c.identity,
            C::CommitImport(c) => &c.identity,
            C::AbortImport(c) => &c.identity,
            C::UpdatePolicy(c) => &c.identity,
            C::Remove(c) => &c.identity,
            C::AcquireLease(c) => &c.identity,
            C::RenewLease(c) => &c.identity,
            C::ReleaseLease(c) => &c.identity,
            C::StartMigration(c) => &c.identity,
            C::StartRepair(c) => &c.identity,
            C::PurgeTombstone(c) => &c.identity,
            C::BeginReplacement(c) => &c.base,
            C::AbortReplacement(c) => return Some(&c.lineage.tenant_id),
            _ => return None,
        };
        Some(&identity.tenant_id)
    }
}

impl Command {
    /// The revisions that the command names.
    #[must_use]
    pub fn revisions(&self) -> Vec<&RevisionIdentity> {
        use Command as C;
        match self {
            C::BeginImport(c) => vec![&c.identity],
            C::BeginSharedImport(c) => vec![&c.import.identity],
            C::JoinImport(c) => vec![&c.identity],
            C::RenewPart(c) | C::FinishPart(c) => vec![&c.identity],
            C::RenewImport(c) => vec![&c.identity],
            C::CommitImport(c) => vec![&c.identity],
            C::AbortImport(c) => vec![&c.identity],
            C::UpdatePolicy(c) => vec![&c.identity],
            C::Remove(c) => vec![&c.identity],
            C::RevisionDegraded(c) => vec![&c.identity],
            C::RevisionRecovered(c) => vec![&c.identity],
            C::AcquireLease(c) => vec![&c.identity],
            C::RenewLease(c) => vec![&c.identity],
            C::ReleaseLease(c) => vec![&c.identity],
            C::StartMigration(c) => vec![&c.identity],
            C::StartRepair(c) => vec![&c.identity],
            C::PurgeTombstone(c) => vec![&c.identity],
            C::BeginReplacement(c) => vec![&c.base, &c.target],
            _ => Vec::new(),
        }
    }

    /// The operation that the command names.
    #[must_use]
    pub fn operation(&self) -> Option<&OperationId> {
        use Command as C;
        match self {
            C::ClaimOperation(c) => Some(&c.operation_id),
            C::RenewClaim(c) => Some(&c.operation_id),
            C::OperationAdvanced(c) => Some(&c.operation_id),
            C::OperationAttemptFailed(c) => Some(&c.operation_id),
            C::ParkOperation(c) => Some(&c.operation_id),
            C::AuthorizeRelease(c) => Some(&c.operation_id),
            C::OperationFinished(c) => Some(&c.operation_id),
            C::DeletionFinished(c) => Some(&c.operation_id),
            C::ReplacementAdvanced(c) => Some(&c.operation_id),
            C::PauseOperation(id) | C::ResumeOperation(id) | C::CancelOperation(id) | C::RetryOperation(id) => Some(id),
            _ => None,
        }
    }
}

/// Times a caller may leave out.
pub(crate) const fn default_lease_ttl_ms() -> u64 {
    LEASE_TTL_MS_DEFAULT
}

/// As [`default_lease_ttl_ms`], for import sessions.
pub(crate) const fn default_import_ttl_ms() -> u64 {
    IMPORT_TTL_MS_DEFAULT
}

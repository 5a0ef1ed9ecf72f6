//! What the management plane shows of revisions, leases, operations and claims: lightweight records, no tensors,
//! no addresses (RFC, Data Authority Boundaries, safety invariant 9). `*_unix_ms` are for display only.

use serde::{Deserialize, Serialize};

use crate::command::Coordinator;
use crate::digest::Digest;
use crate::error::ErrorCode;
use crate::identity::{GroupId, LineageKey, RevisionIdentity};
use crate::policy::{HotRatio, WeightStoragePolicy};
use crate::position::{InstanceId, LeaseId, LogPosition, NodeId, OperationId, ParticipantId, SessionId, WorkerId};
use crate::state::{
    Availability, ClaimPhase, MigrationTrigger, OperationKind, OperationStatus, ParkReason, Residency, UpsertMode,
};
use crate::time::LogTime;

/// The immutable reference from metadata to the manifest and a summary of its payloads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestRef {
    /// `weights/<ns>/<resource>/<revision>/<generation>/manifest`.
    pub key: String,
    /// SHA-256 of the canonical manifest.
    pub sha256: Digest,
    /// The managed group.
    pub group_id: GroupId,
    /// H(sorted payload keys).
    pub payload_keys_sha256: Digest,
    /// Payload objects.
    pub payload_count: u64,
    /// Logical payload bytes.
    pub logical_bytes: u64,
    /// Affinity units.
    pub affinity_count: u32,
    /// H(sorted NUL-joined affinity groups).
    pub affinity_digest: Digest,
}

/// The management record of one revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightRevisionMetadata {
    /// Which revision.
    pub identity: RevisionIdentity,
    /// Whose bytes stand behind it now.
    pub instance: InstanceId,
    /// The manifest, once committed.
    pub manifest: Option<ManifestRef>,
    /// Complete and readable?
    pub availability: Availability,
    /// Where the payloads were found when last observed whole.
    pub residency: Residency,
    /// Hot share of the logical bytes when last observed, in parts per million.
    pub observed_hot_ppm: u32,
    /// Where it should converge.
    pub policy: WeightStoragePolicy,
    /// The revision's active operation.
    pub operation_id: Option<OperationId>,
    /// Fenced by a replacement: no new leases, no renewals.
    pub retired: bool,
    /// Grows by one with every durable change of this record, from 1.
    pub metadata_generation: u64,
    /// Nodes the payloads were placed on at import.
    pub placement: Vec<NodeId>,
    /// When the import began.
    pub created_unix_ms: u64,
    /// When this record last changed.
    pub updated_unix_ms: u64,
    /// When a lease was last granted; not part of the generation.
    pub last_accessed_unix_ms: u64,
}

/// A record with the live figures beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevisionView {
    /// The record.
    pub metadata: WeightRevisionMetadata,
    /// Leases that have not ended.
    pub active_lease_count: u32,
    /// Log-clock milliseconds until the first of them ends.
    pub nearest_lease_expiry_ms: Option<u64>,
    /// The lineage's watermark: the highest generation whose publication is complete.
    pub watermark: u64,
}

/// A granted lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseGrant {
    /// The lease.
    pub lease_id: LeaseId,
    /// Who holds it.
    pub holder: String,
    /// What it protects.
    pub identity: RevisionIdentity,
    /// Whose bytes.
    pub instance: InstanceId,
    /// Milliseconds from the grant (or renewal) to its end, on the log clock.
    pub ttl_ms: u64,
    /// Its end on the log clock.
    pub expires_at: LogTime,
}

/// An open import session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportSession {
    /// The session.
    pub session_id: SessionId,
    /// What is imported.
    pub identity: RevisionIdentity,
    /// Whose bytes.
    pub instance: InstanceId,
    /// Where they go.
    pub placement: Vec<NodeId>,
    /// Geometry of what is imported: a repeated begin must carry the same.
    pub placement_digest: Digest,
    /// Renewed for this long each time.
    pub ttl_ms: u64,
    /// Its end on the log clock.
    pub expires_at: LogTime,
    /// Of the run that coordinates several writers: 1 for the one that opened the session, one more for each that has found
    /// it open since. 0, and left out, where there is one writer.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub epoch: u64,
}

fn is_zero(epoch: &u64) -> bool {
    *epoch == 0
}

impl ImportSession {
    /// What the run that was answered with this session shows when it speaks for it; `None` where there is one writer.
    #[must_use]
    pub fn coordinator(&self) -> Option<Coordinator> {
        (self.epoch > 0).then(|| Coordinator { instance: self.instance.clone(), epoch: self.epoch })
    }
}

/// How far one participant of an import is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportPart {
    /// Who.
    pub participant: ParticipantId,
    /// Whose bytes: a session's name may be begun again after its end, and is another import then.
    pub instance: InstanceId,
    /// Of the run that is at work; 0 before the first join.
    pub epoch: u64,
    /// When it last joined, renewed or finished, on the log clock; that of the begin before the first join.
    pub heard_at: LogTime,
    /// This run has said that it has nothing more to send.
    pub done: bool,
}

/// A background operation; terminal ones stay queryable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightOperation {
    /// Its stable id.
    pub operation_id: OperationId,
    /// What it does.
    pub kind: OperationKind,
    /// To which revision (REPLACING: the target of the claim).
    pub identity: RevisionIdentity,
    /// To whose bytes (REPLACING: the base's).
    pub instance: InstanceId,
    /// MIGRATING: the residency to reach.
    pub target: Option<Residency>,
    /// MIGRATING to MIXED: the hot share to reach.
    pub target_hot_ratio: Option<HotRatio>,
    /// MIGRATING: what started it.
    pub trigger: Option<MigrationTrigger>,
    /// The metadata generation it was accepted at.
    pub fenced_generation: u64,
    /// Where it stands.
    pub status: OperationStatus,
    /// PARKED: why.
    pub park_reason: Option<ParkReason>,
    /// BACKING_OFF, or PARKED with a timer: when it wakes, on the log clock.
    pub wake_at: Option<LogTime>,
    /// CLAIMED: by whom.
    pub worker: Option<WorkerId>,
    /// Grows with every claim; a step of an older epoch is refused.
    pub epoch: u64,
    /// CLAIMED: until when, on the log clock.
    pub claim_expires_at: Option<LogTime>,
    /// Log position of the last entry that authorised an effect of this operation.
    pub fence: LogPosition,
    /// An authorised release whose execution was not reported yet.
    pub release_outstanding: bool,
    /// Where to go on; what it counts is the machine's own.
    pub cursor: u64,
    /// Units done.
    pub processed_units: u64,
    /// Units to do, once known.
    pub total_units: u64,
    /// Logical bytes done.
    pub processed_bytes: u64,
    /// Logical bytes to do, once known.
    pub total_bytes: u64,
    /// Hot share seen at the last progress, in parts per million.
    pub observed_hot_ppm: u32,
    /// Failed attempts so far.
    pub attempts: u32,
    /// The last error; kept after a later success.
    pub last_error: Option<OperationError>,
    /// How it will end as soon as its outstanding release was executed or fenced off; `None` when nothing asked for its end.
    #[serde(default)]
    pub ending: Option<OperationStatus>,
    /// For people: that the nearest split was taken, say.
    #[serde(default)]
    pub note: Option<String>,
    /// When it was accepted.
    pub started_unix_ms: u64,
    /// When it last changed.
    pub updated_unix_ms: u64,
}

/// Why an attempt of an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperationError {
    /// In one word.
    pub code: ErrorCode,
    /// In one sentence.
    pub message: String,
}

/// The single persisted successor transaction of a lineage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplacementClaim {
    /// The lineage.
    pub lineage: LineageKey,
    /// The caller's id, or the one derived from the arguments.
    pub request_id: String,
    /// What is replaced.
    pub base: RevisionIdentity,
    /// By what.
    pub target: RevisionIdentity,
    /// How.
    pub mode: UpsertMode,
    /// Where it stands.
    pub phase: ClaimPhase,
    /// The base's metadata generation the caller saw.
    pub expected_base_generation: u64,
    /// The policy of the target, if the caller gave one.
    pub policy: Option<WeightStoragePolicy>,
    /// The REPLACING operation that drives it.
    pub operation_id: OperationId,
    /// 1, and one more for every retry after an abort.
    pub attempt: u32,
    /// When it was accepted.
    pub started_unix_ms: u64,
    /// When it last changed.
    pub updated_unix_ms: u64,
}

/// One page of a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevisionPage {
    /// In order of (namespace, resource, revision, generation).
    pub revisions: Vec<WeightRevisionMetadata>,
    /// Where the next page begins; empty on the last.
    pub next_page_token: String,
}

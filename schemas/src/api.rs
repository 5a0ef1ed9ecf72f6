//! Request and reply bodies of the gateway's verbs (JSON on `ballast.v1.<tenant>.<verb>`). Unknown fields are refused.
//!
//! Every request may carry `min_log_seq` (read your own writes through any gateway), `consistency` and, for
//! mutations, `request_id` (idempotency key). Every reply carries `log_seq` and one of the bodies below, or `error`.

use serde::{Deserialize, Serialize};

use crate::command::{Coordinator, default_import_ttl_ms, default_lease_ttl_ms};
use crate::digest::Digest;
use crate::error::BallastError;
use crate::identity::{Component, RevisionIdentity};
use crate::limits::{LIST_LIMIT_DEFAULT, REQUEST_BYTES_MAX};
use crate::metadata::{
    ImportPart, ImportSession, LeaseGrant, ReplacementClaim, WeightOperation, WeightRevisionMetadata,
};
use crate::node::{NodeCheck, NodeEndpoint, NodeStatus};
use crate::policy::{HotRatio, WeightStoragePolicy};
use crate::position::{InstanceId, LeaseId, OperationId, ParticipantId, SessionId, WriterId};
use crate::state::{Residency, UpsertMode};
use crate::time::LogTime;

/// Of the place where a request is wrong; names in it may be the caller's own.
const PATH_CHARS_SHOWN: usize = 100;

/// Every verb, as it stands in the subject.
pub const VERBS: &[&str] = &[
    "begin_import",
    "join_import",
    "renew_part",
    "finish_part",
    "get_import",
    "renew_import",
    "commit_import",
    "abort_import",
    "acquire_lease",
    "renew_lease",
    "release_lease",
    "is_exist",
    "get_metadata",
    "get_size",
    "list",
    "update_policy",
    "upsert",
    "abort_upsert",
    "get_upsert",
    "migrate",
    "repair",
    "verify",
    "get_operation",
    "list_operations",
    "cancel_operation",
    "pause_operation",
    "resume_operation",
    "retry_operation",
    "remove",
    "purge",
    "clock",
    "status",
];

/// How fresh a query's answer must be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Consistency {
    /// Whatever this gateway has folded (and at least `min_log_seq`).
    #[default]
    Local,
    /// Everything that was durable when the query arrived.
    Linearizable,
}

/// What every request may carry beside its own fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestOptions {
    /// Idempotency key of a mutation; a random one otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Of a mutation: refused after this moment of the log clock (`clock` tells it), however late the request arrives. Good
    /// for a minute and a half at most; without it, a minute from when a gateway reads the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_after: Option<LogTime>,
    /// Answer only after having folded this sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_log_seq: Option<u64>,
    /// For queries.
    #[serde(default, skip_serializing_if = "is_default")]
    pub consistency: Consistency,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A request: its own fields and, under `options`, what every request may carry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Request<B> {
    /// The verb's own fields.
    #[serde(flatten)]
    pub body: B,
    /// What every request may carry.
    #[serde(skip_serializing_if = "is_default")]
    pub options: RequestOptions,
}

impl<B: serde::de::DeserializeOwned> Request<B> {
    /// Reads a request body strictly. An empty body is an empty object.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when it is too large, not a JSON object, or has a wrong or unknown field.
    pub fn from_json(bytes: &[u8]) -> Result<Self, BallastError> {
        if bytes.len() > REQUEST_BYTES_MAX {
            let message = format!("the request has {} bytes; at most {REQUEST_BYTES_MAX} are allowed", bytes.len());
            return Err(BallastError::invalid(message));
        }
        let wrong = |error: serde_json::Error| BallastError::invalid(format!("the request body is wrong: {error}"));
        let named = |within: &str, error: serde_path_to_error::Error<serde_json::Error>| {
            let path: String = error.path().to_string().chars().take(PATH_CHARS_SHOWN).collect();
            match (within, path.as_str()) {
                ("", ".") => wrong(error.into_inner()),
                ("", path) => {
                    BallastError::invalid(format!("the request body is wrong at `{path}`: {}", error.inner()))
                }
                (within, ".") => {
                    BallastError::invalid(format!("the request body is wrong at `{within}`: {}", error.inner()))
                }
                (within, path) => {
                    BallastError::invalid(format!("the request body is wrong at `{within}.{path}`: {}", error.inner()))
                }
            }
        };
        let text: &[u8] = if bytes.is_empty() { b"{}" } else { bytes };
        // Flattening would let unknown fields pass, so `options` is taken out by hand and both parts are read strictly.
        let Once(serde_json::Value::Object(mut fields)) = serde_json::from_slice(text).map_err(wrong)? else {
            return Err(BallastError::invalid("the request body is wrong: it is no map of fields (a JSON object)"));
        };
        let options = match fields.remove("options") {
            Some(options) => serde_path_to_error::deserialize(options).map_err(|error| named("options", error))?,
            None => RequestOptions::default(),
        };
        // The one list that a verb takes: of names, which no reader takes a list for.
        let may_be_list = |name: &str| name == "participants";
        if let Some((name, _)) = fields.iter().find(|(name, value)| holds_list(value) && !may_be_list(name)) {
            let name: String = name.chars().take(PATH_CHARS_SHOWN).collect();
            return Err(BallastError::invalid(format!(
                "the request body is wrong at `{name}`: it holds a list, which this field never is"
            )));
        }
        let body =
            serde_path_to_error::deserialize(serde_json::Value::Object(fields)).map_err(|error| named("", error))?;
        Ok(Self { body, options })
    }
}

/// Any JSON in which no object names a field twice: the last one would win, whatever the first one said.
struct Once(serde_json::Value);

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OnceVisitor).map(Self)
    }
}

struct OnceVisitor;

impl<'de> serde::de::Visitor<'de> for OnceVisitor {
    type Value = serde_json::Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(serde_json::Value::Null)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Once(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut fields = serde_json::Map::new();
        while let Some((name, Once(value))) = entries.next_entry::<String, Once>()? {
            if fields.contains_key(&name) {
                let name: String = name.chars().take(PATH_CHARS_SHOWN).collect();
                return Err(serde::de::Error::custom(format_args!("the field `{name}` is there twice")));
            }
            fields.insert(name, value);
        }
        Ok(fields.into())
    }
}

/// Derived readers take a list for an object, field by position: `"policy": []` would be the default policy.
fn holds_list(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Array(_) => true,
        serde_json::Value::Object(fields) => fields.values().any(holds_list),
        _ => false,
    }
}

macro_rules! body {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name { $($(#[$fdoc])* pub $field: $type,)* }
    };
}

body! {
    /// `begin_import`: opens a session (or finds it again).
    BeginImportRequest {
        /// What is imported.
        identity: RevisionIdentity,
        /// Chosen by the importer.
        session_id: SessionId,
        /// The session ends after this long without a renewal.
        #[serde(default = "default_import_ttl_ms")]
        ttl_ms: u64,
        /// `null`: the cluster's default.
        #[serde(default)]
        policy: Option<WeightStoragePolicy>,
        /// Digest of the geometry.
        placement_digest: Digest,
        /// Logical payload bytes.
        logical_bytes: u64,
        /// Bytes that the node must reserve: every unit's extent at its place in the layout.
        reserved_bytes: u64,
        /// Units.
        unit_count: u32,
        /// Who brings a part, where one writer does not bring everything; then each of them joins.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        participants: Vec<ParticipantId>,
        /// With participants: the run of the coordinator, chosen by it; another run takes the place of an earlier one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        writer_id: Option<WriterId>,
    }
}

body! {
    /// Reply to `begin_import`.
    BeginImportReply {
        /// The session.
        session: ImportSession,
        /// Where the bytes go, one per node of the placement.
        endpoints: Vec<NodeEndpoint>,
        /// Opens those nodes' doors.
        token: String,
    }
}

body! {
    /// `join_import`: a participant of an open session begins to write its part.
    JoinImportRequest {
        /// What is imported.
        identity: RevisionIdentity,
        /// The session.
        session_id: SessionId,
        /// Which of the declared participants.
        participant: ParticipantId,
        /// Its run, chosen by it; another run takes the place of an earlier one.
        writer_id: WriterId,
        /// Digest of the whole geometry.
        placement_digest: Digest,
    }
}

body! {
    /// Reply to `join_import`.
    JoinImportReply {
        /// The session.
        session: ImportSession,
        /// The participant, with the epoch of this run.
        part: ImportPart,
        /// Where the bytes go, one per node of the placement.
        endpoints: Vec<NodeEndpoint>,
        /// Opens those nodes' doors, for this participant's fragments.
        token: String,
    }
}

body! {
    /// `renew_part`: this participant is at work, which keeps the session open too. `finish_part`: it has nothing more to send.
    PartRequest {
        /// What is imported.
        identity: RevisionIdentity,
        /// The session.
        session_id: SessionId,
        /// The participant.
        participant: ParticipantId,
        /// Whose bytes, as its join answered.
        instance: InstanceId,
        /// As its join answered.
        epoch: u64,
    }
}

body! {
    /// Reply to `renew_part` and `finish_part`.
    PartReply {
        /// The participant.
        part: ImportPart,
    }
}

body! {
    /// Reply to `get_import`.
    ImportReply {
        /// The session.
        session: ImportSession,
        /// Its participants by name; none where there is one writer.
        participants: Vec<ImportPart>,
        /// The log clock, on which they were last heard of.
        log_clock: LogTime,
    }
}

body! {
    /// `renew_import`, `abort_import` and `get_import`.
    SessionRequest {
        /// What is imported.
        identity: RevisionIdentity,
        /// The session.
        session_id: SessionId,
        /// Which run says so, as its begin answered: needed to speak for a session with participants.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        coordinator: Option<Coordinator>,
    }
}

body! {
    /// Reply to `renew_import`.
    SessionReply {
        /// The session.
        session: ImportSession,
    }
}

body! {
    /// `commit_import`: the gateway asks every node of the placement for its receipt and publishes READY + HOT.
    CommitImportRequest {
        /// What was imported.
        identity: RevisionIdentity,
        /// The session.
        session_id: SessionId,
        /// SHA-256 of the manifest the importer sealed with.
        manifest_sha256: Digest,
        /// Which run says so, as its begin answered: needed to speak for a session with participants.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        coordinator: Option<Coordinator>,
    }
}

body! {
    /// Reply with a revision's record.
    RevisionReply {
        /// The record.
        revision: WeightRevisionMetadata,
    }
}

body! {
    /// `acquire_lease`.
    AcquireLeaseRequest {
        /// Whose.
        identity: RevisionIdentity,
        /// Chosen by the holder; a repeat returns the same lease.
        lease_id: LeaseId,
        /// Who reads, for people.
        #[serde(default)]
        holder: String,
        /// The lease ends after this long without a renewal.
        #[serde(default = "default_lease_ttl_ms")]
        ttl_ms: u64,
    }
}

body! {
    /// Reply to `acquire_lease`.
    AcquireLeaseReply {
        /// The lease.
        lease: LeaseGrant,
        /// The record it was granted on.
        revision: WeightRevisionMetadata,
        /// Nodes that hold some of it.
        endpoints: Vec<NodeEndpoint>,
        /// Opens those nodes' doors.
        token: String,
    }
}

body! {
    /// `renew_lease`.
    RenewLeaseRequest {
        /// Whose.
        identity: RevisionIdentity,
        /// Which.
        lease_id: LeaseId,
        /// From now.
        #[serde(default = "default_lease_ttl_ms")]
        ttl_ms: u64,
    }
}

body! {
    /// Reply to `renew_lease`.
    LeaseReply {
        /// The lease.
        lease: LeaseGrant,
    }
}

body! {
    /// `release_lease`.
    ReleaseLeaseRequest {
        /// Whose.
        identity: RevisionIdentity,
        /// Which.
        lease_id: LeaseId,
    }
}

body! {
    /// Reply to `release_lease`.
    ReleaseLeaseReply {
        /// The lease had expired before the release: what was read in between does not count.
        lapsed: bool,
    }
}

body! {
    /// `is_exist`, `get_metadata`, `get_size`, `purge`.
    IdentityRequest {
        /// Which.
        identity: RevisionIdentity,
    }
}

body! {
    /// Reply to `is_exist`.
    IsExistReply {
        /// READY and readable.
        exists: bool,
    }
}

body! {
    /// Reply to `get_size`.
    GetSizeReply {
        /// Logical payload bytes validated at commit time.
        logical_bytes: u64,
    }
}

body! {
    /// `list`: every field that is given must match.
    ListRequest {
        /// Only this namespace.
        #[serde(default)]
        namespace: Option<Component>,
        /// Only this resource.
        #[serde(default)]
        resource_id: Option<Component>,
        /// Only resources that begin with this.
        #[serde(default)]
        resource_prefix: Option<String>,
        /// Only this revision.
        #[serde(default)]
        revision: Option<Component>,
        /// Also tombstones and imports in progress.
        #[serde(default)]
        all: bool,
        /// `next_page_token` of the page before.
        #[serde(default)]
        page_token: String,
        /// 1 to 1000.
        #[serde(default = "default_list_limit")]
        limit: u32,
    }
}

fn default_list_limit() -> u32 {
    LIST_LIMIT_DEFAULT
}

body! {
    /// `update_policy`.
    UpdatePolicyRequest {
        /// Whose.
        identity: RevisionIdentity,
        /// To what.
        policy: WeightStoragePolicy,
        /// Fence.
        expected_metadata_generation: u64,
    }
}

body! {
    /// `upsert`: claims the lineage for a successor, which is then imported like any revision.
    UpsertRequest {
        /// What is replaced.
        base: RevisionIdentity,
        /// By what.
        target: RevisionIdentity,
        /// PUT_FIRST or DELETE_FIRST.
        #[serde(default = "default_upsert_mode")]
        mode: UpsertMode,
        /// Fence on the base.
        expected_metadata_generation: u64,
        /// `null`: derived from the arguments.
        #[serde(default)]
        replacement_request_id: Option<String>,
        /// The target's policy; `null`: the base's.
        #[serde(default)]
        policy: Option<WeightStoragePolicy>,
    }
}

fn default_upsert_mode() -> UpsertMode {
    UpsertMode::PutFirst
}

body! {
    /// `abort_upsert` and `get_upsert`: by any identity of the lineage.
    UpsertIdRequest {
        /// Any generation of the lineage.
        identity: RevisionIdentity,
        /// Which claim; `null` for `get_upsert`: the latest.
        #[serde(default)]
        replacement_request_id: Option<String>,
    }
}

body! {
    /// Reply to `upsert`, `abort_upsert` and `get_upsert`.
    ClaimReply {
        /// The claim.
        claim: ReplacementClaim,
    }
}

body! {
    /// `migrate`.
    MigrateRequest {
        /// Whose.
        identity: RevisionIdentity,
        /// HOT, COLD or MIXED.
        target: Residency,
        /// MIXED only; `null`: the policy's.
        #[serde(default)]
        mixed_hot_ratio: Option<HotRatio>,
        /// Fence.
        expected_metadata_generation: u64,
    }
}

body! {
    /// `repair`.
    RepairRequest {
        /// Whose.
        identity: RevisionIdentity,
        /// Fence; `null`: whatever stands.
        #[serde(default)]
        expected_metadata_generation: Option<u64>,
    }
}

body! {
    /// Reply to `repair`.
    RepairReply {
        /// What repairs it; `null` when nothing is missing.
        operation: Option<WeightOperation>,
    }
}

body! {
    /// `verify`: reads a round of units back on every node that holds some.
    VerifyRequest {
        /// Whose.
        identity: RevisionIdentity,
        /// The first unit of the round.
        #[serde(default)]
        from: u32,
    }
}

body! {
    /// Reply to `verify`.
    VerifyReply {
        /// One per node that holds some of it.
        nodes: Vec<NodeCheck>,
        /// Units of the revision.
        units: u32,
        /// Where the next round begins; `null` after the last.
        next: Option<u32>,
    }
}

body! {
    /// `get_operation`, `cancel_operation`, `pause_operation`, `resume_operation`, `retry_operation`.
    OperationRequest {
        /// Which.
        operation_id: OperationId,
    }
}

body! {
    /// Reply with an operation.
    OperationReply {
        /// The operation.
        operation: WeightOperation,
    }
}

body! {
    /// `list_operations`.
    ListOperationsRequest {
        /// Also those that have ended.
        #[serde(default)]
        all: bool,
        /// 1 to 1000, newest first.
        #[serde(default = "default_list_limit")]
        limit: u32,
    }
}

body! {
    /// Reply to `list_operations`.
    OperationsReply {
        /// Newest first.
        operations: Vec<WeightOperation>,
    }
}

body! {
    /// `remove`.
    RemoveRequest {
        /// Whose.
        identity: RevisionIdentity,
        /// Fence.
        expected_metadata_generation: u64,
    }
}

body! {
    /// `clock` and `status`: nothing to say.
    StatusRequest {}
}

body! {
    /// Reply to `clock`.
    ClockReply {
        /// The log clock as this gateway has folded it: what `options.not_after` is measured on.
        log_clock: LogTime,
    }
}

body! {
    /// Reply to `status`.
    StatusReply {
        /// The cluster.
        cluster_id: String,
        /// Its incarnation.
        incarnation: u64,
        /// The answering replica.
        replica_id: String,
        /// How far it has folded.
        folded_seq: u64,
        /// Revisions by availability.
        revisions: std::collections::BTreeMap<String, u64>,
        /// Operations that have not ended.
        active_operations: u64,
        /// Leases that have not ended.
        active_leases: u64,
        /// The policy of revisions whose caller gives none.
        default_policy: WeightStoragePolicy,
        /// Nodes heard of.
        nodes: Vec<NodeStatus>,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_with_a_wrong_or_unknown_field_is_refused_by_name() {
        let read = |text: &str| Request::<OperationRequest>::from_json(text.as_bytes());
        assert!(read(r#"{"operation_id":"op-1.0","options":{"min_log_seq":3}}"#).is_ok());
        for (text, word) in [
            (r#"{"operation_id":"op-1.0","color":1}"#, "color"),
            (r#"{"operation_id":"op-1.0","options":{"color":1}}"#, "color"),
            (r#"{"operation_id":""}"#, "OperationId"),
            (r#"{"operation_id":7}"#, "`operation_id`"),
            (r#"{"operation_id":"op-1.0","options":{"min_log_seq":"x"}}"#, "`options.min_log_seq`"),
            ("{}", "operation_id"),
            ("[]", "map"),
            (r#"{"operation_id":"op-1.0","operation_id":"op-2.0"}"#, "`operation_id` is there twice"),
            (
                r#"{"operation_id":"op-1.0","options":{"min_log_seq":1,"min_log_seq":2}}"#,
                "`min_log_seq` is there twice",
            ),
            ("not json", "expected"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.message.contains(word), "{text}: {error}");
        }
        let policy = r#"{"identity":{"namespace":"n","resource_id":"r","revision":"v","weight_generation":1},"policy":[],"expected_metadata_generation":1}"#;
        let error = Request::<UpdatePolicyRequest>::from_json(policy.as_bytes()).unwrap_err();
        assert!(error.message.contains("`policy`: it holds a list"), "{error}");
        assert!(read(&" ".repeat(2 << 20)).unwrap_err().message.contains("2097152"));
    }
}

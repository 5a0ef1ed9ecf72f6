//! What the commands that read the log themselves share: the way to it, and one command of it as people read it.

use std::time::Duration;

use ballast_journal::{History, HistoryError, ReplicaError, Walk, connect, view_streams};
use ballast_schemas::{BallastError, Command, ErrorCode, Outcome, Reply};
use serde_json::Value;

use crate::output::{Output, percent};

const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// The past of the cluster at `nats`; nothing there is changed.
pub async fn open(nats: &str) -> Result<History, BallastError> {
    let unavailable = |reason: String| BallastError::new(ErrorCode::Unavailable, reason);
    let client =
        connect(nats, "ballast log", CONNECT_PATIENCE).await.map_err(|error| unavailable(error.to_string()))?;
    let streams = view_streams(client).await.map_err(|error| unavailable(error.to_string()))?;
    Ok(History::new(&streams))
}

/// As the CLI shows it.
pub fn failed(error: HistoryError) -> BallastError {
    let code = match &error {
        HistoryError::Zero => ErrorCode::InvalidArgument,
        HistoryError::Future { .. } => ErrorCode::NotFound,
        HistoryError::OutOfReach { .. } => ErrorCode::NotReady,
        HistoryError::Replica(ReplicaError::Log(_)) => ErrorCode::Unavailable,
        HistoryError::Replica(_) => ErrorCode::DurabilityFailed,
    };
    BallastError::new(code, error.to_string())
}

/// Says what of the range that was asked for can not be shown, or only in part.
pub fn remarks(walk: &Walk, wanted: Option<u64>, out: Output) {
    if wanted.is_some_and(|wanted| wanted.max(1) < walk.from()) {
        out.note(&format!("the log starts at entry {}; older entries are trimmed away", walk.from()));
    }
    for error in walk.passed_over() {
        out.note(&format!("passed over: {error}"));
    }
    if walk.state().is_none() {
        let before = walk.from().saturating_sub(1);
        out.note(&format!(
            "outcomes can not be known: the log before entry {} is trimmed away and no usable snapshot stands at entry {before}",
            walk.from()
        ));
    }
}

/// A command's kind and its fields, as they stand in the log.
pub fn parts(command: &Command) -> (String, Value) {
    match serde_json::to_value(command) {
        Ok(Value::Object(fields)) => fields.into_iter().next().unwrap_or_default(),
        Ok(Value::String(kind)) => (kind, Value::Null),
        Ok(other) => (other.to_string(), Value::Null),
        Err(error) => (error.to_string(), Value::Null),
    }
}

/// What a command is about, in a few words.
pub fn about(command: &Command) -> String {
    use Command as C;
    match command {
        C::CreateCluster(c) => c.cluster_id.to_string(),
        C::AnnounceReplica(c) => format!("{}, build {}", c.replica_id, c.version),
        C::ConfirmCapability(c) => c.capability.to_string(),
        C::SnapshotCommitted(c) => format!("snapshot {}", c.seq),
        C::RaiseFoldVersion(c) => format!("to {}", c.fold_version),
        C::AcquireLease(c) => format!("{} lease {} by {}", c.identity, c.lease_id, c.holder),
        C::RenewLease(c) => format!("{} lease {}", c.identity, c.lease_id),
        C::ReleaseLease(c) => format!("{} lease {}", c.identity, c.lease_id),
        C::StartMigration(c) => format!("{} to {} ({})", c.identity, c.target, c.trigger),
        C::RelievePressure(c) => format!("{} by {} bytes ({}, round {})", c.node, c.bytes, c.trigger, c.round),
        C::BeginReplacement(c) => format!("{} by #{} {}", c.base, c.target.weight_generation, c.mode),
        C::AbortReplacement(c) => format!("{} {}", c.lineage, c.request_id),
        C::ClaimOperation(c) => format!("{} by {}", c.operation_id, c.worker),
        C::OperationAdvanced(c) => {
            format!("{} epoch {}, cursor {} to {}", c.operation_id, c.epoch, c.from_cursor, c.to_cursor)
        }
        C::OperationAttemptFailed(c) => format!("{} {}: {}", c.operation_id, c.error.code, c.error.message),
        C::ParkOperation(c) => format!("{} for {}", c.operation_id, c.reason),
        C::AuthorizeRelease(c) => format!("{} {} units from cursor {}", c.operation_id, c.unit_count, c.cursor),
        C::ReplacementAdvanced(c) => format!("{} to {}", c.operation_id, c.to),
        other => match (other.operation(), other.revisions().first()) {
            (Some(operation), _) => operation.to_string(),
            (None, Some(identity)) => identity.to_string(),
            (None, None) => String::new(),
        },
    }
}

/// An outcome in a few words.
pub fn decided(outcome: Option<&Outcome>) -> String {
    match outcome {
        None => "outcome unknown".to_owned(),
        Some(Err(rejection)) => format!("refused, {}: {}", rejection.code, rejection.message),
        Some(Ok(reply)) => match reply {
            Reply::Done => "done".to_owned(),
            Reply::Clock(at) => format!("log clock {} ms", at.0),
            Reply::Round(operations) => format!("{} migrations started", operations.len()),
            Reply::Import(session) => match session.epoch {
                0 => format!("session {} until {} ms", session.session_id, session.expires_at.0),
                epoch => format!("session {}, epoch {epoch}, until {} ms", session.session_id, session.expires_at.0),
            },
            Reply::Part(part) => match part.done {
                true => format!("{}, epoch {}, done", part.participant, part.epoch),
                false => format!("{}, epoch {}", part.participant, part.epoch),
            },
            Reply::Revision(revision) => format!(
                "{} {}, {} hot, generation {}",
                revision.availability,
                revision.residency,
                percent(revision.observed_hot_ppm),
                revision.metadata_generation
            ),
            Reply::Lease(lease) => format!("until {} ms", lease.expires_at.0),
            Reply::LeaseEnded { lapsed: true } => "ended; it had lapsed".to_owned(),
            Reply::LeaseEnded { lapsed: false } => "ended".to_owned(),
            Reply::Operation(operation) => {
                format!("{} {}, epoch {}", operation.operation_id, operation.status, operation.epoch)
            }
            Reply::Claim(claim) => format!("{} {}", claim.operation_id, claim.phase),
        },
    }
}

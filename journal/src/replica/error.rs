//! Why a replica stops, and why a command or a wait has no outcome.

use std::sync::Arc;

use ballast_schemas::{BallastError, ClusterId, CommandId, Digest, EnvelopeError, ErrorCode};
use ballast_workflows::FoldHalt;

use crate::log::{AppendError, LogError, TailError};
use crate::snapshots::SnapshotError;

/// Why a replica does not start, or stopped. It can not be passed over: what follows would be folded on a wrong state.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    #[error("log entry {seq} cannot be folded: {source}")]
    Entry { seq: u64, source: EnvelopeError },
    #[error(transparent)]
    Tail(#[from] TailError),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(
        "the log starts at entry {first} and no snapshot reaches it (newest: {snapshot}): restore a snapshot or the log from a backup"
    )]
    NoSnapshot { first: u64, snapshot: u64 },
    #[error(
        "log cut short: snapshot {snapshot} is there but the log ends at {last}; bring the log back from a newer backup"
    )]
    CutShort { snapshot: u64, last: u64 },
    #[error("the log belongs to cluster {found}, expected {expected}")]
    OtherCluster { expected: ClusterId, found: ClusterId },
    #[error("the log cannot be read: {0}")]
    Log(#[from] LogError),
    #[error("the cluster's first entry was not stored: {0}")]
    Create(AppendError),
    #[error("log entry {seq} stops the fold: {source}")]
    Halt { seq: u64, source: FoldHalt },
    #[error(
        "this replica decided something else than the others: after log entry {seq} its digest is {mine}, theirs {theirs} ({with_me} replicas with it, {others} against); it stops rather than answer from a wrong state. Start it again; if it comes back, it runs another build than the others or its snapshot is wrong: `ballast snapshots`, `--restore-from SEQ`"
    )]
    Disagreement { seq: u64, mine: Digest, theirs: Digest, with_me: usize, others: usize },
    #[error("the folding task ended: {reason}")]
    Ended { reason: String },
}

/// Why a command has no outcome.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SubmitError {
    #[error("the command was not stored: {0}")]
    NotStored(Arc<AppendError>),
    #[error("the outcome of command {id} is unknown ({reason}): send it again under the same id to learn it")]
    OutcomeUnknown { id: CommandId, reason: String },
    #[error("this replica has stopped: {0}")]
    Stopped(Arc<ReplicaError>),
    #[error("the command cannot be encoded: {reason}")]
    Encode { reason: String },
    #[error(
        "the log is nearly full ({bytes} of {bytes_max} bytes) and the rest is kept for releases, deletions and snapshots: wait for the next snapshot, or raise its max_bytes"
    )]
    NearlyFull { bytes: u64, bytes_max: u64 },
}

impl SubmitError {
    /// Whether the same command (same id) can be sent again.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NotStored(error) => error.is_retryable(),
            Self::OutcomeUnknown { .. } | Self::NearlyFull { .. } => true,
            Self::Stopped(_) | Self::Encode { .. } => false,
        }
    }

    /// Whether the command may have taken effect.
    pub fn outcome_unknown(&self) -> bool {
        matches!(self, Self::OutcomeUnknown { .. })
    }
}

impl From<SubmitError> for BallastError {
    fn from(error: SubmitError) -> Self {
        let details = match &error {
            SubmitError::NearlyFull { bytes, bytes_max } => {
                serde_json::json!({"log_bytes": bytes, "log_bytes_max": bytes_max})
            }
            _ => serde_json::Value::Null,
        };
        let code = match &error {
            SubmitError::NearlyFull { .. } => ErrorCode::CapacityExhausted,
            SubmitError::NotStored(append) if matches!(**append, AppendError::Full { .. }) => {
                ErrorCode::CapacityExhausted
            }
            SubmitError::NotStored(append) if matches!(**append, AppendError::Rejected { .. }) => {
                ErrorCode::DurabilityFailed
            }
            SubmitError::Encode { .. } => ErrorCode::InvalidArgument,
            SubmitError::NotStored(_) | SubmitError::OutcomeUnknown { .. } | SubmitError::Stopped(_) => {
                ErrorCode::Unavailable
            }
        };
        BallastError::new(code, error.to_string()).with_details(details)
    }
}

/// Why a wait for a sequence ended without it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum WaitError {
    #[error("entry {wanted} was not folded within {waited_ms} ms; this replica is at {at}")]
    TimedOut { wanted: u64, at: u64, waited_ms: u64 },
    #[error("this replica has stopped: {0}")]
    Stopped(Arc<ReplicaError>),
}

impl From<WaitError> for BallastError {
    fn from(error: WaitError) -> Self {
        BallastError::new(ErrorCode::Unavailable, error.to_string())
    }
}

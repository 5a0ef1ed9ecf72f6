//! The shared log as a small trait: append bytes, tail them in order, trim the front.
//!
//! Two providers: [`crate::JetStreamLog`] (the real one) and [`crate::MemoryLog`] (tests and simulation). What the bytes
//! mean is the replica's business, not the log's. See ARCHITECTURE.md, The log and the fold.
//!
//! ```text
//!   trimmed        first_seq                 last_seq   (next append)
//!  ---------|==========|=========================|.............
//! ```

use std::fmt;

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// One entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Position in the log: starts at 1, grows by exactly one.
    pub seq: u64,
    /// When the log stored it, nanoseconds since the Unix epoch by the log server's clock (it may step back).
    pub timestamp_ns: u64,
    pub bytes: Bytes,
}

/// Where the log begins and ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogBounds {
    /// The oldest entry still there; `last_seq + 1` if there is none.
    pub first_seq: u64,
    /// The newest entry ever stored; 0 if there was none.
    pub last_seq: u64,
    /// Bytes stored.
    pub bytes: u64,
    /// Bytes at which appends are refused; `None` = no limit.
    pub bytes_max: Option<u64>,
}

/// The log. Every call may be made from many tasks at once.
pub trait Log: fmt::Debug + Send + Sync + 'static {
    /// Stores `bytes` durably and returns their sequence. A repeat with the same `id` within two minutes returns the first
    /// one's sequence and stores nothing. While the outcome is unknown the same bytes and id are sent again, for at least 15 s.
    ///
    /// With `expected_last_seq`, it is stored only if the log's last sequence is exactly that.
    fn append<'a>(
        &'a self,
        id: &'a str,
        bytes: Bytes,
        expected_last_seq: Option<u64>,
    ) -> BoxFuture<'a, Result<u64, AppendError>>;

    /// Delivers every entry from `from_seq` (at least 1) on, in order and without holes, for ever. An error is the last item.
    fn tail(&self, from_seq: u64) -> Tail;

    /// Where the log begins and ends now.
    fn bounds(&self) -> BoxFuture<'_, Result<LogBounds, LogError>>;

    /// Removes every entry up to and including `up_to_seq`.
    fn trim(&self, up_to_seq: u64) -> BoxFuture<'_, Result<(), LogError>>;
}

/// A running tail; dropping it ends it.
#[derive(Debug)]
pub struct Tail {
    records: mpsc::Receiver<Result<Record, TailError>>,
    reader: JoinHandle<()>,
}

impl Tail {
    /// For providers: `reader` feeds the channel that `records` drains.
    pub(crate) fn new(records: mpsc::Receiver<Result<Record, TailError>>, reader: JoinHandle<()>) -> Self {
        Self { records, reader }
    }

    /// The next entry; waits for it. `None` only after an error.
    pub async fn next(&mut self) -> Option<Result<Record, TailError>> {
        self.records.recv().await
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Why an append failed.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    #[error("the log is full ({description}): take a snapshot so that it can be trimmed, or raise its max_bytes")]
    Full { description: String },
    #[error("the log's last sequence is not the expected {expected}: {description}")]
    WrongLastSequence { expected: u64, description: String },
    #[error("the log can not be reached ({reason}); nothing was appended, try again")]
    Unreachable { reason: String },
    #[error("no answer from the log for {waited_ms} ms ({reason}): the append `{id}` may or may not be stored")]
    OutcomeUnknown { id: String, waited_ms: u64, reason: String },
    #[error("the log refused the append: {reason}")]
    Rejected { reason: String },
}

impl AppendError {
    /// Whether the same append can succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Full { .. } | Self::Unreachable { .. } | Self::OutcomeUnknown { .. })
    }

    /// Whether it may have been stored all the same.
    pub fn outcome_unknown(&self) -> bool {
        matches!(self, Self::OutcomeUnknown { .. })
    }
}

/// Why a tail ended. None of these is passed over: what follows a hole can not be folded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TailError {
    #[error("log entry {expected} is trimmed away, the log now starts at {first}: restore from a newer snapshot")]
    TrimGap { expected: u64, first: u64 },
    #[error("hole in the log: expected entry {expected}, found {found}; nothing may be folded past a hole")]
    Hole { expected: u64, found: u64 },
    #[error("the log ends at {last} but entry {seen} was there before: it was replaced or restored from an older copy")]
    Regressed { seen: u64, last: u64 },
    #[error("the log stream is gone")]
    Missing,
}

/// Why a question about the log has no answer.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("the log can not be reached: {reason}")]
    Unreachable { reason: String },
    #[error("the log stream is gone")]
    Missing,
}

impl LogError {
    /// Whether the same call can succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

//! The past, read only: the state after any entry that can still be reached, and the entries with what folding each decided.
//! An operator's view of the log; it appends nothing, and makes no stream.
//!
//! Not here: following the log as a replica does (`replica.rs`), writing snapshots (`upkeep.rs`).
//! See ARCHITECTURE.md, The log and the fold.

use std::sync::Arc;

use ballast_schemas::{Envelope, Event, LogTime, Outcome};
use ballast_workflows::{State, fold};

use crate::jetstream_log::JetStreamLog;
use crate::log::{Log, LogBounds, Record, Tail};
use crate::replica::ReplicaError;
use crate::snapshots::{JetStreamSnapshots, SnapshotError, SnapshotName, SnapshotStore, checked};
use crate::streams::Streams;

/// Where the past is read from.
#[derive(Debug, Clone)]
pub struct History {
    log: Arc<dyn Log>,
    snapshots: Arc<dyn SnapshotStore>,
}

/// One entry of the log, with what folding it decided.
#[derive(Debug, Clone)]
pub struct HistoryEntry {
    /// Its place.
    pub seq: u64,
    /// When the log stored it, by the log server's clock.
    pub unix_ms: u64,
    /// The commands.
    pub envelope: Envelope,
    /// `None`: what came before it is trimmed away and no snapshot stands there, so nobody can know.
    pub decided: Option<Decided>,
}

/// What folding an entry decided.
#[derive(Debug, Clone)]
pub struct Decided {
    /// The log clock at the entry.
    pub log_clock: LogTime,
    /// One per command, in order.
    pub outcomes: Vec<Outcome>,
    /// What orchestrators heard of it.
    pub events: Vec<Event>,
}

/// A snapshot as it is found in the store.
#[derive(Debug)]
pub struct StoredSnapshot {
    /// Which.
    pub name: SnapshotName,
    /// Its size; 0 when its bytes are gone.
    pub bytes: u64,
    /// Whether it reads back as its name says and its state holds every invariant; else why not.
    pub verified: Result<(), SnapshotError>,
}

/// Why a moment can not be shown.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    #[error("there is no entry 0: the log's entries are numbered from 1")]
    Zero,
    #[error("the log ends at entry {last}; entry {wanted} is not there yet")]
    Future { wanted: u64, last: u64 },
    #[error(
        "the state after entry {wanted} can not be known: the log starts at entry {first} and no usable snapshot stands before it; {reachable}"
    )]
    OutOfReach { wanted: u64, first: u64, reachable: String },
    #[error(transparent)]
    Replica(#[from] ReplicaError),
}

impl From<SnapshotError> for HistoryError {
    fn from(error: SnapshotError) -> Self {
        Self::Replica(error.into())
    }
}

impl History {
    /// The past of the cluster behind `streams`.
    pub fn new(streams: &Streams) -> Self {
        Self::over(Arc::new(JetStreamLog::new(streams)), Arc::new(JetStreamSnapshots::new(streams)))
    }

    /// The past in any log and its snapshots.
    pub fn over(log: Arc<dyn Log>, snapshots: Arc<dyn SnapshotStore>) -> Self {
        Self { log, snapshots }
    }

    /// Where the log begins and ends now.
    pub async fn bounds(&self) -> Result<LogBounds, HistoryError> {
        Ok(self.log.bounds().await.map_err(ReplicaError::Log)?)
    }

    /// Every snapshot, oldest first, each read and checked.
    pub async fn snapshots(&self) -> Result<Vec<StoredSnapshot>, HistoryError> {
        let mut found = Vec::new();
        for name in self.snapshots.list().await? {
            let stored = self.snapshots.get(name.clone()).await?;
            let bytes = stored.as_ref().map_or(0, |stored| stored.len() as u64);
            found.push(StoredSnapshot { verified: checked(&name, stored).await.map(drop), name, bytes });
        }
        Ok(found)
    }

    /// The entries from `from` on (or from the oldest that is kept). Their outcomes are known if the log's beginning or a usable
    /// snapshot stands before the first of them.
    pub async fn walk(&self, from: u64) -> Result<Walk, HistoryError> {
        let bounds = self.bounds().await?;
        let from = from.max(bounds.first_seq).max(1);
        let (state, passed_over) = self.base(from - 1, bounds).await?;
        let next = state.as_ref().map_or(from, |state| state.log_seq() + 1);
        let mut walk = Walk { tail: self.log.tail(next), state, from, passed_over };
        while walk.state.as_ref().is_some_and(|state| state.log_seq() + 1 < from) {
            walk.step().await?;
        }
        Ok(walk)
    }

    /// The state after the entry `seq`.
    pub async fn state_at(&self, seq: u64) -> Result<State, HistoryError> {
        let bounds = self.bounds().await?;
        if seq == 0 {
            return Err(HistoryError::Zero);
        }
        if seq > bounds.last_seq {
            return Err(HistoryError::Future { wanted: seq, last: bounds.last_seq });
        }
        let (state, _) = self.base(seq, bounds).await?;
        let Some(mut state) = state else {
            return Err(HistoryError::OutOfReach {
                wanted: seq,
                first: bounds.first_seq,
                reachable: self.reachable(bounds).await?,
            });
        };
        let mut tail = self.log.tail(state.log_seq() + 1);
        while state.log_seq() < seq {
            let record = next_record(&mut tail).await?;
            fold_record(&mut state, &record)?;
        }
        Ok(state)
    }

    /// The newest usable state at or before `seq` from which the log goes on, and what had to be passed over to find it. (A
    /// replica never passes over anything; whoever only looks may, and says so.)
    async fn base(&self, seq: u64, bounds: LogBounds) -> Result<(Option<State>, Vec<SnapshotError>), HistoryError> {
        let mut passed_over = Vec::new();
        let mut names = self.snapshots.list().await?;
        names.retain(|name| name.seq <= seq && name.seq + 1 >= bounds.first_seq);
        for name in names.into_iter().rev() {
            let stored = self.snapshots.get(name.clone()).await?;
            match checked(&name, stored).await {
                Ok(state) => return Ok((Some(state), passed_over)),
                Err(error) => passed_over.push(error),
            }
        }
        let from_beginning = (bounds.first_seq <= 1).then(State::new);
        Ok((from_beginning, passed_over))
    }

    async fn reachable(&self, bounds: LogBounds) -> Result<String, HistoryError> {
        let usable = self.snapshots().await?.into_iter().find(|stored| {
            stored.verified.is_ok() && stored.name.seq + 1 >= bounds.first_seq && stored.name.seq <= bounds.last_seq
        });
        Ok(match usable {
            Some(stored) => format!("entries {} to {} can be shown", stored.name.seq, bounds.last_seq),
            None => "no state of this log can be shown until its next snapshot".to_owned(),
        })
    }
}

/// Entries in order, from one on.
#[derive(Debug)]
pub struct Walk {
    tail: Tail,
    state: Option<State>,
    from: u64,
    passed_over: Vec<SnapshotError>,
}

impl Walk {
    /// The first entry that it gives.
    pub fn from(&self) -> u64 {
        self.from
    }

    /// The state after the entry given last (before the first: after the one before it); `None` when it can not be known.
    pub fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    /// Snapshots that could not be used, so that an older one was.
    pub fn passed_over(&self) -> &[SnapshotError] {
        &self.passed_over
    }

    /// The next entry; waits until there is one.
    pub async fn next(&mut self) -> Result<HistoryEntry, HistoryError> {
        self.step().await
    }

    async fn step(&mut self) -> Result<HistoryEntry, HistoryError> {
        let record = next_record(&mut self.tail).await?;
        let (seq, unix_ms) = (record.seq, record.timestamp_ns / 1_000_000);
        let Some(state) = &mut self.state else {
            return Ok(HistoryEntry { seq, unix_ms, envelope: decoded(&record)?, decided: None });
        };
        let (envelope, applied) = fold_record(state, &record)?;
        let decided = Decided { log_clock: state.log_clock(), outcomes: applied.outcomes, events: applied.events };
        Ok(HistoryEntry { seq, unix_ms, envelope, decided: Some(decided) })
    }
}

async fn next_record(tail: &mut Tail) -> Result<Record, ReplicaError> {
    match tail.next().await {
        Some(record) => Ok(record?),
        None => Err(ReplicaError::Ended { reason: "the log's tail ended".to_owned() }),
    }
}

fn decoded(record: &Record) -> Result<Envelope, ReplicaError> {
    Envelope::decode(&record.bytes).map_err(|source| ReplicaError::Entry { seq: record.seq, source })
}

fn fold_record(state: &mut State, record: &Record) -> Result<(Envelope, ballast_workflows::Applied), ReplicaError> {
    let envelope = decoded(record)?;
    let applied = fold(state, record.seq, record.timestamp_ns, &envelope)
        .map_err(|source| ReplicaError::Halt { seq: record.seq, source })?;
    Ok((envelope, applied))
}

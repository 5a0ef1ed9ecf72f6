//! A replica: folds the log into a `State`, answers reads from it, and submits commands to the log.
//!
//! Every process that needs the management state runs one. It never decides anything by itself: total order is the lock and
//! `ballast_workflows::fold` the only rule. It fails closed: an entry that can not be folded stops it for good, by name.
//! Not here: packing envelopes (`appender.rs`), snapshots, trimming and ticks (`upkeep.rs`).
//! See ARCHITECTURE.md, The shared log and the pure fold.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use ballast_schemas::{
    BallastError, COMMAND_WINDOW_MS, ClusterId, Command, CommandId, CommandRecord, CreateCluster, Envelope,
    EnvelopeError, ErrorCode, LogPosition, LogTime, Outcome, ReplicaId,
};
use ballast_workflows::{LogEntry, State, fold};
use bytes::Bytes;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::appender::{Appender, Pending, Waiters};
use crate::events::{EventBatch, EventSink};
use crate::log::{AppendError, Log, LogBounds, LogError, Record, Tail, TailError};
use crate::snapshots::{RestoreFrom, SnapshotError, SnapshotName, SnapshotStore, restore};
use crate::upkeep::{self, Ledger, UpkeepError, UpkeepOptions};

/// How long a submitter waits for its outcome: longer than any election.
const SUBMIT_PATIENCE: Duration = Duration::from_secs(30);
const BOUNDS_RETRY_EVERY: Duration = Duration::from_millis(200);
const BOUNDS_PATIENCE: Duration = Duration::from_secs(30);

/// How a replica starts and what it does beside folding.
#[derive(Debug, Clone)]
pub struct ReplicaOptions {
    /// The process that folds.
    pub replica_id: ReplicaId,
    /// The cluster that the log must belong to; `None` accepts any.
    pub cluster_id: Option<ClusterId>,
    /// The first entry to append if the log is new. `None`: wait until somebody else did.
    pub create: Option<CreateCluster>,
    /// Which snapshot to start from.
    pub restore_from: RestoreFrom,
    /// Where the events go; `None` = nowhere.
    pub events: Option<EventSink>,
    /// Ticks, snapshots and trimming.
    pub upkeep: UpkeepOptions,
}

impl ReplicaOptions {
    /// A replica that only folds, reads, submits and ticks.
    pub fn new(replica_id: ReplicaId) -> Self {
        Self {
            replica_id,
            cluster_id: None,
            create: None,
            restore_from: RestoreFrom::Newest,
            events: None,
            upkeep: UpkeepOptions::default(),
        }
    }
}

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
    #[error("the log's first entry creates no cluster")]
    NoCluster,
    #[error("the log cannot be read: {0}")]
    Log(#[from] LogError),
    #[error("the cluster's first entry was not stored: {0}")]
    Create(AppendError),
    #[error("the fold broke an invariant at entry {seq}: {reason}")]
    Invariant { seq: u64, reason: String },
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
        "the log is nearly full ({bytes} of {bytes_max} bytes) and the rest is kept for releases and deletions: wait for the next snapshot, or raise its max_bytes"
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
        BallastError::new(code, error.to_string())
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

/// A handle on a running replica; cheap to clone. The replica ends with its last handle.
#[derive(Debug, Clone)]
pub struct Replica {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    appender: Appender,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// What the tasks of a replica share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub log: Arc<dyn Log>,
    pub snapshots: Option<Arc<dyn SnapshotStore>>,
    pub options: ReplicaOptions,
    state: RwLock<State>,
    folded: watch::Sender<u64>,
    failure: watch::Sender<Option<Arc<ReplicaError>>>,
    waiters: Arc<Waiters>,
    /// The newest entries' times, and the committed snapshots, for trimming.
    pub ledger: Ledger,
}

impl Shared {
    pub(crate) fn read<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        // A panic inside the fold also ends the folding task, which marks the replica as failed.
        look(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn folded(&self) -> watch::Receiver<u64> {
        self.folded.subscribe()
    }

    fn fail(&self, error: ReplicaError) {
        tracing::error!(%error, "the replica stops");
        self.failure.send_replace(Some(Arc::new(error)));
        self.waiters.abandon();
    }
}

impl Replica {
    /// Restores, replays what the log holds now, and goes on folding. Returns once it is caught up.
    pub async fn start(
        log: Arc<dyn Log>,
        snapshots: Option<Arc<dyn SnapshotStore>>,
        options: ReplicaOptions,
    ) -> Result<Self, ReplicaError> {
        let bounds = create_if_new(&*log, &options).await?;
        let state = restore_state(snapshots.as_deref(), &options, bounds).await?;
        let at = state.log_seq();
        let waiters = Arc::new(Waiters::default());
        let ledger = Ledger::new(options.upkeep.snapshots.map_or(Duration::ZERO, |rules| rules.keep));
        let shared = Arc::new(Shared {
            log: Arc::clone(&log),
            snapshots,
            options,
            state: RwLock::new(state),
            folded: watch::Sender::new(at),
            failure: watch::Sender::new(None),
            waiters: Arc::clone(&waiters),
            ledger,
        });
        let appender = Appender::start(Arc::clone(&log), waiters);
        let folding = tokio::spawn(run_folder(Arc::clone(&shared)));
        let tasks = vec![tokio::spawn(watch_folder(folding, Arc::clone(&shared)))];
        let mut replica = Self { inner: Arc::new(Inner { shared, appender, tasks }) };
        replica.catch_up(bounds.last_seq.max(1)).await?;
        // The only handle there is, so this is always the branch taken.
        if let Some(inner) = Arc::get_mut(&mut replica.inner) {
            inner.tasks.extend(upkeep::start(&inner.shared, &inner.appender));
        }
        Ok(replica)
    }

    /// Looks at the state; keep it short, the fold waits meanwhile.
    pub fn read<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        self.inner.shared.read(look)
    }

    /// The last folded log sequence.
    pub fn log_seq(&self) -> u64 {
        *self.inner.shared.folded.borrow()
    }

    /// Wakes on every folded entry; the value is its sequence.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.shared.folded()
    }

    /// Turns to `Some` when the replica stops for good.
    pub fn failure(&self) -> watch::Receiver<Option<Arc<ReplicaError>>> {
        self.inner.shared.failure.subscribe()
    }

    /// Appends a command under a fresh id and returns its position and outcome once this replica has folded it.
    pub async fn submit(&self, command: Command) -> Result<(LogPosition, Outcome), SubmitError> {
        self.submit_as(fresh_command_id(), command).await
    }

    /// As [`Replica::submit`] under the caller's id: a repeat within a minute hears the first outcome.
    pub async fn submit_as(&self, id: CommandId, command: Command) -> Result<(LogPosition, Outcome), SubmitError> {
        self.submit_record(self.stamp(id, command)).await
    }

    /// Stamps a command with the time after which the fold refuses it: a minute of log time from now.
    pub fn stamp(&self, id: CommandId, command: Command) -> CommandRecord {
        CommandRecord { id, not_after: self.read(State::log_clock).plus_ms(COMMAND_WINDOW_MS), command }
    }

    /// Appends a stamped command; sending the same record again is safe.
    pub async fn submit_record(&self, record: CommandRecord) -> Result<(LogPosition, Outcome), SubmitError> {
        if let Some((bytes, bytes_max)) =
            self.inner.shared.ledger.nearly_full().filter(|_| !frees_or_reports(&record.command))
        {
            return Err(SubmitError::NearlyFull { bytes, bytes_max });
        }
        let id = record.id.clone();
        let answer = enqueue(&self.inner.appender, record, || self.stopped()).await?;
        let unknown = |reason: &str| SubmitError::OutcomeUnknown { id: id.clone(), reason: reason.to_owned() };
        tokio::select! {
            answered = answer => match answered {
                Ok(Ok(outcome)) => Ok(outcome),
                Ok(Err(error)) if error.outcome_unknown() => Err(unknown(&error.to_string())),
                Ok(Err(error)) => Err(SubmitError::NotStored(error)),
                Err(_) => Err(self.stopped().unwrap_or_else(|| unknown("the replica was restored meanwhile"))),
            },
            () = tokio::time::sleep(SUBMIT_PATIENCE) => Err(unknown("it was not folded in time")),
            () = self.failed() => Err(self.stopped().unwrap_or_else(|| unknown("the replica stopped"))),
        }
    }

    /// Waits until the entry `seq` is folded here (read your own writes through any replica).
    pub async fn wait_for(&self, seq: u64, patience: Duration) -> Result<(), WaitError> {
        let outcome = tokio::select! {
            reached = tokio::time::timeout(patience, self.reached(seq)) => reached.map_err(drop),
            () = self.failed() => Err(()),
        };
        let waited_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        match (outcome, self.stopped_by()) {
            (Ok(()), _) => Ok(()),
            (Err(()), Some(error)) => Err(WaitError::Stopped(error)),
            (Err(()), None) => Err(WaitError::TimedOut { wanted: seq, at: self.log_seq(), waited_ms }),
        }
    }

    /// Appends a barrier and waits for it: reads after it see everything that was acknowledged to anyone before it.
    pub async fn barrier(&self) -> Result<u64, SubmitError> {
        self.submit(Command::Barrier).await.map(|(position, _)| position.seq)
    }

    /// Writes a snapshot of the current state now; trimming follows by the usual rules.
    pub async fn snapshot_now(&self) -> Result<Option<SnapshotName>, UpkeepError> {
        upkeep::snapshot(&self.inner.shared, &self.inner.appender).await
    }

    async fn catch_up(&self, last_seq: u64) -> Result<(), ReplicaError> {
        tokio::select! {
            () = self.reached(last_seq) => self.check_cluster(),
            () = self.failed() => {
                let error = self.inner.shared.failure.send_replace(None);
                // Nobody else has this replica yet, so the error can be given back whole.
                Err(error.and_then(Arc::into_inner).unwrap_or(ReplicaError::Ended { reason: "before it caught up".to_owned() }))
            }
        }
    }

    /// Waits until `seq` is folded. (The watch's guard must not outlive the wait: it would stop the fold.)
    async fn reached(&self, seq: u64) {
        if self.changes().wait_for(|at| *at >= seq).await.is_err() {
            // The sender lives in `self`, so this can not happen; waiting is the answer that claims nothing.
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the replica has stopped.
    async fn failed(&self) {
        if self.failure().wait_for(Option::is_some).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    fn check_cluster(&self) -> Result<(), ReplicaError> {
        let found = self.read(|state| state.cluster_id().cloned()).ok_or(ReplicaError::NoCluster)?;
        match &self.inner.shared.options.cluster_id {
            Some(expected) if *expected != found => {
                Err(ReplicaError::OtherCluster { expected: expected.clone(), found })
            }
            _ => Ok(()),
        }
    }

    fn stopped_by(&self) -> Option<Arc<ReplicaError>> {
        self.inner.shared.failure.borrow().clone()
    }

    fn stopped(&self) -> Option<SubmitError> {
        self.stopped_by().map(SubmitError::Stopped)
    }
}

/// What must go on when the log is nearly full: everything that is no tenant's, and what tenants give up.
fn frees_or_reports(command: &Command) -> bool {
    let gives_up = matches!(
        command,
        Command::ReleaseLease(_)
            | Command::AbortImport(_)
            | Command::Remove(_)
            | Command::PurgeTombstone(_)
            | Command::AbortReplacement(_)
    );
    gives_up || command.tenant().is_none()
}

/// A command id that nobody used before.
pub fn fresh_command_id() -> CommandId {
    uuid::Uuid::now_v7().to_string().try_into().unwrap_or_else(|_| {
        // Proof: a UUID's text is 36 visible ASCII characters, and 1 to 128 of those are a command id.
        unreachable!("a uuid is a valid command id")
    })
}

/// Puts a command into the appender's queue; the receiver hears its outcome.
pub(crate) async fn enqueue(
    appender: &Appender,
    record: CommandRecord,
    stopped: impl Fn() -> Option<SubmitError>,
) -> Result<oneshot::Receiver<crate::appender::Answer>, SubmitError> {
    let encoded =
        rmp_serde::to_vec_named(&record).map_err(|error| SubmitError::Encode { reason: error.to_string() })?;
    let (answer, receiver) = oneshot::channel();
    if let Some(error) = stopped() {
        return Err(error);
    }
    let id = record.id.clone();
    let queued = appender.enqueue(Pending { record, bytes: encoded.len(), answer }).await;
    match queued {
        Ok(()) => Ok(receiver),
        Err(()) => {
            Err(stopped().unwrap_or(SubmitError::OutcomeUnknown { id, reason: "the appender ended".to_owned() }))
        }
    }
}

async fn bounds_of(log: &dyn Log) -> Result<LogBounds, LogError> {
    let deadline = tokio::time::Instant::now() + BOUNDS_PATIENCE;
    loop {
        match log.bounds().await {
            Err(error) if error.is_retryable() && tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(BOUNDS_RETRY_EVERY).await
            }
            answered => return answered,
        }
    }
}

/// Appends the cluster's first entry to an empty log; only one of several that try wins.
async fn create_if_new(log: &dyn Log, options: &ReplicaOptions) -> Result<LogBounds, ReplicaError> {
    let bounds = bounds_of(log).await?;
    let (0, Some(create)) = (bounds.last_seq, &options.create) else { return Ok(bounds) };
    let record = CommandRecord {
        id: fresh_command_id(),
        not_after: LogTime(COMMAND_WINDOW_MS),
        command: Command::CreateCluster(create.clone()),
    };
    let envelope = Envelope { id: uuid::Uuid::now_v7().to_string(), commands: vec![record] };
    let encoded =
        envelope.encode().map_err(|error| ReplicaError::Create(AppendError::Rejected { reason: error.to_string() }))?;
    match log.append(&envelope.id, Bytes::from(encoded), Some(0)).await {
        // Another one's first entry is as good as ours.
        Ok(_) | Err(AppendError::WrongLastSequence { .. }) => Ok(bounds_of(log).await?),
        Err(error) => Err(ReplicaError::Create(error)),
    }
}

async fn restore_state(
    snapshots: Option<&dyn SnapshotStore>,
    options: &ReplicaOptions,
    bounds: LogBounds,
) -> Result<State, ReplicaError> {
    let restored = match snapshots {
        Some(store) => restore(store, options.restore_from).await?,
        None => None,
    };
    let state = restored.unwrap_or_default();
    let at = state.log_seq();
    if at > bounds.last_seq {
        return Err(ReplicaError::CutShort { snapshot: at, last: bounds.last_seq });
    }
    if at + 1 < bounds.first_seq {
        return Err(ReplicaError::NoSnapshot { first: bounds.first_seq, snapshot: at });
    }
    Ok(state)
}

/// Marks the replica as failed when the folding task ends, however it ends.
async fn watch_folder(folding: JoinHandle<ReplicaError>, shared: Arc<Shared>) {
    let abort = AbortOnDrop(folding);
    let mut folding = abort;
    let error = match (&mut folding.0).await {
        Ok(error) => error,
        Err(ended) => ReplicaError::Ended { reason: ended.to_string() },
    };
    shared.fail(error);
}

struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn run_folder(shared: Arc<Shared>) -> ReplicaError {
    let mut tail = shared.log.tail(shared.read(State::log_seq) + 1);
    loop {
        match tail.next().await {
            Some(Ok(record)) => {
                if let Err(error) = fold_record(&shared, record).await {
                    return error;
                }
            }
            Some(Err(TailError::TrimGap { expected, first })) => match restore_over_gap(&shared, expected, first).await
            {
                Ok(newer) => tail = newer,
                Err(error) => return error,
            },
            Some(Err(error)) => return error.into(),
            None => return ReplicaError::Ended { reason: "the log's tail ended".to_owned() },
        }
    }
}

async fn fold_record(shared: &Shared, record: Record) -> Result<(), ReplicaError> {
    let Record { seq, timestamp_ns, bytes } = record;
    let envelope = Envelope::decode(&bytes).map_err(|source| ReplicaError::Entry { seq, source })?;
    shared.ledger.note_entry(seq, timestamp_ns);
    let applied = {
        let mut state = shared.state.write().unwrap_or_else(PoisonError::into_inner);
        fold(&mut state, &LogEntry { seq, timestamp_ns, envelope: &envelope })
    };
    if let Some(sink) = &shared.options.events {
        // A publisher that ended was stopped together with this process's services.
        let _ = sink.push(EventBatch { seq, events: applied.events }).await;
    }
    shared.folded.send_replace(seq);
    shared.waiters.resolve(&envelope.id, seq, applied.outcomes);
    Ok(())
}

/// This replica was away for longer than the log is kept: what it missed is in a newer snapshot.
async fn restore_over_gap(shared: &Shared, expected: u64, first: u64) -> Result<Tail, ReplicaError> {
    let Some(store) = &shared.snapshots else { return Err(TailError::TrimGap { expected, first }.into()) };
    tracing::warn!(
        expected,
        first,
        "entries were trimmed away before they were folded: restoring from the newest snapshot"
    );
    let state = restore(&**store, RestoreFrom::Newest).await?.unwrap_or_default();
    let at = state.log_seq();
    if at + 1 < first || at < expected {
        return Err(ReplicaError::NoSnapshot { first, snapshot: at });
    }
    *shared.state.write().unwrap_or_else(PoisonError::into_inner) = state;
    // Their entries may lie in the gap; their senders ask again under the same id.
    shared.waiters.abandon();
    shared.folded.send_replace(at);
    Ok(shared.log.tail(at + 1))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use ballast_schemas::ClusterConfig;
    use futures::future::BoxFuture;
    use tokio::sync::mpsc;

    use super::*;
    use crate::{MemoryLog, MemorySnapshots, SnapshotRules};

    const PATIENCE: Duration = Duration::from_secs(20);

    fn options(name: &str) -> ReplicaOptions {
        let create = CreateCluster {
            cluster_id: "test-cluster".parse().unwrap(),
            incarnation: 1,
            config: ClusterConfig::default(),
            capabilities: Vec::new(),
        };
        let rules = SnapshotRules { every_entries: u64::MAX, every: Duration::from_secs(3600), keep: Duration::ZERO };
        ReplicaOptions {
            create: Some(create),
            upkeep: UpkeepOptions { ticks: false, snapshots: Some(rules) },
            ..ReplicaOptions::new(name.parse().unwrap())
        }
    }

    /// A log whose reader falls behind a trim once: its first tail delivers one entry and then waits for `trimmed`.
    #[derive(Debug)]
    struct FallsBehind {
        log: MemoryLog,
        trimmed: Arc<AtomicBool>,
        first: AtomicBool,
    }

    impl Log for FallsBehind {
        fn append<'a>(
            &'a self,
            id: &'a str,
            bytes: Bytes,
            expected_last_seq: Option<u64>,
        ) -> BoxFuture<'a, Result<u64, AppendError>> {
            self.log.append(id, bytes, expected_last_seq)
        }

        fn tail(&self, from_seq: u64) -> Tail {
            if !self.first.swap(false, Ordering::SeqCst) {
                return self.log.tail(from_seq);
            }
            let (sender, receiver) = mpsc::channel(1);
            let (log, trimmed) = (self.log.clone(), Arc::clone(&self.trimmed));
            let reader = tokio::spawn(async move {
                let mut begin = log.tail(from_seq);
                let _ = sender.send(begin.next().await.unwrap()).await;
                while !trimmed.load(Ordering::SeqCst) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                let gap = log.tail(from_seq + 1).next().await.unwrap();
                let _ = sender.send(gap).await;
            });
            Tail::new(receiver, reader)
        }

        fn bounds(&self) -> BoxFuture<'_, Result<LogBounds, LogError>> {
            self.log.bounds()
        }

        fn trim(&self, up_to_seq: u64) -> BoxFuture<'_, Result<(), LogError>> {
            self.log.trim(up_to_seq)
        }
    }

    #[tokio::test]
    async fn a_replica_that_fell_behind_a_trim_restores_from_a_newer_snapshot_and_goes_on() {
        let log = MemoryLog::new();
        let snapshots: Arc<dyn SnapshotStore> = Arc::new(MemorySnapshots::new());
        let busy = Replica::start(Arc::new(log.clone()), Some(Arc::clone(&snapshots)), options("busy")).await.unwrap();
        let trimmed = Arc::new(AtomicBool::new(false));
        let slow_log = FallsBehind { log: log.clone(), trimmed: Arc::clone(&trimmed), first: AtomicBool::new(true) };
        let slow = Replica::start(Arc::new(slow_log), Some(snapshots), options("slow")).await.unwrap();
        for _ in 0..2 {
            busy.barrier().await.unwrap();
            busy.snapshot_now().await.unwrap().unwrap();
        }
        let seq = busy.barrier().await.unwrap();
        assert!(log.bounds().await.unwrap().first_seq > 2);
        assert_eq!(slow.log_seq(), 1);
        trimmed.store(true, Ordering::SeqCst);
        slow.wait_for(seq, PATIENCE).await.unwrap();
        assert_eq!(slow.read(State::digest), busy.read(State::digest));
    }

    #[tokio::test]
    async fn without_a_snapshot_that_reaches_it_a_trimmed_log_is_refused() {
        let log = MemoryLog::new();
        let replica = Replica::start(Arc::new(log.clone()), None, options("one")).await.unwrap();
        replica.barrier().await.unwrap();
        log.trim(1).await.unwrap();
        let error = Replica::start(Arc::new(log), None, options("two")).await.unwrap_err();
        assert!(matches!(error, ReplicaError::NoSnapshot { first: 2, snapshot: 0 }), "{error}");
    }

    #[tokio::test]
    async fn a_full_log_is_a_named_error_to_the_submitter() {
        let log = MemoryLog::new();
        let replica = Replica::start(Arc::new(log.clone()), None, options("one")).await.unwrap();
        log.set_bytes_max(Some(1));
        let error = replica.submit(Command::Barrier).await.unwrap_err();
        assert!(error.is_retryable() && !error.outcome_unknown(), "{error}");
        assert_eq!(BallastError::from(error).code, ErrorCode::CapacityExhausted);
        log.set_bytes_max(None);
        replica.barrier().await.unwrap();
    }
}

//! A replica: folds the log into a `State`, answers reads from it, and submits commands to the log.
//!
//! Every process that needs the management state runs one. It never decides anything by itself: total order is the lock and
//! `ballast_workflows::fold` the only rule. It fails closed: an entry that can not be folded stops it for good, by name.
//! Not here: packing envelopes (`appender.rs`), snapshots, trimming and ticks (`upkeep.rs`).
//! See ARCHITECTURE.md, The log and the fold.

mod error;
mod folding;

use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use ballast_schemas::{
    COMMAND_WINDOW_MS, ClusterId, Command, CommandId, CommandRecord, CreateCluster, Digest, LogPosition, LogTime,
    Outcome, ReplicaId,
};
use ballast_workflows::State;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::agreement::{Chains, DigestExchange};
use crate::appender::{Appender, Pending, Waiters};
use crate::events::EventSink;
use crate::log::Log;
use crate::snapshots::{RestoreFrom, SnapshotName, SnapshotStore};
use crate::upkeep::{self, Ledger, UpkeepError, UpkeepOptions};

pub use error::{ReplicaError, SubmitError, WaitError};

/// How long a submitter waits for its outcome: longer than any election.
pub(crate) const SUBMIT_PATIENCE: Duration = Duration::from_secs(30);

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
    /// Where digests are compared with other replicas'; `None` = nowhere.
    pub digests: Option<DigestExchange>,
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
            digests: None,
            upkeep: UpkeepOptions::default(),
        }
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
    /// For [`crate::agreement`]; whatever this replica says of itself is in here.
    pub chains: Mutex<Chains>,
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

    /// The digest after an entry that was folded not long ago.
    pub(crate) fn chain_at(&self, seq: u64) -> Option<Digest> {
        self.chains.lock().unwrap_or_else(PoisonError::into_inner).at(seq)
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
        let bounds = folding::create_if_new(&*log, &options).await?;
        let state = folding::restore_state(snapshots.as_deref(), &options, bounds).await?;
        let at = state.log_seq();
        let chains = Mutex::new(Chains::since(&state));
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
            chains,
            ledger,
        });
        let appender = Appender::start(Arc::clone(&log), waiters);
        let folder = tokio::spawn(folding::run_folder(Arc::clone(&shared)));
        let tasks = vec![tokio::spawn(folding::watch_folder(folder, Arc::clone(&shared)))];
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
        self.submit_as(fresh_command_id(), None, command).await
    }

    /// As [`Replica::submit`] under the caller's id: a repeat within a minute hears the first outcome. The fold refuses it
    /// after `not_after`, and in any case a minute of log time from now.
    pub async fn submit_as(
        &self,
        id: CommandId,
        not_after: Option<LogTime>,
        command: Command,
    ) -> Result<(LogPosition, Outcome), SubmitError> {
        let stamp = self.read(State::log_clock).plus_ms(COMMAND_WINDOW_MS);
        let not_after = not_after.map_or(stamp, |given| given.min(stamp));
        self.submit_record(CommandRecord { id, not_after, command }).await
    }

    /// Appends a stamped command; sending the same record again is safe.
    pub async fn submit_record(&self, record: CommandRecord) -> Result<(LogPosition, Outcome), SubmitError> {
        let ledger = &self.inner.shared.ledger;
        let refusal = if frees_or_reports(&record.command) { ledger.full() } else { ledger.nearly_full() };
        if let Some((bytes, bytes_max)) = refusal {
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
        let found = self.read(|state| state.cluster_id().cloned());
        match (self.inner.shared.options.cluster_id.clone(), found) {
            (Some(expected), Some(found)) if expected != found => Err(ReplicaError::OtherCluster { expected, found }),
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

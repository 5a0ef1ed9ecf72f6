//! What runs inside a replica: the cluster's first entry, the restored state, and the task that folds the log's tail.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ballast_schemas::{COMMAND_WINDOW_MS, Command, CommandRecord, Envelope, LogTime};
use ballast_workflows::{State, fold};
use bytes::Bytes;
use tokio::task::JoinHandle;

use super::{ReplicaError, ReplicaOptions, Shared, fresh_command_id};
use crate::agreement::{self, Chains};
use crate::events::EventBatch;
use crate::log::{AppendError, Log, LogBounds, LogError, Record, Tail, TailError};
use crate::snapshots::{RestoreFrom, SnapshotStore, restore};

const BOUNDS_RETRY_EVERY: Duration = Duration::from_millis(200);
const BOUNDS_PATIENCE: Duration = Duration::from_secs(30);

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
pub(super) async fn create_if_new(log: &dyn Log, options: &ReplicaOptions) -> Result<LogBounds, ReplicaError> {
    let bounds = bounds_of(log).await?;
    let (0, Some(create)) = (bounds.last_seq, &options.create) else { return Ok(bounds) };
    let record = CommandRecord {
        id: fresh_command_id(),
        not_after: LogTime(COMMAND_WINDOW_MS),
        command: Command::CreateCluster(create.clone()),
    };
    let (envelope, bytes) = Envelope::seal(uuid::Uuid::now_v7().to_string(), vec![record])
        .map_err(|error| ReplicaError::Create(AppendError::Rejected { reason: error.to_string() }))?;
    match log.append(envelope.id(), Bytes::from(bytes), Some(0)).await {
        // Another one's first entry is as good as ours.
        Ok(_) | Err(AppendError::WrongLastSequence { .. }) => Ok(bounds_of(log).await?),
        Err(error) => Err(ReplicaError::Create(error)),
    }
}

pub(super) async fn restore_state(
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

/// Marks the replica as failed when the folding task ends, however it ends, or when the others decided something else; it folds
/// no further then.
pub(super) async fn watch_folder(folding: JoinHandle<ReplicaError>, shared: Arc<Shared>) {
    let mut folding = AbortOnDrop(folding);
    let error = tokio::select! {
        ended = &mut folding.0 => ended.unwrap_or_else(|ended| ReplicaError::Ended { reason: ended.to_string() }),
        disagreement = agreement::run(Arc::clone(&shared)) => disagreement,
    };
    shared.fail(error);
}

struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(super) async fn run_folder(shared: Arc<Shared>) -> ReplicaError {
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
    shared.ledger.note_entry(seq, timestamp_ns, bytes.len());
    let (applied, chain) = {
        let mut state = shared.state.write().unwrap_or_else(PoisonError::into_inner);
        let applied =
            fold(&mut state, seq, timestamp_ns, &envelope).map_err(|source| ReplicaError::Halt { seq, source })?;
        (applied, state.chain())
    };
    shared.chains.lock().unwrap_or_else(PoisonError::into_inner).note(seq, chain);
    if let Some(sink) = &shared.options.events {
        // A publisher that ended was stopped together with this process's services.
        let _ = sink.push(EventBatch { seq, events: applied.events }).await;
    }
    shared.folded.send_replace(seq);
    shared.waiters.resolve(envelope.id(), seq, applied.outcomes);
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
    *shared.chains.lock().unwrap_or_else(PoisonError::into_inner) = Chains::since(&state);
    *shared.state.write().unwrap_or_else(PoisonError::into_inner) = state;
    // Their entries may lie in the gap; their senders ask again under the same id.
    shared.waiters.abandon();
    shared.folded.send_replace(at);
    Ok(shared.log.tail(at + 1))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use ballast_schemas::{BallastError, ClusterConfig, CreateCluster, ErrorCode};
    use futures::future::BoxFuture;
    use tokio::sync::mpsc;

    use super::*;
    use crate::{MemoryLog, MemorySnapshots, Replica, SnapshotRules, UpkeepOptions};

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
            upkeep: UpkeepOptions { ticks: false, announce: false, snapshots: Some(rules) },
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
        let deadline = std::time::Instant::now() + PATIENCE;
        while let Err(error) = replica.barrier().await {
            assert!(std::time::Instant::now() < deadline, "the room is seen at the next look: {error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

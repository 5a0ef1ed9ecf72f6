//! What a replica does for the log beside folding it: ticks while a deadline is pending, snapshots, trimming.
//!
//! Any replica may; jitter decides which does, and two at once do no harm (a tick more; snapshots named by their content).
//! Trimming follows only verified, committed snapshots whose events are stored. See ARCHITECTURE.md, Snapshots and restore.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_schemas::{COMMAND_WINDOW_MS, Command, CommandRecord, Envelope, SnapshotCommitted, TICK_SILENCE_MS};
use ballast_workflows::State;
use rand::RngExt;
use tokio::task::JoinHandle;

use crate::appender::Appender;
use crate::log::LogError;
use crate::replica::{Shared, SubmitError, enqueue, fresh_command_id};
use crate::snapshots::{SnapshotError, SnapshotName, prune, write_verified};

const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Ticks of several replicas are spread over this much.
const TICK_JITTER_MS: u64 = 500;
const SNAPSHOT_LOOK_EVERY: Duration = Duration::from_secs(5);
const SNAPSHOT_JITTER_MS: u64 = 5_000;
/// Times of entries are remembered at this spacing.
const SAMPLE_EVERY_NS: u64 = 1_000_000_000;
const EVENTS_PATIENCE: Duration = Duration::from_secs(60);

/// What a replica does beside folding.
#[derive(Debug, Clone)]
pub struct UpkeepOptions {
    /// Append a `Tick` when a deadline is pending and the log was silent for two seconds.
    pub ticks: bool,
    /// Write snapshots and trim the log; `None` = leave it to others.
    pub snapshots: Option<SnapshotRules>,
}

impl Default for UpkeepOptions {
    fn default() -> Self {
        Self { ticks: true, snapshots: None }
    }
}

/// When to write a snapshot and what to keep of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotRules {
    /// Write one when so many entries came since the last.
    pub every_entries: u64,
    /// Write one when the last is this old and anything came since.
    pub every: Duration,
    /// Entries younger than this (behind the newest) stay, whatever the snapshots say.
    pub keep: Duration,
}

impl Default for SnapshotRules {
    fn default() -> Self {
        Self { every_entries: 20_000, every: Duration::from_secs(600), keep: Duration::from_secs(600) }
    }
}

/// Why a snapshot was not written or the log not trimmed. Both are tried again by themselves.
#[derive(Debug, thiserror::Error)]
pub enum UpkeepError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error("the snapshot was not committed: {0}")]
    Commit(SubmitError),
    #[error("the log was not trimmed: {0}")]
    Trim(#[from] LogError),
    #[error("events up to entry {seq} are not stored yet: no snapshot may stand behind them")]
    EventsBehind { seq: u64 },
    #[error("this replica has no snapshot store")]
    NoStore,
}

/// What trimming and ticking need to remember of the folded entries.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    inner: Mutex<LedgerInner>,
}

#[derive(Debug, Default)]
struct LedgerInner {
    last_entry_at: Option<Instant>,
    head: (u64, u64),
    /// (sequence, timestamp) at least a second apart, oldest first.
    samples: VecDeque<(u64, u64)>,
    /// Sequences of the committed snapshots, oldest first; the last two.
    committed: VecDeque<u64>,
    committed_at: Option<Instant>,
    keep: Duration,
}

impl Ledger {
    pub(crate) fn new(keep: Duration) -> Self {
        Self { inner: Mutex::new(LedgerInner { keep, ..LedgerInner::default() }) }
    }

    fn lock(&self) -> MutexGuard<'_, LedgerInner> {
        // Every field is valid by itself at any point where a panic could happen.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note_entry(&self, seq: u64, timestamp_ns: u64, envelope: &Envelope) {
        let mut ledger = self.lock();
        ledger.last_entry_at = Some(Instant::now());
        ledger.head = (seq, timestamp_ns);
        if ledger.samples.back().is_none_or(|(_, at)| timestamp_ns.saturating_sub(*at) >= SAMPLE_EVERY_NS) {
            ledger.samples.push_back((seq, timestamp_ns));
        }
        // Only the newest sample that is old enough is ever asked for.
        let horizon = timestamp_ns.saturating_sub(nanos(ledger.keep));
        while ledger.samples.get(1).is_some_and(|(_, at)| *at <= horizon) {
            ledger.samples.pop_front();
        }
        for record in &envelope.commands {
            if let Command::SnapshotCommitted(snapshot) = &record.command {
                ledger.committed.push_back(snapshot.seq);
                ledger.committed_at = Some(Instant::now());
                while ledger.committed.len() > 2 {
                    ledger.committed.pop_front();
                }
            }
        }
    }

    fn silence(&self) -> Duration {
        self.lock().last_entry_at.map_or(Duration::MAX, |at| at.elapsed())
    }

    /// The newest committed snapshot's sequence and how long ago it was committed, as far as this replica saw.
    fn last_committed(&self) -> (u64, Option<Duration>) {
        let ledger = self.lock();
        (ledger.committed.back().copied().unwrap_or(0), ledger.committed_at.map(|at| at.elapsed()))
    }

    /// Everything up to here may go: it is in two committed snapshots and old enough. 0 = nothing.
    fn trimmable(&self) -> u64 {
        let ledger = self.lock();
        let (2, Some(older)) = (ledger.committed.len(), ledger.committed.front()) else { return 0 };
        let horizon = ledger.head.1.saturating_sub(nanos(ledger.keep));
        let old_enough = match ledger.keep.is_zero() {
            true => ledger.head.0,
            false => ledger.samples.iter().rev().find(|(_, at)| *at <= horizon).map_or(0, |(seq, _)| *seq),
        };
        (*older).min(old_enough)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Starts the tasks that the options ask for.
pub(crate) fn start(shared: &Arc<Shared>, appender: &Appender) -> Vec<JoinHandle<()>> {
    let options = &shared.options.upkeep;
    let mut tasks = Vec::new();
    if options.ticks {
        tasks.push(tokio::spawn(tick(Arc::clone(shared), appender.clone())));
    }
    if let (Some(rules), Some(_)) = (options.snapshots, &shared.snapshots) {
        tasks.push(tokio::spawn(snapshot_by_rules(Arc::clone(shared), appender.clone(), rules)));
    }
    tasks
}

async fn tick(shared: Arc<Shared>, appender: Appender) {
    let mut threshold = tick_threshold();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if shared.ledger.silence() < threshold || shared.read(|state| state.next_deadline().is_none()) {
            continue;
        }
        if let Err(error) = append(&shared, &appender, Command::Tick).await {
            tracing::debug!(%error, "tick not appended");
        }
        threshold = tick_threshold();
    }
}

fn tick_threshold() -> Duration {
    Duration::from_millis(TICK_SILENCE_MS + rand::rng().random_range(0..TICK_JITTER_MS))
}

/// Appends an upkeep command and waits until this replica has folded it.
async fn append(shared: &Shared, appender: &Appender, command: Command) -> Result<(), SubmitError> {
    let id = fresh_command_id();
    let not_after = shared.read(State::log_clock).plus_ms(COMMAND_WINDOW_MS);
    let record = CommandRecord { id: id.clone(), not_after, command };
    match enqueue(appender, record, || None).await?.await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(SubmitError::NotStored(error)),
        Err(_) => {
            Err(SubmitError::OutcomeUnknown { id, reason: "the replica was restored or stopped meanwhile".to_owned() })
        }
    }
}

async fn snapshot_by_rules(shared: Arc<Shared>, appender: Appender, rules: SnapshotRules) {
    let started = Instant::now();
    let due = || {
        let (committed, age) = shared.ledger.last_committed();
        let entries = shared.read(State::log_seq).saturating_sub(committed);
        // The snapshot's own commit is an entry too; alone it is no reason for another.
        entries >= rules.every_entries.max(2)
            || (entries >= 2 && age.unwrap_or_else(|| started.elapsed()) >= rules.every)
    };
    loop {
        tokio::time::sleep(SNAPSHOT_LOOK_EVERY.min(rules.every)).await;
        if !due() {
            continue;
        }
        let jitter = rand::rng()
            .random_range(0..SNAPSHOT_JITTER_MS.min(1 + u64::try_from(rules.every.as_millis()).unwrap_or(u64::MAX)));
        tokio::time::sleep(Duration::from_millis(jitter)).await;
        if !due() {
            continue;
        }
        match snapshot(&shared, &appender).await {
            Ok(name) => tracing::debug!(?name, "snapshot committed"),
            Err(error) => tracing::warn!(%error, "no snapshot: it is tried again"),
        }
    }
}

/// Writes and verifies a snapshot, commits it in the log, forgets old ones and trims. `None`: the newest one is as good.
pub(crate) async fn snapshot(shared: &Shared, appender: &Appender) -> Result<Option<SnapshotName>, UpkeepError> {
    let store = shared.snapshots.as_ref().ok_or(UpkeepError::NoStore)?;
    let state = shared.read(State::clone);
    let seq = state.log_seq();
    if seq <= shared.ledger.last_committed().0 {
        return Ok(None);
    }
    // Restoring from it must not lose an event, so its events come first.
    if let Some(sink) = &shared.options.events {
        let stored = tokio::time::timeout(EVENTS_PATIENCE, sink.wait_stored(seq)).await;
        if !stored.unwrap_or(false) {
            return Err(UpkeepError::EventsBehind { seq });
        }
    }
    let name = write_verified(&**store, state).await?;
    let committed = Command::SnapshotCommitted(SnapshotCommitted { seq: name.seq, digest: name.digest });
    append(shared, appender, committed).await.map_err(UpkeepError::Commit)?;
    prune(&**store).await?;
    let up_to = shared.ledger.trimmable();
    if up_to > 0 {
        shared.log.trim(up_to).await?;
    }
    Ok(Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_schemas::{CommandId, Digest, LogTime};

    const SECOND_NS: u64 = 1_000_000_000;

    fn envelope(command: Command) -> Envelope {
        let record = CommandRecord { id: CommandId::new("c").unwrap(), not_after: LogTime(0), command };
        Envelope { id: "e".to_owned(), commands: vec![record] }
    }

    fn committed(seq: u64) -> Envelope {
        envelope(Command::SnapshotCommitted(SnapshotCommitted { seq, digest: Digest::of(b"") }))
    }

    #[test]
    fn trimming_stops_at_the_older_of_two_snapshots_and_keeps_young_entries() {
        let ledger = Ledger::new(Duration::from_secs(600));
        for seq in 1..=100 {
            ledger.note_entry(seq, seq * 10 * SECOND_NS, &envelope(Command::Tick));
        }
        assert_eq!(ledger.trimmable(), 0, "no snapshot yet");
        ledger.note_entry(101, 1_010 * SECOND_NS, &committed(20));
        assert_eq!(ledger.trimmable(), 0, "one is not enough");
        ledger.note_entry(102, 1_020 * SECOND_NS, &committed(101));
        assert_eq!(ledger.trimmable(), 20);
        ledger.note_entry(103, 1_030 * SECOND_NS, &committed(102));
        assert_eq!(ledger.trimmable(), 43, "entry 43 is 600 s older than the newest");
    }
}

//! What a replica does for the log beside folding it: announcing itself, ticks while a deadline is pending, snapshots, trimming.
//!
//! Any replica may; jitter decides which does, and two at once do no harm (a tick more; snapshots named by their content).
//! Trimming follows only verified, committed snapshots whose events are stored. See ARCHITECTURE.md, The log and the fold.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_schemas::{AnnounceReplica, COMMAND_WINDOW_MS, Command, CommandRecord, SnapshotCommitted, TICK_SILENCE_MS};
use ballast_workflows::{FOLD_VERSION, State};
use rand::RngExt;
use tokio::task::JoinHandle;

use crate::appender::Appender;
use crate::log::LogError;
use crate::replica::{SUBMIT_PATIENCE, Shared, SubmitError, enqueue, fresh_command_id};
use crate::snapshots::{RestoreFrom, SnapshotError, SnapshotName, prune, write_verified};

/// The command families that this build folds.
const FAMILIES: [u8; 7] = [0, 8, 9, 10, 11, 12, 13];
/// The fold forgets a replica after ten minutes.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(300);
const ANNOUNCE_RETRY_EVERY: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Ticks of several replicas are spread over this much.
const TICK_JITTER_MS: u64 = 500;
const SNAPSHOT_LOOK_EVERY: Duration = Duration::from_secs(5);
const SNAPSHOT_JITTER_MS: u64 = 5_000;
/// Times of entries are remembered at this spacing.
const SAMPLE_EVERY_NS: u64 = 1_000_000_000;
const FILL_LOOK_EVERY: Duration = Duration::from_secs(5);
/// One tenth of the log is kept for releases, worker progress, deletions and snapshots.
const RESERVE_SHARE: u64 = 10;
/// Of that, this share of the log is kept for the commits of snapshots: a log that had no room for one could never be trimmed.
const SNAPSHOT_RESERVE_SHARE: u64 = 50;
/// What a stored entry takes beside its bytes: subject, headers, the record's own frame. An estimate until the next look.
const ENTRY_OVERHEAD_BYTES: u64 = 128;
const EVENTS_PATIENCE: Duration = Duration::from_secs(60);

/// What a replica does beside folding.
#[derive(Debug, Clone)]
pub struct UpkeepOptions {
    /// Say in the log which command families this build folds, at the start and every five minutes.
    pub announce: bool,
    /// Append a `Tick` when a deadline is pending and the log was silent for two seconds.
    pub ticks: bool,
    /// Write snapshots and trim the log; `None` = leave it to others.
    pub snapshots: Option<SnapshotRules>,
}

impl Default for UpkeepOptions {
    fn default() -> Self {
        Self { announce: true, ticks: true, snapshots: None }
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
    keep: Duration,
    /// Bytes stored, as last asked and what was folded since, and bytes at most.
    fill: Option<(u64, u64)>,
    /// The log begins behind this entry.
    trimmed: u64,
}

impl Ledger {
    pub(crate) fn new(keep: Duration) -> Self {
        Self { inner: Mutex::new(LedgerInner { keep, ..LedgerInner::default() }) }
    }

    fn lock(&self) -> MutexGuard<'_, LedgerInner> {
        // Every field is valid by itself at any point where a panic could happen.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note_entry(&self, seq: u64, timestamp_ns: u64, bytes: usize) {
        let mut ledger = self.lock();
        if let Some((stored, _)) = &mut ledger.fill {
            // A burst must not run through the reserve before the next look.
            *stored = stored.saturating_add(bytes as u64).saturating_add(ENTRY_OVERHEAD_BYTES);
        }
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
    }

    /// Bytes stored and bytes at most, once the log is so full that tenants must leave the rest to what frees it.
    pub(crate) fn nearly_full(&self) -> Option<(u64, u64)> {
        self.within(RESERVE_SHARE)
    }

    /// Bytes stored and bytes at most, once there is room for nothing but the commit of a snapshot.
    pub(crate) fn full(&self) -> Option<(u64, u64)> {
        self.within(SNAPSHOT_RESERVE_SHARE)
    }

    fn within(&self, share: u64) -> Option<(u64, u64)> {
        self.lock().fill.filter(|(bytes, bytes_max)| *bytes >= bytes_max - bytes_max / share)
    }

    fn half_full(&self) -> bool {
        self.lock().fill.is_some_and(|(bytes, bytes_max)| bytes >= bytes_max / 2)
    }

    fn silence(&self) -> Duration {
        self.lock().last_entry_at.map_or(Duration::MAX, |at| at.elapsed())
    }

    /// The newest entry that is old enough to go; 0 = none.
    fn old_enough(&self) -> u64 {
        let ledger = self.lock();
        // A log that takes nothing more grows older all the same.
        let silent = ledger.last_entry_at.map_or(Duration::ZERO, |at| at.elapsed());
        let horizon = ledger.head.1.saturating_add(nanos(silent)).saturating_sub(nanos(ledger.keep));
        match ledger.head.1 <= horizon {
            true => ledger.head.0,
            false => ledger.samples.iter().rev().find(|(_, at)| *at <= horizon).map_or(0, |(seq, _)| *seq),
        }
    }
}

/// Everything up to here may go: it is in two committed snapshots and old enough. 0 = nothing.
fn trimmable(snapshots: &[SnapshotCommitted], old_enough: u64) -> u64 {
    match snapshots {
        [.., older, _newest] => older.seq.min(old_enough),
        _ => 0,
    }
}

/// Whether one more snapshot would let more of the log go than the last one did by itself.
fn another_frees(snapshots: &[SnapshotCommitted]) -> bool {
    match snapshots {
        [.., older, newest] => newest.seq > older.seq + 2,
        _ => true,
    }
}

/// The newest committed snapshot's sequence; 0 = none.
fn newest_committed(shared: &Shared) -> u64 {
    shared.read(|state| state.snapshots().last().map_or(0, |snapshot| snapshot.seq))
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Starts the tasks that the options ask for.
pub(crate) fn start(shared: &Arc<Shared>, appender: &Appender) -> Vec<JoinHandle<()>> {
    let options = &shared.options.upkeep;
    let mut tasks = vec![tokio::spawn(watch_fill(Arc::clone(shared)))];
    if options.announce {
        tasks.push(tokio::spawn(announce(Arc::clone(shared), appender.clone())));
    }
    if options.ticks {
        tasks.push(tokio::spawn(tick(Arc::clone(shared), appender.clone())));
    }
    if let (Some(rules), Some(_)) = (options.snapshots, &shared.snapshots) {
        tasks.push(tokio::spawn(snapshot_by_rules(Arc::clone(shared), appender.clone(), rules)));
    }
    tasks
}

async fn watch_fill(shared: Arc<Shared>) {
    loop {
        look_at_fill(&shared).await;
        tokio::time::sleep(FILL_LOOK_EVERY).await;
    }
}

async fn look_at_fill(shared: &Shared) {
    // A log that does not answer is reported by whoever appends to it.
    if let Ok(bounds) = shared.log.bounds().await {
        let mut ledger = shared.ledger.lock();
        ledger.fill = bounds.bytes_max.map(|bytes_max| (bounds.bytes, bytes_max));
        ledger.trimmed = bounds.first_seq.saturating_sub(1);
    }
}

/// Confirming a capability is refused while a live replica said that it can not fold what it opens.
async fn announce(shared: Arc<Shared>, appender: Appender) {
    let announcement = AnnounceReplica {
        replica_id: shared.options.replica_id.clone(),
        families: FAMILIES.to_vec(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        fold_version: FOLD_VERSION,
    };
    loop {
        let again_after = match append(&shared, &appender, Command::AnnounceReplica(announcement.clone())).await {
            Ok(()) => ANNOUNCE_EVERY,
            Err(error) => {
                tracing::debug!(%error, "replica not announced yet");
                ANNOUNCE_RETRY_EVERY
            }
        };
        tokio::time::sleep(again_after).await;
    }
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
    let commits_a_snapshot = matches!(command, Command::SnapshotCommitted(_));
    if let Some((bytes, bytes_max)) = shared.ledger.full().filter(|_| !commits_a_snapshot) {
        return Err(SubmitError::NearlyFull { bytes, bytes_max });
    }
    let id = fresh_command_id();
    let not_after = shared.read(State::log_clock).plus_ms(COMMAND_WINDOW_MS);
    let record = CommandRecord { id: id.clone(), not_after, command };
    let answer = enqueue(appender, record, || None).await?;
    match tokio::time::timeout(SUBMIT_PATIENCE, answer).await {
        Ok(Ok(Ok(_))) => Ok(()),
        Ok(Ok(Err(error))) => Err(SubmitError::NotStored(error)),
        Ok(Err(_)) | Err(_) => {
            Err(SubmitError::OutcomeUnknown { id, reason: "the replica was restored or stopped meanwhile".to_owned() })
        }
    }
}

async fn snapshot_by_rules(shared: Arc<Shared>, appender: Appender, rules: SnapshotRules) {
    // When this replica last saw another snapshot committed.
    let (mut last, mut since) = (newest_committed(&shared), Instant::now());
    // Whoever was told to start from an older snapshot passed over a newer one that is of no use: a fresh one takes its place,
    // so that others start without being told.
    let mut takes_a_place = matches!(shared.options.restore_from, RestoreFrom::Seq(_));
    let mut is_due = || {
        let committed = newest_committed(&shared);
        if committed != last {
            (last, since) = (committed, Instant::now());
            takes_a_place = false;
        }
        let entries = shared.read(State::log_seq).saturating_sub(committed);
        let is_old = since.elapsed() >= rules.every || shared.ledger.half_full();
        // Trimming goes to the older of two snapshots, and a log that takes nothing more brings no entries for the second.
        let makes_room = shared.ledger.nearly_full().is_some() && shared.read(|state| another_frees(state.snapshots()));
        // The snapshot's own commit is an entry too; alone it is no reason for another.
        takes_a_place
            || entries >= rules.every_entries.max(2)
            || (entries >= 2 && is_old)
            || (entries >= 1 && makes_room)
    };
    let jitter_ms = SNAPSHOT_JITTER_MS.min(u64::try_from(rules.every.as_millis()).unwrap_or(u64::MAX));
    loop {
        tokio::time::sleep(SNAPSHOT_LOOK_EVERY.min(rules.every)).await;
        if !is_due() {
            // What was too young when the last snapshot was committed grows older without another.
            if shared.ledger.half_full()
                && let Err(error) = trim(&shared).await
            {
                tracing::warn!(%error, "the log is not trimmed: it is tried again");
            }
            continue;
        }
        // Whoever draws the shortest wait writes it; the others then see it committed.
        let wait_ms = rand::rng().random_range(0..=jitter_ms);
        tokio::time::sleep(Duration::from_millis(wait_ms)).await;
        if !is_due() {
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
    if seq <= newest_committed(shared) {
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
    trim(shared).await?;
    Ok(Some(name))
}

/// Removes what committed snapshots make dispensable, as far as it is old enough.
async fn trim(shared: &Shared) -> Result<(), UpkeepError> {
    let up_to = shared.read(|state| trimmable(state.snapshots(), shared.ledger.old_enough()));
    if up_to > shared.ledger.lock().trimmed {
        shared.log.trim(up_to).await?;
        look_at_fill(shared).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ballast_schemas::Digest;

    use super::*;

    #[test]
    fn trimming_stops_at_the_older_of_two_snapshots_and_keeps_young_entries() {
        let ledger = Ledger::new(Duration::from_secs(600));
        for seq in 1..=100 {
            ledger.note_entry(seq, seq * 10 * SAMPLE_EVERY_NS, 100);
        }
        assert_eq!(ledger.old_enough(), 40, "entry 40 is 600 s older than the newest");
        let committed = |seq| SnapshotCommitted { seq, digest: Digest::of(b"") };
        assert_eq!(trimmable(&[], 40), 0);
        assert_eq!(trimmable(&[committed(20)], 40), 0, "one is not enough");
        assert_eq!(trimmable(&[committed(20), committed(90)], 40), 20);
        assert_eq!(trimmable(&[committed(90), committed(95)], 40), 40);
    }

    #[test]
    fn the_last_tenth_of_the_log_is_a_reserve() {
        let ledger = Ledger::new(Duration::ZERO);
        assert_eq!(ledger.nearly_full(), None, "not known yet");
        ledger.lock().fill = Some((899, 1_000));
        assert_eq!(ledger.nearly_full(), None);
        ledger.lock().fill = Some((900, 1_000));
        assert_eq!(ledger.nearly_full(), Some((900, 1_000)));
        assert_eq!(ledger.full(), None);
        ledger.lock().fill = Some((980, 1_000));
        assert_eq!(ledger.full(), Some((980, 1_000)), "the last fiftieth is the snapshots' alone");
    }

    #[test]
    fn what_is_folded_counts_at_once() {
        let ledger = Ledger::new(Duration::ZERO);
        ledger.lock().fill = Some((0, 10_000));
        ledger.note_entry(1, SAMPLE_EVERY_NS, 9_000);
        assert_eq!(ledger.nearly_full(), Some((9_000 + ENTRY_OVERHEAD_BYTES, 10_000)));
    }

    #[test]
    fn a_log_that_takes_nothing_more_grows_older() {
        let keep = Duration::from_millis(20);
        let ledger = Ledger::new(keep);
        ledger.note_entry(1, SAMPLE_EVERY_NS, 100);
        ledger.note_entry(2, SAMPLE_EVERY_NS + 1, 100);
        std::thread::sleep(2 * keep);
        assert_eq!(ledger.old_enough(), 2);
    }

    #[test]
    fn a_second_snapshot_is_worth_it_only_if_it_frees_more() {
        let committed = |seq| SnapshotCommitted { seq, digest: Digest::of(b"") };
        assert!(another_frees(&[]) && another_frees(&[committed(7)]));
        assert!(another_frees(&[committed(7), committed(100)]));
        assert!(!another_frees(&[committed(100), committed(101)]));
    }
}

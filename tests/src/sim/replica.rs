//! A replica inside a gateway or a worker: tails the log, folds it, submits commands by group commit, ticks. As the journal's
//! replica, without its streams: what is awaited here is simulated (see ARCHITECTURE.md, The log and the fold).

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use ballast_schemas::{
    COMMAND_WINDOW_MS, Command, CommandId, CommandRecord, Envelope, LogPosition, LogTime, Outcome, TICK_SILENCE_MS,
};
use ballast_workflows::State;

use super::bugs::Bug;
use super::fold_bugs;
use super::log::{Snapshot, publish};
use super::runtime::{Giver, MS, ProcessId, SECOND, Signal, oneshot};
use super::world::{Link, W};

/// Appends in flight.
const IN_FLIGHT_MAX: u32 = 2;
/// Commands of one envelope; fewer than the real bound, so that more entries are made.
const COMMANDS_MAX: usize = 40;
/// How long an append without an answer is sent again.
const APPEND_PATIENCE: u64 = 20 * SECOND;
const APPEND_RETRY: u64 = 100 * MS;
/// How long a submitter waits for its outcome.
const SUBMIT_PATIENCE: u64 = 30 * SECOND;
/// Entries between two snapshots of one replica.
const SNAPSHOT_EVERY: u64 = 120;

type Answer = (LogPosition, Outcome);

struct Pending {
    record: CommandRecord,
    answer: Giver<Answer>,
}

pub(crate) struct Replica {
    pub w: W,
    pub name: String,
    pub process: ProcessId,
    pub link: Link,
    pub state: RefCell<State>,
    pub folded: Signal,
    waiters: RefCell<BTreeMap<String, Vec<Giver<Answer>>>>,
    queue: RefCell<VecDeque<Pending>>,
    queued: Signal,
    in_flight: Cell<u32>,
    last_entry_at: Cell<u64>,
}

impl Replica {
    /// Restores the newest snapshot, if there is one, and starts tailing from there.
    pub fn start(w: &W, name: &str, process: ProcessId, link: &Link) -> Rc<Self> {
        let replica = Rc::new(Self {
            w: Rc::clone(w),
            name: name.to_owned(),
            process,
            link: link.clone(),
            state: RefCell::default(),
            folded: Signal::default(),
            waiters: RefCell::default(),
            queue: RefCell::default(),
            queued: Signal::default(),
            in_flight: Cell::new(0),
            last_entry_at: Cell::new(w.now()),
        });
        if w.draw(|rng| rng.chance(5_000)) || w.log.first_seq() > 1 {
            replica.restore();
        }
        w.rt.spawn(process, Rc::clone(&replica).tail());
        w.rt.spawn(process, Rc::clone(&replica).append());
        w.rt.spawn(process, Rc::clone(&replica).tick());
        replica
    }

    pub fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.state.borrow())
    }

    fn restore(&self) {
        let snapshots = self.w.log.snapshots.borrow();
        let committed = self.w.log.truth(|state| state.snapshots().last().map(|snapshot| snapshot.seq));
        let Some(snapshot) = snapshots.iter().rev().find(|snapshot| Some(snapshot.seq) == committed) else { return };
        match rmp_serde::from_slice::<State>(&snapshot.bytes) {
            Ok(state) if state.digest() == snapshot.digest => *self.state.borrow_mut() = state,
            Ok(_) => self.w.violate("replay", "a snapshot reads back as another state"),
            Err(error) => self.w.violate("replay", format!("a snapshot can not be read: {error}")),
        }
        // Whoever waits for an answer hears nothing any more.
        self.waiters.borrow_mut().clear();
    }

    async fn tail(self: Rc<Self>) {
        let w = &self.w;
        loop {
            let next = self.state.borrow().log_seq() + 1;
            w.log.grew.wait_for(|| (w.log.last_seq() >= next).then_some(())).await;
            w.rt.sleep(w.hop() / 2).await;
            if w.strikes(w.plan.network.stall, "replica stalled") {
                w.rt.sleep(w.draw(|rng| rng.between(1, 40)) * SECOND).await;
            }
            while self.link.is_cut(w.now()) {
                w.rt.sleep_until(self.link.back_at()).await;
            }
            if next < w.log.first_seq() {
                w.fault("replica behind a trim");
                self.restore();
            }
            let last = w.log.last_seq();
            let mut seq = self.state.borrow().log_seq() + 1;
            while seq <= last {
                self.fold(seq);
                seq += 1;
            }
            self.folded.notify();
        }
    }

    fn fold(&self, seq: u64) {
        let w = &self.w;
        let Some((unix_ns, envelope, chain)) =
            w.log.read(seq, |entry| (entry.unix_ns, Rc::clone(&entry.envelope), entry.chain))
        else {
            return;
        };
        // A replica that reads its own clock instead of the entry's: its log clock runs elsewhere.
        let alone = w.bug(Bug::ReplicaDecidesAlone) && self.name == "g0" && seq > 40;
        let unix_ns = if alone { unix_ns + w.now() % 1_000 } else { unix_ns };
        let applied = fold_bugs::fold_with(w.plan.bug, &mut self.state.borrow_mut(), seq, unix_ns, &envelope);
        self.last_entry_at.set(w.now());
        let outcomes = match applied {
            Ok(applied) => applied.outcomes,
            Err(halt) => return w.violate("replicas agree", format!("{} stops: {halt}", self.name)),
        };
        if self.read(State::chain) != chain {
            w.violate("replicas agree", format!("{} decided entry {seq} differently", self.name));
        }
        let Some(answers) = self.waiters.borrow_mut().remove(envelope.id()) else { return };
        for ((index, answer), outcome) in (0..).zip(answers).zip(outcomes) {
            answer.give((LogPosition { seq, index }, outcome));
        }
    }

    /// Appends a command and waits for what the fold says. `None`: unknown.
    pub async fn submit_as(&self, id: CommandId, not_after: Option<LogTime>, command: Command) -> Option<Answer> {
        let w = &self.w;
        let stamp = self.read(State::log_clock).plus_ms(COMMAND_WINDOW_MS);
        let not_after = not_after.map_or(stamp, |given| given.min(stamp));
        let record = CommandRecord { id, not_after, command };
        let (giver, taker) = oneshot();
        self.queue.borrow_mut().push_back(Pending { record, answer: giver });
        self.queued.notify();
        w.rt.timeout(SUBMIT_PATIENCE, taker).await.flatten()
    }

    pub async fn submit(&self, command: Command) -> Option<Answer> {
        self.submit_as(self.w.command_id(), None, command).await
    }

    async fn append(self: Rc<Self>) {
        loop {
            let ready = || (!self.queue.borrow().is_empty() && self.in_flight.get() < IN_FLIGHT_MAX).then_some(());
            self.queued.wait_for(ready).await;
            let taken = self.queue.borrow().len().min(COMMANDS_MAX);
            let packed: Vec<Pending> = self.queue.borrow_mut().drain(..taken).collect();
            let mut commands = Vec::new();
            let mut answers = Vec::new();
            for pending in packed {
                commands.push(pending.record);
                answers.push(pending.answer);
            }
            let (envelope, bytes) = match Envelope::seal(self.w.name("env-"), commands) {
                Ok(sealed) => sealed,
                Err(error) => return self.w.violate("envelopes can be encoded", error.to_string()),
            };
            self.waiters.borrow_mut().insert(envelope.id().to_owned(), answers);
            self.in_flight.set(self.in_flight.get() + 1);
            let replica = Rc::clone(&self);
            self.w.rt.spawn(self.process, replica.append_until_known(Rc::new(envelope), Rc::from(bytes)));
        }
    }

    async fn append_until_known(self: Rc<Self>, mut envelope: Rc<Envelope>, mut bytes: Rc<[u8]>) {
        let w = &self.w;
        let stamps_anew = w.bug(Bug::LateEnvelopeStampedAnew);
        let give_up_at = if stamps_anew { u64::MAX } else { w.now() + APPEND_PATIENCE };
        loop {
            let stored = if self.link.is_cut(w.now()) {
                w.rt.sleep(SECOND).await;
                Err(())
            } else {
                publish(w, Rc::clone(&envelope), Rc::clone(&bytes)).await
            };
            if stored.is_ok() {
                // The fold answers the callers.
                break;
            }
            if w.now() >= give_up_at {
                w.fault("append outcome unknown");
                self.waiters.borrow_mut().remove(envelope.id());
                break;
            }
            w.rt.sleep(APPEND_RETRY).await;
            if stamps_anew {
                let Some(again) = self.stamped_anew(&envelope) else { break };
                (envelope, bytes) = again;
            }
        }
        self.in_flight.set(self.in_flight.get() - 1);
        self.queued.notify();
    }

    /// The planted bug: the same commands, good for another window, in an envelope that the log does not know.
    fn stamped_anew(&self, envelope: &Envelope) -> Option<(Rc<Envelope>, Rc<[u8]>)> {
        let not_after = self.read(State::log_clock).plus_ms(COMMAND_WINDOW_MS);
        let again = |record: &CommandRecord| CommandRecord { not_after, ..record.clone() };
        let commands = envelope.commands().iter().map(again).collect();
        let (envelope, bytes) = Envelope::seal(self.w.name("env-"), commands).ok()?;
        Some((Rc::new(envelope), Rc::from(bytes)))
    }

    /// While a deadline is pending and the log is silent, time goes on by a `Tick`.
    async fn tick(self: Rc<Self>) {
        let w = &self.w;
        loop {
            let due = self.last_entry_at.get() + TICK_SILENCE_MS * MS + w.draw(|rng| rng.between(0, 500)) * MS;
            w.rt.sleep_until(due.max(w.now() + 200 * MS)).await;
            let silent = w.now() - self.last_entry_at.get() >= TICK_SILENCE_MS * MS;
            if silent && self.read(State::next_deadline).is_some() {
                self.submit(Command::Tick).await;
            }
        }
    }

    /// Writes snapshots, reads them back, commits and trims.
    pub async fn keep_snapshots(self: Rc<Self>) {
        let w = &self.w;
        let mut last = 0;
        loop {
            w.work(5 * SECOND).await;
            let seq = self.state.borrow().log_seq();
            if seq < last + SNAPSHOT_EVERY {
                continue;
            }
            last = seq;
            let (bytes, digest) = self.read(|state| (rmp_serde::to_vec_named(state), state.digest()));
            let bytes = match bytes {
                Ok(bytes) => Rc::from(bytes),
                Err(error) => return w.violate("replay", format!("a snapshot can not be written: {error}")),
            };
            let back = rmp_serde::from_slice::<State>(&bytes).map(|state| state.digest());
            if !back.is_ok_and(|back| back == digest) {
                return w.violate("replay", format!("the snapshot of {seq} does not read back"));
            }
            w.log.snapshots.borrow_mut().push(Snapshot { seq, digest, bytes });
            w.fault("snapshot written");
            self.submit(Command::SnapshotCommitted(ballast_schemas::SnapshotCommitted { seq, digest })).await;
            w.log.trim(w);
        }
    }
}

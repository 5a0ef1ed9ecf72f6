//! The shared log as JetStream gives it: one total order with timestamps of whoever leads, repeats of a message id within two
//! minutes stored once, acknowledgements that get lost, leaders that change (and with them the clock), entries trimmed away
//! behind verified snapshots. Every stored entry is folded at once into the *truth*, and every invariant is checked.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use ballast_schemas::{Digest, Envelope};
use ballast_workflows::{State, check_step, fold};

use super::bugs::Bug;
use super::fold_bugs;
use super::invariants::{self, Folded};
use super::runtime::{MS, SECOND, Signal, oneshot};
use super::world::W;

/// How long the stream remembers message ids.
const IDS_REMEMBERED: u64 = 120 * SECOND;
/// How long a publisher waits for an acknowledgement.
const ACK_PATIENCE: u64 = 3 * SECOND;
/// An arbitrary beginning of wall-clock time.
const START_UNIX_NS: u64 = 1_800_000_000_000_000_000;
/// Entries younger than this are never trimmed.
const KEPT_NS: u64 = 30 * SECOND;

pub(crate) struct Entry {
    pub unix_ns: u64,
    pub stored_at: u64,
    pub envelope: Rc<Envelope>,
    /// As stored.
    pub bytes: Rc<[u8]>,
    /// What every replica must have decided up to here.
    pub chain: Digest,
}

/// A verified snapshot of the state after `seq`.
pub(crate) struct Snapshot {
    pub seq: u64,
    pub digest: Digest,
    pub bytes: Rc<[u8]>,
}

#[derive(Default)]
pub(crate) struct SharedLog {
    entries: RefCell<Vec<Entry>>,
    ids: RefCell<BTreeMap<String, (u64, u64)>>,
    pub grew: Signal,
    pub truth: RefCell<State>,
    pub snapshots: RefCell<Vec<Snapshot>>,
    first_seq: Cell<u64>,
    leaderless_until: Cell<u64>,
    clock_offset_ns: Cell<i64>,
}

impl SharedLog {
    pub fn last_seq(&self) -> u64 {
        self.entries.borrow().len() as u64
    }

    /// The oldest entry that can still be read.
    pub fn first_seq(&self) -> u64 {
        self.first_seq.get().max(1)
    }

    pub fn read<T>(&self, seq: u64, look: impl FnOnce(&Entry) -> T) -> Option<T> {
        let at = usize::try_from(seq.checked_sub(1)?).ok()?;
        self.entries.borrow().get(at).map(look)
    }

    pub fn truth<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.truth.borrow())
    }

    /// Nothing is stored until then.
    pub fn lose_leader(&self, until_ns: u64) {
        self.leaderless_until.set(until_ns);
    }

    /// The clock of the next entries, against that of the simulation.
    pub fn shift_clock(&self, by_ns: i64) {
        self.clock_offset_ns.set(self.clock_offset_ns.get().saturating_add(by_ns));
    }

    /// Stores an envelope, or finds that it was stored.
    pub fn store(&self, w: &W, envelope: &Rc<Envelope>, bytes: &Rc<[u8]>) -> u64 {
        let now = w.now();
        let known = self.ids.borrow().get(envelope.id()).copied();
        if let Some((seq, at)) = known
            && now - at <= IDS_REMEMBERED
        {
            return seq;
        }
        let seq = self.last_seq() + 1;
        let unix_ns = (START_UNIX_NS + now).saturating_add_signed(self.clock_offset_ns.get());
        self.ids.borrow_mut().insert(envelope.id().to_owned(), (seq, now));
        let before = self.truth.borrow().clone();
        let applied = fold_bugs::fold_with(w.plan.bug, &mut self.truth.borrow_mut(), seq, unix_ns, envelope);
        let applied = match applied {
            Ok(applied) => applied,
            Err(halt) => {
                w.violate("the fold goes on", halt.to_string());
                return seq;
            }
        };
        if let Some(bug) = w.plan.bug {
            fold_bugs::apply(bug, &before, &mut self.truth.borrow_mut());
        }
        let after = self.truth.borrow();
        let entry = Entry {
            unix_ns,
            stored_at: now,
            envelope: Rc::clone(envelope),
            bytes: Rc::clone(bytes),
            chain: after.chain(),
        };
        self.entries.borrow_mut().push(entry);
        for (record, outcome) in envelope.commands().iter().zip(&applied.outcomes) {
            w.trace(format!("{seq} {}", line_of(&record.command, outcome)));
        }
        if let Err(violation) = after.check_invariants().and_then(|()| check_step(&before, &after)) {
            w.violate(violation.invariant, violation.message);
        }
        let records = invariants::every_revision(&after);
        let folded = Folded { before: &before, after: &after, envelope, outcomes: &applied.outcomes, records };
        invariants::check_entry(w, &folded);
        drop(after);
        self.grew.notify();
        seq
    }

    /// Entries that no replica needs any more go, as the trimming rules have it.
    pub fn trim(&self, w: &W) {
        let snapshots = self.truth(|state| state.snapshots().to_vec());
        let [.., older, _] = snapshots.as_slice() else { return };
        let old = self.entries.borrow().partition_point(|entry| entry.stored_at + KEPT_NS <= w.now()) as u64;
        let up_to = older.seq.min(old);
        if up_to + 1 > self.first_seq() {
            self.first_seq.set(up_to + 1);
            w.trace(format!("the log begins at {} now", up_to + 1));
        }
    }
}

/// One attempt to append. `Err`: no acknowledgement; it may be stored, now or later.
pub(crate) async fn publish(w: &W, envelope: Rc<Envelope>, bytes: Rc<[u8]>) -> Result<u64, ()> {
    let network = &w.plan.network;
    let (giver, taker) = oneshot();
    let world = Rc::clone(w);
    let late = w.strikes(network.append_late, "append late").then(|| w.draw(|rng| rng.between(5, 150) * SECOND));
    let lost = late.is_none() && w.strikes(network.lose, "append lost");
    if !lost {
        let delay = late.unwrap_or_else(|| w.hop());
        w.rt.spawn(w.network, async move {
            let w = world;
            w.rt.sleep(delay).await;
            let leaderless = w.log.leaderless_until.get();
            if leaderless > w.now() {
                // Some of what is sent into an election is stored when it is over, unacknowledged; the rest is gone.
                if w.draw(|rng| rng.chance(5_000)) {
                    return;
                }
                w.rt.sleep_until(leaderless + MS).await;
                w.fault("append stored by the next leader");
                w.log.store(&w, &envelope, &bytes);
                return;
            }
            let seq = w.log.store(&w, &envelope, &bytes);
            // One synchronised write.
            w.rt.sleep(w.draw(|rng| rng.between(300_000, 1_500_000))).await;
            if !w.strikes(w.plan.network.ack_lost, "append acknowledgement lost") {
                giver.give(seq);
            }
        });
    }
    match w.rt.timeout(ACK_PATIENCE, taker).await {
        Some(Some(seq)) => Ok(seq),
        // The giver went without a word: nobody will say more, but the publisher can not know that.
        Some(None) => {
            w.rt.sleep(ACK_PATIENCE).await;
            Err(())
        }
        None => Err(()),
    }
}

/// Folds the whole log again from what was stored, and from every kept snapshot: every way must end in the same state.
pub(crate) fn fold_again(w: &W) {
    if w.plan.bug.is_some_and(fold_bugs::is_of_the_fold) || w.bug(Bug::ReplicaDecidesAlone) {
        return;
    }
    let truth = w.log.truth(State::digest);
    let snapshots = w.log.snapshots.borrow();
    let starts = std::iter::once(None).chain(snapshots.iter().map(Some));
    let entries = w.log.entries.borrow();
    for start in starts {
        let begun = start.map_or(Ok(State::new()), |snapshot| rmp_serde::from_slice::<State>(&snapshot.bytes));
        let mut state = match begun {
            Ok(state) => state,
            Err(error) => return w.violate("replay", format!("a snapshot can not be read: {error}")),
        };
        if let Some(snapshot) = start
            && state.digest() != snapshot.digest
        {
            return w.violate("replay", format!("the snapshot of {} reads back as another state", snapshot.seq));
        }
        let from = state.log_seq();
        for (seq, entry) in (from + 1..).zip(entries.iter().skip(from as usize)) {
            let envelope = match Envelope::decode(&entry.bytes) {
                Ok(envelope) => envelope,
                Err(error) => return w.violate("replay", format!("entry {seq} can not be read: {error}")),
            };
            if let Err(halt) = fold(&mut state, seq, entry.unix_ns, &envelope) {
                return w.violate("replay", halt.to_string());
            }
            if state.chain() != entry.chain {
                return w.violate("replay", format!("folded from {from} on, entry {seq} is decided differently"));
            }
        }
        if state.digest() != truth {
            return w.violate("replay", format!("folded from {from} on, the log ends in another state"));
        }
    }
}

fn line_of(command: &ballast_schemas::Command, outcome: &ballast_schemas::Outcome) -> String {
    let asked = format!("{command:?}");
    let asked: String = asked.chars().take(260).collect();
    match outcome {
        Ok(_) => format!("{asked}: accepted"),
        Err(rejection) => format!("{asked}: {}, {}", rejection.code, rejection.message),
    }
}

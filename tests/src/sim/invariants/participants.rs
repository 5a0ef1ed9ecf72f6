//! Many writers, one commit: an import of several participants is published only after each of them has said that its part is
//! there, and nobody speaks for a participant but its latest run, in the session that was declared.

use std::collections::{BTreeMap, BTreeSet};

use ballast_schemas::{Availability, Command, InstanceId, Outcome, PartWriter, ParticipantId, Reply, WriterId};

use super::{Folded, Watch};
use crate::sim::world::W;

const NAME: &str = "participants";

/// What was said in one session. Begun again under its name after its end, it is another one.
pub(super) struct Declared {
    instance: InstanceId,
    participants: BTreeSet<ParticipantId>,
    /// The highest epoch that each was given.
    epochs: BTreeMap<ParticipantId, u64>,
    /// By run. A repeat of a join hears its old outcome, whoever has joined since.
    runs: BTreeMap<WriterId, u64>,
    done: BTreeSet<ParticipantId>,
}

impl Declared {
    fn new(instance: InstanceId, participants: BTreeSet<ParticipantId>) -> Self {
        let (epochs, runs, done) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { instance, participants, epochs, runs, done }
    }
}

pub(super) fn check(w: &W, watch: &mut Watch, folded: &Folded<'_>) {
    for (record, outcome) in folded.envelope.commands().iter().zip(folded.outcomes) {
        if let Err(message) = check_one(watch, folded, &record.command, outcome) {
            return w.violate(NAME, message);
        }
    }
}

fn check_one(watch: &mut Watch, folded: &Folded<'_>, command: &Command, outcome: &Outcome) -> Result<(), String> {
    let Ok(reply) = outcome else { return Ok(()) };
    match command {
        Command::BeginSharedImport(begin) => {
            let Reply::Import(session) = reply else { return Err(format!("a begin was answered {reply:?}")) };
            let known = watch.sessions.get(&session.session_id);
            if known.is_none_or(|known| known.instance.position < session.instance.position) {
                let declared = Declared::new(session.instance.clone(), begin.participants.iter().cloned().collect());
                watch.sessions.insert(session.session_id.clone(), declared);
            }
        }
        Command::JoinImport(join) => {
            let (session, participant) = (&join.session_id, &join.participant);
            let Some(declared) = watch.sessions.get_mut(session).filter(|it| it.participants.contains(participant))
            else {
                return Err(format!("{participant} joined {session}, in which it was not declared"));
            };
            let Reply::Part(part) = reply else { return Err(format!("{participant} was answered {reply:?}")) };
            if part.instance != declared.instance {
                return Ok(());
            }
            let highest = declared.epochs.entry(participant.clone()).or_default();
            let expected = declared.runs.entry(join.writer_id.clone()).or_insert(*highest + 1);
            if part.epoch != *expected {
                return Err(format!("{participant} of {session} got epoch {}, expected {expected}", part.epoch));
            }
            *highest = part.epoch.max(*highest);
        }
        Command::RenewPart(own) => speaks(watch, own)?,
        Command::FinishPart(own) => {
            speaks(watch, own)?;
            // A repeat hears its old outcome, of whichever import that was.
            let declared = watch.sessions.get_mut(&own.session_id).filter(|it| it.instance == own.instance);
            if let Some(declared) = declared {
                declared.done.insert(own.participant.clone());
            }
        }
        Command::CommitImport(commit) => {
            let was = folded.before.revision(&commit.identity).map(|record| record.availability);
            let missing = |declared: &&Declared| declared.participants != declared.done;
            if let (Some(declared), true) =
                (watch.sessions.get(&commit.session_id).filter(missing), was == Some(Availability::Importing))
            {
                let done = declared.done.len();
                return Err(format!(
                    "{} was published with {done} of {} parts",
                    commit.identity,
                    declared.participants.len()
                ));
            }
        }
        _ => {}
    }
    Ok(())
}

/// Only the latest run of a participant is heard. A repeat of what an earlier one said hears its old outcome.
fn speaks(watch: &Watch, own: &PartWriter) -> Result<(), String> {
    let declared = watch.sessions.get(&own.session_id);
    // A repeat of what was said of an import before this one hears its old outcome.
    if declared.is_some_and(|declared| own.instance.position < declared.instance.position) {
        return Ok(());
    }
    match declared.and_then(|declared| declared.epochs.get(&own.participant)) {
        Some(highest) if own.epoch <= *highest => Ok(()),
        other => Err(format!("{} spoke under epoch {}, it was given {other:?}", own.participant, own.epoch)),
    }
}

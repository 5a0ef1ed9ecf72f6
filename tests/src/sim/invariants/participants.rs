//! Many writers, one commit: an import of several participants is published only after the latest run of each has said that its
//! part is there; nobody speaks for a participant, or for the session, but the latest run, in the session that was declared. A
//! repeat is told apart by its command id: it hears its old outcome, whoever has come since.

use std::collections::{BTreeMap, BTreeSet};

use ballast_schemas::{
    Command, CommandId, Coordinator, InstanceId, JoinImport, PartWriter, ParticipantId, Reply, RevisionIdentity,
    SessionId, WriterId,
};

use super::{Folded, Watch};
use crate::sim::world::W;

const NAME: &str = "participants";

/// What was said in one session. Begun again under its name after its end, it is another one.
pub(super) struct Declared {
    instance: InstanceId,
    participants: BTreeSet<ParticipantId>,
    /// The latest run of those that joined.
    parts: BTreeMap<ParticipantId, Run>,
    /// Every run that has coordinated it, the latest last; its epoch is their number.
    coordinators: Vec<WriterId>,
}

/// The latest run of a participant.
struct Run {
    writer_id: WriterId,
    epoch: u64,
    done: bool,
}

impl Declared {
    fn epoch(&self) -> u64 {
        self.coordinators.len() as u64
    }

    fn is_done(&self, participant: &ParticipantId) -> bool {
        self.parts.get(participant).is_some_and(|run| run.done)
    }
}

pub(super) fn check(w: &W, watch: &mut Watch, folded: &Folded<'_>) {
    let mut ended = BTreeSet::new();
    for (record, outcome) in folded.envelope.commands().iter().zip(folded.outcomes) {
        let Ok(reply) = outcome else { continue };
        if let Err(message) = check_one(watch, folded, &mut ended, (&record.id, &record.command), reply) {
            return w.violate(NAME, message);
        }
    }
}

/// `ended`: the imports that an earlier command of the entry may have ended.
fn check_one(
    watch: &mut Watch,
    folded: &Folded<'_>,
    ended: &mut BTreeSet<RevisionIdentity>,
    (id, command): (&CommandId, &Command),
    reply: &Reply,
) -> Result<(), String> {
    let (identity, session_id, coordinator) = match command {
        Command::BeginSharedImport(_) | Command::JoinImport(_) | Command::RenewPart(_) | Command::FinishPart(_) => {
            return match watch.heard.insert(id.clone()) {
                true => check_part(watch, command, reply),
                false => Ok(()),
            };
        }
        Command::RenewImport(it) => (&it.identity, &it.session_id, &it.coordinator),
        Command::CommitImport(it) => (&it.identity, &it.session_id, &it.coordinator),
        Command::AbortImport(it) => (&it.identity, &it.session_id, &it.coordinator),
        _ => {
            ended.extend(command.revisions().into_iter().cloned());
            return Ok(());
        }
    };
    if !watch.heard.insert(id.clone()) {
        return Ok(());
    }
    // An abort of what is being deleted, and a commit of what is published as it was meant, are accepted from anybody.
    let was_open = folded.before.import(identity).is_some_and(|session| {
        session.session_id == *session_id && session.expires_at > folded.after.log_clock() && !ended.contains(identity)
    });
    if !matches!(command, Command::RenewImport(_)) {
        ended.insert(identity.clone());
    }
    let Some(declared) = watch.sessions.get(session_id).filter(|_| was_open) else { return Ok(()) };
    let expected = Coordinator { instance: declared.instance.clone(), epoch: declared.epoch() };
    if coordinator.as_ref() != Some(&expected) {
        return Err(format!("{coordinator:?} spoke for {session_id}, which {expected:?} coordinates"));
    }
    let missing = || declared.participants.iter().find(|participant| !declared.is_done(participant));
    match (command, missing()) {
        (Command::CommitImport(_), Some(missing)) => Err(format!("{identity} was published without {missing}")),
        _ => Ok(()),
    }
}

fn check_part(watch: &mut Watch, command: &Command, reply: &Reply) -> Result<(), String> {
    match command {
        Command::BeginSharedImport(begin) => {
            let Reply::Import(session) = reply else { return Err(format!("a begin was answered {reply:?}")) };
            let known = watch.sessions.get(&session.session_id);
            if known.is_none_or(|known| known.instance.position < session.instance.position) {
                let declared = Declared {
                    instance: session.instance.clone(),
                    participants: begin.participants.iter().cloned().collect(),
                    parts: BTreeMap::new(),
                    coordinators: Vec::new(),
                };
                watch.sessions.insert(session.session_id.clone(), declared);
            }
            let Some(declared) = watch.sessions.get_mut(&session.session_id) else { return Ok(()) };
            if declared.coordinators.last() != Some(&begin.writer_id) {
                if declared.coordinators.contains(&begin.writer_id) {
                    return Err(format!("{} was replaced and took {} back", begin.writer_id, session.session_id));
                }
                declared.coordinators.push(begin.writer_id.clone());
            }
            let expected = (&declared.instance, declared.epoch());
            if (&session.instance, session.epoch) != expected {
                return Err(format!("{} was answered {session:?}, expected {expected:?}", begin.writer_id));
            }
        }
        Command::JoinImport(join) => joined(watch, join, reply)?,
        Command::RenewPart(own) => drop(speaks(watch, own)?),
        Command::FinishPart(own) => speaks(watch, own)?.done = true,
        _ => {}
    }
    Ok(())
}

fn joined(watch: &mut Watch, join: &JoinImport, reply: &Reply) -> Result<(), String> {
    let JoinImport { session_id, participant, writer_id, .. } = join;
    let declared = open(watch, session_id)?;
    if !declared.participants.contains(participant) {
        return Err(format!("{participant} joined {session_id}, in which it was not declared"));
    }
    let Reply::Part(part) = reply else { return Err(format!("{participant} was answered {reply:?}")) };
    let last = declared.parts.get(participant).map_or(0, |run| run.epoch);
    if declared.parts.get(participant).is_none_or(|run| run.writer_id != *writer_id) {
        let run = Run { writer_id: writer_id.clone(), epoch: last + 1, done: false };
        declared.parts.insert(participant.clone(), run);
    }
    let expected = declared.parts.get(participant).map(|run| (&declared.instance, run.epoch, run.done));
    match expected == Some((&part.instance, part.epoch, part.done)) {
        true => Ok(()),
        false => Err(format!("{participant} of {session_id} was answered {part:?}, expected {expected:?}")),
    }
}

/// Only the latest run of a participant is heard.
fn speaks<'a>(watch: &'a mut Watch, own: &PartWriter) -> Result<&'a mut Run, String> {
    let declared = open(watch, &own.session_id)?;
    let is_own = declared.instance == own.instance;
    let run = declared.parts.get_mut(&own.participant).filter(|run| is_own && run.epoch == own.epoch);
    run.ok_or_else(|| {
        format!("{} spoke under epoch {} of {}, and is not its latest run", own.participant, own.epoch, own.instance)
    })
}

fn open<'a>(watch: &'a mut Watch, session_id: &SessionId) -> Result<&'a mut Declared, String> {
    watch.sessions.get_mut(session_id).ok_or_else(|| format!("session {session_id} was never begun with participants"))
}

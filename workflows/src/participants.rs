//! Imports with several writers (RFC, Import and READY Publication; ARCHITECTURE.md, Import sessions): the participants are
//! declared with the session, each joins under an epoch of its own and says when its part is on the nodes. The commit waits
//! for all of them; a run that was replaced, and one of another session, are refused.

use std::collections::{BTreeMap, BTreeSet};

use ballast_schemas::{
    BallastError, BeginSharedImport, Coordinator, ErrorCode, IMPORT_PARTICIPANT_NAMES_BYTES_MAX,
    IMPORT_PARTICIPANTS_MAX, ImportPart, ImportSession, ImportView, InstanceId, JoinImport, LogTime, Outcome,
    PartState, PartView, PartWriter, ParticipantId, Rejection, Reply, RevisionIdentity, SessionId, missing_parts,
};

use crate::fold::{Fold, details, reject};
use crate::revision::{Import, Part};
use crate::state::State;

/// Runs of a session's coordinator that are remembered: the begin of one that was replaced may be read late, and must not
/// replace its successor.
pub(crate) const COORDINATORS_REMEMBERED: usize = 8;

/// Every participant, before it has joined.
pub(crate) fn declared(shared: &BeginSharedImport, now: LogTime) -> BTreeMap<ParticipantId, Part> {
    let part = Part { epoch: 0, writer_id: None, heard_at: now, done: false, incarnations: BTreeMap::new() };
    shared.participants.iter().map(|participant| (participant.clone(), part.clone())).collect()
}

impl State {
    /// The latest run of a participant may speak.
    ///
    /// # Errors
    /// As [`State::open_import`]; `LEASE_EXPIRED` for another import, `CONFLICT` under another epoch than the participant's.
    pub fn expect_part(&self, own: &PartWriter) -> Result<(), BallastError> {
        self.expect_epoch(own).map_err(BallastError::from)
    }

    fn expect_epoch(&self, own: &PartWriter) -> Result<(), Rejection> {
        let PartWriter { identity, session_id, participant, instance, epoch, .. } = own;
        let import = self.open(identity, session_id)?;
        import.expect_instance(instance, "join it again")?;
        let part = import.part(participant)?;
        let message = match part.epoch {
            0 => format!(
                "participant {participant} of session {session_id} has not joined; it joins before it says more"
            ),
            latest if latest == *epoch => return Ok(()),
            latest => format!(
                "participant {participant} of session {session_id} is at epoch {latest}, not {epoch}: another run of it has joined"
            ),
        };
        Err(Rejection::new(ErrorCode::Conflict, message)
            .with_details(details([("participant", participant.as_str().into()), ("epoch", part.epoch.into())])))
    }
}

impl Part {
    /// As outcomes say it.
    pub fn view(&self, participant: &ParticipantId, instance: &InstanceId) -> ImportPart {
        ImportPart {
            participant: participant.clone(),
            instance: instance.clone(),
            epoch: self.epoch,
            heard_at: self.heard_at,
            done: self.done,
            incarnations: BTreeMap::new(),
        }
    }

    fn state(&self) -> PartState {
        match (self.done, self.epoch) {
            (true, _) => PartState::Done,
            (false, 0) => PartState::Declared,
            (false, _) => PartState::Writing,
        }
    }
}

impl Fold<'_> {
    pub fn begin_shared_import(&mut self, command: &BeginSharedImport) -> Outcome {
        let different: BTreeSet<&ParticipantId> = command.participants.iter().collect();
        let count = command.participants.len();
        if different.len() != count || !(1..=IMPORT_PARTICIPANTS_MAX).contains(&count) {
            return reject(
                ErrorCode::InvalidArgument,
                format!(
                    "the import names {count} participants, {} of them different; give 1 to {IMPORT_PARTICIPANTS_MAX} different ones",
                    different.len()
                ),
            );
        }
        let bytes = command.participants.iter().fold(0_usize, |sum, name| sum.saturating_add(name.as_str().len()));
        if bytes > IMPORT_PARTICIPANT_NAMES_BYTES_MAX {
            return reject(
                ErrorCode::InvalidArgument,
                format!(
                    "the names of the {count} participants have {bytes} bytes; at most {IMPORT_PARTICIPANT_NAMES_BYTES_MAX} are allowed, give shorter ones"
                ),
            );
        }
        self.begin_import(&command.import, Some(command))
    }

    /// A session with several writers was found open by the run that coordinates it, or by another one, which takes its place.
    pub fn coordinate(&mut self, command: &BeginSharedImport) -> Outcome {
        let BeginSharedImport { import: begun, writer_id, .. } = command;
        let import = self.state.open(&begun.identity, &begun.session_id)?;
        if import.coordinators.last() == Some(writer_id) {
            return Ok(Reply::Import(Box::new(import.session.clone())));
        }
        if import.coordinators.contains(writer_id) {
            return Err(import.superseded());
        }
        let expires_at = self.clock().plus_ms(import.session.ttl_ms);
        self.edit_revision(&begun.identity, |revision| {
            let Some(import) = &mut revision.import else { return };
            import.session.epoch = import.session.epoch.saturating_add(1);
            import.session.expires_at = import.session.expires_at.max(expires_at);
            import.coordinators.push(writer_id.clone());
            if import.coordinators.len() > COORDINATORS_REMEMBERED {
                import.coordinators.remove(0);
            }
        });
        let session = &self.state.open(&begun.identity, &begun.session_id)?.session;
        Ok(Reply::Import(Box::new(session.clone())))
    }

    pub fn join_import(&mut self, command: &JoinImport) -> Outcome {
        let JoinImport { identity, session_id, participant, writer_id, placement_digest } = command;
        let import = self.state.open(identity, session_id)?;
        let part = import.part(participant)?;
        let expected = import.session.placement_digest;
        if expected != *placement_digest {
            let message = format!(
                "participant {participant} has another geometry ({placement_digest}) than session {session_id} of {identity} ({expected}); all describe the same whole model"
            );
            return Err(Rejection::new(ErrorCode::Conflict, message)
                .with_details(details([("participant", participant.as_str().into())])));
        }
        let again = part.writer_id.as_ref() == Some(writer_id);
        self.hear_of(identity, session_id, participant, |part| {
            if again {
                return;
            }
            // Another run may hold other bytes, and offers them from now on: what the one before it had finished is open again.
            part.epoch = part.epoch.saturating_add(1);
            part.writer_id = Some(writer_id.clone());
            part.done = false;
            part.incarnations.clear();
        })
    }

    pub fn renew_part(&mut self, command: &PartWriter) -> Outcome {
        self.state.expect_epoch(command)?;
        self.hear_of(&command.identity, &command.session_id, &command.participant, |_| {})
    }

    pub fn finish_part(&mut self, command: &PartWriter) -> Outcome {
        self.state.expect_epoch(command)?;
        let placement = &self.state.open(&command.identity, &command.session_id)?.session.placement;
        let placed = command.incarnations.iter().filter(|(node, _)| placement.contains(node));
        let incarnations: BTreeMap<_, _> = placed.map(|(node, run)| (node.clone(), run.clone())).collect();
        self.hear_of(&command.identity, &command.session_id, &command.participant, |part| {
            part.done = true;
            part.incarnations = incarnations;
        })
    }

    /// A sign of life: whoever gives one keeps the session open.
    fn hear_of(
        &mut self,
        identity: &RevisionIdentity,
        session_id: &SessionId,
        participant: &ParticipantId,
        change: impl FnOnce(&mut Part),
    ) -> Outcome {
        let clock = self.clock();
        let expires_at = clock.plus_ms(self.state.open(identity, session_id)?.session.ttl_ms);
        self.edit_revision(identity, |revision| {
            let Some(import) = &mut revision.import else { return };
            import.session.expires_at = import.session.expires_at.max(expires_at);
            if let Some(part) = import.parts.get_mut(participant) {
                part.heard_at = clock;
                change(part);
            }
        });
        let import = self.state.open(identity, session_id)?;
        Ok(Reply::Part(Box::new(import.part(participant)?.view(participant, &import.session.instance))))
    }
}

impl Import {
    /// Every participant by name.
    pub fn views(&self) -> Vec<ImportPart> {
        let instance = &self.session.instance;
        let view = |(participant, part): (&ParticipantId, &Part)| {
            let incarnations = part.incarnations.clone();
            ImportPart { incarnations, ..part.view(participant, instance) }
        };
        self.parts.iter().map(view).collect()
    }

    /// What everybody may see of an import with several writers; the name of one with a single writer is its importer's alone.
    pub fn shown(&self, now: LogTime) -> Option<ImportView> {
        let ImportSession { session_id, epoch, expires_at, .. } = &self.session;
        let part = |(participant, part): (&ParticipantId, &Part)| PartView {
            participant: participant.clone(),
            state: part.state(),
            epoch: part.epoch,
            silent_ms: now.since(part.heard_at),
        };
        (*epoch > 0).then(|| ImportView {
            session_id: session_id.clone(),
            epoch: *epoch,
            ends_in_ms: expires_at.since(now),
            participants: self.parts.iter().map(part).collect(),
        })
    }

    fn part(&self, participant: &ParticipantId) -> Result<&Part, Rejection> {
        self.parts.get(participant).ok_or_else(|| {
            let session_id = &self.session.session_id;
            let message = match self.parts.is_empty() {
                true => format!(
                    "the import of {} under session {session_id} has one writer; begin it with its participants to have several",
                    self.session.identity
                ),
                false => format!(
                    "{participant} is none of the {} participants that session {session_id} was begun with",
                    self.parts.len()
                ),
            };
            Rejection::new(ErrorCode::InvalidArgument, message)
                .with_details(details([("participant", participant.as_str().into())]))
        })
    }

    /// Whoever is missing is named, with when it was last heard of.
    pub fn expect_all_done(&self, now: LogTime) -> Result<(), Rejection> {
        missing_parts(&self.views(), now).map_or(Ok(()), Err)
    }

    /// A session with several writers listens to the latest run of its coordinator alone. One with a single writer has the
    /// name that its importer made up, which nobody else knows.
    pub fn expect_coordinator(&self, coordinator: Option<&Coordinator>) -> Result<(), Rejection> {
        let ImportSession { session_id, identity, epoch, .. } = &self.session;
        match coordinator {
            None if *epoch == 0 => Ok(()),
            None => {
                let message = format!(
                    "session {session_id} of {identity} has several writers; say with `coordinator` which run speaks for it: the instance and the epoch that its begin answered"
                );
                Err(Rejection::new(ErrorCode::InvalidArgument, message))
            }
            Some(Coordinator { instance, epoch: own }) => {
                self.expect_instance(instance, "begin another import")?;
                if own == epoch { Ok(()) } else { Err(self.superseded()) }
            }
        }
    }

    fn superseded(&self) -> Rejection {
        let ImportSession { session_id, identity, epoch, .. } = &self.session;
        let message = format!(
            "session {session_id} of {identity} is at epoch {epoch} of its coordinator: another run has taken it over, leave it to that one"
        );
        Rejection::new(ErrorCode::Conflict, message).with_details(details([("epoch", (*epoch).into())]))
    }

    /// A session's epochs begin at 1 again when its name is begun again.
    fn expect_instance(&self, instance: &InstanceId, otherwise: &str) -> Result<(), Rejection> {
        let ImportSession { session_id, identity, instance: open, .. } = &self.session;
        if open == instance {
            return Ok(());
        }
        let message = format!(
            "the import of {instance} has ended, and session {session_id} of {identity} was begun again; {otherwise}"
        );
        Err(Rejection::new(ErrorCode::LeaseExpired, message))
    }
}

#[cfg(test)]
mod tests;

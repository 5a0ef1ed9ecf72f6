//! Imports with several writers (RFC, Import and READY Publication; ARCHITECTURE.md, Import sessions): the participants are
//! declared with the session, each joins under an epoch of its own and says when its part is on the nodes. The commit waits
//! for all of them; a run that was replaced, and one of another session, are refused.

use std::collections::{BTreeMap, BTreeSet};

use ballast_schemas::{
    BeginSharedImport, ErrorCode, IMPORT_PARTICIPANTS_MAX, ImportPart, InstanceId, JoinImport, LogTime, Outcome,
    PartWriter, ParticipantId, Rejection, Reply, RevisionIdentity, SessionId, missing_parts,
};

use crate::fold::{Fold, details, reject};
use crate::revision::{Import, Part};

/// Every participant, before it has joined.
pub(crate) fn declared(participants: &[ParticipantId], now: LogTime) -> BTreeMap<ParticipantId, Part> {
    let part = Part { epoch: 0, writer_id: None, heard_at: now, done: false };
    participants.iter().map(|participant| (participant.clone(), part.clone())).collect()
}

impl Part {
    pub fn view(&self, participant: &ParticipantId, instance: &InstanceId) -> ImportPart {
        ImportPart {
            participant: participant.clone(),
            instance: instance.clone(),
            epoch: self.epoch,
            heard_at: self.heard_at,
            done: self.done,
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
        self.begin_import(&command.import, &command.participants)
    }

    pub fn join_import(&mut self, command: &JoinImport) -> Outcome {
        let JoinImport { identity, session_id, participant, writer_id, placement_digest } = command;
        let import = self.session(identity, session_id)?;
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
        let epoch = if again { part.epoch } else { part.epoch.saturating_add(1) };
        self.hear_of(identity, session_id, participant, |part| {
            part.epoch = epoch;
            part.writer_id = Some(writer_id.clone());
        })
    }

    pub fn renew_part(&mut self, command: &PartWriter) -> Outcome {
        self.expect_epoch(command)?;
        self.hear_of(&command.identity, &command.session_id, &command.participant, |_| {})
    }

    /// What was done stays done: another run of the same participant finds its bytes on the nodes.
    pub fn finish_part(&mut self, command: &PartWriter) -> Outcome {
        self.expect_epoch(command)?;
        self.hear_of(&command.identity, &command.session_id, &command.participant, |part| part.done = true)
    }

    fn expect_epoch(&self, command: &PartWriter) -> Result<(), Rejection> {
        let PartWriter { identity, session_id, participant, instance, epoch } = command;
        let import = self.session(identity, session_id)?;
        if import.session.instance != *instance {
            let message = format!(
                "the import of {instance} has ended, and session {session_id} of {identity} was begun again; join it again"
            );
            return Err(Rejection::new(ErrorCode::LeaseExpired, message));
        }
        let part = import.part(participant)?;
        if part.epoch == *epoch {
            return Ok(());
        }
        let message = format!(
            "participant {participant} of session {session_id} is at epoch {}, not {epoch}: another run of it has joined",
            part.epoch
        );
        Err(Rejection::new(ErrorCode::Conflict, message)
            .with_details(details([("participant", participant.as_str().into()), ("epoch", part.epoch.into())])))
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
        let expires_at = clock.plus_ms(self.session(identity, session_id)?.session.ttl_ms);
        self.edit_revision(identity, |revision| {
            let Some(import) = &mut revision.import else { return };
            import.session.expires_at = import.session.expires_at.max(expires_at);
            if let Some(part) = import.parts.get_mut(participant) {
                part.heard_at = clock;
                change(part);
            }
        });
        let import = self.session(identity, session_id)?;
        Ok(Reply::Part(Box::new(import.part(participant)?.view(participant, &import.session.instance))))
    }
}

impl Import {
    /// Every participant by name.
    pub fn views(&self) -> Vec<ImportPart> {
        let instance = &self.session.instance;
        self.parts.iter().map(|(participant, part)| part.view(participant, instance)).collect()
    }

    fn part(&self, participant: &ParticipantId) -> Result<&Part, Rejection> {
        self.parts.get(participant).ok_or_else(|| {
            let session_id = &self.session.session_id;
            let message = match self.parts.is_empty() {
                true => format!("session {session_id} has one writer; begin it with its participants to have several"),
                false => format!(
                    "{participant} is none of the {} participants that session {session_id} was begun with",
                    self.parts.len()
                ),
            };
            Rejection::new(ErrorCode::InvalidArgument, message)
                .with_details(details([("participant", participant.as_str().into())]))
        })
    }
}

/// Whoever is missing is named, with when it was last heard of.
pub(crate) fn expect_all_done(import: &Import, now: LogTime) -> Result<(), Rejection> {
    let parts = import.views();
    missing_parts(&parts, now).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests;

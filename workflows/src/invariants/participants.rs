//! Imports with several writers: participants and coordinator are what joins and begins can have made of them.

use ballast_schemas::{IMPORT_PARTICIPANTS_MAX, ParticipantId};

use super::Violation;
use crate::participants::COORDINATORS_REMEMBERED;
use crate::revision::{Import, Part};
use crate::state::State;

const NAME: &str = "participants";

pub(super) fn check(state: &State) -> Result<(), Violation> {
    for (identity, revision) in &state.record.revisions {
        let Some(import) = &revision.import else { continue };
        let wrong = coordinator(import)
            .or_else(|| import.parts.iter().find_map(|(participant, own)| part(state, import, participant, own)));
        if let Some(wrong) = wrong {
            return Err(Violation::new(NAME, format!("the import of {identity}: {wrong}")));
        }
    }
    Ok(())
}

fn coordinator(import: &Import) -> Option<String> {
    let (epoch, runs, parts) = (import.session.epoch, import.coordinators.len(), import.parts.len());
    let expected = usize::try_from(epoch).unwrap_or(usize::MAX).min(COORDINATORS_REMEMBERED);
    if runs != expected || (epoch == 0) != (parts == 0) || parts > IMPORT_PARTICIPANTS_MAX {
        return Some(format!("{parts} participants under epoch {epoch} of {runs} coordinators"));
    }
    let twice = import
        .coordinators
        .iter()
        .enumerate()
        .find(|(at, run)| import.coordinators.iter().take(*at).any(|other| other == *run));
    twice.map(|(_, run)| format!("run {run} coordinates it twice"))
}

fn part(state: &State, import: &Import, participant: &ParticipantId, own: &Part) -> Option<String> {
    let Part { epoch, writer_id, heard_at, done } = own;
    if (*epoch == 0) != writer_id.is_none() {
        return Some(format!("{participant} is at epoch {epoch} with run {writer_id:?}"));
    }
    if *done && *epoch == 0 {
        return Some(format!("{participant} is done and has not joined"));
    }
    let session = &import.session;
    if *heard_at > state.log_clock() || heard_at.plus_ms(session.ttl_ms) > session.expires_at {
        return Some(format!(
            "{participant} was heard of at {} ms, now is {} ms, and the session ends at {} ms",
            heard_at.0,
            state.log_clock().0,
            session.expires_at.0
        ));
    }
    None
}

//! Outcomes: what the fold decided about a command. Every replica decides the same, so a retry hears the same answer.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{BallastError, ErrorCode};
use crate::metadata::{
    ImportPart, ImportSession, LeaseGrant, ReplacementClaim, WeightOperation, WeightRevisionMetadata,
};
use crate::position::OperationId;
use crate::shared::Shared;
use crate::time::LogTime;
use crate::units::human_ms;

/// What an accepted command answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Nothing more to say.
    Done,
    /// A session was opened, found again or renewed.
    Import(Box<ImportSession>),
    /// The participant after the command.
    Part(Box<ImportPart>),
    /// The revision after the command.
    Revision(Box<WeightRevisionMetadata>),
    /// A lease was granted, found again or renewed.
    Lease(Shared<LeaseGrant>),
    /// A lease ended; `lapsed` when it had expired before, so that what was read in between is not protected.
    LeaseEnded {
        /// Whether it had expired before the release.
        lapsed: bool,
    },
    /// The operation after the command.
    Operation(Shared<WeightOperation>),
    /// The claim after the command.
    Claim(Box<ReplacementClaim>),
    /// The log clock at the entry.
    Clock(LogTime),
    /// The migrations that a round started; none when the round was over already, or nothing may move now.
    Round(Vec<OperationId>),
}

/// Why a command was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejection {
    /// In one word.
    pub code: ErrorCode,
    /// Expected, found, what to do.
    pub message: String,
    /// The facts by name.
    pub details: Value,
}

/// Accepted or rejected.
pub type Outcome = Result<Reply, Rejection>;

impl Rejection {
    /// A rejection without details.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Value::Null }
    }

    /// The same with the facts behind it.
    #[must_use]
    pub fn with_details(mut self, details: Value) -> Self {
        self.details = details;
        self
    }
}

impl From<Rejection> for BallastError {
    fn from(rejection: Rejection) -> BallastError {
        BallastError { code: rejection.code, message: rejection.message, details: rejection.details }
    }
}

/// Participants named in one sentence; the details have them all.
const PARTICIPANTS_SHOWN: usize = 5;

/// Why an import can not be committed yet: participants that have not brought their part, and when each was last heard of.
/// Those that never joined come first, then those that have been silent for longest. `None` when nobody is missing.
#[must_use]
pub fn missing_parts(parts: &[ImportPart], now: LogTime) -> Option<Rejection> {
    let mut missing: Vec<&ImportPart> = parts.iter().filter(|part| !part.done).collect();
    // Of names, the shorter first: rank2 before rank10.
    let order = |part: &ImportPart| (part.epoch > 0, part.heard_at, part.participant.as_str().len());
    missing.sort_by(|a, b| order(a).cmp(&order(b)).then_with(|| a.participant.cmp(&b.participant)));
    let describe = |part: &&ImportPart| match part.epoch {
        0 => format!("{} has not joined", part.participant),
        _ => format!("{} was last heard of {} ago", part.participant, human_ms(now.since(part.heard_at))),
    };
    let mut shown: Vec<String> = missing.iter().take(PARTICIPANTS_SHOWN).map(describe).collect();
    if missing.len() > PARTICIPANTS_SHOWN {
        shown.push("…".to_owned());
    }
    let message = format!(
        "{} of {} participants have not brought their part: {}; they finish it, or another run of them joins",
        missing.len(),
        parts.len(),
        shown.join(", ")
    );
    let names: Vec<&str> = missing.iter().map(|part| part.participant.as_str()).collect();
    let details = serde_json::json!({ "participants": names });
    (!missing.is_empty()).then(|| Rejection::new(ErrorCode::NotReady, message).with_details(details))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::RevisionIdentity;
    use crate::position::{InstanceId, LogPosition, ParticipantId};

    fn part(name: &str, epoch: u64, heard_at: u64, done: bool) -> ImportPart {
        let identity = RevisionIdentity::new("default", "n", "r", "v", 1).unwrap();
        let instance = InstanceId { group_id: identity.group_id(), position: LogPosition::ZERO };
        let participant = ParticipantId::new(name).unwrap();
        ImportPart { participant, instance, epoch, heard_at: LogTime(heard_at), done }
    }

    #[test]
    fn who_never_joined_and_who_is_silent_for_longest_is_named_before_those_that_are_at_work() {
        let mut parts: Vec<ImportPart> = (0..300).map(|n| part(&format!("rank{n}"), 1, 59_000, false)).collect();
        parts.push(part("rank512", 1, 20_000, false));
        parts.push(part("rank600", 1, 10_000, true));
        parts.extend([part("rank700", 0, 0, false), part("rank99x", 0, 0, false)]);
        parts.sort_by(|a, b| a.participant.cmp(&b.participant));
        let refused = missing_parts(&parts, LogTime(60_000)).unwrap();
        assert_eq!(refused.code, ErrorCode::NotReady);
        let shown = "303 of 304 participants have not brought their part: rank700 has not joined, rank99x has not joined, \
             rank512 was last heard of 40.0 s ago, rank0 was last heard of 1.0 s ago, rank1 was last heard of 1.0 s ago, …";
        assert!(refused.message.starts_with(shown), "{}", refused.message);
        let named: Vec<&str> =
            refused.details["participants"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert_eq!(
            (&named[..5], named[5], named.len()),
            (&["rank700", "rank99x", "rank512", "rank0", "rank1"][..], "rank2", 303)
        );
        assert_eq!(missing_parts(&parts[..0], LogTime(60_000)), None);
    }
}

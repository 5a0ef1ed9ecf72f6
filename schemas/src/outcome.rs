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
/// `None` when all have.
#[must_use]
pub fn missing_parts(parts: &[ImportPart], now: LogTime) -> Option<Rejection> {
    let missing: Vec<&ImportPart> = parts.iter().filter(|part| !part.done).collect();
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

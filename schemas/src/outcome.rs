//! Outcomes: what the fold decided about a command. Every replica decides the same, so a retry hears the same answer.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{BallastError, ErrorCode};
use crate::metadata::{ImportSession, LeaseGrant, ReplacementClaim, WeightOperation, WeightRevisionMetadata};
use crate::position::OperationId;
use crate::shared::Shared;
use crate::time::LogTime;

/// What an accepted command answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Nothing more to say.
    Done,
    /// A session was opened, found again or renewed.
    Import(Box<ImportSession>),
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

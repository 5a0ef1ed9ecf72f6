//! The errors a caller can get, with their numbers (RFC, Concurrency, Consistency, and Error Handling).

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $number:literal as $text:literal,)+) => {
        /// What went wrong, in one word. Numbers 1–10 are shared with other implementations.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum ErrorCode {
            $($(#[$doc])* #[serde(rename = $text)] $variant,)+
        }

        impl ErrorCode {
            /// Every code.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$variant,)+];

            /// The number on the wire.
            #[must_use]
            pub fn number(self) -> u16 {
                match self { $(ErrorCode::$variant => $number,)+ }
            }

            /// The RFC's name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(ErrorCode::$variant => $text,)+ }
            }
        }
    };
}

codes! {
    /// What was sent can never be accepted.
    InvalidArgument = 1 as "INVALID_ARGUMENT",
    /// There is no such thing.
    NotFound = 2 as "NOT_FOUND",
    /// Something else already stands there.
    Conflict = 3 as "CONFLICT",
    /// The caller's metadata generation is not the current one.
    StaleGeneration = 4 as "STALE_GENERATION",
    /// Not in a state that allows it, yet.
    NotReady = 5 as "NOT_READY",
    /// In use; try again when it is free.
    Busy = 6 as "BUSY",
    /// The lease ended before the work did.
    LeaseExpired = 7 as "LEASE_EXPIRED",
    /// No further generation fits.
    GenerationExhausted = 8 as "GENERATION_EXHAUSTED",
    /// Could not be made durable.
    DurabilityFailed = 9 as "DURABILITY_FAILED",
    /// The policy does not allow it, or nothing could satisfy it.
    PolicyUnsatisfiable = 10 as "POLICY_UNSATISFIABLE",
    /// Nothing reachable that could answer; safe to retry.
    Unavailable = 11 as "UNAVAILABLE",
    /// The caller may not.
    Unauthorized = 12 as "UNAUTHORIZED",
    /// Bytes are not what their checksum says.
    ChecksumMismatch = 13 as "CHECKSUM_MISMATCH",
    /// No room.
    CapacityExhausted = 14 as "CAPACITY_EXHAUSTED",
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An error as every face of Ballast shows it: code, message (expected, found, what to do) and facts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code}: {message}")]
pub struct BallastError {
    /// What went wrong.
    pub code: ErrorCode,
    /// One sentence that names the thing and says what to do.
    pub message: String,
    /// The facts behind it, by name.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub details: Value,
}

impl BallastError {
    /// An error without details.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Value::Null }
    }

    /// The same error with the facts behind it.
    #[must_use]
    pub fn with_details(mut self, details: Value) -> Self {
        self.details = details;
        self
    }

    /// `INVALID_ARGUMENT` with a message.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArgument, message)
    }

    /// Whether the same call may succeed later without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self.code, ErrorCode::Unavailable | ErrorCode::Busy | ErrorCode::NotReady)
    }

    /// The reply body: `{"error":{"code","number","message","details"}}`.
    #[must_use]
    pub fn to_body(&self) -> Value {
        serde_json::json!({"error": {
            "code": self.code.name(),
            "number": self.code.number(),
            "message": self.message,
            "details": self.details,
        }})
    }

    /// Reads a reply body that [`BallastError::to_body`] wrote; `None` when it is not an error body.
    #[must_use]
    pub fn from_body(body: &Value) -> Option<Self> {
        let error = body.get("error")?;
        let code = serde_json::from_value(error.get("code")?.clone()).ok()?;
        let message = error.get("message")?.as_str()?.to_owned();
        Some(Self { code, message, details: error.get("details").cloned().unwrap_or(Value::Null) })
    }
}

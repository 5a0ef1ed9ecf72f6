//! Why weights can not be brought from one shape to another: every error names the tensor.

use ballast_schemas::{BallastError, ErrorCode};
use serde_json::json;

/// A plan that can not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Source and target are of different weights.
    #[error("the target is of {field} {found:?}, the source of {expected:?}; plan both for the same generation")]
    Identity {
        /// Which field.
        field: &'static str,
        /// The source's.
        expected: String,
        /// The target's.
        found: String,
    },
    /// The target leaves out a tensor of the source.
    #[error("the target omits tensor {tensor:?}, which the source holds; place every tensor")]
    Omitted {
        /// The tensor.
        tensor: String,
    },
    /// The target wants a tensor that the source does not hold.
    #[error("the target adds tensor {tensor:?}, which the source does not hold")]
    Added {
        /// The tensor.
        tensor: String,
    },
    /// The two can not be copied byte for byte.
    #[error(
        "tensor {tensor:?}: the target has {field} {found}, the source {expected}; bytes are copied, never converted"
    )]
    Incompatible {
        /// The tensor.
        tensor: String,
        /// Which field.
        field: &'static str,
        /// The source's.
        expected: String,
        /// The target's.
        found: String,
    },
    /// The sources do not hold all that the target wants.
    #[error("tensor {tensor:?}: sources hold {found} of {expected} bytes of the fragment at {offset:?}")]
    Uncovered {
        /// The tensor.
        tensor: String,
        /// Where the target fragment begins.
        offset: Vec<u64>,
        /// Bytes of the target fragment.
        expected: u64,
        /// Bytes that sources hold.
        found: u64,
    },
    /// The source placement has no complete copy.
    #[error("tensor {tensor}: {reason}")]
    NoReplica {
        /// The tensor, as in `tensors["lm_head"]`.
        tensor: String,
        /// What is missing.
        reason: String,
    },
    /// The placement has no such participant.
    #[error("participant {participant:?} is not in the target placement")]
    UnknownParticipant {
        /// Its name.
        participant: String,
    },
    /// Too much to plan at once.
    #[error(
        "tensor {tensor:?} brings the plan above {limit} {what}; plan for one participant, or cut tensors less finely"
    )]
    TooMany {
        /// The tensor at which it became too much.
        tensor: String,
        /// Regions or comparisons.
        what: &'static str,
        /// How many are allowed.
        limit: u64,
    },
    /// A plan that does not follow from its source and target.
    #[error("tensor {tensor:?}: region {region} does not follow from the fragments it joins")]
    NotCanonical {
        /// The tensor.
        tensor: String,
        /// Index of the region; past the last when one is missing.
        region: usize,
    },
}

impl PlanError {
    /// The tensor that is wrong, when it is one.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::Omitted { tensor }
            | Self::Added { tensor }
            | Self::Incompatible { tensor, .. }
            | Self::Uncovered { tensor, .. }
            | Self::NoReplica { tensor, .. }
            | Self::TooMany { tensor, .. }
            | Self::NotCanonical { tensor, .. } => Some(tensor),
            Self::Identity { .. } | Self::UnknownParticipant { .. } => None,
        }
    }
}

/// Buffers that a plan can not write into.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// Not one buffer for each fragment.
    #[error("{found} buffers for {expected} target fragments")]
    Count {
        /// Fragments.
        expected: usize,
        /// Buffers.
        found: usize,
    },
    /// A buffer of another size than its fragment.
    #[error("tensor {tensor:?}: the buffer has {found} bytes, its fragment {expected}")]
    Length {
        /// The tensor.
        tensor: String,
        /// Bytes of the fragment.
        expected: u64,
        /// Bytes of the buffer.
        found: u64,
    },
    /// A buffer at address 0.
    #[error("tensor {tensor:?}: the buffer has address 0")]
    Null {
        /// The tensor.
        tensor: String,
    },
    /// Two buffers share bytes and their tensors are no declared aliases.
    #[error(
        "the buffers of tensors {tensor:?} and {other:?} share bytes; only declared aliases may, and then all of them"
    )]
    Overlap {
        /// One tensor.
        tensor: String,
        /// The other.
        other: String,
    },
    /// A fragment without a buffer.
    #[error("tensor {tensor:?} is not bound: fragment {fragment:?}")]
    Unbound {
        /// The tensor.
        tensor: String,
        /// The fragment's name.
        fragment: String,
    },
}

/// A copy that did not finish. What was written is asked of the targets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// A source that is not as long as its fragment.
    #[error("tensor {tensor:?}: the source has {found} bytes, its fragment {expected}")]
    Source {
        /// The tensor.
        tensor: String,
        /// Bytes of the fragment.
        expected: u64,
        /// Bytes of the source.
        found: u64,
    },
    /// A region that reaches outside a buffer.
    #[error("the region reaches to byte {needed} of its {side}, which has {found}")]
    Bounds {
        /// Source or target.
        side: &'static str,
        /// One past the last byte that the region needs.
        needed: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// Buffers of another plan.
    #[error(
        "the buffers were made for another plan: fragment {target} of tensor {tensor:?} has {found} bytes, expected {expected}"
    )]
    Targets {
        /// The tensor.
        tensor: String,
        /// Index of the target fragment.
        target: usize,
        /// Bytes of the fragment.
        expected: u64,
        /// Bytes of the buffer.
        found: u64,
    },
    /// More bytes came than were asked for.
    #[error("bytes {from}..{to} of an answer of {expected} bytes")]
    Answer {
        /// First byte.
        from: u64,
        /// One past the last.
        to: u64,
        /// Length of the answer.
        expected: u64,
    },
    /// The caller stopped it.
    #[error("interrupted; {} tensors were not written, the first of them {:?}", unwritten.len(), unwritten.first())]
    Interrupted {
        /// Tensors that are not complete.
        unwritten: Vec<String>,
    },
}

/// Reads that can not be made of a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// One region would take too many segments.
    #[error(
        "tensor {tensor:?}: a region needs {segments} segments, at most {limit} are allowed; read it from mapped memory"
    )]
    Segments {
        /// The tensor.
        tensor: String,
        /// Segments it needs.
        segments: u64,
        /// How many are allowed.
        limit: u64,
    },
    /// All regions together would take too many segments.
    #[error(
        "tensor {tensor:?} brings the reads above {limit} segments; read it from mapped memory, or fewer tensors at once"
    )]
    TotalSegments {
        /// The tensor at which it became too much.
        tensor: String,
        /// How many are allowed.
        limit: u64,
    },
    /// The source has no units to read from.
    #[error("tensor {tensor:?} is not read from a stored manifest of version 2, and nothing else is read by unit")]
    NotStored {
        /// The tensor.
        tensor: String,
    },
}

impl From<PlanError> for BallastError {
    fn from(error: PlanError) -> Self {
        let details = json!({"tensor": error.tensor()});
        let code = match error {
            PlanError::TooMany { .. } => ErrorCode::CapacityExhausted,
            _ => ErrorCode::InvalidArgument,
        };
        BallastError::new(code, error.to_string()).with_details(details)
    }
}

impl From<TargetError> for BallastError {
    fn from(error: TargetError) -> Self {
        let tensor = match &error {
            TargetError::Length { tensor, .. }
            | TargetError::Null { tensor }
            | TargetError::Overlap { tensor, .. }
            | TargetError::Unbound { tensor, .. } => Some(tensor.clone()),
            TargetError::Count { .. } => None,
        };
        BallastError::invalid(error.to_string()).with_details(json!({ "tensor": tensor }))
    }
}

impl From<CopyError> for BallastError {
    fn from(error: CopyError) -> Self {
        let details = match &error {
            CopyError::Source { tensor, .. } | CopyError::Targets { tensor, .. } => json!({ "tensor": tensor }),
            CopyError::Interrupted { unwritten } => json!({ "unwritten": unwritten }),
            CopyError::Answer { .. } | CopyError::Bounds { .. } => json!(null),
        };
        let code = match error {
            CopyError::Interrupted { .. } => ErrorCode::Unavailable,
            _ => ErrorCode::InvalidArgument,
        };
        BallastError::new(code, error.to_string()).with_details(details)
    }
}

impl From<LowerError> for BallastError {
    fn from(error: LowerError) -> Self {
        let (code, tensor) = match &error {
            LowerError::Segments { tensor, .. } | LowerError::TotalSegments { tensor, .. } => {
                (ErrorCode::CapacityExhausted, tensor.clone())
            }
            LowerError::NotStored { tensor } => (ErrorCode::InvalidArgument, tensor.clone()),
        };
        BallastError::new(code, error.to_string()).with_details(json!({ "tensor": tensor }))
    }
}

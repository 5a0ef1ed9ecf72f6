//! What can go wrong at the client's end of a transfer, and the code that a caller sees for it.

use ballast_schemas::{BallastError, ErrorCode, NodeId};

use crate::layout::LayoutError;
use crate::mapped::MapError;

/// Why a transfer failed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The node refused, and says why. The connection can be used further.
    #[error(transparent)]
    Refused(#[from] BallastError),
    /// The node could not be reached on any way tried.
    #[error("node {node} can not be reached: {tried}")]
    Unreachable {
        /// The node.
        node: NodeId,
        /// What was tried, and how it failed.
        tried: String,
    },
    /// The connection broke or stalled; whether the last request was carried out is not known.
    #[error("the connection to node {node} broke: {reason}")]
    Broken {
        /// The node.
        node: NodeId,
        /// How.
        reason: String,
    },
    /// The node answered something that does not belong to the request.
    #[error("node {node} breaks the transfer protocol: {reason}")]
    Protocol {
        /// The node.
        node: NodeId,
        /// How.
        reason: String,
    },
    /// The source of an upload can not be read.
    #[error("the source can not be read at byte {offset}: {source}")]
    Source {
        /// Where.
        offset: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// The sizes have no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Mapped segments can not be used.
    #[error(transparent)]
    Map(#[from] MapError),
}

impl TransferError {
    /// The code that a caller sees.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Refused(error) => error.code,
            Self::Unreachable { .. } | Self::Broken { .. } | Self::Protocol { .. } => ErrorCode::Unavailable,
            Self::Source { .. } | Self::Layout(_) => ErrorCode::InvalidArgument,
            Self::Map(error) => error.code(),
        }
    }

    /// Whether another replica, or the same node a little later, may do better.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self.code(), ErrorCode::Unavailable | ErrorCode::Busy | ErrorCode::NotReady)
    }

    /// Whether the last request may have been carried out although it failed.
    #[must_use]
    pub fn outcome_unknown(&self) -> bool {
        matches!(self, Self::Broken { .. } | Self::Protocol { .. })
    }
}

impl From<TransferError> for BallastError {
    fn from(error: TransferError) -> Self {
        match error {
            TransferError::Refused(error) => error,
            other => BallastError::new(other.code(), other.to_string()),
        }
    }
}

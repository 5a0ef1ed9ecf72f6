//! Events: what orchestrators follow. Each is named by its log position and number, so consumers drop repeats.

use serde::{Deserialize, Serialize};

use crate::identity::{RevisionIdentity, TenantId};
use crate::metadata::{ReplacementClaim, WeightOperation, WeightRevisionMetadata};
use crate::position::LogPosition;
use crate::shared::Shared;

/// Something that happened, as a consequence of one command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Position of the command that caused it.
    pub position: LogPosition,
    /// Number among the events of that command.
    pub n: u32,
    /// Stream timestamp of the entry, for display.
    pub unix_ms: u64,
    /// What happened.
    #[serde(flatten)]
    pub body: EventBody,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "SCREAMING_SNAKE_CASE")]
pub enum EventBody {
    /// An import began.
    RevisionImporting {
        /// The record.
        revision: Box<WeightRevisionMetadata>,
    },
    /// Published, or recovered.
    RevisionReady {
        /// The record.
        revision: Box<WeightRevisionMetadata>,
    },
    /// A required member lost its last readable replica.
    RevisionDegraded {
        /// The record.
        revision: Box<WeightRevisionMetadata>,
        /// What is missing.
        reason: String,
    },
    /// The policy changed.
    PolicyUpdated {
        /// The record.
        revision: Box<WeightRevisionMetadata>,
    },
    /// Fenced by a replacement.
    RevisionRetired {
        /// The record.
        revision: Box<WeightRevisionMetadata>,
    },
    /// Deletion began.
    RevisionDeleting {
        /// The record.
        revision: Box<WeightRevisionMetadata>,
    },
    /// A tombstone remains.
    RevisionDeleted {
        /// The record.
        revision: Box<WeightRevisionMetadata>,
    },
    /// An operation was accepted.
    OperationStarted {
        /// The operation.
        operation: Shared<WeightOperation>,
    },
    /// An operation moved on, was claimed, parked or failed an attempt.
    OperationProgress {
        /// The operation.
        operation: Shared<WeightOperation>,
    },
    /// An operation ended.
    OperationEnded {
        /// The operation.
        operation: Shared<WeightOperation>,
    },
    /// An operation is stuck: half of its attempts have failed.
    OperationStuck {
        /// The operation.
        operation: Shared<WeightOperation>,
    },
    /// A claim entered a phase.
    ClaimPhase {
        /// The claim.
        claim: Box<ReplacementClaim>,
    },
}

impl EventBody {
    /// The revision it is about (a claim: its target).
    #[must_use]
    pub fn identity(&self) -> &RevisionIdentity {
        match self {
            Self::RevisionImporting { revision }
            | Self::RevisionReady { revision }
            | Self::RevisionDegraded { revision, .. }
            | Self::PolicyUpdated { revision }
            | Self::RevisionRetired { revision }
            | Self::RevisionDeleting { revision }
            | Self::RevisionDeleted { revision } => &revision.identity,
            Self::OperationStarted { operation }
            | Self::OperationProgress { operation }
            | Self::OperationEnded { operation }
            | Self::OperationStuck { operation } => &operation.identity,
            Self::ClaimPhase { claim } => &claim.target,
        }
    }

    /// The event's name, as in its JSON.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::RevisionImporting { .. } => "REVISION_IMPORTING",
            Self::RevisionReady { .. } => "REVISION_READY",
            Self::RevisionDegraded { .. } => "REVISION_DEGRADED",
            Self::PolicyUpdated { .. } => "POLICY_UPDATED",
            Self::RevisionRetired { .. } => "REVISION_RETIRED",
            Self::RevisionDeleting { .. } => "REVISION_DELETING",
            Self::RevisionDeleted { .. } => "REVISION_DELETED",
            Self::OperationStarted { .. } => "OPERATION_STARTED",
            Self::OperationProgress { .. } => "OPERATION_PROGRESS",
            Self::OperationEnded { .. } => "OPERATION_ENDED",
            Self::OperationStuck { .. } => "OPERATION_STUCK",
            Self::ClaimPhase { .. } => "CLAIM_PHASE",
        }
    }
}

impl Event {
    /// Whose event it is.
    #[must_use]
    pub fn tenant(&self) -> &TenantId {
        &self.body.identity().tenant_id
    }

    /// `<seq>.<index>.<n>`: the message id in the event stream.
    #[must_use]
    pub fn message_id(&self) -> String {
        format!("{}.{}", self.position, self.n)
    }
}

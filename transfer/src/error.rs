//! What can go wrong inside a node's store, each with the facts behind it, and the code that a caller sees for it.

use ballast_schemas::frame::{IMPORT_OFFERS_MAX, Tier};
use ballast_schemas::{
    BallastError, ClusterId, Digest, ErrorCode, InstanceId, ObjectKey, ParticipantId, SessionId, human_bytes,
};
use serde_json::json;

use crate::budget::CapacityExhausted;
use crate::folder::PathError;
use crate::guard::{FenceRefused, NoWitness};
use crate::layout::LayoutError;

/// A unit whose bytes are not what its checksum says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The unit.
    pub unit: u32,
    /// The checksum that the manifest gives.
    pub expected: u64,
    /// The checksum of the bytes found.
    pub found: u64,
}

/// Why the node did not do what it was asked. Whatever was readable before is still readable.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The request makes no sense for this instance.
    #[error("{0}")]
    Invalid(String),
    /// Nothing of the instance is here.
    #[error("this node holds nothing of {instance}")]
    Unknown {
        /// Whose bytes.
        instance: InstanceId,
    },
    /// The instance was deleted here.
    #[error("{instance} was deleted on this node; begin a new import")]
    Deleted {
        /// Whose bytes.
        instance: InstanceId,
    },
    /// Deletion has begun.
    #[error("{instance} is being deleted")]
    Deleting {
        /// Whose bytes.
        instance: InstanceId,
    },
    /// The bytes are kept but not served.
    #[error("{instance} is kept but not served: {why}")]
    NotServed {
        /// Whose bytes.
        instance: InstanceId,
        /// Why.
        why: String,
    },
    /// The import has not ended.
    #[error("{instance} is still being imported")]
    NotSealed {
        /// Whose bytes.
        instance: InstanceId,
    },
    /// The import has ended.
    #[error("{instance} is sealed; its bytes can not change any more")]
    Sealed {
        /// Whose bytes.
        instance: InstanceId,
    },
    /// Another session imports it.
    #[error("{instance} belongs to import session {expected}, not {found}")]
    OtherSession {
        /// Whose bytes.
        instance: InstanceId,
        /// The session here.
        expected: SessionId,
        /// The caller's session.
        found: SessionId,
    },
    /// A later run of the participant has come.
    #[error(
        "another run of participant {participant} (epoch {expected}) imports {instance}; this one has epoch {found}"
    )]
    Superseded {
        /// Whose bytes.
        instance: InstanceId,
        /// The participant.
        participant: ParticipantId,
        /// The highest epoch that it has come with.
        expected: u64,
        /// The caller's.
        found: u64,
    },
    /// Participants that should hold the same bytes do not.
    #[error(
        "participants {} offer different bytes for one fragment of {instance}, at byte {offset} of unit {unit}",
        .participants.iter().map(ParticipantId::as_str).collect::<Vec<_>>().join(" and ")
    )]
    OffersDiffer {
        /// Whose bytes.
        instance: InstanceId,
        /// The unit.
        unit: u32,
        /// First byte of the fragment inside the unit.
        offset: u64,
        /// Who.
        participants: Vec<ParticipantId>,
    },
    /// A participant can not offer or write this.
    #[error("{bytes} bytes at {offset} of unit {unit} of {instance} {why}")]
    Fragment {
        /// What a caller sees.
        code: ErrorCode,
        /// Whose bytes.
        instance: InstanceId,
        /// The unit.
        unit: u32,
        /// First byte inside the unit.
        offset: u64,
        /// How many bytes.
        bytes: u64,
        /// Who.
        participants: Vec<ParticipantId>,
        /// Why.
        why: String,
    },
    /// Participants offer more than a node keeps.
    #[error(
        "the participants of {instance} offer more than {IMPORT_OFFERS_MAX} fragments; let fewer replicas offer theirs"
    )]
    TooManyOffers {
        /// Whose bytes.
        instance: InstanceId,
    },
    /// The caller computed another layout.
    #[error("the layout of {instance} is {expected} here, the caller has {found}")]
    OtherLayout {
        /// Whose bytes.
        instance: InstanceId,
        /// The layout here.
        expected: Digest,
        /// The caller's.
        found: Digest,
    },
    /// It was sealed with another manifest.
    #[error("{instance} is sealed with manifest {expected}, not {found}")]
    OtherManifest {
        /// Whose bytes.
        instance: InstanceId,
        /// The manifest here.
        expected: Digest,
        /// The caller's.
        found: Digest,
    },
    /// Another cluster's node.
    #[error("this node's bytes belong to cluster {expected}, not {found}; they are kept and not served")]
    OtherCluster {
        /// The cluster in the node's folders.
        expected: ClusterId,
        /// The cluster it met.
        found: ClusterId,
    },
    /// No layout follows from the sizes.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A newer effect has been obeyed.
    #[error(transparent)]
    Fence(#[from] FenceRefused),
    /// Nothing else would hold the bytes.
    #[error(transparent)]
    NoWitness(#[from] NoWitness),
    /// No budget left.
    #[error(transparent)]
    Capacity(#[from] CapacityExhausted),
    /// A generic path met a managed group's key.
    #[error(
        "{key} is a member of a managed group ({instance}): it was left alone; weights are deleted as a whole with `ballast rm`"
    )]
    ManagedKey {
        /// The key.
        key: ObjectKey,
        /// Whose.
        instance: InstanceId,
    },
    /// No such object.
    #[error(
        "this node holds no object {key}; objects are evicted when room is needed and do not outlive a restart of their node: list (`ballast object ls`) shows those there are"
    )]
    NoObject {
        /// The key.
        key: ObjectKey,
    },
    /// Managed groups leave objects no room.
    #[error(
        "an object of {} does not fit: objects are taken while the memory tier is filled up to {}, and {} of it are managed groups; \
         migrate or remove a revision, or give the node more with --memory",
        human_bytes(*.asked_bytes), human_bytes(*.watermark_bytes), human_bytes(*.managed_bytes)
    )]
    ObjectsFull {
        /// The object.
        asked_bytes: u64,
        /// What the managed groups hold.
        managed_bytes: u64,
        /// Up to where objects are taken.
        watermark_bytes: u64,
    },
    /// The file system has no room although the budget has.
    #[error("the file system of the {} tier is full ({source}); free some space on it", if *.tier == Tier::Memory { "memory" } else { "cold" })]
    Full {
        /// Which tier.
        tier: Tier,
        /// What the system said.
        source: PathError,
    },
    /// The node has no cold tier.
    #[error("this node has no cold tier; start it with --cold FOLDER or --cold-url URL")]
    NoColdTier,
    /// A unit that should be read is nowhere on this node.
    #[error("unit {unit} of {instance} has no readable copy on this node")]
    NotHere {
        /// Whose bytes.
        instance: InstanceId,
        /// The unit.
        unit: u32,
    },
    /// Readers hold what should be freed.
    #[error("{units} units of {instance} are still mapped or being read; they are freed once their readers are done")]
    Busy {
        /// Whose bytes.
        instance: InstanceId,
        /// How many units wait.
        units: u32,
    },
    /// Something of it is still here.
    #[error("{instance} is not gone: {what}")]
    NotEmpty {
        /// Whose bytes.
        instance: InstanceId,
        /// What is left.
        what: String,
    },
    /// Bytes are not what they should be.
    #[error(
        "{} units of {instance} do not match their checksums in {place}; the first is unit {}: {:016x}, expected {:016x}",
        .units.len(), .units.first().map_or(0, |m| m.unit), .units.first().map_or(0, |m| m.found), .units.first().map_or(0, |m| m.expected)
    )]
    Checksum {
        /// Whose bytes.
        instance: InstanceId,
        /// Where they were found.
        place: &'static str,
        /// The units.
        units: Vec<Mismatch>,
    },
    /// The manifest is not one, or not this instance's.
    #[error("the manifest of {instance} is refused: {why}")]
    Manifest {
        /// Whose bytes.
        instance: InstanceId,
        /// What is wrong with it.
        why: String,
    },
    /// A file or folder operation failed.
    #[error(transparent)]
    Io(#[from] PathError),
}

impl StoreError {
    /// An I/O error on a tier's file, told apart by whether the file system is full.
    pub(crate) fn on_tier(tier: Tier, source: PathError) -> Self {
        if source.is_full() { Self::Full { tier, source } } else { Self::Io(source) }
    }

    /// The code that a caller sees.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Invalid(_) | Self::Layout(_) | Self::Manifest { .. } | Self::TooManyOffers { .. } => {
                ErrorCode::InvalidArgument
            }
            Self::Fragment { code, .. } => *code,
            Self::Unknown { .. } | Self::NoObject { .. } => ErrorCode::NotFound,
            Self::Deleted { .. }
            | Self::Sealed { .. }
            | Self::ManagedKey { .. }
            | Self::OtherSession { .. }
            | Self::Superseded { .. }
            | Self::OffersDiffer { .. }
            | Self::OtherLayout { .. }
            | Self::OtherManifest { .. }
            | Self::OtherCluster { .. }
            | Self::NotEmpty { .. }
            | Self::Fence(_) => ErrorCode::Conflict,
            Self::Deleting { .. } | Self::NotServed { .. } | Self::NotSealed { .. } | Self::NoWitness(_) => {
                ErrorCode::NotReady
            }
            Self::Capacity(_) | Self::Full { .. } | Self::ObjectsFull { .. } => ErrorCode::CapacityExhausted,
            Self::NoColdTier => ErrorCode::PolicyUnsatisfiable,
            Self::NotHere { .. } => ErrorCode::Unavailable,
            Self::Busy { .. } => ErrorCode::Busy,
            Self::Checksum { .. } => ErrorCode::ChecksumMismatch,
            Self::Io(_) => ErrorCode::DurabilityFailed,
        }
    }

    /// The error as every face of the system shows it.
    #[must_use]
    pub fn to_error(&self) -> BallastError {
        let details = match self {
            Self::Capacity(capacity) => json!({
                "tier": capacity.tier_name,
                "asked_bytes": capacity.asked_bytes,
                "used_bytes": capacity.used_bytes,
                "limit_bytes": capacity.limit_bytes,
            }),
            Self::Superseded { participant, expected, .. } => json!({"participant": participant, "epoch": expected}),
            Self::OffersDiffer { unit, offset, participants, .. } => {
                json!({"reason": "OTHER_BYTES", "unit": unit, "offset": offset, "participants": participants})
            }
            Self::Fragment { unit, offset, participants, .. } => {
                json!({"unit": unit, "offset": offset, "participants": participants})
            }
            Self::ManagedKey { key, instance } => json!({"key": key, "group_id": instance.group_id}),
            Self::ObjectsFull { asked_bytes, managed_bytes, watermark_bytes } => json!({
                "asked_bytes": asked_bytes, "managed_bytes": managed_bytes, "watermark_bytes": watermark_bytes,
            }),
            Self::Fence(fence) => {
                json!({"reason": "FENCED", "offered": fence.offered.to_string(), "highest": fence.highest.to_string()})
            }
            Self::NoWitness(NoWitness { unit }) | Self::NotHere { unit, .. } => json!({"unit": unit}),
            Self::Busy { units, .. } => json!({"units": units}),
            Self::Checksum { units, place, .. } => json!({
                "place": place,
                "unit_count": units.len(),
                "units": units.iter().take(16).map(|mismatch| mismatch.unit).collect::<Vec<_>>(),
            }),
            _ => serde_json::Value::Null,
        };
        BallastError::new(self.code(), self.to_string()).with_details(details)
    }
}

impl From<StoreError> for BallastError {
    fn from(error: StoreError) -> Self {
        error.to_error()
    }
}

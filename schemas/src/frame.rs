//! The frames of the transfer protocol between a client and a node's data plane (see ARCHITECTURE.md,
//! Transfer protocol). Types and limits only: sockets and descriptor passing live in the transfer crate.
//!
//! A frame is `u32 header length, little endian | header (MessagePack map) | payload`. The header says how many
//! payload bytes follow and how many descriptors came with the frame (Unix sockets only). One request is
//! answered by one response, except `ReadRanges` and `MapSegments`, whose responses are a sequence that ends with
//! a frame that says so. A connection acts for one instance: the one its token names.

use serde::{Deserialize, Serialize};

use crate::command::Receipt;
use crate::digest::Digest;
use crate::error::BallastError;
use crate::inventory::Bitmap;
use crate::node::NodeEndpoint;
use crate::position::{InstanceId, LogPosition, NodeId, ParticipantId};

/// The protocol that this build speaks; `Hello` carries it and a node refuses another.
pub const PROTOCOL_VERSION: u32 = 1;
/// Bytes of one frame header.
pub const HEADER_BYTES_MAX: u32 = 4 * 1024 * 1024;
/// Payload bytes of one `Write` request and of one `Data` response.
pub const DATA_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// Bytes of one manifest or affinity index.
pub const DOCUMENT_BYTES_MAX: u64 = 512 * 1024 * 1024;
/// Ranges in one `ReadRanges`, `Write` or `WriteFd` request.
pub const RANGES_MAX: usize = 65_536;
/// Ranges in one `Derive` request, which say more each.
pub const DERIVED_RANGES_MAX: usize = 8_192;
/// Bytes that one `Derive` request makes: an answer, and so progress, every fraction of a second.
pub const DERIVE_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// Nodes that one `OpenBase` request may name.
pub const HOLDERS_MAX: usize = 64;
/// Fragments in one `Offer` request.
pub const OFFERS_MAX: usize = 16_384;
/// Fragments that the participants of one import offer, counted once for each of them.
pub const IMPORT_OFFERS_MAX: usize = 8_000_000;
/// Descriptors in one `Segments` response.
pub const DESCRIPTORS_MAX: usize = 64;

/// What stands before the payload of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestHeader {
    /// Payload bytes that follow the header.
    #[serde(default)]
    pub payload_bytes: u64,
    /// Descriptors that came with the frame.
    #[serde(default)]
    pub descriptors: u32,
    /// What is asked.
    pub body: Request,
}

/// What stands before the payload of a response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResponseHeader {
    /// Payload bytes that follow the header.
    #[serde(default)]
    pub payload_bytes: u64,
    /// Descriptors that came with the frame.
    #[serde(default)]
    pub descriptors: u32,
    /// The answer.
    pub body: Response,
}

/// What a client asks of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Request {
    /// First request of a connection, and again to go on under a newer token for the same instance.
    Hello {
        /// The caller's [`PROTOCOL_VERSION`].
        protocol: u32,
        /// The signed token that the gateway issued.
        token: String,
    },
    /// Reserves memory for the instance. Payload: each unit's size in bytes as a little-endian u64.
    Allocate {
        /// How many units.
        unit_count: u32,
        /// Digest of the layout that the caller computed from the same sizes.
        layout_digest: Digest,
    },
    /// Writes the payload, which is the concatenation of all ranges, into units of an instance that is not sealed.
    Write {
        /// Where its bytes go, in order.
        ranges: Vec<ByteRange>,
    },
    /// Writes ranges of a regular file or memfd whose one descriptor comes with the frame (Unix socket).
    WriteFd {
        /// What goes where.
        ranges: Vec<SourceRange>,
    },
    /// Names the sealed instance that `Derive` takes bytes from. It must stay readable under the caller's lease.
    OpenBase {
        /// The token for reading it.
        token: String,
        /// Nodes that hold it, for a node that does not hold all of it: those that the token vouches for, in their order.
        holders: Vec<NodeEndpoint>,
    },
    /// Makes units of the instance out of units of the base, without their bytes travelling. The payload is the
    /// concatenation of all patches: the indices of one, its values, and then the next one's.
    Derive {
        /// What is made, in order; the ranges of one unit follow each other from its first byte to its last.
        ranges: Vec<DerivedRange>,
    },
    /// A participant says which fragments it holds and with which checksums, before it writes them and again afterwards. The
    /// answer names those that it has to send: neither here yet nor brought by a participant that offered them earlier.
    Offer {
        /// Which.
        fragments: Vec<OfferedFragment>,
    },
    /// Asks what all participants have offered, as MessagePack.
    ReadOffers {
        /// Only what they do not agree on.
        conflicts: bool,
    },
    /// Ends the import: the node checks every unit against the manifest, which is the payload.
    Seal,
    /// Asks what the node holds.
    Describe,
    /// Asks for the manifest's bytes.
    ReadManifest,
    /// Asks for the affinity index, as MessagePack.
    ReadAffinity,
    /// Reads ranges, in the order given; bytes come from memory where the unit is hot and from disk otherwise.
    ReadRanges {
        /// What to read.
        ranges: Vec<ReadRange>,
    },
    /// Asks for read-only descriptors of segments (Unix socket). A memory segment's descriptor carries the map
    /// guard: while it or a mapping of it lives, the node frees none of that segment's units.
    MapSegments {
        /// Whether to hand out memory segments that hold a hot unit.
        memory: bool,
        /// Whether to hand out cold segments that hold a cold unit.
        cold: bool,
    },
}

/// Bytes of a source file that go into a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRange {
    /// First byte in the source file.
    pub source_offset: u64,
    /// The unit.
    pub unit: u32,
    /// First byte inside the unit.
    pub unit_offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// Bytes of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteRange {
    /// The unit.
    pub unit: u32,
    /// First byte inside the unit.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// Bytes of a unit that are those at the same place in a unit of the base, but for what the patch changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DerivedRange {
    /// The unit that is made.
    pub unit: u32,
    /// The unit of the base; both have the same size.
    pub base_unit: u32,
    /// First byte inside both.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
    /// BLAKE3 that the whole unit of the base must have for this to be what the caller means; `None`: whatever it has.
    pub blake3: Option<Digest>,
    /// What differs.
    pub patch: Option<Patch>,
}

/// Elements of a range that differ from the base's. Its bytes are in the payload: for each element, in ascending order, its
/// distance from the one before (the first: from the range's first element) as a LEB128 number, and then their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Patch {
    /// What is done with a value.
    pub rule: PatchRule,
    /// How many elements.
    pub entries: u32,
    /// Bytes of their distances.
    pub index_bytes: u32,
}

/// What a patch does with each of its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PatchRule {
    /// It takes the place of the element.
    Overwrite {
        /// Bytes of an element: 1, 2, 4 or 8.
        item_bytes: u32,
    },
    /// It is added to the element.
    Add {
        /// What the elements are.
        number: Number,
    },
}

impl PatchRule {
    /// Bytes of an element.
    #[must_use]
    pub fn item_bytes(self) -> u32 {
        match self {
            Self::Overwrite { item_bytes } => item_bytes,
            Self::Add { number } => number.item_bytes(),
        }
    }
}

/// Numbers that can be added. Halves are added as 32-bit floats and rounded once, to nearest even; whole numbers wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names of the safetensors format")]
pub enum Number {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
}

impl Number {
    /// A number by its safetensors name; `None` for what can not be added.
    #[must_use]
    pub fn from_dtype(dtype: &str) -> Option<Self> {
        Some(match dtype {
            "F64" => Self::F64,
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::BF16,
            "I64" => Self::I64,
            "I32" => Self::I32,
            "I16" => Self::I16,
            "I8" => Self::I8,
            "U64" => Self::U64,
            "U32" => Self::U32,
            "U16" => Self::U16,
            "U8" => Self::U8,
            _ => return None,
        })
    }

    /// Bytes of one.
    #[must_use]
    pub fn item_bytes(self) -> u32 {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 => 1,
        }
    }
}

/// A fragment that a participant holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedFragment {
    /// The unit.
    pub unit: u32,
    /// First byte inside the unit.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
    /// CRC-64/NVME of them.
    pub crc64: u64,
}

/// What the participants of an import have offered to a node so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offers {
    /// By number.
    pub participants: Vec<ParticipantId>,
    /// By unit and offset.
    pub fragments: Vec<FragmentOffer>,
}

/// What is known of one fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FragmentOffer {
    /// As the participant that brings it has offered it.
    pub fragment: OfferedFragment,
    /// Number of that participant.
    pub participant: u32,
    /// Its bytes are here and have that checksum.
    pub held: bool,
    /// Number of a participant that offers other bytes.
    pub differs: Option<u32>,
}

/// Bytes of a unit to read.
pub type ReadRange = ByteRange;

/// What a node answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Response {
    /// To `Hello`.
    Hello(HelloReply),
    /// To `Allocate`.
    Allocated {
        /// Bytes of memory that the instance now has reserved, units rounded up to 4 KiB.
        reserved_bytes: u64,
        /// Whether the import has already ended; nothing needs to be written then.
        sealed: bool,
    },
    /// To `Write` and `WriteFd`.
    Written {
        /// Bytes written.
        bytes: u64,
    },
    /// To `OpenBase`.
    BaseOpened {
        /// Whether this node holds all of it; otherwise its bytes come from another one.
        here: bool,
    },
    /// To `Derive`: the units whose last byte was made, in order.
    Derived {
        /// What became of each.
        units: Vec<DerivedUnit>,
    },
    /// To `Offer`.
    Offered {
        /// The fragments to send, by their place in the request.
        wanted: Bitmap,
    },
    /// To `Seal`.
    Sealed(Receipt),
    /// To `Describe`.
    Described(Description),
    /// To `ReadManifest`, `ReadAffinity` and `ReadOffers`; the payload is the document.
    Document {
        /// SHA-256 of the payload.
        sha256: Digest,
    },
    /// To `ReadRanges`: the payload continues the concatenation of all ranges.
    Data,
    /// To `ReadRanges`, last: everything asked for has been sent and, where whole units came from disk, verified.
    End {
        /// Bytes sent in all.
        bytes: u64,
    },
    /// To `MapSegments`: one descriptor for each grant, in order.
    Segments {
        /// What the descriptors are.
        grants: Vec<SegmentGrant>,
        /// The holdings at the moment the guards were taken, in the last frame of the sequence only.
        holdings: Option<Description>,
    },
    /// The request failed; nothing after the bytes already answered for was done.
    Error(BallastError),
}

/// A unit that was made out of the base's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DerivedUnit {
    /// Which one.
    pub unit: u32,
    /// CRC-64/NVME of its bytes.
    pub crc64: u64,
    /// CRC-64/NVME of the bytes of the base that it was made of, for a caller that knows what they must be.
    pub base_crc64: u64,
    /// Whether the unit of the base had the BLAKE3 asked for. If not, the unit has to be written.
    pub same: bool,
}

/// Who answers a `Hello`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HelloReply {
    /// The node's [`PROTOCOL_VERSION`].
    pub protocol: u32,
    /// The node.
    pub node: NodeId,
    /// Its run; another one after each restart.
    pub incarnation: String,
    /// The instance that the token names.
    pub instance: InstanceId,
}

/// What a node holds of an instance, at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// Whether the import is over.
    pub sealed: bool,
    /// Digest of the layout.
    pub layout_digest: Digest,
    /// Units of the layout.
    pub unit_count: u32,
    /// SHA-256 of the manifest; `None` before the seal.
    pub manifest_sha256: Option<Digest>,
    /// Highest fence that the node has accepted for the instance.
    pub fence: LogPosition,
    /// Units with a readable copy in memory.
    pub hot: Bitmap,
    /// Units with a readable copy on disk.
    pub cold: Bitmap,
}

/// Which tier a descriptor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tier {
    /// The memory tier.
    Memory,
    /// The cold tier.
    Cold,
}

/// One descriptor of a `Segments` response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentGrant {
    /// The segment's number in the layout.
    pub segment: u32,
    /// Its tier.
    pub tier: Tier,
    /// The segment's length in bytes.
    pub bytes: u64,
}

//! What nodes (transfer workers) tell the rest and are told: status, introduction, control requests, token claims.
//! Control requests go over NATS as MessagePack; payload bytes never do (see `frame`).

use serde::{Deserialize, Serialize};

use crate::affinity::AffinityIndex;
use crate::command::Receipt;
use crate::digest::{Digest, hash_list};
use crate::error::BallastError;
use crate::frame::HOLDERS_MAX;
use crate::inventory::{NodeInventory, UnitRange};
use crate::object::ObjectCounts;
use crate::position::{ClusterId, InstanceId, LogPosition, NodeId, ParticipantId, SessionId};

/// Where a node's data plane listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeEndpoint {
    /// The node.
    pub node: NodeId,
    /// Boot id of its host: equal means that the Unix socket may be reachable.
    pub host_id: String,
    /// Path of its Unix socket.
    pub unix_socket: Option<String>,
    /// `address:port` of its TCP listener.
    pub tcp: Option<String>,
}

/// Published every second on `ballast.node.<node>.status` (JSON).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Where it listens.
    pub endpoint: NodeEndpoint,
    /// The run of its process.
    pub incarnation: String,
    /// The cluster it belongs to, once introduced.
    pub cluster_id: Option<ClusterId>,
    /// Why it serves nothing, if it does not.
    pub not_serving: Option<String>,
    /// Bytes of the memory tier.
    pub memory_capacity_bytes: u64,
    /// Bytes of it that are reserved for managed groups. Ordinary objects are not counted: they give way.
    pub memory_used_bytes: u64,
    /// `tmpfs, huge pages` or `tmpfs, 4 KiB pages (why)`.
    pub memory_kind: String,
    /// Bytes of the cold tier; 0 when there is none.
    pub cold_capacity_bytes: u64,
    /// Bytes of it that are used.
    pub cold_used_bytes: u64,
    /// `io_uring`, `positioned I/O (why)` or `none`.
    pub cold_engine: String,
    /// Instances it holds.
    pub instances: u32,
    /// Instances it keeps but does not serve, because the log does not know them.
    pub quarantined: u32,
    /// Its ordinary objects.
    #[serde(default)]
    pub objects: ObjectCounts,
    /// Whether it takes imports with several writers; a node of an earlier build, which would take a participant for the
    /// importer, does not say so.
    #[serde(default)]
    pub shared_imports: bool,
    /// Free labels.
    pub labels: std::collections::BTreeMap<String, String>,
}

impl NodeStatus {
    /// Bytes that an import could still reserve.
    #[must_use]
    pub fn memory_free_bytes(&self) -> u64 {
        self.memory_capacity_bytes.saturating_sub(self.memory_used_bytes)
    }
}

/// A node introduces itself to a gateway (MessagePack on `ballast.cluster.hello`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeHello {
    /// The node.
    pub node: NodeId,
    /// The run of its process.
    pub incarnation: String,
    /// The cluster its folders belong to, if they do.
    pub cluster_id: Option<ClusterId>,
    /// The highest log position any of its fences names.
    pub seen: LogPosition,
    /// What it holds.
    pub instances: Vec<InstanceId>,
}

/// What the log knows of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InstanceStanding {
    /// A revision stands behind it.
    Known,
    /// It was deleted (or replaced by a later import): drop its bytes.
    Deleted,
    /// The log does not know it: keep the bytes, serve nothing.
    Unknown,
}

/// A gateway's answer to [`NodeHello`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HelloReply {
    /// Welcome.
    Welcome {
        /// The cluster.
        cluster_id: ClusterId,
        /// Its incarnation.
        incarnation: u64,
        /// How far the answering replica has folded.
        log_seq: u64,
        /// Key of the transfer tokens (32 bytes).
        token_key: Vec<u8>,
        /// One per instance of the hello, in order.
        standings: Vec<InstanceStanding>,
    },
    /// Not this cluster's node, or the log is behind what the node has seen: quarantine, delete nothing.
    Refused {
        /// Why, and what to do.
        error: BallastError,
    },
}

/// A control request (MessagePack on `ballast.node.<node>.ctl`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeRequest {
    /// What do you hold of this instance?
    Inventory {
        /// Whose bytes.
        instance: InstanceId,
    },
    /// The receipt of a sealed import.
    Receipt {
        /// Whose bytes.
        instance: InstanceId,
        /// The session that sealed it.
        session_id: SessionId,
    },
    /// The units of an instance.
    AffinityIndex {
        /// Whose bytes.
        instance: InstanceId,
    },
    /// Obey nothing older than this fence from now on.
    RaiseFence {
        /// Whose bytes.
        instance: InstanceId,
        /// The new fence.
        fence: LogPosition,
    },
    /// Copy units to disk, sync, read back, verify. Units already there are skipped.
    CopyToCold(UnitEffect),
    /// Copy units to memory, verify. Units already there are skipped.
    CopyToMemory(UnitEffect),
    /// Release memory replicas of units that are cold here, once no reader maps them (else failed BUSY).
    ReleaseMemory(UnitEffect),
    /// Delete units from both tiers.
    DeleteUnits(UnitEffect),
    /// Delete the manifest and whatever is left of the instance.
    DeleteInstance {
        /// Whose bytes.
        instance: InstanceId,
        /// Authorised by.
        fence: LogPosition,
    },
    /// Read units back from every tier and compare their checksums: a round of them, from this one on. Needs no leave: what is
    /// wrong is no longer handed out, and nothing else changes.
    Verify {
        /// Whose bytes.
        instance: InstanceId,
        /// The first unit.
        from: u32,
    },
}

/// An effect on some units of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitEffect {
    /// Whose bytes.
    pub instance: InstanceId,
    /// Log position of the entry that authorised it.
    pub fence: LogPosition,
    /// Which units.
    pub units: Vec<UnitRange>,
}

/// What a round of reading units back found on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCheck {
    /// The node.
    pub node: NodeId,
    /// In memory.
    pub memory: TierCheck,
    /// On disk.
    pub cold: TierCheck,
    /// Where the next round begins; `None` after the last.
    pub next: Option<u32>,
}

/// What reading units back found on one tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierCheck {
    /// Copies that are right.
    pub right: u32,
    /// Units whose copy was wrong. It is not handed out any more.
    pub wrong: Vec<u32>,
}

/// A node's answers to one control request: progress at least once a second, then an end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeReply {
    /// Still at it.
    Progress {
        /// Units done of this request.
        units: u32,
        /// Bytes done of this request.
        bytes: u64,
    },
    /// Done; what the node holds now.
    Inventory(Box<NodeInventory>),
    /// Done: the receipt.
    Receipt(Box<Receipt>),
    /// Done: the units.
    AffinityIndex(Box<AffinityIndex>),
    /// Done: what a round of `Verify` found.
    Verified(Box<NodeCheck>),
    /// Done: nothing of the instance is here.
    Absent,
    /// Not done. The node holds what it held.
    Failed(BallastError),
}

impl NodeReply {
    /// Whether no further reply follows.
    #[must_use]
    pub fn is_final(&self) -> bool {
        !matches!(self, NodeReply::Progress { .. })
    }
}

/// What a transfer token allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenRight {
    /// Describe, read and map.
    Read,
    /// Allocate, write and seal.
    Import,
}

/// Whose writes a token allows, and of which run of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenPart {
    /// The participant.
    pub participant: ParticipantId,
    /// Nodes refuse an older epoch than the highest they have met.
    pub epoch: u64,
}

/// The signed content of a transfer token. A token only opens the door to bytes; whether a read counted is
/// decided by the lease in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenClaims {
    /// Whose bytes.
    pub instance: InstanceId,
    /// What for.
    pub right: TokenRight,
    /// The lease id or session id it was issued for.
    pub subject: String,
    /// Of an import with several writers: whose writes it allows. Without it, it allows the whole import.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<TokenPart>,
    /// For reading: the digest of the nodes that hold the instance ([`holders_digest`]). A node that derives from it
    /// connects to no other address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holders: Option<Digest>,
    /// Wall-clock end, with slack.
    pub expires_unix_ms: u64,
}

/// Stands for nodes and the addresses at which other nodes reach them, in their order; of more than [`HOLDERS_MAX`] for the
/// first ones.
#[must_use]
pub fn holders_digest(holders: &[NodeEndpoint]) -> Digest {
    let fields = |holder: &NodeEndpoint| [holder.node.as_str().to_owned(), holder.tcp.clone().unwrap_or_default()];
    let fields: Vec<String> = holders.iter().take(HOLDERS_MAX).flat_map(fields).collect();
    hash_list(fields.iter().map(String::as_bytes))
}

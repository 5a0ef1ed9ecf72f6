//! `State`: everything the log says, and the questions it answers. Changed only by `fold`.
//!
//! Authoritative records are in [`Record`] (what a snapshot holds); whatever can be derived from them is in the index and is
//! rebuilt after a restore (RFC, HA and Upgrade). Cost is O(revisions + leases + operations), never O(tensors).

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use ballast_schemas::{
    Availability, BallastError, Capability, ClaimPhase, ClusterConfig, ClusterId, CommandId, Digest, ErrorCode,
    FOLD_VERSION_FIRST, ImportPart, ImportSession, InstanceId, InstanceStanding, LeaseGrant, LeaseId, LineageKey,
    ListRequest, LogPosition, LogTime, MigrationTrigger, NodeId, OperationId, Outcome, Rejection, ReplacementClaim,
    ReplicaId, Residency, RevisionIdentity, RevisionPage, RevisionView, SessionId, SnapshotCommitted, TenantId,
    UpsertMode, WeightOperation, WeightRevisionMetadata,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::cluster::{AnnouncedReplica, Cluster};
use crate::index::Index;
use crate::invariants::{self, Violation};
use crate::lineage::Lineage;
use crate::list;
use crate::operation::{Operation, OperationKey};
use crate::pressure::Rounds;
use crate::recent::Recent;
use crate::revision::{Lease, Revision};
use crate::table::Table;

/// The layout of a snapshot. A snapshot of another format is refused, never guessed at.
const SNAPSHOT_FORMAT: u32 = 2;
/// The newest rules that this build folds by; it keeps the older ones, because a log is folded by those it was written under.
/// The rules in force ([`State::fold_version`]) are raised only by a confirmed log entry.
pub const FOLD_VERSION: u32 = 1;

/// The management state after some log entry. Serialises as its authoritative records (MessagePack with named fields);
/// a reader of a snapshot calls [`State::check_restored`] before it trusts it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub(crate) record: Record,
    pub(crate) index: Index,
}

/// What a snapshot holds. An optional section that is missing is an empty one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    pub format: u32,
    pub fold_version: u32,
    pub log_seq: u64,
    /// The log clock in nanoseconds: entries closer together than a millisecond must still add up.
    pub clock_ns: u64,
    /// Stream timestamp of the last entry.
    pub last_unix_ns: u64,
    /// Chains every envelope and its outcomes: two replicas with equal chains decided everything alike.
    pub chain: Digest,
    pub cluster: Option<Cluster>,
    pub config: ClusterConfig,
    #[serde(default)]
    pub capabilities: BTreeSet<Capability>,
    #[serde(default)]
    pub replicas: BTreeMap<ReplicaId, AnnouncedReplica>,
    /// The last two verified snapshots, oldest first.
    #[serde(default)]
    pub snapshots: Vec<SnapshotCommitted>,
    #[serde(default)]
    pub lineages: BTreeMap<LineageKey, Lineage>,
    #[serde(default)]
    pub revisions: Table<RevisionIdentity, Revision>,
    #[serde(default)]
    pub operations: Table<OperationKey, Operation>,
    /// Of the nodes whose memory ran short.
    #[serde(default)]
    pub rounds: BTreeMap<NodeId, Rounds>,
    /// Automatic migrations that reached their target.
    #[serde(default)]
    pub automatic: BTreeMap<MigrationTrigger, AutomaticMigrations>,
    /// What recent commands asked for, and their outcomes, for their repeats. Remembered for two command windows: a repeat
    /// received within the first is never accepted after the second.
    #[serde(default)]
    pub recent: Recent<CommandId, (Digest, Outcome)>,
    /// Leases that ended a short while ago, by instance: whether they had expired.
    #[serde(default)]
    pub ended_leases: Recent<(LogPosition, LeaseId), bool>,
}

impl Default for Record {
    fn default() -> Self {
        Self {
            format: SNAPSHOT_FORMAT,
            fold_version: FOLD_VERSION_FIRST,
            log_seq: 0,
            clock_ns: 0,
            last_unix_ns: 0,
            chain: Digest::from_bytes([0; 32]),
            cluster: None,
            config: ClusterConfig::default(),
            capabilities: BTreeSet::new(),
            replicas: BTreeMap::new(),
            snapshots: Vec::new(),
            lineages: BTreeMap::new(),
            revisions: Table::default(),
            operations: Table::default(),
            rounds: BTreeMap::new(),
            automatic: BTreeMap::new(),
            recent: Recent::default(),
            ended_leases: Recent::default(),
        }
    }
}

impl Serialize for State {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.record.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for State {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let record = Record::deserialize(deserializer)?;
        if record.format != SNAPSHOT_FORMAT || record.fold_version > FOLD_VERSION {
            return Err(serde::de::Error::custom(format!(
                "snapshot format {} with fold version {} is unknown; this build reads format {SNAPSHOT_FORMAT} with fold versions up to {FOLD_VERSION}: use the build that wrote it",
                record.format, record.fold_version
            )));
        }
        let index = Index::of(&record);
        Ok(Self { record, index })
    }
}

/// How many of everything there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Revisions by availability, tombstones too.
    pub revisions: BTreeMap<Availability, u64>,
    /// Revisions by residency, tombstones too.
    pub residency: BTreeMap<Residency, u64>,
    /// Operations that have not ended.
    pub active_operations: u64,
    /// Leases that have not ended.
    pub active_leases: u64,
    /// The latest replacement claim of every lineage, by mode and phase.
    pub claims: BTreeMap<(UpsertMode, ClaimPhase), u64>,
}

/// Automatic migrations since the beginning of the log, by which way they went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutomaticMigrations {
    /// That left more of a revision in memory than before.
    pub promotions: u64,
    /// That left less.
    pub demotions: u64,
}

impl State {
    /// Before the first entry of a log.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The last folded sequence; 0 before the first.
    #[must_use]
    pub fn log_seq(&self) -> u64 {
        self.record.log_seq
    }

    /// The log clock after the last folded entry.
    #[must_use]
    pub fn log_clock(&self) -> LogTime {
        LogTime(self.record.clock_ns.checked_div(1_000_000).unwrap_or_default())
    }

    /// The cluster, once its first entry is folded.
    #[must_use]
    pub fn cluster(&self) -> Option<&Cluster> {
        self.record.cluster.as_ref()
    }

    /// The cluster's id, once its first entry is folded.
    #[must_use]
    pub fn cluster_id(&self) -> Option<&ClusterId> {
        self.cluster().map(|cluster| &cluster.cluster_id)
    }

    /// The cluster-wide settings in force.
    #[must_use]
    pub fn config(&self) -> &ClusterConfig {
        &self.record.config
    }

    /// Whether a gate is open.
    #[must_use]
    pub fn has_capability(&self, capability: Capability) -> bool {
        self.record.capabilities.contains(&capability)
    }

    /// Replicas that announced themselves, with what they can fold.
    pub fn replicas(&self) -> impl Iterator<Item = (&ReplicaId, &AnnouncedReplica)> {
        self.record.replicas.iter()
    }

    /// The last two verified snapshots, oldest first.
    #[must_use]
    pub fn snapshots(&self) -> &[SnapshotCommitted] {
        &self.record.snapshots
    }

    /// A revision's record; tombstones and imports in progress too.
    #[must_use]
    pub fn revision(&self, identity: &RevisionIdentity) -> Option<&WeightRevisionMetadata> {
        self.record.revisions.get(identity).map(|revision| &revision.metadata)
    }

    /// What a call hears whose `not_after` the log clock has passed.
    #[must_use]
    pub fn too_late(clock: LogTime, not_after: LogTime) -> Rejection {
        let message = format!(
            "too late: the command was good until {} ms of the log clock, which is at {} ms; send it again under a new id",
            not_after.0, clock.0
        );
        Rejection::new(ErrorCode::Unavailable, message)
    }

    /// Refuses a call on a revision that was decided on an older record than the present one, or the one before it.
    ///
    /// # Errors
    /// `NOT_FOUND`, `STALE_GENERATION`.
    pub fn expect_recent(&self, identity: &RevisionIdentity, expected: u64) -> Result<(), BallastError> {
        let revision = self.existing(identity)?;
        if revision.is_repeat_of_last_change(expected) {
            return Ok(());
        }
        revision.expect_generation(expected).map_err(BallastError::from)
    }

    /// A revision, or NOT_FOUND.
    pub(crate) fn existing(&self, identity: &RevisionIdentity) -> Result<&Revision, Rejection> {
        let found = self.record.revisions.get(identity);
        found.ok_or_else(|| Rejection::new(ErrorCode::NotFound, format!("revision {identity} does not exist")))
    }

    /// A revision's record with the live figures beside it.
    #[must_use]
    pub fn view(&self, identity: &RevisionIdentity) -> Option<RevisionView> {
        let revision = self.record.revisions.get(identity)?;
        let nearest = revision.leases.values().map(Lease::expires_at).min();
        Some(RevisionView {
            metadata: revision.metadata.clone(),
            active_lease_count: u32::try_from(revision.leases.len()).unwrap_or(u32::MAX),
            nearest_lease_expiry_ms: nearest.map(|at| at.since(self.log_clock())),
            watermark: self.watermark(&identity.lineage()),
            import: revision.import.as_ref().and_then(|import| import.shown(self.log_clock())),
        })
    }

    /// The open import session of a revision.
    #[must_use]
    pub fn import(&self, identity: &RevisionIdentity) -> Option<&ImportSession> {
        self.record.revisions.get(identity)?.import.as_ref().map(|import| &import.session)
    }

    /// The participants of a revision's open import, by name; none where there is one writer.
    #[must_use]
    pub fn import_parts(&self, identity: &RevisionIdentity) -> Vec<ImportPart> {
        let import = self.record.revisions.get(identity).and_then(|revision| revision.import.as_ref());
        import.map_or_else(Vec::new, |import| import.views())
    }

    /// The session whose several writers have published a revision, as far as it is known.
    #[must_use]
    pub fn published_by(&self, identity: &RevisionIdentity) -> Option<&SessionId> {
        self.record.revisions.get(identity)?.published_by.as_ref()
    }

    /// Whether every participant of a revision's open import has brought its part.
    ///
    /// # Errors
    /// `NOT_READY` naming those that have not.
    pub fn expect_parts(&self, identity: &RevisionIdentity) -> Result<(), BallastError> {
        let import = self.record.revisions.get(identity).and_then(|revision| revision.import.as_ref());
        import.map_or(Ok(()), |import| Ok(import.expect_all_done(self.log_clock())?))
    }

    /// Every READY or DEGRADED revision.
    pub fn published(&self) -> impl Iterator<Item = &WeightRevisionMetadata> {
        self.index.listed.iter().filter_map(|identity| self.revision(identity))
    }

    /// The last log position that authorised an effect on a revision's bytes: evidence under an older fence does not count.
    #[must_use]
    pub fn effect_fence(&self, identity: &RevisionIdentity) -> LogPosition {
        self.record.revisions.get(identity).map_or(LogPosition::ZERO, |revision| revision.effect_fence)
    }

    /// An active lease.
    #[must_use]
    pub fn lease(&self, identity: &RevisionIdentity, lease_id: &LeaseId) -> Option<LeaseGrant> {
        Some(LeaseGrant::clone(&self.record.revisions.get(identity)?.leases.get(lease_id)?.grant))
    }

    /// Every active lease of a revision.
    #[must_use]
    pub fn leases(&self, identity: &RevisionIdentity) -> Vec<LeaseGrant> {
        let Some(revision) = self.record.revisions.get(identity) else { return Vec::new() };
        revision.leases.values().map(|lease| LeaseGrant::clone(&lease.grant)).collect()
    }

    /// One page of a tenant's revisions in order of (namespace, resource, revision, generation). Imports in progress,
    /// deletions and tombstones only with `all`. A page may be shorter than `limit`; the last one has an empty token.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a limit of 0 or above 1000, or a token that no page gave.
    pub fn list(&self, tenant: &TenantId, request: &ListRequest) -> Result<RevisionPage, BallastError> {
        list::page(self, tenant, request)
    }

    /// An operation, ended or not.
    #[must_use]
    pub fn operation(&self, operation_id: &OperationId) -> Option<&WeightOperation> {
        self.record.operations.get(&OperationKey::of(operation_id)?).map(|operation| &*operation.view)
    }

    /// A tenant's operations, newest first; those that have ended only with `all`.
    #[must_use]
    pub fn operations(&self, tenant: &TenantId, all: bool, limit: u32) -> Vec<WeightOperation> {
        let Some(keys) = self.index.tenants.get(tenant) else { return Vec::new() };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let keys: Vec<&OperationKey> = if all {
            // Both sets are ordered: the newest of each are enough.
            let mut newest: Vec<&OperationKey> =
                keys.active.iter().rev().take(limit).chain(keys.ended.iter().rev().take(limit)).collect();
            newest.sort_unstable_by(|a, b| b.cmp(a));
            newest
        } else {
            keys.active.iter().rev().collect()
        };
        let operations = keys.into_iter().filter_map(|key| self.record.operations.get(key));
        operations.take(limit).map(|operation| WeightOperation::clone(&operation.view)).collect()
    }

    /// Every revision's record, tombstones and imports in progress too, in order of identity.
    pub fn revisions(&self) -> impl Iterator<Item = &WeightRevisionMetadata> {
        self.record.revisions.values().map(|revision| &revision.metadata)
    }

    /// Every operation that is remembered, ended or not, oldest first.
    pub fn all_operations(&self) -> impl Iterator<Item = &WeightOperation> {
        self.record.operations.values().map(|operation| &*operation.view)
    }

    /// Every lineage with its watermark and its latest replacement claim.
    pub fn lineages(&self) -> impl Iterator<Item = (&LineageKey, u64, Option<&ReplacementClaim>)> {
        self.record.lineages.iter().map(|(key, lineage)| (key, lineage.watermark, lineage.claim.as_deref()))
    }

    /// The rules that entries are folded by; raised only by a confirmed log entry.
    #[must_use]
    pub fn fold_version(&self) -> u32 {
        self.record.fold_version
    }

    /// The stream timestamp of the last entry, for display.
    #[must_use]
    pub fn unix_ms(&self) -> u64 {
        self.record.last_unix_ns.checked_div(1_000_000).unwrap_or_default()
    }

    /// Every open gate.
    pub fn capabilities(&self) -> impl Iterator<Item = Capability> + '_ {
        self.record.capabilities.iter().copied()
    }

    /// The latest replacement claim of a lineage.
    #[must_use]
    pub fn claim(&self, lineage: &LineageKey) -> Option<&ReplacementClaim> {
        self.record.lineages.get(lineage)?.claim.as_deref()
    }

    /// The highest generation of a lineage whose publication is complete; 0 before the first. Orders and fences only: it
    /// does not say which generation is being served.
    #[must_use]
    pub fn watermark(&self, lineage: &LineageKey) -> u64 {
        self.record.lineages.get(lineage).map_or(0, |lineage| lineage.watermark)
    }

    /// Operations that want a worker, oldest first.
    pub fn runnable_operations(&self) -> impl Iterator<Item = &WeightOperation> {
        self.index.runnable.iter().filter_map(|key| self.record.operations.get(key)).map(|operation| &*operation.view)
    }

    /// The earliest moment at which time alone changes something: a lease, a session, a worker's claim, a back-off or a
    /// park timer ends.
    #[must_use]
    pub fn next_deadline(&self) -> Option<LogTime> {
        self.index.deadlines.first().map(|(at, _)| *at)
    }

    /// What the log knows of the bytes of one import.
    #[must_use]
    pub fn instance_standing(&self, instance: &InstanceId) -> InstanceStanding {
        if let Some(identity) = self.index.instances.get(&instance.position) {
            let found = self.record.revisions.get(identity).map(|revision| &revision.metadata);
            return match found.filter(|metadata| metadata.instance == *instance) {
                Some(metadata) if metadata.availability == Availability::Deleted => InstanceStanding::Deleted,
                Some(_) => InstanceStanding::Known,
                None => InstanceStanding::Unknown,
            };
        }
        match self.index.groups.get(&instance.group_id) {
            // A later import of the same revision took its place.
            Some(current) if *current > instance.position => InstanceStanding::Deleted,
            _ => InstanceStanding::Unknown,
        }
    }

    /// Automatic migrations that reached their target, by what started them.
    #[must_use]
    pub fn automatic_migrations(&self) -> &BTreeMap<MigrationTrigger, AutomaticMigrations> {
        &self.record.automatic
    }

    /// How many of everything there are.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.index.counts.clone()
    }

    /// Chains every envelope and its outcomes: two replicas at the same sequence that differ here decided something
    /// differently, and must stop.
    #[must_use]
    pub fn chain(&self) -> Digest {
        self.record.chain
    }

    /// SHA-256 of the whole state as a snapshot would hold it.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut hash = HashWriter::new();
        // Writing into a hash can not fail, and every field has a MessagePack form.
        let written = rmp_serde::encode::write_named(&mut hash, &self.record);
        debug_assert!(written.is_ok(), "state has no MessagePack form: {written:?}");
        hash.finish()
    }

    /// Checks every safety invariant and the state table. O(state).
    ///
    /// # Errors
    /// The first invariant that does not hold, with the record that breaks it.
    pub fn check_invariants(&self) -> Result<(), Violation> {
        invariants::check(self)
    }

    /// The same for a state that was read from a snapshot a moment ago: its index is one that was made from its records.
    ///
    /// # Errors
    /// The first invariant that does not hold, with the record that breaks it.
    pub fn check_restored(&self) -> Result<(), Violation> {
        invariants::check_records(self)
    }
}

/// Bytes that are hashed at once.
const HASHED_AT_ONCE: usize = 4096;

/// Feeds a hash with what a serialiser writes, which is a few bytes at a time.
pub(crate) struct HashWriter {
    hash: Sha256,
    gathered: Vec<u8>,
}

impl HashWriter {
    pub fn new() -> Self {
        Self { hash: Sha256::new(), gathered: Vec::with_capacity(HASHED_AT_ONCE) }
    }

    /// The digest of everything that was written.
    pub fn finish(mut self) -> Digest {
        self.hash.update(&self.gathered);
        Digest::from_bytes(self.hash.finalize().into())
    }
}

impl io::Write for HashWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.gathered.len().saturating_add(bytes.len()) > HASHED_AT_ONCE {
            self.hash.update(&self.gathered);
            self.gathered.clear();
        }
        self.gathered.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

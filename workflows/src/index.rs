//! What is derived from the records so that no command and no query scans: deadlines, what is remembered until when,
//! instances, listings, work and counts. Rebuilt after a restore, never part of a snapshot.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use ballast_schemas::{
    Availability, CommandId, GroupId, LeaseId, LogPosition, LogTime, NodeId, OperationStatus, ReplacementClaim,
    RevisionIdentity, TenantId,
};

use crate::operation::{Operation, OperationKey};
use crate::pressure::{Demotable, Promotable, put_or_take};
use crate::revision::{EndedLease, Lease, Revision};
use crate::state::{Counts, Record};

/// Something that time alone changes. The order breaks ties between equal moments.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Deadline {
    /// A lease of the revision behind this instance.
    Lease(LogPosition, LeaseId),
    /// The import session of this instance.
    Import(LogPosition),
    /// A worker's claim, a back-off or a park timer.
    Operation(OperationKey),
}

/// Something that is remembered for a while so that late repeats do no harm.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Forget {
    Command(CommandId),
    Lease(LogPosition, LeaseId),
}

/// A tenant's operations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TenantOperations {
    pub active: BTreeSet<OperationKey>,
    pub ended: BTreeSet<OperationKey>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Index {
    pub deadlines: BTreeSet<(LogTime, Deadline)>,
    pub forget: BTreeSet<(LogTime, Forget)>,
    /// The revision behind each current instance.
    pub instances: BTreeMap<LogPosition, RevisionIdentity>,
    /// The current instance of each group.
    pub groups: BTreeMap<GroupId, LogPosition>,
    /// READY and DEGRADED revisions: what ordinary discovery sees.
    pub listed: BTreeSet<RevisionIdentity>,
    /// Revisions with an open import session.
    pub importing: BTreeSet<RevisionIdentity>,
    pub runnable: BTreeSet<OperationKey>,
    pub tenants: BTreeMap<TenantId, TenantOperations>,
    /// By node, the AUTO revisions that pressure may demote, in its order.
    pub demotable: BTreeMap<NodeId, BTreeSet<Demotable>>,
    /// By node, those that pressure demoted and its end brings back, in that order.
    pub promotable: BTreeMap<NodeId, BTreeSet<Promotable>>,
    /// By node, the migrations of its last rounds that are under way.
    pub moving: BTreeMap<NodeId, BTreeSet<OperationKey>>,
    pub counts: Counts,
}

impl Index {
    /// The index of `record`.
    pub fn of(record: &Record) -> Self {
        let mut index = Self::default();
        for (identity, revision) in &record.revisions {
            index.add_revision(identity, revision);
            for (lease_id, lease) in &revision.leases {
                index.add_lease(revision, lease_id, lease);
            }
            for (lease_id, ended) in &revision.ended_leases {
                index.add_ended_lease(revision, lease_id, ended);
            }
        }
        for (key, operation) in &record.operations {
            index.add_operation(key, operation);
        }
        for claim in record.lineages.values().filter_map(|lineage| lineage.claim.as_ref()) {
            index.add_claim(claim);
        }
        for (id, remembered) in &record.recent {
            index.forget.insert((remembered.until, Forget::Command(id.clone())));
        }
        index
    }

    pub fn add_revision(&mut self, identity: &RevisionIdentity, revision: &Revision) {
        let metadata = &revision.metadata;
        self.instances.insert(metadata.instance.position, identity.clone());
        self.groups.insert(metadata.instance.group_id.clone(), metadata.instance.position);
        if is_listed(metadata.availability) {
            self.listed.insert(identity.clone());
        }
        if let Some(import) = &revision.import {
            self.importing.insert(identity.clone());
            self.deadlines.insert((import.session.expires_at, Deadline::Import(metadata.instance.position)));
        }
        count(&mut self.counts.revisions, metadata.availability, true);
        count(&mut self.counts.residency, metadata.residency, true);
        self.set_candidate(identity, revision, true);
    }

    pub fn remove_revision(&mut self, identity: &RevisionIdentity, revision: &Revision) {
        let metadata = &revision.metadata;
        self.instances.remove(&metadata.instance.position);
        self.groups.remove(&metadata.instance.group_id);
        self.listed.remove(identity);
        self.importing.remove(identity);
        if let Some(import) = &revision.import {
            self.deadlines.remove(&(import.session.expires_at, Deadline::Import(metadata.instance.position)));
        }
        count(&mut self.counts.revisions, metadata.availability, false);
        count(&mut self.counts.residency, metadata.residency, false);
        self.set_candidate(identity, revision, false);
    }

    /// Puts a revision among the candidates of memory pressure and its end, or takes it out. Leases and accesses change where
    /// it stands there, and nothing else of a revision's index.
    pub fn set_candidate(&mut self, identity: &RevisionIdentity, revision: &Revision, there: bool) {
        let (demotable, promotable) = (revision.demotable(), revision.is_promotable());
        for node in &revision.metadata.placement {
            if let Some((at, bytes)) = demotable {
                put_or_take(&mut self.demotable, node, (at, bytes, identity.clone()), there);
            }
            if promotable {
                put_or_take(&mut self.promotable, node, (Reverse(revision.last_access), identity.clone()), there);
            }
        }
    }

    pub fn add_lease(&mut self, revision: &Revision, lease_id: &LeaseId, lease: &Lease) {
        self.deadlines.insert((lease.expires_at, Deadline::Lease(revision.position(), lease_id.clone())));
        self.counts.active_leases = self.counts.active_leases.saturating_add(1);
    }

    pub fn remove_lease(&mut self, revision: &Revision, lease_id: &LeaseId, lease: &Lease) {
        self.deadlines.remove(&(lease.expires_at, Deadline::Lease(revision.position(), lease_id.clone())));
        self.counts.active_leases = self.counts.active_leases.saturating_sub(1);
    }

    pub fn add_ended_lease(&mut self, revision: &Revision, lease_id: &LeaseId, ended: &EndedLease) {
        self.forget.insert((ended.until, Forget::Lease(revision.position(), lease_id.clone())));
    }

    pub fn remove_ended_lease(&mut self, revision: &Revision, lease_id: &LeaseId, ended: &EndedLease) {
        self.forget.remove(&(ended.until, Forget::Lease(revision.position(), lease_id.clone())));
    }

    pub fn add_operation(&mut self, key: &OperationKey, operation: &Operation) {
        let tenant = self.tenants.entry(operation.view.identity.tenant_id.clone()).or_default();
        if operation.view.status.is_terminal() {
            tenant.ended.insert(*key);
            return;
        }
        tenant.active.insert(*key);
        self.counts.active_operations = self.counts.active_operations.saturating_add(1);
        if operation.view.status == OperationStatus::Runnable {
            self.runnable.insert(*key);
        }
        if let Some(at) = operation.deadline() {
            self.deadlines.insert((at, Deadline::Operation(*key)));
        }
        if let Some(node) = operation.moves_on() {
            put_or_take(&mut self.moving, node, *key, true);
        }
    }

    pub fn remove_operation(&mut self, key: &OperationKey, operation: &Operation) {
        let tenant = &operation.view.identity.tenant_id;
        if let Some(keys) = self.tenants.get_mut(tenant) {
            keys.active.remove(key);
            keys.ended.remove(key);
            if keys.active.is_empty() && keys.ended.is_empty() {
                self.tenants.remove(tenant);
            }
        }
        if operation.view.status.is_terminal() {
            return;
        }
        self.counts.active_operations = self.counts.active_operations.saturating_sub(1);
        self.runnable.remove(key);
        if let Some(at) = operation.deadline() {
            self.deadlines.remove(&(at, Deadline::Operation(*key)));
        }
        if let Some(node) = operation.moves_on() {
            put_or_take(&mut self.moving, node, *key, false);
        }
    }

    pub fn add_claim(&mut self, claim: &ReplacementClaim) {
        count(&mut self.counts.claims, (claim.mode, claim.phase), true);
    }

    pub fn remove_claim(&mut self, claim: &ReplacementClaim) {
        count(&mut self.counts.claims, (claim.mode, claim.phase), false);
    }
}

/// Whether ordinary discovery sees revisions of this availability.
pub(crate) fn is_listed(availability: Availability) -> bool {
    matches!(availability, Availability::Ready | Availability::Degraded)
}

/// One more or one less; a count of zero has no entry, so that an index equals its rebuilt self.
fn count<K: Ord>(counts: &mut BTreeMap<K, u64>, key: K, more: bool) {
    let now = counts.get(&key).copied().unwrap_or_default();
    let then = if more { now.saturating_add(1) } else { now.saturating_sub(1) };
    if then == 0 {
        counts.remove(&key);
    } else {
        counts.insert(key, then);
    }
}

//! What is derived from the records so that no command and no query scans: deadlines, instances, listings, work and counts.
//! Rebuilt after a restore, never part of a snapshot.
//!
//! A record says where it stands in here ([`RevisionPlace`], [`OperationPlace`]); a change moves it only where the two differ.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use ballast_schemas::{
    Availability, GroupId, LeaseId, LogPosition, LogTime, NodeId, OperationStatus, ReplacementClaim, Residency,
    RevisionIdentity, TenantId,
};

use crate::operation::{Operation, OperationKey};
use crate::pressure::{Demotable, Promotable, put_or_take};
use crate::revision::Revision;
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

/// A tenant's operations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TenantOperations {
    pub active: BTreeSet<OperationKey>,
    pub ended: BTreeSet<OperationKey>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Index {
    pub deadlines: BTreeSet<(LogTime, Deadline)>,
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
    /// Replacement claims that have not ended.
    pub open_claims: u64,
    pub counts: Counts,
}

/// Where a revision stands among the candidates of memory pressure and its end. Leases and accesses change that, and nothing
/// else of a revision's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidacy {
    demotable: Option<(LogTime, Reverse<u64>)>,
    promotable: Option<Reverse<LogTime>>,
}

/// Where a revision stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RevisionPlace {
    availability: Availability,
    residency: Residency,
    import_ends: Option<LogTime>,
    candidacy: Candidacy,
}

/// Where an operation stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OperationPlace {
    ended: bool,
    runnable: bool,
    next_look: Option<LogTime>,
    pub moves_on: Option<NodeId>,
}

impl Revision {
    pub fn candidacy(&self) -> Candidacy {
        let promotable = self.is_promotable().then_some(Reverse(self.last_access));
        Candidacy { demotable: self.demotable(), promotable }
    }

    pub fn place(&self) -> RevisionPlace {
        RevisionPlace {
            availability: self.metadata.availability,
            residency: self.metadata.residency,
            import_ends: self.import.as_ref().map(|import| import.session.expires_at),
            candidacy: self.candidacy(),
        }
    }
}

impl Operation {
    pub fn place(&self) -> OperationPlace {
        OperationPlace {
            ended: self.view.status.is_terminal(),
            runnable: self.view.status == OperationStatus::Runnable,
            next_look: self.next_look,
            moves_on: self.moves_on().cloned(),
        }
    }
}

impl Index {
    /// The index of `record`.
    pub fn of(record: &Record) -> Self {
        let mut index = Self::default();
        for (_, revision) in &record.revisions {
            index.add_revision(revision);
            for (lease_id, lease) in &revision.leases {
                index.add_lease(revision.position(), lease_id, lease.next_look);
            }
        }
        for (key, operation) in &record.operations {
            index.add_operation(*key, operation);
        }
        for claim in record.lineages.values().filter_map(|lineage| lineage.claim.as_ref()) {
            index.add_claim(claim);
        }
        index
    }

    pub fn add_revision(&mut self, revision: &Revision) {
        let metadata = &revision.metadata;
        self.instances.insert(metadata.instance.position, metadata.identity.clone());
        self.groups.insert(metadata.instance.group_id.clone(), metadata.instance.position);
        self.place_revision(revision, &revision.place(), true);
    }

    pub fn remove_revision(&mut self, revision: &Revision) {
        self.instances.remove(&revision.metadata.instance.position);
        self.groups.remove(&revision.metadata.instance.group_id);
        self.place_revision(revision, &revision.place(), false);
    }

    /// A revision that stood at `before` has changed. Its identity, its instance and its nodes have not.
    pub fn move_revision(&mut self, revision: &Revision, before: &RevisionPlace) {
        let after = revision.place();
        if *before != after {
            self.place_revision(revision, before, false);
            self.place_revision(revision, &after, true);
        }
    }

    fn place_revision(&mut self, revision: &Revision, place: &RevisionPlace, there: bool) {
        let (identity, position) = (&revision.metadata.identity, revision.position());
        if is_listed(place.availability) {
            put(&mut self.listed, identity.clone(), there);
        }
        if let Some(at) = place.import_ends {
            put(&mut self.importing, identity.clone(), there);
            put(&mut self.deadlines, (at, Deadline::Import(position)), there);
        }
        count(&mut self.counts.revisions, place.availability, there);
        count(&mut self.counts.residency, place.residency, there);
        self.place_candidate(revision, &place.candidacy, there);
    }

    /// A revision that was a candidate as `before` says got or lost a lease, or was read.
    pub fn move_candidate(&mut self, revision: &Revision, before: &Candidacy) {
        let after = revision.candidacy();
        if *before != after {
            self.place_candidate(revision, before, false);
            self.place_candidate(revision, &after, true);
        }
    }

    fn place_candidate(&mut self, revision: &Revision, place: &Candidacy, there: bool) {
        let metadata = &revision.metadata;
        for node in &metadata.placement {
            if let Some((at, bytes)) = place.demotable {
                put_or_take(&mut self.demotable, node, (at, bytes, metadata.identity.clone()), there);
            }
            if let Some(at) = place.promotable {
                put_or_take(&mut self.promotable, node, (at, metadata.identity.clone()), there);
            }
        }
    }

    /// A lease of the instance that began at `position`.
    pub fn add_lease(&mut self, position: LogPosition, lease_id: &LeaseId, next_look: LogTime) {
        self.deadlines.insert((next_look, Deadline::Lease(position, lease_id.clone())));
        self.counts.active_leases = self.counts.active_leases.saturating_add(1);
    }

    pub fn remove_lease(&mut self, position: LogPosition, lease_id: &LeaseId, next_look: LogTime) {
        self.deadlines.remove(&(next_look, Deadline::Lease(position, lease_id.clone())));
        self.counts.active_leases = self.counts.active_leases.saturating_sub(1);
    }

    pub fn add_operation(&mut self, key: OperationKey, operation: &Operation) {
        let nowhere = OperationPlace { ended: false, runnable: false, next_look: None, moves_on: None };
        let place = operation.place();
        let tenant = self.tenants.entry(operation.view.identity.tenant_id.clone()).or_default();
        if place.ended {
            tenant.ended.insert(key);
        } else {
            tenant.active.insert(key);
            self.counts.active_operations = self.counts.active_operations.saturating_add(1);
        }
        self.place_operation(key, &nowhere, &place);
    }

    /// Forgets an operation that has ended.
    pub fn remove_ended_operation(&mut self, key: OperationKey, tenant_id: &TenantId) {
        if let Some(keys) = self.tenants.get_mut(tenant_id) {
            keys.ended.remove(&key);
            if keys.active.is_empty() && keys.ended.is_empty() {
                self.tenants.remove(tenant_id);
            }
        }
    }

    /// An operation that stood at `before` has changed.
    pub fn move_operation(&mut self, key: OperationKey, operation: &Operation, before: &OperationPlace) {
        let after = operation.place();
        if *before == after {
            return;
        }
        if before.ended != after.ended {
            let tenant = self.tenants.entry(operation.view.identity.tenant_id.clone()).or_default();
            put(&mut tenant.ended, key, after.ended);
            put(&mut tenant.active, key, !after.ended);
            let active = self.counts.active_operations;
            self.counts.active_operations =
                if after.ended { active.saturating_sub(1) } else { active.saturating_add(1) };
        }
        self.place_operation(key, before, &after);
    }

    fn place_operation(&mut self, key: OperationKey, before: &OperationPlace, after: &OperationPlace) {
        if before.runnable != after.runnable {
            put(&mut self.runnable, key, after.runnable);
        }
        if before.next_look != after.next_look {
            if let Some(at) = before.next_look {
                self.deadlines.remove(&(at, Deadline::Operation(key)));
            }
            if let Some(at) = after.next_look {
                self.deadlines.insert((at, Deadline::Operation(key)));
            }
        }
        if before.moves_on != after.moves_on {
            if let Some(node) = &before.moves_on {
                put_or_take(&mut self.moving, node, key, false);
            }
            if let Some(node) = &after.moves_on {
                put_or_take(&mut self.moving, node, key, true);
            }
        }
    }

    pub fn add_claim(&mut self, claim: &ReplacementClaim) {
        count(&mut self.counts.claims, (claim.mode, claim.phase), true);
        self.open_claims = self.open_claims.saturating_add(u64::from(!claim.phase.is_terminal()));
    }

    pub fn remove_claim(&mut self, claim: &ReplacementClaim) {
        count(&mut self.counts.claims, (claim.mode, claim.phase), false);
        self.open_claims = self.open_claims.saturating_sub(u64::from(!claim.phase.is_terminal()));
    }
}

/// Whether ordinary discovery sees revisions of this availability.
pub(crate) fn is_listed(availability: Availability) -> bool {
    matches!(availability, Availability::Ready | Availability::Degraded)
}

/// Puts `item` into a set, or takes it out.
fn put<T: Ord>(set: &mut BTreeSet<T>, item: T, there: bool) {
    if there {
        set.insert(item);
    } else {
        set.remove(&item);
    }
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

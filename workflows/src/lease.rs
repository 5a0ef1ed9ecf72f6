//! Leases: short protections of a revision's readable replicas (RFC, Get and Revision Lease). Idempotent by the lease id
//! that the holder chose, so they need no command table; an ended id is remembered long enough for every late repeat.

use ballast_schemas::{
    AcquireLease, ErrorCode, LEASE_TTL_MS_MAX, LEASE_TTL_MS_MIN, LeaseId, MigrationMode, MigrationTrigger, Outcome,
    ParkReason, Rejection, ReleaseLease, RenewLease, Reply, RevisionIdentity, TEXT_BYTES_MAX,
};

use crate::fold::{Fold, NOT_AFTER_AHEAD_MS_MAX, details, reject};
use crate::revision::{EndedLease, Lease, Settled};

impl Fold<'_> {
    pub fn acquire_lease(&mut self, command: &AcquireLease) -> Outcome {
        let (identity, lease_id) = (&command.identity, &command.lease_id);
        expect_ttl(command.ttl_ms)?;
        if command.holder.len() > TEXT_BYTES_MAX {
            let message =
                format!("the holder's name has {} bytes; at most {TEXT_BYTES_MAX} are allowed", command.holder.len());
            return reject(ErrorCode::InvalidArgument, message);
        }
        let revision = self.revision(identity)?;
        if let Some(lease) = revision.leases.get(lease_id) {
            if lease.holder != command.holder || lease.acquired_ttl_ms != command.ttl_ms {
                let message =
                    format!("lease {lease_id} is held by {:?} with other terms; choose a new lease id", lease.holder);
                return reject(ErrorCode::Conflict, message);
            }
            return self.lease_reply(identity, lease_id);
        }
        if revision.ended_leases.contains_key(lease_id) {
            return reject(ErrorCode::LeaseExpired, format!("lease {lease_id} has ended; choose a new lease id"));
        }
        revision.expect_ready()?;
        self.expect_not_retired(identity)?;
        let clock = self.clock();
        let lease = Lease {
            holder: command.holder.clone(),
            acquired_ttl_ms: command.ttl_ms,
            ttl_ms: command.ttl_ms,
            expires_at: clock.plus_ms(command.ttl_ms),
            granted_at: self.position,
        };
        if let Some(revision) = self.state.record.revisions.get_mut(identity) {
            self.state.index.set_candidate(identity, revision, false);
            self.state.index.add_lease(revision, lease_id, &lease);
            revision.leases.insert(lease_id.clone(), lease);
            revision.last_access = clock;
            revision.metadata.last_accessed_unix_ms = self.unix_ms;
            self.state.index.set_candidate(identity, revision, true);
        }
        self.promote_on_access(identity);
        self.lease_reply(identity, lease_id)
    }

    /// A read of an AUTO revision that is colder than preferred persists its promotion in the entry that grants the lease
    /// (RFC, Automatic Migration). Leases bind demotion only.
    fn promote_on_access(&mut self, identity: &RevisionIdentity) {
        let Some(revision) = self.state.record.revisions.get(identity) else { return };
        let policy = &revision.metadata.policy;
        let wanted = policy.migration_mode == MigrationMode::Auto
            && revision.metadata.operation_id.is_none()
            && revision.is_colder_than_preferred();
        let goal = Settled::preferred(policy);
        if !wanted || self.open_claim(&identity.lineage()).is_some_and(|claim| claim.target == *identity) {
            return;
        }
        let operation_id = self.add_migration(identity, goal, MigrationTrigger::Access);
        self.change_revision(identity, |revision| revision.metadata.operation_id = Some(operation_id.clone()));
        self.emit_started(Some(&operation_id));
    }

    pub fn renew_lease(&mut self, command: &RenewLease) -> Outcome {
        let (identity, lease_id) = (&command.identity, &command.lease_id);
        expect_ttl(command.ttl_ms)?;
        let revision = self.revision(identity)?;
        if !revision.leases.contains_key(lease_id) {
            return Err(lease_gone(identity, lease_id));
        }
        self.expect_not_retired(identity)?;
        let expires_at = self.clock().plus_ms(command.ttl_ms);
        if let Some(revision) = self.state.record.revisions.get_mut(identity)
            && let Some(mut lease) = revision.leases.remove(lease_id)
        {
            self.state.index.remove_lease(revision, lease_id, &lease);
            if expires_at > lease.expires_at {
                lease.expires_at = expires_at;
                lease.ttl_ms = command.ttl_ms;
            }
            self.state.index.add_lease(revision, lease_id, &lease);
            revision.leases.insert(lease_id.clone(), lease);
        }
        self.lease_reply(identity, lease_id)
    }

    pub fn release_lease(&mut self, command: &ReleaseLease) -> Outcome {
        let (identity, lease_id) = (&command.identity, &command.lease_id);
        // What is not known any more was not protected up to now.
        let Some(revision) = self.state.record.revisions.get(identity) else {
            return Ok(Reply::LeaseEnded { lapsed: true });
        };
        if let Some(ended) = revision.ended_leases.get(lease_id) {
            return Ok(Reply::LeaseEnded { lapsed: ended.lapsed });
        }
        if !revision.leases.contains_key(lease_id) {
            return Ok(Reply::LeaseEnded { lapsed: true });
        }
        self.end_lease(identity, lease_id, false);
        Ok(Reply::LeaseEnded { lapsed: false })
    }

    /// A lease whose time has come.
    pub fn expire_lease(&mut self, identity: &RevisionIdentity, lease_id: &LeaseId) {
        self.end_lease(identity, lease_id, true);
    }

    fn end_lease(&mut self, identity: &RevisionIdentity, lease_id: &LeaseId, lapsed: bool) {
        let until = self.clock().plus_ms(NOT_AFTER_AHEAD_MS_MAX);
        let Some(revision) = self.state.record.revisions.get_mut(identity) else { return };
        self.state.index.set_candidate(identity, revision, false);
        let lease = revision.leases.remove(lease_id);
        self.state.index.set_candidate(identity, revision, true);
        let Some(lease) = lease else { return };
        self.state.index.remove_lease(revision, lease_id, &lease);
        let ended = EndedLease { lapsed, until };
        self.state.index.add_ended_lease(revision, lease_id, &ended);
        revision.ended_leases.insert(lease_id.clone(), ended);
        if revision.leases.is_empty() {
            if let Some(key) = revision.operation_key() {
                self.wake(key, ParkReason::LeaseDrain);
            }
            self.base_may_be_free(identity);
        }
    }

    fn lease_reply(&self, identity: &RevisionIdentity, lease_id: &LeaseId) -> Outcome {
        let grant = self.state.lease(identity, lease_id).ok_or_else(|| lease_gone(identity, lease_id))?;
        Ok(Reply::Lease(Box::new(grant)))
    }
}

fn lease_gone(identity: &RevisionIdentity, lease_id: &LeaseId) -> Rejection {
    Rejection::new(
        ErrorCode::LeaseExpired,
        format!("lease {lease_id} of revision {identity} has ended; acquire a new one and read again"),
    )
    .with_details(details([("lease_id", lease_id.as_str().into())]))
}

fn expect_ttl(ttl_ms: u64) -> Result<(), Rejection> {
    if (LEASE_TTL_MS_MIN..=LEASE_TTL_MS_MAX).contains(&ttl_ms) {
        return Ok(());
    }
    let message = format!("a lease of {ttl_ms} ms is not possible; give {LEASE_TTL_MS_MIN} to {LEASE_TTL_MS_MAX} ms");
    Err(Rejection::new(ErrorCode::InvalidArgument, message))
}

#[cfg(test)]
mod tests;

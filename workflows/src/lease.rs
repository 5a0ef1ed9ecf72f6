//! Leases: short protections of a revision's readable replicas (RFC, Get and Revision Lease). Idempotent by the lease id
//! that the holder chose, so they need no command table; an ended id is remembered long enough for every late repeat.

use ballast_schemas::{
    AcquireLease, ErrorCode, LEASE_TTL_MS_MAX, LEASE_TTL_MS_MIN, LeaseGrant, LeaseId, LogPosition, LogTime,
    MigrationMode, MigrationTrigger, Outcome, ParkReason, Rejection, ReleaseLease, RenewLease, Reply, RevisionIdentity,
    Shared, TEXT_BYTES_MAX,
};

use crate::fold::{Fold, NOT_AFTER_AHEAD_MS_MAX, details, reject};
use crate::revision::{Lease, Settled};

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
            if lease.grant.holder != command.holder || lease.acquired_ttl_ms != command.ttl_ms {
                let message = format!(
                    "lease {lease_id} is held by {:?} with other terms; choose a new lease id",
                    lease.grant.holder
                );
                return reject(ErrorCode::Conflict, message);
            }
            return Ok(Reply::Lease(lease.grant.clone()));
        }
        if self.ended(revision.position(), lease_id).is_some() {
            return reject(ErrorCode::LeaseExpired, format!("lease {lease_id} has ended; choose a new lease id"));
        }
        revision.expect_ready()?;
        self.expect_not_retired(revision)?;
        let clock = self.clock();
        let Some(revision) = self.state.record.revisions.get_mut(identity) else {
            return Err(lease_gone(identity, lease_id));
        };
        let grant = Shared::new(LeaseGrant {
            lease_id: lease_id.clone(),
            holder: command.holder.clone(),
            identity: revision.metadata.identity.clone(),
            instance: revision.metadata.instance.clone(),
            ttl_ms: command.ttl_ms,
            expires_at: clock.plus_ms(command.ttl_ms),
        });
        let lease = Lease {
            next_look: grant.expires_at,
            grant: grant.clone(),
            acquired_ttl_ms: command.ttl_ms,
            granted_at: self.position,
        };
        let before = revision.candidacy();
        self.state.index.add_lease(revision.position(), lease_id, lease.next_look);
        revision.leases.insert(lease_id.clone(), lease);
        revision.last_access = clock;
        revision.metadata.last_accessed_unix_ms = self.unix_ms;
        self.state.index.move_candidate(revision, &before);
        if revision.metadata.policy.migration_mode == MigrationMode::Auto
            && revision.metadata.operation_id.is_none()
            && revision.is_colder_than_preferred()
        {
            self.promote_on_access(identity);
        }
        Ok(Reply::Lease(grant))
    }

    /// A read of an AUTO revision that is colder than preferred persists its promotion in the entry that grants the lease
    /// (RFC, Automatic Migration). Leases bind demotion only.
    fn promote_on_access(&mut self, identity: &RevisionIdentity) {
        let Some(revision) = self.state.record.revisions.get(identity) else { return };
        let goal = Settled::preferred(&revision.metadata.policy);
        if self.open_claim(identity).is_some_and(|claim| claim.target == *identity) {
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
        self.expect_not_retired(revision)?;
        let expires_at = self.clock().plus_ms(command.ttl_ms);
        let revision = self.state.record.revisions.get_mut(identity);
        let Some(lease) = revision.and_then(|revision| revision.leases.get_mut(lease_id)) else {
            return Err(lease_gone(identity, lease_id));
        };
        if expires_at > lease.expires_at() {
            let grant = &mut *lease.grant;
            (grant.expires_at, grant.ttl_ms) = (expires_at, command.ttl_ms);
        }
        Ok(Reply::Lease(lease.grant.clone()))
    }

    pub fn release_lease(&mut self, command: &ReleaseLease) -> Outcome {
        let (identity, lease_id) = (&command.identity, &command.lease_id);
        // What is not known any more was not protected up to now.
        let Some(revision) = self.state.record.revisions.get(identity) else {
            return Ok(Reply::LeaseEnded { lapsed: true });
        };
        if revision.leases.contains_key(lease_id) {
            self.end_lease(identity, lease_id, false);
            return Ok(Reply::LeaseEnded { lapsed: false });
        }
        Ok(Reply::LeaseEnded { lapsed: self.ended(revision.position(), lease_id).unwrap_or(true) })
    }

    /// Whether a lease that ended a short while ago had expired before it was released. A late repeat neither brings it back
    /// nor lies about its end.
    fn ended(&self, instance: LogPosition, lease_id: &LeaseId) -> Option<bool> {
        self.state.record.ended_leases.get(&(instance, lease_id.clone())).copied()
    }

    /// A lease is looked at: its time has come, or it was renewed and is looked at again then.
    pub fn expire_lease(&mut self, identity: &RevisionIdentity, lease_id: &LeaseId, at: LogTime) {
        let Some(revision) = self.state.record.revisions.get_mut(identity) else { return };
        let position = revision.position();
        let Some(lease) = revision.leases.get_mut(lease_id) else { return };
        if lease.expires_at() > at {
            self.state.index.remove_lease(position, lease_id, lease.next_look);
            lease.next_look = lease.expires_at();
            self.state.index.add_lease(position, lease_id, lease.next_look);
            return;
        }
        self.end_lease(identity, lease_id, true);
    }

    fn end_lease(&mut self, identity: &RevisionIdentity, lease_id: &LeaseId, lapsed: bool) {
        let until = self.clock().plus_ms(NOT_AFTER_AHEAD_MS_MAX);
        let Some(revision) = self.state.record.revisions.get_mut(identity) else { return };
        let before = revision.candidacy();
        let Some(lease) = revision.leases.remove(lease_id) else { return };
        self.state.index.move_candidate(revision, &before);
        let position = revision.position();
        self.state.index.remove_lease(position, lease_id, lease.next_look);
        self.state.record.ended_leases.push((position, lease_id.clone()), lapsed, until);
        if revision.leases.is_empty() {
            if let Some(key) = revision.operation_key() {
                self.wake(key, ParkReason::LeaseDrain);
            }
            self.base_may_be_free(identity);
        }
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

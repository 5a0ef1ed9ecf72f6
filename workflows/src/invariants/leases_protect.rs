//! Safety invariant 5: An active lease prevents deletion and the release of existing replicas: no lease on what is being deleted, and every
//! lease older than an outstanding release was granted after that release was authorised.

use ballast_schemas::Availability;

use super::Violation;
use crate::state::State;

const NAME: &str = "5, leases protect";

pub(super) fn check(state: &State) -> Result<(), Violation> {
    for (identity, revision) in &state.record.revisions {
        let availability = revision.metadata.availability;
        if !revision.leases.is_empty() && !matches!(availability, Availability::Ready | Availability::Degraded) {
            return Err(Violation::new(
                NAME,
                format!("{identity} is {availability} under {} leases", revision.leases.len()),
            ));
        }
        if let Some((lease_id, _)) = revision.leases.iter().find(|(_, lease)| lease.expires_at() <= state.log_clock()) {
            return Err(Violation::new(NAME, format!("lease {lease_id} of {identity} outlived its end")));
        }
        let operation = revision.operation_key().and_then(|key| state.record.operations.get(&key));
        let Some(authorized) = operation.and_then(|operation| operation.authorized) else { continue };
        if let Some((lease_id, _)) = revision.leases.iter().find(|(_, lease)| lease.granted_at < authorized.position) {
            return Err(Violation::new(
                NAME,
                format!("a release of {identity} was authorised at {} under lease {lease_id}", authorized.position),
            ));
        }
    }
    Ok(())
}

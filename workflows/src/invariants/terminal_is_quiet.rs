//! Safety invariant 8: A terminal state has no active lease or active operation.

use ballast_schemas::{Availability, OperationKind, Residency};

use super::Violation;
use crate::operation::OperationKey;
use crate::state::State;

const NAME: &str = "8, a terminal state is quiet";

pub(super) fn check(state: &State) -> Result<(), Violation> {
    for (identity, revision) in &state.record.revisions {
        let metadata = &revision.metadata;
        let deleted = metadata.availability == Availability::Deleted;
        if deleted
            && (metadata.residency != Residency::Absent
                || !revision.leases.is_empty()
                || metadata.operation_id.is_some())
        {
            return Err(Violation::new(NAME, format!("{identity} is DELETED but not ABSENT and quiet")));
        }
    }
    for (key, lineage) in &state.record.lineages {
        let Some(claim) = &lineage.claim else { continue };
        let operation = OperationKey::of(&claim.operation_id).and_then(|key| state.record.operations.get(&key));
        let active = operation.is_some_and(|operation| {
            !operation.view.status.is_terminal() && operation.view.kind == OperationKind::Replacing
        });
        if active == claim.phase.is_terminal() {
            return Err(Violation::new(
                NAME,
                format!("the claim on {key} is {}, its operation {} disagrees", claim.phase, claim.operation_id),
            ));
        }
    }
    Ok(())
}

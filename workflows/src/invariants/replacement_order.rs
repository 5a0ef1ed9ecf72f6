//! Safety invariant 12: PUT_FIRST must not retire the base before target READY. DELETE_FIRST must not delete the base before leases and
//! operations are absent, or allow target import before base deletion.

use ballast_schemas::{Availability, ClaimPhase, UpsertMode};

use super::Violation;
use crate::state::State;

const NAME: &str = "12, replacement order";

pub(super) fn check(state: &State) -> Result<(), Violation> {
    for (key, lineage) in &state.record.lineages {
        let Some(claim) = lineage.claim.as_ref().filter(|claim| !claim.phase.is_terminal()) else { continue };
        let availability = |identity| state.revision(identity).map(|metadata| metadata.availability);
        let (base, target) = (availability(&claim.base), availability(&claim.target));
        let wrong = |message: String| {
            Err(Violation::new(NAME, format!("lineage {key} in {} {}: {message}", claim.mode, claim.phase)))
        };
        let base_stands = matches!(base, Some(Availability::Ready | Availability::Degraded));
        match (claim.mode, claim.phase) {
            (UpsertMode::PutFirst, ClaimPhase::PreparingTarget | ClaimPhase::TargetImporting) => {
                if !base_stands || state.revision(&claim.base).is_some_and(|base| base.retired) {
                    return wrong(format!("the base is {base:?} or retired before the target is READY"));
                }
            }
            (UpsertMode::PutFirst, ClaimPhase::RetiringBase) => {
                if !base_stands || target != Some(Availability::Ready) {
                    return wrong(format!(
                        "base {base:?} and target {target:?}; expected a standing base and a READY target"
                    ));
                }
            }
            (UpsertMode::PutFirst, ClaimPhase::DeletingBase) => {
                if base != Some(Availability::Deleting)
                    || !matches!(target, Some(Availability::Ready | Availability::Degraded))
                {
                    return wrong(format!(
                        "base {base:?} and target {target:?}; expected a DELETING base and a published target"
                    ));
                }
            }
            (UpsertMode::DeleteFirst, ClaimPhase::DeletingBase) => {
                let begun =
                    matches!(target, Some(Availability::Importing | Availability::Ready | Availability::Degraded));
                if base != Some(Availability::Deleting) || begun {
                    return wrong(format!(
                        "base {base:?} and target {target:?}; expected a DELETING base and no target"
                    ));
                }
            }
            (UpsertMode::DeleteFirst, _) => {
                let published = matches!(target, Some(Availability::Ready | Availability::Degraded));
                if !matches!(base, Some(Availability::Deleted) | None) || published {
                    return wrong(format!(
                        "base {base:?} and target {target:?}; expected a DELETED base and no READY target"
                    ));
                }
            }
            (UpsertMode::PutFirst, ClaimPhase::Completed | ClaimPhase::Aborted) => {}
        }
    }
    for (identity, revision) in &state.record.revisions {
        let metadata = &revision.metadata;
        let standing = matches!(metadata.availability, Availability::Ready | Availability::Degraded);
        let retiring = state
            .claim(&identity.lineage())
            .is_some_and(|claim| claim.base == *identity && claim.phase == ClaimPhase::RetiringBase);
        if standing && metadata.retired != retiring {
            return Err(Violation::new(
                NAME,
                format!("{identity} is retired: {}; its lineage is retiring it: {retiring}", metadata.retired),
            ));
        }
    }
    Ok(())
}

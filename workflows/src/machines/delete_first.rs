//! DELETE_FIRST (RFC, Generation Replacement): delete the base → allow the import → target READY. Every move is the fold's own
//! (`lineage.rs`): the base's deletion has an operation of its own, and the target's publication ends the claim. A worker
//! that finds the operation runnable only has it wait for the right thing.

use ballast_schemas::{ClaimPhase, ParkReason, ReplacementClaim};

use super::{Step, parked};
use crate::operation::Operation;

pub(super) fn next(operation: &Operation, claim: &ReplacementClaim) -> Step {
    match claim.phase {
        ClaimPhase::DeletingBase => parked(operation, ParkReason::BaseDeletion, None),
        ClaimPhase::PreparingTarget | ClaimPhase::TargetImporting | ClaimPhase::RetiringBase => {
            parked(operation, ParkReason::TargetImport, None)
        }
        ClaimPhase::Completed | ClaimPhase::Aborted => Step::Done,
    }
}

//! Safety invariant 12, as far as bytes are concerned: PUT_FIRST does not give up the base for a target that is not safe.
//! Safe: where there is a cold tier, every unit of the target has a copy on disk or two in memory.

use ballast_schemas::{ClaimPhase, Command, InstanceId, UpsertMode};

use super::{Folded, Watch};
use crate::sim::node::Tier;
use crate::sim::world::W;

const NAME: &str = "12, replacement order";

pub(super) fn check(w: &W, watch: &Watch, folded: &Folded<'_>) {
    for (id, command) in folded.accepted() {
        let Command::ReplacementAdvanced(advanced) = command else { continue };
        let Some(operation) = folded.after.operation(&advanced.operation_id) else { continue };
        let lineage = operation.identity.lineage();
        let Some(claim) = folded.after.claim(&lineage).filter(|claim| claim.mode == UpsertMode::PutFirst) else {
            continue;
        };
        let was = folded.before.claim(&lineage).map(|claim| claim.phase);
        if claim.phase != ClaimPhase::DeletingBase || was == Some(ClaimPhase::DeletingBase) {
            continue;
        }
        let Some(target) = folded.after.revision(&claim.target) else { continue };
        if watch.struck_since_look(id, &target.instance) {
            continue;
        }
        let units = target.manifest.as_ref().map_or(0, |manifest| manifest.affinity_count);
        if let Some(unit) = (0..units).find(|unit| !is_safe(w, &target.instance, *unit)) {
            let message = format!("base {} goes, and unit {unit} of target {} is not safe", claim.base, claim.target);
            w.violate(NAME, message);
        }
    }
}

fn is_safe(w: &W, instance: &InstanceId, unit: u32) -> bool {
    let mut hot = 0;
    let mut near_a_disk = false;
    for node in &w.nodes {
        let disks = node.disks.borrow();
        if disks.has_recorded(instance, Tier::Cold, unit) {
            return true;
        }
        if disks.has_recorded(instance, Tier::Memory, unit) {
            hot += 1;
            near_a_disk |= node.has_cold;
        }
    }
    hot >= 2 || (hot == 1 && !near_a_disk)
}

//! Safety invariant 6: The last memory replica is not released until a cold replica has been validated as readable. And what
//! follows from it: a READY revision is readable as a whole, except for what the environment itself took.

use ballast_schemas::{Availability, InstanceId};
use ballast_workflows::check_group;

use super::{Folded, Watch, has_good, really_held};
use crate::sim::node::{Cause, Node, Tier};
use crate::sim::world::{W, short};

const NAME: &str = "6, the last replica stays";

pub(super) fn check(w: &W, watch: &Watch, folded: &Folded<'_>) {
    for record in &folded.records {
        let (Availability::Ready, Some(manifest)) = (record.availability, &record.manifest) else { continue };
        let instance = &record.instance;
        let held = really_held(w, instance, manifest.affinity_count);
        let Err(violation) = check_group(folded.after, &record.identity, &held, manifest.affinity_count) else {
            continue;
        };
        let excused = |unit: u32| watch.lost.contains(&(instance.clone(), unit)) || has_good(w, instance, unit);
        let units_gone = (0..manifest.affinity_count).all(excused);
        let any_gone = (0..manifest.affinity_count).any(|unit| watch.lost.contains(&(instance.clone(), unit)));
        if !(units_gone && any_gone) {
            w.violate(NAME, violation.message);
        }
    }
}

/// The environment takes a replica: was it the last one?
pub(super) fn lost(w: &W, watch: &mut Watch, node: &Node, instance: &InstanceId, tier: Tier, unit: u32) {
    if !has_another(w, node, instance, tier, unit) {
        w.fault("unit lost everywhere");
        watch.lost.insert((instance.clone(), unit));
    }
}

pub(super) fn replica_ends(
    w: &W,
    watch: &mut Watch,
    node: &Node,
    instance: &InstanceId,
    tier: Tier,
    unit: u32,
    cause: Cause,
) {
    if !matches!(cause, Cause::Release(_)) || has_another(w, node, instance, tier, unit) {
        return;
    }
    let disks = node.disks.borrow();
    let witness = disks.cold.get(instance).and_then(|folder| folder.units.get(unit as usize));
    if witness.is_some_and(|witness| witness.decayed) {
        // The copy was right when it was read back, and nothing could tell since.
        w.fault("witness decayed");
        watch.lost.insert((instance.clone(), unit));
        watch.struck.insert(instance.clone(), w.now());
        return;
    }
    let message =
        format!("the last replica of unit {unit} of {} is released on {} ({cause:?})", short(instance), node.id);
    w.violate(NAME, message);
}

/// Whether another good replica of a unit exists.
fn has_another(w: &W, node: &Node, instance: &InstanceId, tier: Tier, unit: u32) -> bool {
    w.nodes.iter().any(|other| {
        let disks = other.disks.borrow();
        [Tier::Memory, Tier::Cold]
            .into_iter()
            .any(|at| (other.at != node.at || at != tier) && disks.has_good(instance, at, unit))
    })
}

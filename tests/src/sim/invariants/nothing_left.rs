//! Deletion is whole and asked for: only what the log deletes is deleted, at DELETED no holder has anything of what it held
//! when the deletion began, and in the end nothing is left at all.

use ballast_schemas::{Availability, InstanceId, InstanceStanding};

use super::{Folded, Watch, every_revision};
use crate::sim::node::{Cause, Node};
use crate::sim::world::{W, short};

const NAME: &str = "nothing left, nothing else deleted";

pub(super) fn check(w: &W, watch: &mut Watch, folded: &Folded<'_>) {
    for record in &folded.records {
        let was = folded.before.revision(&record.identity).filter(|was| was.instance == record.instance);
        let was = was.map(|was| was.availability);
        if was == Some(record.availability) {
            continue;
        }
        match record.availability {
            Availability::Deleting => drop(watch.deleting_since.insert(record.instance.clone(), w.now())),
            Availability::Deleted => {
                let since = watch.deleting_since.get(&record.instance).copied().unwrap_or_default();
                for node in &w.nodes {
                    let disks = node.disks.borrow();
                    let memory = disks.memory.get(&record.instance).map(|folder| folder.allocated_at);
                    let cold = disks.cold.get(&record.instance).map(|folder| folder.allocated_at);
                    // A straggling importer may have begun again on a node that had forgotten the deletion.
                    if memory.into_iter().chain(cold).min().is_some_and(|at| at < since) {
                        let message = format!(
                            "{} is DELETED, {} still holds {}",
                            record.identity,
                            node.id,
                            short(&record.instance)
                        );
                        w.violate(NAME, message);
                    }
                }
            }
            _ => {}
        }
    }
}

pub(super) fn replica_ends(w: &W, node: &Node, instance: &InstanceId, cause: Cause) {
    let wanted = match cause {
        Cause::Release(_) | Cause::Evict | Cause::Loss => return,
        Cause::Delete(_) => w.log.truth(|state| {
            let standing = state.instance_standing(instance);
            let current = every_revision(state).into_iter().find(|record| record.instance == *instance);
            let deleting = current.is_some_and(|record| record.availability == Availability::Deleting);
            deleting || standing != InstanceStanding::Known
        }),
        Cause::Drop => w.log.truth(|state| state.instance_standing(instance)) == InstanceStanding::Deleted,
        Cause::Unknown => w.log.truth(|state| state.instance_standing(instance)) == InstanceStanding::Unknown,
    };
    if !wanted {
        let invariant = if cause == Cause::Unknown { super::identity_of_bytes::NAME } else { NAME };
        w.violate(
            invariant,
            format!("{} deletes {} ({cause:?}), which the log did not ask for", node.id, short(instance)),
        );
    }
}

/// When everything has come to rest: nothing is left of what is deleted, or of imports that nobody will go on with.
pub(crate) fn nothing_left(w: &W) {
    for node in &w.nodes {
        let disks = node.disks.borrow();
        for instance in disks.memory.keys().chain(disks.cold.keys()) {
            let standing = w.log.truth(|state| state.instance_standing(instance));
            if standing == InstanceStanding::Deleted {
                return w.violate(NAME, format!("{} holds {}, which is deleted", node.id, short(instance)));
            }
        }
    }
}

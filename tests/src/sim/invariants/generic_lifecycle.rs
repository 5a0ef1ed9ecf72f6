//! Safety invariant 7: The generic Store lifecycle must not partially process a managed group.

use ballast_schemas::InstanceId;

use crate::sim::node::{Cause, Node};
use crate::sim::world::{W, short};

pub(super) fn check(w: &W, node: &Node, instance: &InstanceId, unit: u32, cause: Cause) {
    if cause == Cause::Evict {
        let message = format!("unit {unit} of {} was evicted on {} as an ordinary object", short(instance), node.id);
        w.violate("7, generic lifecycle", message);
    }
}

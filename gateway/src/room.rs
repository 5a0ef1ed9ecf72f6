//! Room for an import when no node has any: asks for the demotion of AUTO revisions where that is enough, and says what takes
//! the memory where it is not (ARCHITECTURE.md, Import sessions).
//!
//! Not here: which revisions are demoted, which follows from the folded state alone.

use ballast_schemas::{BallastError, ClusterId, Command, ErrorCode, MigrationTrigger, NodeStatus, RelievePressure};
use ballast_workflows::{MemoryUse, State};
use serde_json::json;

use crate::placement::serves;

/// How room for an import can be had.
#[derive(Debug, PartialEq)]
pub(crate) enum Room {
    /// By waiting, after appending `command` if there is one.
    Soon { command: Option<Box<Command>>, error: BallastError },
    /// Not by demotion.
    Never { error: BallastError },
}

/// A node that is large enough, and what is on it.
struct Candidate<'a> {
    status: &'a NodeStatus,
    taken: MemoryUse,
    shortfall: u64,
}

impl Candidate<'_> {
    /// What demotion can still release, and migrations under way do.
    fn in_reach(&self) -> u64 {
        let demotable = if self.status.cold_capacity_bytes > 0 { self.taken.demotable_bytes } else { 0 };
        demotable.saturating_add(self.taken.moving_bytes)
    }
}

/// Looks for the node that comes closest to `needed_bytes` of free memory by demotion. `refusal` is what the caller would hear.
pub(crate) fn look_for(
    state: &State,
    nodes: &[NodeStatus],
    cluster_id: &ClusterId,
    needed_bytes: u64,
    refusal: BallastError,
) -> Room {
    let large = nodes.iter().filter(|node| serves(node, cluster_id) && node.memory_capacity_bytes >= needed_bytes);
    let mut candidates: Vec<Candidate<'_>> = large
        .map(|status| Candidate {
            status,
            taken: state.memory_use(&status.endpoint.node),
            shortfall: needed_bytes.saturating_sub(status.memory_free_bytes()),
        })
        .collect();
    candidates.sort_by_key(|candidate| (candidate.shortfall, candidate.status.endpoint.node.clone()));
    let Some(chosen) = candidates.iter().find(|candidate| candidate.in_reach() >= candidate.shortfall) else {
        return Room::Never { error: not_enough(&candidates, needed_bytes, refusal) };
    };
    let status = chosen.status;
    let (node, bytes) = (status.endpoint.node.clone(), chosen.shortfall.saturating_sub(chosen.taken.moving_bytes));
    let cold_free_bytes = status.cold_capacity_bytes.saturating_sub(status.cold_used_bytes);
    let trigger = MigrationTrigger::Pressure;
    let plan = state.plan_round(&node, trigger, bytes, cold_free_bytes);
    if plan.bytes == 0 && !plan.waits && chosen.taken.moving_bytes == 0 {
        // Its disk is full, say.
        return Room::Never { error: not_enough(&candidates, needed_bytes, refusal) };
    }
    let error = soon(chosen, needed_bytes);
    let round = plan.round;
    let command = match (plan.bytes > 0, plan.waits) {
        (true, _) => {
            let command = RelievePressure { node, round, trigger, bytes, cold_free_bytes };
            Some(Box::new(Command::RelievePressure(command)))
        }
        // A cooldown ends by the log's clock, which stands still while nothing is stored.
        (false, true) => Some(Box::new(Command::Tick)),
        (false, false) => None,
    };
    Room::Soon { command, error }
}

fn soon(chosen: &Candidate<'_>, needed_bytes: u64) -> BallastError {
    let node = &chosen.status.endpoint.node;
    let message = format!(
        "room is being made on {node}: {} of {needed_bytes} bytes are free, AUTO revisions of {} bytes are or will be demoted; ask again",
        chosen.status.memory_free_bytes(),
        chosen.in_reach()
    );
    let details = json!({ "needed_bytes": needed_bytes, "making_room": true, "node": node });
    BallastError::new(ErrorCode::CapacityExhausted, message).with_details(details)
}

/// The refusal with what takes the memory, by node, and what would help.
fn not_enough(candidates: &[Candidate<'_>], needed_bytes: u64, refusal: BallastError) -> BallastError {
    let of_node = |candidate: &Candidate<'_>| {
        let (status, taken) = (candidate.status, &candidate.taken);
        json!({
            "node": status.endpoint.node,
            "memory_capacity_bytes": status.memory_capacity_bytes,
            "memory_used_bytes": status.memory_used_bytes,
            "memory_free_bytes": status.memory_free_bytes(),
            "has_cold_tier": status.cold_capacity_bytes > 0,
            "demotable_bytes": taken.demotable_bytes,
            "moving_bytes": taken.moving_bytes,
            "leased_bytes": taken.leased_bytes,
            "pinned_bytes": taken.pinned_bytes,
            "manual_bytes": taken.manual_bytes,
            "busy_bytes": taken.busy_bytes,
        })
    };
    let Some(nearest) = candidates.first() else { return refusal };
    let numbers: Vec<_> = candidates.iter().map(of_node).collect();
    let details = json!({ "needed_bytes": needed_bytes, "nodes": numbers });
    let message = format!("{}; {}", refusal.message, what_holds_it(nearest));
    BallastError::new(refusal.code, message).with_details(details)
}

fn what_holds_it(nearest: &Candidate<'_>) -> String {
    let (node, taken) = (&nearest.status.endpoint.node, &nearest.taken);
    if nearest.status.cold_capacity_bytes == 0 && taken.demotable_bytes > 0 {
        return format!(
            "{node} has no cold tier to demote {} bytes of AUTO revisions to: restart it with --cold FOLDER or --cold-url URL",
            taken.demotable_bytes
        );
    }
    let holders = [
        (taken.pinned_bytes, "PINNED (change a policy)"),
        (taken.manual_bytes, "MANUAL (migrate one to COLD)"),
        (taken.leased_bytes, "under a lease (wait for its release)"),
        (taken.busy_bytes, "busy with an operation (wait for its end)"),
    ];
    let named: Vec<String> = holders
        .iter()
        .filter(|(bytes, _)| *bytes > 0)
        .map(|(bytes, what)| format!("{bytes} bytes are {what}"))
        .collect();
    format!(
        "of its memory {} bytes can be had on {node} by demotion{}{}",
        nearest.in_reach(),
        if named.is_empty() { "" } else { ", " },
        named.join(", ")
    )
}

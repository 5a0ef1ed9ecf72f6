//! The reconciler of a workflow worker and what a node says of its memory: as the product's, on figures that may be old.

use std::rc::Rc;

use ballast_schemas::{ClusterConfig, Command, MigrationTrigger, RelievePressure};
use ballast_workflows::State;

use super::node::Node;
use super::replica::Replica;
use super::runtime::SECOND;
use super::world::W;

/// What a unit has at least; the least that a round is asked for.
pub(crate) const UNIT_BYTES: u64 = 20_000;

/// A node's memory as it said last, in units.
#[derive(Clone, Copy)]
struct Figures {
    capacity: u64,
    used: u64,
}

/// What the figures ask for.
fn wish(figures: Figures, config: &ClusterConfig) -> Option<(MigrationTrigger, u64)> {
    let level = |ppm: u32| figures.capacity * u64::from(ppm) / 1_000_000;
    let (low, high) = (level(config.memory_low_watermark_ppm), level(config.memory_high_watermark_ppm));
    if figures.used > high {
        return Some((MigrationTrigger::Pressure, (figures.used - low) * UNIT_BYTES));
    }
    (figures.used < low).then(|| (MigrationTrigger::PressureRelief, (low - figures.used) * UNIT_BYTES))
}

fn figures(node: &Node) -> Figures {
    Figures { capacity: node.memory_units, used: node.disks.borrow().memory_used() }
}

/// What a worker that sees the node as it is now would append.
fn next_command(state: &State, node: &Node, figures: Figures) -> Option<Command> {
    let (trigger, bytes) = wish(figures, state.config())?;
    if !node.has_cold && trigger == MigrationTrigger::Pressure {
        return None;
    }
    let (node, cold_free_bytes) = (node.id.clone(), u64::MAX);
    let plan = state.plan_round(&node, trigger, bytes, cold_free_bytes);
    let round = plan.round;
    let command = RelievePressure { node, round, trigger, bytes, cold_free_bytes };
    (plan.bytes > 0).then_some(Command::RelievePressure(command))
}

/// Looks after the nodes' memory for as long as its process lives.
pub(crate) async fn reconcile(w: W, replica: Rc<Replica>) {
    loop {
        w.work(SECOND).await;
        for node in w.nodes.iter().filter(|node| node.slot.get().is_some()) {
            let seen = figures(node);
            // What it said is a second old, and the worker slow now and then.
            w.work(SECOND / 4).await;
            let command = replica.read(|state| next_command(state, node, seen));
            if let Some(command) = command {
                replica.submit(command).await;
            }
        }
    }
}

/// Nodes whose memory something could still be done about.
pub(crate) fn unrelieved(w: &W) -> Vec<String> {
    let asks = |node: &&Rc<Node>| {
        node.slot.get().is_some() && w.log.truth(|state| next_command(state, node, figures(node)).is_some())
    };
    w.nodes.iter().filter(asks).map(|node| format!("the memory of {} is not looked after", node.id)).collect()
}

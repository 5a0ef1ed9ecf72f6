//! The reconciler of a workflow worker: looks at what the nodes say of their memory and starts bounded rounds of migrations
//! when it is above the high watermark, or below the low one again (RFC, Automatic Migration; Configuration).
//!
//! It decides how much; which revisions move follows from the folded state (`ballast_workflows`, pressure), so any number of
//! workers may do this at once. Nothing is appended while nothing may move.

use std::time::Duration;

use ballast_journal::Replica;
use ballast_journal::nodes::Directory;
use ballast_schemas::{ClusterConfig, Command, MigrationTrigger, NodeStatus, RelievePressure};

/// How often the nodes' figures are looked at; they are a second old at most.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Looks at every live node until the replica stops.
pub(crate) async fn reconcile(replica: Replica, directory: Directory) {
    let mut seen = replica.log_seq();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        // Cooldowns are measured by the log's clock, which stands still while nothing is stored.
        let is_silent = std::mem::replace(&mut seen, replica.log_seq()) == seen;
        for status in directory.nodes() {
            let Some(command) = next_command(&replica, &status, is_silent) else { continue };
            match replica.submit(command).await {
                Ok((_, Ok(reply))) => tracing::debug!(node = %status.endpoint.node, ?reply, "memory looked after"),
                Ok((_, Err(refused))) => tracing::warn!(reason = refused.message, "a round was refused"),
                Err(error) if error.is_retryable() => tracing::debug!(%error, "the log gave no answer; looking again"),
                Err(_) => return,
            }
        }
    }
}

/// What the node's memory asks for now, if the state lets anything move.
fn next_command(replica: &Replica, status: &NodeStatus, is_silent: bool) -> Option<Command> {
    let node = &status.endpoint.node;
    replica.read(|state| {
        if status.not_serving.is_some() || status.cluster_id.as_ref() != state.cluster_id() {
            return None;
        }
        let (trigger, bytes) = wish(status, state.config())?;
        let cold_free_bytes = status.cold_capacity_bytes.saturating_sub(status.cold_used_bytes);
        let plan = state.plan_round(node, trigger, bytes, cold_free_bytes);
        if plan.bytes > 0 {
            let (node, round) = (node.clone(), plan.round);
            return Some(Command::RelievePressure(RelievePressure { node, round, trigger, bytes, cold_free_bytes }));
        }
        (plan.waits && is_silent).then_some(Command::Tick)
    })
}

/// Above the high watermark: down to the low one, where there is a cold tier to demote to. Below the low one: up to it.
fn wish(status: &NodeStatus, config: &ClusterConfig) -> Option<(MigrationTrigger, u64)> {
    let level = |ppm: u32| {
        let bytes = u128::from(status.memory_capacity_bytes) * u128::from(ppm) / 1_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    };
    let (used, low) = (status.memory_used_bytes, level(config.memory_low_watermark_ppm));
    if used > level(config.memory_high_watermark_ppm) {
        return (status.cold_capacity_bytes > 0).then_some((MigrationTrigger::Pressure, used - low));
    }
    (used < low).then(|| (MigrationTrigger::PressureRelief, low - used))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ballast_schemas::{NodeEndpoint, NodeId};

    use super::*;

    fn status(used: u64, cold: u64) -> NodeStatus {
        let node = NodeId::new("n").unwrap();
        NodeStatus {
            endpoint: NodeEndpoint { node, host_id: "h".into(), unix_socket: None, tcp: None },
            incarnation: "i".into(),
            cluster_id: None,
            not_serving: None,
            memory_capacity_bytes: 1_000,
            memory_used_bytes: used,
            memory_kind: "tmpfs".into(),
            cold_capacity_bytes: cold,
            cold_used_bytes: 0,
            cold_engine: "none".into(),
            instances: 0,
            quarantined: 0,
            objects: ballast_schemas::ObjectCounts::default(),
            shared_imports: true,
            labels: BTreeMap::new(),
        }
    }

    #[test]
    fn between_the_watermarks_nothing_is_asked_for() {
        let config = ClusterConfig::default();
        for used in [800, 850, 900] {
            assert_eq!(wish(&status(used, 100), &config), None, "{used}");
        }
        assert_eq!(wish(&status(901, 100), &config), Some((MigrationTrigger::Pressure, 101)));
        assert_eq!(wish(&status(799, 100), &config), Some((MigrationTrigger::PressureRelief, 1)));
    }

    #[test]
    fn a_node_without_a_cold_tier_is_never_asked_to_demote() {
        assert_eq!(wish(&status(1_000, 0), &ClusterConfig::default()), None);
    }
}

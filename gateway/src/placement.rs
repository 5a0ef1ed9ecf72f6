//! Which node takes an import: the live one with the most free memory, ties broken by a hash of group and node, so that
//! gateways that see the same nodes choose the same one. One node takes a whole instance. The target of a replacement goes
//! where its base is, if there is room, so that what they have in common need not travel.
//!
//! Not here: reserving. The node does that when the importer allocates, and refuses what does not fit by then.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ballast_schemas::{BallastError, ClusterId, Digest, ErrorCode, GroupId, NodeId, NodeStatus, hash_list};
use serde_json::json;

/// How long a choice is remembered: until the node's status shows what was reserved.
const PROMISE_TIME: Duration = Duration::from_secs(3);

/// What this gateway has lately sent where; only spreads imports that begin at once, never refuses one.
#[derive(Debug, Default)]
pub(crate) struct Promises {
    recent: Mutex<Vec<Promise>>,
}

#[derive(Debug)]
struct Promise {
    node: NodeId,
    bytes: u64,
    at: Instant,
}

impl Promises {
    fn by_node(&self) -> BTreeMap<NodeId, u64> {
        // Every element is valid by itself at any point where a panic could happen.
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(|promise| promise.at.elapsed() < PROMISE_TIME);
        let mut sums = BTreeMap::new();
        for promise in recent.iter() {
            let sum: &mut u64 = sums.entry(promise.node.clone()).or_default();
            *sum = sum.saturating_add(promise.bytes);
        }
        sums
    }

    fn add(&self, node: &NodeId, bytes: u64) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.push(Promise { node: node.clone(), bytes, at: Instant::now() });
    }
}

/// Whether the node takes part in this cluster.
pub(crate) fn serves(status: &NodeStatus, cluster_id: &ClusterId) -> bool {
    status.not_serving.is_none() && status.cluster_id.as_ref() == Some(cluster_id)
}

/// Why no node takes an import.
#[derive(Debug)]
pub(crate) struct NoPlace {
    /// What the caller hears.
    pub error: BallastError,
    /// Whether a node's next status may change it: none speaks yet, or those that are large enough are full.
    pub may_pass: bool,
}

/// Whether the node may take an import: one with several writers goes to nodes that say that they know of them.
pub(crate) fn takes(status: &NodeStatus, shared: bool) -> bool {
    status.shared_imports || !shared
}

/// Chooses a node with `needed_bytes` of free memory for `group_id`, among those heard of: the preferred one if it is one.
///
/// # Errors
/// `UNAVAILABLE` when no node serves or takes such an import, `CAPACITY_EXHAUSTED` with every node's numbers when none has room.
pub(crate) fn place(
    nodes: &[NodeStatus],
    cluster_id: &ClusterId,
    group_id: &GroupId,
    needed_bytes: u64,
    shared: bool,
    preferred: Option<&NodeId>,
    promises: &Promises,
) -> Result<NodeId, NoPlace> {
    let mut serving: Vec<&NodeStatus> = nodes.iter().filter(|status| serves(status, cluster_id)).collect();
    if serving.is_empty() {
        return Err(NoPlace { error: no_node(nodes), may_pass: true });
    }
    let all = serving.clone();
    serving.retain(|status| takes(status, shared));
    if serving.is_empty() {
        return Err(NoPlace { error: no_shared(&all), may_pass: true });
    }
    let promised = promises.by_node();
    let rank = |status: &NodeStatus| {
        let node = &status.endpoint.node;
        let promised = promised.get(node).copied().unwrap_or(0);
        (preferred == Some(node), status.memory_free_bytes().saturating_sub(promised), rendezvous(group_id, node))
    };
    let roomy = serving.iter().filter(|status| status.memory_free_bytes() >= needed_bytes);
    match roomy.max_by_key(|status| rank(status)) {
        Some(status) => {
            promises.add(&status.endpoint.node, needed_bytes);
            Ok(status.endpoint.node.clone())
        }
        None => Err(no_room(&serving, needed_bytes)),
    }
}

fn rendezvous(group_id: &GroupId, node: &NodeId) -> Digest {
    hash_list([group_id.as_str().as_bytes(), node.as_str().as_bytes()])
}

fn no_node(nodes: &[NodeStatus]) -> BallastError {
    let reasons: Vec<String> = nodes
        .iter()
        .map(|status| {
            format!(
                "{}: {}",
                status.endpoint.node,
                status.not_serving.as_deref().unwrap_or("not introduced to this cluster yet")
            )
        })
        .collect();
    let message = match reasons.is_empty() {
        true => "no transfer worker is running: start one with `ballast transfer-worker`".to_owned(),
        false => {
            format!("no transfer worker serves ({}): start one with `ballast transfer-worker`", reasons.join("; "))
        }
    };
    BallastError::new(ErrorCode::Unavailable, message)
}

fn no_shared(serving: &[&NodeStatus]) -> BallastError {
    let names: Vec<&str> = serving.iter().map(|status| status.endpoint.node.as_str()).collect();
    let message = format!(
        "no transfer worker takes imports with several writers ({} are of an earlier build): upgrade one, or have one writer put everything",
        names.join(", ")
    );
    BallastError::new(ErrorCode::Unavailable, message)
}

fn no_room(serving: &[&NodeStatus], needed_bytes: u64) -> NoPlace {
    let numbers = serving.iter().map(|status| {
        json!({
            "node": status.endpoint.node,
            "memory_capacity_bytes": status.memory_capacity_bytes,
            "memory_used_bytes": status.memory_used_bytes,
            "memory_free_bytes": status.memory_free_bytes(),
        })
    });
    let details = json!({ "needed_bytes": needed_bytes, "nodes": numbers.collect::<Vec<_>>() });
    let largest = serving.iter().map(|status| status.memory_capacity_bytes).max().unwrap_or(0);
    let list = |figure: &dyn Fn(&NodeStatus) -> String| {
        serving.iter().map(|status| figure(status)).collect::<Vec<_>>().join(", ")
    };
    let may_pass = largest >= needed_bytes;
    let message = if !may_pass {
        let sizes = list(&|status| format!("{} has {}", status.endpoint.node, status.memory_capacity_bytes));
        format!(
            "no node could ever hold {needed_bytes} bytes in memory ({sizes}): start a transfer worker with a larger --memory"
        )
    } else {
        let free = list(&|status| {
            format!(
                "{} has {} of {} free",
                status.endpoint.node,
                status.memory_free_bytes(),
                status.memory_capacity_bytes
            )
        });
        format!(
            "no node has {needed_bytes} bytes of memory free now ({free}): migrate a revision to COLD, remove one, or start another transfer worker"
        )
    };
    NoPlace { error: BallastError::new(ErrorCode::CapacityExhausted, message).with_details(details), may_pass }
}

#[cfg(test)]
mod tests {
    use ballast_schemas::{NodeEndpoint, RevisionIdentity};

    use super::*;

    fn node(name: &str, capacity: u64, used: u64) -> NodeStatus {
        let node = NodeId::new(name).unwrap();
        NodeStatus {
            endpoint: NodeEndpoint { node, host_id: "h".into(), unix_socket: None, tcp: None },
            incarnation: "i".into(),
            cluster_id: Some(cluster()),
            not_serving: None,
            memory_capacity_bytes: capacity,
            memory_used_bytes: used,
            memory_kind: "tmpfs".into(),
            cold_capacity_bytes: 0,
            cold_used_bytes: 0,
            cold_engine: "none".into(),
            instances: 0,
            quarantined: 0,
            objects: ballast_schemas::ObjectCounts::default(),
            shared_imports: true,
            labels: BTreeMap::new(),
        }
    }

    fn cluster() -> ClusterId {
        ClusterId::new("c").unwrap()
    }

    fn group() -> GroupId {
        RevisionIdentity::new("t", "n", "r", "v", 1).unwrap().group_id()
    }

    fn choose(nodes: &[NodeStatus], needed: u64) -> Result<String, BallastError> {
        place(nodes, &cluster(), &group(), needed, false, None, &Promises::default())
            .map(|node| node.to_string())
            .map_err(|no| no.error)
    }

    #[test]
    fn the_node_with_most_free_memory_takes_an_import() {
        assert_eq!(choose(&[node("a", 100, 50), node("b", 80, 10), node("c", 300, 290)], 40).unwrap(), "b");
    }

    #[test]
    fn an_import_with_several_writers_goes_to_a_node_that_knows_of_them() {
        let mut old = node("old", 300, 0);
        old.shared_imports = false;
        let preferred = NodeId::new("old").unwrap();
        let choose = |nodes: &[NodeStatus], shared| {
            place(nodes, &cluster(), &group(), 40, shared, Some(&preferred), &Promises::default())
                .map(|node| node.to_string())
        };
        let both = [old.clone(), node("new", 100, 0)];
        assert_eq!((choose(&both, false).unwrap(), choose(&both, true).unwrap()), ("old".to_owned(), "new".to_owned()));
        let refused = choose(&[old], true).unwrap_err();
        assert_eq!((refused.error.code, refused.may_pass), (ErrorCode::Unavailable, true));
        assert!(refused.error.message.contains("several writers (old"), "{}", refused.error.message);
    }

    #[test]
    fn equal_nodes_are_told_apart_by_the_group_whatever_their_order() {
        let forth = choose(&[node("a", 100, 0), node("b", 100, 0), node("c", 100, 0)], 1).unwrap();
        let back = choose(&[node("c", 100, 0), node("b", 100, 0), node("a", 100, 0)], 1).unwrap();
        assert_eq!(forth, back);
    }

    #[test]
    fn the_preferred_node_takes_what_it_has_room_for() {
        let nodes = [node("a", 100, 50), node("b", 300, 0)];
        let preferred = NodeId::new("a").unwrap();
        let choose = |needed| {
            place(&nodes, &cluster(), &group(), needed, false, Some(&preferred), &Promises::default())
                .unwrap()
                .to_string()
        };
        assert_eq!((choose(50), choose(51)), ("a".to_owned(), "b".to_owned()));
    }

    #[test]
    fn imports_that_begin_at_once_are_spread_but_never_refused_for_it() {
        let nodes = [node("a", 100, 0), node("b", 100, 0)];
        let promises = Promises::default();
        let next = || place(&nodes, &cluster(), &group(), 60, false, None, &promises).unwrap();
        let (first, second) = (next(), next());
        assert_ne!(first, second);
        next();
    }

    #[test]
    fn without_room_the_numbers_of_every_node_are_named() {
        let error = choose(&[node("a", 64, 0), node("b", 32, 0)], 90).unwrap_err();
        assert_eq!(error.code, ErrorCode::CapacityExhausted);
        assert!(error.message.contains("ever hold 90") && error.message.contains("a has 64"), "{error}");
        assert_eq!(error.details["nodes"][1]["memory_capacity_bytes"], 32);
        let no_room = |capacity| {
            place(&[node("a", capacity, 50)], &cluster(), &group(), 90, false, None, &Promises::default()).unwrap_err()
        };
        assert!(no_room(100).may_pass && !no_room(89).may_pass);
        let error = no_room(100).error;
        assert!(error.message.contains("free now") && error.message.contains("50 of 100"), "{error}");
        assert_eq!(error.details["needed_bytes"], 90);
    }

    #[test]
    fn without_a_serving_node_the_command_to_start_one_is_named() {
        let error = choose(&[], 1).unwrap_err();
        assert!(error.code == ErrorCode::Unavailable && error.message.contains("ballast transfer-worker"), "{error}");
        let mut idle = node("a", 100, 0);
        idle.not_serving = Some("its folder belongs to another cluster".into());
        let mut stranger = node("b", 100, 0);
        stranger.cluster_id = None;
        let error = choose(&[idle, stranger], 1).unwrap_err();
        assert!(error.code == ErrorCode::Unavailable && error.message.contains("another cluster"), "{error}");
        assert!(error.message.contains("b: not introduced"), "{error}");
    }
}

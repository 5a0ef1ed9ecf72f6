//! What stands beside the log: events, work hints, inventories.

use std::sync::Arc;
use std::time::Duration;

use ballast_journal::{
    EventFilter, EventPublisher, EventReader, EventStart, HintPublisher, HintReader, InventoryUpdate, InventoryWatch,
    JetStreamLog, JetStreamSnapshots, Replica, ReplicaOptions, Streams, publish_inventory, withdraw_inventory,
};
use ballast_schemas::{
    AbortImport, BeginImport, Bitmap, ClaimOperation, Command, Digest, InstanceId, LogPosition, NodeId, NodeInventory,
    OperationKind, RevisionIdentity, SessionId,
};

use crate::replicas::options;
use crate::{Cluster, in_time};

fn identity(resource: &str) -> RevisionIdentity {
    RevisionIdentity::new("default", "default", resource, "main", 1).unwrap()
}

fn session() -> SessionId {
    SessionId::new("session").unwrap()
}

fn begin_import(resource: &str) -> Command {
    Command::BeginImport(BeginImport {
        identity: identity(resource),
        session_id: session(),
        ttl_ms: 60_000,
        policy: None,
        placement_digest: Digest::of(b"placement"),
        placement: vec![NodeId::new("node").unwrap()],
        logical_bytes: 1,
        unit_count: 1,
    })
}

fn abort_import(resource: &str) -> Command {
    Command::AbortImport(AbortImport { identity: identity(resource), session_id: session(), coordinator: None })
}

async fn replica(streams: &Streams, options: ReplicaOptions) -> Replica {
    let (log, snapshots) = (JetStreamLog::new(streams), JetStreamSnapshots::new(streams));
    Replica::start(Arc::new(log), Some(Arc::new(snapshots)), options).await.unwrap()
}

async fn next_names(reader: &mut EventReader, count: usize) -> Vec<(&'static str, u64)> {
    let mut names = Vec::new();
    while names.len() < count {
        let followed = in_time("an event", reader.next()).await;
        names.push((followed.event.body.name(), followed.event.position.seq));
    }
    names
}

#[tokio::test]
async fn events_are_stored_in_log_order_once_although_two_replicas_publish_them() {
    let cluster = Cluster::start().await;
    let streams = &cluster.streams;
    let mut live = EventReader::start(streams, &EventFilter::All, EventStart::Now).await;
    let (_first, sink) = EventPublisher::start(streams);
    let one = replica(streams, ReplicaOptions { events: Some(sink), ..options(streams, "one") }).await;
    let (_second, sink) = EventPublisher::start(streams);
    let _two = replica(streams, ReplicaOptions { events: Some(sink), ..options(streams, "two") }).await;
    for resource in ["a", "b", "c"] {
        one.submit(begin_import(resource)).await.unwrap().1.unwrap();
        one.submit(abort_import(resource)).await.unwrap().1.unwrap();
    }
    let seen = next_names(&mut live, 9).await;
    assert!(seen.is_sorted_by_key(|(_, seq)| *seq), "{seen:?}");
    for name in ["REVISION_IMPORTING", "REVISION_DELETING", "OPERATION_STARTED"] {
        assert_eq!(seen.iter().filter(|(found, _)| *found == name).count(), 3, "{seen:?}");
    }
    // A reader of one revision gets that one's, from the beginning.
    let only = EventFilter::Revision(identity("b"));
    let mut stored = EventReader::start(streams, &only, EventStart::Oldest).await;
    let first = in_time("an event", stored.next()).await;
    assert_eq!((first.event.body.name(), first.event.body.identity()), ("REVISION_IMPORTING", &identity("b")));
    let second = in_time("an event", stored.next()).await;
    assert!((second.event.position, second.event.n) > (first.event.position, first.event.n));
    // Going on behind a stream sequence repeats nothing.
    let after = EventStart::After { stream_seq: first.stream_seq };
    let mut resumed = EventReader::start(streams, &only, after).await;
    assert_eq!(in_time("an event", resumed.next()).await.event, second.event);
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_publisher_goes_on_behind_the_last_stored_event() {
    let cluster = Cluster::start().await;
    let (publisher, sink) = EventPublisher::start(&cluster.streams);
    let one =
        replica(&cluster.streams, ReplicaOptions { events: Some(sink), ..options(&cluster.streams, "one") }).await;
    one.submit(begin_import("a")).await.unwrap().1.unwrap();
    let mut reader = EventReader::start(&cluster.streams, &EventFilter::All, EventStart::Oldest).await;
    next_names(&mut reader, 1).await;
    drop((publisher, one));
    let cluster = cluster.restart().await;
    // A new process folds the whole log again, but stores only what is new.
    let (_publisher, sink) = EventPublisher::start(&cluster.streams);
    let two =
        replica(&cluster.streams, ReplicaOptions { events: Some(sink), ..options(&cluster.streams, "two") }).await;
    two.submit(begin_import("b")).await.unwrap().1.unwrap();
    let mut all = EventReader::start(&cluster.streams, &EventFilter::All, EventStart::Oldest).await;
    let names = next_names(&mut all, 2).await;
    assert!(names.iter().all(|(name, _)| *name == "REVISION_IMPORTING"), "{names:?}");
    let stored = cluster.streams.client().request("$JS.API.STREAM.INFO.BALLAST_EVENTS", "".into()).await.unwrap();
    let info: serde_json::Value = serde_json::from_slice(&stored.payload).unwrap();
    assert_eq!(info["state"]["messages"], 2);
    // The reader that was there before the restart goes on as well.
    assert_eq!(next_names(&mut reader, 1).await, [names[1]]);
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_runnable_operation_is_announced_until_it_is_claimed() {
    let cluster = Cluster::start().await;
    let one = replica(&cluster.streams, options(&cluster.streams, "one")).await;
    let _publisher = HintPublisher::start(&cluster.streams, one.clone());
    let _another = HintPublisher::start(&cluster.streams, one.clone());
    let mut worker = HintReader::new(&cluster.streams);
    one.submit(begin_import("a")).await.unwrap().1.unwrap();
    one.submit(abort_import("a")).await.unwrap().1.unwrap();
    let hint = in_time("a hint", worker.next()).await;
    assert_eq!(hint.kind, OperationKind::Deleting);
    let operation_id = hint.operation_id.clone();
    assert!(one.read(|state| state.operation(&operation_id).is_some()));
    // Given back, it comes again; taken off the queue without a claim, it is announced again.
    hint.retry_after(Duration::from_millis(50)).await;
    let hint = in_time("the hint that was given back", worker.next()).await;
    assert_eq!(hint.operation_id, operation_id);
    hint.ack().await;
    let hint = in_time("the hint, announced again", worker.next()).await;
    assert_eq!(hint.operation_id, operation_id);
    let claim = ClaimOperation { operation_id: operation_id.clone(), worker: "worker".parse().unwrap(), ttl_ms: 6_000 };
    one.submit(Command::ClaimOperation(claim)).await.unwrap().1.unwrap();
    hint.ack().await;
    // The claim lapses on the log clock, which ticks keep going although nothing else happens.
    let hint = in_time("the hint after the claim lapsed", worker.next()).await;
    assert_eq!(hint.operation_id, operation_id);
    cluster.server.stop().await;
}

#[tokio::test]
async fn hints_survive_a_restart_that_empties_the_queue() {
    let cluster = Cluster::start().await;
    let one = replica(&cluster.streams, options(&cluster.streams, "one")).await;
    let _publisher = HintPublisher::start(&cluster.streams, one.clone());
    let mut worker = HintReader::new(&cluster.streams);
    one.submit(begin_import("a")).await.unwrap().1.unwrap();
    one.submit(abort_import("a")).await.unwrap().1.unwrap();
    let before = in_time("a hint", worker.next()).await;
    let cluster = cluster.restart().await;
    let after = in_time("the hint after the restart", worker.next()).await;
    assert_eq!(after.operation_id, before.operation_id);
    cluster.server.stop().await;
}

fn inventory(node: &str, resource: &str, hot_units: u32) -> NodeInventory {
    let group_id = identity(resource).group_id();
    let mut hot = Bitmap::empty(64);
    (0..hot_units).for_each(|unit| hot.set(unit, true));
    NodeInventory {
        node: NodeId::new(node).unwrap(),
        incarnation: "run-1".to_owned(),
        instance: InstanceId { group_id, position: LogPosition { seq: 2, index: 0 } },
        fence: LogPosition { seq: 2, index: 0 },
        sealed: true,
        manifest: true,
        hot,
        cold: Bitmap::empty(64),
        cold_lost: Bitmap::empty(64),
    }
}

async fn present(watch: &mut InventoryWatch) -> NodeInventory {
    match in_time("an inventory", watch.next()).await {
        InventoryUpdate::Present(inventory) => *inventory,
        other => panic!("expected an inventory, found {other:?}"),
    }
}

#[tokio::test]
async fn a_watch_begins_with_the_last_inventory_of_each_node_and_group_and_goes_on() {
    let cluster = Cluster::start().await;
    for hot in 1..=5 {
        publish_inventory(&cluster.streams, &inventory("node.1", "a", hot)).await.unwrap();
    }
    publish_inventory(&cluster.streams, &inventory("node.2", "a", 9)).await.unwrap();
    let mut watch = InventoryWatch::new(&cluster.streams);
    assert_eq!(present(&mut watch).await, inventory("node.1", "a", 5));
    assert_eq!(present(&mut watch).await, inventory("node.2", "a", 9));
    let cluster = cluster.restart().await;
    publish_inventory(&cluster.streams, &inventory("node.1", "b", 3)).await.unwrap();
    assert_eq!(present(&mut watch).await, inventory("node.1", "b", 3));
    let group_id = identity("a").group_id();
    withdraw_inventory(&cluster.streams, &NodeId::new("node.2").unwrap(), &group_id).await.unwrap();
    let withdrawn = in_time("the withdrawal", watch.next()).await;
    let expected = InventoryUpdate::Withdrawn { node: "node%2E2".to_owned(), group_hex: group_id.hex().to_owned() };
    assert_eq!(withdrawn, expected);
    cluster.server.stop().await;
}

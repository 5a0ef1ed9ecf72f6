//! Replicas over the real log: convergence, snapshots, restore, and stopping on what can not be folded.

use std::sync::Arc;
use std::time::Duration;

use ballast_journal::{
    JetStreamLog, JetStreamSnapshots, Log, Replica, ReplicaError, ReplicaOptions, RestoreFrom, SnapshotRules,
    SnapshotStore, Streams, UpkeepOptions,
};
use ballast_schemas::{Capability, ClusterConfig, Command, CreateCluster, Envelope, ReplicaId};
use bytes::Bytes;

use crate::{Cluster, PATIENCE, eventually, in_time};

pub(crate) fn options(streams: &Streams, name: &str) -> ReplicaOptions {
    let create = CreateCluster {
        cluster_id: streams.cluster_id().clone(),
        incarnation: 1,
        config: ClusterConfig::default(),
        capabilities: Capability::ALL.to_vec(),
    };
    ReplicaOptions {
        cluster_id: Some(streams.cluster_id().clone()),
        create: Some(create),
        ..ReplicaOptions::new(ReplicaId::new(name).unwrap())
    }
}

/// Snapshots on demand, and nothing kept of the log that they make superfluous.
pub(crate) fn trimming(options: ReplicaOptions) -> ReplicaOptions {
    let rules = SnapshotRules { every_entries: u64::MAX, every: Duration::from_secs(3600), keep: Duration::ZERO };
    ReplicaOptions { upkeep: UpkeepOptions { ticks: false, announce: false, snapshots: Some(rules) }, ..options }
}

pub(crate) async fn start(streams: &Streams, options: ReplicaOptions) -> Result<Replica, ReplicaError> {
    let log: Arc<dyn Log> = Arc::new(JetStreamLog::new(streams));
    let snapshots: Arc<dyn SnapshotStore> = Arc::new(JetStreamSnapshots::new(streams));
    in_time("the replica starts", Replica::start(log, Some(snapshots), options)).await
}

pub(crate) async fn submit_many(replica: &Replica, count: usize) {
    let submits = (0..count).map(|_| replica.submit(Command::Barrier));
    for submitted in futures::future::join_all(submits).await {
        submitted.unwrap().1.unwrap();
    }
}

/// Waits until both stand at the same entry (others append meanwhile) and demands the same state there.
async fn agree(one: &Replica, two: &Replica) {
    let at = |replica: &Replica| replica.read(|state| (state.log_seq(), state.digest()));
    let same_entry = async || at(one).0 == at(two).0 && at(one) == at(two);
    eventually("both at the same entry in the same state", same_entry).await;
}

#[tokio::test]
async fn two_replicas_converge_to_the_same_state() {
    let cluster = Cluster::start().await;
    let (one, two) = tokio::join!(
        start(&cluster.streams, options(&cluster.streams, "one")),
        start(&cluster.streams, options(&cluster.streams, "two"))
    );
    let (one, two) = (one.unwrap(), two.unwrap());
    tokio::join!(submit_many(&one, 500), submit_many(&two, 500));
    let seq = one.barrier().await.unwrap();
    two.wait_for(seq, PATIENCE).await.unwrap();
    agree(&one, &two).await;
    // A thousand commands and more shared a few dozen envelopes.
    assert!(seq < 500, "{seq} entries for 1,000 concurrent commands");
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_position_is_the_entry_and_the_index_inside_it() {
    let cluster = Cluster::start().await;
    let replica = start(&cluster.streams, options(&cluster.streams, "one")).await.unwrap();
    let submits = (0..100).map(|_| replica.submit(Command::Barrier));
    let mut positions: Vec<_> =
        futures::future::join_all(submits).await.into_iter().map(|answer| answer.unwrap().0).collect();
    let count = positions.len();
    positions.sort();
    positions.dedup();
    assert_eq!(positions.len(), count, "every command has a position of its own");
    assert!(positions.iter().all(|position| position.seq >= 2 && position.seq <= replica.log_seq()));
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_restored_replica_has_the_digest_of_the_one_that_folded_everything() {
    let cluster = Cluster::start().await;
    let first = start(&cluster.streams, trimming(options(&cluster.streams, "one"))).await.unwrap();
    submit_many(&first, 50).await;
    let older = first.snapshot_now().await.unwrap().unwrap();
    submit_many(&first, 50).await;
    let newer = first.snapshot_now().await.unwrap().unwrap();
    assert!(newer.seq > older.seq);
    submit_many(&first, 50).await;
    let bounds = JetStreamLog::new(&cluster.streams).bounds().await.unwrap();
    assert_eq!(bounds.first_seq, older.seq + 1, "trimmed to the older of the two, not further");

    let seq = first.barrier().await.unwrap();
    let cluster = cluster.restart().await;
    for restore_from in [RestoreFrom::Newest, RestoreFrom::Seq(older.seq)] {
        let options = ReplicaOptions { restore_from, ..trimming(options(&cluster.streams, "two")) };
        let second = start(&cluster.streams, options).await.unwrap();
        second.wait_for(seq, PATIENCE).await.unwrap();
        agree(&second, &first).await;
    }
    let from_start = ReplicaOptions { restore_from: RestoreFrom::Beginning, ..options(&cluster.streams, "three") };
    let error = start(&cluster.streams, from_start).await.unwrap_err();
    assert!(matches!(error, ReplicaError::NoSnapshot { .. }), "{error}");
    let no_such = ReplicaOptions { restore_from: RestoreFrom::Seq(7_777), ..options(&cluster.streams, "four") };
    let error = start(&cluster.streams, no_such).await.unwrap_err();
    assert!(error.to_string().contains(&older.seq.to_string()), "names what there is: {error}");
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_damaged_entry_stops_every_replica_by_name() {
    let cluster = Cluster::start().await;
    let replica = start(&cluster.streams, options(&cluster.streams, "one")).await.unwrap();
    let (_, mut bytes) = Envelope::seal("damaged".to_owned(), Vec::new()).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    let seq = JetStreamLog::new(&cluster.streams).append("damaged", Bytes::from(bytes), None).await.unwrap();
    let mut failure = replica.failure();
    in_time("it stops", failure.wait_for(Option::is_some)).await.unwrap();
    let error = replica.submit(Command::Barrier).await.unwrap_err();
    assert!(!error.is_retryable() && error.to_string().contains(&format!("log entry {seq}")), "{error}");
    assert_eq!(replica.log_seq(), seq - 1, "nothing is folded past it");
    let error = start(&cluster.streams, options(&cluster.streams, "two")).await.unwrap_err();
    assert!(matches!(error, ReplicaError::Entry { seq: found, .. } if found == seq), "{error}");
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_damaged_snapshot_is_refused_by_name_and_an_older_one_can_be_chosen() {
    let cluster = Cluster::start().await;
    let replica = start(&cluster.streams, trimming(options(&cluster.streams, "one"))).await.unwrap();
    submit_many(&replica, 10).await;
    let older = replica.snapshot_now().await.unwrap().unwrap();
    submit_many(&replica, 10).await;
    let newer = replica.snapshot_now().await.unwrap().unwrap();
    let store = JetStreamSnapshots::new(&cluster.streams);
    let mut bytes = store.get(newer.clone()).await.unwrap().unwrap().to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    store.put(newer.clone(), Bytes::from(bytes)).await.unwrap();

    let error = start(&cluster.streams, options(&cluster.streams, "two")).await.unwrap_err();
    assert!(error.to_string().contains(&newer.to_string()) && error.to_string().contains("--restore-from"), "{error}");
    let from_older = ReplicaOptions { restore_from: RestoreFrom::Seq(older.seq), ..options(&cluster.streams, "two") };
    let second = start(&cluster.streams, from_older).await.unwrap();
    agree(&second, &replica).await;
    cluster.server.stop().await;
}

#[tokio::test]
async fn submits_wait_out_a_restart_of_the_server() {
    let cluster = Cluster::start().await;
    let replica = start(&cluster.streams, options(&cluster.streams, "one")).await.unwrap();
    let submitting = tokio::spawn({
        let replica = replica.clone();
        async move {
            for _ in 0..200 {
                replica.submit(Command::Barrier).await.unwrap().1.unwrap();
            }
        }
    });
    replica.wait_for(3, PATIENCE).await.unwrap();
    let cluster = cluster.restart().await;
    in_time("all answered", submitting).await.unwrap();
    assert!(replica.failure().borrow().is_none());
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_replica_of_another_cluster_is_refused() {
    let cluster = Cluster::start().await;
    drop(start(&cluster.streams, options(&cluster.streams, "one")).await.unwrap());
    let other = ReplicaOptions { cluster_id: Some("another".parse().unwrap()), ..options(&cluster.streams, "two") };
    let error = start(&cluster.streams, other).await.unwrap_err();
    assert!(matches!(error, ReplicaError::OtherCluster { .. }), "{error}");
    cluster.server.stop().await;
}

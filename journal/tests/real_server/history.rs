//! The past over the real log: any state again, outcomes from a snapshot on, and what can not be known.

use ballast_journal::{History, HistoryError, JetStreamLog, JetStreamSnapshots, Log, SnapshotStore, view_streams};
use ballast_schemas::{ClusterConfig, Command};
use ballast_workflows::State;
use bytes::Bytes;

use crate::replicas::{options, start, submit_many, trimming};
use crate::{Cluster, in_time};

#[tokio::test]
async fn every_state_since_the_oldest_snapshot_can_be_shown_again_and_older_ones_are_refused_by_name() {
    let cluster = Cluster::start().await;
    let replica = start(&cluster.streams, trimming(options(&cluster.streams, "one"))).await.unwrap();
    submit_many(&replica, 20).await;
    let older = replica.snapshot_now().await.unwrap().unwrap();
    submit_many(&replica, 20).await;
    replica.snapshot_now().await.unwrap().unwrap();
    let config = ClusterConfig { migration_cooldown_ms: 7, ..ClusterConfig::default() };
    let (set, _) = replica.submit(Command::SetConfig(config.clone())).await.unwrap();
    let wrong = ClusterConfig { migration_max_members_per_round: 0, ..ClusterConfig::default() };
    let (refused, outcome) = replica.submit(Command::SetConfig(wrong)).await.unwrap();

    let history = History::new(&view_streams(cluster.streams.client().clone()).await.unwrap());
    let first = history.bounds().await.unwrap().first_seq;
    assert_eq!(first, older.seq + 1, "trimmed to the older snapshot");
    let at = async |seq| in_time("the state", history.state_at(seq)).await;
    assert_eq!(at(older.seq).await.unwrap().digest(), older.digest);
    assert_eq!(at(set.seq - 1).await.unwrap().config(), &ClusterConfig::default());
    assert_eq!(at(set.seq).await.unwrap().config(), &config);
    assert_eq!(at(replica.log_seq()).await.unwrap().digest(), replica.read(State::digest));
    let error = at(older.seq - 1).await.unwrap_err();
    assert!(matches!(error, HistoryError::OutOfReach { .. }), "{error}");
    assert!(error.to_string().contains(&format!("entries {} to", older.seq)), "{error}");
    assert!(matches!(at(refused.seq + 100).await.unwrap_err(), HistoryError::Future { .. }));

    let mut walk = history.walk(refused.seq).await.unwrap();
    let entry = in_time("the entry", walk.next()).await.unwrap();
    assert_eq!(entry.seq, refused.seq);
    assert_eq!(entry.decided.unwrap().outcomes, [outcome]);
    cluster.server.stop().await;
}

#[tokio::test]
async fn without_a_usable_snapshot_entries_are_shown_but_their_outcomes_are_unknown() {
    let cluster = Cluster::start().await;
    let replica = start(&cluster.streams, trimming(options(&cluster.streams, "one"))).await.unwrap();
    submit_many(&replica, 10).await;
    let name = replica.snapshot_now().await.unwrap().unwrap();
    replica.barrier().await.unwrap();
    JetStreamLog::new(&cluster.streams).trim(name.seq).await.unwrap();
    let store = JetStreamSnapshots::new(&cluster.streams);
    let mut bytes = store.get(name.clone()).await.unwrap().unwrap().to_vec();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    store.put(name.clone(), Bytes::from(bytes)).await.unwrap();

    let history = History::new(&cluster.streams);
    let listed = history.snapshots().await.unwrap();
    assert!(listed.iter().any(|stored| stored.name == name && stored.verified.is_err()));
    let mut walk = history.walk(1).await.unwrap();
    assert_eq!(walk.from(), name.seq + 1);
    assert!(walk.state().is_none());
    assert!(walk.passed_over().iter().any(|error| error.to_string().contains(&name.to_string())));
    let entry = in_time("an entry", walk.next()).await.unwrap();
    assert!(entry.decided.is_none() && !entry.envelope.commands().is_empty());
    let error = history.state_at(replica.log_seq()).await.unwrap_err();
    assert!(error.to_string().contains("until its next snapshot"), "{error}");
    cluster.server.stop().await;
}

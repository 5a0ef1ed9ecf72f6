//! Replicas that compare what they decided: one that decided otherwise stops, the others go on; without a majority all stop.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_journal::{
    DigestExchange, JetStreamLog, Log, MemorySnapshots, Replica, ReplicaError, ReplicaOptions, SnapshotStore, Streams,
    encode_snapshot,
};
use ballast_schemas::{ClusterConfig, Command, Envelope};
use ballast_workflows::{State, fold};
use bytes::Bytes;

use crate::replicas::options;
use crate::{Cluster, in_time};

/// Longer than from the first contradiction to the count.
const SETTLED_AFTER: Duration = Duration::from_secs(4);

async fn start(streams: &Streams, name: &str, snapshots: MemorySnapshots) -> Replica {
    let digests = Some(DigestExchange::new(streams));
    let options = ReplicaOptions { digests, ..options(streams, name) };
    let log: Arc<dyn Log> = Arc::new(JetStreamLog::new(streams));
    in_time("the replica starts", Replica::start(log, Some(Arc::new(snapshots)), options)).await.unwrap()
}

/// A snapshot of what a replica would have decided if the log's newest entry had asked for something else.
async fn decided_otherwise(streams: &Streams) -> MemorySnapshots {
    let log = JetStreamLog::new(streams);
    let last = log.bounds().await.unwrap().last_seq;
    let mut tail = log.tail(1);
    let mut state = State::new();
    for seq in 1..=last {
        let record = tail.next().await.unwrap().unwrap();
        let mut envelope = Envelope::decode(&record.bytes).unwrap();
        if seq == last {
            let config = ClusterConfig { migration_cooldown_ms: 1, ..ClusterConfig::default() };
            let mut commands = envelope.commands().to_vec();
            commands[0].command = Command::SetConfig(config);
            (envelope, _) = Envelope::seal(envelope.id().to_owned(), commands).unwrap();
        }
        fold(&mut state, seq, record.timestamp_ns, &envelope).unwrap();
    }
    let (name, bytes): (_, Bytes) = encode_snapshot(&state).unwrap();
    let snapshots = MemorySnapshots::new();
    snapshots.put(name, bytes).await.unwrap();
    snapshots
}

async fn stops(replica: &Replica) -> Arc<ReplicaError> {
    let mut failure = replica.failure();
    in_time("the replica stops", failure.wait_for(Option::is_some)).await.unwrap().clone().unwrap()
}

#[tokio::test]
async fn a_replica_that_decided_something_else_stops_by_entry_and_digests_and_the_others_go_on() {
    let cluster = Cluster::start().await;
    let one = start(&cluster.streams, "one", MemorySnapshots::new()).await;
    let two = start(&cluster.streams, "two", MemorySnapshots::new()).await;
    one.barrier().await.unwrap();
    let wrong = start(&cluster.streams, "wrong", decided_otherwise(&cluster.streams).await).await;
    let error = stops(&wrong).await;
    let ReplicaError::Disagreement { seq, mine, theirs, with_me, others } = &*error else { panic!("{error}") };
    assert_eq!((*with_me, *others), (1, 2));
    for word in [seq.to_string(), mine.to_string(), theirs.to_string()] {
        assert!(error.to_string().contains(&word), "{word}: {error}");
    }
    assert!(wrong.submit(Command::Barrier).await.unwrap_err().to_string().contains("has stopped"));
    let counted = Instant::now() + SETTLED_AFTER;
    while Instant::now() < counted {
        one.barrier().await.unwrap();
        two.barrier().await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(one.failure().borrow().is_none() && two.failure().borrow().is_none());
    cluster.server.stop().await;
}

#[tokio::test]
async fn two_that_disagree_with_nobody_to_decide_between_them_both_stop() {
    let cluster = Cluster::start().await;
    let one = start(&cluster.streams, "one", MemorySnapshots::new()).await;
    one.barrier().await.unwrap();
    let other = start(&cluster.streams, "other", decided_otherwise(&cluster.streams).await).await;
    for replica in [&one, &other] {
        let error = stops(replica).await;
        assert!(matches!(&*error, ReplicaError::Disagreement { with_me: 1, others: 1, .. }), "{error}");
    }
    cluster.server.stop().await;
}

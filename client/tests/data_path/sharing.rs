//! Puts of several participants: what is sent again, who is waited for, and what a successor of the coordinator finds.

use std::time::Duration;

use ballast_client::{
    OpenRevision, PartWriter, Progress, PutWriter, Route, Sharing, Source, TensorData, TensorSource, WeightStore,
};
use ballast_schemas::{Availability, BallastError, ErrorCode, LogTime, NodeEndpoint, NodeId, ParticipantId, SessionId};
use ballast_transfer::DataPlaneOptions;
use serde_json::json;

use crate::cluster::{Cluster, LOG_CLOCK, eventually, identity};
use crate::putting::content;

const SIZES: [(&str, u64); 4] = [("a", 1000), ("b", 300), ("large", 600 << 10), ("none", 0)];

fn rank(number: u32) -> ParticipantId {
    ParticipantId::new(format!("rank{number}")).unwrap()
}

fn session() -> SessionId {
    SessionId::new("step-7").unwrap()
}

fn source() -> Source {
    let tensor = |(name, bytes): (&str, u64)| TensorSource {
        name: name.into(),
        dtype: "U8".into(),
        shape: vec![bytes],
        aliases: vec![],
        data: TensorData::Later,
    };
    Source::from_tensors(SIZES.map(tensor).to_vec()).unwrap()
}

fn bytes_of(name: &str) -> Vec<u8> {
    let (at, (_, bytes)) = SIZES.iter().enumerate().find(|(_, (own, _))| *own == name).unwrap();
    content(at as u8, *bytes as usize)
}

fn sharing(participant: Option<u32>, ranks: u32) -> Sharing {
    Sharing {
        participants: (0..ranks).map(rank).collect(),
        participant: participant.map(rank),
        session_id: Some(session()),
        patience: Duration::ZERO,
    }
}

async fn share(store: &WeightStore, sharing: Sharing) -> Result<PutWriter, BallastError> {
    store.weight_put(source().shared(sharing), &identity(1), None, Progress::none()).await
}

async fn join(store: &WeightStore, number: u32) -> PartWriter {
    PartWriter::join(store, source(), &identity(1), &session(), &rank(number)).await.unwrap()
}

async fn expect_all(cluster: &Cluster) {
    let store = cluster.store(Route::Best).await;
    let open = OpenRevision::open(&store, &identity(1), Default::default()).await.unwrap();
    for (name, _) in SIZES {
        assert_eq!(open.tensor(name).unwrap().bytes, bytes_of(name), "{name}");
    }
    open.close().await.unwrap();
}

#[tokio::test]
async fn a_coordinator_that_comes_after_the_seal_commits_what_its_predecessor_sealed() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let mut first = share(&store, sharing(Some(0), 1)).await.unwrap();
    for (name, bytes) in SIZES.into_iter().filter(|(_, bytes)| *bytes > 0) {
        assert_eq!(bytes_of(name).len() as u64, bytes);
        first.put_tensor(name, &bytes_of(name)).await.unwrap();
    }
    // It ends between the seal and the commit, and nobody hears that it gave up.
    cluster.refuse("commit_import", ErrorCode::LeaseExpired, json!({}), 1);
    cluster.refuse("abort_import", ErrorCode::LeaseExpired, json!({}), 1);
    first.commit().await.unwrap_err();
    let again = share(&store, sharing(Some(0), 1)).await.unwrap();
    let report = again.commit().await.unwrap();
    assert_eq!(report.revision.availability, Availability::Ready);
    expect_all(&cluster).await;
}

#[tokio::test]
async fn a_node_that_closed_an_idle_connection_is_connected_to_again() {
    let idle = Duration::from_millis(200);
    let cluster = Cluster::start_with(DataPlaneOptions { idle, ..Default::default() }).await;
    for route in [Route::Unix, Route::Tcp] {
        let store = cluster.store(route).await;
        let mut first = share(&store, sharing(Some(0), 2)).await.unwrap();
        let mut second = join(&store, 1).await;
        for name in ["a", "b"] {
            // Longer than the node waits for a request.
            tokio::time::sleep(5 * idle).await;
            first.put_tensor(name, &bytes_of(name)).await.unwrap();
        }
        second.put_tensor("large", &bytes_of("large")).await.unwrap();
        tokio::time::sleep(5 * idle).await;
        second.finish().await.unwrap();
        let report = first.commit().await.unwrap();
        assert_eq!(report.revision.availability, Availability::Ready);
        cluster.desk.lock().unwrap().record = None;
    }
}

#[tokio::test]
async fn a_box_that_another_has_otherwise_takes_nothing_else_along() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let mut first = share(&store, sharing(Some(0), 2)).await.unwrap();
    let mut second = join(&store, 1).await;
    first.put_tensor("b", &bytes_of("b")).await.unwrap();
    first.put_tensor("large", &bytes_of("large")).await.unwrap();
    let mut wrong = bytes_of("b");
    wrong[7] ^= 1;
    second.put_tensor("a", &bytes_of("a")).await.unwrap();
    second.put_tensor("b", &wrong).await.unwrap();
    let refused = second.put_tensor("large", &bytes_of("large")).await.unwrap_err();
    assert_eq!((refused.code, &refused.details["tensor"]), (ErrorCode::Conflict, &"b".into()), "{refused}");
    assert!(refused.message.contains("rank0 and rank1 hold different bytes for tensor \"b\""), "{refused}");
    second.put_tensor("b", &bytes_of("b")).await.unwrap();
    second.put_tensor("large", &bytes_of("large")).await.unwrap();
    second.finish().await.unwrap();
    first.commit().await.unwrap();
    expect_all(&cluster).await;
}

#[tokio::test]
async fn a_box_that_is_given_again_and_again_is_there_as_it_was_given_last() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let mut first = share(&store, sharing(Some(0), 1)).await.unwrap();
    first.put_tensor("a", &bytes_of("a")).await.unwrap();
    first.put_tensor("large", &bytes_of("large")).await.unwrap();
    first.put_tensor("a", &content(77, 1000)).await.unwrap();
    first.put_tensor("a", &bytes_of("a")).await.unwrap();
    first.put_tensor("b", &bytes_of("b")).await.unwrap();
    first.commit().await.unwrap();
    expect_all(&cluster).await;
}

#[tokio::test]
async fn the_silent_are_named_and_not_those_at_work() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let first = share(&store, sharing(None, 5)).await.unwrap();
    let _at_work = join(&store, 0).await;
    join(&store, 1).await.finish().await.unwrap();
    for (number, ago) in [(2, 20_000), (3, 60_000)] {
        drop(join(&store, number).await);
        let mut desk = cluster.desk.lock().unwrap();
        desk.parts.get_mut(&rank(number)).unwrap().heard_at = LogTime(LOG_CLOCK.0 - ago);
    }
    let refused = first.commit().await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::NotReady, "{refused}");
    assert_eq!(refused.details["participants"], json!(["rank4", "rank3", "rank2"]));
    let said =
        "3 of 5 participants are silent and have not brought their part: rank4 has not joined, rank3 was last heard of";
    assert!(refused.message.contains(said) && refused.message.contains("1 others are at work"), "{refused}");
}

#[tokio::test]
async fn a_join_that_is_given_up_half_way_gives_no_more_signs_of_life() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let _first = share(&store, sharing(None, 1)).await.unwrap();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    {
        let mut desk = cluster.desk.lock().unwrap();
        desk.ttl_ms = Some(300);
        desk.part_endpoint = Some(NodeEndpoint {
            node: NodeId::new("node-1").unwrap(),
            host_id: "elsewhere".into(),
            unix_socket: None,
            tcp: Some(silent.local_addr().unwrap().to_string()),
        });
    }
    let before = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let joining = tokio::spawn({
        let store = store.clone();
        async move { join(&store, 0).await }
    });
    eventually("it gives signs of life", || cluster.calls("renew_part") > 1).await;
    joining.abort();
    assert!(joining.await.unwrap_err().is_cancelled());
    eventually("what it has started ends", || tokio::runtime::Handle::current().metrics().num_alive_tasks() <= before)
        .await;
}

#[tokio::test]
async fn a_put_that_is_shared_with_nobody_or_without_itself_is_refused() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    for (wrong, says) in [(sharing(None, 0), "is empty"), (sharing(Some(3), 2), "rank3 is not among the 2")] {
        let refused = share(&store, wrong).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::InvalidArgument);
        assert!(refused.message.contains(says), "{refused}");
    }
    assert_eq!(cluster.calls("begin_import"), 0);
}

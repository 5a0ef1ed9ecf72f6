//! Puts of several participants, as their coordinators see them: who may give an import up.

use std::time::Duration;

use ballast_client::{Progress, PutWriter, Route, Sharing, Source, TensorData, TensorSource, WeightStore};
use ballast_schemas::{Availability, BallastError, ErrorCode, ParticipantId, SessionId};
use serde_json::json;

use crate::cluster::{Cluster, eventually, identity};
use crate::putting::{content, tensor};

/// One tensor that some participant brings, in the session that all runs of the coordinator name.
async fn coordinate(store: &WeightStore) -> Result<PutWriter, BallastError> {
    let later = TensorSource {
        name: "a".into(),
        dtype: "U8".into(),
        shape: vec![1000],
        aliases: vec![],
        data: TensorData::Later,
    };
    let sharing = Sharing {
        participants: vec![ParticipantId::new("rank0").unwrap()],
        participant: None,
        session_id: Some(SessionId::new("step-7").unwrap()),
        patience: Duration::from_secs(10),
    };
    let source = Source::from_tensors(vec![later]).unwrap().shared(sharing);
    store.weight_put(source, &identity(1), None, Progress::none()).await
}

/// Whether the session is open still, once everything that was begun before has been heard.
async fn is_open(cluster: &Cluster, store: &WeightStore) -> bool {
    let before = cluster.calls("get_metadata");
    drop(store.weight_get_metadata(&identity(1)).await);
    assert!(cluster.calls("get_metadata") > before);
    let desk = cluster.desk.lock().unwrap();
    desk.session.is_some() && desk.record.as_ref().unwrap().availability == Availability::Importing
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_opened_its_session_gives_it_up() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    drop(coordinate(&store).await.unwrap());
    eventually("the import is aborted", || cluster.calls("abort_import") == 1).await;
    coordinate(&store).await.unwrap().give_up().await.unwrap();
    assert_eq!(cluster.calls("abort_import"), 2);
    assert!(cluster.desk.lock().unwrap().session.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_found_its_session_open_leaves_it_open_unless_it_says_otherwise() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let first = coordinate(&store).await.unwrap();
    let second = coordinate(&store).await.unwrap();
    assert_eq!(second.session_id(), first.session_id());
    drop(second);
    coordinate(&store).await.unwrap().give_up().await.unwrap();
    assert!(is_open(&cluster, &store).await);
    assert_eq!(cluster.calls("abort_import"), 0);
    let last = coordinate(&store).await.unwrap();
    // The first one was replaced: what it says does not count, and it says why.
    assert_eq!(first.abort().await.unwrap_err().code, ErrorCode::Conflict);
    assert!(is_open(&cluster, &store).await);
    last.abort().await.unwrap();
    assert!(!is_open(&cluster, &store).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_of_a_coordinator_that_was_replaced_touches_nothing() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let first = coordinate(&store).await.unwrap();
    let _second = coordinate(&store).await.unwrap();
    assert_eq!(first.commit().await.unwrap_err().code, ErrorCode::Conflict);
    assert!(is_open(&cluster, &store).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_fails_to_take_its_session_over_does_not_destroy_what_it_came_to_rescue() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let first = coordinate(&store).await.unwrap();
    cluster.desk.lock().unwrap().without_nodes = true;
    assert_eq!(coordinate(&store).await.unwrap_err().code, ErrorCode::Unavailable);
    assert!(is_open(&cluster, &store).await);
    drop(first);
    eventually("what the first one says is refused", || cluster.calls("abort_import") == 1).await;
    assert!(is_open(&cluster, &store).await);
    // One that it has opened itself leaves nothing behind.
    cluster.desk.lock().unwrap().record = None;
    cluster.desk.lock().unwrap().session = None;
    assert_eq!(coordinate(&store).await.unwrap_err().code, ErrorCode::Unavailable);
    assert_eq!(cluster.calls("abort_import"), 2);
    assert!(!is_open(&cluster, &store).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_is_cancelled_while_it_waits_aborts_nothing() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let first = coordinate(&store).await.unwrap();
    // As long as it is waiting nobody knows whose session it will be.
    cluster.refuse("begin_import", ErrorCode::Busy, json!({"session_id": "another"}), 1_000);
    let waiting = tokio::time::timeout(Duration::from_millis(300), coordinate(&store)).await;
    assert!(waiting.is_err(), "it waits for whoever is in the way");
    assert!(is_open(&cluster, &store).await);
    assert_eq!(cluster.calls("abort_import"), 0);
    cluster.desk.lock().unwrap().refusals.clear();
    // A plain put beside it aborts what it has begun, as ever.
    first.abort().await.unwrap();
    let plain = Source::from_tensors(vec![tensor("a", content(1, 1000))]).unwrap();
    drop(store.weight_put(plain, &identity(1), None, Progress::none()).await.unwrap());
    eventually("the import is aborted", || cluster.calls("abort_import") == 2).await;
}

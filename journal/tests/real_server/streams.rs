//! What happens when streams are missing, foreign, or of another cluster.

use ballast_journal::{JetStreamLog, LastSeen, Log, OpenStreamsError, StreamOptions, connect, open_streams, token_key};
use ballast_schemas::ClusterId;
use bytes::Bytes;

use crate::{Cluster, PATIENCE, start_server};

async fn open(cluster: &Cluster, options: &StreamOptions) -> Result<ballast_journal::Streams, OpenStreamsError> {
    open_streams(cluster.streams.client().clone(), options).await
}

#[tokio::test]
async fn opening_again_finds_the_same_cluster_and_key() {
    let cluster = Cluster::start().await;
    let key = token_key(&cluster.streams).await.unwrap();
    let cluster = cluster.restart().await;
    let again = open(&cluster, &StreamOptions { create: false, ..StreamOptions::default() }).await.unwrap();
    assert_eq!(again.cluster_id(), cluster.streams.cluster_id());
    assert_eq!(token_key(&again).await.unwrap(), key);
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_worker_does_not_make_a_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let server = start_server(&folder).await;
    let client = connect(&server.url(), "test", PATIENCE).await.unwrap();
    let opened = open_streams(client, &StreamOptions { create: false, ..StreamOptions::default() }).await;
    let error = opened.unwrap_err();
    assert!(matches!(error, OpenStreamsError::NoCluster) && error.is_retryable(), "{error}");
    server.stop().await;
}

#[tokio::test]
async fn several_that_open_at_once_agree_on_one_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let server = start_server(&folder).await;
    let openings = (0..4).map(|_| async {
        let client = connect(&server.url(), "test", PATIENCE).await.unwrap();
        open_streams(client, &StreamOptions::default()).await.unwrap().cluster_id().clone()
    });
    let ids = futures::future::join_all(openings).await;
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    server.stop().await;
}

#[tokio::test]
async fn a_deleted_log_folder_is_refused_with_cluster_and_sequence_and_nothing_is_touched() {
    let cluster = Cluster::start().await;
    let log = JetStreamLog::new(&cluster.streams);
    for id in ["a", "b", "c"] {
        log.append(id, Bytes::from_static(b"x"), None).await.unwrap();
    }
    let Cluster { server, streams, folder } = cluster;
    let cluster_id = streams.cluster_id().clone();
    server.stop().await;
    let stream_folder = folder.path().join("jetstream/jetstream/$G/streams/BALLAST_LOG");
    assert!(stream_folder.is_dir(), "JetStream keeps its streams elsewhere now");
    std::fs::remove_dir_all(&stream_folder).unwrap();
    let server = start_server(&folder).await;
    let cluster = Cluster { server, streams, folder };

    let seen = LastSeen { cluster_id: cluster_id.clone(), log_seq: 3 };
    let error = open(&cluster, &StreamOptions { last_seen: Some(seen), ..StreamOptions::default() }).await.unwrap_err();
    assert!(
        matches!(&error, OpenStreamsError::LogMissing { cluster_id: found, last_seq: 3 } if *found == cluster_id),
        "{error}"
    );
    assert!(
        error.to_string().starts_with(&format!("log missing, cluster {cluster_id}, last seen sequence 3")),
        "{error}"
    );
    // Without anybody's memory the other streams still tell.
    let error = open(&cluster, &StreamOptions::default()).await.unwrap_err();
    assert!(matches!(&error, OpenStreamsError::LogMissing { .. }), "{error}");
    assert!(!stream_folder.exists(), "the refusal must not make a new log");
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_log_that_ends_before_what_was_seen_is_refused() {
    let cluster = Cluster::start().await;
    JetStreamLog::new(&cluster.streams).append("a", Bytes::from_static(b"x"), None).await.unwrap();
    let seen = LastSeen { cluster_id: cluster.streams.cluster_id().clone(), log_seq: 9 };
    let error = open(&cluster, &StreamOptions { last_seen: Some(seen), ..StreamOptions::default() }).await.unwrap_err();
    assert!(matches!(error, OpenStreamsError::LogCutShort { last_seq: 9, found: 1, .. }), "{error}");
    let other = LastSeen { cluster_id: ClusterId::new("another").unwrap(), log_seq: 0 };
    let error =
        open(&cluster, &StreamOptions { last_seen: Some(other), ..StreamOptions::default() }).await.unwrap_err();
    assert!(matches!(error, OpenStreamsError::OtherCluster { .. }), "{error}");
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_stream_that_another_program_made_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let server = start_server(&folder).await;
    let client = connect(&server.url(), "test", PATIENCE).await.unwrap();
    let context = async_nats::jetstream::new(client.clone());
    let config = async_nats::jetstream::stream::Config {
        name: "BALLAST_LOG".to_owned(),
        subjects: vec!["x".to_owned()],
        ..Default::default()
    };
    context.create_stream(config).await.unwrap();
    let error = open_streams(client, &StreamOptions::default()).await.unwrap_err();
    assert!(matches!(error, OpenStreamsError::Foreign { .. }), "{error}");
    server.stop().await;
}

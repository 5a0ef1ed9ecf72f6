//! Requests: nobody there, somebody who is late, the same request again.

use std::time::Duration;

use ballast_client::{ConnectOptions, Gateway, Route};
use ballast_journal::{EmbeddedServer, ServerOptions};
use ballast_schemas::{COMMAND_WINDOW_MS, ErrorCode, TenantId};
use serde_json::{Value, json};

use crate::cluster::{Cluster, LOG_CLOCK, identity};

#[tokio::test]
async fn no_server_and_no_gateway_are_different_sentences() {
    let options =
        ConnectOptions { connect_patience: Duration::from_millis(100), ..ConnectOptions::new("nats://127.0.0.1:1") };
    let error = Gateway::connect(&options).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("no NATS server answers at nats://127.0.0.1:1"), "{error}");

    let folder = tempfile::tempdir().unwrap();
    let server =
        EmbeddedServer::start(ServerOptions::new(folder.path())).await.unwrap_or_else(|error| panic!("{error}"));
    let options = ConnectOptions { request_deadline: Duration::from_millis(300), ..ConnectOptions::new(server.url()) };
    let gateway = Gateway::connect(&options).await.unwrap();
    let nothing = json!({});
    let ask = || gateway.call::<_, Value>(gateway.tenant(), "status", &nothing);
    let error = ask().await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("no Ballast gateway answers"), "{error}");
    server.stop().await;
    let error = ask().await.unwrap_err();
    assert!(error.message.contains("no NATS server answers"), "{error}");
}

#[tokio::test]
async fn a_request_is_sent_again_under_the_same_id_until_somebody_answers() {
    let cluster = Cluster::start().await;
    let gateway = cluster.gateway(Route::Best).await;
    cluster.refuse("abort_import", ErrorCode::Unavailable, Value::Null, 3);
    let body = json!({"identity": identity(1), "session_id": "s"});
    let error = gateway.call::<_, Value>(&TenantId::default_tenant(), "abort_import", &body).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::NotFound);
    let ids = cluster.desk.lock().unwrap().request_ids.clone();
    assert_eq!(ids.len(), 4);
    assert!(ids.iter().all(|id| *id == ids[0]) && !ids[0].is_empty());
    // However late one of them is read, it is good only for as long as the fold remembers the others.
    let ends = cluster.desk.lock().unwrap().not_after.clone();
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    assert!((LOG_CLOCK.0 + COMMAND_WINDOW_MS..LOG_CLOCK.0 + 2 * COMMAND_WINDOW_MS).contains(&ends[0]), "{ends:?}");
    gateway.call::<_, Value>(&TenantId::default_tenant(), "abort_import", &body).await.unwrap_err();
    assert_ne!(cluster.desk.lock().unwrap().request_ids[4], ids[0]);
}

//! What a gateway does beside answering requests: the inbox, introductions, health, metrics, restarts.

use std::time::Duration;

use ballast_gateway::{Gateway, GatewayError};
use ballast_schemas::subject::HELLO_SUBJECT;
use ballast_schemas::{
    ClusterConfig, ClusterId, HelloReply, InstanceId, InstanceStanding, LogPosition, NodeHello, NodeId,
};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::fixture::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_left_in_the_inbox_is_carried_out_and_its_outcome_stored() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);
    let revision = fixture.import(&node, &identity, hot()).await;
    let jetstream = async_nats::jetstream::new(fixture.client.clone());
    let mut outcomes = fixture.client.subscribe("ballast.events.default.outcome.*").await.unwrap();
    let submit = async |verb: &str, body: Value| {
        let stored =
            jetstream.publish(format!("ballast.submit.default.{verb}"), body.to_string().into()).await.unwrap();
        stored.await.unwrap().sequence
    };
    let generation = revision["metadata_generation"].as_u64().unwrap();
    let policy = json!({"preferred_residency": "HOT", "mixed_hot_ratio": 0.125, "migration_mode": "MANUAL"});
    let update = json!({"identity": identity, "policy": policy, "expected_metadata_generation": generation, "options": {"request_id": "r.1"}});
    submit("update_policy", update).await;
    let stale = submit("remove", json!({"identity": identity, "expected_metadata_generation": generation})).await;
    submit("list", json!({"options": {"request_id": "r3"}})).await;
    submit("fly", json!({"options": {"request_id": "r4"}})).await;
    let mut next = async || {
        let message = tokio::time::timeout(PATIENCE, outcomes.next()).await.unwrap().unwrap();
        let body: Value = serde_json::from_slice(&message.payload).unwrap();
        (message.subject.to_string(), body)
    };
    let (subject, body) = next().await;
    assert_eq!(subject, "ballast.events.default.outcome.r%2E1");
    assert_eq!(
        (&body["verb"], &body["revision"]["policy"]["mixed_hot_ratio"]),
        (&json!("update_policy"), &json!(0.125))
    );
    let (subject, body) = next().await;
    assert_eq!(subject, format!("ballast.events.default.outcome.BALLAST_INBOX-{stale}"));
    assert_eq!(body["error"]["code"], "STALE_GENERATION");
    assert_eq!(next().await.1["error"]["code"], "INVALID_ARGUMENT");
    assert_eq!(next().await.1["error"]["code"], "NOT_FOUND");
    eventually("the inbox is empty", async || {
        let mut stream = jetstream.get_stream("BALLAST_INBOX").await.unwrap();
        (stream.info().await.unwrap().state.messages == 0).then_some(())
    })
    .await;
}

async fn hello(fixture: &Fixture, hello: &NodeHello) -> HelloReply {
    let body = rmp_serde::to_vec_named(hello).unwrap();
    let message = fixture.client.request(HELLO_SUBJECT, body.into()).await.unwrap();
    rmp_serde::from_slice(&message.payload).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_introduces_itself_hears_what_becomes_of_its_instances() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);
    let revision = fixture.import(&node, &identity, hot()).await;
    let known: InstanceId = serde_json::from_value(revision["instance"].clone()).unwrap();
    let unknown = InstanceId { group_id: minilm(2).group_id(), position: LogPosition { seq: 1, index: 0 } };
    let cluster_id = fixture.handle().streams().cluster_id().clone();
    let mut introduction = NodeHello {
        node: NodeId::new("node-1").unwrap(),
        incarnation: "second".into(),
        cluster_id: Some(cluster_id.clone()),
        seen: known.position,
        instances: vec![known, unknown],
    };
    match hello(&fixture, &introduction).await {
        HelloReply::Welcome { cluster_id: found, incarnation, token_key, standings, .. } => {
            assert_eq!((found, incarnation, token_key.len()), (cluster_id, 1, 32));
            assert_eq!(standings, [InstanceStanding::Known, InstanceStanding::Unknown]);
        }
        other => panic!("{other:?}"),
    }
    introduction.seen = LogPosition { seq: 1_000_000, index: 0 };
    match hello(&fixture, &introduction).await {
        HelloReply::Refused { error } => assert!(error.message.contains("1000000"), "{error}"),
        other => panic!("{other:?}"),
    }
    introduction.cluster_id = Some(ClusterId::new("elsewhere").unwrap());
    match hello(&fixture, &introduction).await {
        HelloReply::Refused { error } => assert!(error.message.contains("elsewhere"), "{error}"),
        other => panic!("{other:?}"),
    }
    let message = fixture.client.request(HELLO_SUBJECT, "not a hello".into()).await.unwrap();
    assert!(matches!(rmp_serde::from_slice(&message.payload).unwrap(), HelloReply::Refused { .. }));
}

async fn get(fixture: &Fixture, path: &str) -> String {
    let address = fixture.handle().http_address().unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_metrics_are_served_over_http() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    fixture.import(&node, &minilm(1), hot()).await;
    let _ = fixture.call("get_metadata", json!({"identity": minilm(9)})).await;
    assert!(get(&fixture, "/healthz").await.starts_with("HTTP/1.1 200"));
    assert!(get(&fixture, "/readyz").await.contains("ready: folded"));
    let metrics = get(&fixture, "/metrics").await;
    for line in [
        "application/openmetrics-text",
        "ballast_revisions{availability=\"READY\"} 1",
        "ballast_revisions_by_residency{residency=\"HOT\"} 1",
        "ballast_gateway_requests_total{verb=\"commit_import\",outcome=\"OK\"} 1",
        "ballast_gateway_requests_total{verb=\"get_metadata\",outcome=\"NOT_FOUND\"} 1",
        "ballast_log_command_time_seconds_count",
        "ballast_nodes_live 1",
        "ballast_node_memory_bytes{node=\"node-1\",kind=\"capacity\"} 67108864",
        "# EOF",
    ] {
        assert!(metrics.contains(line), "{line} is not in:\n{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_starts_again_knows_what_was_there() {
    let mut fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let revision = fixture.import(&node, &minilm(1), hot()).await;
    fixture.stop_gateway().await;
    fixture.add_gateway().await;
    let view = fixture.call("get_metadata", json!({"identity": minilm(1)})).await.unwrap();
    assert_eq!(view["metadata"], revision);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_goes_on_after_the_server_was_killed() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let revision = fixture.import(&node, &minilm(1), hot()).await;
    let pid = fixture.server.pid().unwrap().to_string();
    assert!(std::process::Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    let view = eventually("the gateway answers again", async || {
        let body = json!({"identity": minilm(1), "options": {"consistency": "linearizable"}}).to_string();
        let request = async_nats::Request::new().payload(body.into()).timeout(Some(Duration::from_secs(1)));
        let message = fixture.client.send_request("ballast.v1.default.get_metadata", request).await.ok()?;
        let body: Value = serde_json::from_slice(&message.payload).ok()?;
        body.get("metadata").cloned()
    })
    .await;
    assert_eq!(view, revision);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_requests_than_a_gateway_takes_are_refused_at_once() {
    let mut fixture = Fixture::start().await;
    let options = ballast_gateway::GatewayOptions { requests_in_flight_max: 1, ..fixture.options("small") };
    fixture.stop_gateway().await;
    fixture.add_gateway_with(options).await;
    let slow = json!({"options": {"min_log_seq": 1_000_000}});
    let (first, second) = tokio::join!(fixture.call("list", slow.clone()), fixture.call("list", slow));
    let messages = [first.unwrap_err().message, second.unwrap_err().message];
    assert!(messages.iter().any(|message| message.contains("at work on 1 requests")), "{messages:?}");
    assert!(messages.iter().any(|message| message.contains("min_log_seq")), "{messages:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_answered_within_its_deadline() {
    let mut fixture = Fixture::start().await;
    let options =
        ballast_gateway::GatewayOptions { request_deadline: Duration::from_millis(200), ..fixture.options("hasty") };
    fixture.stop_gateway().await;
    fixture.add_gateway_with(options).await;
    let error = fixture.call("list", json!({"options": {"min_log_seq": 1_000_000}})).await.unwrap_err();
    assert!(error.message.contains("200 ms") && error.details["outcome_unknown"] == true, "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_settings_and_a_taken_address_are_refused_at_the_start() {
    let fixture = Fixture::start().await;
    let mut options = fixture.options("other");
    options.http = fixture.handle().http_address();
    assert!(matches!(Gateway::open(options).await, Err(GatewayError::Http { .. })));
    let mut options = fixture.options("other");
    options.config = ClusterConfig { migration_max_members_per_round: 0, ..ClusterConfig::default() };
    let error = Gateway::open(options).await.unwrap_err();
    assert!(error.to_string().contains("weight_migration_max_members_per_round"), "{error}");
    let mut options = fixture.options("other");
    (options.nats_url, options.connect_patience) = ("nats://127.0.0.1:1".to_owned(), Duration::ZERO);
    let error = Gateway::open(options).await.unwrap_err();
    assert!(error.to_string().contains("no NATS server answers"), "{error}");
}

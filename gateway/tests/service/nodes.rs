//! Control requests between whoever drives nodes and a node, over a real nats-server.

use std::time::Duration;

use ballast_journal::nodes::{NodeCallError, NodeClient, NodeListener, NodeProgress};
use ballast_schemas::{AffinityIndex, AffinityUnit, BallastError, Digest, ErrorCode, InstanceId, LogPosition, NodeId};
use ballast_schemas::{NodeReply, NodeRequest};

use super::fixture::*;

fn instance() -> InstanceId {
    InstanceId { group_id: minilm(1).group_id(), position: LogPosition { seq: 7, index: 0 } }
}

fn request() -> NodeRequest {
    NodeRequest::Inventory { instance: instance() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_shows_progress_is_waited_for_and_a_silent_one_is_not() {
    let fixture = Fixture::start().await;
    let node = NodeId::new("node-1").unwrap();
    let client = NodeClient::new(fixture.client.clone()).with_silence_max(Duration::from_millis(400));
    assert!(matches!(client.call(&node, &request(), |_| {}).await, Err(NodeCallError::NotListening { .. })));
    let mut listener = NodeListener::open(fixture.client.clone(), &node).await.unwrap();
    fixture.client.flush().await.unwrap();
    let answering = tokio::spawn(async move {
        // Altogether longer than the silence that is allowed.
        let working = listener.next().await.unwrap();
        for step in 1..=5 {
            tokio::time::sleep(Duration::from_millis(150)).await;
            working.progress(NodeProgress { units: step, bytes: 10 }).await.unwrap();
        }
        working.finish(NodeReply::Absent).await.unwrap();
        let failing = listener.next().await.unwrap();
        failing.finish(NodeReply::Failed(BallastError::new(ErrorCode::Busy, "a reader maps it"))).await.unwrap();
        let forgotten = listener.next().await.unwrap();
        (listener, forgotten)
    });
    let mut steps = Vec::new();
    let end = client.call(&node, &request(), |progress| steps.push(progress.units)).await;
    assert_eq!((end, steps), (Ok(NodeReply::Absent), vec![1, 2, 3, 4, 5]));
    let failed = client.call(&node, &request(), |_| {}).await.unwrap_err();
    assert!(failed.is_retryable() && !failed.outcome_unknown());
    let error = BallastError::from(failed);
    assert_eq!((error.code, error.message.as_str()), (ErrorCode::Busy, "node node-1: a reader maps it"));
    let silent = client.call(&node, &request(), |_| {}).await.unwrap_err();
    assert!(silent.outcome_unknown() && silent.is_retryable(), "{silent}");
    assert_eq!(BallastError::from(silent).code, ErrorCode::Unavailable);
    drop(answering.await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_that_is_larger_than_a_message_arrives_whole() {
    let fixture = Fixture::start().await;
    let node = NodeId::new("node-1").unwrap();
    let unit = |n: u32| AffinityUnit {
        affinity_id: Digest::of(&n.to_be_bytes()),
        extent_bytes: 4096,
        logical_bytes: 4000,
        crc64: u64::from(n),
    };
    let index = AffinityIndex { units: (0..30_000).map(unit).collect() };
    let mut listener = NodeListener::open(fixture.client.clone(), &node).await.unwrap();
    fixture.client.flush().await.unwrap();
    let sent = index.clone();
    let answering = tokio::spawn(async move {
        let call = listener.next().await.unwrap();
        call.finish(NodeReply::AffinityIndex(Box::new(sent))).await.unwrap();
        listener
    });
    let received = NodeClient::new(fixture.client.clone()).affinity_index(&node, &instance()).await.unwrap();
    assert_eq!(received, index);
    drop(answering.await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_request_is_answered_as_such() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", MIB).await;
    let reply = fixture.client.request("ballast.node.node-1.ctl", "nonsense".into()).await.unwrap();
    let reply: NodeReply = rmp_serde::from_slice(&reply.payload).unwrap();
    assert!(matches!(reply, NodeReply::Failed(error) if error.code == ErrorCode::InvalidArgument));
    let dotted = NodeId::new("a.b").unwrap();
    let error = NodeListener::open(fixture.client.clone(), &dotted).await.unwrap_err();
    assert!(error.to_string().contains("a.b"), "{error}");
    drop(node);
}

//! What a workflow worker does with operations, whatever happens to it.

use std::time::Duration;

use ballast_schemas::*;
use serde::Serialize;

use super::fake_node::FakeNode;
use super::site::*;

fn one_unit_a_round() -> ClusterConfig {
    ClusterConfig { migration_max_members_per_round: 1, deletion_max_members_per_round: 1, ..ClusterConfig::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_dies_is_replaced_by_one_that_goes_on_from_the_cursor() {
    let site = Site::start(Clock::Test, one_unit_a_round()).await;
    let node = FakeNode::start(&site, "node-1").await;
    let instance = node.import(&site, &minilm(1), 4).await;
    let first = site.worker("first");
    node.hesitate(Some(("copy_to_cold", 2)));
    let operation = site.migrate(&minilm(1), Residency::Cold, None).await;
    site.operation_is(&operation, "has done two units", |operation| operation.cursor == 2).await;
    first.kill().await;
    let done_by_first = node.effects();
    let left = site.operation(&operation);
    assert_eq!((left.status, left.epoch), (OperationStatus::Claimed, 1), "{left:?}");

    let second = site.worker("second");
    node.hesitate(None);
    site.pass(Duration::from_millis(CLAIM_TTL_MS)).await;
    let ended = site.succeeded(&operation).await;
    assert_eq!(ended.epoch, 2);
    let inventory = node.inventory(&instance).unwrap();
    assert!(inventory.hot.is_empty() && inventory.cold.is_full());
    assert_eq!(site.revision(&minilm(1)).residency, Residency::Cold);
    // Nothing before the cursor was touched again.
    let by_second = &node.effects()[done_by_first.len()..];
    assert!(
        by_second.iter().all(|(_, units)| units.iter().all(|unit| u64::from(*unit) >= left.cursor)),
        "{by_second:?}"
    );
    second.stop().await;
}

/// As `ballast-journal` writes it.
#[derive(Serialize)]
struct HintBody<'a> {
    operation_id: &'a OperationId,
    kind: OperationKind,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hint_that_comes_twice_does_nothing() {
    let site = Site::start(Clock::Test, ClusterConfig::default()).await;
    let node = FakeNode::start(&site, "node-1").await;
    node.import(&site, &minilm(1), 4).await;
    let (first, second) = (site.worker("first"), site.worker("second"));
    node.hesitate(Some(("copy_to_cold", 0)));
    let operation = site.migrate(&minilm(1), Residency::Cold, None).await;
    node.hesitates().await;
    let repeat = async || {
        let body =
            rmp_serde::to_vec_named(&HintBody { operation_id: &operation, kind: OperationKind::Migrating }).unwrap();
        let hint = subject::work(OperationKind::Migrating, &operation);
        // Each is taken off the queue before the next is let in.
        eventually("the queue takes the hint", async || {
            let reply = site.client.request(hint.clone(), body.clone().into()).await.unwrap();
            let reply: serde_json::Value = serde_json::from_slice(&reply.payload).unwrap();
            reply.get("error").is_none().then_some(())
        })
        .await;
    };
    for _ in 0..3 {
        repeat().await;
    }
    node.hesitate(None);
    let ended = site.succeeded(&operation).await;
    assert_eq!(ended.epoch, 1, "claimed once");
    for _ in 0..2 {
        repeat().await;
    }
    assert_eq!(node.effects(), [("copy_to_cold", vec![0, 1, 2, 3]), ("release_memory", vec![0, 1, 2, 3])]);
    first.stop().await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_lost_its_claim_drops_the_work_and_is_free_for_other() {
    let site = Site::start(Clock::Test, ClusterConfig::default()).await;
    let node = FakeNode::start(&site, "node-1").await;
    node.import(&site, &minilm(1), 2).await;
    let other = RevisionIdentity::new("default", "default", "other", "main", 1).unwrap();
    node.import(&site, &other, 2).await;
    let worker = site.worker("only");
    node.hesitate(Some(("copy_to_cold", 0)));
    let paused = site.migrate(&minilm(1), Residency::Cold, None).await;
    node.hesitates().await;
    site.accept(Command::PauseOperation(paused.clone())).await;
    // It drives one at a time, and what it is in the middle of never ends: only the refused renewal frees it.
    let removed = site.remove(&other).await;
    assert_eq!(site.succeeded(&removed).await.epoch, 1);
    node.hesitate(None);
    eventually("the abandoned copy is done", async || {
        node.effects().contains(&("copy_to_cold", vec![0, 1])).then_some(())
    })
    .await;
    let left = site.operation(&paused);
    assert_eq!((left.status, left.cursor, left.epoch), (OperationStatus::Paused, 0, 1), "nothing was appended for it");

    site.accept(Command::ResumeOperation(paused.clone())).await;
    assert_eq!(site.succeeded(&paused).await.epoch, 2);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demotion_waits_for_leases_without_a_worker_and_wakes_when_they_end() {
    let site = Site::start(Clock::Test, ClusterConfig::default()).await;
    let node = FakeNode::start(&site, "node-1").await;
    let instance = node.import(&site, &minilm(1), 2).await;
    let lease_id = LeaseId::new("reader").unwrap();
    let acquire =
        AcquireLease { identity: minilm(1), lease_id: lease_id.clone(), holder: "a test".into(), ttl_ms: 60_000 };
    site.accept(Command::AcquireLease(acquire)).await;
    let worker = site.worker("only");
    let operation = site.migrate(&minilm(1), Residency::Cold, None).await;
    let waiting =
        site.operation_is(&operation, "is parked", |operation| operation.status == OperationStatus::Parked).await;
    assert_eq!((waiting.park_reason, waiting.attempts), (Some(ParkReason::LeaseDrain), 0), "{waiting:?}");
    let inventory = node.inventory(&instance).unwrap();
    assert!(inventory.hot.is_full() && inventory.cold.is_full(), "copied, and nothing released under the lease");

    site.accept(Command::ReleaseLease(ReleaseLease { identity: minilm(1), lease_id })).await;
    site.succeeded(&operation).await;
    assert!(node.inventory(&instance).unwrap().hot.is_empty());
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_whose_node_is_away_waits_and_goes_on_when_it_is_back() {
    let site = Site::start(Clock::Test, ClusterConfig::default()).await;
    let mut node = FakeNode::start(&site, "node-1").await;
    let instance = node.import(&site, &minilm(1), 2).await;
    node.leave().await;
    let worker = site.worker("only");
    let operation = site.remove(&minilm(1)).await;
    let waiting =
        site.operation_is(&operation, "is parked", |operation| operation.status == OperationStatus::Parked).await;
    assert_eq!((waiting.park_reason, waiting.attempts), (Some(ParkReason::Node), 0), "{waiting:?}");
    assert!(node.inventory(&instance).is_some());

    node.listen().await;
    site.pass(Duration::from_secs(10)).await;
    site.succeeded(&operation).await;
    assert_eq!(node.inventory(&instance), None);
    let tombstone = site.revision(&minilm(1));
    assert_eq!((tombstone.availability, tombstone.residency), (Availability::Deleted, Residency::Absent));
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_effect_backs_off_and_keeps_the_revision_readable() {
    let site = Site::start(Clock::Test, ClusterConfig::default()).await;
    let node = FakeNode::start(&site, "node-1").await;
    node.import(&site, &minilm(1), 2).await;
    node.fail(Some(BallastError::new(ErrorCode::DurabilityFailed, "the disk says no")));
    let worker = site.worker("only");
    let operation = site.migrate(&minilm(1), Residency::Cold, None).await;
    let backing_off =
        site.operation_is(&operation, "backs off", |operation| operation.status == OperationStatus::BackingOff).await;
    let error = backing_off.last_error.unwrap();
    assert_eq!((backing_off.attempts, error.code), (1, ErrorCode::DurabilityFailed));
    assert!(error.message.contains("node-1") && error.message.contains("the disk says no"), "{}", error.message);
    assert_eq!(site.revision(&minilm(1)).availability, Availability::Ready);

    node.fail(None);
    site.pass(Duration::from_secs(5)).await;
    site.succeeded(&operation).await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_worker_leaves_a_step_that_does_not_end_and_appends_nothing_more() {
    let site = Site::start(Clock::Test, one_unit_a_round()).await;
    let node = FakeNode::start(&site, "node-1").await;
    node.import(&site, &minilm(1), 3).await;
    let worker = site.worker("first");
    node.hesitate(Some(("copy_to_cold", 0)));
    let operation = site.migrate(&minilm(1), Residency::Cold, None).await;
    node.hesitates().await;
    worker.stop().await;
    node.hesitate(None);
    eventually("the abandoned copy is done", async || (!node.effects().is_empty()).then_some(())).await;
    let end = site.replica.log_seq();
    site.pass(Duration::from_millis(CLAIM_TTL_MS)).await;
    let left = site.operation(&operation);
    assert_eq!((left.status, left.cursor, left.epoch), (OperationStatus::Runnable, 0, 1), "{left:?}");
    assert_eq!(site.replica.log_seq(), end + 2, "only the clock's own entries");

    let next = site.worker("second");
    site.succeeded(&operation).await;
    next.stop().await;
}

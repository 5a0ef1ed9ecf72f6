//! Operations on a real node: bytes on tmpfs and on disk, moved by a workflow worker and read back by a client.

use ballast_schemas::*;

use super::node::{Node, Payload};
use super::site::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_goes_cold_hot_and_mixed_and_leaves_nothing_behind() {
    let site =
        Site::start(Clock::Real, ClusterConfig { migration_max_members_per_round: 3, ..ClusterConfig::default() })
            .await;
    let node = Node::start(&site, "node-1").await;
    let worker = site.worker("worker-1");
    let payload = Payload::new(&[300_000, 5, 70_000, 4096, 0, 1_000_000, 123_457]);
    let instance = node.import(&site, &minilm(1), &payload).await;
    assert_eq!(site.revision(&minilm(1)).residency, Residency::Hot);

    let half = Some(HotRatio::HALF);
    for (target, ratio) in
        [(Residency::Cold, None), (Residency::Hot, None), (Residency::Mixed, half), (Residency::Cold, None)]
    {
        let operation = site.migrate(&minilm(1), target, ratio).await;
        let ended = site.succeeded(&operation).await;
        let revision = site.revision(&minilm(1));
        assert_eq!((revision.residency, revision.observed_hot_ppm), (target, ended.observed_hot_ppm), "{ended:?}");
        if target == Residency::Mixed {
            assert!(ended.observed_hot_ppm.abs_diff(500_000) < 200_000, "{}", ended.observed_hot_ppm);
        }
        node.reads_back(&instance, &payload).await;
        // What the node published is what it holds.
        eventually("the inventory is published", async || {
            let group = site.directory.group(&instance);
            let hot = group.nodes.get(&node.node)?.hot.count();
            let is_there = match target {
                Residency::Hot => hot == payload.units(),
                Residency::Cold => hot == 0,
                _ => hot > 0 && hot < payload.units(),
            };
            is_there.then_some(())
        })
        .await;
    }

    let operation = site.remove(&minilm(1)).await;
    site.succeeded(&operation).await;
    let tombstone = site.revision(&minilm(1));
    assert_eq!((tombstone.availability, tombstone.residency), (Availability::Deleted, Residency::Absent));
    eventually("the inventory is withdrawn", async || site.directory.group(&instance).nodes.is_empty().then_some(()))
        .await;
    let status = eventually("the node counts nothing", async || {
        site.directory.node(&node.node).filter(|status| status.instances == 0)
    })
    .await;
    assert_eq!((status.memory_used_bytes, status.cold_used_bytes), (0, 0));
    assert!(node.is_empty(), "no file of any instance is left");
    worker.stop().await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demotion_waits_for_a_reader_that_maps_the_bytes() {
    let site = Site::start(Clock::Real, ClusterConfig::default()).await;
    let node = Node::start(&site, "node-1").await;
    let worker = site.worker("worker-1");
    let payload = Payload::new(&[300_000, 70_000]);
    let instance = node.import(&site, &minilm(1), &payload).await;
    let mapped = node.map(&instance, &payload).await;
    let operation = site.migrate(&minilm(1), Residency::Cold, None).await;
    let waiting = site
        .operation_is(&operation, "waits for readers", |operation| operation.park_reason == Some(ParkReason::Readers))
        .await;
    assert_eq!(waiting.attempts, 0);
    drop(mapped);
    site.succeeded(&operation).await;
    node.reads_back(&instance, &payload).await;
    worker.stop().await;
    node.stop().await;
}

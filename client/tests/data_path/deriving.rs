//! Replacements that are made out of their base: over several nodes, with copies that are wrong or gone, and what an upsert does
//! without.

use ballast_client::delta::{self, Members, Semantics, SparseDelta};
use ballast_client::{Progress, PutReport, Route, Source, TensorData, TensorSource, UpsertOptions, WeightStore};
use ballast_schemas::frame::ReadRange;
use ballast_schemas::{
    BallastError, ClaimPhase, ErrorCode, MigrationMode, NodeEndpoint, NodeId, Residency, UpsertMode,
};
use ballast_transfer::NodeStore;
use serde_json::json;

use crate::cluster::{Cluster, eventually, identity};
use crate::putting::{content, tensor};

const BYTES: usize = 300_000;

fn tensors(seed: u8) -> Source {
    Source::from_tensors(vec![tensor("a", content(1, BYTES)), tensor("b", content(seed, BYTES))]).unwrap()
}

/// Publishes the base on these nodes; what comes next is its replacement.
async fn base_on(cluster: &Cluster, store: &WeightStore, nodes: &[NodeEndpoint]) {
    cluster.desk.lock().unwrap().placement = nodes.to_vec();
    let writer = store.weight_put(tensors(2), &identity(1), None, Progress::none()).await.unwrap();
    writer.commit().await.unwrap();
    let mut desk = cluster.desk.lock().unwrap();
    desk.base = desk.record.take();
    desk.holders = nodes.to_vec();
    desk.placement = Vec::new();
    desk.phases = vec![ClaimPhase::PreparingTarget, ClaimPhase::RetiringBase];
}

/// Overwrites element 7 of `b`.
fn changed() -> SparseDelta {
    let metadata = json!({
        "schema": "mooncake.sparse_object", "version": 1, "coordinate_space": "global", "tensor_id": "b",
        "global_shape": [BYTES], "global_offset": [0], "local_shape": [BYTES], "tile_shape": [BYTES],
        "base_generation": 1, "delta_generation": 2, "index_dtype": "uint32", "value_dtype": "uint8",
        "members": {
            "indices": {"dtype": "uint32", "shape": [1, 1]}, "values": {"dtype": "uint8", "shape": [1]},
            "tile_coords": {"dtype": "uint32", "shape": [1, 1]}, "tile_ptr": {"dtype": "uint64", "shape": [2]},
        },
    });
    let pointers = [0_u64.to_le_bytes(), 1_u64.to_le_bytes()].concat();
    let members = Members { indices: &7_u32.to_le_bytes(), values: &[99], tile_coords: &[0; 4], tile_ptr: &pointers };
    SparseDelta::new(&metadata.to_string(), &members).unwrap()
}

async fn apply(
    store: &WeightStore,
    expected: Option<u64>,
    request_id: Option<&str>,
) -> Result<PutReport, BallastError> {
    let options = UpsertOptions { request_id: request_id.map(Into::into), ..UpsertOptions::default() };
    delta::upsert(store, &[changed()], Semantics::Overwrite, &identity(1), expected, options, Progress::none()).await
}

fn expect_target(cluster: &Cluster, node: &NodeStore) {
    let mut b = content(2, BYTES);
    b[7] = 99;
    expect_units(cluster, node, &[content(1, BYTES), b]);
}

fn expect_units(cluster: &Cluster, node: &NodeStore, expected: &[Vec<u8>]) {
    let reader = node.reader(&cluster.instance()).unwrap();
    for (unit, expected) in (0..).zip(expected) {
        let range = ReadRange { unit, offset: 0, bytes: BYTES as u64 };
        assert!(reader.hot(&range).unwrap().unwrap().bytes() == expected.as_slice(), "unit {unit} on {}", node.node());
    }
}

/// Changes a byte of `b` behind the node's back.
fn spoil(cluster: &Cluster, name: &str) {
    let instances = cluster.memory_of(name).join("instances");
    let folder = std::fs::read_dir(instances).unwrap().next().unwrap().unwrap().path();
    let segment = std::fs::File::options().write(true).open(folder.join("segment-000000")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&segment, b"spoiled", BYTES as u64 + 100_000).unwrap();
}

#[tokio::test]
async fn a_delta_goes_to_several_nodes_and_takes_another_copy_where_one_is_wrong() {
    let cluster = Cluster::start().await;
    let (_, second, _) = cluster.another_node("node-2").await;
    let (third_store, third, _) = cluster.another_node("node-3").await;
    let (fourth_store, fourth, _) = cluster.another_node("node-4").await;
    let store = cluster.store(Route::Best).await;
    base_on(&cluster, &store, &[second.clone(), third.clone()]).await;
    spoil(&cluster, "node-2");
    // One that has the base, and one that has to ask for it: first the node whose copy is wrong.
    cluster.desk.lock().unwrap().placement = vec![third, fourth];
    let report = apply(&store, None, None).await.unwrap();
    assert_eq!(report.reused_bytes, 2 * BYTES as u64 - 1);
    expect_target(&cluster, &third_store);
    expect_target(&cluster, &fourth_store);
    assert!(cluster.desk.lock().unwrap().leases.is_empty());
}

#[tokio::test]
async fn a_delta_whose_base_nobody_has_right_fails_and_an_upsert_sends_what_it_can_not_copy() {
    let cluster = Cluster::start().await;
    let (_, second, _) = cluster.another_node("node-2").await;
    let store = cluster.store(Route::Tcp).await;
    base_on(&cluster, &store, &[second]).await;
    spoil(&cluster, "node-2");
    let error = apply(&store, None, None).await.unwrap_err();
    assert!(error.code == ErrorCode::Unavailable && error.message.contains("has it wrong"), "{error}");
    let generation = cluster.desk.lock().unwrap().base.as_ref().unwrap().metadata_generation;
    let (options, progress) = (UpsertOptions::default(), Progress::none());
    let writer = store.weight_upsert(tensors(2), &identity(1), 2, generation, options, progress).await.unwrap();
    let report = writer.commit().await.unwrap();
    assert_eq!(report.reused_bytes, BYTES as u64, "the one that is right");
}

#[tokio::test]
async fn of_files_that_go_over_tcp_only_what_the_base_does_not_have_is_sent() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Tcp).await;
    base_on(&cluster, &store, &[]).await;
    let path = cluster.scratch.path().join("weights.bin");
    let (a, c) = (content(1, BYTES), content(5, BYTES));
    std::fs::write(&path, [c.clone(), a.clone()].concat()).unwrap();
    let in_file = |name: &str, offset: u64| {
        let data = TensorData::File { path: path.clone(), offset };
        TensorSource { name: name.into(), dtype: "U8".into(), shape: vec![BYTES as u64], aliases: vec![], data }
    };
    let source = Source::from_tensors(vec![in_file("a", BYTES as u64), in_file("c", 0)]).unwrap();
    let generation = cluster.desk.lock().unwrap().base.as_ref().unwrap().metadata_generation;
    let (options, progress) = (UpsertOptions::default(), Progress::none());
    let writer = store.weight_upsert(source, &identity(1), 2, generation, options, progress).await.unwrap();
    assert_eq!(writer.commit().await.unwrap().reused_bytes, BYTES as u64);
    expect_units(&cluster, &cluster.node, &[a, c]);
}

async fn upsert_without(cluster: &Cluster, store: &WeightStore) {
    let generation = cluster.desk.lock().unwrap().base.as_ref().unwrap().metadata_generation;
    let (options, progress) = (UpsertOptions::default(), Progress::none());
    let writer = store.weight_upsert(tensors(3), &identity(1), 2, generation, options, progress).await.unwrap();
    let report = writer.commit().await.unwrap();
    assert_eq!(report.reused_bytes, 0);
    eventually("no lease is left", || cluster.desk.lock().unwrap().leases.is_empty()).await;
}

#[tokio::test]
async fn an_upsert_does_not_wait_for_a_base_whose_node_says_nothing() {
    let cluster = Cluster::start().await;
    let (_, second, _) = cluster.another_node("node-2").await;
    let store = cluster.store(Route::Best).await;
    base_on(&cluster, &store, &[second]).await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = NodeEndpoint {
        node: NodeId::new("node-2").unwrap(),
        host_id: String::new(),
        unix_socket: None,
        tcp: Some(silent.local_addr().unwrap().to_string()),
    };
    cluster.desk.lock().unwrap().holders = vec![endpoint];
    upsert_without(&cluster, &store).await;
    assert_eq!(cluster.calls("acquire_lease"), 1, "one try");
}

#[tokio::test]
async fn a_base_that_the_node_refuses_is_given_up_and_the_upsert_goes_on() {
    let cluster = Cluster::start().await;
    let (_, second, _) = cluster.another_node("node-2").await;
    let store = cluster.store(Route::Tcp).await;
    base_on(&cluster, &store, &[second]).await;
    cluster.desk.lock().unwrap().vouches_not = true;
    upsert_without(&cluster, &store).await;
    assert_eq!(cluster.calls("acquire_lease"), 1, "one try");
}

#[tokio::test]
async fn a_base_that_comes_into_memory_meanwhile_is_no_change_and_another_policy_is() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    base_on(&cluster, &store, &[]).await;
    let before = cluster.desk.lock().unwrap().base.clone().unwrap();
    let mut later = before.clone();
    later.metadata_generation += 2;
    later.policy.migration_mode = MigrationMode::Manual;
    later.policy.preferred_residency = Residency::Cold;
    assert_ne!(later.policy, before.policy);
    cluster.desk.lock().unwrap().base_later = Some(later.clone());
    let error = apply(&store, Some(before.metadata_generation), None).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::StaleGeneration, "{error}");

    let mut warm = later.clone();
    warm.metadata_generation += 2;
    warm.residency = if warm.residency == Residency::Hot { Residency::Mixed } else { Residency::Hot };
    cluster.desk.lock().unwrap().base_later = Some(warm);
    apply(&store, Some(later.metadata_generation), None).await.unwrap();
    expect_target(&cluster, &cluster.node);
}

#[tokio::test]
async fn a_request_that_is_still_open_is_resumed_whatever_its_base_has_become() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    base_on(&cluster, &store, &[]).await;
    // The import can not begin: the claim stays.
    cluster.refuse("begin_import", ErrorCode::PolicyUnsatisfiable, json!({}), 1);
    cluster.desk.lock().unwrap().phases = vec![ClaimPhase::PreparingTarget];
    let error = apply(&store, None, Some("mine")).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::PolicyUnsatisfiable, "{error}");
    cluster.desk.lock().unwrap().base.as_mut().unwrap().metadata_generation += 3;
    apply(&store, None, Some("mine")).await.unwrap();
    assert_eq!(cluster.desk.lock().unwrap().claim.as_ref().unwrap().mode, UpsertMode::PutFirst);
    expect_target(&cluster, &cluster.node);
}

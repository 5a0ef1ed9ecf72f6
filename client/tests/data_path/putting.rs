//! Puts: what moves, what is waited for, what is given up.

use std::sync::{Arc, Mutex};

use ballast_client::{Phase, Progress, Route, Source, TensorData, TensorSource, Transport, WeightStore};
use ballast_schemas::{Availability, ErrorCode, Residency, WeightStoragePolicy};
use bytes::Bytes;
use serde_json::json;

use crate::cluster::{Cluster, eventually, identity, over_tcp};

pub fn content(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| (n as u32).wrapping_mul(2_654_435_761).rotate_left(7) as u8 ^ seed).collect()
}

pub fn tensor(name: &str, bytes: Vec<u8>) -> TensorSource {
    let data = TensorData::Bytes(Bytes::from(bytes));
    let shape = match &data {
        TensorData::Bytes(bytes) => vec![bytes.len() as u64],
        _ => vec![],
    };
    TensorSource { name: name.into(), dtype: "U8".into(), shape, aliases: vec![], data }
}

/// Tensors in memory and in a file, one of them larger than what travels in one piece, one empty, one tied.
pub fn sample(cluster: &Cluster) -> Source {
    let file = cluster.scratch.path().join("weights.bin");
    std::fs::write(&file, content(9, 9 << 20)).unwrap();
    let in_file = |name: &str, offset: u64, bytes: u64| TensorSource {
        name: name.into(),
        dtype: "U8".into(),
        shape: vec![bytes],
        aliases: vec![],
        data: TensorData::File { path: file.clone(), offset },
    };
    let mut tied = tensor("tied", content(1, 1000));
    tied.aliases = vec!["embed".into()];
    let tensors = vec![
        in_file("large", 0, 9 << 20),
        in_file("part", 100, 4097),
        tensor("memory", content(2, 300_000)),
        tensor("empty", vec![]),
        tied,
    ];
    Source::from_tensors(tensors).unwrap()
}

async fn put_and_look(route: Route, transport: Transport) {
    let cluster = Cluster::start().await;
    let store = cluster.store(route).await;
    let phases = Arc::new(Mutex::new(Vec::new()));
    let seen = phases.clone();
    let progress = Progress::new(move |update| {
        assert!(update.done_bytes <= update.total_bytes);
        seen.lock().unwrap().push((update.phase, update.done_bytes));
    });
    let writer = store.weight_put(sample(&cluster), &identity(1), None, progress).await.unwrap();
    assert_eq!(writer.identity(), &identity(1));
    let report = writer.commit().await.unwrap();
    assert_eq!(report.revision.availability, Availability::Ready);
    assert_eq!((report.existed, report.transport), (false, Some(transport)));
    let total = (9 << 20) + 4097 + 300_000 + 1000;
    assert_eq!(report.bytes, total);
    let phases = phases.lock().unwrap();
    assert!(phases.contains(&(Phase::Writing, total)) && phases.iter().any(|(phase, _)| *phase == Phase::Committing));
    assert_eq!(cluster.calls("abort_import"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_on_the_same_host_publishes_files_and_memory() {
    put_and_look(Route::Best, Transport::Local).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_over_tcp_publishes_files_and_memory() {
    put_and_look(Route::Tcp, over_tcp().1).await;
}

#[tokio::test]
async fn a_put_repeated_with_the_same_content_finds_the_revision_and_with_other_content_conflicts() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let put = |bytes: Vec<u8>| {
        let store = store.clone();
        async move {
            let source = Source::from_tensors(vec![tensor("w", bytes)]).unwrap();
            store.weight_put(source, &identity(1), None, Progress::none()).await?.commit().await
        }
    };
    let first = put(content(1, 5000)).await.unwrap();
    let again = put(content(1, 5000)).await.unwrap();
    assert!(again.existed && !first.existed);
    assert_eq!(again.revision.manifest, first.revision.manifest);
    let other = put(content(2, 5000)).await.unwrap_err();
    assert_eq!(other.code, ErrorCode::Conflict);
    assert!(other.message.contains("\"w\" differs"), "{other}");
    let other = put(content(1, 4999)).await.unwrap_err();
    assert_eq!(other.code, ErrorCode::Conflict);
    assert!(cluster.desk.lock().unwrap().leases.is_empty());
}

#[tokio::test]
async fn a_put_waits_for_what_passes_and_says_so() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    cluster.refuse("begin_import", ErrorCode::Busy, json!({"session_id": "another"}), 1);
    cluster.refuse("begin_import", ErrorCode::Busy, json!({"operation_id": "op-1.0"}), 1);
    cluster.refuse("begin_import", ErrorCode::CapacityExhausted, json!({"making_room": true}), 1);
    let notes = Arc::new(Mutex::new(Vec::new()));
    let seen = notes.clone();
    let progress = Progress::new(move |update| seen.lock().unwrap().extend(update.note.clone()));
    let source = Source::from_tensors(vec![tensor("w", content(1, 10))]).unwrap();
    store.weight_put(source, &identity(1), None, progress).await.unwrap().commit().await.unwrap();
    assert_eq!(cluster.calls("begin_import"), 4);
    assert_eq!(notes.lock().unwrap().len(), 3);
}

#[tokio::test]
async fn the_policy_of_a_put_goes_before_that_of_the_store_and_both_before_the_clusters() {
    let cluster = Cluster::start().await;
    let given = |preferred| Some(WeightStoragePolicy { preferred_residency: preferred, ..Default::default() });
    for (of_put, of_store, expected) in [
        (given(Residency::Hot), given(Residency::Cold), given(Residency::Hot)),
        (None, given(Residency::Cold), given(Residency::Cold)),
        (None, None, None),
    ] {
        let gateway = cluster.gateway(Route::Best).await;
        let store = match of_store {
            Some(policy) => WeightStore::with_default_policy(gateway.clone(), policy),
            None => WeightStore::new(gateway.clone()),
        };
        let source = Source::from_tensors(vec![tensor("w", content(1, 10))]).unwrap();
        let writer = store.weight_put(source, &identity(1), of_put, Progress::none()).await.unwrap();
        assert_eq!(cluster.desk.lock().unwrap().begun_with, expected, "what the gateway is told; none: the cluster's");
        writer.abort().await.unwrap();
    }
}

#[tokio::test]
async fn a_put_into_a_claimed_lineage_is_refused_at_once() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    cluster.refuse("begin_import", ErrorCode::Busy, json!({"request_id": "r", "operation_id": "op-1.0"}), 1);
    let source = Source::from_tensors(vec![tensor("w", content(1, 10))]).unwrap();
    let error = store.weight_put(source, &identity(1), None, Progress::none()).await.unwrap_err();
    assert_eq!((error.code, cluster.calls("begin_import")), (ErrorCode::Busy, 1));
    assert_eq!(cluster.calls("abort_import"), 0, "nothing was opened");
}

#[tokio::test]
async fn a_dropped_writer_aborts_its_import() {
    let cluster = Cluster::start().await;
    let gateway = cluster.gateway(Route::Best).await;
    let store = ballast_client::WeightStore::new(gateway.clone());
    let source = Source::from_tensors(vec![tensor("w", content(1, 10))]).unwrap();
    drop(store.weight_put(source, &identity(1), None, Progress::none()).await.unwrap());
    gateway.settle(crate::cluster::PATIENCE).await;
    assert_eq!(cluster.calls("abort_import"), 1);
    assert!(cluster.desk.lock().unwrap().session.is_none());
}

#[tokio::test]
async fn a_model_that_does_not_fit_is_refused_with_numbers_and_leaves_no_session() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let file = cluster.scratch.path().join("huge");
    std::fs::File::create(&file).unwrap().set_len(100 << 20).unwrap();
    let huge = TensorSource {
        name: "w".into(),
        dtype: "U8".into(),
        shape: vec![100 << 20],
        aliases: vec![],
        data: TensorData::File { path: file, offset: 0 },
    };
    let source = Source::from_tensors(vec![huge]).unwrap();
    let error = store.weight_put(source, &identity(1), None, Progress::none()).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::CapacityExhausted);
    assert!(error.details.to_string().contains("104857600"), "{error}: {}", error.details);
    let tries = cluster.calls("begin_import");
    assert!(tries > 1, "what the gateway thought was there may be on its way");
    assert_eq!(cluster.calls("abort_import"), tries);
}

#[tokio::test]
async fn a_file_that_changes_under_a_put_is_noticed_and_the_import_aborted() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let writer = store.weight_put(sample(&cluster), &identity(1), None, Progress::none()).await.unwrap();
    std::fs::write(cluster.scratch.path().join("weights.bin"), b"short").unwrap();
    let error = writer.commit().await.unwrap_err();
    assert!(error.code == ErrorCode::InvalidArgument && error.message.contains("was changed"), "{error}");
    assert_eq!((cluster.calls("abort_import"), cluster.calls("commit_import")), (1, 0));
}

#[tokio::test]
async fn tensors_may_come_one_by_one_and_a_missing_one_is_named() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let later = |name: &str, bytes: u64| TensorSource {
        name: name.into(),
        dtype: "U8".into(),
        shape: vec![bytes],
        aliases: vec![],
        data: TensorData::Later,
    };
    let source = || Source::from_tensors(vec![later("a", 6_000_000), later("b", 3), later("c", 0)]).unwrap();
    let mut writer = store.weight_put(source(), &identity(1), None, Progress::none()).await.unwrap();
    assert!(writer.put_tensor("nobody", b"").await.unwrap_err().message.contains("nobody"));
    assert!(writer.put_tensor("b", b"12").await.unwrap_err().message.contains("3 bytes, 2"));
    writer.put_tensor("a", &content(1, 6_000_000)).await.unwrap();
    let error = writer.commit().await.unwrap_err();
    assert!(error.message.contains("(b, c)"), "{error}");
    eventually("the import is aborted", || cluster.calls("abort_import") == 1).await;

    let mut writer = store.weight_put(source(), &identity(1), None, Progress::none()).await.unwrap();
    writer.put_tensor("a", &content(7, 6_000_000)).await.unwrap();
    writer.put_tensor("a", &content(1, 6_000_000)).await.unwrap();
    writer.put_tensor("b", b"123").await.unwrap();
    writer.put_tensor("c", b"").await.unwrap();
    let report = writer.commit().await.unwrap();
    assert_eq!(report.revision.availability, Availability::Ready);
}

#[tokio::test]
async fn an_empty_source_is_refused() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let source = Source::from_tensors(vec![]).unwrap();
    let error = store.weight_put(source, &identity(1), None, Progress::none()).await.unwrap_err();
    assert!(error.message.contains("at least one tensor"), "{error}");
}

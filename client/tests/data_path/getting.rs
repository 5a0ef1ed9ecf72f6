//! Gets and opens: from memory, from disk, over TCP; damaged copies, lapsed leases, cancelled reads.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use ballast_client::{
    GetOptions, GetTarget, OpenRevision, Progress, Route, Source, Transport, Verify, WeightStore, safetensors,
};
use ballast_schemas::{BallastError, ErrorCode};

use crate::cluster::{Cluster, PATIENCE, eventually, identity, over_tcp};
use crate::putting::{content, sample, tensor};

async fn put(cluster: &Cluster, source: Source) {
    let store = cluster.store(Route::Best).await;
    store.weight_put(source, &identity(1), None, Progress::none()).await.unwrap().commit().await.unwrap();
}

const SIZES: [(&str, usize); 6] =
    [("large", 9 << 20), ("part", 4097), ("memory", 300_000), ("empty", 0), ("tied", 1000), ("embed", 1000)];

async fn get_all(
    store: &WeightStore,
    options: GetOptions,
) -> Result<(BTreeMap<String, Vec<u8>>, ballast_client::GetReport), BallastError> {
    let mut buffers: BTreeMap<String, Vec<u8>> =
        SIZES.iter().map(|(name, bytes)| ((*name).to_owned(), vec![0xee; *bytes])).collect();
    let named = buffers.iter_mut().map(|(name, buffer)| (name.clone(), buffer.as_mut_slice())).collect();
    let report = store.weight_get(&identity(1), GetTarget::Buffers(named), options).await?;
    Ok((buffers, report))
}

fn expect_sample(found: &BTreeMap<String, Vec<u8>>) {
    let file = content(9, 9 << 20);
    assert!(found["large"] == file, "large differs");
    assert!(found["part"] == file[100..100 + 4097], "part differs");
    assert!(found["memory"] == content(2, 300_000), "memory differs");
    assert!(found["tied"] == content(1, 1000) && found["embed"] == content(1, 1000), "a tied tensor differs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buffers_are_filled_from_memory_disk_and_both_on_every_route() {
    let cluster = Cluster::start().await;
    put(&cluster, sample(&cluster)).await;
    for cold in [0..0, 0..2, 0..5] {
        cluster.make_cold(cold.clone());
        for (route, transport) in [(Route::Best, Transport::Local), (Route::Tcp, Transport::Tcp)] {
            for verify in [Verify::Auto, Verify::Always, Verify::Never] {
                let store = cluster.store(route).await;
                let (found, report) = get_all(&store, GetOptions { verify, ..GetOptions::default() }).await.unwrap();
                expect_sample(&found);
                // What is on disk comes over TCP.
                let transport = if route == Route::Tcp && cold.end < 5 { over_tcp().1 } else { transport };
                assert_eq!(report.transport, Some(transport));
                assert_eq!(report.why_not_rdma.is_some(), transport == Transport::Tcp);
                assert_eq!(report.bytes, (9 << 20) + 4097 + 300_000 + 1000);
                assert_eq!(report.cold_bytes == 0, cold.is_empty(), "{cold:?}");
                assert_eq!(report.hot_bytes == 0, cold.end == 5, "{cold:?}");
            }
        }
    }
    assert!(cluster.desk.lock().unwrap().leases.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_revision_shows_its_tensors_in_place_and_releases_its_lease() {
    let cluster = Cluster::start().await;
    put(&cluster, sample(&cluster)).await;
    for (route, cold) in [(Route::Best, 0..0), (Route::Best, 0..2), (Route::Tcp, 0..2)] {
        cluster.make_cold(cold.clone());
        let gateway = cluster.gateway(route).await;
        let store = WeightStore::new(gateway.clone());
        let open =
            OpenRevision::open(&store, &identity(1), GetOptions { verify: Verify::Always, ..GetOptions::default() })
                .await
                .unwrap();
        assert_eq!(open.tensor("memory").unwrap().bytes, content(2, 300_000));
        assert_eq!(open.tensor("tied").unwrap().bytes, content(1, 1000));
        assert_eq!(open.tensor("embed").unwrap().bytes, content(1, 1000));
        assert_eq!(open.tensor("large").unwrap().bytes.len(), 9 << 20);
        assert_eq!((open.tensor("empty").unwrap().bytes, open.shape("empty").unwrap()), (&[][..], vec![0]));
        assert!(open.tensor("nobody").is_none() && open.file("nothing").is_none());
        let all_mapped = route == Route::Best && cold.is_empty();
        assert_eq!(open.mapped_bytes() == open.manifest().logical_bytes(), all_mapped);
        assert_eq!(cluster.desk.lock().unwrap().leases.len(), 1);
        if cold.is_empty() {
            drop(open);
            gateway.settle(PATIENCE).await;
        } else {
            open.close().await.unwrap();
        }
        assert!(cluster.desk.lock().unwrap().leases.is_empty());
    }
}

fn model_folder(cluster: &Cluster) -> std::path::PathBuf {
    let folder = cluster.scratch.path().join("model");
    std::fs::create_dir_all(folder.join("sub")).unwrap();
    let bytes: Vec<(String, Vec<u8>)> =
        (0..40).map(|n| (format!("layer.{n}.weight"), content(n, 70_000 + usize::from(n)))).collect();
    let view = |bytes| {
        ::safetensors::tensor::TensorView::new(::safetensors::Dtype::U8, vec![<[u8]>::len(bytes)], bytes).unwrap()
    };
    let views = bytes.iter().map(|(name, bytes)| (name.as_str(), view(bytes.as_slice())));
    std::fs::write(folder.join("model.safetensors"), ::safetensors::serialize(views, None).unwrap()).unwrap();
    std::fs::write(folder.join("config.json"), b"{\"a\": 1}").unwrap();
    std::fs::write(folder.join("sub/vocab.txt"), content(3, 5_000_000)).unwrap();
    std::fs::write(folder.join("sub/empty"), b"").unwrap();
    folder
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_folder_comes_back_byte_for_byte_on_every_route_from_every_tier() {
    let cluster = Cluster::start().await;
    let folder = model_folder(&cluster);
    put(&cluster, safetensors::open(&folder).unwrap()).await;
    for (turn, cold) in [0..0, 5..20, 0..44].into_iter().enumerate() {
        cluster.make_cold(cold);
        for route in [Route::Best, Route::Tcp] {
            let out = cluster.scratch.path().join(format!("out-{turn}-{route:?}"));
            let store = cluster.store(route).await;
            let target = GetTarget::Directory { path: &out, overwrite: false };
            let report = store.weight_get(&identity(1), target, GetOptions::default()).await.unwrap();
            assert_eq!(report.files.len(), 4);
            for file in ["model.safetensors", "config.json", "sub/vocab.txt", "sub/empty"] {
                assert!(
                    std::fs::read(folder.join(file)).unwrap() == std::fs::read(out.join(file)).unwrap(),
                    "{file} differs"
                );
            }
            assert_eq!(std::fs::read_dir(&out).unwrap().count(), 3, "the record is not one of the model's files");
        }
    }
}

/// Flips one byte in every copy on disk of every unit.
fn damage_cold(cluster: &Cluster) {
    for path in cluster.cold_files() {
        let mut bytes = std::fs::read(&path).unwrap();
        // The segment's own bytes, not the node's records, are what readers are given.
        if bytes.len() > 1 << 20 {
            bytes[500] ^= 1;
            std::fs::write(&path, bytes).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_rotted_on_disk_are_refused_by_name_and_nothing_appears() {
    let cluster = Cluster::start().await;
    put(
        &cluster,
        Source::from_tensors(vec![tensor("rotten", content(1, 3 << 20)), tensor("sound", content(2, 3 << 20))])
            .unwrap(),
    )
    .await;
    cluster.make_cold(0..2);
    damage_cold(&cluster);
    for route in [Route::Best, Route::Tcp] {
        let store = cluster.store(route).await;
        let out = cluster.scratch.path().join("out");
        let target = GetTarget::Directory { path: &out, overwrite: false };
        let error = store.weight_get(&identity(1), target, GetOptions::default()).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::ChecksumMismatch, "{route:?}: {error}");
        assert!(error.message.contains("rotten") && !error.message.contains("sound"), "{error}");
        assert!(!out.exists());
        let mut buffer = vec![0; 3 << 20];
        let named = BTreeMap::from([("rotten".to_owned(), buffer.as_mut_slice())]);
        let error = store.weight_get(&identity(1), GetTarget::Buffers(named), GetOptions::default()).await.unwrap_err();
        // A node that has noticed does not offer the copy any more.
        let noticed =
            route == Route::Tcp && error.code == ErrorCode::Unavailable && error.message.contains("needs repair");
        assert!(error.code == ErrorCode::ChecksumMismatch || noticed, "{route:?}: {error}");
        let named = BTreeMap::from([("sound".to_owned(), buffer.as_mut_slice())]);
        store.weight_get(&identity(1), GetTarget::Buffers(named), GetOptions::default()).await.unwrap();
        assert!(buffer == content(2, 3 << 20));
    }
    eventually("every lease is released", || cluster.desk.lock().unwrap().leases.is_empty()).await;
}

#[tokio::test]
async fn a_read_whose_lease_had_lapsed_does_not_count() {
    let cluster = Cluster::start().await;
    put(&cluster, sample(&cluster)).await;
    cluster.desk.lock().unwrap().lapsed = true;
    for route in [Route::Best, Route::Tcp] {
        let store = cluster.store(route).await;
        let out = cluster.scratch.path().join("out");
        let target = GetTarget::Directory { path: &out, overwrite: false };
        let error = store.weight_get(&identity(1), target, GetOptions::default()).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::LeaseExpired);
        assert!(!out.exists());
        assert_eq!(get_all(&store, GetOptions::default()).await.unwrap_err().code, ErrorCode::LeaseExpired);
        let open = OpenRevision::open(&store, &identity(1), GetOptions::default()).await.unwrap();
        assert_eq!(open.close().await.unwrap_err().code, ErrorCode::LeaseExpired);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_changed_in_memory_are_refused_by_name() {
    let cluster = Cluster::start().await;
    let tensors = vec![tensor("changed", content(1, 3 << 20)), tensor("sound", content(2, 3 << 20))];
    put(&cluster, Source::from_tensors(tensors).unwrap()).await;
    let mut segments = cluster.memory_files();
    segments.retain(|path| std::fs::metadata(path).unwrap().len() > 1 << 20);
    for path in &segments {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 500).unwrap();
        file.write_all_at(&[byte[0] ^ 1], 500).unwrap();
    }
    let store = cluster.store(Route::Tcp).await;
    let mut buffers = [vec![0; 3 << 20], vec![0; 3 << 20]];
    let named = ["changed", "sound"].map(str::to_owned).into_iter().zip(buffers.iter_mut().map(Vec::as_mut_slice));
    let target = GetTarget::Buffers(named.collect());
    let error = store.weight_get(&identity(1), target, GetOptions::default()).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::ChecksumMismatch, "{error}");
    assert!(error.message.contains("changed") && !error.message.contains("sound"), "{error}");
}

#[tokio::test]
async fn a_lease_that_is_not_renewed_any_more_is_known_to_lapse_but_its_views_stay() {
    let cluster = Cluster::start().await;
    put(&cluster, sample(&cluster)).await;
    let store = cluster.store(Route::Best).await;
    // The gateway refuses every renewal: the revision is being replaced.
    let options = GetOptions { lease_ttl_ms: 300, ..GetOptions::default() };
    let open = OpenRevision::open(&store, &identity(1), options).await.unwrap();
    eventually("the lease lapses", || open.lease_lapsed()).await;
    assert_eq!(cluster.calls("renew_lease"), 1);
    assert_eq!(open.tensor("memory").unwrap().bytes, content(2, 300_000));
}

#[tokio::test]
async fn a_cancelled_get_releases_its_lease_and_leaves_nothing() {
    let cluster = Cluster::start().await;
    put(&cluster, sample(&cluster)).await;
    let gateway = cluster.gateway(Route::Tcp).await;
    let store = WeightStore::new(gateway.clone());
    let out = cluster.scratch.path().join("out");
    let (begun, wait) = tokio::sync::oneshot::channel();
    let begun = std::sync::Mutex::new(Some(begun));
    let progress = Progress::new(move |update| {
        if update.done_bytes > 0
            && let Some(begun) = begun.lock().unwrap().take()
        {
            let _ = begun.send(());
        }
    });
    let options = GetOptions { progress, ..GetOptions::default() };
    let (revision, target) = (identity(1), GetTarget::Directory { path: &out, overwrite: false });
    tokio::select! {
        _ = store.weight_get(&revision, target, options) => panic!("the read was over before it was cancelled"),
        begun = wait => begun.unwrap(),
    }
    gateway.settle(PATIENCE).await;
    assert!(cluster.desk.lock().unwrap().leases.is_empty());
    eventually("the staging folder is gone", || {
        !std::fs::read_dir(cluster.scratch.path())
            .unwrap()
            .any(|entry| entry.unwrap().file_name().to_string_lossy().contains(".ballast-"))
    })
    .await;
    assert!(!out.exists());
}

#[tokio::test]
async fn what_can_not_be_read_is_refused_before_any_lease_stays() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let get = |name: &str, bytes: usize| {
        let (store, name) = (store.clone(), name.to_owned());
        async move {
            let mut buffer = vec![0; bytes];
            let named = BTreeMap::from([(name, buffer.as_mut_slice())]);
            store.weight_get(&identity(1), GetTarget::Buffers(named), GetOptions::default()).await.unwrap_err()
        }
    };
    assert_eq!(get("w", 1).await.code, ErrorCode::NotFound);
    put(&cluster, sample(&cluster)).await;
    assert!(get("nobody", 1).await.message.contains("nobody"));
    assert!(get("memory", 1).await.message.contains("300000"));
    let out = cluster.scratch.path().join("taken");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("model.safetensors"), b"mine").unwrap();
    let target = GetTarget::Directory { path: &out, overwrite: false };
    let error = store.weight_get(&identity(1), target, GetOptions::default()).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Conflict);
    assert_eq!(std::fs::read(out.join("model.safetensors")).unwrap(), b"mine");
    eventually("every lease is released", || cluster.desk.lock().unwrap().leases.is_empty()).await;
}

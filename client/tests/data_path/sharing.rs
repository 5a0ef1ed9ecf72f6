//! Puts of several participants: what is sent again, who is waited for, and what a successor of the coordinator finds.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_client::{
    OpenRevision, PartWriter, Phase, Progress, ProgressUpdate, PutWriter, Route, ShardedTensor, Sharing, Source,
    TensorData, TensorSource, WeightStore,
};
use ballast_schemas::{Availability, BallastError, ErrorCode, LogTime, NodeEndpoint, NodeId, ParticipantId, SessionId};
use ballast_transfer::DataPlaneOptions;
use serde_json::json;

use crate::cluster::{Cluster, LOG_CLOCK, PATIENCE, eventually, identity, now_unix_ms};
use crate::putting::content;

const SIZES: [(&str, u64); 4] = [("a", 1000), ("b", 300), ("large", 600 << 10), ("none", 0)];

fn rank(number: u32) -> ParticipantId {
    ParticipantId::new(format!("rank{number}")).unwrap()
}

fn session() -> SessionId {
    SessionId::new("step-7").unwrap()
}

fn source() -> Source {
    let tensor = |(name, bytes): (&str, u64)| TensorSource {
        name: name.into(),
        dtype: "U8".into(),
        shape: vec![bytes],
        aliases: vec![],
        data: TensorData::Later,
    };
    Source::from_tensors(SIZES.map(tensor).to_vec()).unwrap()
}

fn bytes_of(name: &str) -> Vec<u8> {
    let (at, (_, bytes)) = SIZES.iter().enumerate().find(|(_, (own, _))| *own == name).unwrap();
    content(at as u8, *bytes as usize)
}

fn sharing(participant: Option<u32>, ranks: u32) -> Sharing {
    Sharing {
        participants: (0..ranks).map(rank).collect(),
        participant: participant.map(rank),
        session_id: Some(session()),
        patience: Duration::ZERO,
    }
}

async fn share(store: &WeightStore, sharing: Sharing) -> Result<PutWriter, BallastError> {
    store.weight_put(source().shared(sharing), &identity(1), None, Progress::none()).await
}

async fn try_join(store: &WeightStore, number: u32) -> Result<PartWriter, BallastError> {
    PartWriter::join(store, source(), &identity(1), &session(), &rank(number), Progress::none()).await
}

async fn join(store: &WeightStore, number: u32) -> PartWriter {
    try_join(store, number).await.unwrap()
}

/// Connects under tokens that end soon, yet not before it has connected, however slow the machine is. Also when they have ended.
async fn with_short_tokens<T>(cluster: &Cluster, connect: impl AsyncFn() -> Result<T, BallastError>) -> (T, u64) {
    let mut lives_ms = 1_000;
    loop {
        cluster.desk.lock().unwrap().tokens_ms = Some(lives_ms);
        match connect().await {
            Ok(connected) => return (connected, now_unix_ms() + lives_ms),
            Err(error) if error.code == ErrorCode::Unauthorized && lives_ms < 60_000 => lives_ms *= 2,
            Err(error) => panic!("{error}"),
        }
    }
}

async fn expect_all(cluster: &Cluster) {
    let store = cluster.store(Route::Best).await;
    let open = OpenRevision::open(&store, &identity(1), Default::default()).await.unwrap();
    for (name, _) in SIZES {
        assert_eq!(open.tensor(name).unwrap().bytes, bytes_of(name), "{name}");
    }
    open.close().await.unwrap();
}

#[tokio::test]
async fn a_coordinator_that_comes_after_the_seal_commits_what_its_predecessor_sealed() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let mut first = share(&store, sharing(Some(0), 1)).await.unwrap();
    for (name, bytes) in SIZES.into_iter().filter(|(_, bytes)| *bytes > 0) {
        assert_eq!(bytes_of(name).len() as u64, bytes);
        first.put_tensor(name, &bytes_of(name)).await.unwrap();
    }
    // It ends between the seal and the commit, and nobody hears that it gave up.
    cluster.refuse("commit_import", ErrorCode::LeaseExpired, json!({}), 1);
    cluster.refuse("abort_import", ErrorCode::LeaseExpired, json!({}), 1);
    first.commit().await.unwrap_err();
    let again = share(&store, sharing(Some(0), 1)).await.unwrap();
    let report = again.commit().await.unwrap();
    assert_eq!(report.revision.availability, Availability::Ready);
    expect_all(&cluster).await;
}

#[tokio::test]
async fn a_node_that_closed_an_idle_connection_is_connected_to_again() {
    let idle = Duration::from_millis(200);
    let cluster = Cluster::start_with(DataPlaneOptions { idle, ..Default::default() }).await;
    for route in [Route::Unix, Route::Tcp] {
        let store = cluster.store(route).await;
        let mut first = share(&store, sharing(Some(0), 2)).await.unwrap();
        let mut second = join(&store, 1).await;
        for name in ["a", "b"] {
            // Longer than the node waits for a request.
            tokio::time::sleep(5 * idle).await;
            first.put_tensor(name, &bytes_of(name)).await.unwrap();
        }
        second.put_tensor("large", &bytes_of("large")).await.unwrap();
        tokio::time::sleep(5 * idle).await;
        second.finish().await.unwrap();
        let report = first.commit().await.unwrap();
        assert_eq!(report.revision.availability, Availability::Ready);
        cluster.desk.lock().unwrap().record = None;
    }
}

#[tokio::test]
async fn a_box_that_another_has_otherwise_takes_nothing_else_along() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let mut first = share(&store, sharing(Some(0), 2)).await.unwrap();
    let mut second = join(&store, 1).await;
    first.put_tensor("b", &bytes_of("b")).await.unwrap();
    first.put_tensor("large", &bytes_of("large")).await.unwrap();
    let mut wrong = bytes_of("b");
    wrong[7] ^= 1;
    second.put_tensor("a", &bytes_of("a")).await.unwrap();
    second.put_tensor("b", &wrong).await.unwrap();
    let refused = second.put_tensor("large", &bytes_of("large")).await.unwrap_err();
    assert_eq!((refused.code, &refused.details["tensor"]), (ErrorCode::Conflict, &"b".into()), "{refused}");
    assert!(refused.message.contains("rank0 and rank1 hold different bytes for tensor \"b\""), "{refused}");
    second.put_tensor("b", &bytes_of("b")).await.unwrap();
    second.put_tensor("large", &bytes_of("large")).await.unwrap();
    second.finish().await.unwrap();
    first.commit().await.unwrap();
    expect_all(&cluster).await;
}

#[tokio::test]
async fn a_box_that_is_given_again_and_again_is_there_as_it_was_given_last() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let mut first = share(&store, sharing(Some(0), 1)).await.unwrap();
    first.put_tensor("a", &bytes_of("a")).await.unwrap();
    first.put_tensor("large", &bytes_of("large")).await.unwrap();
    first.put_tensor("a", &content(77, 1000)).await.unwrap();
    first.put_tensor("a", &bytes_of("a")).await.unwrap();
    first.put_tensor("b", &bytes_of("b")).await.unwrap();
    first.commit().await.unwrap();
    expect_all(&cluster).await;
}

#[tokio::test]
async fn the_silent_are_named_and_not_those_at_work() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let first = share(&store, sharing(None, 5)).await.unwrap();
    let _at_work = join(&store, 0).await;
    join(&store, 1).await.finish().await.unwrap();
    for (number, ago) in [(2, 20_000), (3, 60_000)] {
        drop(join(&store, number).await);
        let mut desk = cluster.desk.lock().unwrap();
        desk.parts.get_mut(&rank(number)).unwrap().heard_at = LogTime(LOG_CLOCK.0 - ago);
    }
    let refused = first.commit().await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::NotReady, "{refused}");
    assert_eq!(refused.details["participants"], json!(["rank4", "rank3", "rank2"]));
    let said =
        "3 of 5 participants are silent and have not brought their part: rank4 has not joined, rank3 was last heard of";
    assert!(refused.message.contains(said) && refused.message.contains("1 others are at work"), "{refused}");
}

async fn put_all(part: &mut PartWriter, names: &[&str]) {
    for name in names {
        part.put_tensor(name, &bytes_of(name)).await.unwrap();
    }
}

#[tokio::test]
async fn a_participant_tells_how_far_it_is() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let first = share(&store, sharing(None, 1)).await.unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let hears = told.clone();
    let progress = Progress::new(move |update: &ProgressUpdate| {
        hears.lock().unwrap().push((update.phase, update.done_bytes, update.total_bytes));
    });
    let mut part =
        PartWriter::join(&store, source(), &identity(1), &session(), &rank(0), progress.clone()).await.unwrap();
    put_all(&mut part, &["a", "large", "b"]).await;
    part.finish().await.unwrap();
    let (large, all) = (600 << 10, 1300 + (600 << 10));
    let expected = [
        (Phase::Writing, 1000, 0),
        (Phase::Writing, 1000 + large, 0),
        (Phase::Writing, all, 0),
        (Phase::Sealing, 0, all),
        (Phase::Sealing, all, all),
    ];
    assert_eq!(*told.lock().unwrap(), expected);
    first.commit().await.unwrap();
}

#[tokio::test]
async fn the_repeat_of_a_job_whose_commit_was_not_heard_finds_it_published() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    for route in [Route::Unix, Route::Tcp] {
        let first = share(&store, sharing(None, 2)).await.unwrap();
        let mut parts = [join(&store, 0).await, join(&store, 1).await];
        put_all(&mut parts[0], &["a", "large"]).await;
        put_all(&mut parts[1], &["b", "large"]).await;
        for part in parts {
            assert!(!part.finish().await.unwrap().existed);
        }
        let committed = first.commit().await.unwrap();
        let begun = cluster.calls("begin_import");
        let other = cluster.store(route).await;
        // The same again, by the same name or by one that is made up.
        for named in [true, false] {
            let session_id = named.then(session);
            let mut again = share(&other, Sharing { session_id, ..sharing(Some(0), 2) }).await.unwrap();
            assert_eq!(again.session_id(), Some(&session()), "what the others join");
            let mut part = join(&other, 1).await;
            put_all(&mut part, &["b", "large"]).await;
            again.put_tensor("a", &bytes_of("a")).await.unwrap();
            let part = part.finish().await.unwrap();
            assert_eq!((part.existed, part.sent_bytes, part.transport), (true, 0, None));
            assert_eq!(part.bytes, (300 + (600 << 10)) as u64);
            let again = again.commit().await.unwrap();
            assert_eq!((again.existed, again.transport, &again.revision), (true, None, &committed.revision));
        }
        // Other content is refused by name, whoever has it.
        let mut wrong = bytes_of("large");
        wrong[99_999] ^= 1;
        let mut part = join(&other, 1).await;
        part.put_tensor("large", &wrong).await.unwrap();
        let refused = part.finish().await.unwrap_err();
        assert_eq!((refused.code, &refused.details["name"]), (ErrorCode::Conflict, &"large".into()), "{refused}");
        let mut again = share(&other, sharing(Some(0), 2)).await.unwrap();
        again.put_tensor("large", &wrong).await.unwrap();
        assert_eq!(again.commit().await.unwrap_err().code, ErrorCode::Conflict);
        // Whoever comes from another session is refused at once.
        let stale = SessionId::new("step-6").unwrap();
        let refused =
            PartWriter::join(&other, source(), &identity(1), &stale, &rank(1), Progress::none()).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Conflict);
        let refused = share(&other, Sharing { session_id: Some(stale), ..sharing(None, 2) }).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Conflict);
        assert_eq!(cluster.calls("begin_import"), begun + 4);
        assert_eq!(cluster.desk.lock().unwrap().leases.len(), 0, "no lease is left");
        cluster.desk.lock().unwrap().record = None;
    }
}

#[tokio::test]
async fn boxes_of_a_repeat_are_compared_with_what_is_published_of_their_tensor() {
    let cluster = Cluster::start().await;
    let sharded = |cut: u64| {
        let tensor = ShardedTensor {
            name: "w".into(),
            dtype: "U8".into(),
            shape: vec![1000],
            aliases: vec![],
            layer_id: None,
            expert_id: None,
            parallel_axes: vec![],
            fragments: vec![(vec![0], vec![cut]), (vec![cut], vec![1000 - cut])],
        };
        Source::from_shards(vec![tensor]).unwrap()
    };
    let bytes = content(3, 1000);
    for route in [Route::Unix, Route::Tcp] {
        let store = cluster.store(route).await;
        let join = async |number, source| {
            PartWriter::join(&store, source, &identity(1), &session(), &rank(number), Progress::none()).await
        };
        let whole = sharded(400).shared(sharing(None, 2));
        let first = store.weight_put(whole, &identity(1), None, Progress::none()).await.unwrap();
        let cuts = [(0, 0..400_usize), (1, 400..1000)];
        for (number, cut) in cuts.clone() {
            let mut part = join(number, sharded(400)).await.unwrap();
            part.put_fragment("w", &[cut.start as u64], &[cut.len() as u64], &bytes[cut]).await.unwrap();
            part.finish().await.unwrap();
        }
        first.commit().await.unwrap();
        for (number, cut) in cuts {
            for spoiled in [false, true] {
                let mut own = bytes[cut.clone()].to_vec();
                own[cut.len() - 1] ^= u8::from(spoiled);
                let mut part = join(number, sharded(400)).await.unwrap();
                part.put_fragment("w", &[cut.start as u64], &[cut.len() as u64], &own).await.unwrap();
                match part.finish().await {
                    Ok(report) => assert!(!spoiled && report.existed),
                    Err(refused) => {
                        assert!(spoiled && refused.code == ErrorCode::Conflict, "{refused}");
                        let named = format!("the box of [{}] at [{}] of tensor \"w\" differs", cut.len(), cut.start);
                        assert!(refused.message.contains(&named), "{refused}");
                    }
                }
            }
        }
        assert_eq!(join(1, sharded(300)).await.unwrap_err().code, ErrorCode::Conflict, "the geometry is another");
        cluster.desk.lock().unwrap().record = None;
    }
}

#[tokio::test]
async fn writers_go_on_beyond_the_end_of_their_first_tokens() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    cluster.desk.lock().unwrap().ttl_ms = Some(600);
    let (mut first, first_ends) = with_short_tokens(&cluster, || share(&store, sharing(Some(0), 2))).await;
    let (mut second, second_ends) = with_short_tokens(&cluster, || try_join(&store, 1)).await;
    put_all(&mut second, &["large"]).await;
    let until = first_ends.max(second_ends);
    eventually("the tokens of the begin and of the joins end", || now_unix_ms() > until).await;
    // On the connections of the begin, and on one that is made anew.
    put_all(&mut second, &["large", "b"]).await;
    first.put_tensor("large", &bytes_of("large")).await.unwrap();
    first.put_tensor("a", &bytes_of("a")).await.unwrap();
    second.finish().await.unwrap();
    first.commit().await.unwrap();
    expect_all(&cluster).await;
}

#[tokio::test]
async fn a_run_that_is_refused_gets_no_newer_token() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    cluster.desk.lock().unwrap().ttl_ms = Some(600);
    let _first = share(&store, sharing(None, 1)).await.unwrap();
    let (mut stale, until) = with_short_tokens(&cluster, || try_join(&store, 0)).await;
    cluster.refuse("renew_part", ErrorCode::Conflict, json!({"epoch": 2}), 1);
    eventually("it was refused, and its token ends", || now_unix_ms() > until && cluster.calls("renew_part") > 0).await;
    let refused = stale.put_tensor("large", &bytes_of("large")).await.unwrap_err();
    assert!([ErrorCode::Conflict, ErrorCode::Unauthorized].contains(&refused.code), "{refused}");
}

#[tokio::test]
async fn parts_that_went_with_a_node_are_named_with_it_and_brought_again() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Unix).await;
    let (node, endpoint, running) = cluster.another_node("node-2").await;
    {
        let mut desk = cluster.desk.lock().unwrap();
        desk.placement = vec![endpoint.clone()];
        desk.part_endpoint = Some(endpoint);
    }
    let mut process = (node, running);
    for patience in [Duration::ZERO, PATIENCE] {
        let first = share(&store, Sharing { patience, ..sharing(None, 2) }).await.unwrap();
        let mut parts = [join(&store, 0).await, join(&store, 1).await];
        put_all(&mut parts[0], &["a", "large"]).await;
        put_all(&mut parts[1], &["large"]).await;
        let [done, mut writing] = parts;
        done.finish().await.unwrap();
        process = cluster.restart("node-2", process).await;
        let cut = writing.put_tensor("large", &bytes_of("large")).await.unwrap_err();
        assert_eq!((cut.code, &cut.details["restarted_nodes"]), (ErrorCode::Unavailable, &json!(["node-2"])), "{cut}");
        assert!(cut.message.contains("node node-2 was restarted since the import began"), "{cut}");
        let mut again = join(&store, 1).await;
        put_all(&mut again, &["b", "large"]).await;
        again.finish().await.unwrap();
        if patience.is_zero() {
            let lost = first.commit().await.unwrap_err();
            assert_eq!(lost.code, ErrorCode::NotReady, "{lost}");
            let named = json!({"participants": ["rank0"], "restarted_nodes": ["node-2"]});
            assert_eq!(lost.details, named);
            assert!(
                lost.message.contains("node node-2 was restarted after 1 of 2 participants had finished"),
                "{lost}"
            );
            continue;
        }
        let committing = tokio::spawn(first.commit());
        eventually("the coordinator looks", || cluster.calls("get_import") > 3).await;
        assert!(!committing.is_finished());
        let mut again = join(&store, 0).await;
        put_all(&mut again, &["a", "large"]).await;
        again.finish().await.unwrap();
        assert_eq!(committing.await.unwrap().unwrap().revision.availability, Availability::Ready);
    }
}

#[tokio::test]
async fn a_coordinator_whose_own_part_is_lost_waits_for_nobody() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Unix).await;
    let (node, endpoint, running) = cluster.another_node("node-2").await;
    {
        let mut desk = cluster.desk.lock().unwrap();
        desk.placement = vec![endpoint.clone()];
        desk.part_endpoint = Some(endpoint);
    }
    let mut first = share(&store, Sharing { patience: PATIENCE * 100, ..sharing(Some(0), 2) }).await.unwrap();
    first.put_tensor("large", &bytes_of("large")).await.unwrap();
    let committing = tokio::spawn(first.commit());
    eventually("its own part is there", || cluster.calls("finish_part") > 0).await;
    let _process = cluster.restart("node-2", (node, running)).await;
    let lost = tokio::time::timeout(PATIENCE, committing).await.unwrap().unwrap().unwrap_err();
    assert_eq!((lost.code, &lost.details["participants"]), (ErrorCode::NotReady, &json!(["rank0"])), "{lost}");
}

#[tokio::test]
async fn a_join_that_is_given_up_half_way_gives_no_more_signs_of_life() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    let _first = share(&store, sharing(None, 1)).await.unwrap();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    {
        let mut desk = cluster.desk.lock().unwrap();
        desk.ttl_ms = Some(300);
        desk.part_endpoint = Some(NodeEndpoint {
            node: NodeId::new("node-1").unwrap(),
            host_id: "elsewhere".into(),
            unix_socket: None,
            tcp: Some(silent.local_addr().unwrap().to_string()),
        });
    }
    let before = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let joining = tokio::spawn({
        let store = store.clone();
        async move { join(&store, 0).await }
    });
    eventually("it gives signs of life", || cluster.calls("renew_part") > 1).await;
    joining.abort();
    assert!(joining.await.unwrap_err().is_cancelled());
    eventually("what it has started ends", || tokio::runtime::Handle::current().metrics().num_alive_tasks() <= before)
        .await;
}

#[tokio::test]
async fn a_put_that_is_shared_with_nobody_or_without_itself_is_refused() {
    let cluster = Cluster::start().await;
    let store = cluster.store(Route::Best).await;
    for (wrong, says) in [(sharing(None, 0), "is empty"), (sharing(Some(3), 2), "rank3 is not among the 2")] {
        let refused = share(&store, wrong).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::InvalidArgument);
        assert!(refused.message.contains(says), "{refused}");
    }
    assert_eq!(cluster.calls("begin_import"), 0);
}

//! Every verb, as far as it goes without a workflow worker.

use ballast_schemas::{ErrorCode, VERBS};
use serde_json::{Value, json};

use super::fixture::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_verb_is_an_endpoint_of_the_service() {
    let fixture = Fixture::start().await;
    let message = fixture.client.request("$SRV.INFO.ballast-gateway", "".into()).await.unwrap();
    let info: Value = serde_json::from_slice(&message.payload).unwrap();
    assert_eq!(info["type"], "io.nats.micro.v1.info_response");
    let endpoints = info["endpoints"].as_array().unwrap();
    assert_eq!(endpoints.len(), VERBS.len());
    for verb in VERBS {
        let found = endpoints.iter().find(|endpoint| endpoint["name"] == *verb).unwrap();
        assert_eq!(found["subject"], format!("ballast.v1.*.{verb}"));
        assert_eq!(found["queue_group"], "ballast-gateway");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revision_is_imported_found_read_changed_moved_and_removed() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);

    // Import: the same session is found again, another one has to wait, and only the node's own proof commits.
    let begun = fixture.call("begin_import", begin(&identity, "s1", hot())).await.unwrap();
    assert_eq!(begun["session"]["placement"], json!(["node-1"]));
    assert_eq!(begun["endpoints"][0]["tcp"], "127.0.0.1:1");
    assert!(!begun["token"].as_str().unwrap().is_empty());
    let again = fixture.call("begin_import", begin(&identity, "s1", hot())).await.unwrap();
    assert_eq!(again["session"]["instance"], begun["session"]["instance"]);
    fixture.refuse("begin_import", begin(&identity, "s2", hot()), ErrorCode::Busy).await;
    let renewed = fixture.call("renew_import", json!({"identity": identity, "session_id": "s1"})).await.unwrap();
    assert_eq!(renewed["session"]["session_id"], "s1");
    assert_eq!(fixture.call("is_exist", json!({"identity": identity})).await.unwrap()["exists"], false);
    fixture.refuse("get_size", json!({"identity": identity}), ErrorCode::NotReady).await;
    let lease = json!({"identity": identity, "lease_id": "l1", "holder": "test"});
    fixture.refuse("acquire_lease", lease.clone(), ErrorCode::NotReady).await;
    let commit =
        |sha256: &str, session: &str| json!({"identity": identity, "session_id": session, "manifest_sha256": sha256});
    let error = fixture.refuse("commit_import", commit(&"0".repeat(64), "s1"), ErrorCode::NotReady).await;
    assert!(error.message.contains("node-1"), "{error}");
    let instance = serde_json::from_value(begun["session"]["instance"].clone()).unwrap();
    let sha256 = node.seal(&identity, &instance, "s1").to_string();
    fixture.refuse("commit_import", commit(&"0".repeat(64), "s1"), ErrorCode::ChecksumMismatch).await;
    fixture.refuse("commit_import", commit(&sha256, "s2"), ErrorCode::Conflict).await;
    let committed = fixture.call("commit_import", commit(&sha256, "s1")).await.unwrap();
    assert_eq!(
        (&committed["revision"]["availability"], &committed["revision"]["residency"]),
        (&json!("READY"), &json!("HOT"))
    );
    let repeated = fixture.call("commit_import", commit(&sha256, "s1")).await.unwrap();
    assert_eq!(repeated["revision"], committed["revision"]);
    fixture.refuse("commit_import", commit(&"1".repeat(64), "s1"), ErrorCode::Conflict).await;
    fixture.refuse("begin_import", begin(&identity, "s3", hot()), ErrorCode::Conflict).await;

    // Discovery, as fresh as wanted.
    let read = json!({"identity": identity, "options": {"min_log_seq": committed["log_seq"]}});
    assert_eq!(fixture.call("is_exist", read.clone()).await.unwrap()["exists"], true);
    let linear = json!({"identity": identity, "options": {"consistency": "linearizable"}});
    let fresh = fixture.call("get_metadata", linear).await.unwrap();
    assert!(fresh["log_seq"].as_u64() > committed["log_seq"].as_u64());
    assert_eq!(
        (&fresh["metadata"]["metadata_generation"], &fresh["watermark"]),
        (&committed["revision"]["metadata_generation"], &json!(1))
    );
    assert_eq!(fixture.call("get_size", read).await.unwrap()["logical_bytes"], 8000);
    let page = fixture.call("list", json!({"resource_prefix": "mini"})).await.unwrap();
    assert_eq!(page["revisions"][0]["identity"], json!(identity));
    assert_eq!(fixture.call("list", json!({"resource_id": "other"})).await.unwrap()["revisions"], json!([]));

    // A lease: found again by its id, renewed, released.
    let granted = fixture.call("acquire_lease", lease.clone()).await.unwrap();
    assert_eq!(granted["endpoints"][0]["node"], "node-1");
    assert_eq!(granted["revision"]["manifest"]["sha256"], sha256);
    let found = fixture.call("acquire_lease", lease).await.unwrap();
    assert_eq!(found["lease"]["instance"], granted["lease"]["instance"]);
    let view = fixture.call("get_metadata", json!({"identity": identity})).await.unwrap();
    assert_eq!(view["active_lease_count"], 1);
    let renewed =
        fixture.call("renew_lease", json!({"identity": identity, "lease_id": "l1", "ttl_ms": 90_000})).await.unwrap();
    assert_eq!(renewed["lease"]["ttl_ms"], 90_000);
    let generation = |view: &Value| view["metadata_generation"].as_u64().unwrap();
    let now = generation(&committed["revision"]);
    let remove = |expected: u64| json!({"identity": identity, "expected_metadata_generation": expected});
    fixture.refuse("remove", remove(now), ErrorCode::Busy).await;
    let released = fixture.call("release_lease", json!({"identity": identity, "lease_id": "l1"})).await.unwrap();
    assert_eq!(released["lapsed"], false);

    // Policy: fenced by the generation, idempotent by the request id.
    let policy = |expected: u64, id: &str, ratio: f64| {
        let policy = json!({"preferred_residency": "HOT", "mixed_hot_ratio": ratio, "migration_mode": "MANUAL"});
        json!({"identity": identity, "policy": policy, "expected_metadata_generation": expected, "options": {"request_id": id}})
    };
    fixture.refuse("update_policy", policy(now + 7, "p0", 0.25), ErrorCode::StaleGeneration).await;
    let updated = fixture.call("update_policy", policy(now, "p1", 0.25)).await.unwrap();
    assert_eq!(updated["revision"]["policy"]["mixed_hot_ratio"], 0.25);
    let repeated = fixture.call("update_policy", policy(now, "p1", 0.25)).await.unwrap();
    assert_eq!(repeated["revision"], updated["revision"]);
    fixture.refuse("update_policy", policy(now, "p1", 0.75), ErrorCode::Conflict).await;

    // Migration: an operation that is looked at and steered.
    let now = generation(&updated["revision"]);
    let migrate = json!({"identity": identity, "target": "COLD", "expected_metadata_generation": now});
    let operation = fixture.call("migrate", migrate).await.unwrap()["operation"].clone();
    assert_eq!(
        (&operation["kind"], &operation["target"], &operation["status"]),
        (&json!("MIGRATING"), &json!("COLD"), &json!("RUNNABLE"))
    );
    let by_id = json!({"operation_id": operation["operation_id"]});
    assert_eq!(
        fixture.call("get_operation", by_id.clone()).await.unwrap()["operation"]["operation_id"],
        operation["operation_id"]
    );
    let listed = fixture.call("list_operations", json!({})).await.unwrap();
    assert_eq!(listed["operations"][0]["operation_id"], operation["operation_id"]);
    assert_eq!(fixture.call("pause_operation", by_id.clone()).await.unwrap()["operation"]["status"], "PAUSED");
    assert_eq!(fixture.call("resume_operation", by_id.clone()).await.unwrap()["operation"]["status"], "RUNNABLE");
    fixture.call("retry_operation", by_id.clone()).await.unwrap();
    assert_eq!(fixture.call("cancel_operation", by_id.clone()).await.unwrap()["operation"]["status"], "CANCELLED");
    assert_eq!(fixture.call("list_operations", json!({})).await.unwrap()["operations"], json!([]));
    assert_eq!(
        fixture.call("list_operations", json!({"all": true})).await.unwrap()["operations"].as_array().unwrap().len(),
        1
    );

    // Replacement: claimed, looked at, given up.
    let view = fixture.call("get_metadata", json!({"identity": identity})).await.unwrap();
    let now = generation(&view["metadata"]);
    let upsert = json!({"base": identity, "target": minilm(2), "expected_metadata_generation": now});
    let claim = fixture.call("upsert", upsert.clone()).await.unwrap()["claim"].clone();
    assert_eq!((&claim["mode"], claim["request_id"].as_str().unwrap().len()), (&json!("PUT_FIRST"), 64));
    assert_eq!(fixture.call("upsert", upsert).await.unwrap()["claim"]["operation_id"], claim["operation_id"]);
    let latest = fixture.call("get_upsert", json!({"identity": minilm(2)})).await.unwrap();
    assert_eq!(latest["claim"]["request_id"], claim["request_id"]);
    fixture
        .refuse("get_upsert", json!({"identity": identity, "replacement_request_id": "other"}), ErrorCode::NotFound)
        .await;
    let abort = json!({"identity": identity, "replacement_request_id": claim["request_id"]});
    let aborted = fixture.call("abort_upsert", abort).await.unwrap();
    assert!(matches!(aborted["claim"]["phase"].as_str(), Some("ABORTED")), "{aborted}");

    // Removal: at once DELETING, and no tombstone to purge yet.
    let view = fixture.call("get_metadata", json!({"identity": identity})).await.unwrap();
    let removed = fixture.call("remove", remove(generation(&view["metadata"]))).await.unwrap();
    assert_eq!(removed["revision"]["availability"], "DELETING");
    assert!(fixture.call("purge", json!({"identity": identity})).await.is_err());
    assert_eq!(fixture.call("is_exist", json!({"identity": identity})).await.unwrap()["exists"], false);

    let status = fixture.call("status", json!({})).await.unwrap();
    assert_eq!((&status["revisions"]["DELETING"], &status["active_leases"]), (&json!(1), &json!(0)));
    assert_eq!(status["nodes"][0]["endpoint"]["node"], "node-1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aborted_import_is_not_committed_any_more() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);
    let begun = fixture.call("begin_import", begin(&identity, "s1", Value::Null)).await.unwrap();
    let instance = serde_json::from_value(begun["session"]["instance"].clone()).unwrap();
    let sha256 = node.seal(&identity, &instance, "s1");
    fixture.call("abort_import", json!({"identity": identity, "session_id": "s1"})).await.unwrap();
    let commit = json!({"identity": identity, "session_id": "s1", "manifest_sha256": sha256});
    fixture.refuse("commit_import", commit, ErrorCode::LeaseExpired).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_node_or_without_room_nothing_is_appended() {
    let fixture = Fixture::start().await;
    let identity = minilm(1);
    let big = |bytes: u64| {
        let mut body = begin(&identity, "s1", hot());
        (body["logical_bytes"], body["reserved_bytes"]) = (json!(bytes), json!(bytes));
        body
    };
    let error = fixture.refuse("begin_import", big(90 * MIB), ErrorCode::Unavailable).await;
    assert!(error.message.contains("ballast transfer-worker"), "{error}");
    let _small = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let error = fixture.refuse("begin_import", big(90 * MIB), ErrorCode::CapacityExhausted).await;
    assert_eq!(error.details["nodes"][0]["memory_capacity_bytes"], 64 * MIB);
    assert_eq!(error.details["needed_bytes"], 90 * MIB);
    fixture.refuse("get_metadata", json!({"identity": identity}), ErrorCode::NotFound).await;
    let _large = FakeNode::start(&fixture, "node-2", 128 * MIB).await;
    let begun = fixture.call("begin_import", big(90 * MIB)).await.unwrap();
    assert_eq!(begun["session"]["placement"], json!(["node-2"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lack_of_room_does_not_hide_why_an_import_has_to_wait_anyway() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);
    let revision = fixture.import(&node, &identity, hot()).await;
    let big = |generation: u64| {
        let mut body = begin(&minilm(generation), "s2", hot());
        (body["logical_bytes"], body["reserved_bytes"]) = (json!(90 * MIB), json!(90 * MIB));
        body
    };
    fixture.refuse("begin_import", big(1), ErrorCode::Conflict).await;
    fixture.refuse("begin_import", big(2), ErrorCode::CapacityExhausted).await;
    let now = revision["metadata_generation"].clone();
    let upsert =
        json!({"base": identity, "target": minilm(2), "mode": "DELETE_FIRST", "expected_metadata_generation": now});
    let claim = fixture.call("upsert", upsert).await.unwrap()["claim"].clone();
    assert_eq!(claim["phase"], "DELETING_BASE");
    fixture.refuse("begin_import", big(2), ErrorCode::NotReady).await;
    fixture.refuse("begin_import", big(3), ErrorCode::Busy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revision_whose_node_is_gone_gives_no_lease() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);
    fixture.import(&node, &identity, hot()).await;
    let node_id = node.node.clone();
    drop(node);
    eventually("the node falls silent", async || fixture.handle().directory().node(&node_id).is_none().then_some(()))
        .await;
    let error =
        fixture.refuse("acquire_lease", json!({"identity": identity, "lease_id": "l1"}), ErrorCode::Unavailable).await;
    assert!(error.message.contains("node-1"), "{error}");
    let view = fixture.call("get_metadata", json!({"identity": identity})).await.unwrap();
    assert_eq!(view["active_lease_count"], 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_goes_on_where_its_page_ended_however_long_the_names() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let long = "é".repeat(512);
    for n in 0..5 {
        let resource = format!("r{n}");
        let identity = ballast_schemas::RevisionIdentity::new("default", &long, &resource, &long, 1).unwrap();
        fixture.import(&node, &identity, hot()).await;
    }
    let mut found = Vec::new();
    let mut token = json!("");
    loop {
        let page = fixture.call("list", json!({"limit": 2, "page_token": token})).await.unwrap();
        found.extend(
            page["revisions"]
                .as_array()
                .unwrap()
                .iter()
                .map(|revision| revision["identity"]["resource_id"].as_str().unwrap().to_owned()),
        );
        token = page["next_page_token"].clone();
        if token == "" {
            break;
        }
    }
    assert_eq!(found, ["r0", "r1", "r2", "r3", "r4"]);
    fixture.refuse("list", json!({"page_token": "nonsense"}), ErrorCode::InvalidArgument).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_gateways_share_the_work_and_read_each_others_writes() {
    let mut fixture = Fixture::start().await;
    fixture.add_gateway().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);
    let revision = fixture.import(&node, &identity, hot()).await;
    let mut generation = revision["metadata_generation"].as_u64().unwrap();
    let mut seq = 0;
    let mut answered_by = std::collections::BTreeSet::new();
    for round in 0..40 {
        let ratio = if round % 2 == 0 { 0.25 } else { 0.75 };
        let policy = json!({"preferred_residency": "HOT", "mixed_hot_ratio": ratio, "migration_mode": "MANUAL"});
        let body = json!({"identity": identity, "policy": policy, "expected_metadata_generation": generation, "options": {"min_log_seq": seq}});
        let updated = fixture.call("update_policy", body).await.unwrap();
        generation = updated["revision"]["metadata_generation"].as_u64().unwrap();
        seq = updated["log_seq"].as_u64().unwrap();
        let read =
            fixture.call("get_metadata", json!({"identity": identity, "options": {"min_log_seq": seq}})).await.unwrap();
        assert_eq!(read["metadata"]["metadata_generation"], generation);
        let status = fixture.call("status", json!({})).await.unwrap();
        answered_by.insert(status["replica_id"].as_str().unwrap().to_owned());
    }
    assert_eq!(answered_by.len(), 2, "{answered_by:?}");
    // One of them goes, amid requests; none is lost, and then the other answers alone.
    let client = fixture.client.clone();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let (rounds, mut counted) = tokio::sync::watch::channel(0);
    let asking = tokio::spawn(async move {
        while !*stopped.borrow() {
            let requests = (0..20).map(|_| client.request("ballast.v1.default.status", "{}".into()));
            futures::future::try_join_all(requests).await.unwrap();
            rounds.send_modify(|rounds| *rounds += 1);
        }
    });
    counted.wait_for(|rounds| *rounds >= 2).await.unwrap();
    fixture.stop_gateway().await;
    let rounds = *counted.borrow();
    counted.wait_for(|now| *now > rounds).await.unwrap();
    stop.send(true).unwrap();
    asking.await.unwrap();
    for _ in 0..10 {
        assert_eq!(fixture.call("status", json!({})).await.unwrap()["replica_id"], "gateway-2");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn participants_join_finish_and_are_named_while_they_are_missing() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);
    let mut shared = begin(&identity, "s1", hot());
    shared["participants"] = json!(["rank0", "rank1"]);
    let error = fixture.refuse("begin_import", shared.clone(), ErrorCode::InvalidArgument).await;
    assert!(error.message.contains("writer_id"), "{error}");
    shared["writer_id"] = json!("run1");
    let begun = fixture.call("begin_import", shared.clone()).await.unwrap();
    let again = fixture.call("begin_import", shared.clone()).await.unwrap();
    assert_eq!(again["session"], begun["session"]);
    for wrong in [json!(["rank0", "rank0"]), json!(["a b"]), json!([["rank0"]]), json!([1])] {
        let mut other = shared.clone();
        other["participants"] = wrong;
        let error = fixture.refuse("begin_import", other, ErrorCode::InvalidArgument).await;
        assert!(error.message.contains("participants"), "{error}");
    }
    let join = |participant: &str, writer: &str| {
        let digest = &shared["placement_digest"];
        json!({"identity": identity, "session_id": "s1", "participant": participant, "writer_id": writer, "placement_digest": digest})
    };
    let joined = fixture.call("join_import", join("rank0", "w1")).await.unwrap();
    assert_eq!((&joined["part"]["epoch"], &joined["endpoints"][0]["node"]), (&json!(1), &json!("node-1")));
    assert_ne!(joined["token"], begun["token"]);
    assert_eq!(fixture.call("join_import", join("rank0", "w2")).await.unwrap()["part"]["epoch"], 2);
    fixture.refuse("join_import", join("rank7", "w1"), ErrorCode::InvalidArgument).await;
    // A stale rank: of another session, of another geometry, of a run that was replaced.
    let mut stale = join("rank1", "w1");
    stale["session_id"] = json!("s0");
    fixture.refuse("join_import", stale, ErrorCode::Conflict).await;
    let mut stale = join("rank1", "w1");
    stale["placement_digest"] = json!("1".repeat(64));
    fixture.refuse("join_import", stale, ErrorCode::Conflict).await;
    let part = |participant: &str, epoch: u64| json!({"identity": identity, "session_id": "s1", "participant": participant, "instance": begun["session"]["instance"], "epoch": epoch});
    fixture.refuse("renew_part", part("rank0", 1), ErrorCode::Conflict).await;
    fixture.refuse("finish_part", part("rank0", 1), ErrorCode::Conflict).await;
    assert_eq!(fixture.call("finish_part", part("rank0", 2)).await.unwrap()["part"]["done"], true);
    let coordinator = json!({"instance": begun["session"]["instance"], "epoch": 1});
    let commit = |sha256: &str| json!({"identity": identity, "session_id": "s1", "manifest_sha256": sha256, "coordinator": coordinator});
    let error = fixture.refuse("commit_import", commit(&"0".repeat(64)), ErrorCode::NotReady).await;
    assert_eq!(error.details["participants"], json!(["rank1"]));
    let found = fixture.call("get_import", json!({"identity": identity, "session_id": "s1"})).await.unwrap();
    let done: Vec<&Value> = found["participants"].as_array().unwrap().iter().map(|part| &part["done"]).collect();
    assert_eq!(done, [&json!(true), &json!(false)]);
    fixture.call("join_import", join("rank1", "w1")).await.unwrap();
    fixture.call("renew_part", part("rank1", 1)).await.unwrap();
    fixture.call("finish_part", part("rank1", 1)).await.unwrap();
    let instance = serde_json::from_value(begun["session"]["instance"].clone()).unwrap();
    let sha256 = node.seal(&identity, &instance, "s1").to_string();
    let committed = fixture.call("commit_import", commit(&sha256)).await.unwrap();
    assert_eq!(committed["revision"]["availability"], "READY");
    fixture.refuse("join_import", join("rank1", "w9"), ErrorCode::Conflict).await;
    fixture.refuse("get_import", json!({"identity": identity, "session_id": "s1"}), ErrorCode::Conflict).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_was_replaced_is_refused_by_every_verb_that_speaks_for_the_session() {
    let fixture = Fixture::start().await;
    let _node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);
    let begin_as = |session: &str, writer: &str| {
        let mut body = begin(&identity, session, hot());
        body["participants"] = json!(["rank0"]);
        body["writer_id"] = json!(writer);
        body
    };
    let first = fixture.call("begin_import", begin_as("s1", "run1")).await.unwrap();
    let second = fixture.call("begin_import", begin_as("s1", "run2")).await.unwrap();
    let instance = &first["session"]["instance"];
    assert_eq!((&first["session"]["epoch"], &second["session"]["epoch"]), (&json!(1), &json!(2)));
    assert_eq!(&second["session"]["instance"], instance);
    let error = fixture.refuse("begin_import", begin_as("s2", "run3"), ErrorCode::Busy).await;
    assert_eq!(error.details["session_id"], "s1");
    let ask = |epoch: u64| json!({"identity": identity, "session_id": "s1", "coordinator": {"instance": instance, "epoch": epoch}});
    let commit = |epoch: u64| {
        let mut body = ask(epoch);
        body["manifest_sha256"] = json!("0".repeat(64));
        body
    };
    for verb in ["renew_import", "abort_import", "get_import"] {
        let error = fixture.refuse(verb, ask(1), ErrorCode::Conflict).await;
        assert_eq!(error.details["epoch"], 2, "{verb}");
    }
    fixture.refuse("commit_import", commit(1), ErrorCode::Conflict).await;
    fixture.refuse("begin_import", begin_as("s1", "run1"), ErrorCode::Conflict).await;
    fixture.refuse("abort_import", json!({"identity": identity, "session_id": "s1"}), ErrorCode::InvalidArgument).await;
    fixture.call("renew_import", ask(2)).await.unwrap();
    fixture.call("get_import", ask(2)).await.unwrap();
    fixture.refuse("commit_import", commit(2), ErrorCode::NotReady).await;
    fixture.call("abort_import", ask(2)).await.unwrap();
    fixture.refuse("get_import", ask(2), ErrorCode::LeaseExpired).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_join_that_is_repeated_late_opens_no_door() {
    let fixture = Fixture::start().await;
    let _node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);
    let mut shared = begin(&identity, "s1", hot());
    shared["participants"] = json!(["rank0"]);
    shared["writer_id"] = json!("run1");
    let begun = fixture.call("begin_import", shared.clone()).await.unwrap();
    let join = |writer: &str, request_id: &str| {
        let digest = &shared["placement_digest"];
        json!({"identity": identity, "session_id": "s1", "participant": "rank0", "writer_id": writer,
            "placement_digest": digest, "options": {"request_id": request_id}})
    };
    let first = fixture.call("join_import", join("w1", "j1")).await.unwrap();
    assert_eq!(fixture.call("join_import", join("w1", "j1")).await.unwrap()["part"], first["part"]);
    // Another run has joined since.
    fixture.call("join_import", join("w2", "j2")).await.unwrap();
    let error = fixture.refuse("join_import", join("w1", "j1"), ErrorCode::Conflict).await;
    assert_eq!(error.details["epoch"], 2);
    // The import was given up, and its session's name begun again.
    let coordinator = json!({"instance": begun["session"]["instance"], "epoch": 1});
    let aborted = json!({"identity": identity, "session_id": "s1", "coordinator": coordinator});
    let aborted = fixture.call("abort_import", aborted).await.unwrap();
    fixture.finish_deletion(&aborted["revision"]).await;
    let next = fixture.call("begin_import", shared.clone()).await.unwrap();
    assert_ne!(next["session"]["instance"], begun["session"]["instance"]);
    fixture.refuse("join_import", join("w2", "j2"), ErrorCode::LeaseExpired).await;
    assert_eq!(fixture.call("join_import", join("w2", "j3")).await.unwrap()["part"]["epoch"], 1);
}

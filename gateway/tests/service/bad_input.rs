//! What callers get wrong: each a clear error, and nothing changed.

use ballast_schemas::{BallastError, ErrorCode, TenantId, VERBS, subject};
use serde_json::{Value, json};

use super::fixture::*;

fn good(verb: &str) -> Value {
    let identity = minilm(1);
    match verb {
        "begin_import" => begin(&identity, "s1", hot()),
        "join_import" => {
            let (participant, digest) = ("rank0", "0".repeat(64));
            json!({"identity": identity, "session_id": "s1", "participant": participant, "writer_id": "w1", "placement_digest": digest})
        }
        "renew_part" | "finish_part" => {
            let instance =
                json!({"group_id": format!("weight:{}", "0".repeat(64)), "position": {"seq": 3, "index": 0}});
            json!({"identity": identity, "session_id": "s1", "participant": "rank0", "instance": instance, "epoch": 1})
        }
        "renew_import" | "abort_import" | "get_import" => json!({"identity": identity, "session_id": "s1"}),
        "commit_import" => json!({"identity": identity, "session_id": "s1", "manifest_sha256": "0".repeat(64)}),
        "acquire_lease" | "renew_lease" | "release_lease" => json!({"identity": identity, "lease_id": "l1"}),
        "is_exist" | "get_metadata" | "get_size" | "purge" | "repair" | "verify" => json!({"identity": identity}),
        "update_policy" => json!({"identity": identity, "policy": {}, "expected_metadata_generation": 1}),
        "upsert" => json!({"base": identity, "target": minilm(2), "expected_metadata_generation": 1}),
        "abort_upsert" | "get_upsert" => json!({"identity": identity, "replacement_request_id": "r"}),
        "migrate" => json!({"identity": identity, "target": "COLD", "expected_metadata_generation": 1}),
        "remove" => json!({"identity": identity, "expected_metadata_generation": 1}),
        "get_operation" | "cancel_operation" | "pause_operation" | "resume_operation" | "retry_operation" => {
            json!({"operation_id": "op-1.0"})
        }
        _ => json!({}),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_verb_refuses_what_is_not_its_request() {
    let fixture = Fixture::start().await;
    for verb in VERBS {
        let raw =
            async |body: &str| fixture.call_raw(&format!("ballast.v1.default.{verb}"), body.as_bytes().to_vec()).await;
        for body in ["not json", "[1]", "\"text\"", "{\"a\":", "\u{0}"] {
            let error = raw(body).await.unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument, "{verb} {body:?}: {error}");
        }
        let mut unknown = good(verb);
        unknown["color"] = json!("blue");
        let error = fixture.refuse(verb, unknown, ErrorCode::InvalidArgument).await;
        assert!(error.message.contains("color"), "{verb}: {error}");
        let mut wrong = good(verb);
        wrong["options"] = json!({"min_log_seq": "seven"});
        let error = fixture.refuse(verb, wrong, ErrorCode::InvalidArgument).await;
        assert!(error.message.contains("options.min_log_seq"), "{verb}: {error}");
        for field in good(verb).as_object().unwrap().keys() {
            let mut wrong = good(verb);
            wrong[field] = json!({"no": [true]});
            let error = fixture.refuse(verb, wrong, ErrorCode::InvalidArgument).await;
            assert!(error.message.contains(field), "{verb} {field}: {error}");
        }
        if !["clock", "status"].contains(verb) && !verb.starts_with("list") {
            let mut missing = good(verb);
            let first = missing.as_object().unwrap().keys().find(|key| *key != "policy").unwrap().clone();
            missing.as_object_mut().unwrap().remove(&first);
            if verb != &"get_upsert" && verb != &"abort_upsert" || first != "replacement_request_id" {
                let error = fixture.refuse(verb, missing, ErrorCode::InvalidArgument).await;
                assert!(error.message.contains(&first), "{verb} {first}: {error}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hostile_identity_is_named_by_its_part() {
    let fixture = Fixture::start().await;
    let refuse = async |field: &str, value: Value| {
        let mut identity = json!(minilm(1));
        identity[field] = value;
        fixture.refuse("get_metadata", json!({"identity": identity}), ErrorCode::InvalidArgument).await.message
    };
    assert!(refuse("namespace", json!("a\u{7}b")).await.contains("U+0007"));
    assert!(refuse("resource_id", json!("x".repeat(1025))).await.contains("1025"));
    assert!(refuse("revision", json!("")).await.contains("revision"));
    assert!(refuse("weight_generation", json!(0)).await.contains("start at 1"));
    assert!(refuse("weight_generation", json!(-1)).await.contains("weight_generation"));
    assert!(refuse("weight_generation", json!(1.5)).await.contains("weight_generation"));
    assert!(refuse("tenant_id", json!("_sys")).await.contains("reserved"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_are_refused_by_field() {
    let fixture = Fixture::start().await;
    let identity = minilm(1);
    let policy = |ratio: Value| json!({"identity": identity, "policy": {"mixed_hot_ratio": ratio}, "expected_metadata_generation": 1});
    let cases = [
        (
            "begin_import",
            {
                let mut body = good("begin_import");
                body["ttl_ms"] = json!(0);
                body
            },
            "ttl_ms",
        ),
        (
            "begin_import",
            {
                let mut body = good("begin_import");
                body["unit_count"] = json!(0);
                body
            },
            "unit_count",
        ),
        (
            "begin_import",
            {
                let mut body = good("begin_import");
                body["reserved_bytes"] = json!(1);
                body
            },
            "reserved_bytes",
        ),
        (
            "begin_import",
            {
                let mut body = good("begin_import");
                body["session_id"] = json!("a b");
                body
            },
            "session_id",
        ),
        ("acquire_lease", json!({"identity": identity, "lease_id": "l", "ttl_ms": 86_400_001}), "ttl_ms"),
        ("acquire_lease", json!({"identity": identity, "lease_id": "l", "holder": "x".repeat(1025)}), "holder"),
        ("renew_lease", json!({"identity": identity, "lease_id": "l", "ttl_ms": 0}), "ttl_ms"),
        ("update_policy", policy(json!(0)), "mixed_hot_ratio"),
        ("update_policy", policy(json!(1)), "mixed_hot_ratio"),
        ("update_policy", policy(json!("NaN")), "mixed_hot_ratio"),
        ("update_policy", policy(Value::Null), "mixed_hot_ratio"),
        ("migrate", json!({"identity": identity, "target": "ABSENT", "expected_metadata_generation": 1}), "target"),
        (
            "migrate",
            json!({"identity": identity, "target": "HOT", "mixed_hot_ratio": 0.5, "expected_metadata_generation": 1}),
            "mixed_hot_ratio",
        ),
        ("upsert", json!({"base": minilm(2), "target": minilm(2), "expected_metadata_generation": 1}), "greater"),
        ("abort_upsert", json!({"identity": identity}), "replacement_request_id"),
        ("list", json!({"limit": 0}), "limit"),
        ("list", json!({"limit": 1001}), "limit"),
        ("list", json!({"limit": 1, "options": {"request_id": ""}}), "request_id"),
        ("list_operations", json!({"limit": 5000}), "limit"),
        ("list", json!({"options": {"consistency": "eventual"}}), "consistency"),
    ];
    for (verb, body, word) in cases {
        let error = fixture.refuse(verb, body.clone(), ErrorCode::InvalidArgument).await;
        assert!(error.message.contains(word), "{verb} {body}: {error}");
    }
    // NaN is no JSON at all.
    let nan = r#"{"identity":{"namespace":"n","resource_id":"r","revision":"v","weight_generation":1},"policy":{"mixed_hot_ratio":NaN},"expected_metadata_generation":1}"#;
    let error = fixture.call_raw("ballast.v1.default.update_policy", nan.as_bytes().to_vec()).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_over_256_kib_is_refused_with_its_size_and_over_1_mib_not_even_sent() {
    let fixture = Fixture::start().await;
    let body = format!("{{\"resource_prefix\":\"{}\"}}", "x".repeat(300 * 1024));
    let size = body.len();
    let error = fixture.call_raw("ballast.v1.default.list", body.into_bytes()).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(error.message.contains(&size.to_string()), "{error}");
    let refused = fixture.client.request("ballast.v1.default.list", vec![b' '; 2 << 20].into()).await.unwrap_err();
    assert_eq!(refused.kind(), async_nats::RequestErrorKind::MaxPayloadExceeded);
    assert!(fixture.call("list", json!({})).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_verb_hears_which_there_are() {
    let fixture = Fixture::start().await;
    for subject in ["ballast.v1.default.fly", "ballast.v1.default.list.more", "ballast.v1.default"] {
        let error: BallastError = fixture.call_raw(subject, b"{}".to_vec()).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::NotFound, "{subject}");
        assert!(error.message.contains("acquire_lease"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_are_kept_apart_by_their_subject() {
    let fixture = Fixture::start().await;
    let node = FakeNode::start(&fixture, "node-1", 64 * MIB).await;
    let identity = minilm(1);
    let revision = fixture.import(&node, &identity, hot()).await;
    let migrate = json!({"identity": identity, "target": "COLD", "expected_metadata_generation": revision["metadata_generation"]});
    let operation = fixture.call("migrate", migrate).await.unwrap()["operation"]["operation_id"].clone();
    let other = async |verb: &str, body: Value| {
        fixture.call_raw(&format!("ballast.v1.other.{verb}"), body.to_string().into_bytes()).await
    };
    let error = other("get_metadata", json!({"identity": identity})).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unauthorized);
    let mut unnamed = json!(identity);
    unnamed.as_object_mut().unwrap().remove("tenant_id");
    assert_eq!(other("get_metadata", json!({"identity": unnamed})).await.unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(other("list", json!({"all": true})).await.unwrap()["revisions"], json!([]));
    assert_eq!(other("list_operations", json!({"all": true})).await.unwrap()["operations"], json!([]));
    for verb in ["get_operation", "cancel_operation"] {
        assert_eq!(other(verb, json!({"operation_id": operation})).await.unwrap_err().code, ErrorCode::NotFound);
    }
    // A tenant whose name is too long for a subject is named by its digest there and in full in the body.
    let long = TenantId::new(&"é".repeat(500)).unwrap();
    let mut named = json!(identity);
    named["tenant_id"] = json!(long);
    let body = json!({"identity": named}).to_string().into_bytes();
    assert_eq!(fixture.call_raw(&subject::verb(&long, "is_exist"), body).await.unwrap()["exists"], false);
    let error = fixture.call_raw(&subject::verb(&long, "list"), b"{}".to_vec()).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_that_never_comes_is_unavailable() {
    let fixture = Fixture::start().await;
    let body = json!({"options": {"min_log_seq": 1_000_000}});
    let error = fixture.refuse("list", body, ErrorCode::Unavailable).await;
    assert!(error.message.contains("1000000"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mutation_that_would_outlive_the_memory_of_its_outcome_is_refused() {
    let fixture = Fixture::start().await;
    let clock = fixture.call("clock", json!({})).await.unwrap()["log_clock"].as_u64().unwrap();
    let remove = |not_after: u64| json!({"identity": minilm(1), "expected_metadata_generation": 1, "options": {"request_id": "far", "not_after": not_after}});
    for far in [clock + 1_000_000, u64::MAX] {
        let error = fixture.refuse("remove", remove(far), ErrorCode::InvalidArgument).await;
        assert!(error.message.contains("options.not_after") && error.message.contains("90000 ms"), "{error}");
        assert_eq!(error.details["field"], "options.not_after");
    }
    // As late as may be: it is decided.
    fixture.refuse("remove", remove(clock + 90_000), ErrorCode::NotFound).await;
}

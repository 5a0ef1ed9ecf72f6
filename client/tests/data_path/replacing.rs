//! Replacements: what the client waits for on the way to the target and, if asked to, to the end of the base.

use std::sync::{Arc, Mutex};

use ballast_client::{Progress, PutReport, Route, Source, UpsertOptions};
use ballast_schemas::{
    Availability, BallastError, ClaimPhase, ErrorCode, UpsertMode, WeightRevisionMetadata, default_upsert_request_id,
};
use serde_json::json;

use crate::cluster::{Cluster, identity};
use crate::putting::{content, tensor};

async fn replace(cluster: &Cluster, options: UpsertOptions, progress: Progress) -> Result<PutReport, BallastError> {
    let store = cluster.store(Route::Best).await;
    let source = Source::from_tensors(vec![tensor("w", content(1, 100))]).unwrap();
    let writer = store.weight_upsert(source, &identity(1), 2, 7, options, progress).await?;
    assert_eq!(writer.claim().unwrap().target, identity(2));
    writer.commit().await
}

#[tokio::test]
async fn a_put_first_returns_with_its_target_ready_while_the_base_is_still_read() {
    let cluster = Cluster::start().await;
    cluster.desk.lock().unwrap().phases = vec![ClaimPhase::PreparingTarget, ClaimPhase::RetiringBase];
    let report = replace(&cluster, UpsertOptions::default(), Progress::none()).await.unwrap();
    assert_eq!(report.revision.availability, Availability::Ready);
    let claim = report.claim.unwrap();
    assert_eq!(claim.phase, ClaimPhase::RetiringBase);
    assert_eq!(claim.request_id, default_upsert_request_id(&identity(1), &identity(2), UpsertMode::PutFirst, 7));
}

#[tokio::test]
async fn a_commit_that_was_asked_to_waits_for_the_end_of_the_base() {
    let cluster = Cluster::start().await;
    cluster.desk.lock().unwrap().phases =
        vec![ClaimPhase::PreparingTarget, ClaimPhase::RetiringBase, ClaimPhase::DeletingBase, ClaimPhase::Completed];
    let options = UpsertOptions { wait_completed: true, request_id: Some("mine".into()), ..UpsertOptions::default() };
    let notes = Arc::new(Mutex::new(Vec::new()));
    let seen = notes.clone();
    let progress = Progress::new(move |update| seen.lock().unwrap().extend(update.note.clone()));
    let claim = replace(&cluster, options, progress).await.unwrap().claim.unwrap();
    assert_eq!((claim.phase, claim.request_id.as_str()), (ClaimPhase::Completed, "mine"));
    let notes = notes.lock().unwrap();
    assert!(notes[0].contains("older leases") && notes[1].contains("being deleted"), "{notes:?}");
}

#[tokio::test]
async fn a_delete_first_imports_its_target_when_the_base_is_gone() {
    let cluster = Cluster::start().await;
    cluster.desk.lock().unwrap().phases =
        vec![ClaimPhase::DeletingBase, ClaimPhase::DeletingBase, ClaimPhase::TargetImporting, ClaimPhase::Completed];
    let options = UpsertOptions { mode: UpsertMode::DeleteFirst, ..UpsertOptions::default() };
    replace(&cluster, options, Progress::none()).await.unwrap();
    assert!(cluster.calls("get_upsert") >= 2);
    assert_eq!(cluster.calls("begin_import"), 1);
}

fn target(availability: Availability) -> WeightRevisionMetadata {
    serde_json::from_value(json!({
        "identity": identity(2),
        "instance": {"group_id": identity(2).group_id(), "position": {"seq": 1, "index": 0}},
        "manifest": null, "availability": availability, "residency": "UNKNOWN", "observed_hot_ppm": 0,
        "policy": {}, "operation_id": null, "retired": false, "metadata_generation": 1, "placement": [],
        "created_unix_ms": 0, "updated_unix_ms": 0, "last_accessed_unix_ms": 0,
    }))
    .unwrap()
}

#[tokio::test]
async fn the_remains_of_an_earlier_attempt_are_waited_for_and_a_base_in_use_is_not() {
    let cluster = Cluster::start().await;
    cluster.desk.lock().unwrap().phases = vec![ClaimPhase::PreparingTarget];
    cluster.refuse("upsert", ErrorCode::Busy, json!({"active_lease_count": 1}), 1);
    let error = replace(&cluster, UpsertOptions::default(), Progress::none()).await.unwrap_err();
    assert_eq!((error.code, cluster.calls("upsert")), (ErrorCode::Busy, 1));

    cluster.desk.lock().unwrap().record = Some(target(Availability::Deleting));
    cluster.refuse("upsert", ErrorCode::Busy, json!({}), 2);
    let desk = cluster.desk.clone();
    let progress = Progress::new(move |update| {
        // The second time somebody waits, the remains are gone.
        if update.note.is_some() && desk.lock().unwrap().calls["upsert"] == 3 {
            desk.lock().unwrap().record = Some(target(Availability::Deleted));
        }
    });
    replace(&cluster, UpsertOptions::default(), progress).await.unwrap();
    assert_eq!(cluster.calls("upsert"), 4);
}

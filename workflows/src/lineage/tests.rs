use ballast_schemas::{
    AbortImport, AbortReplacement, Availability, ClaimPhase, Command, ErrorCode, MigrationMode, OperationStatus,
    ParkReason, ReplacementAdvanced, Residency, UpdatePolicy, UpsertMode, WeightOperation,
};

use crate::testing::*;

fn put_first(log: &mut Log) -> WeightOperation {
    let claim = log.accept_claim(replace(1, 2, UpsertMode::PutFirst, log.generation(1), "r1"));
    log.operation(&claim.operation_id)
}

fn to(operation: &WeightOperation, to: ClaimPhase) -> Command {
    Command::ReplacementAdvanced(ReplacementAdvanced {
        operation_id: operation.operation_id.clone(),
        epoch: operation.epoch,
        to,
    })
}

fn abort(request_id: &str) -> Command {
    Command::AbortReplacement(AbortReplacement { lineage: identity(1).lineage(), request_id: request_id.into() })
}

fn abort_import(generation: u64) -> Command {
    let session_id = session(&format!("s{generation}"));
    Command::AbortImport(AbortImport { identity: identity(generation), session_id, coordinator: None })
}

fn phase(log: &Log) -> ClaimPhase {
    log.state.claim(&identity(1).lineage()).unwrap().phase
}

fn watermark(log: &Log) -> u64 {
    log.state.watermark(&identity(1).lineage())
}

fn wake(log: &mut Log, operation: &WeightOperation) -> WeightOperation {
    log.accept_operation(claim(&operation.operation_id, "w1"))
}

fn status(log: &Log, operation: &WeightOperation) -> (OperationStatus, Option<ParkReason>) {
    let operation = log.operation(&operation.operation_id);
    (operation.status, operation.park_reason)
}

const WAITS_FOR_TARGET: (OperationStatus, Option<ParkReason>) =
    (OperationStatus::Parked, Some(ParkReason::TargetImport));
const WAITS_FOR_LEASES: (OperationStatus, Option<ParkReason>) = (OperationStatus::Parked, Some(ParkReason::LeaseDrain));
const WAITS_FOR_DELETION: (OperationStatus, Option<ParkReason>) =
    (OperationStatus::Parked, Some(ParkReason::BaseDeletion));

#[test]
fn put_first_walks_every_phase_and_commits_the_watermark_last() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Cold, MigrationMode::Auto));
    let initial = log.active(1);
    let operation = put_first(&mut log);
    assert_eq!((phase(&log), status(&log, &operation)), (ClaimPhase::PreparingTarget, WAITS_FOR_TARGET));
    assert_eq!((&operation.identity, &operation.instance), (&identity(2), &log.revision(1).instance));
    let session = log.import(begin(2, policy(Residency::Cold, MigrationMode::Auto)));
    assert_eq!(phase(&log), ClaimPhase::TargetImporting);
    log.send(Command::CommitImport(commit(&session, manifest(2)))).unwrap();
    assert_eq!(status(&log, &operation).0, OperationStatus::Runnable);
    let target_operation = log.active(2);
    assert_eq!(status(&log, &target_operation), WAITS_FOR_DELETION, "only the replacement touches the target");
    assert_eq!(watermark(&log), 1);
    log.send(acquire(1, "l", 10_000)).unwrap();

    let operation = wake(&mut log, &operation);
    assert_eq!(log.code(to(&operation, ClaimPhase::DeletingBase)), ErrorCode::Conflict);
    assert_eq!(log.code(to(&operation, ClaimPhase::Completed)), ErrorCode::InvalidArgument);
    let events = log.events(to(&operation, ClaimPhase::RetiringBase));
    assert_eq!(events, ["CLAIM_PHASE", "REVISION_RETIRED", "OPERATION_ENDED", "OPERATION_PROGRESS"]);
    assert_eq!(log.operation(&initial.operation_id).status, OperationStatus::Superseded);
    assert_eq!((log.revision(1).retired, log.revision(1).availability), (true, Availability::Ready));
    assert_eq!(status(&log, &operation), WAITS_FOR_LEASES);
    for refused in [
        log.refused(acquire(1, "l2", 1_000)),
        log.refused(renew(1, "l", 60_000)),
        log.refused(migrate(1, Residency::Hot, 1)),
    ] {
        assert_eq!((refused.code, refused.details["successor_generation"].as_u64()), (ErrorCode::NotReady, Some(2)));
    }
    assert_eq!(log.pass(10_000), ["OPERATION_PROGRESS"], "the straggler's lease runs out");

    let operation = wake(&mut log, &operation);
    let events = log.events(to(&operation, ClaimPhase::DeletingBase));
    assert_eq!(events, ["CLAIM_PHASE", "REVISION_DELETING", "OPERATION_STARTED", "OPERATION_PROGRESS"]);
    assert_eq!(status(&log, &operation), WAITS_FOR_DELETION);
    assert_eq!(watermark(&log), 1);
    let events = log.finish_deletion(1);
    assert_eq!(events, ["OPERATION_ENDED", "REVISION_DELETED", "CLAIM_PHASE", "OPERATION_ENDED", "OPERATION_PROGRESS"]);
    assert_eq!((phase(&log), watermark(&log)), (ClaimPhase::Completed, 2));
    assert_eq!(status(&log, &operation).0, OperationStatus::Succeeded);
    assert_eq!(status(&log, &target_operation).0, OperationStatus::Runnable, "now the target may converge");
}

#[test]
fn the_same_request_returns_its_claim_and_any_other_is_refused() {
    let mut log = Log::new();
    log.put(1, hot());
    put_first(&mut log);
    let claim = log.accept_claim(replace(1, 2, UpsertMode::PutFirst, 2, "r1"));
    assert_eq!(claim.attempt, 1);
    assert_eq!(log.code(replace(1, 2, UpsertMode::DeleteFirst, 2, "r1")), ErrorCode::Conflict);
    assert_eq!(log.code(replace(1, 3, UpsertMode::PutFirst, 2, "r1")), ErrorCode::Conflict);
    assert_eq!(log.code(replace(1, 2, UpsertMode::PutFirst, 2, "r2")), ErrorCode::Busy);
    assert_eq!(log.code(replace(1, 3, UpsertMode::PutFirst, 2, "r3")), ErrorCode::Busy);
}

#[test]
fn a_replacement_needs_a_standing_base_and_a_free_higher_target() {
    let mut log = Log::new();
    assert_eq!(log.code(replace(1, 2, UpsertMode::PutFirst, 1, "r")), ErrorCode::NotFound);
    log.put(3, hot());
    assert_eq!(log.code(replace(3, 3, UpsertMode::PutFirst, 2, "r")), ErrorCode::InvalidArgument);
    assert_eq!(log.code(replace(3, 4, UpsertMode::PutFirst, 2, "")), ErrorCode::InvalidArgument);
    assert_eq!(log.code(replace(3, 4, UpsertMode::PutFirst, 1, "r")), ErrorCode::StaleGeneration);
    log.import(begin(5, hot()));
    assert_eq!(log.code(replace(3, 4, UpsertMode::PutFirst, 2, "r")), ErrorCode::Busy);
    let session = log.state.import(&identity(5)).unwrap().clone();
    log.send(Command::CommitImport(commit(&session, manifest(5)))).unwrap();
    let refused = log.refused(replace(3, 4, UpsertMode::PutFirst, 2, "r"));
    assert!(refused.code == ErrorCode::Conflict && refused.message.contains("watermark 5"), "{refused:?}");
    assert_eq!(log.code(replace(3, 5, UpsertMode::PutFirst, 2, "r")), ErrorCode::Conflict);
    log.send(replace(3, 6, UpsertMode::PutFirst, 2, "r")).unwrap();
}

#[test]
fn only_the_target_enters_a_claimed_lineage() {
    let mut log = Log::new();
    log.put(1, hot());
    put_first(&mut log);
    let refused = log.refused(Command::BeginImport(begin(3, hot())));
    assert_eq!((refused.code, refused.details["target_generation"].as_u64()), (ErrorCode::Busy, Some(2)));
    let mut target = begin(2, hot());
    target.policy = None;
    log.import(target);
    assert_eq!(log.revision(2).policy, hot(), "the claim's policy");
}

#[test]
fn a_failed_put_first_target_leaves_the_base_and_the_same_request_opens_it_again() {
    for end in ["expire", "abort import", "abort replacement"] {
        let mut log = Log::new();
        let base = log.put(1, hot());
        let operation = put_first(&mut log);
        log.import(begin(2, hot()));
        match end {
            "expire" => drop(log.pass(15_000)),
            "abort import" => drop(log.send(abort_import(2)).unwrap()),
            _ => drop(log.send(abort("r1")).unwrap()),
        }
        assert_eq!(phase(&log), ClaimPhase::Aborted, "{end}");
        assert!(status(&log, &operation).0.is_terminal());
        assert_eq!((log.revision(1), watermark(&log)), (&base, 1));
        let again = replace(1, 2, UpsertMode::PutFirst, 2, "r1");
        assert_eq!(log.code(again.clone()), ErrorCode::Busy, "its remains are being deleted");
        log.finish_deletion(2);
        let claim = log.accept_claim(again);
        assert_eq!((claim.attempt, claim.phase), (2, ClaimPhase::PreparingTarget));
        assert_ne!(claim.operation_id, operation.operation_id);
        log.put(2, hot());
        assert_eq!(log.operation(&claim.operation_id).status, OperationStatus::Runnable);
    }
}

#[test]
fn a_target_that_degrades_before_the_base_is_deleted_gives_the_base_back() {
    let mut log = Log::new();
    log.put(1, hot());
    let operation = put_first(&mut log);
    let target = log.put(2, hot());
    log.send(acquire(1, "l", 60_000)).unwrap();
    let operation = wake(&mut log, &operation);
    log.send(to(&operation, ClaimPhase::RetiringBase)).unwrap();
    let events = log.events(degraded(&target, target.instance.position));
    assert_eq!(events, ["REVISION_DEGRADED", "CLAIM_PHASE", "OPERATION_PROGRESS"]);
    assert_eq!((phase(&log), log.revision(1).retired), (ClaimPhase::TargetImporting, false));
    assert_eq!(status(&log, &operation), WAITS_FOR_TARGET);
    log.send(renew(1, "l", 60_000)).unwrap();
    log.send(acquire(1, "l2", 60_000)).unwrap();
    log.send(recovered(&target, target.instance.position, Residency::Hot)).unwrap();
    let operation = wake(&mut log, &operation);
    log.send(to(&operation, ClaimPhase::RetiringBase)).unwrap();
    assert_eq!(status(&log, &operation), WAITS_FOR_LEASES);
}

#[test]
fn the_base_is_not_deleted_under_a_lease_or_for_a_target_that_is_not_ready() {
    let mut log = Log::new();
    log.put(1, hot());
    let operation = put_first(&mut log);
    let target = log.put(2, hot());
    let operation = wake(&mut log, &operation);
    log.send(degraded(&target, target.instance.position)).unwrap();
    assert_eq!(log.code(to(&operation, ClaimPhase::RetiringBase)), ErrorCode::NotReady);
    log.send(recovered(&target, target.instance.position, Residency::Hot)).unwrap();
    log.send(acquire(1, "l", 60_000)).unwrap();
    log.send(to(&operation, ClaimPhase::RetiringBase)).unwrap();
    log.send(Command::PauseOperation(operation.operation_id.clone())).unwrap();
    log.send(Command::ResumeOperation(operation.operation_id.clone())).unwrap();
    assert_eq!(status(&log, &operation), WAITS_FOR_LEASES, "a resumed replacement waits on");
    log.send(release(1, "l")).unwrap();
    assert_eq!(status(&log, &operation).0, OperationStatus::Runnable);
}

#[test]
fn a_base_operation_with_a_release_outstanding_is_closed_out_before_the_base_goes() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Cold, MigrationMode::Manual));
    let replacing = put_first(&mut log);
    log.put(2, hot());
    let demotion = log.claimed(1, "w2");
    let demotion = log.accept_operation(leave(&demotion, 2));
    let replacing = wake(&mut log, &replacing);
    log.send(to(&replacing, ClaimPhase::RetiringBase)).unwrap();
    assert_eq!(status(&log, &replacing), WAITS_FOR_LEASES);
    assert_eq!(log.operation(&demotion.operation_id).ending, Some(OperationStatus::Superseded));
    let events = log.events(step(&demotion, 2, true));
    assert_eq!(events, ["OPERATION_ENDED", "OPERATION_PROGRESS"]);
    assert_eq!(log.operation(&demotion.operation_id).status, OperationStatus::Superseded);
    assert_eq!(status(&log, &replacing).0, OperationStatus::Runnable);
}

#[test]
fn delete_first_is_busy_under_a_lease_or_an_operation() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Cold, MigrationMode::Manual));
    let command = |expected| replace(1, 2, UpsertMode::DeleteFirst, expected, "r1");
    assert_eq!(log.code(command(2)), ErrorCode::Busy);
    log.finish_migration(1, Residency::Cold, 0);
    log.send(acquire(1, "l", 60_000)).unwrap();
    assert_eq!(log.code(command(3)), ErrorCode::Busy);
    assert_eq!(log.revision(1).availability, Availability::Ready, "before any side effect");
    log.send(release(1, "l")).unwrap();
    assert_eq!(log.events(command(3)), ["CLAIM_PHASE", "OPERATION_STARTED", "REVISION_DELETING", "OPERATION_STARTED"]);
}

#[test]
fn delete_first_lets_the_target_in_only_after_the_base_is_gone_and_survives_a_failed_import() {
    let mut log = Log::new();
    log.put(1, hot());
    let claim = log.accept_claim(replace(1, 2, UpsertMode::DeleteFirst, 2, "r1"));
    let operation = log.operation(&claim.operation_id);
    assert_eq!((phase(&log), status(&log, &operation)), (ClaimPhase::DeletingBase, WAITS_FOR_DELETION));
    assert_eq!(log.code(Command::BeginImport(begin(2, hot()))), ErrorCode::NotReady);
    assert_eq!(log.code(abort("r1")), ErrorCode::Busy);
    log.finish_deletion(1);
    assert_eq!((phase(&log), status(&log, &operation)), (ClaimPhase::TargetImporting, WAITS_FOR_TARGET));
    log.import(begin(2, hot()));
    log.pass(15_000);
    assert_eq!(phase(&log), ClaimPhase::TargetImporting, "it waits for the next import");
    log.finish_deletion(2);
    let session = log.import(begin(2, policy(Residency::Mixed, MigrationMode::Auto)));
    let events = log.events(Command::CommitImport(commit(&session, manifest(2))));
    assert_eq!(events, ["REVISION_READY", "OPERATION_STARTED", "CLAIM_PHASE", "OPERATION_ENDED"]);
    assert_eq!((phase(&log), watermark(&log)), (ClaimPhase::Completed, 2));
    assert_eq!(status(&log, &operation).0, OperationStatus::Succeeded);
    assert_eq!(log.active(2).status, OperationStatus::Runnable);
    let again = log.accept_claim(replace(1, 2, UpsertMode::DeleteFirst, 2, "r1"));
    assert_eq!(again.phase, ClaimPhase::Completed, "the same request hears its end");
}

#[test]
fn delete_first_can_be_given_up_and_taken_up_again_once_its_base_is_gone() {
    let mut log = Log::new();
    log.put(1, hot());
    log.send(replace(1, 2, UpsertMode::DeleteFirst, 2, "r1")).unwrap();
    log.finish_deletion(1);
    log.import(begin(2, hot()));
    let claim = log.accept_claim(abort("r1"));
    assert_eq!(claim.phase, ClaimPhase::Aborted);
    assert_eq!(log.accept_claim(abort("r1")), claim);
    log.finish_deletion(2);
    let again = log.accept_claim(replace(1, 2, UpsertMode::DeleteFirst, 2, "r1"));
    assert_eq!((again.phase, again.attempt), (ClaimPhase::TargetImporting, 2));
    log.put(2, hot());
    assert_eq!(phase(&log), ClaimPhase::Completed);
}

#[test]
fn an_aborted_replacement_keeps_a_published_target_as_if_it_had_been_put() {
    let mut log = Log::new();
    log.put(1, hot());
    put_first(&mut log);
    log.put(2, policy(Residency::Cold, MigrationMode::Manual));
    assert_eq!(log.code(abort("other")), ErrorCode::NotFound);
    log.send(abort("r1")).unwrap();
    assert_eq!((phase(&log), watermark(&log)), (ClaimPhase::Aborted, 2));
    assert_eq!(log.active(2).status, OperationStatus::Runnable);
    assert_eq!(log.code(replace(1, 2, UpsertMode::PutFirst, 2, "r1")), ErrorCode::Busy, "its target is migrating");
    log.finish_migration(2, Residency::Cold, 0);
    let claim = log.accept_claim(replace(1, 2, UpsertMode::PutFirst, 2, "r1"));
    assert_eq!((claim.phase, claim.attempt), (ClaimPhase::TargetImporting, 2));
    assert_eq!(log.operation(&claim.operation_id).status, OperationStatus::Runnable);
}

#[test]
fn a_replacement_that_was_given_up_begins_anew_on_the_base_as_it_is_by_then() {
    let mut log = Log::new();
    log.put(1, hot());
    put_first(&mut log);
    assert_eq!(log.code(replace(1, 2, UpsertMode::PutFirst, 3, "r1")), ErrorCode::Conflict, "it is still open");
    log.send(abort("r1")).unwrap();
    let pinned = policy(Residency::Hot, MigrationMode::Pinned);
    let update = UpdatePolicy { identity: identity(1), policy: pinned, expected_metadata_generation: 2 };
    log.send(Command::UpdatePolicy(update)).unwrap();
    assert_eq!(log.code(replace(1, 2, UpsertMode::PutFirst, 2, "r1")), ErrorCode::StaleGeneration);
    assert_eq!(log.code(replace(1, 3, UpsertMode::PutFirst, 3, "r1")), ErrorCode::Conflict);
    let claim = log.accept_claim(replace(1, 2, UpsertMode::PutFirst, 3, "r1"));
    assert_eq!((claim.phase, claim.attempt), (ClaimPhase::PreparingTarget, 2));
    assert_eq!(claim.expected_base_generation, 3);
}

#[test]
fn a_fenced_base_can_only_go_forward() {
    let mut log = Log::new();
    log.put(1, hot());
    let operation = put_first(&mut log);
    log.put(2, hot());
    let operation = wake(&mut log, &operation);
    log.send(to(&operation, ClaimPhase::RetiringBase)).unwrap();
    assert_eq!(log.code(abort("r1")), ErrorCode::Conflict);
    let claim = log.accept_claim(to(&operation, ClaimPhase::RetiringBase));
    assert_eq!(claim.phase, ClaimPhase::RetiringBase, "a repeat");
    log.send(to(&operation, ClaimPhase::DeletingBase)).unwrap();
    assert_eq!(log.code(Command::CancelOperation(operation.operation_id.clone())), ErrorCode::Conflict);
    log.finish_deletion(1);
    assert_eq!(log.code(abort("r1")), ErrorCode::Conflict);
}

#[test]
fn a_degraded_base_can_be_replaced_in_both_modes() {
    for mode in [UpsertMode::PutFirst, UpsertMode::DeleteFirst] {
        let mut log = Log::new();
        let base = log.put(1, hot());
        log.send(degraded(&base, base.instance.position)).unwrap();
        log.send(replace(1, 2, mode, 3, "r1")).unwrap();
        if mode == UpsertMode::DeleteFirst {
            log.finish_deletion(1);
        }
        log.put(2, hot());
        if mode == UpsertMode::PutFirst {
            let operation = log.operation(&log.state.claim(&identity(1).lineage()).unwrap().operation_id.clone());
            let operation = wake(&mut log, &operation);
            log.send(to(&operation, ClaimPhase::RetiringBase)).unwrap();
            log.send(to(&operation, ClaimPhase::DeletingBase)).unwrap();
            log.finish_deletion(1);
        }
        assert_eq!((phase(&log), watermark(&log)), (ClaimPhase::Completed, 2));
    }
}

use ballast_schemas::{
    CLAIM_TTL_MS, Command, ErrorCode, LogPosition, MigrationMode, OperationId, OperationStatus, ParkReason,
    RETRY_BUDGET, RenewClaim, Residency, WeightOperation,
};

use super::OperationKey;
use crate::testing::*;

/// A log with one revision whose initial migration to COLD wants a worker.
fn migrating() -> (Log, OperationId) {
    let mut log = Log::new();
    log.put(1, policy(Residency::Cold, MigrationMode::Manual));
    let id = log.active(1).operation_id;
    (log, id)
}

fn runnable(log: &Log) -> Vec<OperationId> {
    log.state.runnable_operations().map(|operation| operation.operation_id.clone()).collect()
}

#[test]
fn an_id_has_one_spelling() {
    let at = |seq, index, n| OperationId::at(LogPosition { seq, index }, n);
    assert_eq!(OperationKey::of(&at(10, 2, 0)), Some(OperationKey(10, 2, 0)));
    assert_eq!(OperationKey::of(&at(9, 0, 3)), Some(OperationKey(9, 0, 3)));
    for wrong in ["op-", "op-1", "op-1.2.0", "op-01.2", "op-1.2.3.4", "x-1.2", "op-+1.2"] {
        assert_eq!(OperationKey::of(&OperationId::new(wrong).unwrap()), None, "{wrong}");
    }
}

#[test]
fn a_claim_gives_an_epoch_and_a_fence_and_holds_off_other_workers() {
    let (mut log, id) = migrating();
    assert_eq!(runnable(&log), std::slice::from_ref(&id));
    let first = log.accept_operation(claim(&id, "w1"));
    assert_eq!((first.status, first.epoch), (OperationStatus::Claimed, 1));
    assert_eq!(first.fence, LogPosition { seq: log.state.log_seq(), index: 0 });
    assert!(runnable(&log).is_empty());
    let busy = log.refused(claim(&id, "w2"));
    assert_eq!((busy.code, busy.details["worker"].as_str()), (ErrorCode::Busy, Some("w1")));
    let again = log.accept_operation(claim(&id, "w1"));
    assert_eq!(again.epoch, 1);
    assert!(again.fence > first.fence, "what the worker lost track of can not be taken for done");
    let nothing = OperationId::new("op-77.0").unwrap();
    assert_eq!(log.code(claim(&nothing, "w1")), ErrorCode::NotFound);
}

#[test]
fn a_silent_claim_lapses_and_the_zombie_is_refused() {
    let (mut log, id) = migrating();
    let zombie = log.accept_operation(claim(&id, "w1"));
    log.pass(5_000);
    log.send(Command::RenewClaim(RenewClaim { operation_id: id.clone(), epoch: 1, ttl_ms: CLAIM_TTL_MS })).unwrap();
    log.pass(5_999);
    assert_eq!(log.operation(&id).status, OperationStatus::Claimed);
    assert_eq!(log.pass(1), ["OPERATION_PROGRESS"]);
    assert_eq!(runnable(&log), std::slice::from_ref(&id));
    let next = log.accept_operation(claim(&id, "w2"));
    assert_eq!(next.epoch, 2);
    for late in [
        step(&zombie, 2, false),
        leave(&zombie, 2),
        attempt_failed(&zombie, false),
        park(&zombie, ParkReason::Node, None),
        finished(&zombie, Residency::Cold, 0),
        Command::RenewClaim(RenewClaim { operation_id: id.clone(), epoch: 1, ttl_ms: 1_000 }),
    ] {
        assert_eq!(log.code(late), ErrorCode::Conflict);
    }
    assert_eq!(log.operation(&id), next);
}

#[test]
fn steps_follow_each_other_a_repeat_changes_nothing_and_progress_renews_the_claim() {
    let (mut log, id) = migrating();
    let start = log.accept_operation(claim(&id, "w1"));
    log.pass(5_000);
    let second = log.accept_operation(step(&start, 2, false));
    assert_eq!((second.cursor, second.processed_units, second.processed_bytes), (2, 2, 200));
    assert_eq!(log.accept_operation(step(&start, 2, false)), second);
    assert_eq!(log.code(step(&start, 3, false)), ErrorCode::Conflict);
    assert_eq!(log.code(step(&second, 2, false)), ErrorCode::Conflict);
    log.pass(5_000);
    assert_eq!(log.operation(&id).status, OperationStatus::Claimed);
    let third = log.accept_operation(step(&second, 4, false));
    assert_eq!(third.cursor, 4);
}

#[test]
fn failures_back_off_doubling_then_are_called_stuck_then_end_it() {
    let (mut log, id) = migrating();
    let mut waited = Vec::new();
    for attempt in 1..RETRY_BUDGET {
        let operation = log.accept_operation(claim(&id, "w1"));
        let events = log.events(attempt_failed(&operation, false));
        assert_eq!(events.contains(&"OPERATION_STUCK"), attempt == RETRY_BUDGET / 2);
        let operation = log.operation(&id);
        assert_eq!((operation.status, operation.attempts), (OperationStatus::BackingOff, attempt));
        let wait = operation.wake_at.unwrap().0 - log.clock();
        log.pass(wait - 1);
        assert_eq!(log.operation(&id).status, OperationStatus::BackingOff);
        log.pass(1);
        assert_eq!(log.operation(&id).status, OperationStatus::Runnable);
        waited.push(wait);
    }
    assert_eq!(waited, [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]);
    let operation = log.accept_operation(claim(&id, "w1"));
    assert_eq!(log.events(attempt_failed(&operation, false)), ["OPERATION_ENDED"]);
    let ended = log.operation(&id);
    assert_eq!((ended.status, ended.last_error.unwrap().message.as_str()), (OperationStatus::Failed, "disk full"));
    assert_eq!((log.revision(1).availability.name(), &log.revision(1).operation_id), ("READY", &None));
    log.send(migrate(1, Residency::Cold, log.generation(1))).unwrap();
}

#[test]
fn progress_gives_a_fresh_budget_and_a_permanent_failure_needs_none() {
    let (mut log, id) = migrating();
    let operation = log.accept_operation(claim(&id, "w1"));
    log.send(attempt_failed(&operation, false)).unwrap();
    log.pass(1_000);
    let operation = log.accept_operation(claim(&id, "w1"));
    assert_eq!(log.accept_operation(step(&operation, 1, false)).attempts, 0);
    assert_eq!(log.events(attempt_failed(&operation, true)), ["OPERATION_ENDED"]);
    assert_eq!(log.operation(&id).status, OperationStatus::Failed);
    assert_eq!(log.code(claim(&id, "w1")), ErrorCode::NotReady);
}

#[test]
fn a_deletion_never_gives_up() {
    let mut log = Log::new();
    log.put(1, hot());
    log.send(remove(1, 2)).unwrap();
    let id = log.active(1).operation_id;
    for _ in 0..RETRY_BUDGET * 2 {
        let operation = log.accept_operation(claim(&id, "w1"));
        log.send(attempt_failed(&operation, true)).unwrap();
        assert_eq!(log.operation(&id).status, OperationStatus::BackingOff);
        log.pass(30_000);
    }
    assert_eq!(log.code(Command::CancelOperation(id)), ErrorCode::Conflict);
    log.finish_deletion(1);
}

#[test]
fn waiting_costs_no_attempt_and_a_timer_ends_it() {
    let (mut log, id) = migrating();
    let operation = log.accept_operation(claim(&id, "w1"));
    log.send(park(&operation, ParkReason::Node, Some(2_000))).unwrap();
    let parked = log.operation(&id);
    assert_eq!((parked.status, parked.attempts, parked.worker), (OperationStatus::Parked, 0, None));
    assert_eq!(log.state.next_deadline(), parked.wake_at);
    assert_eq!(log.code(claim(&id, "w2")), ErrorCode::NotReady);
    log.pass(2_000);
    assert_eq!(log.operation(&id).status, OperationStatus::Runnable);
    let operation = log.accept_operation(claim(&id, "w1"));
    log.send(park(&operation, ParkReason::Memory, None)).unwrap();
    assert!(log.operation(&id).wake_at.is_some(), "the fold can not see memory, so there is always a timer");
}

#[test]
fn a_wait_for_what_has_ended_meanwhile_does_not_begin() {
    let (mut log, id) = migrating();
    log.send(acquire(1, "l", 60_000)).unwrap();
    let operation = log.accept_operation(claim(&id, "w1"));
    log.send(release(1, "l")).unwrap();
    log.send(park(&operation, ParkReason::LeaseDrain, None)).unwrap();
    assert_eq!(log.operation(&id).status, OperationStatus::Runnable);
    let operation = log.accept_operation(claim(&id, "w1"));
    log.send(park(&operation, ParkReason::BaseDeletion, None)).unwrap();
    assert_eq!(log.operation(&id).status, OperationStatus::Runnable);
}

#[test]
fn pause_stops_at_once_and_resume_goes_on() {
    let (mut log, id) = migrating();
    let operation = log.accept_operation(claim(&id, "w1"));
    for _ in 0..2 {
        log.send(Command::PauseOperation(id.clone())).unwrap();
    }
    assert_eq!(log.operation(&id).status, OperationStatus::Paused);
    assert_eq!(log.code(step(&operation, 1, false)), ErrorCode::Conflict);
    assert_eq!(log.code(Command::RetryOperation(id.clone())), ErrorCode::NotReady);
    log.pass(60_000);
    assert_eq!(log.state.next_deadline(), None);
    for _ in 0..2 {
        log.send(Command::ResumeOperation(id.clone())).unwrap();
    }
    assert_eq!(log.operation(&id).status, OperationStatus::Runnable);
}

#[test]
fn cancel_ends_at_once_where_nothing_is_outstanding() {
    let (mut log, id) = migrating();
    log.accept_operation(claim(&id, "w1"));
    assert_eq!(log.events(Command::CancelOperation(id.clone())), ["OPERATION_ENDED"]);
    assert_eq!(log.operation(&id).status, OperationStatus::Cancelled);
    log.send(Command::CancelOperation(id.clone())).unwrap();
    for control in [Command::PauseOperation, Command::ResumeOperation, Command::RetryOperation] {
        assert_eq!(log.code(control(id.clone())), ErrorCode::Conflict);
    }
    log.send(remove(1, log.generation(1))).unwrap();
}

#[test]
fn retry_ends_a_back_off_with_a_fresh_budget() {
    let (mut log, id) = migrating();
    for _ in 0..3 {
        let operation = log.accept_operation(claim(&id, "w1"));
        log.send(attempt_failed(&operation, false)).unwrap();
        log.send(Command::RetryOperation(id.clone())).unwrap();
        assert_eq!((log.operation(&id).status, log.operation(&id).attempts), (OperationStatus::Runnable, 0));
    }
}

#[test]
fn operations_are_listed_newest_first_and_by_tenant() {
    let mut log = Log::new();
    log.put(1, hot());
    for target in [Residency::Cold, Residency::Hot, Residency::Cold] {
        log.send(migrate(1, target, log.generation(1))).unwrap();
        let ppm = if target == Residency::Hot { 1_000_000 } else { 0 };
        log.finish_migration(1, target, ppm);
    }
    log.send(migrate(1, Residency::Hot, log.generation(1))).unwrap();
    let tenant = identity(1).tenant_id.clone();
    let targets = |operations: Vec<WeightOperation>| operations.iter().map(|op| op.target.unwrap()).collect::<Vec<_>>();
    assert_eq!(targets(log.state.operations(&tenant, true, 3)), [Residency::Hot, Residency::Cold, Residency::Hot]);
    assert_eq!(targets(log.state.operations(&tenant, false, 3)), [Residency::Hot]);
    let other = ballast_schemas::TenantId::new("other").unwrap();
    assert!(log.state.operations(&other, true, 10).is_empty());
}

use ballast_schemas::{
    Availability, Command, ErrorCode, HotRatio, MigrationMode, MigrationTrigger, OperationStatus, ParkReason,
    Residency, StartMigration, WeightOperation,
};

use crate::testing::*;

fn start(target: Residency, ppm: Option<u32>, expected: u64, trigger: MigrationTrigger) -> Command {
    Command::StartMigration(StartMigration {
        identity: identity(1),
        target,
        target_hot_ratio: ppm.map(|ppm| HotRatio::from_ppm(ppm).unwrap()),
        expected_metadata_generation: expected,
        trigger,
    })
}

/// Claimed, with a release of two units authorised.
fn releasing() -> (Log, WeightOperation) {
    let mut log = Log::new();
    log.put(1, policy(Residency::Cold, MigrationMode::Manual));
    let operation = log.claimed(1, "w1");
    let operation = log.accept_operation(leave(&operation, 2));
    (log, operation)
}

#[test]
fn the_same_target_returns_the_same_operation_and_another_is_busy() {
    let mut log = Log::new();
    log.put(1, hot());
    assert_eq!(log.code(migrate(1, Residency::Cold, 1)), ErrorCode::StaleGeneration);
    let operation = log.accept_operation(migrate(1, Residency::Cold, 2));
    assert_eq!((operation.fenced_generation, log.generation(1)), (2, 3));
    for expected in [2, 3] {
        assert_eq!(log.accept_operation(migrate(1, Residency::Cold, expected)), operation);
    }
    assert_eq!(log.code(migrate(1, Residency::Cold, 1)), ErrorCode::StaleGeneration);
    assert_eq!(log.code(migrate(1, Residency::Hot, 3)), ErrorCode::Busy);
    assert_eq!(log.code(migrate(1, Residency::Mixed, 3)), ErrorCode::Busy);
}

#[test]
fn a_mixed_migration_takes_the_policys_ratio_unless_told() {
    let mut log = Log::new();
    log.put(1, hot());
    let operation = log.accept_operation(start(Residency::Mixed, None, 2, MigrationTrigger::Explicit));
    assert_eq!(operation.target_hot_ratio, Some(HotRatio::HALF));
    assert_eq!(log.accept_operation(start(Residency::Mixed, Some(500_000), 2, MigrationTrigger::Explicit)), operation);
    assert_eq!(log.code(start(Residency::Mixed, Some(250_000), 2, MigrationTrigger::Explicit)), ErrorCode::Busy);
    assert_eq!(
        log.code(start(Residency::Cold, Some(250_000), 2, MigrationTrigger::Explicit)),
        ErrorCode::InvalidArgument
    );
    assert_eq!(log.code(start(Residency::Absent, None, 2, MigrationTrigger::Explicit)), ErrorCode::InvalidArgument);
}

#[test]
fn a_pinned_revision_moves_only_until_it_has_converged() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Cold, MigrationMode::Pinned));
    let initial = log.active(1);
    log.send(Command::CancelOperation(initial.operation_id)).unwrap();
    assert_eq!(log.code(migrate(1, Residency::Mixed, log.generation(1))), ErrorCode::PolicyUnsatisfiable);
    log.send(migrate(1, Residency::Cold, log.generation(1))).unwrap();
    log.finish_migration(1, Residency::Cold, 0);
    for target in [Residency::Hot, Residency::Cold, Residency::Mixed] {
        assert_eq!(log.code(migrate(1, target, log.generation(1))), ErrorCode::PolicyUnsatisfiable);
    }
    log.send(remove(1, log.generation(1))).unwrap();
}

#[test]
fn a_migration_to_where_it_is_already_is_an_operation_that_ends_soon() {
    let mut log = Log::new();
    log.put(1, hot());
    log.send(migrate(1, Residency::Hot, 2)).unwrap();
    assert_eq!(log.finish_migration(1, Residency::Hot, 1_000_000).status, OperationStatus::Succeeded);
}

#[test]
fn pressure_needs_auto_and_no_lease_and_the_cooldown() {
    let mut log = Log::new();
    log.put(1, hot());
    assert_eq!(log.code(start(Residency::Cold, None, 2, MigrationTrigger::Pressure)), ErrorCode::PolicyUnsatisfiable);
    let mut log = Log::new();
    log.put(1, policy(Residency::Hot, MigrationMode::Auto));
    log.send(acquire(1, "l", 10_000)).unwrap();
    assert_eq!(log.code(start(Residency::Mixed, None, 2, MigrationTrigger::Pressure)), ErrorCode::Busy);
    log.send(release(1, "l")).unwrap();
    log.send(start(Residency::Mixed, None, 2, MigrationTrigger::Pressure)).unwrap();
    log.finish_migration(1, Residency::Mixed, 500_000);
    let second = log.accept_operation(start(Residency::Cold, None, log.generation(1), MigrationTrigger::Pressure));
    assert_eq!((second.status, second.park_reason), (OperationStatus::Parked, Some(ParkReason::Cooldown)));
    log.send(Command::CancelOperation(second.operation_id)).unwrap();
    let explicit = log.accept_operation(start(Residency::Cold, None, log.generation(1), MigrationTrigger::Explicit));
    assert_eq!(explicit.status, OperationStatus::Runnable, "the cooldown is for AUTO");
}

#[test]
fn an_end_records_what_was_found_and_clears_the_operation_in_one_change() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Mixed, MigrationMode::Auto));
    let operation = log.claimed(1, "w1");
    let mut end = finished(&operation, Residency::Mixed, 480_000);
    if let Command::OperationFinished(command) = &mut end {
        command.note = Some("the nearest split".into());
    }
    assert_eq!(log.events(end.clone()), ["OPERATION_ENDED"]);
    let record = log.revision(1);
    assert_eq!((record.residency, record.observed_hot_ppm), (Residency::Mixed, 480_000));
    assert_eq!((record.metadata_generation, &record.operation_id), (3, &None));
    let ended = log.accept_operation(end);
    assert_eq!((ended.status, ended.note.as_deref()), (OperationStatus::Succeeded, Some("the nearest split")));
}

#[test]
fn an_end_that_does_not_reach_the_target_or_rests_on_old_evidence_is_refused() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Cold, MigrationMode::Auto));
    let before = log.active(1);
    let operation = log.claimed(1, "w1");
    assert_eq!(log.code(finished(&operation, Residency::Mixed, 1)), ErrorCode::Conflict);
    let stale = WeightOperation { fence: before.fence, ..operation.clone() };
    assert_eq!(log.code(finished(&stale, Residency::Cold, 0)), ErrorCode::Conflict);
    log.send(finished(&operation, Residency::Cold, 0)).unwrap();
}

#[test]
fn leave_to_release_is_refused_under_a_lease_and_the_operation_waits_for_its_end() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Cold, MigrationMode::Manual));
    log.send(acquire(1, "l1", 60_000)).unwrap();
    log.send(acquire(1, "l2", 8_000)).unwrap();
    let operation = log.claimed(1, "w1");
    assert_eq!(log.code(leave(&operation, 2)), ErrorCode::Busy);
    let parked = log.operation(&operation.operation_id);
    assert_eq!((parked.status, parked.park_reason), (OperationStatus::Parked, Some(ParkReason::LeaseDrain)));
    log.send(release(1, "l1")).unwrap();
    assert_eq!(log.operation(&operation.operation_id).status, OperationStatus::Parked);
    assert_eq!(log.pass(8_000), ["OPERATION_PROGRESS"]);
    assert_eq!(log.operation(&operation.operation_id).status, OperationStatus::Runnable);
}

#[test]
fn leave_given_stands_against_later_leases_until_it_is_reported() {
    let (mut log, operation) = releasing();
    assert!(operation.release_outstanding);
    assert_eq!(operation.fence.seq, log.state.log_seq());
    log.send(acquire(1, "later", 60_000)).unwrap();
    assert_eq!(log.accept_operation(leave(&operation, 2)), log.operation(&operation.operation_id), "a repeat");
    assert_eq!(log.code(leave(&operation, 3)), ErrorCode::Conflict);
    assert_eq!(log.code(step(&operation, 2, false)), ErrorCode::NotReady);
    assert_eq!(log.code(finished(&operation, Residency::Cold, 0)), ErrorCode::NotReady);
    let next = log.accept_operation(step(&operation, 2, true));
    assert!(!next.release_outstanding);
    assert_eq!(log.code(leave(&next, 2)), ErrorCode::Busy, "the lease protects what is left");
}

#[test]
fn an_operation_with_a_release_outstanding_ends_only_after_it() {
    let (mut log, operation) = releasing();
    assert_eq!(log.events(Command::CancelOperation(operation.operation_id.clone())), ["OPERATION_PROGRESS"]);
    let ending = log.operation(&operation.operation_id);
    assert_eq!((ending.status, ending.ending), (OperationStatus::Claimed, Some(OperationStatus::Cancelled)));
    assert!(ending.fence > operation.fence, "a fence that closes the release out");
    assert_eq!(log.code(leave(&ending, 2)), ErrorCode::Conflict);
    assert_eq!(log.code(remove(1, log.generation(1))), ErrorCode::Busy);
    assert_eq!(log.events(step(&ending, ending.cursor, true)), ["OPERATION_ENDED"]);
    assert_eq!(log.operation(&operation.operation_id).status, OperationStatus::Cancelled);
}

#[test]
fn an_operation_that_fails_for_good_with_a_release_outstanding_is_closed_out_by_the_next_claim() {
    let (mut log, operation) = releasing();
    log.send(attempt_failed(&operation, true)).unwrap();
    let id = operation.operation_id;
    assert_eq!(
        (log.operation(&id).status, log.operation(&id).ending),
        (OperationStatus::Runnable, Some(OperationStatus::Failed))
    );
    let claimed = log.accept_operation(claim(&id, "w2"));
    assert_eq!(log.code(step(&claimed, claimed.cursor, false)), ErrorCode::Conflict);
    assert_eq!(log.events(step(&claimed, claimed.cursor, true)), ["OPERATION_ENDED"]);
    let ended = log.operation(&id);
    assert_eq!((ended.status, ended.last_error.unwrap().message.as_str()), (OperationStatus::Failed, "disk full"));
}

#[test]
fn a_cancel_finds_an_operation_that_waits_with_a_release_outstanding() {
    for stop in ["park", "pause", "lapse"] {
        let (mut log, operation) = releasing();
        match stop {
            "park" => drop(log.send(park(&operation, ParkReason::Readers, Some(1_000))).unwrap()),
            "pause" => drop(log.send(Command::PauseOperation(operation.operation_id.clone())).unwrap()),
            _ => drop(log.pass(6_000)),
        }
        log.send(Command::CancelOperation(operation.operation_id.clone())).unwrap();
        let id = operation.operation_id;
        assert_eq!(log.operation(&id).status, OperationStatus::Runnable, "{stop}");
        let claimed = log.accept_operation(claim(&id, "w2"));
        log.send(step(&claimed, claimed.cursor, true)).unwrap();
        assert_eq!(log.operation(&id).status, OperationStatus::Cancelled, "{stop}");
    }
}

/// Cold by request a moment ago, then read: the promotion to the preferred residency waits for the cooldown.
fn waiting_promotion() -> (Log, WeightOperation) {
    let mut log = Log::new();
    log.put(1, policy(Residency::Hot, MigrationMode::Auto));
    log.send(start(Residency::Cold, None, log.generation(1), MigrationTrigger::Explicit)).unwrap();
    log.finish_migration(1, Residency::Cold, 0);
    log.send(acquire(1, "l", 10_000)).unwrap();
    log.send(release(1, "l")).unwrap();
    let waiting = log.active(1);
    assert_eq!(waiting.park_reason, Some(ParkReason::Cooldown));
    (log, waiting)
}

#[test]
fn an_automatic_migration_in_its_cooldown_steps_aside_for_what_a_person_asks() {
    let (mut log, waiting) = waiting_promotion();
    let generation = log.generation(1);
    let asked = log.accept_operation(start(Residency::Mixed, None, generation, MigrationTrigger::Explicit));
    assert_eq!(
        (asked.status, log.operation(&waiting.operation_id).status),
        (OperationStatus::Runnable, OperationStatus::Superseded)
    );
    assert_eq!(log.generation(1), generation + 1, "one change of the record");

    let (mut log, waiting) = waiting_promotion();
    log.send(remove(1, log.generation(1))).unwrap();
    assert_eq!(log.operation(&waiting.operation_id).status, OperationStatus::Superseded);
    assert_eq!(log.revision(1).availability, Availability::Deleting);
}

#[test]
fn asking_for_what_waits_for_its_cooldown_starts_it_at_once() {
    let (mut log, waiting) = waiting_promotion();
    let asked = log.accept_operation(start(Residency::Hot, None, log.generation(1), MigrationTrigger::Explicit));
    assert_eq!((&asked.operation_id, asked.status), (&waiting.operation_id, OperationStatus::Runnable));
    assert_eq!(asked.trigger, Some(MigrationTrigger::Explicit));
}

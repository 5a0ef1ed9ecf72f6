use ballast_schemas::{
    AcquireLease, Availability, Command, ErrorCode, LeaseGrant, MigrationMode, MigrationTrigger, OperationStatus,
    Outcome, ParkReason, Reply, Residency,
};

use crate::testing::*;

fn grant(outcome: Outcome) -> LeaseGrant {
    match outcome {
        Ok(Reply::Lease(grant)) => grant.into_inner(),
        other => panic!("not a lease: {other:?}"),
    }
}

fn lapsed(outcome: Outcome) -> bool {
    match outcome {
        Ok(Reply::LeaseEnded { lapsed }) => lapsed,
        other => panic!("not an end: {other:?}"),
    }
}

#[test]
fn only_a_ready_revision_grants_leases() {
    let mut log = Log::new();
    assert_eq!(log.code(acquire(1, "l", 1000)), ErrorCode::NotFound);
    log.import(begin(1, hot()));
    let refused = log.refused(acquire(1, "l", 1000));
    assert_eq!((refused.code, refused.details["availability"].as_str()), (ErrorCode::NotReady, Some("IMPORTING")));
    log.send(remove(1, 1)).unwrap_err();
    for ttl_ms in [0, 86_400_001] {
        assert_eq!(log.code(acquire(1, "l", ttl_ms)), ErrorCode::InvalidArgument);
    }
    assert_eq!(log.revision(1).availability, Availability::Importing);
}

#[test]
fn a_lease_changes_neither_generation_nor_record_but_the_access_time() {
    let mut log = Log::new();
    let before = log.put(1, hot());
    let grant = grant(log.send(acquire(1, "l", 60_000)));
    assert_eq!((grant.ttl_ms, grant.expires_at.0 - log.clock()), (60_000, 60_000));
    assert_eq!(grant.instance, before.instance);
    let after = log.revision(1).clone();
    assert_eq!(after.metadata_generation, before.metadata_generation);
    assert_eq!(after.last_accessed_unix_ms, START_MS);
    let view = log.state.view(&identity(1)).unwrap();
    assert_eq!((view.active_lease_count, view.nearest_lease_expiry_ms), (1, Some(60_000)));
    assert_eq!(log.state.counts().active_leases, 1);
}

#[test]
fn a_repeated_acquire_finds_its_lease_and_one_with_other_terms_does_not() {
    let mut log = Log::new();
    log.put(1, hot());
    let first = grant(log.send(acquire(1, "l", 60_000)));
    log.pass(10_000);
    assert_eq!(grant(log.send(acquire(1, "l", 60_000))), first);
    assert_eq!(log.code(acquire(1, "l", 50_000)), ErrorCode::Conflict);
    let other = AcquireLease { identity: identity(1), lease_id: lease("l"), holder: "someone".into(), ttl_ms: 60_000 };
    assert_eq!(log.code(Command::AcquireLease(other)), ErrorCode::Conflict);
}

#[test]
fn a_renewal_never_shortens() {
    let mut log = Log::new();
    log.put(1, hot());
    let first = grant(log.send(acquire(1, "l", 60_000)));
    log.pass(5_000);
    assert_eq!(grant(log.send(renew(1, "l", 1_000))), first);
    let longer = grant(log.send(renew(1, "l", 60_000)));
    assert_eq!(longer.expires_at.0, log.clock() + 60_000);
}

#[test]
fn a_release_says_whether_the_lease_had_lapsed_and_says_it_again() {
    let mut log = Log::new();
    log.put(1, hot());
    log.send(acquire(1, "kept", 60_000)).unwrap();
    log.send(acquire(1, "lost", 1_000)).unwrap();
    log.pass(1_000);
    for _ in 0..2 {
        assert!(!lapsed(log.send(release(1, "kept"))));
        assert!(lapsed(log.send(release(1, "lost"))));
    }
    assert!(lapsed(log.send(release(1, "never"))));
    assert!(lapsed(log.send(release(9, "never"))));
    assert_eq!(log.code(renew(1, "lost", 1_000)), ErrorCode::LeaseExpired);
    assert_eq!(log.code(renew(1, "kept", 1_000)), ErrorCode::LeaseExpired);
}

#[test]
fn a_late_repeat_of_an_acquire_does_not_bring_an_ended_lease_back() {
    let mut log = Log::new();
    log.put(1, hot());
    let record = log.record(acquire(1, "l", 1_000));
    log.fold(vec![record.clone()]);
    log.send(release(1, "l")).unwrap();
    log.pass(59_000);
    assert_eq!(log.fold(vec![record.clone()]).outcomes[0].as_ref().unwrap_err().code, ErrorCode::LeaseExpired);
    log.pass(2_000);
    assert_eq!(log.fold(vec![record]).outcomes[0].as_ref().unwrap_err().code, ErrorCode::Unavailable);
    log.pass(120_000);
    assert_eq!(log.state.record.ended_leases.len(), 0, "forgotten in the end");
}

#[test]
fn a_read_of_a_colder_auto_revision_starts_its_promotion_in_the_entry_that_grants_the_lease() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Hot, MigrationMode::Auto));
    log.send(migrate(1, Residency::Cold, 2)).unwrap();
    log.finish_migration(1, Residency::Cold, 0);
    log.pass(30_000);
    assert_eq!(log.events(acquire(1, "l", 60_000)), ["OPERATION_STARTED"]);
    let operation = log.active(1);
    assert_eq!((operation.target, operation.trigger), (Some(Residency::Hot), Some(MigrationTrigger::Access)));
    assert_eq!(operation.status, OperationStatus::Runnable);
    assert!(log.events(acquire(1, "l2", 60_000)).is_empty(), "one operation at a time");
}

#[test]
fn cooldown_delays_the_steps_of_a_promotion_not_its_persistence() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Hot, MigrationMode::Auto));
    log.send(migrate(1, Residency::Cold, 2)).unwrap();
    log.finish_migration(1, Residency::Cold, 0);
    log.pass(10_000);
    log.send(acquire(1, "l", 60_000)).unwrap();
    let operation = log.active(1);
    assert_eq!((operation.status, operation.park_reason), (OperationStatus::Parked, Some(ParkReason::Cooldown)));
    log.pass(19_999);
    assert_eq!(log.active(1).status, OperationStatus::Parked);
    assert_eq!(log.pass(1), ["OPERATION_PROGRESS"]);
    assert_eq!(log.active(1).status, OperationStatus::Runnable);
}

#[test]
fn neither_manual_nor_a_satisfied_split_is_promoted_by_a_read() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Hot, MigrationMode::Manual));
    log.send(migrate(1, Residency::Cold, 2)).unwrap();
    log.finish_migration(1, Residency::Cold, 0);
    log.pass(60_000);
    assert!(log.events(acquire(1, "l", 1_000)).is_empty());
    log.put(2, policy(Residency::Mixed, MigrationMode::Auto));
    // One unit: the nearest split may be COLD; it must not be tried again on every read.
    log.finish_migration(2, Residency::Cold, 0);
    log.pass(60_000);
    assert!(log.events(acquire(2, "l", 1_000)).is_empty());
    log.send(migrate(2, Residency::Cold, 3)).unwrap();
    log.finish_migration(2, Residency::Cold, 0);
    log.pass(60_000);
    assert_eq!(log.events(acquire(2, "l2", 1_000)), ["OPERATION_STARTED"]);
}

use ballast_schemas::{
    Availability, Command, ErrorCode, InstanceStanding, LogPosition, MigrationMode, MigrationTrigger, NodeId,
    OperationStatus, PurgeTombstone, Residency, UpdatePolicy, UpsertMode, WeightStoragePolicy,
};

use crate::testing::*;

fn update(policy: WeightStoragePolicy, expected: u64) -> Command {
    Command::UpdatePolicy(UpdatePolicy { identity: identity(1), policy, expected_metadata_generation: expected })
}

#[test]
fn a_policy_changes_under_its_generation_and_a_repeat_returns_the_record() {
    let mut log = Log::new();
    log.put(1, hot());
    let pinned = policy(Residency::Hot, MigrationMode::Pinned);
    let stale = log.refused(update(pinned, 1));
    assert_eq!(stale.code, ErrorCode::StaleGeneration);
    assert_eq!((stale.details["expected"].as_u64(), stale.details["current"].as_u64()), (Some(1), Some(2)));
    assert_eq!(log.events(update(pinned, 2)), ["POLICY_UPDATED"]);
    assert_eq!(log.generation(1), 3);
    for expected in [2, 3] {
        assert_eq!(log.accept_revision(update(pinned, expected)).metadata_generation, 3, "expected {expected}");
    }
    assert_eq!(log.code(update(pinned, 1)), ErrorCode::StaleGeneration);
}

#[test]
fn a_policy_does_not_change_under_an_active_operation_nor_before_publication() {
    let mut log = Log::new();
    log.import(begin(1, policy(Residency::Cold, MigrationMode::Manual)));
    assert_eq!(log.code(update(hot(), 1)), ErrorCode::NotReady);
    let session = log.state.import(&identity(1)).unwrap().clone();
    log.send(Command::CommitImport(commit(&session, manifest(1)))).unwrap();
    let operation = log.active(1);
    let busy = log.refused(update(hot(), 99));
    assert_eq!(
        (busy.code, busy.details["operation_id"].as_str()),
        (ErrorCode::Busy, Some(operation.operation_id.as_str()))
    );
    log.finish_migration(1, Residency::Cold, 0);
    log.send(update(hot(), 3)).unwrap();
    assert_eq!(log.revision(1).operation_id, None, "MANUAL waits to be asked");
    assert_eq!(
        log.code(Command::UpdatePolicy(UpdatePolicy {
            identity: identity(2),
            policy: hot(),
            expected_metadata_generation: 1
        })),
        ErrorCode::NotFound
    );
}

#[test]
fn an_auto_policy_converges_by_itself_inside_the_same_change() {
    let mut log = Log::new();
    log.put(1, hot());
    let auto = policy(Residency::Mixed, MigrationMode::Auto);
    assert_eq!(log.events(update(auto, 2)), ["POLICY_UPDATED", "OPERATION_STARTED"]);
    assert_eq!(log.generation(1), 3);
    let operation = log.active(1);
    assert_eq!((operation.target, operation.trigger), (Some(Residency::Mixed), Some(MigrationTrigger::Policy)));
    assert_eq!(log.accept_revision(update(auto, 2)).metadata_generation, 3);
}

#[test]
fn remove_walks_ready_deleting_deleted_and_every_repeat_returns_the_record() {
    let mut log = Log::new();
    log.put(1, hot());
    assert_eq!(log.code(remove(1, 1)), ErrorCode::StaleGeneration);
    assert_eq!(log.code(remove(2, 1)), ErrorCode::NotFound);
    assert_eq!(log.events(remove(1, 2)), ["REVISION_DELETING", "OPERATION_STARTED"]);
    let record = log.revision(1).clone();
    assert_eq!((record.availability, record.metadata_generation), (Availability::Deleting, 3));
    for expected in [2, 3] {
        assert_eq!(log.accept_revision(remove(1, expected)), record);
    }
    assert_eq!(log.code(acquire(1, "l", 1000)), ErrorCode::NotReady);
    assert_eq!(log.finish_deletion(1), ["OPERATION_ENDED", "REVISION_DELETED"]);
    let tombstone = log.revision(1).clone();
    assert_eq!((tombstone.availability, tombstone.residency), (Availability::Deleted, Residency::Absent));
    assert_eq!((tombstone.operation_id.clone(), tombstone.metadata_generation), (None, 4));
    assert!(tombstone.manifest.is_some(), "a tombstone says what it was");
    assert_eq!(log.accept_revision(remove(1, 2)), tombstone);
    assert_eq!(log.code(Command::BeginImport(begin(1, hot()))), ErrorCode::Conflict);
}

#[test]
fn remove_is_busy_under_a_lease_or_a_migration_and_not_ready_while_importing() {
    let mut log = Log::new();
    log.import(begin(1, policy(Residency::Cold, MigrationMode::Manual)));
    let importing = log.refused(remove(1, 1));
    assert!(importing.code == ErrorCode::NotReady && importing.message.contains("abort its import"), "{importing:?}");
    let session = log.state.import(&identity(1)).unwrap().clone();
    log.send(Command::CommitImport(commit(&session, manifest(1)))).unwrap();
    let busy = log.refused(remove(1, 2));
    assert_eq!((busy.code, busy.details["operation_id"].is_string()), (ErrorCode::Busy, true));
    log.finish_migration(1, Residency::Cold, 0);
    log.send(acquire(1, "l", 10_000)).unwrap();
    let busy = log.refused(remove(1, 3));
    assert_eq!((busy.code, busy.details["active_lease_count"].as_u64()), (ErrorCode::Busy, Some(1)));
    log.send(release(1, "l")).unwrap();
    log.send(remove(1, 3)).unwrap();
}

#[test]
fn a_purged_tombstone_is_forgotten_but_its_watermark_is_not() {
    let mut log = Log::new();
    let record = log.put(1, hot());
    let purge = Command::PurgeTombstone(PurgeTombstone { identity: identity(1) });
    assert_eq!(log.code(purge.clone()), ErrorCode::NotReady);
    log.send(remove(1, 2)).unwrap();
    log.finish_deletion(1);
    log.send(purge.clone()).unwrap();
    assert_eq!(log.code(purge), ErrorCode::NotFound);
    assert_eq!(log.state.watermark(&identity(1).lineage()), 1);
    let refused = log.refused(Command::BeginImport(begin(1, hot())));
    assert!(refused.message.contains("watermark 1"));
    assert_eq!(log.state.instance_standing(&record.instance), InstanceStanding::Unknown);
}

#[test]
fn a_tombstone_that_lost_nodes_owe_for_is_not_purged() {
    let mut log = Log::new();
    log.put(1, hot());
    log.send(remove(1, 2)).unwrap();
    let operation = log.claimed(1, "w");
    log.send(Command::DeletionFinished(ballast_schemas::DeletionFinished {
        operation_id: operation.operation_id,
        epoch: operation.epoch,
        owed: vec![NodeId::new("lost").unwrap()],
    }))
    .unwrap();
    let refused = log.refused(Command::PurgeTombstone(PurgeTombstone { identity: identity(1) }));
    assert!(refused.message.contains("lost"));
}

#[test]
fn a_degraded_revision_refuses_new_leases_keeps_old_ones_and_recovers() {
    let mut log = Log::new();
    let record = log.put(1, hot());
    log.send(acquire(1, "l", 60_000)).unwrap();
    let fence = record.instance.position;
    assert_eq!(log.events(degraded(&record, fence)), ["REVISION_DEGRADED"]);
    assert_eq!(log.revision(1).availability, Availability::Degraded);
    assert!(log.send(degraded(&record, fence)).is_ok(), "a repeat");
    assert_eq!(log.code(acquire(1, "l2", 1000)), ErrorCode::NotReady);
    log.send(renew(1, "l", 60_000)).unwrap();
    assert_eq!(log.code(recovered(&record, fence, Residency::Absent)), ErrorCode::InvalidArgument);
    let events = log.events(recovered(&record, fence, Residency::Mixed));
    assert_eq!(events, ["REVISION_READY", "OPERATION_STARTED"], "it is brought back to HOT");
    assert_eq!((log.revision(1).availability, log.revision(1).residency), (Availability::Ready, Residency::Mixed));
}

#[test]
fn evidence_older_than_the_last_effect_or_of_other_bytes_does_not_count() {
    let mut log = Log::new();
    let record = log.put(1, policy(Residency::Cold, MigrationMode::Auto));
    let operation = log.claimed(1, "w");
    assert_eq!(log.code(degraded(&record, record.instance.position)), ErrorCode::Conflict);
    let mut other = record.clone();
    other.instance.position = LogPosition { seq: 1, index: 0 };
    assert_eq!(log.code(degraded(&other, operation.fence)), ErrorCode::Conflict);
    let events = log.events(degraded(&record, operation.fence));
    assert_eq!(events, ["OPERATION_ENDED", "REVISION_DEGRADED"]);
    assert_eq!(log.operation(&operation.operation_id).status, OperationStatus::Superseded);
    let events = log.events(recovered(&record, operation.fence, Residency::Hot));
    assert_eq!(events, ["REVISION_READY", "OPERATION_STARTED"], "the initial convergence goes on");
}

#[test]
fn nothing_touches_base_or_target_of_a_replacement_under_way() {
    let mut log = Log::new();
    log.put(1, hot());
    log.send(replace(1, 2, UpsertMode::PutFirst, 2, "r")).unwrap();
    let refused = log.refused(remove(1, 2));
    assert_eq!((refused.code, refused.details["request_id"].as_str()), (ErrorCode::Busy, Some("r")));
    log.put(2, hot());
    assert_eq!(log.code(remove(2, 2)), ErrorCode::Busy);
    assert_eq!(log.code(migrate(2, Residency::Cold, 2)), ErrorCode::Busy);
}

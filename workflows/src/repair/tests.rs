use ballast_schemas::*;

use super::*;
use crate::testing::*;

fn repair(generation: u64, expected: u64) -> Command {
    Command::StartRepair(StartRepair { identity: identity(generation), expected_metadata_generation: expected })
}

fn units(of: &[u32]) -> Bitmap {
    let mut bitmap = Bitmap::empty(4);
    of.iter().for_each(|unit| bitmap.set(*unit, true));
    bitmap
}

fn held(metadata: &WeightRevisionMetadata, hot: &[u32], cold: &[u32], cold_lost: &[u32]) -> GroupInventory {
    let inventory = NodeInventory {
        node: node(),
        incarnation: "i".into(),
        instance: metadata.instance.clone(),
        fence: metadata.instance.position,
        sealed: true,
        manifest: true,
        hot: units(hot),
        cold: units(cold),
        cold_lost: units(cold_lost),
    };
    GroupInventory { nodes: [(node(), inventory)].into() }
}

fn follows(log: &Log, held: &GroupInventory) -> Option<Command> {
    verdict(&log.state, log.revision(1), held, evidence(log.state.effect_fence(&identity(1))), None)
}

#[test]
fn a_revision_is_told_to_degrade_exactly_when_a_unit_is_readable_nowhere() {
    let mut log = Log::new();
    let record = log.put(1, hot());
    assert_eq!(follows(&log, &held(&record, &[0, 1, 2, 3], &[], &[])), None);
    let repairable = follows(&log, &held(&record, &[0, 1, 2], &[3], &[])).unwrap();
    assert_eq!(repairable, repair(1, record.metadata_generation));
    let lost = follows(&log, &held(&record, &[0, 1, 2], &[], &[])).unwrap();
    assert!(matches!(&lost, Command::RevisionDegraded(c) if c.reason.ends_with("on any node: 3")), "{lost:?}");
    log.send(lost).unwrap();
    assert_eq!(follows(&log, &held(&record, &[0, 1, 2], &[], &[])), None, "nothing more to say");
    log.send(follows(&log, &held(&record, &[0, 1, 2, 3], &[], &[])).unwrap()).unwrap();
    assert_eq!(log.revision(1).availability, Availability::Ready);
}

#[test]
fn a_copy_on_disk_that_was_found_wrong_is_wanted_again_and_one_that_never_was_is_not() {
    let mut log = Log::new();
    let record = log.put(1, hot());
    assert_eq!(follows(&log, &held(&record, &[0, 1, 2, 3], &[0, 1], &[])), None);
    assert!(follows(&log, &held(&record, &[0, 1, 2, 3], &[0, 1], &[2])).is_some());
}

#[test]
fn degrading_needs_a_word_about_every_node_of_the_placement() {
    let mut log = Log::new();
    let record = log.put(1, hot());
    let Command::RevisionDegraded(mut told) = degraded(&record, record.instance.position) else { unreachable!() };
    told.evidence[0].node = NodeId::new("another").unwrap();
    assert_eq!(log.code(Command::RevisionDegraded(told)), ErrorCode::InvalidArgument);
    log.send(degraded(&record, record.instance.position)).unwrap();
}

#[test]
fn two_watchers_start_one_repair_and_a_stale_one_is_refused() {
    let mut log = Log::new();
    let record = log.put(1, hot());
    let seen = record.metadata_generation;
    let first = log.accept_operation(repair(1, seen));
    assert_eq!((first.kind, first.target), (OperationKind::Repairing, Some(Residency::Hot)));
    assert_eq!(log.accept_operation(repair(1, seen)).operation_id, first.operation_id);
    assert_eq!(log.code(migrate(1, Residency::Cold, seen + 1)), ErrorCode::Busy);
    let operation = log.claimed(1, "w");
    let done = log.accept_operation(finished(&operation, Residency::Hot, 1_000_000));
    assert_eq!(done.status, OperationStatus::Succeeded);
    assert_eq!(log.code(repair(1, seen)), ErrorCode::StaleGeneration);
}

#[test]
fn a_repair_of_a_degraded_revision_makes_it_ready_with_its_end() {
    let mut log = Log::new();
    let record = log.put(1, hot());
    log.send(degraded(&record, record.instance.position)).unwrap();
    log.send(repair(1, log.generation(1))).unwrap();
    let operation = log.claimed(1, "w");
    let end = finished(&operation, Residency::Hot, 1_000_000);
    assert_eq!(log.events(end), ["OPERATION_ENDED", "REVISION_READY"]);
    assert_eq!(log.revision(1).availability, Availability::Ready);
}

#[test]
fn what_cannot_be_repaired_stays_degraded_and_its_operation_fails() {
    let mut log = Log::new();
    let record = log.put(1, hot());
    log.send(repair(1, record.metadata_generation)).unwrap();
    let operation = log.claimed(1, "w");
    log.send(degraded(&record, operation.fence)).unwrap();
    assert_eq!(log.operation(&operation.operation_id).status, OperationStatus::Claimed, "it does what can be done");
    let failed = log.accept_operation(attempt_failed(&operation, true));
    assert_eq!(failed.status, OperationStatus::Failed);
    assert_eq!((log.revision(1).availability, log.revision(1).operation_id.clone()), (Availability::Degraded, None));
}

#[test]
fn a_revision_that_recovers_colder_than_it_was_is_brought_back_to_where_it_was() {
    let mut log = Log::new();
    let record = log.put(1, hot());
    log.send(degraded(&record, record.instance.position)).unwrap();
    let events = log.events(recovered(&record, record.instance.position, Residency::Cold));
    assert_eq!(events, ["REVISION_READY", "OPERATION_STARTED"]);
    let operation = log.active(1);
    assert_eq!((operation.kind, operation.target), (OperationKind::Repairing, Some(Residency::Hot)));
    assert_eq!(log.revision(1).residency, Residency::Cold, "what is there now");
}

#[test]
fn the_degraded_target_of_a_replacement_is_repaired_while_the_replacement_waits() {
    let mut log = Log::new();
    log.put(1, hot());
    log.send(replace(1, 2, UpsertMode::PutFirst, 2, "r")).unwrap();
    let target = log.put(2, hot());
    assert_eq!(log.code(repair(2, target.metadata_generation)), ErrorCode::Busy);
    log.send(degraded(&target, target.instance.position)).unwrap();
    log.send(repair(2, log.generation(2))).unwrap();
    assert_eq!(log.active(2).status, OperationStatus::Runnable);
    let operation = log.claimed(2, "w");
    log.send(finished(&operation, Residency::Hot, 1_000_000)).unwrap();
    assert_eq!(log.revision(2).availability, Availability::Ready);
}

#[test]
fn a_repair_without_memory_steps_aside_for_what_a_person_asks() {
    let mut log = Log::new();
    let record = log.put(1, hot());
    log.send(repair(1, record.metadata_generation)).unwrap();
    let operation = log.claimed(1, "w");
    log.send(park(&operation, ParkReason::Memory, Some(5_000))).unwrap();
    log.send(migrate(1, Residency::Cold, log.generation(1))).unwrap();
    assert_eq!(log.operation(&operation.operation_id).status, OperationStatus::Superseded);
}

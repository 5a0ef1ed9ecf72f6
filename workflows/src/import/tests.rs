use ballast_schemas::{
    AbortImport, Availability, Command, DeletionFinished, Digest, ErrorCode, InstanceId, InstanceStanding, LogPosition,
    MigrationMode, NodeId, OperationKind, OperationStatus, RenewImport, Residency,
};

use crate::testing::*;

fn abort(generation: u64) -> Command {
    let session_id = session(&format!("s{generation}"));
    Command::AbortImport(AbortImport { identity: identity(generation), session_id, coordinator: None })
}

#[test]
fn an_import_is_importing_and_unknown_and_a_repeated_begin_finds_its_session() {
    let mut log = Log::new();
    let first = log.import(begin(1, hot()));
    assert_eq!(first.instance.position, LogPosition { seq: 2, index: 0 });
    let revision = log.revision(1).clone();
    assert_eq!((revision.availability, revision.residency), (Availability::Importing, Residency::Unknown));
    assert_eq!((revision.metadata_generation, revision.manifest), (1, None));
    assert_eq!(log.import(begin(1, hot())), first);
    let mut elsewhere = begin(1, hot());
    elsewhere.placement = vec![NodeId::new("n9").unwrap()];
    assert_eq!(log.import(elsewhere), first, "where it was placed first stands");
    let mut other = begin(1, hot());
    other.unit_count = 5;
    assert_eq!(log.code(Command::BeginImport(other)), ErrorCode::Conflict);
}

#[test]
fn another_session_is_told_when_the_open_one_ends() {
    let mut log = Log::new();
    log.import(begin(1, hot()));
    log.pass(4_000);
    let mut other = begin(1, hot());
    other.session_id = session("other");
    let busy = log.refused(Command::BeginImport(other));
    assert_eq!(busy.code, ErrorCode::Busy);
    assert_eq!(busy.details["session_expiry_ms"], 11_000);
}

#[test]
fn impossible_announcements_are_refused() {
    let mut log = Log::new();
    let variants: [fn(&mut ballast_schemas::BeginImport); 5] = [
        |c| c.ttl_ms = 0,
        |c| c.ttl_ms = 3_600_001,
        |c| c.unit_count = 0,
        |c| c.placement.clear(),
        |c| c.placement.push(node()),
    ];
    for change in variants {
        let mut command = begin(1, hot());
        change(&mut command);
        assert_eq!(log.code(Command::BeginImport(command)), ErrorCode::InvalidArgument);
    }
    assert!(log.state.revision(&identity(1)).is_none());
}

#[test]
fn a_renewed_session_lives_and_a_silent_one_becomes_a_deletion() {
    let mut log = Log::new();
    log.import(begin(1, hot()));
    let renew =
        Command::RenewImport(RenewImport { identity: identity(1), session_id: session("s1"), coordinator: None });
    for _ in 0..5 {
        log.pass(10_000);
        log.send(renew.clone()).unwrap();
    }
    let events = log.pass(15_000);
    assert_eq!(events, ["REVISION_DELETING", "OPERATION_STARTED"]);
    assert_eq!(log.revision(1).availability, Availability::Deleting);
    assert_eq!(log.active(1).kind, OperationKind::Deleting);
    assert_eq!(log.code(renew), ErrorCode::LeaseExpired);
    assert_eq!(log.code(Command::BeginImport(begin(1, hot()))), ErrorCode::Busy);
}

#[test]
fn a_tombstone_that_was_never_ready_does_not_block_the_next_import() {
    let mut log = Log::new();
    let first = log.import(begin(1, hot()));
    assert_eq!(log.events(abort(1)), ["REVISION_DELETING", "OPERATION_STARTED"]);
    log.send(abort(1)).unwrap();
    assert_eq!(log.finish_deletion(1), ["OPERATION_ENDED", "REVISION_DELETED"]);
    log.send(abort(1)).unwrap();
    assert_eq!(log.state.instance_standing(&first.instance), InstanceStanding::Deleted);
    let generation = log.generation(1);
    let second = log.import(begin(1, hot()));
    assert_ne!(second.instance, first.instance);
    assert_eq!(log.generation(1), generation + 1, "a fence of the first import can not fit the second");
    assert_eq!(log.state.instance_standing(&first.instance), InstanceStanding::Deleted);
    assert_eq!(log.state.instance_standing(&second.instance), InstanceStanding::Known);
    let future = InstanceId { position: LogPosition { seq: 999, index: 0 }, ..second.instance.clone() };
    assert_eq!(log.state.instance_standing(&future), InstanceStanding::Unknown);
    let elsewhere = InstanceId { group_id: identity(7).group_id(), ..second.instance };
    assert_eq!(log.state.instance_standing(&elsewhere), InstanceStanding::Unknown);
}

#[test]
fn a_commit_publishes_ready_and_hot_and_its_repeat_returns_the_record() {
    let mut log = Log::new();
    let session = log.import(begin(1, hot()));
    let command = Command::CommitImport(commit(&session, manifest(1)));
    assert_eq!(log.events(command.clone()), ["REVISION_READY"]);
    let revision = log.revision(1).clone();
    assert_eq!(
        (revision.availability, revision.residency, revision.observed_hot_ppm),
        (Availability::Ready, Residency::Hot, 1_000_000)
    );
    assert_eq!((revision.metadata_generation, &revision.operation_id), (2, &None));
    assert_eq!(log.state.watermark(&identity(1).lineage()), 1);
    assert_eq!(log.accept_revision(command), revision);
    let mut other = manifest(1);
    other.sha256 = Digest::of(b"other");
    assert_eq!(log.code(Command::CommitImport(commit(&session, other))), ErrorCode::Conflict);
    assert_eq!(log.code(abort(1)), ErrorCode::Conflict);
    assert_eq!(log.code(Command::BeginImport(begin(1, hot()))), ErrorCode::Conflict);
}

#[test]
fn a_preference_other_than_hot_starts_its_migration_in_the_same_entry() {
    for (preferred, mode) in [(Residency::Cold, MigrationMode::Pinned), (Residency::Mixed, MigrationMode::Manual)] {
        let mut log = Log::new();
        let session = log.import(begin(1, policy(preferred, mode)));
        let events = log.events(Command::CommitImport(commit(&session, manifest(1))));
        assert_eq!(events, ["REVISION_READY", "OPERATION_STARTED"]);
        let operation = log.active(1);
        assert_eq!((operation.kind, operation.target), (OperationKind::Migrating, Some(preferred)));
        assert_eq!(
            (operation.status, operation.total_units, operation.total_bytes),
            (OperationStatus::Runnable, 4, 400)
        );
        assert_eq!(operation.target_hot_ratio.is_some(), preferred == Residency::Mixed);
        assert_eq!(log.generation(1), 2, "one durable mutation");
    }
}

#[test]
fn a_commit_without_every_receipt_names_the_nodes_that_are_missing() {
    let mut log = Log::new();
    let mut two = begin(1, hot());
    two.placement = vec![node(), NodeId::new("n2").unwrap()];
    let session = log.import(two);
    let mut command = commit(&session, manifest(1));
    let second = command.receipts.pop().unwrap();
    let refused = log.refused(Command::CommitImport(command.clone()));
    assert_eq!((refused.code, refused.details["missing"][0].as_str()), (ErrorCode::NotReady, Some("n2")));
    let mut wrong = second.clone();
    wrong.manifest.sha256 = Digest::of(b"other");
    command.receipts.push(wrong);
    let refused = log.refused(Command::CommitImport(command.clone()));
    assert_eq!((refused.code, refused.details["node"].as_str()), (ErrorCode::Conflict, Some("n2")));
    command.receipts[1] = second;
    log.send(Command::CommitImport(command)).unwrap();
}

#[test]
fn a_commit_must_be_of_what_was_announced_under_this_revisions_key() {
    let mut log = Log::new();
    let session = log.import(begin(1, hot()));
    let with = |change: fn(&mut ballast_schemas::ManifestRef)| {
        let mut manifest = manifest(1);
        change(&mut manifest);
        Command::CommitImport(commit(&session, manifest))
    };
    assert_eq!(log.code(with(|m| m.key.push('x'))), ErrorCode::InvalidArgument);
    assert_eq!(log.code(with(|m| m.affinity_count = 3)), ErrorCode::Conflict);
    assert_eq!(log.code(with(|m| m.logical_bytes = 3)), ErrorCode::Conflict);
    let mut other = commit(&session, manifest(1));
    other.session_id = super::SessionId::new("other").unwrap();
    assert_eq!(log.code(Command::CommitImport(other)), ErrorCode::Conflict);
    assert_eq!(log.revision(1).availability, Availability::Importing);
}

#[test]
fn a_generation_at_or_below_the_watermark_never_enters() {
    let mut log = Log::new();
    let low = log.import(begin(2, hot()));
    log.put(3, hot());
    let refused = log.refused(Command::CommitImport(commit(&low, manifest(2))));
    assert_eq!((refused.code, refused.details["watermark"].as_u64()), (ErrorCode::Conflict, Some(3)));
    let refused = log.refused(Command::BeginImport(begin(1, hot())));
    assert!(refused.message.contains("watermark 3"), "{}", refused.message);
}

#[test]
fn an_expired_session_can_not_be_committed() {
    let mut log = Log::new();
    let session = log.import(begin(1, hot()));
    log.pass(15_000);
    let command = Command::CommitImport(commit(&session, manifest(1)));
    assert_eq!(log.code(command.clone()), ErrorCode::LeaseExpired);
    let operation = log.claimed(1, "w");
    let done = DeletionFinished { operation_id: operation.operation_id, epoch: operation.epoch, owed: vec![] };
    log.send(Command::DeletionFinished(done)).unwrap();
    assert_eq!(log.code(command), ErrorCode::LeaseExpired);
}

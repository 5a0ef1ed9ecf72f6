use ballast_schemas::{
    AbortImport, Availability, BeginSharedImport, Command, CommitImport, Digest, ErrorCode, ImportPart, ImportSession,
    JoinImport, LogTime, PartWriter, ParticipantId, Rejection, RenewImport, Reply, WriterId,
};

use crate::State;
use crate::revision::{Import, Part};
use crate::testing::*;

fn rank(n: u32) -> ParticipantId {
    ParticipantId::new(format!("rank{n}")).unwrap()
}

fn run(text: &str) -> WriterId {
    WriterId::new(text).unwrap()
}

fn begin_shared(generation: u64, ranks: u32) -> BeginSharedImport {
    let participants = (0..ranks).map(rank).collect();
    BeginSharedImport { import: begin(generation, hot()), participants, writer_id: run("coordinator") }
}

fn begin_as(generation: u64, ranks: u32, writer: &str) -> Command {
    Command::BeginSharedImport(BeginSharedImport { writer_id: run(writer), ..begin_shared(generation, ranks) })
}

fn session_of(log: &mut Log, command: Command) -> ImportSession {
    match log.send(command) {
        Ok(Reply::Import(session)) => *session,
        other => panic!("not a session: {other:?}"),
    }
}

fn open(log: &mut Log, generation: u64, ranks: u32) -> ImportSession {
    session_of(log, Command::BeginSharedImport(begin_shared(generation, ranks)))
}

fn renew_of(session: &ImportSession) -> Command {
    let (identity, session_id) = (session.identity.clone(), session.session_id.clone());
    Command::RenewImport(RenewImport { identity, session_id, coordinator: session.coordinator() })
}

fn abort_of(session: &ImportSession) -> Command {
    let (identity, session_id) = (session.identity.clone(), session.session_id.clone());
    Command::AbortImport(AbortImport { identity, session_id, coordinator: session.coordinator() })
}

fn join(session: &ImportSession, n: u32, writer: &str) -> JoinImport {
    JoinImport {
        identity: session.identity.clone(),
        session_id: session.session_id.clone(),
        participant: rank(n),
        writer_id: WriterId::new(writer).unwrap(),
        placement_digest: session.placement_digest,
    }
}

fn writer(session: &ImportSession, n: u32, epoch: u64) -> PartWriter {
    let (identity, session_id) = (session.identity.clone(), session.session_id.clone());
    PartWriter { identity, session_id, participant: rank(n), instance: session.instance.clone(), epoch }
}

fn part(log: &mut Log, command: Command) -> ImportPart {
    match log.send(command) {
        Ok(Reply::Part(part)) => *part,
        other => panic!("not a participant: {other:?}"),
    }
}

fn joined(log: &mut Log, session: &ImportSession, n: u32, writer: &str) -> u64 {
    part(log, Command::JoinImport(join(session, n, writer))).epoch
}

fn commit_of(session: &ImportSession) -> CommitImport {
    commit(session, manifest(session.identity.weight_generation))
}

fn named(refused: &Rejection) -> Vec<&str> {
    refused.details["participants"].as_array().unwrap().iter().filter_map(|name| name.as_str()).collect()
}

#[test]
fn a_commit_waits_for_every_participant_and_names_those_that_are_missing() {
    let mut log = Log::new();
    let session = open(&mut log, 1, 3);
    assert!((0..2).all(|n| joined(&mut log, &session, n, "a") == 1));
    assert!(part(&mut log, Command::FinishPart(writer(&session, 0, 1))).done);
    log.pass(4_000);
    let refused = log.refused(Command::CommitImport(commit_of(&session)));
    assert_eq!((refused.code, named(&refused)), (ErrorCode::NotReady, vec!["rank2", "rank1"]));
    assert!(refused.message.contains("rank1 was last heard of 4.0 s ago"), "{}", refused.message);
    assert!(refused.message.contains("rank2 has not joined"), "{}", refused.message);
    joined(&mut log, &session, 2, "a");
    for n in 1..3 {
        part(&mut log, Command::FinishPart(writer(&session, n, 1)));
    }
    let parts = log.state.import_parts(&session.identity);
    assert!(parts.len() == 3 && parts.iter().all(|part| part.done && part.epoch == 1));
    assert_eq!(log.events(Command::CommitImport(commit_of(&session))), ["REVISION_READY"]);
    assert_eq!(log.revision(1).availability, Availability::Ready);
    assert!(log.state.import_parts(&session.identity).is_empty());
}

#[test]
fn another_run_of_a_participant_takes_its_place_and_finishes_again() {
    let mut log = Log::new();
    let session = open(&mut log, 1, 1);
    assert_eq!(joined(&mut log, &session, 0, "first"), 1);
    assert_eq!(joined(&mut log, &session, 0, "first"), 1, "a repeat finds its own epoch");
    assert_eq!(joined(&mut log, &session, 0, "second"), 2);
    for stale in [Command::RenewPart(writer(&session, 0, 1)), Command::FinishPart(writer(&session, 0, 1))] {
        let refused = log.refused(stale);
        assert_eq!((refused.code, refused.details["epoch"].as_u64()), (ErrorCode::Conflict, Some(2)));
    }
    assert!(part(&mut log, Command::FinishPart(writer(&session, 0, 2))).done);
    assert_eq!(joined(&mut log, &session, 0, "second"), 2);
    assert!(log.state.import_parts(&session.identity)[0].done, "a repeat of its own join takes nothing back");
    // The third run may hold other bytes than the second had finished.
    assert_eq!(joined(&mut log, &session, 0, "third"), 3);
    let refused = log.refused(Command::CommitImport(commit_of(&session)));
    assert_eq!((refused.code, named(&refused)), (ErrorCode::NotReady, vec!["rank0"]));
    part(&mut log, Command::FinishPart(writer(&session, 0, 3)));
    log.send(Command::CommitImport(commit_of(&session))).unwrap();
}

#[test]
fn a_coordinator_that_comes_again_takes_the_session_over_and_the_one_before_it_can_not_touch_it() {
    let mut log = Log::new();
    let first = open(&mut log, 1, 1);
    assert_eq!((first.epoch, open(&mut log, 1, 1).epoch), (1, 1), "a repeat finds its own epoch");
    joined(&mut log, &first, 0, "a");
    part(&mut log, Command::FinishPart(writer(&first, 0, 1)));
    log.pass(10_000);
    let second = session_of(&mut log, begin_as(1, 1, "second"));
    assert_eq!((&second.instance, second.epoch), (&first.instance, 2), "nothing is begun anew");
    assert_eq!(second.expires_at, log.state.log_clock().plus_ms(second.ttl_ms));
    for stale in [renew_of(&first), Command::CommitImport(commit_of(&first)), abort_of(&first)] {
        let refused = log.refused(stale);
        assert_eq!((refused.code, refused.details["epoch"].as_u64()), (ErrorCode::Conflict, Some(2)));
    }
    // Its begin, read once more and late, does not bring it back.
    assert_eq!(log.code(Command::BeginSharedImport(begin_shared(1, 1))), ErrorCode::Conflict);
    let nameless = ImportSession { epoch: 0, ..second.clone() };
    for unsaid in [renew_of(&nameless), Command::CommitImport(commit_of(&nameless)), abort_of(&nameless)] {
        assert_eq!(log.code(unsaid), ErrorCode::InvalidArgument, "which run says so is not said");
    }
    assert_eq!(session_of(&mut log, renew_of(&second)), log.state.import(&first.identity).unwrap().clone());
    log.send(Command::CommitImport(commit_of(&second))).unwrap();
    assert_eq!(log.revision(1).availability, Availability::Ready);
}

#[test]
fn a_coordinator_does_not_speak_for_the_next_import_under_its_name() {
    let mut log = Log::new();
    let old = open(&mut log, 1, 1);
    log.pass(15_000);
    log.finish_deletion(1);
    let new = session_of(&mut log, begin_as(1, 1, "next"));
    assert_eq!((&new.session_id, new.epoch), (&old.session_id, old.epoch));
    for late in [renew_of(&old), abort_of(&old)] {
        assert_eq!(log.code(late), ErrorCode::LeaseExpired);
    }
    assert_eq!(log.revision(1).availability, Availability::Importing);
    log.send(abort_of(&new)).unwrap();
    assert_eq!(log.revision(1).availability, Availability::Deleting);
}

#[test]
fn many_runs_of_a_coordinator_follow_each_other() {
    let mut log = Log::new();
    let first = open(&mut log, 1, 1);
    for n in 2..30 {
        assert_eq!(session_of(&mut log, begin_as(1, 1, &format!("run{n}"))).epoch, n);
    }
    assert_eq!(log.code(begin_as(1, 1, "run28")), ErrorCode::Conflict);
    assert_eq!(log.state.import(&first.identity).unwrap().epoch, 29);
}

#[test]
fn a_restored_state_with_participants_that_no_command_makes_is_refused() {
    type Spoil = fn(&mut Import);
    fn rank0(import: &mut Import) -> &mut Part {
        import.parts.get_mut(&rank(0)).unwrap()
    }
    let spoils: [(&str, Spoil); 8] = [
        ("rank0 is at epoch 0", |import| rank0(import).epoch = 0),
        ("rank0 is at epoch 1", |import| rank0(import).writer_id = None),
        ("rank1 is done", |import| import.parts.get_mut(&rank(1)).unwrap().done = true),
        ("rank0 was heard of", |import| rank0(import).heard_at = LogTime(1_000_000)),
        ("the session ends", |import| import.session.expires_at = LogTime(1)),
        ("under epoch 0", |import| import.session.epoch = 0),
        ("of 0 coordinators", |import| import.coordinators.clear()),
        ("0 participants", |import| import.parts.clear()),
    ];
    let mut log = Log::new();
    let session = open(&mut log, 1, 2);
    joined(&mut log, &session, 0, "a");
    assert_eq!(log.state.check_restored(), Ok(()));
    for (named, spoil) in spoils {
        let mut state = log.state.clone();
        let revision = state.record.revisions.get_mut(&session.identity).unwrap();
        spoil(revision.import.as_mut().unwrap());
        let violation = state.check_restored().unwrap_err();
        assert!(violation.invariant == "participants" && violation.message.contains(named), "{violation}");
    }
}

#[test]
fn a_stale_rank_is_refused_at_once() {
    let mut log = Log::new();
    let old = open(&mut log, 1, 1);
    joined(&mut log, &old, 0, "old");
    log.pass(15_000);
    // Its session ended, and its remains are being deleted.
    for late in [Command::JoinImport(join(&old, 0, "late")), Command::RenewPart(writer(&old, 0, 1))] {
        assert_eq!(log.code(late), ErrorCode::LeaseExpired);
    }
    log.finish_deletion(1);
    assert_eq!(log.code(Command::JoinImport(join(&old, 0, "late"))), ErrorCode::LeaseExpired);
    // The next session of the same generation is another one's.
    let mut next = begin_shared(1, 1);
    next.import.session_id = session("next");
    log.send(Command::BeginSharedImport(next)).unwrap();
    let refused = log.refused(Command::JoinImport(join(&old, 0, "late")));
    assert_eq!(refused.code, ErrorCode::Conflict);
    assert!(refused.message.contains("session next, not by s1"), "{}", refused.message);
    assert_eq!(log.code(Command::FinishPart(writer(&old, 0, 1))), ErrorCode::Conflict);
    // A generation that is published takes nobody any more.
    log.put(2, hot());
    let published = ImportSession { identity: identity(2), ..old };
    assert_eq!(log.code(Command::JoinImport(join(&published, 0, "late"))), ErrorCode::Conflict);
}

#[test]
fn what_is_said_of_an_import_that_ended_does_not_count_for_the_next_under_its_name() {
    let mut log = Log::new();
    let old = open(&mut log, 1, 1);
    let epoch = joined(&mut log, &old, 0, "old");
    log.pass(15_000);
    log.finish_deletion(1);
    let new = open(&mut log, 1, 1);
    assert_eq!((&new.session_id, joined(&mut log, &new, 0, "new")), (&old.session_id, epoch));
    assert_eq!(log.code(Command::FinishPart(writer(&old, 0, epoch))), ErrorCode::LeaseExpired);
    assert!(!log.state.import_parts(&new.identity)[0].done);
}

#[test]
fn whoever_is_at_work_keeps_the_session_open() {
    let mut log = Log::new();
    let session = open(&mut log, 1, 2);
    let epoch = joined(&mut log, &session, 1, "a");
    for _ in 0..5 {
        log.pass(10_000);
        let heard = part(&mut log, Command::RenewPart(writer(&session, 1, epoch))).heard_at;
        assert_eq!(heard, log.state.log_clock());
    }
    assert_eq!(log.revision(1).availability, Availability::Importing);
    log.pass(15_000);
    assert_eq!(log.revision(1).availability, Availability::Deleting);
}

#[test]
fn strangers_other_geometries_and_sessions_of_one_writer_are_refused_by_name() {
    let mut log = Log::new();
    let session = open(&mut log, 1, 2);
    let refused = log.refused(Command::JoinImport(join(&session, 7, "a")));
    assert_eq!((refused.code, refused.details["participant"].as_str()), (ErrorCode::InvalidArgument, Some("rank7")));
    let mut other = join(&session, 1, "a");
    other.placement_digest = Digest::of(b"another geometry");
    let refused = log.refused(Command::JoinImport(other));
    assert_eq!((refused.code, refused.details["participant"].as_str()), (ErrorCode::Conflict, Some("rank1")));
    for epoch in [0, 1] {
        let refused = log.refused(Command::FinishPart(writer(&session, 1, epoch)));
        assert_eq!(refused.code, ErrorCode::Conflict);
        assert!(refused.message.contains("rank1 of session s1 has not joined"), "{}", refused.message);
    }
    assert!(log.state.import_parts(&session.identity).iter().all(|part| !part.done));
    let mut log = Log::new();
    let alone = log.import(begin(1, hot()));
    assert_eq!(log.code(Command::JoinImport(join(&alone, 0, "a"))), ErrorCode::InvalidArgument);
}

#[test]
fn a_repeated_begin_has_to_name_the_same_participants() {
    let mut log = Log::new();
    let session = open(&mut log, 1, 2);
    assert_eq!(open(&mut log, 1, 2), session);
    assert_eq!(log.code(begin_as(1, 3, "coordinator")), ErrorCode::Conflict);
    assert_eq!(log.code(Command::BeginImport(begin(1, hot()))), ErrorCode::Conflict);
    let long = |n: u32| ParticipantId::new(format!("{n:0>128}")).unwrap();
    let wrong = [vec![], vec![rank(0), rank(0)], (0..1025).map(rank).collect(), (0..129).map(long).collect()];
    for participants in wrong {
        let command = BeginSharedImport { participants, ..begin_shared(2, 1) };
        assert_eq!(log.code(Command::BeginSharedImport(command)), ErrorCode::InvalidArgument);
    }
    for participants in [(0..1024).map(rank).collect(), (0..128).map(long).collect::<Vec<_>>()] {
        let mut log = Log::new();
        log.send(Command::BeginSharedImport(BeginSharedImport { participants, ..begin_shared(2, 1) })).unwrap();
    }
}

#[test]
fn a_snapshot_keeps_the_participants_and_one_without_them_reads_as_before() {
    let mut log = Log::new();
    let session = open(&mut log, 1, 2);
    joined(&mut log, &session, 1, "a");
    let restored: State = rmp_serde::from_slice(&rmp_serde::to_vec_named(&log.state).unwrap()).unwrap();
    assert_eq!(restored, log.state);
    let mut log = Log::new();
    log.import(begin(1, hot()));
    let snapshot = rmp_serde::to_vec_named(&log.state).unwrap();
    let is_named = |name: &[u8]| snapshot.windows(name.len()).any(|word| word == name);
    for name in ["parts", "coordinators", "writer_id"] {
        assert!(!is_named(name.as_bytes()), "an import of one writer is written as it always was, without {name}");
    }
    assert_eq!(rmp_serde::from_slice::<State>(&snapshot).unwrap(), log.state);
}

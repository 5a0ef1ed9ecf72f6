use ballast_schemas::{
    Availability, BeginSharedImport, Command, CommitImport, Digest, ErrorCode, ImportPart, ImportSession, JoinImport,
    PartWriter, ParticipantId, Rejection, Reply, WriterId,
};

use crate::State;
use crate::testing::*;

fn rank(n: u32) -> ParticipantId {
    ParticipantId::new(format!("rank{n}")).unwrap()
}

fn begin_shared(generation: u64, ranks: u32) -> Command {
    let participants = (0..ranks).map(rank).collect();
    Command::BeginSharedImport(BeginSharedImport { import: begin(generation, hot()), participants })
}

fn open(log: &mut Log, generation: u64, ranks: u32) -> ImportSession {
    match log.send(begin_shared(generation, ranks)) {
        Ok(Reply::Import(session)) => *session,
        other => panic!("not a session: {other:?}"),
    }
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

fn joined(log: &mut Log, session: &ImportSession, n: u32, run: &str) -> u64 {
    part(log, Command::JoinImport(join(session, n, run))).epoch
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
    assert_eq!((refused.code, named(&refused)), (ErrorCode::NotReady, vec!["rank1", "rank2"]));
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
fn another_run_of_a_participant_takes_its_place_and_what_was_done_stays_done() {
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
    assert_eq!(joined(&mut log, &session, 0, "third"), 3);
    log.send(Command::CommitImport(commit_of(&session))).unwrap();
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
    let Command::BeginSharedImport(mut next) = begin_shared(1, 1) else { panic!("not what was made") };
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
    assert_eq!(log.code(Command::FinishPart(writer(&session, 1, 1))), ErrorCode::Conflict, "it has not joined");
    let mut log = Log::new();
    let alone = log.import(begin(1, hot()));
    assert_eq!(log.code(Command::JoinImport(join(&alone, 0, "a"))), ErrorCode::InvalidArgument);
}

#[test]
fn a_repeated_begin_has_to_name_the_same_participants() {
    let mut log = Log::new();
    let session = open(&mut log, 1, 2);
    assert_eq!(open(&mut log, 1, 2), session);
    assert_eq!(log.code(begin_shared(1, 3)), ErrorCode::Conflict);
    assert_eq!(log.code(Command::BeginImport(begin(1, hot()))), ErrorCode::Conflict);
    for (participants, generation) in [(vec![], 2), (vec![rank(0), rank(0)], 2)] {
        let command = BeginSharedImport { import: begin(generation, hot()), participants };
        assert_eq!(log.code(Command::BeginSharedImport(command)), ErrorCode::InvalidArgument);
    }
    let many = BeginSharedImport { import: begin(2, hot()), participants: (0..1025).map(rank).collect() };
    assert_eq!(log.code(Command::BeginSharedImport(many)), ErrorCode::InvalidArgument);
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
    let is_named = snapshot.windows(5).any(|word| word == b"parts");
    assert!(!is_named, "an import of one writer is written as it always was");
    assert_eq!(rmp_serde::from_slice::<State>(&snapshot).unwrap(), log.state);
}

use ballast_schemas::{
    AnnounceReplica, BeginImport, BeginSharedImport, ClusterConfig, ClusterId, CommandId, ConfirmCapability,
    Coordinator, CreateCluster, FOLD_VERSION_FIRST, InstanceId, MigrationMode, ParticipantId, RaiseFoldVersion,
    RenewImport, ReplicaId, Residency, SnapshotCommitted, UpsertMode, WriterId,
};

use super::*;
use crate::testing::*;

fn sealed(commands: Vec<CommandRecord>) -> Envelope {
    Envelope::seal("e".into(), commands).unwrap().0
}

fn entry(commands: Vec<Command>) -> Envelope {
    let records = commands.into_iter().enumerate().map(|(n, command)| CommandRecord {
        id: CommandId::new(format!("c{n}")).unwrap(),
        not_after: LogTime(60_000),
        command,
    });
    sealed(records.collect())
}

#[test]
fn a_log_that_does_not_begin_with_create_cluster_stops_the_replica() {
    let mut state = State::new();
    assert_eq!(fold(&mut state, 1, 5, &entry(vec![Command::Tick])), Err(FoldHalt::NoCluster));
    assert_eq!(fold(&mut state, 1, 5, &entry(vec![])), Err(FoldHalt::NoCluster));
    let Command::CreateCluster(mut cluster) = create() else { unreachable!() };
    cluster.config.migration_max_members_per_round = 0;
    let halt = fold(&mut state, 1, 5, &entry(vec![Command::CreateCluster(cluster)])).unwrap_err();
    assert!(halt.to_string().contains("weight_migration_max_members_per_round"), "{halt}");
    assert_eq!(state, State::new());
    let record = CommandRecord { not_after: LogTime::MAX, ..entry(vec![create()]).commands()[0].clone() };
    let first = sealed(vec![record]);
    assert_eq!(fold(&mut state, 1, 5, &first).unwrap().outcomes, [Ok(Reply::Done)], "whatever its window says");
}

#[test]
fn a_gap_or_a_repeat_in_the_sequence_stops_the_replica_and_changes_nothing() {
    let mut log = Log::new();
    let before = log.state.clone();
    for seq in [0, 1, 3] {
        let halt = fold(&mut log.state, seq, 5, &entry(vec![Command::Tick])).unwrap_err();
        assert_eq!(halt, FoldHalt::NotContinuous { folded: 1, expected: 2, found: seq });
    }
    assert_eq!(log.state, before);
}

#[test]
fn the_log_clock_adds_up_small_steps_and_clamps_large_and_backward_ones() {
    let mut state = State::new();
    let start = START_MS * 1_000_000;
    let fold_at = |state: &mut State, ns: u64, commands| {
        let seq = state.log_seq() + 1;
        fold(state, seq, ns, &entry(commands)).unwrap();
        state.log_clock().0
    };
    assert_eq!(fold_at(&mut state, start, vec![create()]), 0);
    let mut at = start;
    for _ in 0..10 {
        at += 250_000;
        fold_at(&mut state, at, vec![]);
    }
    assert_eq!(state.log_clock().0, 2, "ten quarters of a millisecond are two whole ones");
    assert_eq!(fold_at(&mut state, at + 3_600_000_000_000, vec![]), 5_002, "an hour forward counts as five seconds");
    assert_eq!(fold_at(&mut state, at, vec![]), 5_002, "time does not go back");
    assert_eq!(fold_at(&mut state, at + 1_000_000_000, vec![]), 6_002, "nor does it stand still afterwards");
}

#[test]
fn a_repeated_command_hears_its_first_outcome_and_has_no_second_effect() {
    let mut log = Log::new();
    log.put(1, hot());
    let record = log.record(migrate(1, Residency::Cold, 2));
    let first = log.fold(vec![record.clone()]);
    let generation = log.generation(1);
    log.pass(50_000);
    let again = log.fold(vec![record.clone(), record.clone()]);
    assert_eq!(again.outcomes, vec![first.outcomes[0].clone(); 2]);
    assert!(again.events.is_empty());
    assert_eq!(log.generation(1), generation);
    let other = CommandRecord { command: remove(1, 3), ..record.clone() };
    assert_eq!(log.fold(vec![other]).outcomes[0].as_ref().unwrap_err().code, ErrorCode::Conflict);
    log.pass(11_000);
    let late = log.fold(vec![record]).outcomes.remove(0).unwrap_err();
    assert_eq!(late.code, ErrorCode::Unavailable);
    assert!(late.message.contains("too late"));
    log.pass(60_000);
    assert!(
        log.state.record.recent.get(&CommandId::new("cmd-4").unwrap()).is_none(),
        "forgotten once no repeat can be accepted"
    );
}

#[test]
fn a_repeat_that_was_received_later_hears_the_first_outcome_for_as_long_as_it_is_good() {
    let mut log = Log::new();
    log.put(1, hot());
    let record = log.record(migrate(1, Residency::Cold, 2));
    let first = log.fold(vec![record.clone()]).outcomes.remove(0);
    let operation = log.active(1);
    log.pass(50_000);
    // Another gateway received the repeat just now, and appends it only after the first one's window.
    let repeat =
        CommandRecord { not_after: log.state.log_clock().plus_ms(ballast_schemas::COMMAND_WINDOW_MS), ..record };
    log.send(Command::CancelOperation(operation.operation_id)).unwrap();
    log.pass(30_000);
    let again = log.fold(vec![repeat]);
    assert_eq!(again.outcomes, [first]);
    assert!(log.revision(1).operation_id.is_none(), "nothing was started a second time");
}

#[test]
fn a_command_from_too_far_in_the_future_is_refused() {
    let mut log = Log::new();
    let mut record = log.record(Command::SetConfig(ClusterConfig::default()));
    record.not_after = LogTime::MAX;
    assert_eq!(log.fold(vec![record]).outcomes[0].as_ref().unwrap_err().code, ErrorCode::InvalidArgument);
}

#[test]
fn newer_rules_need_every_live_replica_and_stop_a_build_that_does_not_know_them() {
    let mut log = Log::new();
    let announce = |name: &str, fold_version| {
        Command::AnnounceReplica(AnnounceReplica {
            replica_id: ReplicaId::new(name).unwrap(),
            families: vec![0, 8, 9, 10, 11, 12],
            version: "1".into(),
            fold_version,
        })
    };
    let raise = |fold_version| Command::RaiseFoldVersion(RaiseFoldVersion { fold_version });
    let next = FOLD_VERSION + 1;
    let error = log.send(raise(next)).unwrap_err();
    assert!(error.code == ErrorCode::NotReady && error.message.contains("no live replica"), "{error:?}");
    log.send(announce("old", FOLD_VERSION)).unwrap();
    log.send(announce("new", next)).unwrap();
    let error = log.send(raise(next)).unwrap_err();
    assert!(error.message.contains("replica old"), "{error:?}");
    assert_eq!(log.send(raise(0)).unwrap_err().code, ErrorCode::InvalidArgument);
    log.send(raise(FOLD_VERSION)).unwrap();
    // The old one is replaced.
    log.send(announce("old", next)).unwrap();
    log.send(raise(next)).unwrap();
    assert_eq!(log.state.fold_version(), next);
    let (before, seq) = (log.state.clone(), log.state.log_seq() + 1);
    let halt = fold(&mut log.state, seq, 5, &entry(vec![Command::Tick])).unwrap_err();
    assert_eq!(halt, FoldHalt::FoldVersion { found: next });
    assert_eq!(log.state, before);
    let packed = rmp_serde::to_vec_named(&log.state).unwrap();
    let error = rmp_serde::from_slice::<State>(&packed).unwrap_err().to_string();
    assert!(error.contains(&format!("fold version {next}")), "nor does it start from such a snapshot: {error}");
}

#[test]
fn an_announcement_of_the_first_rules_is_digested_as_it_was_before_there_were_others() {
    let packed = rmp_serde::to_vec_named(&AnnounceReplica {
        replica_id: ReplicaId::new("r").unwrap(),
        families: vec![0],
        version: "1".into(),
        fold_version: FOLD_VERSION_FIRST,
    });
    let packed = packed.unwrap();
    assert!(!String::from_utf8_lossy(&packed).contains("fold_version"));
    assert_eq!(rmp_serde::from_slice::<AnnounceReplica>(&packed).unwrap().fold_version, FOLD_VERSION_FIRST);
}

#[test]
fn a_family_whose_gate_is_closed_is_refused_by_the_name_of_its_flag() {
    let mut state = State::new();
    let cluster = CreateCluster {
        cluster_id: ClusterId::new("c").unwrap(),
        incarnation: 1,
        config: ClusterConfig::default(),
        capabilities: vec![],
    };
    let confirm = |capability| Command::ConfirmCapability(ConfirmCapability { capability });
    let announce = |families: &[u8]| {
        Command::AnnounceReplica(AnnounceReplica {
            replica_id: ReplicaId::new("r1").unwrap(),
            families: families.to_vec(),
            version: "1".into(),
            fold_version: FOLD_VERSION_FIRST,
        })
    };
    let shared = BeginSharedImport {
        import: begin(9, hot()),
        participants: vec![ParticipantId::new("rank0").unwrap()],
        writer_id: WriterId::new("run").unwrap(),
    };
    let instance = InstanceId { group_id: identity(1).group_id(), position: LogPosition::ZERO };
    let coordinator = Some(Coordinator { instance, epoch: 1 });
    let renewal = RenewImport { identity: identity(1), session_id: session("s1"), coordinator };
    let begin = Command::BeginImport(begin(1, hot()));
    let lease = acquire(1, "l", 1000);
    let upsert = replace(1, 2, UpsertMode::PutFirst, 2, "r");
    let commands = vec![
        Command::CreateCluster(cluster),
        begin.clone(),
        lease.clone(),
        upsert.clone(),
        announce(&[0, 8, 9, 10]),
        confirm(Capability::WeightManagement),
        announce(&[0, 8, 9, 10, 11]),
        confirm(Capability::WeightManagement),
        begin,
        lease,
        upsert.clone(),
        confirm(Capability::WeightLineage),
        Command::BeginSharedImport(shared),
        Command::RenewImport(renewal),
        confirm(Capability::WeightSharing),
    ];
    let outcomes = fold(&mut state, 1, 1, &entry(commands)).unwrap().outcomes;
    let refused = |at: usize| outcomes[at].as_ref().unwrap_err();
    for at in [1, 2, 5] {
        assert!(
            refused(at).message.contains(if at == 5 { "family 11" } else { "weight_management" }),
            "{at}: {:?}",
            refused(at)
        );
        assert_eq!(refused(at).code, ErrorCode::NotReady);
    }
    assert!(outcomes[7].is_ok() && outcomes[8].is_ok());
    assert!(refused(9).message.contains("IMPORTING"));
    for at in [3, 10] {
        assert!(refused(at).message.contains("weight_lineage"));
    }
    assert!(refused(11).message.contains("family 12"), "the replica that was announced can not fold it");
    // What such a replica does not know of, in commands that it does know too.
    for at in [12, 13] {
        assert!(refused(at).message.contains("weight_sharing"), "{at}: {:?}", refused(at));
    }
    assert!(refused(14).message.contains("family 13"));
}

#[test]
fn a_cluster_is_created_once() {
    let mut log = Log::new();
    assert_eq!(log.code(create()), ErrorCode::Conflict);
    assert_eq!(log.state.cluster_id().unwrap().as_str(), "c1");
    let bad = ClusterConfig { deletion_max_members_per_round: 0, ..ClusterConfig::default() };
    assert_eq!(log.code(Command::SetConfig(bad)), ErrorCode::InvalidArgument);
}

#[test]
fn watermarks_that_leave_nothing_between_them_are_refused_by_name() {
    let mut log = Log::new();
    for (low, high, named) in [
        (0, 900_000, "weight_memory_low_watermark"),
        (800_000, 800_000, "below the high one"),
        (900_000, 800_000, "below the high one"),
        (800_000, 1_000_001, "weight_memory_high_watermark"),
    ] {
        let config = ClusterConfig {
            memory_low_watermark_ppm: low,
            memory_high_watermark_ppm: high,
            ..ClusterConfig::default()
        };
        let refused = log.refused(Command::SetConfig(config));
        assert!(refused.message.contains(named), "{}", refused.message);
    }
}

#[test]
fn a_revision_without_a_policy_of_its_own_takes_the_clusters_at_that_entry() {
    let mut log = Log::new();
    let default_policy = policy(Residency::Cold, MigrationMode::Manual);
    log.send(Command::SetConfig(ClusterConfig { default_policy, ..ClusterConfig::default() })).unwrap();
    log.import(BeginImport { policy: None, ..begin(1, hot()) });
    log.import(begin(2, hot()));
    log.send(Command::SetConfig(ClusterConfig::default())).unwrap();
    assert_eq!((log.revision(1).policy, log.revision(2).policy), (default_policy, hot()));
}

#[test]
fn only_the_last_two_snapshots_are_remembered() {
    let mut log = Log::new();
    log.pass(20_000);
    let snapshot = |seq| Command::SnapshotCommitted(SnapshotCommitted { seq, digest: Digest::of(b"s") });
    for seq in [1, 3, 2, 4] {
        assert!(log.send(snapshot(seq)).is_ok());
    }
    assert_eq!(log.state.snapshots().iter().map(|s| s.seq).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(log.code(snapshot(100)), ErrorCode::InvalidArgument);
}

#[test]
fn what_time_ends_happens_before_the_entry_and_is_named_by_its_first_position() {
    let mut log = Log::new();
    log.import(begin(1, hot()));
    log.pass(15_000 - 1);
    assert_eq!(log.revision(1).availability.name(), "IMPORTING");
    log.now_ms += 1;
    let renew = Command::RenewImport(ballast_schemas::RenewImport {
        identity: identity(1),
        session_id: session("s1"),
        coordinator: None,
    });
    let applied = log.entry(vec![renew, Command::Barrier]);
    assert_eq!(applied.outcomes[0].as_ref().unwrap_err().code, ErrorCode::LeaseExpired);
    let ids: Vec<String> = applied.events.iter().map(Event::message_id).collect();
    let seq = log.state.log_seq();
    assert_eq!(ids, [format!("{seq}.0.0"), format!("{seq}.0.1")]);
    assert_eq!(log.active(1).operation_id.as_str(), format!("op-{seq}.0"));
}

#[test]
fn a_state_reads_back_from_a_snapshot_and_an_unknown_format_is_refused() {
    let mut log = Log::new();
    log.put(1, policy(Residency::Mixed, ballast_schemas::MigrationMode::Auto));
    log.send(acquire(1, "l1", 60_000)).unwrap();
    log.claimed(1, "w1");
    let bytes = rmp_serde::to_vec_named(&log.state).unwrap();
    let back: State = rmp_serde::from_slice(&bytes).unwrap();
    assert_eq!(back, log.state);
    assert_eq!(back.digest(), log.state.digest());
    back.check_invariants().unwrap();
    let mut other = log.state.clone();
    other.record.format += 1;
    let bytes = rmp_serde::to_vec_named(&other).unwrap();
    let error = rmp_serde::from_slice::<State>(&bytes).unwrap_err().to_string();
    assert!(error.contains(&format!("snapshot format {}", other.record.format)), "{error}");
}

#[test]
fn two_replicas_that_decide_alike_have_equal_chains() {
    let run = |extra: bool| {
        let mut log = Log::new();
        log.put(1, hot());
        if extra {
            log.send(acquire(2, "l", 10)).unwrap_err();
        } else {
            log.send(acquire(1, "l", 10)).unwrap();
        }
        log.state.chain()
    };
    assert_eq!(run(true), run(true));
    assert_ne!(run(true), run(false));
}

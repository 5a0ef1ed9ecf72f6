use ballast_schemas::*;

use crate::RoundPlan;
use crate::testing::*;

const CAPACITY: u64 = 1_000;

fn auto(preferred: Residency) -> WeightStoragePolicy {
    policy(preferred, MigrationMode::Auto)
}

fn round(log: &Log, trigger: MigrationTrigger, bytes: u64) -> Command {
    let round = log.state.plan_round(&node(), trigger, bytes, u64::MAX).round;
    Command::RelievePressure(RelievePressure { node: node(), round, trigger, bytes, cold_free_bytes: u64::MAX })
}

fn press(log: &Log, bytes: u64) -> Command {
    round(log, MigrationTrigger::Pressure, bytes)
}

fn relieve(log: &Log, bytes: u64) -> Command {
    round(log, MigrationTrigger::PressureRelief, bytes)
}

/// The generations whose migrations a round started.
fn started(log: &mut Log, command: Command) -> Vec<u64> {
    match log.send(command) {
        Ok(Reply::Round(operations)) => {
            operations.iter().map(|id| log.operation(id).identity.weight_generation).collect()
        }
        other => panic!("not a round: {other:?}"),
    }
}

/// Revisions of 400 bytes each, HOT, published one after the other.
fn hot_revisions(preferred: Residency, generations: &[u64]) -> Log {
    let mut log = Log::new();
    for generation in generations {
        log.put(*generation, auto(preferred));
        log.pass(10);
        if log.revision(*generation).operation_id.is_some() {
            log.finish_migration(*generation, Residency::Mixed, 500_000);
        }
    }
    log
}

fn read(log: &mut Log, generation: u64, id: &str) {
    log.send(acquire(generation, id, 15_000)).unwrap();
    log.send(release(generation, id)).unwrap();
    log.pass(10);
}

/// Every active migration of the generations, carried out.
fn carry_out(log: &mut Log, generations: &[u64]) {
    for generation in generations {
        if log.revision(*generation).operation_id.is_none() {
            continue;
        }
        let operation = log.active(*generation);
        if operation.status != OperationStatus::Runnable {
            continue;
        }
        let target = operation.target.unwrap();
        let ppm = match target {
            Residency::Hot => 1_000_000,
            Residency::Mixed => 500_000,
            _ => 0,
        };
        log.finish_migration(*generation, target, ppm);
    }
}

fn used(log: &Log, generations: &[u64]) -> u64 {
    generations.iter().map(|generation| u64::from(log.revision(*generation).observed_hot_ppm) * 400 / 1_000_000).sum()
}

#[test]
fn the_oldest_access_is_demoted_first_and_only_as_much_as_is_asked_for() {
    let mut log = hot_revisions(Residency::Hot, &[1, 2, 3]);
    read(&mut log, 1, "l1");
    let command = press(&log, 201);
    assert_eq!(started(&mut log, command), [2, 3]);
    let operation = log.active(2);
    assert_eq!((operation.target, operation.trigger), (Some(Residency::Mixed), Some(MigrationTrigger::Pressure)));
    assert!(log.revision(1).operation_id.is_none());
}

#[test]
fn among_equally_old_ones_the_one_that_releases_most_goes_first_then_the_lower_identity() {
    let mut log = Log::new();
    for (generation, bytes) in [(1, 400), (2, 400), (3, 800)] {
        let session = log.import(BeginImport { logical_bytes: bytes, ..begin(generation, auto(Residency::Hot)) });
        let manifest = ManifestRef { logical_bytes: bytes, ..manifest(generation) };
        log.accept_revision(Command::CommitImport(commit(&session, manifest)));
    }
    let command = press(&log, 600);
    assert_eq!(started(&mut log, command), [3, 1]);
}

#[test]
fn one_step_at_a_time_leads_from_hot_over_mixed_to_cold_and_no_further() {
    let mut log = hot_revisions(Residency::Hot, &[1]);
    for (target, ppm) in [(Residency::Mixed, 500_000), (Residency::Cold, 0)] {
        let command = press(&log, CAPACITY);
        assert_eq!(started(&mut log, command), [1]);
        assert_eq!(log.finish_migration(1, target, ppm).target, Some(target));
        assert_eq!(log.revision(1).residency, target);
        log.pass(40_000);
    }
    let plan = log.state.plan_round(&node(), MigrationTrigger::Pressure, CAPACITY, u64::MAX);
    assert_eq!(plan, RoundPlan { round: 2, bytes: 0, waits: false });
}

#[test]
fn a_revision_that_can_not_be_split_goes_straight_to_cold() {
    let mut log = Log::new();
    let session = log.import(BeginImport { unit_count: 1, ..begin(1, auto(Residency::Hot)) });
    let manifest = ManifestRef { payload_count: 1, affinity_count: 1, ..manifest(1) };
    log.accept_revision(Command::CommitImport(commit(&session, manifest)));
    let command = press(&log, 1);
    assert_eq!(started(&mut log, command), [1]);
    assert_eq!(log.active(1).target, Some(Residency::Cold));
}

#[test]
fn of_workers_that_race_one_starts_the_round_and_the_others_hear_that_nothing_was_left_to_do() {
    let mut log = hot_revisions(Residency::Hot, &[1, 2]);
    let (one, other) = (press(&log, 200), press(&log, 200));
    let applied = log.entry(vec![one, other]);
    let counts: Vec<usize> = applied
        .outcomes
        .iter()
        .map(|outcome| match outcome {
            Ok(Reply::Round(operations)) => operations.len(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(counts, [1, 0]);
    // Much later, when the next round could begin, the old number still starts nothing.
    carry_out(&mut log, &[1]);
    let RelievePressure { round, .. } = match press(&log, 200) {
        Command::RelievePressure(command) => command,
        other => panic!("{other:?}"),
    };
    log.pass(5_000);
    let stale = Command::RelievePressure(RelievePressure {
        node: node(),
        round: round - 1,
        trigger: MigrationTrigger::Pressure,
        bytes: 200,
        cold_free_bytes: u64::MAX,
    });
    assert!(started(&mut log, stale).is_empty());
    let command = press(&log, 200);
    assert_eq!(started(&mut log, command), [2]);
}

#[test]
fn the_next_round_waits_until_the_last_one_shows_in_what_the_node_says() {
    let mut log = hot_revisions(Residency::Hot, &[1, 2]);
    let command = press(&log, 100);
    assert_eq!(started(&mut log, command), [1]);
    log.pass(60_000);
    let plan = log.state.plan_round(&node(), MigrationTrigger::Pressure, 100, u64::MAX);
    assert_eq!((plan.bytes, plan.waits), (0, true), "the first is under way");
    carry_out(&mut log, &[1]);
    let plan = log.state.plan_round(&node(), MigrationTrigger::Pressure, 100, u64::MAX);
    assert_eq!((plan.bytes, plan.waits), (0, true), "its end does not show yet");
    log.pass(2_000);
    let command = press(&log, 100);
    assert_eq!(started(&mut log, command), [2]);
}

#[test]
fn a_migration_that_waits_for_readers_holds_no_round_up() {
    let mut log = hot_revisions(Residency::Hot, &[1, 2]);
    let command = press(&log, 100);
    assert_eq!(started(&mut log, command), [1]);
    let operation = log.claimed(1, "w1");
    log.accept_operation(park(&operation, ParkReason::Readers, Some(3_600_000)));
    log.pass(2_000);
    let command = press(&log, 100);
    assert_eq!(started(&mut log, command), [2]);
}

#[test]
fn pinned_and_manual_revisions_stay_whatever_the_pressure() {
    for mode in [MigrationMode::Pinned, MigrationMode::Manual] {
        let mut log = Log::new();
        log.put(1, policy(Residency::Hot, mode));
        log.pass(60_000);
        let command = press(&log, CAPACITY);
        assert!(started(&mut log, command).is_empty(), "{mode}");
        assert_eq!(log.revision(1).residency, Residency::Hot);
        let taken = log.state.memory_use(&node());
        assert_eq!(taken.demotable_bytes, 0);
        assert_eq!(taken.pinned_bytes + taken.manual_bytes, 400);
    }
}

#[test]
fn leased_busy_retired_and_replacing_revisions_stay() {
    let mut log = hot_revisions(Residency::Hot, &[1]);
    log.send(acquire(1, "l1", 15_000)).unwrap();
    let command = press(&log, CAPACITY);
    assert!(started(&mut log, command).is_empty());
    assert_eq!(log.state.memory_use(&node()).leased_bytes, 400);
    log.send(release(1, "l1")).unwrap();
    let generation = log.generation(1);
    let operation = log.accept_operation(migrate(1, Residency::Mixed, generation));
    let command = press(&log, CAPACITY);
    assert!(started(&mut log, command).is_empty());
    assert_eq!(log.state.memory_use(&node()).moving_bytes, 200);
    log.accept_operation(Command::CancelOperation(operation.operation_id));
    log.pass(30_000);
    // As the base of an open replacement.
    let generation = log.generation(1);
    log.accept_claim(replace(1, 2, UpsertMode::PutFirst, generation, "r1"));
    let command = press(&log, CAPACITY);
    assert!(started(&mut log, command).is_empty());
    assert_eq!(log.state.memory_use(&node()).busy_bytes, 400);
}

#[test]
fn within_its_cooldown_a_revision_is_passed_over_and_the_next_one_moves() {
    let mut log = hot_revisions(Residency::Mixed, &[1, 2]);
    let plan = log.state.plan_round(&node(), MigrationTrigger::Pressure, 100, u64::MAX);
    assert_eq!((plan.bytes, plan.waits), (0, true));
    log.pass(29_990);
    // The first one's cooldown ends before the second one's.
    let command = press(&log, CAPACITY);
    assert_eq!(started(&mut log, command), [1]);
}

#[test]
fn a_round_ends_at_its_limits_but_always_moves_one() {
    let mut log = hot_revisions(Residency::Hot, &[1, 2, 3]);
    let limited = |members, bytes| {
        Command::SetConfig(ClusterConfig {
            migration_max_members_per_round: members,
            migration_max_bytes_per_round: bytes,
            ..ClusterConfig::default()
        })
    };
    log.send(limited(2, 1 << 30)).unwrap();
    assert_eq!(log.state.plan_round(&node(), MigrationTrigger::Pressure, CAPACITY, u64::MAX).bytes, 400);
    log.send(limited(64, 399)).unwrap();
    assert_eq!(log.state.plan_round(&node(), MigrationTrigger::Pressure, CAPACITY, u64::MAX).bytes, 200);
    log.send(limited(64, 1)).unwrap();
    let command = press(&log, CAPACITY);
    assert_eq!(started(&mut log, command), [1]);
}

#[test]
fn without_room_on_disk_only_what_has_its_copies_there_is_demoted() {
    let mut log = hot_revisions(Residency::Hot, &[1, 2]);
    let generation = log.generation(2);
    log.accept_operation(migrate(2, Residency::Cold, generation));
    log.finish_migration(2, Residency::Cold, 0);
    log.pass(30_000);
    let generation = log.generation(2);
    log.accept_operation(migrate(2, Residency::Hot, generation));
    log.finish_migration(2, Residency::Hot, 1_000_000);
    log.pass(30_000);
    let no_disk = RelievePressure {
        node: node(),
        round: 0,
        trigger: MigrationTrigger::Pressure,
        bytes: CAPACITY,
        cold_free_bytes: 199,
    };
    assert_eq!(started(&mut log, Command::RelievePressure(no_disk)), [2]);
}

#[test]
fn when_pressure_is_over_the_newest_come_back_as_far_as_they_fit() {
    let generations = [1, 2, 3];
    let mut log = hot_revisions(Residency::Hot, &generations);
    let command = press(&log, CAPACITY);
    assert_eq!(started(&mut log, command), generations);
    carry_out(&mut log, &generations);
    assert_eq!(log.state.plan_round(&node(), MigrationTrigger::PressureRelief, CAPACITY, 0).bytes, 0);
    log.pass(30_000);
    let command = relieve(&log, 401);
    assert_eq!(started(&mut log, command), [3, 2]);
    let operation = log.active(3);
    assert_eq!((operation.target, operation.trigger), (Some(Residency::Hot), Some(MigrationTrigger::PressureRelief)));
    carry_out(&mut log, &generations);
    let done = log.state.automatic_migrations();
    assert_eq!(done[&MigrationTrigger::Pressure].demotions, 3);
    assert_eq!(done[&MigrationTrigger::PressureRelief].promotions, 2);
}

#[test]
fn what_a_person_made_colder_is_not_brought_back() {
    let mut log = hot_revisions(Residency::Hot, &[1]);
    let command = press(&log, 1);
    assert_eq!(started(&mut log, command), [1]);
    carry_out(&mut log, &[1]);
    let generation = log.generation(1);
    log.accept_operation(migrate(1, Residency::Cold, generation));
    log.finish_migration(1, Residency::Cold, 0);
    log.pass(60_000);
    let plan = log.state.plan_round(&node(), MigrationTrigger::PressureRelief, CAPACITY, 0);
    assert_eq!((plan.bytes, plan.waits), (0, false));
}

#[test]
fn a_round_is_started_by_pressure_or_its_end_only() {
    let mut log = hot_revisions(Residency::Hot, &[1]);
    let command = round(&log, MigrationTrigger::Access, 1);
    assert_eq!(log.code(command), ErrorCode::InvalidArgument);
}

#[test]
fn an_attempt_that_can_not_succeed_is_tried_again_only_after_the_cooldown() {
    let mut log = hot_revisions(Residency::Hot, &[1]);
    let command = press(&log, 1);
    assert_eq!(started(&mut log, command), [1]);
    let operation = log.claimed(1, "w1");
    log.accept_operation(attempt_failed(&operation, true));
    let failed_at = log.clock();
    let mut tries = 0;
    while log.clock() < failed_at + 60_000 {
        let command = press(&log, 1);
        if !started(&mut log, command).is_empty() {
            tries += 1;
            let operation = log.claimed(1, "w1");
            log.accept_operation(attempt_failed(&operation, true));
        }
        log.pass(1_000);
    }
    assert!(tries <= 2, "{tries} tries in two cooldowns");
}

/// Pressure and access in turns, as fast as they can: every automatic migration of a revision begins a cooldown, and none
/// starts or goes on within it. So in a time T no revision moves more often than T / cooldown + 1 times, and no more than
/// its own bytes each time: the bound is (T / cooldown + 1) x the bytes of all revisions.
#[test]
fn pressure_and_access_in_turns_move_no_more_than_the_cooldown_allows() {
    let generations = [1, 2, 3, 4];
    let mut log = hot_revisions(Residency::Hot, &generations);
    let begun = log.clock();
    let (mut moved, mut migrations) = (0, 0);
    for turn in 0..1_000u64 {
        let free = CAPACITY.saturating_sub(used(&log, &generations));
        let memory = if turn % 2 == 0 { press(&log, CAPACITY) } else { relieve(&log, free) };
        let (reader, id) = (generations[(turn % 4) as usize], format!("l{turn}"));
        log.now_ms += 500;
        log.entry(vec![memory, acquire(reader, &id, 15_000), release(reader, &id)]);
        for generation in generations {
            let before = used(&log, &[generation]);
            carry_out(&mut log, &[generation]);
            let after = used(&log, &[generation]);
            moved += before.abs_diff(after);
            migrations += u64::from(before != after);
        }
    }
    let cooldown = log.state.config().migration_cooldown_ms;
    let bound = (log.clock() - begun) / cooldown + 1;
    assert!(migrations > 4, "it does move: {migrations}");
    assert!(migrations <= bound * 4, "{migrations} migrations, at most {bound} of each revision");
    assert!(moved <= bound * 4 * 400, "{moved} bytes moved, at most {}", bound * 4 * 400);
}

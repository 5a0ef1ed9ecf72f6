//! Every planted bug must be caught, by the invariant that it breaks, within a bounded number of seeds: the six that
//! ARCHITECTURE.md names, one or more for each of the RFC's twelve safety invariants, and some beyond them. What this proves is
//! the simulation, not the product.

use ballast_tests::sim::{Bug, Options, run};

/// Seeds until the last of them is caught; most need one or two.
const SEEDS_MAX: u64 = 60;

fn caught(bug: Bug) {
    let expected: Vec<&str> = bug.caught_by().split('|').collect();
    for seed in 1..=SEEDS_MAX {
        let result = run(seed, Options { bug: Some(bug), echo: false });
        let Some(violation) = result.violations.first() else { continue };
        let fits = expected.iter().any(|name| violation.invariant.starts_with(name));
        assert!(fits, "{bug} was caught by {:?} ({}), expected {expected:?}", violation.invariant, violation.message);
        println!("{bug}: seed {seed}, {} entries: {}: {}", violation.entries, violation.invariant, violation.message);
        return;
    }
    panic!("{bug} was not caught in {SEEDS_MAX} seeds");
}

macro_rules! planted {
    ($($name:ident => $bug:ident,)+) => {
        $(#[test]
        fn $name() {
            caught(Bug::$bug);
        })+

        #[test]
        fn every_planted_bug_has_a_test() {
            assert_eq!([$(Bug::$bug,)+], Bug::ALL);
        }
    };
}

planted! {
    a_stale_release_after_a_cancel_is_caught => StaleReleaseAfterCancel,
    a_target_lost_while_the_base_drains_is_caught => TargetLostWhileBaseDrains,
    a_hint_acknowledged_after_its_wake_up_is_caught => HintAckedAfterItsWakeUp,
    a_late_envelope_that_runs_again_is_caught => LateEnvelopeStampedAnew,
    a_late_request_that_runs_again_is_caught => LateRequestStampedAfresh,
    an_old_instance_that_is_adopted_again_is_caught => OldInstanceReadopted,
    a_worker_killed_under_a_mapping_is_caught => WorkerKilledUnderMapping,
    invariant_1_another_manifest_identity_is_caught => OtherManifestIdentity,
    invariant_2_a_commit_without_receipts_is_caught => CommitWithoutReceipts,
    invariant_2_an_offer_that_counts_unread_is_caught => OffersCountUnread,
    invariant_2_a_commit_without_a_part_is_caught => CommitWithoutAPart,
    invariant_2_ready_while_importing_is_caught => ReadyWhileImporting,
    invariant_3_a_manifest_that_changes_is_caught => ManifestChanges,
    invariant_4_a_change_without_a_generation_is_caught => GenerationStands,
    invariant_4_a_watermark_that_falls_is_caught => WatermarkFalls,
    invariant_5_a_release_without_leave_is_caught => ReleaseWithoutLeave,
    invariant_5_a_guard_after_the_description_is_caught => GuardAfterDescribe,
    invariant_6_a_release_without_a_witness_is_caught => ReleaseWithoutWitness,
    invariant_6_a_copy_that_was_not_read_back_is_caught => CopyCountsUnverified,
    invariant_7_an_eviction_of_managed_units_is_caught => EvictionTakesManaged,
    invariant_8_a_tombstone_with_an_operation_is_caught => TombstoneKeepsOperation,
    invariant_9_units_in_metadata_are_caught => UnitsInMetadata,
    invariant_10_trust_in_recorded_progress_is_caught => TrustsRecordedProgress,
    invariant_11_a_watermark_taken_for_the_head_is_caught => WatermarkAsHead,
    invariant_12_a_base_retired_early_is_caught => BaseRetiredEarly,
    a_replaced_run_of_a_participant_that_is_heard_is_caught => ReplacedPartIsHeard,
    a_replaced_run_of_a_coordinator_that_is_heard_is_caught => ReplacedCoordinatorIsHeard,
    the_state_table_ready_and_absent_is_caught => ReadyAndAbsent,
    a_round_that_does_not_await_the_last_one_is_caught => RoundNotAwaited,
    a_loss_that_nobody_repairs_is_caught => LossNotRepaired,
    progress_that_goes_back_is_caught => ProgressGoesBack,
    a_replica_that_decides_alone_is_caught => ReplicaDecidesAlone,
    a_deletion_that_forgets_a_holder_is_caught => DeletionForgetsHolder,
    an_unknown_instance_that_is_dropped_is_caught => UnknownIsDropped,
    a_lookup_by_group_is_caught => LooksUpByGroup,
    fences_that_a_node_forgets_are_caught => FencesForgotten,
    a_lapse_that_a_reader_ignores_is_caught => LapseIgnored,
}

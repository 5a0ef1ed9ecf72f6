//! What one seed sets up: how many of everything, which faults and how often, what the clients do. Drawn from the seed; for a
//! planted bug the draw is bent towards the circumstances in which it shows, so that a few seeds find it.

use super::bugs::Bug;
use super::rng::Rng;
use super::runtime::SECOND;

/// One simulated cluster's circumstances.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub seed: u64,
    pub bug: Option<Bug>,
    pub gateways: usize,
    pub workers: usize,
    pub nodes: usize,
    pub clients: usize,
    pub lineages: u64,
    /// Units of one revision, at most.
    pub units_max: u64,
    /// How long faults and new work go on.
    pub chaos_ns: u64,
    pub network: Network,
    pub strikes: Strikes,
    pub actions: Actions,
    /// Memory of a node, in units; small ones make promotions wait.
    pub memory_units: u64,
    /// Of 10,000 nodes, how many have no cold tier.
    pub no_cold: u32,
    /// Of 10,000 imports, how many are placed on two nodes.
    pub two_holders: u32,
    /// Log entries at which the run stops making new work.
    pub entries_max: u64,
}

/// Faults of single messages, in parts of 10,000.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    pub lose: u32,
    pub duplicate: u32,
    /// Of duplicates, how many come very late.
    pub late: u32,
    pub slow: u32,
    /// An entry that comes to a replica only after many seconds, while the replica can be reached.
    pub stall: u32,
    pub ack_lost: u32,
    /// An append that is stored long after it was given up.
    pub append_late: u32,
    /// A request to release memory that its worker sends only after a long sleep.
    pub release_late: u32,
    /// A component that dies between two of its steps.
    pub die: u32,
    pub disk_error: u32,
    pub bad_write: u32,
}

/// Faults that strike a component, by weight, and the mean time between two of them.
#[derive(Clone, Debug)]
pub(crate) struct Strikes {
    pub every_ns: u64,
    /// Longest pause of a process.
    pub pause_s_max: u64,
    /// Longest time for which a connection is cut.
    pub cut_s_max: u64,
    pub crash: u32,
    pub pause: u32,
    pub isolate: u32,
    pub leader_change: u32,
    pub clock_jump: u32,
    pub hints_lost: u32,
    pub memory_loss: u32,
    pub cold_damage: u32,
    pub cold_offline: u32,
    pub evict: u32,
}

/// What clients do, by weight.
#[derive(Clone, Debug)]
pub(crate) struct Actions {
    /// Mean time between two actions of one client.
    pub every_ns: u64,
    pub put: u32,
    /// Puts of several participants.
    pub share: u32,
    pub put_first: u32,
    pub delete_first: u32,
    pub get: u32,
    pub migrate: u32,
    pub press: u32,
    pub policy: u32,
    pub remove: u32,
    pub control: u32,
    pub abort: u32,
    pub purge: u32,
    pub configure: u32,
    pub discover: u32,
}

impl Plan {
    pub fn new(seed: u64, bug: Option<Bug>) -> Self {
        // Another stream than the run's own, so that a planted bug does not change everything else by itself.
        let mut rng = Rng::new(seed ^ 0x5eed_0f91_a7b3_c2d1);
        let calm = [0, 0, 20, 100, 400];
        let mut rate = || rng.pick(&calm).copied().unwrap_or_default();
        let network = Network {
            lose: rate(),
            duplicate: rate(),
            late: 3_000,
            slow: rate(),
            stall: rate() / 8,
            ack_lost: rate(),
            append_late: rate() / 2,
            release_late: rate() * 3,
            die: rate() / 2,
            disk_error: rate() / 4,
            bad_write: rate() / 4,
        };
        let mut on = |weight: u32| if rng.chance(6_000) { weight } else { 0 };
        let strikes = Strikes {
            every_ns: 0,
            pause_s_max: 100,
            cut_s_max: 30,
            crash: 30,
            pause: on(15),
            isolate: on(10),
            leader_change: on(10),
            clock_jump: on(6),
            hints_lost: on(4),
            memory_loss: on(5),
            cold_damage: on(5),
            cold_offline: on(3),
            evict: on(4),
        };
        let actions = Actions {
            every_ns: rng.between(2, 8) * SECOND,
            put: 16,
            share: 8,
            put_first: 12,
            delete_first: 6,
            get: 34,
            migrate: 16,
            press: 8,
            policy: 8,
            remove: 6,
            control: 12,
            abort: 3,
            purge: 1,
            configure: 1,
            discover: 4,
        };
        let mut plan = Self {
            seed,
            bug,
            gateways: rng.between(1, 3) as usize,
            workers: rng.between(1, 3) as usize,
            nodes: rng.between(1, 4) as usize,
            clients: rng.between(2, 5) as usize,
            lineages: rng.between(1, 3),
            units_max: rng.between(1, 12),
            chaos_ns: rng.between(60, 200) * SECOND,
            network,
            strikes: Strikes { every_ns: rng.between(1, 12) * SECOND, ..strikes },
            actions,
            memory_units: if rng.chance(2_000) { rng.between(12, 30) } else { 400 },
            no_cold: 1_500,
            two_holders: 3_000,
            entries_max: 900,
        };
        if let Some(bug) = bug {
            plan.bend(bug);
        }
        plan
    }

    /// Makes what a bug needs likely.
    fn bend(&mut self, bug: Bug) {
        let plan = self;
        plan.memory_units = 400;
        plan.chaos_ns = 150 * SECOND;
        match bug {
            Bug::StaleReleaseAfterCancel | Bug::FencesForgotten => {
                plan.no_cold = 0;
                plan.lineages = 2;
                plan.clients = 5;
                plan.network.release_late = 5_000;
                plan.actions = Actions {
                    migrate: 60,
                    control: 80,
                    get: 80,
                    put_first: 1,
                    delete_first: 0,
                    ..plan.actions.clone()
                };
                plan.actions.every_ns = 2 * SECOND;
                if bug == Bug::FencesForgotten {
                    plan.strikes = Strikes { crash: 90, every_ns: 2 * SECOND, ..plan.strikes.clone() };
                }
            }
            Bug::TargetLostWhileBaseDrains => {
                plan.no_cold = 9_000;
                plan.two_holders = 0;
                plan.nodes = 3;
                plan.clients = 5;
                plan.actions =
                    Actions { put: 30, put_first: 60, get: 80, remove: 0, delete_first: 0, ..plan.actions.clone() };
                plan.strikes = Strikes { memory_loss: 60, every_ns: 4 * SECOND, ..plan.strikes.clone() };
            }
            Bug::HintAckedAfterItsWakeUp => {
                plan.network.lose = 0;
                plan.strikes.hints_lost = 0;
                plan.actions = Actions { control: 60, migrate: 40, ..plan.actions.clone() };
            }
            Bug::LateEnvelopeStampedAnew => {
                plan.gateways = 3;
                plan.clients = 5;
                plan.chaos_ns = 600 * SECOND;
                plan.entries_max = 2_000;
                plan.actions = Actions { control: 100, migrate: 40, policy: 40, ..plan.actions.clone() };
                plan.actions.every_ns = 2 * SECOND;
                plan.network.lose = 1_000;
                plan.network.ack_lost = 8_000;
                plan.strikes = Strikes {
                    isolate: 90,
                    leader_change: 40,
                    cut_s_max: 400,
                    every_ns: 3 * SECOND,
                    ..plan.strikes.clone()
                };
            }
            Bug::LateRequestStampedAfresh => {
                plan.clients = 5;
                plan.chaos_ns = 400 * SECOND;
                plan.entries_max = 2_000;
                plan.network.duplicate = 3_000;
                plan.network.late = 9_000;
                plan.actions = Actions { control: 100, migrate: 40, policy: 40, get: 60, ..plan.actions.clone() };
                plan.actions.every_ns = 2 * SECOND;
            }
            Bug::OldInstanceReadopted | Bug::LooksUpByGroup => {
                plan.nodes = 1;
                plan.clients = 5;
                plan.lineages = 1;
                plan.network.duplicate = 2_000;
                plan.network.late = 9_000;
                plan.actions = Actions { put: 100, get: 30, ..plan.actions.clone() };
                plan.actions.every_ns = 2 * SECOND;
                plan.strikes = Strikes { crash: 60, pause: 60, every_ns: 3 * SECOND, ..plan.strikes.clone() };
            }
            Bug::WorkerKilledUnderMapping | Bug::GuardAfterDescribe => {
                plan.no_cold = 0;
                plan.nodes = 1;
                plan.clients = 5;
                plan.network.slow = 1_500;
                plan.network.release_late = 5_000;
                plan.actions = Actions { migrate: 60, get: 120, ..plan.actions.clone() };
                plan.actions.every_ns = SECOND;
                if bug == Bug::WorkerKilledUnderMapping {
                    plan.strikes = Strikes { crash: 80, every_ns: 2 * SECOND, ..plan.strikes.clone() };
                }
            }
            Bug::ReleaseWithoutWitness => {
                plan.no_cold = 0;
                plan.actions = Actions { migrate: 80, ..plan.actions.clone() };
                plan.strikes = Strikes { cold_damage: 80, every_ns: SECOND, ..plan.strikes.clone() };
            }
            Bug::CopyCountsUnverified => {
                plan.no_cold = 0;
                plan.network.bad_write = 2_000;
            }
            Bug::EvictionTakesManaged => plan.strikes.evict = 40,
            Bug::ReleaseWithoutLeave => {
                plan.no_cold = 0;
                plan.actions = Actions { migrate: 60, get: 100, ..plan.actions.clone() };
            }
            Bug::TrustsRecordedProgress => {
                plan.no_cold = 0;
                plan.units_max = 12;
                plan.actions = Actions { migrate: 80, get: 60, ..plan.actions.clone() };
                plan.strikes = Strikes { crash: 60, every_ns: 2 * SECOND, ..plan.strikes.clone() };
            }
            Bug::RoundNotAwaited => {
                plan.no_cold = 0;
                plan.nodes = 1;
                plan.actions = Actions { press: 120, put: 60, get: 60, ..plan.actions.clone() };
                plan.actions.every_ns = SECOND;
            }
            Bug::LossNotRepaired => {
                plan.no_cold = 0;
                plan.clients = 5;
                plan.actions =
                    Actions { migrate: 120, get: 60, remove: 0, put_first: 0, delete_first: 0, ..plan.actions.clone() };
                plan.actions.every_ns = SECOND;
                plan.strikes = Strikes { memory_loss: 80, every_ns: 6 * SECOND, ..plan.strikes.clone() };
            }
            Bug::WatermarkAsHead => plan.actions = Actions { discover: 60, remove: 20, ..plan.actions.clone() },
            Bug::DeletionForgetsHolder => {
                plan.nodes = 3;
                plan.two_holders = 10_000;
                plan.actions.remove = 30;
            }
            Bug::UnknownIsDropped => {
                plan.gateways = 3;
                plan.actions.put = 80;
                plan.network.stall = 100;
                plan.strikes = Strikes { crash: 60, every_ns: 2 * SECOND, ..plan.strikes.clone() };
            }
            Bug::LapseIgnored => {
                plan.actions.get = 100;
                plan.strikes = Strikes { pause: 60, isolate: 60, every_ns: 2 * SECOND, ..plan.strikes.clone() };
            }
            Bug::UnitsInMetadata => plan.units_max = 12,
            Bug::OffersCountUnread => plan.actions.share = 60,
            Bug::CommitWithoutAPart | Bug::ReplacedPartIsHeard | Bug::ReplacedCoordinatorIsHeard => {
                plan.clients = 5;
                plan.actions.share = 60;
                plan.actions.every_ns = 2 * SECOND;
            }
            Bug::CommitWithoutReceipts
            | Bug::OtherManifestIdentity
            | Bug::ReadyWhileImporting
            | Bug::ManifestChanges
            | Bug::GenerationStands
            | Bug::WatermarkFalls
            | Bug::TombstoneKeepsOperation
            | Bug::BaseRetiredEarly
            | Bug::ReadyAndAbsent
            | Bug::ProgressGoesBack
            | Bug::ReplicaDecidesAlone => {}
        }
    }
}

//! Memory pressure: which AUTO revisions of a node move a step colder, and which come back once it is over (RFC, Automatic
//! Migration). A worker says how much; what moves follows from the state, so that workers that race do it once.
//!
//! Not here: when memory is short, which only the nodes know (the workers' and the gateways' matter), and how a migration is
//! carried out (`machines/migration.rs`).

use std::cmp::Reverse;
use std::collections::BTreeSet;

use ballast_schemas::{
    Availability, ErrorCode, LogTime, MigrationMode, MigrationTrigger, NodeId, OperationKind, OperationStatus, Outcome,
    RelievePressure, Reply, Residency, RevisionIdentity,
};
use serde::{Deserialize, Serialize};

use crate::fold::{Fold, reject};
use crate::operation::{Operation, OperationKey};
use crate::revision::{Revision, Settled};
use crate::state::State;

/// After a round's last migration: until what a node says of itself shows what was moved.
const SETTLE_MS: u64 = 2_000;
/// Candidates that one round looks at.
const LOOKED_AT_MAX: usize = 1_000;
/// Nodes whose rounds are remembered; the one whose last round is oldest is forgotten first.
const NODES_MAX: usize = 1_000;

/// A demotion candidate's place: oldest access, then most releasable bytes, then identity.
pub(crate) type Demotable = (LogTime, Reverse<u64>, RevisionIdentity);
/// A promotion candidate's place: newest access, then identity.
pub(crate) type Promotable = (Reverse<LogTime>, RevisionIdentity);

/// The rounds of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rounds {
    /// How many there were.
    pub count: u64,
    /// When the last one began, or the last of its migrations came to rest.
    pub moved_at: LogTime,
    /// When the last one began that demoted.
    pub pressed_at: Option<LogTime>,
}

/// One step of one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub identity: RevisionIdentity,
    pub goal: Settled,
    pub bytes: u64,
}

/// What a round would do if it began now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoundPlan {
    /// The node's round, for the command.
    pub round: u64,
    /// Bytes that would be released, or filled; 0 when nothing may move.
    pub bytes: u64,
    /// Something may move later: after a cooldown, or once the last round has come to rest.
    pub waits: bool,
}

/// The memory that a node's revisions take, by what may become of it. Logical bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Of AUTO revisions that may be demoted, at once or after their cooldown.
    pub demotable_bytes: u64,
    /// That migrations under way release.
    pub moving_bytes: u64,
    /// Of AUTO revisions with active leases.
    pub leased_bytes: u64,
    /// Of PINNED revisions.
    pub pinned_bytes: u64,
    /// Of MANUAL revisions.
    pub manual_bytes: u64,
    /// Of AUTO revisions that have another operation, are not READY, or take part in a replacement.
    pub busy_bytes: u64,
}

impl Revision {
    fn logical_bytes(&self) -> u64 {
        self.metadata.manifest.as_ref().map_or(0, |manifest| manifest.logical_bytes)
    }

    fn hot_bytes(&self) -> u64 {
        share(self.logical_bytes(), self.metadata.observed_hot_ppm)
    }

    /// `bytes` as they fall on each of its nodes.
    fn per_node(&self, bytes: u64) -> u64 {
        let nodes = u64::try_from(self.metadata.placement.len()).unwrap_or(u64::MAX);
        bytes.checked_div(nodes).unwrap_or(bytes)
    }

    fn may_move_by_itself(&self) -> bool {
        self.metadata.availability == Availability::Ready
            && self.metadata.policy.migration_mode == MigrationMode::Auto
            && self.metadata.operation_id.is_none()
            && !self.metadata.retired
            && self.leases.is_empty()
    }

    /// The next step of `HOT -> MIXED -> COLD`, and the bytes it releases on each node.
    fn colder(&self) -> Option<(Settled, u64)> {
        let mixed = Settled { target: Residency::Mixed, ratio: Some(self.metadata.policy.mixed_hot_ratio) };
        let units = self.metadata.manifest.as_ref().map_or(0, |manifest| manifest.affinity_count);
        // A split that the model can not satisfy left it HOT: then the step after it is next.
        let splits = self.metadata.residency == Residency::Hot && units > 1 && self.settled != Some(mixed);
        let (goal, stays) = match splits {
            true => (mixed, share(self.logical_bytes(), self.metadata.policy.mixed_hot_ratio.ppm())),
            false => (Settled { target: Residency::Cold, ratio: None }, 0),
        };
        let bytes = self.per_node(self.hot_bytes().saturating_sub(stays));
        (bytes > 0).then_some((goal, bytes))
    }

    /// Its place among the candidates for demotion.
    pub fn demotable(&self) -> Option<(LogTime, Reverse<u64>)> {
        let (_, bytes) = self.colder().filter(|_| self.may_move_by_itself() && !self.stays_hot)?;
        Some((self.last_access, Reverse(bytes)))
    }

    /// Whether it waits for the end of the pressure that made it colder than preferred.
    pub fn is_promotable(&self) -> bool {
        self.pressed && self.may_move_by_itself() && self.is_colder_than_preferred()
    }

    /// The bytes that its way back takes on each node.
    fn missing_bytes(&self) -> u64 {
        let wanted = match self.metadata.policy.preferred_residency {
            Residency::Hot => 1_000_000,
            Residency::Mixed => self.metadata.policy.mixed_hot_ratio.ppm(),
            _ => 0,
        };
        self.per_node(share(self.logical_bytes(), wanted.saturating_sub(self.metadata.observed_hot_ppm)))
    }

    fn cools_down(&self, clock: LogTime, cooldown_ms: u64) -> bool {
        self.last_migration.is_some_and(|at| at.plus_ms(cooldown_ms) > clock)
    }
}

impl Operation {
    /// The node whose round it belongs to, while it is under way: one that waits for something holds no round up.
    pub fn moves_on(&self) -> Option<&NodeId> {
        let under_way = matches!(self.view.status, OperationStatus::Runnable | OperationStatus::Claimed);
        self.relieves.as_ref().filter(|_| under_way)
    }
}

fn share(bytes: u64, ppm: u32) -> u64 {
    let share = u128::from(bytes).saturating_mul(ppm.into()).checked_div(1_000_000).unwrap_or_default();
    u64::try_from(share).unwrap_or(u64::MAX)
}

impl State {
    /// What a round on `node` would do now. A worker asks before it appends [`RelievePressure`], so that nothing is appended
    /// for nothing.
    #[must_use]
    pub fn plan_round(&self, node: &NodeId, trigger: MigrationTrigger, bytes: u64, cold_free_bytes: u64) -> RoundPlan {
        let round = self.rounds(node).count;
        let command = RelievePressure { node: node.clone(), round, trigger, bytes, cold_free_bytes };
        let (moves, waits) = self.moves(&command);
        let bytes = moves.iter().fold(0u64, |sum, one| sum.saturating_add(one.bytes));
        RoundPlan { round, bytes, waits }
    }

    /// What the memory of `node` is taken by, and what of it can be had. O(revisions): for when memory is short.
    #[must_use]
    pub fn memory_use(&self, node: &NodeId) -> MemoryUse {
        let mut sums = MemoryUse::default();
        let all = self.index.listed.iter().filter_map(|identity| self.record.revisions.get(identity));
        for revision in all.filter(|revision| revision.metadata.placement.contains(node)) {
            let hot = revision.per_node(revision.hot_bytes());
            let moving = revision.per_node(self.releasing(revision));
            sums.moving_bytes = sums.moving_bytes.saturating_add(moving);
            let rest = match revision.metadata.policy.migration_mode {
                MigrationMode::Pinned => &mut sums.pinned_bytes,
                MigrationMode::Manual => &mut sums.manual_bytes,
                MigrationMode::Auto if !revision.leases.is_empty() => &mut sums.leased_bytes,
                MigrationMode::Auto if self.may_move(revision) && !revision.stays_hot => &mut sums.demotable_bytes,
                MigrationMode::Auto => &mut sums.busy_bytes,
            };
            *rest = rest.saturating_add(hot.saturating_sub(moving));
        }
        sums
    }

    /// Bytes that the revision's migration under way releases.
    fn releasing(&self, revision: &Revision) -> u64 {
        let operation = revision.operation_key().and_then(|key| self.record.operations.get(&key));
        let view = operation.map(|operation| &operation.view).filter(|view| {
            view.kind == OperationKind::Migrating
                && view.ending.is_none()
                && matches!(view.status, OperationStatus::Runnable | OperationStatus::Claimed)
        });
        let stays = match view.map(|view| (view.target, view.target_hot_ratio)) {
            Some((Some(Residency::Cold), _)) => 0,
            Some((Some(Residency::Mixed), Some(ratio))) => share(revision.logical_bytes(), ratio.ppm()),
            _ => return 0,
        };
        revision.hot_bytes().saturating_sub(stays)
    }

    pub(crate) fn rounds(&self, node: &NodeId) -> Rounds {
        self.record.rounds.get(node).copied().unwrap_or_default()
    }

    /// Whether it takes part in no replacement, beside what it says itself.
    fn may_move(&self, revision: &Revision) -> bool {
        let identity = &revision.metadata.identity;
        let claim = self.claim(&identity.lineage()).filter(|claim| !claim.phase.is_terminal());
        revision.may_move_by_itself() && claim.is_none_or(|claim| claim.target != *identity && claim.base != *identity)
    }

    /// The steps of a round, within its limits, and whether something waits for a moment to come.
    pub(crate) fn moves(&self, command: &RelievePressure) -> (Vec<Move>, bool) {
        let (clock, rounds) = (self.log_clock(), self.rounds(&command.node));
        let moving = self.index.moving.contains_key(&command.node);
        let settles = rounds.count > 0 && rounds.moved_at.plus_ms(SETTLE_MS) > clock;
        let (moves, cools_down, after_pressure) = match command.trigger {
            MigrationTrigger::Pressure => {
                let (moves, cools_down) = self.demotions(command);
                (moves, cools_down, false)
            }
            // Pressure that was there a moment ago may come back the next: it is over after a cooldown without.
            MigrationTrigger::PressureRelief => {
                let (moves, cools_down) = self.promotions(command);
                let over = rounds.pressed_at.map(|at| at.plus_ms(self.config().migration_cooldown_ms));
                (moves, cools_down, over.is_some_and(|at| at > clock))
            }
            _ => (Vec::new(), false, false),
        };
        if moves.is_empty() || !(moving || settles || after_pressure) {
            return (moves, cools_down);
        }
        (Vec::new(), true)
    }

    fn demotions(&self, command: &RelievePressure) -> (Vec<Move>, bool) {
        let candidates = self.index.demotable.get(&command.node).into_iter().flatten();
        let mut round = RoundInTheMaking::new(self);
        let mut cold_left = command.cold_free_bytes;
        for (_, _, identity) in candidates.take(LOOKED_AT_MAX) {
            if round.released >= command.bytes {
                break;
            }
            let Some(revision) = self.record.revisions.get(identity).filter(|revision| self.may_move(revision)) else {
                continue;
            };
            let Some((goal, bytes)) = revision.colder() else { continue };
            // What was COLD once has its copies on disk.
            let written = if revision.on_disk { 0 } else { bytes };
            if written > cold_left || round.has_to_wait(revision) {
                continue;
            }
            if !round.take(identity, goal, bytes) {
                break;
            }
            cold_left = cold_left.saturating_sub(written);
        }
        (round.moves, round.waits)
    }

    fn promotions(&self, command: &RelievePressure) -> (Vec<Move>, bool) {
        let candidates = self.index.promotable.get(&command.node).into_iter().flatten();
        let mut round = RoundInTheMaking::new(self);
        for (_, identity) in candidates.take(LOOKED_AT_MAX) {
            let Some(revision) = self.record.revisions.get(identity).filter(|revision| self.may_move(revision)) else {
                continue;
            };
            let bytes = revision.missing_bytes();
            // Only as far as it fits: what does not is left where it is.
            if round.released.saturating_add(bytes) > command.bytes || round.has_to_wait(revision) {
                continue;
            }
            if !round.take(identity, Settled::preferred(&revision.metadata.policy), bytes) {
                break;
            }
        }
        (round.moves, round.waits)
    }
}

/// Moves gathered up to the limits of a round.
struct RoundInTheMaking<'a> {
    state: &'a State,
    moves: Vec<Move>,
    /// Bytes released, or filled.
    released: u64,
    /// Somebody has to wait for the end of its cooldown.
    waits: bool,
}

impl<'a> RoundInTheMaking<'a> {
    fn new(state: &'a State) -> Self {
        Self { state, moves: Vec::new(), released: 0, waits: false }
    }

    fn has_to_wait(&mut self, revision: &Revision) -> bool {
        let waits = revision.cools_down(self.state.log_clock(), self.state.config().migration_cooldown_ms);
        self.waits |= waits;
        waits
    }

    /// False when the round is full. One move is always allowed.
    fn take(&mut self, identity: &RevisionIdentity, goal: Settled, bytes: u64) -> bool {
        let config = self.state.config();
        let members = u32::try_from(self.moves.len()).unwrap_or(u32::MAX);
        let with = self.released.saturating_add(bytes);
        let full = members >= config.migration_max_members_per_round || with > config.migration_max_bytes_per_round;
        if full && members > 0 {
            return false;
        }
        self.released = with;
        self.moves.push(Move { identity: identity.clone(), goal, bytes });
        true
    }
}

impl Fold<'_> {
    pub fn relieve_pressure(&mut self, command: &RelievePressure) -> Outcome {
        let trigger = command.trigger;
        if !matches!(trigger, MigrationTrigger::Pressure | MigrationTrigger::PressureRelief) {
            let message = format!("a round is started by PRESSURE or PRESSURE_RELIEF, not by {trigger}");
            return reject(ErrorCode::InvalidArgument, message);
        }
        if command.round != self.state.rounds(&command.node).count {
            return Ok(Reply::Round(Vec::new()));
        }
        let (moves, _) = self.state.moves(command);
        if moves.is_empty() {
            return Ok(Reply::Round(Vec::new()));
        }
        self.begin_round(&command.node, trigger);
        let mut started = Vec::with_capacity(moves.len());
        for Move { identity, goal, .. } in moves {
            let operation_id = self.add_migration(&identity, goal, trigger);
            if let Some(key) = OperationKey::of(&operation_id) {
                self.edit_operation(key, |operation| operation.relieves = Some(command.node.clone()));
            }
            self.change_revision(&identity, |revision| {
                revision.metadata.operation_id = Some(operation_id.clone());
                revision.pressed |= trigger == MigrationTrigger::Pressure;
            });
            self.emit_started(Some(&operation_id));
            started.push(operation_id);
        }
        Ok(Reply::Round(started))
    }

    fn begin_round(&mut self, node: &NodeId, trigger: MigrationTrigger) {
        let clock = self.clock();
        let rounds = &mut self.state.record.rounds;
        let of_node = rounds.entry(node.clone()).or_default();
        of_node.count = of_node.count.saturating_add(1);
        of_node.moved_at = clock;
        if trigger == MigrationTrigger::Pressure {
            of_node.pressed_at = Some(clock);
        }
        if rounds.len() > NODES_MAX {
            let oldest = rounds.iter().min_by_key(|(node, rounds)| (rounds.moved_at, *node)).map(|(node, _)| node);
            if let Some(node) = oldest.cloned() {
                rounds.remove(&node);
            }
        }
    }

    /// A migration of a round on `node` has come to rest: what it moved shows a moment later.
    pub fn came_to_rest(&mut self, node: &NodeId) {
        let clock = self.clock();
        if let Some(rounds) = self.state.record.rounds.get_mut(node) {
            rounds.moved_at = clock;
        }
    }
}

/// Keeps an ordered set per node; an empty one has no entry.
pub(crate) fn put_or_take<T: Ord>(
    sets: &mut std::collections::BTreeMap<NodeId, BTreeSet<T>>,
    node: &NodeId,
    item: T,
    there: bool,
) {
    if there {
        sets.entry(node.clone()).or_default().insert(item);
    } else if let Some(set) = sets.get_mut(node) {
        set.remove(&item);
        if set.is_empty() {
            sets.remove(node);
        }
    }
}

#[cfg(test)]
mod tests;

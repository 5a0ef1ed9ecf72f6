//! Memory pressure moves what it may and no more (RFC, Automatic Migration): AUTO revisions without a lease only, and one round of
//! a node at a time, so that one shortage is not met twice.

use std::collections::{BTreeMap, BTreeSet};

use ballast_schemas::{Command, LogTime, MigrationMode, NodeId, OperationId, OperationStatus, Reply};
use ballast_workflows::State;

use super::{Folded, Watch};
use crate::sim::world::W;

const NAME: &str = "pressure";
/// Until what was moved shows in what a node says of itself.
const SHOWS_MS: u64 = 2_000;

/// The last round of each node.
#[derive(Default)]
pub(super) struct Rounds(BTreeMap<NodeId, Round>);

struct Round {
    operations: Vec<OperationId>,
    /// When one of them was last under way, or ended.
    moved_at: LogTime,
}

pub(super) fn check(w: &W, watch: &mut Watch, folded: &Folded<'_>) {
    let clock = folded.after.log_clock();
    let mut begun = BTreeSet::new();
    for (record, outcome) in folded.envelope.commands().iter().zip(folded.outcomes) {
        let (Command::RelievePressure(command), Ok(Reply::Round(started))) = (&record.command, outcome) else {
            continue;
        };
        // A repeat of a command hears what was started long ago.
        let is_new = |id: &&OperationId| folded.before.operation(id).is_none();
        let started: Vec<OperationId> = started.iter().filter(is_new).cloned().collect();
        let early = watch.rounds.0.get(&command.node).is_some_and(|last| last.moved_at.plus_ms(SHOWS_MS) > clock);
        if started.is_empty() || !begun.insert((command.node.clone(), record.id.clone())) {
            continue;
        }
        if early {
            w.violate(NAME, format!("a round of {} began before the last one shows", command.node));
        }
        started.iter().for_each(|id| may_move(w, folded, id));
        watch.rounds.0.insert(command.node.clone(), Round { operations: started, moved_at: clock });
    }
    for round in watch.rounds.0.values_mut() {
        if round.operations.iter().any(|id| under_way(folded.before, id) || under_way(folded.after, id)) {
            round.moved_at = clock;
        }
    }
}

fn under_way(state: &State, id: &OperationId) -> bool {
    let under_way = [OperationStatus::Runnable, OperationStatus::Claimed];
    state.operation(id).is_some_and(|operation| under_way.contains(&operation.status))
}

fn may_move(w: &W, folded: &Folded<'_>, id: &OperationId) {
    let Some(operation) = folded.after.operation(id) else { return };
    let identity = &operation.identity;
    let mode = |state: &State| state.revision(identity).map(|record| record.policy.migration_mode);
    let modes = [mode(folded.before), mode(folded.after)];
    if !modes.contains(&Some(MigrationMode::Auto)) {
        w.violate(NAME, format!("{id} moves {identity}, which is {modes:?}"));
    }
    let leased = folded.before.leases(identity);
    if let Some(lease) = leased.iter().find(|lease| folded.after.lease(identity, &lease.lease_id).is_some()) {
        w.violate(NAME, format!("{id} moves {identity} under lease {}", lease.lease_id));
    }
}

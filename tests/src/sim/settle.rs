//! The end of a run: faults stop, nothing new begins, and everything that was begun must come to its end. Then what is READY
//! must be readable, and what is deleted must be gone; in the end everything is deleted, and nothing may be left.

use std::rc::Rc;

use ballast_schemas::{
    AbortReplacement, Availability, ClaimPhase, Command, InstanceId, OperationKind, OperationStatus, ParkReason,
    Remove, TenantId, WeightOperation, WeightRevisionMetadata,
};
use ballast_workflows::{State, verdict};

use super::gateway::Gateway;
use super::invariants::{self, every_revision};
use super::log::fold_again;
use super::reconciler::unrelieved;
use super::runtime::SECOND;
use super::world::W;
use super::{client, faults};

/// How long what was begun may take to end once faults have stopped.
const PATIENCE: u64 = 300 * SECOND;
/// After this long an operation that waits for memory is cancelled: nobody will free any.
const MEMORY_PATIENCE: u64 = 60 * SECOND;
/// Long enough for every node to introduce itself again.
const INTRODUCTIONS: u64 = 70 * SECOND;
const NAME: &str = "liveness";

pub(crate) fn settle(w: &W) {
    w.closing.set(true);
    faults::heal(w);
    w.trace("faults end");
    run_for(w, 20 * SECOND);
    faults::dismiss_clients(w);
    if !come_to_rest(w) {
        return;
    }
    run_for(w, INTRODUCTIONS);
    if w.rt.is_stopped() {
        return;
    }
    invariants::nothing_left(w);
    // A reading may move units between the tiers: a disk copy that decayed in silence is only read once the one in memory has
    // gone. What a reader found to be lost is told to the log by the next inspection.
    for _ in 0..2 {
        read_everything(w);
        run_for(w, INTRODUCTIONS);
    }
    if w.rt.is_stopped() {
        return;
    }
    ready_is_readable(w);
    promises_are_kept(w);
    remove_everything(w);
    run_for(w, SECOND);
    if !w.rt.is_stopped() {
        fold_again(w);
    }
}

fn run_for(w: &W, ns: u64) {
    w.rt.run_until(w.now() + ns);
}

/// Runs until nothing is active any more, with an operator who resumes what was paused and aborts what nobody goes on with.
fn come_to_rest(w: &W) -> bool {
    let begun = w.now();
    loop {
        run_for(w, 5 * SECOND);
        if w.rt.is_stopped() {
            return false;
        }
        let mut left = w.log.truth(what_is_left);
        left.extend(unrelieved(w));
        if left.is_empty() && replicas_agree(w) {
            w.rested_after_ns.set(w.now() - begun);
            return true;
        }
        if w.now() - begun > PATIENCE {
            w.violate(NAME, left.join("; "));
            return false;
        }
        let memory_too = w.now() - begun > MEMORY_PATIENCE;
        let (world, commands) = (Rc::clone(w), w.log.truth(|state| operate(state, memory_too)));
        w.rt.spawn(w.network, async move {
            for command in commands {
                if let Some(gateway) = world.gateways.iter().find_map(|slot| slot.get()) {
                    gateway.replica.submit(command).await;
                }
            }
        });
    }
}

fn replicas_agree(w: &W) -> bool {
    let head = w.log.last_seq();
    let gateways = w.gateways.iter().filter_map(|slot| slot.get()).map(|it| Rc::clone(&it.replica));
    let workers = w.workers.iter().filter_map(|slot| slot.get()).map(|it| Rc::clone(&it.replica));
    let mut replicas = gateways.chain(workers);
    replicas.all(|replica| {
        replica.read(State::log_seq) == head && replica.read(State::digest) == w.log.truth(State::digest)
    })
}

fn what_is_left(state: &State) -> Vec<String> {
    let operations = state.operations(&TenantId::default_tenant(), false, 1_000);
    let mut left: Vec<String> = operations
        .iter()
        .map(|it| {
            let reason = it.park_reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
            let error =
                it.last_error.as_ref().map(|error| format!(", last error {}", error.message)).unwrap_or_default();
            format!("{} {} on {} is {}{reason}{error}", it.operation_id, it.kind, it.identity, it.status)
        })
        .collect();
    for record in every_revision(state) {
        let leases = state.leases(&record.identity).len();
        if leases > 0 {
            left.push(format!("{leases} leases on {}", record.identity));
        }
        if state.import(&record.identity).is_some() {
            left.push(format!("an import of {}", record.identity));
        }
        if let Some(claim) = state.claim(&record.identity.lineage()).filter(|claim| !claim.phase.is_terminal()) {
            left.push(format!("claim {} is {}", claim.request_id, claim.phase));
        }
    }
    left
}

/// What a person would ask for, seeing what is left.
fn operate(state: &State, memory_too: bool) -> Vec<Command> {
    let mut commands = Vec::new();
    for operation in state.operations(&TenantId::default_tenant(), false, 1_000) {
        let id = operation.operation_id.clone();
        if operation.status == OperationStatus::Paused {
            commands.push(Command::ResumeOperation(id));
        } else if memory_too && operation.park_reason == Some(ParkReason::Memory) {
            commands.push(Command::CancelOperation(id));
        }
    }
    for record in every_revision(state) {
        let lineage = record.identity.lineage();
        let Some(claim) = state.claim(&lineage).filter(|claim| claim.base == record.identity) else { continue };
        let waits = matches!(claim.phase, ClaimPhase::PreparingTarget | ClaimPhase::TargetImporting);
        let target = state.revision(&claim.target).map(|target| target.availability);
        let nobody_imports = !matches!(target, Some(Availability::Importing | Availability::Ready));
        if waits && nobody_imports {
            commands
                .push(Command::AbortReplacement(AbortReplacement { lineage, request_id: claim.request_id.clone() }));
        }
    }
    commands
}

fn of(w: &W, wanted: impl Fn(Availability) -> bool) -> Vec<WeightRevisionMetadata> {
    w.log.truth(every_revision).into_iter().filter(|record| wanted(record.availability)).collect()
}

/// Every READY revision is read once more, as any client would.
fn read_everything(w: &W) {
    let Some(slot) = w.clients.first() else { return };
    for record in of(w, |availability| availability == Availability::Ready) {
        if slot.get().is_none() {
            client::start(w, slot);
        }
        let Some(reader) = slot.get() else { return };
        let (world, identity) = (Rc::clone(w), record.identity.clone());
        let done = Rc::new(std::cell::Cell::new(false));
        let told = Rc::clone(&done);
        w.rt.spawn(reader.process, async move {
            let read = client::read_all(&reader, &record).await;
            if let Err(error) = read
                && !invariants::is_lost(&world, &record.instance)
            {
                world.violate(NAME, format!("{} is READY and can not be read: {}", record.identity, error.message));
            }
            told.set(true);
        });
        run_for(w, 60 * SECOND);
        if w.rt.is_stopped() {
            return;
        }
        if !done.get() {
            return w.violate(NAME, format!("reading {identity} does not end"));
        }
    }
}

/// DEGRADED exactly when something is lost.
fn ready_is_readable(w: &W) {
    for record in w.log.truth(every_revision) {
        let lost = invariants::is_lost(w, &record.instance);
        let fits = match record.availability {
            Availability::Ready => !lost,
            Availability::Degraded => lost,
            _ => true,
        };
        if !fits {
            w.violate(NAME, format!("{} is {}, and lost: {lost}", record.identity, record.availability));
        }
    }
}

/// What a READY revision lacks of its residency has been made again, unless an attempt to do so has ended without.
fn promises_are_kept(w: &W) {
    let gave_up = |operation: &WeightOperation, instance: &InstanceId| {
        operation.kind == OperationKind::Repairing
            && operation.instance == *instance
            && matches!(operation.status, OperationStatus::Failed | OperationStatus::Cancelled)
    };
    let wanted: Vec<String> = w.log.truth(|state| {
        let operations = state.operations(&TenantId::default_tenant(), true, 1_000);
        let ready = every_revision(state).into_iter().filter(|record| record.availability == Availability::Ready);
        let lacks = |record: &WeightRevisionMetadata| {
            let units = record.manifest.as_ref().map_or(0, |manifest| manifest.affinity_count);
            let held = invariants::recorded(w, &record.instance, units);
            matches!(verdict(state, record, &held, Vec::new(), None), Some(Command::StartRepair(_)))
                && !operations.iter().any(|operation| gave_up(operation, &record.instance))
        };
        ready.filter(lacks).map(|record| format!("{} is not repaired", record.identity)).collect()
    });
    wanted.into_iter().for_each(|message| w.violate(NAME, message));
}

/// Everything is removed; nothing may stay on any disk.
fn remove_everything(w: &W) {
    let published = |availability| matches!(availability, Availability::Ready | Availability::Degraded);
    let begun = w.now();
    loop {
        if w.rt.is_stopped() {
            return;
        }
        let left = of(w, |availability| availability != Availability::Deleted);
        if left.is_empty() {
            break;
        }
        if w.now() - begun > PATIENCE {
            let names: Vec<String> = left.iter().map(|it| format!("{} ({})", it.identity, it.availability)).collect();
            return w.violate(NAME, format!("can not be deleted: {}", names.join(", ")));
        }
        let world = Rc::clone(w);
        let gateway: Option<Rc<Gateway>> = w.gateways.iter().find_map(|slot| slot.get());
        let removed: Vec<WeightRevisionMetadata> =
            left.into_iter().filter(|record| published(record.availability)).collect();
        // A replacement that somebody asked for long ago may have come only now.
        let commands = w.log.truth(|state| operate(state, true));
        w.rt.spawn(w.network, async move {
            let Some(gateway) = gateway else { return };
            for command in commands {
                gateway.replica.submit(command).await;
            }
            for record in removed {
                let expected_metadata_generation = record.metadata_generation;
                let remove = Remove { identity: record.identity, expected_metadata_generation };
                gateway.replica.submit(Command::Remove(remove)).await;
            }
            drop(world);
        });
        run_for(w, 10 * SECOND);
    }
    invariants::nothing_left(w);
}

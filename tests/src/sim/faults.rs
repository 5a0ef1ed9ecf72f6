//! What strikes components: crashes, pauses, cut connections, machines that lose their memory, disks that lie, leaders and
//! clocks that change. And the end of all that.

use std::rc::Rc;

use super::invariants;
use super::node::{self, Cause, Node, Tier};
use super::runtime::{MS, SECOND};
use super::world::{Slot, W};
use super::{client, gateway, worker};

#[derive(Clone, Copy, Debug)]
enum Strike {
    Crash,
    Pause,
    Isolate,
    LeaderChange,
    ClockJump,
    HintsLost,
    MemoryLoss,
    ColdDamage,
    ColdOffline,
    Evict,
}

/// A component to strike.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    Gateway(usize),
    Worker(usize),
    Node(usize),
    Client(usize),
}

/// Strikes until calm.
pub(crate) async fn nemesis(w: W) {
    let strikes = &w.plan.strikes;
    let weights = [
        (strikes.crash, Strike::Crash),
        (strikes.pause, Strike::Pause),
        (strikes.isolate, Strike::Isolate),
        (strikes.leader_change, Strike::LeaderChange),
        (strikes.clock_jump, Strike::ClockJump),
        (strikes.hints_lost, Strike::HintsLost),
        (strikes.memory_loss, Strike::MemoryLoss),
        (strikes.cold_damage, Strike::ColdDamage),
        (strikes.cold_offline, Strike::ColdOffline),
        (strikes.evict, Strike::Evict),
    ];
    loop {
        w.work(strikes.every_ns).await;
        if w.calm.get() {
            return;
        }
        if let Some(kind) = w.draw(|rng| rng.weighted(&weights)) {
            strike(&w, kind);
        }
    }
}

fn strike(w: &W, kind: Strike) {
    let (now, strikes) = (w.now(), &w.plan.strikes);
    match kind {
        Strike::Crash => {
            let target = some_target(w);
            w.fault("crash");
            w.trace(format!("crash of {target:?}"));
            crash(w, target);
        }
        Strike::Pause => {
            let target = some_target(w);
            let ns = w.draw(|rng| {
                let long = !rng.chance(7_000);
                if long { rng.between(12, strikes.pause_s_max) } else { rng.between(1, 12) }
            }) * SECOND;
            w.fault("pause");
            w.trace(format!("pause of {target:?} for {} ms", ns / MS));
            pause(w, target, ns);
        }
        Strike::Isolate => {
            let target = some_target(w);
            let until = now + w.draw(|rng| rng.between(1, strikes.cut_s_max)) * SECOND;
            w.fault("cut off");
            w.trace(format!("{target:?} is cut off until {} ms", until / MS));
            match target {
                Target::Gateway(at) => w.gateways[at].link.cut_until(until),
                Target::Worker(at) => w.workers[at].link.cut_until(until),
                Target::Node(at) => w.nodes[at].slot.link.cut_until(until),
                Target::Client(at) => w.clients[at].link.cut_until(until),
            }
        }
        Strike::LeaderChange => {
            w.fault("leader change");
            w.log.lose_leader(now + w.draw(|rng| rng.between(300, 8_000)) * MS);
            let skew = w.draw(|rng| rng.between(0, 4_000)) as i64 - 2_000;
            w.log.shift_clock(skew * MS as i64);
            w.trace(format!("the log changes its leader; its clock goes by {skew} ms"));
        }
        Strike::ClockJump => {
            w.fault("clock jump");
            let hours = w.draw(|rng| rng.between(1, 12)) as i64;
            let back = w.draw(|rng| rng.chance(5_000));
            w.log.shift_clock(if back { -hours } else { hours } * 3_600 * SECOND as i64);
            w.trace(format!("the log's clock jumps {hours} h, back: {back}"));
        }
        Strike::HintsLost => {
            w.fault("hints lost");
            w.hints.lose_all();
        }
        Strike::MemoryLoss => {
            let at = w.draw(|rng| rng.index(w.nodes.len()));
            w.fault("memory loss");
            w.trace(format!("machine {at} loses its memory"));
            lose_memory(w, at);
        }
        Strike::ColdDamage => damage_cold(w),
        Strike::ColdOffline => {
            let at = w.draw(|rng| rng.index(w.nodes.len()));
            w.fault("cold tier unreadable");
            w.trace(format!("n{at} finds its cold segments unreadable"));
            w.nodes[at].cold_offline.set(true);
            crash(w, Target::Node(at));
            // Somebody mends it and restarts the node.
            let (world, ns) = (Rc::clone(w), w.draw(|rng| rng.between(10, 40)) * SECOND);
            w.rt.spawn(w.network, async move {
                world.rt.sleep(ns).await;
                crash(&world, Target::Node(at));
            });
        }
        Strike::Evict => {
            w.fault("eviction of ordinary objects");
            let at = w.draw(|rng| rng.index(w.nodes.len()));
            if let Some(store) = w.nodes[at].slot.get() {
                store.evict();
            }
        }
    }
}

fn some_target(w: &W) -> Target {
    w.draw(|rng| match rng.below(10) {
        0 | 1 => Target::Gateway(rng.index(w.gateways.len())),
        2..=4 => Target::Worker(rng.index(w.workers.len())),
        5..=7 => Target::Node(rng.index(w.nodes.len())),
        _ => Target::Client(rng.index(w.clients.len())),
    })
}

fn end<S>(w: &W, slot: &Slot<S>) {
    let gone = slot.current.borrow_mut().take();
    if let Some(process) = slot.process.take() {
        w.rt.kill(process);
    }
    drop(gone);
}

/// Kills it where it stands; another run begins a while later.
pub(crate) fn crash(w: &W, target: Target) {
    match target {
        Target::Gateway(at) => end(w, &w.gateways[at]),
        Target::Worker(at) => end(w, &w.workers[at]),
        Target::Node(at) => end(w, &w.nodes[at].slot),
        Target::Client(at) => end(w, &w.clients[at]),
    }
    let ns = w.draw(|rng| if rng.chance(8_000) { rng.between(100, 2_000) } else { rng.between(2_000, 20_000) }) * MS;
    let world = Rc::clone(w);
    w.rt.spawn(w.network, async move {
        world.rt.sleep(ns).await;
        begin_again(&world, target);
    });
}

/// Starts a run unless there is one.
fn begin_again(w: &W, target: Target) {
    match target {
        Target::Gateway(at) if w.gateways[at].process.get().is_none() => gateway::start(w, &w.gateways[at]),
        Target::Worker(at) if w.workers[at].process.get().is_none() => worker::start(w, &w.workers[at]),
        Target::Node(at) if w.nodes[at].slot.process.get().is_none() => node::start(w, &w.nodes[at]),
        Target::Client(at) if w.clients[at].process.get().is_none() && !w.closing.get() => {
            client::start(w, &w.clients[at]);
        }
        _ => {}
    }
}

fn pause(w: &W, target: Target, ns: u64) {
    let process = match target {
        Target::Gateway(at) => w.gateways[at].process.get(),
        Target::Worker(at) => w.workers[at].process.get(),
        Target::Node(at) => w.nodes[at].slot.process.get(),
        Target::Client(at) => w.clients[at].process.get(),
    };
    let Some(process) = process else { return };
    w.rt.pause(process);
    let world = Rc::clone(w);
    w.rt.spawn(w.network, async move {
        world.rt.sleep(ns).await;
        world.rt.resume(process);
    });
}

/// A machine restarts: its memory tier is empty, and every process on it is gone.
fn lose_memory(w: &W, at: usize) {
    crash(w, Target::Node(at));
    for (client, slot) in w.clients.iter().enumerate() {
        if slot.get().is_some_and(|it| it.host == Some(at)) {
            crash(w, Target::Client(client));
        }
    }
    let node = &w.nodes[at];
    report_losses(w, node, Tier::Memory);
    node.disks.borrow_mut().memory.clear();
}

/// Every good replica of a tier is about to be lost.
pub(crate) fn report_losses(w: &W, node: &Node, tier: Tier) {
    let held: Vec<_> = {
        let disks = node.disks.borrow();
        let instances = disks.memory.keys().chain(disks.cold.keys());
        let ids: std::collections::BTreeSet<_> = instances.cloned().collect();
        let of = |id: &ballast_schemas::InstanceId| {
            let id = id.clone();
            disks
                .replicas(&id)
                .into_iter()
                .filter(|(at, _)| *at == tier)
                .map(move |(_, unit)| (id.clone(), unit))
                .collect::<Vec<_>>()
        };
        ids.iter().flat_map(of).collect()
    };
    for (id, unit) in held {
        invariants::replica_ends(w, node, &id, tier, unit, Cause::Loss);
    }
}

/// Bytes on some disk become others, or are cut off; now and then without anybody's writing.
fn damage_cold(w: &W) {
    let mut held = Vec::new();
    for node in &w.nodes {
        let disks = node.disks.borrow();
        for (id, folder) in &disks.cold {
            held.extend(folder.held.iter().map(|unit| (Rc::clone(node), id.clone(), unit)));
        }
    }
    let Some((node, id, unit)) = w.draw(|rng| rng.pick(&held).cloned()) else { return };
    invariants::replica_ends(w, &node, &id, Tier::Cold, unit, Cause::Loss);
    let kind = w.draw(|rng| rng.below(5));
    w.fault(
        ["cold copy flipped", "cold copy flipped", "cold copy cut off", "cold copy cut off", "cold copy decayed"]
            [kind as usize],
    );
    w.trace(format!("{} loses unit {unit} of {} on disk (kind {kind})", node.id, super::world::short(&id)));
    let mut disks = node.disks.borrow_mut();
    let changed = disks.next_write();
    if let Some(slot) = disks.cold.get_mut(&id).and_then(|folder| folder.units.get_mut(unit as usize)) {
        slot.bytes = if matches!(kind, 2 | 3) { None } else { slot.bytes.map(|bytes| bytes ^ 0x10) };
        slot.decayed = kind == 4;
        if kind != 4 {
            slot.changed = changed;
        }
    }
}

/// The end of all faults: everything runs, every connection stands.
pub(crate) fn heal(w: &W) {
    w.calm.set(true);
    w.log.lose_leader(0);
    let all = (0..w.gateways.len()).map(Target::Gateway);
    let all = all.chain((0..w.workers.len()).map(Target::Worker)).chain((0..w.nodes.len()).map(Target::Node));
    for target in all.chain((0..w.clients.len()).map(Target::Client)) {
        let (process, link) = match target {
            Target::Gateway(at) => (w.gateways[at].process.get(), &w.gateways[at].link),
            Target::Worker(at) => (w.workers[at].process.get(), &w.workers[at].link),
            Target::Node(at) => (w.nodes[at].slot.process.get(), &w.nodes[at].slot.link),
            Target::Client(at) => (w.clients[at].process.get(), &w.clients[at].link),
        };
        link.mend();
        if let Some(process) = process {
            w.rt.resume(process);
        }
        begin_again(w, target);
    }
    // What is unreadable on a disk by fault of its machine is readable again after its next start.
    for at in 0..w.nodes.len() {
        w.nodes[at].cold_offline.set(false);
        let offline = w.nodes[at].disks.borrow().cold.values().any(|folder| folder.offline);
        if offline {
            crash(w, Target::Node(at));
        }
    }
}

/// Clients go; what they held ends by itself.
pub(crate) fn dismiss_clients(w: &W) {
    w.clients.iter().for_each(|slot| end(w, slot));
}

//! A run of a node from its start: re-adopt what is intact, introduce itself to a gateway, serve what the log knows, drop what
//! the log knows to be deleted, keep the rest; again every half minute. Publishes what it holds.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ballast_schemas::{InstanceId, InstanceStanding, LogPosition, SessionId};

use super::Node;
use super::disks::Tier;
use super::store::{Cause, Live, Standing, Store};
use crate::sim::bugs::Bug;
use crate::sim::net::{Patience, ask};
use crate::sim::runtime::{MS, SECOND};
use crate::sim::world::{W, short};
use crate::sim::{faults, invariants};

/// A welcomed node asks again this often.
const HELLO_EVERY: u64 = 30 * SECOND;
const RETRY_AFTER: u64 = SECOND;
const ANSWER: Patience = Patience::new(5 * SECOND);

/// Starts a run.
pub(crate) fn start(w: &W, node: &Rc<Node>) {
    let process = w.rt.start_process();
    node.slot.process.set(Some(process));
    let store = Rc::new(Store {
        w: Rc::clone(w),
        node: Rc::clone(node),
        incarnation: node.next_incarnation(),
        process,
        instances: RefCell::new(BTreeMap::new()),
        tombstones: RefCell::new(BTreeSet::new()),
        introduced_at: Cell::new(0),
    });
    w.rt.spawn(process, store.run());
}

impl Store {
    async fn run(self: Rc<Self>) {
        let w = Rc::clone(&self.w);
        w.work(100 * MS).await;
        self.adopt();
        if w.bug(Bug::OldInstanceReadopted) {
            self.instances.borrow().values().for_each(|live| live.standing.set(Standing::Serving));
        }
        while !self.hello().await {
            w.rt.sleep(RETRY_AFTER).await;
        }
        *self.node.slot.current.borrow_mut() = Some(Rc::clone(&self));
        self.trace("serves");
        let publisher = Rc::clone(&self);
        w.rt.spawn(self.process, async move {
            loop {
                publisher.publish();
                publisher.w.rt.sleep(SECOND).await;
            }
        });
        loop {
            w.rt.sleep(HELLO_EVERY).await;
            while !self.hello().await {
                w.rt.sleep(RETRY_AFTER).await;
            }
        }
    }

    /// Takes what is in the folders: sealed instances, with the units whose bytes are what they should be. Imports that never
    /// ended are discarded.
    fn adopt(&self) {
        let offline = self.node.cold_offline.replace(false);
        if offline {
            faults::report_losses(&self.w, &self.node, Tier::Cold);
        }
        let mut disks = self.node.disks.borrow_mut();
        disks.memory.retain(|_, folder| folder.content.is_some());
        let mut mended = Vec::new();
        for (id, folder) in &mut disks.cold {
            if folder.offline && !offline {
                mended.push(id.clone());
            }
            folder.offline = offline;
        }
        let ids: BTreeSet<InstanceId> = disks.memory.keys().chain(disks.cold.keys()).cloned().collect();
        drop(disks);
        mended.iter().for_each(|id| invariants::restored(&self.w, id));
        for id in ids {
            let live = Rc::new(self.adopt_instance(&id));
            self.save_memory(&live);
            self.instances.borrow_mut().insert(id, live);
        }
    }

    fn adopt_instance(&self, id: &InstanceId) -> Live {
        let mut disks = self.node.disks.borrow_mut();
        let disks = &mut *disks;
        let from_cold = disks.cold.get(id).map(|cold| (cold.session_id.clone(), Rc::clone(&cold.content)));
        let from_memory =
            disks.memory.get(id).and_then(|it| Some((it.session_id.clone(), Rc::clone(it.content.as_ref()?))));
        let Some((session_id, content)) = from_memory.or(from_cold) else {
            // Only sealed folders are left here.
            return Live::new(id, &no_session(), 0, Standing::Quarantined);
        };
        let count = content.len();
        let live = Live::new(id, &session_id, count, Standing::Quarantined);
        let memory_fence = disks.memory.get(id).map_or(LogPosition::ZERO, |folder| folder.fence);
        let cold_fence = disks.cold.get(id).map_or(LogPosition::ZERO, |folder| folder.fence);
        live.fence.set(memory_fence.max(cold_fence));
        let deleting =
            disks.memory.get(id).is_some_and(|it| it.deleting) || disks.cold.get(id).is_some_and(|it| it.deleting);
        live.deleting.set(deleting);
        *live.content.borrow_mut() = Some(Rc::clone(&content));
        let mut units = live.units.borrow_mut();
        if let Some(cold) = disks.cold.get(id).filter(|cold| !cold.offline) {
            cold.held.iter().for_each(|unit| units.set_cold(unit, true));
            *live.cold_lost.borrow_mut() = cold.lost.clone();
        }
        // The manifest stays readable from memory whatever the units do.
        let folder = disks.memory.entry(id.clone()).or_insert_with(|| {
            let mut folder = super::store::new_folder(&session_id, count, self.w.now());
            folder.content = Some(Rc::clone(&content));
            folder.resident = ballast_schemas::Bitmap::empty(count);
            folder
        });
        for unit in 0..count {
            let segment_is_mapped = folder.locks(unit / super::SEGMENT_UNITS) > 0;
            if folder.held.get(unit) {
                let right = folder.bytes(unit) == content.unit(unit);
                units.set_hot(unit);
                if !right {
                    units.clear_hot(unit);
                }
            } else if segment_is_mapped {
                if folder.resident.get(unit) {
                    units.set_resident(unit);
                }
            } else {
                folder.write(unit, None);
            }
        }
        drop(units);
        live
    }

    /// Introduces the node once and does what follows from the answer.
    async fn hello(&self) -> bool {
        let w = &self.w;
        let gateway = w.draw(|rng| rng.pick(&w.gateways).cloned());
        let Some(gateway) = gateway else { return false };
        let (held, seen) = {
            let instances = self.instances.borrow();
            let seen = instances.values().map(|live| live.fence.get().max(live.id.position)).max();
            (instances.keys().cloned().collect::<Vec<_>>(), seen.unwrap_or(LogPosition::ZERO))
        };
        let asked = held.clone();
        let answer = ask(w, &self.node.slot.link, &gateway, ANSWER, move |gateway| {
            let held = asked.clone();
            async move { gateway.welcome(&held, seen).await }
        });
        let Some(Some((log_seq, standings))) = answer.await else { return false };
        for (id, standing) in held.into_iter().zip(standings) {
            self.follow(&id, standing, log_seq).await;
        }
        self.introduced_at.set(w.now());
        true
    }

    async fn follow(&self, id: &InstanceId, standing: InstanceStanding, log_seq: u64) {
        let Some(live) = self.instances.borrow().get(id).cloned() else { return };
        match standing {
            InstanceStanding::Known => live.standing.set(Standing::Serving),
            InstanceStanding::Deleted if self.w.bug(Bug::OldInstanceReadopted) => {}
            InstanceStanding::Deleted => {
                self.tombstones.borrow_mut().insert(id.clone());
                let _turn = live.queue.enter().await;
                self.remove(&live, Cause::Drop);
            }
            InstanceStanding::Unknown if self.w.bug(Bug::UnknownIsDropped) => self.remove(&live, Cause::Unknown),
            // The gateway has not folded the entry that made it: nothing follows.
            InstanceStanding::Unknown if log_seq < id.position.seq => {}
            InstanceStanding::Unknown => {
                self.w.fault("instance quarantined");
                self.trace(&format!("keeps {} and does not serve it", short(id)));
                live.standing.set(Standing::Quarantined);
            }
        }
    }

    fn publish(&self) {
        let served = |live: &&Rc<Live>| live.standing.get() == Standing::Serving;
        let held = self.instances.borrow().values().filter(served).map(|live| live.id.clone()).collect();
        *self.node.published.borrow_mut() = held;
    }
}

fn no_session() -> SessionId {
    SessionId::new("none").expect("a short ASCII name is a session id")
}

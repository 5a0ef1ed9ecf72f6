//! Effects on an instance, as the node store carries them out: copies that count once they are verified, memory freed only
//! beside a verified copy and outside of every guard, deletion of everything. Each takes time, and a crash at any of its
//! waits leaves what a crash would leave.

use std::rc::Rc;

use ballast_schemas::{BallastError, ErrorCode, InstanceId, LogPosition, NodeCheck, TierCheck, UnitEffect};

use super::disks::Tier;
use super::store::{Cause, Live, Standing, Store, refuse};
use crate::sim::bugs::Bug;
use crate::sim::runtime::{MS, SECOND};
use crate::sim::world::short;

/// How long a release waits for readers before it says BUSY.
const READERS_WAIT: u64 = 2 * SECOND;
const ASK_AGAIN: u64 = 20 * MS;
/// One unit, on average.
const UNIT_TIME: u64 = 15 * MS;
/// Longest wait for the writers of an import that is being deleted.
const WRITERS_WAIT: u64 = 2 * SECOND;

impl Store {
    async fn begin(&self, effect: &UnitEffect) -> Result<(Rc<Live>, Vec<u32>), BallastError> {
        let live = self.served(&effect.instance)?;
        let units = Self::units_of(&live, &effect.units)?;
        Ok((live, units))
    }

    fn fenced_off<T>(live: &Live, fence: LogPosition) -> Result<T, BallastError> {
        let message = format!("fence {fence} is older than {}", live.fence.get());
        refuse(ErrorCode::Conflict, message)
    }

    pub async fn copy_to_cold(&self, effect: &UnitEffect) -> Result<Rc<Live>, BallastError> {
        let (live, units) = self.begin(effect).await?;
        let _turn = live.queue.enter().await;
        self.obey(&live, effect.fence)?;
        let content = Self::sealed(&live)?;
        if !self.node.has_cold {
            return refuse(ErrorCode::PolicyUnsatisfiable, "this node has no cold tier");
        }
        let wanted: Vec<u32> = units.into_iter().filter(|unit| !live.units.borrow().cold().get(*unit)).collect();
        if let Some(unit) = wanted.iter().find(|unit| !live.units.borrow().hot().get(**unit)) {
            return refuse(ErrorCode::Unavailable, format!("unit {unit} of {} has no readable copy here", live.id));
        }
        for &unit in &wanted {
            self.step(UNIT_TIME).await;
            if !Self::is_current(&live, effect.fence) {
                return Self::fenced_off(&live, effect.fence);
            }
            if self.w.strikes(self.w.plan.network.disk_error, "disk error") {
                return refuse(ErrorCode::DurabilityFailed, "write: input/output error");
            }
            let bad = self.w.strikes(self.w.plan.network.bad_write, "bad write");
            let mut disks = self.node.disks.borrow_mut();
            let bytes = disks.memory.get(&live.id).and_then(|folder| folder.bytes(unit));
            let changed = disks.next_write();
            if let Some(slot) = disks.cold.get_mut(&live.id).and_then(|folder| folder.units.get_mut(unit as usize)) {
                slot.bytes = if bad { Some(2) } else { bytes };
                slot.changed = changed;
                slot.decayed = false;
            }
        }
        // Synchronised, then read back.
        self.step(2 * MS).await;
        let wrong: Vec<u32> =
            wanted.iter().copied().filter(|unit| self.cold_bytes(&live, *unit) != content.unit(*unit)).collect();
        if !wrong.is_empty() && !self.w.bug(Bug::CopyCountsUnverified) {
            // The disk's fault, or memory's?
            let in_memory = self.lose_wrong_hot(&live, &wrong);
            let place = if in_memory { "memory" } else { "the cold tier" };
            return refuse(ErrorCode::ChecksumMismatch, format!("units {wrong:?} do not match in {place}"));
        }
        if !Self::is_current(&live, effect.fence) {
            return Self::fenced_off(&live, effect.fence);
        }
        for unit in wanted {
            live.units.borrow_mut().set_cold(unit, true);
            live.cold_lost.borrow_mut().set(unit, false);
            let changed = self.changed(&live, unit);
            live.verified.borrow_mut().insert(unit, changed);
        }
        self.save_cold(&live);
        Ok(live)
    }

    pub async fn copy_to_memory(&self, effect: &UnitEffect) -> Result<Rc<Live>, BallastError> {
        let (live, units) = self.begin(effect).await?;
        let _turn = live.queue.enter().await;
        self.obey(&live, effect.fence)?;
        let content = Self::sealed(&live)?;
        let missing: Vec<u32> = units.into_iter().filter(|unit| !live.units.borrow().hot().get(*unit)).collect();
        let (leaving, mut absent): (Vec<u32>, Vec<u32>) =
            missing.into_iter().partition(|unit| live.units.borrow().is_leaving(*unit));
        // Bytes on their way out are still there; those that are right need not be read again.
        for unit in leaving {
            if self.memory_bytes(&live, unit) == content.unit(unit) {
                live.units.borrow_mut().set_hot(unit);
            } else {
                absent.push(unit);
            }
        }
        self.save_memory(&live);
        if absent.is_empty() {
            return Ok(live);
        }
        if let Some(unit) = absent.iter().find(|unit| !live.units.borrow().cold().get(**unit)) {
            return refuse(ErrorCode::Unavailable, format!("unit {unit} of {} has no readable copy here", live.id));
        }
        let taken: Vec<u32> =
            absent.iter().copied().filter(|unit| !live.units.borrow().resident().get(*unit)).collect();
        if self.node.disks.borrow().memory_used() + taken.len() as u64 > self.node.memory_units {
            return refuse(ErrorCode::CapacityExhausted, "memory tier is full");
        }
        taken.iter().for_each(|unit| live.units.borrow_mut().set_resident(*unit));
        self.save_memory(&live);
        let mut wrong = Vec::new();
        for &unit in &absent {
            self.step(UNIT_TIME).await;
            if !Self::is_current(&live, effect.fence) {
                self.give_up(&live, &absent);
                return Self::fenced_off(&live, effect.fence);
            }
            let bytes = self.cold_bytes(&live, unit);
            if bytes != content.unit(unit) {
                wrong.push(unit);
                continue;
            }
            if let Some(folder) = self.node.disks.borrow_mut().memory.get_mut(&live.id) {
                folder.write(unit, bytes);
            }
        }
        for unit in absent.iter().filter(|unit| !wrong.contains(unit)) {
            live.units.borrow_mut().set_hot(*unit);
        }
        self.give_up(&live, &wrong);
        self.save_memory(&live);
        if wrong.is_empty() {
            return Ok(live);
        }
        self.lose_cold(&live, &wrong);
        refuse(ErrorCode::ChecksumMismatch, format!("units {wrong:?} do not match in the cold tier"))
    }

    /// Frees the room of units that never became hot.
    fn give_up(&self, live: &Live, units: &[u32]) {
        for &unit in units.iter().filter(|unit| !live.units.borrow().hot().get(**unit)) {
            live.units.borrow_mut().finish_release(unit);
            if let Some(folder) = self.node.disks.borrow_mut().memory.get_mut(&live.id) {
                folder.write(unit, None);
            }
        }
        self.save_memory(live);
    }

    pub async fn release_memory(&self, effect: &UnitEffect) -> Result<Rc<Live>, BallastError> {
        let (live, units) = self.begin(effect).await?;
        let _turn = live.queue.enter().await;
        self.obey(&live, effect.fence)?;
        let content = Self::sealed(&live)?;
        let units: Vec<u32> = units.into_iter().filter(|unit| live.units.borrow().resident().get(*unit)).collect();
        if units.is_empty() {
            return Ok(live);
        }
        if !self.node.has_cold {
            return refuse(ErrorCode::PolicyUnsatisfiable, "this node has no cold tier");
        }
        if self.w.bug(Bug::ReleaseWithoutWitness) {
            let unwitnessed: Vec<u32> =
                units.iter().copied().filter(|unit| !live.units.borrow().cold().get(*unit)).collect();
            if !unwitnessed.is_empty() {
                return refuse(ErrorCode::NotReady, "no copy on the cold tier");
            }
        } else {
            self.check_witness(&live, &content.units, &units).await?;
        }
        if !Self::is_current(&live, effect.fence) {
            return Self::fenced_off(&live, effect.fence);
        }
        {
            let hot: Vec<u32> = units.iter().copied().filter(|unit| live.units.borrow().hot().get(*unit)).collect();
            if let Err(unwitnessed) = live.units.borrow_mut().begin_release(&units) {
                return refuse(ErrorCode::NotReady, unwitnessed.to_string());
            }
            for unit in hot {
                self.ends(&live.id, Tier::Memory, unit, Cause::Release(effect.fence));
            }
            self.save_memory(&live);
        }
        let deadline = self.w.now() + READERS_WAIT;
        loop {
            self.step(MS).await;
            self.free_unguarded(&live, &units, effect.fence)?;
            let left = units.iter().filter(|unit| live.units.borrow().resident().get(**unit)).count();
            if left == 0 {
                return Ok(live);
            }
            if self.w.now() >= deadline {
                self.w.fault("release waits for readers");
                return refuse(ErrorCode::Busy, format!("{left} units of {} are still mapped or read", live.id));
            }
            self.w.rt.timeout(ASK_AGAIN, live.eased.wait_for(|| None::<()>)).await;
        }
    }

    /// Frees what is on its way out and under no guard, segment by segment.
    fn free_unguarded(&self, live: &Live, units: &[u32], fence: LogPosition) -> Result<(), BallastError> {
        for segment in Self::segments(live) {
            let range = Self::segment_units(live, segment);
            let here: Vec<u32> = units.iter().copied().filter(|unit| range.contains(unit)).collect();
            if here.is_empty() || !self.is_unmapped(live, segment) {
                continue;
            }
            if !Self::is_current(live, fence) {
                return Self::fenced_off(live, fence);
            }
            for unit in here {
                let mut states = live.units.borrow_mut();
                if !states.is_leaving(unit) || states.is_guarded(unit) {
                    continue;
                }
                states.finish_release(unit);
                drop(states);
                if let Some(folder) = self.node.disks.borrow_mut().memory.get_mut(&live.id) {
                    folder.write(unit, None);
                }
            }
        }
        self.save_memory(live);
        Ok(())
    }

    /// Looks at the copies on disk once more, right before those in memory go.
    async fn check_witness(&self, live: &Live, expected: &[u64], units: &[u32]) -> Result<(), BallastError> {
        let unseen = |unit: &u32| {
            let changed = self.changed(live, *unit);
            live.units.borrow().cold().get(*unit) && live.verified.borrow().get(unit) != Some(&changed)
        };
        let unseen: Vec<u32> = units.iter().copied().filter(unseen).collect();
        let wrong = self.verify_cold(live, expected, &unseen).await;
        if wrong.is_empty() {
            return Ok(());
        }
        refuse(ErrorCode::ChecksumMismatch, format!("units {wrong:?} do not match in the cold tier"))
    }

    /// Reads units from disk; wrong ones no longer count.
    async fn verify_cold(&self, live: &Live, expected: &[u64], units: &[u32]) -> Vec<u32> {
        let mut wrong = Vec::new();
        for &unit in units {
            let changed = self.changed(live, unit);
            self.step(UNIT_TIME / 3).await;
            if self.cold_bytes(live, unit) == expected.get(unit as usize).copied() {
                live.verified.borrow_mut().insert(unit, changed);
            } else {
                wrong.push(unit);
            }
        }
        if !wrong.is_empty() {
            self.lose_cold(live, &wrong);
        }
        wrong
    }

    /// Copies on disk that are wrong no longer count.
    pub fn lose_cold(&self, live: &Live, units: &[u32]) {
        self.w.fault("cold copy found wrong");
        for &unit in units {
            live.units.borrow_mut().set_cold(unit, false);
            live.cold_lost.borrow_mut().set(unit, true);
            live.verified.borrow_mut().remove(&unit);
        }
        self.save_cold(live);
    }

    /// Memory copies that are wrong are no longer handed out. Tells whether there were any.
    fn lose_wrong_hot(&self, live: &Live, units: &[u32]) -> bool {
        let expected = live.content.borrow().clone();
        let wrong = |unit: &u32| self.memory_bytes(live, *unit) != expected.as_ref().and_then(|it| it.unit(*unit));
        let wrong: Vec<u32> = units.iter().copied().filter(wrong).collect();
        wrong.iter().for_each(|unit| live.units.borrow_mut().clear_hot(*unit));
        self.save_memory(live);
        !wrong.is_empty()
    }

    /// Reads everything of an instance back; wrong copies no longer count.
    pub async fn verify(&self, id: &InstanceId) -> Result<NodeCheck, BallastError> {
        let live = self.served(id)?;
        let _turn = live.queue.enter().await;
        let content = Self::sealed(&live)?;
        let hot: Vec<u32> = live.units.borrow().hot().iter().collect();
        self.lose_wrong_hot(&live, &hot);
        let cold: Vec<u32> = live.units.borrow().cold().iter().collect();
        let wrong_cold = self.verify_cold(&live, &content.units, &cold).await;
        let wrong_hot: Vec<u32> = hot.iter().copied().filter(|unit| !live.units.borrow().hot().get(*unit)).collect();
        let check = |asked: usize, wrong: Vec<u32>| TierCheck { right: (asked - wrong.len()) as u32, wrong };
        Ok(NodeCheck {
            node: self.node.id.clone(),
            memory: check(hot.len(), wrong_hot),
            cold: check(cold.len(), wrong_cold),
            next: None,
        })
    }

    /// Marks an instance as being deleted and closes its import. `None` when it is not here: it must not come any more.
    async fn begin_deletion(&self, id: &InstanceId, fence: LogPosition) -> Result<Option<Rc<Live>>, BallastError> {
        let Some(live) = self.find(id) else {
            self.tombstones.borrow_mut().insert(id.clone());
            return Ok(None);
        };
        if live.standing.get() != Standing::Serving {
            return refuse(ErrorCode::NotReady, format!("{id} is kept but not served"));
        }
        self.obey(&live, fence)?;
        if !live.deleting.get() {
            // From here on nothing of it is handed out.
            let held = self.node.disks.borrow().replicas(&live.id);
            for (tier, unit) in held {
                self.ends(&live.id, tier, unit, Cause::Delete(fence));
            }
            live.deleting.set(true);
            self.save(&live);
        }
        let writers_gone = live.eased.wait_for(|| (live.writers.get() == 0).then_some(()));
        self.w.rt.timeout(WRITERS_WAIT, writers_gone).await;
        Ok(Some(live))
    }

    pub async fn delete_units(&self, effect: &UnitEffect) -> Result<Option<Rc<Live>>, BallastError> {
        let Some(live) = self.begin_deletion(&effect.instance, effect.fence).await? else { return Ok(None) };
        let units = Self::units_of(&live, &effect.units)?;
        let _turn = live.queue.enter().await;
        self.obey(&live, effect.fence)?;
        for &unit in &units {
            let mut states = live.units.borrow_mut();
            states.clear_hot(unit);
            states.set_cold(unit, false);
        }
        self.save(&live);
        self.step(5 * MS).await;
        let mut disks = self.node.disks.borrow_mut();
        if let Some(folder) = disks.cold.get_mut(&live.id) {
            for unit in &units {
                if let Some(slot) = folder.units.get_mut(*unit as usize) {
                    slot.bytes = None;
                }
            }
        }
        drop(disks);
        self.free_unguarded(&live, &units, effect.fence)?;
        self.unlink_empty_segments(&live);
        Ok(Some(live))
    }

    /// Segments of which nothing is handed out any more go from the folder; readers keep what they map.
    fn unlink_empty_segments(&self, live: &Live) {
        if live.content.borrow().is_none() {
            return;
        }
        for segment in Self::segments(live) {
            let range = Self::segment_units(live, segment);
            if range.clone().any(|unit| live.units.borrow().hot().get(unit)) {
                continue;
            }
            if let Some(folder) = self.node.disks.borrow_mut().memory.get_mut(&live.id) {
                folder.segments.remove(&segment);
            }
            range.for_each(|unit| live.units.borrow_mut().finish_release(unit));
        }
        self.save_memory(live);
    }

    pub async fn delete_instance(&self, id: &InstanceId, fence: LogPosition) -> Result<(), BallastError> {
        if let Some(live) = self.begin_deletion(id, fence).await? {
            let _turn = live.queue.enter().await;
            self.obey(&live, fence)?;
            self.step(5 * MS).await;
            self.remove(&live, Cause::Delete(fence));
        }
        let disks = self.node.disks.borrow();
        if disks.memory.contains_key(id) || disks.cold.contains_key(id) {
            return refuse(ErrorCode::Conflict, format!("{} is not gone", short(id)));
        }
        Ok(())
    }

    pub fn cold_bytes(&self, live: &Live, unit: u32) -> Option<u64> {
        let disks = self.node.disks.borrow();
        let folder = disks.cold.get(&live.id).filter(|folder| !folder.offline)?;
        folder.units.get(unit as usize)?.bytes
    }

    fn changed(&self, live: &Live, unit: u32) -> u64 {
        let disks = self.node.disks.borrow();
        disks.cold.get(&live.id).and_then(|folder| folder.units.get(unit as usize)).map_or(0, |unit| unit.changed)
    }

    pub fn memory_bytes(&self, live: &Live, unit: u32) -> Option<u64> {
        self.node.disks.borrow().memory.get(&live.id).and_then(|folder| folder.bytes(unit))
    }
}

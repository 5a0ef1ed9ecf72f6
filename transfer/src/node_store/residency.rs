//! Effects that move units between the tiers, each authorised by the log and fenced (RFC, Residency Migration):
//! copies are verified before they count, and memory is freed only where a verified copy on disk was seen just before.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_schemas::frame::{ReadRange, Tier};
use ballast_schemas::{Bitmap, InstanceId, LogPosition, NodeCheck, NodeInventory, TierCheck, UnitEffect};

use super::instance::{Instance, Sealed, cold_record};
use super::{NodeStore, lock};
use crate::checksum::RunningChecksum;
use crate::cold::{ColdFailure, ColdReplica, Gone, Progress, Watch};
use crate::error::{Mismatch, StoreError};
use crate::folder::OnPath;
use crate::guard::FenceRefused;
use crate::layout::Run;
use crate::record::StateRecord;
use crate::segment::{lock_out_readers, punch};

/// How often a segment is asked whether its readers are gone. The kernel tells nobody when a lock goes with a mapping.
const ASK_AGAIN: Duration = Duration::from_millis(20);
/// Bytes of one round of a verification, on each tier.
const VERIFY_ROUND_BYTES: u64 = 256 << 20;
/// Bytes read at a time of one copy that is looked at.
const CHECK_BYTES: u64 = 1 << 20;

impl NodeStore {
    /// Obeys nothing older than `fence` from now on. Does not wait for an effect that is being carried out: that one
    /// ends at its next check.
    ///
    /// # Errors
    /// When a higher fence is in force, or it can not be made durable.
    pub fn raise_fence(&self, id: &InstanceId, fence: LogPosition) -> Result<NodeInventory, StoreError> {
        let instance = self.served(id)?;
        instance.obey(fence)?;
        Ok(self.inventory_of(&instance))
    }

    /// Copies units from memory to disk: write, sync, read back, verify, record. Units already there are skipped.
    ///
    /// # Errors
    /// When a unit is not in memory, there is no room, or the disk fails; units in memory stay readable.
    pub fn copy_to_cold(&self, effect: &UnitEffect, progress: &Progress) -> Result<NodeInventory, StoreError> {
        let (instance, units) = self.target(effect)?;
        let _queue = lock(&instance.queue);
        let sealed = instance.begin(effect.fence)?;
        let tier = self.cold()?;
        let replica = instance.cold_replica()?;
        let wanted = {
            let state = lock(&instance.state);
            let wanted: Vec<u32> = units.into_iter().filter(|&unit| !state.units.cold().get(unit)).collect();
            if let Some(&unit) = wanted.iter().find(|&&unit| !state.units.hot().get(unit)) {
                return Err(StoreError::NotHere { instance: instance.id.clone(), unit });
            }
            wanted
        };
        if wanted.is_empty() {
            return Ok(self.inventory_of(&instance));
        }
        instance.lose_gone(&sealed, &wanted)?;
        let charge = tier.budget().reserve(instance.padded_bytes(&wanted))?;
        let runs = instance.runs(&wanted);
        let watch = Watch { progress, wanted: &|| instance.is_current(effect.fence) };
        let checksum_of = |unit| sealed.checksum(unit);
        instance.forget_changed(replica, &runs);
        let copied = replica.write(&instance.memory, &runs, &watch);
        let copied = copied.and_then(|()| replica.verify(&runs, &checksum_of, &watch));
        let failure = match copied {
            Ok(wrong) if wrong.is_empty() => None,
            Ok(wrong) => Some(instance.blame(&sealed, wrong)?),
            Err(failure) => Some(instance.failure(effect.fence, Tier::Cold, failure)),
        };
        if let Some(failure) = failure {
            replica.discard(&runs);
            return Err(failure);
        }
        replica.mark(&runs);
        let durable = |record: &mut StateRecord| {
            for &unit in &wanted {
                record.held.set(unit, true);
                record.resident.set(unit, true);
            }
        };
        instance.change_cold(durable, |state| {
            for &unit in &wanted {
                state.units.set_cold(unit, true);
                state.cold_lost.set(unit, false);
                state.verified.set(unit, true);
            }
            match &mut state.cold_charge {
                Some(all) => all.absorb(charge),
                none => *none = Some(charge),
            }
        })?;
        progress.add_units(wanted.len() as u32);
        Ok(self.inventory_of(&instance))
    }

    /// Copies units from disk to memory and verifies them. Units already there are skipped.
    ///
    /// # Errors
    /// When a unit is not on disk, there is no room, or its bytes there are wrong (that copy no longer counts then).
    pub fn copy_to_memory(&self, effect: &UnitEffect, progress: &Progress) -> Result<NodeInventory, StoreError> {
        let (instance, units) = self.target(effect)?;
        let _queue = lock(&instance.queue);
        let sealed = instance.begin(effect.fence)?;
        let (leaving, absent): (Vec<u32>, Vec<u32>) = {
            let state = lock(&instance.state);
            let wanted = units.into_iter().filter(|&unit| !state.units.hot().get(unit));
            wanted.partition(|&unit| state.units.is_leaving(unit))
        };
        // Bytes that were on their way out are still there; those that are right need not be read again.
        let wrong = instance.check_memory(&leaving, &|unit| sealed.checksum(unit))?;
        let wrong: BTreeSet<u32> = wrong.into_iter().map(|mismatch| mismatch.unit).collect();
        let right: Vec<u32> = leaving.into_iter().filter(|unit| !wrong.contains(unit)).collect();
        instance.become_hot(&right)?;
        progress.add_units(right.len() as u32);

        if absent.is_empty() && wrong.is_empty() {
            return Ok(self.inventory_of(&instance));
        }
        let replica = instance.cold_replica()?;
        let mut wanted: Vec<u32> = absent.iter().copied().chain(wrong).collect();
        wanted.sort_unstable();
        {
            let state = lock(&instance.state);
            if let Some(&unit) = wanted.iter().find(|&&unit| !state.units.cold().get(unit)) {
                return Err(StoreError::NotHere { instance: instance.id.clone(), unit });
            }
        }
        let gone = instance.lose_gone(&sealed, &wanted)?;
        if !gone.is_empty() {
            return Err(StoreError::Checksum { instance: instance.id.clone(), place: "the cold tier", units: gone });
        }
        let charge = self.memory.reserve(instance.padded_bytes(&absent))?;
        {
            let mut state = lock(&instance.state);
            absent.iter().for_each(|&unit| state.units.set_resident(unit));
            state.memory_charge.absorb(charge);
        }
        let runs = instance.runs(&wanted);
        let watch = Watch { progress, wanted: &|| instance.is_current(effect.fence) };
        let checksum_of = |unit| sealed.checksum(unit);
        let filled = replica.fill(&instance.memory, &runs, &checksum_of, &watch);
        let (bad, failure) = match filled {
            Ok(bad) => (bad, None),
            Err(failure) => (Vec::new(), Some(failure)),
        };
        if let Some(failure) = failure {
            instance.give_up(&wanted);
            return Err(instance.failure(effect.fence, Tier::Memory, failure));
        }
        let bad_units: Vec<u32> = bad.iter().map(|mismatch| mismatch.unit).collect();
        // Both ascend.
        let good: Vec<u32> = wanted.iter().copied().filter(|unit| bad_units.binary_search(unit).is_err()).collect();
        if let Err(error) = instance.become_hot(&good) {
            instance.give_up(&wanted);
            return Err(error);
        }
        progress.add_units(good.len() as u32);
        if bad.is_empty() {
            return Ok(self.inventory_of(&instance));
        }
        instance.give_up(&bad_units);
        instance.lose_cold(&bad_units)?;
        Err(StoreError::Checksum { instance: instance.id.clone(), place: "the cold tier", units: bad })
    }

    /// Frees the memory of units that are on disk here: their copies there are looked at once more, the units are no
    /// longer handed out, and once no reader covers them their memory goes. Units already gone are skipped.
    ///
    /// # Errors
    /// `Busy` when readers still hold some after `wait`; those are no longer handed out, and repeating the call goes on.
    /// Otherwise when a unit's copy on disk is not right; nothing is freed then.
    pub fn release_memory(
        &self,
        effect: &UnitEffect,
        wait: Duration,
        progress: &Progress,
    ) -> Result<NodeInventory, StoreError> {
        let (instance, units) = self.target(effect)?;
        let _queue = lock(&instance.queue);
        let sealed = instance.begin(effect.fence)?;
        let units: Vec<u32> = {
            let state = lock(&instance.state);
            units.into_iter().filter(|&unit| state.units.resident().get(unit)).collect()
        };
        if units.is_empty() {
            return Ok(self.inventory_of(&instance));
        }
        instance.check_witness(&sealed, &units, effect.fence, progress)?;
        {
            let mut state = lock(&instance.state);
            let before = state.units.clone();
            if state.units.begin_release(&units)?
                && let Err(error) = instance.save_memory(&state)
            {
                state.units = before;
                return Err(error);
            }
        }
        let deadline = Instant::now() + wait;
        loop {
            let freed = instance.free_unguarded(&units, effect.fence)?;
            progress.add_units(freed);
            let state = lock(&instance.state);
            let left = units.iter().filter(|&&unit| state.units.resident().get(unit)).count();
            if freed > 0 {
                instance.save_memory(&state)?;
            }
            if left == 0 {
                drop(state);
                return Ok(self.inventory_of(&instance));
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(StoreError::Busy { instance: instance.id.clone(), units: left as u32 });
            }
            // A reader in this process says when it is done; one that maps the segment does not.
            drop(instance.wait_until(state, ASK_AGAIN.min(deadline - now), |_| false));
        }
    }

    /// Reads units back from every tier that has them and compares their checksums: a round of them from `from` on, so that
    /// what else is to be done on the instance gets its turn. A copy that is wrong is never handed out again.
    ///
    /// # Errors
    /// When the instance is not here or the disk fails.
    pub fn verify(&self, id: &InstanceId, from: u32, progress: &Progress) -> Result<NodeCheck, StoreError> {
        let instance = self.served(id)?;
        let _queue = lock(&instance.queue);
        let sealed = instance.sealed()?;
        let fence = lock(&instance.state).fence;
        let count = instance.layout.unit_count();
        let mut bytes = 0;
        // One unit at least, however large.
        let in_round = |unit: &u32| {
            bytes += instance.padded_bytes(&[*unit]);
            *unit == from || bytes <= VERIFY_ROUND_BYTES
        };
        let units: Vec<u32> = (from..count).take_while(in_round).collect();
        let (hot, cold): (Vec<u32>, Vec<u32>) = {
            let state = lock(&instance.state);
            let held = |in_tier: &ballast_schemas::Bitmap| units.iter().copied().filter(|&u| in_tier.get(u)).collect();
            (held(state.units.hot()), held(state.units.cold()))
        };
        let in_memory = instance.check_memory(&hot, &|unit| sealed.checksum(unit))?;
        progress.add_bytes(instance.padded_bytes(&hot));
        if !in_memory.is_empty() {
            instance.lose_hot(&in_memory)?;
        }
        let on_disk = match cold.is_empty() {
            true => Vec::new(),
            false => instance.verify_cold(&sealed, &cold, fence, progress)?,
        };
        progress.add_units(units.len() as u32);
        let check = |asked: &[u32], wrong: Vec<Mismatch>| {
            let wrong: Vec<u32> = wrong.into_iter().map(|mismatch| mismatch.unit).collect();
            TierCheck { right: (asked.len() - wrong.len()) as u32, wrong }
        };
        let next = from.saturating_add(units.len() as u32);
        Ok(NodeCheck {
            node: self.node.clone(),
            memory: check(&hot, in_memory),
            cold: check(&cold, on_disk),
            next: (next < count).then_some(next),
        })
    }

    /// The disk did not give bytes to the data plane: when that is because a segment is gone or cut off, what was in it no
    /// longer counts.
    pub(crate) fn report_unreadable_cold(&self, id: &InstanceId, unit: u32) {
        let lost = self.served(id).and_then(|instance| {
            let _queue = lock(&instance.queue);
            let sealed = instance.sealed()?;
            instance.lose_gone(&sealed, &[unit])
        });
        if let Err(error) = lost {
            tracing::warn!(%error, instance = %id, unit, "a read from disk failed, and what is there can not be looked at");
        }
    }

    /// A whole unit read from disk by the data plane did not match: that copy no longer counts.
    pub(crate) fn report_bad_cold(&self, id: &InstanceId, mismatch: Mismatch) -> StoreError {
        let lost = self.served(id).and_then(|instance| {
            let _queue = lock(&instance.queue);
            instance.lose_cold(&[mismatch.unit])
        });
        if let Err(error) = lost {
            tracing::error!(%error, instance = %id, unit = mismatch.unit, "can not give up a wrong copy on disk");
        }
        StoreError::Checksum { instance: id.clone(), place: "the cold tier", units: vec![mismatch] }
    }

    /// A whole unit read from memory by the data plane did not match. It is looked at again, and no longer handed out if it
    /// is wrong.
    pub(crate) fn report_bad_hot(&self, id: &InstanceId, mismatch: Mismatch) -> StoreError {
        self.give_up_bad_hot(id, mismatch.unit);
        StoreError::Checksum { instance: id.clone(), place: "memory", units: vec![mismatch] }
    }

    fn give_up_bad_hot(&self, id: &InstanceId, unit: u32) {
        let lost = self.served(id).and_then(|instance| {
            let _queue = lock(&instance.queue);
            let sealed = instance.sealed()?;
            if !lock(&instance.state).units.hot().get(unit) {
                return Ok(());
            }
            match instance.check_memory(&[unit], &|unit| sealed.checksum(unit))? {
                wrong if wrong.is_empty() => Ok(()),
                wrong => instance.lose_hot(&wrong),
            }
        });
        if let Err(error) = lost {
            tracing::error!(%error, instance = %id, unit, "can not give up a wrong copy in memory");
        }
    }

    /// Somebody has read a unit here and found its bytes wrong. Nobody's word is taken: every copy is looked at, and those that are
    /// wrong no longer count.
    ///
    /// # Errors
    /// When nothing of the instance is here, or it has no such unit.
    pub fn check_copies(&self, id: &InstanceId, unit: u32) -> Result<(), StoreError> {
        let reader = self.reader(id)?;
        let bytes = reader.affinity().units.get(unit as usize).map(|unit| unit.extent_bytes);
        let bytes = bytes.ok_or_else(|| StoreError::Invalid(format!("unit {unit} is not in {id}")))?;
        self.give_up_bad_hot(id, unit);
        if !reader.describe().cold.get(unit) {
            return Ok(());
        }
        let mut sum = RunningChecksum::default();
        for offset in (0..bytes).step_by(CHECK_BYTES as usize) {
            let range = ReadRange { unit, offset, bytes: CHECK_BYTES.min(bytes - offset) };
            match reader.cold(&[range]) {
                Ok(pieces) => pieces.iter().for_each(|piece| sum.update(piece.bytes())),
                Err(error) => {
                    tracing::warn!(%error, instance = %id, unit, "a copy on disk that was to be looked at can not be read");
                    self.report_unreadable_cold(id, unit);
                    return Ok(());
                }
            }
        }
        if let Some(mismatch) = reader.compare(unit, sum.value()) {
            drop(self.report_bad_cold(id, mismatch));
        }
        Ok(())
    }

    fn target(&self, effect: &UnitEffect) -> Result<(Arc<Instance>, Vec<u32>), StoreError> {
        let instance = self.served(&effect.instance)?;
        let units = instance.units_of(&effect.units)?;
        Ok((instance, units))
    }
}

impl Instance {
    /// Obeys the fence, and gives what the seal fixed.
    fn begin(&self, fence: LogPosition) -> Result<Arc<Sealed>, StoreError> {
        self.obey(fence)?;
        let sealed = self.sealed()?;
        self.keep_hold(&sealed)?;
        Ok(sealed)
    }

    /// Where another node has taken over the cold replica, what is in it is that node's: this one holds nothing cold and
    /// begins a replica of its own. The caller holds the queue.
    pub(super) fn keep_hold(&self, sealed: &Sealed) -> Result<(), StoreError> {
        let Some(replica) = &self.cold else { return Ok(()) };
        let failed = |error| StoreError::on_tier(Tier::Cold, error);
        if replica.holds().map_err(failed)? {
            return Ok(());
        }
        tracing::warn!(instance = %self.id, "the cold replica is another's now; a new one is begun");
        let _order = lock(&self.saving);
        let record = {
            let mut state = lock(&self.state);
            (0..self.layout.unit_count()).for_each(|unit| state.units.set_cold(unit, false));
            state.cold_lost = Bitmap::empty(self.layout.unit_count());
            state.verified = Bitmap::empty(self.layout.unit_count());
            if let Some(charge) = &mut state.cold_charge {
                drop(charge.split(charge.bytes()));
            }
            cold_record(&state)
        };
        replica.start_over().and_then(|()| replica.begin(&sealed.0, &record)).map_err(failed)
    }

    /// Before a deletion: a replica that is another node's now is not this one's to delete.
    pub(super) fn let_go(&self) -> Result<(), StoreError> {
        let Ok(sealed) = self.sealed() else { return Ok(()) };
        let Some(replica) = &self.cold else { return Ok(()) };
        if replica.holds().map_err(|error| StoreError::on_tier(Tier::Cold, error))? {
            return Ok(());
        }
        let _queue = lock(&self.queue);
        self.keep_hold(&sealed)
    }

    fn cold_replica(&self) -> Result<&dyn ColdReplica, StoreError> {
        self.cold.as_deref().ok_or(StoreError::NoColdTier)
    }

    fn failure(&self, fence: LogPosition, tier: Tier, failure: ColdFailure) -> StoreError {
        match failure {
            ColdFailure::Path(error) => StoreError::on_tier(tier, error),
            ColdFailure::Unwanted => {
                StoreError::Fence(FenceRefused { offered: fence, highest: lock(&self.state).fence })
            }
        }
    }

    /// Units read back from disk were wrong: the disk's fault, or memory's?
    fn blame(&self, sealed: &Sealed, wrong: Vec<Mismatch>) -> Result<StoreError, StoreError> {
        let units: Vec<u32> = wrong.iter().map(|mismatch| mismatch.unit).collect();
        let in_memory = self.check_memory(&units, &|unit| sealed.checksum(unit))?;
        let instance = self.id.clone();
        if in_memory.is_empty() {
            return Ok(StoreError::Checksum { instance, place: "the cold tier", units: wrong });
        }
        self.lose_hot(&in_memory)?;
        Ok(StoreError::Checksum { instance, place: "memory", units: in_memory })
    }

    /// Memory copies that are wrong are no longer handed out.
    fn lose_hot(&self, wrong: &[Mismatch]) -> Result<(), StoreError> {
        let mut state = lock(&self.state);
        wrong.iter().for_each(|mismatch| state.units.clear_hot(mismatch.unit));
        self.save_memory(&state)
    }

    /// Copies that can not be there any more no longer count. Returns those of `units`.
    fn lose_gone(&self, sealed: &Sealed, units: &[u32]) -> Result<Vec<Mismatch>, StoreError> {
        let lost = self.cold_replica()?.gone(units).map_err(|error| StoreError::on_tier(Tier::Cold, error))?;
        let mut gone: Vec<u32> = Vec::new();
        for Gone { units, why } in lost {
            let state = lock(&self.state);
            let before = gone.len();
            gone.extend(units.into_iter().filter(|&unit| state.units.cold().get(unit)));
            // Before the first demotion there is nothing, and nothing is lost.
            if gone.len() > before {
                tracing::error!(error = %why, instance = %self.id, "what held cold units is gone");
            }
        }
        gone.sort_unstable();
        gone.dedup();
        if !gone.is_empty() {
            self.lose_cold(&gone)?;
        }
        let mismatch = |unit: u32| Mismatch { unit, expected: sealed.checksum(unit), found: 0 };
        Ok(gone.into_iter().filter(|unit| units.binary_search(unit).is_ok()).map(mismatch).collect())
    }

    /// Copies on disk that are wrong no longer count, and their room is given back.
    fn lose_cold(&self, units: &[u32]) -> Result<(), StoreError> {
        let replica = self.cold_replica()?;
        let mut state = lock(&self.state);
        let lost: Vec<u32> = units.iter().copied().filter(|&unit| state.units.cold().get(unit)).collect();
        for &unit in &lost {
            state.units.set_cold(unit, false);
            state.cold_lost.set(unit, true);
            state.verified.set(unit, false);
        }
        let bytes = self.padded_bytes(&lost);
        if let Some(charge) = &mut state.cold_charge {
            drop(charge.split(bytes));
        }
        drop(state);
        let saved = self.save_cold();
        replica.discard(&self.runs(&lost));
        saved
    }

    /// Units whose bytes in memory are verified are handed out from now on.
    fn become_hot(&self, units: &[u32]) -> Result<(), StoreError> {
        if units.is_empty() {
            return Ok(());
        }
        let mut state = lock(&self.state);
        units.iter().for_each(|&unit| state.units.set_hot(unit));
        if let Err(error) = self.save_memory(&state) {
            units.iter().for_each(|&unit| state.units.clear_hot(unit));
            return Err(error);
        }
        Ok(())
    }

    /// Frees the room of units that never became hot: no reader was ever told of them.
    fn give_up(&self, units: &[u32]) {
        for run in self.runs(units) {
            let Some(segment) = self.memory.get(run.segment) else { continue };
            if let Err(error) = punch(segment.file(), &run.range) {
                tracing::warn!(%error, "memory is not given back");
                return;
            }
        }
        let mut state = lock(&self.state);
        units.iter().for_each(|&unit| state.units.finish_release(unit));
        let bytes = self.padded_bytes(units);
        drop(state.memory_charge.split(bytes));
    }

    /// What this run knows of copies holds only if nobody else changed them since.
    fn forget_changed(&self, replica: &dyn ColdReplica, runs: &[Run]) {
        let changed = replica.changed(runs);
        let mut state = lock(&self.state);
        changed.into_iter().for_each(|unit| state.verified.set(unit, false));
    }

    /// Looks at the copies on disk once more, right before the ones in memory go. Those that this run of the node has
    /// read back and whose file nobody has changed since are taken as they are; others are read.
    fn check_witness(
        &self,
        sealed: &Sealed,
        units: &[u32],
        fence: LogPosition,
        progress: &Progress,
    ) -> Result<(), StoreError> {
        let replica = self.cold_replica()?;
        self.forget_changed(replica, &self.runs(units));
        let unseen: Vec<u32> = {
            let state = lock(&self.state);
            let unseen = |unit: &u32| state.units.cold().get(*unit) && !state.verified.get(*unit);
            units.iter().copied().filter(unseen).collect()
        };
        if unseen.is_empty() {
            return Ok(());
        }
        let wrong = self.verify_cold(sealed, &unseen, fence, progress)?;
        if wrong.is_empty() {
            return Ok(());
        }
        Err(StoreError::Checksum { instance: self.id.clone(), place: "the cold tier", units: wrong })
    }

    /// Reads units from disk. Wrong ones no longer count and are returned; the others are known to be right.
    fn verify_cold(
        &self,
        sealed: &Sealed,
        units: &[u32],
        fence: LogPosition,
        progress: &Progress,
    ) -> Result<Vec<Mismatch>, StoreError> {
        let replica = self.cold_replica()?;
        let mut wrong = self.lose_gone(sealed, units)?;
        let units: Vec<u32> = {
            let state = lock(&self.state);
            units.iter().copied().filter(|&unit| state.units.cold().get(unit)).collect()
        };
        let runs = self.runs(&units);
        self.forget_changed(replica, &runs);
        // Before they are read, so that a change meanwhile is noticed.
        replica.mark(&runs);
        let watch = Watch { progress, wanted: &|| self.is_current(fence) };
        let checksum_of = |unit| sealed.checksum(unit);
        let verified = replica.verify(&runs, &checksum_of, &watch);
        let mismatches = verified.map_err(|failure| self.failure(fence, Tier::Cold, failure))?;
        if !mismatches.is_empty() {
            let units: Vec<u32> = mismatches.iter().map(|mismatch| mismatch.unit).collect();
            self.lose_cold(&units)?;
        }
        wrong.extend(mismatches);
        if !wrong.is_empty() {
            // Room was given back just now, which changed what holds the others.
            replica.mark(&runs);
        }
        let mut state = lock(&self.state);
        for unit in units {
            let right = state.units.cold().get(unit);
            state.verified.set(unit, right);
        }
        Ok(wrong)
    }

    /// Frees the memory of those units on their way out that nobody reads, segment by segment.
    pub(super) fn free_unguarded(&self, units: &[u32], fence: LogPosition) -> Result<u32, StoreError> {
        let mut freed = 0;
        for segment_index in 0..self.layout.segment_count() {
            let in_segment = self.layout.units_of(segment_index);
            let first = units.partition_point(|&unit| unit < in_segment.start);
            let end = units.partition_point(|&unit| unit < in_segment.end);
            let segment = self.memory.get(segment_index);
            let path = &self.memory_folder;
            let no_readers = match &segment {
                Some(segment) if first < end => match lock_out_readers(segment.file()).on("lock a segment in", path)? {
                    Some(no_readers) => Some(no_readers),
                    None => continue,
                },
                _ => None,
            };
            let free: Vec<u32> = {
                let state = lock(&self.state);
                if state.fence > fence {
                    return Err(FenceRefused { offered: fence, highest: state.fence }.into());
                }
                let free = |unit: &u32| state.units.is_leaving(*unit) && !state.units.is_guarded(*unit);
                units[first..end].iter().copied().filter(free).collect()
            };
            // Nobody can guard them any more: they are not hot, and the queue keeps other effects away.
            if let Some(segment) = segment.as_ref().filter(|_| no_readers.is_some()) {
                for run in self.runs(&free) {
                    punch(segment.file(), &run.range).on("free memory in", path)?;
                }
            }
            let mut state = lock(&self.state);
            free.iter().for_each(|&unit| state.units.finish_release(unit));
            let bytes = self.padded_bytes(&free);
            drop(state.memory_charge.split(bytes));
            freed += free.len() as u32;
        }
        Ok(freed)
    }
}

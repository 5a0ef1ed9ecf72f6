//! Deletion: units in batches, the manifest last, and nothing left (RFC, Delete and Ordinary Eviction). Files are
//! unlinked, not emptied: a reader that still maps one keeps what it sees, and its bytes stay charged until it is done.

use std::time::Duration;

use ballast_schemas::frame::Tier;
use ballast_schemas::{InstanceId, LogPosition, NodeInventory, UnitEffect};

use super::instance::Instance;
use super::{NodeStore, lock};
use crate::cold::Progress;
use crate::error::StoreError;
use crate::folder::{remove_folder, rename_if_there};
use crate::instance_records::GONE;
use crate::memory_tier::instance_folder;

/// Longest wait for the writers of an import that is being deleted.
const WRITERS_WAIT: Duration = Duration::from_secs(2);

impl NodeStore {
    /// Deletes units from both tiers, and serves nothing of the instance any more. Units already gone are skipped, and
    /// so is everything of an instance that is not here: its answer is `None`.
    ///
    /// # Errors
    /// When a higher fence is in force, or a tier fails; what was deleted stays deleted.
    pub fn delete_units(&self, effect: &UnitEffect, progress: &Progress) -> Result<Option<NodeInventory>, StoreError> {
        let Some(instance) = self.begin_deletion(&effect.instance, effect.fence)? else { return Ok(None) };
        let units = instance.units_of(&effect.units)?;
        let _queue = lock(&instance.queue);
        instance.obey(effect.fence)?;
        let cold_before: Vec<u32> = {
            let mut state = lock(&instance.state);
            let cold = units.iter().copied().filter(|&unit| state.units.cold().get(unit)).collect();
            for &unit in &units {
                state.units.clear_hot(unit);
                state.units.set_cold(unit, false);
            }
            cold
        };
        // First what a restart would believe, then the bytes.
        instance.save()?;
        self.free_cold(&instance, &cold_before)?;
        progress.add_bytes(instance.padded_bytes(&units));
        let freed = instance.free_unguarded(&units, effect.fence)?;
        self.unlink_empty_segments(&instance)?;
        if freed > 0 {
            instance.save_memory(&lock(&instance.state))?;
        }
        progress.add_units(units.len() as u32);
        Ok(Some(self.inventory_of(&instance)))
    }

    /// Deletes whatever is left of an instance, the manifest last. Repeating it is fine.
    ///
    /// # Errors
    /// When a higher fence is in force, or a tier fails.
    pub fn delete_instance(&self, id: &InstanceId, fence: LogPosition, progress: &Progress) -> Result<(), StoreError> {
        if let Some(instance) = self.begin_deletion(id, fence)? {
            let _queue = lock(&instance.queue);
            instance.obey(fence)?;
            self.remove(&instance, progress)?;
        }
        self.verify_empty(id)
    }

    /// Drops an instance that the log knows to be deleted, whatever its fence.
    pub(super) fn drop_instance(&self, id: &InstanceId) -> Result<(), StoreError> {
        self.bury(id, LogPosition::ZERO);
        let Some(instance) = self.read_instances().get(id).cloned() else { return Ok(()) };
        let _queue = lock(&instance.queue);
        lock(&instance.state).deleting = true;
        self.remove(&instance, &Progress::default())
    }

    /// Whether nothing of an instance is here.
    ///
    /// # Errors
    /// When something is, saying what.
    pub fn verify_empty(&self, id: &InstanceId) -> Result<(), StoreError> {
        let not_empty = |what: String| Err(StoreError::NotEmpty { instance: id.clone(), what });
        if self.read_instances().contains_key(id) {
            return not_empty("the node still holds it".to_owned());
        }
        let folder = self.memory.instances().join(instance_folder(id));
        if folder.exists() {
            return not_empty(format!("{} is still there", folder.display()));
        }
        let left = self.cold.as_ref().map(|cold| cold.left_of(id)).transpose();
        match left.map_err(|error| StoreError::on_tier(Tier::Cold, error))?.flatten() {
            Some(left) => not_empty(format!("{} is still there", left.display())),
            None => Ok(()),
        }
    }

    /// Marks an instance as being deleted, durably, and closes its import. `None` when it is not here; the node then
    /// remembers that it must not come.
    fn begin_deletion(
        &self,
        id: &InstanceId,
        fence: LogPosition,
    ) -> Result<Option<std::sync::Arc<Instance>>, StoreError> {
        let Some(instance) = self.read_instances().get(id).cloned() else {
            self.bury(id, fence);
            return Ok(None);
        };
        instance.check_served()?;
        instance.obey(fence)?;
        instance.let_go()?;
        let had_begun = std::mem::replace(&mut lock(&instance.state).deleting, true);
        if !had_begun && let Err(error) = instance.save() {
            lock(&instance.state).deleting = false;
            return Err(error);
        }
        let state = lock(&instance.state);
        // A writer that had begun ends within one piece. One that does not has its segment unlinked under it, which
        // hurts nobody.
        drop(instance.wait_until(state, WRITERS_WAIT, |state| state.writers == 0));
        Ok(Some(instance))
    }

    /// Frees units on disk: their segment goes when it holds nothing else, otherwise they are punched out of it.
    fn free_cold(&self, instance: &Instance, units: &[u32]) -> Result<(), StoreError> {
        let Some(replica) = &instance.cold else { return Ok(()) };
        for run in instance.runs(units) {
            let is_last = {
                let state = lock(&instance.state);
                !instance.layout.units_of(run.segment).any(|unit| state.units.cold().get(unit))
            };
            replica.free(&run, is_last).map_err(|error| StoreError::on_tier(Tier::Cold, error))?;
        }
        let bytes = instance.padded_bytes(units);
        if let Some(charge) = &mut lock(&instance.state).cold_charge {
            drop(charge.split(bytes));
        }
        Ok(())
    }

    /// Unlinks memory segments of which nothing is handed out any more.
    fn unlink_empty_segments(&self, instance: &Instance) -> Result<(), StoreError> {
        for segment in 0..instance.layout.segment_count() {
            let units = instance.layout.units_of(segment);
            let mut state = lock(&instance.state);
            // While the import was going on no unit was hot; each goes with its own batch.
            let imported = state.sealed.is_some();
            if !imported || units.clone().any(|unit| state.units.hot().get(unit)) {
                continue;
            }
            let unlinked = instance.memory.unlink(segment).map_err(|error| StoreError::on_tier(Tier::Memory, error))?;
            let held: Vec<u32> = units.filter(|&unit| state.units.resident().get(unit)).collect();
            let charge = state.memory_charge.split(instance.padded_bytes(&held));
            held.iter().for_each(|&unit| state.units.finish_release(unit));
            drop(state);
            if let Some(unlinked) = unlinked {
                self.memory.linger(unlinked, charge);
            }
        }
        Ok(())
    }

    /// Removes everything of an instance from both tiers and from the list. The caller holds its queue.
    fn remove(&self, instance: &Instance, progress: &Progress) -> Result<(), StoreError> {
        if let Some(replica) = &instance.cold {
            replica.remove().map_err(|error| StoreError::on_tier(Tier::Cold, error))?;
        }
        // The cold tier is empty, the memory is not yet: a group without bytes has its manifest at least.
        progress.add_bytes(instance.layout.padded_bytes().max(1));
        let gone = instance.memory_folder.with_extension(GONE);
        rename_if_there(&instance.memory_folder, &gone).map_err(|error| StoreError::on_tier(Tier::Memory, error))?;
        let segments = instance.memory.unlink_all().map_err(|error| StoreError::on_tier(Tier::Memory, error))?;
        remove_folder(&gone).map_err(|error| StoreError::on_tier(Tier::Memory, error))?;
        {
            let mut state = lock(&instance.state);
            for segment in segments {
                let bytes = segment.taken_bytes();
                let charge = state.memory_charge.split(bytes);
                self.memory.linger(segment, charge);
            }
            let rest = state.memory_charge.bytes();
            drop(state.memory_charge.split(rest));
            state.cold_charge = None;
            let fence = state.fence;
            drop(state);
            self.bury(&instance.id, fence);
        }
        self.write_instances().remove(&instance.id);
        instance.unguard(self.memory.objects());
        Ok(())
    }
}

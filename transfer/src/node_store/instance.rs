//! One instance on this node: its segments on both tiers, its state, and how that state is made durable. The rules
//! about units are in `guard`; what changes the state is in the modules beside this one.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use ballast_schemas::frame::Tier;
use ballast_schemas::{Bitmap, InstanceId, LogPosition, SessionId, UnitRange};

use super::lock;
use crate::budget::Charge;
use crate::cold::{ColdReplica, ColdTier};
use crate::error::StoreError;
use crate::folder::replace_file;
use crate::guard::{FenceStep, UnitStates, check_fence};
use crate::instance_records::{InstanceRecords, STATE};
use crate::layout::{GroupLayout, Run};
use crate::memory_tier::{MemorySegments, MemoryTier, instance_folder};
use crate::record::{self, LayoutRecord, StateRecord};

/// Whether an instance may be read and acted on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// The log knows it.
    Serving,
    /// Kept, not served; the text says why.
    Quarantined(String),
}

/// What the seal fixed.
#[derive(Debug)]
pub(super) struct Sealed(pub InstanceRecords);

impl Sealed {
    pub(super) fn checksum(&self, unit: u32) -> u64 {
        self.0.seal.affinity.units.get(unit as usize).map_or(0, |unit| unit.crc64)
    }
}

/// What changes of an instance.
#[derive(Debug)]
pub(super) struct State {
    pub standing: Standing,
    pub fence: LogPosition,
    /// Deletion has begun.
    pub deleting: bool,
    /// `None` while the import goes on.
    pub sealed: Option<Arc<Sealed>>,
    /// A seal is taking checksums: no writer may start.
    pub sealing: bool,
    /// Writers between their check of the state and the end of their copy.
    pub writers: u32,
    pub units: UnitStates,
    /// Units whose copy on disk was found wrong or gone and has not been made again.
    pub cold_lost: Bitmap,
    /// Cold copies that this run of the node has read and found right.
    pub verified: Bitmap,
    pub memory_charge: Charge,
    pub cold_charge: Option<Charge>,
}

/// One instance on this node.
#[derive(Debug)]
pub(super) struct Instance {
    pub id: InstanceId,
    pub session_id: SessionId,
    pub layout: Arc<GroupLayout>,
    pub memory_folder: PathBuf,
    pub memory: MemorySegments,
    pub cold: Option<Box<dyn ColdReplica>>,
    /// Held by the effect that is being carried out.
    pub queue: Mutex<()>,
    /// Held while the state is written to the cold tier, from the look at it on, so that an older one never follows a newer one.
    /// Taken after `queue` and before `state`, which is not held meanwhile: a cold tier may take a minute to answer.
    pub saving: Mutex<()>,
    pub state: Mutex<State>,
    /// Told when a writer ends or a guard goes.
    pub eased: Condvar,
    /// How far each unit was written, while the import goes on.
    pub writes: Mutex<super::import::Writes>,
}

/// The charges of an instance that nothing is charged for yet.
pub(super) fn no_charges(memory: &MemoryTier, cold: Option<&Arc<dyn ColdTier>>) -> (Charge, Option<Charge>) {
    (memory.budget().charge(0), cold.map(|cold| cold.budget().charge(0)))
}

impl Instance {
    /// An instance with this layout and state, without looking at any file.
    pub(super) fn new(
        memory: &MemoryTier,
        cold: Option<Box<dyn ColdReplica>>,
        record: &LayoutRecord,
        layout: Arc<GroupLayout>,
        state: State,
    ) -> Self {
        let memory_folder = memory.instances().join(instance_folder(&record.instance));
        Self {
            id: record.instance.clone(),
            session_id: record.session_id.clone(),
            memory: MemorySegments::new(memory_folder.clone(), layout.clone(), memory.huge()),
            cold,
            memory_folder,
            queue: Mutex::new(()),
            saving: Mutex::new(()),
            state: Mutex::new(state),
            eased: Condvar::new(),
            writes: Mutex::new(super::import::Writes::new(&layout)),
            layout,
        }
    }

    pub(super) fn check_served(&self) -> Result<(), StoreError> {
        match &lock(&self.state).standing {
            Standing::Serving => Ok(()),
            Standing::Quarantined(why) => Err(StoreError::NotServed { instance: self.id.clone(), why: why.clone() }),
        }
    }

    /// The seal, once there is one and while deletion has not begun.
    pub(super) fn sealed(&self) -> Result<Arc<Sealed>, StoreError> {
        let state = lock(&self.state);
        if state.deleting {
            return Err(StoreError::Deleting { instance: self.id.clone() });
        }
        state.sealed.clone().ok_or_else(|| StoreError::NotSealed { instance: self.id.clone() })
    }

    /// The units of ranges, ascending and each once.
    pub(super) fn units_of(&self, ranges: &[UnitRange]) -> Result<Vec<u32>, StoreError> {
        let count = self.layout.unit_count();
        let mut wanted = Bitmap::empty(count);
        for range in ranges {
            if range.start > range.end || range.end > count {
                return Err(StoreError::Invalid(format!(
                    "units {}..{} are not in {}, which has {count}",
                    range.start, range.end, self.id
                )));
            }
            range.iter().for_each(|unit| wanted.set(unit, true));
        }
        Ok(wanted.iter().collect())
    }

    /// Bytes that units take on a tier.
    pub(super) fn padded_bytes(&self, units: &[u32]) -> u64 {
        units.iter().filter_map(|&unit| self.layout.extent(unit)).map(|extent| extent.padded_bytes()).sum()
    }

    /// The runs of units.
    pub(super) fn runs(&self, units: &[u32]) -> Vec<Run> {
        self.layout.runs(units.iter().copied())
    }

    /// Obeys a fence or refuses it. A higher one is durable before this returns: in memory, and on a cold tier that writes
    /// it at once.
    pub(super) fn obey(&self, fence: LogPosition) -> Result<(), StoreError> {
        let on_cold = self.cold.as_deref().filter(|cold| cold.writes_fences_at_once());
        let _order = on_cold.map(|_| lock(&self.saving));
        let mut state = lock(&self.state);
        let FenceStep::Raise(fence) = check_fence(state.fence, fence)? else { return Ok(()) };
        let before = std::mem::replace(&mut state.fence, fence);
        let written = match on_cold.filter(|_| state.sealed.is_some()) {
            Some(cold) => self.write_cold(cold, &cold_record(&state)),
            None => Ok(()),
        };
        let saved = written.and_then(|()| self.save_memory(&state));
        if saved.is_err() {
            state.fence = before;
        }
        saved
    }

    /// Whether a fence is still the highest one.
    pub(super) fn is_current(&self, fence: LogPosition) -> bool {
        lock(&self.state).fence <= fence
    }

    /// Makes the state durable: on the cold tier first, where it survives more. Before the seal there is nothing there.
    pub(super) fn save(&self) -> Result<(), StoreError> {
        self.save_cold()?;
        self.save_memory(&lock(&self.state))
    }

    pub(super) fn save_memory(&self, state: &State) -> Result<(), StoreError> {
        let record = StateRecord {
            fence: state.fence,
            deleting: state.deleting,
            held: state.units.hot().clone(),
            resident: state.units.resident().clone(),
        };
        replace_file(&self.memory_folder.join(STATE), &record::encode(&record), false)
            .map_err(|error| StoreError::on_tier(Tier::Memory, error))
    }

    /// Writes the state to the cold tier. The caller does not hold the state.
    pub(super) fn save_cold(&self) -> Result<(), StoreError> {
        self.change_cold(|_| {}, |_| {})
    }

    /// Writes the state to the cold tier with a change that is nobody's to see before it is durable, and then makes it.
    pub(super) fn change_cold(
        &self,
        change: impl FnOnce(&mut StateRecord),
        then: impl FnOnce(&mut State),
    ) -> Result<(), StoreError> {
        let Some(cold) = self.cold.as_deref() else { return Ok(()) };
        let _order = lock(&self.saving);
        let mut record = {
            let state = lock(&self.state);
            if state.sealed.is_none() {
                return Ok(());
            }
            cold_record(&state)
        };
        change(&mut record);
        self.write_cold(cold, &record)?;
        then(&mut lock(&self.state));
        Ok(())
    }

    fn write_cold(&self, cold: &dyn ColdReplica, record: &StateRecord) -> Result<(), StoreError> {
        cold.save(record).map_err(|error| StoreError::on_tier(Tier::Cold, error))
    }

    /// Waits until the state has `done`, for at most `wait`. Tells whether it has.
    pub(super) fn wait_until<'a>(
        &self,
        state: MutexGuard<'a, State>,
        wait: std::time::Duration,
        done: impl Fn(&State) -> bool,
    ) -> (MutexGuard<'a, State>, bool) {
        let waited = self.eased.wait_timeout_while(state, wait, |state| !done(state));
        let (state, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        let done = done(&state);
        (state, done)
    }
}

/// The state as it stands on disk.
pub(super) fn cold_record(state: &State) -> StateRecord {
    let cold = state.units.cold();
    // On disk, what is resident beyond what is held is what was lost.
    let mut resident = cold.clone();
    resident.union_with(&state.cold_lost);
    StateRecord { fence: state.fence, deleting: state.deleting, held: cold.clone(), resident }
}

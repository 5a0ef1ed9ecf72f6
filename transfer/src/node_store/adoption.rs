//! What a node finds in its folders when it starts: sealed instances are adopted once their bytes in memory are
//! verified, imports that never ended are discarded, and what can not be understood is kept and reported.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use ballast_schemas::{Bitmap, InstanceId};

use super::instance::{Instance, Sealed, Standing, State, cold_record, no_charges};
use super::lock;
use crate::budget::Charge;
use crate::cold::{ColdTier, FoundReplica, Gone, Scan};
use crate::folder::{OnPath, PathError, create_folder, remove_folder, used_bytes};
use crate::guard::UnitStates;
use crate::instance_records::{FRESH, Found, GONE, write_records};
use crate::memory_tier::MemoryTier;
use crate::record::StateRecord;
use crate::segment::{lock_out_readers, punch};

/// A folder of an instance that can not be adopted. Its bytes are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedFolder {
    /// The folder.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// What was found at start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adoption {
    /// Instances adopted.
    pub instances: u32,
    /// Bytes in memory that were checked and are still hot.
    pub hot_bytes: u64,
    /// Bytes on disk that are still cold.
    pub cold_bytes: u64,
    /// Units whose bytes in memory were not what they should be; they are no longer handed out.
    pub wrong_units: u32,
    /// Units that a record speaks of and whose segment is gone or has another length.
    pub lost_units: u32,
    /// Imports that never ended and were discarded.
    pub discarded_imports: u32,
    /// Folders that can not be understood. They are kept.
    pub damaged: Vec<DamagedFolder>,
}

/// What the node goes on with.
#[derive(Default)]
pub(super) struct Adopted {
    pub instances: BTreeMap<InstanceId, Arc<Instance>>,
    pub adoption: Adoption,
    /// The bytes of damaged folders.
    pub charges: Vec<Charge>,
}

impl Adopted {
    /// Notes what can not be adopted, with the room that it keeps.
    fn keep(&mut self, damaged: DamagedFolder, charge: Charge) {
        let (path, reason) = (damaged.path.display(), &damaged.reason);
        tracing::error!(%path, reason, "an instance can not be adopted; its bytes are kept");
        self.adoption.damaged.push(damaged);
        self.charges.push(charge);
    }

    fn take_cold(
        &mut self,
        memory: &MemoryTier,
        cold: Option<&Arc<dyn ColdTier>>,
        on_cold: Scan,
    ) -> Result<(), PathError> {
        for (folder, charge) in on_cold.damaged {
            self.keep(folder, charge);
        }
        for (id, cold_copy) in on_cold.found {
            let instance = adopt_instance(memory, cold, None, Some(cold_copy), &mut self.adoption)?;
            self.instances.insert(id, instance);
        }
        self.adoption.instances = self.instances.len() as u32;
        Ok(())
    }
}

/// Adopts what is in memory, and what was found on the cold tier.
pub(super) fn adopt(
    memory: &MemoryTier,
    cold: Option<&Arc<dyn ColdTier>>,
    mut on_cold: Scan,
) -> Result<Adopted, PathError> {
    let mut adopted = Adopted::default();
    let in_memory = scan_memory(memory, &mut adopted)?;
    for (id, memory_copy) in in_memory {
        let cold_copy = on_cold.found.remove(&id);
        let same = |(cold, _): &FoundReplica| {
            cold.records.seal.manifest == memory_copy.records.seal.manifest
                && cold.records.layout == memory_copy.records.layout
        };
        if !cold_copy.as_ref().is_none_or(same) {
            // Not reached by anything this program writes: both come from one seal.
            let path = memory.instances().join(crate::memory_tier::instance_folder(&id));
            let reason = "the records of its two tiers are of different imports".to_owned();
            let charge = memory.budget().charge(used_bytes(&path)?);
            adopted.keep(DamagedFolder { path, reason }, charge);
            continue;
        }
        let instance = adopt_instance(memory, cold, Some(memory_copy), cold_copy, &mut adopted.adoption)?;
        adopted.instances.insert(id, instance);
    }
    adopted.take_cold(memory, cold, on_cold)?;
    Ok(adopted)
}

/// Adopts what was found on the cold tier of a node that has nothing in memory.
pub(super) fn adopt_found(memory: &MemoryTier, cold: &Arc<dyn ColdTier>, on_cold: Scan) -> Result<Adopted, PathError> {
    let mut adopted = Adopted::default();
    adopted.take_cold(memory, Some(cold), on_cold)?;
    Ok(adopted)
}

fn scan_memory(memory: &MemoryTier, adopted: &mut Adopted) -> Result<BTreeMap<InstanceId, Found>, PathError> {
    let folder = memory.instances();
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(&folder).on("list", &folder)? {
        let path = entry.on("list", &folder)?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if matches!(extension, Some(FRESH | GONE)) {
            remove_folder(&path)?;
            continue;
        }
        match Found::in_folder(&path) {
            Ok(Some(copy)) => {
                found.insert(copy.records.layout.instance.clone(), copy);
            }
            // Without a seal nothing was promised of it.
            Ok(None) => {
                remove_folder(&path)?;
                adopted.adoption.discarded_imports += 1;
            }
            Err(reason) => {
                let charge = memory.budget().charge(used_bytes(&path)?);
                adopted.keep(DamagedFolder { path, reason }, charge);
            }
        }
    }
    Ok(found)
}

/// Adopts an instance from what its tiers say of it.
pub(super) fn adopt_instance(
    memory: &MemoryTier,
    cold: Option<&Arc<dyn ColdTier>>,
    memory_copy: Option<Found>,
    cold_copy: Option<FoundReplica>,
    adoption: &mut Adoption,
) -> Result<Arc<Instance>, PathError> {
    let (cold_copy, replica) = cold_copy.unzip();
    let memory_state = memory_copy.as_ref().map(|copy| copy.state.clone());
    let cold_state = cold_copy.as_ref().map(|copy| copy.state.clone());
    // Both say the same of everything but the state.
    let Some(Found { records, layout, .. }) = memory_copy.or(cold_copy) else {
        unreachable!("an instance is adopted from at least one tier");
    };
    let count = layout.unit_count();
    let replica = replica.or_else(|| cold.map(|cold| cold.clone().replica(&records.layout.instance, &layout)));

    let states = [memory_state.as_ref(), cold_state.as_ref()];
    let fence = states.iter().flatten().map(|state| state.fence).max().unwrap_or_default();
    let deleting = states.iter().flatten().any(|state| state.deleting);
    let (memory_charge, cold_charge) = no_charges(memory, cold);
    let sealed = Arc::new(Sealed(records));
    let state = State {
        standing: Standing::Quarantined("the log has not been asked about it yet".to_owned()),
        fence,
        deleting,
        sealed: Some(sealed.clone()),
        sealing: false,
        writers: 0,
        units: UnitStates::new(count),
        cold_lost: Bitmap::empty(count),
        verified: Bitmap::empty(count),
        memory_charge,
        cold_charge,
    };
    let instance = Instance::new(memory, replica, &sealed.0.layout, layout, state);
    adopt_cold(&instance, cold_state.as_ref(), cold, adoption)?;
    match &memory_state {
        Some(state) => adopt_memory(&instance, state, &sealed, memory, adoption)?,
        None => {
            // The manifest stays readable from memory whatever the units do.
            remove_folder(&instance.memory_folder)?;
            create_folder(&instance.memory_folder)?;
            let empty = StateRecord { fence, deleting, held: Bitmap::empty(count), resident: Bitmap::empty(count) };
            write_records(&instance.memory_folder, &sealed.0, &empty, false)?;
        }
    }
    if let (Some(replica), None) = (&instance.cold, &cold_state) {
        // A cold tier that is new to this instance: the manifest and the index become durable there.
        replica.begin(&sealed.0, &cold_record(&lock(&instance.state)))?;
    }
    Ok(Arc::new(instance))
}

/// Cold units count when what should hold them is there at full length. Their bytes are read before anything relies on
/// them alone: at promotion, at release, on a scrub.
fn adopt_cold(
    instance: &Instance,
    record: Option<&StateRecord>,
    cold: Option<&Arc<dyn ColdTier>>,
    adoption: &mut Adoption,
) -> Result<(), PathError> {
    let (Some(record), Some(replica), Some(tier)) = (record, &instance.cold, cold) else { return Ok(()) };
    let claimed: Vec<u32> = record.held.iter().collect();
    let mut gone = BTreeSet::new();
    for Gone { units, why } in replica.gone_at_start(&claimed)? {
        tracing::error!(error = %why, instance = %instance.id, "cold units are lost with what held them");
        gone.extend(units);
    }
    let (lost, held): (Vec<u32>, Vec<u32>) = claimed.into_iter().partition(|unit| gone.contains(unit));
    adoption.lost_units += lost.len() as u32;
    let lost_before = record.resident.iter().filter(|unit| !record.held.get(*unit));
    let bytes = instance.padded_bytes(&held);
    let mut state = lock(&instance.state);
    held.iter().for_each(|&unit| state.units.set_cold(unit, true));
    lost.iter().copied().chain(lost_before).for_each(|unit| state.cold_lost.set(unit, true));
    state.cold_charge = Some(tier.budget().charge(bytes));
    drop(state);
    adoption.cold_bytes += bytes;
    if !lost.is_empty()
        && let Err(error) = instance.save_cold()
    {
        tracing::error!(%error, instance = %instance.id, "that cold units are lost can not be written down; the next start finds it again");
    }
    Ok(())
}

/// Hot units count when their bytes are right. Whatever else takes room in a segment is freed, unless a reader from
/// before the restart still maps it.
fn adopt_memory(
    instance: &Instance,
    record: &StateRecord,
    sealed: &Sealed,
    memory: &MemoryTier,
    adoption: &mut Adoption,
) -> Result<(), PathError> {
    let mut hot = Vec::new();
    let mut leaving = Vec::new();
    for index in 0..instance.layout.segment_count() {
        let units = instance.layout.units_of(index);
        if instance.layout.segment_bytes(index) == 0 {
            hot.extend(units.filter(|&unit| record.held.get(unit)));
            continue;
        }
        let (held, other): (Vec<u32>, Vec<u32>) = units.partition(|&unit| record.held.get(unit));
        let segment = match instance.memory.adopt(index) {
            Ok(Some(segment)) => segment,
            Ok(None) => {
                adoption.lost_units += held.len() as u32;
                continue;
            }
            Err(error) => {
                tracing::error!(%error, instance = %instance.id, "hot units are lost with their segment");
                adoption.lost_units += held.len() as u32;
                continue;
            }
        };
        let free = lock_out_readers(segment.file()).on("lock a segment in", &instance.memory_folder)?;
        if free.is_some() {
            for run in instance.runs(&other) {
                punch(segment.file(), &run.range).on("free memory in", &instance.memory_folder)?;
            }
        } else {
            leaving.extend(other.into_iter().filter(|&unit| record.resident.get(unit)));
        }
        hot.extend(held);
    }
    let wrong = instance.check_memory(&hot, &|unit| sealed.checksum(unit));
    let wrong = wrong.map_err(|error| std::io::Error::other(error.to_string())).on("check", &instance.memory_folder)?;
    for mismatch in &wrong {
        tracing::error!(
            instance = %instance.id, unit = mismatch.unit, expected = %format!("{:016x}", mismatch.expected),
            found = %format!("{:016x}", mismatch.found), "a unit in memory is not what it should be"
        );
    }
    let mut state = lock(&instance.state);
    hot.iter().for_each(|&unit| state.units.set_hot(unit));
    leaving.iter().for_each(|&unit| state.units.set_resident(unit));
    wrong.iter().for_each(|mismatch| state.units.clear_hot(mismatch.unit));
    let hot_bytes = instance.padded_bytes(&hot);
    state.memory_charge = memory.budget().charge(hot_bytes + instance.padded_bytes(&leaving));
    adoption.hot_bytes += hot_bytes;
    adoption.wrong_units += wrong.len() as u32;
    let saved = instance.save_memory(&state);
    saved.map_err(|error| std::io::Error::other(error.to_string())).on("write the state of", &instance.memory_folder)
}

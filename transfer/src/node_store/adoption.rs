//! What a node finds in its folders when it starts: sealed instances are adopted once their bytes in memory are
//! verified, imports that never ended are discarded, and what can not be understood is kept and reported.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_schemas::{Bitmap, Digest, InstanceId};
use bytes::Bytes;

use super::instance::{
    Instance, LAYOUT, MANIFEST, SEAL, STATE, Sealed, Standing, State, cold_record, no_charges, write_records,
};
use super::lock;
use crate::budget::Charge;
use crate::cold_tier::ColdTier;
use crate::folder::{OnPath, PathError, create_folder, remove_folder, rename, sync_folder, used_bytes};
use crate::guard::UnitStates;
use crate::layout::GroupLayout;
use crate::memory_tier::MemoryTier;
use crate::record::{self, LayoutRecord, SealRecord, StateRecord};
use crate::segment::{lock_out_readers, punch};

/// Extension of a folder that is being made.
pub(super) const FRESH: &str = "fresh";
/// Extension of a folder that is being removed.
pub(super) const GONE: &str = "gone";

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

/// What one tier's folder says of an instance.
struct Found {
    layout: LayoutRecord,
    seal: SealRecord,
    manifest: Bytes,
    state: StateRecord,
}

/// What the node goes on with.
pub(super) struct Adopted {
    pub instances: BTreeMap<InstanceId, Arc<Instance>>,
    pub adoption: Adoption,
    /// The bytes of damaged folders.
    pub charges: Vec<Charge>,
}

/// Adopts what is in the folders.
pub(super) fn adopt(memory: &MemoryTier, cold: Option<&Arc<ColdTier>>) -> Result<Adopted, PathError> {
    let mut adoption = Adoption::default();
    let in_memory = scan(&memory.instances(), true, &mut adoption)?;
    let mut on_disk = match cold {
        Some(cold) => scan(&cold.instances(), false, &mut adoption)?,
        None => BTreeMap::new(),
    };
    let mut instances = BTreeMap::new();
    for (id, memory_copy) in in_memory {
        let disk_copy = on_disk.remove(&id);
        let same = |disk: &Found| disk.seal.manifest == memory_copy.seal.manifest && disk.layout == memory_copy.layout;
        if !disk_copy.as_ref().is_none_or(same) {
            // Not reached by anything this program writes: both come from one seal.
            let path = memory.instances().join(crate::memory_tier::instance_folder(&id));
            let reason = "the records in memory and on disk are of different imports".to_owned();
            adoption.damaged.push(DamagedFolder { path, reason });
            continue;
        }
        let instance = adopt_instance(memory, cold, Some(memory_copy), disk_copy, &mut adoption)?;
        instances.insert(id, instance);
    }
    for (id, disk_copy) in on_disk {
        let instance = adopt_instance(memory, cold, None, Some(disk_copy), &mut adoption)?;
        instances.insert(id, instance);
    }
    adoption.instances = instances.len() as u32;
    let mut charges = Vec::new();
    for damaged in &adoption.damaged {
        let bytes = used_bytes(&damaged.path)?;
        match cold.filter(|cold| damaged.path.starts_with(cold.instances())) {
            Some(cold) => charges.push(cold.budget().charge(bytes)),
            None => charges.push(memory.budget().charge(bytes)),
        }
        tracing::error!(path = %damaged.path.display(), reason = damaged.reason, "an instance can not be adopted; its bytes are kept");
    }
    Ok(Adopted { instances, adoption, charges })
}

fn scan(folder: &Path, imports: bool, adoption: &mut Adoption) -> Result<BTreeMap<InstanceId, Found>, PathError> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).on("list", folder)? {
        let path = entry.on("list", folder)?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if matches!(extension, Some(FRESH | GONE)) {
            remove_folder(&path)?;
            continue;
        }
        match read_folder(&path) {
            Ok(Some(copy)) => {
                found.insert(copy.layout.instance.clone(), copy);
            }
            // Without a seal nothing was promised of it.
            Ok(None) if imports => {
                remove_folder(&path)?;
                adoption.discarded_imports += 1;
            }
            Ok(None) => {
                let reason = "it has no seal record".to_owned();
                adoption.damaged.push(DamagedFolder { path, reason });
            }
            Err(reason) => adoption.damaged.push(DamagedFolder { path, reason }),
        }
    }
    Ok(found)
}

/// What a folder says; `None` when it was never sealed.
fn read_folder(path: &Path) -> Result<Option<Found>, String> {
    let text = |error: record::RecordError| error.to_string();
    let Some(seal) = record::read::<SealRecord>(&path.join(SEAL)).map_err(text)? else { return Ok(None) };
    let missing = |name: &str| format!("its {name} record is missing");
    let layout = record::read::<LayoutRecord>(&path.join(LAYOUT)).map_err(text)?.ok_or_else(|| missing(LAYOUT))?;
    let state = record::read::<StateRecord>(&path.join(STATE)).map_err(text)?.ok_or_else(|| missing(STATE))?;
    let manifest = fs::read(path.join(MANIFEST)).map_err(|error| format!("its manifest can not be read: {error}"))?;
    let sha256 = Digest::of(&manifest);
    if sha256 != seal.manifest.sha256 {
        return Err(format!("its manifest is {sha256}, expected {}", seal.manifest.sha256));
    }
    let units = layout.unit_sizes.len();
    if seal.affinity.units.len() != units || state.held.len() as usize != units {
        return Err("its records speak of different numbers of units".to_owned());
    }
    Ok(Some(Found { layout, seal, manifest: manifest.into(), state }))
}

fn adopt_instance(
    memory: &MemoryTier,
    cold: Option<&Arc<ColdTier>>,
    memory_copy: Option<Found>,
    disk_copy: Option<Found>,
    adoption: &mut Adoption,
) -> Result<Arc<Instance>, PathError> {
    let memory_state = memory_copy.as_ref().map(|copy| copy.state.clone());
    let disk_state = disk_copy.as_ref().map(|copy| copy.state.clone());
    // Both say the same of everything but the state.
    let Some(Found { layout: record, seal, manifest, .. }) = memory_copy.or(disk_copy) else {
        unreachable!("an instance is adopted from at least one tier");
    };
    let invalid =
        |error: crate::layout::LayoutError| std::io::Error::new(std::io::ErrorKind::InvalidData, error.to_string());
    let layout = GroupLayout::new(&record.unit_sizes).map_err(invalid).on("adopt", &memory.instances())?;
    let layout = Arc::new(layout);
    let count = layout.unit_count();

    let states = [memory_state.as_ref(), disk_state.as_ref()];
    let fence = states.iter().flatten().map(|state| state.fence).max().unwrap_or_default();
    let deleting = states.iter().flatten().any(|state| state.deleting);
    let (memory_charge, cold_charge) = no_charges(memory, cold);
    let sealed = Arc::new(Sealed { record: seal, manifest });
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
        cold_changed: vec![None; layout.segment_count() as usize],
        memory_charge,
        cold_charge,
    };
    let instance = Instance::new(memory, cold, &record, layout, state);
    adopt_cold(&instance, disk_state.as_ref(), cold, adoption);
    match &memory_state {
        Some(state) => adopt_memory(&instance, state, &sealed, memory, adoption)?,
        None => {
            // The manifest stays readable from memory whatever the units do.
            remove_folder(&instance.memory_folder)?;
            create_folder(&instance.memory_folder)?;
            let empty = StateRecord { fence, deleting, held: Bitmap::empty(count), resident: Bitmap::empty(count) };
            write_records(&instance.memory_folder, &record, &sealed, &empty, false)?;
        }
    }
    if let (Some(tier), Some(files), None) = (cold, &instance.cold, &disk_state) {
        // A cold folder that is new to this instance: the manifest and the index become durable there.
        let fresh = files.folder().with_extension(FRESH);
        remove_folder(&fresh)?;
        create_folder(&fresh)?;
        write_records(&fresh, &record, &sealed, &cold_record(&lock(&instance.state)), true)?;
        sync_folder(&fresh)?;
        rename(&fresh, files.folder())?;
        sync_folder(&tier.instances())?;
    }
    Ok(Arc::new(instance))
}

/// Cold units count when their segment's file is there at full length. Their bytes are read before anything relies on
/// them alone: at promotion, at release, on a scrub.
fn adopt_cold(
    instance: &Instance,
    record: Option<&StateRecord>,
    cold: Option<&Arc<ColdTier>>,
    adoption: &mut Adoption,
) {
    let (Some(record), Some(files), Some(tier)) = (record, &instance.cold, cold) else { return };
    let mut held = Vec::new();
    let mut lost: Vec<u32> = record.resident.iter().filter(|unit| !record.held.get(*unit)).collect();
    for segment in 0..instance.layout.segment_count() {
        let units: Vec<u32> = instance.layout.units_of(segment).filter(|&unit| record.held.get(unit)).collect();
        if units.is_empty() {
            continue;
        }
        // Units of no bytes need no file.
        if instance.padded_bytes(&units) > 0
            && let Err(error) = files.get(segment)
        {
            tracing::error!(%error, instance = %instance.id, units = units.len(), "cold units are lost with their segment");
            adoption.lost_units += units.len() as u32;
            lost.extend(units);
            continue;
        }
        held.extend(units);
    }
    let bytes = instance.padded_bytes(&held);
    let mut state = lock(&instance.state);
    held.iter().for_each(|&unit| state.units.set_cold(unit, true));
    lost.iter().for_each(|&unit| state.cold_lost.set(unit, true));
    state.cold_charge = Some(tier.budget().charge(bytes));
    adoption.cold_bytes += bytes;
    let changed = cold_record(&state).held != record.held;
    if changed && let Err(error) = instance.save_cold(&state) {
        tracing::error!(%error, instance = %instance.id, "that cold units are lost can not be written down; the next start finds it again");
    }
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

//! The records of a sealed instance: what the seal fixed, and how they stand as files in a folder beside the segments, on
//! both tiers. What changes of an instance is the state record, whose meaning is the node store's.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ballast_schemas::Digest;
use bytes::Bytes;

use crate::folder::{PathError, write_file};
use crate::layout::GroupLayout;
use crate::memory_tier::instance_folder;
use crate::record::{self, LayoutRecord, RecordError, SealRecord, StateRecord};

/// Names of the records beside the segments.
pub(crate) const LAYOUT: &str = "layout";
pub(crate) const SEAL: &str = "seal";
pub(crate) const MANIFEST: &str = "manifest";
pub(crate) const STATE: &str = "state";

/// Extension of a folder that is being made.
pub(crate) const FRESH: &str = "fresh";
/// Extension of a folder that is being removed.
pub(crate) const GONE: &str = "gone";

/// What the seal fixed of an instance: written once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InstanceRecords {
    pub layout: LayoutRecord,
    pub seal: SealRecord,
    pub manifest: Bytes,
}

/// What one tier says of an instance.
#[derive(Debug)]
pub(crate) struct Found {
    pub records: InstanceRecords,
    pub layout: Arc<GroupLayout>,
    pub state: StateRecord,
}

impl Found {
    /// Checks that the records belong together.
    pub(crate) fn new(records: InstanceRecords, state: StateRecord) -> Result<Self, String> {
        let sha256 = Digest::of(&records.manifest);
        if sha256 != records.seal.manifest.sha256 {
            return Err(format!("its manifest is {sha256}, expected {}", records.seal.manifest.sha256));
        }
        let units = records.layout.unit_sizes.len();
        let held = [&state.held, &state.resident];
        if records.seal.affinity.units.len() != units || held.iter().any(|held| held.len() as usize != units) {
            return Err("its records speak of different numbers of units".to_owned());
        }
        let layout = GroupLayout::new(&records.layout.unit_sizes).map_err(|error| error.to_string())?;
        Ok(Self { records, layout: Arc::new(layout), state })
    }

    /// The name of the instance's folder.
    pub(crate) fn instance_folder(&self) -> String {
        instance_folder(&self.records.layout.instance)
    }

    /// What a folder says; `None` when it was never sealed.
    pub(crate) fn in_folder(path: &Path) -> Result<Option<Self>, String> {
        let text = |error: RecordError| error.to_string();
        let Some(seal) = record::read::<SealRecord>(&path.join(SEAL)).map_err(text)? else { return Ok(None) };
        let missing = |name: &str| format!("its {name} record is missing");
        let layout = record::read::<LayoutRecord>(&path.join(LAYOUT)).map_err(text)?.ok_or_else(|| missing(LAYOUT))?;
        let state = record::read::<StateRecord>(&path.join(STATE)).map_err(text)?.ok_or_else(|| missing(STATE))?;
        let manifest =
            fs::read(path.join(MANIFEST)).map_err(|error| format!("its manifest can not be read: {error}"))?.into();
        Self::new(InstanceRecords { layout, seal, manifest }, state).map(Some)
    }
}

/// Writes the records into a folder, the seal last.
pub(crate) fn write_records(
    folder: &Path,
    records: &InstanceRecords,
    state: &StateRecord,
    durable: bool,
) -> Result<(), PathError> {
    write_file(&folder.join(LAYOUT), &record::encode(&records.layout), durable)?;
    write_file(&folder.join(MANIFEST), &records.manifest, durable)?;
    write_file(&folder.join(STATE), &record::encode(state), durable)?;
    write_file(&folder.join(SEAL), &record::encode(&records.seal), durable)
}

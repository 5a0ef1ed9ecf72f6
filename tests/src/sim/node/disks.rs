//! What is on a node's two tiers: segments, bytes and records. It survives the node's process; the memory tier does not
//! survive the machine.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use ballast_schemas::{Bitmap, InstanceId, LogPosition, SessionId};

use crate::sim::content::Content;

/// Units of one segment: small, so that units share locks.
pub(crate) const SEGMENT_UNITS: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tier {
    Memory,
    Cold,
}

/// A file on tmpfs. Readers that map it keep it when it is unlinked.
pub(crate) struct Inode {
    pub first_unit: u32,
    /// `None`: a hole.
    pub bytes: RefCell<Vec<Option<u64>>>,
    /// Shared locks held through descriptors and mappings of readers; the kernel keeps them, whoever dies.
    pub locks: Cell<u32>,
}

impl Inode {
    fn get(&self, unit: u32) -> Option<u64> {
        let at = unit.checked_sub(self.first_unit)?;
        self.bytes.borrow().get(at as usize).copied().flatten()
    }

    fn set(&self, unit: u32, bytes: Option<u64>) {
        let Some(at) = unit.checked_sub(self.first_unit) else { return };
        if let Some(slot) = self.bytes.borrow_mut().get_mut(at as usize) {
            *slot = bytes;
        }
    }

    pub fn read(&self, unit: u32) -> Option<u64> {
        self.get(unit)
    }
}

/// An instance's folder on the memory tier.
pub(crate) struct MemoryFolder {
    pub session_id: SessionId,
    pub count: u32,
    /// Once sealed.
    pub content: Option<Rc<Content>>,
    pub fence: LogPosition,
    pub deleting: bool,
    /// Units that the record calls hot, and those that it says take room.
    pub held: Bitmap,
    pub resident: Bitmap,
    pub segments: BTreeMap<u32, Rc<Inode>>,
    /// When the import began here.
    pub allocated_at: u64,
}

/// The bytes of a unit on disk.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ColdUnit {
    pub bytes: Option<u64>,
    /// The file's change time when it was last written, by whomever.
    pub changed: u64,
    /// It decayed without anybody's writing: no change time tells.
    pub decayed: bool,
}

/// An instance's folder on the cold tier.
pub(crate) struct ColdFolder {
    pub session_id: SessionId,
    pub content: Rc<Content>,
    pub fence: LogPosition,
    pub deleting: bool,
    pub held: Bitmap,
    /// Found wrong, and not made again yet.
    pub lost: Bitmap,
    pub units: Vec<ColdUnit>,
    /// The segments can not be opened during this run.
    pub offline: bool,
    pub allocated_at: u64,
}

#[derive(Default)]
pub(crate) struct Disks {
    pub memory: BTreeMap<InstanceId, MemoryFolder>,
    pub cold: BTreeMap<InstanceId, ColdFolder>,
    /// Change times only grow.
    pub writes: u64,
}

impl MemoryFolder {
    pub fn bytes(&self, unit: u32) -> Option<u64> {
        self.segments.get(&(unit / SEGMENT_UNITS))?.get(unit)
    }

    pub fn write(&mut self, unit: u32, bytes: Option<u64>) {
        let segment = unit / SEGMENT_UNITS;
        let inode = self.segments.entry(segment).or_insert_with(|| {
            Rc::new(Inode {
                first_unit: segment * SEGMENT_UNITS,
                bytes: RefCell::new(vec![None; SEGMENT_UNITS as usize]),
                locks: Cell::new(0),
            })
        });
        inode.set(unit, bytes);
    }

    pub fn locks(&self, segment: u32) -> u32 {
        self.segments.get(&segment).map_or(0, |inode| inode.locks.get())
    }
}

impl Disks {
    pub fn next_write(&mut self) -> u64 {
        self.writes += 1;
        self.writes
    }

    /// Whether the node would hand out good bytes of a unit from this tier: recorded, reachable and right.
    pub fn has_good(&self, instance: &InstanceId, tier: Tier, unit: u32) -> bool {
        match tier {
            Tier::Memory => self.memory.get(instance).is_some_and(|folder| {
                let expected = folder.content.as_ref().and_then(|content| content.unit(unit));
                !folder.deleting && folder.held.get(unit) && expected.is_some() && folder.bytes(unit) == expected
            }),
            Tier::Cold => self.cold.get(instance).is_some_and(|folder| {
                let found = folder.units.get(unit as usize).and_then(|unit| unit.bytes);
                !folder.deleting
                    && !folder.offline
                    && folder.held.get(unit)
                    && found.is_some()
                    && found == folder.content.unit(unit)
            }),
        }
    }

    /// Whether the node's records say that a unit is here, whatever its bytes are by now.
    pub fn has_recorded(&self, instance: &InstanceId, tier: Tier, unit: u32) -> bool {
        match tier {
            Tier::Memory => self.memory.get(instance).is_some_and(|folder| !folder.deleting && folder.held.get(unit)),
            Tier::Cold => {
                let folder = self.cold.get(instance);
                folder.is_some_and(|folder| !folder.deleting && !folder.offline && folder.held.get(unit))
            }
        }
    }

    /// Every good replica of an instance here.
    pub fn replicas(&self, instance: &InstanceId) -> Vec<(Tier, u32)> {
        let memory = self.memory.get(instance).map_or(0, |folder| folder.count);
        let cold = self.cold.get(instance).map_or(0, |folder| folder.content.len());
        let of = |tier, count| (0..count).map(move |unit| (tier, unit));
        of(Tier::Memory, memory)
            .chain(of(Tier::Cold, cold))
            .filter(|(tier, unit)| self.has_good(instance, *tier, *unit))
            .collect()
    }

    /// Whether the manifest is readable here.
    pub fn has_manifest(&self, instance: &InstanceId) -> bool {
        let memory = self.memory.get(instance).is_some_and(|folder| folder.content.is_some() && !folder.deleting);
        memory || self.cold.get(instance).is_some_and(|folder| !folder.deleting)
    }

    /// Units that take room in memory.
    pub fn memory_used(&self) -> u64 {
        self.memory.values().map(|folder| u64::from(folder.resident.count())).sum()
    }
}

//! An instance mapped by a reader on the node's host: views of hot units without any copy, and positioned reads of cold
//! ones. The node frees none of the mapped units for as long as this lives, whatever becomes of the node.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ballast_schemas::frame::{Description, SegmentGrant, Tier};
use ballast_schemas::{Bitmap, Digest, ErrorCode, InstanceId};
use rustix::mm::Advice;

use crate::checksum::checksum;
use crate::layout::GroupLayout;
use crate::segment::Mapping;

/// Why mapped segments can not be used, or a read from them failed.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The node's layout is not the one that follows from the manifest.
    #[error("the layout of {instance} is {found} on the node, expected {expected}")]
    OtherLayout {
        /// Whose bytes.
        instance: InstanceId,
        /// The layout computed here.
        expected: Digest,
        /// The node's.
        found: Digest,
    },
    /// A segment is not what the layout says.
    #[error("segment {segment} of {instance} has {found} bytes, expected {expected}")]
    OtherLength {
        /// Whose bytes.
        instance: InstanceId,
        /// The segment.
        segment: u32,
        /// Its length in the layout.
        expected: u64,
        /// Its length.
        found: u64,
    },
    /// The system can not map or read a segment.
    #[error("can not read segment {segment} of {instance}: {source}")]
    Io {
        /// Whose bytes.
        instance: InstanceId,
        /// The segment.
        segment: u32,
        /// What the system said.
        source: std::io::Error,
    },
    /// The unit has no copy on the node.
    #[error("unit {unit} of {instance} is not on this node")]
    NotHere {
        /// Whose bytes.
        instance: InstanceId,
        /// The unit.
        unit: u32,
    },
    /// A range does not lie in its unit.
    #[error("{bytes} bytes at {offset} do not lie in unit {unit} of {instance}")]
    Outside {
        /// Whose bytes.
        instance: InstanceId,
        /// The unit.
        unit: u32,
        /// First byte.
        offset: u64,
        /// How many.
        bytes: u64,
    },
    /// A unit's bytes are not what they should be.
    #[error("unit {unit} of {instance} has checksum {found:016x}, expected {expected:016x}; its copy must be repaired")]
    Checksum {
        /// Whose bytes.
        instance: InstanceId,
        /// The unit.
        unit: u32,
        /// The checksum in the manifest.
        expected: u64,
        /// The checksum of what is there.
        found: u64,
    },
}

impl MapError {
    /// The code that a caller sees.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::OtherLayout { .. } => ErrorCode::Conflict,
            Self::OtherLength { .. } | Self::Io { .. } | Self::NotHere { .. } => ErrorCode::Unavailable,
            Self::Outside { .. } => ErrorCode::InvalidArgument,
            Self::Checksum { .. } => ErrorCode::ChecksumMismatch,
        }
    }
}

/// An instance mapped on the node's host.
#[derive(Debug)]
pub struct MappedInstance {
    instance: InstanceId,
    layout: Arc<GroupLayout>,
    holdings: Description,
    memory: Vec<Option<Mapping>>,
    cold: Vec<Option<File>>,
    is_whole: bool,
}

impl MappedInstance {
    pub(crate) fn new(
        instance: InstanceId,
        layout: Arc<GroupLayout>,
        segments: Vec<(SegmentGrant, OwnedFd)>,
        holdings: Description,
    ) -> Result<Self, MapError> {
        let (expected, found) = (layout.digest(), holdings.layout_digest);
        if expected != found {
            return Err(MapError::OtherLayout { instance, expected, found });
        }
        let count = layout.segment_count() as usize;
        let mut mapped = Self {
            instance,
            holdings,
            memory: (0..count).map(|_| None).collect(),
            cold: (0..count).map(|_| None).collect(),
            is_whole: true,
            layout,
        };
        for (grant, descriptor) in segments {
            mapped.add(grant, File::from(descriptor))?;
        }
        mapped.forget_what_is_not_granted();
        Ok(mapped)
    }

    /// Cold units that lie in no file of this host are held by the node, but can not be read here.
    fn forget_what_is_not_granted(&mut self) {
        for unit in self.holdings.cold.clone().iter() {
            let Some(extent) = self.layout.extent(unit) else { continue };
            let has_file = self.cold.get(extent.segment as usize).is_some_and(Option::is_some);
            if extent.bytes > 0 && !has_file {
                self.holdings.cold.set(unit, false);
                self.is_whole &= self.holdings.hot.get(unit);
            }
        }
    }

    /// Whether all that the node held when it was mapped can be read here. Where it keeps cold copies in object storage, the
    /// rest comes over its connection.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    fn add(&mut self, grant: SegmentGrant, file: File) -> Result<(), MapError> {
        let SegmentGrant { segment, tier, .. } = grant;
        let expected = self.layout.segment_bytes(segment);
        let found = file.metadata().map_err(|source| self.io(segment, source))?.len();
        if expected == 0 || found != expected {
            return Err(MapError::OtherLength { instance: self.instance.clone(), segment, expected, found });
        }
        let index = segment as usize;
        match tier {
            Tier::Memory => {
                let mapping = Mapping::new(&file, expected, false).map_err(|source| self.io(segment, source))?;
                // Only a huge-page tmpfs minds; elsewhere it is no loss.
                let _ = mapping.advise(0..expected, Advice::LinuxHugepage);
                self.memory[index] = Some(mapping);
            }
            Tier::Cold => self.cold[index] = Some(file),
        }
        Ok(())
    }

    fn io(&self, segment: u32, source: std::io::Error) -> MapError {
        MapError::Io { instance: self.instance.clone(), segment, source }
    }

    /// The instance.
    #[must_use]
    pub fn instance(&self) -> &InstanceId {
        &self.instance
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Arc<GroupLayout> {
        &self.layout
    }

    /// What can be read here of what the node held when it was mapped.
    #[must_use]
    pub fn holdings(&self) -> &Description {
        &self.holdings
    }

    /// Units that can be viewed without a copy.
    #[must_use]
    pub fn hot(&self) -> &Bitmap {
        &self.holdings.hot
    }

    /// The bytes of a hot unit, where they lie; `None` when it is not hot.
    #[must_use]
    pub fn view(&self, unit: u32) -> Option<&[u8]> {
        if !self.holdings.hot.get(unit) {
            return None;
        }
        let extent = self.layout.extent(unit)?;
        if extent.bytes == 0 {
            return Some(&[]);
        }
        let mapping = self.memory.get(extent.segment as usize)?.as_ref()?;
        // SAFETY: the unit was hot when the guard on its segment was taken, and this mapping keeps the guard. The bytes of
        // a sealed unit never change, and only read-only descriptors are handed out.
        unsafe { mapping.bytes(extent.offset..extent.offset + extent.bytes) }.ok()
    }

    /// The bytes of a hot unit, as a view that keeps the mapping alive; `None` when it is not hot.
    #[must_use]
    pub fn shared_view(self: &Arc<Self>, unit: u32) -> Option<UnitView> {
        self.view(unit).map(|_| UnitView { mapped: self.clone(), unit })
    }

    /// Copies a whole unit into a buffer of its size: from memory when it is hot, from disk otherwise. With `expected`,
    /// its checksum is compared.
    ///
    /// # Errors
    /// When the buffer has another size, the unit is not on the node, reading fails, or the checksum differs. What is
    /// in the buffer means nothing then.
    pub fn read_unit_into(&self, unit: u32, buffer: &mut [u8], expected: Option<u64>) -> Result<(), MapError> {
        let size = self.layout.extent(unit).map(|extent| extent.bytes);
        let bytes = buffer.len() as u64;
        if size != Some(bytes) {
            return Err(MapError::Outside { instance: self.instance.clone(), unit, offset: 0, bytes });
        }
        self.read_into(unit, 0, buffer)?;
        match expected {
            Some(expected) => self.compare(unit, expected, checksum(buffer)),
            None => Ok(()),
        }
    }

    /// Copies a part of a unit into a buffer: from memory when it is hot, from disk otherwise.
    ///
    /// # Errors
    /// When the range does not lie in the unit, the unit is not on the node, or reading fails.
    pub fn read_into(&self, unit: u32, offset: u64, buffer: &mut [u8]) -> Result<(), MapError> {
        let bytes = buffer.len() as u64;
        let outside = || MapError::Outside { instance: self.instance.clone(), unit, offset, bytes };
        let extent = self.layout.extent(unit).ok_or_else(outside)?;
        let end = offset.checked_add(bytes).filter(|&end| end <= extent.bytes).ok_or_else(outside)?;
        if let Some(view) = self.view(unit) {
            buffer.copy_from_slice(&view[offset as usize..end as usize]);
            return Ok(());
        }
        let not_here = || MapError::NotHere { instance: self.instance.clone(), unit };
        if !self.holdings.cold.get(unit) {
            return Err(not_here());
        }
        if buffer.is_empty() {
            return Ok(());
        }
        let file = self.cold.get(extent.segment as usize).and_then(Option::as_ref).ok_or_else(not_here)?;
        file.read_exact_at(buffer, extent.offset + offset).map_err(|source| self.io(extent.segment, source))
    }

    /// Compares a hot unit's checksum, where it lies.
    ///
    /// # Errors
    /// When it is not hot, or the checksum differs.
    pub fn verify(&self, unit: u32, expected: u64) -> Result<(), MapError> {
        let view = self.view(unit).ok_or_else(|| MapError::NotHere { instance: self.instance.clone(), unit })?;
        self.compare(unit, expected, checksum(view))
    }

    fn compare(&self, unit: u32, expected: u64, found: u64) -> Result<(), MapError> {
        if found == expected {
            return Ok(());
        }
        Err(MapError::Checksum { instance: self.instance.clone(), unit, expected, found })
    }

    /// Sets up the page tables of every mapped segment now, instead of page by page at the first touch.
    ///
    /// # Errors
    /// When the system can not.
    pub fn populate(&self) -> Result<(), MapError> {
        for (segment, mapping) in self.memory.iter().enumerate() {
            let Some(mapping) = mapping else { continue };
            // Only what is hot has pages; touching a hole would make some.
            let units = self.layout.units_of(segment as u32).filter(|&unit| self.holdings.hot.get(unit));
            for run in self.layout.runs(units).iter().filter(|run| !run.range.is_empty()) {
                let populated = mapping.advise(run.range.clone(), Advice::LinuxPopulateRead);
                populated.map_err(|source| self.io(segment as u32, source))?;
            }
        }
        Ok(())
    }
}

/// The bytes of a hot unit. It keeps the mapping alive, and with it the node's guard.
#[derive(Clone, Debug)]
pub struct UnitView {
    mapped: Arc<MappedInstance>,
    unit: u32,
}

impl AsRef<[u8]> for UnitView {
    fn as_ref(&self) -> &[u8] {
        // It was there when the view was made, and a mapping does not change.
        self.mapped.view(self.unit).unwrap_or_default()
    }
}

impl std::ops::Deref for UnitView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.as_ref()
    }
}

//! Reading an instance: what is here at one moment, bytes from memory under a guard, bytes from disk, and read-only
//! descriptors for readers on the same host (see ARCHITECTURE.md, Guards and fences).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_schemas::frame::{Description, ReadRange, SegmentGrant, Tier};
use ballast_schemas::{AffinityIndex, InstanceId};
use bytes::Bytes;

use super::instance::{Instance, Sealed, State};
use super::{NodeStore, lock};
use crate::cold::{ColdBytes, READ_BYTES_MAX};
use crate::error::{Mismatch, StoreError};
use crate::folder::{OnPath, PathError};
use crate::segment::{Segment, reader_descriptor};

/// Bytes between two ranges on disk that are rather read than jumped over.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// Longest wait for a segment that is being freed just now.
const GRANT_WAIT: Duration = Duration::from_secs(5);

/// A reader of one instance.
#[derive(Clone, Debug)]
pub struct InstanceReader {
    instance: Arc<Instance>,
    sealed: Arc<Sealed>,
}

/// Descriptors for a reader on the same host, and what they hold.
#[derive(Debug)]
pub struct GrantedSegments {
    /// A read-only descriptor each. Those of memory segments guard their segment for as long as they or a mapping of
    /// them live.
    pub grants: Vec<(SegmentGrant, OwnedFd)>,
    /// What was readable when the guards were taken; hot units stay so while they are guarded.
    pub holdings: Description,
}

/// Bytes of a hot unit. Its memory is not freed while this lives.
#[derive(Debug)]
pub struct HotPiece {
    instance: Arc<Instance>,
    /// `None` for no bytes, which lie nowhere.
    segment: Option<Arc<Segment>>,
    range: std::ops::Range<u64>,
    unit: u32,
}

impl HotPiece {
    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let Some(segment) = &self.segment else { return &[] };
        // SAFETY: a hot unit is never written again, and the guard that this holds keeps it from being freed. The range
        // was taken from the layout, so that it lies in the segment.
        unsafe { segment.bytes(self.range.clone()) }.unwrap_or_default()
    }
}

impl Drop for HotPiece {
    fn drop(&mut self) {
        lock(&self.instance.state).units.unguard(self.unit);
        self.instance.eased.notify_all();
    }
}

/// Hot units that lie next to each other. Their memory is not freed while this lives.
#[cfg(feature = "rdma")]
#[derive(Debug)]
pub(crate) struct HotRun {
    instance: Arc<Instance>,
    segment: Arc<Segment>,
    units: std::ops::Range<u32>,
    range: std::ops::Range<u64>,
}

#[cfg(feature = "rdma")]
impl HotRun {
    /// Address of the first byte, and how many there are, padding between the units included. They are never written.
    pub(crate) fn memory(&self) -> std::io::Result<(std::ptr::NonNull<u8>, u64)> {
        Ok((self.segment.address(&self.range)?, self.range.end - self.range.start))
    }

    /// Where a unit lies in it.
    pub(crate) fn place_of(&self, unit: u32) -> Option<std::ops::Range<u64>> {
        let extent = self.instance.layout.extent(unit).filter(|_| self.units.contains(&unit))?;
        let start = extent.offset - self.range.start;
        Some(start..start + extent.bytes)
    }
}

#[cfg(feature = "rdma")]
impl Drop for HotRun {
    fn drop(&mut self) {
        let mut state = lock(&self.instance.state);
        self.units.clone().for_each(|unit| state.units.unguard(unit));
        drop(state);
        self.instance.eased.notify_all();
    }
}

/// Bytes of a cold unit, read from disk.
#[derive(Clone, Debug)]
pub struct ColdPiece {
    /// `None` for no bytes, which lie nowhere.
    read: Option<Arc<ColdBytes>>,
    range: std::ops::Range<usize>,
}

impl ColdPiece {
    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.read.as_ref().and_then(|read| read.bytes().get(self.range.clone())).unwrap_or_default()
    }
}

impl NodeStore {
    /// Opens an instance for reading.
    ///
    /// # Errors
    /// When it is not here, not sealed, not served, or being deleted.
    pub fn reader(&self, id: &InstanceId) -> Result<InstanceReader, StoreError> {
        let instance = self.served(id)?;
        let sealed = instance.sealed()?;
        Ok(InstanceReader { instance, sealed })
    }

    /// What is here of an instance, which may still be imported.
    ///
    /// # Errors
    /// When it is not here or not served.
    pub fn describe(&self, id: &InstanceId) -> Result<Description, StoreError> {
        let instance = self.served(id)?;
        let state = lock(&instance.state);
        Ok(instance.description(&state))
    }

    /// The units of a sealed instance.
    ///
    /// # Errors
    /// When it is not here, not sealed, not served, or being deleted.
    pub fn affinity_index(&self, id: &InstanceId) -> Result<AffinityIndex, StoreError> {
        Ok(self.served(id)?.sealed()?.0.seal.affinity.clone())
    }
}

impl InstanceReader {
    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> Bytes {
        self.sealed.0.manifest.clone()
    }

    /// The manifest's reference.
    #[must_use]
    pub fn reference(&self) -> &ballast_schemas::ManifestRef {
        &self.sealed.0.seal.manifest
    }

    /// The units.
    #[must_use]
    pub fn affinity(&self) -> &AffinityIndex {
        &self.sealed.0.seal.affinity
    }

    /// What is here at this moment.
    #[must_use]
    pub fn describe(&self) -> Description {
        self.instance.description(&lock(&self.instance.state))
    }

    /// The tier that a unit is read from, if it is here.
    #[must_use]
    pub(crate) fn tier(&self, unit: u32) -> Option<Tier> {
        let state = lock(&self.instance.state);
        match state.units.hot().get(unit) {
            true => Some(Tier::Memory),
            false => state.units.cold().get(unit).then_some(Tier::Cold),
        }
    }

    /// Whether a range is a whole unit, whose checksum then tells whether its bytes are right.
    #[must_use]
    pub fn is_whole(&self, range: &ReadRange) -> bool {
        range.offset == 0 && self.instance.layout.extent(range.unit).is_some_and(|extent| extent.bytes == range.bytes)
    }

    /// Whether a range lies in its unit.
    ///
    /// # Errors
    /// When it does not.
    pub fn check(&self, range: &ReadRange) -> Result<(), StoreError> {
        let ReadRange { unit, offset, bytes } = *range;
        let extent = self.instance.layout.extent(unit);
        let fits = extent.is_some_and(|extent| offset.checked_add(bytes).is_some_and(|end| end <= extent.bytes));
        if fits {
            return Ok(());
        }
        let size = extent.map_or(0, |extent| extent.bytes);
        let id = &self.instance.id;
        Err(StoreError::Invalid(format!(
            "{bytes} bytes at {offset} do not lie in unit {unit} of {id}, which has {size}"
        )))
    }

    /// Bytes from memory, when the unit is hot.
    ///
    /// # Errors
    /// When the range does not lie in its unit, or the instance is being deleted.
    pub fn hot(&self, range: &ReadRange) -> Result<Option<HotPiece>, StoreError> {
        self.check(range)?;
        let Some(extent) = self.instance.layout.extent(range.unit) else { return Ok(None) };
        let mut state = lock(&self.instance.state);
        if state.deleting {
            return Err(StoreError::Deleting { instance: self.instance.id.clone() });
        }
        let segment = self.instance.memory.get(extent.segment).filter(|_| range.bytes > 0);
        if segment.is_none() && range.bytes > 0 {
            return Ok(None);
        }
        if !state.units.guard(range.unit) {
            return Ok(None);
        }
        let start = extent.offset + range.offset;
        let range_in_segment = start..start + range.bytes;
        Ok(Some(HotPiece { instance: self.instance.clone(), segment, range: range_in_segment, unit: range.unit }))
    }

    /// The longest run of hot units that a unit with bytes is part of, if it is hot.
    ///
    /// # Errors
    /// When the instance is being deleted.
    #[cfg(feature = "rdma")]
    pub(crate) fn hot_run(&self, unit: u32) -> Result<Option<HotRun>, StoreError> {
        let layout = &self.instance.layout;
        let Some(extent) = layout.extent(unit).filter(|extent| extent.bytes > 0) else { return Ok(None) };
        let mut state = lock(&self.instance.state);
        if state.deleting {
            return Err(StoreError::Deleting { instance: self.instance.id.clone() });
        }
        let Some(segment) = self.instance.memory.get(extent.segment) else { return Ok(None) };
        let hot = state.units.hot();
        if !hot.get(unit) {
            return Ok(None);
        }
        let in_segment = layout.units_of(extent.segment);
        let first = (in_segment.start..unit).rev().take_while(|&unit| hot.get(unit)).last().unwrap_or(unit);
        let last = (unit..in_segment.end).take_while(|&unit| hot.get(unit)).last().unwrap_or(unit);
        let units = first..last + 1;
        let (Some(first), Some(last)) = (layout.extent(first), layout.extent(last)) else { return Ok(None) };
        let range = first.offset..last.padded_range().end.min(layout.segment_bytes(extent.segment));
        units.clone().for_each(|unit| {
            state.units.guard(unit);
        });
        drop(state);
        Ok(Some(HotRun { instance: self.instance.clone(), segment, units, range }))
    }

    /// How many of the leading ranges one disk read covers: one at least, and its neighbours when they are cold too and
    /// lie close behind it. Zero only of none.
    #[must_use]
    pub fn one_read(&self, ranges: &[ReadRange]) -> usize {
        let Some((segment, start, mut end)) = ranges.first().and_then(|first| self.on_disk(first).ok()) else {
            return ranges.len().min(1);
        };
        let mut count = 1;
        for range in &ranges[1..] {
            let Ok((next_segment, next_start, next_end)) = self.on_disk(range) else { break };
            let close = next_segment == segment && next_start >= end && next_start - end <= GAP_BYTES_MAX;
            if !close
                || lock(&self.instance.state).units.hot().get(range.unit)
                || next_end - start > Self::COLD_BYTES_MAX
            {
                break;
            }
            end = next_end;
            count += 1;
        }
        count
    }

    /// Bytes of ranges from disk, in one read: see [`InstanceReader::one_read`]. Blocks for the disk.
    ///
    /// # Errors
    /// When a range does not lie in its unit, its unit is not on disk, together they are longer than
    /// [`InstanceReader::COLD_BYTES_MAX`] or not in one segment, the instance is being deleted, or the disk fails.
    pub fn cold(&self, ranges: &[ReadRange]) -> Result<Vec<ColdPiece>, StoreError> {
        let places: Vec<(u32, u64, u64)> = ranges.iter().map(|range| self.on_disk(range)).collect::<Result<_, _>>()?;
        let Some(&(segment, start, _)) = places.first() else { return Ok(Vec::new()) };
        let end = places.iter().map(|place| place.2).max().unwrap_or(start);
        let together = places.iter().all(|place| place.0 == segment && place.1 >= start);
        if !together || end - start > Self::COLD_BYTES_MAX {
            return Err(StoreError::Invalid(format!("{} ranges do not fit one read from disk", ranges.len())));
        }
        let replica = self.instance.cold.as_ref().ok_or(StoreError::NoColdTier)?;
        let read = match end > start {
            true => Some(replica.read(segment, start..end).map_err(|error| StoreError::on_tier(Tier::Cold, error))?),
            false => None,
        };
        let read = read.map(Arc::new);
        let piece = |(_, first, last): (u32, u64, u64)| ColdPiece {
            read: read.clone(),
            range: (first - start) as usize..(last - start) as usize,
        };
        Ok(places.into_iter().map(piece).collect())
    }

    /// Where a range lies on disk, if its unit is cold.
    fn on_disk(&self, range: &ReadRange) -> Result<(u32, u64, u64), StoreError> {
        self.check(range)?;
        let not_here = || StoreError::NotHere { instance: self.instance.id.clone(), unit: range.unit };
        let extent = self.instance.layout.extent(range.unit).ok_or_else(not_here)?;
        let state = lock(&self.instance.state);
        if state.deleting {
            return Err(StoreError::Deleting { instance: self.instance.id.clone() });
        }
        if !state.units.cold().get(range.unit) {
            return Err(not_here());
        }
        let start = extent.offset + range.offset;
        Ok((extent.segment, start, start + range.bytes))
    }

    /// Most bytes that one [`InstanceReader::cold`] reads.
    pub const COLD_BYTES_MAX: u64 = READ_BYTES_MAX;

    /// Compares a unit's checksum with that of bytes read for it.
    #[must_use]
    pub fn compare(&self, unit: u32, found: u64) -> Option<Mismatch> {
        let expected = self.sealed.checksum(unit);
        (found != expected).then_some(Mismatch { unit, expected, found })
    }

    /// Hands out read-only descriptors of segments, with what they hold: guards and bitmaps belong to one moment. A unit
    /// that is hot in the answer stays in memory for as long as its segment's descriptor or a mapping of it lives.
    ///
    /// # Errors
    /// When the instance is being deleted, or descriptors run out.
    pub fn grant_segments(&self, memory: bool, cold: bool) -> Result<GrantedSegments, StoreError> {
        let deadline = Instant::now() + GRANT_WAIT;
        loop {
            match self.try_grant(memory, cold)? {
                Some(granted) => return Ok(granted),
                // Some units of a segment are being freed at this moment; that takes the time of a system call.
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                None => return Err(StoreError::Busy { instance: self.instance.id.clone(), units: 0 }),
            }
        }
    }

    fn try_grant(&self, memory: bool, cold: bool) -> Result<Option<GrantedSegments>, StoreError> {
        let instance = &self.instance;
        let state = lock(&instance.state);
        if state.deleting {
            return Err(StoreError::Deleting { instance: instance.id.clone() });
        }
        let holds =
            |held: &ballast_schemas::Bitmap, segment| instance.layout.units_of(segment).any(|unit| held.get(unit));
        let mut grants = Vec::new();
        for segment in
            (0..instance.layout.segment_count()).filter(|&segment| instance.layout.segment_bytes(segment) > 0)
        {
            let bytes = instance.layout.segment_bytes(segment);
            if memory
                && holds(state.units.hot(), segment)
                && let Some(open) = instance.memory.get(segment)
            {
                let Some(reader) = guarded(open.file(), &instance.memory_folder)? else { return Ok(None) };
                grants.push((SegmentGrant { segment, tier: Tier::Memory, bytes }, reader));
            }
            if let Some(replica) = instance.cold.as_ref().filter(|_| cold && holds(state.units.cold(), segment))
                && let Some(file) = replica.file(segment).map_err(|error| StoreError::on_tier(Tier::Cold, error))?
            {
                let Some(reader) = guarded(&file, replica.place())? else { return Ok(None) };
                grants.push((SegmentGrant { segment, tier: Tier::Cold, bytes }, reader));
            }
        }
        Ok(Some(GrantedSegments { grants, holdings: instance.description(&state) }))
    }
}

/// A guarded descriptor; `None` while something in the file is being freed.
fn guarded(file: &std::fs::File, folder: &std::path::Path) -> Result<Option<OwnedFd>, PathError> {
    match reader_descriptor(file, true) {
        Ok(reader) => Ok(Some(reader)),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error).on("hand out a segment of", folder),
    }
}

impl Instance {
    fn description(&self, state: &State) -> Description {
        let sealed = state.sealed.as_ref();
        Description {
            sealed: sealed.is_some(),
            layout_digest: self.layout.digest(),
            unit_count: self.layout.unit_count(),
            manifest_sha256: sealed.map(|sealed| sealed.0.seal.manifest.sha256),
            fence: state.fence,
            hot: state.units.hot().clone(),
            cold: state.units.cold().clone(),
        }
    }
}

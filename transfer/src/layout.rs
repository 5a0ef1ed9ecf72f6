//! Where each unit of a group lies: the fixed rule from unit sizes to (segment, offset), the same on both tiers and
//! on both ends (see ARCHITECTURE.md, One layout, two tiers). What lies inside a unit is the manifest's matter.

use std::fmt::Write as _;
use std::ops::Range;

use ballast_schemas::{Digest, UNITS_MAX};
use sha2::{Digest as _, Sha256};

/// Longest segment that holds more than one unit, in bytes; a larger unit has a segment of its own.
pub const SEGMENT_BYTES_MAX: u64 = 4 << 30;
/// Every unit starts at a multiple of this many bytes, and its extent is rounded up to one: a page, and what
/// `O_DIRECT` asks of offsets and lengths.
pub const UNIT_ALIGN_BYTES: u64 = 4096;
/// Largest unit, in bytes. Far above any tensor, and low enough that no sum of offsets overflows.
pub const UNIT_BYTES_MAX: u64 = 1 << 44;
/// Largest group, in bytes.
pub const GROUP_BYTES_MAX: u64 = 1 << 50;

/// Why a list of unit sizes has no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// More units than a revision may have.
    #[error("{units} units; a revision has at most {UNITS_MAX}")]
    TooManyUnits {
        /// How many were given.
        units: usize,
    },
    /// A unit beyond 16 TiB.
    #[error("unit {unit} has {bytes} bytes; a unit has at most {UNIT_BYTES_MAX}")]
    UnitTooLarge {
        /// The unit.
        unit: usize,
        /// Its size.
        bytes: u64,
    },
    /// All units together beyond 1 PiB.
    #[error("units add up to more than {GROUP_BYTES_MAX} bytes at unit {unit}")]
    GroupTooLarge {
        /// The first unit that does not fit.
        unit: usize,
    },
}

/// Where one unit lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The segment.
    pub segment: u32,
    /// First byte inside the segment, a multiple of [`UNIT_ALIGN_BYTES`].
    pub offset: u64,
    /// The unit's size in bytes.
    pub bytes: u64,
}

impl Extent {
    /// Bytes that the unit takes in its segment: its size rounded up to [`UNIT_ALIGN_BYTES`].
    #[must_use]
    pub fn padded_bytes(&self) -> u64 {
        self.bytes.next_multiple_of(UNIT_ALIGN_BYTES)
    }

    /// The bytes of the segment that the unit takes, padding included.
    #[must_use]
    pub fn padded_range(&self) -> Range<u64> {
        self.offset..self.offset + self.padded_bytes()
    }
}

/// Units that lie next to each other in one segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The segment.
    pub segment: u32,
    /// The units, in order.
    pub units: Vec<u32>,
    /// The bytes of the segment that they take together.
    pub range: Range<u64>,
}

/// The layout of a group.
#[derive(Clone, PartialEq, Eq)]
pub struct GroupLayout {
    extents: Box<[Extent]>,
    segments: Box<[u64]>,
    bytes: u64,
    digest: Digest,
}

impl std::fmt::Debug for GroupLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupLayout")
            .field("units", &self.extents.len())
            .field("segments", &self.segments.len())
            .field("bytes", &self.bytes)
            .field("digest", &self.digest)
            .finish()
    }
}

impl GroupLayout {
    /// The layout of units of these sizes, in this order.
    ///
    /// # Errors
    /// When there are too many units or they are too large.
    pub fn new(unit_sizes: &[u64]) -> Result<Self, LayoutError> {
        if unit_sizes.len() > UNITS_MAX as usize {
            return Err(LayoutError::TooManyUnits { units: unit_sizes.len() });
        }
        let mut extents = Vec::with_capacity(unit_sizes.len());
        let mut segments: Vec<u64> = Vec::new();
        let mut total = 0;
        for (unit, &bytes) in unit_sizes.iter().enumerate() {
            if bytes > UNIT_BYTES_MAX {
                return Err(LayoutError::UnitTooLarge { unit, bytes });
            }
            total += bytes;
            if total > GROUP_BYTES_MAX {
                return Err(LayoutError::GroupTooLarge { unit });
            }
            let padded = bytes.next_multiple_of(UNIT_ALIGN_BYTES);
            match segments.last() {
                Some(&filled) if filled + padded <= SEGMENT_BYTES_MAX => {}
                _ => segments.push(0),
            }
            let segment = segments.len() - 1;
            extents.push(Extent { segment: segment as u32, offset: segments[segment], bytes });
            segments[segment] += padded;
        }
        Ok(Self { extents: extents.into(), segments: segments.into(), bytes: total, digest: digest_of(unit_sizes) })
    }

    /// SHA-256 of the rule and the sizes as text: equal digests mean equal layouts.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// How many units.
    #[must_use]
    pub fn unit_count(&self) -> u32 {
        self.extents.len() as u32
    }

    /// Where a unit lies; `None` past the last unit.
    #[must_use]
    pub fn extent(&self, unit: u32) -> Option<Extent> {
        self.extents.get(unit as usize).copied()
    }

    /// Where each unit lies, in order.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// How many segments.
    #[must_use]
    pub fn segment_count(&self) -> u32 {
        self.segments.len() as u32
    }

    /// Length of a segment in bytes; 0 past the last one.
    #[must_use]
    pub fn segment_bytes(&self, segment: u32) -> u64 {
        self.segments.get(segment as usize).copied().unwrap_or(0)
    }

    /// Bytes of all units, without padding.
    #[must_use]
    pub fn unit_bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that all units take, padding included.
    #[must_use]
    pub fn padded_bytes(&self) -> u64 {
        self.segments.iter().sum()
    }

    /// Each unit's size, in order.
    #[must_use]
    pub fn unit_sizes(&self) -> Vec<u64> {
        self.extents.iter().map(|extent| extent.bytes).collect()
    }

    /// The units that lie in a segment.
    #[must_use]
    pub fn units_of(&self, segment: u32) -> Range<u32> {
        let first = self.extents.partition_point(|extent| extent.segment < segment) as u32;
        let end = self.extents.partition_point(|extent| extent.segment <= segment) as u32;
        first..end
    }

    /// Ascending units grouped into stretches that lie next to each other. Units past the last one are left out.
    #[must_use]
    pub fn runs(&self, units: impl IntoIterator<Item = u32>) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for unit in units {
            let Some(extent) = self.extent(unit) else { continue };
            match runs.last_mut() {
                Some(run) if run.segment == extent.segment && run.range.end == extent.offset => {
                    run.units.push(unit);
                    run.range.end = extent.padded_range().end;
                }
                _ => runs.push(Run { segment: extent.segment, units: vec![unit], range: extent.padded_range() }),
            }
        }
        runs
    }
}

fn digest_of(unit_sizes: &[u64]) -> Digest {
    let mut hash = Sha256::new();
    hash.update(format!(
        "ballast-layout-v1\nalign {UNIT_ALIGN_BYTES}\nsegment {SEGMENT_BYTES_MAX}\nunits {}\n",
        unit_sizes.len()
    ));
    let mut text = String::with_capacity(16);
    for bytes in unit_sizes {
        text.clear();
        // Writing to a String can not fail.
        let _ = writeln!(text, "{bytes}");
        hash.update(&text);
    }
    Digest::from_bytes(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_digest_is_the_sha256_of_the_rule_and_the_sizes() {
        let layout = GroupLayout::new(&[1, 0, 4097]).unwrap();
        let text = b"ballast-layout-v1\nalign 4096\nsegment 4294967296\nunits 3\n1\n0\n4097\n";
        assert_eq!(layout.digest(), Digest::of(text));
    }

    #[test]
    fn a_unit_larger_than_a_segment_has_one_of_its_own() {
        let layout = GroupLayout::new(&[10, SEGMENT_BYTES_MAX + 1, 10]).unwrap();
        let places: Vec<_> = layout.extents().iter().map(|extent| (extent.segment, extent.offset)).collect();
        assert_eq!(places, [(0, 0), (1, 0), (2, 0)]);
        assert_eq!(layout.segment_bytes(1), SEGMENT_BYTES_MAX + UNIT_ALIGN_BYTES);
    }

    #[test]
    fn units_fill_a_segment_to_the_brim_and_no_further() {
        let layout = GroupLayout::new(&[SEGMENT_BYTES_MAX - 4096, 4096, 1]).unwrap();
        assert_eq!(layout.segment_count(), 2);
        assert_eq!(layout.units_of(0), 0..2);
        assert_eq!(layout.units_of(1), 2..3);
    }

    #[test]
    fn sizes_that_could_overflow_are_refused() {
        assert!(matches!(GroupLayout::new(&[u64::MAX]), Err(LayoutError::UnitTooLarge { unit: 0, .. })));
        let many = vec![UNIT_BYTES_MAX; 65];
        assert!(matches!(GroupLayout::new(&many), Err(LayoutError::GroupTooLarge { unit: 64 })));
    }

    fn sizes() -> impl Strategy<Value = Vec<u64>> {
        let size = prop_oneof![
            Just(0),
            1..10_000_u64,
            1..(1_u64 << 31),
            (SEGMENT_BYTES_MAX - 5000)..(SEGMENT_BYTES_MAX + 5000),
        ];
        prop::collection::vec(size, 0..200)
    }

    proptest! {
        #[test]
        fn units_are_aligned_in_order_and_never_overlap(sizes in sizes()) {
            let layout = GroupLayout::new(&sizes).unwrap();
            prop_assert_eq!(layout.unit_sizes(), sizes.clone());
            let mut end = (0, 0);
            for extent in layout.extents() {
                prop_assert_eq!(extent.offset % UNIT_ALIGN_BYTES, 0);
                prop_assert!((extent.segment, extent.offset) >= end);
                end = (extent.segment, extent.padded_range().end);
                prop_assert!(end.1 <= layout.segment_bytes(extent.segment));
            }
            for segment in 0..layout.segment_count() {
                let units = layout.units_of(segment);
                prop_assert!(!units.is_empty());
                prop_assert!(layout.segment_bytes(segment) <= SEGMENT_BYTES_MAX || units.len() == 1
                    || units.clone().filter(|&u| layout.extent(u).unwrap().bytes > 0).count() == 1);
            }
        }

        #[test]
        fn the_same_sizes_always_give_the_same_layout(sizes in sizes()) {
            prop_assert_eq!(GroupLayout::new(&sizes).unwrap(), GroupLayout::new(&sizes).unwrap());
        }

        #[test]
        fn runs_cover_exactly_the_units_asked_for(sizes in sizes(), pick in prop::collection::vec(any::<bool>(), 200)) {
            let layout = GroupLayout::new(&sizes).unwrap();
            let units: Vec<u32> = (0..layout.unit_count()).filter(|&u| pick[u as usize]).collect();
            let runs = layout.runs(units.iter().copied());
            let covered: Vec<u32> = runs.iter().flat_map(|run| run.units.clone()).collect();
            prop_assert_eq!(&covered, &units);
            let bytes: u64 = runs.iter().map(|run| run.range.end - run.range.start).sum();
            let expected: u64 = units.iter().map(|&u| layout.extent(u).unwrap().padded_bytes()).sum();
            prop_assert_eq!(bytes, expected);
        }
    }
}

//! Affinity units: complete tensors, alias groups or extra files, which migration never splits, and the index of
//! a group's units that planner, layout and inventories number by (RFC, Terminology; formats: affinity ids and digest).

use serde::{Deserialize, Serialize};

use crate::digest::{Digest, hash_list};
use crate::limits::UNITS_MAX;

/// One unit of a group. Its index is its place in [`AffinityIndex::units`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AffinityUnit {
    /// SHA-256 of the sorted member names joined by NUL.
    pub affinity_id: Digest,
    /// Bytes the unit takes in a segment, fragments and their padding.
    pub extent_bytes: u64,
    /// Logical payload bytes: the fragments without padding.
    pub logical_bytes: u64,
    /// CRC-64/NVME of the extent.
    pub crc64: u64,
}

/// Every unit of a group, in the order that layout, bitmaps, cursors and plans count by:
/// by lowest member tensor name, extra files last by path.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AffinityIndex {
    /// The units by index.
    pub units: Vec<AffinityUnit>,
}

impl AffinityIndex {
    /// Number of units.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.units.len()).unwrap_or(UNITS_MAX)
    }

    /// Whether there is no unit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// Logical payload bytes of all units.
    #[must_use]
    pub fn logical_bytes(&self) -> u64 {
        self.units.iter().fold(0, |sum, unit| sum.saturating_add(unit.logical_bytes))
    }

    /// Extent bytes of every unit by index: what the layout follows from.
    #[must_use]
    pub fn extents(&self) -> Vec<u64> {
        self.units.iter().map(|unit| unit.extent_bytes).collect()
    }
}

/// The id of the unit with these member names (sorted here).
#[must_use]
pub fn affinity_id(members: &[&str]) -> Digest {
    Digest::of(joined(members).as_bytes())
}

/// `H` over the sorted NUL-joined member lists of every group.
#[must_use]
pub fn affinity_digest(groups: &[Vec<&str>]) -> Digest {
    let mut lines: Vec<String> = groups.iter().map(|members| joined(members)).collect();
    lines.sort_unstable();
    hash_list(lines.iter().map(|line| line.as_bytes()))
}

fn joined(members: &[&str]) -> String {
    let mut sorted = members.to_vec();
    sorted.sort_unstable();
    sorted.join("\0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_affinity_id_does_not_depend_on_the_order_of_its_members() {
        assert_eq!(affinity_id(&["b", "a"]), Digest::of(b"a\0b"));
        assert_eq!(affinity_digest(&[vec!["z"], vec!["b", "a"]]), hash_list([b"a\0b".as_slice(), b"z"]));
    }
}

//! Inventory: which units of a group a node physically holds. Twelve kilobytes for a hundred thousand units,
//! never a record per tensor. Where units lie in a segment belongs to the transfer crate's layout.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::position::{InstanceId, LogPosition, NodeId};
use crate::state::Residency;

/// A run of unit indexes, `start` included, `end` excluded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UnitRange {
    /// First unit.
    pub start: u32,
    /// One past the last unit.
    pub end: u32,
}

impl UnitRange {
    /// Units in the run.
    #[must_use]
    pub fn len(self) -> u32 {
        self.end.saturating_sub(self.start)
    }

    /// Whether it holds no unit.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The units, in order.
    pub fn iter(self) -> std::ops::Range<u32> {
        self.start..self.end
    }
}

/// Units in all `ranges`.
#[must_use]
pub fn total_units(ranges: &[UnitRange]) -> u32 {
    ranges.iter().fold(0, |sum, range| sum.saturating_add(range.len()))
}

/// A set of unit indexes below `len`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawBitmap", into = "RawBitmap")]
pub struct Bitmap {
    len: u32,
    words: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
struct RawBitmap {
    len: u32,
    words: Vec<u64>,
}

impl TryFrom<RawBitmap> for Bitmap {
    type Error = &'static str;

    fn try_from(raw: RawBitmap) -> Result<Self, Self::Error> {
        let fits = raw.words.len() == (raw.len as usize).div_ceil(64);
        let tail = raw.len % 64;
        let clean = tail == 0 || raw.words.last().is_none_or(|word| word >> tail == 0);
        if fits && clean {
            Ok(Self { len: raw.len, words: raw.words })
        } else {
            Err("bitmap words do not fit its length")
        }
    }
}

impl From<Bitmap> for RawBitmap {
    fn from(bitmap: Bitmap) -> RawBitmap {
        RawBitmap { len: bitmap.len, words: bitmap.words }
    }
}

impl Bitmap {
    /// No unit of `len`.
    #[must_use]
    pub fn empty(len: u32) -> Self {
        Self { len, words: vec![0; (len as usize).div_ceil(64)] }
    }

    /// Every unit of `len`.
    #[must_use]
    pub fn full(len: u32) -> Self {
        let mut bitmap = Self::empty(len);
        for unit in 0..len {
            bitmap.set(unit, true);
        }
        bitmap
    }

    /// How many units there could be.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether no unit is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Whether every unit is in the set.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.count() == self.len
    }

    /// Units in the set.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether `unit` is in the set; false beyond the length.
    #[must_use]
    pub fn get(&self, unit: u32) -> bool {
        self.words.get(unit as usize / 64).is_some_and(|word| word >> (unit % 64) & 1 == 1)
    }

    /// Puts `unit` in or takes it out; ignored beyond the length.
    pub fn set(&mut self, unit: u32, present: bool) {
        if unit >= self.len {
            return;
        }
        if let Some(word) = self.words.get_mut(unit as usize / 64) {
            let bit = 1u64 << (unit % 64);
            if present { *word |= bit } else { *word &= !bit }
        }
    }

    /// Adds every unit of `other`.
    pub fn union_with(&mut self, other: &Bitmap) {
        for (word, more) in self.words.iter_mut().zip(&other.words) {
            *word |= more;
        }
        let tail = self.len % 64;
        if let (true, Some(last)) = (tail != 0, self.words.last_mut()) {
            *last &= (1u64 << tail) - 1;
        }
    }

    /// The units in the set, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.len).filter(|unit| self.get(*unit))
    }

    /// The set as maximal runs.
    #[must_use]
    pub fn runs(&self) -> Vec<UnitRange> {
        let mut runs: Vec<UnitRange> = Vec::new();
        for unit in self.iter() {
            match runs.last_mut() {
                Some(run) if run.end == unit => run.end += 1,
                _ => runs.push(UnitRange { start: unit, end: unit + 1 }),
            }
        }
        runs
    }
}

/// What one node physically holds of one instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInventory {
    /// The node.
    pub node: NodeId,
    /// One run of the node's process; a restart is another.
    pub incarnation: String,
    /// Whose bytes.
    pub instance: InstanceId,
    /// The highest fence the node has obeyed for this instance.
    pub fence: LogPosition,
    /// Whether the import was sealed here.
    pub sealed: bool,
    /// Whether the manifest is readable here.
    pub manifest: bool,
    /// Units readable from memory.
    pub hot: Bitmap,
    /// Units readable from disk.
    pub cold: Bitmap,
    /// Units whose copy on disk was found wrong or gone and has not been made again.
    pub cold_lost: Bitmap,
}

/// The inventories of one instance on every node that holds some of it.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GroupInventory {
    /// By node.
    pub nodes: BTreeMap<NodeId, NodeInventory>,
}

impl GroupInventory {
    /// Units with a memory replica somewhere.
    #[must_use]
    pub fn hot(&self, units: u32) -> Bitmap {
        self.gather(units, |node| &node.hot)
    }

    /// Units with a cold replica somewhere.
    #[must_use]
    pub fn cold(&self, units: u32) -> Bitmap {
        self.gather(units, |node| &node.cold)
    }

    fn gather(&self, units: u32, tier: impl Fn(&NodeInventory) -> &Bitmap) -> Bitmap {
        let mut all = Bitmap::empty(units);
        for node in self.nodes.values() {
            all.union_with(tier(node));
        }
        all
    }

    /// Whether every unit is readable somewhere.
    #[must_use]
    pub fn is_readable(&self, units: u32) -> bool {
        let mut all = self.hot(units);
        all.union_with(&self.cold(units));
        all.is_full() && self.nodes.values().any(|node| node.manifest)
    }

    /// Observed residency: all hot → HOT, all cold and none hot → COLD, nothing readable → ABSENT, else MIXED.
    #[must_use]
    pub fn residency(&self, units: u32) -> Residency {
        let (hot, cold) = (self.hot(units), self.cold(units));
        if hot.is_full() && units > 0 {
            Residency::Hot
        } else if hot.is_empty() && cold.is_full() && units > 0 {
            Residency::Cold
        } else if hot.is_empty() && cold.is_empty() {
            Residency::Absent
        } else {
            Residency::Mixed
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bitmap_gives_its_units_as_maximal_runs() {
        let mut bitmap = Bitmap::empty(130);
        for unit in [0, 1, 2, 64, 65, 129] {
            bitmap.set(unit, true);
        }
        bitmap.set(500, true);
        let runs: Vec<_> = bitmap.runs().iter().map(|run| (run.start, run.end)).collect();
        assert_eq!(runs, [(0, 3), (64, 66), (129, 130)]);
        assert_eq!(bitmap.count(), 6);
        assert!(Bitmap::full(130).is_full());
        let packed = rmp_serde::to_vec_named(&bitmap).unwrap();
        assert_eq!(rmp_serde::from_slice::<Bitmap>(&packed).unwrap(), bitmap);
    }

    #[test]
    fn a_bitmap_whose_words_do_not_fit_is_refused() {
        for text in [r#"{"len":1,"words":[2]}"#, r#"{"len":65,"words":[0]}"#, r#"{"len":0,"words":[0]}"#] {
            assert!(serde_json::from_str::<Bitmap>(text).is_err(), "{text}");
        }
    }
}

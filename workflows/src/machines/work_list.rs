//! The order in which a migration goes through a group's units: first those to be hot, then those to be cold, each in index
//! order (so in contiguous runs of the layout). It follows from the affinity index and the operation's target alone, so a
//! cursor means the same to every worker.

use ballast_schemas::{AffinityIndex, Bitmap, Digest, HotRatio, Residency};

use crate::planner::plan_hot_units;

/// Units in the order of the cursor.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WorkList {
    /// What it was made for.
    pub target: Residency,
    pub ratio: Option<HotRatio>,
    /// Units by cursor: `promote` of them to be hot, then those to be cold.
    pub units: Vec<u32>,
    pub promote: usize,
    /// Logical bytes of the units before each cursor; one longer than `units`.
    pub bytes_before: Vec<u64>,
    /// Hot share that the plan reaches, in parts per million.
    pub planned_ppm: u32,
}

impl WorkList {
    pub fn new(index: &AffinityIndex, target: Residency, ratio: Option<HotRatio>) -> Self {
        let hot = match (target, ratio) {
            (Residency::Hot, _) => Bitmap::full(index.len()),
            (Residency::Mixed, Some(ratio)) => {
                let units: Vec<(u64, &Digest)> =
                    index.units.iter().map(|unit| (unit.logical_bytes, &unit.affinity_id)).collect();
                plan_hot_units(&units, ratio.ppm())
            }
            _ => Bitmap::empty(index.len()),
        };
        let cold = (0..index.len()).filter(|unit| !hot.get(*unit));
        let units: Vec<u32> = hot.iter().chain(cold).collect();
        let mut sum = 0u64;
        let mut bytes_before = vec![0];
        for unit in &units {
            sum = sum.saturating_add(logical_bytes(index, *unit));
            bytes_before.push(sum);
        }
        let promote = usize::try_from(hot.count()).unwrap_or(usize::MAX);
        Self { target, ratio, units, promote, bytes_before, planned_ppm: hot_ppm(index, &hot) }
    }

    pub fn is_for(&self, target: Residency, ratio: Option<HotRatio>) -> bool {
        self.target == target && self.ratio == ratio
    }

    /// Logical bytes of all units.
    pub fn total_bytes(&self) -> u64 {
        self.bytes_before.last().copied().unwrap_or_default()
    }
}

pub(super) fn logical_bytes(index: &AffinityIndex, unit: u32) -> u64 {
    let unit = usize::try_from(unit).ok().and_then(|unit| index.units.get(unit));
    unit.map_or(0, |unit| unit.logical_bytes)
}

/// Share of the logical bytes that the units of `hot` have, in parts per million. A group without bytes goes by units.
pub(crate) fn hot_ppm(index: &AffinityIndex, hot: &Bitmap) -> u32 {
    let sum = |units: &mut dyn Iterator<Item = u32>| {
        units.fold(0u128, |sum, unit| sum.saturating_add(logical_bytes(index, unit).into()))
    };
    let total = sum(&mut (0..index.len()));
    let (part, whole) = match total {
        0 => (u128::from(hot.count()), u128::from(index.len())),
        total => (sum(&mut hot.iter()), total),
    };
    let ppm = part.saturating_mul(1_000_000).checked_div(whole).unwrap_or_default();
    u32::try_from(ppm).unwrap_or(1_000_000)
}

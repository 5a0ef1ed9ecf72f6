//! The residency planner for MIXED: which whole affinity units stay hot (RFC, Preferred Residency).
//!
//! Hot bytes as close to the asked share as whole units allow; ties to more hot bytes, then to units of lower id. The set
//! chosen does not depend on the order of the input. Exact up to [`EXACT_UNITS_MAX`] units, greedy with bounded swaps beyond.
//! A group of two or more units always keeps some hot and some cold: that is what MIXED means.

use std::cmp::{Ordering, Reverse};

use ballast_schemas::{Bitmap, Digest};

/// Up to this many units every split is considered.
const EXACT_UNITS_MAX: usize = 24;
/// Improvements by a swap that the greedy plan is given.
const SWAPS_MAX: u32 = 4;
const PPM: u128 = 1_000_000;

/// The units to keep hot, by index into `units` (logical bytes and id of each), so that their share of all bytes comes
/// nearest to `hot_ppm` parts per million.
#[must_use]
pub fn plan_hot_units(units: &[(u64, &Digest)], hot_ppm: u32) -> Bitmap {
    let mut hot = Bitmap::empty(u32::try_from(units.len()).unwrap_or(u32::MAX));
    // By id: from here on the input's order plays no part.
    let mut order: Vec<usize> = (0..units.len()).collect();
    order.sort_by_key(|at| (units.get(*at).map(|unit| unit.1), *at));
    let bytes: Vec<u64> = order.iter().filter_map(|at| units.get(*at)).map(|unit| unit.0).collect();
    let goal = Goal::of(&bytes, hot_ppm);
    let chosen = match bytes.len() {
        0 => Vec::new(),
        1 => vec![goal.is_nearer(goal.total, 0)],
        n if n <= EXACT_UNITS_MAX => exact(&bytes, &goal),
        _ => greedy(&bytes, &goal),
    };
    for (at, chosen) in order.iter().zip(chosen) {
        hot.set(u32::try_from(*at).unwrap_or(u32::MAX), chosen);
    }
    hot
}

/// Which sum of hot bytes is wanted.
struct Goal {
    total: u128,
    /// Wanted hot bytes times a million.
    wanted: u128,
}

impl Goal {
    fn of(bytes: &[u64], hot_ppm: u32) -> Self {
        let total = bytes.iter().fold(0u128, |sum, bytes| sum.saturating_add((*bytes).into()));
        Self { total, wanted: total.saturating_mul(hot_ppm.clamp(1, 999_999).into()) }
    }

    fn distance(&self, hot: u128) -> u128 {
        hot.saturating_mul(PPM).abs_diff(self.wanted)
    }

    /// Nearer to the goal, or as near with more hot bytes.
    fn order(&self, a: u128, b: u128) -> Ordering {
        self.distance(a).cmp(&self.distance(b)).then(b.cmp(&a))
    }

    fn is_nearer(&self, a: u128, b: u128) -> bool {
        self.order(a, b) == Ordering::Less
    }

    fn is_beyond(&self, hot: u128) -> bool {
        hot.saturating_mul(PPM) > self.wanted
    }
}

/// A sum that some units of one half give, with the best two sets that give it (lower ids are higher bits).
struct Sum {
    bytes: u128,
    best: u32,
    second: Option<u32>,
}

/// Every sum of a half's units, ascending.
fn sums(bytes: &[u64]) -> Vec<Sum> {
    // The first unit takes the highest bit, so that the greater mask is the one with lower ids.
    let mut all: Vec<(u128, u32)> = vec![(0, 0)];
    for (place, bytes) in bytes.iter().rev().enumerate() {
        let bit = 1u32.checked_shl(u32::try_from(place).unwrap_or(u32::MAX)).unwrap_or_default();
        let with: Vec<_> = all.iter().map(|(sum, mask)| (sum.saturating_add((*bytes).into()), mask | bit)).collect();
        all.extend(with);
    }
    all.sort_unstable_by_key(|(sum, mask)| (*sum, Reverse(*mask)));
    let mut sums: Vec<Sum> = Vec::new();
    for (bytes, mask) in all {
        match sums.last_mut() {
            Some(last) if last.bytes == bytes => last.second = last.second.or(Some(mask)),
            _ => sums.push(Sum { bytes, best: mask, second: None }),
        }
    }
    sums
}

/// The best of all splits, from the sums of two halves.
fn exact(bytes: &[u64], goal: &Goal) -> Vec<bool> {
    let (left, right) = bytes.split_at(bytes.len() / 2);
    let (left_sums, right_sums) = (sums(left), sums(right));
    let full = |half: &[u64]| {
        1u32.checked_shl(u32::try_from(half.len()).unwrap_or(u32::MAX)).map_or(u32::MAX, |bit| bit.saturating_sub(1))
    };
    let (left_full, right_full) = (full(left), full(right));
    let mut best: Option<(u128, u32, u32)> = None;
    for l in &left_sums {
        let split = right_sums.partition_point(|r| !goal.is_beyond(l.bytes.saturating_add(r.bytes)));
        // One more on each side: the nearest may be the split without a hot or without a cold unit, which is none.
        let window =
            right_sums.get(split.saturating_sub(2)..right_sums.len().min(split.saturating_add(2))).unwrap_or_default();
        for r in window {
            let hot = l.bytes.saturating_add(r.bytes);
            for left_mask in std::iter::once(l.best).chain(l.second) {
                for right_mask in std::iter::once(r.best).chain(r.second) {
                    let one_sided =
                        (left_mask, right_mask) == (0, 0) || (left_mask, right_mask) == (left_full, right_full);
                    let better = best.is_none_or(|(best_hot, best_left, best_right)| {
                        goal.order(hot, best_hot).then((best_left, best_right).cmp(&(left_mask, right_mask)))
                            == Ordering::Less
                    });
                    if better && !one_sided {
                        best = Some((hot, left_mask, right_mask));
                    }
                }
            }
        }
    }
    let (_, left_mask, right_mask) = best.unwrap_or_default();
    let unpack = |half: &[u64], mask: u32| {
        let places = (0..u32::try_from(half.len()).unwrap_or_default()).rev();
        places.map(|place| mask.checked_shr(place).unwrap_or_default() & 1 == 1).collect::<Vec<_>>()
    };
    [unpack(left, left_mask), unpack(right, right_mask)].concat()
}

/// Largest first while they fit, then the one more that comes nearer, then swaps that do.
fn greedy(bytes: &[u64], goal: &Goal) -> Vec<bool> {
    let mut by_size: Vec<usize> = (0..bytes.len()).collect();
    by_size.sort_by_key(|at| (Reverse(bytes.get(*at).copied()), *at));
    let size = |at: usize| bytes.get(at).copied().map_or(0, u128::from);
    let mut chosen = vec![false; bytes.len()];
    let mut put = |at: usize, hot: bool| {
        if let Some(slot) = chosen.get_mut(at) {
            *slot = hot;
        }
    };
    let (mut sum, mut count) = (0u128, 0usize);
    let mut cold = Vec::new();
    let mut hot = Vec::new();
    for at in by_size {
        let with = sum.saturating_add(size(at));
        // One unit at least stays cold.
        if goal.is_beyond(with) || count.saturating_add(1) == bytes.len() {
            cold.push(at);
        } else {
            (sum, count) = (with, count.saturating_add(1));
            hot.push(at);
            put(at, true);
        }
    }
    // `cold` is by size, largest first: its last is the least that can be added.
    if let Some(least) = cold.last().copied() {
        let with = sum.saturating_add(size(least));
        if hot.is_empty() || (cold.len() > 1 && goal.is_nearer(with, sum)) {
            sum = with;
            cold.pop();
            hot.push(least);
            put(least, true);
        }
    }
    for _ in 0..SWAPS_MAX {
        let Some((out, into)) = best_swap(&hot, &cold, &size, sum, goal) else { break };
        sum = sum.saturating_sub(size(out)).saturating_add(size(into));
        put(out, false);
        put(into, true);
        hot.retain(|at| *at != out);
        cold.retain(|at| *at != into);
        hot.push(into);
        cold.push(out);
        cold.sort_by_key(|at| (Reverse(size(*at)), *at));
    }
    chosen
}

/// The exchange of one hot for one cold unit that comes nearest to the goal, if it comes nearer than `sum`.
fn best_swap(
    hot: &[usize],
    cold: &[usize],
    size: &impl Fn(usize) -> u128,
    sum: u128,
    goal: &Goal,
) -> Option<(usize, usize)> {
    let mut best: Option<(u128, usize, usize)> = None;
    for out in hot {
        let without = sum.saturating_sub(size(*out));
        // Cold units are by size, largest first: those before the split overshoot.
        let split = cold.partition_point(|into| goal.is_beyond(without.saturating_add(size(*into))));
        for into in cold.get(split.saturating_sub(1)..cold.len().min(split.saturating_add(1))).unwrap_or_default() {
            let with = without.saturating_add(size(*into));
            let better = best.is_none_or(|(best_with, best_out, best_into)| {
                goal.order(with, best_with).then((best_out, *into).cmp(&(*out, best_into))) == Ordering::Less
            });
            if better && goal.is_nearer(with, sum) {
                best = Some((with, *out, *into));
            }
        }
    }
    best.map(|(_, out, into)| (out, into))
}

#[cfg(test)]
mod tests;

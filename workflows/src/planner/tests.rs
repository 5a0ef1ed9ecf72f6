use ballast_schemas::{Bitmap, Digest};
use proptest::prelude::*;

use super::plan_hot_units;

fn ids(count: usize) -> Vec<Digest> {
    (0..count).map(|n| Digest::of(format!("unit {n}").as_bytes())).collect()
}

fn plan(bytes: &[u64], ppm: u32) -> Bitmap {
    let ids = ids(bytes.len());
    let units: Vec<(u64, &Digest)> = bytes.iter().copied().zip(&ids).collect();
    plan_hot_units(&units, ppm)
}

fn hot_bytes(bytes: &[u64], plan: &Bitmap) -> u128 {
    plan.iter().map(|unit| u128::from(bytes[unit as usize])).sum()
}

fn distance(bytes: &[u64], hot: u128, ppm: u32) -> u128 {
    let total: u128 = bytes.iter().map(|bytes| u128::from(*bytes)).sum();
    (hot * 1_000_000).abs_diff(total * u128::from(ppm))
}

/// Every split with some hot and some cold, best first by the rule in the module's documentation.
fn by_brute_force(bytes: &[u64], ppm: u32) -> Bitmap {
    let ids = ids(bytes.len());
    let mut order: Vec<usize> = (0..bytes.len()).collect();
    order.sort_by_key(|at| ids[*at]);
    let n = bytes.len() as u32;
    let best = (1..(1u32 << n) - 1)
        .min_by_key(|mask| {
            let chosen: Vec<bool> = order.iter().map(|at| mask >> at & 1 == 1).collect();
            let hot: u128 = (0..bytes.len()).filter(|at| mask >> at & 1 == 1).map(|at| u128::from(bytes[at])).sum();
            (distance(bytes, hot, ppm), std::cmp::Reverse(hot), std::cmp::Reverse(chosen))
        })
        .unwrap();
    let mut plan = Bitmap::empty(n);
    (0..n).filter(|at| best >> at & 1 == 1).for_each(|at| plan.set(at, true));
    plan
}

#[test]
fn one_unit_takes_the_nearer_side_and_a_tie_is_hot() {
    assert!(plan(&[10], 500_000).is_full());
    assert!(plan(&[10], 600_000).is_full());
    assert!(plan(&[10], 400_000).is_empty());
    assert_eq!(plan(&[], 500_000).len(), 0);
}

#[test]
fn two_units_or_more_always_keep_some_hot_and_some_cold() {
    for bytes in [vec![1, 99], vec![0, 0], vec![0, 100, 0], vec![u64::MAX; 30], vec![0; 30]] {
        for ppm in [1, 500_000, 999_999] {
            let plan = plan(&bytes, ppm);
            assert!(!plan.is_empty() && !plan.is_full(), "{bytes:?} at {ppm}");
        }
    }
}

#[test]
fn a_tie_goes_to_more_hot_bytes() {
    // 1 of 4 and 3 of 4 are as near to one half.
    assert_eq!(hot_bytes(&[1, 3], &plan(&[1, 3], 500_000)), 3);
}

#[test]
fn many_units_come_near_to_the_goal() {
    let bytes: Vec<u64> = (0..500u64).map(|n| 1_000_000 + n * n * 37 % 5_000_000).collect();
    let total: u128 = bytes.iter().map(|bytes| u128::from(*bytes)).sum();
    for ppm in [1_000, 100_000, 333_333, 500_000, 900_000] {
        let hot = hot_bytes(&bytes, &plan(&bytes, ppm));
        let off = (hot * 1_000_000 / total).abs_diff(ppm.into());
        assert!(off <= 200, "{ppm}: off by {off} ppm");
    }
}

proptest! {
    #[test]
    fn small_plans_are_exactly_the_best(bytes in prop::collection::vec(0u64..20, 2..10), ppm in 1u32..1_000_000) {
        prop_assert_eq!(plan(&bytes, ppm), by_brute_force(&bytes, ppm));
    }

    #[test]
    fn small_plans_with_large_units_are_exactly_the_best(bytes in prop::collection::vec(any::<u64>(), 2..10), ppm in 1u32..1_000_000) {
        prop_assert_eq!(plan(&bytes, ppm), by_brute_force(&bytes, ppm));
    }

    #[test]
    fn the_chosen_set_does_not_depend_on_the_order_of_the_input(
        bytes in prop::collection::vec(0u64..1000, 2..60),
        ppm in 1u32..1_000_000,
        seed in any::<u64>(),
    ) {
        let ids = ids(bytes.len());
        let units: Vec<(u64, &Digest)> = bytes.iter().copied().zip(&ids).collect();
        let mut shuffled = units.clone();
        shuffled.sort_by_key(|(_, id)| Digest::of(format!("{seed}{id}").as_bytes()));
        let chosen = |units: &[(u64, &Digest)]| {
            let mut chosen: Vec<Digest> = plan_hot_units(units, ppm).iter().map(|unit| *units[unit as usize].1).collect();
            chosen.sort();
            chosen
        };
        prop_assert_eq!(chosen(&units), chosen(&shuffled));
    }

    #[test]
    fn large_plans_are_no_worse_than_any_single_change(bytes in prop::collection::vec(1u64..1_000_000, 25..80), ppm in 1u32..1_000_000) {
        let plan = plan(&bytes, ppm);
        let hot = hot_bytes(&bytes, &plan);
        let largest = u128::from(*bytes.iter().max().unwrap());
        prop_assert!(distance(&bytes, hot, ppm) <= largest * 1_000_000, "never further off than one unit");
        prop_assert!(!plan.is_empty() && !plan.is_full());
    }
}

//! Whether boxes cover a tensor exactly: nothing left out, nothing twice. N dimensions, under a budget of comparisons.

use std::collections::BTreeMap;

/// How many pairs of boxes one manifest may ask to compare before it is refused.
pub(crate) const COMPARISONS_MAX: u64 = 50_000_000;

/// A region: first element and extent by dimension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region<'a> {
    pub(crate) offset: &'a [u64],
    pub(crate) shape: &'a [u64],
}

impl Region<'_> {
    fn is_empty(self) -> bool {
        self.shape.contains(&0)
    }

    fn volume(self) -> u128 {
        self.shape.iter().fold(1, |volume: u128, dim| volume.saturating_mul(u128::from(*dim)))
    }

    fn end(self, dim: usize) -> u64 {
        self.offset[dim].saturating_add(self.shape[dim])
    }

    fn meets(self, other: Region<'_>) -> bool {
        (0..self.shape.len()).all(|dim| self.offset[dim] < other.end(dim) && other.offset[dim] < self.end(dim))
    }
}

/// Why boxes do not cover a tensor exactly. Numbers are places in the list that was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CoverProblem {
    Outside(usize),
    Overlap(usize, usize),
    Missing(u128),
    TooMany,
}

/// Checks that `boxes` (of the tensor's rank) cover `shape` exactly. Empty boxes may lie anywhere inside.
pub(crate) fn check_cover(shape: &[u64], boxes: &[Region<'_>], comparisons: &mut u64) -> Result<(), CoverProblem> {
    let inside = |b: &Region<'_>| {
        (0..shape.len()).all(|dim| b.offset[dim].checked_add(b.shape[dim]).is_some_and(|end| end <= shape[dim]))
    };
    if let Some(outside) = boxes.iter().position(|b| !inside(b)) {
        return Err(CoverProblem::Outside(outside));
    }
    let order: Vec<usize> = (0..boxes.len()).filter(|at| !boxes[*at].is_empty()).collect();
    if order.len() > 1
        && let Some((first, second)) = find_overlap(boxes, order.clone(), comparisons)?
    {
        return Err(CoverProblem::Overlap(first.min(second), first.max(second)));
    }
    let whole = Region { offset: &[], shape };
    let total = if whole.is_empty() { 0 } else { whole.volume() };
    let covered = order.iter().fold(0_u128, |sum, at| sum.saturating_add(boxes[*at].volume()));
    if covered == total { Ok(()) } else { Err(CoverProblem::Missing(total.saturating_sub(covered))) }
}

/// Two of these (non-empty) boxes that overlap, if any do.
fn find_overlap(
    boxes: &[Region<'_>],
    mut order: Vec<usize>,
    comparisons: &mut u64,
) -> Result<Option<(usize, usize)>, CoverProblem> {
    // Dimensions in which every box is the same decide nothing. Of the others, the one with the most different
    // starts leaves the fewest boxes open at a time.
    let first = boxes[order[0]];
    let mut dims: Vec<(usize, usize)> = (0..first.shape.len())
        .filter(|&dim| {
            order
                .iter()
                .any(|at| (boxes[*at].offset[dim], boxes[*at].shape[dim]) != (first.offset[dim], first.shape[dim]))
        })
        .map(|dim| {
            let mut starts: Vec<u64> = order.iter().map(|at| boxes[*at].offset[dim]).collect();
            starts.sort_unstable();
            starts.dedup();
            (starts.len(), dim)
        })
        .collect();
    dims.sort_unstable_by(|a, b| b.cmp(a));
    let Some(&(_, sweep)) = dims.first() else { return Ok(Some((order[0], order[1]))) };
    order.sort_unstable_by_key(|at| boxes[*at].offset[sweep]);
    match dims[1..] {
        [] => Ok(order
            .windows(2)
            .find(|pair| boxes[pair[0]].end(sweep) > boxes[pair[1]].offset[sweep])
            .map(|pair| (pair[0], pair[1]))),
        [(_, across)] => Ok(sweep_plane(boxes, &order, sweep, across)),
        _ => {
            let mut open: Vec<usize> = Vec::new();
            for at in order {
                open.retain(|other| boxes[*other].end(sweep) > boxes[at].offset[sweep]);
                *comparisons += open.len() as u64;
                if *comparisons > COMPARISONS_MAX {
                    return Err(CoverProblem::TooMany);
                }
                if let Some(&other) = open.iter().find(|other| boxes[**other].meets(boxes[at])) {
                    return Ok(Some((other, at)));
                }
                open.push(at);
            }
            Ok(None)
        }
    }
}

/// Boxes that differ in two dimensions only, in order of their starts along `sweep`: those open at a time lie apart
/// across, so each new one has only its neighbours to meet.
fn sweep_plane(boxes: &[Region<'_>], order: &[usize], sweep: usize, across: usize) -> Option<(usize, usize)> {
    let mut closing = order.to_vec();
    closing.sort_unstable_by_key(|at| boxes[*at].end(sweep));
    let mut closing = closing.into_iter().peekable();
    let mut open: BTreeMap<u64, usize> = BTreeMap::new();
    for &at in order {
        while let Some(gone) = closing.next_if(|other| boxes[*other].end(sweep) <= boxes[at].offset[sweep]) {
            open.remove(&boxes[gone].offset[across]);
        }
        let start = boxes[at].offset[across];
        let below = open.range(..=start).next_back().filter(|(_, other)| boxes[**other].end(across) > start);
        let above = open.range(start..).next().filter(|(other, _)| **other < boxes[at].end(across));
        if let Some((_, &other)) = below.or(above) {
            return Some((other, at));
        }
        open.insert(start, at);
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Owned = (Vec<u64>, Vec<u64>);

    fn check(shape: &[u64], boxes: &[Owned]) -> Result<(), CoverProblem> {
        let boxes: Vec<_> = boxes.iter().map(|(offset, shape)| Region { offset, shape }).collect();
        check_cover(shape, &boxes, &mut 0)
    }

    #[test]
    fn a_scalar_is_covered_by_one_box_and_no_more() {
        assert_eq!(check(&[], &[(vec![], vec![])]), Ok(()));
        assert_eq!(check(&[], &[]), Err(CoverProblem::Missing(1)));
        assert!(matches!(check(&[], &[(vec![], vec![]), (vec![], vec![])]), Err(CoverProblem::Overlap(0, 1))));
    }

    #[test]
    fn an_empty_tensor_is_covered_by_nothing_or_by_empty_boxes() {
        assert_eq!(check(&[3, 0], &[]), Ok(()));
        assert_eq!(check(&[3, 0], &[(vec![0, 0], vec![3, 0])]), Ok(()));
        assert_eq!(check(&[6], &[(vec![0], vec![6]), (vec![6], vec![0])]), Ok(()));
        assert_eq!(check(&[3, 0], &[(vec![0, 0], vec![3, 1])]), Err(CoverProblem::Outside(0)));
    }

    #[test]
    fn an_offset_that_overflows_is_outside() {
        assert_eq!(check(&[4], &[(vec![u64::MAX], vec![2])]), Err(CoverProblem::Outside(0)));
    }

    #[test]
    fn a_grid_of_many_boxes_is_checked_without_comparing_pairs() {
        let boxes: Vec<Owned> = (0..250_000).map(|n| (vec![n / 500, 7, n % 500], vec![1, 2, 1])).collect();
        let boxes: Vec<_> = boxes.iter().map(|(offset, shape)| Region { offset, shape }).collect();
        let mut comparisons = 0;
        assert_eq!(check_cover(&[500, 9, 500], &boxes, &mut comparisons), Err(CoverProblem::Missing(1_750_000)));
        assert_eq!(comparisons, 0);
    }

    /// Whether any element lies in two boxes, element by element.
    fn overlaps(boxes: &[Owned]) -> bool {
        let mut seen = std::collections::HashSet::new();
        boxes.iter().any(|(offset, shape)| {
            let count: u64 = shape.iter().product();
            (0..count).any(|mut n| {
                let place: Vec<u64> = offset
                    .iter()
                    .zip(shape)
                    .map(|(start, extent)| {
                        let at = start + n % extent;
                        n /= extent;
                        at
                    })
                    .collect();
                !seen.insert(place)
            })
        })
    }

    fn tiling() -> impl Strategy<Value = (Vec<u64>, Vec<Owned>)> {
        prop::collection::vec(prop::collection::vec(1_u64..4, 1..4), 1..4).prop_map(|parts| {
            let shape: Vec<u64> = parts.iter().map(|lengths| lengths.iter().sum()).collect();
            let mut boxes: Vec<Owned> = vec![(vec![], vec![])];
            for lengths in &parts {
                let mut grown = Vec::new();
                for (offset, extent) in &boxes {
                    let mut start = 0;
                    for length in lengths {
                        grown.push(([offset.as_slice(), &[start]].concat(), [extent.as_slice(), &[*length]].concat()));
                        start += length;
                    }
                }
                boxes = grown;
            }
            (shape, boxes)
        })
    }

    proptest! {
        #[test]
        fn boxes_overlap_exactly_when_an_element_lies_in_two_of_them(
            boxes in (1_usize..4).prop_flat_map(|rank| prop::collection::vec(
                (prop::collection::vec(0_u64..5, rank), prop::collection::vec(0_u64..4, rank)), 0..9,
            )),
        ) {
            let shape = vec![8; boxes.first().map_or(1, |first| first.0.len())];
            let found = matches!(check(&shape, &boxes), Err(CoverProblem::Overlap(..)));
            prop_assert_eq!(found, overlaps(&boxes));
        }

        #[test]
        fn a_tiling_covers_and_no_longer_does_when_a_box_is_dropped_doubled_or_moved(
            (shape, boxes) in tiling(), pick in any::<prop::sample::Index>(), dim in any::<prop::sample::Index>(),
        ) {
            prop_assert_eq!(check(&shape, &boxes), Ok(()));
            let at = pick.index(boxes.len());
            let mut dropped = boxes.clone();
            let gone = dropped.remove(at);
            let volume = gone.1.iter().map(|n| u128::from(*n)).product();
            prop_assert_eq!(check(&shape, &dropped), Err(CoverProblem::Missing(volume)));
            let mut doubled = boxes.clone();
            doubled.push(gone);
            prop_assert!(matches!(check(&shape, &doubled), Err(CoverProblem::Overlap(..))));
            let mut moved = boxes.clone();
            moved[at].0[dim.index(shape.len())] += 1;
            prop_assert!(check(&shape, &moved).is_err());
        }
    }
}

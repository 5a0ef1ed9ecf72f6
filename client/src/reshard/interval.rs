//! Which source boxes may meet a target box: an interval tree over the dimension that tells the sources best apart.

use super::region::Block;

/// Fewer sources than this are looked through one by one.
const SCAN_MAX: usize = 8;

/// The sources of one tensor by their stretch of one dimension. An implicit balanced tree: the middle of a range is its
/// root, and knows the furthest end below it.
#[derive(Debug, Default)]
pub(super) struct IntervalIndex {
    /// `None`: everything is a candidate.
    dim: Option<usize>,
    nodes: Vec<Node>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    start: u64,
    end: u64,
    furthest: u64,
    source: u32,
}

impl IntervalIndex {
    /// Indexes these sources again; memory is reused.
    pub(super) fn build<'a>(&mut self, count: usize, block: impl Fn(usize) -> Block<'a>) {
        self.nodes.clear();
        self.dim = None;
        let rank = if count == 0 { 0 } else { block(0).shape.len() };
        if count >= SCAN_MAX {
            let distinct = |dim: usize| {
                let mut stretches: Vec<(u64, u64)> =
                    (0..count).map(|at| (block(at).offset[dim], block(at).end(dim))).collect();
                stretches.sort_unstable();
                stretches.dedup();
                stretches.len()
            };
            self.dim = (0..rank).max_by_key(|dim| (distinct(*dim), std::cmp::Reverse(*dim)));
        }
        let Some(dim) = self.dim else {
            self.nodes.extend((0..count).map(|at| Node { start: 0, end: 0, furthest: 0, source: at as u32 }));
            return;
        };
        self.nodes.extend((0..count).map(|at| {
            let (start, end) = (block(at).offset[dim], block(at).end(dim));
            Node { start, end, furthest: end, source: at as u32 }
        }));
        self.nodes.sort_unstable_by_key(|node| (node.start, node.source));
        let last = self.nodes.len();
        self.set_furthest(0, last);
    }

    fn set_furthest(&mut self, from: usize, to: usize) -> u64 {
        if from >= to {
            return 0;
        }
        let middle = from.midpoint(to);
        let furthest =
            self.set_furthest(from, middle).max(self.set_furthest(middle + 1, to)).max(self.nodes[middle].end);
        self.nodes[middle].furthest = furthest;
        furthest
    }

    /// Appends the sources whose stretch meets the target's, in no certain order.
    pub(super) fn candidates(&self, target: Block<'_>, found: &mut Vec<u32>) {
        match self.dim {
            None => found.extend(self.nodes.iter().map(|node| node.source)),
            Some(dim) => self.collect(0, self.nodes.len(), target.offset[dim], target.end(dim), found),
        }
    }

    fn collect(&self, from: usize, to: usize, start: u64, end: u64, found: &mut Vec<u32>) {
        if from >= to {
            return;
        }
        let middle = from.midpoint(to);
        let node = self.nodes[middle];
        if node.furthest <= start {
            return;
        }
        self.collect(from, middle, start, end, found);
        if node.start < end {
            if node.end > start {
                found.push(node.source);
            }
            self.collect(middle + 1, to, start, end, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_source_that_meets_the_target_is_a_candidate_and_few_others(
            stretches in prop::collection::vec((0_u64..60, 0_u64..9), 0..40), start in 0_u64..60, length in 0_u64..9,
        ) {
            let boxes: Vec<_> = stretches.iter().map(|(start, length)| ([*start], [*length])).collect();
            let mut index = IntervalIndex::default();
            index.build(boxes.len(), |at| Block { offset: &boxes[at].0, shape: &boxes[at].1 });
            let mut found = Vec::new();
            index.candidates(Block { offset: &[start], shape: &[length] }, &mut found);
            found.sort_unstable();
            let meets = |at: &u32| {
                let (other, extent) = stretches[*at as usize];
                boxes.len() < SCAN_MAX || (other < start + length && other + extent > start)
            };
            let expected: Vec<u32> = (0..boxes.len() as u32).filter(meets).collect();
            prop_assert_eq!(found, expected);
        }
    }
}

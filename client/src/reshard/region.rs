//! The overlap of one stored box with one wanted box, as a strided copy: where it begins on both sides, how many bytes
//! are contiguous on both, and the loops around them.

/// A box of a tensor: first element and extent, by dimension.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block<'a> {
    pub(super) offset: &'a [u64],
    pub(super) shape: &'a [u64],
}

impl Block<'_> {
    pub(super) fn end(self, dim: usize) -> u64 {
        // Fragments were checked to lie inside their tensor.
        self.offset[dim] + self.shape[dim]
    }
}

/// One loop of a strided copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// How often it runs; at least 2.
    pub count: u64,
    /// Bytes that the source advances each time.
    pub source_stride: u64,
    /// Bytes that the target advances each time.
    pub target_stride: u64,
}

/// Bytes of one source fragment that go into one target fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Index of the tensor in the plan.
    pub tensor: u32,
    /// Index of the source fragment in the plan.
    pub source: u32,
    /// Index of the target fragment in the plan.
    pub target: u32,
    /// The overlap in the tensor: its first element by dimension, then its extent by dimension.
    overlap: Box<[u64]>,
    /// First byte inside the source fragment.
    pub source_offset: u64,
    /// First byte inside the target fragment.
    pub target_offset: u64,
    /// Bytes that are contiguous on both sides.
    pub inner_bytes: u64,
    /// The loops around them, outermost first; none when the whole region is contiguous. Neighbouring loops that could
    /// be one are one, so equal regions are written equally.
    pub loops: Box<[Loop]>,
}

impl Region {
    /// The overlap of two boxes of one tensor; `None` when they share no element.
    pub(super) fn between(source: Block<'_>, target: Block<'_>, itemsize: u64) -> Option<Self> {
        let rank = target.shape.len();
        let start = |dim: usize| source.offset[dim].max(target.offset[dim]);
        let end = |dim: usize| source.end(dim).min(target.end(dim));
        if (0..rank).any(|dim| start(dim) >= end(dim)) {
            return None;
        }
        let overlap: Box<[u64]> = (0..rank).map(start).chain((0..rank).map(|dim| end(dim) - start(dim))).collect();
        let (mut source_offset, mut target_offset, mut inner_bytes) = (0, 0, itemsize);
        // Bytes from one element to the next in the dimension at hand. They stay within the fragments' sizes, which fit.
        let (mut source_stride, mut target_stride) = (itemsize, itemsize);
        let mut loops: Vec<Loop> = Vec::new();
        for dim in (0..rank).rev() {
            let (first, count) = (overlap[dim], overlap[rank + dim]);
            source_offset += (first - source.offset[dim]) * source_stride;
            target_offset += (first - target.offset[dim]) * target_stride;
            if count > 1 {
                match loops.last_mut() {
                    None if source_stride == inner_bytes && target_stride == inner_bytes => inner_bytes *= count,
                    Some(last)
                        if last.source_stride * last.count == source_stride
                            && last.target_stride * last.count == target_stride =>
                    {
                        last.count *= count;
                    }
                    _ => loops.push(Loop { count, source_stride, target_stride }),
                }
            }
            source_stride *= source.shape[dim];
            target_stride *= target.shape[dim];
        }
        loops.reverse();
        let loops = loops.into_boxed_slice();
        Some(Self { tensor: 0, source: 0, target: 0, overlap, source_offset, target_offset, inner_bytes, loops })
    }

    /// First element of the overlap in the tensor, by dimension.
    #[must_use]
    pub fn overlap_offset(&self) -> &[u64] {
        &self.overlap[..self.overlap.len() / 2]
    }

    /// Extent of the overlap, by dimension.
    #[must_use]
    pub fn overlap_shape(&self) -> &[u64] {
        &self.overlap[self.overlap.len() / 2..]
    }

    /// Contiguous runs that the region consists of.
    #[must_use]
    pub fn rows(&self) -> u64 {
        rows(&self.loops)
    }

    /// Bytes that the region copies.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.inner_bytes.saturating_mul(self.rows())
    }

    /// One past the last byte that is read, inside the source fragment.
    #[must_use]
    pub fn source_end(&self) -> u64 {
        self.source_offset.saturating_add(source_span(self.inner_bytes, &self.loops))
    }

    /// One past the last byte that is written, inside the target fragment.
    #[must_use]
    pub fn target_end(&self) -> u64 {
        let step =
            |end: u64, next: &Loop| end.saturating_add(next.count.saturating_sub(1).saturating_mul(next.target_stride));
        self.loops.iter().fold(self.target_offset.saturating_add(self.inner_bytes), step)
    }
}

// Whether a copy stays inside its buffers is judged by these, so they saturate instead of wrapping.

/// How often the innermost of these loops runs in all.
pub(super) fn rows(loops: &[Loop]) -> u64 {
    loops.iter().fold(1, |rows: u64, next| rows.saturating_mul(next.count))
}

/// Bytes from the first that is read to the last, holes included.
pub(super) fn source_span(inner_bytes: u64, loops: &[Loop]) -> u64 {
    let step =
        |span: u64, next: &Loop| span.saturating_add(next.count.saturating_sub(1).saturating_mul(next.source_stride));
    loops.iter().fold(inner_bytes, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn between(source: (&[u64], &[u64]), target: (&[u64], &[u64]), itemsize: u64) -> Option<Region> {
        let block = |(offset, shape)| Block { offset, shape };
        Region::between(block(source), block(target), itemsize)
    }

    #[test]
    fn a_split_of_the_outermost_dimension_is_one_run() {
        let region = between((&[4, 0, 0], &[4, 3, 5]), (&[6, 0, 0], &[1, 3, 5]), 2).unwrap();
        assert_eq!((region.source_offset, region.target_offset, region.inner_bytes), (60, 0, 30));
        assert!(region.loops.is_empty());
        assert_eq!((region.overlap_offset(), region.overlap_shape()), (&[6, 0, 0][..], &[1, 3, 5][..]));
        assert_eq!((region.source_end(), region.target_end()), (90, 30));
    }

    #[test]
    fn loops_that_step_over_each_other_without_a_gap_are_one() {
        // Dimensions 0 and 1 are whole on both sides, dimension 2 is split on the target's.
        let region = between((&[0, 0, 0], &[4, 3, 8]), (&[0, 0, 2], &[4, 3, 2]), 4).unwrap();
        assert_eq!(region.loops[..], [Loop { count: 12, source_stride: 32, target_stride: 8 }]);
        assert_eq!((region.source_offset, region.inner_bytes, region.bytes()), (8, 8, 96));
        assert_eq!((region.source_end(), region.target_end()), (8 + 11 * 32 + 8, 96));
    }

    #[test]
    fn crossing_splits_keep_their_loops_apart() {
        let region = between((&[0, 2, 0], &[4, 2, 8]), (&[0, 0, 4], &[4, 4, 4]), 1).unwrap();
        let loops = [
            Loop { count: 4, source_stride: 16, target_stride: 16 },
            Loop { count: 2, source_stride: 8, target_stride: 4 },
        ];
        assert_eq!(
            (&region.loops[..], region.source_offset, region.target_offset, region.inner_bytes),
            (&loops[..], 4, 8, 4)
        );
    }

    #[test]
    fn a_scalar_is_one_element_and_boxes_apart_share_nothing() {
        assert_eq!(between((&[], &[]), (&[], &[]), 8).unwrap().bytes(), 8);
        assert!(between((&[0], &[2]), (&[2], &[2]), 1).is_none());
        assert!(between((&[0], &[2]), (&[1], &[0]), 1).is_none());
    }
}

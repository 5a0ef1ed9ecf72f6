//! Room for the bytes of an import, taken when the first byte of a block is written. What is written is not known here.

use std::io;
use std::ops::Range;
use std::sync::Mutex;

use super::lock;
use crate::layout::GroupLayout;
use crate::segment::Segment;

/// Large enough for whole huge pages, small enough that what the kernel has just zeroed is still in a core's cache when
/// it is overwritten.
const BLOCK_BYTES: u64 = 4 << 20;

/// Which blocks of the segments have their room.
#[derive(Debug, Default)]
pub(super) struct Room {
    segments: Vec<Blocks>,
}

#[derive(Debug)]
struct Blocks {
    segment_bytes: u64,
    /// Whether the room of each was taken. Each has a lock of its own: writers take room side by side.
    taken: Vec<Mutex<bool>>,
}

impl Room {
    pub(super) fn new(layout: &GroupLayout) -> Self {
        let blocks = |segment| {
            let segment_bytes = layout.segment_bytes(segment);
            Blocks {
                segment_bytes,
                taken: (0..segment_bytes.div_ceil(BLOCK_BYTES)).map(|_| Mutex::default()).collect(),
            }
        };
        Self { segments: (0..layout.segment_count()).map(blocks).collect() }
    }

    /// Notes that a segment has room from its start up to here.
    pub(super) fn note(&self, index: u32, end: u64) {
        let Some(blocks) = self.segments.get(index as usize) else { return };
        let whole = if end == blocks.segment_bytes { blocks.taken.len() } else { (end / BLOCK_BYTES) as usize };
        blocks.taken.iter().take(whole).for_each(|taken| *lock(taken) = true);
    }

    /// Takes room for a range of a segment, where it was not taken before.
    pub(super) fn take(&self, index: u32, segment: &Segment, range: &Range<u64>) -> io::Result<()> {
        let Some(blocks) = self.segments.get(index as usize) else { return Ok(()) };
        let first = range.start / BLOCK_BYTES;
        let end = range.end.div_ceil(BLOCK_BYTES);
        for (block, taken) in (0..end).zip(&blocks.taken).skip(first as usize) {
            let mut taken = lock(taken);
            if !*taken {
                let start = block * BLOCK_BYTES;
                segment.take_room(&(start..blocks.segment_bytes.min(start + BLOCK_BYTES)))?;
                *taken = true;
            }
        }
        Ok(())
    }
}

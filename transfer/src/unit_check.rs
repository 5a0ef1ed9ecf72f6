//! Units checked against their checksums while a segment's bytes come by, in pieces of any size.

use crate::checksum::RunningChecksum;
use crate::error::Mismatch;
use crate::layout::{GroupLayout, Run};

/// Checks units against their checksums while their bytes come by in order, padding included.
pub(crate) struct UnitCheck<'a> {
    units: std::iter::Peekable<std::vec::IntoIter<(u32, u64, u64)>>,
    checksum_of: &'a dyn Fn(u32) -> u64,
    running: RunningChecksum,
    /// Padding bytes of the last unit still to come.
    padding: u64,
    mismatches: Vec<Mismatch>,
}

impl<'a> UnitCheck<'a> {
    pub(crate) fn new(layout: &GroupLayout, runs: &[Run], checksum_of: &'a dyn Fn(u32) -> u64) -> Self {
        let units: Vec<_> = runs
            .iter()
            .flat_map(|run| run.units.iter())
            .filter_map(|&unit| layout.extent(unit).map(|extent| (unit, extent.bytes, extent.padded_bytes())))
            .collect();
        Self {
            units: units.into_iter().peekable(),
            checksum_of,
            running: RunningChecksum::default(),
            padding: 0,
            mismatches: Vec::new(),
        }
    }

    pub(crate) fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.padding > 0 {
                let skip = (bytes.len() as u64).min(self.padding);
                self.padding -= skip;
                bytes = &bytes[skip as usize..];
                continue;
            }
            let Some(&(_, size, _)) = self.units.peek() else { return };
            let take = (size - self.running.bytes()).min(bytes.len() as u64) as usize;
            self.running.update(&bytes[..take]);
            bytes = &bytes[take..];
            if self.running.bytes() == size {
                self.close();
            }
        }
    }

    /// Ends the unit at the front.
    fn close(&mut self) {
        let Some((unit, size, padded)) = self.units.next() else { return };
        let (expected, found) = ((self.checksum_of)(unit), self.running.value());
        if found != expected || self.running.bytes() != size {
            self.mismatches.push(Mismatch { unit, expected, found });
        }
        self.running = RunningChecksum::default();
        self.padding = padded - size;
    }

    pub(crate) fn finish(mut self) -> Vec<Mismatch> {
        // Units of no bytes at the end, and any whose bytes did not come.
        while self.units.peek().is_some() {
            self.close();
        }
        self.mismatches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::checksum;

    #[test]
    fn units_are_checked_wherever_the_chunks_break() {
        let sizes = [10, 0, 4096, 5000, 0];
        let layout = GroupLayout::new(&sizes).unwrap();
        let mut segment = vec![0; layout.segment_bytes(0) as usize];
        for (unit, extent) in layout.extents().iter().enumerate() {
            segment[extent.offset as usize..(extent.offset + extent.bytes) as usize].fill(unit as u8 + 1);
        }
        let sums: Vec<u64> =
            (0..5_u32).map(|unit| checksum(&vec![unit as u8 + 1; sizes[unit as usize] as usize])).collect();
        let checksum_of = |unit: u32| sums[unit as usize];
        let runs = layout.runs(0..5);
        for chunk_bytes in [1, 7, 4096, 5001, 100_000] {
            let mut check = UnitCheck::new(&layout, &runs, &checksum_of);
            segment.chunks(chunk_bytes).for_each(|chunk| check.take(chunk));
            assert_eq!(check.finish(), [], "chunks of {chunk_bytes}");
        }
        segment[4096] ^= 1;
        let mut check = UnitCheck::new(&layout, &runs, &checksum_of);
        check.take(&segment);
        let wrong: Vec<u32> = check.finish().iter().map(|mismatch| mismatch.unit).collect();
        assert_eq!(wrong, [2]);
        let mut check = UnitCheck::new(&layout, &runs, &checksum_of);
        check.take(&segment[..4096]);
        let wrong: Vec<u32> = check.finish().iter().map(|mismatch| mismatch.unit).collect();
        assert_eq!(wrong, [2, 3], "bytes that did not come are a mismatch");
    }
}

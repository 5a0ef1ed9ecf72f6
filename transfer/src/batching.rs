//! Uploads cut into requests: many small ranges in one, large ones in several, so that neither messages nor memory
//! grow with the number of units or their size.

use std::fs::File;
use std::os::unix::fs::FileExt;

use ballast_schemas::frame::{ByteRange, RANGES_MAX, SourceRange};

/// Cuts a range into pieces of at most `bytes`.
fn split(range: &SourceRange, bytes: u64) -> impl Iterator<Item = SourceRange> + use<> {
    let range = *range;
    (0..range.bytes).step_by(bytes as usize).map(move |done| SourceRange {
        source_offset: range.source_offset + done,
        unit: range.unit,
        unit_offset: range.unit_offset + done,
        bytes: bytes.min(range.bytes - done),
    })
}

/// Cuts ranges into requests of at most `bytes_max` bytes and [`RANGES_MAX`] ranges.
pub(crate) fn batches(ranges: &[SourceRange], bytes_max: u64) -> impl Iterator<Item = Vec<SourceRange>> {
    let mut pieces = ranges.iter().flat_map(move |range| split(range, bytes_max)).peekable();
    std::iter::from_fn(move || {
        let mut batch = Vec::new();
        let mut bytes = 0;
        while let Some(piece) = pieces.next_if(|piece| bytes + piece.bytes <= bytes_max && batch.len() < RANGES_MAX) {
            bytes += piece.bytes;
            batch.push(piece);
        }
        (!batch.is_empty()).then_some(batch)
    })
}

/// Where the bytes of a batch go.
pub(crate) fn targets(batch: &[SourceRange]) -> Vec<ByteRange> {
    let target = |piece: &SourceRange| ByteRange { unit: piece.unit, offset: piece.unit_offset, bytes: piece.bytes };
    batch.iter().map(target).collect()
}

/// The bytes of a batch, one after the other; an error comes with its place in the source.
pub(crate) fn read_batch(source: &File, batch: &[SourceRange]) -> Result<Vec<u8>, (u64, std::io::Error)> {
    let bytes: u64 = batch.iter().map(|piece| piece.bytes).sum();
    let mut buffer = vec![0; bytes as usize];
    let mut rest = buffer.as_mut_slice();
    let mut pieces = batch.iter().peekable();
    while let Some(first) = pieces.next() {
        // Pieces that lie next to each other in the source are read at once.
        let mut length = first.bytes;
        while let Some(next) =
            pieces.next_if(|next| first.source_offset.checked_add(length) == Some(next.source_offset))
        {
            length += next.bytes;
        }
        let (target, later) = rest.split_at_mut(length as usize);
        source.read_exact_at(target, first.source_offset).map_err(|error| (first.source_offset, error))?;
        rest = later;
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 1000;

    #[test]
    fn uploads_are_cut_into_requests_that_are_answered_before_long() {
        let range = |unit, bytes| SourceRange { source_offset: 10, unit, unit_offset: 0, bytes };
        let ranges = [range(0, MAX * 2 + 1), range(1, 5), range(2, MAX)];
        let cut: Vec<_> = batches(&ranges, MAX).collect();
        let sizes: Vec<Vec<u64>> = cut.iter().map(|batch| batch.iter().map(|r| r.bytes).collect()).collect();
        assert_eq!(sizes, [vec![MAX], vec![MAX], vec![1, 5], vec![MAX]]);
        assert_eq!(cut[2][0].source_offset, 10 + MAX * 2);
        assert_eq!(batches(&[], 1).count(), 0);
        let many = vec![range(0, 1); RANGES_MAX + 1];
        assert_eq!(batches(&many, u64::MAX).map(|batch| batch.len()).collect::<Vec<_>>(), [RANGES_MAX, 1]);
    }
}

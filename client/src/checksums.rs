//! The checksum of every unit of a source, computed here from the source itself: what the node finds in its memory is
//! compared with this, so that no byte is lost on the way unnoticed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use ballast_schemas::{BallastError, Digest};
use ballast_transfer::{RunningChecksum, checksum};

use crate::progress::Meter;
use crate::source::{Data, SourceFile, UnitSource};

/// Bytes read at a time: small enough to be checksummed while they are in a core's cache.
const PIECE_BYTES: u64 = 1 << 20;

/// Sets its flag when dropped: work on another thread stops when the one who waits for it is gone.
#[derive(Debug, Default)]
pub(crate) struct StopOnDrop(pub(crate) std::sync::Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Checksum of `bytes` bytes of an open file from `offset` on. Blocks on the disk.
pub(crate) fn of_file(
    file: &File,
    source: &SourceFile,
    offset: u64,
    bytes: u64,
    stop: &AtomicBool,
    meter: Option<&Meter>,
) -> Result<u64, BallastError> {
    let mut running = RunningChecksum::default();
    read_file(file, source, offset, bytes, stop, |piece| {
        running.update(piece);
        if let Some(meter) = meter {
            meter.add(piece.len() as u64);
        }
    })?;
    Ok(running.value())
}

/// BLAKE3 of the same. Blocks on the disk.
pub(crate) fn blake3_of_file(
    file: &File,
    source: &SourceFile,
    offset: u64,
    bytes: u64,
    stop: &AtomicBool,
) -> Result<Digest, BallastError> {
    let mut hash = blake3::Hasher::new();
    read_file(file, source, offset, bytes, stop, |piece| {
        hash.update(piece);
    })?;
    Ok(Digest::from_bytes(*hash.finalize().as_bytes()))
}

fn read_file(
    file: &File,
    source: &SourceFile,
    offset: u64,
    bytes: u64,
    stop: &AtomicBool,
    mut take: impl FnMut(&[u8]),
) -> Result<(), BallastError> {
    let mut buffer = vec![0; PIECE_BYTES.min(bytes) as usize];
    let mut done = 0;
    while done < bytes {
        if stop.load(Ordering::Relaxed) {
            return Err(BallastError::invalid("given up"));
        }
        let piece = &mut buffer[..PIECE_BYTES.min(bytes - done) as usize];
        file.read_exact_at(piece, offset + done).map_err(|error| {
            BallastError::invalid(format!("can not read {} at byte {}: {error}", source.path.display(), offset + done))
        })?;
        take(piece);
        done += piece.len() as u64;
    }
    Ok(())
}

/// Checksums of units whose bytes are in memory or in files; `None` where they come later. Blocks on the disk.
pub(crate) fn of_units(
    units: &[UnitSource],
    stop: &AtomicBool,
    meter: &Meter,
) -> Result<Vec<Option<u64>>, BallastError> {
    let mut open: Option<(std::path::PathBuf, File)> = None;
    let mut checksums = Vec::with_capacity(units.len());
    for unit in units {
        checksums.push(match &unit.data {
            Data::Later | Data::Base { .. } => None,
            Data::Bytes(bytes) => {
                meter.add(unit.bytes);
                Some(checksum(bytes))
            }
            Data::File { file, offset } => {
                if open.as_ref().is_none_or(|(path, _)| *path != file.path) {
                    open = Some((file.path.clone(), file.open()?));
                }
                match &open {
                    Some((_, opened)) => Some(of_file(opened, file, *offset, unit.bytes, stop, Some(meter))?),
                    None => None,
                }
            }
        });
    }
    Ok(checksums)
}

//! The unit checksum, CRC-64/NVME, over bytes in memory: whole, or fed piece by piece in order.

use ballast_schemas::manifest::FRAGMENT_ALIGN_BYTES;
use crc_fast::{CrcAlgorithm, Digest as Crc, checksum_combine, crc64_nvme};

/// CRC-64/NVME of `bytes`.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    crc64_nvme(bytes)
}

/// CRC-64/NVME of bytes with this checksum followed by `bytes` ones with that one.
#[must_use]
pub fn combine(first: u64, second: u64, bytes: u64) -> u64 {
    if bytes == 0 { first } else { checksum_combine(CrcAlgorithm::Crc64Nvme, first, second, bytes) }
}

/// CRC-64/NVME of an extent and its length, from its parts in order with zeros between them: the first byte, the length and the
/// checksum of each. `None` when they overlap, or lie further apart than parts that are packed.
#[must_use]
pub fn of_parts(parts: impl IntoIterator<Item = (u64, u64, u64)>) -> Option<(u64, u64)> {
    const GAP_BYTES_MAX: usize = FRAGMENT_ALIGN_BYTES as usize;
    let (mut sum, mut end) = (checksum(&[]), 0);
    for (offset, bytes, own) in parts {
        let gap = usize::try_from(offset.checked_sub(end)?).ok().filter(|gap| *gap < GAP_BYTES_MAX)?;
        sum = combine(sum, checksum(&[0; GAP_BYTES_MAX][..gap]), gap as u64);
        sum = combine(sum, own, bytes);
        end = offset.checked_add(bytes)?;
    }
    Some((sum, end))
}

/// CRC-64/NVME fed in order.
#[derive(Clone)]
pub struct RunningChecksum {
    crc: Crc,
    bytes: u64,
}

impl std::fmt::Debug for RunningChecksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningChecksum").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Default for RunningChecksum {
    fn default() -> Self {
        Self { crc: Crc::new(CrcAlgorithm::Crc64Nvme), bytes: 0 }
    }
}

impl RunningChecksum {
    /// Takes in the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.crc.update(bytes);
        self.bytes += bytes.len() as u64;
    }

    /// How many bytes it has taken in.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The checksum of everything taken in.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.crc.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_in_order_give_the_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..10_000_u32).map(|i| (i * 7) as u8).collect();
        let mut running = RunningChecksum::default();
        for piece in bytes.chunks(777) {
            running.update(piece);
        }
        assert_eq!(running.value(), checksum(&bytes));
        assert_eq!(running.bytes(), 10_000);
    }

    #[test]
    fn it_is_crc_64_nvme() {
        // Check value of the CRC catalogue for CRC-64/NVME.
        assert_eq!(checksum(b"123456789"), 0xae8b_1486_0a79_9888);
        assert_eq!(checksum(b""), RunningChecksum::default().value());
    }
}

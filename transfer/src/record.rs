//! The small records that stand beside the bytes of an instance, on both tiers: a magic word, MessagePack, and a
//! CRC-64/NVME over both, so that a torn or flipped record is an error and never a different truth.

use std::io;
use std::path::{Path, PathBuf};

use ballast_schemas::{AffinityIndex, Bitmap, InstanceId, LogPosition, ManifestRef, SessionId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::checksum::checksum;

const MAGIC: &[u8; 8] = b"BALLAST1";
const CHECKSUM_BYTES: usize = 8;

/// Why a record can not be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file can not be read.
    #[error("can not read {path}: {source}", path = path.display())]
    Read {
        /// The record.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Too short, or not one of ours.
    #[error("{path} is no record of this program", path = path.display())]
    NotARecord {
        /// The record.
        path: PathBuf,
    },
    /// The checksum does not fit.
    #[error("{path} is damaged: checksum {found:016x}, expected {expected:016x}", path = path.display())]
    Checksum {
        /// The record.
        path: PathBuf,
        /// The checksum written in it.
        expected: u64,
        /// The checksum of what is there.
        found: u64,
    },
    /// The content is not what this program writes.
    #[error("{path} has content that this build does not know: {reason}", path = path.display())]
    Content {
        /// The record.
        path: PathBuf,
        /// What the decoder said.
        reason: String,
    },
}

/// The bytes of a record.
#[must_use]
pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    // Our records hold only integers, strings, sequences and maps with string keys: MessagePack has all of them, and
    // writing to memory can not fail.
    if let Err(error) = rmp_serde::encode::write_named(&mut bytes, value) {
        unreachable!("a record always encodes: {error}");
    }
    let sum = checksum(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// Reads a record; `None` when there is no such file.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, RecordError> {
    match std::fs::read(path) {
        Ok(bytes) => decode(&bytes, path).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(RecordError::Read { path: path.to_owned(), source }),
    }
}

/// Reads a record from its bytes; `path` names it in errors.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8], path: &Path) -> Result<T, RecordError> {
    let path = || path.to_owned();
    let not_a_record = || RecordError::NotARecord { path: path() };
    let body_end = bytes.len().checked_sub(CHECKSUM_BYTES).ok_or_else(not_a_record)?;
    let (body, sum) = bytes.split_at(body_end);
    let content = body.strip_prefix(MAGIC).ok_or_else(not_a_record)?;
    let expected = u64::from_le_bytes(sum.try_into().map_err(|_| not_a_record())?);
    let found = checksum(body);
    if found != expected {
        return Err(RecordError::Checksum { path: path(), expected, found });
    }
    ballast_schemas::from_messagepack(content)
        .map_err(|error| RecordError::Content { path: path(), reason: error.to_string() })
}

/// What never changes of an instance: written once, when its memory is reserved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LayoutRecord {
    /// Whose bytes.
    pub instance: InstanceId,
    /// The import session that reserved them.
    pub session_id: SessionId,
    /// Each unit's size in bytes.
    pub unit_sizes: Vec<u64>,
}

/// What the seal fixed: written once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SealRecord {
    /// The session that sealed it.
    pub session_id: SessionId,
    /// What the manifest says of itself.
    pub manifest: ManifestRef,
    /// The units, with the checksums that the node found to be right.
    pub affinity: AffinityIndex,
}

/// What changes: which units this tier holds, and the highest fence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StateRecord {
    /// Highest fence that an effect on this instance carried.
    pub fence: LogPosition,
    /// Deletion has begun: nothing is served any more.
    pub deleting: bool,
    /// Units with a verified copy on this tier.
    pub held: Bitmap,
    /// Units that take room on this tier, held ones included.
    pub resident: Bitmap,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> StateRecord {
        let mut held = Bitmap::empty(10);
        held.set(3, true);
        StateRecord { fence: LogPosition { seq: 9, index: 1 }, deleting: false, held, resident: Bitmap::full(10) }
    }

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("state");
        assert!(read::<StateRecord>(&path).unwrap().is_none());
        std::fs::write(&path, encode(&sample())).unwrap();
        assert_eq!(read::<StateRecord>(&path).unwrap().unwrap(), sample());
    }

    #[test]
    fn every_truncation_and_every_flipped_bit_is_noticed() {
        let bytes = encode(&sample());
        let path = Path::new("state");
        for length in 0..bytes.len() {
            assert!(decode::<StateRecord>(&bytes[..length], path).is_err(), "{length} bytes");
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(decode::<StateRecord>(&flipped, path).is_err(), "bit {bit}");
        }
    }
}

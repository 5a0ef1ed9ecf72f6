//! The envelope: one message of the log, a group-committed batch of commands with a format version and a checksum.
//!
//! Bytes: `BLE` and a version byte, 32 bytes SHA-256 of the rest, then MessagePack with named fields.

use serde::{Deserialize, Serialize};

use crate::command::CommandRecord;
use crate::digest::Digest;
use crate::limits::{ENVELOPE_BYTES_MAX, ENVELOPE_COMMANDS_MAX};

const MAGIC: &[u8; 3] = b"BLE";
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 4 + 32;

/// A batch of commands that became durable together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    body: Body,
    digest: Digest,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Body {
    id: String,
    commands: Vec<CommandRecord>,
}

/// Why bytes are not an envelope.
#[derive(Debug, thiserror::Error)]
pub enum EnvelopeError {
    /// Too short, or another magic.
    #[error("not an envelope: {bytes} bytes that do not begin with BLE")]
    NotAnEnvelope {
        /// How many bytes were given.
        bytes: usize,
    },
    /// A version this build does not know.
    #[error("envelope version {found} is unknown; this build reads version {VERSION}: upgrade it")]
    UnknownVersion {
        /// The version found.
        found: u8,
    },
    /// The checksum does not fit.
    #[error("envelope checksum mismatch: the record says {expected}, its bytes give {found}")]
    Checksum {
        /// Recorded.
        expected: Digest,
        /// Computed.
        found: Digest,
    },
    /// Not MessagePack, or a command kind this build does not know.
    #[error("envelope can not be decoded (an unknown command kind needs a newer build): {0}")]
    Decode(#[from] rmp_serde::decode::Error),
    /// Can not be encoded.
    #[error("envelope can not be encoded: {0}")]
    Encode(#[from] rmp_serde::encode::Error),
    /// Over a limit.
    #[error(
        "envelope has {commands} commands in {bytes} bytes; at most {ENVELOPE_COMMANDS_MAX} in {ENVELOPE_BYTES_MAX} are allowed"
    )]
    TooLarge {
        /// Commands given.
        commands: usize,
        /// Bytes they take.
        bytes: usize,
    },
}

impl Envelope {
    /// A new envelope, and its bytes for the log.
    ///
    /// # Errors
    /// When it is over a limit.
    pub fn seal(id: String, commands: Vec<CommandRecord>) -> Result<(Self, Vec<u8>), EnvelopeError> {
        let body = Body { id, commands };
        let mut out = vec![0; HEADER_BYTES];
        rmp_serde::encode::write_named(&mut out, &body)?;
        // One command alone may be as large as it is; the gateway bounds it by its request limit.
        let (commands, bytes) = (body.commands.len(), out.len());
        if commands > ENVELOPE_COMMANDS_MAX || (commands > 1 && bytes > ENVELOPE_BYTES_MAX) {
            return Err(EnvelopeError::TooLarge { commands, bytes });
        }
        let (header, rest) = out.split_at_mut(HEADER_BYTES);
        let digest = Digest::of(rest);
        header[..3].copy_from_slice(MAGIC);
        header[3] = VERSION;
        header[4..].copy_from_slice(digest.as_bytes());
        Ok((Self { body, digest }, out))
    }

    /// Unique; also the message's `Nats-Msg-Id`.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.body.id
    }

    /// In order.
    #[must_use]
    pub fn commands(&self) -> &[CommandRecord] {
        &self.body.commands
    }

    /// The checksum that its bytes in the log carry.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Reads what [`Envelope::seal`] wrote.
    ///
    /// # Errors
    /// When magic, version, checksum or content do not fit. The log is never read past such a record.
    pub fn decode(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        if bytes.len() < HEADER_BYTES || !bytes.starts_with(MAGIC) {
            return Err(EnvelopeError::NotAnEnvelope { bytes: bytes.len() });
        }
        if bytes[3] != VERSION {
            return Err(EnvelopeError::UnknownVersion { found: bytes[3] });
        }
        let (header, body) = bytes.split_at(HEADER_BYTES);
        let mut recorded = [0; 32];
        recorded.copy_from_slice(&header[4..]);
        let (expected, found) = (Digest::from_bytes(recorded), Digest::of(body));
        if expected != found {
            return Err(EnvelopeError::Checksum { expected, found });
        }
        Ok(Self { body: crate::messagepack::from_messagepack(body)?, digest: found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Command;
    use crate::position::CommandId;
    use crate::time::LogTime;

    fn envelope() -> (Envelope, Vec<u8>) {
        let record =
            CommandRecord { id: CommandId::new("c1").unwrap(), not_after: LogTime(60_000), command: Command::Tick };
        Envelope::seal("e1".into(), vec![record]).unwrap()
    }

    #[test]
    fn an_envelope_reads_back() {
        let (envelope, bytes) = envelope();
        assert_eq!(Envelope::decode(&bytes).unwrap(), envelope);
    }

    #[test]
    fn any_flipped_byte_is_noticed() {
        let (_, bytes) = envelope();
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1;
            assert!(Envelope::decode(&wrong).is_err(), "byte {at}");
        }
        assert!(Envelope::decode(&bytes[..20]).is_err());
    }
}

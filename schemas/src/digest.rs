//! The digests of design "Identity, keys and digests": fixed formats that other tools depend on.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest, in JSON and on the log as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The SHA-256 of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Wraps 32 digest bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The 64 hex digits, for as long as `look` wants them.
    fn with_hex<R>(&self, look: impl FnOnce(&str) -> R) -> R {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut hex = [0; 64];
        for (pair, byte) in hex.chunks_exact_mut(2).zip(self.0) {
            pair[0] = DIGITS[usize::from(byte >> 4)];
            pair[1] = DIGITS[usize::from(byte & 15)];
        }
        // Hex digits are UTF-8, so the empty text is never taken.
        look(std::str::from_utf8(&hex).unwrap_or_default())
    }

    pub(crate) fn read(text: &str) -> Result<Self, DigestError> {
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(|d| matches!(d, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(DigestError { text: text.to_owned() });
        }
        let nibble = |d: u8| if d.is_ascii_digit() { d - b'0' } else { d - b'a' + 10 };
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = nibble(pair[0]) << 4 | nibble(pair[1]);
        }
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.with_hex(|hex| serializer.serialize_str(hex))
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        crate::text::deserialize(deserializer, Self::read)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with_hex(|hex| f.write_str(hex))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// A text that is not 64 lower-case hex digits.
#[derive(Debug, thiserror::Error)]
#[error("digest {text:?} is not 64 lower-case hex digits")]
pub struct DigestError {
    text: String,
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        Self::read(&text)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

/// `H(list)`: SHA-256 over `<decimal byte length>:<bytes>\n` for each item.
#[must_use]
pub fn hash_list<'a>(items: impl IntoIterator<Item = &'a [u8]>) -> Digest {
    let mut hash = Sha256::new();
    for item in items {
        hash.update(item.len().to_string().as_bytes());
        hash.update(b":");
        hash.update(item);
        hash.update(b"\n");
    }
    Digest(hash.finalize().into())
}

/// SHA-256 over items that are each prefixed by their length as 8 big-endian bytes.
#[must_use]
pub fn hash_prefixed<'a>(items: impl IntoIterator<Item = &'a [u8]>) -> Digest {
    let mut hash = Sha256::new();
    for item in items {
        hash.update((item.len() as u64).to_be_bytes());
        hash.update(item);
    }
    Digest(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_digest_is_the_sha256_of_its_length_prefixed_items() {
        let by_hand = Digest::of(b"2:ab\n0:\n1:c\n");
        assert_eq!(hash_list([b"ab".as_slice(), b"", b"c"]), by_hand);
    }

    #[test]
    fn a_digest_reads_back_from_hex_and_refuses_upper_case() {
        let digest = Digest::of(b"x");
        assert_eq!(Digest::try_from(digest.to_string()).unwrap(), digest);
        assert!(Digest::try_from(digest.to_string().to_uppercase()).is_err());
        assert!(Digest::try_from("ab".to_owned()).is_err());
    }
}

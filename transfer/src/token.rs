//! Transfer tokens: claims signed with HMAC-SHA256, issued by a gateway and checked by nodes offline. A token only
//! opens the door to bytes; whether a read counted is decided by the lease in the log.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use ballast_schemas::TokenClaims;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Bytes of a key.
pub const TOKEN_KEY_BYTES: usize = 32;
/// How far the clocks of gateway and node may be apart, in milliseconds.
pub const TOKEN_LEEWAY_MS: u64 = 60_000;
/// Version of the token's format.
const PREFIX: &str = "b1";
/// Longest token that is looked at, in bytes.
const TOKEN_BYTES_MAX: usize = 8192;

/// Why a token does not open anything.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Not a token of this format.
    #[error("the transfer token is malformed; ask the gateway for a new one")]
    Malformed,
    /// Not signed with this cluster's key.
    #[error("the transfer token is not signed by this cluster; ask its gateway for a new one")]
    Signature,
    /// Its time is over.
    #[error("the transfer token expired {ago_ms} ms ago; renew the lease or session for a new one")]
    Expired {
        /// How long ago.
        ago_ms: u64,
    },
}

/// A key that is not [`TOKEN_KEY_BYTES`] long.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a token key has {TOKEN_KEY_BYTES} bytes, found {found}")]
pub struct TokenKeyError {
    /// Its length.
    pub found: usize,
}

/// The key that a cluster signs its tokens with.
#[derive(Clone)]
pub struct TokenKey([u8; TOKEN_KEY_BYTES]);

impl fmt::Debug for TokenKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenKey(..)")
    }
}

impl TokenKey {
    /// Takes a key's bytes.
    ///
    /// # Errors
    /// When there are not [`TOKEN_KEY_BYTES`] of them.
    pub fn new(bytes: &[u8]) -> Result<Self, TokenKeyError> {
        bytes.try_into().map(Self).map_err(|_| TokenKeyError { found: bytes.len() })
    }

    fn mac(&self, claims: &[u8]) -> Hmac<Sha256> {
        // HMAC takes a key of any length.
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(&self.0) else { unreachable!("HMAC refuses no key") };
        mac.update(PREFIX.as_bytes());
        mac.update(claims);
        mac
    }

    /// Signs claims.
    #[must_use]
    pub fn sign(&self, claims: &TokenClaims) -> String {
        // Claims hold integers and strings only, which MessagePack always encodes.
        let Ok(bytes) = rmp_serde::to_vec_named(claims) else { unreachable!("claims always encode") };
        let mac = self.mac(&bytes).finalize().into_bytes();
        format!("{PREFIX}.{}.{}", hex(&bytes), hex(&mac))
    }

    /// Checks a token and gives its claims.
    ///
    /// # Errors
    /// When it is malformed, signed with another key, or expired for more than [`TOKEN_LEEWAY_MS`].
    pub fn verify(&self, token: &str, now_unix_ms: u64) -> Result<TokenClaims, TokenError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenError::Malformed);
        }
        let mut parts = token.split('.');
        let (Some(PREFIX), Some(claims), Some(mac), None) = (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Malformed);
        };
        let claims = unhex(claims).ok_or(TokenError::Malformed)?;
        let mac = unhex(mac).ok_or(TokenError::Malformed)?;
        self.mac(&claims).verify_slice(&mac).map_err(|_| TokenError::Signature)?;
        let claims: TokenClaims = ballast_schemas::from_messagepack(&claims).map_err(|_| TokenError::Malformed)?;
        check_time(&claims, now_unix_ms)?;
        Ok(claims)
    }
}

/// Whether claims still hold.
///
/// # Errors
/// When they expired for more than [`TOKEN_LEEWAY_MS`].
pub(crate) fn check_time(claims: &TokenClaims, now_unix_ms: u64) -> Result<(), TokenError> {
    let end = claims.expires_unix_ms.saturating_add(TOKEN_LEEWAY_MS);
    if now_unix_ms <= end { Ok(()) } else { Err(TokenError::Expired { ago_ms: now_unix_ms - claims.expires_unix_ms }) }
}

/// Wall-clock time in milliseconds since 1970.
pub(crate) fn now_unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [DIGITS[(byte >> 4) as usize], DIGITS[(byte & 15) as usize]]);
    digits.map(char::from).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let nibble = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    digits.chunks_exact(2).map(|pair| Some(nibble(pair[0])? << 4 | nibble(pair[1])?)).collect()
}

/// The key of the cluster that a node was introduced to, once it was. Cheap to clone; clones share it.
#[derive(Clone, Debug, Default)]
pub struct TokenGate(Arc<RwLock<Option<TokenKey>>>);

impl TokenGate {
    /// A gate that opens for nobody until it gets a key.
    #[must_use]
    pub fn closed() -> Self {
        Self::default()
    }

    /// Opens for tokens of this key, and no other.
    pub fn set(&self, key: TokenKey) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(key);
    }

    /// Opens for nobody.
    pub fn close(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(crate) fn key(&self) -> Option<TokenKey> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use ballast_schemas::TokenRight;

    use super::*;
    use crate::testing::instance;

    fn claims() -> TokenClaims {
        TokenClaims {
            instance: instance(1),
            right: TokenRight::Read,
            subject: "lease".into(),
            part: None,
            holders: None,
            expires_unix_ms: 1_000_000,
        }
    }

    #[test]
    fn a_token_opens_for_its_key_alone_and_until_its_end() {
        let key = TokenKey::new(&[7; 32]).unwrap();
        let token = key.sign(&claims());
        assert_eq!(key.verify(&token, 0).unwrap(), claims());
        assert_eq!(key.verify(&token, 1_000_000 + TOKEN_LEEWAY_MS).unwrap(), claims());
        let late = key.verify(&token, 1_000_001 + TOKEN_LEEWAY_MS);
        assert_eq!(late, Err(TokenError::Expired { ago_ms: TOKEN_LEEWAY_MS + 1 }));
        let other = TokenKey::new(&[8; 32]).unwrap();
        assert_eq!(other.verify(&token, 0), Err(TokenError::Signature));
        assert!(TokenKey::new(&[7; 31]).is_err());
    }

    #[test]
    fn a_changed_token_is_refused() {
        let key = TokenKey::new(&[7; 32]).unwrap();
        let token = key.sign(&claims());
        for at in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[at] = if changed[at] == b'0' { b'1' } else { b'0' };
            let changed = String::from_utf8(changed).unwrap();
            assert!(key.verify(&changed, 0).is_err(), "byte {at}");
        }
        for wrong in ["", ".", "b1", "b1..", "b1.zz.00", "b1.0.0", "b1.00.00.00"] {
            assert!(key.verify(wrong, 0).is_err(), "{wrong}");
        }
    }
}

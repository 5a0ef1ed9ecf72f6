//! The cluster's token key: 32 random bytes in the bucket `BALLAST_KEYS`, made by whoever needs it first.
//!
//! What the key signs is the gateway's and the nodes' business. See ARCHITECTURE.md, Guards and fences.

use std::fmt;
use std::time::{Duration, Instant};

use async_nats::jetstream::kv::{CreateErrorKind, Store};
use bytes::Bytes;
use rand::Rng;

use crate::streams::{KEYS_BUCKET, Streams};

const TOKEN_KEY: &str = "token";
const PATIENCE: Duration = Duration::from_secs(20);
const RETRY_EVERY: Duration = Duration::from_millis(200);

/// The key that signs transfer tokens. Its debug form does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenKey([u8; 32]);

impl TokenKey {
    /// Wraps 32 key bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 key bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for TokenKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenKey(..)")
    }
}

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error(
        "the key in bucket {KEYS_BUCKET} has {bytes} bytes, expected 32: delete it and restart the gateways to make another"
    )]
    Malformed { bytes: usize },
    #[error("the bucket {KEYS_BUCKET} does not answer: {reason}")]
    Unreachable { reason: String },
}

/// The cluster's token key, made if there is none yet.
pub async fn token_key(streams: &Streams) -> Result<TokenKey, KeyError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let reason = match read_or_create(streams).await {
            Ok(found) => return found,
            Err(reason) => reason,
        };
        if Instant::now() >= deadline {
            return Err(KeyError::Unreachable { reason });
        }
        tokio::time::sleep(RETRY_EVERY).await;
    }
}

/// The outer error is worth another try.
async fn read_or_create(streams: &Streams) -> Result<Result<TokenKey, KeyError>, String> {
    let bucket: Store = streams.context.get_key_value(KEYS_BUCKET).await.map_err(|error| error.to_string())?;
    if let Some(bytes) = bucket.get(TOKEN_KEY).await.map_err(|error| error.to_string())? {
        let bytes: &[u8] = &bytes;
        return Ok(<[u8; 32]>::try_from(bytes).map(TokenKey).map_err(|_| KeyError::Malformed { bytes: bytes.len() }));
    }
    let mut fresh = [0_u8; 32];
    rand::rng().fill_bytes(&mut fresh);
    match bucket.create(TOKEN_KEY, Bytes::copy_from_slice(&fresh)).await {
        Ok(_) => Ok(Ok(TokenKey(fresh))),
        // Somebody else's came first: read that one.
        Err(error) if error.kind() == CreateErrorKind::AlreadyExists => Err("made by another a moment ago".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

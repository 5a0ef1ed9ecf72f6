//! Issues transfer tokens: what a caller shows to nodes so that they open their doors to one instance's bytes.
//!
//! The signature is the transfer crate's; the key comes from the cluster's bucket. A token's time is the wall clock's, with much
//! slack: whether bytes read under it count is decided by the lease in the log. See ARCHITECTURE.md, Guards and fences.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ballast_journal::KeyError;
use ballast_schemas::{ImportSession, InstanceId, TokenClaims, TokenPart, TokenRight};
use ballast_transfer::TokenKey;

/// Beyond the lease or session: renewals bring no new token, and clocks differ.
const SLACK: Duration = Duration::from_secs(3600);

/// Signs tokens with the cluster's key.
#[derive(Debug, Clone)]
pub(crate) struct TokenIssuer {
    stored: ballast_journal::TokenKey,
    key: TokenKey,
}

impl TokenIssuer {
    pub(crate) fn new(stored: ballast_journal::TokenKey) -> Result<Self, KeyError> {
        let key = TokenKey::new(stored.as_bytes()).map_err(|error| KeyError::Malformed { bytes: error.found })?;
        Ok(Self { stored, key })
    }

    /// The key's bytes, for nodes that introduce themselves.
    pub(crate) fn key_bytes(&self) -> Vec<u8> {
        self.stored.as_bytes().to_vec()
    }

    /// A token for `right` on `instance`, on behalf of the lease or session `subject` that lasts `ttl_ms`.
    pub(crate) fn issue(&self, instance: &InstanceId, right: TokenRight, subject: &str, ttl_ms: u64) -> String {
        self.sign(instance, right, subject, None, ttl_ms)
    }

    /// A token for a participant's fragments in an import.
    pub(crate) fn issue_part(&self, session: &ImportSession, part: TokenPart) -> String {
        let subject = session.session_id.as_str();
        self.sign(&session.instance, TokenRight::Import, subject, Some(part), session.ttl_ms)
    }

    fn sign(
        &self,
        instance: &InstanceId,
        right: TokenRight,
        subject: &str,
        part: Option<TokenPart>,
        ttl_ms: u64,
    ) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let end = now.saturating_add(Duration::from_millis(ttl_ms)).saturating_add(SLACK);
        let expires_unix_ms = u64::try_from(end.as_millis()).unwrap_or(u64::MAX);
        let claims =
            TokenClaims { instance: instance.clone(), right, subject: subject.to_owned(), part, expires_unix_ms };
        self.key.sign(&claims)
    }
}

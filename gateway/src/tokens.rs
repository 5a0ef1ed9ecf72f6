//! Issues transfer tokens: what a caller shows to nodes so that they open their doors to one instance's bytes.
//!
//! The signature is the transfer crate's; the key comes from the cluster's bucket. A token's time is the wall clock's, with much
//! slack: whether bytes read under it count is decided by the lease in the log. See ARCHITECTURE.md, Guards and fences.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ballast_journal::KeyError;
use ballast_schemas::{ImportSession, LeaseGrant, NodeEndpoint, TokenClaims, TokenPart, TokenRight, holders_digest};
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

    /// A token for reading what a lease protects. It vouches for the nodes that hold it.
    pub(crate) fn issue_read(&self, lease: &LeaseGrant, holders: &[NodeEndpoint]) -> String {
        let claims = TokenClaims {
            instance: lease.instance.clone(),
            right: TokenRight::Read,
            subject: lease.lease_id.to_string(),
            part: None,
            holders: Some(holders_digest(holders)),
            expires_unix_ms: end(lease.ttl_ms),
        };
        self.key.sign(&claims)
    }

    /// A token for a whole import.
    pub(crate) fn issue_import(&self, session: &ImportSession) -> String {
        self.import(session, None)
    }

    /// A token for a participant's fragments in an import.
    pub(crate) fn issue_part(&self, session: &ImportSession, part: TokenPart) -> String {
        self.import(session, Some(part))
    }

    fn import(&self, session: &ImportSession, part: Option<TokenPart>) -> String {
        let claims = TokenClaims {
            instance: session.instance.clone(),
            right: TokenRight::Import,
            subject: session.session_id.to_string(),
            part,
            holders: None,
            expires_unix_ms: end(session.ttl_ms),
        };
        self.key.sign(&claims)
    }
}

/// When a token ends whose lease or session lasts `ttl_ms`.
fn end(ttl_ms: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let end = now.saturating_add(Duration::from_millis(ttl_ms)).saturating_add(SLACK);
    u64::try_from(end.as_millis()).unwrap_or(u64::MAX)
}

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

#[cfg(test)]
mod tests {
    use ballast_schemas::{InstanceId, LeaseId, LogPosition, LogTime, NodeId, RevisionIdentity};

    use super::*;

    #[test]
    fn a_token_for_reading_vouches_for_the_addresses_of_its_holders_and_for_no_other() {
        let issuer = TokenIssuer::new(ballast_journal::TokenKey::from_bytes([7; 32])).unwrap();
        let identity = RevisionIdentity::new("default", "default", "m", "main", 1).unwrap();
        let lease = LeaseGrant {
            lease_id: LeaseId::new("lease").unwrap(),
            holder: "reader".into(),
            instance: InstanceId { group_id: identity.group_id(), position: LogPosition { seq: 1, index: 0 } },
            identity,
            ttl_ms: 1_000,
            expires_at: LogTime(1_000),
        };
        let endpoint = |node: &str, tcp: &str| NodeEndpoint {
            node: NodeId::new(node).unwrap(),
            host_id: "host".into(),
            unix_socket: None,
            tcp: Some(tcp.into()),
        };
        let holders = [endpoint("node-1", "10.0.0.1:7000"), endpoint("node-2", "10.0.0.2:7000")];
        let claims = issuer.key.verify(&issuer.issue_read(&lease, &holders), 0).unwrap();
        assert_eq!((claims.right, claims.subject.as_str()), (TokenRight::Read, "lease"));
        assert_eq!(claims.holders, Some(holders_digest(&holders)));
        let [first, second] = holders.clone();
        for other in [
            vec![],
            vec![first.clone()],
            vec![second.clone(), first.clone()],
            vec![first.clone(), endpoint("node-2", "10.0.0.3:7000")],
            vec![first.clone(), endpoint("node-3", "10.0.0.2:7000")],
            vec![first.clone(), NodeEndpoint { tcp: None, ..second }],
        ] {
            assert_ne!(claims.holders, Some(holders_digest(&other)), "{other:?}");
        }
    }
}

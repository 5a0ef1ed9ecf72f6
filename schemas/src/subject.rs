//! The subjects and streams of design "Streams and buckets". A token made from user text is percent-encoded
//! (`.` too) if that stays short, else replaced by its digest; the full identity is in the body.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::digest::Digest;
use crate::identity::{RevisionIdentity, TenantId};
use crate::limits::SUBJECT_TOKEN_BYTES_MAX;
use crate::position::{NodeId, OperationId};
use crate::state::OperationKind;

/// The durable log.
pub const LOG_STREAM: &str = "BALLAST_LOG";
/// Its subject; the last token leaves room for shards.
pub const LOG_SUBJECT: &str = "ballast.log.0";
/// Hints that an operation wants a worker.
pub const WORK_STREAM: &str = "BALLAST_WORK";
/// Its subjects.
pub const WORK_SUBJECTS: &str = "ballast.work.>";
/// The last inventory per (node, group).
pub const INVENTORY_STREAM: &str = "BALLAST_INVENTORY";
/// Its subjects.
pub const INVENTORY_SUBJECTS: &str = "ballast.inv.>";
/// What orchestrators follow.
pub const EVENTS_STREAM: &str = "BALLAST_EVENTS";
/// Its subjects.
pub const EVENTS_SUBJECTS: &str = "ballast.events.>";
/// Store-and-forward commands.
pub const INBOX_STREAM: &str = "BALLAST_INBOX";
/// Its subjects.
pub const INBOX_SUBJECTS: &str = "ballast.submit.>";
/// Fold snapshots.
pub const SNAPSHOTS_BUCKET: &str = "BALLAST_SNAPSHOTS";
/// The cluster's token key.
pub const KEYS_BUCKET: &str = "BALLAST_KEYS";
/// Where nodes introduce themselves to a gateway.
pub const HELLO_SUBJECT: &str = "ballast.cluster.hello";
/// Where replicas tell each other what they decided.
pub const DIGEST_SUBJECT: &str = "ballast.cluster.digest";
/// Every node's status.
pub const NODE_STATUS_SUBJECTS: &str = "ballast.node.*.status";

const TOKEN_ESCAPES: &AsciiSet = &NON_ALPHANUMERIC.remove(b'_').remove(b'-');

/// One subject token from user text.
#[must_use]
pub fn token(text: &str) -> String {
    let encoded = utf8_percent_encode(text, TOKEN_ESCAPES).to_string();
    if !encoded.is_empty() && encoded.len() <= SUBJECT_TOKEN_BYTES_MAX {
        encoded
    } else {
        format!("~{}", Digest::of(text.as_bytes()))
    }
}

/// Where a verb is called: `ballast.v1.<tenant>.<verb>`.
#[must_use]
pub fn verb(tenant: &TenantId, verb: &str) -> String {
    format!("ballast.v1.{}.{verb}", token(tenant.as_str()))
}

/// Where a verb is left for later: `ballast.submit.<tenant>.<verb>`.
#[must_use]
pub fn submit(tenant: &TenantId, verb: &str) -> String {
    format!("ballast.submit.{}.{verb}", token(tenant.as_str()))
}

/// Where a revision's events go: `ballast.events.<tenant>.<ns>.<resource>.<revision>.<generation>`.
#[must_use]
pub fn events_of(identity: &RevisionIdentity) -> String {
    format!(
        "ballast.events.{}.{}.{}.{}.{}",
        token(identity.tenant_id.as_str()),
        token(identity.namespace.as_str()),
        token(identity.resource_id.as_str()),
        token(identity.revision.as_str()),
        identity.weight_generation
    )
}

/// Where the outcome of a request left in the inbox goes: `ballast.events.<tenant>.outcome.<request>`.
#[must_use]
pub fn outcome_of(tenant: &TenantId, request_id: &str) -> String {
    format!("ballast.events.{}.outcome.{}", token(tenant.as_str()), token(request_id))
}

/// The hint of one operation: `ballast.work.<kind>.<operation>`.
#[must_use]
pub fn work(kind: OperationKind, operation: &OperationId) -> String {
    format!("ballast.work.{}.{}", kind.name(), token(operation.as_str()))
}

/// The inventory of one group on one node: `ballast.inv.<node>.<group hex>`.
#[must_use]
pub fn inventory(node: &NodeId, group_hex: &str) -> String {
    format!("ballast.inv.{}.{group_hex}", token(node.as_str()))
}

/// A node's status.
#[must_use]
pub fn node_status(node: &NodeId) -> String {
    format!("ballast.node.{}.status", token(node.as_str()))
}

/// A node's control requests.
#[must_use]
pub fn node_control(node: &NodeId) -> String {
    format!("ballast.node.{}.ctl", token(node.as_str()))
}

/// A node's ordinary objects.
#[must_use]
pub fn node_objects(node: &NodeId) -> String {
    format!("ballast.node.{}.object", token(node.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_never_splits_a_subject() {
        assert_eq!(token("v1.0 *>"), "v1%2E0%20%2A%3E");
        let long = token(&"é".repeat(500));
        assert!(long.starts_with('~') && long.len() == 65);
        assert_eq!(token("minilm"), "minilm");
    }
}

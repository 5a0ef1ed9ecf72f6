//! Inventories over JetStream: the last one of every (node, group), published by nodes, watched by gateways and workers.
//!
//! What an inventory says is `ballast_schemas::NodeInventory`; when to publish is the node's business.
//! See ARCHITECTURE.md, Three authorities.

use std::time::Duration;

use async_nats::HeaderMap;
use ballast_schemas::{GroupId, NodeId, NodeInventory, subject};
use bytes::Bytes;

use crate::follow::{Followed, Follower, Start};
use crate::publish::{PublishFailure, publish_once};
use crate::streams::{INVENTORY_STREAM, INVENTORY_SUBJECTS, Streams};

const ACK_TIMEOUT: Duration = Duration::from_secs(3);

/// Why an inventory was not published. It is safe to publish it (or a newer one) again.
#[derive(Debug, thiserror::Error)]
pub enum PublishInventoryError {
    #[error("the inventory of {group_id} on {node} cannot be encoded: {reason}")]
    Encode { node: NodeId, group_id: GroupId, reason: String },
    #[error("the inventory of {group_id} on {node} was not stored: {reason}")]
    NotStored { node: NodeId, group_id: GroupId, reason: String },
}

/// Replaces the node's last inventory of the group. An inventory that holds nothing still says so by name.
pub async fn publish_inventory(streams: &Streams, inventory: &NodeInventory) -> Result<(), PublishInventoryError> {
    let (node, group_id) = (&inventory.node, &inventory.instance.group_id);
    let encoded = rmp_serde::to_vec_named(inventory);
    let body = encoded.map_err(|error| PublishInventoryError::Encode {
        node: node.clone(),
        group_id: group_id.clone(),
        reason: error.to_string(),
    })?;
    publish(streams, node, group_id, Bytes::from(body)).await
}

/// Says that the node holds nothing of the group any more.
pub async fn withdraw_inventory(
    streams: &Streams,
    node: &NodeId,
    group_id: &GroupId,
) -> Result<(), PublishInventoryError> {
    publish(streams, node, group_id, Bytes::new()).await
}

async fn publish(
    streams: &Streams,
    node: &NodeId,
    group_id: &GroupId,
    body: Bytes,
) -> Result<(), PublishInventoryError> {
    let subject = subject::inventory(node, group_id.hex());
    let published = publish_once(&streams.client, subject, HeaderMap::new(), body, ACK_TIMEOUT).await;
    published.map(drop).map_err(|failure: PublishFailure| PublishInventoryError::NotStored {
        node: node.clone(),
        group_id: group_id.clone(),
        reason: failure.to_string(),
    })
}

/// What an inventory watch delivers.
#[derive(Debug, Clone, PartialEq)]
pub enum InventoryUpdate {
    /// The node's last inventory of the group it names.
    Present(Box<NodeInventory>),
    /// The node withdrew it. Both are subject tokens: the node's name and the group's hex digits.
    Withdrawn { node: String, group_hex: String },
    /// Forget everything delivered before: the stream was made anew.
    StartedOver,
}

/// Delivers the last inventory of every (node, group), then every change.
pub struct InventoryWatch {
    follower: Follower,
}

impl std::fmt::Debug for InventoryWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InventoryWatch")
    }
}

impl InventoryWatch {
    /// Watches every node.
    pub fn new(streams: &Streams) -> Self {
        Self {
            follower: Follower::new(streams, INVENTORY_STREAM, INVENTORY_SUBJECTS.to_owned(), Start::LastPerSubject),
        }
    }

    /// The next change; waits for it, through restarts of the server. Cancel safe.
    pub async fn next(&mut self) -> InventoryUpdate {
        loop {
            let message = match self.follower.next().await {
                Followed::StartedOver => return InventoryUpdate::StartedOver,
                Followed::Message { message, .. } => message,
            };
            if message.payload.is_empty() {
                let mut tokens = message.subject.as_str().split('.').skip(2).map(str::to_owned);
                if let (Some(node), Some(group_hex)) = (tokens.next(), tokens.next()) {
                    return InventoryUpdate::Withdrawn { node, group_hex };
                }
                continue;
            }
            match ballast_schemas::from_messagepack::<NodeInventory>(&message.payload) {
                Ok(inventory) => return InventoryUpdate::Present(Box::new(inventory)),
                // An inventory is a hint about a node that answers for itself; a broken one hides that node, nothing more.
                Err(error) => tracing::warn!(subject = %message.subject, %error, "unreadable inventory ignored"),
            }
        }
    }
}

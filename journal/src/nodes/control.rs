//! The asking side of control requests to nodes: one request, progress while the node works, one end.
//!
//! A node that says nothing for five seconds is taken for dead; the request may have been carried out all the same, so what is
//! asked must be safe to ask again (every effect carries its fence and skips what is done). See ARCHITECTURE.md, Guards and fences.

use std::time::Duration;

use async_nats::{Client, StatusCode, Subscriber};
use ballast_schemas::{
    AffinityIndex, BallastError, ErrorCode, InstanceId, NodeId, NodeInventory, NodeReply, NodeRequest, Receipt,
    SessionId, subject,
};
use bytes::Bytes;
use futures::StreamExt;

use super::directory::NODE_SILENCE;
use super::parts::Joiner;

/// What a node has done of a request so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeProgress {
    pub units: u32,
    pub bytes: u64,
}

/// Why a control request has no good answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NodeCallError {
    #[error("node {node} does not listen: start its transfer worker, or wait until it is introduced to the cluster")]
    NotListening { node: NodeId },
    #[error("node {node} said nothing for {} ms: its process or its connection is gone", silence.as_millis())]
    Silent { node: NodeId, silence: Duration },
    #[error("node {node}: {error}")]
    Failed { node: NodeId, error: BallastError },
    #[error("node {node} answered something else than what was asked: {reason}")]
    Garbled { node: NodeId, reason: String },
    #[error("the request to node {node} cannot be sent: {reason}")]
    NotSent { node: NodeId, reason: String },
}

impl NodeCallError {
    /// Whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NotListening { .. } | Self::Silent { .. } | Self::Garbled { .. } | Self::NotSent { .. } => true,
            Self::Failed { error, .. } => error.is_retryable(),
        }
    }

    /// Whether the node may have done it, or may still be at it.
    pub fn outcome_unknown(&self) -> bool {
        matches!(self, Self::Silent { .. } | Self::Garbled { .. })
    }
}

impl From<NodeCallError> for BallastError {
    /// The node's own error with its name in front; everything else is UNAVAILABLE.
    fn from(error: NodeCallError) -> BallastError {
        match error {
            NodeCallError::Failed { node, error } => {
                BallastError { message: format!("node {node}: {}", error.message), ..error }
            }
            other => BallastError::new(ErrorCode::Unavailable, other.to_string()),
        }
    }
}

/// Sends control requests. Cheap to clone; any number of requests may be under way.
#[derive(Debug, Clone)]
pub struct NodeClient {
    client: Client,
    silence_max: Duration,
}

impl NodeClient {
    /// Gives a node up after [`NODE_SILENCE`].
    pub fn new(client: Client) -> Self {
        Self { client, silence_max: NODE_SILENCE }
    }

    /// The same, but gives a node up after another time.
    #[must_use]
    pub fn with_silence_max(self, silence_max: Duration) -> Self {
        Self { silence_max, ..self }
    }

    /// Asks `node` and waits for the end, however long the node shows progress.
    ///
    /// # Errors
    /// Also when the node's end is [`NodeReply::Failed`].
    pub async fn call(
        &self,
        node: &NodeId,
        request: &NodeRequest,
        mut on_progress: impl FnMut(NodeProgress),
    ) -> Result<NodeReply, NodeCallError> {
        let not_sent = |reason: String| NodeCallError::NotSent { node: node.clone(), reason };
        let body = rmp_serde::to_vec_named(request).map_err(|error| not_sent(error.to_string()))?;
        let inbox = self.client.new_inbox();
        let mut replies = self.client.subscribe(inbox.clone()).await.map_err(|error| not_sent(error.to_string()))?;
        let sent = self.client.publish_with_reply(subject::node_control(node), inbox, Bytes::from(body)).await;
        sent.map_err(|error| not_sent(error.to_string()))?;
        let mut joiner = Joiner::default();
        loop {
            match self.next_reply(node, &mut replies, &mut joiner).await? {
                NodeReply::Progress { units, bytes } => on_progress(NodeProgress { units, bytes }),
                NodeReply::Failed(error) => return Err(NodeCallError::Failed { node: node.clone(), error }),
                end => return Ok(end),
            }
        }
    }

    async fn next_reply(
        &self,
        node: &NodeId,
        replies: &mut Subscriber,
        joiner: &mut Joiner,
    ) -> Result<NodeReply, NodeCallError> {
        loop {
            let silent = || NodeCallError::Silent { node: node.clone(), silence: self.silence_max };
            let next = tokio::time::timeout(self.silence_max, replies.next()).await.map_err(|_| silent())?;
            // The subscription ends only with the client.
            let message = next.ok_or_else(silent)?;
            if message.status == Some(StatusCode::NO_RESPONDERS) {
                return Err(NodeCallError::NotListening { node: node.clone() });
            }
            let garbled = |reason: String| NodeCallError::Garbled { node: node.clone(), reason };
            if let Some(reply) = joiner.push(&message).map_err(|error| garbled(error.to_string()))? {
                return Ok(reply);
            }
        }
    }

    /// What `node` holds of `instance`; `None` when it holds nothing.
    pub async fn inventory(
        &self,
        node: &NodeId,
        instance: &InstanceId,
    ) -> Result<Option<NodeInventory>, NodeCallError> {
        let request = NodeRequest::Inventory { instance: instance.clone() };
        match self.call(node, &request, |_| {}).await? {
            NodeReply::Inventory(inventory) => Ok(Some(*inventory)),
            NodeReply::Absent => Ok(None),
            other => Err(unexpected(node, "Inventory or Absent", &other)),
        }
    }

    /// The receipt of the import that `session_id` sealed on `node`.
    pub async fn receipt(
        &self,
        node: &NodeId,
        instance: &InstanceId,
        session_id: &SessionId,
    ) -> Result<Receipt, NodeCallError> {
        let request = NodeRequest::Receipt { instance: instance.clone(), session_id: session_id.clone() };
        match self.call(node, &request, |_| {}).await? {
            NodeReply::Receipt(receipt) => Ok(*receipt),
            NodeReply::Absent => Err(NodeCallError::Failed {
                node: node.clone(),
                error: BallastError::new(
                    ErrorCode::NotReady,
                    format!("nothing of instance {instance} is here: upload and seal it first"),
                ),
            }),
            other => Err(unexpected(node, "Receipt", &other)),
        }
    }

    /// The units of `instance`, from a node that holds its manifest.
    pub async fn affinity_index(&self, node: &NodeId, instance: &InstanceId) -> Result<AffinityIndex, NodeCallError> {
        let request = NodeRequest::AffinityIndex { instance: instance.clone() };
        match self.call(node, &request, |_| {}).await? {
            NodeReply::AffinityIndex(index) => Ok(*index),
            NodeReply::Absent => Err(NodeCallError::Failed {
                node: node.clone(),
                error: BallastError::new(ErrorCode::NotFound, format!("nothing of instance {instance} is here")),
            }),
            other => Err(unexpected(node, "AffinityIndex", &other)),
        }
    }
}

fn unexpected(node: &NodeId, expected: &str, found: &NodeReply) -> NodeCallError {
    let found = match found {
        NodeReply::Progress { .. } => "Progress",
        NodeReply::Inventory(_) => "Inventory",
        NodeReply::Receipt(_) => "Receipt",
        NodeReply::AffinityIndex(_) => "AffinityIndex",
        NodeReply::Verified(_) => "Verified",
        NodeReply::Absent => "Absent",
        NodeReply::Failed(_) => "Failed",
    };
    NodeCallError::Garbled { node: node.clone(), reason: format!("expected {expected}, found {found}") }
}

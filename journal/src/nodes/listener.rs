//! The node's side of control requests: takes them one by one and sends progress and the end back.
//!
//! Not here: doing what is asked, nor sending progress in time (at least once a second while at work).

use async_nats::{Client, Message, Subject, Subscriber};
use ballast_schemas::{BallastError, ErrorCode, NodeId, NodeReply, NodeRequest, subject};
use futures::StreamExt;

use super::control::NodeProgress;
use super::parts::split;

/// Why a node does not listen, or why an answer was not sent.
#[derive(Debug, thiserror::Error)]
pub enum NodeListenerError {
    #[error("node {node} can not stand as one subject token (no '.', '*' or '>'): choose another --node name")]
    Name { node: NodeId },
    #[error("the control subject {subject} can not be used: {reason}")]
    Subscribe { subject: String, reason: String },
    #[error("the answer was not sent: {reason}")]
    NotSent { reason: String },
}

/// Receives the control requests of one node, through reconnects.
#[derive(Debug)]
pub struct NodeListener {
    client: Client,
    requests: Subscriber,
}

impl NodeListener {
    /// Listens from now on.
    pub async fn open(client: Client, node: &NodeId) -> Result<Self, NodeListenerError> {
        if !node.is_subject_token() {
            return Err(NodeListenerError::Name { node: node.clone() });
        }
        let subject = subject::node_control(node);
        let requests = client.subscribe(subject.clone()).await;
        let requests = requests.map_err(|error| NodeListenerError::Subscribe { subject, reason: error.to_string() })?;
        Ok(Self { client, requests })
    }

    /// The next request; `None` when the connection was closed for good. What is not a request is answered here. Cancel safe.
    pub async fn next(&mut self) -> Option<NodeCall> {
        loop {
            let Message { reply, payload, .. } = self.requests.next().await?;
            let Some(reply) = reply else { continue };
            let client = self.client.clone();
            match ballast_schemas::from_messagepack(&payload) {
                Ok(request) => return Some(NodeCall { request, responder: NodeResponder { client, reply } }),
                Err(error) => {
                    let error = BallastError::invalid(format!("not a node request: {error}"));
                    if let Err(error) = (NodeResponder { client, reply }).send(&NodeReply::Failed(error)).await {
                        tracing::debug!(%error, "nobody hears the answer");
                    }
                }
            }
        }
    }
}

/// A request and the way back to who asked.
#[derive(Debug)]
pub struct NodeCall {
    /// What is asked.
    pub request: NodeRequest,
    responder: NodeResponder,
}

#[derive(Debug, Clone)]
struct NodeResponder {
    client: Client,
    reply: Subject,
}

impl NodeCall {
    /// Says that the node is still at it.
    pub async fn progress(&self, progress: NodeProgress) -> Result<(), NodeListenerError> {
        self.responder.send(&NodeReply::Progress { units: progress.units, bytes: progress.bytes }).await
    }

    /// Sends the end. A reply that is too large becomes a failure that says so.
    pub async fn finish(self, reply: NodeReply) -> Result<(), NodeListenerError> {
        self.responder.send(&reply).await
    }
}

impl NodeResponder {
    async fn send(&self, reply: &NodeReply) -> Result<(), NodeListenerError> {
        let not_sent = |reason: String| NodeListenerError::NotSent { reason };
        let messages = match split(reply) {
            Ok(messages) => messages,
            Err(error) => {
                let failed = NodeReply::Failed(BallastError::new(ErrorCode::CapacityExhausted, error.to_string()));
                split(&failed).map_err(|error| not_sent(error.to_string()))?
            }
        };
        for (headers, payload) in messages {
            let published = match headers.is_empty() {
                true => self.client.publish(self.reply.clone(), payload).await,
                false => self.client.publish_with_headers(self.reply.clone(), headers, payload).await,
            };
            published.map_err(|error| not_sent(error.to_string()))?;
        }
        Ok(())
    }
}

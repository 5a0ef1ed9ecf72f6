//! The ordinary objects of one node: small unmanaged bytes that share its memory tier with weights and give way to them
//! (ARCHITECTURE.md, Ordinary objects). Weights are not reached this way.

use std::time::Duration;

use async_nats::client::RequestErrorKind;
use ballast_schemas::{
    BallastError, ErrorCode, NodeId, ObjectEntry, ObjectKey, ObjectReply, ObjectRequest, object_head, object_message,
    subject,
};
use bytes::Bytes;

use crate::gateway::Gateway;

/// A node answers from memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// The ordinary objects of one node. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeObjects {
    gateway: Gateway,
    node: NodeId,
}

impl NodeObjects {
    /// The objects of `node`, over the connection of `gateway`.
    #[must_use]
    pub fn new(gateway: Gateway, node: NodeId) -> Self {
        Self { gateway, node }
    }

    /// Stores an object in place of what was there; answers how many others were evicted for it.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a managed group's key or too many bytes, `CAPACITY_EXHAUSTED` when weights leave no room.
    pub async fn put(&self, key: ObjectKey, bytes: &[u8]) -> Result<u64, BallastError> {
        if bytes.len() > ballast_schemas::OBJECT_BYTES_MAX {
            return Err(BallastError::invalid(format!(
                "the object has {} bytes, at most {} are stored under one key; split it, or publish weights with `ballast put`",
                bytes.len(),
                ballast_schemas::OBJECT_BYTES_MAX
            )));
        }
        match self.ask(&ObjectRequest::Put { key }, bytes).await? {
            (ObjectReply::Stored { evicted, .. }, _) => Ok(evicted),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// An object's bytes.
    ///
    /// # Errors
    /// `NOT_FOUND`, also when it was evicted or its node was restarted.
    pub async fn get(&self, key: ObjectKey) -> Result<Bytes, BallastError> {
        match self.ask(&ObjectRequest::Get { key }, &[]).await? {
            (ObjectReply::Found { .. }, bytes) => Ok(bytes),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// Removes one object; answers its bytes.
    ///
    /// # Errors
    /// `NOT_FOUND`; `CONFLICT` for a managed group's key, which is left alone.
    pub async fn remove(&self, key: ObjectKey) -> Result<u64, BallastError> {
        match self.ask(&ObjectRequest::Remove { key }, &[]).await? {
            (ObjectReply::Removed { bytes }, _) => Ok(bytes),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// Every object, in the order of their keys.
    ///
    /// # Errors
    /// `UNAVAILABLE` when the node does not answer.
    pub async fn list(&self) -> Result<Vec<ObjectEntry>, BallastError> {
        let mut all: Vec<ObjectEntry> = Vec::new();
        loop {
            let after = all.last().map_or_else(String::new, |last| last.key.clone());
            match self.ask(&ObjectRequest::List { after }, &[]).await? {
                (ObjectReply::Listed { objects, more }, _) => {
                    let more = more && !objects.is_empty();
                    all.extend(objects);
                    if !more {
                        return Ok(all);
                    }
                }
                (other, _) => return Err(self.unexpected(&other)),
            }
        }
    }

    /// Removes every object and leaves managed groups alone; a dry run only counts. The answer is
    /// [`ObjectReply::Cleared`].
    ///
    /// # Errors
    /// `UNAVAILABLE` when the node does not answer.
    pub async fn clear(&self, dry_run: bool) -> Result<ObjectReply, BallastError> {
        match self.ask(&ObjectRequest::Clear { dry_run }, &[]).await? {
            (cleared @ ObjectReply::Cleared { .. }, _) => Ok(cleared),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    async fn ask(&self, request: &ObjectRequest, bytes: &[u8]) -> Result<(ObjectReply, Bytes), BallastError> {
        let node = &self.node;
        let body = object_message(request, bytes).map_err(|error| BallastError::invalid(error.to_string()))?;
        let asked = self.gateway.nats().request(subject::node_objects(node), body.into());
        let unavailable = |reason: String| BallastError::new(ErrorCode::Unavailable, reason);
        let answer = match tokio::time::timeout(PATIENCE, asked).await {
            Ok(Ok(answer)) => answer.payload,
            Ok(Err(error)) if error.kind() == RequestErrorKind::NoResponders => {
                return Err(unavailable(format!(
                    "node {node} does not listen; `ballast status` shows the nodes that do"
                )));
            }
            Ok(Err(error)) => return Err(unavailable(format!("node {node} was not reached: {error}"))),
            Err(_) => return Err(unavailable(format!("node {node} said nothing for {} s", PATIENCE.as_secs()))),
        };
        let (reply, at) = object_head::<ObjectReply>(&answer)
            .map_err(|error| unavailable(format!("node {node} answered something else than expected: {error}")))?;
        match reply {
            ObjectReply::Failed(error) => {
                Err(BallastError { message: format!("node {node}: {}", error.message), ..error })
            }
            reply => Ok((reply, answer.slice(at..))),
        }
    }

    fn unexpected(&self, reply: &ObjectReply) -> BallastError {
        let message = format!("node {} answered something else than what was asked: {reply:?}", self.node);
        BallastError::new(ErrorCode::Unavailable, message)
    }
}

//! The node's answers to requests about its ordinary objects, one NATS message each way (ARCHITECTURE.md, Ordinary objects).
//! What may be removed is decided by the store's guard.

use std::sync::Arc;

use async_nats::{Client, Message, Subscriber};
use ballast_schemas::{BallastError, ObjectReply, ObjectRequest, object_head, object_message, subject};
use ballast_transfer::{NodeStore, StoreError};
use bytes::Bytes;

/// Answers one request after the other: each is a moment's work in memory.
#[derive(Debug)]
pub(crate) struct ObjectDesk {
    client: Client,
    store: Arc<NodeStore>,
    requests: Subscriber,
}

impl ObjectDesk {
    pub(crate) async fn open(client: Client, store: Arc<NodeStore>) -> Result<Self, async_nats::SubscribeError> {
        let requests = client.subscribe(subject::node_objects(store.node())).await?;
        Ok(Self { client, store, requests })
    }

    /// Answers until the connection is closed.
    pub(crate) async fn serve(mut self) {
        while let Some(message) = futures::StreamExt::next(&mut self.requests).await {
            self.answer(message).await;
        }
    }

    async fn answer(&self, message: Message) {
        let Some(to) = message.reply.clone() else { return };
        let store = Arc::clone(&self.store);
        // It may wait for a lock that an import holds.
        let done = tokio::task::spawn_blocking(move || carry_out(&store, &message.payload)).await;
        let (reply, bytes) = match done {
            Ok(Ok(done)) => done,
            Ok(Err(error)) => (ObjectReply::Failed(error), Bytes::new()),
            Err(error) => {
                tracing::error!(%error, "a request about an object ended badly");
                return;
            }
        };
        let sent = match object_message(&reply, &bytes) {
            Ok(body) => self.client.publish(to, body.into()).await.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = sent {
            tracing::warn!(error, "an answer about an object was not sent");
        }
    }
}

fn carry_out(store: &NodeStore, message: &Bytes) -> Result<(ObjectReply, Bytes), BallastError> {
    let (request, at) = object_head::<ObjectRequest>(message)?;
    let (is_put, ends) = (matches!(request, ObjectRequest::Put { .. }), message[..at].ends_with(b"\n"));
    match (is_put, ends, message.len() - at) {
        // A message that was cut off would store an empty object.
        (true, false, _) => Err(BallastError::invalid(
            "the first line does not end: a put is a line of JSON, a line end, and then the object's bytes",
        )),
        (false, _, 1..) => {
            Err(BallastError::invalid("bytes follow the first line, which only a put has; send the line of JSON alone"))
        }
        _ => Ok(()),
    }?;
    perform(store, request, message.slice(at..)).map_err(|error| error.to_error())
}

fn perform(store: &NodeStore, request: ObjectRequest, body: Bytes) -> Result<(ObjectReply, Bytes), StoreError> {
    let reply = match request {
        ObjectRequest::Put { key } => {
            let bytes = body.len() as u64;
            // A copy of its own: a slice would keep the whole message in memory.
            ObjectReply::Stored { evicted: store.put_object(&key, Bytes::copy_from_slice(&body))?, bytes }
        }
        ObjectRequest::Get { key } => {
            let found = store.get_object(&key)?;
            return Ok((ObjectReply::Found { bytes: found.len() as u64 }, found));
        }
        ObjectRequest::Remove { key } => ObjectReply::Removed { bytes: store.remove_object(&key)? },
        ObjectRequest::List { after } => {
            let (objects, more) = store.list_objects(&after);
            ObjectReply::Listed { objects, more }
        }
        ObjectRequest::Clear { dry_run } => {
            let cleared = store.clear_objects(dry_run);
            ObjectReply::Cleared { objects: cleared.objects, bytes: cleared.bytes, skipped: cleared.skipped }
        }
    };
    Ok((reply, Bytes::new()))
}

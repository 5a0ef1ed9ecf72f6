//! Introductions: a node that starts says who it is and what it holds, and hears which cluster this is, the key that tokens are
//! signed with, and what the log knows of each of its instances. Nothing is ever deleted on a doubt.
//!
//! See ARCHITECTURE.md, Three authorities. Not here: what a node does with the answer (workers).

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, Message, Subscriber};
use ballast_journal::WaitError;
use ballast_schemas::subject::HELLO_SUBJECT;
use ballast_schemas::{BallastError, ErrorCode, HelloReply, LogPosition, NodeHello};
use bytes::Bytes;
use futures::StreamExt;
use tokio::task::JoinSet;

use crate::context::Context;
use crate::service::QUEUE_GROUP;

/// How long a replica that is behind what the node has seen gets to catch up.
const CATCH_UP: Duration = Duration::from_secs(3);

/// Listens for introductions.
pub(crate) async fn listen(client: &Client) -> Result<Subscriber, async_nats::SubscribeError> {
    client.queue_subscribe(HELLO_SUBJECT, QUEUE_GROUP.to_owned()).await
}

/// Answers introductions for as long as the subscription lives.
pub(crate) async fn answer_all(mut hellos: Subscriber, client: Client, context: Arc<Context>) {
    let mut answers = JoinSet::new();
    while let Some(message) = hellos.next().await {
        while answers.try_join_next().is_some() {}
        answers.spawn(answer(message, client.clone(), Arc::clone(&context)));
    }
}

async fn answer(message: Message, client: Client, context: Arc<Context>) {
    let Some(to) = message.reply else { return };
    let reply = match ballast_schemas::from_messagepack::<NodeHello>(&message.payload) {
        Ok(hello) => welcome(&context, &hello).await.unwrap_or_else(|error| HelloReply::Refused { error }),
        Err(error) => {
            HelloReply::Refused { error: BallastError::invalid(format!("not a node's introduction: {error}")) }
        }
    };
    match rmp_serde::to_vec_named(&reply) {
        Ok(body) => {
            if let Err(error) = client.publish(to, Bytes::from(body)).await {
                tracing::warn!(%error, "a node's introduction is not answered; it asks again");
            }
        }
        Err(error) => tracing::error!(%error, "the answer to a node's introduction cannot be encoded"),
    }
}

async fn welcome(context: &Context, hello: &NodeHello) -> Result<HelloReply, BallastError> {
    let node = &hello.node;
    if let Some(found) = hello.cluster_id.as_ref().filter(|found| **found != context.cluster_id) {
        let expected = &context.cluster_id;
        let message = format!(
            "node {node} belongs to cluster {found}, this is {expected}: give it this cluster's folders or that cluster's NATS address"
        );
        return Err(BallastError::new(ErrorCode::Conflict, message));
    }
    // What the node holds may be younger than what this replica has folded; only a replica past it can tell what it does not know.
    let held = hello.instances.iter().map(|instance| instance.position);
    let seen = held.chain([hello.seen]).max().unwrap_or(LogPosition::ZERO);
    match context.replica.wait_for(seen.seq, CATCH_UP).await {
        Ok(()) => {}
        Err(WaitError::TimedOut { wanted, at, .. }) => {
            let message = format!(
                "node {node} has seen log sequence {wanted}, but this log ends at {at}: it was restored from an older copy or is another one; bring the newer log back"
            );
            return Err(BallastError::new(ErrorCode::Conflict, message));
        }
        Err(WaitError::Stopped(error)) => {
            return Err(BallastError::new(ErrorCode::Unavailable, format!("this gateway has stopped: {error}")));
        }
    }
    let reply = context.replica.read(|state| HelloReply::Welcome {
        cluster_id: context.cluster_id.clone(),
        incarnation: state.cluster().map_or(0, |cluster| cluster.incarnation),
        log_seq: state.log_seq(),
        token_key: context.tokens.key_bytes(),
        standings: hello.instances.iter().map(|instance| state.instance_standing(instance)).collect(),
    });
    tracing::debug!(%node, incarnation = hello.incarnation, instances = hello.instances.len(), "node introduced");
    Ok(reply)
}

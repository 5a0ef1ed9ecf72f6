//! Work hints: wake-ups for workflow workers that an operation wants one.
//!
//! A hint is derivable from the fold and fences nothing (the claim in the log does). Every publishing replica repeats the
//! hint of each runnable operation every two seconds and on changes; the queue keeps one per operation and refuses doubles.
//! See ARCHITECTURE.md, Operations.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::jetstream::consumer::{AckPolicy, Consumer, pull};
use async_nats::jetstream::{AckKind, Message};
use ballast_schemas::{OperationId, OperationKind, subject};
use bytes::Bytes;
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use crate::publish::{PublishFailure, publish_once};
use crate::replica::Replica;
use crate::streams::{Streams, WORK_STREAM, recreate_work_stream};

const REPEAT_EVERY: Duration = Duration::from_secs(2);
/// Several folded entries become one look at the state.
const SETTLE: Duration = Duration::from_millis(5);
const ACK_TIMEOUT: Duration = Duration::from_secs(2);
/// A worker that says nothing about a hint for this long is taken for dead; the hint goes to another.
const WORKER_SILENCE: Duration = Duration::from_secs(5);
const CONSUMER: &str = "workers";
const RETRY_EVERY: Duration = Duration::from_millis(200);
/// One request waits this long at the server. Short, because a restarted server has forgotten it without a word. (The client
/// library's heartbeats for single requests are no way out: version 0.51 stops polling after one.)
const PULL_EXPIRES: Duration = Duration::from_secs(1);
const PULL_OVERDUE: Duration = Duration::from_millis(1_500);

/// What a hint says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct HintBody {
    operation_id: OperationId,
    kind: OperationKind,
}

/// Publishes hints for as long as it lives.
#[derive(Debug)]
pub struct HintPublisher {
    task: JoinHandle<()>,
}

impl HintPublisher {
    /// Starts publishing what `replica` says is runnable.
    pub fn start(streams: &Streams, replica: Replica) -> Self {
        let publisher = Publisher { streams: streams.clone(), replica, sent: HashMap::new() };
        Self { task: tokio::spawn(publisher.run()) }
    }
}

impl Drop for HintPublisher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Publisher {
    streams: Streams,
    replica: Replica,
    /// When the hint of each runnable operation was last sent.
    sent: HashMap<OperationId, Instant>,
}

impl Publisher {
    async fn run(mut self) {
        let mut changes = self.replica.changes();
        loop {
            let runnable: Vec<HintBody> = self.replica.read(|state| {
                let wants = state.runnable_operations();
                wants.map(|it| HintBody { operation_id: it.operation_id.clone(), kind: it.kind }).collect()
            });
            // What is not runnable any more is announced at once when it is again.
            let still: std::collections::HashSet<&OperationId> =
                runnable.iter().map(|hint| &hint.operation_id).collect();
            self.sent.retain(|id, _| still.contains(id));
            for hint in &runnable {
                let due = self.sent.get(&hint.operation_id).is_none_or(|at| at.elapsed() >= REPEAT_EVERY);
                if due && self.publish(hint).await {
                    self.sent.insert(hint.operation_id.clone(), Instant::now());
                }
            }
            tokio::select! {
                changed = changes.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    tokio::time::sleep(SETTLE).await;
                }
                () = tokio::time::sleep(REPEAT_EVERY / 4) => {}
            }
        }
    }

    /// Whether the hint is in the queue now.
    async fn publish(&self, hint: &HintBody) -> bool {
        let body = match rmp_serde::to_vec_named(hint) {
            Ok(body) => Bytes::from(body),
            Err(error) => {
                tracing::error!(operation = %hint.operation_id, %error, "hint cannot be encoded");
                return false;
            }
        };
        let subject = subject::work(hint.kind, &hint.operation_id);
        match publish_once(&self.streams.client, subject, HeaderMap::new(), body, ACK_TIMEOUT).await {
            // Full is the queue's way to say that this operation's hint is there already.
            Ok(_) | Err(PublishFailure::Full { .. }) => true,
            Err(failure) => {
                tracing::debug!(operation = %hint.operation_id, %failure, "hint not published");
                // A restart of a single server empties memory; on some it forgets the stream as well.
                if let Err(error) = recreate_work_stream(&self.streams).await {
                    tracing::debug!(%error, "the hint stream cannot be made");
                }
                false
            }
        }
    }
}

/// A hint taken from the queue. Unacknowledged, it goes to another worker after five seconds.
pub struct Hint {
    pub operation_id: OperationId,
    pub kind: OperationKind,
    message: Message,
}

impl std::fmt::Debug for Hint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hint")
            .field("operation_id", &self.operation_id)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

impl Hint {
    /// Takes the hint off the queue: the operation is claimed, or wants no worker any more.
    pub async fn ack(self) {
        self.answer(AckKind::Ack).await;
    }

    /// Gives the hint back; it comes again, here or elsewhere, after `delay`.
    pub async fn retry_after(self, delay: Duration) {
        self.answer(AckKind::Nak(Some(delay))).await;
    }

    async fn answer(self, kind: AckKind) {
        // A lost answer means a hint delivered twice, which costs a look at the state.
        if let Err(error) = self.message.ack_with(kind).await {
            tracing::debug!(operation = %self.operation_id, %error, "hint not acknowledged");
        }
    }
}

/// Takes hints from the queue; any number of workers may.
pub struct HintReader {
    streams: Streams,
    consumer: Option<Consumer<pull::Config>>,
    /// The request that is under way and when it is overdue; kept here so that a cancelled `next` loses nothing.
    request: Option<(pull::Batch, tokio::time::Instant)>,
}

impl std::fmt::Debug for HintReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HintReader")
    }
}

impl HintReader {
    pub fn new(streams: &Streams) -> Self {
        Self { streams: streams.clone(), consumer: None, request: None }
    }

    /// The next hint; waits for one, through restarts of the server. Cancel safe.
    pub async fn next(&mut self) -> Hint {
        loop {
            let Some((request, overdue_at)) = self.request.as_mut() else {
                if let Err(reason) = self.ask().await {
                    tracing::debug!(reason, "hints cannot be read yet");
                    self.consumer = None;
                    tokio::time::sleep(RETRY_EVERY).await;
                }
                continue;
            };
            let message = match tokio::time::timeout_at(*overdue_at, request.next()).await {
                Ok(Some(Ok(message))) => message,
                // The request ran out without a hint: ask again.
                Ok(None) => {
                    self.request = None;
                    continue;
                }
                // The stream lives in memory, and a restarted server has forgotten stream and consumer.
                Ok(Some(Err(_))) | Err(_) => {
                    self.request = None;
                    self.consumer = None;
                    continue;
                }
            };
            self.request = None;
            match ballast_schemas::from_messagepack::<HintBody>(&message.payload) {
                Ok(body) => return Hint { operation_id: body.operation_id, kind: body.kind, message },
                Err(error) => {
                    tracing::warn!(subject = %message.subject, %error, "unreadable hint dropped");
                    let _ = message.ack_with(AckKind::Term).await;
                }
            }
        }
    }

    /// Asks for exactly one hint: what a worker has not begun stays for the others.
    async fn ask(&mut self) -> Result<(), String> {
        let consumer = match &self.consumer {
            Some(consumer) => consumer,
            None => {
                let config = pull::Config {
                    durable_name: Some(CONSUMER.to_owned()),
                    ack_policy: AckPolicy::Explicit,
                    ack_wait: WORKER_SILENCE,
                    memory_storage: true,
                    ..pull::Config::default()
                };
                let created = self.streams.context.create_consumer_on_stream(config, WORK_STREAM).await;
                self.consumer.insert(created.map_err(|error| error.to_string())?)
            }
        };
        let request = consumer.batch().max_messages(1).expires(PULL_EXPIRES).messages().await;
        self.request = Some((request.map_err(|error| error.to_string())?, tokio::time::Instant::now() + PULL_OVERDUE));
        Ok(())
    }
}

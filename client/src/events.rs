//! Following the event stream: in order, from a position one can come back to, through restarts of the server
//! (ARCHITECTURE.md, Streams and buckets). Consumers see an event at least once; its position tells repeats.

use std::time::Duration;

use async_nats::connection::State as ConnectionState;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::{self, Context, Message};
use ballast_schemas::subject::{EVENTS_STREAM, events_of, token};
use ballast_schemas::{BallastError, Component, ErrorCode, Event, LineageKey, RevisionIdentity, TenantId};
use futures::StreamExt;

use crate::gateway::Gateway;

const BATCH: usize = 256;
const HEARTBEAT: Duration = Duration::from_secs(1);
const PULL_EXPIRES: Duration = Duration::from_secs(15);
const CONSUMER_IDLE: Duration = Duration::from_secs(30);
const RETRY_EVERY: Duration = Duration::from_millis(200);
const CONNECTION_LOOK_EVERY: Duration = Duration::from_millis(250);
/// An answer of the JetStream API is waited for this long when the feed is opened.
const OPEN_PATIENCE: Duration = Duration::from_secs(10);

/// Whose events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventFilter {
    /// Every tenant's; the server may not allow it.
    All,
    /// One tenant's.
    Tenant(TenantId),
    /// Those of every revision of a model.
    Resource {
        /// Whose.
        tenant: TenantId,
        /// Where.
        namespace: Component,
        /// Which model.
        resource_id: Component,
    },
    /// Those of every generation of a lineage.
    Lineage(LineageKey),
    /// Those of one generation.
    Revision(RevisionIdentity),
}

impl EventFilter {
    /// The subject: seven tokens, so that outcomes of submitted commands (five) stay out.
    fn subject(&self) -> String {
        match self {
            Self::All => "ballast.events.*.*.*.*.*".to_owned(),
            Self::Tenant(tenant) => format!("ballast.events.{}.*.*.*.*", token(tenant.as_str())),
            Self::Resource { tenant, namespace, resource_id } => {
                let (namespace, resource) = (token(namespace.as_str()), token(resource_id.as_str()));
                format!("ballast.events.{}.{namespace}.{resource}.*.*", token(tenant.as_str()))
            }
            Self::Lineage(lineage) => {
                let (namespace, resource) = (token(lineage.namespace.as_str()), token(lineage.resource_id.as_str()));
                let tenant = token(lineage.tenant_id.as_str());
                format!("ballast.events.{tenant}.{namespace}.{resource}.{}.*", token(lineage.revision.as_str()))
            }
            Self::Revision(identity) => events_of(identity),
        }
    }
}

/// Where to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventStart {
    /// What comes from now on.
    New,
    /// The oldest event that is kept.
    All,
    /// Behind this stream sequence, as an earlier [`FollowedEvent`] told it.
    After(u64),
}

/// An event and where it stands in the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FollowedEvent {
    /// Its stream sequence, for [`EventStart::After`].
    pub stream_seq: u64,
    /// The event.
    pub event: Event,
}

/// Follows the events.
pub struct EventFeed {
    client: async_nats::Client,
    context: Context,
    subject: String,
    start: EventStart,
    last_seq: u64,
    open: Option<Open>,
}

struct Open {
    messages: pull::Stream,
    was_connected: bool,
}

impl std::fmt::Debug for EventFeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventFeed")
            .field("subject", &self.subject)
            .field("last_seq", &self.last_seq)
            .finish_non_exhaustive()
    }
}

impl EventFeed {
    /// Begins to follow. Once this has returned, nothing that happens is missed.
    ///
    /// # Errors
    /// `UNAVAILABLE` when the event stream is not there or does not answer.
    pub async fn follow(gateway: &Gateway, filter: EventFilter, start: EventStart) -> Result<Self, BallastError> {
        let client = gateway.nats().clone();
        let mut feed = Self {
            context: jetstream::new(client.clone()),
            client,
            subject: filter.subject(),
            start,
            last_seq: if let EventStart::After(seq) = start { seq } else { 0 },
            open: None,
        };
        let opened = tokio::time::timeout(OPEN_PATIENCE, feed.reopen()).await;
        let reason = match opened {
            Ok(Ok(())) => return Ok(feed),
            Ok(Err(reason)) => reason,
            Err(_) => "it does not answer".to_owned(),
        };
        let message = format!(
            "the stream {EVENTS_STREAM} can not be followed ({reason}): is a gateway running on this NATS server?"
        );
        Err(BallastError::new(ErrorCode::Unavailable, message))
    }

    /// The next event; waits for it, through restarts of the server. Cancel safe.
    pub async fn next(&mut self) -> FollowedEvent {
        loop {
            let Some(open) = self.open.as_mut() else {
                if let Err(reason) = self.reopen().await {
                    tracing::debug!(reason, "the event stream can not be followed yet");
                    tokio::time::sleep(RETRY_EVERY).await;
                }
                continue;
            };
            let message = tokio::select! {
                message = open.messages.next() => message,
                () = tokio::time::sleep(CONNECTION_LOOK_EVERY) => {
                    let connected = self.client.connection_state() == ConnectionState::Connected;
                    if connected && !open.was_connected {
                        // The consumer lived in the server's memory.
                        self.open = None;
                    } else {
                        open.was_connected = connected;
                    }
                    continue;
                }
            };
            let Some(Ok(message)) = message else {
                self.open = None;
                continue;
            };
            if let Some(followed) = self.take(&message) {
                return followed;
            }
        }
    }

    fn take(&mut self, message: &Message) -> Option<FollowedEvent> {
        let stream_seq = message.info().ok()?.stream_sequence;
        if stream_seq <= self.last_seq {
            return None;
        }
        self.last_seq = stream_seq;
        match serde_json::from_slice(&message.payload) {
            Ok(event) => Some(FollowedEvent { stream_seq, event }),
            Err(error) => {
                tracing::warn!(stream_seq, %error, "an event can not be read; is the gateway newer than this client?");
                None
            }
        }
    }

    async fn reopen(&mut self) -> Result<(), String> {
        let info = self.context.get_stream(EVENTS_STREAM).await.map_err(|error| error.to_string())?;
        let last = info.cached_info().state.last_sequence;
        if last < self.last_seq {
            // The stream was made anew; what it holds now was never seen.
            self.last_seq = 0;
            self.start = EventStart::All;
        }
        if self.start == EventStart::New && self.last_seq == 0 {
            // Counted from here, so that a second consumer does not skip what came while the first one was lost.
            self.start = EventStart::After(last);
            self.last_seq = last;
        }
        let deliver_policy = match self.last_seq {
            0 => DeliverPolicy::All,
            last => DeliverPolicy::ByStartSequence { start_sequence: last + 1 },
        };
        let config = pull::Config {
            deliver_policy,
            filter_subject: self.subject.clone(),
            ack_policy: AckPolicy::None,
            inactive_threshold: CONSUMER_IDLE,
            memory_storage: true,
            num_replicas: 1,
            ..pull::Config::default()
        };
        let consumer =
            self.context.create_consumer_on_stream(config, EVENTS_STREAM).await.map_err(|error| error.to_string())?;
        let opened =
            consumer.stream().max_messages_per_batch(BATCH).expires(PULL_EXPIRES).heartbeat(HEARTBEAT).messages().await;
        self.open = Some(Open { messages: opened.map_err(|error| error.to_string())?, was_connected: true });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_a_subject_that_user_text_can_not_widen() {
        let identity = RevisionIdentity::new("t", "n.*", "m>", "main", 3).unwrap();
        assert_eq!(EventFilter::Revision(identity.clone()).subject(), "ballast.events.t.n%2E%2A.m%3E.main.3");
        assert_eq!(EventFilter::Lineage(identity.lineage()).subject(), "ballast.events.t.n%2E%2A.m%3E.main.*");
        let resource = EventFilter::Resource {
            tenant: identity.tenant_id.clone(),
            namespace: identity.namespace.clone(),
            resource_id: identity.resource_id.clone(),
        };
        assert_eq!(resource.subject(), "ballast.events.t.n%2E%2A.m%3E.*.*");
        assert_eq!(EventFilter::Tenant(identity.tenant_id.clone()).subject(), "ballast.events.t.*.*.*.*");
    }
}

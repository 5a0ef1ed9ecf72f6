//! The event stream: what the fold says happened, stored in log order for orchestrators to follow.
//!
//! Publishing replicas store every event under its log position; repeats are filtered by the stream (two minutes) and by
//! readers (by position). What an event says is `ballast_schemas::Event`. See ARCHITECTURE.md, The log and the fold.

use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream::Context;
use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::GetStreamErrorKind;
use ballast_schemas::{Event, LogPosition, RevisionIdentity, TenantId, subject};
use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::follow::{Followed, Follower, Start};
use crate::publish::publish_once;
use crate::streams::{EVENTS_STREAM, EVENTS_SUBJECTS, Streams};

/// Names the event's position (`<seq>.<index>.<n>`) on every message of the stream that is an event.
const POSITION_HEADER: &str = "Ballast-Position";
const ACK_TIMEOUT: Duration = Duration::from_secs(3);
const RETRY_EVERY: Duration = Duration::from_millis(200);
/// Folded entries that may wait for their events to be stored; beyond, the fold waits.
const BACKLOG_ENTRIES: usize = 16_384;
/// After this long without a stored event another replica may be far ahead, beyond what the stream's filter remembers.
const REREAD_AFTER: Duration = Duration::from_secs(60);
/// How far back the last event is searched behind messages that are none (outcomes of submitted requests).
const LOOK_BACK_MAX: u64 = 1_000;

/// An event's place: log position and number among the events of one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct EventPosition {
    pub seq: u64,
    pub index: u32,
    pub n: u32,
}

impl EventPosition {
    fn of(event: &Event) -> Self {
        Self { seq: event.position.seq, index: event.position.index, n: event.n }
    }

    fn parse(text: &str) -> Option<Self> {
        let (position, n) = text.rsplit_once('.')?;
        let LogPosition { seq, index } = position.parse().ok()?;
        Some(Self { seq, index, n: n.parse().ok()? })
    }
}

/// The events of one folded entry.
#[derive(Debug)]
pub(crate) struct EventBatch {
    pub seq: u64,
    pub events: Vec<Event>,
}

/// Where a replica leaves its events; see [`EventPublisher::start`].
#[derive(Debug, Clone)]
pub struct EventSink {
    batches: mpsc::Sender<EventBatch>,
    stored_through: watch::Receiver<u64>,
}

impl EventSink {
    /// Waits while the backlog is full. An ended publisher takes nothing, and says so by `false`.
    pub(crate) async fn push(&self, batch: EventBatch) -> bool {
        self.batches.send(batch).await.is_ok()
    }

    /// Waits until every event of the entries up to `seq` is stored; `false` when the publisher ended.
    pub(crate) async fn wait_stored(&self, seq: u64) -> bool {
        self.stored_through.clone().wait_for(|stored| *stored >= seq).await.is_ok()
    }
}

/// Stores events for as long as it lives.
#[derive(Debug)]
pub struct EventPublisher {
    task: JoinHandle<()>,
}

impl EventPublisher {
    /// Starts a publisher; a replica that is given the sink feeds it.
    pub fn start(streams: &Streams) -> (Self, EventSink) {
        let (batches, receiver) = mpsc::channel(BACKLOG_ENTRIES);
        let (stored, stored_through) = watch::channel(0);
        let publisher = Publisher { streams: streams.clone(), batches: receiver, stored };
        (Self { task: tokio::spawn(publisher.run()) }, EventSink { batches, stored_through })
    }
}

impl Drop for EventPublisher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Publisher {
    streams: Streams,
    batches: mpsc::Receiver<EventBatch>,
    stored: watch::Sender<u64>,
}

impl Publisher {
    async fn run(mut self) {
        let mut last = self.last_stored().await;
        let mut known_at = Instant::now();
        while let Some(EventBatch { seq, events }) = self.batches.recv().await {
            for event in events {
                let position = EventPosition::of(&event);
                if known_at.elapsed() > REREAD_AFTER {
                    last = self.last_stored().await;
                }
                if position > last {
                    self.store(&event).await;
                    last = position;
                }
                known_at = Instant::now();
            }
            self.stored.send_replace(seq);
        }
    }

    async fn last_stored(&self) -> EventPosition {
        loop {
            match last_stored_position(&self.streams.context).await {
                Ok(last) => return last.unwrap_or_default(),
                Err(reason) => tracing::debug!(reason, "the event stream does not answer yet"),
            }
            tokio::time::sleep(RETRY_EVERY).await;
        }
    }

    /// Tries until it is stored: a later event must not overtake it.
    async fn store(&self, event: &Event) {
        let body = match serde_json::to_vec(event) {
            Ok(body) => Bytes::from(body),
            Err(error) => {
                tracing::error!(id = event.message_id(), %error, "event cannot be encoded and is left out");
                return;
            }
        };
        let mut warned = false;
        loop {
            let mut headers = HeaderMap::new();
            headers.insert(NATS_MESSAGE_ID, event.message_id());
            headers.insert(POSITION_HEADER, event.message_id());
            let subject = subject::events_of(event.body.identity());
            match publish_once(&self.streams.client, subject, headers, body.clone(), ACK_TIMEOUT).await {
                Ok(_) => return,
                Err(failure) if warned => tracing::debug!(id = event.message_id(), %failure, "event not stored yet"),
                Err(failure) => {
                    warned = true;
                    tracing::warn!(id = event.message_id(), %failure, "event not stored yet: trying on");
                }
            }
            tokio::time::sleep(RETRY_EVERY).await;
        }
    }
}

/// The position of the newest event in the stream; `None` when there is none (or no stream).
pub(crate) async fn last_stored_position(context: &Context) -> Result<Option<EventPosition>, String> {
    let stream = match context.get_stream(EVENTS_STREAM).await {
        Ok(stream) => stream,
        Err(error) => {
            return match error.kind() {
                GetStreamErrorKind::JetStream(answer) if answer.error_code() == ErrorCode::STREAM_NOT_FOUND => Ok(None),
                _ => Err(error.to_string()),
            };
        }
    };
    let state = &stream.cached_info().state;
    if state.messages == 0 {
        return Ok(None);
    }
    let oldest = state.first_sequence.max(state.last_sequence.saturating_sub(LOOK_BACK_MAX));
    for seq in (oldest..=state.last_sequence).rev() {
        // One that just aged out is not there any more.
        let Ok(message) = stream.get_raw_message(seq).await else { continue };
        if let Some(position) =
            message.headers.get(POSITION_HEADER).and_then(|value| EventPosition::parse(value.as_str()))
        {
            return Ok(Some(position));
        }
    }
    Ok(None)
}

/// Which events to follow.
#[derive(Debug, Clone)]
pub enum EventFilter {
    All,
    Tenant(TenantId),
    Revision(RevisionIdentity),
}

impl EventFilter {
    fn subject(&self) -> String {
        match self {
            Self::All => EVENTS_SUBJECTS.to_owned(),
            Self::Tenant(tenant) => format!("ballast.events.{}.>", subject::token(tenant.as_str())),
            Self::Revision(identity) => subject::events_of(identity),
        }
    }
}

/// Where to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventStart {
    /// The oldest event still kept.
    Oldest,
    /// What happens from now on.
    Now,
    /// Behind the event that [`FollowedEvent::stream_seq`] named.
    After { stream_seq: u64 },
}

/// An event and its place in the stream, for going on after a restart.
#[derive(Debug, Clone, PartialEq)]
pub struct FollowedEvent {
    pub event: Event,
    pub stream_seq: u64,
}

/// Follows the event stream in log order, each event once.
pub struct EventReader {
    follower: Follower,
    last: EventPosition,
}

impl std::fmt::Debug for EventReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventReader").field("last", &self.last).finish_non_exhaustive()
    }
}

impl EventReader {
    /// Begins following; with [`EventStart::Now`] nothing that happens after this returned is missed.
    pub async fn start(streams: &Streams, filter: &EventFilter, start: EventStart) -> Self {
        let start = match start {
            EventStart::Oldest => Start::All,
            EventStart::Now => Start::New,
            EventStart::After { stream_seq } => Start::Seq(stream_seq + 1),
        };
        let mut follower = Follower::new(streams, EVENTS_STREAM, filter.subject(), start);
        follower.begin().await;
        Self { follower, last: EventPosition::default() }
    }

    /// The next event; waits for it, through restarts of the server. Cancel safe.
    pub async fn next(&mut self) -> FollowedEvent {
        loop {
            // Events keep their log positions when the stream is made anew, so nothing is to be forgotten then.
            let Followed::Message { message, stream_seq, .. } = self.follower.next().await else { continue };
            // Outcomes of submitted requests share the stream; only events name a position.
            if message.headers.as_ref().and_then(|headers| headers.get(POSITION_HEADER)).is_none() {
                continue;
            }
            match serde_json::from_slice::<Event>(&message.payload) {
                Ok(event) => {
                    let position = EventPosition::of(&event);
                    if position > self.last || self.last == EventPosition::default() {
                        self.last = position;
                        return FollowedEvent { event, stream_seq };
                    }
                }
                Err(error) => tracing::warn!(subject = %message.subject, %error, "unreadable event skipped"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_read_back_and_ordered_by_number_not_by_text() {
        let read = |text: &str| EventPosition::parse(text).unwrap();
        assert_eq!(read("57.3.1"), EventPosition { seq: 57, index: 3, n: 1 });
        assert!(read("9.0.0") < read("10.0.0") && read("10.2.0") < read("10.10.0") && read("10.2.2") < read("10.2.10"));
        assert_eq!(EventPosition::parse("57.3"), None);
    }
}

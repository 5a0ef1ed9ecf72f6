//! Follows a stream that may have holes (events, inventories): an ephemeral consumer that is made anew behind the last
//! message whenever it goes quiet.
//!
//! Not the log's tail: that one (`jetstream_log.rs`) treats every hole as an error.

use std::time::Duration;

use async_nats::connection::State as ConnectionState;
use async_nats::jetstream::Message;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use futures::StreamExt;

use crate::streams::Streams;

const BATCH: usize = 256;
const HEARTBEAT: Duration = Duration::from_secs(1);
const PULL_EXPIRES: Duration = Duration::from_secs(15);
const CONSUMER_IDLE: Duration = Duration::from_secs(30);
const RETRY_EVERY: Duration = Duration::from_millis(200);
const CONNECTION_LOOK_EVERY: Duration = Duration::from_millis(250);

/// Where to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// The oldest message there is.
    All,
    /// What comes from now on.
    New,
    /// The last message of every subject, then what comes.
    LastPerSubject,
    /// From this stream sequence on.
    Seq(u64),
}

/// A message, or the news that the stream was made anew and what was delivered before is void.
#[derive(Debug)]
pub(crate) enum Followed {
    Message { message: Box<Message>, stream_seq: u64 },
    StartedOver,
}

pub(crate) struct Follower {
    streams: Streams,
    stream: &'static str,
    filter: String,
    start: Start,
    /// The last stream sequence delivered, once there was one.
    last_seq: u64,
    open: Option<Open>,
}

struct Open {
    messages: pull::Stream,
    was_connected: bool,
}

impl Follower {
    pub(crate) fn new(streams: &Streams, stream: &'static str, filter: String, start: Start) -> Self {
        Self { streams: streams.clone(), stream, filter, start, last_seq: 0, open: None }
    }

    /// Makes the consumer now, so that [`Start::New`] counts from here and not from the first `next`.
    pub(crate) async fn begin(&mut self) {
        while self.open.is_none() {
            if let Err(reason) = self.reopen().await {
                tracing::debug!(stream = self.stream, reason, "cannot follow yet");
                tokio::time::sleep(RETRY_EVERY).await;
            }
        }
    }

    /// The next message; waits for it, through restarts of the server. Cancel safe.
    pub(crate) async fn next(&mut self) -> Followed {
        loop {
            let Some(open) = self.open.as_mut() else {
                match self.reopen().await {
                    Ok(true) => return Followed::StartedOver,
                    Ok(false) => {}
                    Err(reason) => {
                        tracing::debug!(stream = self.stream, reason, "cannot follow yet");
                        tokio::time::sleep(RETRY_EVERY).await;
                    }
                }
                continue;
            };
            let message = tokio::select! {
                message = open.messages.next() => message,
                () = tokio::time::sleep(CONNECTION_LOOK_EVERY) => {
                    let connected = self.streams.client.connection_state() == ConnectionState::Connected;
                    if connected && !open.was_connected {
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
            let Ok(stream_seq) = message.info().map(|info| info.stream_sequence) else { continue };
            if stream_seq <= self.last_seq {
                continue;
            }
            self.last_seq = stream_seq;
            return Followed::Message { message: Box::new(message), stream_seq };
        }
    }

    /// Makes a consumer; whether the stream is another one than before.
    async fn reopen(&mut self) -> Result<bool, String> {
        let info = self.streams.context.get_stream(self.stream).await.map_err(|error| error.to_string())?;
        let started_over = info.cached_info().state.last_sequence < self.last_seq;
        if started_over {
            self.last_seq = 0;
        }
        let deliver_policy = match (self.last_seq, self.start) {
            (0, Start::All) => DeliverPolicy::All,
            (0, Start::New) => DeliverPolicy::New,
            (0, Start::LastPerSubject) => DeliverPolicy::LastPerSubject,
            (0, Start::Seq(seq)) => DeliverPolicy::ByStartSequence { start_sequence: seq.max(1) },
            (last, _) => DeliverPolicy::ByStartSequence { start_sequence: last + 1 },
        };
        if self.start == Start::New && self.last_seq == 0 {
            // A second consumer must not skip what came while the first one was lost.
            self.start = Start::Seq(info.cached_info().state.last_sequence + 1);
        }
        let config = pull::Config {
            deliver_policy,
            filter_subject: self.filter.clone(),
            ack_policy: AckPolicy::None,
            inactive_threshold: CONSUMER_IDLE,
            memory_storage: true,
            num_replicas: 1,
            ..pull::Config::default()
        };
        let consumer = self
            .streams
            .context
            .create_consumer_on_stream(config, self.stream)
            .await
            .map_err(|error| error.to_string())?;
        let opened =
            consumer.stream().max_messages_per_batch(BATCH).expires(PULL_EXPIRES).heartbeat(HEARTBEAT).messages().await;
        let messages = opened.map_err(|error| error.to_string())?;
        self.open = Some(Open { messages, was_connected: true });
        Ok(started_over)
    }
}

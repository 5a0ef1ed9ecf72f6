//! The log on a JetStream stream.
//!
//! Appends are sent again under the same id while their outcome is unknown. The tail is a reader of our own: an ephemeral
//! pull consumer with a heartbeat of one second that is made anew behind the last entry whenever anything looks wrong,
//! because a purge is silent to a consumer and the client library's ordered consumer stalls for 15 s after a server restart.
//! See ARCHITECTURE.md, The log and the fold.

use std::time::{Duration, Instant};

use async_nats::connection::State as ConnectionState;
use async_nats::header::{NATS_EXPECTED_LAST_SEQUENCE, NATS_MESSAGE_ID};
use async_nats::jetstream::consumer::{AckPolicy, Consumer, DeliverPolicy, pull};
use async_nats::jetstream::context::GetStreamErrorKind;
use async_nats::jetstream::{self, Context, ErrorCode};
use async_nats::{Client, HeaderMap};
use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;

use crate::log::{AppendError, Log, LogBounds, LogError, Record, Tail, TailError};
use crate::publish::{PublishFailure, publish_once};
use crate::streams::{LEADER_READS_FOR, LOG_STREAM, LOG_SUBJECT, Streams};

/// How long an append with an unknown outcome is sent again. An unclean leader loss takes up to 7.1 s; the stream remembers
/// ids for two minutes.
const APPEND_PATIENCE: Duration = Duration::from_secs(20);
const ACK_TIMEOUT: Duration = Duration::from_secs(3);
const APPEND_RETRY_EVERY: Duration = Duration::from_millis(100);

const TAIL_BUFFER: usize = 256;
const TAIL_BATCH: usize = 256;
const HEARTBEAT: Duration = Duration::from_secs(1);
const PULL_EXPIRES: Duration = Duration::from_secs(15);
const CONSUMER_IDLE: Duration = Duration::from_secs(30);
const TAIL_RETRY_EVERY: Duration = Duration::from_millis(100);
const CONNECTION_LOOK_EVERY: Duration = Duration::from_millis(250);
/// A stream that the server denies for this long is gone, not on its way.
const MISSING_AFTER: Duration = Duration::from_secs(15);

/// The stream as its leader describes it.
struct StreamState {
    bounds: LogBounds,
    is_replicated: bool,
}

/// The log of one cluster.
#[derive(Debug, Clone)]
pub struct JetStreamLog {
    client: Client,
    context: Context,
}

impl JetStreamLog {
    /// The log among `streams`.
    pub fn new(streams: &Streams) -> Self {
        Self { client: streams.client.clone(), context: streams.context.clone() }
    }

    async fn append_until_known(
        &self,
        id: &str,
        bytes: Bytes,
        expected_last_seq: Option<u64>,
    ) -> Result<u64, AppendError> {
        let started = Instant::now();
        // Once a copy was sent its outcome is unknown until the server says something; before that nothing can be stored.
        let mut sent = false;
        let mut reason = "not connected to NATS".to_owned();
        loop {
            // While disconnected the client library would queue every repeat; one is enough once the connection is back.
            if self.client.connection_state() == ConnectionState::Connected {
                let headers = append_headers(id, expected_last_seq);
                sent = true;
                match publish_once(&self.client, LOG_SUBJECT.to_owned(), headers, bytes.clone(), ACK_TIMEOUT).await {
                    Ok(seq) => return Ok(seq),
                    Err(PublishFailure::Unknown { reason: why }) => reason = why,
                    Err(PublishFailure::Full { description }) => return Err(AppendError::Full { description }),
                    Err(PublishFailure::WrongLastSequence { description }) => {
                        let expected = expected_last_seq.unwrap_or_default();
                        return Err(AppendError::WrongLastSequence { expected, description });
                    }
                    Err(failure @ (PublishFailure::Rejected { .. } | PublishFailure::Unsendable { .. })) => {
                        return Err(AppendError::Rejected { reason: failure.to_string() });
                    }
                }
            }
            let waited = started.elapsed();
            if waited >= APPEND_PATIENCE {
                let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
                return Err(match sent {
                    true => AppendError::OutcomeUnknown { id: id.to_owned(), waited_ms, reason },
                    false => AppendError::Unreachable { reason },
                });
            }
            tokio::time::sleep(APPEND_RETRY_EVERY).await;
        }
    }

    async fn stream_state(&self) -> Result<StreamState, LogError> {
        match self.context.get_stream(LOG_STREAM).await {
            Ok(stream) => {
                let info = stream.cached_info();
                let last_seq = info.state.last_sequence;
                // An empty stream reports first = last + 1, a new one first = 0.
                let first_seq = if info.state.messages == 0 { last_seq + 1 } else { info.state.first_sequence };
                let bytes_max = u64::try_from(info.config.max_bytes).ok().filter(|max| *max > 0);
                let bounds = LogBounds { first_seq, last_seq, bytes: info.state.bytes, bytes_max };
                Ok(StreamState { bounds, is_replicated: info.config.num_replicas > 1 })
            }
            Err(error) => Err(match error.kind() {
                GetStreamErrorKind::JetStream(answer) if answer.error_code() == ErrorCode::STREAM_NOT_FOUND => {
                    LogError::Missing
                }
                _ => LogError::Unreachable { reason: error.to_string() },
            }),
        }
    }
}

fn append_headers(id: &str, expected_last_seq: Option<u64>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(NATS_MESSAGE_ID, id);
    if let Some(expected) = expected_last_seq {
        headers.insert(NATS_EXPECTED_LAST_SEQUENCE, expected.to_string());
    }
    headers
}

impl Log for JetStreamLog {
    fn append<'a>(
        &'a self,
        id: &'a str,
        bytes: Bytes,
        expected_last_seq: Option<u64>,
    ) -> BoxFuture<'a, Result<u64, AppendError>> {
        Box::pin(self.append_until_known(id, bytes, expected_last_seq))
    }

    fn tail(&self, from_seq: u64) -> Tail {
        let (sender, receiver) = mpsc::channel(TAIL_BUFFER);
        let reader = TailReader { log: self.clone(), next: from_seq.max(1), records: sender };
        Tail::new(receiver, tokio::spawn(reader.run()))
    }

    fn bounds(&self) -> BoxFuture<'_, Result<LogBounds, LogError>> {
        Box::pin(async move { self.stream_state().await.map(|state| state.bounds) })
    }

    fn trim(&self, up_to_seq: u64) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async move {
            let unreachable = |reason: String| LogError::Unreachable { reason };
            let stream =
                self.context.get_stream_no_info(LOG_STREAM).await.map_err(|error| unreachable(error.to_string()))?;
            // The purge keeps the entry at the given sequence.
            let purged = stream.purge().sequence(up_to_seq.saturating_add(1)).await;
            purged.map(drop).map_err(|error| unreachable(error.to_string()))
        })
    }
}

type LogConsumer = Consumer<pull::Config>;

/// Why one consumer is given up for another, or the tail for good.
enum ReadEnd {
    /// Make another consumer behind the last entry.
    Again(String),
    Failed(TailError),
    /// Nobody listens any more.
    Dropped,
}

struct TailReader {
    log: JetStreamLog,
    /// The sequence that must come next.
    next: u64,
    records: mpsc::Sender<Result<Record, TailError>>,
}

impl TailReader {
    async fn run(mut self) {
        let mut suspect_since: Option<Instant> = None;
        loop {
            let end = match self.prepare(&mut suspect_since).await {
                Ok(consumer) => {
                    suspect_since = None;
                    let end = self.read(&consumer).await;
                    self.discard(consumer);
                    end
                }
                Err(end) => end,
            };
            match end {
                ReadEnd::Again(reason) => tracing::debug!(next = self.next, reason, "the log's tail starts again"),
                ReadEnd::Failed(error) => {
                    let _ = self.records.send(Err(error)).await;
                    return;
                }
                ReadEnd::Dropped => return,
            }
            tokio::time::sleep(TAIL_RETRY_EVERY).await;
        }
    }

    /// Checks that the log still holds what must come next, and makes a consumer there.
    async fn prepare(&self, suspect_since: &mut Option<Instant>) -> Result<LogConsumer, ReadEnd> {
        let mut unless_it_passes = |patience: Duration, error: TailError| {
            let since = *suspect_since.get_or_insert_with(Instant::now);
            match since.elapsed() >= patience {
                true => ReadEnd::Failed(error),
                false => ReadEnd::Again(error.to_string()),
            }
        };
        let StreamState { bounds: LogBounds { first_seq: first, last_seq: last, .. }, is_replicated } =
            match self.log.stream_state().await {
                Ok(state) => state,
                Err(LogError::Unreachable { reason }) => return Err(ReadEnd::Again(reason)),
                Err(LogError::Missing) => return Err(unless_it_passes(MISSING_AFTER, TailError::Missing)),
            };
        if last + 1 < self.next {
            let patience = if is_replicated { LEADER_READS_FOR } else { Duration::ZERO };
            return Err(unless_it_passes(patience, TailError::Regressed { seen: self.next - 1, last }));
        }
        if first > self.next {
            return Err(ReadEnd::Failed(TailError::TrimGap { expected: self.next, first }));
        }
        let config = pull::Config {
            description: Some("Ballast log tail".to_owned()),
            deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: self.next },
            ack_policy: AckPolicy::None,
            inactive_threshold: CONSUMER_IDLE,
            memory_storage: true,
            num_replicas: 1,
            ..pull::Config::default()
        };
        self.log
            .context
            .create_consumer_on_stream(config, LOG_STREAM)
            .await
            .map_err(|error| ReadEnd::Again(error.to_string()))
    }

    async fn read(&mut self, consumer: &LogConsumer) -> ReadEnd {
        let opened = consumer
            .stream()
            .max_messages_per_batch(TAIL_BATCH)
            .expires(PULL_EXPIRES)
            .heartbeat(HEARTBEAT)
            .messages()
            .await;
        let mut messages = match opened {
            Ok(messages) => messages,
            Err(error) => return ReadEnd::Again(error.to_string()),
        };
        let mut look = tokio::time::interval(CONNECTION_LOOK_EVERY);
        let mut was_connected = true;
        loop {
            let message = tokio::select! {
                message = messages.next() => message,
                _ = look.tick() => {
                    // A restarted server has forgotten the consumer: do not wait for heartbeats to run out.
                    let connected = self.log.client.connection_state() == ConnectionState::Connected;
                    if connected && !was_connected {
                        return ReadEnd::Again("reconnected".to_owned());
                    }
                    was_connected = connected;
                    continue;
                }
                () = self.records.closed() => return ReadEnd::Dropped,
            };
            let record = match message {
                Some(Ok(message)) => match record_of(message) {
                    Ok(record) => record,
                    Err(reason) => return ReadEnd::Again(reason),
                },
                Some(Err(error)) => return ReadEnd::Again(error.to_string()),
                None => return ReadEnd::Again("the consumer ended".to_owned()),
            };
            if record.seq < self.next {
                // Delivered twice around a reconnect.
                continue;
            }
            if record.seq > self.next {
                return self.explain_hole(record.seq).await;
            }
            self.next += 1;
            if self.records.send(Ok(record)).await.is_err() {
                return ReadEnd::Dropped;
            }
        }
    }

    /// A sequence was skipped: trimmed away meanwhile, lost on the way to us, or missing in the stream itself.
    async fn explain_hole(&self, found: u64) -> ReadEnd {
        let stream = match self.log.context.get_stream(LOG_STREAM).await {
            Ok(stream) => stream,
            Err(error) => return ReadEnd::Again(error.to_string()),
        };
        let (first, last) = (stream.cached_info().state.first_sequence, stream.cached_info().state.last_sequence);
        if first > self.next {
            return ReadEnd::Failed(TailError::TrimGap { expected: self.next, first });
        }
        if last < found {
            return ReadEnd::Again(format!("the log's leader has read only {last} of it"));
        }
        match stream.get_raw_message(self.next).await {
            Ok(_) => ReadEnd::Again(format!("entry {} was not delivered", self.next)),
            Err(error) if is_not_found(&error) => ReadEnd::Failed(TailError::Hole { expected: self.next, found }),
            Err(error) => ReadEnd::Again(error.to_string()),
        }
    }

    /// The server forgets an idle consumer by itself; telling it is a courtesy that nobody waits for.
    fn discard(&self, consumer: LogConsumer) {
        let context = self.log.context.clone();
        let name = consumer.cached_info().name.clone();
        tokio::spawn(async move { context.delete_consumer_from_stream(name, LOG_STREAM).await });
    }
}

fn is_not_found(error: &jetstream::stream::RawMessageError) -> bool {
    use jetstream::stream::LastRawMessageErrorKind as Kind;
    match error.kind() {
        Kind::NoMessageFound => true,
        Kind::JetStream(answer) => answer.error_code() == ErrorCode::NO_MESSAGE_FOUND,
        _ => false,
    }
}

fn record_of(message: jetstream::Message) -> Result<Record, String> {
    let info = message.info().map_err(|error| error.to_string())?;
    let seq = info.stream_sequence;
    let timestamp_ns = u64::try_from(info.published.unix_timestamp_nanos())
        .map_err(|_| format!("entry {seq} is stamped before 1970"))?;
    Ok(Record { seq, timestamp_ns, bytes: message.message.payload })
}

//! The streams and buckets of a cluster: their settings, their creation, and the refusal to go on without a log that was there.
//!
//! The log's stream is made first and carries a fresh cluster id; every other stream carries the same id. So a missing log
//! beside streams that name a cluster is a *lost* log, not a new cluster: nothing is created and nothing deleted then.
//! See ARCHITECTURE.md, The log and the fold.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use async_nats::Client;
use async_nats::jetstream::context::{CreateStreamErrorKind, GetStreamErrorKind};
use async_nats::jetstream::stream::{Config, DiscardPolicy, Info, RetentionPolicy, StorageType};
use async_nats::jetstream::{self, Context, ErrorCode};
use ballast_schemas::ClusterId;

use crate::{events, snapshots};

pub(crate) use ballast_schemas::subject::{
    EVENTS_STREAM, EVENTS_SUBJECTS, INBOX_STREAM, INBOX_SUBJECTS, INVENTORY_STREAM, INVENTORY_SUBJECTS, KEYS_BUCKET,
    LOG_STREAM, LOG_SUBJECT, SNAPSHOTS_BUCKET, WORK_STREAM, WORK_SUBJECTS,
};

/// The metadata key under which every stream names its cluster.
const CLUSTER_METADATA: &str = "ballast_cluster";

/// How long an answer of the JetStream API is waited for: an election takes up to 9 s.
const API_PATIENCE: Duration = Duration::from_secs(30);
const API_TIMEOUT: Duration = Duration::from_secs(5);
const API_RETRY_EVERY: Duration = Duration::from_millis(250);
/// How long a new leader of a replicated log may take to know its end.
pub(crate) const LEADER_READS_FOR: Duration = Duration::from_secs(15);

const MIB: i64 = 1024 * 1024;

/// How the streams are made; the settings count only when a stream does not exist yet.
#[derive(Debug, Clone)]
pub struct StreamOptions {
    /// Copies of each stream: 1, or 3 on a cluster of servers.
    pub replicas: usize,
    /// Bytes at which the log refuses appends.
    pub log_bytes_max: u64,
    /// Bytes of events kept; the oldest go first.
    pub events_bytes_max: u64,
    /// How long events are kept.
    pub events_age_max: Duration,
    /// Bytes of unprocessed submitted commands at which more are refused.
    pub inbox_bytes_max: u64,
    /// Whether to make a new cluster where none is. A worker leaves that to a gateway.
    pub create: bool,
    /// What this process knows of the cluster from earlier (a node folder's record, say).
    pub last_seen: Option<LastSeen>,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            replicas: 1,
            log_bytes_max: 1024 * MIB as u64,
            events_bytes_max: 512 * MIB as u64,
            events_age_max: Duration::from_secs(7 * 24 * 3600),
            inbox_bytes_max: 128 * MIB as u64,
            create: true,
            last_seen: None,
        }
    }
}

/// What somebody remembers of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastSeen {
    pub cluster_id: ClusterId,
    /// The highest log sequence seen.
    pub log_seq: u64,
}

/// The streams of one cluster, all there.
#[derive(Debug, Clone)]
pub struct Streams {
    pub(crate) client: Client,
    pub(crate) context: Context,
    cluster_id: ClusterId,
    /// For a stream that must be made anew.
    replicas: usize,
}

impl Streams {
    /// The cluster that the log belongs to.
    pub fn cluster_id(&self) -> &ClusterId {
        &self.cluster_id
    }

    /// The connection they were opened with.
    pub fn client(&self) -> &Client {
        &self.client
    }
}

/// Why the streams can not be used. Nothing was deleted in any case.
#[derive(Debug, thiserror::Error)]
pub enum OpenStreamsError {
    #[error(
        "log missing, cluster {cluster_id}, last seen sequence {last_seq}: the stream {LOG_STREAM} is gone although the cluster's other records are there; bring the JetStream folder back or restore the stream from a backup (weights on the nodes are untouched)"
    )]
    LogMissing { cluster_id: ClusterId, last_seq: u64 },
    #[error(
        "log cut short, cluster {cluster_id}, last seen sequence {last_seq}: the stream {LOG_STREAM} ends at {found}; bring the JetStream folder back or restore the stream from a newer backup (weights on the nodes are untouched)"
    )]
    LogCutShort { cluster_id: ClusterId, last_seq: u64, found: u64 },
    #[error("{what} belongs to cluster {found}, expected {expected}: this is another cluster's NATS server or folder")]
    OtherCluster { what: String, expected: ClusterId, found: ClusterId },
    #[error(
        "the stream {stream} exists but carries no Ballast cluster id: another program made it; remove or rename it"
    )]
    Foreign { stream: String },
    #[error(
        "there is no Ballast cluster on this NATS server yet: start a gateway first (`ballast gateway`, or `ballast dev`)"
    )]
    NoCluster,
    #[error("cannot create the stream {stream}: {reason}")]
    Create { stream: String, reason: String },
    #[error("JetStream is not enabled on this NATS server: start it with the settings of ops/nats.conf")]
    NoJetStream,
    #[error("JetStream does not answer: {reason}")]
    Unreachable { reason: String },
}

impl OpenStreamsError {
    /// Whether trying again later can help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NoCluster | Self::Unreachable { .. })
    }
}

/// Opens the cluster's streams, making those that are missing, unless a log that was there is gone.
pub async fn open_streams(client: Client, options: &StreamOptions) -> Result<Streams, OpenStreamsError> {
    let context = api_context(&client);
    let mut others = Vec::new();
    for config in other_configs(options) {
        let info = stream_info(&context, &config.name).await?;
        others.push((config, info));
    }
    let known = known_cluster(&others, options.last_seen.as_ref());
    let log = match stream_info(&context, LOG_STREAM).await? {
        Some(info) => info,
        None => match known {
            Some(cluster_id) => {
                let last_seq = last_seen_seq(&context, &cluster_id, options.last_seen.as_ref()).await;
                return Err(OpenStreamsError::LogMissing { cluster_id, last_seq });
            }
            None if options.create => create_log(&context, options).await?,
            None => return Err(OpenStreamsError::NoCluster),
        },
    };
    let cluster_id = cluster_of(&log).ok_or_else(|| OpenStreamsError::Foreign { stream: LOG_STREAM.to_owned() })?;
    // Whoever made the cluster said how many copies there are; a worker that comes first to a stream does not know.
    let replicas = log.config.num_replicas;
    if let Some(found) = options.last_seen.as_ref().map(|seen| &seen.cluster_id).filter(|found| **found != cluster_id) {
        let what = "what this process remembers".to_owned();
        return Err(OpenStreamsError::OtherCluster { what, expected: cluster_id, found: found.clone() });
    }
    for (config, info) in others {
        match info {
            Some(info) => match cluster_of(&info) {
                Some(found) if found == cluster_id => {}
                Some(found) => {
                    return Err(OpenStreamsError::OtherCluster {
                        what: format!("the stream {}", config.name),
                        expected: cluster_id,
                        found,
                    });
                }
                None => return Err(OpenStreamsError::Foreign { stream: config.name }),
            },
            None => {
                create(&context, Config { num_replicas: replicas, ..config }, &cluster_id).await?;
            }
        }
    }
    let last_seq = last_seen_seq(&context, &cluster_id, options.last_seen.as_ref()).await;
    let found = log.state.last_sequence;
    if found < last_seq && (replicas == 1 || !reaches(&context, last_seq).await?) {
        return Err(OpenStreamsError::LogCutShort { cluster_id, last_seq, found });
    }
    Ok(Streams { client, context, cluster_id, replicas })
}

/// Whether a replicated log is as long as that after all: a server that has just become its leader may not have read all of
/// its own copy yet.
async fn reaches(context: &Context, last_seq: u64) -> Result<bool, OpenStreamsError> {
    let deadline = Instant::now() + LEADER_READS_FOR;
    loop {
        let found = stream_info(context, LOG_STREAM).await?.map_or(0, |info| info.state.last_sequence);
        if found >= last_seq || Instant::now() >= deadline {
            return Ok(found >= last_seq);
        }
        tokio::time::sleep(API_RETRY_EVERY).await;
    }
}

/// The cluster's streams for somebody who only looks: nothing is made, and only the log must be there.
pub async fn view_streams(client: Client) -> Result<Streams, OpenStreamsError> {
    let context = api_context(&client);
    let log = stream_info(&context, LOG_STREAM).await?.ok_or(OpenStreamsError::NoCluster)?;
    let cluster_id = cluster_of(&log).ok_or_else(|| OpenStreamsError::Foreign { stream: LOG_STREAM.to_owned() })?;
    Ok(Streams { client, context, cluster_id, replicas: log.config.num_replicas })
}

/// A JetStream context whose API calls end after [`API_TIMEOUT`].
pub(crate) fn api_context(client: &Client) -> Context {
    let mut context = jetstream::new(client.clone());
    context.set_timeout(API_TIMEOUT);
    context
}

/// Makes a stream of this cluster again when it is gone: the one of the hints lives in memory.
pub(crate) async fn recreate_work_stream(streams: &Streams) -> Result<(), OpenStreamsError> {
    create(&streams.context, work_config(streams.replicas), &streams.cluster_id).await.map(drop)
}

fn known_cluster(others: &[(Config, Option<Info>)], last_seen: Option<&LastSeen>) -> Option<ClusterId> {
    let named = others.iter().filter_map(|(_, info)| info.as_ref()).find_map(cluster_of);
    named.or_else(|| last_seen.map(|seen| seen.cluster_id.clone()))
}

fn cluster_of(info: &Info) -> Option<ClusterId> {
    info.config.metadata.get(CLUSTER_METADATA).and_then(|text| text.parse().ok())
}

/// The highest log sequence that anything but the log remembers; 0 when nothing does.
async fn last_seen_seq(context: &Context, cluster_id: &ClusterId, last_seen: Option<&LastSeen>) -> u64 {
    let told = last_seen.filter(|seen| seen.cluster_id == *cluster_id).map_or(0, |seen| seen.log_seq);
    // Both are best effort: a bucket that can not be read remembers nothing, and the caller then knows less, not more.
    let event = events::last_stored_position(context).await.ok().flatten().map_or(0, |position| position.seq);
    let snapshot = snapshots::newest_seq(context).await.unwrap_or(0);
    told.max(event).max(snapshot)
}

/// The stream, or `None` if the server says there is none. Waits out elections and restarts.
pub(crate) async fn stream_info(context: &Context, name: &str) -> Result<Option<Info>, OpenStreamsError> {
    let deadline = Instant::now() + API_PATIENCE;
    loop {
        let reason = match context.get_stream(name).await {
            Ok(stream) => return Ok(Some(stream.cached_info().clone())),
            Err(error) => match error.kind() {
                GetStreamErrorKind::JetStream(answer) if answer.error_code() == ErrorCode::STREAM_NOT_FOUND => {
                    return Ok(None);
                }
                GetStreamErrorKind::JetStream(answer) if is_disabled(answer.error_code()) => {
                    return Err(OpenStreamsError::NoJetStream);
                }
                _ => error.to_string(),
            },
        };
        if Instant::now() >= deadline {
            return Err(OpenStreamsError::Unreachable { reason });
        }
        tokio::time::sleep(API_RETRY_EVERY).await;
    }
}

fn is_disabled(code: ErrorCode) -> bool {
    code == ErrorCode::JETSTREAM_NOT_ENABLED || code == ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT
}

async fn create_log(context: &Context, options: &StreamOptions) -> Result<Info, OpenStreamsError> {
    let fresh = ClusterId::new(uuid::Uuid::new_v4().to_string())
        .map_err(|error| OpenStreamsError::Create { stream: LOG_STREAM.to_owned(), reason: error.to_string() })?;
    let error = match create(context, log_config(options), &fresh).await {
        Ok(info) => return Ok(info),
        Err(error) => error,
    };
    // Somebody else made it a moment ago, under another id: theirs is the cluster. On several servers the name is taken before
    // the stream is there.
    let deadline = Instant::now() + if options.replicas > 1 { LEADER_READS_FOR } else { Duration::ZERO };
    loop {
        match stream_info(context, LOG_STREAM).await? {
            Some(info) => return Ok(info),
            None if Instant::now() >= deadline => return Err(error),
            None => tokio::time::sleep(API_RETRY_EVERY).await,
        }
    }
}

async fn create(context: &Context, mut config: Config, cluster_id: &ClusterId) -> Result<Info, OpenStreamsError> {
    config.metadata = HashMap::from([(CLUSTER_METADATA.to_owned(), cluster_id.to_string())]);
    let name = config.name.clone();
    let deadline = Instant::now() + API_PATIENCE;
    loop {
        match context.create_stream(config.clone()).await {
            Ok(stream) => return Ok(stream.cached_info().clone()),
            // The same again is the same stream.
            Err(error) if is_passing(&error.kind()) && Instant::now() < deadline => {
                tracing::debug!(stream = name, %error, "the stream can not be made yet");
                tokio::time::sleep(API_RETRY_EVERY).await;
            }
            Err(error) => return Err(OpenStreamsError::Create { stream: name, reason: error.to_string() }),
        }
    }
}

/// Whether servers that are still finding each other, or electing, say so.
fn is_passing(kind: &CreateStreamErrorKind) -> bool {
    match kind {
        CreateStreamErrorKind::TimedOut | CreateStreamErrorKind::JetStreamUnavailable => true,
        CreateStreamErrorKind::JetStream(answer) => {
            answer.code() == 503 || answer.error_code() == ErrorCode::CLUSTER_NO_PEERS
        }
        _ => false,
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn log_config(options: &StreamOptions) -> Config {
    Config {
        name: LOG_STREAM.to_owned(),
        description: Some("Ballast: the durable log, one envelope of commands a message".to_owned()),
        subjects: vec![LOG_SUBJECT.to_owned()],
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        num_replicas: options.replicas,
        // Full means refused, never the silent loss of the oldest.
        discard: DiscardPolicy::New,
        max_bytes: signed(options.log_bytes_max),
        max_message_size: MIB as i32,
        deny_delete: true,
        allow_direct: true,
        duplicate_window: Duration::from_secs(120),
        ..Config::default()
    }
}

fn work_config(replicas: usize) -> Config {
    Config {
        name: WORK_STREAM.to_owned(),
        description: Some("Ballast: hints that an operation wants a worker".to_owned()),
        subjects: vec![WORK_SUBJECTS.to_owned()],
        retention: RetentionPolicy::WorkQueue,
        storage: StorageType::Memory,
        num_replicas: replicas,
        discard: DiscardPolicy::New,
        discard_new_per_subject: true,
        max_messages_per_subject: 1,
        ..Config::default()
    }
}

/// Every stream but the log's.
fn other_configs(options: &StreamOptions) -> Vec<Config> {
    let inventory = Config {
        name: INVENTORY_STREAM.to_owned(),
        description: Some("Ballast: the last inventory of each node and group".to_owned()),
        subjects: vec![INVENTORY_SUBJECTS.to_owned()],
        storage: StorageType::File,
        num_replicas: options.replicas,
        max_messages_per_subject: 1,
        allow_direct: true,
        ..Config::default()
    };
    let events = Config {
        name: EVENTS_STREAM.to_owned(),
        description: Some("Ballast: what happened, in log order".to_owned()),
        subjects: vec![EVENTS_SUBJECTS.to_owned()],
        storage: StorageType::File,
        num_replicas: options.replicas,
        max_bytes: signed(options.events_bytes_max),
        max_age: options.events_age_max,
        allow_direct: true,
        duplicate_window: Duration::from_secs(120),
        ..Config::default()
    };
    let inbox = Config {
        name: INBOX_STREAM.to_owned(),
        description: Some("Ballast: submitted commands that no gateway took yet".to_owned()),
        subjects: vec![INBOX_SUBJECTS.to_owned()],
        retention: RetentionPolicy::WorkQueue,
        storage: StorageType::File,
        num_replicas: options.replicas,
        discard: DiscardPolicy::New,
        max_bytes: signed(options.inbox_bytes_max),
        ..Config::default()
    };
    // The two buckets are the streams that the client library's object store and key-value store expect, made here because
    // only the stream itself can carry the cluster id.
    let snapshots = Config {
        name: format!("OBJ_{SNAPSHOTS_BUCKET}"),
        description: Some("Ballast: snapshots of the folded state".to_owned()),
        subjects: vec![format!("$O.{SNAPSHOTS_BUCKET}.C.>"), format!("$O.{SNAPSHOTS_BUCKET}.M.>")],
        storage: StorageType::File,
        num_replicas: options.replicas,
        discard: DiscardPolicy::New,
        allow_rollup: true,
        allow_direct: true,
        ..Config::default()
    };
    let keys = Config {
        name: format!("KV_{KEYS_BUCKET}"),
        description: Some("Ballast: the key that signs transfer tokens".to_owned()),
        subjects: vec![format!("$KV.{KEYS_BUCKET}.>")],
        storage: StorageType::File,
        num_replicas: options.replicas,
        discard: DiscardPolicy::New,
        max_messages_per_subject: 1,
        allow_rollup: true,
        deny_delete: true,
        allow_direct: true,
        ..Config::default()
    };
    vec![work_config(options.replicas), inventory, events, inbox, snapshots, keys]
}

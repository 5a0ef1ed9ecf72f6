//! Snapshots of the folded state: their format, where they are kept, and restoring from one.
//!
//! A snapshot is named by the log sequence it stands at and the digest of the state; what does not read back as exactly that
//! is refused by name, never skipped. When to write one and how far to trim is the replica's business (`upkeep.rs`).
//! See ARCHITECTURE.md, The log and the fold.
//!
//! Bytes: `BLS` and a version byte, 32 bytes SHA-256 of the rest, then MessagePack with named fields.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::object_store::{GetErrorKind, ObjectStore};
use ballast_schemas::Digest;
use ballast_workflows::State;
use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;

use crate::streams::{SNAPSHOTS_BUCKET, Streams};

const MAGIC: &[u8; 3] = b"BLS";
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 4 + 32;
/// Snapshots kept; the log is trimmed to the second newest at most.
const KEPT: usize = 3;
const STORE_TIMEOUT: Duration = Duration::from_secs(60);

/// `<seq as 20 digits>-<state digest>`: sorts by sequence, and two replicas that snapshot the same entry write the same name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SnapshotName {
    /// The last log sequence folded into it.
    pub seq: u64,
    /// Digest of the state.
    pub digest: Digest,
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:020}-{}", self.seq, self.digest)
    }
}

impl FromStr for SnapshotName {
    type Err = SnapshotError;

    fn from_str(text: &str) -> Result<Self, SnapshotError> {
        let parsed = text.split_once('-').and_then(|(seq, digest)| {
            Some(Self { seq: seq.parse().ok()?, digest: Digest::try_from(digest.to_owned()).ok()? })
        });
        parsed.ok_or_else(|| SnapshotError::Damaged {
            name: text.to_owned(),
            reason: "its name is not <sequence>-<digest>".to_owned(),
        })
    }
}

/// Why a snapshot can not be written or used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error(
        "snapshot {name} cannot be used: {reason}; it is never skipped by itself: `ballast snapshots` lists the others, and `--restore-from SEQ` starts from one of them"
    )]
    Damaged { name: String, reason: String },
    #[error("there is no snapshot at sequence {wanted}; there are: {present}")]
    NoSuch { wanted: u64, present: String },
    #[error("snapshot {name} did not read back as written: {reason}")]
    NotVerified { name: String, reason: String },
    #[error("the state cannot be encoded: {reason}")]
    Encode { reason: String },
    #[error("the snapshot store does not answer: {reason}")]
    Store { reason: String },
}

impl SnapshotError {
    /// Whether trying again later can help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Store { .. })
    }
}

/// Which snapshot to restore from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RestoreFrom {
    /// The newest, or the log's beginning where there is none.
    #[default]
    Newest,
    /// The one that stands at this sequence.
    Seq(u64),
    /// None: replay the whole log.
    Beginning,
}

#[derive(Serialize)]
struct BodyRef<'a> {
    seq: u64,
    digest: Digest,
    state: &'a State,
}

#[derive(Deserialize)]
struct Body {
    seq: u64,
    digest: Digest,
    state: State,
}

/// The snapshot of `state` as bytes, and its name.
pub fn encode_snapshot(state: &State) -> Result<(SnapshotName, Bytes), SnapshotError> {
    let name = SnapshotName { seq: state.log_seq(), digest: state.digest() };
    let body = rmp_serde::to_vec_named(&BodyRef { seq: name.seq, digest: name.digest, state });
    let body = body.map_err(|error| SnapshotError::Encode { reason: error.to_string() })?;
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    bytes.extend_from_slice(MAGIC);
    bytes.push(VERSION);
    bytes.extend_from_slice(Digest::of(&body).as_bytes());
    bytes.extend_from_slice(&body);
    Ok((name, Bytes::from(bytes)))
}

/// Reads what [`encode_snapshot`] wrote and checks everything that can be checked.
pub fn decode_snapshot(name: &SnapshotName, bytes: &[u8]) -> Result<State, SnapshotError> {
    let damaged = |reason: String| SnapshotError::Damaged { name: name.to_string(), reason };
    if bytes.len() < HEADER_BYTES || !bytes.starts_with(MAGIC) {
        return Err(damaged(format!("{} bytes that do not begin with BLS", bytes.len())));
    }
    if bytes[3] != VERSION {
        return Err(damaged(format!("format version {}, this build reads {VERSION}", bytes[3])));
    }
    let (header, body) = bytes.split_at(HEADER_BYTES);
    let found = Digest::of(body);
    if found.as_bytes() != &header[4..] {
        return Err(damaged("its checksum does not match its bytes".to_owned()));
    }
    let Body { seq, digest, state } =
        ballast_schemas::from_messagepack(body).map_err(|error| damaged(format!("it cannot be decoded: {error}")))?;
    let inside = SnapshotName { seq, digest };
    if inside != *name || state.log_seq() != seq {
        return Err(damaged(format!("it holds the state {inside} at sequence {}", state.log_seq())));
    }
    // A replica that starts waits for both.
    let (computed, checked) = std::thread::scope(|scope| {
        let computed = scope.spawn(|| state.digest());
        let checked = state.check_restored();
        (computed.join(), checked)
    });
    let computed = computed.map_err(|_| damaged("its digest could not be computed".to_owned()))?;
    if computed != digest {
        return Err(damaged(format!("its state has digest {computed}, expected {digest}")));
    }
    checked.map_err(|violation| damaged(format!("its state violates an invariant: {violation}")))?;
    Ok(state)
}

/// Where snapshots are kept.
pub trait SnapshotStore: fmt::Debug + Send + Sync + 'static {
    /// Keeps `bytes` under `name`.
    fn put(&self, name: SnapshotName, bytes: Bytes) -> BoxFuture<'_, Result<(), SnapshotError>>;
    /// What was kept, or `None`.
    fn get(&self, name: SnapshotName) -> BoxFuture<'_, Result<Option<Bytes>, SnapshotError>>;
    /// Every name, oldest first.
    fn list(&self) -> BoxFuture<'_, Result<Vec<SnapshotName>, SnapshotError>>;
    /// Forgets `name`; no error if it is not there.
    fn delete(&self, name: SnapshotName) -> BoxFuture<'_, Result<(), SnapshotError>>;
}

/// Writes a snapshot of `state`, reads it back and compares; then forgets all but the newest three.
pub(crate) async fn write_verified(store: &dyn SnapshotStore, state: State) -> Result<SnapshotName, SnapshotError> {
    let encoded = tokio::task::spawn_blocking(move || encode_snapshot(&state)).await;
    let (name, bytes) = encoded.map_err(|error| SnapshotError::Encode { reason: error.to_string() })??;
    store.put(name.clone(), bytes.clone()).await?;
    let back = store.get(name.clone()).await?;
    let not_verified = |reason: String| SnapshotError::NotVerified { name: name.to_string(), reason };
    let back = back.ok_or_else(|| not_verified("it is not there".to_owned()))?;
    let checked_name = name.clone();
    let decoded = tokio::task::spawn_blocking(move || decode_snapshot(&checked_name, &back)).await;
    decoded.map_err(|error| not_verified(error.to_string()))?.map_err(|error| not_verified(error.to_string()))?;
    Ok(name)
}

/// Forgets all but the newest snapshots.
pub(crate) async fn prune(store: &dyn SnapshotStore) -> Result<(), SnapshotError> {
    let names = store.list().await?;
    let surplus = names.len().saturating_sub(KEPT);
    for name in names.into_iter().take(surplus) {
        store.delete(name).await?;
    }
    Ok(())
}

/// The state to start from; `None` = the log's beginning.
pub(crate) async fn restore(store: &dyn SnapshotStore, from: RestoreFrom) -> Result<Option<State>, SnapshotError> {
    let names = match from {
        RestoreFrom::Beginning => return Ok(None),
        RestoreFrom::Newest | RestoreFrom::Seq(_) => store.list().await?,
    };
    let chosen = match from {
        RestoreFrom::Seq(wanted) => {
            let found = names.iter().rev().find(|name| name.seq == wanted);
            let present = || match names.is_empty() {
                true => "none".to_owned(),
                false => names.iter().map(|name| name.seq.to_string()).collect::<Vec<_>>().join(", "),
            };
            Some(found.cloned().ok_or_else(|| SnapshotError::NoSuch { wanted, present: present() })?)
        }
        _ => names.last().cloned(),
    };
    let Some(name) = chosen else { return Ok(None) };
    let stored = store.get(name.clone()).await?;
    checked(&name, stored).await.map(Some)
}

/// The state in a snapshot, if it is exactly what its name says.
pub(crate) async fn checked(name: &SnapshotName, stored: Option<Bytes>) -> Result<State, SnapshotError> {
    let damaged = |reason: String| SnapshotError::Damaged { name: name.to_string(), reason };
    let stored = stored.ok_or_else(|| damaged("its bytes are gone".to_owned()))?;
    let decoding = name.clone();
    let decoded = tokio::task::spawn_blocking(move || decode_snapshot(&decoding, &stored)).await;
    decoded.map_err(|ended| damaged(format!("the check of it ended: {ended}")))?
}

/// Snapshots in the JetStream object store.
#[derive(Debug, Clone)]
pub struct JetStreamSnapshots {
    context: Context,
}

impl JetStreamSnapshots {
    /// The bucket among `streams`.
    pub fn new(streams: &Streams) -> Self {
        Self { context: streams.context.clone() }
    }
}

fn store_error(error: impl fmt::Display) -> SnapshotError {
    SnapshotError::Store { reason: error.to_string() }
}

async fn bucket(context: &Context) -> Result<ObjectStore, SnapshotError> {
    context.get_object_store(SNAPSHOTS_BUCKET).await.map_err(store_error)
}

async fn list_names(context: &Context) -> Result<Vec<SnapshotName>, SnapshotError> {
    let bucket = bucket(context).await?;
    let mut objects = bucket.list().await.map_err(store_error)?;
    let mut names = Vec::new();
    while let Some(object) = objects.next().await {
        names.push(object.map_err(store_error)?.name.parse::<SnapshotName>()?);
    }
    names.sort();
    Ok(names)
}

/// The sequence of the newest snapshot, 0 if there is none.
pub(crate) async fn newest_seq(context: &Context) -> Result<u64, SnapshotError> {
    let names = tokio::time::timeout(STORE_TIMEOUT, list_names(context)).await.map_err(store_error)??;
    Ok(names.last().map_or(0, |name| name.seq))
}

impl SnapshotStore for JetStreamSnapshots {
    fn put(&self, name: SnapshotName, bytes: Bytes) -> BoxFuture<'_, Result<(), SnapshotError>> {
        Box::pin(async move {
            let work = async {
                let mut reader: &[u8] = &bytes;
                bucket(&self.context)
                    .await?
                    .put(name.to_string().as_str(), &mut reader)
                    .await
                    .map(drop)
                    .map_err(store_error)
            };
            tokio::time::timeout(STORE_TIMEOUT, work).await.map_err(store_error)?
        })
    }

    fn get(&self, name: SnapshotName) -> BoxFuture<'_, Result<Option<Bytes>, SnapshotError>> {
        Box::pin(async move {
            let work = async {
                let mut object = match bucket(&self.context).await?.get(name.to_string()).await {
                    Ok(object) => object,
                    Err(error) if error.kind() == GetErrorKind::NotFound => return Ok(None),
                    Err(error) => return Err(store_error(error)),
                };
                let mut bytes = Vec::new();
                object.read_to_end(&mut bytes).await.map_err(store_error)?;
                Ok(Some(Bytes::from(bytes)))
            };
            tokio::time::timeout(STORE_TIMEOUT, work).await.map_err(store_error)?
        })
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<SnapshotName>, SnapshotError>> {
        Box::pin(
            async move { tokio::time::timeout(STORE_TIMEOUT, list_names(&self.context)).await.map_err(store_error)? },
        )
    }

    fn delete(&self, name: SnapshotName) -> BoxFuture<'_, Result<(), SnapshotError>> {
        use async_nats::jetstream::object_store::DeleteErrorKind;
        Box::pin(async move {
            match bucket(&self.context).await?.delete(name.to_string()).await {
                Ok(()) => Ok(()),
                Err(error) if error.kind() == DeleteErrorKind::NotFound => Ok(()),
                Err(error) => Err(store_error(error)),
            }
        })
    }
}

/// Snapshots in memory, for tests and simulation.
#[derive(Debug, Clone, Default)]
pub struct MemorySnapshots {
    kept: Arc<Mutex<BTreeMap<SnapshotName, Bytes>>>,
}

impl MemorySnapshots {
    pub fn new() -> Self {
        Self::default()
    }

    fn with<R>(&self, act: impl FnOnce(&mut BTreeMap<SnapshotName, Bytes>) -> R) -> R {
        // A map is whole at any point where a panic could happen.
        act(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl SnapshotStore for MemorySnapshots {
    fn put(&self, name: SnapshotName, bytes: Bytes) -> BoxFuture<'_, Result<(), SnapshotError>> {
        self.with(|kept| kept.insert(name, bytes));
        Box::pin(async { Ok(()) })
    }

    fn get(&self, name: SnapshotName) -> BoxFuture<'_, Result<Option<Bytes>, SnapshotError>> {
        let found = self.with(|kept| kept.get(&name).cloned());
        Box::pin(async { Ok(found) })
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<SnapshotName>, SnapshotError>> {
        let names = self.with(|kept| kept.keys().cloned().collect());
        Box::pin(async { Ok(names) })
    }

    fn delete(&self, name: SnapshotName) -> BoxFuture<'_, Result<(), SnapshotError>> {
        self.with(|kept| kept.remove(&name));
        Box::pin(async { Ok(()) })
    }
}

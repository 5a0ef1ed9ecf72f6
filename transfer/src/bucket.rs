//! Object storage as the cold tier meets it: one bucket and a prefix in it, over the S3 API. Calls block; requests that the
//! server could not answer (5xx, 429, a broken connection) are repeated for a while. What the objects mean is in
//! `cold_bucket` and `bucket_index`.
//!
//! Credentials come from the environment (`AWS_ACCESS_KEY_ID` and its kin, or what the platform offers) and are kept
//! nowhere here: neither the address nor any error holds one.

use std::future::Future;
use std::io;
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, RetryConfig};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use crate::folder::PathError;

/// Bytes of one part of a large object: what S3 takes, and enough to make the round trip cheap.
pub(crate) const PART_BYTES: u64 = 8 << 20;
/// Parts of one object: S3 takes 10,000.
const PARTS_MAX: u64 = 9_000;
/// Parts held in memory at once, over all uploads of a node.
const PARTS_AT_ONCE: usize = 8;
/// Small requests under way at once.
const AT_ONCE: usize = 16;
/// For how long a request is repeated that the server could not answer.
const REPEAT_FOR: Duration = Duration::from_secs(60);
const REPEATS_MAX: usize = 10;
/// How often a job asks whether it is still wanted.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Where cold copies are kept in object storage: `s3://<bucket>[/<prefix>]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketUrl {
    bucket: String,
    prefix: Path,
}

/// An address that names no bucket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no address of a bucket: {reason}; write s3://<bucket> or s3://<bucket>/<prefix>")]
pub struct BucketUrlError {
    /// What is wrong with it. The address itself is not repeated: somebody may have put a secret into it.
    reason: String,
}

impl std::str::FromStr for BucketUrl {
    type Err = BucketUrlError;

    fn from_str(text: &str) -> Result<Self, BucketUrlError> {
        let wrong = |reason: &str| BucketUrlError { reason: reason.to_owned() };
        let rest = text.strip_prefix("s3://").ok_or_else(|| wrong("it does not begin with s3://"))?;
        if rest.contains('@') {
            return Err(wrong("it holds an @; credentials belong into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"));
        }
        if rest.contains(['?', '#']) {
            return Err(wrong("it holds ? or #; settings belong into the AWS_ variables"));
        }
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
        if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(fits) {
            return Err(wrong("a bucket's name has 3 to 63 of a-z, 0-9, - and ."));
        }
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        if prefix.split('/').any(str::is_empty) && !prefix.is_empty() {
            return Err(wrong("its prefix has an empty part"));
        }
        let prefix = Path::parse(prefix).map_err(|error| wrong(&error.to_string()))?;
        Ok(Self { bucket: bucket.to_owned(), prefix })
    }
}

impl std::fmt::Display for BucketUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        if self.prefix.is_root() { Ok(()) } else { write!(f, "/{}", self.prefix) }
    }
}

/// What a bucket is kept on.
pub(crate) trait Store: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Store for T {}

/// A prefix in a bucket.
pub(crate) struct Bucket {
    store: Arc<dyn Store>,
    prefix: Path,
    /// What stands for it in errors and reports.
    place: PathBuf,
    parts: Semaphore,
    /// Taken out only by `drop`.
    runtime: Option<Runtime>,
}

impl std::fmt::Debug for Bucket {
    // The store knows the credentials.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bucket").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // The last owner may be an async task, which must not wait.
            runtime.shutdown_background();
        }
    }
}

impl Bucket {
    /// The bucket of an address, with what the `AWS_` variables of the environment say of it.
    pub(crate) fn open(url: &BucketUrl) -> io::Result<Self> {
        // The client has TLS without a provider of its own; whoever came first has chosen the same one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig { max_retries: REPEATS_MAX, retry_timeout: REPEAT_FOR, ..RetryConfig::default() };
        let mut builder = AmazonS3Builder::from_env().with_bucket_name(&url.bucket).with_retry(retry);
        // What the other tools for S3 call it.
        if let Ok(endpoint) = std::env::var("AWS_ENDPOINT_URL_S3").or_else(|_| std::env::var("AWS_ENDPOINT_URL")) {
            builder = builder.with_endpoint(endpoint);
        }
        let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint).unwrap_or_default();
        if endpoint.contains('@') {
            // Every error would repeat it.
            let message =
                "the endpoint holds an @; credentials belong into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let plain = endpoint.starts_with("http://");
        if plain && std::env::var("AWS_ALLOW_HTTP").is_ok_and(|allowed| allowed != "true") {
            return Err(io::Error::other("the endpoint is plain HTTP, which AWS_ALLOW_HTTP forbids"));
        }
        builder = builder.with_allow_http(plain);
        // The builder's errors name a setting and never its value.
        let store = builder.build().map_err(io::Error::other)?;
        Self::on(Arc::new(store), url.prefix.clone(), PathBuf::from(url.to_string()))
    }

    /// A prefix of any store.
    pub(crate) fn on(store: Arc<dyn Store>, prefix: Path, place: PathBuf) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("cold-bucket")
            .enable_all()
            .build()?;
        Ok(Self { store, prefix, place, parts: Semaphore::new(PARTS_AT_ONCE), runtime: Some(runtime) })
    }

    pub(crate) fn place(&self) -> &FsPath {
        &self.place
    }

    /// The key of a name below the prefix.
    pub(crate) fn key<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Path {
        names.into_iter().fold(self.prefix.clone(), |key, name| key.join(name))
    }

    /// Runs a future to its end. Never called on a thread of an async runtime.
    pub(crate) fn block<T>(&self, future: impl Future<Output = T>) -> T {
        match &self.runtime {
            Some(runtime) => runtime.block_on(future),
            None => unreachable!("the runtime goes with its owner"),
        }
    }

    /// As [`Bucket::block`], for as long as `wanted` says so; `None` when it was given up.
    pub(crate) fn block_while<T>(&self, wanted: &dyn Fn() -> bool, future: impl Future<Output = T>) -> Option<T> {
        self.block(async {
            tokio::pin!(future);
            while wanted() {
                tokio::select! {
                    done = &mut future => return Some(done),
                    () = tokio::time::sleep(LOOK_EVERY) => {}
                }
            }
            None
        })
    }

    /// What stands for a key in errors and reports.
    pub(crate) fn path_of(&self, key: &Path) -> PathBuf {
        let below = key.prefix_match(&self.prefix);
        let below: Option<PathBuf> = below.map(|rest| rest.map(|part| part.as_ref().to_owned()).collect());
        self.place.join(below.unwrap_or_default())
    }

    fn error(&self, action: &'static str, key: &Path, error: Error) -> PathError {
        let kind = match &error {
            Error::NotFound { .. } => io::ErrorKind::NotFound,
            Error::AlreadyExists { .. } | Error::Precondition { .. } => io::ErrorKind::AlreadyExists,
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
            _ => io::ErrorKind::Other,
        };
        PathError::new(action, &self.path_of(key), io::Error::new(kind, said(&error.to_string())))
    }

    /// A whole small object; `None` when there is none.
    pub(crate) fn get(&self, key: &Path) -> Result<Option<Bytes>, PathError> {
        let read = self.block(async { self.store.get(key).await?.bytes().await });
        match read {
            Ok(bytes) => Ok(Some(bytes)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.error("read", key, error)),
        }
    }

    /// Writes a small object, whatever was there.
    pub(crate) fn put(&self, key: &Path, bytes: Vec<u8>) -> Result<(), PathError> {
        let put = self.block(self.store.put(key, bytes.into()));
        put.map(drop).map_err(|error| self.error("write", key, error))
    }

    /// Writes a small object where there is none. Tells whether it did: not when somebody was there before.
    pub(crate) fn create(&self, key: &Path, bytes: Vec<u8>) -> Result<bool, PathError> {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match self.block(self.store.put_opts(key, bytes.into(), options)) {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
            Err(error) => Err(self.error("write", key, error)),
        }
    }

    /// Whether the server writes only where there is nothing when it is asked to, and lists what it has just taken: without
    /// these, two nodes could own the same bytes. Nobody else knows `key`.
    pub(crate) fn check_server(&self, key: &Path) -> Result<(), PathError> {
        self.create(key, Vec::new())?;
        let overwritten = self.create(key, Vec::new())?;
        let listed = self.list(key.parent().as_ref().unwrap_or(&self.prefix))?.iter().any(|meta| meta.location == *key);
        self.remove(std::slice::from_ref(key))?;
        let message = match (overwritten, listed) {
            (true, _) => {
                "the server overwrites objects that it was asked to leave alone (If-None-Match); use one that does not"
            }
            (_, false) => "the server does not list an object that it has just taken; use one that does",
            _ => return Ok(()),
        };
        Err(PathError::new("use", &self.place, io::Error::new(io::ErrorKind::Unsupported, message)))
    }

    /// Every object below a key.
    pub(crate) fn list(&self, below: &Path) -> Result<Vec<ObjectMeta>, PathError> {
        let listed = self.block(self.store.list(Some(below)).try_collect());
        listed.map_err(|error| self.error("list", below, error))
    }

    /// The names right below a key that have something below them.
    pub(crate) fn folders(&self, below: &Path) -> Result<Vec<String>, PathError> {
        let listed = self.block(self.store.list_with_delimiter(Some(below)));
        let listed = listed.map_err(|error| self.error("list", below, error))?;
        Ok(listed.common_prefixes.iter().filter_map(|folder| folder.filename().map(str::to_owned)).collect())
    }

    /// How objects look; `None` for one that is not there.
    pub(crate) fn look_at(&self, keys: &[Path]) -> Result<Vec<Option<ObjectMeta>>, PathError> {
        let look = |key: &Path| {
            let key = key.clone();
            async move {
                match self.store.head(&key).await {
                    Ok(meta) => Ok(Some(meta)),
                    Err(Error::NotFound { .. }) => Ok(None),
                    Err(error) => Err(self.error("look at", &key, error)),
                }
            }
        };
        self.block(futures::stream::iter(keys.iter().map(look)).buffered(AT_ONCE).try_collect())
    }

    /// Removes objects; that one is already gone is fine.
    pub(crate) fn remove(&self, keys: &[Path]) -> Result<(), PathError> {
        let removed = keys.iter().map(|key| self.remove_now(key));
        self.block(futures::stream::iter(removed).buffer_unordered(AT_ONCE).try_collect::<()>())
    }

    /// A range of an object, whole or failed.
    pub(crate) async fn read(&self, key: &Path, range: std::ops::Range<u64>) -> Result<Bytes, PathError> {
        let wanted = range.end - range.start;
        let bytes = self.store.get_range(key, range).await.map_err(|error| self.error("read", key, error))?;
        if bytes.len() as u64 == wanted {
            return Ok(bytes);
        }
        let short = io::Error::new(io::ErrorKind::UnexpectedEof, format!("{} bytes, expected {wanted}", bytes.len()));
        let error = Error::Generic { store: "bucket", source: short.into() };
        let PathError { action, path, source } = self.error("read", key, error);
        Err(PathError { action, path, source: io::Error::new(io::ErrorKind::UnexpectedEof, source) })
    }

    /// Writes an object of `bytes` bytes, which `piece` gives range by range. A large one goes up in parts and appears when
    /// the last has come: `note` hears of its upload before the first part, and the answer is whether it did. `moved` hears of
    /// each piece.
    pub(crate) async fn upload(
        &self,
        key: &Path,
        bytes: u64,
        piece: impl Fn(std::ops::Range<u64>) -> io::Result<Vec<u8>>,
        note: impl AsyncFn(&str) -> Result<(), PathError>,
        moved: impl Fn(u64),
    ) -> Result<bool, PathError> {
        let failed = |error| self.error("write", key, error);
        let taken = |range: std::ops::Range<u64>| {
            piece(range).map(PutPayload::from).map_err(|source| PathError::new("read memory for", &self.place, source))
        };
        let part_bytes = PART_BYTES.max(bytes.div_ceil(PARTS_MAX).next_multiple_of(1 << 20));
        if bytes <= part_bytes {
            let _room = self.parts.acquire().await;
            self.store.put(key, taken(0..bytes)?).await.map_err(failed)?;
            moved(bytes);
            return Ok(false);
        }
        let id = self.store.create_multipart(key).await.map_err(failed)?;
        if let Err(error) = note(&id).await {
            // Nobody would find it later; the error that matters is the first one.
            let _ = self.store.abort_multipart(key, &id).await;
            return Err(error);
        }
        let send = |(number, start): (usize, u64)| {
            let (id, taken, moved, failed) = (&id, &taken, &moved, &failed);
            async move {
                // A part is copied out of memory when its turn has come, so that few are held.
                let _room = self.parts.acquire().await;
                let range = start..bytes.min(start + part_bytes);
                let sent = range.end - range.start;
                let part = self.store.put_part(key, id, number, taken(range)?).await.map_err(failed)?;
                moved(sent);
                Ok(part)
            }
        };
        let starts = (0..bytes).step_by(part_bytes as usize).enumerate();
        let parts: Vec<_> = futures::stream::iter(starts.map(send)).buffered(PARTS_AT_ONCE).try_collect().await?;
        self.store.complete_multipart(key, &id, parts).await.map_err(failed)?;
        Ok(true)
    }

    /// Gives up an upload in parts; that it is over is fine.
    pub(crate) fn abort(&self, key: &Path, id: &str) -> Result<(), PathError> {
        match self.block(self.store.abort_multipart(key, &id.to_owned())) {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.error("give up the upload of", key, error)),
        }
    }

    /// Removes one object, inside a future.
    pub(crate) async fn remove_now(&self, key: &Path) -> Result<(), PathError> {
        match self.store.delete(key).await {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.error("remove", key, error)),
        }
    }

    /// [`Bucket::put`] inside a future.
    pub(crate) async fn put_now(&self, key: &Path, bytes: Vec<u8>) -> Result<(), PathError> {
        let put = self.store.put(key, bytes.into()).await;
        put.map(drop).map_err(|error| self.error("write", key, error))
    }
}

/// What the client says before it repeats what a server answered.
const ANSWERS: [&str; 2] = ["returned non-2xx status code: ", "returned error response: "];
/// Most characters of a server's own words that are repeated.
const WORDS_MAX: usize = 300;

/// The text of an error without the server's answer as such, of which only code and message are kept: servers repeat keys and
/// tokens that they do not like.
fn said(text: &str) -> String {
    let found = ANSWERS.iter().find_map(|marker| Some((text.find(marker)? + marker.len(), *marker)));
    let Some((at, marker)) = found else { return text.to_owned() };
    let (before, answer) = text.split_at(at);
    let (status, body) =
        if marker == ANSWERS[0] { answer.split_once(": ").unwrap_or((answer, "")) } else { ("", answer) };
    let element = |name: &str| {
        let (_, rest) = body.split_once(&format!("<{name}>"))?;
        rest.split_once(&format!("</{name}>")).map(|(text, _)| text)
    };
    let words = [element("Code"), element("Message")].into_iter().flatten().collect::<Vec<_>>().join(": ");
    let words: String = words.chars().take(WORDS_MAX).collect();
    let between = if status.is_empty() || words.is_empty() { "" } else { ": " };
    format!("{before}{status}{between}{words}")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn an_address_names_a_bucket_and_a_prefix() {
        for (text, shown) in [
            ("s3://models", "s3://models"),
            ("s3://models/", "s3://models"),
            ("s3://models/ballast/a/", "s3://models/ballast/a"),
        ] {
            assert_eq!(text.parse::<BucketUrl>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn an_address_that_is_none_is_refused_without_being_repeated() {
        for text in [
            "",
            "models",
            "https://models.s3.amazonaws.com",
            "s3://",
            "s3:///prefix",
            "s3://AKIA:secret@models/prefix",
            "s3://models/prefix?secret=1",
            "s3://models//twice",
        ] {
            let error = text.parse::<BucketUrl>().unwrap_err().to_string();
            assert!(error.contains("s3://<bucket>/<prefix>") && !error.contains("secret="), "{text}: {error}");
            assert!(!error.contains("AKIA"), "{text}: {error}");
        }
    }

    /// A server that gives every request the same answer.
    fn server(answer: String) -> String {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                let _ = connection.read(&mut [0; 8192]);
                let _ = connection.write_all(answer.as_bytes());
            }
        });
        address
    }

    #[test]
    fn no_error_repeats_what_a_server_says_of_keys_and_tokens() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        for (status, code) in [
            ("403 Forbidden", "SignatureDoesNotMatch"),
            ("400 Bad Request", "ExpiredToken"),
            ("401 Unauthorized", "InvalidAccessKeyId"),
            ("409 Conflict", "OperationAborted"),
        ] {
            let body = format!(
                "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>not this one</Message>\
                 <AWSAccessKeyId>AKIAKEY</AWSAccessKeyId><Token-0>session-token</Token-0>\
                 <StringToSign>to: sign</StringToSign></Error>"
            );
            let answer =
                format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
            let store = AmazonS3Builder::new()
                .with_bucket_name("models")
                .with_region("us-east-1")
                .with_endpoint(server(answer))
                .with_allow_http(true)
                .with_access_key_id("AKIAKEY")
                .with_secret_access_key("secret-key")
                .with_token("session-token")
                .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
                .build()
                .unwrap();
            let bucket = Bucket::on(Arc::new(store), Path::from("a"), PathBuf::from("s3://models/a")).unwrap();
            let key = bucket.key(["name"]);
            let errors = [
                bucket.get(&key).map(drop),
                bucket.put(&key, vec![1]),
                bucket.create(&key, vec![1]).map(drop),
                bucket.list(&key).map(drop),
                bucket.folders(&key).map(drop),
                bucket.look_at(std::slice::from_ref(&key)).map(drop),
                bucket.remove(std::slice::from_ref(&key)),
                bucket.block(bucket.read(&key, 0..10)).map(drop),
                bucket.abort(&key, "upload"),
            ];
            let said: Vec<String> =
                errors.into_iter().filter_map(Result::err).map(|error| format!("{error} {error:?}")).collect();
            assert!(said.len() > 7, "{said:?}");
            for text in &said {
                for secret in ["AKIAKEY", "secret-key", "session-token", "StringToSign"] {
                    assert!(!text.contains(secret), "{text}");
                }
            }
            let listed = said.iter().find(|text| text.contains("list")).unwrap();
            assert!(listed.contains(code) && listed.contains("not this one"), "{listed}");
        }
    }
}

//! What stands in for object storage in tests: a store in memory or in a folder whose requests can be made to fail, to wait,
//! or to carry a flipped bit, with uploads in parts as S3 has them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::executor::block_on;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartId, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use crate::bucket::Bucket;
use crate::testing::{Fault, Faults};

/// Where an upload goes, and the parts that have come.
type Upload = (Path, BTreeMap<usize, Bytes>);

/// A store whose peer can be made to fail.
#[derive(Debug)]
pub(crate) struct TestStore {
    inner: Arc<dyn ObjectStore>,
    faults: Arc<Faults>,
    uploads: Mutex<BTreeMap<MultipartId, Upload>>,
    next_upload: AtomicU64,
    /// It overwrites what it was asked to leave alone, as older servers do.
    pub(crate) overwrites: AtomicBool,
    /// It lists this key, and says that it is not there.
    hidden: Mutex<Option<String>>,
    /// Objects until the one that is taken without an answer; negative when none is to come.
    answers_left: AtomicIsize,
}

impl std::fmt::Display for TestStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.inner)
    }
}

fn broken() -> Error {
    Error::Generic { store: "test", source: "the peer does not answer".into() }
}

impl TestStore {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>, faults: Arc<Faults>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            faults,
            uploads: Mutex::default(),
            next_upload: AtomicU64::new(1),
            overwrites: AtomicBool::new(false),
            hidden: Mutex::default(),
            answers_left: AtomicIsize::new(-1),
        })
    }

    /// The same objects, past all faults.
    pub(crate) fn unhindered(&self) -> Arc<Self> {
        Self::new(self.inner.clone(), Arc::default())
    }

    pub(crate) fn hide(&self, key: &str) {
        *self.hidden.lock().unwrap() = Some(key.to_owned());
    }

    /// The object after the next `after` ones is taken, and nobody hears of it; with a negative number none is any more. Tells
    /// whether an earlier call came to that.
    pub(crate) fn lose_answers(&self, after: isize) -> bool {
        self.answers_left.swap(after, Ordering::SeqCst) < 0
    }

    pub(crate) fn bucket(self: &Arc<Self>) -> Bucket {
        Bucket::on(self.clone(), Path::from("some/prefix"), PathBuf::from("s3://bucket/some/prefix")).unwrap()
    }

    /// Every key, past all faults.
    pub(crate) fn keys(&self) -> Vec<String> {
        let listed: Vec<ObjectMeta> = block_on(self.inner.list(None).try_collect()).unwrap();
        let mut keys: Vec<String> = listed.into_iter().map(|meta| meta.location.to_string()).collect();
        keys.sort();
        keys
    }

    pub(crate) fn content(&self, key: &str) -> Vec<u8> {
        block_on(async { self.inner.get(&Path::from(key)).await.unwrap().bytes().await.unwrap() }).to_vec()
    }

    pub(crate) fn replace(&self, key: &str, content: Vec<u8>) {
        block_on(self.inner.put(&Path::from(key), content.into())).unwrap();
    }

    pub(crate) fn delete_object(&self, key: &str) {
        block_on(self.inner.delete(&Path::from(key))).unwrap();
    }

    /// Uploads in parts that have neither ended nor been given up, and take room. One of which no part has come takes none:
    /// a peer that dies before its id was noted leaves such a one.
    pub(crate) fn open_uploads(&self) -> usize {
        self.uploads.lock().unwrap().values().filter(|(_, parts)| !parts.is_empty()).count()
    }

    /// The key of the pack that holds this byte of a segment, with the place of the byte in it.
    pub(crate) fn pack_at(&self, segment: u32, at: u64) -> (String, u64) {
        let holds = |key: String| {
            let name = key.split_once("/packs/")?.1.to_owned();
            let mut parts = name.split('-');
            let of: u32 = parts.next()?.parse().ok()?;
            let start: u64 = parts.next()?.parse().ok()?;
            let size = self.content(&key).len() as u64;
            (of == segment && (start..start + size).contains(&at)).then_some((key, at - start))
        };
        // Names end with the time at which they were given.
        self.keys().into_iter().filter_map(holds).next_back().expect("a pack holds it")
    }

    async fn pass(&self) -> Result<bool> {
        self.faults.come();
        while self.faults.is_held() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        match self.faults.next() {
            None => Ok(false),
            Some(Fault::Error | Fault::Lost) => Err(broken()),
            Some(Fault::Flipped) => Ok(true),
        }
    }
}

fn flipped(payload: PutPayload) -> PutPayload {
    let mut bytes = BytesMut::from(Bytes::from(payload).as_ref());
    let middle = bytes.len() / 2;
    if let Some(byte) = bytes.get_mut(middle) {
        *byte ^= 1;
    }
    bytes.freeze().into()
}

#[async_trait]
impl ObjectStore for TestStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, mut opts: PutOptions) -> Result<PutResult> {
        if self.overwrites.load(Ordering::SeqCst) {
            opts.mode = PutMode::Overwrite;
        }
        let flip = self.pass().await? && location.as_ref().contains("/packs/");
        let put = self.inner.put_opts(location, if flip { flipped(payload) } else { payload }, opts).await;
        let counts = self.answers_left.load(Ordering::SeqCst) >= 0;
        if counts && self.answers_left.fetch_sub(1, Ordering::SeqCst) == 0 {
            return Err(broken());
        }
        put
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        unreachable!("uploads in parts go through MultipartStore")
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.pass().await?;
        if self.hidden.lock().unwrap().as_deref() == Some(location.as_ref()) {
            return Err(Error::NotFound { path: location.to_string(), source: "it is hidden".into() });
        }
        self.inner.get_opts(location, options).await
    }

    async fn get_ranges(&self, _: &Path, _: &[Range<u64>]) -> Result<Vec<Bytes>> {
        unreachable!("ranges are read one by one")
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        match self.faults.next() {
            Some(Fault::Error | Fault::Lost) => futures::stream::iter([Err(broken())]).boxed(),
            _ => self.inner.delete_stream(locations),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.faults.next() {
            Some(Fault::Error | Fault::Lost) => futures::stream::iter([Err(broken())]).boxed(),
            _ => self.inner.list(prefix),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.pass().await?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        unreachable!("nothing is copied")
    }
}

#[async_trait]
impl MultipartStore for TestStore {
    async fn create_multipart(&self, path: &Path) -> Result<MultipartId> {
        self.pass().await?;
        let id = format!("upload-{}", self.next_upload.fetch_add(1, Ordering::SeqCst));
        self.uploads.lock().unwrap().insert(id.clone(), (path.clone(), BTreeMap::new()));
        Ok(id)
    }

    async fn put_part(&self, path: &Path, id: &MultipartId, part: usize, data: PutPayload) -> Result<PartId> {
        let flip = self.pass().await?;
        let data = Bytes::from(if flip { flipped(data) } else { data });
        let mut uploads = self.uploads.lock().unwrap();
        let (key, parts) = uploads.get_mut(id).ok_or_else(|| no_upload(path))?;
        assert_eq!(key, path);
        parts.insert(part, data);
        Ok(PartId { content_id: part.to_string() })
    }

    async fn complete_multipart(&self, path: &Path, id: &MultipartId, parts: Vec<PartId>) -> Result<PutResult> {
        self.pass().await?;
        let (_, sent) = self.uploads.lock().unwrap().remove(id).ok_or_else(|| no_upload(path))?;
        assert_eq!(parts.len(), sent.len());
        // S3 refuses a part below 5 MiB, but for the last.
        let mut all = sent.values().rev();
        assert!(all.next().is_some() && all.all(|part| part.len() >= 5 << 20));
        self.inner.put(path, sent.into_values().collect::<PutPayload>()).await
    }

    async fn abort_multipart(&self, path: &Path, id: &MultipartId) -> Result<()> {
        self.pass().await?;
        self.uploads.lock().unwrap().remove(id).map(drop).ok_or_else(|| no_upload(path))
    }
}

fn no_upload(path: &Path) -> Error {
    Error::NotFound { path: path.to_string(), source: "no such upload".into() }
}

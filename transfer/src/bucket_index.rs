//! How a bucket remembers what it holds: the keys, and the index of each replica. Nothing is ever changed in place.
//!
//! * `cluster`: whose bytes these are.
//! * `probes/<node>/<run>`: there for a moment at a node's start, which tries whether the server keeps to what follows.
//! * `nodes/<node>/<replica>`: an empty mark: that node made the replica, or took it over. A hint; the index decides.
//! * `replicas/<replica>/records` and `manifest`: what the seal fixed.
//! * `replicas/<replica>/packs/…`: bytes of the segments, each object a run of units as they lie there.
//! * `replicas/<replica>/uploads/…`: the id of an upload in parts that is under way, so that it can be given up.
//! * `replicas/<replica>/index/<version>`: who owns the replica, the state, and which packs hold the units. Written where
//!   there is none; the highest version counts. Of two writers of one version the store lets one through, so that a node
//!   whose replica another has taken over can not write any more, and learns it at its next try.

use ballast_schemas::{Bitmap, ClusterId, LogPosition, NodeId};
use object_store::path::Path;
use serde::{Deserialize, Serialize};

use crate::bucket::Bucket;
use crate::folder::{OnPath, PathError};
use crate::layout::GroupLayout;
use crate::record::{self, LayoutRecord, SealRecord, StateRecord};

/// Digits of a version, so that names sort like numbers.
const VERSION_DIGITS: usize = 20;

/// Names of what a replica consists of.
pub(crate) const RECORDS: &str = "records";
pub(crate) const MANIFEST: &str = "manifest";
pub(crate) const PACKS: &str = "packs";
pub(crate) const UPLOADS: &str = "uploads";
const INDEX: &str = "index";
const REPLICAS: &str = "replicas";
const NODES: &str = "nodes";
const CLUSTER: &str = "cluster";
const PROBES: &str = "probes";

/// What the seal fixed, but for the manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SealedRecord {
    pub layout: LayoutRecord,
    pub seal: SealRecord,
}

/// An object that holds a run of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pack {
    /// Its name below `packs`.
    pub name: String,
    /// The segment.
    pub segment: u32,
    /// First byte of the segment that it holds.
    pub start: u64,
    /// How many it holds.
    pub bytes: u64,
}

impl Pack {
    /// Whether it can be what its index says.
    pub(crate) fn lies_in(&self, layout: &GroupLayout) -> bool {
        let end = self.start.checked_add(self.bytes);
        self.segment < layout.segment_count() && end.is_some_and(|end| end <= layout.segment_bytes(self.segment))
    }
}

/// A replica at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Index {
    /// The node that may write it.
    pub owner: NodeId,
    /// The run of that node.
    pub incarnation: String,
    /// What counts.
    pub state: StateRecord,
    /// What holds it.
    pub packs: Vec<Pack>,
}

impl Index {
    /// One that says that what stands beside it is about to be removed, because it never had an index.
    pub(crate) fn of_remains(owner: &NodeId, incarnation: &str) -> Self {
        let state = StateRecord {
            fence: LogPosition::ZERO,
            deleting: true,
            held: Bitmap::empty(0),
            resident: Bitmap::empty(0),
        };
        Self { owner: owner.clone(), incarnation: incarnation.to_owned(), state, packs: Vec::new() }
    }

    pub(crate) fn is_of_remains(&self) -> bool {
        self.state.deleting && self.state.fence == LogPosition::ZERO && self.packs.is_empty()
    }
}

/// The key of a replica, or of something in it.
pub(crate) fn replica_key<'a>(bucket: &Bucket, replica: &'a str, names: impl IntoIterator<Item = &'a str>) -> Path {
    bucket.key([REPLICAS, replica].into_iter().chain(names))
}

/// The key of a node's mark on a replica.
pub(crate) fn mark_key(bucket: &Bucket, node: &NodeId, replica: &str) -> Path {
    bucket.key([NODES, node.as_str(), replica])
}

/// Whether the server can be relied on by this run of a node.
pub(crate) fn check_server(bucket: &Bucket, node: &NodeId, incarnation: &str) -> Result<(), PathError> {
    bucket.check_server(&bucket.key([PROBES, node.as_str(), incarnation]))
}

/// The replicas that a node has marked.
pub(crate) fn marked_by(bucket: &Bucket, node: &NodeId) -> Result<Vec<String>, PathError> {
    let marks = bucket.list(&bucket.key([NODES, node.as_str()]))?;
    Ok(marks.iter().filter_map(|mark| mark.location.filename().map(str::to_owned)).collect())
}

/// The nodes that have marks.
pub(crate) fn nodes(bucket: &Bucket) -> Result<Vec<NodeId>, PathError> {
    let names = bucket.folders(&bucket.key([NODES]))?;
    let decoded = |name: &String| percent_encoding::percent_decode_str(name).decode_utf8_lossy().into_owned();
    // A name that is none was not written by this program.
    Ok(names.iter().filter_map(|name| NodeId::new(decoded(name)).ok()).collect())
}

/// The cluster that the bucket's bytes belong to; `None` when it has met none.
pub(crate) fn cluster(bucket: &Bucket) -> Result<Option<ClusterId>, PathError> {
    let key = bucket.key([CLUSTER]);
    let Some(bytes) = bucket.get(&key)? else { return Ok(None) };
    record::decode(&bytes, &bucket.place().join(CLUSTER))
        .map(Some)
        .map_err(std::io::Error::other)
        .on("use", bucket.place())
}

/// Makes the bucket a cluster's. Tells whose it is then.
pub(crate) fn set_cluster(bucket: &Bucket, wanted: &ClusterId) -> Result<ClusterId, PathError> {
    if let Some(found) = cluster(bucket)? {
        return Ok(found);
    }
    bucket.create(&bucket.key([CLUSTER]), record::encode(wanted))?;
    // Whoever came first has it.
    Ok(cluster(bucket)?.unwrap_or_else(|| wanted.clone()))
}

/// The versions of a replica's index, ascending.
pub(crate) fn versions(bucket: &Bucket, replica: &str) -> Result<Vec<u64>, PathError> {
    let listed = bucket.list(&replica_key(bucket, replica, [INDEX]))?;
    let mut versions: Vec<u64> =
        listed.iter().filter_map(|meta| meta.location.filename().and_then(|name| name.parse().ok())).collect();
    versions.sort_unstable();
    Ok(versions)
}

/// Whether a key is one of a replica's indexes.
pub(crate) fn is_index(bucket: &Bucket, replica: &str, key: &Path) -> bool {
    key.prefix_matches(&replica_key(bucket, replica, [INDEX]))
}

pub(crate) fn version_key(bucket: &Bucket, replica: &str, version: u64) -> Path {
    replica_key(bucket, replica, [INDEX, &format!("{version:0VERSION_DIGITS$}")])
}

/// A version, and what the index says in it, or what is wrong with it.
pub(crate) type Newest = (u64, Result<Index, String>);

/// What a replica's index says now; `None` when it has none.
pub(crate) fn newest(bucket: &Bucket, replica: &str) -> Result<Option<Newest>, PathError> {
    let mut tried = None;
    loop {
        let Some(&version) = versions(bucket, replica)?.last() else { return Ok(None) };
        let key = version_key(bucket, replica, version);
        if let Some(bytes) = bucket.get(&key)? {
            let index = record::decode(&bytes, &bucket.path_of(&key)).map_err(|error| error.to_string());
            return Ok(Some((version, index)));
        }
        // It may have been replaced by a newer one meanwhile, which is then listed instead.
        if tried.replace(version) == Some(version) {
            let source = std::io::Error::other("the server lists it, and then does not have it");
            return Err(PathError::new("read", &bucket.path_of(&key), source));
        }
    }
}

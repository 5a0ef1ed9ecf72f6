//! The cold tier as the node store sees it: for every instance a replica that takes units from memory, gives them back
//! checked, and remembers durably which of them count (see ARCHITECTURE.md, The cold tier's back-ends). How bytes and
//! records are kept is the back-end's matter (`cold_disk`, `cold_bucket`); which units are cold is the node store's.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ballast_schemas::{ClusterId, InstanceId, NodeId};
use uuid::Uuid;

use crate::bucket::BucketUrl;
use crate::budget::{Budget, Charge};
use crate::cold_bucket::BucketTier;
use crate::cold_disk::DiskTier;
use crate::cold_engine::{self, EngineChoice};
use crate::error::Mismatch;
use crate::folder::{FolderError, PathError};
use crate::instance_records::{Found, InstanceRecords};
use crate::layout::{GroupLayout, Run};
use crate::memory_tier::MemorySegments;
use crate::node_store::DamagedFolder;
use crate::record::StateRecord;

/// Most bytes that one [`ColdReplica::read`] may ask for, wherever they start.
pub(crate) const READ_BYTES_MAX: u64 = (2 << 20) - (8 << 10);

/// How to open a cold tier.
#[derive(Clone, Debug)]
pub struct ColdOptions {
    /// Where the copies are kept.
    pub place: ColdPlace,
    /// Bytes that the tier may use; `None` for what the place has free.
    pub quota_bytes: Option<u64>,
}

/// Where a node keeps its cold copies.
#[derive(Clone, Debug)]
pub enum ColdPlace {
    /// On local disk.
    Disk {
        /// The folder, which must exist.
        folder: PathBuf,
        /// Which engine moves the bytes.
        engine: EngineChoice,
    },
    /// In object storage.
    Bucket(BucketUrl),
}

/// Why a cold tier can not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ColdTierError {
    /// The folder can not be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// No engine starts.
    #[error("can not start an I/O engine for the cold tier: {0}")]
    Engine(io::Error),
    /// Another operation failed.
    #[error(transparent)]
    Path(#[from] PathError),
}

/// What a cold tier runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColdReport {
    /// The folder, or what stands for it.
    pub place: PathBuf,
    /// Bytes that the tier may use.
    pub quota_bytes: u64,
    /// How bytes get there, and why not by the first choice if they do not.
    pub how: String,
}

impl std::fmt::Display for ColdReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.how)
    }
}

/// Opens the cold tier that the options name.
pub(crate) fn open(
    options: &ColdOptions,
    node: &NodeId,
    incarnation: Uuid,
) -> Result<Arc<dyn ColdTier>, ColdTierError> {
    match &options.place {
        ColdPlace::Disk { folder, engine } => {
            let start = || cold_engine::start(*engine);
            Ok(Arc::new(DiskTier::open(folder, options.quota_bytes, node, incarnation, start)?))
        }
        ColdPlace::Bucket(url) => Ok(Arc::new(BucketTier::open(url, options.quota_bytes, node, incarnation)?)),
    }
}

/// The cold tier of a node.
pub(crate) trait ColdTier: Send + Sync + std::fmt::Debug {
    /// What it runs on.
    fn report(&self) -> &ColdReport;

    /// The cluster that its bytes belong to, once it is known.
    fn cluster(&self) -> Option<ClusterId>;

    /// Records the cluster that its bytes belong to, durably.
    fn set_cluster(&self, cluster: &ClusterId) -> Result<(), PathError>;

    /// The bytes that it may use.
    fn budget(&self) -> &Budget;

    /// The replica of an instance of which nothing is here yet.
    fn replica(self: Arc<Self>, instance: &InstanceId, layout: &Arc<GroupLayout>) -> Box<dyn ColdReplica>;

    /// Something that is still here of an instance, if anything is.
    fn left_of(&self, instance: &InstanceId) -> Result<Option<PathBuf>, PathError>;

    /// What is here from earlier runs of the node. What was left half made or half removed is cleaned away.
    fn scan(self: Arc<Self>) -> Result<Scan, PathError>;

    /// Whether what is here stays when the node is gone.
    fn outlives_node(&self) -> bool {
        false
    }

    /// Takes over what other nodes have here that are away, and what of an earlier try was not adopted. `held` names the
    /// instances of which this node holds something already, as folders: of these nothing is taken. Nothing where the tier
    /// goes with its node.
    fn adopt(
        self: Arc<Self>,
        _is_away: &dyn Fn(&NodeId) -> bool,
        _held: &dyn Fn() -> BTreeSet<String>,
    ) -> Result<Vec<FoundReplica>, PathError> {
        Ok(Vec::new())
    }
}

/// One instance's copies on a cold tier.
///
/// Copying and removing is serialised by the caller (the instance's queue); reading may go on at the same time.
pub(crate) trait ColdReplica: Send + Sync + std::fmt::Debug {
    /// Where it is, for people.
    fn place(&self) -> &Path;

    /// Whether it is still this node's. One that stays with its node always is.
    fn holds(&self) -> Result<bool, PathError> {
        Ok(true)
    }

    /// Forgets a replica that is another node's now, so that a new one can be begun.
    fn start_over(&self) -> Result<(), PathError> {
        Ok(())
    }

    /// Makes the records durable, before there is any unit. An earlier attempt may have come halfway.
    fn begin(&self, records: &InstanceRecords, state: &StateRecord) -> Result<(), PathError>;

    /// Whether a fence that was raised is written when it is, which is quick then. Otherwise it goes with the next change.
    fn writes_fences_at_once(&self) -> bool {
        true
    }

    /// Makes the state durable: from then on the units that it says are held count, also after a crash.
    fn save(&self, state: &StateRecord) -> Result<(), PathError>;

    /// Writes runs from memory and makes them durable. They are not verified, and do not count, yet.
    ///
    /// The caller answers for the units being hot and guarded: nobody writes or frees them meanwhile.
    fn write(&self, memory: &MemorySegments, runs: &[Run], watch: &Watch<'_>) -> Result<(), ColdFailure>;

    /// Reads runs back and compares each unit with its checksum.
    fn verify(
        &self,
        runs: &[Run],
        checksum_of: &dyn Fn(u32) -> u64,
        watch: &Watch<'_>,
    ) -> Result<Vec<Mismatch>, ColdFailure>;

    /// Reads runs into memory and compares each unit with its checksum.
    ///
    /// The caller answers for nobody reading or writing these units in memory meanwhile, and gives up what was taken when
    /// this fails.
    fn fill(
        &self,
        memory: &MemorySegments,
        runs: &[Run],
        checksum_of: &dyn Fn(u32) -> u64,
        watch: &Watch<'_>,
    ) -> Result<Vec<Mismatch>, ColdFailure>;

    /// Reads at most [`READ_BYTES_MAX`] bytes of a segment.
    fn read(&self, segment: u32, range: Range<u64>) -> Result<ColdBytes, PathError>;

    /// What can not hold the units' copies any more. Whether any of them counted is the caller's to know.
    fn gone(&self, units: &[u32]) -> Result<Vec<Gone>, PathError>;

    /// As [`ColdReplica::gone`], when the node starts.
    fn gone_at_start(&self, units: &[u32]) -> Result<Vec<Gone>, PathError> {
        self.gone(units)
    }

    /// Remembers how what holds these runs looks now.
    fn mark(&self, runs: &[Run]);

    /// Units, among those of these runs and what lies with them, that somebody may have changed since they were marked.
    fn changed(&self, runs: &[Run]) -> Vec<u32>;

    /// Gives back the room of runs of which no record speaks. What can not be given back is only noted.
    fn discard(&self, runs: &[Run]);

    /// Gives back the room of a run that was deleted; `is_last` says that its segment holds nothing else.
    fn free(&self, run: &Run, is_last: bool) -> Result<(), PathError>;

    /// The file of a segment, for readers on the same host; `None` where there is no such file.
    fn file(&self, segment: u32) -> Result<Option<Arc<File>>, PathError>;

    /// Removes everything. After a crash it is whole, or on its way out.
    fn remove(&self) -> Result<(), PathError>;
}

/// Something that held copies of units and does not any more.
#[derive(Debug)]
pub(crate) struct Gone {
    /// All units that it held, ascending.
    pub units: Vec<u32>,
    /// What was found in its place.
    pub why: PathError,
}

/// A sealed instance that was found, and its copies.
pub(crate) type FoundReplica = (Found, Box<dyn ColdReplica>);

/// What was found on a tier.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// Sealed instances.
    pub found: BTreeMap<InstanceId, FoundReplica>,
    /// What can not be understood, with the room that it keeps.
    pub damaged: Vec<(DamagedFolder, Charge)>,
}

/// Bytes read from a cold segment.
pub(crate) struct ColdBytes(Box<dyn AsRef<[u8]> + Send + Sync>);

impl ColdBytes {
    pub(crate) fn new(bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self(Box::new(bytes))
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.as_ref().as_ref()
    }
}

impl std::fmt::Debug for ColdBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ColdBytes").field(&self.bytes().len()).finish()
    }
}

/// Why a job on the cold tier ended early.
#[derive(Debug)]
pub(crate) enum ColdFailure {
    /// An operation on a file, or on what stands for one, failed.
    Path(PathError),
    /// The job is no longer wanted.
    Unwanted,
}

impl From<PathError> for ColdFailure {
    fn from(error: PathError) -> Self {
        Self::Path(error)
    }
}

/// What a long job asks and tells between two chunks.
pub(crate) struct Watch<'a> {
    pub progress: &'a Progress,
    /// Whether the job is still wanted.
    pub wanted: &'a dyn Fn() -> bool,
}

/// How far a long effect has come. Shared with whoever reports it.
#[derive(Default)]
pub struct Progress {
    bytes: AtomicU64,
    units: AtomicU32,
    look: Option<Box<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Progress").field("bytes", &self.bytes()).field("units", &self.units()).finish_non_exhaustive()
    }
}

impl Progress {
    /// One that calls `look` in the middle of the work, whenever some more of it is done.
    #[must_use]
    pub fn watched(look: impl Fn() + Send + Sync + 'static) -> Self {
        Self { look: Some(Box::new(look)), ..Self::default() }
    }

    /// Bytes moved or checked so far. Work that is done in passes counts each of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Units done so far.
    #[must_use]
    pub fn units(&self) -> u32 {
        self.units.load(Ordering::Relaxed)
    }

    pub(crate) fn add_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.tell(bytes > 0);
    }

    pub(crate) fn add_units(&self, units: u32) {
        self.units.fetch_add(units, Ordering::Relaxed);
        self.tell(units > 0);
    }

    fn tell(&self, moved: bool) {
        if let Some(look) = self.look.as_ref().filter(|_| moved) {
            look();
        }
    }
}

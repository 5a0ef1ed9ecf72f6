//! The memory tier: groups as segment files on tmpfs, within a byte budget (see ARCHITECTURE.md, One layout, two
//! tiers). Room is reserved and taken before any byte moves; bytes of deleted segments stay charged until the last
//! reader has unmapped them. Which units are hot is the node store's matter.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ballast_schemas::frame::Tier;
use ballast_schemas::{InstanceId, NodeId};
use uuid::Uuid;

use crate::budget::{Budget, CapacityExhausted, Charge, Usage};
use crate::folder::{
    Folder, FolderError, FolderIdentity, FolderOptions, OnPath, PathError, remove_file, remove_folder, space,
    used_bytes,
};
use crate::layout::GroupLayout;
use crate::objects::Objects;
use crate::segment::{Segment, lock_out_readers};
use crate::spares::{Spare, Spares};
use crate::tmpfs;

const FLAG: &str = "--memory-dir";
/// The folder of the spare segments in the tier's.
const SPARES: &str = "spares";

/// Whether the node mounts a huge-page tmpfs on its memory folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Where it may; otherwise it says why not and goes on with 4 KiB pages.
    #[default]
    Auto,
    /// Never mount; a folder that already lies on a huge-page tmpfs is still used as one.
    Off,
}

/// How to open a memory tier.
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// The folder, on tmpfs; made when it is missing.
    pub folder: PathBuf,
    /// Bytes that the tier may use.
    pub budget_bytes: u64,
    /// Whether to mount a huge-page tmpfs there.
    pub huge_pages: HugePages,
}

/// Why a memory tier can not be opened.
#[derive(Debug, thiserror::Error)]
pub enum MemoryTierError {
    /// The folder lies on something else than tmpfs.
    #[error("memory folder {folder} is not on a tmpfs; name a folder under /dev/shm or another tmpfs with {FLAG}", folder = folder.display())]
    NotTmpfs {
        /// The folder.
        folder: PathBuf,
    },
    /// The tmpfs is smaller than the budget.
    #[error(
        "the tmpfs of memory folder {folder} has {free_bytes} of its {total_bytes} bytes free, --memory asks for {budget_bytes}; \
         enlarge it (in a container: --shm-size), name another with {FLAG}, or lower --memory",
        folder = folder.display()
    )]
    TooSmall {
        /// The folder.
        folder: PathBuf,
        /// What the tmpfs can still take, the node's own bytes included.
        free_bytes: u64,
        /// Its size.
        total_bytes: u64,
        /// The budget.
        budget_bytes: u64,
    },
    /// The machine has less memory than the budget.
    #[error("the machine has {machine_bytes} bytes of memory, --memory asks for {budget_bytes}; lower it")]
    BeyondMachine {
        /// Memory of the machine.
        machine_bytes: u64,
        /// The budget.
        budget_bytes: u64,
    },
    /// A budget of nothing.
    #[error("--memory is 0; a node needs memory to take an import")]
    NoBudget,
    /// The folder can not be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// Another operation failed.
    #[error(transparent)]
    Path(#[from] PathError),
}

/// What a memory tier runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryReport {
    /// The folder.
    pub folder: PathBuf,
    /// Bytes that the tier may use.
    pub budget_bytes: u64,
    /// Why there are no huge pages; `None` when there are.
    pub no_huge_pages: Option<String>,
}

impl std::fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.no_huge_pages {
            None => f.write_str("tmpfs, huge pages"),
            Some(why) => write!(f, "tmpfs, 4 KiB pages ({why})"),
        }
    }
}

/// A segment whose file is gone but whose bytes some reader still maps.
#[derive(Debug)]
struct Lingering {
    segment: Arc<Segment>,
    _charge: Charge,
}

/// The memory tier of a node.
#[derive(Debug)]
pub(crate) struct MemoryTier {
    /// Taken out only by `drop`, to give the lock back before unmounting.
    folder: Mutex<Option<Folder>>,
    path: PathBuf,
    identity: FolderIdentity,
    mounted: bool,
    report: MemoryReport,
    budget: Budget,
    objects: Objects,
    lingering: Mutex<Vec<Lingering>>,
    /// Taken out only by `drop`, to remove their files before unmounting.
    spares: Option<Spares>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these mutexes hold is changed in single statements; a panic elsewhere can not leave it torn.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryTier {
    /// Opens the tier and takes its folder for this process.
    pub(crate) fn open(options: &MemoryOptions, node: &NodeId, incarnation: Uuid) -> Result<Self, MemoryTierError> {
        let MemoryOptions { folder: path, budget_bytes, huge_pages } = options;
        let budget_bytes = *budget_bytes;
        if budget_bytes == 0 {
            return Err(MemoryTierError::NoBudget);
        }
        if let Some(machine_bytes) = tmpfs::machine_memory_bytes().filter(|&machine| machine < budget_bytes) {
            return Err(MemoryTierError::BeyondMachine { machine_bytes, budget_bytes });
        }
        fs::create_dir_all(path).on("create", path)?;
        let no_huge_pages = prepare_mount(path, budget_bytes, *huge_pages)?;
        if !tmpfs::is_tmpfs(path)? {
            return Err(MemoryTierError::NotTmpfs { folder: path.clone() });
        }
        let folder_options = FolderOptions { what: "memory", flag: FLAG, path, durable: false };
        let folder = Folder::open(folder_options, node, incarnation)?;
        let spares = Spares::open(path.join(SPARES), no_huge_pages.is_none())?;
        let own_bytes = used_bytes(&folder.instances())?;
        let space = space(path)?;
        let free_bytes = space.free_bytes + own_bytes;
        if free_bytes < budget_bytes {
            return Err(MemoryTierError::TooSmall {
                folder: path.clone(),
                free_bytes,
                total_bytes: space.total_bytes,
                budget_bytes,
            });
        }
        Ok(Self {
            identity: folder.identity().clone(),
            folder: Mutex::new(Some(folder)),
            path: path.clone(),
            mounted: is_mount_point(path)?,
            report: MemoryReport { folder: path.clone(), budget_bytes, no_huge_pages },
            budget: Budget::new(Tier::Memory, budget_bytes),
            objects: Objects::default(),
            lingering: Mutex::default(),
            spares: Some(spares),
        })
    }

    pub(crate) fn report(&self) -> &MemoryReport {
        &self.report
    }

    /// Who the folder belonged to when it was opened.
    pub(crate) fn identity(&self) -> &FolderIdentity {
        &self.identity
    }

    pub(crate) fn set_cluster(&self, cluster: &ballast_schemas::ClusterId) -> Result<(), PathError> {
        match lock(&self.folder).as_mut() {
            Some(folder) => folder.set_cluster(cluster),
            None => Ok(()),
        }
    }

    pub(crate) fn instances(&self) -> PathBuf {
        self.path.join("instances")
    }

    pub(crate) fn huge(&self) -> bool {
        self.report.no_huge_pages.is_none()
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// How full the tier is, after giving back what no reader maps any more.
    pub(crate) fn usage(&self) -> Usage {
        self.sweep();
        self.budget.usage()
    }

    /// Takes room for a managed group out of the budget; ordinary objects give way to it.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<Charge, CapacityExhausted> {
        let charge = self.budget.reserve(bytes).or_else(|_| {
            self.sweep();
            self.objects.reserve_managed(&self.budget, bytes)
        });
        self.fit_spares();
        charge
    }

    /// Spare segments take nothing but what the budget has free.
    pub(crate) fn fit_spares(&self) {
        if let Some(spares) = &self.spares {
            spares.fit(self.budget.usage().free_bytes());
        }
    }

    /// Gives all spare segments back to the file system.
    pub(crate) fn give_up_spares(&self) {
        if let Some(spares) = &self.spares {
            spares.fit(0);
        }
    }

    /// Bytes of the spare segments, once all are made.
    #[cfg(test)]
    pub(crate) fn spare_bytes(&self) -> Option<u64> {
        self.spares.as_ref().filter(|spares| spares.is_idle()).map(Spares::bytes)
    }

    /// Spare segments of the sizes that a layout needs, by the number of the segment that each can be.
    pub(crate) fn take_spares(&self, layout: &GroupLayout) -> Vec<(u32, Spare)> {
        let Some(spares) = &self.spares else { return Vec::new() };
        let found = |index| Some((index, spares.take(layout.segment_bytes(index))?));
        (0..layout.segment_count()).filter_map(found).collect()
    }

    /// The ordinary objects, and the guard over the managed groups' keys.
    pub(crate) fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Keeps the bytes of an unlinked segment charged until nobody maps it.
    pub(crate) fn linger(&self, segment: Arc<Segment>, charge: Charge) {
        lock(&self.lingering).push(Lingering { segment, _charge: charge });
        self.sweep();
    }

    /// Gives back the bytes of unlinked segments that nobody maps any more.
    pub(crate) fn sweep(&self) {
        let mut gone = Vec::new();
        lock(&self.lingering).retain(|lingering| {
            let read_here = Arc::strong_count(&lingering.segment) > 1;
            let mapped = match lock_out_readers(lingering.segment.file()) {
                Ok(no_readers) => no_readers.is_none(),
                Err(error) => {
                    tracing::error!(%error, "can not ask whether a deleted segment is still mapped");
                    true
                }
            };
            let stays = read_here || mapped;
            if !stays {
                gone.push(lingering.segment.size_bytes());
            }
            stays
        });
        if !gone.is_empty() {
            self.fit_spares();
            gone.iter().for_each(|&bytes| self.want_spare(bytes));
        }
    }

    fn want_spare(&self, bytes: u64) {
        if let Some(spares) = &self.spares {
            spares.want(bytes);
        }
    }

    /// Bytes of unlinked segments that readers still map.
    pub(crate) fn lingering_bytes(&self) -> u64 {
        self.sweep();
        lock(&self.lingering).iter().map(|lingering| lingering._charge.bytes()).sum()
    }
}

impl Drop for MemoryTier {
    fn drop(&mut self) {
        self.spares = None;
        let empty = fs::read_dir(self.instances()).is_ok_and(|mut entries| entries.next().is_none());
        self.folder.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.mounted && empty && lock(&self.lingering).is_empty() {
            // An empty tmpfs of ours is of no use to anybody; one that is still in use stays.
            if let Err(error) = tmpfs::unmount(&self.path) {
                tracing::debug!(%error, path = %self.path.display(), "the memory folder stays mounted");
            }
        }
    }
}

fn is_mount_point(path: &Path) -> Result<bool, PathError> {
    let canonical = path.canonicalize().on("resolve", path)?;
    Ok(tmpfs::mount_of(path)?.is_some_and(|mount| mount.mount_point == canonical))
}

/// Mounts a huge-page tmpfs where that is wanted and possible. The answer says why there are no huge pages.
fn prepare_mount(path: &Path, budget_bytes: u64, huge_pages: HugePages) -> Result<Option<String>, PathError> {
    // Room for the records beside the bytes, and for huge pages that stick out over the edge of a unit.
    let size_bytes = budget_bytes + budget_bytes / 32 + (64 << 20);
    let mount = tmpfs::mount_of(path)?;
    if mount.as_ref().is_some_and(tmpfs::MountInfo::has_huge_pages) {
        if is_mount_point(path)?
            && space(path)?.total_bytes < size_bytes
            && let Err(error) = tmpfs::resize(path, size_bytes)
        {
            tracing::warn!(%error, path = %path.display(), "can not resize the memory folder's tmpfs");
        }
        return Ok(None);
    }
    if huge_pages == HugePages::Off {
        return Ok(Some("switched off".to_owned()));
    }
    let in_use = fs::read_dir(path).on("list", path)?.next().is_some();
    if in_use {
        // Mounting over it would hide the bytes, or the lock, of an earlier or another run.
        return Ok(Some("the folder was in use before, on a tmpfs without them".to_owned()));
    }
    match tmpfs::mount_huge(path, size_bytes) {
        Ok(()) => Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            Ok(Some(format!("mounting a huge=advise tmpfs needs CAP_SYS_ADMIN: {error}")))
        }
        Err(error) => Ok(Some(format!("can not mount a huge=advise tmpfs: {error}"))),
    }
}

/// The name of an instance's folder, on both tiers: the group's digest and the log position.
pub(crate) fn instance_folder(instance: &InstanceId) -> String {
    format!("{}-{}", instance.group_id.hex(), instance.position)
}

/// The name of a segment's file, on both tiers.
pub(crate) fn segment_file(segment: u32) -> String {
    format!("segment-{segment:06}")
}

/// The segments of one instance in memory.
#[derive(Debug)]
pub(crate) struct MemorySegments {
    folder: PathBuf,
    layout: Arc<GroupLayout>,
    huge: bool,
    open: Mutex<Vec<Option<Arc<Segment>>>>,
}

impl MemorySegments {
    /// The segments in an instance's folder; files are opened or made when they are first needed.
    pub(crate) fn new(folder: PathBuf, layout: Arc<GroupLayout>, huge: bool) -> Self {
        let open = vec![None; layout.segment_count() as usize];
        Self { folder, layout, huge, open: Mutex::new(open) }
    }

    fn path(&self, segment: u32) -> PathBuf {
        self.folder.join(segment_file(segment))
    }

    /// Begins a segment with a spare one; answers how many bytes of it have their room.
    pub(crate) fn begin_with(&self, segment: u32, spare: Spare) -> Result<u64, PathError> {
        let ready_bytes = spare.ready_bytes();
        self.insert(segment, |path, _| spare.place(path))?;
        Ok(ready_bytes)
    }

    /// A segment, if there is one.
    pub(crate) fn get(&self, segment: u32) -> Option<Arc<Segment>> {
        lock(&self.open).get(segment as usize)?.clone()
    }

    /// A segment, made when there is none.
    pub(crate) fn get_or_create(&self, segment: u32) -> Result<Arc<Segment>, PathError> {
        self.insert(segment, |path, bytes| Segment::create(path, bytes, self.huge).map(Arc::new))
    }

    /// Opens a segment's file from an earlier run; `None` when there is none.
    pub(crate) fn adopt(&self, segment: u32) -> Result<Option<Arc<Segment>>, PathError> {
        if !self.path(segment).exists() {
            return Ok(None);
        }
        self.insert(segment, |path, bytes| Segment::open(path, bytes, self.huge).map(Arc::new)).map(Some)
    }

    fn insert(
        &self,
        segment: u32,
        make: impl FnOnce(&Path, u64) -> Result<Arc<Segment>, PathError>,
    ) -> Result<Arc<Segment>, PathError> {
        let path = self.path(segment);
        let mut open = lock(&self.open);
        let slot = open
            .get_mut(segment as usize)
            .ok_or_else(|| PathError::new("open", &path, std::io::Error::from(std::io::ErrorKind::InvalidInput)))?;
        if let Some(segment) = slot {
            return Ok(segment.clone());
        }
        let made = make(&path, self.layout.segment_bytes(segment))?;
        *slot = Some(made.clone());
        Ok(made)
    }

    /// Unlinks a segment's file. Its inode is never used again: who maps it keeps what it sees.
    pub(crate) fn unlink(&self, segment: u32) -> Result<Option<Arc<Segment>>, PathError> {
        remove_file(&self.path(segment))?;
        Ok(lock(&self.open).get_mut(segment as usize).and_then(Option::take))
    }

    /// Unlinks every segment and removes the instance's folder.
    pub(crate) fn unlink_all(&self) -> Result<Vec<Arc<Segment>>, PathError> {
        let segments = lock(&self.open).iter_mut().filter_map(Option::take).collect();
        remove_folder(&self.folder)?;
        Ok(segments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> NodeId {
        NodeId::new("n").unwrap()
    }

    fn open(folder: &Path, budget_bytes: u64, huge_pages: HugePages) -> Result<MemoryTier, MemoryTierError> {
        MemoryTier::open(
            &MemoryOptions { folder: folder.to_owned(), budget_bytes, huge_pages },
            &node(),
            Uuid::new_v4(),
        )
    }

    #[test]
    fn a_folder_that_is_not_in_memory_is_refused() {
        let scratch = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let error = open(scratch.path(), 1 << 20, HugePages::Off).unwrap_err();
        assert!(matches!(error, MemoryTierError::NotTmpfs { .. }), "{error}");
    }

    #[test]
    fn a_budget_beyond_the_machine_or_of_nothing_is_refused() {
        let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
        let error = open(scratch.path(), u64::MAX / 2, HugePages::Off).unwrap_err();
        assert!(matches!(error, MemoryTierError::BeyondMachine { .. }), "{error}");
        assert!(matches!(open(scratch.path(), 0, HugePages::Off), Err(MemoryTierError::NoBudget)));
    }

    #[test]
    fn a_small_container_tmpfs_says_what_it_has_and_what_to_change() {
        let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = CString::new("size=64m").unwrap();
        if let Err(error) =
            rustix::mount::mount("t", scratch.path(), "tmpfs", rustix::mount::MountFlags::empty(), options.as_c_str())
        {
            println!("skipped: can not mount a tmpfs here: {error}");
            return;
        }
        let error = open(scratch.path(), 90 << 20, HugePages::Off);
        tmpfs::unmount(scratch.path()).unwrap();
        let text = error.unwrap_err().to_string();
        assert!(text.contains("of its 67108864 bytes free") && text.contains("--shm-size"), "{text}");
    }

    #[test]
    fn huge_pages_are_mounted_where_allowed_and_otherwise_explained() {
        let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
        let folder = scratch.path().join("node");
        let tier = open(&folder, 8 << 20, HugePages::Auto).unwrap();
        match &tier.report().no_huge_pages {
            None => assert!(tier.mounted && tier.huge()),
            Some(why) => println!("no huge pages here: {why}"),
        }
        drop(tier);
        assert!(!is_mount_point(&folder).unwrap(), "an empty mount does not outlive the node");
        let off = open(&folder, 8 << 20, HugePages::Off).unwrap();
        assert_eq!(off.report().to_string(), "tmpfs, 4 KiB pages (switched off)");
        drop(off);
        let again = open(&folder, 8 << 20, HugePages::Auto).unwrap();
        assert!(again.report().to_string().contains("in use before"), "{}", again.report());
    }

    #[test]
    fn deleted_bytes_stay_charged_until_the_last_reader_is_gone() {
        let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
        let tier = open(scratch.path(), 1 << 20, HugePages::Off).unwrap();
        let layout = Arc::new(GroupLayout::new(&[8192]).unwrap());
        let folder = tier.instances().join("x");
        fs::create_dir(&folder).unwrap();
        let segments = MemorySegments::new(folder.clone(), layout, false);
        let charge = tier.reserve(8192).unwrap();
        let segment = segments.get_or_create(0).unwrap();
        segment.take_room(&(0..8192)).unwrap();
        let reader = crate::segment::reader_descriptor(segment.file(), true).unwrap();
        drop(segment);
        let gone = segments.unlink(0).unwrap().unwrap();
        tier.linger(gone, charge);
        assert_eq!((tier.usage().used_bytes, tier.lingering_bytes()), (8192, 8192));
        drop(reader);
        assert_eq!((tier.usage().used_bytes, tier.lingering_bytes()), (0, 0));
    }

    use std::ffi::CString;
}

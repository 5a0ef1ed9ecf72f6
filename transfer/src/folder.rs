//! A tier's folder on a file system: one process at a time, atomic and durable replacement of small files, and the
//! identity of node and cluster that is kept beside the bytes (see ARCHITECTURE.md, Losing the log).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use ballast_schemas::{ClusterId, NodeId};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::record::{self, RecordError};

/// An operation on a path failed.
#[derive(Debug, thiserror::Error)]
#[error("can not {action} {path}: {source}", path = path.display())]
pub struct PathError {
    /// What was attempted.
    pub action: &'static str,
    /// On which file or folder.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

impl PathError {
    pub(crate) fn new(action: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self { action, path: path.to_owned(), source: source.into() }
    }

    /// Whether the file system has no room left.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self.source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

/// Attaches the path to an I/O error.
pub(crate) trait OnPath<T> {
    fn on(self, action: &'static str, path: &Path) -> Result<T, PathError>;
}

impl<T, E: Into<io::Error>> OnPath<T> for Result<T, E> {
    fn on(self, action: &'static str, path: &Path) -> Result<T, PathError> {
        self.map_err(|source| PathError::new(action, path, source))
    }
}

/// Why a tier's folder can not be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// There is no such folder.
    #[error("{what} folder {path} does not exist; create it or name another with {flag}", path = path.display())]
    Missing {
        /// Which tier's.
        what: &'static str,
        /// The folder.
        path: PathBuf,
        /// The flag that names it.
        flag: &'static str,
    },
    /// It is something else than a folder.
    #[error("{path} is not a folder; name another with {flag}", path = path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
        /// The flag that names it.
        flag: &'static str,
    },
    /// Nothing can be written there.
    #[error("{what} folder {path} is not writable ({source}); name another with {flag} or change its permissions", path = path.display())]
    NotWritable {
        /// Which tier's.
        what: &'static str,
        /// The folder.
        path: PathBuf,
        /// The flag that names it.
        flag: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The file system has no room even for the folder's own records.
    #[error("{what} folder {path} is on a full file system; free some space or name another with {flag}", path = path.display())]
    Full {
        /// Which tier's.
        what: &'static str,
        /// The folder.
        path: PathBuf,
        /// The flag that names it.
        flag: &'static str,
    },
    /// Another process uses it.
    #[error("{what} folder {path} is in use by process {pid}; stop it or name another folder with {flag}", path = path.display())]
    InUse {
        /// Which tier's.
        what: &'static str,
        /// The folder.
        path: PathBuf,
        /// The flag that names it.
        flag: &'static str,
        /// The other process, or `?` when it left no number.
        pid: String,
    },
    /// It holds the bytes of another node.
    #[error("{what} folder {path} belongs to node {found}, this is node {expected}; start with --node {found} or name another folder with {flag}", path = path.display())]
    OtherNode {
        /// Which tier's.
        what: &'static str,
        /// The folder.
        path: PathBuf,
        /// The flag that names it.
        flag: &'static str,
        /// This node.
        expected: NodeId,
        /// The node in the folder.
        found: NodeId,
    },
    /// Its identity record is damaged.
    #[error("{what} folder {path} has a damaged identity record: {source}", path = path.display())]
    Damaged {
        /// Which tier's.
        what: &'static str,
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        source: RecordError,
    },
    /// Another operation failed.
    #[error(transparent)]
    Path(#[from] PathError),
}

/// Who a folder belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FolderIdentity {
    /// The node.
    pub node: NodeId,
    /// The cluster, once the node has met it.
    pub cluster: Option<ClusterId>,
    /// The node's latest run on this folder.
    pub incarnation: String,
}

impl FolderIdentity {
    /// Who a folder belongs to, without taking it; `None` when nobody has used it.
    ///
    /// # Errors
    /// When what is recorded there is damaged or can not be read.
    pub fn of(folder: &Path) -> Result<Option<Self>, RecordError> {
        record::read(&folder.join(IDENTITY))
    }
}

const LOCK: &str = "LOCK";
const IDENTITY: &str = "node";
const INSTANCES: &str = "instances";

/// A folder that this process has for itself.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    durable: bool,
    identity: FolderIdentity,
    /// Held for its lock.
    _lock: File,
}

/// How to open a folder.
#[derive(Clone, Copy, Debug)]
pub struct FolderOptions<'a> {
    /// The tier's name in errors.
    pub what: &'static str,
    /// The flag that names the folder, for errors.
    pub flag: &'static str,
    /// The folder, which must exist.
    pub path: &'a Path,
    /// Whether records are synced to disk.
    pub durable: bool,
}

impl Folder {
    /// Takes the folder for this process and records the new run of the node in it.
    ///
    /// # Errors
    /// When it is missing, not writable, full, in use, damaged or another node's.
    pub fn open(options: FolderOptions<'_>, node: &NodeId, incarnation: Uuid) -> Result<Self, FolderError> {
        let FolderOptions { what, flag, path, durable } = options;
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => return Err(FolderError::NotAFolder { path: path.to_owned(), flag }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(FolderError::Missing { what, path: path.to_owned(), flag });
            }
            Err(error) => return Err(PathError::new("look at", path, error).into()),
        }
        let refused = |source: io::Error| match source.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                FolderError::NotWritable { what, path: path.to_owned(), flag, source }
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                FolderError::Full { what, path: path.to_owned(), flag }
            }
            _ => PathError::new("write in", path, source).into(),
        };
        let lock_path = path.join(LOCK);
        let mut lock =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&lock_path).map_err(refused)?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            let mut pid = String::new();
            // The number is a courtesy: without it the error still says what to do.
            let _ = lock.read_to_string(&mut pid);
            let pid = pid.trim();
            let pid = if pid.is_empty() { "?".to_owned() } else { pid.to_owned() };
            return Err(FolderError::InUse { what, path: path.to_owned(), flag, pid });
        }
        lock.set_len(0).map_err(refused)?;
        write!(lock, "{}", std::process::id()).map_err(refused)?;

        let instances = path.join(INSTANCES);
        match fs::create_dir(&instances) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(refused(error)),
            _ => {}
        }
        let before: Option<FolderIdentity> = record::read(&path.join(IDENTITY))
            .map_err(|source| FolderError::Damaged { what, path: path.to_owned(), source })?;
        let cluster = match before {
            Some(before) if before.node != *node => {
                return Err(FolderError::OtherNode {
                    what,
                    path: path.to_owned(),
                    flag,
                    expected: node.clone(),
                    found: before.node,
                });
            }
            Some(before) => before.cluster,
            None => None,
        };
        let identity = FolderIdentity { node: node.clone(), cluster, incarnation: incarnation.to_string() };
        let folder = Self { path: path.to_owned(), durable, identity, _lock: lock };
        folder.save_identity().map_err(|error| refused(error.source))?;
        Ok(folder)
    }

    fn save_identity(&self) -> Result<(), PathError> {
        replace_file(&self.path.join(IDENTITY), &record::encode(&self.identity), self.durable)
    }

    /// Who it belongs to.
    #[must_use]
    pub fn identity(&self) -> &FolderIdentity {
        &self.identity
    }

    /// Records the cluster that the node belongs to.
    ///
    /// # Errors
    /// When it can not be written.
    pub fn set_cluster(&mut self, cluster: &ClusterId) -> Result<(), PathError> {
        self.identity.cluster = Some(cluster.clone());
        self.save_identity()
    }

    /// The folder that holds one folder for each instance.
    #[must_use]
    pub fn instances(&self) -> PathBuf {
        self.path.join(INSTANCES)
    }
}

/// Bytes that a file system has, as `statvfs` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// All of it.
    pub total_bytes: u64,
    /// What an unprivileged process can still take.
    pub free_bytes: u64,
}

/// How much room the file system under `path` has.
///
/// # Errors
/// When the system does not say.
pub fn space(path: &Path) -> Result<Space, PathError> {
    let stat = rustix::fs::statvfs(path).on("ask for the free space of", path)?;
    Ok(Space { total_bytes: stat.f_blocks * stat.f_frsize, free_bytes: stat.f_bavail * stat.f_frsize })
}

/// Bytes of disk or memory that the files below a folder take.
pub(crate) fn used_bytes(path: &Path) -> Result<u64, PathError> {
    use std::os::unix::fs::MetadataExt;
    let mut bytes = 0;
    for entry in fs::read_dir(path).on("list", path)? {
        let entry = entry.on("list", path)?;
        let metadata = entry.metadata().on("look at", path)?;
        bytes += if metadata.is_dir() { used_bytes(&entry.path())? } else { metadata.blocks() * 512 };
    }
    Ok(bytes)
}

/// Steps at which tests let the process "die": every change of a file or folder passes here.
#[cfg(not(test))]
fn step(_path: &Path) -> Result<(), PathError> {
    Ok(())
}

#[cfg(test)]
pub(crate) use crash::step;

/// A countdown to the step from which on nothing on this thread reaches the file system any more.
#[cfg(test)]
pub(crate) mod crash {
    use std::cell::Cell;
    use std::path::Path;

    use super::PathError;

    thread_local! {
        static STEPS_LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    pub(crate) fn step(path: &Path) -> Result<(), PathError> {
        STEPS_LEFT.with(|left| match left.get() {
            None => Ok(()),
            Some(0) => Err(PathError::new("survive", path, std::io::Error::other("the process has died"))),
            Some(steps) => {
                left.set(Some(steps - 1));
                Ok(())
            }
        })
    }

    /// Dies after this many steps on this thread; `None` lives on.
    pub(crate) fn die_after(steps: Option<u32>) {
        STEPS_LEFT.with(|left| left.set(steps));
    }

    /// Whether the countdown has come to its end.
    pub(crate) fn is_dead() -> bool {
        STEPS_LEFT.with(|left| left.get() == Some(0))
    }
}

/// Replaces a file by new content, so that after a crash at any moment it holds either the old or the new.
///
/// # Errors
/// When a step fails; the old content is still there then.
pub(crate) fn replace_file(path: &Path, content: &[u8], durable: bool) -> Result<(), PathError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let fresh = path.with_file_name(name);
    let written = write_file(&fresh, content, durable).and_then(|()| rename(&fresh, path));
    if let Err(error) = written {
        // Leaves no half-written file behind; the error that matters is the first one.
        let _ = remove_file(&fresh);
        return Err(error);
    }
    match path.parent() {
        Some(parent) if durable => sync_folder(parent),
        _ => Ok(()),
    }
}

/// Writes a new file.
pub(crate) fn write_file(path: &Path, content: &[u8], durable: bool) -> Result<(), PathError> {
    step(path)?;
    let mut file = File::create(path).on("create", path)?;
    file.write_all(content).on("write", path)?;
    if durable {
        file.sync_all().on("sync", path)?;
    }
    Ok(())
}

/// Makes the entries of a folder durable.
pub(crate) fn sync_folder(path: &Path) -> Result<(), PathError> {
    step(path)?;
    File::open(path).and_then(|folder| folder.sync_all()).on("sync", path)
}

/// Gives a file or folder another name.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), PathError> {
    step(from)?;
    fs::rename(from, to).on("rename", from)
}

/// Gives a file or folder another name; that it is already gone is fine.
pub(crate) fn rename_if_there(from: &Path, to: &Path) -> Result<(), PathError> {
    match rename(from, to) {
        Err(error) if error.source.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes a folder.
pub(crate) fn create_folder(path: &Path) -> Result<(), PathError> {
    step(path)?;
    fs::create_dir(path).on("create", path)
}

/// Removes a file; that it is already gone is fine.
pub(crate) fn remove_file(path: &Path) -> Result<(), PathError> {
    step(path)?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(PathError::new("remove", path, error)),
        _ => Ok(()),
    }
}

/// Removes a folder and what is in it; that it is already gone is fine.
pub(crate) fn remove_folder(path: &Path) -> Result<(), PathError> {
    step(path)?;
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(PathError::new("remove", path, error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(path: &Path) -> FolderOptions<'_> {
        FolderOptions { what: "cold", flag: "--cold", path, durable: true }
    }

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    #[test]
    fn a_folder_remembers_its_node_and_cluster_and_notes_each_run() {
        let scratch = tempfile::tempdir().unwrap();
        let first = Uuid::new_v4();
        let mut folder = Folder::open(options(scratch.path()), &node("a"), first).unwrap();
        assert_eq!(folder.identity().incarnation, first.to_string());
        folder.set_cluster(&ClusterId::new("c1").unwrap()).unwrap();
        drop(folder);
        let folder = Folder::open(options(scratch.path()), &node("a"), Uuid::new_v4()).unwrap();
        assert_eq!(folder.identity().cluster, Some(ClusterId::new("c1").unwrap()));
        assert_ne!(folder.identity().incarnation, first.to_string());
        drop(folder);
        let error = Folder::open(options(scratch.path()), &node("b"), Uuid::new_v4()).unwrap_err();
        assert!(error.to_string().contains("belongs to node a, this is node b"), "{error}");
    }

    #[test]
    fn a_folder_in_use_names_the_process_that_has_it() {
        let scratch = tempfile::tempdir().unwrap();
        let _held = Folder::open(options(scratch.path()), &node("a"), Uuid::new_v4()).unwrap();
        let error = Folder::open(options(scratch.path()), &node("a"), Uuid::new_v4()).unwrap_err();
        assert!(error.to_string().contains(&format!("in use by process {}", std::process::id())), "{error}");
    }

    #[test]
    fn a_missing_folder_and_a_file_are_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let missing = scratch.path().join("none");
        let error = Folder::open(options(&missing), &node("a"), Uuid::new_v4()).unwrap_err();
        assert!(matches!(error, FolderError::Missing { .. }), "{error}");
        let file = scratch.path().join("file");
        fs::write(&file, b"x").unwrap();
        let error = Folder::open(options(&file), &node("a"), Uuid::new_v4()).unwrap_err();
        assert!(matches!(error, FolderError::NotAFolder { .. }), "{error}");
    }

    #[test]
    fn a_damaged_identity_is_an_error_not_a_fresh_start() {
        let scratch = tempfile::tempdir().unwrap();
        drop(Folder::open(options(scratch.path()), &node("a"), Uuid::new_v4()).unwrap());
        let path = scratch.path().join(IDENTITY);
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, bytes).unwrap();
        let error = Folder::open(options(scratch.path()), &node("a"), Uuid::new_v4()).unwrap_err();
        assert!(matches!(error, FolderError::Damaged { .. }), "{error}");
    }

    #[test]
    fn replacing_a_file_leaves_nothing_beside_it() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("x");
        replace_file(&path, b"one", true).unwrap();
        replace_file(&path, b"two", true).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
    }
}

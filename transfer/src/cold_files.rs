//! The segment files of one instance on disk, opened when they are first needed, and whether their file system takes
//! direct I/O. What moves through them is the cold tier's matter.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;

use crate::folder::{OnPath, PathError, remove_file};
use crate::layout::{GroupLayout, UNIT_ALIGN_BYTES};
use crate::memory_tier::segment_file;
use crate::segment::Mapping;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What this mutex holds is changed in single statements; a panic elsewhere can not leave it torn.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the file system takes `O_DIRECT` with page-aligned writes.
pub(crate) fn probe_direct(path: &Path) -> Result<bool, PathError> {
    let probe = path.join("probe");
    let opened = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(OFlags::DIRECT.bits() as i32)
        .open(&probe);
    let answer = match opened {
        Ok(file) => {
            let page = Mapping::anonymous(UNIT_ALIGN_BYTES).on("get a buffer for", &probe)?;
            // SAFETY: the mapping was just made and is known here alone.
            let bytes = unsafe { page.bytes(0..UNIT_ALIGN_BYTES) }.on("read a buffer for", &probe)?;
            match std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
                Err(error) => Err(PathError::new("write", &probe, error)),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
        Err(error) => Err(PathError::new("create", &probe, error)),
    };
    remove_file(&probe)?;
    answer
}

/// The segments of one instance on disk.
#[derive(Debug)]
pub(crate) struct ColdSegments {
    folder: PathBuf,
    layout: Arc<GroupLayout>,
    direct: bool,
    open: Mutex<BTreeMap<u32, Arc<File>>>,
}

impl ColdSegments {
    /// The segments in an instance's folder; files are opened or made when they are first needed.
    pub(crate) fn new(folder: PathBuf, layout: Arc<GroupLayout>, direct: bool) -> Self {
        Self { folder, layout, direct, open: Mutex::default() }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn path(&self, segment: u32) -> PathBuf {
        self.folder.join(segment_file(segment))
    }

    /// A segment's file, which must be there with the layout's length.
    pub(crate) fn get(&self, segment: u32) -> Result<Arc<File>, PathError> {
        self.open_file(segment, false)
    }

    /// Whether a segment's file is in the folder with the layout's length. One that was opened before and is gone from the
    /// folder is closed: it would not survive this process.
    pub(crate) fn check(&self, segment: u32) -> Result<(), PathError> {
        let path = self.path(segment);
        let named = std::fs::metadata(&path).on("look at", &path);
        let opened = lock(&self.open).get(&segment).and_then(|file| file.metadata().ok());
        let other = |named: &std::fs::Metadata| opened.is_some_and(|opened| opened.ino() != named.ino());
        if named.as_ref().map_or(true, other) {
            lock(&self.open).remove(&segment);
        }
        named?;
        self.get(segment).map(drop)
    }

    /// A segment's file, made when there is none.
    pub(crate) fn get_or_create(&self, segment: u32) -> Result<Arc<File>, PathError> {
        self.open_file(segment, true)
    }

    fn open_file(&self, segment: u32, create: bool) -> Result<Arc<File>, PathError> {
        let path = self.path(segment);
        let expected = self.layout.segment_bytes(segment);
        let mut open = lock(&self.open);
        let file = match open.get(&segment) {
            Some(file) => file.clone(),
            None => {
                let mut options = OpenOptions::new();
                options.read(true).write(true).create(create).mode(0o600);
                if self.direct {
                    options.custom_flags(OFlags::DIRECT.bits() as i32);
                }
                let file = Arc::new(options.open(&path).on("open", &path)?);
                open.insert(segment, file.clone());
                file
            }
        };
        let found = file.metadata().on("look at", &path)?.len();
        // One that was cut off holds nothing that counts: whoever writes has given up its units before.
        if found != expected && create {
            file.set_len(expected).on("size", &path)?;
        } else if found != expected {
            let error = io::Error::new(io::ErrorKind::InvalidData, format!("{found} bytes, expected {expected}"));
            return Err(PathError::new("use", &path, error));
        }
        Ok(file)
    }

    /// When the file's content or status last changed, to the nanosecond; `None` when it can not be had.
    pub(crate) fn change_time(&self, segment: u32) -> Option<(i64, i64)> {
        let file = self.get(segment).ok()?;
        let metadata = file.metadata().ok()?;
        Some((metadata.ctime(), metadata.ctime_nsec()))
    }

    /// Removes a segment's file. Descriptors that were handed out stay readable.
    pub(crate) fn unlink(&self, segment: u32) -> Result<(), PathError> {
        lock(&self.open).remove(&segment);
        remove_file(&self.path(segment))
    }

    /// Forgets every open file, before the folder is removed.
    pub(crate) fn forget_all(&self) {
        lock(&self.open).clear();
    }
}

//! Writing a revision back into a folder: which bytes of which unit go where, into a staging folder first, and into place
//! only when everything is there. Nothing that exists is touched unless it was asked for.

#[cfg(test)]
use std::collections::BTreeMap;
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ballast_schemas::manifest::{Manifest, check_file_path};
use ballast_schemas::{BallastError, ErrorCode};
use rustix::fs::{CWD, FallocateFlags, RenameFlags};
use serde_json::json;
use uuid::Uuid;

use super::header::{Header, dtype_named};
use super::record::{Record, is_hidden};
use crate::source::user_shape;

/// Why a folder can not be written.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// It would overwrite something.
    #[error("{path} exists; choose another folder or ask to overwrite", path = path.display())]
    Exists {
        /// What is in the way.
        path: PathBuf,
    },
    /// A path of the revision would leave the folder.
    #[error("{path} is not a folder of the target; refusing to write through it", path = path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// The revision's own records contradict each other.
    #[error("the revision can not be written as files: {reason}")]
    Records {
        /// What contradicts what.
        reason: String,
    },
    /// The operating system refuses.
    #[error("can not {action} {path}: {source}", path = path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

impl ExportError {
    fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    fn records(reason: impl Into<String>) -> Self {
        Self::Records { reason: reason.into() }
    }
}

impl From<ExportError> for BallastError {
    fn from(error: ExportError) -> Self {
        let full = matches!(&error, ExportError::Io { source, .. }
            if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded));
        let code = match &error {
            ExportError::Exists { .. } => ErrorCode::Conflict,
            ExportError::Io { .. } if full => ErrorCode::CapacityExhausted,
            _ => ErrorCode::InvalidArgument,
        };
        let details = match &error {
            ExportError::Exists { path } | ExportError::NotAFolder { path } | ExportError::Io { path, .. } => {
                json!({"path": path.display().to_string()})
            }
            ExportError::Records { .. } => serde_json::Value::Null,
        };
        BallastError::new(code, error.to_string()).with_details(details)
    }
}

/// Where a stretch of a unit's bytes goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// First byte inside the unit.
    pub(crate) unit_offset: u64,
    pub(crate) bytes: u64,
    /// Number of the file.
    pub(crate) file: usize,
    /// First byte inside the file.
    pub(crate) file_offset: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct OutFile {
    path: String,
    bytes: u64,
    prefix: Vec<u8>,
}

/// Which files a revision is written as.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Export {
    files: Vec<OutFile>,
    /// By unit: where its bytes go.
    places: Vec<Vec<Place>>,
}

impl Export {
    /// The files that `record` (the bytes of the revision's record, if it has one) describes, and the extra files.
    /// Without a record all tensors go into one file.
    pub(crate) fn new(manifest: &Manifest, record: Option<&[u8]>) -> Result<Self, ExportError> {
        let mut export = Self { files: Vec::new(), places: vec![Vec::new(); manifest.units().len()] };
        for file in manifest.files().iter().filter(|file| !is_hidden(&file.path)) {
            let place =
                Place { unit_offset: file.object_offset, bytes: file.nbytes, file: export.files.len(), file_offset: 0 };
            export.places[file.unit as usize].push(place);
            export.files.push(OutFile { path: file.path.clone(), bytes: file.nbytes, prefix: Vec::new() });
        }
        let parts = match record {
            Some(bytes) => Self::recorded(bytes)?,
            None if manifest.tensors().is_empty() => Vec::new(),
            None => vec![Self::generated(manifest)?],
        };
        let mut placed = HashSet::new();
        for (path, header) in parts {
            check_file_path(&path).map_err(ExportError::records)?;
            for tensor in &header.tensors {
                export.place_tensor(manifest, tensor.name.as_str(), tensor.offset, tensor.nbytes)?;
                if !placed.insert(tensor.name.clone()) {
                    return Err(ExportError::records(format!("tensor {:?} is recorded in two files", tensor.name)));
                }
            }
            export.files.push(OutFile { path, bytes: header.file_bytes, prefix: header.prefix() });
        }
        if let Some(missing) = manifest.tensors().iter().find(|tensor| !placed.contains(&tensor.tensor_id)) {
            return Err(ExportError::records(format!("no recorded file has tensor {:?}", missing.tensor_id)));
        }
        export.check_paths()?;
        Ok(export)
    }

    fn recorded(bytes: &[u8]) -> Result<Vec<(String, Header)>, ExportError> {
        let record = Record::from_bytes(bytes).map_err(ExportError::records)?;
        let part = |file: super::record::RecordFile| {
            let header = Header::parse(file.header)
                .map_err(|reason| ExportError::records(format!("{}: {reason}", file.path)))?;
            Ok((file.path, header))
        };
        record.files.into_iter().map(part).collect()
    }

    fn generated(manifest: &Manifest) -> Result<(String, Header), ExportError> {
        let mut tensors = Vec::with_capacity(manifest.tensors().len());
        for tensor in manifest.tensors() {
            let dtype = dtype_named(&tensor.dtype).ok_or_else(|| {
                ExportError::records(format!(
                    "tensor {:?} has the dtype {:?}, which safetensors lacks",
                    tensor.tensor_id, tensor.dtype
                ))
            })?;
            tensors.push((tensor.tensor_id.clone(), dtype, user_shape(tensor)));
        }
        let header = Header::generate(&tensors).map_err(ExportError::records)?;
        let taken = |name: &str| manifest.file(name).is_some();
        let name =
            (0..).map(|n| if n == 0 { "model.safetensors".to_owned() } else { format!("model-{n}.safetensors") });
        // Some number is free: there are only so many files.
        let name = name.into_iter().find(|name| !taken(name)).unwrap_or_default();
        Ok((name, header))
    }

    fn place_tensor(
        &mut self,
        manifest: &Manifest,
        name: &str,
        file_offset: u64,
        nbytes: u64,
    ) -> Result<(), ExportError> {
        let mut fragments = manifest.fragments_of(name);
        let (Some(fragment), None) = (fragments.next(), fragments.next()) else {
            return Err(ExportError::records(format!("tensor {name:?} is missing or stored in several fragments")));
        };
        if fragment.nbytes != nbytes {
            let reason = format!("tensor {name:?} has {} bytes, its file's header says {nbytes}", fragment.nbytes);
            return Err(ExportError::records(reason));
        }
        let place = Place { unit_offset: fragment.object_offset, bytes: nbytes, file: self.files.len(), file_offset };
        self.places[fragment.unit as usize].push(place);
        Ok(())
    }

    /// No two files in one place, and none where another needs a folder.
    fn check_paths(&self) -> Result<(), ExportError> {
        let mut paths = HashSet::new();
        for file in &self.files {
            if !paths.insert(file.path.as_str()) {
                return Err(ExportError::records(format!("{:?} is written twice", file.path)));
            }
        }
        for file in &self.files {
            let mut folders = file.path.match_indices('/').map(|(end, _)| &file.path[..end]);
            if let Some(folder) = folders.find(|folder| paths.contains(folder)) {
                return Err(ExportError::records(format!("{folder:?} is a file and a folder")));
            }
        }
        Ok(())
    }

    /// Where the bytes of a unit go.
    pub(crate) fn places(&self, unit: u32) -> &[Place] {
        self.places.get(unit as usize).map_or(&[], Vec::as_slice)
    }

    /// Whether any byte of the unit is wanted.
    pub(crate) fn wants(&self, unit: u32) -> bool {
        self.places(unit).iter().any(|place| place.bytes > 0)
    }
}

/// The staging folder of one export. Dropping it removes what was staged; [`Staging::publish`] puts it in place.
#[derive(Debug)]
pub(crate) struct Staging {
    target: PathBuf,
    folder: PathBuf,
    /// Whether the target is made by putting the staging folder in its place.
    whole: bool,
    overwrite: bool,
    paths: Vec<String>,
    files: Vec<File>,
    published: bool,
}

impl Staging {
    /// Makes the staging folder and takes room for every file. Refuses at once what would be refused in the end.
    pub(crate) fn new(export: &Export, target: &Path, overwrite: bool) -> Result<Self, ExportError> {
        let whole = match fs::symlink_metadata(target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            Err(error) => return Err(ExportError::io("look at", target)(error)),
            Ok(_) => false,
        };
        if !whole && !target.is_dir() {
            return Err(ExportError::Exists { path: target.to_owned() });
        }
        let id = Uuid::new_v4().simple().to_string();
        let folder = if whole {
            let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            fs::create_dir_all(parent).map_err(ExportError::io("create", parent))?;
            let name = target.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            parent.join(format!(".{name}.ballast-{id}"))
        } else {
            target.join(format!(".ballast-get-{id}"))
        };
        let mut staging = Self {
            target: target.to_owned(),
            folder,
            whole,
            overwrite,
            paths: export.files.iter().map(|file| file.path.clone()).collect(),
            files: Vec::with_capacity(export.files.len()),
            published: false,
        };
        if !whole {
            for path in &staging.paths {
                staging.check_target(path)?;
            }
        }
        fs::create_dir(&staging.folder).map_err(ExportError::io("create", &staging.folder))?;
        for file in &export.files {
            staging.create(file)?;
        }
        Ok(staging)
    }

    fn create(&mut self, file: &OutFile) -> Result<(), ExportError> {
        let path = self.folder.join(&file.path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(ExportError::io("create", parent))?;
        }
        let shown = self.target.join(&file.path);
        let out =
            OpenOptions::new().write(true).create_new(true).open(&path).map_err(ExportError::io("create", &shown))?;
        take_room(&out, file.bytes).map_err(ExportError::io("take room for", &shown))?;
        out.write_all_at(&file.prefix, 0).map_err(ExportError::io("write", &shown))?;
        self.files.push(out);
        Ok(())
    }

    /// Whether a file may be put at `path` of an existing target: nothing is there (or it may be overwritten), and every
    /// folder on the way is a folder of the target itself, not a link that leads elsewhere.
    fn check_target(&self, path: &str) -> Result<(), ExportError> {
        for (end, _) in path.match_indices('/') {
            let folder = self.target.join(&path[..end]);
            match fs::symlink_metadata(&folder) {
                Ok(found) if found.is_dir() => {}
                Ok(_) => return Err(ExportError::NotAFolder { path: folder }),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(ExportError::io("look at", folder)(error)),
            }
        }
        let file = self.target.join(path);
        match fs::symlink_metadata(&file) {
            Ok(found) if found.is_dir() || !self.overwrite => Err(ExportError::Exists { path: file }),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(ExportError::io("look at", file)(error)),
        }
    }

    /// Writes bytes that begin at `offset` of a unit to wherever they belong.
    pub(crate) fn write(&self, places: &[Place], offset: u64, bytes: &[u8]) -> Result<(), ExportError> {
        let end = offset + bytes.len() as u64;
        for place in places {
            let (from, to) = (offset.max(place.unit_offset), end.min(place.unit_offset + place.bytes));
            if from >= to {
                continue;
            }
            let piece = &bytes[(from - offset) as usize..(to - offset) as usize];
            let at = place.file_offset + (from - place.unit_offset);
            self.files[place.file]
                .write_all_at(piece, at)
                .map_err(ExportError::io("write", self.target.join(&self.paths[place.file])))?;
        }
        Ok(())
    }

    /// Puts everything in place and answers the paths written.
    pub(crate) fn publish(mut self) -> Result<Vec<PathBuf>, ExportError> {
        let written = self.paths.iter().map(|path| self.target.join(path)).collect();
        self.files.clear();
        if self.whole {
            rename_new(&self.folder, &self.target).map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty => {
                    ExportError::Exists { path: self.target.clone() }
                }
                _ => ExportError::io("create", &self.target)(error),
            })?;
            self.published = true;
            return Ok(written);
        }
        for path in &self.paths {
            self.check_target(path)?;
            let (from, to) = (self.folder.join(path), self.target.join(path));
            if let Some(parent) = to.parent() {
                fs::create_dir_all(parent).map_err(ExportError::io("create", parent))?;
            }
            let moved = if self.overwrite { fs::rename(&from, &to) } else { rename_new(&from, &to) };
            moved.map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists => ExportError::Exists { path: to.clone() },
                _ => ExportError::io("create", &to)(error),
            })?;
        }
        Ok(written)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.files.clear();
        if self.published {
            return;
        }
        if let Err(error) = fs::remove_dir_all(&self.folder)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(folder = %self.folder.display(), %error, "can not remove a staging folder");
        }
    }
}

/// Takes a file's room at once, so that a full disk is found before bytes move.
fn take_room(file: &File, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS | rustix::io::Errno::INTR) => file.set_len(bytes),
        Err(error) => Err(error.into()),
    }
}

/// Renames unless something is there already.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        // Some file systems have no such rename; the look before it has to do.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) if fs::symlink_metadata(to).is_err() => {
            fs::rename(from, to)
        }
        Err(error) => Err(error.into()),
    }
}

/// The bytes of each extra file and tensor by name, for tests.
#[cfg(test)]
pub(super) fn bytes_by_path(root: &Path) -> BTreeMap<String, Vec<u8>> {
    fn visit(root: &Path, prefix: &str, found: &mut BTreeMap<String, Vec<u8>>) {
        for entry in fs::read_dir(root).unwrap() {
            let path = entry.unwrap().path();
            let name = format!("{prefix}{}", path.file_name().unwrap().to_str().unwrap());
            if path.is_dir() {
                visit(&path, &format!("{name}/"), found);
            } else {
                found.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    visit(root, "", &mut found);
    found
}

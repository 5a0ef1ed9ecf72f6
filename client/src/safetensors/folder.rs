//! All regular files below a folder. A symbolic link is followed while it stays inside (or leads to the blobs of the
//! Hugging Face cache entry that the folder is a snapshot of); anything else that could surprise is refused by name.

use std::collections::BTreeMap;
use std::fs::FileType;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use ballast_schemas::manifest::check_file_path;

use super::error::SafetensorsError;
use super::record::RESERVED;

/// Files of one folder.
const FILES_MAX: usize = 100_000;
/// Folders inside each other.
const DEPTH_MAX: usize = 32;

/// What a folder holds.
#[derive(Debug)]
pub(super) struct Walk {
    /// Relative path, joined by `/`, to the file to open.
    pub(super) files: BTreeMap<String, PathBuf>,
}

/// Finds every file below `root`.
pub(super) fn walk(root: &Path) -> Result<Walk, SafetensorsError> {
    let root = std::fs::canonicalize(root).map_err(SafetensorsError::io("look at", root))?;
    let mut walk = Walk { files: BTreeMap::new() };
    // models--x/snapshots/<commit>/model.safetensors -> ../../blobs/<hash>
    let snapshot_of = root.parent().filter(|parent| parent.ends_with("snapshots")).and_then(Path::parent);
    let blobs = snapshot_of.map(|entry| entry.join("blobs"));
    let inside = Inside { root: &root, blobs };
    visit(&mut walk, &inside, "", &root, &mut vec![root.clone()])?;
    Ok(walk)
}

struct Inside<'a> {
    root: &'a Path,
    blobs: Option<PathBuf>,
}

impl Inside<'_> {
    fn allows(&self, path: &Path) -> bool {
        path.starts_with(self.root) || self.blobs.as_ref().is_some_and(|blobs| path.starts_with(blobs))
    }
}

/// `open` holds the real folders from the root down to this one, so that a link to one of them is noticed.
fn visit(
    walk: &mut Walk,
    inside: &Inside<'_>,
    prefix: &str,
    folder: &Path,
    open: &mut Vec<PathBuf>,
) -> Result<(), SafetensorsError> {
    if open.len() > DEPTH_MAX {
        return Err(SafetensorsError::folder(folder, format!("folders lie more than {DEPTH_MAX} deep")));
    }
    let mut entries = std::fs::read_dir(folder)
        .and_then(|entries| entries.collect::<Result<Vec<_>, _>>())
        .map_err(SafetensorsError::io("list", folder))?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_str().ok_or_else(|| SafetensorsError::folder(&path, "its name is not UTF-8; rename it"))?;
        if prefix.is_empty() && name == RESERVED {
            return Err(SafetensorsError::folder(&path, "the name .ballast is reserved; rename or remove it"));
        }
        let relative = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}/{name}") };
        check_file_path(&relative).map_err(|reason| SafetensorsError::folder(&path, reason))?;
        let real = std::fs::canonicalize(&path).map_err(SafetensorsError::io("follow", &path))?;
        if !inside.allows(&real) {
            let reason = format!("it is a link to {}, outside the folder; replace it by the file", real.display());
            return Err(SafetensorsError::folder(&path, reason));
        }
        let kind = std::fs::metadata(&real).map_err(SafetensorsError::io("look at", &real))?.file_type();
        if kind.is_dir() {
            if open.contains(&real) {
                return Err(SafetensorsError::folder(&path, "it is a link to a folder that it lies in; remove it"));
            }
            open.push(real.clone());
            visit(walk, inside, &relative, &real, open)?;
            open.pop();
        } else if kind.is_file() {
            if walk.files.len() == FILES_MAX {
                return Err(SafetensorsError::folder(
                    folder,
                    format!("it holds more than {FILES_MAX} files; is this a model's folder?"),
                ));
            }
            walk.files.insert(relative, real);
        } else {
            return Err(SafetensorsError::folder(&path, format!("it is {}, not a file; remove it", kind_name(kind))));
        }
    }
    Ok(())
}

fn kind_name(kind: FileType) -> &'static str {
    if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

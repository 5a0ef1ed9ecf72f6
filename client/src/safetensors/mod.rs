//! Checkpoints on disk: a safetensors file, or a folder with one or several and whatever else belongs to the model.
//! Import knows where the bytes are and never reads them; export writes the same files back, byte for byte.

mod error;
mod export;
mod folder;
mod header;
mod record;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use error::SafetensorsError;
pub use export::ExportError;
pub(crate) use export::{Export, Staging};
use header::{Header, parse_index};
pub(crate) use header::{dtype_named, tensor_bytes};
pub(crate) use record::{RECORD_PATH, is_hidden};
use record::{Record, RecordFile};

use crate::source::{Data, Source, SourceFile, source_file};

const INDEX_SUFFIX: &str = ".safetensors.index.json";
const SINGLE_FILE: &str = "model.safetensors";
/// Bytes of one index; real ones have a few megabytes.
const INDEX_BYTES_MAX: u64 = 512 << 20;

/// Reads the headers of a safetensors file, or of a folder's, and says where all its bytes are.
///
/// A folder is one with `model.safetensors.index.json` and the shards it names, one with `model.safetensors`, or one with
/// a single safetensors file of any name; all its other files travel with the tensors. Blocks on the disk.
///
/// # Errors
/// What is wrong with which file; nothing was sent.
pub fn open(path: &Path) -> Result<Source, SafetensorsError> {
    let metadata = std::fs::metadata(path).map_err(SafetensorsError::io("look at", path))?;
    if metadata.is_dir() {
        return open_folder(path);
    }
    if !metadata.is_file() {
        return Err(SafetensorsError::folder(path, "it is neither a file nor a folder"));
    }
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| SafetensorsError::folder(path, "its name is not UTF-8; rename it"))?;
    if name.ends_with(INDEX_SUFFIX) {
        return Err(SafetensorsError::folder(
            path,
            "it is the index of a model in shards; give the folder that it is in",
        ));
    }
    let mut import = Import::default();
    import.add_file(name, path)?;
    import.finish(BTreeMap::new())
}

fn open_folder(root: &Path) -> Result<Source, SafetensorsError> {
    let mut files = folder::walk(root)?.files;
    let top = |suffix: &str| -> Vec<String> {
        files.keys().filter(|path| !path.contains('/') && path.ends_with(suffix)).cloned().collect()
    };
    let mut import = Import::default();
    let (indexes, singles) = (top(INDEX_SUFFIX), top(".safetensors"));
    let index = indexes.iter().find(|path| *path == "model.safetensors.index.json").or(match indexes.as_slice() {
        [only] => Some(only),
        _ => None,
    });
    let shards = if let Some(index) = index {
        let map = read_index(&files[index])?;
        let mut shards: Vec<&str> = map.iter().map(|(_, shard)| shard.as_str()).collect();
        shards.sort_unstable();
        shards.dedup();
        let wrong = |reason: String| SafetensorsError::Index { path: files[index].clone(), reason };
        for shard in &shards {
            let path = files
                .get(*shard)
                .ok_or_else(|| wrong(format!("it names the shard {shard:?}, which is not in the folder")))?;
            import.add_file(shard, path)?;
        }
        for (tensor, shard) in &map {
            match import.shard_of(tensor) {
                Some(found) if found == shard => {}
                Some(found) => {
                    return Err(wrong(format!(
                        "it maps tensor {tensor:?} to {shard:?}, which lacks it; {found:?} has it"
                    )));
                }
                None => return Err(wrong(format!("it maps tensor {tensor:?} to {shard:?}, which lacks it"))),
            }
        }
        shards.into_iter().map(str::to_owned).collect()
    } else if indexes.len() > 1 {
        let reason = format!(
            "it has several indexes ({}); name the one to use model.safetensors.index.json",
            indexes.join(", ")
        );
        return Err(SafetensorsError::folder(root, reason));
    } else {
        let single = if files.contains_key(SINGLE_FILE) { vec![SINGLE_FILE.to_owned()] } else { singles };
        match single.as_slice() {
            [only] => import.add_file(only, &files[only])?,
            [] => {
                return Err(SafetensorsError::folder(
                    root,
                    "it has no model.safetensors and no model.safetensors.index.json",
                ));
            }
            several => {
                let reason =
                    format!("it has several safetensors files and no index: {}; name one of them", several.join(", "));
                return Err(SafetensorsError::folder(root, reason));
            }
        }
        single
    };
    for shard in shards {
        files.remove(&shard);
    }
    import.finish(files)
}

fn read_index(path: &Path) -> Result<Vec<(String, String)>, SafetensorsError> {
    let wrong = |reason: String| SafetensorsError::Index { path: path.to_owned(), reason };
    let bytes = std::fs::metadata(path).map_err(SafetensorsError::io("look at", path))?.len();
    if bytes > INDEX_BYTES_MAX {
        return Err(wrong(format!("it has {bytes} bytes; at most {INDEX_BYTES_MAX} are allowed")));
    }
    let text = std::fs::read(path).map_err(SafetensorsError::io("read", path))?;
    let map = parse_index(&text).map_err(wrong)?;
    for (_, shard) in &map {
        ballast_schemas::manifest::check_file_path(shard).map_err(wrong)?;
    }
    Ok(map)
}

/// Tensor files being gathered.
#[derive(Default)]
struct Import {
    record: Record,
    parts: Vec<(Header, Arc<SourceFile>)>,
    /// For each tensor the number of its file.
    places: HashMap<String, usize>,
}

impl Import {
    fn add_file(&mut self, name: &str, path: &Path) -> Result<(), SafetensorsError> {
        let (file, source) = source_file(path).map_err(SafetensorsError::io("open", path))?;
        let header = Header::read(&file, path)?;
        for tensor in &header.tensors {
            if let Some(other) = self.places.insert(tensor.name.clone(), self.parts.len()) {
                let reason = format!("tensor {:?} is also in {:?}", tensor.name, self.record.files[other].path);
                return Err(SafetensorsError::file(path, reason));
            }
        }
        self.record.files.push(RecordFile { header: header.text.clone(), path: name.to_owned() });
        self.parts.push((header, source));
        Ok(())
    }

    fn shard_of(&self, tensor: &str) -> Option<&String> {
        self.places.get(tensor).map(|place| &self.record.files[*place].path)
    }

    /// The source: every tensor, every other file, and the record of how the tensors were cut into files.
    fn finish(self, files: BTreeMap<String, PathBuf>) -> Result<Source, SafetensorsError> {
        let mut source = Source::empty();
        for (header, file) in &self.parts {
            for tensor in &header.tensors {
                ballast_schemas::manifest::check_tensor_name(&tensor.name).map_err(|reason| {
                    SafetensorsError::file(&file.path, format!("the tensor name {:?} {reason}", tensor.name))
                })?;
                let data = Data::File { file: file.clone(), offset: tensor.offset };
                source.push_tensor(&tensor.name, tensor.dtype, &tensor.shape, Vec::new(), data);
            }
        }
        for (name, path) in files {
            let (_, file) = source_file(&path).map_err(SafetensorsError::io("open", &path))?;
            source.push_file(name, file.bytes(), Data::File { file, offset: 0 });
        }
        let record = self.record.to_bytes();
        source.push_file(RECORD_PATH.to_owned(), record.len() as u64, Data::Bytes(record));
        Ok(source)
    }
}

#[cfg(test)]
mod tests;

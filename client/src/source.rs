//! What a put sends: named tensors and files whose bytes are in memory, in a range of a file, or come later. No model
//! is ever held whole: a source knows where its bytes are, not what they are.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_schemas::manifest::{ManifestPlan, ParallelAxis, PlannedTensor, Tensor};
use ballast_schemas::{BallastError, RevisionIdentity};
use ballast_transfer::UnitPatch;
use bytes::Bytes;
use safetensors::Dtype;

use crate::part::Sharing;
use crate::safetensors::{dtype_named, tensor_bytes};

/// How the manifest says that a tensor of elements smaller than a byte is kept as plain bytes.
const PACKED: &str = "packed ";

/// One tensor to put.
#[derive(Clone, Debug)]
pub struct TensorSource {
    /// Its name, unique in the source.
    pub name: String,
    /// Element type by its safetensors name: `F32`, `BF16`, `F8_E4M3`, …
    pub dtype: String,
    /// Dimensions; none for a scalar.
    pub shape: Vec<u64>,
    /// Further names of the same bytes (tied weights): stored once, found under each.
    pub aliases: Vec<String>,
    /// Where its bytes are: row-major, without gaps.
    pub data: TensorData,
}

/// Where the bytes of a tensor are.
#[derive(Clone, Debug)]
pub enum TensorData {
    /// In memory.
    Bytes(Bytes),
    /// In a file, from this byte on.
    File {
        /// The file; it must not change before the put has ended.
        path: PathBuf,
        /// First byte.
        offset: u64,
    },
    /// They come through [`PutWriter::put_tensor`](crate::PutWriter::put_tensor).
    Later,
}

/// One tensor that comes later, in boxes: how a training job holds it is how it is stored.
#[derive(Clone, Debug)]
pub struct ShardedTensor {
    /// Its name, unique in the source.
    pub name: String,
    /// Element type by its safetensors name.
    pub dtype: String,
    /// Dimensions of the whole tensor.
    pub shape: Vec<u64>,
    /// Further names of the same bytes.
    pub aliases: Vec<String>,
    /// The layer it belongs to.
    pub layer_id: Option<u64>,
    /// The expert it belongs to.
    pub expert_id: Option<u64>,
    /// What each kind of parallelism does to it, in the order dp, pp, ep, tp.
    pub parallel_axes: Vec<ParallelAxis>,
    /// First element and extent of each box; none: the whole tensor is one. Together they cover it exactly.
    pub fragments: Vec<(Vec<u64>, Vec<u64>)>,
}

/// Everything that one put sends.
#[derive(Clone, Debug)]
pub struct Source {
    tensors: Vec<(PlannedTensor, Data)>,
    files: BTreeMap<String, (u64, Data)>,
    pub(crate) sharing: Option<Sharing>,
}

/// Where bytes are, checked.
#[derive(Clone, Debug)]
pub(crate) enum Data {
    Bytes(Bytes),
    File {
        file: Arc<SourceFile>,
        offset: u64,
    },
    Later,
    /// A unit of the base, and what differs.
    Base {
        unit: u32,
        patch: Option<Arc<UnitPatch>>,
    },
}

/// A file as it was when the source was made.
#[derive(Debug)]
pub(crate) struct SourceFile {
    pub(crate) path: PathBuf,
    stamp: Stamp,
}

/// Tells a file that was changed or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(file: &File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }
}

impl SourceFile {
    pub(crate) fn new(path: PathBuf, file: &File) -> std::io::Result<Self> {
        Ok(Self { path, stamp: Stamp::of(file)? })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.stamp.bytes
    }

    /// Opens the file and makes sure that it is still the one it was.
    pub(crate) fn open(&self) -> Result<File, BallastError> {
        let wrong = |reason: String| BallastError::invalid(format!("can not read {}: {reason}", self.path.display()));
        let file = File::open(&self.path).map_err(|error| wrong(error.to_string()))?;
        let now = Stamp::of(&file).map_err(|error| wrong(error.to_string()))?;
        if now != self.stamp {
            return Err(wrong(format!(
                "it was changed since the put began (it had {} bytes, now {}); run the put again",
                self.stamp.bytes, now.bytes
            )));
        }
        Ok(file)
    }
}

/// One unit of a plan and where its bytes are.
#[derive(Clone, Debug)]
pub(crate) struct UnitSource {
    pub(crate) unit: u32,
    /// The tensor's name or the file's path.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) data: Data,
}

impl Source {
    /// A source of tensors.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` naming the tensor: a name twice, an unknown dtype, bytes that do not fit the shape.
    pub fn from_tensors(tensors: Vec<TensorSource>) -> Result<Self, BallastError> {
        let mut source = Self { tensors: Vec::with_capacity(tensors.len()), ..Self::empty() };
        let mut files: BTreeMap<PathBuf, Arc<SourceFile>> = BTreeMap::new();
        let mut names = HashSet::new();
        for tensor in tensors {
            for name in tensor.aliases.iter().chain([&tensor.name]) {
                if !names.insert(name.clone()) {
                    return Err(BallastError::invalid(format!("the tensor name {name:?} stands twice in the source")));
                }
            }
            let wrong = |reason: String| BallastError::invalid(format!("tensor {:?}: {reason}", tensor.name));
            let dtype = dtype_named(&tensor.dtype).ok_or_else(|| wrong(format!("unknown dtype {:?}", tensor.dtype)))?;
            let expected = tensor_bytes(dtype, &tensor.shape).ok_or_else(|| {
                wrong(format!("{dtype} {:?} is not a whole number of bytes below 2^64", tensor.shape))
            })?;
            let data = match tensor.data {
                TensorData::Later => Data::Later,
                TensorData::Bytes(bytes) if bytes.len() as u64 == expected => Data::Bytes(bytes),
                TensorData::Bytes(bytes) => {
                    return Err(wrong(format!(
                        "{} bytes given, {dtype} {:?} needs {expected}",
                        bytes.len(),
                        tensor.shape
                    )));
                }
                TensorData::File { path, offset } => {
                    let file = match files.get(&path) {
                        Some(file) => file.clone(),
                        None => {
                            let opened = File::open(&path).and_then(|file| SourceFile::new(path.clone(), &file));
                            let file = Arc::new(
                                opened.map_err(|error| wrong(format!("can not open {}: {error}", path.display())))?,
                            );
                            files.insert(path, file.clone());
                            file
                        }
                    };
                    if offset.checked_add(expected).is_none_or(|end| end > file.bytes()) {
                        let reason = format!(
                            "needs bytes {offset}.. +{expected} of {}, which has {}",
                            file.path.display(),
                            file.bytes()
                        );
                        return Err(wrong(reason));
                    }
                    Data::File { file, offset }
                }
            };
            source.push_tensor(&tensor.name, dtype, &tensor.shape, tensor.aliases, data);
        }
        Ok(source)
    }

    /// A source of tensors whose bytes all come later, box by box, through
    /// [`PutWriter::put_fragment`](crate::PutWriter::put_fragment).
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` naming the tensor: a name twice, an unknown dtype, or boxes of elements smaller than a byte.
    pub fn from_shards(tensors: Vec<ShardedTensor>) -> Result<Self, BallastError> {
        let mut source = Self::empty();
        let mut names = HashSet::new();
        for sharded in tensors {
            for name in sharded.aliases.iter().chain([&sharded.name]) {
                if !names.insert(name.clone()) {
                    return Err(BallastError::invalid(format!("the tensor name {name:?} stands twice in the source")));
                }
            }
            let wrong = |reason: String| BallastError::invalid(format!("tensor {:?}: {reason}", sharded.name));
            let dtype =
                dtype_named(&sharded.dtype).ok_or_else(|| wrong(format!("unknown dtype {:?}", sharded.dtype)))?;
            if tensor_bytes(dtype, &sharded.shape).is_none() {
                return Err(wrong(format!("{dtype} {:?} is not a whole number of bytes below 2^64", sharded.shape)));
            }
            if dtype.bitsize() % 8 != 0 && !(sharded.fragments.is_empty() && sharded.parallel_axes.is_empty()) {
                return Err(wrong(format!("{dtype} has elements smaller than a byte and can not be cut")));
            }
            let mut tensor = manifest_tensor(&sharded.name, dtype, &sharded.shape);
            let split = sharded.parallel_axes.iter().filter_map(|axis| match *axis {
                ParallelAxis::Split { dim, .. } => Some(dim),
                ParallelAxis::Replicated { .. } | ParallelAxis::Ownership { .. } => None,
            });
            tensor.shard_dims = split.collect();
            tensor.shard_dims.sort_unstable();
            tensor.layer_id = sharded.layer_id;
            tensor.expert_id = sharded.expert_id;
            tensor.parallel_axes = sharded.parallel_axes;
            let planned = PlannedTensor { tensor, aliases: sharded.aliases, fragments: sharded.fragments };
            source.tensors.push((planned, Data::Later));
        }
        Ok(source)
    }

    pub(crate) fn empty() -> Self {
        Self { tensors: Vec::new(), files: BTreeMap::new(), sharing: None }
    }

    pub(crate) fn push_planned(&mut self, planned: PlannedTensor, data: Data) {
        self.tensors.push((planned, data));
    }

    pub(crate) fn push_tensor(&mut self, name: &str, dtype: Dtype, shape: &[u64], aliases: Vec<String>, data: Data) {
        let planned = PlannedTensor { tensor: manifest_tensor(name, dtype, shape), aliases, fragments: Vec::new() };
        self.push_planned(planned, data);
    }

    pub(crate) fn push_file(&mut self, path: String, bytes: u64, data: Data) {
        self.files.insert(path, (bytes, data));
    }

    /// The same, brought by several participants: the put opens the session that they join, and commits it.
    #[must_use]
    pub fn shared(self, sharing: Sharing) -> Self {
        Self { sharing: Some(sharing), ..self }
    }

    /// How many tensors; tied ones count once.
    #[must_use]
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// How many other files.
    #[must_use]
    pub fn file_count(&self) -> usize {
        self.files.keys().filter(|path| !crate::safetensors::is_hidden(path)).count()
    }

    /// Bytes of all tensors and files.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let tensors = self.tensors.iter().filter_map(|(planned, _)| planned.tensor.nbytes());
        tensors.chain(self.files.values().map(|(bytes, _)| *bytes)).fold(0, u64::saturating_add)
    }

    /// Where everything goes in the revision, and from where.
    pub(crate) fn plan(self, identity: &RevisionIdentity) -> Result<(ManifestPlan, Vec<UnitSource>), BallastError> {
        if self.tensors.is_empty() && self.files.is_empty() {
            return Err(BallastError::invalid("the source is empty; a revision needs at least one tensor or file"));
        }
        let sizes = self.files.iter().map(|(path, (bytes, _))| (path.clone(), *bytes)).collect();
        let planned = self.tensors.iter().map(|(planned, _)| planned.clone()).collect();
        let plan = ManifestPlan::new(identity, planned, sizes)?;
        let mut lowest: BTreeMap<String, Data> = self
            .tensors
            .into_iter()
            .map(|(planned, data)| {
                let names = planned.aliases.iter().chain([&planned.tensor.tensor_id]);
                (names.min().cloned().unwrap_or_default(), data)
            })
            .collect();
        let extents = plan.extents();
        let mut files = self.files;
        let mut units = Vec::with_capacity(lowest.len() + files.len());
        for fragment in plan.fragments() {
            // The fragments of one unit stand together.
            if fragment.unit as usize == units.len() {
                units.push(UnitSource {
                    unit: fragment.unit,
                    name: fragment.tensor_id.clone(),
                    bytes: extents.get(fragment.unit as usize).copied().unwrap_or(0),
                    data: lowest.remove(&fragment.tensor_id).unwrap_or(Data::Later),
                });
            }
        }
        for file in plan.files() {
            let data = files.remove(&file.path).map_or(Data::Later, |(_, data)| data);
            units.push(UnitSource { unit: file.unit, name: file.path.clone(), bytes: file.nbytes, data });
        }
        Ok((plan, units))
    }
}

/// A tensor's descriptor as a put of ours writes it, without parallel axes: what a target placement must say of it as well.
///
/// # Errors
/// `INVALID_ARGUMENT` naming the tensor: an unknown dtype, or a size that is not a whole number of bytes below 2^64.
pub fn describe_tensor(name: &str, dtype: &str, shape: &[u64]) -> Result<Tensor, BallastError> {
    let wrong = |reason: String| BallastError::invalid(format!("tensor {name:?}: {reason}"));
    let known = dtype_named(dtype).ok_or_else(|| wrong(format!("unknown dtype {dtype:?}")))?;
    tensor_bytes(known, shape)
        .ok_or_else(|| wrong(format!("{dtype} {shape:?} is not a whole number of bytes below 2^64")))?;
    Ok(manifest_tensor(name, known, shape))
}

/// A tensor as the manifest describes it. Elements smaller than a byte have no address of their own, so their tensors are
/// plain bytes whose fingerprint keeps the shape.
fn manifest_tensor(name: &str, dtype: Dtype, shape: &[u64]) -> Tensor {
    let bits = dtype.bitsize() as u64;
    if bits.is_multiple_of(8) {
        return Tensor::plain(name, dtype.to_string(), bits / 8, shape.to_vec());
    }
    let mut tensor = Tensor::plain(name, dtype.to_string(), 1, vec![tensor_bytes(dtype, shape).unwrap_or(0)]);
    let dims: Vec<String> = shape.iter().map(u64::to_string).collect();
    tensor.layout_fingerprint = format!("{PACKED}{}", dims.join(","));
    tensor
}

/// The shape that the tensor's user knows.
#[must_use]
pub fn user_shape(tensor: &Tensor) -> Vec<u64> {
    match tensor.layout_fingerprint.strip_prefix(PACKED) {
        Some(dims) => dims.split(',').filter_map(|dim| dim.parse().ok()).collect(),
        None => tensor.global_shape.clone(),
    }
}

/// Opens a file that a source reads from.
pub(crate) fn source_file(path: &Path) -> std::io::Result<(File, Arc<SourceFile>)> {
    let file = File::open(path)?;
    let source = SourceFile::new(path.to_owned(), &file)?;
    Ok((file, Arc::new(source)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, dtype: &str, shape: &[u64], data: TensorData) -> TensorSource {
        TensorSource { name: name.into(), dtype: dtype.into(), shape: shape.to_vec(), aliases: vec![], data }
    }

    fn refuse(tensors: Vec<TensorSource>) -> String {
        Source::from_tensors(tensors).unwrap_err().message
    }

    #[test]
    fn a_tensor_that_does_not_fit_its_bytes_is_refused_by_name() {
        let bytes = |n| TensorData::Bytes(Bytes::from(vec![0; n]));
        assert!(refuse(vec![tensor("w", "F32", &[2], bytes(7))]).contains("\"w\": 7 bytes given, F32 [2] needs 8"));
        assert!(refuse(vec![tensor("w", "F99", &[2], bytes(8))]).contains("unknown dtype"));
        assert!(refuse(vec![tensor("w", "U8", &[2], bytes(2)), tensor("w", "U8", &[2], bytes(2))]).contains("twice"));
        let file = tempfile::NamedTempFile::new().unwrap();
        let data = TensorData::File { path: file.path().to_owned(), offset: 0 };
        assert!(refuse(vec![tensor("w", "U8", &[2], data)]).contains("which has 0"));
        let data = TensorData::File { path: "/nowhere/at/all".into(), offset: 0 };
        assert!(refuse(vec![tensor("w", "U8", &[2], data)]).contains("can not open"));
    }

    #[test]
    fn a_file_that_changed_since_is_noticed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"12345678").unwrap();
        let (_, source) = source_file(file.path()).unwrap();
        assert!(source.open().is_ok());
        std::fs::write(file.path(), b"1234567").unwrap();
        assert!(source.open().unwrap_err().message.contains("changed"));
    }

    #[test]
    fn tied_tensors_are_one_unit_and_small_elements_keep_their_shape() {
        let mut tied = tensor("lm_head", "F32", &[2], TensorData::Later);
        tied.aliases = vec!["embed".into()];
        let tensors = vec![tied, tensor("q", "F4", &[2, 8], TensorData::Later)];
        let identity = RevisionIdentity::new("default", "default", "m", "main", 1).unwrap();
        let (plan, units) = Source::from_tensors(tensors).unwrap().plan(&identity).unwrap();
        assert_eq!(plan.unit_count(), 2);
        assert_eq!(
            units.iter().map(|unit| (unit.name.as_str(), unit.bytes)).collect::<Vec<_>>(),
            [("embed", 8), ("q", 8)]
        );
        let q = plan.tensors().iter().find(|tensor| tensor.tensor_id == "q").unwrap();
        assert_eq!((user_shape(q), q.global_shape.as_slice()), (vec![2, 8], &[8_u64][..]));
    }
}

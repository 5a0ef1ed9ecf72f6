//! What a manifest is made of: tensors with their parallel axes, fragments, units and extra files, and the rules that
//! each of them keeps by itself. Rules between them are `validate.rs`'s matter.

use serde::{Deserialize, Serialize};

use super::error::ManifestError;
use crate::digest::Digest;

/// Dimensions of one tensor.
pub const RANK_MAX: usize = 64;
/// Bytes of one tensor's name or one extra file's path.
pub const NAME_BYTES_MAX: usize = 4096;
/// Fragments of one manifest, and tensors, and extra files.
pub const PARTS_MAX: usize = 10_000_000;
/// Fragments of version 2 lie at multiples of this many bytes inside their unit.
pub const FRAGMENT_ALIGN_BYTES: u64 = 256;

/// A kind of parallelism. The order is the canonical order of a tensor's axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AxisKind {
    /// Data parallel.
    Dp,
    /// Pipeline parallel.
    Pp,
    /// Expert parallel.
    Ep,
    /// Tensor parallel.
    Tp,
}

impl AxisKind {
    /// The name in the document.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            AxisKind::Dp => "dp",
            AxisKind::Pp => "pp",
            AxisKind::Ep => "ep",
            AxisKind::Tp => "tp",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        [AxisKind::Dp, AxisKind::Pp, AxisKind::Ep, AxisKind::Tp].into_iter().find(|kind| kind.name() == name)
    }
}

/// What a kind of parallelism does to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "semantics", rename_all = "lowercase")]
pub enum ParallelAxis {
    /// Ranks hold slices along a dimension (tp, ep).
    Split {
        /// Which kind.
        kind: AxisKind,
        /// Along which dimension.
        dim: u32,
    },
    /// Every rank holds a complete copy.
    Replicated {
        /// Which kind.
        kind: AxisKind,
    },
    /// Only declared owners hold the tensor.
    Ownership {
        /// Which kind.
        kind: AxisKind,
    },
}

impl ParallelAxis {
    /// The kind of parallelism.
    #[must_use]
    pub fn kind(&self) -> AxisKind {
        match *self {
            ParallelAxis::Split { kind, .. } | ParallelAxis::Replicated { kind } | ParallelAxis::Ownership { kind } => {
                kind
            }
        }
    }
}

/// One logical tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// Its name.
    pub tensor_id: String,
    /// Its dimensions; none for a scalar.
    pub global_shape: Vec<u64>,
    /// Element type, by its safetensors name (`BF16`) in documents of ours.
    pub dtype: String,
    /// Bytes of one element.
    pub itemsize: u64,
    /// The layer it belongs to.
    pub layer_id: Option<u64>,
    /// The expert it belongs to.
    pub expert_id: Option<u64>,
    /// How elements lie in a fragment; copying needs equal ones.
    pub layout_fingerprint: String,
    /// Dimensions that are split, ascending.
    pub shard_dims: Vec<u32>,
    /// What each kind of parallelism does to it, in the order of the kinds.
    pub parallel_axes: Vec<ParallelAxis>,
}

/// The fingerprint of elements in C order without gaps.
pub const ROW_MAJOR: &str = "row-major";

impl Tensor {
    /// A row-major tensor without parallel axes.
    pub fn plain(
        tensor_id: impl Into<String>,
        dtype: impl Into<String>,
        itemsize: u64,
        global_shape: Vec<u64>,
    ) -> Self {
        Self {
            tensor_id: tensor_id.into(),
            global_shape,
            dtype: dtype.into(),
            itemsize,
            layer_id: None,
            expert_id: None,
            layout_fingerprint: ROW_MAJOR.to_owned(),
            shard_dims: Vec::new(),
            parallel_axes: Vec::new(),
        }
    }

    /// Bytes of the whole tensor; `None` when they do not fit in 64 bits.
    #[must_use]
    pub fn nbytes(&self) -> Option<u64> {
        volume_bytes(&self.global_shape, self.itemsize)
    }

    /// Whether two tensors may share one stored copy.
    #[must_use]
    pub fn is_alias_of(&self, other: &Tensor) -> bool {
        self.global_shape == other.global_shape
            && self.dtype == other.dtype
            && self.itemsize == other.itemsize
            && self.layer_id == other.layer_id
            && self.expert_id == other.expert_id
            && self.layout_fingerprint == other.layout_fingerprint
            && self.shard_dims == other.shard_dims
            && self.parallel_axes == other.parallel_axes
    }

    pub(crate) fn check(&self, path: &dyn Fn(&str) -> String, version: u64) -> Result<(), ManifestError> {
        let wrong = |field: &str, reason: String| Err(ManifestError::new(path(field), reason));
        check_tensor_name(&self.tensor_id).or_else(|reason| wrong("tensor_id", reason))?;
        let rank = self.global_shape.len();
        if rank > RANK_MAX {
            return wrong("global_shape", format!("{rank} dimensions; at most {RANK_MAX} are allowed"));
        }
        if version == 1 && (rank == 0 || self.global_shape.contains(&0)) {
            return wrong("global_shape", "version 1 allows neither scalars nor empty tensors".to_owned());
        }
        if self.itemsize == 0 {
            return wrong("itemsize", "is 0, expected at least 1".to_owned());
        }
        if self.nbytes().is_none() {
            return wrong("global_shape", "the tensor's bytes do not fit in 64 bits".to_owned());
        }
        for (field, text) in [("dtype", &self.dtype), ("layout_fingerprint", &self.layout_fingerprint)] {
            check_tensor_name(text).or_else(|reason| wrong(field, reason))?;
        }
        if !self.shard_dims.is_sorted_by(|a, b| a < b) || self.shard_dims.iter().any(|dim| *dim as usize >= rank) {
            return wrong("shard_dims", format!("{:?} must ascend and lie below the rank {rank}", self.shard_dims));
        }
        if !self.parallel_axes.is_sorted_by(|a, b| a.kind() < b.kind()) {
            return wrong("parallel_axes", "kinds must be unique and stand in the order dp, pp, ep, tp".to_owned());
        }
        let mut split = Vec::new();
        for axis in &self.parallel_axes {
            match *axis {
                ParallelAxis::Split { kind: AxisKind::Dp | AxisKind::Pp, .. } => {
                    return wrong(
                        "parallel_axes",
                        format!("{} can not split a tensor, only ep and tp can", axis.kind().name()),
                    );
                }
                ParallelAxis::Split { kind: AxisKind::Ep, dim } if dim != 0 => {
                    return wrong("parallel_axes", format!("ep splits dimension {dim}, it may only split 0"));
                }
                ParallelAxis::Split { kind: AxisKind::Ep, .. } if self.expert_id.is_some() => {
                    return wrong("parallel_axes", "a tensor with an expert_id can not be split by ep".to_owned());
                }
                ParallelAxis::Split { dim, .. } => split.push(dim),
                ParallelAxis::Ownership { kind: AxisKind::Tp } if version > 1 => {
                    return wrong("parallel_axes", "tp has no owners, only dp, pp and ep have".to_owned());
                }
                ParallelAxis::Replicated { .. } | ParallelAxis::Ownership { .. } => {}
            }
        }
        split.sort_unstable();
        if split != self.shard_dims {
            return wrong(
                "parallel_axes",
                format!("split dimensions {split:?} are not shard_dims {:?}", self.shard_dims),
            );
        }
        Ok(())
    }
}

/// A box of one tensor and where its bytes lie.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fragment {
    /// Its name, unique in the manifest.
    pub fragment_id: String,
    /// Whose box (of an alias group in version 2: the lowest name).
    pub tensor_id: String,
    /// Every tensor that these bytes stand for, ascending, when there is more than one.
    pub aliases: Vec<String>,
    /// First element of the box, by dimension.
    pub global_offset: Vec<u64>,
    /// Extent of the box, by dimension.
    pub local_shape: Vec<u64>,
    /// The payload object.
    pub object_key: String,
    /// First byte inside the object, which in version 2 is the unit.
    pub object_offset: u64,
    /// Bytes.
    pub nbytes: u64,
    /// Index of the unit; 0 in version 1, which has no units.
    pub unit: u32,
}

/// A complete tensor, alias group or extra file: one payload object, never split by a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// SHA-256 of the sorted member names joined by NUL; of an extra file: of NUL and its path.
    pub affinity_id: Digest,
    /// Bytes it takes: up to the end of its last fragment.
    pub extent_bytes: u64,
    /// Bytes of its fragments, without padding.
    pub logical_bytes: u64,
    /// CRC-64/NVME of the extent; padding is zeros.
    pub crc64: u64,
}

/// A file that travels with the tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtraFile {
    /// Relative path, components joined by `/`.
    pub path: String,
    /// Bytes.
    pub nbytes: u64,
    /// The payload object.
    pub object_key: String,
    /// First byte inside the object.
    pub object_offset: u64,
    /// Index of the unit.
    pub unit: u32,
}

impl ExtraFile {
    /// The member names of an extra file's unit. No tensor's name is empty, so no alias group can have the same.
    #[must_use]
    pub fn affinity_members(path: &str) -> [&str; 2] {
        ["", path]
    }
}

/// Bytes of a box; `None` when they do not fit in 64 bits.
#[must_use]
pub fn volume_bytes(shape: &[u64], itemsize: u64) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(itemsize, |bytes, dim| bytes.checked_mul(*dim))
}

/// The name of a fragment: 24 hex digits from what it covers.
#[must_use]
pub fn fragment_id(tensor_id: &str, global_offset: &[u64], local_shape: &[u64]) -> String {
    let list = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    let text = format!("{tensor_id}|{}|{}", list(global_offset), list(local_shape));
    Digest::of(text.as_bytes()).to_string()[..24].to_owned()
}

/// Whether a text may name a tensor: 1 to [`NAME_BYTES_MAX`] bytes without NUL.
///
/// # Errors
/// What is wrong with it.
pub fn check_tensor_name(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err("is empty".to_owned());
    }
    if text.len() > NAME_BYTES_MAX {
        return Err(format!("has {} bytes; at most {NAME_BYTES_MAX} are allowed", text.len()));
    }
    if text.contains('\0') {
        return Err("holds a NUL character".to_owned());
    }
    Ok(())
}

/// Whether a path may be written below any folder: relative, no `.` or `..`, no empty component.
///
/// # Errors
/// What is wrong with it.
pub fn check_file_path(path: &str) -> Result<(), String> {
    check_tensor_name(path)?;
    for component in path.split('/') {
        if component.is_empty() {
            return Err(format!("{path:?} has an empty component; give a relative path"));
        }
        if component == "." || component == ".." {
            return Err(format!("{path:?} has the component {component:?}, which could leave the folder"));
        }
        if component.len() > 255 {
            return Err(format!("{path:?} has a component of {} bytes; at most 255 are allowed", component.len()));
        }
    }
    Ok(())
}

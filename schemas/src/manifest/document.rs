//! The manifest document, versions 1 and 2, field by field (RFC, Data Authority Boundaries; ARCHITECTURE.md, Manifest).
//! Canonical form is `json.rs`'s matter, rules between the parts `validate.rs`'s.

use super::error::ManifestError;
use super::json::{Reader, Writer};
use super::parts::{AxisKind, ExtraFile, Fragment, PARTS_MAX, ParallelAxis, RANK_MAX, Tensor, Unit};
use crate::digest::Digest;
use crate::limits::UNITS_MAX;

/// The only kind of resource there is.
const RESOURCE_KIND: &str = "model_weight";

const FIELDS_1: &[&str] = &[
    "created_at",
    "fragments",
    "group_id",
    "manifest_key",
    "namespace",
    "resource_id",
    "resource_kind",
    "revision",
    "tensors",
    "weight_generation",
];
const FIELDS_2: &[&str] = &[
    "files",
    "fragments",
    "group_id",
    "manifest_key",
    "namespace",
    "resource_id",
    "resource_kind",
    "revision",
    "tensors",
    "units",
    "version",
    "weight_generation",
];
const TENSOR_FIELDS: &[&str] = &[
    "dtype",
    "expert_id",
    "global_shape",
    "itemsize",
    "layer_id",
    "layout_fingerprint",
    "parallel_axes",
    "shard_dims",
    "tensor_id",
];
const FRAGMENT_FIELDS_1: &[&str] =
    &["aliases", "fragment_id", "global_offset", "local_shape", "nbytes", "object_key", "object_offset", "tensor_id"];
const FRAGMENT_FIELDS_2: &[&str] = &[
    "aliases",
    "fragment_id",
    "global_offset",
    "local_shape",
    "nbytes",
    "object_key",
    "object_offset",
    "tensor_id",
    "unit",
];
const UNIT_FIELDS: &[&str] = &["affinity_id", "crc64", "extent_bytes", "logical_bytes"];
const FILE_FIELDS: &[&str] = &["nbytes", "object_key", "object_offset", "path", "unit"];

/// The fields of a document, not yet checked against each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Document {
    pub(super) version: u64,
    pub(super) namespace: String,
    pub(super) resource_id: String,
    pub(super) revision: String,
    pub(super) weight_generation: u64,
    pub(super) group_id: String,
    pub(super) manifest_key: String,
    pub(super) created_at: Option<String>,
    pub(super) tensors: Vec<Tensor>,
    pub(super) fragments: Vec<Fragment>,
    pub(super) units: Vec<Unit>,
    pub(super) files: Vec<ExtraFile>,
}

pub(super) fn read(bytes: &[u8]) -> Result<Document, ManifestError> {
    let mut reader = Reader::new(bytes)?;
    // Canonical order puts a field first that tells the versions apart.
    let version = if reader.sees("{\"created_at\":") { 1 } else { 2 };
    let r = &mut reader;
    r.open(if version == 1 { FIELDS_1 } else { FIELDS_2 })?;
    let (mut created_at, mut files, mut units) = (None, Vec::new(), Vec::new());
    if version == 1 {
        r.field("created_at")?;
        created_at = Some(r.string()?);
    } else {
        r.field("files")?;
        files = r.list(PARTS_MAX, read_file)?;
    }
    r.field("fragments")?;
    let fragments = r.list(PARTS_MAX, |r| read_fragment(r, version))?;
    let group_id = text(r, "group_id")?;
    let manifest_key = text(r, "manifest_key")?;
    let namespace = text(r, "namespace")?;
    let resource_id = text(r, "resource_id")?;
    let resource_kind = text(r, "resource_kind")?;
    if resource_kind != RESOURCE_KIND {
        return Err(r.error(format!("found {resource_kind:?}, expected {RESOURCE_KIND:?}")));
    }
    let revision = text(r, "revision")?;
    r.field("tensors")?;
    let tensors = r.list(PARTS_MAX, read_tensor)?;
    if version == 2 {
        r.field("units")?;
        units = r.list(UNITS_MAX as usize, read_unit)?;
        let found = number(r, "version")?;
        if found != version {
            return Err(r.error(format!("found {found}, expected 2 (or a document of version 1)")));
        }
    }
    let weight_generation = number(r, "weight_generation")?;
    r.close()?;
    r.finish()?;
    Ok(Document {
        version,
        namespace,
        resource_id,
        revision,
        weight_generation,
        group_id,
        manifest_key,
        created_at,
        tensors,
        fragments,
        units,
        files,
    })
}

fn text(r: &mut Reader<'_>, name: &'static str) -> Result<String, ManifestError> {
    r.field(name)?;
    r.string()
}

fn number(r: &mut Reader<'_>, name: &'static str) -> Result<u64, ManifestError> {
    r.field(name)?;
    r.number()
}

fn small(r: &mut Reader<'_>) -> Result<u32, ManifestError> {
    let value = r.number()?;
    u32::try_from(value).map_err(|_| r.error(format!("{value} does not fit in 32 bits")))
}

fn numbers(r: &mut Reader<'_>, name: &'static str) -> Result<Vec<u64>, ManifestError> {
    r.field(name)?;
    r.list(RANK_MAX, Reader::number)
}

pub(crate) fn read_tensor(r: &mut Reader<'_>) -> Result<Tensor, ManifestError> {
    r.open(TENSOR_FIELDS)?;
    let dtype = text(r, "dtype")?;
    r.field("expert_id")?;
    let expert_id = r.optional_number()?;
    let global_shape = numbers(r, "global_shape")?;
    let itemsize = number(r, "itemsize")?;
    r.field("layer_id")?;
    let layer_id = r.optional_number()?;
    let layout_fingerprint = text(r, "layout_fingerprint")?;
    r.field("parallel_axes")?;
    let parallel_axes = r.list(RANK_MAX, read_axis)?;
    r.field("shard_dims")?;
    let shard_dims = r.list(RANK_MAX, small)?;
    let tensor_id = text(r, "tensor_id")?;
    r.close()?;
    Ok(Tensor {
        tensor_id,
        global_shape,
        dtype,
        itemsize,
        layer_id,
        expert_id,
        layout_fingerprint,
        shard_dims,
        parallel_axes,
    })
}

fn read_axis(r: &mut Reader<'_>) -> Result<ParallelAxis, ManifestError> {
    let split = r.sees("{\"dim\":");
    r.open(if split { &["dim", "kind", "semantics"] } else { &["kind", "semantics"] })?;
    let mut dim = 0;
    if split {
        r.field("dim")?;
        dim = small(r)?;
    }
    let name = text(r, "kind")?;
    let kind =
        AxisKind::from_name(&name).ok_or_else(|| r.error(format!("found {name:?}, expected dp, pp, ep or tp")))?;
    let semantics = text(r, "semantics")?;
    let axis = match (semantics.as_str(), split) {
        ("split", true) => ParallelAxis::Split { kind, dim },
        ("replicated", false) => ParallelAxis::Replicated { kind },
        ("ownership", false) => ParallelAxis::Ownership { kind },
        ("split", false) => return Err(r.error("\"split\" needs the field \"dim\"")),
        ("replicated" | "ownership", true) => return Err(r.error(format!("{semantics:?} has no field \"dim\""))),
        _ => return Err(r.error(format!("found {semantics:?}, expected split, replicated or ownership"))),
    };
    r.close()?;
    Ok(axis)
}

fn read_fragment(r: &mut Reader<'_>, version: u64) -> Result<Fragment, ManifestError> {
    r.open(if version == 1 { FRAGMENT_FIELDS_1 } else { FRAGMENT_FIELDS_2 })?;
    r.field("aliases")?;
    let aliases = r.list(PARTS_MAX, Reader::string)?;
    let fragment_id = text(r, "fragment_id")?;
    let global_offset = numbers(r, "global_offset")?;
    let local_shape = numbers(r, "local_shape")?;
    let nbytes = number(r, "nbytes")?;
    let object_key = text(r, "object_key")?;
    let object_offset = number(r, "object_offset")?;
    let tensor_id = text(r, "tensor_id")?;
    let mut unit = 0;
    if version == 2 {
        r.field("unit")?;
        unit = small(r)?;
    }
    r.close()?;
    Ok(Fragment {
        fragment_id,
        tensor_id,
        aliases,
        global_offset,
        local_shape,
        object_key,
        object_offset,
        nbytes,
        unit,
    })
}

fn read_unit(r: &mut Reader<'_>) -> Result<Unit, ManifestError> {
    r.open(UNIT_FIELDS)?;
    let id = text(r, "affinity_id")?;
    let affinity_id = Digest::try_from(id).map_err(|error| r.error(error.to_string()))?;
    let digits = text(r, "crc64")?;
    let hex = digits.len() == 16 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let crc64 = match u64::from_str_radix(&digits, 16) {
        Ok(value) if hex => value,
        _ => return Err(r.error(format!("{digits:?} is not 16 lower-case hex digits"))),
    };
    let extent_bytes = number(r, "extent_bytes")?;
    let logical_bytes = number(r, "logical_bytes")?;
    r.close()?;
    Ok(Unit { affinity_id, extent_bytes, logical_bytes, crc64 })
}

fn read_file(r: &mut Reader<'_>) -> Result<ExtraFile, ManifestError> {
    r.open(FILE_FIELDS)?;
    let nbytes = number(r, "nbytes")?;
    let object_key = text(r, "object_key")?;
    let object_offset = number(r, "object_offset")?;
    let path = text(r, "path")?;
    r.field("unit")?;
    let unit = small(r)?;
    r.close()?;
    Ok(ExtraFile { path, nbytes, object_key, object_offset, unit })
}

/// The canonical bytes. Without checksums, what remains is the geometry.
pub(super) fn write(document: &Document, checksums: bool) -> Vec<u8> {
    let mut writer = Writer::with_capacity(256 + 640 * document.fragments.len() + 160 * document.units.len());
    let w = &mut writer;
    w.open();
    if let Some(created_at) = &document.created_at {
        w.field("created_at");
        w.string(created_at);
    }
    if document.version == 2 {
        w.field("files");
        w.list(&document.files, write_file);
    }
    w.field("fragments");
    w.list(&document.fragments, |w, fragment| write_fragment(w, fragment, document.version));
    for (name, value) in [
        ("group_id", document.group_id.as_str()),
        ("manifest_key", &document.manifest_key),
        ("namespace", &document.namespace),
        ("resource_id", &document.resource_id),
        ("resource_kind", RESOURCE_KIND),
        ("revision", &document.revision),
    ] {
        w.field(name);
        w.string(value);
    }
    w.field("tensors");
    w.list(&document.tensors, write_tensor);
    if document.version == 2 {
        w.field("units");
        w.list(&document.units, |w, unit| write_unit(w, unit, checksums));
        w.field("version");
        w.number(document.version);
    }
    w.field("weight_generation");
    w.number(document.weight_generation);
    w.close();
    writer.into_bytes()
}

fn write_numbers(w: &mut Writer, name: &str, values: &[u64]) {
    w.field(name);
    w.list(values, |w, value| w.number(*value));
}

pub(crate) fn write_tensor(w: &mut Writer, tensor: &Tensor) {
    w.open();
    w.field("dtype");
    w.string(&tensor.dtype);
    w.field("expert_id");
    w.optional_number(tensor.expert_id);
    write_numbers(w, "global_shape", &tensor.global_shape);
    w.field("itemsize");
    w.number(tensor.itemsize);
    w.field("layer_id");
    w.optional_number(tensor.layer_id);
    w.field("layout_fingerprint");
    w.string(&tensor.layout_fingerprint);
    w.field("parallel_axes");
    w.list(&tensor.parallel_axes, write_axis);
    w.field("shard_dims");
    w.list(&tensor.shard_dims, |w, dim| w.number(u64::from(*dim)));
    w.field("tensor_id");
    w.string(&tensor.tensor_id);
    w.close();
}

fn write_axis(w: &mut Writer, axis: &ParallelAxis) {
    w.open();
    let semantics = match axis {
        ParallelAxis::Split { dim, .. } => {
            w.field("dim");
            w.number(u64::from(*dim));
            "split"
        }
        ParallelAxis::Replicated { .. } => "replicated",
        ParallelAxis::Ownership { .. } => "ownership",
    };
    w.field("kind");
    w.string(axis.kind().name());
    w.field("semantics");
    w.string(semantics);
    w.close();
}

fn write_fragment(w: &mut Writer, fragment: &Fragment, version: u64) {
    w.open();
    w.field("aliases");
    w.list(&fragment.aliases, |w, name| w.string(name));
    w.field("fragment_id");
    w.string(&fragment.fragment_id);
    write_numbers(w, "global_offset", &fragment.global_offset);
    write_numbers(w, "local_shape", &fragment.local_shape);
    w.field("nbytes");
    w.number(fragment.nbytes);
    w.field("object_key");
    w.string(&fragment.object_key);
    w.field("object_offset");
    w.number(fragment.object_offset);
    w.field("tensor_id");
    w.string(&fragment.tensor_id);
    if version == 2 {
        w.field("unit");
        w.number(u64::from(fragment.unit));
    }
    w.close();
}

fn write_unit(w: &mut Writer, unit: &Unit, checksums: bool) {
    w.open();
    w.field("affinity_id");
    w.string(&unit.affinity_id.to_string());
    if checksums {
        w.field("crc64");
        w.string(&format!("{:016x}", unit.crc64));
    }
    w.field("extent_bytes");
    w.number(unit.extent_bytes);
    w.field("logical_bytes");
    w.number(unit.logical_bytes);
    w.close();
}

fn write_file(w: &mut Writer, file: &ExtraFile) {
    w.open();
    w.field("nbytes");
    w.number(file.nbytes);
    w.field("object_key");
    w.string(&file.object_key);
    w.field("object_offset");
    w.number(file.object_offset);
    w.field("path");
    w.string(&file.path);
    w.field("unit");
    w.number(u64::from(file.unit));
    w.close();
}

//! The sparse object, "mooncake.sparse_object" version 1: metadata in JSON and the members `indices`, `values`, `tile_coords`
//! and `tile_ptr`. Entries are sorted by (tile, element). What the tensor of the base is like is `lower.rs`'s matter.

use std::collections::BTreeMap;

use ballast_schemas::BallastError;
use serde::Deserialize;
use serde_json::json;

use super::{Semantics, side_by_side};

const SCHEMA: &str = "mooncake.sparse_object";
const VERSION: u64 = 1;

/// The bytes of an object's members, little-endian and row-major.
#[derive(Clone, Copy, Debug)]
pub struct Members<'a> {
    /// The global coordinates of every entry: [nnz, rank].
    pub indices: &'a [u8],
    /// The value of every entry: [nnz].
    pub values: &'a [u8],
    /// The tiles that have entries: [tiles, rank], in units of the tile's shape.
    pub tile_coords: &'a [u8],
    /// Where each tile's entries begin, and the end: [tiles + 1].
    pub tile_ptr: &'a [u8],
}

/// A sparse object that keeps every rule of its format.
#[derive(Clone, Debug)]
pub struct SparseDelta {
    tensor_id: String,
    global_shape: Vec<u64>,
    base_generation: u64,
    delta_generation: u64,
    dtype: &'static str,
    item_bytes: u32,
    semantics: Option<Semantics>,
    elements: Vec<u64>,
    values: Vec<u8>,
}

/// The metadata, as far as it matters here. Objects carry more: where they come from, which policy placed them.
#[derive(Deserialize)]
struct Metadata {
    schema: String,
    version: u64,
    coordinate_space: String,
    tensor_id: String,
    global_shape: Vec<u64>,
    global_offset: Vec<u64>,
    local_shape: Vec<u64>,
    base_generation: u64,
    delta_generation: u64,
    tile_shape: Vec<u64>,
    members: BTreeMap<String, Member>,
    index_dtype: String,
    value_dtype: String,
    coordinate_rank: Option<u64>,
    nnz: Option<u64>,
    apply: Option<String>,
}

/// As much of the metadata as an error about the rest of it needs.
#[derive(Deserialize)]
struct Named {
    tensor_id: String,
}

#[derive(Deserialize)]
struct Member {
    dtype: String,
    shape: Vec<u64>,
}

/// An element type: its name here, its bytes, and what else it is called.
const DTYPES: [(&str, u32, &str); 19] = [
    ("BOOL", 1, "bool"),
    ("U8", 1, "uint8"),
    ("I8", 1, "int8"),
    ("F8_E4M3", 1, "float8_e4m3fn"),
    ("F8_E5M2", 1, "float8_e5m2"),
    ("F8_E8M0", 1, "float8_e8m0fnu"),
    ("F8_E4M3FNUZ", 1, "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 1, "float8_e5m2fnuz"),
    ("U16", 2, "uint16"),
    ("I16", 2, "int16"),
    ("F16", 2, "float16"),
    ("BF16", 2, "bfloat16"),
    ("U32", 4, "uint32"),
    ("I32", 4, "int32"),
    ("F32", 4, "float32"),
    ("U64", 8, "uint64"),
    ("I64", 8, "int64"),
    ("F64", 8, "float64"),
    ("C64", 8, "complex64"),
];

fn dtype_called(name: &str) -> Option<(&'static str, u32)> {
    let word = name.strip_prefix("torch.").unwrap_or(name);
    let found = DTYPES.iter().find(|(own, _, other)| *own == word || *other == word);
    found.map(|(own, bytes, _)| (*own, *bytes))
}

/// A whole-number type that coordinates may have.
#[derive(Clone, Copy, PartialEq, Eq)]
struct IndexType {
    name: &'static str,
    bytes: u32,
}

impl IndexType {
    fn called(name: &str) -> Option<Self> {
        let (name, bytes) = dtype_called(name)?;
        matches!(name, "U8" | "U16" | "U32" | "U64" | "I8" | "I16" | "I32" | "I64").then_some(Self { name, bytes })
    }

    /// The numbers, or which of them is negative.
    fn read(self, bytes: &[u8]) -> Result<Vec<u64>, usize> {
        macro_rules! read {
            ($number:ty, $width:literal) => {
                bytes
                    .as_chunks::<$width>()
                    .0
                    .iter()
                    .zip(0..)
                    .map(|(number, at)| u64::try_from(<$number>::from_le_bytes(*number)).map_err(|_| at))
                    .collect()
            };
        }
        match self.name {
            "U8" => read!(u8, 1),
            "U16" => read!(u16, 2),
            "U32" => read!(u32, 4),
            "U64" => read!(u64, 8),
            "I8" => read!(i8, 1),
            "I16" => read!(i16, 2),
            "I32" => read!(i32, 4),
            _ => read!(i64, 8),
        }
    }
}

fn refuse(tensor_id: &str, reason: impl std::fmt::Display) -> BallastError {
    BallastError::invalid(format!("the delta of tensor {tensor_id:?}: {reason}"))
        .with_details(json!({ "tensor": tensor_id }))
}

impl SparseDelta {
    /// Reads an object and checks it.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` naming the tensor and what is wrong: a field that is missing, members whose dtypes or lengths do
    /// not fit, tiles or entries out of order, an entry outside its tile, its box or the tensor.
    pub fn new(metadata: &str, members: &Members<'_>) -> Result<Self, BallastError> {
        let metadata: Metadata = serde_json::from_str(metadata).map_err(|error| {
            let reason = format!("its metadata: {error}");
            match serde_json::from_str::<Named>(metadata) {
                Ok(Named { tensor_id }) => refuse(&tensor_id, reason),
                Err(_) => BallastError::invalid(format!("a sparse delta without tensor_id: {reason}")),
            }
        })?;
        Self::read(&metadata, members).map_err(|reason| refuse(&metadata.tensor_id, reason))
    }

    /// Reads many objects, as [`SparseDelta::new`] does, on a few threads.
    ///
    /// # Errors
    /// Those of the first that is wrong.
    pub fn read_all(objects: &[(&str, Members<'_>)]) -> Result<Vec<Self>, BallastError> {
        side_by_side(objects, |(metadata, members)| Self::new(metadata, members)).into_iter().collect()
    }

    fn read(metadata: &Metadata, bytes: &Members<'_>) -> Result<Self, String> {
        check_header(metadata)?;
        let rank = metadata.global_shape.len() as u64;
        let index = IndexType::called(&metadata.index_dtype)
            .ok_or_else(|| format!("index_dtype {:?} is no whole-number type", metadata.index_dtype))?;
        let (dtype, item_bytes) = dtype_called(&metadata.value_dtype)
            .ok_or_else(|| format!("value_dtype {:?} is not known", metadata.value_dtype))?;
        let values = member(metadata, "values")?;
        let &[nnz] = values.shape.as_slice() else {
            return Err(format!("values has the shape {:?}, expected [nnz]", values.shape));
        };
        let tile_ptr = member(metadata, "tile_ptr")?;
        let pointer = IndexType::called(&tile_ptr.dtype)
            .ok_or_else(|| format!("tile_ptr has the dtype {:?}, which is no whole-number type", tile_ptr.dtype))?;
        let tiles = match tile_ptr.shape.as_slice() {
            &[ends] if ends > 0 => ends - 1,
            shape => return Err(format!("tile_ptr has the shape {shape:?}, expected [tiles + 1]")),
        };
        let expect = |name: &str, dtype: &str, item: u32, shape: &[u64], found: &[u8]| {
            let described = member(metadata, name)?;
            if dtype_called(&described.dtype).map(|(name, _)| name) != Some(dtype) {
                return Err(format!("{name} has the dtype {:?}, expected {dtype}", described.dtype));
            }
            if described.shape != shape {
                return Err(format!("{name} has the shape {:?}, expected {shape:?}", described.shape));
            }
            let bytes = shape.iter().try_fold(u64::from(item), |bytes, extent| bytes.checked_mul(*extent));
            if bytes != Some(found.len() as u64) {
                let found = found.len();
                return Err(format!("{name} has {found} bytes, {dtype} {shape:?} needs {}", bytes.unwrap_or(u64::MAX)));
            }
            Ok(())
        };
        expect("values", dtype, item_bytes, &[nnz], bytes.values)?;
        expect("indices", index.name, index.bytes, &[nnz, rank], bytes.indices)?;
        expect("tile_coords", index.name, index.bytes, &[tiles, rank], bytes.tile_coords)?;
        expect("tile_ptr", pointer.name, pointer.bytes, &[tiles + 1], bytes.tile_ptr)?;
        if metadata.nnz.is_some_and(|given| given != nnz) {
            return Err(format!("nnz is {}, there are {nnz} values", metadata.nnz.unwrap_or_default()));
        }
        let width = metadata.global_shape.len().max(1);
        let indices = index.read(bytes.indices).map_err(|at| {
            let (entry, dim, shape) = (at / width, at % width, &metadata.global_shape);
            format!("the index of entry {entry} is negative in dimension {dim}; the tensor is {shape:?}")
        })?;
        let coords = index
            .read(bytes.tile_coords)
            .map_err(|at| format!("tile_coords holds a negative number, in tile {}", at / width))?;
        let pointers = pointer
            .read(bytes.tile_ptr)
            .map_err(|at| format!("tile_ptr holds a negative number, the one of tile {at}"))?;
        Ok(Self {
            tensor_id: metadata.tensor_id.clone(),
            global_shape: metadata.global_shape.clone(),
            base_generation: metadata.base_generation,
            delta_generation: metadata.delta_generation,
            dtype,
            item_bytes,
            semantics: said_semantics(metadata)?,
            elements: elements(metadata, nnz, &indices, &coords, &pointers)?,
            values: bytes.values.to_vec(),
        })
    }

    /// The tensor.
    #[must_use]
    pub fn tensor_id(&self) -> &str {
        &self.tensor_id
    }

    /// Its whole shape.
    #[must_use]
    pub fn global_shape(&self) -> &[u64] {
        &self.global_shape
    }

    /// The generation that it changes.
    #[must_use]
    pub fn base_generation(&self) -> u64 {
        self.base_generation
    }

    /// The generation that it leads to.
    #[must_use]
    pub fn delta_generation(&self) -> u64 {
        self.delta_generation
    }

    /// The values' type by its safetensors name.
    #[must_use]
    pub fn dtype(&self) -> &'static str {
        self.dtype
    }

    /// How many entries.
    #[must_use]
    pub fn nnz(&self) -> usize {
        self.elements.len()
    }

    /// Bytes of one value.
    pub(super) fn item_bytes(&self) -> u32 {
        self.item_bytes
    }

    /// What it says of itself, if anything.
    pub(super) fn semantics(&self) -> Option<Semantics> {
        self.semantics
    }

    /// The row-major place of each entry in the whole tensor, in the order of the values.
    pub(super) fn elements(&self) -> &[u64] {
        &self.elements
    }

    /// The values' bytes.
    pub(super) fn values(&self) -> &[u8] {
        &self.values
    }

    /// An error that names the tensor.
    pub(super) fn refuse(&self, reason: impl std::fmt::Display) -> BallastError {
        refuse(&self.tensor_id, reason)
    }
}

fn member<'a>(metadata: &'a Metadata, name: &str) -> Result<&'a Member, String> {
    metadata.members.get(name).ok_or_else(|| format!("the member {name} is missing"))
}

fn check_header(metadata: &Metadata) -> Result<(), String> {
    let Metadata { schema, version, coordinate_space, .. } = metadata;
    if schema != SCHEMA || *version != VERSION {
        return Err(format!("it is a {schema:?} of version {version}, expected {SCHEMA:?} of version {VERSION}"));
    }
    if coordinate_space != "global" {
        return Err(format!("its coordinates are {coordinate_space:?}, expected \"global\""));
    }
    let (base, delta) = (metadata.base_generation, metadata.delta_generation);
    if base >= delta {
        return Err(format!("delta_generation {delta} is not above base_generation {base}"));
    }
    let shape = &metadata.global_shape;
    let rank = shape.len();
    for (name, list) in [
        ("global_offset", &metadata.global_offset),
        ("local_shape", &metadata.local_shape),
        ("tile_shape", &metadata.tile_shape),
    ] {
        if list.len() != rank {
            return Err(format!("{name} {list:?} has not the rank of global_shape {shape:?}"));
        }
    }
    if metadata.coordinate_rank.is_some_and(|given| given != rank as u64) {
        return Err(format!("coordinate_rank is not {rank}, the rank of global_shape"));
    }
    if metadata.tile_shape.contains(&0) {
        return Err(format!("tile_shape {:?} has an empty side", metadata.tile_shape));
    }
    if shape.iter().try_fold(1_u64, |count, extent| count.checked_mul(*extent)).is_none() {
        return Err(format!("global_shape {shape:?} has more elements than fit in 64 bits"));
    }
    let inside = |dim: usize| {
        let end = metadata.global_offset[dim].checked_add(metadata.local_shape[dim]);
        end.is_some_and(|end| end <= shape[dim])
    };
    if !(0..rank).all(inside) {
        let (offset, local) = (&metadata.global_offset, &metadata.local_shape);
        return Err(format!("its box of {local:?} at {offset:?} does not lie in global_shape {shape:?}"));
    }
    Ok(())
}

fn said_semantics(metadata: &Metadata) -> Result<Option<Semantics>, String> {
    match metadata.apply.as_deref() {
        None => Ok(None),
        Some("scatter_add") => Ok(Some(Semantics::Additive)),
        Some("overwrite") => Ok(Some(Semantics::Overwrite)),
        Some(other) => Err(format!("apply is {other:?}, expected \"overwrite\" or \"scatter_add\"")),
    }
}

/// The row-major place of every entry, with every rule about tiles and entries checked.
fn elements(
    metadata: &Metadata,
    nnz: u64,
    indices: &[u64],
    coords: &[u64],
    pointers: &[u64],
) -> Result<Vec<u64>, String> {
    let Metadata { global_shape: shape, global_offset, local_shape, tile_shape, .. } = metadata;
    let rank = shape.len();
    if pointers.first() != Some(&0) || pointers.last() != Some(&nnz) || !pointers.is_sorted() {
        return Err(format!("tile_ptr does not ascend from 0 to {nnz}"));
    }
    let tile = |number: usize| &coords[number * rank..(number + 1) * rank];
    if let Some(number) = (1..pointers.len() - 1).find(|number| tile(number - 1) >= tile(*number)) {
        return Err(format!("tile {:?} does not follow {:?}: tiles must ascend", tile(number), tile(number - 1)));
    }
    let mut elements = Vec::with_capacity(nnz as usize);
    for (number, entries) in pointers.windows(2).enumerate() {
        let corner = tile(number);
        // The part of the box that lies in this tile.
        let mut bounds = Vec::with_capacity(rank);
        for dim in 0..rank {
            let start = corner[dim].saturating_mul(tile_shape[dim]);
            let end = start.saturating_add(tile_shape[dim]).min(global_offset[dim] + local_shape[dim]);
            bounds.push((start.max(global_offset[dim]), end));
        }
        let mut before = None;
        for entry in entries[0] as usize..entries[1] as usize {
            let coordinates = &indices[entry * rank..(entry + 1) * rank];
            let mut element = 0;
            for ((coordinate, (start, end)), extent) in coordinates.iter().zip(&bounds).zip(shape) {
                if coordinate < start || coordinate >= end {
                    return Err(outside(metadata, entry, coordinates, corner));
                }
                element = element * extent + coordinate;
            }
            if before.is_some_and(|before| before > element) {
                return Err(format!("entry {entry} at {coordinates:?} is out of order in its tile {corner:?}"));
            }
            before = Some(element);
            elements.push(element);
        }
    }
    Ok(elements)
}

fn outside(metadata: &Metadata, entry: usize, coordinates: &[u64], tile: &[u64]) -> String {
    let Metadata { global_shape: shape, global_offset: offset, local_shape: local, .. } = metadata;
    if coordinates.iter().zip(shape).any(|(coordinate, extent)| coordinate >= extent) {
        return format!("entry {entry} at {coordinates:?} lies outside the tensor, which is {shape:?}");
    }
    let in_box = coordinates.iter().zip(offset).zip(local);
    if in_box.into_iter().any(|((coordinate, offset), extent)| coordinate < offset || *coordinate >= offset + extent) {
        return format!("entry {entry} at {coordinates:?} lies outside the delta's box of {local:?} at {offset:?}");
    }
    format!("entry {entry} at {coordinates:?} lies outside its tile {tile:?} of {:?}", metadata.tile_shape)
}

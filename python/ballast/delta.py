"""Sparse deltas: a few changed elements of a few tensors become the next complete generation of a model.

    changed = delta.between("embed.weight", before, after, base_generation=1, delta_generation=2)
    delta.upsert([changed], replacing="minilm")

The node copies what does not change; only the changed elements travel. A delta is a `mooncake.sparse_object`: metadata and four
members (`indices`, `values`, `tile_coords`, `tile_ptr`). It leads from one generation to a later one and is applied once: what has
been applied is refused, because additive deltas would otherwise be added twice.
"""

import contextlib
import ctypes
import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._arrays import byte_count, known_dtype, memory_of, numpy_dtype
from ._easy import store_of
from ._errors import InvalidArgumentError, invalid
from ._records import WeightRevisionIdentity, WeightRevisionMetadata, generation_of
from ._snapshot import contiguous, extents, tensor_name
from ._store import policy_text

_SCHEMA = "mooncake.sparse_object"
_TILE = 256
_MEMBERS = ("indices", "values", "tile_coords", "tile_ptr")
# What may hold the bits of another type.
_WHOLE = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


class Semantics(enum.Enum):
    """What the values are. OVERWRITE: the new elements. ADDITIVE: what is added to the base's; F16 and BF16 are added as
    32-bit floats and rounded once, to nearest even, whole numbers wrap, F8, BOOL and C64 can only be overwritten."""

    OVERWRITE = "overwrite"
    ADDITIVE = "additive"


_APPLY = {Semantics.OVERWRITE: "overwrite", Semantics.ADDITIVE: "scatter_add"}


@dataclasses.dataclass(frozen=True, eq=False)
class SparseDelta:
    """One sparse object: its metadata as a dict, and its members as arrays (numpy, torch on the CPU and their like). They are
    checked when they are applied."""

    metadata: Mapping[str, Any]
    indices: Any
    values: Any
    tile_coords: Any
    tile_ptr: Any

    def __post_init__(self):
        if not isinstance(self.metadata, Mapping):
            raise invalid(f"the metadata of a sparse delta is {self.metadata!r}; give a mapping")

    @property
    def tensor_id(self):
        """The tensor."""
        return self.metadata.get("tensor_id")

    @property
    def base_generation(self):
        """The generation that it changes."""
        return self.metadata.get("base_generation")

    @property
    def delta_generation(self):
        """The generation that it leads to."""
        return self.metadata.get("delta_generation")

    def __repr__(self):
        return f"<SparseDelta of {self.tensor_id!r}, {self.base_generation} to {self.delta_generation}>"


def of_entries(tensor_id, shape, indices, values, *, base_generation, delta_generation, semantics=Semantics.OVERWRITE,
               tile_shape=None, dtype=None):
    """A delta of entries in any order: `indices` are their coordinates, [nnz, rank], `values` their values, [nnz]. `dtype` is
    the tensor's where numpy has no such type: `values` are then whole numbers of the same size that hold the bits."""
    base_generation, delta_generation = _generations(base_generation, delta_generation, tensor_name(tensor_id))
    shape = extents(shape, tensor_id)
    rank = len(shape)
    indices = _coordinates(indices, shape, tensor_id)
    values, value_dtype = _elements(values, tensor_id, dtype)
    if len(values) != len(indices):
        raise invalid(f"tensor {tensor_id!r}: {len(values)} values for {len(indices)} indices", tensor=tensor_id)
    if tile_shape is None:
        tile_shape = tuple(min(_TILE, max(extent, 1)) for extent in shape)
    tile_shape = extents(tile_shape, tensor_id, "tile_shape")
    if len(tile_shape) != rank or 0 in tile_shape:
        raise invalid(f"tensor {tensor_id!r}: tile_shape is {tile_shape}, expected {rank} numbers from 1 on", tensor=tensor_id)
    index_dtype = np.dtype(np.uint32 if all(extent <= 2**32 for extent in shape) else np.uint64)
    tiles = indices.astype(np.int64) // np.asarray(tile_shape, dtype=np.int64)
    keys = [indices[:, dim] for dim in reversed(range(rank))] + [tiles[:, dim] for dim in reversed(range(rank))]
    order = np.lexsort(keys) if keys else np.arange(len(indices))
    tiles = tiles[order]
    first = np.ones(len(tiles), dtype=bool)
    first[1:] = (tiles[1:] != tiles[:-1]).any(axis=1)
    starts = np.flatnonzero(first)
    members = {
        "indices": np.ascontiguousarray(indices[order], dtype=index_dtype),
        "values": np.ascontiguousarray(values[order]),
        "tile_coords": np.ascontiguousarray(tiles[starts], dtype=index_dtype),
        "tile_ptr": np.append(starts, len(indices)).astype(np.uint64),
    }
    described = {name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in members.items()}
    described["values"] = {"dtype": value_dtype, "shape": [len(values)]}
    metadata = {
        "schema": _SCHEMA, "version": 1, "coordinate_space": "global", "tensor_id": tensor_id, "global_shape": list(shape),
        "global_offset": [0] * rank, "local_shape": list(shape), "coordinate_rank": rank, "nnz": len(indices),
        "index_dtype": str(index_dtype), "value_dtype": value_dtype, "tile_shape": list(tile_shape),
        "base_generation": base_generation, "delta_generation": delta_generation, "apply": _APPLY[_semantics(semantics)],
        "members": described,
    }
    return SparseDelta(metadata, **members)


def between(tensor_id, before, after, *, base_generation, delta_generation, tile_shape=None, dtype=None):
    """An overwriting delta of the elements in which two arrays of one dtype and shape differ, bit by bit. `dtype` as for
    `of_entries`."""
    tensor_name(tensor_id)
    before, was = _array(before, tensor_id, "before")
    after, name = _array(after, tensor_id, "after")
    if before.shape != after.shape or was != name:
        message = f"tensor {tensor_id!r} is {name} {list(after.shape)}, and was {was} {list(before.shape)}"
        raise invalid(message, tensor=tensor_id)
    name = _retyped(name, dtype, tensor_id, "the arrays")
    bits = np.dtype(f"u{after.dtype.itemsize}")
    old, new = (np.ascontiguousarray(array).reshape(-1).view(bits) for array in (before, after))
    changed = np.flatnonzero(old != new)
    indices = np.stack(np.unravel_index(changed, after.shape), axis=1) if after.ndim else np.empty((len(changed), 0), np.int64)
    return of_entries(tensor_id, after.shape, indices, after.reshape(-1)[changed], base_generation=base_generation,
                      delta_generation=delta_generation, tile_shape=tile_shape, dtype=name)


def upsert(deltas, *, replacing, semantics=Semantics.OVERWRITE, expected_metadata_generation=None, policy=None,
           request_id=None, wait=False, store=None, progress=None):
    """Applies deltas to a revision and publishes the complete generation that results in its place; answers its record, READY
    when this returns. `replacing` is an identity, or the short name of a lineage, of which the deltas' base generation is meant.

    `wait` waits until the base is gone. What the deltas do not fit, and those that were applied before, are refused by an
    error that names the tensor; nothing of the next generation stays then."""
    store = store_of(store)
    deltas = _listed(deltas)
    base = _base_of(replacing, deltas)
    described, kept = [], []
    for delta in deltas:
        memories = [_member(delta, name) for name in _MEMBERS]
        kept.extend(memories)
        try:
            metadata = json.dumps(dict(delta.metadata), allow_nan=False)
        except (TypeError, ValueError) as error:
            message = f"the metadata of {delta!r} is no JSON: {error}; give plain texts, numbers, lists and dicts"
            raise invalid(message, tensor=delta.tensor_id) from error
        described.append((metadata, *((memory.address, memory.nbytes) for memory in memories)))
    expected = None
    if expected_metadata_generation is not None:
        expected = generation_of(expected_metadata_generation, "expected_metadata_generation")
    replacement = json.dumps({
        "base": base._to_wire(), "expected_metadata_generation": expected, "request_id": request_id, "wait_completed": bool(wait),
    })
    report = json.loads(store._connection.client(store._cancel).delta(
        replacement, described, _semantics(semantics).value, policy_text(policy), progress or store._connection.progress,
        store._cancel))
    del kept
    return WeightRevisionMetadata._from_wire(report["revision"])


def _semantics(value):
    try:
        return Semantics(value.lower() if isinstance(value, str) else value)
    except ValueError:
        raise invalid(f"semantics is {value!r}; OVERWRITE or ADDITIVE") from None


def _base_of(replacing, deltas):
    if isinstance(replacing, WeightRevisionIdentity):
        return replacing
    if not isinstance(replacing, str):
        raise invalid(f"replacing is {replacing!r}; give a name or a WeightRevisionIdentity")
    tensor_id = deltas[0].tensor_id
    what = f"base_generation of the delta of tensor {tensor_id!r}"
    generation = generation_of(deltas[0].base_generation, what, tensor=tensor_id)
    return WeightRevisionIdentity.parse(replacing if "#" in replacing else f"{replacing}#{generation}")


def _generations(base, target, tensor_id):
    base, target = (
        generation_of(value, f"{what} of the delta of tensor {tensor_id!r}", tensor=tensor_id)
        for value, what in ((base, "base_generation"), (target, "delta_generation"))
    )
    if base >= target:
        message = f"the delta of tensor {tensor_id!r}: delta_generation {target} is not above base_generation {base}"
        raise invalid(message, tensor=tensor_id)
    return base, target


def _listed(deltas):
    if isinstance(deltas, SparseDelta):
        raise invalid(f"deltas is {deltas!r} alone; put it in a list: upsert([delta], …)", tensor=deltas.tensor_id)
    try:
        each = iter(deltas)
    except TypeError:
        raise invalid(f"deltas is {deltas!r}; give a list of ballast.delta.SparseDelta") from None
    deltas = list(each)
    if not deltas:
        raise invalid("there is no delta to apply")
    for delta in deltas:
        if not isinstance(delta, SparseDelta):
            raise invalid(f"{delta!r} is no delta; give a ballast.delta.SparseDelta")
    return deltas


def _member(delta, name):
    """Where a member lies, whose elements are what the metadata says, or hold its bits."""
    with _part(delta.tensor_id, name) as part:
        memory = memory_of(getattr(delta, name), part)
    try:
        said = delta.metadata["members"][name]["dtype"]
    except (KeyError, TypeError):
        return memory  # What is missing there is refused by its name later.
    if memory.dtype is not None and memory.dtype != "U8":
        _retyped(memory.dtype, said, delta.tensor_id, name)
    return memory


@contextlib.contextmanager
def _part(tensor_id, what):
    """The name of a part of a delta; errors about it have the tensor in their details all the same."""
    try:
        yield f"{tensor_id} ({what})"
    except InvalidArgumentError as error:
        error.details["tensor"] = tensor_id
        raise


def _array(value, tensor_id, what):
    """Anybody's array as numpy's, and its dtype's name. What numpy has no type for comes as its bits."""
    with _part(tensor_id, what) as part:
        if not hasattr(value, "__dlpack__") or isinstance(value, (np.ndarray, np.generic)):
            try:
                array = np.asarray(value)
            except (TypeError, ValueError) as error:
                raise invalid(f"tensor {part!r} is a {type(value).__name__} that is no array: {error}") from error
            return array, known_dtype(array.dtype, part)
        memory = memory_of(contiguous(value), part)
    block = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    block.owner = memory
    dtype = numpy_dtype(memory.dtype) or np.dtype(f"u{byte_count(memory.dtype, (1,))}")
    return np.ctypeslib.as_array(block).view(dtype).reshape(memory.shape), memory.dtype


def _coordinates(indices, shape, tensor_id):
    """Coordinates [nnz, rank], all of them in the tensor."""
    indices, name = _array(indices, tensor_id, "indices")
    if indices.shape == (0,):
        indices = indices.reshape(0, len(shape))
    if not indices.size:
        indices, name = indices.astype(np.int64), "I64"  # Of an empty list numpy makes floats.
    if indices.ndim != 2 or indices.shape[1] != len(shape) or name not in _WHOLE:
        message = f"tensor {tensor_id!r}: indices are {name} {list(indices.shape)}, expected whole numbers [nnz, {len(shape)}]"
        raise invalid(message, tensor=tensor_id)
    inside = (indices >= 0) & (indices < np.asarray(shape, dtype=np.int64))
    if not inside.all():
        entry = int(inside.all(axis=1).argmin())
        at = indices[entry].tolist()
        message = f"tensor {tensor_id!r}: entry {entry} at {at} lies outside the tensor, which is {list(shape)}"
        raise invalid(message, tensor=tensor_id, entry=entry, coordinates=at)
    return indices


def _elements(values, tensor_id, dtype):
    """Values as a numpy array of one element each, and their dtype's name."""
    array, name = _array(values, tensor_id, "values")
    if array.ndim != 1:
        raise invalid(f"tensor {tensor_id!r}: values have the shape {list(array.shape)}, expected [nnz]", tensor=tensor_id)
    if dtype is not None and not array.size and not hasattr(values, "dtype"):
        name = known_dtype(dtype, tensor_id)  # An empty list is of any type.
        array = array.astype(f"u{byte_count(name, (1,)) or 1}")
    return array, _retyped(name, dtype, tensor_id, "values")


def _retyped(name, dtype, tensor_id, what):
    """The type of elements of the type `name`: `dtype`, if that is theirs or they are whole numbers that can hold its bits."""
    wanted = name if dtype is None else known_dtype(dtype, tensor_id)
    size = byte_count(wanted, (1,))
    if not size:
        message = f"tensor {tensor_id!r}: the elements of {wanted} are no whole bytes; publish the tensor in full"
        raise invalid(message, tensor=tensor_id)
    same_size = byte_count(name, (1,)) == size
    if wanted == name or (same_size and name in _WHOLE):
        return wanted
    bits = f".view(numpy.uint{8 * size}) if they hold its bits" if same_size else f"its bits as numpy.uint{8 * size}"
    message = f"tensor {tensor_id!r}: {what} are {name}, expected {wanted}; nothing is converted: give {wanted}, or {bits}"
    raise invalid(message, tensor=tensor_id, expected=wanted, found=name)


__all__ = ["Semantics", "SparseDelta", "between", "of_entries", "upsert"]

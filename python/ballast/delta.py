"""Sparse deltas: a few changed elements of a few tensors become the next complete generation of a model.

    changed = delta.between("embed.weight", before, after, base_generation=1, delta_generation=2)
    delta.upsert([changed], replacing="minilm")

The node copies what does not change; only the changed elements travel. A delta is a `mooncake.sparse_object`: metadata and four
members (`indices`, `values`, `tile_coords`, `tile_ptr`). It leads from one generation to a later one and is applied once: what has
been applied is refused, because additive deltas would otherwise be added twice.
"""

import ctypes
import dataclasses
import enum
import json
from typing import Any, Mapping

import numpy as np

from ._arrays import byte_count, known_dtype, memory_of
from ._easy import store_of
from ._errors import invalid
from ._records import WeightRevisionIdentity, WeightRevisionMetadata, generation_of
from ._store import policy_text

_SCHEMA = "mooncake.sparse_object"
_TILE = 256
_MEMBERS = ("indices", "values", "tile_coords", "tile_ptr")


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
    the tensor's where numpy has no such type: `values` are
    then whole numbers of the same size that hold the bits."""
    shape = tuple(int(extent) for extent in shape)
    rank = len(shape)
    indices = np.asarray(indices)
    if indices.ndim != 2 or indices.shape[1] != rank or indices.dtype.kind not in "iu":
        message = f"tensor {tensor_id!r}: indices are {indices.dtype} {list(indices.shape)}, expected whole numbers [nnz, {rank}]"
        raise invalid(message, tensor=tensor_id)
    if indices.size and (indices.min() < 0 or (indices >= np.asarray(shape, dtype=np.uint64)).any()):
        raise invalid(f"tensor {tensor_id!r}: an index lies outside the tensor, which is {list(shape)}", tensor=tensor_id)
    values, value_dtype = _elements(values, tensor_id, dtype)
    if len(values) != len(indices):
        raise invalid(f"tensor {tensor_id!r}: {len(values)} values for {len(indices)} indices", tensor=tensor_id)
    tile_shape = tuple(min(_TILE, max(extent, 1)) for extent in shape) if tile_shape is None else tuple(tile_shape)
    if len(tile_shape) != rank or any(int(extent) < 1 for extent in tile_shape):
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
        "index_dtype": str(index_dtype), "value_dtype": value_dtype, "tile_shape": [int(extent) for extent in tile_shape],
        "base_generation": generation_of(base_generation, "base_generation"),
        "delta_generation": generation_of(delta_generation, "delta_generation"),
        "apply": _APPLY[_semantics(semantics)], "members": described,
    }
    return SparseDelta(metadata, **members)


def between(tensor_id, before, after, *, base_generation, delta_generation, tile_shape=None):
    """An overwriting delta of the elements in which two arrays of one dtype and shape differ, bit by bit."""
    before, after = np.asarray(before), np.asarray(after)
    if before.shape != after.shape or before.dtype != after.dtype:
        message = f"tensor {tensor_id!r} is {after.dtype} {list(after.shape)}, and was {before.dtype} {list(before.shape)}"
        raise invalid(message, tensor=tensor_id)
    bits = np.dtype(f"u{after.dtype.itemsize}")
    old, new = (np.ascontiguousarray(array).reshape(-1).view(bits) for array in (before, after))
    changed = np.flatnonzero(old != new)
    indices = np.stack(np.unravel_index(changed, after.shape), axis=1) if after.ndim else np.empty((len(changed), 0), np.int64)
    return of_entries(tensor_id, after.shape, indices, after.reshape(-1)[changed], base_generation=base_generation,
                      delta_generation=delta_generation, tile_shape=tile_shape)


def upsert(deltas, *, replacing, semantics=Semantics.OVERWRITE, expected_metadata_generation=None, policy=None,
           request_id=None, wait=False, store=None, progress=None):
    """Applies deltas to a revision and publishes the complete generation that results in its place; answers its record, READY
    when this returns. `replacing` is an identity, or the short name of a lineage, of which the deltas' base generation is meant.

    `wait` waits until the base is gone. What the deltas do not fit, and those that were applied before, are refused by an
    error that names the tensor; nothing of the next generation stays then."""
    store = store_of(store)
    deltas = list(deltas)
    if not deltas:
        raise invalid("there is no delta to apply")
    base = _base_of(replacing, deltas)
    described, kept = [], []
    for delta in deltas:
        if not isinstance(delta, SparseDelta):
            raise invalid(f"{delta!r} is no delta; give a ballast.delta.SparseDelta")
        members = []
        for name in _MEMBERS:
            memory = memory_of(getattr(delta, name), f"{delta.tensor_id} ({name})")
            members.append((memory.address, memory.nbytes))
            kept.append(memory)
        try:
            described.append((json.dumps(dict(delta.metadata)), *members))
        except TypeError as error:
            raise invalid(f"the metadata of {delta!r} is no JSON: {error}", tensor=delta.tensor_id) from error
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
    generation = generation_of(deltas[0].base_generation, "base_generation")
    return WeightRevisionIdentity.parse(replacing if "#" in replacing else f"{replacing}#{generation}")


def _elements(values, tensor_id, dtype):
    """Values as a numpy array of one element each, and their dtype's name."""
    what = f"tensor {tensor_id!r}"
    if hasattr(values, "is_contiguous"):
        values = values.contiguous()
        memory = memory_of(values, tensor_id)
        array = np.frombuffer(ctypes.string_at(memory.address, memory.nbytes), f"u{values.element_size()}")
        shape, found = tuple(values.shape), memory.dtype
    else:
        array = np.asarray(values)
        shape, found = array.shape, None if dtype is not None else known_dtype(array.dtype, what)
    if len(shape) != 1:
        raise invalid(f"{what}: values have the shape {list(shape)}, expected [nnz]", tensor=tensor_id)
    name = found if dtype is None else known_dtype(dtype, what)
    if byte_count(name, (1,)) != array.dtype.itemsize:
        raise invalid(f"{what}: values are {array.dtype}, which has not the size of {name}", tensor=tensor_id)
    return array, name


__all__ = ["Semantics", "SparseDelta", "between", "of_entries", "upsert"]

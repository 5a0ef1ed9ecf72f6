"""Distributed tensors as storage sees them: a device mesh and, for each tensor, `Shard(dim)` or `Replicate()` along every
dimension of the mesh, become a placement and the buffers bound to it.

Nothing here needs torch; a torch `DeviceMesh`, `DTensor`, `Shard` or `Replicate` is taken where there is one. A dimension is
cut as `torch.chunk` cuts it: into pieces of equal length, rounded up, so the last ones may be shorter or empty (length 6 over
4 ranks is 2, 2, 2, 0).
"""

import dataclasses
from typing import Any, Mapping, Tuple

from ._arrays import check, memory_of
from ._errors import invalid
from ._placement import KINDS, Participant, WeightBinding, WeightPlacement
from ._snapshot import ArrayAdapter, ParallelAxis, TensorSpec


@dataclasses.dataclass(frozen=True)
class Shard:
    """Cut along a dimension of the tensor."""

    dim: int


@dataclasses.dataclass(frozen=True)
class Replicate:
    """A complete copy on every rank."""


def chunk(length, pieces, at):
    """Offset and length of a piece: (0, 2), (2, 2), (4, 2), (6, 0) for length 6 over 4."""
    size = -(-length // pieces)
    start = min(at * size, length)
    return start, min(size, length - start)


class DeviceMesh:
    """Ranks in an n-dimensional grid, row-major, with a name for each dimension.

    The names `dp`, `pp`, `ep` and `tp` say what kind of parallelism a dimension is; `kinds` says it for other names
    (`{"model": "tp"}`).
    """

    def __init__(self, shape, names=None, *, kinds=None):
        self.shape = tuple(int(extent) for extent in shape)
        if any(extent < 1 for extent in self.shape):
            raise invalid(f"a device mesh of shape {self.shape}; every dimension has at least one rank")
        default = {1: ("tp",), 2: ("dp", "tp"), 3: ("dp", "pp", "tp"), 4: KINDS}
        self.names = tuple(names) if names is not None else default.get(len(self.shape), ())
        if len(self.names) != len(self.shape):
            raise invalid(f"a device mesh of shape {self.shape} has {len(self.names)} names; give one for each dimension")
        kinds = {} if kinds is None else kinds
        self.kinds = tuple(kinds.get(name, name if name in KINDS else None) for name in self.names)

    @classmethod
    def of(cls, mesh, kinds=None):
        """`mesh` itself, or what a torch `DeviceMesh` says."""
        if isinstance(mesh, cls):
            return mesh
        if hasattr(mesh, "mesh") and hasattr(mesh, "mesh_dim_names"):
            return cls(tuple(mesh.mesh.shape), mesh.mesh_dim_names, kinds=kinds)
        raise invalid(f"{type(mesh).__name__} is no device mesh; give a ballast.dtensor.DeviceMesh or torch's")

    @property
    def size(self):
        """How many ranks."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def coordinates(self, rank):
        """Where a rank stands in the grid."""
        found = []
        for extent in reversed(self.shape):
            found.append(rank % extent)
            rank //= extent
        return tuple(reversed(found))

    def __repr__(self):
        return f"<DeviceMesh {dict(zip(self.names, self.shape))}>"


def _placements(given, mesh, name, rank):
    if len(given) != len(mesh.shape):
        raise invalid(f"tensor {name!r} has {len(given)} placements, the mesh {len(mesh.shape)} dimensions", tensor=name)
    found = []
    for placement in given:
        # torch's own, by their names and fields, so that torch need not be there.
        kind = type(placement).__name__
        if isinstance(placement, Shard) or kind == "Shard":
            dim = placement.dim + rank if placement.dim < 0 else placement.dim
            if not 0 <= dim < rank:
                raise invalid(f"tensor {name!r} has {rank} dimensions and is cut along {placement.dim}", tensor=name)
            found.append(Shard(dim))
        elif isinstance(placement, Replicate) or kind == "Replicate":
            found.append(Replicate())
        else:
            raise invalid(f"tensor {name!r} is placed by {placement!r}; only Shard and Replicate can be stored (reduce partial sums first)", tensor=name)
    return tuple(found)


def box_of(mesh, placements, shape, rank):
    """First element and extent of what a rank holds."""
    offset, extent = [0] * len(shape), list(shape)
    for at, size, placement in zip(mesh.coordinates(rank), mesh.shape, placements):
        if isinstance(placement, Shard):
            start, length = chunk(extent[placement.dim], size, at)
            offset[placement.dim] += start
            extent[placement.dim] = length
    return tuple(offset), tuple(extent)


def _axes(mesh, placements):
    """The parallel axes of a tensor, or `None` when they can not say what its placements do."""
    axes = []
    for kind, size, placement in zip(mesh.kinds, mesh.shape, placements):
        if kind is None:
            return None
        if isinstance(placement, Replicate):
            axes.append(ParallelAxis(kind, "replicated"))
        elif kind == "tp" or (kind == "ep" and placement.dim == 0):
            axes.append(ParallelAxis(kind, "split", placement.dim))
        elif size > 1:
            return None
        else:
            axes.append(ParallelAxis(kind, "replicated"))
    dims = [axis.dim for axis in axes if axis.semantics == "split"]
    if len(set(dims)) != len(dims) or len(set(mesh.kinds)) != len(mesh.kinds):
        return None
    return tuple(sorted(axes, key=lambda axis: KINDS.index(axis.kind)))


def rank_name(rank):
    """The participant that a rank is."""
    return f"rank{rank}"


def placement(mesh, tensors: Mapping[str, Tuple[Any, Tuple[int, ...], Any]], *, kinds=None):
    """The placement of tensors over a mesh: `tensors` gives (dtype, whole shape, placements) by name."""
    mesh = DeviceMesh.of(mesh, kinds)
    specs, boxes, exact = [], {}, True
    for name, (dtype, shape, placements) in tensors.items():
        shape = tuple(int(extent) for extent in shape)
        placements = _placements(placements, mesh, name, len(shape))
        axes = _axes(mesh, placements)
        exact = exact and axes is not None
        specs.append(TensorSpec(name, dtype, shape, parallel_axes=axes or ()))
        boxes[name] = [box_of(mesh, placements, shape, rank) for rank in range(mesh.size)]
    sizes = {kind: size for kind, size in zip(mesh.kinds, mesh.shape)} if exact else {"tp": mesh.size}
    participants = []
    for rank in range(mesh.size):
        own = dict(zip(mesh.kinds, mesh.coordinates(rank))) if exact else {"tp": rank}
        held = {name: (found[rank],) for name, found in boxes.items()}
        participants.append(Participant(rank_name(rank), own, held))
    if not exact:
        specs = [dataclasses.replace(spec, parallel_axes=()) for spec in specs]
    return WeightPlacement(specs, participants, sizes=sizes, exact=exact)


class ShardedTensor:
    """The pieces of one distributed tensor that this process has, by rank: what a torch `DTensor` is for one rank."""

    def __init__(self, mesh, placements, dtype, shape, local):
        self.mesh = DeviceMesh.of(mesh)
        self.shape = tuple(int(extent) for extent in shape)
        self.placements = _placements(placements, self.mesh, "tensor", len(self.shape))
        self.dtype = dtype
        self.local = dict(local)

    @classmethod
    def scatter(cls, mesh, placements, array):
        """Every rank's piece of an array, as views of it (copies where a piece is not contiguous)."""
        mesh = DeviceMesh.of(mesh)
        checked = _placements(placements, mesh, "tensor", array.ndim)
        local = {}
        for rank in range(mesh.size):
            offset, extent = box_of(mesh, checked, array.shape, rank)
            piece = array[tuple(slice(start, start + length) for start, length in zip(offset, extent))]
            local[rank] = piece if piece.flags.c_contiguous else piece.copy(order="C")
        return cls(mesh, placements, memory_of(array[:0] if array.ndim else array, "tensor").dtype, array.shape, local)

    def __repr__(self):
        return f"<ShardedTensor {self.dtype} {list(self.shape)} by {list(self.placements)} over {self.mesh}, ranks {sorted(self.local)} here>"


def _torch_dtensor(tensor):
    """What is needed of a torch DTensor; `None` when it is none."""
    if type(tensor).__name__ != "DTensor" or not hasattr(tensor, "device_mesh"):
        return None
    mesh = DeviceMesh.of(tensor.device_mesh)
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return ShardedTensor(mesh, tensor.placements, str(tensor.dtype), tensor.shape, {})
    rank = 0
    for at, extent in zip(coordinates, mesh.shape):
        rank = rank * extent + at
    return ShardedTensor(mesh, tensor.placements, str(tensor.dtype), tensor.shape, {rank: tensor.to_local()})


class DTensorAdapter(ArrayAdapter):
    """Reads distributed tensors (`ShardedTensor` and torch's `DTensor`) in the boxes in which they are held, and plain arrays."""

    def describe(self, name, tensor):
        sharded = tensor if isinstance(tensor, ShardedTensor) else _torch_dtensor(tensor)
        if sharded is None:
            return super().describe(name, tensor)
        return placement(sharded.mesh, {name: (sharded.dtype, sharded.shape, sharded.placements)}).stored()[0]

    def shards(self, spec, tensor):
        sharded = tensor if isinstance(tensor, ShardedTensor) else _torch_dtensor(tensor)
        if sharded is None:
            yield from super().shards(spec, tensor)
            return
        if sharded.shape != spec.shape:
            raise invalid(f"tensor {spec.name!r} has shape {list(sharded.shape)}, announced was {list(spec.shape)}", tensor=spec.name)
        whole = ((0,) * len(spec.shape), spec.shape)
        announced = spec.fragments or (whole,)
        sent = set()
        for rank in sorted(sharded.local):
            box = box_of(sharded.mesh, sharded.placements, sharded.shape, rank)
            if 0 in box[1] and box not in announced:
                continue
            if box not in announced:
                raise invalid(f"tensor {spec.name!r} was announced without the box {box}", tensor=spec.name)
            # Replicas hold the same bytes; one of them is enough.
            if box not in sent:
                sent.add(box)
                yield (box if spec.fragments else None), sharded.local[rank]


def bindings(target, buffers, rank=None):
    """The buffers of one rank, or of all ranks (a dict by rank), bound to a placement that `placement` made."""
    by_rank = buffers if rank is None else {rank: buffers}
    bound = []
    for own, tensors in by_rank.items():
        local = target.local(rank_name(own))
        for name, buffer in tensors.items():
            boxes = local.fragments.get(name)
            if boxes is None:
                raise invalid(f"rank {own} holds no tensor {name!r}", tensor=name)
            check(memory_of(buffer, name), name, target.tensors[name].dtype, boxes[0][1], writable=True)
            bound.append(WeightBinding(name, buffer, boxes[0], rank_name(own)))
    return bound


__all__ = ["DTensorAdapter", "DeviceMesh", "Replicate", "Shard", "ShardedTensor", "bindings", "box_of", "chunk", "placement", "rank_name"]

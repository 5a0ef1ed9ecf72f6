"""What a put is told: the revision's name and its tensors (the snapshot), and how tensors of some framework are read (the
adapter). A snapshot holds no bytes; they come with `weight_put_tensor`, one tensor at a time."""

import dataclasses
import operator
from typing import Any, Iterable, Mapping, Optional, Tuple

from ._arrays import byte_count, check, known_dtype, memory_of
from ._errors import invalid
from ._records import WeightRevisionIdentity, generation_of


@dataclasses.dataclass(frozen=True)
class ParallelAxis:
    """What one kind of parallelism (`dp`, `pp`, `ep`, `tp`) does to a tensor: `split` along `dim`, `replicated`, `ownership`."""

    kind: str
    semantics: str
    dim: Optional[int] = None

    def _to_wire(self):
        return {"kind": self.kind, "semantics": self.semantics, **({} if self.dim is None else {"dim": self.dim})}


Box = Tuple[Tuple[int, ...], Tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of a snapshot: its type by its safetensors name, its whole shape, and the boxes in which it comes
    (first element and extent of each; none: the whole tensor is one)."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    aliases: Tuple[str, ...] = ()
    layer_id: Optional[int] = None
    expert_id: Optional[int] = None
    parallel_axes: Tuple[ParallelAxis, ...] = ()
    fragments: Tuple[Box, ...] = ()

    def __post_init__(self):
        tensor_name(self.name)
        object.__setattr__(self, "dtype", known_dtype(self.dtype, self.name))
        object.__setattr__(self, "shape", extents(self.shape, self.name))
        boxes = tuple((extents(offset, self.name), extents(shape, self.name)) for offset, shape in self.fragments)
        object.__setattr__(self, "fragments", boxes)
        object.__setattr__(self, "aliases", tuple(self.aliases))
        object.__setattr__(self, "parallel_axes", tuple(self.parallel_axes))

    @property
    def nbytes(self):
        """Bytes of the whole tensor."""
        return byte_count(self.dtype, self.shape)

    def _to_wire(self):
        return {
            "name": self.name, "dtype": self.dtype, "shape": self.shape, "aliases": self.aliases, "layer_id": self.layer_id,
            "expert_id": self.expert_id, "parallel_axes": [axis._to_wire() for axis in self.parallel_axes],
            "fragments": self.fragments,
        }


def tensor_name(name):
    """The name of a tensor: a string that is not empty."""
    if not isinstance(name, str) or not name:
        raise invalid(f"a tensor's name is {name!r}; give a string")
    return name


def extents(shape, name, what="shape"):
    """A shape or an offset: whole numbers from 0 on."""
    try:
        numbers = tuple(operator.index(extent) for extent in shape)
    except TypeError:
        raise invalid(f"tensor {name!r} has the {what} {shape!r}; give a sequence of whole numbers", tensor=name) from None
    if any(not 0 <= extent < 1 << 63 for extent in numbers):
        raise invalid(f"tensor {name!r} has the {what} {numbers}; extents are from 0 to 2^63 - 1", tensor=name)
    return numbers


def names_of(participants):
    """The names of participants."""
    if isinstance(participants, str) or not isinstance(participants, Iterable):
        raise invalid(f"participants is {participants!r}; give a list of names")
    return tuple(participants)


@dataclasses.dataclass(frozen=True)
class WeightSharing:
    """How several participants put one snapshot. `participants` are those that have to bring a part, named by the one that
    coordinates the put; empty for a part. Made by `WeightSnapshot.shared` and `WeightSnapshot.part`."""

    participants: Tuple[str, ...] = ()
    participant: Optional[str] = None
    session: Optional[str] = None
    patience: float = 30.0

    def __post_init__(self):
        object.__setattr__(self, "participants", names_of(self.participants))
        names = (*self.participants, *(() if self.participant is None else (self.participant,)))
        for name in names:
            if not isinstance(name, str):
                raise invalid(f"a participant is {name!r}; give its name")
        if self.participants:
            if len(set(self.participants)) != len(self.participants):
                raise invalid("participants names one twice; name each of them once")
            if self.participant is not None and self.participant not in self.participants:
                raise invalid(f"participant {self.participant!r} is not among the {len(self.participants)} participants")
        elif self.participant is None or not isinstance(self.session, str):
            raise invalid("a part has a participant's name and the session that it joins")

    def _to_wire(self):
        return {
            "participants": self.participants, "participant": self.participant, "session": self.session,
            "patience_seconds": self.patience,
        }


@dataclasses.dataclass(frozen=True)
class WeightSnapshot:
    """A complete generation of a model about to be published. The tenant comes with the put."""

    namespace: str
    resource_id: str
    revision: str
    weight_generation: int
    tensors: Tuple[TensorSpec, ...]
    sharing: Optional[WeightSharing] = None

    def __post_init__(self):
        generation_of(self.weight_generation, "weight_generation")
        object.__setattr__(self, "tensors", tuple(self.tensors))
        seen = set()
        for spec in self.tensors:
            for name in (spec.name, *spec.aliases):
                if name in seen:
                    raise invalid(f"the tensor name {name!r} stands twice in the snapshot", tensor=name)
                seen.add(name)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Any],
        *,
        resource_id: str,
        weight_generation: int,
        namespace: str = "default",
        revision: str = "main",
        adapter: Any = None,
        aliases: Mapping[str, Iterable[str]] = {},
    ):
        """A snapshot of tensors that are at hand; `aliases` gives further names of tied ones."""
        adapter = ArrayAdapter() if adapter is None else adapter
        specs = [
            dataclasses.replace(adapter.describe(name, tensor), aliases=tuple(aliases.get(name, ())))
            for name, tensor in tensors.items()
        ]
        return cls(namespace, resource_id, revision, weight_generation, tuple(specs))

    def shared(self, participants, *, participant=None, session=None, patience=30.0):
        """The same for the one that coordinates a put of several participants: it names them all, and which of them it is
        itself, if any. Its writer has the `session` for the others. Its commit waits for their parts: as long as they are at
        work, and `patience` seconds for those that are silent or have not come, which it then names. A rank that has joined is
        silent when its process was not heard of for 30 seconds; one that hangs while its process lives is waited for without
        end, so a job that has a deadline interrupts the commit.

        A coordinator that comes again with its own `session` takes it over as it stands; the run before it is refused from
        then on. After an error it leaves such a session open; only `abort()` deletes what is in it."""
        participants = names_of(participants)
        if not participants:
            raise invalid("participants is empty; name everyone who brings a part")
        return dataclasses.replace(self, sharing=WeightSharing(participants, participant, session, patience))

    def part(self, participant, session):
        """The same for a participant that joins the session of the coordinator's writer. It describes the same whole model,
        and puts the boxes that it holds; what several hold is sent once, and has to be equal."""
        return dataclasses.replace(self, sharing=WeightSharing((), participant, session))

    @classmethod
    def assemble(cls, snapshots):
        """The whole model from what each participant has described of it, as their job has gathered it: every tensor that
        one of them describes, in all of its boxes."""
        snapshots = list(snapshots)
        if not snapshots:
            raise invalid("there are no snapshots to assemble")
        first, specs, boxes = snapshots[0], {}, {}
        for snapshot in snapshots:
            if snapshot.identity() != first.identity():
                raise invalid(f"the snapshots are of {first.identity()} and of {snapshot.identity()}")
            for spec in snapshot.tensors:
                known = specs.setdefault(spec.name, spec)
                if dataclasses.replace(spec, fragments=()) != dataclasses.replace(known, fragments=()):
                    raise invalid(f"tensor {spec.name!r} is described as {known} and as {spec}", tensor=spec.name)
                if bool(spec.fragments) != bool(known.fragments):
                    raise invalid(f"tensor {spec.name!r} is described as a whole and in boxes", tensor=spec.name)
                boxes.setdefault(spec.name, {}).update((box, None) for box in spec.fragments)
        tensors = (dataclasses.replace(spec, fragments=tuple(sorted(boxes[name]))) for name, spec in sorted(specs.items()))
        return cls(first.namespace, first.resource_id, first.revision, first.weight_generation, tuple(tensors))

    def identity(self, tenant_id="default"):
        """The identity of the revision that this becomes."""
        return WeightRevisionIdentity(tenant_id, self.namespace, self.resource_id, self.revision, self.weight_generation)

    @property
    def nbytes(self):
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors)

    def __repr__(self):
        name = f"{self.namespace}/{self.resource_id}@{self.revision}#{self.weight_generation}"
        return f"<WeightSnapshot {name}: {len(self.tensors)} tensors, {self.nbytes} bytes>"


class ArrayAdapter:
    """Reads plain arrays: numpy, torch on the CPU, anything with DLPack or the buffer protocol. An adapter of your own has
    the same two methods."""

    def describe(self, name, tensor):
        """The `TensorSpec` of a tensor."""
        memory = memory_of(tensor, name)
        if memory.dtype is None:
            raise invalid(f"tensor {name!r} is plain bytes; say its dtype and shape with a TensorSpec", tensor=name)
        return TensorSpec(name, memory.dtype, tuple(memory.shape))

    def shards(self, spec, tensor):
        """The boxes of a tensor and their memory, as (box or None, buffer). A tensor that was announced in several boxes
        and comes whole is cut here: rows of the first dimension without a copy, other boxes with one."""
        if len(spec.fragments) < 2:
            yield (spec.fragments[0] if spec.fragments else None), tensor
            return
        if not hasattr(tensor, "__getitem__") or isinstance(tensor, (bytes, bytearray, memoryview)):
            raise invalid(f"tensor {spec.name!r} is plain bytes and can not be cut into its boxes", tensor=spec.name)
        check(memory_of(tensor, spec.name), spec.name, spec.dtype, spec.shape, writable=False)
        for offset, shape in spec.fragments:
            cut = tensor[tuple(slice(start, start + extent) for start, extent in zip(offset, shape))]
            yield (offset, shape), contiguous(cut)

    def __repr__(self):
        return f"<{type(self).__name__}>"


def contiguous(array):
    """`array`, or a contiguous copy of it."""
    if hasattr(array, "is_contiguous"):
        return array.contiguous()
    flags = getattr(array, "flags", None)
    if flags is not None and not flags.c_contiguous:
        return array.copy(order="C")
    return array

"""Who holds which box of which tensor: the shape in which a revision is wanted, and the buffers bound to it."""

import dataclasses
import json
from typing import Any, Mapping, Optional, Tuple

from . import _native
from ._arguments import optional_text, text
from ._arrays import check, memory_of
from ._errors import invalid
from ._snapshot import Box, ParallelAxis, TensorSpec, tensor_name

KINDS = ("dp", "pp", "ep", "tp")


@dataclasses.dataclass(frozen=True)
class Participant:
    """One process that holds weights: its name, its rank by kind of parallelism, and its boxes of each tensor."""

    participant_id: str
    rank: Mapping[str, int]
    fragments: Mapping[str, Tuple[Box, ...]]


class WeightPlacement:
    """A complete placement: tensors, and for each participant the boxes that it holds.

    `sizes` says how many ranks each kind of parallelism has. `exact` is false for layouts that the axes `dp`, `pp`, `ep`
    and `tp` can not describe (two splits of one dimension, say); these are read one participant at a time.
    """

    def __init__(self, tensors, participants, *, sizes=None, placement_set_id="python", exact=True):
        self.tensors = {spec.name: spec for spec in tensors}
        self.participants = {text(own.participant_id, "participant_id"): own for own in participants}
        self.sizes = {kind: 1 for kind in KINDS}
        self.sizes.update(sizes or {})
        self.placement_set_id = text(placement_set_id, "placement_set_id")
        self.exact = exact
        self._native = {}
        if not self.participants:
            raise invalid("a placement needs at least one participant")
        for own in self.participants.values():
            for name in own.fragments:
                if name not in self.tensors:
                    raise invalid(f"participant {own.participant_id!r} holds tensor {name!r}, which the placement has not", tensor=name)

    @classmethod
    def whole(cls, tensors):
        """One participant that holds every tensor as a whole."""
        specs = [dataclasses.replace(spec, fragments=(), parallel_axes=()) for spec in tensors]
        boxes = {spec.name: (((0,) * len(spec.shape), spec.shape),) for spec in specs}
        return cls(specs, [Participant("rank0", {}, boxes)])

    @classmethod
    def from_axes(cls, tensors, sizes, *, owns=None):
        """A participant for every combination of ranks, `dp0-pp0-ep0-tp0` and so on; boxes follow from the axes of each
        tensor. `owns(spec, rank)` says who holds a tensor at all; by default everyone."""
        from .dtensor import chunk

        sizes = {**{kind: 1 for kind in KINDS}, **sizes}
        ranks = [{}]
        for kind in KINDS:
            ranks = [{**rank, kind: at} for rank in ranks for at in range(sizes[kind])]
        participants = []
        for rank in ranks:
            boxes = {}
            for spec in tensors:
                if owns is not None and not owns(spec, rank):
                    continue
                offset, shape = [0] * len(spec.shape), list(spec.shape)
                for axis in spec.parallel_axes:
                    if axis.semantics == "split":
                        offset[axis.dim], shape[axis.dim] = chunk(spec.shape[axis.dim], sizes[axis.kind], rank[axis.kind])
                boxes[spec.name] = ((tuple(offset), tuple(shape)),)
            participants.append(Participant("-".join(f"{kind}{rank[kind]}" for kind in KINDS), rank, boxes))
        return cls(tensors, participants, sizes=sizes)

    def local(self, participant_id):
        """What one participant holds, for a `weight_get` in its own process."""
        if participant_id not in self.participants:
            raise invalid(f"participant {participant_id!r} is not in the placement; there are {', '.join(self.participants)}")
        return LocalPlacement(self, participant_id)

    def stored(self):
        """The tensors as one copy of this placement would be stored: every different box once."""
        boxes = {name: {} for name in self.tensors}
        for own in self.participants.values():
            for name, held in own.fragments.items():
                boxes[name].update((box, None) for box in held)
        specs = []
        for name, spec in self.tensors.items():
            whole = ((0,) * len(spec.shape), spec.shape)
            fragments = tuple(box for box in boxes[name] if 0 not in box[1])
            specs.append(dataclasses.replace(spec, fragments=() if fragments in ((), (whole,)) else fragments))
        return tuple(specs)

    def _to_wire(self):
        numbers = {name: number for number, name in enumerate(self.tensors)}
        participants = [
            {
                "participant_id": own.participant_id,
                "rank": {kind: own.rank.get(kind, 0) for kind in KINDS},
                "fragments": [(numbers[name], *box) for name, boxes in own.fragments.items() for box in boxes],
            }
            for own in self.participants.values()
        ]
        tensors = [{**spec._to_wire(), "fragments": []} for spec in self.tensors.values()]
        return {
            "placement_set_id": self.placement_set_id, "sizes": self.sizes, "participants": participants, "tensors": tensors,
            "exact": self.exact,
        }

    def _for(self, identity):
        if identity not in self._native:
            self._native = {identity: _native.Placement(json.dumps(identity._to_wire()), json.dumps(self._to_wire()))}
        return self._native[identity]

    def __repr__(self):
        return f"<WeightPlacement of {len(self.tensors)} tensors over {len(self.participants)} participants>"


class LocalPlacement:
    """What one participant of a placement holds."""

    def __init__(self, placement, participant_id):
        self.placement = placement
        self.participant_id = participant_id

    @property
    def fragments(self):
        """The boxes that are held, by tensor."""
        return self.placement.participants[self.participant_id].fragments

    def empty(self, allocate):
        """A buffer for every box, made by `allocate(shape, spec)`; a dict as `weight_get` takes it."""
        buffers = {}
        for name, boxes in self.fragments.items():
            made = [allocate(shape, self.placement.tensors[name]) for _, shape in boxes]
            buffers[name] = made[0] if len(made) == 1 else made
        return buffers

    def __repr__(self):
        return f"<LocalPlacement of {self.participant_id!r}, {len(self.fragments)} tensors>"


@dataclasses.dataclass(frozen=True)
class WeightBinding:
    """A buffer of one box of one tensor; without a box: of the only one that the participant has."""

    tensor: str
    buffer: Any
    box: Optional[Box] = None
    participant_id: Optional[str] = None


def bindings_of(placement, given):
    """The bindings that a caller gave, each resolved to its box and checked against its tensor; memory is kept by what is
    returned: [(tensor, participant, box, dtype, memory)]."""
    if given is None:
        raise invalid("target_bindings is None; give a buffer for every tensor, by name")
    local = placement if isinstance(placement, LocalPlacement) else None
    whole = local.placement if local else placement
    bindings = []
    if isinstance(given, Mapping):
        for name, value in given.items():
            several = isinstance(value, (list, tuple))
            boxes = _boxes(local, whole, name)
            if several and boxes is not None and len(boxes) != len(value):
                raise invalid(f"tensor {name!r} has {len(boxes)} boxes here and {len(value)} buffers", tensor=name)
            for at, buffer in enumerate(value if several else [value]):
                box = boxes[at] if boxes and (several or len(boxes) == 1) else None
                bindings.append(WeightBinding(name, buffer, box))
    else:
        bindings = list(given)
    resolved = []
    for binding in bindings:
        if not isinstance(binding, WeightBinding):
            raise invalid(f"target_bindings holds a {type(binding).__name__}; give a dict of buffers or WeightBinding objects")
        name = tensor_name(binding.tensor)
        memory = memory_of(binding.buffer, name)
        spec = whole.tensors.get(name) if whole is not None else None
        box = binding.box
        if box is None and whole is not None:
            owner = whole.local(binding.participant_id) if local is None and binding.participant_id else local
            boxes = _boxes(owner, whole, name)
            box = boxes[0] if boxes and len(boxes) == 1 else None
        if not memory.writable:
            raise invalid(f"tensor {name!r}: the target buffer is read-only; give one that can be written", tensor=name)
        if spec is not None and box is not None:
            check(memory, name, spec.dtype, box[1], writable=True)
        # The participant matters only where several are read at once.
        participant = optional_text(binding.participant_id, "participant_id") if local is None else None
        resolved.append((name, participant, box, memory))
    return resolved


def _boxes(local, whole, name):
    if local is not None:
        return local.fragments.get(name)
    if whole is not None and len(whole.participants) == 1:
        return next(iter(whole.participants.values())).fragments.get(name)
    return None


__all__ = ["Box", "LocalPlacement", "ParallelAxis", "Participant", "TensorSpec", "WeightBinding", "WeightPlacement"]

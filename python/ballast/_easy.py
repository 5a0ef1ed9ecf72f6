"""Everyday helpers beside the store: open, load, save, wait."""

import json
import os
import threading
import weakref
from collections.abc import Mapping

import numpy as np

from ._arguments import names as several, seconds, shown, text
from ._arrays import array_of, memory_of, numpy_dtype
from ._errors import invalid
from ._records import (
    WeightManifest, WeightRevisionIdentity, WeightRevisionMetadata, WeightUpsertMode, generation_of, human_bytes, one_of,
)
from ._snapshot import ArrayAdapter, WeightSnapshot, contiguous, expect_tensors
from ._store import LEASE_TTL_MS, WeightStore, WeightWriter, policy_text, reading_text

open_revisions = weakref.WeakSet()

_default = {}
_default_lock = threading.Lock()


def default_store():
    """The store that helpers use when they are given none: one for each NATS server, shared."""
    key = (os.getpid(), os.environ.get("BALLAST_NATS"))
    with _default_lock:
        if key not in _default:
            _default[key] = WeightStore()
        return _default[key]


def store_of(store):
    """A store, or the default one."""
    if store is None:
        return default_store()
    if isinstance(store, str):
        return WeightStore(store)
    if not isinstance(store, WeightStore):
        raise invalid(f"store is a {type(store).__name__}; give a ballast.WeightStore or the address of a NATS server")
    return store


def name_of(name):
    """A short name, or the identity that it is given by."""
    if isinstance(name, (str, WeightRevisionIdentity)):
        return name if isinstance(name, WeightRevisionIdentity) else text(name, "name")
    raise invalid(f"name is {shown(name)}; give a string, or a WeightRevisionIdentity")


def resolve(name, store):
    """The identity that a name stands for just now: the generation it names, or the newest READY one."""
    name = name_of(name)
    if isinstance(name, WeightRevisionIdentity):
        return name
    return WeightRevisionIdentity._from_wire(json.loads(store._connection.client(store._cancel).resolve(name, store._cancel)))


class OpenRevision(Mapping):
    """A revision opened in place: a read-only mapping of names to zero-copy numpy arrays.

    What is in this host's memory is mapped, the rest was read when it was opened. The lease lives as long as the last array:
    `close()` (or the end of a `with` block) lets go of it, and arrays that are still there stay valid.
    """

    # Two of the same revision are two leases.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, native):
        self._native = native
        self.revision = WeightRevisionMetadata._from_wire(json.loads(native.revision()))
        self._names = native.names()
        self._known = frozenset(self._names)
        open_revisions.add(self)

    @property
    def identity(self):
        """Which revision."""
        return self.revision.identity

    @property
    def generation(self):
        """Its weight generation."""
        return self.identity.weight_generation

    @property
    def manifest(self):
        """Its manifest."""
        return WeightManifest(bytes(self._native.manifest()), self.identity, self.revision.manifest.sha256)

    @property
    def files(self):
        """The paths of the files that travel with the tensors; `file` reads one."""
        return tuple(self._native.files())

    @property
    def mapped_bytes(self):
        """Bytes that are mapped, not copied."""
        return self._native.mapped_bytes

    @property
    def lease_lapsed(self):
        """Whether the lease is known to have ended. Arrays stay valid: the bytes of a revision never change."""
        return self._native.lease_lapsed

    def file(self, path):
        """The bytes of another file, as a read-only array."""
        view = self._native.file(text(path, "path"))
        if view is None:
            raise KeyError(path)
        return array_of(view)

    def dtype(self, name):
        """The element type of a tensor by its safetensors name, also where numpy has none."""
        return self.manifest.tensors[name].dtype

    def __getitem__(self, name):
        if name not in self._known:
            raise KeyError(name)
        view = self._native.tensor(name)
        return array_of(view) if view is not None else self._assemble(name)

    def _assemble(self, name):
        # Stored in several boxes: put together in memory of our own.
        described = self.manifest.tensors[name]
        dtype = numpy_dtype(described.dtype)
        extra = () if dtype is not None else (described.nbytes // max(1, int(np.prod(described.shape))),)
        whole = np.empty((*described.shape, *extra), dtype=np.uint8 if dtype is None else dtype)
        for offset, shape, view in self._native.fragments(name):
            if view.nbytes:
                whole[tuple(slice(start, start + extent) for start, extent in zip(offset, shape))] = array_of(view)
        whole.flags.writeable = False
        return whole

    def __iter__(self):
        return iter(self._names)

    def __len__(self):
        return len(self._names)

    def close(self):
        """Lets go of the revision. When no array is left the lease ends now, and `LeaseExpiredError` says if it had lapsed
        while the revision was open; otherwise it ends with the last array."""
        open_revisions.discard(self)
        return self._native.close()

    def _let_go(self):
        try:
            self.close()
        except Exception:
            pass  # At the end of the process there is nobody to tell; the lease ends by itself.

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.close()
        return False

    def __repr__(self):
        size = human_bytes(self.revision.manifest.logical_bytes)
        return f"<OpenRevision {self.identity}: {len(self)} tensors, {size}>"


def open(name, *, store=None, holder=None, lease_ttl_ms=LEASE_TTL_MS, verify="auto", progress=None):
    """Opens a revision in place. `name` is a short name (the newest READY generation, or the one it names) or an identity."""
    store, reading = store_of(store), reading_text(holder, lease_ttl_ms, verify)
    identity = resolve(name, store)
    native = store._connection.client(store._cancel).open(
        json.dumps(identity._to_wire()), reading, progress or store._connection.progress, store._cancel)
    return OpenRevision(native)


class Weights(dict):
    """Zero-copy, read-only arrays by tensor name. `generation` and `identity` say of which revision; its lease lives as
    long as the last of the arrays."""

    def __init__(self, opened, names=None):
        names = list(opened) if names is None else list(names)
        for name in names:
            if name not in opened:
                raise invalid(f"{opened.identity} has no tensor {name!r}", tensor=name)
        super().__init__((name, opened[name]) for name in names)
        self.revision = opened.revision
        self.dtypes = {name: described.dtype for name, described in opened.manifest.tensors.items() if name in self}

    @property
    def identity(self):
        """Which revision."""
        return self.revision.identity

    @property
    def generation(self):
        """Its weight generation."""
        return self.identity.weight_generation

    def __repr__(self):
        return f"<Weights of {self.identity}: {len(self)} tensors>"


def load(name, *, names=None, store=None, holder=None, lease_ttl_ms=LEASE_TTL_MS, verify="auto", progress=None):
    """A revision's tensors (or those that `names` lists) as zero-copy, read-only arrays."""
    names = None if names is None else several(names, "names")
    opened = open(name, store=store, holder=holder, lease_ttl_ms=lease_ttl_ms, verify=verify, progress=progress)
    weights = Weights(opened, names)
    # What is left of the lease is the arrays'.
    opened.close()
    return weights


def wait(name, min_generation=1, *, timeout=None, store=None):
    """Waits until a generation from `min_generation` on is READY and answers the identity of the newest one; never an older
    one. After `timeout` seconds it raises `NotReadyError`."""
    store, name = store_of(store), str(name_of(name))
    least = generation_of(min_generation, "min_generation")
    timeout = None if timeout is None else seconds(timeout, "timeout")
    found = store._connection.client(store._cancel).wait_ready(name, least, timeout, store._cancel)
    return WeightRevisionIdentity._from_wire(json.loads(found))


def begin(store, name, *, tensors=None, path=None, policy=None, replace=None, progress=None):
    """Begins a put under a short name: of the generation it names, else of the next one; with `replace` in the place of
    the newest READY one. Answers (native writer, identity)."""
    name, policy = name_of(name), policy_text(policy)
    mode = None
    if replace:
        mode = WeightUpsertMode.PUT_FIRST if replace is True else one_of(WeightUpsertMode, replace, "replace")
    client, cancel = store._connection.client(store._cancel), store._cancel
    progress = progress or store._connection.progress
    if mode is not None:
        plan = json.loads(client.plan_replacement(str(name), mode.name, cancel))
        base = WeightRevisionIdentity._from_wire(plan["base"])
        identity = base.generation(plan["target_generation"])
        native = client.upsert(json.dumps({**plan, "wait_completed": False}), tensors, path, policy, None, progress, cancel)
        return native, identity
    if isinstance(name, WeightRevisionIdentity):
        identity = name
    else:
        lineage, _, number = name.partition("#")
        identity = (WeightRevisionIdentity.parse(name) if number
                    else WeightRevisionIdentity._from_wire(json.loads(client.next_generation(lineage, cancel))))
    return client.put(json.dumps(identity._to_wire()), tensors, path, policy, None, progress, cancel), identity


def save(state_dict, name, *, policy=None, replace=None, adapter=None, store=None, progress=None):
    """Publishes a dict of arrays as the next generation of `name` (or the one it names with `#`) and answers its record;
    READY when this returns. Arrays that are the same memory are stored once. `replace=True` retires the newest READY
    generation afterwards (`"delete_first"` deletes it before)."""
    store = store_of(store)
    name = name_of(name)
    expect_tensors(state_dict, "state_dict")
    if not state_dict:
        raise invalid("state_dict is empty; give a dict of at least one array by tensor name")
    adapter = ArrayAdapter() if adapter is None else adapter
    tensors, aliases, first = {}, {}, {}
    for key, value in state_dict.items():
        value = contiguous(value)
        memory = memory_of(value, key) if type(adapter) is ArrayAdapter else None
        place = None if memory is None or not memory.nbytes else (memory.address, memory.nbytes, memory.dtype, memory.shape)
        if place is not None and place in first:
            aliases[first[place]].append(key)
            continue
        if place is not None:
            first[place] = key
        tensors[key] = value
        aliases[key] = []
    snapshot = WeightSnapshot.from_tensors(
        tensors, resource_id="state-dict", weight_generation=1, adapter=adapter, aliases=aliases)
    specs = json.dumps([spec._to_wire() for spec in snapshot.tensors])
    native, identity = begin(store, name, tensors=specs, policy=policy, replace=replace, progress=progress)
    with WeightWriter(native, identity, snapshot, adapter, store._connection) as writer:
        writer._cancel = store._cancel
        for key, value in tensors.items():
            writer.weight_put_tensor(key, value)
    return writer.revision


def get_state_dict(name, *, store=None, holder=None, lease_ttl_ms=LEASE_TTL_MS):
    """A revision's tensors as a dict of writable arrays of the caller's own: a copy, without a lease that goes on."""
    with open(name, store=store, holder=holder, lease_ttl_ms=lease_ttl_ms) as opened:
        return {key: np.array(opened[key]) for key in opened}

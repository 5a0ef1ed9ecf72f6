"""`WeightStore`: the eleven operations on managed weight revisions (RFC, Python API), and nothing else."""

import atexit
import json
import os
import threading
import weakref

from . import _native
from ._arguments import choice, optional_text, ratio, seconds, shown, text, whole
from ._arrays import check, memory_of
from ._errors import BallastError, ConflictError, NotFoundError, invalid
from ._placement import LocalPlacement, WeightPlacement, bindings_of
from ._records import (
    MOVABLE, WeightManifest, WeightOperation, WeightReplacement, WeightResidencyState, WeightRevisionIdentity,
    WeightRevisionMetadata, WeightRevisionPage, WeightRevisionView, WeightStoragePolicy, WeightUpsertMode, generation_of,
    human_bytes, one_of,
)
from ._snapshot import ArrayAdapter, WeightSnapshot

DEFAULT_NATS = "nats://127.0.0.1:4222"
LEASE_TTL_MS = 60_000
_LEASE_TTL_MS_MAX = 86_400_000
_LIST_LIMIT_MAX = 1000
_REQUEST_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
_SETTLE_SECONDS = 2.0

_connections = weakref.WeakSet()


class Connection:
    """A connection that stores share; made on first use, and made anew after a fork."""

    def __init__(self, nats=None, *, name=None, tenant="default", route="best", default_policy=None, progress=None,
                 connect_seconds=_CONNECT_SECONDS, request_seconds=_REQUEST_SECONDS):
        if default_policy is not None and not isinstance(default_policy, WeightStoragePolicy):
            raise invalid(f"default_policy is {shown(default_policy)}; give a WeightStoragePolicy")
        self.nats = optional_text(nats, "nats") or os.environ.get("BALLAST_NATS") or DEFAULT_NATS
        self.progress = progress
        self.default_policy = default_policy
        self._options = json.dumps({
            "nats": self.nats, "name": optional_text(name, "name"), "tenant": text(tenant, "tenant_id"),
            "route": choice(route, "route", ("best", "unix", "rdma", "tcp")),
            "connect_seconds": seconds(connect_seconds, "connect_seconds"),
            "request_seconds": seconds(request_seconds, "request_seconds", zero=False),
            "default_policy": None if default_policy is None else default_policy._to_wire(),
        })
        self._lock = threading.Lock()
        self._client = None
        self._process = None

    def client(self, cancel=None):
        """The native client."""
        with self._lock:
            if self._client is None or self._process != os.getpid():
                self._client = _native.Client(self._options, self._waiting if self.progress else None, cancel)
                self._process = os.getpid()
                _connections.add(self)
            return self._client

    def call(self, tenant, verb, body, cancel=None):
        """Calls a verb; the reply's JSON, parsed."""
        return json.loads(self.client(cancel).call(tenant, verb, json.dumps(body), cancel))

    def about(self, verb, identity, cancel=None, **fields):
        """Calls a verb that names a revision."""
        return self.call(identity.tenant_id, verb, {"identity": identity._to_wire(), **fields}, cancel)

    def _waiting(self, phase, done, total, note):
        if self.progress is not None:
            self.progress(phase, done, total, note)


@atexit.register
def _settle():
    # Leases of readers and imports of writers that nobody closed are let go before the process ends.
    import gc

    from . import _easy

    for opened in list(_easy.open_revisions):
        opened._let_go()
    gc.collect()
    for connection in list(_connections):
        if connection._client is not None and connection._process == os.getpid():
            try:
                connection._client.settle(_SETTLE_SECONDS)
            except BallastError:
                pass


def identity_of(value, what="identity"):
    """A `WeightRevisionIdentity`; a short name with a generation will do as well."""
    if isinstance(value, WeightRevisionIdentity):
        return value
    if isinstance(value, str):
        return WeightRevisionIdentity.parse(value)
    raise invalid(f"{what} is {shown(value)}; give a WeightRevisionIdentity")


def policy_text(policy):
    """A policy as JSON, or `None`."""
    if policy is None:
        return None
    if not isinstance(policy, WeightStoragePolicy):
        raise invalid(f"policy is {shown(policy)}; give a WeightStoragePolicy")
    return json.dumps(policy._to_wire())


def sharing_text(snapshot):
    """How a put is shared among participants, as JSON; `None` where there is one writer."""
    return None if snapshot.sharing is None else json.dumps(snapshot.sharing._to_wire())


def reading_text(holder, lease_ttl_ms, verify="auto"):
    """How to read, as JSON."""
    return json.dumps({
        "holder": optional_text(holder, "holder"), "lease_ttl_ms": whole(lease_ttl_ms, "lease_ttl_ms", 1, _LEASE_TTL_MS_MAX),
        "verify": choice(verify, "verify", ("auto", "always", "never")),
    })


def manifest_of(report):
    """The manifest and the record in a report of the Rust side."""
    revision = WeightRevisionMetadata._from_wire(report["revision"])
    return WeightManifest(report["manifest"].encode(), revision.identity, revision.manifest.sha256), revision


class WeightWriter:
    """A revision being published: a context manager whose end commits, and in which an exception aborts.

    `identity` is what is published, `replacement` the replacement that it is the target of (`weight_upsert`), `revision`
    its record once it is committed. Of a snapshot that is shared, `session` is what the participants join. The writer of a
    part brings that part alone, and an exception in its block leaves the import open for another run of the participant.
    """

    def __init__(self, native, identity, snapshot, adapter, connection):
        self.identity = identity
        self.session = native.session
        self.revision = None
        self.report = None
        self._native = native
        self._adapter = adapter
        self._specs = {} if snapshot is None else {spec.name: spec for spec in snapshot.tensors}
        if snapshot is not None:
            for spec in snapshot.tensors:
                self._specs.update((alias, spec) for alias in spec.aliases)
        self._connection = connection
        self._cancel = None
        self._ended = False
        claim = native.claim
        self.replacement = None if claim is None else WeightReplacement._from_wire(json.loads(claim))

    def weight_put_tensor(self, tensor_id, tensor):
        """Sends a tensor that the snapshot announced. Again with other bytes replaces it."""
        self._expect_open()
        spec = self._specs.get(text(tensor_id, "tensor_id"))
        if spec is None:
            raise invalid(f"the snapshot has no tensor {tensor_id!r}", tensor=tensor_id)
        for box, buffer in self._adapter.shards(spec, tensor):
            memory = memory_of(buffer, tensor_id)
            check(memory, tensor_id, spec.dtype, spec.shape if box is None else box[1], writable=False)
            region = None if box is None or not spec.fragments else box
            self._native.put(tensor_id, region, memory.address, memory.nbytes, self._cancel)
            del memory

    def commit(self):
        """Publishes the revision: READY and HOT when this returns its record. After an error the import is aborted.

        The coordinator of several participants waits for them here; one that has found its session open leaves it open after
        an error. A participant's commit hands its part in and returns `None`: the revision is READY once the coordinator has
        committed. After an error of a participant the import stays open, and another run of it may join."""
        self._expect_open()
        self._ended = True
        self.report = json.loads(self._native.commit(self._cancel))
        if "revision" not in self.report:
            return None
        self.revision = WeightRevisionMetadata._from_wire(self.report["revision"])
        if self.report["claim"] is not None:
            self.replacement = WeightReplacement._from_wire(self.report["claim"])
        return self.revision

    def abort(self):
        """Gives the import up; its bytes are deleted. Does nothing after the commit."""
        self._give_up()

    def _give_up(self, *, failed=False):
        if not self._ended:
            self._ended = True
            self._native.abort(self._cancel, failed)

    def _expect_open(self):
        if self._ended:
            raise ConflictError(f"the writer of {self.identity} has ended; begin another put")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is None:
            if not self._ended:
                self.commit()
            return False
        try:
            # What another run has opened, or taken over since, is not this one's to delete.
            self._give_up(failed=True)
        except BallastError as failure:
            # The session ends by itself; what went wrong first is what the caller must see.
            if hasattr(error, "add_note"):
                error.add_note(f"the import of {self.identity} was not aborted: {failure}; it ends by itself")
        return False

    def __repr__(self):
        state = "committed" if self.report is not None else "ended" if self._ended else "open"
        return f"<WeightWriter of {self.identity}, {state}>"


class WeightStore:
    """The managed weights of a cluster: eleven operations on complete, immutable revisions.

    `nats` is the NATS server of the cluster (by default the environment's BALLAST_NATS, else the one of `ballast dev`).
    `default_policy` is the policy of puts that give none, before the cluster's own. `progress` is called with (phase,
    done_bytes, total_bytes, note) while bytes move and while something is waited for. `route` is how nodes are reached:
    "best", "unix", "rdma" or "tcp". Every call releases the GIL; Ctrl-C ends it and releases what it held.
    """

    def __init__(self, nats=None, *, default_policy=None, name=None, tenant_id="default", route="best", progress=None,
                 connect_seconds=_CONNECT_SECONDS, request_seconds=_REQUEST_SECONDS):
        if isinstance(nats, Connection):
            self._connection = nats
        else:
            self._connection = Connection(
                nats, name=name, tenant=tenant_id, route=route, default_policy=default_policy, progress=progress,
                connect_seconds=connect_seconds, request_seconds=request_seconds,
            )
        self._cancel = None

    def weight_put(self, snapshot, adapter=None, *, tenant_id="default", policy=None):
        """Begins to publish a complete revision and answers its writer.

        `snapshot` is a `WeightSnapshot`; `adapter` reads the tensors given to the writer (numpy, torch and their like when
        it is `None`). The tensors go to the nodes as they are put; the revision is READY once the writer has committed.

        The ranks of a training job put one revision together: one of them puts `snapshot.shared(...)` and commits, the
        others put their `snapshot.part(...)`. The policy is that one's to say.
        """
        if not isinstance(snapshot, WeightSnapshot):
            raise invalid(f"snapshot is a {type(snapshot).__name__}; give a ballast.WeightSnapshot")
        if policy is not None and snapshot.sharing is not None and not snapshot.sharing.participants:
            raise invalid("a part has no policy of its own: give it to the put that shares the snapshot")
        identity = snapshot.identity(tenant_id)
        tensors, policy = json.dumps([spec._to_wire() for spec in snapshot.tensors]), policy_text(policy)
        native = self._connection.client(self._cancel).put(
            json.dumps(identity._to_wire()), tensors, None, policy, sharing_text(snapshot), self._connection.progress, self._cancel)
        return self._writer(native, identity, snapshot, adapter)

    def weight_get(self, identity, target_placement, target_bindings, *, holder=None, lease_ttl_ms=LEASE_TTL_MS,
                   target_allocation_guards=None):
        """Reads a revision into the caller's buffers, in the shape the caller wants, and answers its manifest.

        `target_placement` is a `WeightPlacement` (all its participants are in this process), what `placement.local(...)`
        gives (one of them is), or `None`: every tensor as a whole. `target_bindings` gives the buffers: a dict by tensor name, or
        `WeightBinding` objects. Every tensor of the revision has to be there. The lease is renewed while bytes move and
        released at the end; `target_allocation_guards` are context managers that are held meanwhile.
        """
        identity = identity_of(identity)
        if target_placement is not None and not isinstance(target_placement, (WeightPlacement, LocalPlacement)):
            raise invalid(f"target_placement is a {type(target_placement).__name__}; give a WeightPlacement, its local(...), or None")
        bound = bindings_of(target_placement, target_bindings)
        whole = target_placement.placement if isinstance(target_placement, LocalPlacement) else target_placement
        participant = target_placement.participant_id if isinstance(target_placement, LocalPlacement) else None
        native = None if whole is None else whole._for(identity)
        buffers = []
        for name, owner, box, memory in bound:
            dtype, shape = (memory.dtype, memory.shape) if whole is None else (None, None)
            buffers.append((name, owner, box, dtype, shape, memory.address, memory.nbytes))
        reading = reading_text(holder, lease_ttl_ms)
        guards = list(target_allocation_guards or ())
        entered = []
        try:
            for guard in guards:
                guard.__enter__()
                entered.append(guard)
            report = json.loads(self._connection.client(self._cancel).get(
                json.dumps(identity._to_wire()), native, participant, buffers, reading, self._connection.progress, self._cancel))
        finally:
            for guard in reversed(entered):
                guard.__exit__(None, None, None)
        manifest, _ = manifest_of(report)
        if whole is not None and not whole.exact:
            for name in manifest.tensors:
                if name not in whole.tensors:
                    raise invalid(f"the target omits tensor {name!r}, which the revision holds; place every tensor", tensor=name)
        return manifest

    def weight_is_exist(self, identity):
        """Whether exactly this revision is READY and readable."""
        try:
            return self._connection.about("is_exist", identity_of(identity), self._cancel)["exists"]
        except NotFoundError:
            return False

    def weight_get_metadata(self, identity):
        """The revision's record and its active leases, as a `WeightRevisionView`."""
        return WeightRevisionView._from_wire(self._connection.about("get_metadata", identity_of(identity), self._cancel))

    def weight_get_size(self, identity):
        """Logical payload bytes that were validated at the commit."""
        return self._connection.about("get_size", identity_of(identity), self._cancel)["logical_bytes"]

    def weight_list(self, *, namespace, resource_id, tenant_id="default", page_token="", limit=100):
        """One page of a model's revisions, by revision and generation."""
        body = {
            "namespace": text(namespace, "namespace"), "resource_id": text(resource_id, "resource_id"),
            "page_token": text(page_token, "page_token"), "limit": whole(limit, "limit", 1, _LIST_LIMIT_MAX),
        }
        return WeightRevisionPage._from_wire(self._connection.call(text(tenant_id, "tenant_id"), "list", body, self._cancel))

    def weight_update_policy(self, identity, *, policy, expected_metadata_generation):
        """Changes the policy and nothing else; answers the new record."""
        if not isinstance(policy, WeightStoragePolicy):
            raise invalid(f"policy is {shown(policy)}; give a WeightStoragePolicy")
        expected = generation_of(expected_metadata_generation, "expected_metadata_generation")
        reply = self._connection.about("update_policy", identity_of(identity), self._cancel, policy=policy._to_wire(),
                                       expected_metadata_generation=expected)
        return WeightRevisionMetadata._from_wire(reply["revision"])

    def weight_upsert(self, snapshot, adapter=None, *, replacing, expected_metadata_generation,
                      mode=WeightUpsertMode.PUT_FIRST, tenant_id="default", policy=None, request_id=None):
        """Begins to replace a revision by a higher generation of its lineage and answers the writer of that one. The same
        call after a failure goes on where it had stopped. Of several ranks one upserts `snapshot.shared(...)`; the others
        put their `snapshot.part(...)`, as ever."""
        if not isinstance(snapshot, WeightSnapshot):
            raise invalid(f"snapshot is a {type(snapshot).__name__}; give a ballast.WeightSnapshot")
        if not isinstance(mode, WeightUpsertMode):
            raise invalid(f"mode is {shown(mode)}; give a WeightUpsertMode")
        if snapshot.sharing is not None and not snapshot.sharing.participants:
            raise invalid("a part is put, not upserted: the one that shares the snapshot upserts it")
        base, target = identity_of(replacing, "replacing"), snapshot.identity(tenant_id)
        if base.lineage != target.lineage:
            raise invalid(f"{target} is of another lineage than {base}; only a generation of the same one replaces it")
        if target.weight_generation <= base.weight_generation:
            raise invalid(f"generation {target.weight_generation} does not replace {base}; give a higher one")
        replacement = json.dumps({
            "base": base._to_wire(), "target_generation": target.weight_generation,
            "expected_metadata_generation": generation_of(expected_metadata_generation, "expected_metadata_generation"),
            "mode": mode.name, "request_id": optional_text(request_id, "request_id"), "wait_completed": False,
        })
        tensors, policy = json.dumps([spec._to_wire() for spec in snapshot.tensors]), policy_text(policy)
        native = self._connection.client(self._cancel).upsert(
            replacement, tensors, None, policy, sharing_text(snapshot), self._connection.progress, self._cancel)
        return self._writer(native, target, snapshot, adapter)

    def weight_migrate(self, identity, *, target, expected_metadata_generation, mixed_hot_ratio=None):
        """Starts (or finds) a migration to HOT, COLD or MIXED and answers the operation."""
        target = one_of(WeightResidencyState, target, "target", MOVABLE)
        mixed_hot_ratio = None if mixed_hot_ratio is None else ratio(mixed_hot_ratio, "mixed_hot_ratio")
        if mixed_hot_ratio is not None and target is not WeightResidencyState.MIXED:
            raise invalid(f"mixed_hot_ratio is for MIXED, the target is {target.name}")
        expected = generation_of(expected_metadata_generation, "expected_metadata_generation")
        reply = self._connection.about("migrate", identity_of(identity), self._cancel, target=target.name,
                                       mixed_hot_ratio=mixed_hot_ratio, expected_metadata_generation=expected)
        return WeightOperation._from_wire(reply["operation"])

    def weight_get_operation(self, operation_id, *, tenant_id="default"):
        """An operation's target, progress and error; also after it has ended."""
        body = {"operation_id": text(operation_id, "operation_id")}
        reply = self._connection.call(text(tenant_id, "tenant_id"), "get_operation", body, self._cancel)
        return WeightOperation._from_wire(reply["operation"])

    def weight_remove(self, identity, *, expected_metadata_generation):
        """Starts the deletion of the whole revision; a tombstone remains."""
        expected = generation_of(expected_metadata_generation, "expected_metadata_generation")
        reply = self._connection.about("remove", identity_of(identity), self._cancel, expected_metadata_generation=expected)
        return WeightRevisionMetadata._from_wire(reply["revision"])

    def _writer(self, native, identity, snapshot, adapter):
        writer = WeightWriter(native, identity, snapshot, ArrayAdapter() if adapter is None else adapter, self._connection)
        writer._cancel = self._cancel
        return writer

    def __repr__(self):
        return f"<WeightStore at {self._connection.nats}>"


__all__ = ["WeightStore", "WeightWriter", "human_bytes"]

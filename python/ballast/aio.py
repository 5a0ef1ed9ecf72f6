"""The same eleven operations for `asyncio`. Every call works in a thread without the GIL; cancelling its task ends it, and
waits until what it held is released."""

import asyncio
import functools

from . import _easy, _native
from . import _store as _sync
from . import delta as _delta


async def _run(work, *arguments, **named):
    """Runs `work(cancel, ...)` in a thread; cancelling ends it."""
    cancel = _native.Cancel()
    loop = asyncio.get_running_loop()
    task = loop.run_in_executor(None, functools.partial(work, cancel, *arguments, **named))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancel.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # Looked at, so that nobody complains that it was not.
        raise


def _with(connection, cancel):
    store = _sync.WeightStore(connection)
    store._cancel = cancel
    return store


class WeightWriter:
    """A revision being published: an asynchronous context manager whose end commits, and in which an exception aborts."""

    def __init__(self, begin):
        self._begin = begin
        self._writer = None

    def _call(self, method, *arguments):
        def work(cancel):
            self._writer._cancel = cancel
            return method(*arguments)

        return _run(work)

    @property
    def identity(self):
        """What is published."""
        return self._writer.identity

    @property
    def session(self):
        """What the participants of a shared snapshot join."""
        return self._writer.session

    @property
    def replacement(self):
        """The replacement that it is the target of."""
        return self._writer.replacement

    @property
    def revision(self):
        """The record, once it is committed."""
        return self._writer.revision

    async def weight_put_tensor(self, tensor_id, tensor):
        """Sends a tensor that the snapshot announced."""
        return await self._call(self._writer.weight_put_tensor, tensor_id, tensor)

    async def commit(self):
        """Publishes the revision and answers its record."""
        return await self._call(self._writer.commit)

    async def abort(self):
        """Gives the import up."""
        return await self._call(self._writer.abort)

    async def _open(self):
        if self._writer is None:
            self._writer = await _run(self._begin)
        return self

    def __await__(self):
        return self._open().__await__()

    async def __aenter__(self):
        return await self._open()

    async def __aexit__(self, kind, error, traceback):
        # The abort is not given up with the task that was cancelled.
        await asyncio.shield(self._call(self._writer.__exit__, kind, error, traceback))
        return False

    def __repr__(self):
        return f"<aio {self._writer!r}>" if self._writer is not None else "<aio WeightWriter, not begun>"


class WeightStore:
    """The managed weights of a cluster, for `asyncio`: as `ballast.WeightStore`, with every operation awaited, and writers
    entered with `async with`."""

    def __init__(self, *arguments, **named):
        self._connection = _sync.WeightStore(*arguments, **named)._connection

    def weight_put(self, snapshot, adapter=None, *, tenant_id="default", policy=None):
        """As `ballast.WeightStore.weight_put`; enter what it answers with `async with`."""
        return WeightWriter(lambda cancel: _with(self._connection, cancel).weight_put(
            snapshot, adapter, tenant_id=tenant_id, policy=policy))

    async def weight_get(self, identity, target_placement, target_bindings, *, holder=None,
                         lease_ttl_ms=_sync.LEASE_TTL_MS, target_allocation_guards=None):
        """As `ballast.WeightStore.weight_get`."""
        return await self._ask("weight_get", identity, target_placement, target_bindings, holder=holder,
                               lease_ttl_ms=lease_ttl_ms, target_allocation_guards=target_allocation_guards)

    async def weight_is_exist(self, identity):
        """As `ballast.WeightStore.weight_is_exist`."""
        return await self._ask("weight_is_exist", identity)

    async def weight_get_metadata(self, identity):
        """As `ballast.WeightStore.weight_get_metadata`."""
        return await self._ask("weight_get_metadata", identity)

    async def weight_get_size(self, identity):
        """As `ballast.WeightStore.weight_get_size`."""
        return await self._ask("weight_get_size", identity)

    async def weight_list(self, *, namespace, resource_id, tenant_id="default", page_token="", limit=100):
        """As `ballast.WeightStore.weight_list`."""
        return await self._ask("weight_list", namespace=namespace, resource_id=resource_id, tenant_id=tenant_id,
                               page_token=page_token, limit=limit)

    async def weight_update_policy(self, identity, *, policy, expected_metadata_generation):
        """As `ballast.WeightStore.weight_update_policy`."""
        return await self._ask("weight_update_policy", identity, policy=policy,
                               expected_metadata_generation=expected_metadata_generation)

    def weight_upsert(self, snapshot, adapter=None, *, replacing, expected_metadata_generation,
                      mode=_sync.WeightUpsertMode.PUT_FIRST, tenant_id="default", policy=None, request_id=None):
        """As `ballast.WeightStore.weight_upsert`; enter what it answers with `async with`."""
        return WeightWriter(lambda cancel: _with(self._connection, cancel).weight_upsert(
            snapshot, adapter, replacing=replacing, expected_metadata_generation=expected_metadata_generation, mode=mode,
            tenant_id=tenant_id, policy=policy, request_id=request_id))

    async def weight_migrate(self, identity, *, target, expected_metadata_generation, mixed_hot_ratio=None):
        """As `ballast.WeightStore.weight_migrate`."""
        return await self._ask("weight_migrate", identity, target=target, mixed_hot_ratio=mixed_hot_ratio,
                               expected_metadata_generation=expected_metadata_generation)

    async def weight_get_operation(self, operation_id, *, tenant_id="default"):
        """As `ballast.WeightStore.weight_get_operation`."""
        return await self._ask("weight_get_operation", operation_id, tenant_id=tenant_id)

    async def weight_remove(self, identity, *, expected_metadata_generation):
        """As `ballast.WeightStore.weight_remove`."""
        return await self._ask("weight_remove", identity, expected_metadata_generation=expected_metadata_generation)

    async def _ask(self, method, *arguments, **named):
        return await _run(lambda cancel: getattr(_with(self._connection, cancel), method)(*arguments, **named))

    def __repr__(self):
        return f"<aio WeightStore at {self._connection.nats}>"


def _helper(function):
    @functools.wraps(function)
    async def awaited(*arguments, store=None, **named):
        connection = store._connection if isinstance(store, WeightStore) else _easy.store_of(store)._connection
        return await _run(lambda cancel: function(*arguments, store=_with(connection, cancel), **named))

    return awaited


open = _helper(_easy.open)
load = _helper(_easy.load)
save = _helper(_easy.save)
wait = _helper(_easy.wait)

delta_upsert = _helper(_delta.upsert)

__all__ = ["WeightStore", "WeightWriter", "delta_upsert", "load", "open", "save", "wait"]

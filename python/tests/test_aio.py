"""The asyncio twin: every operation awaited, writers entered with `async with`, cancellation that leaves nothing."""

import asyncio
import os

import numpy as np
import pytest

import ballast
from ballast import aio, delta
from conftest import leases, tensors, until
from test_store import HOT, snapshot_of
from test_writers import gone


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_put_get_upsert_migrate_remove(cluster, store, name):
    async def work():
        twin = aio.WeightStore(cluster.nats)
        before, after = tensors(50), tensors(51)
        async with twin.weight_put(snapshot_of(before, name), None, policy=HOT) as writer:
            for key, value in before.items():
                await writer.weight_put_tensor(key, value)
        base = writer.identity
        found = {key: np.empty_like(value) for key, value in before.items()}
        manifest, exists, size, view = await asyncio.gather(
            twin.weight_get(base, None, found), twin.weight_is_exist(base), twin.weight_get_size(base), twin.weight_get_metadata(base))
        assert exists and size == sum(value.nbytes for value in before.values()) and manifest.identity == base
        assert all(np.array_equal(found[key], value) for key, value in before.items())
        page = await twin.weight_list(namespace="default", resource_id=name)
        assert [record.identity for record in page.revisions] == [base]
        updated = await twin.weight_update_policy(
            base, policy=ballast.WeightStoragePolicy("HOT", 0.5, "AUTO"), expected_metadata_generation=view.metadata.metadata_generation)
        operation = await twin.weight_migrate(base, target="COLD", expected_metadata_generation=updated.metadata_generation)
        while not (operation := await twin.weight_get_operation(operation.operation_id)).done:
            await asyncio.sleep(0.05)
        expected = (await twin.weight_get_metadata(base)).metadata.metadata_generation
        writer = await twin.weight_upsert(snapshot_of(after, name, 2), None, replacing=base, expected_metadata_generation=expected, policy=HOT)
        for key, value in after.items():
            await writer.weight_put_tensor(key, value)
        record = await writer.commit()
        assert record.identity.weight_generation == 2 and writer.replacement.target == record.identity
        found = await aio.wait(name, 2, store=twin)
        weights = await aio.load(found, store=twin)
        assert weights.generation == 2 and np.array_equal(weights["mask"], after["mask"])
        return base

    base = run(work())
    until(lambda: store.weight_get_metadata(base).metadata.availability is ballast.WeightAvailability.DELETED)


def test_a_delta_is_applied_and_a_stale_one_refused(cluster, store, name):
    before = tensors(54)
    after = {key: value.copy() for key, value in before.items()}
    changed = next(key for key, value in before.items() if value.size > 10 and value.dtype == np.float32)
    after[changed].reshape(-1)[3:9] += 1
    deltas = [delta.between(changed, before[changed], after[changed], base_generation=1, delta_generation=2)]

    async def work():
        twin = aio.WeightStore(cluster.nats)
        await aio.save(before, name, store=twin, policy=HOT)
        record = await aio.delta_upsert(deltas, replacing=name, store=twin)
        with pytest.raises(ballast.StaleGenerationError):
            await aio.delta_upsert(deltas, replacing=record.identity, store=twin)
        return record

    record = run(work())
    assert record.identity.weight_generation == 2
    found = ballast.load(record.identity, store=store)
    assert found.keys() == after.keys() and all(np.array_equal(found[key], value) for key, value in after.items())


def test_an_exception_inside_the_block_aborts(cluster, store, name):
    async def work():
        twin = aio.WeightStore(cluster.nats)
        async with twin.weight_put(snapshot_of(tensors(52), name), None) as writer:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(work())
    gone(store, ballast.WeightRevisionIdentity("default", "default", name, "main", 1))


def test_a_cancelled_wait_ends_at_once_and_a_cancelled_put_leaves_nothing(cluster, store, name):
    async def work():
        twin = aio.WeightStore(cluster.nats)
        waiting = asyncio.create_task(aio.wait("nobody-ever", 7, store=twin))

        async def put():
            async with twin.weight_put(snapshot_of(tensors(53), name), None) as writer:
                begun.set()
                await asyncio.sleep(60)

        begun = asyncio.Event()
        putting = asyncio.create_task(put())
        await begun.wait()
        for task in (waiting, putting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(work())
    gone(store, ballast.WeightRevisionIdentity("default", "default", name, "main", 1))


def test_a_cancelled_read_releases_its_lease(cluster, store, name):
    values = {f"w{at}": np.zeros(1 << 20, np.float32) for at in range(16)}
    identity = ballast.save(values, name, store=store, policy=HOT).identity

    async def work():
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def progress(phase, done, total, note):
            if phase == "reading" and done and not begun.is_set():
                loop.call_soon_threadsafe(begun.set)

        twin = aio.WeightStore(cluster.nats, route="tcp", progress=progress)
        reading = asyncio.create_task(twin.weight_get(identity, None, {key: np.empty_like(value) for key, value in values.items()}))
        await begun.wait()
        reading.cancel()
        try:
            await reading
        except asyncio.CancelledError:
            pass

    run(work())
    until(lambda: leases(store, identity) == 0, seconds=5)


def test_the_loop_is_free_while_calls_wait(cluster, name):
    async def work():
        twin = aio.WeightStore(cluster.nats)
        waiting = asyncio.create_task(aio.wait(name, 1, timeout=1, store=twin))
        ticks = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(ballast.NotReadyError):
            await waiting
        return ticks

    assert run(work()) > 10


def test_errors_are_the_same(cluster, name):
    missing = ballast.WeightRevisionIdentity("default", "default", name, "main", 1)
    with pytest.raises(ballast.NotFoundError):
        run(aio.WeightStore(cluster.nats).weight_get_metadata(missing))
    assert run(aio.WeightStore(cluster.nats).weight_is_exist(missing)) is False
    assert os.environ["BALLAST_NATS"] in repr(aio.WeightStore())

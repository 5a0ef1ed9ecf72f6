"""Reads: into buffers, in place, interrupted, refused; the lease is released whatever happens (RFC, Get and Revision Lease)."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import ballast
from conftest import leases, tensors, until
from test_store import HOT, publish, snapshot_of


@pytest.fixture(scope="module")
def model(cluster):
    store = ballast.WeightStore(cluster.nats)
    values = tensors(30)
    return store, publish(store, values, f"reading-{os.getpid()}"), values


def buffers(values):
    return {key: np.full_like(value, 1) for key, value in values.items()}


@pytest.mark.parametrize("what, change", [
    ("omits", lambda given: given.pop("mask")),
    ("adds", lambda given: given.update(stranger=np.empty(3, np.float32))),
    ("dtype", lambda given: given.update({"embed.weight": np.empty((32, 16), np.float64)})),
    ("dtype", lambda given: given.update({"embed.weight": np.empty((32, 16), np.int32)})),
    ("shape", lambda given: given.update({"embed.weight": np.empty((16, 32), np.float32)})),
    ("bytes", lambda given: given.update({"embed.weight": bytearray(32 * 16 * 4 - 1)})),
    ("bytes", lambda given: given.update({"embed.weight": bytearray(32 * 16 * 4 + 1)})),
    ("contiguous", lambda given: given.update({"embed.weight": np.empty((32, 32), np.float32)[:, ::2]})),
    ("contiguous", lambda given: given.update({"embed.weight": np.empty((16, 32), np.float32).T})),
    ("read-only", lambda given: given["embed.weight"].setflags(write=False)),
    ("read-only", lambda given: given.update({"embed.weight": bytes(32 * 16 * 4)})),
    ("give a numpy array", lambda given: given.update({"embed.weight": [1.0] * 512})),
    ("share bytes", lambda given: given.update({"layer.0.bias": given["embed.weight"].view(np.int64).reshape(-1)[:16]})),
])
def test_a_target_that_does_not_fit_is_refused_by_name_and_leaves_no_lease(model, what, change):
    store, identity, values = model
    given = buffers(values)
    change(given)
    with pytest.raises(ballast.InvalidArgumentError, match=what) as refused:
        store.weight_get(identity, None, given)
    assert refused.value.details.get("tensor") in {"mask", "stranger", "embed.weight", "layer.0.bias"}, refused.value.details
    assert leases(store, identity) == 0


def test_a_target_of_another_generation_or_model_is_refused(model, name):
    store, identity, values = model
    specs = snapshot_of(values, "any").tensors
    placement = ballast.WeightPlacement.whole(specs)
    found = buffers(values)
    store.weight_get(identity, placement, found)
    assert all(np.array_equal(found[key], value) for key, value in values.items())
    for wrong in (specs[:-1], (*specs, ballast.TensorSpec("stranger", "F32", (1,)))):
        given = {spec.name: np.empty(spec.shape, ballast._arrays.numpy_dtype(spec.dtype)) for spec in wrong}
        with pytest.raises(ballast.InvalidArgumentError, match="omits|adds"):
            store.weight_get(identity, ballast.WeightPlacement.whole(wrong), given)
    changed = tuple(ballast.TensorSpec(s.name, "I32" if s.dtype == "F32" else s.dtype, s.shape) for s in specs)
    given = {spec.name: np.empty(spec.shape, ballast._arrays.numpy_dtype(spec.dtype)) for spec in changed}
    with pytest.raises(ballast.InvalidArgumentError, match="dtype"):
        store.weight_get(identity, ballast.WeightPlacement.whole(changed), given)
    assert leases(store, identity) == 0


def test_several_threads_read_at_once(model):
    store, identity, values = model
    failures = []

    def read():
        found = buffers(values)
        store.weight_get(identity, None, found)
        failures.extend(key for key, value in values.items() if not np.array_equal(found[key], value))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and leases(store, identity) == 0


def test_guards_are_held_while_bytes_move(model):
    store, identity, values = model
    held = []

    class Guard:
        def __enter__(self):
            held.append("in")

        def __exit__(self, *error):
            held.append("out")

    store.weight_get(identity, None, buffers(values), target_allocation_guards=[Guard(), Guard()])
    assert held == ["in", "in", "out", "out"]


def test_the_lease_lives_as_long_as_the_last_array(model):
    store, identity, values = model
    weights = ballast.load(identity, store=store)
    assert weights.generation == 1 and weights.identity == identity and leases(store, identity) == 1
    kept = weights["embed.weight"][3:5]
    assert not kept.flags.writeable and kept.base is not None
    del weights
    gc.collect()
    assert leases(store, identity) == 1
    assert np.array_equal(kept, values["embed.weight"][3:5])
    with pytest.raises(ballast.BusyError):
        generation = store.weight_get_metadata(identity).metadata.metadata_generation
        store.weight_remove(identity, expected_metadata_generation=generation)
    del kept
    gc.collect()
    until(lambda: leases(store, identity) == 0)


def test_an_open_revision_is_a_mapping_that_lets_go_when_closed(model):
    store, identity, values = model
    with ballast.open(identity, store=store) as opened:
        assert sorted(opened) == sorted(values) and len(opened) == len(values) and "nobody" not in opened
        assert opened.mapped_bytes == store.weight_get_size(identity) and not opened.lease_lapsed
        for key, value in values.items():
            assert opened[key].dtype == value.dtype and np.array_equal(opened[key], value), key
        with pytest.raises(KeyError):
            opened["nobody"]
        assert opened.manifest.sha256 == opened.revision.manifest.sha256 and "6 tensors" in repr(opened)
        assert leases(store, identity) == 1
    assert leases(store, identity) == 0
    with pytest.raises(ValueError):
        opened["mask"]


def test_zero_copy_means_the_same_memory(model):
    store, identity, _ = model
    one, two = ballast.load(identity, store=store), ballast.load(identity, store=store, names=["embed.weight"])
    assert list(two) == ["embed.weight"] and one["embed.weight"].ctypes.data != two["embed.weight"].ctypes.data
    maps = open("/proc/self/maps").read()
    address = one["embed.weight"].ctypes.data
    spans = [line.split()[0].split("-") for line in maps.splitlines() if "shm" in line or "ballast" in line]
    assert any(int(start, 16) <= address < int(end, 16) for start, end in spans), "not mapped from the node's segment"
    with pytest.raises(ballast.InvalidArgumentError, match="nobody"):
        ballast.load(identity, names=["nobody"], store=store)


def test_ctrl_c_ends_a_read_and_releases_its_lease(cluster, store, name):
    # The reader stops in its progress callback, so that the signal finds it under way.
    identity = publish(store, {f"w{at}": np.full((1 << 20,), at, np.float32) for at in range(24)}, name)
    script = textwrap.dedent("""
        import os, signal, sys, time, numpy as np, ballast
        def slow(phase, done, total, note):
            if phase == "reading" and done:
                print("reading", flush=True)
                time.sleep(0.2)
        store = ballast.WeightStore(sys.argv[1], progress=slow, route="tcp")
        try:
            store.weight_get(sys.argv[2], None, {f"w{at}": np.empty(1 << 20, np.float32) for at in range(24)})
            print("finished", flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script, cluster.nats, str(identity)], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0].splitlines()[-1] == "interrupted"
    assert process.returncode == 0
    until(lambda: leases(store, identity) == 0, seconds=5)


def test_an_exit_without_a_close_releases_the_lease(cluster, store, name):
    identity = publish(store, tensors(31), name)
    script = "import sys, ballast; w = ballast.load(sys.argv[2], store=sys.argv[1]); o = ballast.open(sys.argv[2], store=sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, cluster.nats, str(identity)], check=True, env=dict(os.environ), timeout=60)
    until(lambda: leases(store, identity) == 0, seconds=5)


def test_a_fork_has_connections_of_its_own(store, name):
    # Again and again, and while the parent reads: what its threads wait for at that moment is gone in the child.
    identity = publish(store, tensors(32), name)
    stop = threading.Event()

    def read():
        while not stop.is_set():
            ballast.load(identity, store=store)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(40):
            child = os.fork()
            if child == 0:
                try:
                    os._exit(0 if store.weight_is_exist(identity) and len(ballast.load(identity, store=store)) == 6 else 1)
                finally:
                    os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert store.weight_is_exist(identity)
    until(lambda: leases(store, identity) == 0, seconds=90)


def test_forks_do_not_hear_each_other(store, name):
    # What their parent would have called its next requests, all of them would.
    models = [(publish(store, {"w": np.full(8, at)}, f"{name}-{at}"), at) for at in range(6)]
    children = []
    for identity, at in models:
        child = os.fork()
        if child == 0:
            try:
                read = (ballast.load(identity, store=store)["w"] for _ in range(20))
                os._exit(0 if all((values == at).all() for values in read) else 1)
            finally:
                os._exit(2)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [0] * len(models)


def test_a_fork_that_ends_does_not_let_go_of_what_its_parent_holds(cluster, store, name):
    identity = publish(store, tensors(39), name)
    script = textwrap.dedent("""
        import os, sys, time, ballast
        store = ballast.WeightStore(sys.argv[1])
        opened = ballast.open(sys.argv[2], store=store)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        begun = time.monotonic()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert time.monotonic() - begun < 10, "the child waited for a connection that it does not have"
        assert store.weight_get_metadata(sys.argv[2]).active_lease_count == 1
        assert opened.close() is True
    """)
    subprocess.run([sys.executable, "-c", script, cluster.nats, str(identity)], check=True, env=dict(os.environ), timeout=60)
    until(lambda: leases(store, identity) == 0, seconds=5)


def test_waiting_never_answers_an_older_generation(store, name):
    publish(store, tensors(33), name)
    assert ballast.wait(name, store=store).weight_generation == 1
    with pytest.raises(ballast.NotReadyError) as waited:
        ballast.wait(name, min_generation=2, timeout=0.3, store=store)
    assert waited.value.details["min_generation"] == 2
    found = []
    waiter = threading.Thread(target=lambda: found.append(ballast.wait(name, min_generation=3, timeout=60, store=store)))
    waiter.start()
    ballast.save(tensors(34), name, store=store, policy=HOT)
    ballast.save(tensors(35), name, store=store, policy=HOT)
    waiter.join()
    assert found[0].weight_generation == 3
    assert ballast.load(found[0], store=store).generation == 3
    assert ballast.wait(found[0], store=store) == found[0]


def test_save_replace_retires_the_base(store, name):
    first = ballast.save(tensors(36), name, store=store, policy=HOT).identity
    second = ballast.save(tensors(37), name, store=store, policy=HOT, replace=True).identity
    assert (first.weight_generation, second.weight_generation) == (1, 2)
    # At once again: the base of the one before may still be going.
    for seed in (38, 39, 40):
        last = ballast.save(tensors(seed), name, store=store, policy=HOT, replace=True).identity
    assert last.weight_generation == 5
    gone = (first, second, last.generation(4))
    until(lambda: all(
        store.weight_get_metadata(one).metadata.availability is ballast.WeightAvailability.DELETED for one in gone))
    third = ballast.save(tensors(41), f"{name}#9", store=store, policy=HOT).identity
    assert third.weight_generation == 9 and ballast.load(name, store=store).generation == 9

"""Writers: what is put, what is refused, and that nothing half-written ever stays (RFC, Import and READY Publication)."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import ballast
from ballast import TensorSpec, WeightAvailability, WeightSnapshot
from conftest import leases, tensors, until
from test_store import HOT, publish, snapshot_of


def gone(store, identity):
    """Nothing is left of an import: no revision that anybody could find, no bytes."""
    def look():
        try:
            record = store.weight_get_metadata(identity).metadata
        except ballast.NotFoundError:
            return True
        assert record.availability is not WeightAvailability.READY
        return record.availability is WeightAvailability.DELETED and record.manifest is None

    until(look)
    assert not store.weight_is_exist(identity)


def test_an_exception_inside_the_block_aborts_and_is_the_one_that_is_seen(store, name):
    values = tensors(20)
    with pytest.raises(ZeroDivisionError):
        with store.weight_put(snapshot_of(values, name), None) as writer:
            writer.weight_put_tensor("embed.weight", values["embed.weight"])
            1 / 0
    gone(store, writer.identity)
    # The generation is free again.
    assert publish(store, values, name) == writer.identity


def test_abort_and_commit_by_hand(store, name):
    values = tensors(21)
    writer = store.weight_put(snapshot_of(values, name), None)
    writer.abort()
    writer.abort()
    gone(store, writer.identity)
    for use in (writer.commit, lambda: writer.weight_put_tensor("mask", values["mask"])):
        with pytest.raises(ballast.ConflictError):
            use()
    writer = store.weight_put(snapshot_of(values, name), None, policy=HOT)
    for key, value in values.items():
        writer.weight_put_tensor(key, value)
    record = writer.commit()
    assert record.availability is WeightAvailability.READY and "committed" in repr(writer)


def test_a_writer_that_is_dropped_aborts(store, name):
    writer = store.weight_put(snapshot_of(tensors(22), name), None)
    identity = writer.identity
    del writer
    gone(store, identity)


def test_a_missing_tensor_is_named_and_nothing_is_published(store, name):
    values = tensors(23)
    with pytest.raises(ballast.InvalidArgumentError, match="layer.0.bias") as missing:
        with store.weight_put(snapshot_of(values, name), None) as writer:
            for key in values.keys() - {"layer.0.bias"}:
                writer.weight_put_tensor(key, values[key])
    assert missing.value.details["tensors"] == ["layer.0.bias"]
    gone(store, writer.identity)


@pytest.mark.parametrize("what, wrong", [
    ("dtype", lambda value: value.astype(np.float64)),
    ("bytes", lambda value: value[:-1]),
    ("shape", lambda value: value.reshape(-1)),
    ("contiguous", lambda value: np.asfortranarray(value)),
    ("contiguous", lambda value: np.repeat(value, 2, axis=0)[::2]),
    ("big-endian", lambda value: value.astype(">f4")),
    ("numpy array", lambda value: value.tolist()),
    ("bytes", lambda value: value.tobytes()[:-1]),
])
def test_a_tensor_that_is_not_what_was_announced_is_refused_by_name(store, name, what, wrong):
    values = tensors(24)
    with pytest.raises(ballast.InvalidArgumentError, match=what) as refused:
        with store.weight_put(snapshot_of(values, name), None) as writer:
            writer.weight_put_tensor("embed.weight", wrong(values["embed.weight"]))
    assert "embed.weight" in refused.value.message and refused.value.details["tensor"] == "embed.weight"
    gone(store, writer.identity)


def test_a_tensor_that_was_not_announced_is_refused_and_the_writer_goes_on(store, name):
    values = tensors(25)
    with store.weight_put(snapshot_of(values, name), None, policy=HOT) as writer:
        with pytest.raises(ballast.InvalidArgumentError, match="stranger"):
            writer.weight_put_tensor("stranger", values["mask"])
        for key, value in values.items():
            writer.weight_put_tensor(key, np.zeros_like(value))
            writer.weight_put_tensor(key, value)  # again: replaces it
    found = ballast.get_state_dict(writer.identity, store=store)
    assert all(np.array_equal(found[key], value) for key, value in values.items())


def test_snapshots_that_contradict_themselves_are_refused(store, name):
    spec = TensorSpec("w", "F32", (6, 4))
    half = ((0, 0), (3, 4))
    wrong = [
        [spec, spec],
        [TensorSpec("w", "F32", (6, 4), aliases=("w",))],
        [TensorSpec("w", "F32", (6, 4), fragments=(half,))],
        [TensorSpec("w", "F32", (6, 4), fragments=(half, ((2, 0), (4, 4))))],
        [TensorSpec("w", "F32", (6, 4), fragments=(half, ((3, 0), (4, 4))))],
        [],
    ]
    for specs in wrong:
        with pytest.raises(ballast.InvalidArgumentError):
            store.weight_put(WeightSnapshot("default", name, "main", 1, tuple(specs)), None)
    for dtype in ("F99", "object", None, np.dtype("datetime64[s]")):
        with pytest.raises(ballast.InvalidArgumentError, match="w"):
            TensorSpec("w", dtype, (1,))
    assert not store.weight_is_exist(ballast.WeightRevisionIdentity("default", "default", name, "main", 1))


def test_no_room_is_said_with_numbers(store, name):
    huge = TensorSpec("w", "F32", (1 << 34,))
    with pytest.raises(ballast.CapacityExhaustedError) as full:
        store.weight_put(WeightSnapshot("default", name, "main", 1, (huge,)), None)
    assert full.value.details
    gone(store, ballast.WeightRevisionIdentity("default", "default", name, "main", 1))


def test_tied_weights_are_stored_once(store, name):
    shared = np.arange(1000, dtype=np.float32)
    record = ballast.save({"embed": shared, "head": shared, "other": shared + 1}, name, store=store, policy=HOT)
    assert record.manifest.logical_bytes == 2 * shared.nbytes
    loaded = ballast.load(name, store=store)
    assert np.array_equal(loaded["embed"], shared) and np.array_equal(loaded["head"], shared)
    out = np.empty_like(shared)
    store.weight_get(record.identity, None, {"embed": out, "head": out, "other": np.empty_like(shared)})
    assert np.array_equal(out, shared)


def test_progress_is_told(cluster, name):
    told = []
    store = ballast.WeightStore(cluster.nats, progress=lambda *update: told.append(update))
    values = {"w": np.zeros((1024, 1024), dtype=np.float32)}
    identity = publish(store, values, name)
    store.weight_get(identity, None, {"w": np.empty_like(values["w"])})
    phases = {phase for phase, *_ in told}
    assert {"sealing", "committing", "reading"} <= phases, phases
    assert ("reading", values["w"].nbytes, values["w"].nbytes, None) in told


def test_a_call_out_of_a_progress_callback_is_refused_by_name(cluster, name):
    told = []

    def asking(*_):
        try:
            ballast.WeightStore(cluster.nats).weight_is_exist(ballast.WeightRevisionIdentity("default", "default", "m", "main", 1))
        except ballast.BallastError as error:
            told.append(error)

    store = ballast.WeightStore(cluster.nats, progress=asking)
    ballast.save({"w": np.zeros(1000, np.float32)}, name, store=store)
    assert told and all(error.code == "INVALID_ARGUMENT" and "progress callback" in error.message for error in told)
    assert ballast.load(name, store=store)["w"].shape == (1000,)


def test_a_progress_callback_that_raises_does_no_harm(cluster, name):
    def raising(*update):
        raise RuntimeError("not interested")

    store = ballast.WeightStore(cluster.nats, progress=raising)
    with _unraisable():
        identity = publish(store, tensors(26), name)
    assert store.weight_is_exist(identity)


class _unraisable:
    """Keeps the interpreter's hook quiet while callbacks raise."""

    def __enter__(self):
        self.hook, sys.unraisablehook = sys.unraisablehook, lambda *_: None

    def __exit__(self, *_):
        sys.unraisablehook = self.hook


def test_ctrl_c_ends_a_put_and_a_wait_and_leaves_nothing(cluster, store, name):
    script = textwrap.dedent("""
        import sys, numpy as np, ballast
        store, name = ballast.WeightStore(sys.argv[1]), sys.argv[2]
        snapshot = ballast.WeightSnapshot.from_tensors({"w": np.zeros(4, np.float32)}, resource_id=name, weight_generation=1)
        try:
            with store.weight_put(snapshot, None) as writer:
                print("writing", flush=True)
                ballast.wait("nobody-ever", 7, store=store)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script, cluster.nats, name], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == "interrupted\n" and process.returncode == 0
    gone(store, ballast.WeightRevisionIdentity("default", "default", name, "main", 1))


def test_a_killed_writer_leaves_nothing(cluster, store, name):
    script = textwrap.dedent("""
        import os, sys, numpy as np, ballast
        store = ballast.WeightStore(sys.argv[1])
        values = {"w": np.zeros((512, 1024), np.float32), "v": np.ones(4, np.float32)}
        snapshot = ballast.WeightSnapshot.from_tensors(values, resource_id=sys.argv[2], weight_generation=1)
        writer = store.weight_put(snapshot, None)
        writer.weight_put_tensor("w", values["w"])
        os.kill(os.getpid(), 9)
    """)
    subprocess.run([sys.executable, "-c", script, cluster.nats, name], env=dict(os.environ), timeout=60)
    identity = ballast.WeightRevisionIdentity("default", "default", name, "main", 1)
    # The session ends by its time to live, 15 s on the log's clock.
    until(lambda: store.weight_get_metadata(identity).metadata.availability is WeightAvailability.DELETED, seconds=60)
    gone(store, identity)


def test_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(ballast.BusyError("in use", {"a": 1})))
    assert (type(error), error.message, error.details) == (ballast.BusyError, "in use", {"a": 1})
    assert json.dumps(error.details) == '{"a": 1}'


def test_no_lease_is_left_by_any_of_this(store, name):
    identity = publish(store, tensors(27), name)
    assert leases(store, identity) == 0

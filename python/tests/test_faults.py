"""Reads while parts of the cluster die: never a success that is none, no lease left, and the same call completes later."""

import os
import pathlib
import signal
import sys

import numpy as np
import pytest

import ballast
from ballast.dtensor import DeviceMesh, Shard, placement
from conftest import ROOT, leases, until
from test_store import HOT, at_rest, snapshot_of

sys.path.insert(0, str(ROOT / "ops"))


@pytest.fixture
def parts(tmp_path):
    """A cluster of separate processes, all run by the command that the package brings."""
    from cluster import Cluster

    command = tmp_path / "ballast"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -m ballast \"$@\"\n")
    command.chmod(0o755)
    with Cluster(tmp_path / "cluster", command) as running:
        running.start()
        yield running


def test_a_source_killed_in_the_middle_of_a_read_is_no_success_and_the_retry_completes(parts):
    values = {f"layer.{at:03}": np.full(1 << 20, at, np.float32) for at in range(64)}
    identity = ballast.save(values, "large", store=parts.url, policy=HOT).identity
    killed = []

    def kill(phase, done, total, note):
        if phase == "reading" and 0 < done < total and not killed:
            parts.transfer_workers[0].kill()
            killed.append(done)

    store = ballast.WeightStore(parts.url, route="tcp", progress=kill)
    mesh = DeviceMesh((2,))
    target = placement(mesh, {key: ("F32", value.shape, [Shard(0)]) for key, value in values.items()}).local("rank1")
    buffers = target.empty(lambda shape, spec: np.zeros(shape, np.float32))
    with pytest.raises(ballast.UnavailableError) as failed:
        store.weight_get(identity, target, buffers)
    assert killed
    details = failed.value.details
    assert details["unread"] and details["written_count"] + details["unread_count"] == len(values)
    for key in details["written"]:
        assert (buffers[key] == values[key][: len(buffers[key])]).all(), key
    until(lambda: leases(store, identity) == 0)

    parts.transfer_workers[0].start()
    until(lambda: store.weight_is_exist(identity))
    store.weight_get(identity, target, buffers)
    for key, value in values.items():
        assert np.array_equal(buffers[key], value[len(value) // 2:]), key
    assert leases(store, identity) == 0


@pytest.mark.parametrize("route", ["unix", "tcp"])
def test_a_byte_that_flipped_on_disk_is_never_returned(parts, route):
    values = {f"layer.{at}": np.arange(1 << 16, dtype=np.float32) + at for at in range(4)}
    store = ballast.WeightStore(parts.url, route=route)
    identity = ballast.save(values, "cold", store=store, policy=ballast.WeightStoragePolicy("COLD", 0.5, "MANUAL")).identity
    assert at_rest(store, identity).metadata.residency.name == "COLD"
    wanted = np.float32(12345) + np.float32(2)  # an element of layer.2, somewhere in its middle
    flipped = 0
    for path in (path for folder in parts.cold_dirs for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= 1 << 20):
        content = np.fromfile(path, dtype=np.uint8)
        words = content[: len(content) // 4 * 4].view(np.float32)
        whole = values["layer.2"]
        for at in np.flatnonzero(words == wanted):
            start = at - 12345
            if start >= 0 and np.array_equal(words[start:start + len(whole)], whole):
                with open(path, "r+b") as file:
                    file.seek(int(at) * 4)
                    file.write(b"\xff")
                flipped += 1
    assert flipped == 1
    mesh = DeviceMesh((2,))
    target = placement(mesh, {key: ("F32", value.shape, [Shard(0)]) for key, value in values.items()}).local("rank1")
    buffers = target.empty(lambda shape, spec: np.zeros(shape, np.float32))
    # The other half of the tensor is wanted; its checksum covers all of it.
    with pytest.raises(ballast.BallastError) as failed:
        store.weight_get(identity, target, buffers)
    assert failed.value.code in ("CHECKSUM_MISMATCH", "UNAVAILABLE") and "layer.2" in failed.value.message
    assert "layer.2" not in failed.value.details["written"]
    until(lambda: leases(store, identity) == 0)


def two_parts(store, name):
    """A coordinator and a participant that have brought half of a model each."""
    values = {"a": np.full(1 << 18, 1, np.float32), "b": np.full(1 << 18, 2, np.float32)}
    snapshot = snapshot_of(values, name)
    first = store.weight_put(snapshot.shared(["rank0", "rank1"], participant="rank0", patience=5), policy=HOT)
    first.weight_put_tensor("a", values["a"])
    second = store.weight_put(snapshot.part("rank1", first.session))
    second.weight_put_tensor("b", values["b"])
    return first, second, values


def serves(store):
    """Whether a node takes an import."""
    try:
        return ballast.save({"w": np.zeros(3, np.float32)}, "probe", store=store, policy=HOT)
    except ballast.UnavailableError:
        return None


def lost(parts, call):
    with pytest.raises(ballast.UnavailableError) as failed:
        call()
    node = parts.transfer_workers[0].name
    for word in (f"node {node} was restarted since the import began", "put everything again"):
        assert word in failed.value.message, failed.value.message
    assert failed.value.details == {"restarted_nodes": [node]}
    return failed.value


def test_a_node_that_was_restarted_says_what_became_of_the_imports_that_it_had(parts):
    store = ballast.WeightStore(parts.url)
    first, second, values = two_parts(store, "shared")
    single = store.weight_put(snapshot_of(values, "single"), policy=HOT)
    single.weight_put_tensor("a", values["a"])
    other = store.weight_put(snapshot_of(values, "other"), policy=HOT)
    other.weight_put_tensor("a", values["a"])
    parts.transfer_workers[0].kill()
    with pytest.raises(ballast.UnavailableError, match="if the node was restarted, everything has to be put again"):
        other.weight_put_tensor("b", values["b"])
    other.abort()
    parts.transfer_workers[0].start()
    until(lambda: serves(store))
    lost(parts, second.commit)
    assert "the import was given up" in lost(parts, first.commit).message
    lost(parts, lambda: single.weight_put_tensor("b", values["b"]))
    single.abort()
    # What it says to do is what helps.
    for name in ("shared", "single"):
        identity = ballast.WeightRevisionIdentity("default", "default", name, "main", 1)
        until(lambda: store.weight_get_metadata(identity).metadata.availability is ballast.WeightAvailability.DELETED)
    first, second, values = two_parts(store, "shared")
    second.commit()
    assert first.commit().availability is ballast.WeightAvailability.READY
    assert ballast.save(values, "single", store=store, policy=HOT).identity.weight_generation == 1


def is_stopped(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return stat.rsplit(")", 1)[1].split()[0] == "T"


def test_the_log_away_is_unavailable_and_what_is_mapped_stays_readable(parts):
    values = {"w": np.arange(1000, dtype=np.float32)}
    store = ballast.WeightStore(parts.url, request_seconds=2)
    identity = ballast.save(values, "small", store=store, policy=HOT).identity
    with ballast.open(identity, store=store) as opened:
        os.kill(parts.nats.pid, signal.SIGSTOP)
        try:
            # The signal is sent, not obeyed yet: a thread of the server may still answer.
            until(lambda: is_stopped(parts.nats.pid))
            with pytest.raises(ballast.UnavailableError):
                store.weight_get_metadata(identity)
            assert np.array_equal(opened["w"], values["w"])
        finally:
            os.kill(parts.nats.pid, signal.SIGCONT)
        until(lambda: leases(store, identity) == 1)

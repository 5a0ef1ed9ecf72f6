"""Many writers, one commit: the ranks of a job put one revision together, and whoever dies, is stale, or disagrees is named."""

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

import ballast
from ballast import TensorSpec, WeightAvailability, WeightSnapshot, aio
from ballast.dtensor import DeviceMesh, DTensorAdapter, Replicate, Shard, ShardedTensor, placement
from conftest import leases, tensors, until
from test_dtensor import read_all
from test_store import HOT
from test_writers import gone

HERE = pathlib.Path(__file__).parent
RANKS = ["rank0", "rank1"]


class Rank:
    """One rank in a process of its own."""

    def __init__(self, cluster, model, name, rank, session=None, ranks=2, **more):
        job = {"nats": cluster.nats, "model": str(model), "name": name, "rank": rank, "ranks": ranks, "session": session, **more}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "rank_process.py"), json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=dict(os.environ))

    def told(self, what):
        """What it says next; it must be of this kind."""
        line = self.process.stdout.readline()
        assert line, f"the rank ended with {self.process.wait()} before it said {what}"
        said = json.loads(line)
        assert what in said, said
        return said

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, what):
        said = self.told(what)
        assert self.process.wait(60) == 0
        self.close()
        return said

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.close()

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small model in a file, with what is cut by columns, by rows, and not at all."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(77)
    values = {
        "a.output.dense.weight": rng.standard_normal((64, 1024), dtype=np.float32),
        "b.weight": rng.standard_normal((1024, 96), dtype=np.float32),
        "c.large": rng.standard_normal((2048, 512), dtype=np.float32),
        "d.bias": rng.standard_normal(300, dtype=np.float32),
        "e.odd": rng.standard_normal((3, 5)).astype(np.float16),
    }
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file(values, path)
    return path, values


def identity_of(name, generation=1):
    return ballast.WeightRevisionIdentity("default", "default", name, "main", generation)


def loaded(store, identity, values):
    found = ballast.get_state_dict(identity, store=store)
    assert found.keys() == values.keys()
    assert all(np.array_equal(found[key], value) and found[key].dtype == value.dtype for key, value in values.items())


@pytest.mark.parametrize("route", ["unix", "tcp"])
def test_two_processes_save_one_model_and_neither_sends_all_of_it(cluster, store, name, checkpoint, route):
    path, values = checkpoint
    first = Rank(cluster, path, name, 0, route=route)
    session = first.told("session")["session"]
    second = Rank(cluster, path, name, 1, session, route=route)
    assert second.told("session")["session"] == session
    part = second.end("report")
    whole = first.end("report")
    assert (part["revision"], whole["revision"]) == (None, "READY")
    assert part["report"]["participant"] == "rank1"
    total = sum(value.nbytes for value in values.values())
    assert part["report"]["bytes"] == part["held"] < total and whole["held"] < total
    assert part["report"]["sent_bytes"] <= part["report"]["bytes"]
    loaded(store, identity_of(name), values)


def test_a_killed_rank_is_replaced_and_the_commit_completes(cluster, store, name, checkpoint):
    path, values = checkpoint
    first = Rank(cluster, path, name, 0)
    session = first.told("session")["session"]
    # In the middle of its part: two of its tensors are with the node.
    second = Rank(cluster, path, name, 1, session, pause=3)
    second.told("session")
    second.told("paused")
    second.kill()
    again = Rank(cluster, path, name, 1, session)
    again.told("session")
    report = again.end("report")["report"]
    assert first.end("report")["revision"] == "READY"
    assert report["sent_bytes"] < report["bytes"], "what the first run had sent was not sent again"
    loaded(store, identity_of(name), values)


def test_a_run_that_was_replaced_is_refused_at_once(cluster, store, name, checkpoint):
    path, values = checkpoint
    first = Rank(cluster, path, name, 0, pause="commit")
    session = first.told("session")["session"]
    zombie = Rank(cluster, path, name, 1, session, pause=2)
    zombie.told("session")
    zombie.told("paused")
    again = Rank(cluster, path, name, 1, session)
    again.told("session")
    again.end("report")
    zombie.go_on()
    refused = zombie.end("error")
    assert refused["error"] == "ConflictError" and "rank1" in refused["message"], refused
    assert refused["details"]["participant"] == "rank1"
    first.told("paused")
    first.go_on()
    assert first.end("report")["revision"] == "READY"
    loaded(store, identity_of(name), values)


def test_a_killed_coordinator_comes_again_under_its_session(cluster, store, name, checkpoint):
    path, values = checkpoint
    own = f"{name}-step-7"
    first = Rank(cluster, path, name, 0, own=own, pause=3)
    assert first.told("session")["session"] == own
    first.told("paused")
    second = Rank(cluster, path, name, 1, own)
    second.told("session")
    first.kill()
    second.end("report")
    again = Rank(cluster, path, name, 0, own=own)
    again.told("session")
    assert again.end("report")["revision"] == "READY"
    loaded(store, identity_of(name), values)


def test_a_coordinator_that_was_replaced_leaves_the_import_to_its_successor(store, name):
    values, held, snapshots = two_halves(name)
    adapter = DTensorAdapter()
    shared = snapshots[0].shared(RANKS, participant="rank0", session=f"{name}-step-7")
    with pytest.raises(ballast.ConflictError):
        with store.weight_put(shared, adapter, policy=HOT) as first:
            with store.weight_put(snapshots[1].part("rank1", first.session), adapter) as second:
                put_all(second, held[1])
            # Started again while it was only slow; and this run fails in turn.
            with pytest.raises(ZeroDivisionError):
                with store.weight_put(shared, adapter, policy=HOT):
                    1 / 0
            put_all(first, held[0])
            first.commit()
    with store.weight_put(shared, adapter, policy=HOT) as again:
        put_all(again, held[0])
    assert again.revision.availability is WeightAvailability.READY
    loaded(store, again.identity, values)


def test_a_dead_rank_is_named_at_the_commit_and_nothing_stays(cluster, store, name, checkpoint):
    path, _ = checkpoint
    first = Rank(cluster, path, name, 0, ranks=3, patience=1.0, pause="commit")
    session = first.told("session")["session"]
    third = Rank(cluster, path, name, 2, session, ranks=3)
    third.told("session")
    third.end("report")
    dead = Rank(cluster, path, name, 1, session, ranks=3, pause=1)
    dead.told("session")
    dead.told("paused")
    dead.kill()
    first.told("paused")
    first.go_on()
    refused = first.end("error")
    assert refused["error"] == "NotReadyError" and refused["details"]["participants"] == ["rank1"], refused
    assert "rank1 was last heard of" in refused["message"], refused
    gone(store, identity_of(name))


def test_a_rank_that_never_came_is_named(store, name):
    values = tensors(31)
    snapshot = WeightSnapshot.from_tensors(values, resource_id=name, weight_generation=1)
    with pytest.raises(ballast.NotReadyError, match="rank1 has not joined") as missing:
        with store.weight_put(snapshot.shared(RANKS, participant="rank0", patience=0.5)) as writer:
            for key, value in values.items():
                writer.weight_put_tensor(key, value)
    assert missing.value.details["participants"] == ["rank1"]
    gone(store, writer.identity)


def test_different_bytes_for_a_replicated_tensor_name_both_ranks(cluster, store, name, checkpoint):
    path, _ = checkpoint
    first = Rank(cluster, path, name, 0)
    session = first.told("session")["session"]
    second = Rank(cluster, path, name, 1, session, spoil="d.bias")
    second.told("session")
    for refused in (second.end("error"), first.end("error")):
        assert refused["error"] == "ConflictError", refused
        assert "rank0" in refused["message"] and "rank1" in refused["message"] and "d.bias" in refused["message"], refused
        assert refused["details"]["participants"] == RANKS and refused["details"]["tensor"] == "d.bias"
    gone(store, identity_of(name))


def test_a_fragment_that_nobody_brings_is_named(cluster, store, name, checkpoint):
    path, _ = checkpoint
    first = Rank(cluster, path, name, 0)
    session = first.told("session")["session"]
    second = Rank(cluster, path, name, 1, session, leave_out=["c.large"])
    second.told("session")
    second.end("report")
    refused = first.end("error")
    assert refused["error"] == "InvalidArgumentError" and refused["details"]["tensors"] == ["c.large"], refused
    assert "[1024, 0]" in refused["message"], refused
    gone(store, identity_of(name))


def two_halves(name, generation=1):
    """What each of two ranks holds: half of one tensor, and all of another."""
    value, mesh = np.arange(600, dtype=np.float32).reshape(60, 10), DeviceMesh((2,))
    tensors = ShardedTensor.scatter(mesh, [Shard(0)], value), ShardedTensor.scatter(mesh, [Replicate()], value + 1)
    held = []
    for rank in range(2):
        own = [ShardedTensor(mesh, all_.placements, all_.dtype, all_.shape, {rank: all_.local[rank]}) for all_ in tensors]
        held.append({"w": own[0], "v": own[1]})
    snapshots = [
        WeightSnapshot.from_tensors(own, resource_id=name, weight_generation=generation, adapter=DTensorAdapter()) for own in held]
    return {"w": value, "v": value + 1}, held, snapshots


def put_all(writer, held):
    for key, tensor in held.items():
        writer.weight_put_tensor(key, tensor)


def test_a_stale_rank_is_refused_at_once_and_harms_nobody(store, name):
    values, held, snapshots = two_halves(name)
    adapter = DTensorAdapter()
    stale = store.weight_put(snapshots[0].shared(RANKS, participant="rank0"), adapter)
    old = stale.session
    straggler = store.weight_put(snapshots[1].part("rank1", old), adapter)
    stale.abort()
    # Of a session that has ended, at once; its bytes are refused as well.
    with pytest.raises((ballast.LeaseExpiredError, ballast.ConflictError)):
        store.weight_put(snapshots[1].part("rank1", old), adapter)
    with pytest.raises(ballast.BallastError):
        put_all(straggler, held[1])
        straggler.commit()
    with store.weight_put(snapshots[0].shared(RANKS, participant="rank0"), adapter, policy=HOT) as first:
        with pytest.raises(ballast.ConflictError, match=old):
            store.weight_put(snapshots[1].part("rank1", old), adapter)
        with pytest.raises(ballast.InvalidArgumentError, match="rank7"):
            store.weight_put(snapshots[1].part("rank7", first.session), adapter)
        with pytest.raises(ballast.ConflictError, match="geometry"):
            other = WeightSnapshot("default", name, "main", 1, (TensorSpec("w", "F32", (60, 10)),))
            store.weight_put(other.part("rank1", first.session), adapter)
        put_all(first, held[0])
        with store.weight_put(snapshots[1].part("rank1", first.session), adapter) as second:
            put_all(second, held[1])
        assert second.revision is None and second.report["bytes"] == values["w"].nbytes // 2 + values["v"].nbytes
    loaded(store, first.identity, values)
    # And of the last generation, which is published.
    with pytest.raises(ballast.ConflictError, match="published"):
        store.weight_put(snapshots[1].part("rank1", first.session), adapter)


def test_an_exception_in_a_ranks_block_leaves_the_import_open_for_its_next_run(store, name):
    values, held, snapshots = two_halves(name)
    adapter = DTensorAdapter()
    with store.weight_put(snapshots[0].shared(RANKS, participant="rank0"), adapter, policy=HOT) as first:
        with pytest.raises(ZeroDivisionError):
            with store.weight_put(snapshots[1].part("rank1", first.session), adapter) as second:
                second.weight_put_tensor("w", held[1]["w"])
                1 / 0
        with store.weight_put(snapshots[1].part("rank1", first.session), adapter) as second:
            put_all(second, held[1])
        put_all(first, held[0])
    loaded(store, first.identity, values)


def test_an_abandoned_import_of_several_ranks_leaves_nothing(cluster, store, name, checkpoint):
    path, _ = checkpoint
    first = Rank(cluster, path, name, 0, pause="commit")
    session = first.told("session")["session"]
    second = Rank(cluster, path, name, 1, session, pause="commit")
    second.told("session")
    assert first.told("paused") and second.told("paused")
    first.kill()
    second.kill()
    until(lambda: store.weight_get_metadata(identity_of(name)).metadata.availability is WeightAvailability.DELETED, seconds=90)
    gone(store, identity_of(name))


def test_a_coordinator_that_holds_nothing_and_parts_that_know_only_their_own(store, name):
    """Pipeline ranks: each describes its own layers, and the job assembles the descriptions."""
    values = {f"layer.{at}": np.full((8, 3), at, dtype=np.float32) for at in range(4)}
    own = [{key: value for key, value in values.items() if int(key[-1]) // 2 == rank} for rank in range(2)]
    described = [WeightSnapshot.from_tensors(part, resource_id=name, weight_generation=1) for part in own]
    snapshot = WeightSnapshot.assemble(reversed(described))
    assert [spec.name for spec in snapshot.tensors] == sorted(values)
    with store.weight_put(snapshot.shared(RANKS), policy=HOT) as coordinator:
        with pytest.raises(ballast.InvalidArgumentError, match="no participant of its own"):
            coordinator.weight_put_tensor("layer.0", values["layer.0"])
        for rank, part in enumerate(own):
            with store.weight_put(snapshot.part(RANKS[rank], coordinator.session)) as writer:
                put_all(writer, part)
    loaded(store, coordinator.identity, values)
    assert coordinator.report["bytes"] == sum(value.nbytes for value in values.values())
    halves = [TensorSpec("w", "F32", (6, 4), fragments=(((at, 0), (3, 4)),)) for at in (3, 0)]
    parts = [WeightSnapshot("default", name, "main", 1, (half,)) for half in halves]
    assert WeightSnapshot.assemble(parts).tensors[0].fragments == (((0, 0), (3, 4)), ((3, 0), (3, 4)))
    for wrong in (TensorSpec("w", "F32", (6, 5)), TensorSpec("w", "F32", (6, 4))):
        with pytest.raises(ballast.InvalidArgumentError, match="'w'"):
            WeightSnapshot.assemble([parts[0], WeightSnapshot("default", name, "main", 1, (wrong,))])


def test_a_replacement_by_several_ranks(store, name):
    old, held, snapshots = two_halves(name)
    base = ballast.save(old, name, store=store, policy=HOT)
    _, held, snapshots = two_halves(name, generation=2)
    adapter = DTensorAdapter()
    with store.weight_upsert(
        snapshots[0].shared(RANKS, participant="rank0"), adapter, replacing=base.identity,
        expected_metadata_generation=base.metadata_generation, policy=HOT,
    ) as first:
        put_all(first, held[0])
        with store.weight_put(snapshots[1].part("rank1", first.session), adapter) as second:
            put_all(second, held[1])
    assert first.replacement is not None and first.identity.weight_generation == 2
    loaded(store, first.identity, old)
    until(lambda: not store.weight_is_exist(base.identity))
    with pytest.raises(ballast.InvalidArgumentError, match="a part is put"):
        store.weight_upsert(snapshots[1].part("rank1", "s"), adapter, replacing=base.identity, expected_metadata_generation=1)


def test_what_makes_no_sense_is_refused_before_anything_is_sent(store, name):
    snapshot = WeightSnapshot.from_tensors(tensors(33), resource_id=name, weight_generation=1)
    for wrong in (
        lambda: snapshot.shared([]), lambda: snapshot.shared(["a", "a"]), lambda: snapshot.shared("rank0"),
        lambda: snapshot.shared(None), lambda: snapshot.shared(7), lambda: snapshot.shared(iter(())),
        lambda: store.weight_put(snapshot.part("rank0", "s"), policy=HOT),
        lambda: snapshot.shared([1]), lambda: snapshot.shared(RANKS, participant="rank7"), lambda: snapshot.part("rank0", None),
        lambda: snapshot.part(None, "s"), lambda: store.weight_put(snapshot.shared(["has a space"])),
        lambda: store.weight_put(snapshot.shared(RANKS, patience=-1.0)), lambda: store.weight_put(snapshot.part("rank0", "a b")),
    ):
        with pytest.raises(ballast.InvalidArgumentError):
            wrong()
    with pytest.raises(ballast.NotFoundError):
        store.weight_put(snapshot.part("rank0", "nobodys"))


def test_a_tensor_of_no_elements_is_nobodys_to_send(store, name):
    values = {"w": np.arange(6, dtype=np.float32), "none": np.zeros((0, 5), dtype=np.float32)}
    snapshot = WeightSnapshot.from_tensors(values, resource_id=name, weight_generation=1)
    with store.weight_put(snapshot.shared(RANKS, participant="rank0"), policy=HOT) as first:
        first.weight_put_tensor("none", values["none"])
        with store.weight_put(snapshot.part("rank1", first.session)) as second:
            second.weight_put_tensor("w", values["w"])
    loaded(store, first.identity, values)


def test_ranks_in_asyncio(cluster, store, name):
    values, held, snapshots = two_halves(name)
    adapter = DTensorAdapter()

    async def save():
        both = aio.WeightStore(cluster.nats)
        async with both.weight_put(snapshots[0].shared(RANKS, participant="rank0"), adapter, policy=HOT) as first:
            async def part():
                async with both.weight_put(snapshots[1].part("rank1", first.session), adapter) as second:
                    for key, tensor in held[1].items():
                        await second.weight_put_tensor(key, tensor)

            other = asyncio.create_task(part())
            for key, tensor in held[0].items():
                await first.weight_put_tensor(key, tensor)
            await other
        return first.identity

    loaded(store, asyncio.run(save()), values)


def test_eight_ranks_in_a_grid_and_their_reads(store, name):
    """DP2 x TP4: what two data-parallel ranks hold is sent once."""
    rng = np.random.default_rng(5)
    values = {"w": rng.random((10, 12), dtype=np.float32), "v": rng.random((7, 3), dtype=np.float32), "s": np.float32([2.5])}
    mesh, adapter = DeviceMesh((2, 4), ("dp", "tp")), DTensorAdapter()
    cuts = {"w": [Replicate(), Shard(1)], "v": [Replicate(), Shard(0)], "s": [Replicate(), Replicate()]}
    whole = {key: ShardedTensor.scatter(mesh, cuts[key], value) for key, value in values.items()}
    ranks = [f"rank{rank}" for rank in range(8)]
    sent = []
    with store.weight_put(
        WeightSnapshot.from_tensors(whole, resource_id=name, weight_generation=1, adapter=adapter).shared(ranks), adapter, policy=HOT,
    ) as coordinator:
        for rank, participant in enumerate(ranks):
            own = {key: ShardedTensor(mesh, cuts[key], all_.dtype, all_.shape, {rank: all_.local[rank]}) for key, all_ in whole.items()}
            snapshot = WeightSnapshot.from_tensors(own, resource_id=name, weight_generation=1, adapter=adapter)
            with store.weight_put(snapshot.part(participant, coordinator.session), adapter) as writer:
                put_all(writer, own)
            sent.append(writer.report["sent_bytes"])
    assert sum(sent) == sum(value.nbytes for value in values.values()) and sent[4:] == [0] * 4
    for shape in ((1,), (3,)):
        target = placement(DeviceMesh(shape), {key: ("F32", value.shape, [Shard(0)]) for key, value in values.items()})
        read_all(store, coordinator.identity, target, values, one_by_one=True)
    until(lambda: leases(store, coordinator.identity) == 0)

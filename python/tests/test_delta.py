"""Sparse deltas: the next generation is exactly what numpy makes of the base, what does not fit is refused by name and leaves
nothing, and an upsert does not send what its base has."""

import sys

import ml_dtypes
import numpy as np
import pytest

import ballast
from ballast import WeightMigrationMode, WeightResidencyState, WeightStoragePolicy, delta
from ballast.dtensor import DeviceMesh, DTensorAdapter, Shard, ShardedTensor
from conftest import ROOT, leases, until
from test_store import HOT, at_rest, publish, snapshot_of
from test_writers import gone

sys.path.insert(0, str(ROOT / "ops"))

COLD = WeightStoragePolicy(WeightResidencyState.COLD, 0.5, WeightMigrationMode.MANUAL)
GENERATIONS = {"base_generation": 1, "delta_generation": 2}


def model(seed=1):
    """Tensors of many types; several of one unit's size, one large, one scalar, one empty."""
    rng = np.random.default_rng(seed)
    floats = rng.standard_normal((300, 520), dtype=np.float32)
    return {
        "large": rng.standard_normal((700, 1030), dtype=np.float32),
        "bf16": floats.astype(ml_dtypes.bfloat16),
        "f16": floats[:40].astype(np.float16),
        "e4m3": floats[:33].astype(ml_dtypes.float8_e4m3fn),
        "ids": rng.integers(-2**40, 2**40, 1000),
        "deep": rng.integers(0, 255, (3, 5, 7, 11), dtype=np.uint8),
        "mask": rng.integers(0, 2, 99).astype(bool),
        "scalar": np.array(1.5, dtype=np.float64),
        "empty": np.zeros((0, 7), dtype=np.float32),
        "untouched": rng.standard_normal((256, 1024), dtype=np.float32),
    }


def places(array, share, rng):
    """Coordinates of a few elements, in no order."""
    count = max(1, int(array.size * share))
    flat = rng.choice(array.size, count, replace=False)
    return np.stack(np.unravel_index(flat, array.shape), axis=1) if array.ndim else np.empty((1, 0), np.int64)


def changed(values, seed, names):
    """Some elements of some tensors are others."""
    rng = np.random.default_rng(seed)
    after = {key: value.copy() for key, value in values.items()}
    for key in names:
        at = tuple(places(after[key], 0.01, rng).T)
        fresh = rng.permuted(values[key].reshape(-1))[: len(at[0]) if at else 1]
        after[key][at if at else ()] = fresh if at else values[key] + 1
    return after


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def expect(store, identity, expected):
    with ballast.open(identity, store=store) as opened:
        assert set(opened) == set(expected)
        for key, value in expected.items():
            found = opened[key]
            assert found.dtype == value.dtype and found.shape == value.shape, key
            assert np.array_equal(bits(found), bits(value)), key


@pytest.mark.parametrize("policy", [HOT, COLD, None], ids=["hot", "cold", "automatic"])
def test_an_overwriting_delta_makes_the_generation_that_numpy_makes(store, name, policy):
    before = model()
    base = publish(store, before, name, policy=policy)
    if policy is not HOT:
        at_rest(store, base)
    names = ["large", "bf16", "f16", "e4m3", "ids", "deep", "mask", "scalar"]
    after = changed(before, 2, names)
    deltas = [delta.between(key, before[key], after[key], **GENERATIONS) for key in names]
    assert all(len(one.values) for one in deltas)
    record = delta.upsert(deltas, replacing=name, wait=True, store=store)
    assert record.identity.weight_generation == 2
    expect(store, record.identity, after)
    assert not store.weight_is_exist(base), "the base is retired"


@pytest.mark.parametrize("tile", [None, (1, 1), (7, 64), (1000, 1000)])
def test_tiles_of_any_shape_mean_the_same(store, name, tile):
    before = {"w": np.arange(60 * 90, dtype=np.int32).reshape(60, 90)}
    publish(store, before, name)
    rng = np.random.default_rng(4)
    at = places(before["w"], 0.2, rng)
    values = rng.integers(0, 10**6, len(at), dtype=np.int32)
    after = before["w"].copy()
    after[tuple(at.T)] = values
    one = delta.of_entries("w", (60, 90), at, values, tile_shape=tile, **GENERATIONS)
    record = delta.upsert([one], replacing=name, store=store)
    expect(store, record.identity, {"w": after})


def test_an_additive_delta_adds_once_and_rounds_once(store, name):
    before = {key: value for key, value in model().items() if key in ("large", "bf16", "f16", "ids", "deep", "scalar", "untouched")}
    publish(store, before, name)
    rng = np.random.default_rng(5)
    after, deltas = dict(before), []
    for key in ("large", "bf16", "f16", "ids", "deep", "scalar"):
        at = places(before[key], 0.02, rng)
        base = before[key][tuple(at.T)] if before[key].ndim else before[key].reshape(1)
        values = rng.permuted(base)
        after[key] = before[key].copy()
        if key in ("bf16", "f16"):
            summed = (base.astype(np.float32) + values.astype(np.float32)).astype(base.dtype)
        else:
            summed = base + values
        after[key][tuple(at.T) if before[key].ndim else ()] = summed if before[key].ndim else summed[0]
        deltas.append(delta.of_entries(key, before[key].shape, at, values, semantics="additive", **GENERATIONS))
    record = delta.upsert(deltas, replacing=name, semantics=delta.Semantics.ADDITIVE, store=store)
    expect(store, record.identity, after)


@pytest.mark.parametrize("semantics", list(delta.Semantics))
def test_a_delta_is_applied_once(store, name, semantics):
    values = np.arange(1000, dtype=np.int64)
    base = publish(store, {"w": values}, name)
    one = delta.of_entries("w", (1000,), [[7], [3]], np.array([10, 20]), semantics=semantics, **GENERATIONS)
    record = delta.upsert([one], replacing=base, semantics=semantics, wait=True, store=store)
    after = values.copy()
    after[[7, 3]] = np.array([10, 20]) + (values[[7, 3]] if semantics is delta.Semantics.ADDITIVE else 0)
    expect(store, record.identity, {"w": after})
    for again in (base, name):
        with pytest.raises(ballast.ConflictError, match="applied once"):
            delta.upsert([one], replacing=again, semantics=semantics, store=store)
    # On what it was made into it does not fit either.
    with pytest.raises(ballast.StaleGenerationError, match="'w'|\"w\"") as stale:
        delta.upsert([one], replacing=record.identity, semantics=semantics, store=store)
    assert stale.value.details["tensor"] == "w"
    expect(store, record.identity, {"w": after})
    until(lambda: leases(store, record.identity) == 0)


def test_elements_that_are_named_twice_are_added_twice_and_never_overwritten_twice(store, name):
    base = publish(store, {"w": np.zeros(10, dtype=np.int32)}, name)
    entries = dict(indices=[[2], [2], [5]], values=np.array([1, 2, 4], dtype=np.int32))
    with pytest.raises(ballast.InvalidArgumentError, match="twice"):
        delta.upsert([delta.of_entries("w", (10,), **entries, **GENERATIONS)], replacing=base, store=store)
    nothing_stays(store, base)
    one = delta.of_entries("w", (10,), **entries, semantics="additive", **GENERATIONS)
    record = delta.upsert([one], replacing=base, semantics="additive", store=store)
    expect(store, record.identity, {"w": np.array([0, 0, 3, 0, 0, 4, 0, 0, 0, 0], dtype=np.int32)})


def test_sharded_and_tied_tensors_are_changed_where_they_lie(store, name):
    whole = np.arange(60 * 35, dtype=np.float32).reshape(60, 35)
    shards = {"w": ShardedTensor.scatter(DeviceMesh((4,)), [Shard(1)], whole)}
    snapshot = ballast.WeightSnapshot.from_tensors(shards, resource_id=name, weight_generation=1, adapter=DTensorAdapter())
    with store.weight_put(snapshot, DTensorAdapter(), policy=HOT) as writer:
        writer.weight_put_tensor("w", shards["w"])
    rng = np.random.default_rng(3)
    at = places(whole, 0.1, rng)
    after = whole.copy()
    after[tuple(at.T)] = rng.random(len(at), dtype=np.float32)
    record = delta.upsert([delta.between("w", whole, after, **GENERATIONS)], replacing=name, store=store)
    expect(store, record.identity, {"w": after})

    tied = np.arange(100, dtype=np.float32)
    name = name + "-tied"
    base = ballast.save({"embed": tied, "head": tied}, name, store=store).identity
    after = tied.copy()
    after[[4, 90]] = -1
    record = delta.upsert([delta.between("head", tied, after, **GENERATIONS)], replacing=base, store=store)
    expect(store, record.identity, {"embed": after, "head": after})


def nothing_stays(store, base):
    """No lease, no target, and the base as it was."""
    assert leases(store, base) == 0
    assert store.weight_is_exist(base) and not store.weight_is_exist(base.generation(base.weight_generation + 1))


def broken(edit, semantics="overwrite", **given):
    """A delta of three entries with something wrong in it."""
    entries = dict(indices=[[1, 1], [2, 5], [3, 3]], values=np.array([1, 2, 3], np.float32), **GENERATIONS)
    one = delta.of_entries("w", (4, 6), **{**entries, **given}, tile_shape=(2, 3), semantics=semantics)
    members = {name: np.array(getattr(one, name)) for name in ("indices", "values", "tile_coords", "tile_ptr")}
    metadata = dict(one.metadata)
    edit(metadata, members)
    return delta.SparseDelta(metadata, **members)


def put(member, at, value):
    def edit(metadata, members):
        members[member][at] = value
    return edit


def swap_tiles(metadata, members):
    members["tile_coords"][[0, 1]] = members["tile_coords"][[1, 0]]


def fewer_values(metadata, members):
    members["values"] = members["values"][:-1]


def other_member(metadata, members):
    metadata["members"] = {**metadata["members"], "values": {"dtype": "float64", "shape": [3]}}


WRONG = {
    "outside": (put("indices", (2, 0), 4), "outside the tensor"),
    "outside its tile": (put("indices", (0, 0), 2), "outside its tile"),
    "tiles": (swap_tiles, "tiles must ascend"),
    "pointers": (put("tile_ptr", 1, 3), "tile"),
    "pointers' end": (put("tile_ptr", -1, 2), "tile_ptr does not ascend from 0 to 3"),
    "values": (fewer_values, "values has 8 bytes"),
    "member dtype": (other_member, "values has the dtype"),
    "schema": (lambda metadata, members: metadata.update(version=2), "of version 2"),
    "field": (lambda metadata, members: metadata.pop("tile_shape"), "tile_shape"),
    "generations": (lambda metadata, members: metadata.update(delta_generation=1), "is not above base_generation"),
    "shape": (lambda metadata, members: metadata.update(global_shape=[4, 7]), "the tensor is"),
    "tensor": (lambda metadata, members: metadata.update(tensor_id="nobody"), "no such tensor"),
    "semantics": (lambda metadata, members: metadata.update(apply="scatter_add"), "Additive"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_does_not_fit_is_refused_by_name_and_leaves_nothing(store, name, which):
    edit, why = WRONG[which]
    base = publish(store, {"w": np.zeros((4, 6), np.float32)}, name)
    with pytest.raises(ballast.InvalidArgumentError, match=why) as refused:
        delta.upsert([broken(edit)], replacing=base, store=store)
    if which != "field":
        assert refused.value.details["tensor"] == ("nobody" if which == "tensor" else "w")
    nothing_stays(store, base)


def test_the_wrong_base_and_the_wrong_dtype_are_refused_by_name(store, name):
    base = publish(store, {"w": np.zeros((4, 6), np.float32), "e": np.zeros(8, ml_dtypes.float8_e5m2)}, name)

    def refuse(one, error, why, **given):
        with pytest.raises(error, match=why) as refused:
            delta.upsert([one], **{"replacing": base, "store": store, **given})
        nothing_stays(store, base)
        return refused.value.details

    same = lambda metadata, members: None
    assert refuse(broken(same, base_generation=2, delta_generation=3), ballast.StaleGenerationError, "for generation 2")["tensor"] == "w"
    refuse(broken(same, values=np.zeros(3, np.float16)), ballast.InvalidArgumentError, "values are F16, the tensor is F32")
    eighths = delta.of_entries("e", (8,), [[1]], np.zeros(1, ml_dtypes.float8_e5m2), semantics="additive", **GENERATIONS)
    assert refuse(eighths, ballast.InvalidArgumentError, "can not be added to", semantics="additive")["tensor"] == "e"
    current = store.weight_get_metadata(base).metadata.metadata_generation
    details = refuse(broken(same), ballast.StaleGenerationError, "decide anew", expected_metadata_generation=current + 3)
    assert details["current"] == current
    with pytest.raises(ballast.NotFoundError):
        delta.upsert([broken(same)], replacing="nobody-here", store=store)
    record = delta.upsert([broken(same)], replacing=base, expected_metadata_generation=current, store=store)
    assert record.identity.weight_generation == 2


def test_a_cold_base_that_warms_up_under_the_lease_is_no_stale_one(store, name):
    values = np.arange(1 << 16, dtype=np.float32)
    hot = WeightStoragePolicy(WeightResidencyState.HOT, 0.5, WeightMigrationMode.AUTO)
    base = publish(store, {"w": values, "v": values}, name, policy=hot)
    generation = at_rest(store, base).metadata.metadata_generation
    store.weight_migrate(base, target=WeightResidencyState.COLD, expected_metadata_generation=generation)
    generation = at_rest(store, base).metadata.metadata_generation
    after = values.copy()
    after[::1000] = -1
    one = delta.between("w", values, after, **GENERATIONS)
    record = delta.upsert([one], replacing=base, expected_metadata_generation=generation, wait=True, store=store)
    expect(store, record.identity, {"w": after, "v": values})


@pytest.mark.parametrize("route", ["unix", "tcp"])
def test_an_upsert_does_not_send_what_its_base_has(cluster, name, route):
    store = ballast.WeightStore(cluster.nats, route=route)
    values = {f"layer.{at}": np.random.default_rng(at).random(50_000 * (at % 3) + 7, np.float32) for at in range(12)}
    base = publish(store, values, name)
    after = dict(values, **{"layer.3": values["layer.3"] + 1, "layer.11": values["layer.11"] * 2})
    # One is found under another name.
    after["renamed"] = after.pop("layer.5")
    generation = store.weight_get_metadata(base).metadata.metadata_generation
    with store.weight_upsert(snapshot_of(after, name, 2), None, replacing=base, expected_metadata_generation=generation) as writer:
        for key, value in after.items():
            writer.weight_put_tensor(key, value)
        # Given again with other bytes, it is what came last.
        writer.weight_put_tensor("layer.0", after["layer.0"] - 1)
        writer.weight_put_tensor("layer.1", after["layer.1"] - 1)
        writer.weight_put_tensor("layer.1", after["layer.1"])
    after["layer.0"] = after["layer.0"] - 1
    sent = sum(after[key].nbytes for key in ("layer.3", "layer.11"))
    assert writer.report["reused_bytes"] >= sum(value.nbytes for value in after.values()) - sent - after["layer.0"].nbytes
    expect(store, writer.identity, after)
    until(lambda: not store.weight_is_exist(base))


@pytest.fixture
def parts(tmp_path):
    """Two nodes in processes of their own, run by the command that the package brings."""
    from cluster import Cluster

    command = tmp_path / "ballast"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -m ballast \"$@\"\n")
    command.chmod(0o755)
    with Cluster(tmp_path / "cluster", command, transfer_workers=2) as running:
        running.start()
        yield running


def holder_of(store, identity):
    [node] = store._connection.about("get_metadata", identity)["metadata"]["placement"]
    return node


def test_a_node_killed_in_the_middle_of_a_delta_leaves_nothing_and_the_retry_completes(parts):
    values = {f"layer.{at:03}": np.full(1 << 20, at, np.float32) for at in range(64)}
    store = ballast.WeightStore(parts.url, request_seconds=60)
    base = ballast.save(values, "large", store=store, policy=HOT).identity
    # The target goes where its base is.
    holder = holder_of(store, base)
    service = parts.transfer_workers[int(holder.rpartition("-")[2])]
    at = np.arange(0, 1 << 20, 97)
    added = np.full(len(at), 5, np.float32)
    deltas = [delta.of_entries(key, (1 << 20,), at[:, None], added, semantics="additive", **GENERATIONS) for key in values]
    after = {key: value.copy() for key, value in values.items()}
    for value in after.values():
        value[at] += 5
    killed = []

    def kill(phase, done, total, note):
        if phase == "writing" and 0 < done < total and not killed:
            service.kill()
            killed.append(done)

    with pytest.raises(ballast.UnavailableError):
        delta.upsert(deltas, replacing=base, semantics="additive", store=store, progress=kill)
    assert killed
    service.start()
    until(lambda: store.weight_is_exist(base))
    gone(store, base.generation(2))
    until(lambda: leases(store, base) == 0)
    record = delta.upsert(deltas, replacing=base, semantics="additive", store=store, wait=True)
    assert holder_of(store, record.identity) == holder
    expect(store, record.identity, after)


def test_a_base_on_another_node_is_read_from_there(parts):
    values = {f"layer.{at:03}": np.full(1 << 22, at, np.float32) for at in range(20)}
    filler = {f"filler.{at}": np.full(1 << 26, at, np.uint8) for at in range(10)}
    store = ballast.WeightStore(parts.url)
    # Each goes where most room is: in the end there is none for the target beside its base.
    ballast.save(filler, "filler-1", store=store, policy=HOT)
    base = ballast.save(values, "large", store=store, policy=HOT).identity
    ballast.save(filler, "filler-2", store=store, policy=HOT)
    after = dict(values, **{"layer.004": values["layer.004"].copy()})
    after["layer.004"][123] = 7
    one = delta.between("layer.004", values["layer.004"], after["layer.004"], **GENERATIONS)
    record = delta.upsert([one], replacing=base, store=store, wait=True)
    assert holder_of(store, record.identity) != holder_of(store, base)
    expect(store, record.identity, after)

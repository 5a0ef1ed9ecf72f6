"""Meshes and placements: what a rank holds, and reads in any other shape, against a brute force in numpy."""

import itertools
import json
import os
import pathlib
import random
import sys

import numpy as np
import pytest

import ballast
from ballast import TensorSpec, WeightPlacement, WeightSnapshot
from ballast.dtensor import DeviceMesh, DTensorAdapter, Replicate, Shard, ShardedTensor, bindings, box_of, chunk, placement, rank_name
from conftest import ROOT, leases, until
from test_store import HOT, at_rest

sys.path.insert(0, str(ROOT / "ops"))


def test_length_6_over_4_ranks_is_2_2_2_0():
    assert [chunk(6, 4, at) for at in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 0)]
    assert [chunk(5, 3, at)[1] for at in range(3)] == [2, 2, 1] and chunk(0, 2, 1) == (0, 0) and chunk(1, 3, 2) == (1, 0)
    mesh = DeviceMesh((4,))
    held = placement(mesh, {"w": ("F32", (6, 10), [Shard(0)])})
    assert [held.local(rank_name(rank)).fragments["w"][0][1] for rank in range(4)] == [(2, 10), (2, 10), (2, 10), (0, 10)]
    assert held.sizes["tp"] == 4 and held.exact
    assert placement(mesh, {"w": ("F32", (6, 10), [Shard(-1)])}).local("rank3").fragments["w"] == (((0, 9), (6, 1)),)


def test_torchs_own_objects_are_taken_by_their_looks():
    torch_shard = type("Shard", (), {"dim": 1})()
    torch_replicate = type("Replicate", (), {})()
    torch_mesh = type("DeviceMesh", (), {"mesh": np.arange(4).reshape(2, 2), "mesh_dim_names": ("dp", "tp")})()
    held = placement(torch_mesh, {"w": ("torch.float32", (4, 8), [torch_replicate, torch_shard])})
    assert held.local("rank1").fragments["w"] == (((0, 4), (4, 4)),) and held.tensors["w"].dtype == "F32"
    torch_mesh.get_coordinate = lambda: [1, 1]
    local = np.ones((4, 4), np.float32)
    looks = {"device_mesh": torch_mesh, "placements": (torch_replicate, torch_shard), "dtype": "torch.float32", "shape": (4, 8),
             "to_local": lambda self: local}
    dtensor = type("DTensor", (), looks)()
    adapter = DTensorAdapter()
    spec = adapter.describe("w", dtensor)
    assert spec.shape == (4, 8) and spec.fragments == (((0, 0), (4, 4)), ((0, 4), (4, 4)))
    assert [(box, buffer is local) for box, buffer in adapter.shards(spec, dtensor)] == [(((0, 4), (4, 4)), True)]
    partial = type("Partial", (), {})()
    with pytest.raises(ballast.InvalidArgumentError, match="reduce partial"):
        placement(torch_mesh, {"w": ("F32", (4, 8), [partial, torch_shard])})
    for wrong in ([Shard(0)], [Shard(2), Shard(0)]):
        with pytest.raises(ballast.InvalidArgumentError, match="'w'"):
            placement(torch_mesh, {"w": ("F32", (4, 8), wrong)})


def cut(value, box):
    offset, shape = box
    return value[tuple(slice(start, start + extent) for start, extent in zip(offset, shape))]


compared = [0]


def read_all(store, identity, target, values, one_by_one):
    """Reads every rank's boxes and compares them with numpy's."""
    by_rank = {}
    for name, own in target.participants.items():
        by_rank[name] = {key: np.full(boxes[0][1], 99).astype(values[key].dtype) for key, boxes in own.fragments.items()}
    if one_by_one:
        for name, buffers in by_rank.items():
            store.weight_get(identity, target.local(name), buffers)
    else:
        bound = [ballast.WeightBinding(key, buffer, target.participants[name].fragments[key][0], name)
                 for name, buffers in by_rank.items() for key, buffer in buffers.items()]
        store.weight_get(identity, target, bound)
    for name, buffers in by_rank.items():
        compared[0] += len(buffers)
        for key, buffer in buffers.items():
            assert np.array_equal(buffer, cut(values[key], target.participants[name].fragments[key][0])), (name, key)


def random_mesh(rng):
    shape = [rng.choice([1, 2, 3, 4]) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    names = [f"axis{at}" for at in range(len(shape))]
    kinds = rng.sample(["tp", "dp", "ep", "pp"], len(shape))
    return DeviceMesh(shape, names, kinds=dict(zip(names, kinds)) if rng.random() < 0.8 else {names[0]: "tp"})


def random_placements(rng, mesh, rank):
    return [Shard(rng.randrange(rank)) if rank and rng.random() < 0.6 else Replicate() for _ in mesh.shape]


@pytest.mark.parametrize("seed", range(12))
def test_random_layouts_into_random_layouts_are_numpys(store, name, seed):
    rng = random.Random(seed)
    values = {}
    for at in range(20):
        shape = [rng.choice([1, 2, 3, 5, 6, 7, 8]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4]))]
        dtype = rng.choice([np.float32, np.int8, np.float64, np.int16])
        values[f"t{at}"] = (np.arange(int(np.prod(shape))) * 7 + at).astype(dtype).reshape(shape)
    mesh = random_mesh(rng)
    sharded = {key: ShardedTensor.scatter(mesh, random_placements(rng, mesh, value.ndim), value) for key, value in values.items()}
    record = ballast.save(sharded, name, store=store, policy=HOT, adapter=DTensorAdapter())
    loaded = ballast.load(name, store=store)
    for key, value in values.items():
        assert np.array_equal(loaded[key], value) and loaded[key].shape == value.shape, key
    del loaded
    for _ in range(10):
        target_mesh = random_mesh(rng)
        dtypes = {key: ballast._arrays.known_dtype(value.dtype, key) for key, value in values.items()}
        target = placement(target_mesh, {
            key: (dtypes[key], value.shape, random_placements(rng, target_mesh, value.ndim)) for key, value in values.items()})
        read_all(store, record.identity, target, values, one_by_one=not target.exact or rng.random() < 0.5)
    until(lambda: leases(store, record.identity) == 0)


def test_the_random_layouts_were_many():
    assert compared[0] == 0 or compared[0] >= 10_000, compared


def test_layouts_of_experts_pipelines_and_replicas_in_one_read(store, name):
    """TP2 x EP2 x PP2 x DP2 as the target of a revision that was saved whole."""
    axis = ballast.ParallelAxis
    layers = {}
    for layer in range(2):
        layers[f"layer{layer}.attention"] = (TensorSpec(f"layer{layer}.attention", "F32", (8, 6), layer_id=layer, parallel_axes=(
            axis("dp", "replicated"), axis("pp", "ownership"), axis("ep", "replicated"), axis("tp", "split", 0))), None)
        layers[f"layer{layer}.experts"] = (TensorSpec(f"layer{layer}.experts", "F32", (4, 6, 5), layer_id=layer, parallel_axes=(
            axis("dp", "replicated"), axis("pp", "ownership"), axis("ep", "split", 0), axis("tp", "split", 2))), None)
    specs = [spec for spec, _ in layers.values()]
    values = {spec.name: np.random.default_rng(1).random(spec.shape, dtype=np.float32) for spec in specs}
    record = ballast.save(values, name, store=store, policy=HOT)
    target = WeightPlacement.from_axes(
        specs, {"dp": 2, "pp": 2, "ep": 2, "tp": 2}, owns=lambda spec, rank: spec.layer_id == rank["pp"])
    assert len(target.participants) == 16
    read_all(store, record.identity, target, values, one_by_one=False)
    read_all(store, record.identity, target, values, one_by_one=True)
    # And the other way round: stored as it is held.
    snapshot = WeightSnapshot("default", name, "main", 2, target.stored())
    with store.weight_put(snapshot, None, policy=HOT) as writer:
        for key, value in values.items():
            writer.weight_put_tensor(key, value)
    read_all(store, writer.identity, WeightPlacement.whole(specs), values, one_by_one=True)


def test_bad_placements_name_the_tensor_and_leave_no_lease(store, name):
    value = np.arange(60, dtype=np.float32).reshape(6, 10)
    identity = ballast.save({"w": value, "v": value + 1}, name, store=store, policy=HOT).identity
    axes = (ballast.ParallelAxis("tp", "split", 0),)
    spec, other = TensorSpec("w", "F32", (6, 10), parallel_axes=axes), TensorSpec("v", "F32", (6, 10), parallel_axes=axes)

    def over_two(w, v=(((0, 0), (3, 10)), ((3, 0), (3, 10))), specs=(spec, other)):
        own = [ballast.Participant(f"rank{at}", {"tp": at}, {"w": (w[at],), "v": (v[at],)}) for at in range(2)]
        return WeightPlacement(specs, own, sizes={"tp": 2})

    def read(target, change=lambda buffers: None):
        local = target.local("rank0")
        buffers = local.empty(lambda shape, spec: np.empty(shape, np.float32))
        change(buffers)
        store.weight_get(identity, local, buffers)

    halves = (((0, 0), (3, 10)), ((3, 0), (3, 10)))
    read(over_two(halves))
    frozen = np.empty((3, 10), np.float32)
    frozen.flags.writeable = False
    for wrong, what in (
        (lambda: read(over_two((((0, 0), (2, 10)), ((3, 0), (3, 10))))), "uncovered"),
        (lambda: read(over_two((((0, 0), (4, 10)), ((3, 0), (3, 10))))), "overlap"),
        (lambda: read(over_two((((0, 0), (3, 10)), ((3, 0), (4, 10))))), "outside"),
        (lambda: read(over_two(halves, specs=(TensorSpec("w", "F32", (6, 11), parallel_axes=axes), other))), "uncovered|shape"),
        (lambda: read(over_two(halves, specs=(TensorSpec("w", "I32", (6, 10), parallel_axes=axes), other)),
                      lambda b: b.update(w=np.empty((3, 10), np.int32))), "dtype"),
        (lambda: read(over_two(halves), lambda b: b.pop("w")), "omits"),
        (lambda: read(over_two(halves), lambda b: b.update(x=frozen.copy())), "adds|not in the target"),
        (lambda: read(over_two(halves), lambda b: b.update(w=frozen)), "read-only"),
        (lambda: read(over_two(halves), lambda b: b.update(w=bytearray(119))), "bytes"),
        (lambda: read(over_two(halves), lambda b: b.update(w=np.empty((10, 3), np.float32).T)), "contiguous"),
    ):
        with pytest.raises(ballast.InvalidArgumentError, match=what) as refused:
            wrong()
        assert "w" in refused.value.message or "x" in refused.value.message
        assert leases(store, identity) == 0
    with pytest.raises(ballast.InvalidArgumentError, match="rank7"):
        over_two(halves).local("rank7")


@pytest.fixture(scope="module")
def minilm():
    import weights

    try:
        folder = weights.fetch_minilm()
    except weights.Failure as failure:
        pytest.skip(f"the model can not be fetched here: {failure}")
    from safetensors.numpy import load_file

    return load_file(pathlib.Path(folder) / "model.safetensors")


def column_then_row(name, value):
    """How a tensor-parallel runtime would cut it."""
    if value.ndim < 2:
        return Replicate()
    return Shard(1) if "output.dense" in name else Shard(0)


@pytest.fixture(scope="module", params=["unix", "tcp"])
def minilm_of_two_ranks(cluster, minilm, request):
    """Saved by two processes, each with its own slices of the file."""
    import weights
    from test_participants import Rank

    path, name = pathlib.Path(weights.fetch_minilm()) / "model.safetensors", f"minilm-{request.param}-{os.getpid()}"
    first = Rank(cluster, path, name, 0, route=request.param)
    second = Rank(cluster, path, name, 1, first.told("session")["session"], route=request.param)
    second.told("session")
    total = sum(value.nbytes for value in minilm.values())
    assert second.end("report")["held"] < 0.6 * total and first.end("report")["held"] < 0.6 * total
    return ballast.WeightRevisionIdentity("default", "default", name, "main", 1)


@pytest.mark.parametrize("residency", ["HOT", "MIXED", "COLD"])
@pytest.mark.parametrize("route", ["unix", "tcp"])
def test_minilm_saved_by_two_ranks_loads_on_one_three_and_eight(cluster, minilm, minilm_of_two_ranks, route, residency):
    identity = minilm_of_two_ranks
    store = ballast.WeightStore(cluster.nats, route=route)
    record = at_rest(store, identity).metadata
    if record.residency.name != residency:
        operation = store.weight_migrate(identity, target=residency, expected_metadata_generation=record.metadata_generation)
        until(lambda: store.weight_get_operation(operation.operation_id).done)
        assert store.weight_get_metadata(identity).metadata.residency.name == residency
    for ranks in (1, 3, 8):
        mesh = DeviceMesh((ranks,))
        target = placement(mesh, {
            key: (ballast._arrays.known_dtype(value.dtype, key), value.shape, [column_then_row(key, value)])
            for key, value in minilm.items()})
        read_all(store, identity, target, minilm, one_by_one=ranks == 3)
    assert leases(store, identity) == 0


def test_a_placement_document_is_the_same_for_every_process(minilm):
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    described = {key: ("F32", value.shape, [Replicate(), column_then_row(key, value)]) for key, value in itertools.islice(minilm.items(), 20) if value.dtype == np.float32}
    identity = ballast.WeightRevisionIdentity("default", "default", "minilm", "main", 3)
    one, two = (placement(mesh, described)._for(identity) for _ in range(2))
    assert one.placement_id == two.placement_id and one.placement_id.startswith("sha256:")
    assert json.loads(one.to_json())["weight_generation"] == 3
    assert box_of(mesh, [Replicate(), Shard(0)], (6, 2), 3) == ((3, 0), (3, 2))
    bound = bindings(placement(mesh, {"w": ("F32", (6, 2), [Replicate(), Shard(0)])}), {"w": np.empty((3, 2), np.float32)}, rank=1)
    assert bound[0].participant_id == "rank1" and bound[0].box == ((3, 0), (3, 2))

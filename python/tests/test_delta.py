"""Sparse deltas: the next generation is exactly what numpy makes of the base, what does not fit is refused by name and leaves
nothing, and an upsert does not send what its base has."""

import sys

import ml_dtypes
import numpy as np
import pytest

import ballast
from ballast import WeightMigrationMode, WeightResidencyState, WeightStoragePolicy, delta
from ballast.dtensor import DeviceMesh, DTensorAdapter, Shard, ShardedTensor
from ballast import _arrays
from conftest import ROOT, leases, until
from test_arrays import Elsewhere, Framework
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
    later = delta.of_entries("w", (1000,), [[7], [3]], np.array([10, 20]), semantics=semantics, base_generation=1, delta_generation=3)
    for again, given in ((base, one), (name, one), (base, later), (name, later)):
        with pytest.raises(ballast.StaleGenerationError, match="applied once") as stale:
            delta.upsert([given], replacing=again, semantics=semantics, store=store)
        assert stale.value.details == {"tensor": "w", "base_generation": 1, "current_generation": 2}
        assert f"{name}@main#1" in stale.value.message and "generation 2 is current" in stale.value.message
    # On what it was made into it does not fit either.
    with pytest.raises(ballast.StaleGenerationError, match="'w'|\"w\"") as stale:
        delta.upsert([one], replacing=record.identity, semantics=semantics, store=store)
    assert stale.value.details["tensor"] == "w"
    expect(store, record.identity, {"w": after})
    until(lambda: leases(store, record.identity) == 0)


def test_elements_that_are_named_twice_are_added_twice_and_never_overwritten_twice(store, name):
    base = publish(store, {"w": np.zeros(10, dtype=np.int32)}, name)
    entries = dict(indices=[[2], [2], [5]], values=np.array([1, 2, 4], dtype=np.int32))
    with pytest.raises(ballast.InvalidArgumentError, match=r"element at \[2\] twice") as twice:
        delta.upsert([delta.of_entries("w", (10,), **entries, **GENERATIONS)], replacing=base, store=store)
    assert twice.value.details == {"tensor": "w", "coordinates": [2]}
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


def negative_index(metadata, members):
    metadata.update(index_dtype="int32")
    metadata["members"] = {name: {**said, "dtype": said["dtype"].replace("uint32", "int32")} for name, said in metadata["members"].items()}
    members.update({name: members[name].astype(np.int32) for name in ("indices", "tile_coords")})
    members["indices"][1, 1] = -5


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
    members["values"] = members["values"].astype(np.float64)


def retyped(member, dtype):
    def edit(metadata, members):
        members[member] = members[member].astype(dtype)
    return edit


WRONG = {
    "outside": (put("indices", (2, 0), 4), r"entry 2 at \[4, 3\] lies outside the tensor, which is \[4, 6\]"),
    "outside its tile": (put("indices", (0, 0), 2), r"entry 0 at \[2, 1\] lies outside its tile"),
    "negative": (negative_index, r"entry 1 is negative in dimension 1; the tensor is \[4, 6\]"),
    "floats as indices": (retyped("indices", np.float32), "indices are F32, expected U32"),
    "tiles": (swap_tiles, "tiles must ascend"),
    "pointers": (put("tile_ptr", 1, 3), "tile"),
    "pointers' end": (put("tile_ptr", -1, 2), "tile_ptr does not ascend from 0 to 3"),
    "values": (fewer_values, "values has 8 bytes"),
    "member dtype": (other_member, "values has the dtype"),
    "schema": (lambda metadata, members: metadata.update(version=2), "of version 2"),
    "member": (lambda metadata, members: members.update(tile_ptr=None), r"tile_ptr\)' is a NoneType"),
    "number": (lambda metadata, members: metadata.update(nnz=np.int64(3)), "is no JSON"),
    "not a number": (lambda metadata, members: metadata.update(extra=float("nan")), "is no JSON"),
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
    # By name the base is what the delta says, which is not there.
    details = refuse(broken(same, base_generation=7, delta_generation=8), ballast.StaleGenerationError, "generation 1 is current", replacing=name)
    assert details == {"tensor": "w", "base_generation": 7, "current_generation": 1}
    record = delta.upsert([broken(same)], replacing=base, expected_metadata_generation=current, store=store)
    assert record.identity.weight_generation == 2


def test_a_generation_that_was_used_up_beside_its_base_is_a_conflict(store, name):
    values = {"w": np.zeros((4, 6), np.float32)}
    base = publish(store, values, name)
    beside = ballast.save(values, f"{name}#2", store=store).identity
    current = at_rest(store, beside).metadata.metadata_generation
    store.weight_remove(beside, expected_metadata_generation=current)
    until(lambda: store.weight_get_metadata(beside).metadata.availability == ballast.WeightAvailability.DELETED)
    one = broken(lambda metadata, members: None)
    with pytest.raises(ballast.ConflictError, match="#2 was published before .* higher generation"):
        delta.upsert([one], replacing=base, store=store)


NOTHING = np.zeros(2, np.float32)
GIVEN = {
    "ragged indices": (dict(indices=[[1, 1], [2]]), "indices"),
    "indices of floats": (dict(indices=[[1.0, 1.0], [2.0, 2.0]]), "indices are F64"),
    "indices of objects": (dict(indices=[[1, None], [2, 2]]), r"indices\)' has the dtype object"),
    "indices of another rank": (dict(indices=[[1], [2]]), r"expected whole numbers \[nnz, 2\]"),
    "big-endian indices": (dict(indices=np.array([[1, 1], [2, 2]], ">i8")), "newbyteorder"),
    "an index too large": (dict(indices=[[1, 1], [4, 5]]), r"entry 1 at \[4, 5\] lies outside the tensor, which is \[4, 6\]"),
    "an index below": (dict(indices=[[-1, 1], [3, 5]]), r"entry 0 at \[-1, 1\] lies outside the tensor, which is \[4, 6\]"),
    "ragged values": (dict(values=[[1], [1, 2]]), "values"),
    "values of text": (dict(values=["a", "b"]), "values.*has the dtype <U1"),
    "values of objects": (dict(values=[None, 1]), "values.*has the dtype object"),
    "wide complex values": (dict(values=np.zeros(2, np.complex128)), "values.*has the dtype complex128"),
    "big-endian values": (dict(values=np.zeros(2, ">f4")), "big-endian .*newbyteorder"),
    "values of two dimensions": (dict(values=np.zeros((2, 1), np.float32)), r"expected \[nnz\]"),
    "too few values": (dict(values=np.zeros(1, np.float32)), "1 values for 2 indices"),
    "values elsewhere": (dict(values=Elsewhere(NOTHING)), "give it on the CPU"),
    "halves as BF16": (dict(values=np.zeros(2, np.float16), dtype="BF16"), r"values are F16, expected BF16.*\.view\(numpy\.uint16\)"),
    "BF16 as halves": (dict(values=np.zeros(2, ml_dtypes.bfloat16), dtype="F16"), r"values are BF16, expected F16.*\.view\(numpy\.uint16\)"),
    "booleans as bytes": (dict(values=np.zeros(2, bool), dtype="F8_E5M2"), "values are BOOL, expected F8_E5M2"),
    "wider bits": (dict(values=np.zeros(2, np.uint32), dtype="BF16"), "values are U32, expected BF16.*numpy.uint16"),
    "elements of half a byte": (dict(values=[], indices=[], dtype="F4"), "no whole bytes"),
    "an unknown dtype": (dict(dtype="float3"), "'float3'"),
    "tiles of one number": (dict(tile_shape=4), "tile_shape 4; give a sequence of whole numbers"),
    "tiles of text": (dict(tile_shape=("a", "b")), "tile_shape"),
    "tiles of fractions": (dict(tile_shape=(2.5, 2.5)), "tile_shape"),
    "tiles without a side": (dict(tile_shape=(0, 2)), "tile_shape"),
    "tiles of another rank": (dict(tile_shape=(2,)), "tile_shape"),
    "a negative shape": (dict(shape=(-1, 6)), r"shape \(-1, 6\)"),
    "a shape of text": (dict(shape="46"), "shape '46'"),
    "a shape of fractions": (dict(shape=(4.0, 6.0)), "shape"),
    "an endless shape": (dict(shape=(2**70, 6)), "2\\^63"),
    "equal generations": (dict(delta_generation=1), "delta_generation 1 is not above base_generation 1"),
    "generations backwards": (dict(delta_generation=0), "delta_generation 0 is not above base_generation 1"),
    "a generation of text": (dict(base_generation="1"), "base_generation of the delta of tensor 'w' is '1'"),
}


@pytest.mark.parametrize("which", GIVEN)
def test_entries_that_can_make_no_delta_are_refused_by_name(which):
    given, why = GIVEN[which]
    good = dict(tensor_id="w", shape=(4, 6), indices=[[1, 1], [3, 5]], values=NOTHING, **GENERATIONS)
    assert delta.of_entries(**good).metadata["nnz"] == 2
    with pytest.raises(ballast.InvalidArgumentError, match=why) as refused:
        delta.of_entries(**{**good, **given})
    assert refused.value.details["tensor"] == "w" and "w" in refused.value.message


BETWEEN = {
    "ragged": (dict(after=[[1], [1, 2]]), "after.*is no array"),
    "wide complex": (dict(before=np.zeros(2, np.complex128), after=np.ones(2, np.complex128)), "complex128"),
    "wide floats": (dict(before=np.zeros(2, np.longdouble), after=np.ones(2, np.longdouble)), str(np.dtype(np.longdouble))),
    "objects": (dict(before=np.array([None, 1]), after=np.array([None, 2])), "object"),
    "text": (dict(before=np.array(["a", "b"]), after=np.array(["a", "c"])), "<U1"),
    "big-endian": (dict(before=np.zeros(2, ">f4"), after=np.ones(2, ">f4")), "big-endian .*newbyteorder"),
    "other shape": (dict(after=np.zeros(3, np.float32)), r"is F32 \[3\], and was F32 \[2\]"),
    "other dtype": (dict(after=np.zeros(2, np.int32)), r"is I32 \[2\], and was F32 \[2\]"),
    "another's bits": (dict(dtype="I32"), "are F32, expected I32"),
    "tiles": (dict(tile_shape=(2.5,)), "tile_shape"),
    "equal generations": (dict(delta_generation=1), "is not above"),
}


@pytest.mark.parametrize("which", BETWEEN)
def test_arrays_that_can_make_no_delta_are_refused_by_name(which):
    given, why = BETWEEN[which]
    good = dict(tensor_id="w", before=NOTHING, after=NOTHING + 1, **GENERATIONS)
    assert delta.between(**good).metadata["nnz"] == 2
    with pytest.raises(ballast.InvalidArgumentError, match=why) as refused:
        delta.between(**{**good, **given})
    assert refused.value.details["tensor"] == "w" and "w" in refused.value.message


@pytest.mark.parametrize("tensor_id", [None, "", 5, b"w"])
def test_a_tensor_has_a_name(tensor_id):
    for make in (lambda: delta.of_entries(tensor_id, (2,), [[1]], [1.0], **GENERATIONS),
                 lambda: delta.between(tensor_id, NOTHING, NOTHING, **GENERATIONS)):
        with pytest.raises(ballast.InvalidArgumentError, match="a tensor's name"):
            make()


@pytest.mark.parametrize("deltas, why", [
    (lambda one: one, r"of 'w', 1 to 2> alone; put it in a list"),
    (lambda one: None, "give a list"),
    (lambda one: [{"tensor_id": "w"}], "is no delta"),
    (lambda one: [one, None], "is no delta"),
    (lambda one: [], "no delta to apply"),
])
def test_what_is_no_list_of_deltas_is_refused(store, name, deltas, why):
    base = publish(store, {"w": np.zeros((4, 6), np.float32)}, name)
    one = broken(lambda metadata, members: None)
    for replacing in (base, name):
        with pytest.raises(ballast.InvalidArgumentError, match=why):
            delta.upsert(deltas(one), replacing=replacing, store=store)
    nothing_stays(store, base)


@pytest.mark.parametrize("metadata", [None, 5, "text", [("tensor_id", "w")]])
def test_metadata_is_a_mapping(metadata):
    with pytest.raises(ballast.InvalidArgumentError, match="give a mapping"):
        delta.SparseDelta(metadata, *[NOTHING] * 4)


@pytest.mark.parametrize("field", ["tensor_id", "base_generation", "delta_generation", "global_shape", "members", "value_dtype"])
def test_a_missing_field_is_named_with_its_tensor(store, name, field):
    base = publish(store, {"w": np.zeros((4, 6), np.float32)}, name)
    for replacing in (base, name):
        with pytest.raises(ballast.InvalidArgumentError, match=field) as refused:
            delta.upsert([broken(lambda metadata, members: metadata.pop(field))], replacing=replacing, store=store)
        if field != "tensor_id":
            assert refused.value.details["tensor"] == "w" and "w" in refused.value.message
    nothing_stays(store, base)


@pytest.mark.parametrize("entries", [
    dict(indices=[], values=[]), dict(indices=[], values=[], dtype="BF16"), dict(indices=(), values=np.empty(0, np.float32)),
    dict(indices=np.empty((0, 2)), values=np.empty(0, ml_dtypes.bfloat16)),
])
def test_a_delta_without_entries_changes_nothing(store, name, entries):
    values = {"w": np.arange(24).astype(ml_dtypes.bfloat16).reshape(4, 6)}
    publish(store, values, name)
    empty = delta.of_entries("w", (4, 6), **entries, **GENERATIONS)
    assert empty.metadata["nnz"] == 0 and empty.metadata["members"]["indices"]["shape"] == [0, 2]
    # Beside one that has some.
    after = {"w": values["w"].copy()}
    after["w"][3, 5] = -1
    deltas = [empty, delta.between("w", values["w"], after["w"], **GENERATIONS)]
    record = delta.upsert(deltas, replacing=name, wait=True, store=store)
    expect(store, record.identity, after)
    next_one = {"base_generation": 2, "delta_generation": 3}
    record = delta.upsert([delta.of_entries("w", (4, 6), **entries, **next_one)], replacing=name, store=store)
    expect(store, record.identity, after)


@pytest.mark.parametrize("numpys_type", [True, False], ids=["with ml_dtypes", "without"])
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_tensors_of_a_framework_are_compared_as_bits_and_keep_their_type(store, name, dtype, numpys_type, monkeypatch):
    rng = np.random.default_rng(6)
    typed = _arrays.numpy_dtype(dtype)
    before = rng.integers(0, 2 ** (8 * typed.itemsize), (30, 40)).astype(f"u{typed.itemsize}")
    after = before.copy()
    after[[2, 29], [3, 39]] ^= 1
    publish(store, {"w": before.view(typed), "v": before.view(typed)}, name)
    if not numpys_type:
        monkeypatch.setattr(_arrays, "_TO_NUMPY", {key: value for key, value in _arrays._TO_NUMPY.items() if key != dtype})
    one = delta.between("w", Framework(before, dtype), Framework(after, dtype), **GENERATIONS)
    assert one.metadata["value_dtype"] == dtype and one.metadata["nnz"] == 2
    same = delta.of_entries("v", (30, 40), [[2, 3], [29, 39]], Framework(after[[2, 29], [3, 39]], dtype), **GENERATIONS)
    assert same.metadata["value_dtype"] == dtype and np.array_equal(bits(same.values), bits(one.values))
    record = delta.upsert([one, same], replacing=name, store=store)
    monkeypatch.undo()
    expect(store, record.identity, {"w": after.view(typed), "v": after.view(typed)})


def test_bits_may_be_said_to_be_a_type_that_numpy_lacks(store, name):
    before = np.arange(24, dtype=np.uint16).reshape(4, 6)
    after = before.copy()
    after[1, 2] = 0x3F80
    publish(store, {"w": before.view(ml_dtypes.bfloat16)}, name)
    one = delta.between("w", before, after.view(np.uint16), dtype="BF16", **GENERATIONS)
    assert one.metadata["value_dtype"] == "BF16"
    record = delta.upsert([one], replacing=name, store=store)
    expect(store, record.identity, {"w": after.view(ml_dtypes.bfloat16)})


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

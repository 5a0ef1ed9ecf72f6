"""What can never be accepted is refused at once and by name: durations, ratios, texts, names, and how much of them is repeated."""

import asyncio
import fractions

import numpy as np
import pytest

import ballast
from ballast import (
    ParallelAxis, TensorSpec, WeightBinding, WeightPlacement, WeightRevisionIdentity, WeightSharing, WeightSnapshot, aio, delta,
    safetensors,
)
from ballast._arrays import check, memory_of

# Nobody answers there: what is refused before anything is sent needs nobody.
NOWHERE = "nats://127.0.0.1:1"
STATE = {"w": np.zeros((2, 3), np.float32)}
HALF = "\ud800"


@pytest.fixture(scope="module")
def lonely():
    return ballast.WeightStore(NOWHERE, connect_seconds=0)


def refused(call, *said):
    """Refused as INVALID_ARGUMENT, in these words."""
    with pytest.raises(ballast.InvalidArgumentError) as error:
        call()
    assert (error.value.code, error.value.number) == ("INVALID_ARGUMENT", 1)
    for word in said:
        assert word in error.value.message, (word, error.value.message)


def snapshot():
    return WeightSnapshot.from_tensors(STATE, resource_id="m", weight_generation=1)


def identity():
    return WeightRevisionIdentity("default", "default", "m", "main", 1)


def said(value):
    """How an error repeats it, or begins to."""
    try:
        return repr(value)[:100]
    except ValueError:
        return "a int that can not be shown"


NO_NUMBERS = [float("nan"), float("inf"), -float("inf"), -1, -0.001, True, "5", None, 1e300, 10**400, 10**5000, [], np.array([1.0, 2.0])]
SECONDS = {
    "shared": ("patience", lambda store, value: snapshot().shared(["a"], patience=value)),
    "sharing": ("patience", lambda store, value: WeightSharing(("a",), patience=value)),
    "wait": ("timeout", lambda store, value: ballast.wait("m", timeout=value, store=store)),
    "aio.wait": ("timeout", lambda store, value: asyncio.run(aio.wait("m", timeout=value, store=store))),
    "connect": ("connect_seconds", lambda store, value: ballast.WeightStore(NOWHERE, connect_seconds=value)),
    "request": ("request_seconds", lambda store, value: ballast.WeightStore(NOWHERE, request_seconds=value)),
    "aio.connect": ("connect_seconds", lambda store, value: aio.WeightStore(NOWHERE, connect_seconds=value)),
    "aio.request": ("request_seconds", lambda store, value: aio.WeightStore(NOWHERE, request_seconds=value)),
}


@pytest.mark.parametrize("which", SECONDS)
def test_a_duration_that_is_none_is_refused_by_name(lonely, which):
    argument, call = SECONDS[which]
    for wrong in NO_NUMBERS:
        if wrong is None and argument == "timeout":
            continue  # Without end.
        refused(lambda: call(lonely, wrong), f"{argument} is {said(wrong)}", "give seconds, a number", "to 1000000000")
    if argument == "request_seconds":
        refused(lambda: call(lonely, 0), "request_seconds is 0; give seconds, a number above 0")


@pytest.mark.parametrize("right", [0, 0.5, 7, np.float32(2.5), np.int64(3), fractions.Fraction(1, 3), 1_000_000_000])
def test_a_duration_may_be_any_number_that_is_one(right):
    shared = snapshot().shared(["a"], patience=right).sharing
    assert shared.patience == float(right) and type(shared.patience) is float
    ballast.WeightStore(NOWHERE, connect_seconds=right, request_seconds=right or 1)


LEASES = {
    "weight_get": lambda store, value: store.weight_get(identity(), None, {}, lease_ttl_ms=value),
    "aio.weight_get": lambda store, value: asyncio.run(aio.WeightStore(NOWHERE).weight_get(identity(), None, {}, lease_ttl_ms=value)),
    "open": lambda store, value: ballast.open(identity(), store=store, lease_ttl_ms=value),
    "load": lambda store, value: ballast.load(identity(), store=store, lease_ttl_ms=value),
    "get_state_dict": lambda store, value: ballast.get_state_dict(identity(), store=store, lease_ttl_ms=value),
    "export": lambda store, value: safetensors.export(identity(), "nowhere", store=store, lease_ttl_ms=value),
    "aio.open": lambda store, value: asyncio.run(aio.open(identity(), store=store, lease_ttl_ms=value)),
}


@pytest.mark.parametrize("which", LEASES)
def test_a_lease_that_can_not_be_is_refused_by_name(lonely, which):
    for wrong in (*NO_NUMBERS, 0, 1.5, 86_400_001):
        refused(lambda: LEASES[which](lonely, wrong), f"lease_ttl_ms is {said(wrong)}", "a whole number from 1 to 86400000")


def test_a_ratio_that_is_none_is_refused_by_name(lonely):
    for wrong in (*NO_NUMBERS, 0, 1, 2, "x"):
        if wrong is not None:
            move = lambda: lonely.weight_migrate(identity(), target="MIXED", mixed_hot_ratio=wrong, expected_metadata_generation=1)
            refused(move, f"mixed_hot_ratio is {said(wrong)}", "above 0 and below 1")
        refused(lambda: ballast.WeightStoragePolicy(mixed_hot_ratio=wrong), f"mixed_hot_ratio is {said(wrong)}", "above 0 and below 1")
    assert ballast.WeightStoragePolicy(mixed_hot_ratio=np.float32(0.25)).mixed_hot_ratio == 0.25


def test_numbers_of_numpy_are_numbers():
    made = WeightRevisionIdentity("default", "default", "m", "main", np.int64(7))
    assert str(made) == "default/m@main#7" and type(made.weight_generation) is int
    for wrong in (1.5, True, "1", -1, 1 << 64):
        refused(lambda: made.generation(wrong), f"weight_generation is {wrong!r}", "a whole number from 0 to")


def spec(**parts):
    return TensorSpec(**{"name": "w", "dtype": "F32", "shape": (2, 3), **parts})


def entries(**parts):
    given = {"tensor_id": "w", "shape": (4,), "indices": [[1]], "values": np.ones(1, np.float32), "base_generation": 1, "delta_generation": 2}
    return delta.of_entries(**{**given, **parts})


# Every text that a caller can give, by how its error names it.
TEXTS = {
    "nats": lambda store, value: ballast.WeightStore(value),
    "name": lambda store, value: ballast.WeightStore(NOWHERE, name=value),
    "tenant_id": lambda store, value: ballast.WeightStore(NOWHERE, tenant_id=value),
    "route": lambda store, value: ballast.WeightStore(NOWHERE, route=value),
    "tenant_id of an identity": lambda store, value: WeightRevisionIdentity(value, "default", "m", "main", 1),
    "namespace of an identity": lambda store, value: WeightRevisionIdentity("default", value, "m", "main", 1),
    "resource_id of an identity": lambda store, value: WeightRevisionIdentity("default", "default", value, "main", 1),
    "revision of an identity": lambda store, value: WeightRevisionIdentity("default", "default", "m", value, 1),
    "name to parse": lambda store, value: WeightRevisionIdentity.parse(value),
    "namespace of a snapshot": lambda store, value: WeightSnapshot(value, "m", "main", 1, ()),
    "resource_id of a snapshot": lambda store, value: WeightSnapshot("default", value, "main", 1, ()),
    "revision of a snapshot": lambda store, value: WeightSnapshot("default", "m", value, 1, ()),
    "tenant_id of a put": lambda store, value: store.weight_put(snapshot(), tenant_id=value),
    "a tensor's name": lambda store, value: spec(name=value),
    "aliases of tensor 'w'": lambda store, value: spec(aliases=(value,)),
    "kind": lambda store, value: ParallelAxis(value, "split", 0),
    "semantics": lambda store, value: ParallelAxis("tp", value, 0),
    "participants[1]": lambda store, value: snapshot().shared(["a", value]),
    "participant": lambda store, value: snapshot().shared(["a"], participant=value),
    "session": lambda store, value: snapshot().shared(["a"], session=value),
    "participant of a part": lambda store, value: snapshot().part(value, "s"),
    "session of a part": lambda store, value: snapshot().part("rank1", value),
    "participant_id": lambda store, value: WeightPlacement([spec()], [ballast.Participant(value, {}, {})]),
    "placement_set_id": lambda store, value: WeightPlacement([spec()], [ballast.Participant("a", {}, {})], placement_set_id=value),
    "a tensor's name in a binding": lambda store, value: store.weight_get(identity(), None, [WeightBinding(value, np.zeros(1))]),
    "participant_id of a binding": lambda store, value: store.weight_get(
        identity(), None, [WeightBinding("w", np.zeros(1), participant_id=value)]),
    "holder": lambda store, value: ballast.open(identity(), store=store, holder=value),
    "verify": lambda store, value: ballast.open(identity(), store=store, verify=value),
    "namespace": lambda store, value: store.weight_list(namespace=value, resource_id="m"),
    "resource_id": lambda store, value: store.weight_list(namespace="default", resource_id=value),
    "tenant_id of a list": lambda store, value: store.weight_list(namespace="default", resource_id="m", tenant_id=value),
    "page_token": lambda store, value: store.weight_list(namespace="default", resource_id="m", page_token=value),
    "request_id": lambda store, value: store.weight_upsert(
        WeightSnapshot("default", "m", "main", 2, ()), replacing=identity(), expected_metadata_generation=1, request_id=value),
    "operation_id": lambda store, value: store.weight_get_operation(value),
    "tenant_id of an operation": lambda store, value: store.weight_get_operation("op-1.0", tenant_id=value),
    "name to save": lambda store, value: ballast.save(STATE, value, store=store),
    "name to load": lambda store, value: ballast.load(value, store=store),
    "name to open": lambda store, value: ballast.open(value, store=store),
    "name to wait for": lambda store, value: ballast.wait(value, store=store),
    "name to copy": lambda store, value: ballast.get_state_dict(value, store=store),
    "name to import": lambda store, value: safetensors.import_path("/", value, store=store),
    "name to export": lambda store, value: safetensors.export(value, "nowhere", store=store),
    "path": lambda store, value: safetensors.import_path(value, "m", store=store),
    "folder": lambda store, value: safetensors.export("m", value, store=store),
    "a tensor's name in a delta": lambda store, value: entries(tensor_id=value),
    "replacing": lambda store, value: delta.upsert([entries()], replacing=value, store=store),
    "request_id of a delta": lambda store, value: delta.upsert([entries()], replacing="m", request_id=value, store=store),
    "name in asyncio": lambda store, value: asyncio.run(aio.save(STATE, value, store=store)),
    "session in asyncio": lambda store, value: asyncio.run(awaited_put(value)),
}
# Where `None` means that there is none.
OPTIONAL = {"nats", "name", "participant", "session", "holder", "request_id", "request_id of a delta", "participant_id of a binding"}


async def awaited_put(session):
    await aio.WeightStore(NOWHERE).weight_put(snapshot().part("rank1", session))


@pytest.mark.parametrize("which", TEXTS)
def test_a_text_that_is_none_is_refused_by_name(lonely, which):
    argument = which.partition(" of a")[0] if "of tensor" not in which else which
    argument = argument.partition(" to ")[0].partition(" in ")[0]
    for wrong in (5, 1.5, True, b"\xff\0" if argument in ("path", "folder") else b"bytes", ["a"], HALF, f"a{HALF}b"):
        refused(lambda: TEXTS[which](lonely, wrong), argument, ascii(wrong).replace("\\\\", "\\") if isinstance(wrong, str) else repr(wrong))
    if which not in OPTIONAL:
        refused(lambda: TEXTS[which](lonely, None), f"{argument}", "None")


def test_half_a_surrogate_in_the_metadata_of_a_delta_is_refused_by_its_tensor(lonely):
    good = entries()
    wrong = delta.SparseDelta({**good.metadata, "note": HALF}, good.indices, good.values, good.tile_coords, good.tile_ptr)
    refused(lambda: delta.upsert([wrong], replacing="m", store=lonely), "the metadata of <SparseDelta of 'w', 1 to 2>", "surrogates")


def test_what_is_saved_is_a_dict_and_says_so(lonely):
    refused(lambda: ballast.save([STATE["w"]], "m", store=lonely), "state_dict is a list; give a dict of arrays by tensor name")
    refused(lambda: ballast.save({}, "m", store=lonely), "state_dict is empty")
    refused(lambda: ballast.save({5: STATE["w"]}, "m", store=lonely), "a tensor's name is 5; give a string")
    refused(lambda: WeightSnapshot.from_tensors([STATE["w"]], resource_id="m", weight_generation=1), "tensors is a list")
    refused(lambda: ballast.load(identity(), names="w", store=lonely), "names is 'w'; give a list of names")


def test_what_is_repeated_of_a_huge_argument_is_short(lonely):
    huge = "n" * 100_000
    for wrong in (
        lambda: spec(name=huge), lambda: ballast.save({huge: STATE["w"]}, "m", store=lonely),
        lambda: ballast.WeightRevisionIdentity.parse(huge + "#x"), lambda: ballast.WeightRevisionIdentity.parse("n" * 1000),
        lambda: ballast.save(STATE, "n" * 5000, store=lonely), lambda: ballast.wait("n" * 5000, timeout=0, store=lonely),
        lambda: ballast.load("n" * 5000 + "#1", store=lonely), lambda: ballast.save({"w": huge}, "m", store=lonely),
        lambda: ballast.WeightStoragePolicy(mixed_hot_ratio=huge), lambda: ballast.WeightStoragePolicy(preferred_residency=huge),
        lambda: snapshot().shared(["a"], participant=huge), lambda: spec(name="n" * 4000, dtype="F31"),
        lambda: spec(name="n" * 4000, shape="x" * 5000), lambda: ballast.WeightStore(NOWHERE, route=huge),
        lambda: ballast.WeightStore(NOWHERE, connect_seconds=huge), lambda: delta.upsert(huge, replacing="m", store=lonely),
        lambda: ballast.WeightStore(f"nats://{'h' * 5000}", connect_seconds=0).weight_get_metadata(identity()),
    ):
        with pytest.raises(ballast.BallastError) as error:
            wrong()
        assert len(error.value.message) <= 600 and len(str(error.value)) < 700, error.value.message[:200]
    refused(lambda: spec(name=huge), "a tensor's name is 'nnn", "n… (100002 characters); give 1 to 4096 bytes")
    with pytest.raises(ballast.InvalidArgumentError, match="tensor 'n+…n+': the buffer has 8 bytes, F32 .* needs 24") as error:
        known = spec(name="n" * 4000)
        check(memory_of(bytes(8), known.name), known.name, known.dtype, known.shape, writable=False)
    assert error.value.details["tensor"] == "n" * 4000, "the facts are whole"


@pytest.mark.parametrize("value", ["UNKNOWN", "ABSENT", "warm", 0, 4, 9, None, 1.5, True, ballast.WeightResidencyState.ABSENT, ballast.WeightMigrationMode.AUTO])
def test_a_residency_that_nothing_can_be_moved_to_is_refused_with_those_it_can(lonely, value):
    calls = {
        "target": lambda: lonely.weight_migrate(identity(), target=value, expected_metadata_generation=1),
        "preferred_residency": lambda: ballast.WeightStoragePolicy(preferred_residency=value),
    }
    for what, call in calls.items():
        typed = value is True or value is ballast.WeightMigrationMode.AUTO
        refused(call, what, "WeightResidencyState" if typed else "one of HOT, COLD, MIXED")


@pytest.mark.parametrize("route", ["best", "unix", "rdma", "tcp"])
def test_every_route_may_be_asked_for(route):
    ballast.WeightStore(NOWHERE, route=route, connect_seconds=0)

"""A memory tier that runs short: AUTO revisions make room, oldest access first, and come back when it is over; PINNED and MANUAL
ones stay, and what can not fit is refused with the numbers."""

import urllib.request

import pytest

from cluster import free_port, wait_until
from verbs import identity

MIB = 1 << 20
MEMORY = 96 * MIB
CAPACITY_EXHAUSTED = 24


@pytest.fixture
def small(make_site):
    """A cluster of one node with little memory."""
    return make_site(memory_bytes=MEMORY, workflow_workers=2)


@pytest.fixture
def model(models):
    return lambda name, mib, seed: models(f"pressure-{name}-{mib}", tensors=mib // 2, kib=2048, seed=seed)


def memory_used(site):
    return site.verbs.steady("status")["nodes"][0]["memory_used_bytes"]


def residency(site, which):
    return site.verbs.metadata(which)["residency"]


def pressed(site):
    """The resources that pressure has moved, in the order in which it did."""
    operations = site.verbs.steady("list_operations", {"all": True, "limit": 1000})["operations"]
    return [operation["identity"]["resource_id"] for operation in reversed(operations) if operation["trigger"] == "PRESSURE"]


def test_a_put_into_full_memory_is_admitted_once_the_oldest_auto_revision_was_demoted(small, model, scratch):
    originals = {name: model(name, 24, seed) for seed, name in enumerate("abcd", 1)}
    held = {name: small.put(originals[name], name, mode="auto") for name in "abc"}
    small.get_identical("a", originals["a"], scratch / "a-read")     # so that b is the oldest
    reply = small.cli.json("put", originals["d"], "d", "--preferred", "hot", "--mode", "auto", timeout_s=200)
    held["d"] = reply["identity"]
    assert pressed(small) == ["b"]
    assert small.settled(held["b"])["residency"] == "MIXED"
    assert {name: residency(small, held[name]) for name in "acd"} == dict.fromkeys("acd", "HOT")
    for name, original in originals.items():
        small.get_identical(name, original, scratch / f"{name}-after")
    http = f"127.0.0.1:{free_port()}"
    another = small.cluster._service("gateway-later", "gateway", "--id", "gateway-later", "--http", http)
    another.start()
    try:
        metrics = urllib.request.urlopen(f"http://{http}/metrics", timeout=10).read().decode()
    finally:
        another.stop()
    assert 'ballast_automatic_migrations_total{trigger="PRESSURE",direction="DEMOTION"} 1' in metrics


def test_above_the_high_watermark_the_oldest_are_demoted_and_below_the_low_one_they_come_back(small, model):
    held = {name: small.put(model(name, 22, seed), name, mode="auto") for seed, name in enumerate("abcd", 1)}
    # A node's figures are a second old: what they say right after the put may be from before it.
    wait_until(lambda: pressed(small) == ["a", "b"], 60, "the two oldest are demoted")
    wait_until(lambda: memory_used(small) <= 0.8 * MEMORY, 60, "memory is below the low watermark")
    assert {name: small.settled(held[name])["residency"] for name in "abcd"} == {"a": "MIXED", "b": "MIXED", "c": "HOT", "d": "HOT"}
    small.empty(held.pop("d"))
    for name in "ba":
        wait_until(lambda: residency(small, held[name]) == "HOT", 90, f"{name} comes back")
    assert memory_used(small) <= 0.8 * MEMORY


@pytest.mark.parametrize("mode", ["pinned", "manual"])
def test_what_may_not_move_stays_and_a_put_that_can_not_fit_hears_the_numbers(small, model, scratch, mode):
    originals = {name: model(name, 24, seed) for seed, name in enumerate("abcd", 1)}
    held = {name: small.put(originals[name], name, mode=mode) for name in "abc"}
    code, error, _ = small.cli.refusal("put", originals["d"], "d", "--preferred", "hot", "--mode", "auto")
    assert code == CAPACITY_EXHAUSTED
    node = error["details"]["nodes"][0]
    assert node[f"{mode}_bytes"] >= 3 * 24 * MIB and node["demotable_bytes"] == 0, node
    assert error["details"]["needed_bytes"] > node["memory_free_bytes"]
    assert mode.upper() in error["message"], error
    assert {name: residency(small, which) for name, which in held.items()} == dict.fromkeys("abc", "HOT")
    assert pressed(small) == []
    small.get_identical("a", originals["a"], scratch / "still")
    # At most the tombstone of an import that its node had no room for.
    wait_until(lambda: (found := small.verbs.find(identity("d"))) is None or found["availability"] == "DELETED", 30, "nothing is left of it")

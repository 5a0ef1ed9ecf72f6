"""A log that fills up: new work is refused by name, what frees or reports still passes, and after a snapshot and a trim everything
is as before. On one server in `make test`, on three in `make cluster-test`."""

import asyncio
import json
import uuid

import pytest

from cluster import wait_until
from conftest import name_of
from verbs import VerbError

LOG_BYTES = 192 << 10
CAPACITY_EXHAUSTED = 24


@pytest.fixture(params=[1, pytest.param(3, marks=pytest.mark.cluster)], ids=["one server", "three servers"])
def site(make_site, request):
    # Nothing is trimmed within the ten minutes for which entries are kept by default.
    return make_site(servers=request.param, gateway_options=["--log-size", LOG_BYTES])


def log_state(site):
    return json.loads(site.verbs.request("$JS.API.STREAM.INFO.BALLAST_LOG", b"").data)["state"]


def call_many(site, verb, bodies):
    """Calls a verb at once for all bodies; the error codes, None for those that were carried out."""
    async def one(body):
        message = await site.verbs.nc.request(f"ballast.v1.default.{verb}", json.dumps(body).encode(), timeout=30)
        return json.loads(message.data).get("error", {}).get("code")

    async def all_of_them():
        return await asyncio.gather(*map(one, bodies))
    return site.verbs.run(all_of_them(), 60)


def lease(which):
    return {"identity": which, "lease_id": str(uuid.uuid4()), "ttl_ms": 600_000}


def fill(site, which):
    """Acquires leases until that is refused; all that were granted."""
    granted = []
    while True:
        bodies = [lease(which) for _ in range(16)]
        codes = call_many(site, "acquire_lease", bodies)
        granted += [body for body, code in zip(bodies, codes) if code is None]
        if set(codes) - {None}:
            assert set(codes) <= {None, "CAPACITY_EXHAUSTED"}, codes
            return granted
        assert len(granted) < 5_000, "the log does not fill"


def refused(site, verb, body):
    with pytest.raises(VerbError) as caught:
        site.verbs.call(verb, body, timeout_s=30)
    error = caught.value
    assert error.code == "CAPACITY_EXHAUSTED" and "log" in error.message, error
    assert error.details["log_bytes_max"] == LOG_BYTES and error.details["outcome_unknown"] is False
    return error


def make_room(site):
    """Starts the gateway again so that it lets go of everything that two snapshots hold."""
    old = site.cluster.gateways[0]
    assert old.stop() == 0
    old.command += ["--log-keep", "0"]
    before = log_state(site)
    old.start()
    wait_until(lambda: log_state(site)["first_seq"] > before["last_seq"] - 8, 60, "the log is trimmed behind a snapshot")


def test_a_full_log_refuses_new_work_lets_pass_what_frees_and_takes_on_again_after_a_trim(site, models, scratch):
    model = models("full-log")
    held, moving, doomed = (site.put(model, name) for name in ("held", "moving", "doomed"))
    generations = {which["resource_id"]: site.settled(which)["metadata_generation"] for which in (held, moving, doomed)}
    granted = fill(site, held)

    # New work is refused by name, by every door, and changes nothing.
    metadata = site.verbs.metadata(held)
    refused(site, "acquire_lease", lease(held))
    refused(site, "migrate", {"identity": moving, "target": "COLD", "expected_metadata_generation": generations["moving"]})
    policy = {"preferred_residency": "HOT", "mixed_hot_ratio": 0.25, "migration_mode": "PINNED"}
    refused(site, "update_policy", {"identity": held, "policy": policy, "expected_metadata_generation": generations["held"]})
    code, error, _ = site.cli.refusal("put", model, "new")
    assert code == CAPACITY_EXHAUSTED and "log" in error["message"], error
    assert site.verbs.metadata(held) == metadata and site.verbs.view(held)["active_lease_count"] == len(granted)

    # Releases pass, and a removal runs to its end: its operation reports every step to the log.
    first, rest = granted[:8], granted[8:]
    assert call_many(site, "release_lease", [{key: body[key] for key in ("identity", "lease_id")} for body in first]) == [None] * len(first)
    assert site.verbs.view(held)["active_lease_count"] == len(rest)
    removed = site.verbs.call("remove", {"identity": doomed, "expected_metadata_generation": generations["doomed"]})
    assert removed["revision"]["availability"] in ("DELETING", "DELETED")
    site.becomes(doomed, "DELETED")
    refused(site, "acquire_lease", lease(held))

    # After a snapshot and a trim the same is accepted.
    make_room(site)
    assert site.verbs.view(held)["active_lease_count"] == len(rest), "the trimmed entries' effects stay"
    again = lease(held)
    wait_until(lambda: call_many(site, "acquire_lease", [again]) == [None], 30, "new work is admitted")
    call_many(site, "release_lease", [{"identity": held, "lease_id": body["lease_id"]} for body in [again, *rest]])
    assert site.verbs.view(held)["active_lease_count"] == 0
    site.cli.json("migrate", name_of(moving), "cold", "--wait")
    site.get_identical(name_of(moving), model, scratch / "moved")
    site.put(model, "new")
    site.get_identical("new", model, scratch / "new")


def test_a_log_that_is_full_to_the_last_byte_can_still_be_trimmed(site, models, scratch):
    """What may pass when it is nearly full fills the rest too; the commit of a snapshot has room left even then."""
    model = models("full-log")
    held = site.put(model, "held")
    moving = site.put(model, "moving")
    generation = site.settled(moving)["metadata_generation"]
    # A migration that is under way when everything stops, and goes on by itself.
    for worker in site.cluster.workflow_workers:
        worker.kill()
    operation_id = site.verbs.call("migrate", {"identity": moving, "target": "COLD", "expected_metadata_generation": generation})["operation"]["operation_id"]
    granted = fill(site, held)
    releases = [{"identity": held, "lease_id": body["lease_id"]} for body in granted]
    passed, codes = 0, []
    while set(codes) <= {None}:
        codes = call_many(site, "release_lease", [releases[(passed + n) % len(releases)] for n in range(16)])
        passed += 16
        assert passed < 5_000, "the log does not fill"
    assert set(codes) <= {None, "CAPACITY_EXHAUSTED"}, codes
    refused(site, "release_lease", releases[-1])
    for worker in site.cluster.workflow_workers:
        worker.start()

    make_room(site)
    for body in releases:
        wait_until(lambda: set(call_many(site, "release_lease", [body])) <= {None}, 30, "a release passes again")
    assert site.verbs.view(held)["active_lease_count"] == 0
    assert site.operation_ends(operation_id)["status"] == "SUCCEEDED"
    site.get_identical(name_of(moving), model, scratch / "moved")
    for service in site.cluster.services:
        assert service.running, f"{service.name} has ended:\n{service.output()[-2000:]}"

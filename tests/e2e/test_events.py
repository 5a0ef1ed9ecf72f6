"""The event stream: what orchestrators follow. Each event once, in order, and every step of a life told."""

import json

import pytest

from cluster import wait_until
from conftest import name_of


def events_of(site, which, until, deadline_s=60):
    """Every event of the resource's first stream position up to one that `until` accepts, read with nats-py."""
    async def read():
        found = []
        subject = f"ballast.events.default.default.{which['resource_id']}.main.*"
        subscription = await site.verbs.nc.jetstream().subscribe(subject, ordered_consumer=True)
        try:
            while not found or not until(found[-1][1]):
                message = await subscription.next_msg(deadline_s)
                found.append((message, json.loads(message.data)))
        finally:
            await subscription.unsubscribe()
        return found
    return site.verbs.run(read(), deadline_s + 10)


def is_event(name, generation):
    def matches(event):
        about = event.get("revision") or event.get("operation")
        return event["event"] == name and about and about["identity"]["weight_generation"] == generation
    return matches


@pytest.fixture(scope="module")
def life(site, models):
    """A whole life: put, convergence, migration, replacement, removal; and the events it made."""
    from verbs import identity
    which = identity("told")
    first = site.cli.json("put", models("plain"), "told", "--mode", "manual")
    site.operation_ends(first["metadata"]["operation_id"])
    site.cli.json("migrate", "told", "hot", "--wait")
    site.cli.json("put", models("other", seed=2), "told", "--replace", "--wait")
    successor = {**which, "weight_generation": 2}
    site.settled(successor)
    site.cli.json("rm", "told#2", "--wait")
    site.becomes(successor, "DELETED")
    return which, events_of(site, which, is_event("REVISION_DELETED", 2)), first


def test_events_come_once_and_in_order_and_are_named_by_their_position(life):
    _, events, _ = life
    positions = []
    for message, event in events:
        position = (event["position"]["seq"], event["position"]["index"], event["n"])
        positions.append(position)
        assert message.headers["Nats-Msg-Id"] == ".".join(map(str, position))
        assert event["unix_ms"] > 0
    assert positions == sorted(set(positions))


def test_a_revision_becomes_ready_hot_and_its_convergence_starts_with_it(life):
    _, events, first = life
    names = [event["event"] for _, event in events]
    assert names[0] == "REVISION_IMPORTING"
    ready = next(event for _, event in events if event["event"] == "REVISION_READY")
    assert (ready["revision"]["availability"], ready["revision"]["residency"]) == ("READY", "HOT")
    started = next(event for _, event in events if event["event"] == "OPERATION_STARTED")
    assert started["operation"]["operation_id"] == first["metadata"]["operation_id"]
    assert started["position"] == ready["position"], "READY and its first migration are one durable change"


def test_every_operation_tells_its_start_progress_and_end(life):
    _, events, _ = life
    by_operation = {}
    for _, event in events:
        if "operation" in event:
            by_operation.setdefault(event["operation"]["operation_id"], []).append(event)
    kinds = {told[0]["operation"]["kind"] for told in by_operation.values()}
    assert kinds == {"MIGRATING", "REPLACING", "DELETING"}
    for operation_id, told in by_operation.items():
        names = [event["event"] for event in told]
        assert names[0] == "OPERATION_STARTED" and names[-1] == "OPERATION_ENDED", (operation_id, names)
        assert names.count("OPERATION_STARTED") == names.count("OPERATION_ENDED") == 1
        assert told[-1]["operation"]["status"] == "SUCCEEDED"
        done = [event["operation"]["processed_units"] for event in told]
        assert done == sorted(done), "progress never goes back"
    assert any(event["event"] == "OPERATION_PROGRESS" for _, event in events)


def test_a_replacement_tells_its_phases(life):
    _, events, _ = life
    phases = [event["claim"]["phase"] for _, event in events if event["event"] == "CLAIM_PHASE"]
    assert phases[0] == "PREPARING_TARGET" and phases[-1] == "COMPLETED"
    assert phases.index("TARGET_IMPORTING") < phases.index("RETIRING_BASE")
    order = [event["event"] for _, event in events if is_event("REVISION_READY", 2)(event) or is_event("REVISION_RETIRED", 1)(event) or is_event("REVISION_DELETED", 1)(event)]
    assert order == ["REVISION_READY", "REVISION_RETIRED", "REVISION_DELETED"], "the base goes only after its successor is READY"


def test_a_watcher_outlives_a_restart_of_server_and_gateway(make_site, models, scratch):
    site = make_site()
    log = open(scratch / "watched.jsonl", "wb")
    watch = site.cli.start("-o", "json", "watch", "--from-start", stdout=log)

    def watched():
        lines = (scratch / "watched.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]
    try:
        first = site.put(models("plain"), "before")
        wait_until(lambda: any(is_event("REVISION_READY", 1)(event) for event in watched()), 20, "the watch tells of the first put")
        site.cluster.nats.kill()
        site.cluster.gateways[0].kill()
        site.cluster.nats.start()
        site.cluster.gateways[0].start()
        second = site.put(models("other", seed=2), "after")
        wait_until(lambda: any(is_event("REVISION_READY", 1)(event) and event["revision"]["identity"]["resource_id"] == "after" for event in watched()),
                   60, "the watch tells of the put after the restart")
        positions = [(event["position"]["seq"], event["position"]["index"], event["n"]) for event in watched()]
        assert positions == sorted(set(positions))
        assert name_of(first) != name_of(second)
    finally:
        watch.kill()
        watch.wait()

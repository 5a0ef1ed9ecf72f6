"""The past of a cluster, read from the log itself: entries with their outcomes, the life of an operation, any earlier state,
and starting from an older snapshot when the newest is damaged."""

import asyncio
import json
import signal

import nats
import pytest

from cluster import wait_until
from conftest import name_of

SNAPSHOT_ENTRIES = 20


def lines(text):
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def log(site, *options):
    return lines(site.cli.text("-o", "json", "log", *options))


@pytest.fixture
def travelled(site, models, fresh):
    """A revision that was put hot and moved to cold: its identity, and the operation."""
    which = site.put(models("plain"), fresh()["resource_id"])
    operation = site.cli.json("migrate", name_of(which), "cold", "--wait")
    assert operation["status"] == "SUCCEEDED"
    return which, operation


def test_the_log_shows_every_command_with_what_folding_it_decided(site, travelled):
    which, operation = travelled
    about = log(site, "--revision", name_of(which))
    kinds = [line["kind"] for line in about]
    assert kinds[0] == "BeginImport" and "CommitImport" in kinds and "StartMigration" in kinds and "ClaimOperation" in kinds
    commit = next(line for line in about if line["kind"] == "CommitImport")
    assert commit["outcome"]["Ok"]["Revision"]["availability"] == "READY"
    code, _, _ = site.cli.refusal("migrate", name_of(which), "hot", "--expected", "1")
    assert code == 14
    refused = log(site, "--revision", name_of(which))[-1]
    assert refused["kind"] == "StartMigration" and refused["outcome"]["Err"]["code"] == "STALE_GENERATION"
    assert [line["kind"] for line in log(site, "--op", operation["operation_id"])][0] == "StartMigration"
    seq = refused["seq"]
    assert {line["seq"] for line in log(site, "--from", seq, "--to", seq)} == {seq}
    assert len(log(site, "-n", "3", "--to", seq)) == 3
    text = site.cli.text("log", "--from", seq, "--to", seq)
    assert f"{seq}.{refused['index']}" in text and "STALE_GENERATION" in text and name_of(which) in text


def test_an_entry_that_is_not_there_yet_is_refused_by_number(site):
    code, error, _ = site.cli.refusal("log", "--from", "999999999")
    assert code == 12 and "999999999" in error["message"]
    code, error, _ = site.cli.refusal("replay", "--to", "999999999")
    assert code == 12 and "999999999" in error["message"]


def test_the_log_can_be_followed(site, models, fresh):
    following = site.cli.start("-o", "json", "log", "--follow", "-n", "1")
    try:
        json.loads(following.stdout.readline())
        which = site.put(models("plain"), fresh()["resource_id"])
        seen = []
        while "CommitImport" not in seen:
            line = json.loads(following.stdout.readline())
            if line["command"] and line["command"].get("identity") == which:
                seen.append(line["kind"])
        assert seen[0] == "BeginImport"
    finally:
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 0


def test_the_life_of_an_operation_is_readable_from_the_log(site, travelled):
    which, operation = travelled
    life = site.cli.json("op", "history", operation["operation_id"])
    assert life["complete"]
    changes = [step["change"] for step in life["steps"]]
    assert changes[0] == "CREATED" and changes[-1] == "ENDED" and "ADVANCED" in changes and "AUTHORIZED" in changes
    claimed = next(step for step in life["steps"] if step["change"] == "CLAIMED")
    assert claimed["operation"]["epoch"] == 1 and claimed["operation"]["worker"].startswith("workflow-")
    assert [step["seq"] for step in life["steps"]] == sorted(step["seq"] for step in life["steps"])
    assert life["steps"][0]["by"] == "StartMigration"
    assert {key: value for key, value in life["steps"][-1]["operation"].items()} == site.verbs.operation(operation["operation_id"])
    text = site.cli.text("op", "history", operation["operation_id"])
    assert "CLAIMED" in text and "epoch 1" in text and name_of(which) in text
    code, error, _ = site.cli.refusal("op", "history", "op-1.7")
    assert code == 12 and "op-1.7" in error["message"]


def test_a_wait_for_readers_is_part_of_the_history(site, models, fresh):
    which = site.put(models("plain"), fresh()["resource_id"])
    lease = site.verbs.call("acquire_lease", {"identity": which, "lease_id": f"reader-{which['resource_id']}", "holder": "test", "ttl_ms": 60_000})
    operation = site.cli.json("migrate", name_of(which), "cold")
    parked = lambda: site.verbs.operation(operation["operation_id"])["status"] == "PARKED"
    wait_until(parked, 60, "the migration waits for its reader")
    site.verbs.call("release_lease", {"identity": which, "lease_id": lease["lease"]["lease_id"]})
    site.operation_ends(operation["operation_id"])
    steps = site.cli.json("op", "history", operation["operation_id"])["steps"]
    assert any(step["change"] == "PARKED" and step["operation"]["park_reason"] == "LEASE_DRAIN" for step in steps), steps
    assert steps[-1]["operation"]["status"] == "SUCCEEDED"


def test_any_earlier_state_can_be_shown_and_two_compared(site, travelled):
    which, operation = travelled
    name = name_of(which)
    created = int(operation["operation_id"].removeprefix("op-").split(".")[0])
    now = site.cli.json("replay", "--revision", name)
    assert now["revisions"] == [site.verbs.metadata(which)]
    before = site.cli.json("replay", "--to", created - 1, "--revision", name)
    assert before["seq"] == created - 1 and before["revisions"][0]["residency"] == "HOT" and before["operations"] == []
    whole = site.cli.json("replay", "--to", created)
    assert any(found["operation_id"] == operation["operation_id"] for found in whole["operations"])
    assert whole["config"] and whole["capabilities"] and whole["lineages"] and whole["cluster"]
    diff = site.cli.json("replay", "--diff", created - 1, now["seq"], "--revision", name)
    changed = {change["kind"]: change for change in diff["changes"]}
    assert changed["operation"]["change"] == "added" and changed["operation"]["name"] == operation["operation_id"]
    assert changed["revision"]["fields"]["residency"] == ["HOT", "COLD"]
    assert "HOT -> COLD" in site.cli.text("replay", "--diff", created - 1, now["seq"], "--revision", name)
    assert name in site.cli.text("replay", "--to", created)


def damage_newest_snapshot(url):
    """Flips a byte in the middle of the newest snapshot; returns its name."""
    async def damage():
        connection = await nats.connect(url)
        try:
            store = await connection.jetstream().object_store("BALLAST_SNAPSHOTS")
            newest = max(info.name for info in await store.list())
            data = bytearray((await store.get(newest)).data)
            data[len(data) // 2] ^= 1
            await store.put(newest, bytes(data))
            return newest
        finally:
            await connection.close()

    return asyncio.run(damage())


def test_a_damaged_snapshot_is_refused_by_name_and_an_older_one_brings_everything_back(make_site, models):
    site = make_site()
    cluster = site.cluster
    gateway = cluster.gateways[0]
    gateway.stop()
    gateway.command += ["--snapshot-entries", str(SNAPSHOT_ENTRIES)]
    gateway.start()
    usable = lambda: [one["seq"] for one in site.cli.json("snapshots")["snapshots"] if one["verified"] and one["log_goes_on"]]
    which = site.put(models("plain"), "travels")
    operation = site.cli.json("migrate", name_of(which), "cold", "--wait")

    def busy_until(count):
        def enough():
            site.verbs.call("list", {"options": {"consistency": "linearizable"}})
            return len(usable()) >= count
        wait_until(enough, 60, f"{count} snapshots", poll_s=0.2)

    busy_until(2)
    for service in (*cluster.workflow_workers, *cluster.transfer_workers, gateway):
        service.stop()
    older = usable()[-2]
    newest = damage_newest_snapshot(cluster.url)
    listed = site.cli.json("snapshots")["snapshots"][-1]
    assert not listed["verified"] and newest in listed["reason"]

    gateway.start(wait=False)
    assert gateway.wait_end(30) != 0
    assert newest in gateway.output() and "--restore-from" in gateway.output()

    gateway.command += ["--restore-from", str(older)]
    gateway.start()
    assert site.verbs.operation(operation["operation_id"]) == operation
    assert site.verbs.metadata(which)["residency"] == "COLD"
    # A fresh one takes the damaged one's place, so that the others start without being told.
    wait_until(lambda: usable()[-1] > int(newest.split("-")[0]), 30, "a fresh snapshot")
    for service in (*cluster.transfer_workers, *cluster.workflow_workers):
        service.start()
    again = site.cli.json("migrate", name_of(which), "hot", "--wait")
    assert again["status"] == "SUCCEEDED"

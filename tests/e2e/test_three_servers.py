"""Three NATS servers that keep every stream three times: one killed, paused or cut off in the middle of a verb, the log's leader
included, costs nobody anything but time; without a majority nothing is changed and what can be read is read.

`make cluster-test` runs all of it, `make test` the first test.
"""

import contextlib
import json
import time

import nats.errors
import nats.js.errors
import pytest

import weights
from cluster import CommandFailed, Failure, wait_until
from conftest import TERMINAL, name_of
from verbs import NoAnswer, VerbError, identity

UNAVAILABLE = 21
# BUSY (what was begun has not ended), NOT_READY, UNAVAILABLE: "try again" in the RFC's words.
TRY_AGAIN = {15, 16, UNAVAILABLE}
STREAMS = ["BALLAST_LOG", "BALLAST_EVENTS", "BALLAST_INVENTORY", "BALLAST_INBOX", "BALLAST_WORK", "OBJ_BALLAST_SNAPSHOTS", "KV_BALLAST_KEYS"]
whole_suite = pytest.mark.cluster


def api(site, subject):
    """The answer of the JetStream API, or None when there is none."""
    with contextlib.suppress(NoAnswer):
        answer = json.loads(site.verbs.request(f"$JS.API.{subject}", b"", 3).data)
        return None if "error" in answer else answer
    return None


def log_leader(site):
    def leader():
        info = api(site, "STREAM.INFO.BALLAST_LOG")
        return info and info["cluster"].get("leader")
    return wait_until(leader, 60, "the log has a leader")


def whole(site):
    """Waits until every stream has three copies that are all up to date."""
    def behind():
        found = {}
        for stream in STREAMS:
            info = api(site, f"STREAM.INFO.{stream}")
            peers = (info or {}).get("cluster", {}).get("replicas", [])
            if not info or not info["cluster"].get("leader") or len(peers) != 2 or not all(peer["current"] and not peer.get("offline") for peer in peers):
                found[stream] = info and info["cluster"]
        return found
    wait_until(lambda: not behind(), 90, lambda: f"every stream is whole; not yet: {behind()}", poll_s=0.25)


def server(site, name):
    return next(server for server in site.cluster.nats_servers if server.name == name)


class Fault:
    """What is done to one server, and undone."""

    def __init__(self, site, how, whom):
        self.site, self.how, self.whom = site, how, whom
        self.name = None

    def strike(self):
        leader = log_leader(self.site)
        self.name = leader if self.whom == "leader" else next(one.name for one in self.site.cluster.nats_servers if one.name != leader)
        match self.how:
            case "killed":
                server(self.site, self.name).kill()
            case "paused":
                server(self.site, self.name).pause()
            case "cut-off":
                self.site.cluster.links.cut_off(self.name)

    def heal(self):
        if self.name is None:
            return
        match self.how:
            case "killed":
                server(self.site, self.name).start()
            case "paused":
                server(self.site, self.name).resume()
            case "cut-off":
                self.site.cluster.links.heal(self.name)
        self.name = None
        whole(self.site)


FAULTS = [("killed", "other"), ("killed", "leader"), ("paused", "other"), ("paused", "leader"), ("cut-off", "other"), ("cut-off", "leader")]


@pytest.fixture(params=FAULTS, ids=[f"{whom}-{how}" for how, whom in FAULTS])
def fault(site, request):
    fault = Fault(site, *request.param)
    whole(site)
    yield fault
    fault.heal()
    for service in site.cluster.services:
        assert service.running, f"{service.name} has ended:\n{service.output()[-2000:]}"


@pytest.fixture(scope="module")
def site(make_site):
    # The pause gives deletions and migrations of small models a middle to be interrupted in.
    return make_site(servers=3, gateways=2, workflow_workers=2, worker_env={"BALLAST_STEP_DELAY_MS": "150"})


@pytest.fixture(scope="module")
def base_model(session_folder):
    return weights.write(session_folder / "three" / "base" / "model.safetensors", weights.random_tensors([(f"w{n:03}", (64, 1024)) for n in range(160)], seed=21))


@pytest.fixture(scope="module")
def next_model(session_folder):
    return weights.write(session_folder / "three" / "next" / "model.safetensors", weights.random_tensors([(f"w{n:03}", (64, 1024)) for n in range(160)], seed=22))


def now(site, verb, body):
    """One quick look; None when nobody answers or there is no such thing."""
    try:
        return site.verbs.call(verb, body, timeout_s=1)
    except (NoAnswer, VerbError):
        return None


def availability(site, which):
    view = now(site, "get_metadata", {"identity": which})
    return view and view["metadata"]["availability"]


def in_the_middle(process, holds):
    wait_until(lambda: process.poll() is not None or holds(), 60, "the command is in its middle", poll_s=0.002)
    assert process.poll() is None, f"the command ended before anything happened to it: {process.communicate()}"


def ended(site, process, command):
    """The command's end: whether it went through at once. What was told to try again is told the same again."""
    out, err = process.communicate(timeout=240)
    assert "panicked" not in err, err
    assert process.returncode in {0, *TRY_AGAIN}, f"{out}\n{err}\n{site.cli.run('log', '-n', 40).stdout}"
    deadline = time.monotonic() + 120
    code = process.returncode
    at_once = code == 0
    while code != 0:
        if time.monotonic() > deadline:
            raise Failure(f"still refused: {err}")
        done = site.cli.run("-o", "json", *command, timeout_s=240)
        code, err = done.returncode, done.stderr
        assert code in {0, *TRY_AGAIN}, f"{done}\n{site.cli.run('log', '-n', 40).stdout}"
    return at_once


def read_identical(site, which, original, to):
    """Reads it while one server is in trouble; an answer that says "try again" is one, for a while."""
    def read():
        try:
            return site.get_identical(name_of(which), original, to, "--force")
        except CommandFailed as failure:
            assert failure.exit_code == UNAVAILABLE, failure
    wait_until(read, 90, f"{name_of(which)} is read")


def operations(site, resource, kind=None):
    """Every operation of the resource."""
    found = site.verbs.steady("list_operations", {"all": True, "limit": 1000})["operations"]
    return [one for one in found if one["identity"]["resource_id"] == resource and kind in (None, one["kind"])]


def told_once(site, which):
    """The event stream tells each thing once and in order, and each operation's start and end once."""
    async def read():
        """All there is; nothing while the servers still agree on a leader."""
        try:
            return await read_all()
        except (nats.errors.Error, nats.js.errors.APIError):
            return []

    async def read_all():
        found = []
        subject = f"ballast.events.default.default.{which['resource_id']}.main.*"
        subscription = await site.verbs.nc.jetstream().subscribe(subject, ordered_consumer=True)
        try:
            while True:
                message = await subscription.next_msg(2)
                found.append((message.headers["Ballast-Position"], json.loads(message.data)))
        except nats.errors.TimeoutError:
            return found
        finally:
            await subscription.unsubscribe()

    def ends(events):
        return {event["operation"]["operation_id"] for _, event in events if event["event"] == "OPERATION_ENDED"}
    wanted = {one["operation_id"] for one in operations(site, which["resource_id"])}
    events = wait_until(lambda: ends(found := site.verbs.run(read())) == wanted and found, 60, "the events tell the end of every operation")
    positions = [tuple(map(int, position.split("."))) for position, _ in events]
    assert positions == sorted(set(positions))
    for operation_id in wanted:
        names = [event["event"] for _, event in events if event.get("operation", {}).get("operation_id") == operation_id]
        assert names.count("OPERATION_STARTED") == names.count("OPERATION_ENDED") == 1, names


def test_the_main_path_on_three_servers(make_site, models, scratch):
    site = make_site(servers=3)
    for stream in STREAMS:
        info = wait_until(lambda: api(site, f"STREAM.INFO.{stream}"), 30, f"{stream} answers")
        assert info["config"]["num_replicas"] == 3, f"{stream} is kept three times"
    first, second = models("three-a"), models("three-b", seed=2)
    which = site.put(first, "main-path")
    site.get_identical("main-path", first, scratch / "hot")
    moved = site.cli.json("migrate", "main-path", "cold", "--wait")
    assert site.settled(which)["residency"] == "COLD", moved
    site.get_identical("main-path", first, scratch / "cold")
    generation = site.verbs.metadata(which)["metadata_generation"]
    target = {**which, "weight_generation": 2}
    site.cli.json("upsert", second, name_of(target), "--replacing", "1", "--expected", generation, "--preferred", "hot", "--mode", "manual", "--wait")
    site.get_identical("main-path", second, scratch / "next")
    site.becomes(which, "DELETED")
    site.cli.json("rm", name_of(target), "--wait")
    site.becomes(target, "DELETED")
    wait_until(lambda: not any(path.endswith(".seg") for path in site.bytes_of_tiers()), 30, "no bytes are left")
    told_once(site, which)


@whole_suite
def test_a_put_goes_on(site, fault, base_model, fresh, scratch):
    which = fresh()
    command = ["put", base_model, name_of(which), "--preferred", "hot", "--mode", "manual"]
    process = site.cli.start("-o", "json", *command)
    in_the_middle(process, lambda: availability(site, which) == "IMPORTING")
    instance = wait_until(lambda: site.verbs.find(which), 10, "the gateway that is asked has heard of it")["instance"]
    fault.strike()
    at_once = ended(site, process, command)
    # Any gateway may answer, and one whose server is in trouble has not heard of it yet.
    metadata = site.becomes(which, "READY")
    assert metadata["instance"] == instance or not at_once, "it is the import that was begun, unless its writer was told to begin again"
    read_identical(site, which, base_model, scratch / "during")
    fault.heal()
    site.get_identical(name_of(which), base_model, scratch / "after")
    assert len(site.verbs.revisions(resource_id=which["resource_id"])) == 1
    told_once(site, which)
    site.empty(which)


@whole_suite
def test_a_migration_goes_on(site, fault, base_model, fresh, scratch):
    which = fresh()
    site.put(base_model, name_of(which))
    command = ["migrate", name_of(which), "cold", "--wait"]
    process = site.cli.start("-o", "json", *command)
    moving = lambda: [one for one in (now(site, "list_operations", {}) or {}).get("operations", [])
                      if one["identity"]["resource_id"] == which["resource_id"] and one["status"] == "CLAIMED" and one["cursor"] > 0]
    in_the_middle(process, moving)
    fault.strike()
    ended(site, process, command)
    assert site.settled(which)["residency"] == "COLD"
    read_identical(site, which, base_model, scratch / "during")
    fault.heal()
    [operation] = operations(site, which["resource_id"], "MIGRATING")
    assert operation["status"] == "SUCCEEDED", "the operation that was begun is the one that ends"
    site.get_identical(name_of(which), base_model, scratch / "after")
    told_once(site, which)
    site.empty(which)


@whole_suite
def test_an_upsert_goes_on(site, fault, base_model, next_model, fresh, scratch):
    base, target = fresh(), None
    site.put(base_model, name_of(base))
    target = {**base, "weight_generation": 2}
    generation = site.settled(base)["metadata_generation"]
    command = ["upsert", next_model, name_of(target), "--replacing", "1", "--expected", generation, "--request-id", f"{base['resource_id']}-rollout",
               "--preferred", "hot", "--mode", "manual", "--wait"]
    process = site.cli.start("-o", "json", *command)
    in_the_middle(process, lambda: availability(site, target) in ("IMPORTING", "READY"))
    fault.strike()
    ended(site, process, command)
    wait_until(lambda: site.verbs.steady("get_upsert", {"identity": base})["claim"]["phase"] == "COMPLETED", 60, "the claim completes")
    read_identical(site, target, next_model, scratch / "during")
    fault.heal()
    [replacing] = operations(site, base["resource_id"], "REPLACING")
    assert replacing["status"] == "SUCCEEDED" and site.verbs.steady("get_upsert", {"identity": base})["claim"]["attempt"] == 1
    site.becomes(base, "DELETED")
    [deleting] = operations(site, base["resource_id"], "DELETING")
    assert deleting["status"] in TERMINAL
    site.get_identical(name_of(target), next_model, scratch / "after")
    told_once(site, target)
    site.empty(target)


@whole_suite
def test_a_removal_goes_on(site, fault, base_model, fresh):
    which = fresh()
    site.put(base_model, name_of(which))
    site.cli.json("migrate", name_of(which), "mixed", "--wait")
    site.settled(which)
    command = ["rm", name_of(which), "--wait"]
    process = site.cli.start("-o", "json", *command)
    in_the_middle(process, lambda: availability(site, which) == "DELETING")
    fault.strike()
    ended(site, process, command)
    assert site.becomes(which, "DELETED")["residency"] == "ABSENT"
    fault.heal()
    [deleting] = operations(site, which["resource_id"], "DELETING")
    assert deleting["status"] in TERMINAL
    told_once(site, which)


@whole_suite
def test_without_a_majority_nothing_changes_and_what_can_be_read_is_read(site, base_model, scratch):
    whole(site)
    read, moving, doomed = map(identity, ("majority-read", "majority-moving", "majority-doomed"))
    for which in (read, moving, doomed):
        site.put(base_model, name_of(which))
    before = {which["resource_id"]: site.settled(which) for which in (read, moving, doomed)}
    migrated = site.verbs.call("migrate", {"identity": moving, "target": "COLD", "expected_metadata_generation": before[moving["resource_id"]]["metadata_generation"]})
    operation_id = migrated["operation"]["operation_id"]
    # A reader that has its lease and its mapping needs nobody for a while.
    opened, release = scratch / "opened", scratch / "release"
    reader = site.cli.start("open", name_of(read), "--", "sh", "-c", f"touch {opened}; while [ ! -e {release} ]; do sleep 0.1; done")
    wait_until(opened.exists, 30, "the reader has opened it")
    victims = site.cluster.nats_servers[1:]
    for victim in victims:
        victim.kill()
    assert site.verbs.metadata(doomed) == before[doomed["resource_id"]]
    listed = {one["identity"]["resource_id"] for one in site.verbs.steady("list", {"limit": 1000})["revisions"]}
    assert listed >= set(before)
    assert {one["identity"]["resource_id"] for one in site.cli.json("ls")} >= set(before)

    removal = {"identity": doomed, "expected_metadata_generation": before[doomed["resource_id"]]["metadata_generation"], "options": {"request_id": f"remove-{doomed['resource_id']}"}}
    with pytest.raises(VerbError) as caught:
        site.verbs.call("remove", removal, timeout_s=40)
    assert caught.value.code == "UNAVAILABLE", caught.value
    assert caught.value.details["outcome_unknown"] is True, "the caller hears that the same request again is the way to learn it"
    code, error, _ = site.cli.refusal("migrate", name_of(read), "cold")
    assert code == UNAVAILABLE and error["message"], error
    assert site.verbs.metadata(doomed) == before[doomed["resource_id"]], "nothing is changed before it is stored"
    assert reader.poll() is None, "a mapping outlives the log's absence"
    for victim in victims:
        victim.start()
    whole(site)
    release.touch()
    out, err = reader.communicate(timeout=120)
    assert reader.returncode == 0, err
    assert site.operation_ends(operation_id)["status"] == "SUCCEEDED"
    assert site.settled(moving)["residency"] == "COLD"
    site.get_identical(name_of(moving), base_model, scratch / "moved")
    assert site.verbs.steady("remove", removal)["revision"]["availability"] in ("DELETING", "DELETED")
    site.becomes(doomed, "DELETED")
    assert len(operations(site, doomed["resource_id"], "DELETING")) == 1
    assert len(operations(site, moving["resource_id"], "MIGRATING")) == 1
    for which in (moving, doomed):
        told_once(site, which)
    site.get_identical(name_of(read), base_model, scratch / "read")
    for service in site.cluster.services:
        assert service.running, f"{service.name} has ended:\n{service.output()[-2000:]}"

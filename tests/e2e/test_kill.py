"""kill -9 of each process during each verb that changes something: the state afterwards is one the RFC allows, nothing readable
is lost, and repeating the same command completes it, without a byte left over."""

import time

import pytest

import weights
from cluster import Failure, footprint, wait_until
from conftest import TERMINAL, name_of
from verbs import NoAnswer, VerbError, identity

VICTIMS = ["nats-server", "gateway", "workflow-worker", "transfer-worker"]
# BUSY (another session or operation has not ended), NOT_READY, UNAVAILABLE: "try again" in the RFC's words.
TRY_AGAIN = {15, 16, 21}
REPEAT_S = 120


@pytest.fixture(scope="module")
def site(make_site):
    # The pause gives deletions and migrations of small models a middle to be interrupted in.
    return make_site(worker_env={"BALLAST_STEP_DELAY_MS": "150"})


@pytest.fixture(scope="module")
def base_model(session_folder):
    return weights.write(session_folder / "kill" / "base" / "model.safetensors", weights.random_tensors([(f"w{n:03}", (64, 1024)) for n in range(160)], seed=11))


@pytest.fixture(scope="module")
def next_model(session_folder):
    return weights.write(session_folder / "kill" / "next" / "model.safetensors", weights.random_tensors([(f"w{n:03}", (64, 1024)) for n in range(160)], seed=12))


def victim_of(site, victim):
    return {"nats-server": site.cluster.nats, "gateway": site.cluster.gateways[0], "workflow-worker": site.cluster.workflow_workers[0],
            "transfer-worker": site.cluster.transfer_workers[0]}[victim]


def look(site, which):
    """Availability now, or None: not there, or nobody to ask."""
    try:
        return site.verbs.call("get_metadata", {"identity": which}, timeout_s=1)["metadata"]["availability"]
    except VerbError as error:
        if error.code not in ("NOT_FOUND", "UNAVAILABLE"):
            raise
    except NoAnswer:
        pass
    return None


def strike(site, victim, process, in_the_middle):
    """Kills the victim once `in_the_middle` holds (or the command has ended before), and starts it again."""
    wait_until(lambda: process.poll() is not None or in_the_middle(), 60, "the command is in its middle", poll_s=0.002)
    was_running = process.poll() is None
    victim_of(site, victim).restart()
    return was_running


def ended(process):
    out, err = process.communicate(timeout=180)
    assert "panicked" not in err, err
    return process.returncode, out, err


def repeat(site, *arguments):
    """The same command again, until it succeeds; only answers that say "try again" are accepted before."""
    deadline = time.monotonic() + REPEAT_S
    while True:
        done = site.cli.run("-o", "json", *arguments, timeout_s=REPEAT_S)
        if done.returncode == 0:
            return
        assert done.returncode in TRY_AGAIN, done
        if time.monotonic() > deadline:
            raise Failure(f"still refused after {REPEAT_S} s: {done.stderr}")
        time.sleep(0.2)


def nothing_is_left(site, which, before):
    """Removes the revision; then the tiers hold no byte more than before the test."""
    site.settled(which)
    repeat(site, "rm", name_of(which), "--wait")
    assert site.verbs.metadata(which)["availability"] == "DELETED"
    wait_until(lambda: sum(site.bytes_of_tiers().values()) <= before, 30,
               f"the tiers are as empty as before ({before} bytes)")


def occupied(site):
    return sum(footprint(*site.cluster.memory_dirs, *site.cluster.cold_dirs).values())


@pytest.fixture
def resource(request):
    return "kill-" + request.node.callspec.params["victim"]


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_during_put(site, base_model, resource, victim, scratch):
    before = occupied(site)
    which = identity(f"{resource}-put")
    command = ["put", base_model, name_of(which), "--preferred", "hot", "--mode", "manual"]
    process = site.cli.start("-o", "json", *command)
    strike(site, victim, process, lambda: look(site, which) == "IMPORTING")
    code, out, err = ended(process)
    found = site.verbs.find(which)
    assert found is None or found["availability"] in ("IMPORTING", "READY", "DELETING", "DELETED"), found
    if code == 0:
        assert found["availability"] == "READY", err
    if found and found["availability"] == "READY":
        # What is READY is complete, whoever died.
        site.get_identical(name_of(which), base_model, scratch / f"{victim}-put-at-once")
    repeat(site, *command)
    assert site.verbs.metadata(which)["availability"] == "READY"
    site.get_identical(name_of(which), base_model, scratch / f"{victim}-put")
    nothing_is_left(site, which, before)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_during_migrate(site, base_model, resource, victim, scratch):
    before = occupied(site)
    which = site.put(base_model, f"{resource}-migrate")
    command = ["migrate", name_of(which), "cold", "--wait"]
    process = site.cli.start("-o", "json", *command)

    def moving():
        try:
            operations = site.verbs.call("list_operations", {}, timeout_s=1)["operations"]
        except (NoAnswer, VerbError):
            return False
        return any(operation["status"] == "CLAIMED" and operation["cursor"] > 0 for operation in operations)
    strike(site, victim, process, moving)
    ended(process)
    metadata = site.verbs.metadata(which)
    assert metadata["availability"] == "READY", "a migration never makes a readable revision unreadable"
    operations = [one for one in site.verbs.steady("list_operations", {"all": True, "limit": 1000})["operations"] if one["instance"] == metadata["instance"]]
    assert len(operations) == 1, "the killed operation is not replaced by another"
    site.get_identical(name_of(which), base_model, scratch / f"{victim}-migrate-at-once")
    repeat(site, *command)
    assert site.settled(which)["residency"] == "COLD"
    assert site.verbs.operation(operations[0]["operation_id"])["status"] == "SUCCEEDED"
    site.get_identical(name_of(which), base_model, scratch / f"{victim}-migrate")
    nothing_is_left(site, which, before)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_during_upsert(site, base_model, next_model, resource, victim, scratch):
    before = occupied(site)
    base = site.put(base_model, f"{resource}-upsert")
    target = {**base, "weight_generation": 2}
    generation = site.verbs.metadata(base)["metadata_generation"]
    command = ["upsert", next_model, name_of(target), "--replacing", "1", "--expected", str(generation), "--request-id", f"{resource}-rollout",
               "--preferred", "hot", "--mode", "manual", "--wait"]
    process = site.cli.start("-o", "json", *command)
    strike(site, victim, process, lambda: look(site, target) in ("IMPORTING", "READY"))
    ended(process)
    states = {generation: (site.verbs.find({**base, "weight_generation": generation}) or {}).get("availability") for generation in (1, 2)}
    assert "READY" in states.values(), f"PUT_FIRST never leaves the lineage without a readable generation: {states}"
    repeat(site, *command)
    wait_until(lambda: site.verbs.steady("get_upsert", {"identity": base})["claim"]["phase"] == "COMPLETED", 60, "the claim completes")
    assert site.verbs.metadata(base)["availability"] == "DELETED"
    assert site.verbs.metadata(target)["availability"] == "READY"
    assert site.verbs.view(target)["watermark"] == 2
    replacing = [one for one in site.verbs.steady("list_operations", {"all": True, "limit": 1000})["operations"]
                 if one["kind"] == "REPLACING" and one["identity"]["resource_id"] == base["resource_id"]]
    # An attempt whose upload died ends, and the same request opens the next; only one of them has a successor.
    assert [one["status"] for one in replacing].count("SUCCEEDED") == 1, "the lineage has one successor"
    assert len(replacing) == site.verbs.steady("get_upsert", {"identity": base})["claim"]["attempt"]
    assert all(one["status"] in TERMINAL for one in replacing)
    site.get_identical(name_of(target), next_model, scratch / f"{victim}-upsert")
    nothing_is_left(site, target, before)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_during_rm(site, base_model, resource, victim):
    before = occupied(site)
    which = site.put(base_model, f"{resource}-rm")
    site.cli.json("migrate", name_of(which), "mixed", "--wait")
    site.settled(which)
    command = ["rm", name_of(which), "--wait"]
    process = site.cli.start("-o", "json", *command)
    strike(site, victim, process, lambda: look(site, which) == "DELETING")
    ended(process)
    assert site.verbs.metadata(which)["availability"] in ("READY", "DELETING", "DELETED")
    repeat(site, *command)
    tombstone = site.becomes(which, "DELETED")
    assert tombstone["residency"] == "ABSENT" and tombstone["operation_id"] is None
    deletions = [one for one in site.verbs.steady("list_operations", {"all": True, "limit": 1000})["operations"]
                 if one["kind"] == "DELETING" and one["instance"] == tombstone["instance"]]
    assert len(deletions) == 1 and deletions[0]["status"] in TERMINAL
    wait_until(lambda: occupied(site) <= before, 30, f"the tiers are as empty as before ({before} bytes)")


def test_everything_at_once_comes_back(site, base_model, scratch):
    """All four die together, as in a power cut of the machine's processes."""
    before = occupied(site)
    hot = site.put(base_model, "kill-all-hot")
    cold = site.put(base_model, "kill-all-cold")
    site.cli.json("migrate", name_of(cold), "cold", "--wait")
    state = {name_of(which): site.settled(which) for which in (hot, cold)}
    for victim in VICTIMS:
        victim_of(site, victim).kill()
    for victim in VICTIMS:
        victim_of(site, victim).start(wait=victim == "nats-server")
    for victim in VICTIMS:
        victim_of(site, victim).wait_ready()
    for which in (hot, cold):
        assert site.verbs.metadata(which) == state[name_of(which)]
        repeat(site, "get", name_of(which), "--to", scratch / which["resource_id"], "--force")
        weights.compare(weights.fingerprints(base_model), scratch / which["resource_id"])
    repeat(site, "rm", name_of(hot), "--wait")
    nothing_is_left(site, cold, before)

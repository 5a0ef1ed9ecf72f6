"""Every verb over NATS in JSON, with nats-py: a client that shares no code with Ballast. Bytes are imported with `ballast put`,
because they never travel over NATS."""

import json
import shutil
import uuid

import pytest

from cluster import wait_until
from conftest import name_of
from verbs import VerbError

VERBS = {
    "begin_import", "renew_import", "commit_import", "abort_import", "acquire_lease", "renew_lease", "release_lease", "is_exist",
    "get_metadata", "get_size", "list", "update_policy", "upsert", "abort_upsert", "get_upsert", "migrate", "get_operation",
    "list_operations", "cancel_operation", "pause_operation", "resume_operation", "retry_operation", "remove", "purge", "repair", "verify", "clock", "status",
    "join_import", "renew_part", "finish_part", "get_import",
}
NUMBERS = {"INVALID_ARGUMENT": 1, "NOT_FOUND": 2, "CONFLICT": 3, "STALE_GENERATION": 4, "NOT_READY": 5, "BUSY": 6, "LEASE_EXPIRED": 7,
           "POLICY_UNSATISFIABLE": 10, "UNAVAILABLE": 11, "CAPACITY_EXHAUSTED": 14}
DIGEST = "ab" * 32
PAYLOAD = 12 * 64 * 1024


def refused(verbs, code, verb, body, **options):
    """The verb must be refused with this code, number, a message, and the service error headers."""
    with pytest.raises(VerbError) as caught:
        verbs.call(verb, body, **options)
    error = caught.value
    assert error.code == code, error
    assert error.number == NUMBERS[code]
    assert error.message and error.message[0].islower()
    assert error.headers["Nats-Service-Error-Code"]
    assert code in error.headers["Nats-Service-Error"]
    return error


def import_request(which, **fields):
    return {"identity": which, "session_id": str(uuid.uuid4()), "placement_digest": DIGEST, "logical_bytes": 1000, "reserved_bytes": 4096,
            "unit_count": 1, **fields}


@pytest.fixture
def ready(site, models, fresh):
    """A READY, HOT revision of 3 MiB that nothing moves by itself."""
    which = fresh()
    site.put(models("plain"), name_of(which))
    return which


def test_the_service_is_discoverable_with_every_verb(site):
    message = site.verbs.request("$SRV.INFO", b"")
    info = json.loads(message.data)
    assert "ballast" in info["name"].lower()
    found = {endpoint["subject"].rsplit(".", 1)[-1] for endpoint in info["endpoints"]}
    assert found == VERBS
    assert all(endpoint["subject"].startswith("ballast.v1.*.") for endpoint in info["endpoints"])
    ping = json.loads(site.verbs.request("$SRV.PING", b"").data)
    assert ping["name"] == info["name"]


def test_a_mutation_is_refused_after_the_end_that_its_caller_gave_it(site, ready):
    clock = site.verbs.call("clock")["log_clock"]
    assert site.verbs.call("clock")["log_clock"] >= clock
    body = {"identity": ready, "expected_metadata_generation": site.verbs.view(ready)["metadata"]["metadata_generation"]}
    late = {"request_id": str(uuid.uuid4()), "not_after": 0}
    error = refused(site.verbs, "UNAVAILABLE", "remove", {**body, "options": late})
    assert "too late" in error.message and "new id" in error.message
    assert site.verbs.view(ready)["metadata"]["availability"] == "READY"
    refused(site.verbs, "INVALID_ARGUMENT", "remove", {**body, "options": {"not_after": "soon"}})
    removed = site.verbs.call("remove", {**body, "options": {"request_id": str(uuid.uuid4()), "not_after": clock + 90_000}})
    assert removed["revision"]["availability"] == "DELETING"


def test_status_names_cluster_replica_and_nodes(site):
    status = site.verbs.call("status")
    assert status["cluster_id"] and status["incarnation"] >= 1 and status["replica_id"]
    assert status["folded_seq"] >= 1
    node = status["nodes"][0]
    assert node["endpoint"]["node"] == "node-0"
    assert node["not_serving"] is None
    assert node["cold_capacity_bytes"] > 0


def test_every_reply_carries_the_log_sequence_and_min_log_seq_waits_for_it(site, ready):
    first = site.verbs.call("get_metadata", {"identity": ready})
    seq = first["log_seq"]
    again = site.verbs.call("get_metadata", {"identity": ready, "options": {"min_log_seq": seq, "consistency": "linearizable"}})
    assert again["log_seq"] > seq, "a linearizable read appends a barrier"
    assert again["metadata"] == first["metadata"]


def test_a_published_revision_is_found_by_identity_and_in_lists(site, ready):
    assert site.verbs.call("is_exist", {"identity": ready})["exists"] is True
    view = site.verbs.call("get_metadata", {"identity": ready})
    metadata = view["metadata"]
    assert metadata["identity"] == {"tenant_id": "default", **ready}
    assert (metadata["availability"], metadata["residency"], metadata["observed_hot_ppm"]) == ("READY", "HOT", 1_000_000)
    assert metadata["policy"] == {"preferred_residency": "HOT", "mixed_hot_ratio": 0.5, "migration_mode": "MANUAL"}
    assert metadata["manifest"]["key"] == f"weights/default/{ready['resource_id']}/main/1/manifest"
    # The tensors, and a description of the file, so that it comes back byte for byte.
    size = metadata["manifest"]["logical_bytes"]
    assert PAYLOAD < size < PAYLOAD + 4096
    assert metadata["manifest"]["affinity_count"] == 12 + 1
    assert view["active_lease_count"] == 0 and view["nearest_lease_expiry_ms"] is None
    assert view["watermark"] == 1
    assert site.verbs.call("get_size", {"identity": ready})["logical_bytes"] == size
    page = site.verbs.call("list", {"resource_id": ready["resource_id"]})
    assert [revision["identity"]["resource_id"] for revision in page["revisions"]] == [ready["resource_id"]]
    assert page["next_page_token"] == ""


def test_what_is_whole_is_verified_and_needs_no_repair(site, ready, fresh):
    units = site.verbs.view(ready)["metadata"]["manifest"]["affinity_count"]
    reply = site.verbs.call("verify", {"identity": ready})
    assert (reply["units"], reply["next"]) == (units, None)
    assert [(check["memory"], check["cold"]) for check in reply["nodes"]] == [({"right": units, "wrong": []}, {"right": 0, "wrong": []})]
    assert site.verbs.call("verify", {"identity": ready, "from": 1})["nodes"][0]["memory"]["right"] == units - 1
    assert site.verbs.call("repair", {"identity": ready})["operation"] is None
    missing = fresh(2)
    for verb in ["verify", "repair"]:
        refused(site.verbs, "NOT_FOUND", verb, {"identity": missing})


def test_metadata_holds_no_tensor_and_no_address(site, ready):
    text = json.dumps(site.verbs.call("get_metadata", {"identity": ready}))
    assert "layer." not in text and "/dev/shm" not in text and "127.0.0.1" not in text


def test_what_is_not_there_is_not_found(site, fresh):
    missing = fresh()
    assert site.verbs.call("is_exist", {"identity": missing})["exists"] is False
    for verb in ("get_metadata", "get_size"):
        refused(site.verbs, "NOT_FOUND", verb, {"identity": missing})
    refused(site.verbs, "NOT_FOUND", "get_operation", {"operation_id": "op-999999.0"})
    refused(site.verbs, "NOT_FOUND", "get_upsert", {"identity": missing})
    refused(site.verbs, "NOT_FOUND", "acquire_lease", {"identity": missing, "lease_id": str(uuid.uuid4())})
    refused(site.verbs, "NOT_FOUND", "remove", {"identity": missing, "expected_metadata_generation": 1})
    refused(site.verbs, "NOT_FOUND", "migrate", {"identity": missing, "target": "COLD", "expected_metadata_generation": 1})


def test_is_exist_is_right_in_every_availability_and_while_migrating(make_site, models, fresh):
    # Without a workflow worker everything stays where it was begun.
    site = make_site(workflow_workers=0)

    def exists(which):
        found = site.verbs.find(which)
        return found and (found["availability"], found["operation_id"] is not None), site.verbs.steady("is_exist", {"identity": which})["exists"]

    importing, moving, leaving, lost = (fresh(revision=name) for name in ("importing", "moving", "leaving", "lost"))
    assert exists(importing) == (None, False)
    site.verbs.call("begin_import", import_request(importing))
    assert exists(importing) == (("IMPORTING", False), False)
    for which in (moving, leaving, lost):
        site.put(models("plain"), name_of(which))
        assert exists(which) == (("READY", False), True)
    site.verbs.call("migrate", {"identity": moving, "target": "COLD", "expected_metadata_generation": site.verbs.metadata(moving)["metadata_generation"]})
    assert exists(moving) == (("READY", True), True)
    site.verbs.call("remove", {"identity": leaving, "expected_metadata_generation": site.verbs.metadata(leaving)["metadata_generation"]})
    assert exists(leaving) == (("DELETING", True), False)
    worker = site.cluster.new_workflow_worker("late").start()
    try:
        site.becomes(leaving, "DELETED")
        assert exists(leaving) == (("DELETED", False), False)
        site.settled(moving)
        # What was in memory only is lost with it.
        node = site.cluster.transfer_workers[0]
        node.kill()
        for entry in site.cluster.memory_dirs[0].iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        node.start()
        site.verbs.steady("migrate", {"identity": lost, "target": "COLD", "expected_metadata_generation": site.verbs.metadata(lost)["metadata_generation"]})
        site.becomes(lost, "DEGRADED")
        assert exists(lost)[1] is False
    finally:
        worker.kill()


def test_lists_page_through_everything_once(site, models, fresh):
    first = fresh()
    names = []
    for n in range(5):
        which = {**first, "revision": f"r{n}"}
        site.put(models("plain"), name_of(which))
        names.append(which["revision"])
    found, token, pages = [], "", 0
    while True:
        page = site.verbs.call("list", {"resource_id": first["resource_id"], "limit": 2, "page_token": token})
        found += [revision["identity"]["revision"] for revision in page["revisions"]]
        token, pages = page["next_page_token"], pages + 1
        if not token:
            break
    assert (found, pages) == (names, 3)
    by_prefix = site.verbs.call("list", {"resource_prefix": first["resource_id"][:-1]})
    assert {revision["identity"]["revision"] for revision in by_prefix["revisions"]} >= set(names)
    for limit in (0, 1001):
        refused(site.verbs, "INVALID_ARGUMENT", "list", {"limit": limit})
    refused(site.verbs, "INVALID_ARGUMENT", "list", {"page_token": "nonsense"})


def test_tenants_do_not_see_each_other(site, models, fresh):
    which = fresh(tenant="team-b")
    site.put(models("plain"), name_of(which))
    assert site.verbs.call("is_exist", {"identity": which}, tenant="team-b")["exists"]
    own = {key: value for key, value in which.items() if key != "tenant_id"}
    assert not site.verbs.call("is_exist", {"identity": own})["exists"]
    assert not site.verbs.call("list", {"resource_id": which["resource_id"]})["revisions"]
    with pytest.raises(VerbError) as caught:
        site.verbs.call("get_metadata", {"identity": which}, tenant="default")
    assert caught.value.code in ("INVALID_ARGUMENT", "UNAUTHORIZED")
    assert "team-b" in caught.value.message


# -- policy

def test_a_policy_changes_under_its_fence_and_a_repeat_returns_the_same(site, ready):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    policy = {"preferred_residency": "HOT", "mixed_hot_ratio": 0.25, "migration_mode": "PINNED"}
    changed = site.verbs.call("update_policy", {"identity": ready, "policy": policy, "expected_metadata_generation": generation})["revision"]
    assert changed["policy"] == policy and changed["metadata_generation"] == generation + 1
    again = site.verbs.call("update_policy", {"identity": ready, "policy": policy, "expected_metadata_generation": generation})["revision"]
    assert again["metadata_generation"] == generation + 1, "the repeat of a lost answer is no second change"
    other = {**policy, "mixed_hot_ratio": 0.75}
    error = refused(site.verbs, "STALE_GENERATION", "update_policy", {"identity": ready, "policy": other, "expected_metadata_generation": generation})
    assert str(generation) in error.message and str(generation + 1) in error.message, "what was expected and what was found"
    error = refused(site.verbs, "POLICY_UNSATISFIABLE", "migrate", {"identity": ready, "target": "COLD", "expected_metadata_generation": generation + 1})
    assert "PINNED" in error.message


# -- leases

def test_a_lease_is_granted_renewed_found_again_and_released(site, ready):
    lease_id = str(uuid.uuid4())
    request = {"identity": ready, "lease_id": lease_id, "holder": "test", "ttl_ms": 30_000}
    reply = site.verbs.call("acquire_lease", request)
    assert reply["lease"]["lease_id"] == lease_id and reply["lease"]["ttl_ms"] == 30_000
    assert reply["revision"]["identity"]["resource_id"] == ready["resource_id"]
    assert reply["endpoints"][0]["node"] == "node-0" and reply["token"]
    assert site.verbs.call("acquire_lease", request)["lease"]["lease_id"] == lease_id
    view = site.verbs.view(ready)
    assert view["active_lease_count"] == 1 and 0 < view["nearest_lease_expiry_ms"] <= 30_000
    generation = view["metadata"]["metadata_generation"]
    renewed = site.verbs.call("renew_lease", {"identity": ready, "lease_id": lease_id, "ttl_ms": 60_000})
    assert renewed["lease"]["expires_at"] > reply["lease"]["expires_at"]
    assert site.verbs.metadata(ready)["metadata_generation"] == generation, "leases do not change the metadata"
    assert site.verbs.call("release_lease", {"identity": ready, "lease_id": lease_id})["lapsed"] is False
    assert site.verbs.view(ready)["active_lease_count"] == 0


def test_an_active_lease_prevents_deletion(site, ready):
    lease_id = str(uuid.uuid4())
    site.verbs.call("acquire_lease", {"identity": ready, "lease_id": lease_id})
    generation = site.verbs.metadata(ready)["metadata_generation"]
    error = refused(site.verbs, "BUSY", "remove", {"identity": ready, "expected_metadata_generation": generation})
    assert "lease" in error.message
    site.verbs.call("release_lease", {"identity": ready, "lease_id": lease_id})
    removed = site.verbs.call("remove", {"identity": ready, "expected_metadata_generation": generation})["revision"]
    assert removed["availability"] in ("DELETING", "DELETED")
    site.becomes(ready, "DELETED")


def test_a_lease_ends_by_itself_and_its_release_says_so(site, ready):
    lease_id = str(uuid.uuid4())
    site.verbs.call("acquire_lease", {"identity": ready, "lease_id": lease_id, "ttl_ms": 500})
    wait_until(lambda: site.verbs.view(ready)["active_lease_count"] == 0, 15, "the lease ends")
    assert site.verbs.call("release_lease", {"identity": ready, "lease_id": lease_id})["lapsed"] is True
    refused(site.verbs, "LEASE_EXPIRED", "renew_lease", {"identity": ready, "lease_id": lease_id})


@pytest.mark.parametrize("ttl_ms", [0, 86_400_001])
def test_a_lease_of_no_time_or_more_than_a_day_is_refused(site, ready, ttl_ms):
    refused(site.verbs, "INVALID_ARGUMENT", "acquire_lease", {"identity": ready, "lease_id": str(uuid.uuid4()), "ttl_ms": ttl_ms})


def test_questions_neither_extend_a_lease_nor_count_as_access(site, ready):
    before = site.verbs.metadata(ready)["last_accessed_unix_ms"]
    site.verbs.call("is_exist", {"identity": ready})
    site.verbs.call("list", {"resource_id": ready["resource_id"]})
    site.verbs.call("get_size", {"identity": ready})
    assert site.verbs.metadata(ready)["last_accessed_unix_ms"] == before


# -- migration and operations

@pytest.mark.parametrize("path", [["COLD", "HOT"], ["MIXED", "COLD", "MIXED", "HOT"], ["COLD", "MIXED"]])
def test_a_revision_migrates_along_every_path(site, ready, path):
    for target in path:
        generation = site.settled(ready)["metadata_generation"]
        body = {"identity": ready, "target": target, "expected_metadata_generation": generation}
        operation = site.verbs.call("migrate", body)["operation"]
        assert (operation["kind"], operation["target"], operation["trigger"]) == ("MIGRATING", target, "EXPLICIT")
        ended = site.operation_ends(operation["operation_id"])
        assert ended["status"] == "SUCCEEDED", ended
        assert ended["processed_units"] == ended["total_units"] and ended["processed_bytes"] == ended["total_bytes"]
        metadata = site.verbs.metadata(ready)
        assert metadata["residency"] == target and metadata["operation_id"] is None
        hot = {"HOT": 1_000_000, "COLD": 0, "MIXED": 500_000}[target]
        assert abs(metadata["observed_hot_ppm"] - hot) <= 50_000
        assert metadata["metadata_generation"] > generation
        # The repeat of a lost answer returns what was begun, terminal or not.
        assert site.verbs.call("get_operation", {"operation_id": operation["operation_id"]})["operation"] == ended


def test_a_hot_ratio_is_met_by_whole_tensors(site, ready):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    operation = site.verbs.call("migrate", {"identity": ready, "target": "MIXED", "mixed_hot_ratio": 0.25, "expected_metadata_generation": generation})["operation"]
    assert operation["target_hot_ratio"] == 0.25
    assert site.operation_ends(operation["operation_id"])["status"] == "SUCCEEDED"
    assert abs(site.verbs.metadata(ready)["observed_hot_ppm"] - 250_000) < 2000, "3 of 12 equal tensors; the header is small"


def test_a_stale_migration_is_refused_and_begins_nothing(site, ready, unchanged):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    with unchanged(site):
        error = refused(site.verbs, "STALE_GENERATION", "migrate", {"identity": ready, "target": "COLD", "expected_metadata_generation": generation + 7})
        assert str(generation) in error.message and str(generation + 7) in error.message
        refused(site.verbs, "INVALID_ARGUMENT", "migrate", {"identity": ready, "target": "ABSENT", "expected_metadata_generation": generation})


def test_operations_are_listed_newest_first_and_stay_queryable(site, ready):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    operation_id = site.verbs.call("migrate", {"identity": ready, "target": "COLD", "expected_metadata_generation": generation})["operation"]["operation_id"]
    site.operation_ends(operation_id)
    listed = site.verbs.call("list_operations", {"all": True, "limit": 1000})["operations"]
    ids = [operation["operation_id"] for operation in listed]
    assert operation_id in ids
    positions = [tuple(map(int, which.removeprefix("op-").split("."))) for which in ids]
    assert positions == sorted(positions, reverse=True)
    assert operation_id not in [operation["operation_id"] for operation in site.verbs.call("list_operations")["operations"]]


def test_an_ended_operation_can_not_be_cancelled_paused_resumed_or_retried(site, ready):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    operation_id = site.verbs.call("migrate", {"identity": ready, "target": "COLD", "expected_metadata_generation": generation})["operation"]["operation_id"]
    ended = site.operation_ends(operation_id)
    for verb in ("pause_operation", "resume_operation", "retry_operation", "cancel_operation"):
        with pytest.raises(VerbError) as caught:
            site.verbs.call(verb, {"operation_id": operation_id})
        assert caught.value.code in ("NOT_READY", "CONFLICT"), caught.value
    assert site.verbs.operation(operation_id) == ended


# -- removal

def test_removal_leaves_a_tombstone_that_purge_takes_away(site, ready):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    site.verbs.call("remove", {"identity": ready, "expected_metadata_generation": generation})
    tombstone = site.becomes(ready, "DELETED")
    assert tombstone["residency"] == "ABSENT" and tombstone["operation_id"] is None
    assert site.verbs.call("is_exist", {"identity": ready})["exists"] is False
    assert not site.verbs.call("list", {"resource_id": ready["resource_id"]})["revisions"]
    assert len(site.verbs.call("list", {"resource_id": ready["resource_id"], "all": True})["revisions"]) == 1
    with pytest.raises(VerbError) as caught:
        site.verbs.call("acquire_lease", {"identity": ready, "lease_id": str(uuid.uuid4())})
    assert caught.value.code in ("NOT_READY", "NOT_FOUND")
    again = site.verbs.call("remove", {"identity": ready, "expected_metadata_generation": tombstone["metadata_generation"]})["revision"]
    assert again["availability"] == "DELETED", "removing a tombstone changes nothing"
    assert site.verbs.metadata(ready) == tombstone
    site.verbs.call("purge", {"identity": ready})
    assert site.verbs.find(ready) is None
    error = refused(site.verbs, "CONFLICT", "begin_import", import_request(ready))
    assert "watermark" in error.message, "a generation at or below the watermark never enters again"


def test_a_stale_removal_is_refused(site, ready, unchanged):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    with unchanged(site):
        refused(site.verbs, "STALE_GENERATION", "remove", {"identity": ready, "expected_metadata_generation": generation + 1})


def test_only_a_tombstone_can_be_purged(site, ready, unchanged):
    with unchanged(site), pytest.raises(VerbError) as caught:
        site.verbs.call("purge", {"identity": ready})
    assert caught.value.code in ("NOT_READY", "CONFLICT", "BUSY")


# -- import sessions

def test_an_import_session_is_found_again_renewed_and_aborted(site, fresh):
    which = fresh()
    request = import_request(which, ttl_ms=20_000)
    reply = site.verbs.call("begin_import", request)
    assert reply["session"]["placement"] == ["node-0"] and reply["endpoints"][0]["node"] == "node-0" and reply["token"]
    assert site.verbs.metadata(which)["availability"] == "IMPORTING"
    assert site.verbs.call("is_exist", {"identity": which})["exists"] is False
    assert not site.verbs.call("list", {"resource_id": which["resource_id"]})["revisions"], "an import is invisible to ordinary discovery"
    again = site.verbs.call("begin_import", request)
    assert again["session"]["instance"] == reply["session"]["instance"]
    error = refused(site.verbs, "BUSY", "begin_import", import_request(which))
    assert "session" in error.message
    renewed = site.verbs.call("renew_import", {"identity": which, "session_id": request["session_id"]})
    assert renewed["session"]["expires_at"] >= reply["session"]["expires_at"]
    refused(site.verbs, "NOT_FOUND", "get_size", {"identity": {**which, "revision": "other"}})
    with pytest.raises(VerbError) as caught:
        site.verbs.call("commit_import", {"identity": which, "session_id": request["session_id"], "manifest_sha256": DIGEST})
    assert caught.value.code in ("NOT_READY", "NOT_FOUND", "CONFLICT"), "nothing was sealed, so nothing can be published"
    site.verbs.call("abort_import", {"identity": which, "session_id": request["session_id"]})
    gone = wait_until(lambda: (found := site.verbs.find(which)) is None or found["availability"] == "DELETED" and found, 30, "the import is cleaned up")
    assert gone
    assert site.verbs.view(which)["watermark"] == 0, "what was never READY does not raise the watermark"


def test_an_abandoned_import_is_cleaned_up_and_may_begin_again(site, fresh, models):
    which = fresh()
    site.verbs.call("begin_import", import_request(which, ttl_ms=1000))
    site.becomes(which, "DELETED", deadline_s=40)
    site.put(models("plain"), name_of(which))
    assert site.verbs.metadata(which)["availability"] == "READY"


def test_an_import_that_no_node_can_hold_is_refused_with_numbers(site, fresh, unchanged):
    with unchanged(site):
        error = refused(site.verbs, "CAPACITY_EXHAUSTED", "begin_import", import_request(fresh(), logical_bytes=1 << 40, reserved_bytes=1 << 40))
        assert str(1 << 40) in error.message or (1 << 40) in error.details.values()


# -- replacement

def upsert_request(base, target, generation, **fields):
    return {"base": base, "target": target, "expected_metadata_generation": generation, **fields}


def test_a_replacement_is_claimed_once_and_completed_by_an_import(site, models, ready, fresh):
    target = {**ready, "weight_generation": 2}
    generation = site.verbs.metadata(ready)["metadata_generation"]
    request = upsert_request(ready, target, generation, replacement_request_id="rollout-1")
    claim = site.verbs.call("upsert", request)["claim"]
    assert (claim["phase"], claim["mode"], claim["request_id"]) == ("PREPARING_TARGET", "PUT_FIRST", "rollout-1")
    assert site.verbs.call("upsert", request)["claim"]["operation_id"] == claim["operation_id"]
    with pytest.raises(VerbError) as caught:
        site.verbs.call("upsert", upsert_request(ready, {**ready, "weight_generation": 3}, generation, replacement_request_id="rollout-2"))
    assert caught.value.code in ("BUSY", "CONFLICT"), "one successor at a time"
    refused(site.verbs, "CONFLICT", "upsert", upsert_request(ready, {**ready, "weight_generation": 3}, generation, replacement_request_id="rollout-1"))
    with pytest.raises(VerbError) as caught:
        site.verbs.call("begin_import", import_request({**ready, "weight_generation": 5}))
    assert caught.value.code in ("BUSY", "CONFLICT"), "only the claim's target may enter the lineage"
    refused(site.verbs, "BUSY", "remove", {"identity": ready, "expected_metadata_generation": site.verbs.metadata(ready)["metadata_generation"]})
    site.put(models("other", seed=2), name_of(target))
    wait_until(lambda: site.verbs.call("get_upsert", {"identity": ready})["claim"]["phase"] == "COMPLETED", 60, "the claim completes")
    assert site.verbs.metadata(ready)["availability"] == "DELETED"
    assert site.verbs.metadata(target)["availability"] == "READY"
    assert site.verbs.view(target)["watermark"] == 2
    operation = site.verbs.operation(claim["operation_id"])
    assert (operation["kind"], operation["status"]) == ("REPLACING", "SUCCEEDED")


def test_a_claim_whose_base_is_untouched_can_be_aborted(site, ready):
    target = {**ready, "weight_generation": 2}
    before = site.verbs.metadata(ready)
    site.verbs.call("upsert", upsert_request(ready, target, before["metadata_generation"], replacement_request_id="never"))
    claim = site.verbs.call("abort_upsert", {"identity": ready, "replacement_request_id": "never"})["claim"]
    assert claim["phase"] == "ABORTED"
    after = site.verbs.metadata(ready)
    assert after["availability"] == "READY" and not after["retired"]
    assert site.verbs.call("is_exist", {"identity": ready})["exists"]


def test_a_replacement_that_makes_no_sense_is_refused(site, ready, unchanged):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    with unchanged(site):
        for target in (ready, {**ready, "revision": "other", "weight_generation": 2}):
            with pytest.raises(VerbError) as caught:
                site.verbs.call("upsert", upsert_request(ready, target, generation))
            assert caught.value.code in ("INVALID_ARGUMENT", "CONFLICT")
        refused(site.verbs, "STALE_GENERATION", "upsert", upsert_request(ready, {**ready, "weight_generation": 2}, generation + 3))


def test_delete_first_is_refused_under_a_lease_before_anything_happens(site, ready):
    lease_id = str(uuid.uuid4())
    site.verbs.call("acquire_lease", {"identity": ready, "lease_id": lease_id})
    generation = site.verbs.metadata(ready)["metadata_generation"]
    request = upsert_request(ready, {**ready, "weight_generation": 2}, generation, mode="DELETE_FIRST")
    refused(site.verbs, "BUSY", "upsert", request)
    assert site.verbs.metadata(ready)["availability"] == "READY"
    site.verbs.call("release_lease", {"identity": ready, "lease_id": lease_id})
    claim = site.verbs.call("upsert", request)["claim"]
    assert len(claim["request_id"]) == 64, "derived from the arguments"
    assert site.verbs.call("upsert", request)["claim"]["operation_id"] == claim["operation_id"]
    site.becomes(ready, "DELETED")


# -- idempotency, and commands left for later

def test_one_request_id_with_other_content_is_a_conflict(site, ready):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    options = {"request_id": str(uuid.uuid4())}
    policy = {"preferred_residency": "HOT", "migration_mode": "MANUAL", "mixed_hot_ratio": 0.4}
    request = {"identity": ready, "policy": policy, "expected_metadata_generation": generation, "options": options}
    first = site.verbs.call("update_policy", request)["revision"]
    assert site.verbs.call("update_policy", request)["revision"]["metadata_generation"] == first["metadata_generation"]
    other = {**request, "policy": {**policy, "mixed_hot_ratio": 0.6}, "expected_metadata_generation": generation + 1}
    refused(site.verbs, "CONFLICT", "update_policy", other)


def submit(site, verb, body, tenant="default"):
    async def publish():
        return await site.verbs.nc.jetstream().publish(f"ballast.submit.{tenant}.{verb}", json.dumps(body).encode())
    return site.verbs.run(publish())


def outcome(site, subject, deadline_s=30):
    async def read():
        subscription = await site.verbs.nc.jetstream().subscribe(subject, ordered_consumer=True)
        try:
            return await subscription.next_msg(deadline_s)
        finally:
            await subscription.unsubscribe()
    return json.loads(site.verbs.run(read(), deadline_s + 5).data)


def test_a_command_left_in_the_inbox_is_carried_out_once_and_its_outcome_told(site, ready):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    request_id = f"left-{uuid.uuid4()}"
    ack = submit(site, "migrate", {"identity": ready, "target": "COLD", "expected_metadata_generation": generation, "options": {"request_id": request_id}})
    assert ack.stream == "BALLAST_INBOX"
    told = outcome(site, f"ballast.events.default.outcome.{request_id}")
    assert "COLD" in json.dumps(told)
    wait_until(lambda: site.verbs.metadata(ready)["residency"] == "COLD", 60, "the migration is done")


def test_a_refused_command_of_the_inbox_is_told_too(site, fresh):
    request_id = f"left-{uuid.uuid4()}"
    submit(site, "remove", {"identity": fresh(), "expected_metadata_generation": 1, "options": {"request_id": request_id}})
    told = outcome(site, f"ballast.events.default.outcome.{request_id}")
    assert "NOT_FOUND" in json.dumps(told)


def test_a_command_of_the_inbox_that_comes_too_late_is_told_and_keeps_nobody_waiting(site, ready):
    generation = site.verbs.metadata(ready)["metadata_generation"]
    late, behind = f"late-{uuid.uuid4()}", f"behind-{uuid.uuid4()}"
    request = {"identity": ready, "target": "HOT", "expected_metadata_generation": generation}
    submit(site, "migrate", {**request, "options": {"request_id": late, "not_after": 1}})
    request = {"identity": ready, "policy": {"migration_mode": "MANUAL"}, "expected_metadata_generation": generation}
    submit(site, "update_policy", {**request, "options": {"request_id": behind}})
    told = outcome(site, f"ballast.events.default.outcome.{late}")["error"]
    assert told["code"] == "UNAVAILABLE" and "options.not_after: too late" in told["message"], told
    assert outcome(site, f"ballast.events.default.outcome.{behind}")["revision"]["policy"]["migration_mode"] == "MANUAL"

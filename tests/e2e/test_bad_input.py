"""Bad input: each gives a clear error, the exit code of its kind, and changes nothing."""

import json
import os
import pathlib
import shutil
import subprocess
import uuid

import numpy as np
import pytest

import weights
from cluster import Ballast, Service, footprint, free_port, wait_until
from conftest import name_of
from verbs import NoAnswer, VerbError, identity

INVALID, NOT_FOUND, CONFLICT, STALE, NOT_READY, BUSY = 11, 12, 13, 14, 15, 16
UNAVAILABLE, CAPACITY = 21, 24
USAGE = 2


def put_refused(site, path, name, words, codes=(INVALID,)):
    code, error, stderr = site.cli.refusal("put", path, name)
    assert code in codes, (code, stderr)
    said = (error.get("message", "") + stderr).lower()
    for word in words:
        assert str(word).lower() in said, f"{word!r} is not in {said!r}"
    assert "panicked" not in stderr
    return said


# -- files

def test_a_missing_file_or_a_folder_without_weights_is_refused(site, scratch, fresh, unchanged):
    empty = scratch / "empty-folder"
    empty.mkdir(exist_ok=True)
    with unchanged(site):
        put_refused(site, scratch / "no-such.safetensors", name_of(fresh()), ["no-such.safetensors"], (INVALID, NOT_FOUND, 1))
        put_refused(site, empty, name_of(fresh()), ["empty-folder"], (INVALID, NOT_FOUND, 1))


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -4096])
def test_a_truncated_file_is_refused(site, scratch, fresh, models, unchanged, keep):
    whole = models("plain").read_bytes()
    path = scratch / f"truncated-{keep}.safetensors"
    path.write_bytes(whole[:keep])
    with unchanged(site):
        put_refused(site, path, name_of(fresh()), [path.name])


def tensor(begin, end, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


BROKEN_HEADERS = {
    "a header that is longer than the file": ({"a": tensor(0, 8)}, b"\0" * 8, 1 << 20),
    "a header length past every limit": ({"a": tensor(0, 8)}, b"\0" * 8, (1 << 64) - 1),
    "overlapping ranges": ({"a": tensor(0, 16), "b": tensor(8, 24)}, b"\0" * 24, None),
    "a gap between ranges": ({"a": tensor(0, 8), "b": tensor(16, 24)}, b"\0" * 24, None),
    "a gap before the first range": ({"a": tensor(8, 16)}, b"\0" * 16, None),
    "bytes after the last range": ({"a": tensor(0, 8)}, b"\0" * 16, None),
    "a range past the file": ({"a": tensor(0, 64)}, b"\0" * 8, None),
    "a range that ends before it begins": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, b"\0" * 8, None),
    "a shape that does not fit its range": ({"a": tensor(0, 8, shape=[3])}, b"\0" * 8, None),
    "a shape whose size overflows": ({"a": tensor(0, 8, shape=[1 << 62, 1 << 62])}, b"\0" * 8, None),
    "an unknown dtype": ({"a": tensor(0, 8, dtype="F31")}, b"\0" * 8, None),
    "a negative shape": ('{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', b"\0" * 8, None),
    "two tensors of one name": ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}', b"\0" * 16, None),
    "a header that is not JSON": ("{nonsense", b"", None),
    "a header that is not an object": ("[]", b"", None),
}


@pytest.mark.parametrize("what", BROKEN_HEADERS)
def test_a_file_with_a_broken_header_is_refused(site, scratch, fresh, unchanged, what):
    header, payload, length = BROKEN_HEADERS[what]
    path = weights.raw_safetensors(scratch / "broken" / f"{what.replace(' ', '-')}.safetensors", header, payload, length)
    with unchanged(site):
        put_refused(site, path, name_of(fresh()), [path.name])


def shard_folder(scratch, name):
    folder = scratch / name
    shutil.rmtree(folder, ignore_errors=True)
    tensors = {f"layer.{n}.weight": np.full((8, 8), n, np.float32) for n in range(6)}
    return weights.write_sharded(folder, tensors, 3)


def test_an_index_that_maps_a_tensor_to_a_shard_without_it_is_refused(site, scratch, fresh, unchanged):
    folder = shard_folder(scratch, "wrong-index")
    index = json.loads((folder / weights.INDEX).read_text())
    moved = "layer.0.weight"
    index["weight_map"][moved] = index["weight_map"]["layer.1.weight"]
    (folder / weights.INDEX).write_text(json.dumps(index))
    with unchanged(site):
        put_refused(site, folder, name_of(fresh()), [moved])


def test_an_index_that_names_a_missing_shard_is_refused(site, scratch, fresh, unchanged):
    folder = shard_folder(scratch, "missing-shard")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with unchanged(site):
        put_refused(site, folder, name_of(fresh()), [gone.name], (INVALID, NOT_FOUND, 1))


@pytest.mark.parametrize("outside", ["../outside.safetensors", "/etc/hostname"])
def test_an_index_that_leaves_its_folder_is_refused(site, scratch, fresh, unchanged, outside):
    folder = shard_folder(scratch, "leaving-index")
    index = json.loads((folder / weights.INDEX).read_text())
    index["weight_map"]["layer.0.weight"] = outside
    (folder / weights.INDEX).write_text(json.dumps(index))
    with unchanged(site):
        put_refused(site, folder, name_of(fresh()), [pathlib.Path(outside).name])


def test_an_index_that_is_not_json_is_refused(site, scratch, fresh, unchanged):
    folder = shard_folder(scratch, "garbled-index")
    (folder / weights.INDEX).write_text("{")
    with unchanged(site):
        put_refused(site, folder, name_of(fresh()), [weights.INDEX])


# -- identities

LONG = "x" * 1025


@pytest.mark.parametrize("field,value", [
    ("resource_id", "a\u0007b"), ("resource_id", LONG), ("resource_id", ""), ("namespace", "a\nb"), ("revision", LONG), ("revision", "\u0000"),
    ("weight_generation", 0), ("weight_generation", -1), ("weight_generation", 1 << 64), ("weight_generation", 1.5), ("weight_generation", "1"), ("tenant_id", "_system"),
])
def test_an_identity_that_can_not_be_is_refused_over_nats(site, unchanged, field, value):
    which = {**identity("bad"), field: value}
    with unchanged(site):
        for verb, body in [
            ("get_metadata", {"identity": which}),
            ("begin_import", {"identity": which, "session_id": "s", "placement_digest": "00" * 32, "logical_bytes": 1, "reserved_bytes": 4096, "unit_count": 1}),
        ]:
            with pytest.raises(VerbError) as caught:
                site.verbs.call(verb, body)
            assert (caught.value.code, caught.value.number) == ("INVALID_ARGUMENT", 1), caught.value
            assert caught.value.message


@pytest.mark.parametrize("name", ["a#0", "a%07b", f"{LONG}", "a#x", "a/b/c", "", "_system:a", "a@"])
def test_a_name_that_can_not_be_is_refused_on_the_command_line(site, models, unchanged, name):
    with unchanged(site):
        done = site.cli.run("put", models("plain"), name)
        assert done.returncode in (USAGE, INVALID), done
        assert done.stderr.strip() and "panicked" not in done.stderr


def test_the_longest_name_is_not_too_long(site, models, scratch):
    name = "ü" * 512
    model = models("plain")
    site.put(model, name)
    site.get_identical(name, model, scratch / "longest")
    site.empty(identity(name))


# -- contents and policies

def test_a_second_put_of_an_identity_with_other_content_is_a_conflict(site, models, fresh, scratch, unchanged):
    which = fresh()
    first, second = models("plain"), models("other", seed=2)
    site.put(first, name_of(which))
    with unchanged(site):
        put_refused(site, second, name_of(which), [str(which["resource_id"])], (CONFLICT,))
    site.get_identical(name_of(which), first, scratch / "conflict")
    assert site.cli.json("put", first, name_of(which))["identity"]["weight_generation"] == 1, "the same content is the same put"


@pytest.mark.parametrize("ratio", ["0", "1", "nan", "NaN", "inf", "-0.5", "1.5", "half"])
def test_a_ratio_that_is_no_ratio_is_refused_on_the_command_line(site, models, fresh, unchanged, ratio):
    with unchanged(site):
        for arguments in (["put", models("plain"), name_of(fresh()), f"--hot-ratio={ratio}"], ["migrate", "x#1", "mixed", f"--hot-ratio={ratio}"]):
            done = site.cli.run(*arguments)
            assert done.returncode in (USAGE, INVALID), done
            assert "ratio" in done.stderr.lower() or "number" in done.stderr.lower()


@pytest.mark.parametrize("policy", [
    {"mixed_hot_ratio": 0}, {"mixed_hot_ratio": 1}, {"mixed_hot_ratio": "NaN"}, {"mixed_hot_ratio": None}, {"preferred_residency": "ABSENT"},
    {"preferred_residency": "LUKEWARM"}, {"migration_mode": "SOMETIMES"}, {"temperature": 0.5}, [],
])
def test_a_policy_that_can_not_be_is_refused_over_nats(site, models, fresh, unchanged, policy):
    which = fresh()
    site.put(models("plain"), name_of(which))
    generation = site.verbs.metadata(which)["metadata_generation"]
    with unchanged(site), pytest.raises(VerbError) as caught:
        site.verbs.call("update_policy", {"identity": which, "policy": policy, "expected_metadata_generation": generation})
    assert caught.value.code == "INVALID_ARGUMENT"


def test_a_ratio_written_as_a_bare_nan_is_refused(site, fresh, unchanged):
    body = json.dumps({"identity": fresh(), "policy": {"mixed_hot_ratio": float("nan")}, "expected_metadata_generation": 1})
    assert "NaN" in body
    with unchanged(site):
        reply = json.loads(site.verbs.request("ballast.v1.default.update_policy", body.encode()).data)
    assert reply["error"]["code"] == "INVALID_ARGUMENT"


def test_a_stale_migration_is_refused_on_the_command_line(site, models, fresh, unchanged):
    which = fresh()
    site.put(models("plain"), name_of(which))
    with unchanged(site):
        code, error, stderr = site.cli.refusal("migrate", name_of(which), "cold", "--expected", "99")
    assert (code, error["code"], error["number"]) == (STALE, "STALE_GENERATION", 4)
    assert "99" in error["message"] and "error: " in stderr


# -- states that can not be read

def test_an_import_in_progress_can_not_be_read(site, fresh, scratch):
    which = fresh()
    session = str(uuid.uuid4())
    site.verbs.call("begin_import", {"identity": which, "session_id": session, "placement_digest": "00" * 32, "logical_bytes": 1, "reserved_bytes": 4096, "unit_count": 1})
    code, error, _ = site.cli.refusal("get", name_of(which), "--to", scratch / "importing")
    assert code in (NOT_READY, NOT_FOUND), error
    assert "IMPORTING" in error["message"] or code == NOT_FOUND
    assert not list((scratch / "importing").glob("*")) if (scratch / "importing").exists() else True
    site.verbs.call("abort_import", {"identity": which, "session_id": session})


def test_a_tombstone_can_not_be_read(site, models, fresh, scratch, unchanged):
    which = fresh()
    site.put(models("plain"), name_of(which))
    site.empty(which)
    with unchanged(site):
        code, error, _ = site.cli.refusal("get", name_of(which), "--to", scratch / "deleted")
    assert code in (NOT_READY, NOT_FOUND), error
    assert "DELETED" in error["message"] or code == NOT_FOUND


def test_a_revision_that_is_being_deleted_can_not_be_read(make_site, models, scratch):
    site = make_site(workflow_workers=1, worker_env={"BALLAST_STEP_DELAY_MS": "3000"})
    which = identity("going")
    site.put(models("plain"), name_of(which))
    generation = site.verbs.metadata(which)["metadata_generation"]
    assert site.verbs.call("remove", {"identity": which, "expected_metadata_generation": generation})["revision"]["availability"] == "DELETING"
    code, error, _ = site.cli.refusal("get", name_of(which), "--to", scratch / "deleting")
    assert code in (NOT_READY, NOT_FOUND), error
    assert "DELETING" in error["message"]
    site.becomes(which, "DELETED")


def test_a_get_does_not_overwrite_what_is_there(site, models, fresh, scratch):
    which = fresh()
    model = models("plain")
    site.put(model, name_of(which))
    target = scratch / "taken"
    target.mkdir()
    (target / "model.safetensors").write_text("mine")
    code, error, stderr = site.cli.refusal("get", name_of(which), "--to", target)
    assert "--force" in stderr and str(target) in stderr
    assert (target / "model.safetensors").read_text() == "mine"
    site.get_identical(name_of(which), model, target, "--force")


# -- requests

@pytest.mark.parametrize("body,word", [
    (b"not json", "expected"), (b"\xff\xfe", "request"), (b"[]", "map"), (b'"text"', "map"), (b"{", "EOF"),
    (b'{"identity":{"namespace":"default","resource_id":"a","revision":"main","weight_generation":1},"color":1}', "color"),
    (b'{"identity":{"namespace":"default","resource_id":"a","revision":"main","weight_generation":1,"color":1}}', "color"),
    (b'{"options":{"color":1}}', "color"), (b"{}", "identity"), (b'{"identity":7}', "identity"),
    (b'{"identity":' + b"[" * 100_000, "identity"), (b'{"filler":"' + b"x" * 300_000 + b'"}', "262144"),
])
def test_a_request_body_that_is_no_request_is_refused_by_name(site, unchanged, body, word):
    with unchanged(site):
        message = site.verbs.request("ballast.v1.default.get_metadata", body)
    error = json.loads(message.data)["error"]
    assert (error["code"], error["number"]) == ("INVALID_ARGUMENT", 1)
    assert word in error["message"], error
    assert len(error["message"]) < 2000, "an error does not echo the request"
    assert message.headers["Nats-Service-Error-Code"]


@pytest.mark.parametrize("field,json_text,words", [
    (field, text, [f"`{field}"]) for field in ("target", "mixed_hot_ratio", "expected_metadata_generation", "options", "identity.namespace")
    for text in ("NaN", "-Infinity", "1e400", '"\\ud800"', '{"HOT":null}', "[1]", "true", '{"a":' * 300)
] + [("target", text, ["`target`", '"HOT", "COLD", "MIXED"']) for text in ('"cold"', '"UNKNOWN"', "1", '"' + "x" * 100_000 + '"')])
def test_a_field_that_can_not_be_is_refused_by_its_name(site, unchanged, field, json_text, words):
    fields = {
        "target": '"MIXED"', "mixed_hot_ratio": "0.5", "expected_metadata_generation": "1", "options": "{}",
        "identity": '{"namespace":"default","resource_id":"a","revision":"main","weight_generation":1}',
    }
    if field == "identity.namespace":
        fields["identity"] = fields["identity"].replace('"default"', json_text)
    else:
        fields[field] = json_text
    body = "{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}"
    with unchanged(site):
        error = json.loads(site.verbs.request("ballast.v1.default.migrate", body.encode()).data)["error"]
    assert error["code"] == "INVALID_ARGUMENT" and all(word in error["message"] for word in words), error
    assert len(error["message"]) < 2000, "an error does not echo the request"


def test_a_request_body_of_two_megabytes_is_refused(site, unchanged):
    body = b'{"filler":"' + b"x" * (2 << 20) + b'"}'
    with unchanged(site):
        # The server announces how much a message may hold, and the client library refuses to send more; where the server
        # allows it, the gateway refuses.
        if len(body) > site.verbs.nc.max_payload:
            with pytest.raises(Exception) as caught:
                site.verbs.request("ballast.v1.default.get_metadata", body)
            assert "payload" in str(caught.value).lower()
        else:
            error = json.loads(site.verbs.request("ballast.v1.default.get_metadata", body).data)["error"]
            assert error["code"] == "INVALID_ARGUMENT" and str(len(body)) in error["message"]


def test_an_unknown_verb_is_answered_with_those_there_are(site):
    error = json.loads(site.verbs.request("ballast.v1.default.frobnicate", b"{}").data)["error"]
    assert error["code"] == "NOT_FOUND"
    assert "frobnicate" in error["message"] and "get_metadata" in error["message"]


# -- capacity and folders

def test_a_memory_tier_smaller_than_the_model_is_refused_with_numbers(make_site, scratch, unchanged):
    site = make_site(memory_bytes=64 << 20)
    model = weights.write(scratch / "ninety" / "model.safetensors", weights.random_tensors([(f"w{n}", (1 << 20,)) for n in range(22)]))
    with unchanged(site):
        said = put_refused(site, model, "ninety", [], (CAPACITY,))
    assert any(number in said for number in (str(64 << 20), "67.1", "64 MiB", "67108864"))
    small = weights.small_model(scratch / "fits" / "model.safetensors")
    site.put(small, "fits")
    site.get_identical("fits", small, scratch / "fits-back")


def test_a_full_cold_folder_fails_the_migration_and_leaves_the_revision_readable(make_site, models, scratch):
    site = make_site(cold_quota_bytes=1 << 20)
    model = models("big", tensors=12, kib=512)
    which = site.put(model, "big")
    generation = site.verbs.metadata(which)["metadata_generation"]
    operation_id = site.verbs.call("migrate", {"identity": which, "target": "COLD", "expected_metadata_generation": generation})["operation"]["operation_id"]
    failing = wait_until(lambda: (found := site.verbs.operation(operation_id))["last_error"] and found, 30, "the migration reports its failure")
    assert failing["last_error"]["code"] == "CAPACITY_EXHAUSTED", failing["last_error"]
    metadata = site.verbs.metadata(which)
    assert metadata["availability"] == "READY"
    site.get_identical("big", model, scratch / "full-cold")
    site.verbs.call("cancel_operation", {"operation_id": operation_id})
    assert site.operation_ends(operation_id)["status"] == "CANCELLED"
    site.settled(which)
    site.get_identical("big", model, scratch / "full-cold-after")


def transfer_worker(site, name, memory_dir, cold):
    command = site.cli.command("transfer-worker", "--name", name, "--memory", "64MiB", "--memory-dir", memory_dir, "--cold", cold)
    return Service(name, command, site.cluster.logs, r"^ready: ")


def refuses_to_start(service, *words):
    service.start(wait=False)
    try:
        code = service.wait_end(20)
    finally:
        service.kill()
    said = service.output()
    assert code not in (0, None) and "panicked" not in said, said
    for word in words:
        assert word in said, said


def test_a_cold_folder_in_use_by_another_process_is_refused(site):
    cold = site.cluster.cold_dirs[0]
    before = footprint(cold)
    memory = site.cluster.folder / "memory-second"
    refuses_to_start(transfer_worker(site, "node-second", memory, cold), str(cold), "in use", f"{site.cluster.transfer_workers[0].pid}")
    assert footprint(cold) == before
    subprocess.run(["umount", "--lazy", memory], capture_output=True)


def test_a_memory_folder_in_use_by_another_process_is_refused(site, scratch):
    memory = site.cluster.memory_dirs[0]
    before = footprint(memory)
    refuses_to_start(transfer_worker(site, "node-third", memory, scratch / "cold-third"), str(memory), "in use", f"{site.cluster.transfer_workers[0].pid}")
    assert footprint(memory) == before


def test_a_read_only_cold_folder_is_refused(site, scratch):
    cold = scratch / "read-only-cold"
    cold.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "ballast-test", cold], capture_output=True).returncode == 0
    if not mounted:
        if os.geteuid() == 0:
            pytest.skip("this root may not mount, so no folder can be made read-only for it")
        cold.chmod(0o500)
    memory = scratch / "memory-read-only"
    try:
        refuses_to_start(transfer_worker(site, "node-read-only", memory, cold), str(cold))
    finally:
        subprocess.run(["umount", "--lazy", memory], capture_output=True)
        if mounted:
            subprocess.run(["umount", cold], capture_output=True)


# -- nobody there

def all_unavailable(cli, commands, *words):
    """All commands at once, because each waits for a while: all end with UNAVAILABLE and say what is missing."""
    running = [(command, cli.start("-o", "json", *command)) for command in commands]
    for command, process in running:
        out, err = process.communicate(timeout=90)
        assert process.returncode == UNAVAILABLE, (command, out, err)
        error = json.loads(out)["error"]
        assert error["code"] == "UNAVAILABLE"
        for word in words:
            assert word in error["message"], (command, error)


def test_without_a_server_every_command_says_so(binary, models, scratch):
    cli = Ballast(binary, f"nats://127.0.0.1:{free_port()}")
    commands = [["ls"], ["put", models("plain"), "x"], ["get", "x", "--to", scratch / "none"], ["status"], ["rm", "x#1"], ["watch"]]
    all_unavailable(cli, commands, cli.url.removeprefix("nats://"), "ballast dev")


def test_without_a_gateway_every_command_says_so(site, binary, models, scratch):
    server = Service("nats-alone", [site.cluster.nats.command[0], "--addr", "127.0.0.1", "--port", (port := free_port())], site.cluster.logs, "Server is ready")
    server.start()
    try:
        cli = Ballast(binary, f"nats://127.0.0.1:{port}")
        all_unavailable(cli, [["ls"], ["put", models("plain"), "x"], ["get", "x", "--to", scratch / "none"], ["status"]], "gateway")
    finally:
        server.kill()


def test_without_a_node_a_put_says_so(make_site, models):
    site = make_site(transfer_workers=0, workflow_workers=0)
    before = site.everything()
    code, error, _ = site.cli.refusal("put", models("plain"), "nowhere", timeout_s=60)
    assert code in (UNAVAILABLE, CAPACITY), error
    assert "transfer worker" in error["message"]
    assert site.everything() == before


def test_without_a_workflow_worker_a_migration_waits_and_goes_on_when_one_comes(make_site, models, scratch):
    site = make_site(workflow_workers=0)
    model = models("plain")
    which = site.put(model, "waiting")
    operation = site.cli.json("migrate", "waiting", "cold")
    assert operation["status"] == "RUNNABLE"
    site.get_identical("waiting", model, scratch / "waiting")
    worker = site.cluster.new_workflow_worker("late")
    site.cluster.workflow_workers.append(worker)
    worker.start()
    assert site.operation_ends(operation["operation_id"])["status"] == "SUCCEEDED"
    assert site.verbs.metadata(which)["residency"] == "COLD"

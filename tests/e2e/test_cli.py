"""Every command of the `ballast` binary: results, `-o json`, exit codes, short names."""

import json
import pathlib
import re
import signal
import subprocess

import numpy as np
import pytest

import weights
from cluster import wait_until
from conftest import name_of
from verbs import identity

USAGE, NOT_FOUND, CONFLICT, STALE, BUSY = 2, 12, 13, 14, 16


@pytest.fixture
def ready(site, models, fresh):
    which = fresh()
    site.put(models("plain"), name_of(which))
    return which


def test_help_names_every_command_and_a_wrong_one_is_a_usage_error(site):
    said = site.cli.text("--help")
    for command in ("dev", "gateway", "workflow-worker", "transfer-worker", "put", "upsert", "get", "open", "ls", "show", "policy", "migrate", "op", "rm", "object",
                    "watch", "status"):
        assert re.search(rf"^  {command}\b", said, re.M), command
        assert site.cli.text(command, "--help")
    assert re.match(r"ballast \d+\.\d+\.\d+", site.cli.text("--version"))
    for wrong in (["frobnicate"], ["put"], ["get", "x"], ["migrate", "x", "lukewarm"], ["--output", "yaml", "ls"]):
        done = site.cli.run(*wrong)
        assert done.returncode == USAGE and done.stderr, wrong


def test_put_takes_short_names_and_the_next_generation(site, models, fresh, scratch):
    resource = fresh()["resource_id"]
    model = models("plain")
    first = site.cli.json("put", model, resource, "--preferred", "hot")
    assert first["identity"] == {"tenant_id": "default", **identity(resource)}
    assert 12 * 64 * 1024 < first["bytes"] < 12 * 64 * 1024 + 4096 and first["seconds"] > 0
    assert first["metadata"]["availability"] == "READY" and first["metadata"]["residency"] == "HOT"
    assert "operation_id" not in first or first["operation_id"] is None
    other = models("other", seed=2)
    second = site.cli.json("put", other, resource, "--preferred", "hot")
    assert second["identity"]["weight_generation"] == 2, "without a generation, put takes the next one"
    site.get_identical(resource, other, scratch / "short-newest")
    site.get_identical(f"{resource}#1", model, scratch / "short-first")
    site.get_identical(f"default/{resource}@main#2", other, scratch / "short-full")
    assert site.cli.json("show", resource)["metadata"]["identity"]["weight_generation"] == 2
    full = site.cli.json("put", model, f"team:lab/{resource}@tuned", "--preferred", "hot")["identity"]
    assert full == {"tenant_id": "team", "namespace": "lab", "resource_id": resource, "revision": "tuned", "weight_generation": 1}
    site.get_identical(f"team:lab/{resource}@tuned", model, scratch / "short-team")


def test_put_replace_publishes_the_next_generation_and_retires_the_newest(site, models, fresh, scratch):
    resource = fresh()["resource_id"]
    site.put(models("plain"), resource)
    tuned = models("other", seed=2)
    reply = site.cli.json("put", tuned, resource, "--replace", "--wait")
    assert reply["identity"]["weight_generation"] == 2
    assert reply["claim"]["mode"] == "PUT_FIRST"
    site.becomes(identity(resource, 1), "DELETED")
    site.get_identical(resource, tuned, scratch / "replaced")
    third = models("third", seed=3)
    site.settled(identity(resource, 2))
    reply = site.cli.json("put", third, resource, "--replace", "delete-first", "--wait")
    assert (reply["identity"]["weight_generation"], reply["claim"]["mode"]) == (3, "DELETE_FIRST")
    site.becomes(identity(resource, 2), "DELETED")
    site.get_identical(resource, third, scratch / "replaced-again")


def test_put_replace_needs_something_to_replace(site, models, fresh):
    code, error, _ = site.cli.refusal("put", models("plain"), fresh()["resource_id"], "--replace")
    assert code == NOT_FOUND and "replace" in error["message"]


def test_upsert_takes_every_argument_and_repeats_safely(site, models, ready, scratch):
    resource = ready["resource_id"]
    tuned = models("other", seed=2)
    generation = site.verbs.metadata(ready)["metadata_generation"]
    code, _, _ = site.cli.refusal("upsert", tuned, f"{resource}#2", "--replacing", "1", "--expected", str(generation + 5))
    assert code == STALE
    command = ["upsert", tuned, f"{resource}#2", "--replacing", "1", "--expected", str(generation), "--request-id", f"rollout-{resource}",
               "--preferred", "hot", "--mode", "manual", "--wait"]
    reply = site.cli.json(*command)
    assert reply["identity"]["weight_generation"] == 2
    site.becomes(ready, "DELETED")
    assert site.cli.json(*command)["identity"] == reply["identity"], "the repeat finds it done"
    site.get_identical(resource, tuned, scratch / "upserted")


def test_a_model_folder_comes_back_with_its_other_files(site, fresh, scratch):
    folder = scratch / "folder-model"
    weights.small_model(folder / "model.safetensors", seed=5)
    (folder / "config.json").write_text('{"hidden_size": 256}')
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\nü\n")
    (folder / "empty.txt").write_bytes(b"")
    which = fresh()
    site.put(folder, name_of(which))
    back = scratch / "folder-back"
    reply = site.get_identical(name_of(which), folder, back)
    assert reply["tensors"] == 12
    assert weights.other_files(back) == weights.other_files(folder)
    # And from disk alone.
    site.cli.json("migrate", name_of(which), "cold", "--wait")
    cold = scratch / "folder-back-cold"
    site.get_identical(name_of(which), folder, cold)
    assert weights.other_files(cold) == weights.other_files(folder)


def test_a_sharded_folder_goes_in_and_comes_back(site, fresh, scratch):
    tensors = weights.random_tensors([(f"model.layers.{n}.weight", (96, 128)) for n in range(17)], seed=3, dtype=weights.BFLOAT16)
    folder = weights.write_sharded(scratch / "sharded", tensors, 4)
    (folder / "config.json").write_text("{}")
    which = fresh()
    site.put(folder, name_of(which))
    back = scratch / "sharded-back"
    site.get_identical(name_of(which), folder, back)
    assert (back / "config.json").read_text() == "{}"


def test_every_dtype_and_odd_shape_comes_back(site, fresh, scratch):
    tensors = {
        "bool": np.array([True, False, True]), "int8": np.arange(-5, 5, dtype=np.int8), "uint8": np.arange(7, dtype=np.uint8),
        "int16": np.arange(3, dtype=np.int16), "int64": np.array([[1, 2], [3, 4]]), "float16": np.ones((3, 5, 7), np.float16),
        "float64": np.array(np.nan), "scalar": np.float32(3.5).reshape(()), "empty": np.zeros((0, 4), np.float32),
        "bfloat16": np.linspace(-1, 1, 33).astype(weights.BFLOAT16), "näme/with:odd chars#1": np.arange(4, dtype=np.uint32),
    }
    model = weights.write(scratch / "dtypes" / "model.safetensors", tensors, {"format": "pt", "made by": "nobody"})
    which = fresh()
    site.put(model, name_of(which))
    site.get_identical(name_of(which), model, scratch / "dtypes-back")
    site.cli.json("migrate", name_of(which), "cold", "--wait")
    site.get_identical(name_of(which), model, scratch / "dtypes-back-cold")


def test_a_model_of_one_tensor_takes_the_nearest_split(site, fresh, scratch):
    model = weights.small_model(scratch / "one" / "model.safetensors", tensors=1)
    which = fresh()
    site.cli.json("put", model, name_of(which), "--wait")
    metadata = site.settled(which)
    assert metadata["availability"] == "READY" and metadata["residency"] in ("HOT", "COLD", "MIXED")
    site.get_identical(name_of(which), model, scratch / "one-back")


def test_ls_and_show_print_tables_and_json(site, ready):
    resource = ready["resource_id"]
    line = next(line for line in site.cli.text("ls", resource).splitlines() if resource in line)
    assert "READY" in line and "HOT" in line and "#1" in line
    listed = site.cli.json("ls", resource)
    assert [revision["identity"]["resource_id"] for revision in listed] == [resource]
    shown = site.cli.text("show", resource)
    assert "READY" in shown and "metadata generation" in shown
    view = site.cli.json("show", name_of(ready))
    assert view["metadata"] == site.verbs.metadata(ready)
    code, error, stderr = site.cli.refusal("show", "no-such-model")
    assert (code, error["code"]) == (NOT_FOUND, "NOT_FOUND") and "no-such-model" in stderr
    site.empty(ready)
    assert not site.cli.json("ls", resource)
    assert site.cli.json("ls", resource, "--all")[0]["availability"] == "DELETED"


def test_policy_shows_and_changes(site, ready):
    name = name_of(ready)
    assert "HOT" in site.cli.text("policy", name)
    changed = site.cli.json("policy", name, "--preferred", "hot", "--hot-ratio", "0.3", "--mode", "pinned")
    assert site.verbs.metadata(ready)["policy"] == {"preferred_residency": "HOT", "mixed_hot_ratio": 0.3, "migration_mode": "PINNED"}
    assert "PINNED" in json.dumps(changed)
    code, error, _ = site.cli.refusal("migrate", name, "cold")
    assert (code, error["code"]) == (20, "POLICY_UNSATISFIABLE")
    code, _, _ = site.cli.refusal("policy", name, "--mode", "auto", "--expected", "1")
    assert code == STALE


def test_migrate_and_op_show_the_operation(site, ready):
    name = name_of(ready)
    code, error, _ = site.cli.refusal("migrate", name, "cold", "--hot-ratio", "0.5")
    assert code == 11 and "--hot-ratio" in error["message"]
    operation = site.cli.json("migrate", name, "cold", "--wait")
    assert (operation["status"], operation["target"]) == ("SUCCEEDED", "COLD")
    assert site.cli.json("op", operation["operation_id"]) == site.verbs.operation(operation["operation_id"])
    shown = site.cli.text("op", operation["operation_id"])
    assert "SUCCEEDED" in shown and "COLD" in shown
    assert operation["operation_id"] in site.cli.text("op", "--all")
    assert operation["operation_id"] not in site.cli.text("op")
    waited = site.cli.json("op", site.cli.json("migrate", name, "mixed", "--hot-ratio", "0.25")["operation_id"], "--wait")
    assert waited["status"] == "SUCCEEDED"
    assert abs(site.verbs.metadata(ready)["observed_hot_ppm"] - 250_000) < 2000
    for arguments in (["op", "op-999999.0"], ["op", "history", "op-999999.0"], ["op", "cancel", "op-999999.0"]):
        code, error, _ = site.cli.refusal(*arguments)
        assert code == NOT_FOUND and "op-999999.0" in error["message"] and "ballast op --all" in error["message"]


def test_a_generation_that_is_not_there_is_told_with_those_that_are(site, models, ready, scratch):
    resource = ready["resource_id"]
    for arguments in (
        ["get", f"{resource}#9", "--to", scratch / "none"], ["open", f"{resource}#9", "--", "true"], ["show", f"{resource}#9"],
        ["policy", f"{resource}#9"], ["migrate", f"{resource}#9", "cold"], ["repair", f"{resource}#9"], ["verify", f"{resource}#9"],
        ["rm", f"{resource}#9"], ["upsert", models("plain"), resource, "--replacing", "9"],
    ):
        code, error, _ = site.cli.refusal(*arguments)
        assert (code, error["message"]) == (
            NOT_FOUND, f"there is no revision default/{resource}@main#9: of default/{resource}@main, #1 is READY"), arguments
    code, error, _ = site.cli.refusal("get", f"{resource}-other#9", "--to", scratch / "none")
    assert code == NOT_FOUND and "no other of" in error["message"] and "`ballast ls` shows what there is" in error["message"]
    # What is there and can not be read is told as it stands.
    site.empty(ready)
    code, error, _ = site.cli.refusal("get", f"{resource}#1", "--to", scratch / "none")
    assert "DELETED" in error["message"] and "there is no revision" not in error["message"]


def test_a_listing_takes_a_prefix_of_names_and_nothing_else(site, models, fresh):
    resource = fresh()["resource_id"]
    site.put(models("plain"), f"x y/{resource}%2Fz")
    for prefix in ("x%20y/", "x y/", f"x y/{resource}%2F", f"x%20y/{resource}"):
        assert [one["identity"]["resource_id"] for one in site.cli.json("ls", prefix)] == [f"{resource}/z"], prefix
    for wrong, why in (("x y/z/q", "at most one '/'"), (f"{resource}#1", "ballast show"), (f"{resource}@main", "ballast show"), ("team:x", "--tenant"), ("", "empty")):
        done = site.cli.run("ls", wrong)
        assert done.returncode == USAGE and why in done.stderr, (wrong, done)


def test_a_ratio_that_does_nothing_yet_is_said(site, ready):
    name = name_of(ready)
    done = site.cli.run("policy", name, "--preferred", "cold", "--hot-ratio", "0.3")
    assert done.returncode == 0 and "--hot-ratio 0.3 is kept for when the revision is MIXED" in done.stderr and "prefers COLD" in done.stderr
    assert site.cli.run("policy", name, "--preferred", "mixed", "--hot-ratio", "0.4").stderr == ""


def test_whoever_is_busy_says_how_to_wait(make_site, models):
    site = make_site(worker_env={"BALLAST_STEP_DELAY_MS": "700"})
    operation = site.cli.json("put", models("plain"), "moving")["operation_id"]
    code, error, _ = site.cli.refusal("migrate", "moving", "cold")
    assert code == BUSY and error["message"].endswith(f"(`ballast op {operation} --wait` waits for it)")
    assert site.cli.json("op", operation, "--wait")["note"] is None
    site.cli.json("migrate", "moving", "cold", "--wait")
    # Twelve units of one size and a small one: a third of them is what there is.
    operation = site.cli.json("migrate", "moving", "mixed", "--hot-ratio", "0.3", "--wait")
    assert "a hot ratio of 0.3 was asked for; the nearest that" in operation["note"] and "ppm" not in operation["note"]


def test_op_pauses_resumes_and_cancels(make_site, models):
    site = make_site(worker_env={"BALLAST_STEP_DELAY_MS": "700"})
    which = site.put(models("plain"), "held")
    operation_id = site.cli.json("migrate", "held", "cold")["operation_id"]
    site.cli.json("op", "pause", operation_id)
    wait_until(lambda: site.verbs.operation(operation_id)["status"] == "PAUSED", 20, "the operation pauses")
    site.cli.json("op", "resume", operation_id)
    assert site.operation_ends(operation_id)["status"] == "SUCCEEDED"
    operation_id = site.cli.json("migrate", "held", "hot")["operation_id"]
    site.cli.json("op", "cancel", operation_id)
    assert site.operation_ends(operation_id)["status"] == "CANCELLED"
    assert site.settled(which)["availability"] == "READY"


def test_rm_says_what_it_would_do_and_does_it(site, ready):
    name = name_of(ready)
    before = site.everything()
    said = site.cli.text("rm", name, "--dry-run")
    assert ready["resource_id"] in said
    assert site.everything() == before
    site.cli.json("rm", name, "--wait")
    assert site.verbs.metadata(ready)["availability"] == "DELETED"
    assert "is deleted already" in site.cli.text("rm", name, "--dry-run")
    code, _, _ = site.cli.refusal("rm", "no-such-model#1")
    assert code == NOT_FOUND


def test_open_holds_the_lease_while_a_command_runs_and_gives_back_its_exit_code(site, ready):
    done = site.cli.run("open", name_of(ready), "--", "sh", "-c", "exit 7")
    assert done.returncode == 7, done
    assert re.search(r"^open: ", done.stdout + done.stderr, re.M)
    assert site.verbs.view(ready)["active_lease_count"] == 0


def test_open_asks_for_its_command_before_it_maps_anything(site, ready):
    done = site.cli.run("open", name_of(ready), "--", "no-such-program-here")
    assert done.returncode == 11 and "no such program" in done.stderr and "open:" not in done.stdout


def opened(site, name, **options):
    process = site.cli.start("open", name, stdin=subprocess.PIPE, start_new_session=True, **options)
    line = process.stdout.readline()
    assert line.startswith("open: "), line + process.stderr.read() if process.poll() is not None else line
    return process


def test_open_maps_without_copying_until_its_input_ends(site, ready):
    process = opened(site, name_of(ready))
    try:
        view = site.verbs.view(ready)
        assert view["active_lease_count"] == 1
        maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
        mine = [line for line in maps.splitlines() if str(site.cluster.memory_dirs[0]) in line]
        assert mine and all(" r--s " in line for line in mine), "shared and read-only"
        code, error, _ = site.cli.refusal("rm", name_of(ready))
        assert (code, error["code"]) == (BUSY, "BUSY")
        process.stdin.close()
        assert process.wait(20) == 0
        assert site.verbs.view(ready)["active_lease_count"] == 0
    finally:
        process.kill()
        process.wait()


def test_an_interrupted_open_releases_its_lease(site, ready):
    process = opened(site, name_of(ready))
    try:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)
        assert site.verbs.view(ready)["active_lease_count"] == 0
    finally:
        process.kill()
        process.wait()


def test_a_get_that_fails_has_released_its_lease_when_it_ends(site, ready, scratch):
    taken = scratch / "taken"
    taken.write_text("a file where a folder is asked for")
    for _ in range(10):
        code, error, _ = site.cli.refusal("get", name_of(ready), "--to", str(taken))
        assert (code, error["code"]) == (CONFLICT, "CONFLICT")
        assert site.verbs.view(ready)["active_lease_count"] == 0


def test_an_interrupted_put_leaves_nothing_behind_for_long(site, scratch, fresh):
    model = weights.write(scratch / "interrupted" / "model.safetensors", weights.random_tensors([(f"w{n}", (1 << 20,)) for n in range(48)]))
    which = fresh()
    process = site.cli.start("put", model, name_of(which), "--preferred", "hot", "--mode", "manual", start_new_session=True)
    wait_until(lambda: process.poll() is not None or site.verbs.find(which), 20, "the import begins", poll_s=0.002)
    process.send_signal(signal.SIGINT)
    code = process.wait(30)
    if code != 0:
        # By its own handler, or by the signal itself when it came before any byte moved.
        assert code in (130, -signal.SIGINT)
        wait_until(lambda: (found := site.verbs.find(which)) is None or found["availability"] == "DELETED", 40, "the import is cleaned up")
    site.put(model, name_of(which))
    site.get_identical(name_of(which), model, scratch / "interrupted-back")
    site.empty(which)


def test_watch_prints_one_event_per_line_and_stops_after_a_count(site, models, fresh):
    which = fresh()
    watch = site.cli.start("-o", "json", "watch", which["resource_id"], "--from-start", "--count", "2")
    site.put(models("plain"), name_of(which))
    out, err = watch.communicate(timeout=30)
    assert watch.returncode == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["REVISION_IMPORTING", "REVISION_READY"]


def test_status_shows_cluster_and_nodes(site):
    status = site.cli.json("status")
    assert status["cluster_id"] == site.verbs.call("status")["cluster_id"]
    said = site.cli.text("status")
    assert "node-0" in said and status["cluster_id"] in said


def test_errors_go_to_standard_error_and_also_as_json(site):
    done = site.cli.run("show", "no-such-model")
    assert done.returncode == NOT_FOUND and done.stdout == ""
    assert done.stderr.startswith("error: NOT_FOUND: ")
    done = site.cli.run("-o", "json", "show", "no-such-model")
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["number"]) == ("NOT_FOUND", 2) and error["message"]

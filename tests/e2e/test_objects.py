"""Ordinary objects share a node's memory with weights, give way to them, and no generic path touches a managed group."""

import json
import urllib.request

import pytest

from conftest import name_of
from cluster import free_port, wait_until

MIB = 1 << 20
OBJECT = bytes(range(256)) * 2048
CONFLICT, NOT_FOUND, INVALID = 13, 12, 11


def ask(site, request, body=b""):
    message = json.dumps(request).encode() + b"\n" + body
    answer = site.verbs.run(site.verbs.nc.request("ballast.node.node-0.object", message, timeout=10)).data
    head, _, rest = answer.partition(b"\n")
    return json.loads(head), rest


def test_a_message_that_is_cut_off_stores_nothing(site):
    for message in (b'{"op":"put","key":"kv/cut"}', b'{"op":"get","key":"kv/cut"}\nmore', b'{"op":"clear"}\nmore', b'{"op":"put","key":'):
        answer = json.loads(site.verbs.run(site.verbs.nc.request("ballast.node.node-0.object", message, timeout=10)).data)
        assert answer["failed"]["code"] == "INVALID_ARGUMENT" and "first line" in answer["failed"]["message"], answer
    assert ask(site, {"op": "get", "key": "kv/cut"})[0]["failed"]["code"] == "NOT_FOUND"
    assert ask(site, {"op": "put", "key": "kv/empty"})[0] == {"stored": {"bytes": 0, "evicted": 0}}


def skips(site):
    return site.verbs.steady("status")["nodes"][0]["objects"]["guard_skips"]


def counted(site, path, more_than):
    return wait_until(lambda: skips(site)[path] > more_than, 20, f"the guard's skips on {path} are told")


def metric(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    line = f'ballast_managed_group_guard_skips_total{{node="node-0",path="{path}"}} '
    return next((int(found.removeprefix(line)) for found in text.splitlines() if found.startswith(line)), None)


@pytest.fixture(scope="module")
def small_site(make_site):
    return make_site(memory_bytes=64 * MIB)


def test_an_object_goes_in_comes_back_and_goes(small_site, scratch):
    cli = small_site.cli
    (scratch / "object").write_bytes(OBJECT)
    assert cli.json("object", "put", "kv/a", scratch / "object") == {"key": "kv/a", "bytes": len(OBJECT), "evicted": 0}
    assert "kv/a" in cli.text("object", "ls")
    cli.json("object", "get", "kv/a", "--to", scratch / "back")
    assert (scratch / "back").read_bytes() == OBJECT
    assert "removed kv/a" in cli.text("object", "rm", "kv/a")
    code, error, _ = cli.refusal("object", "get", "kv/a", "--to", scratch / "back")
    assert code == NOT_FOUND and "kv/a" in error["message"]
    (scratch / "large").write_bytes(bytes(MIB))
    code, error, _ = cli.refusal("object", "put", "kv/large", scratch / "large")
    assert code == INVALID and "ballast put" in error["message"]


def test_objects_give_way_to_weights_and_no_generic_path_touches_a_managed_group(small_site, models, fresh, scratch):
    site, cli = small_site, small_site.cli
    before = site.put(models("first"), name_of(fresh()))
    for number in range(130):
        reply, _ = ask(site, {"op": "put", "key": f"kv/{number:03}"}, OBJECT)
        assert "stored" in reply, reply
    held = cli.json("object", "ls")
    assert 100 < len(held) < 130 and held[-1]["key"] == "kv/129", "the watermark evicts, the longest unused first"
    counted(site, "quota", 0)

    model = models("larger", tensors=24, kib=1024)
    which = site.put(model, name_of(fresh(2)))
    assert len(cli.json("object", "ls")) < len(held), "objects gave way"
    site.get_identical(name_of(which), model, scratch / "after-import")
    group = site.verbs.metadata(which)["manifest"]["group_id"]
    manifest = site.verbs.metadata(which)["manifest"]["key"]
    files = site.bytes_of_tiers()

    for key in (group, manifest, f"{group}/payload/0"):
        code, error, _ = cli.refusal("object", "rm", key)
        assert code == CONFLICT and "ballast rm" in error["message"], error
    counted(site, "remove", 2)
    assert "would leave" in cli.text("object", "clear", "--dry-run")
    assert cli.json("object", "ls")
    cleared = cli.json("object", "clear")["cleared"]
    assert cleared["skipped"] == 4 and cleared["objects"] > 0, "two keys of each of the two groups"
    counted(site, "clear", 3)
    assert cli.json("object", "ls") == []
    port = free_port()
    gateway = cli.start("gateway", "--http", f"127.0.0.1:{port}", "--id", "gateway-http")
    try:
        wait_until(lambda: metric(port, "clear") == 4 and metric(port, "remove") == 3, 30, "/metrics shows the skips")
    finally:
        gateway.kill()
        gateway.wait()

    assert site.bytes_of_tiers() == files
    site.get_identical(name_of(which), model, scratch / "after-clear")
    site.get_identical(name_of(before), models("first"), scratch / "first-after-clear")

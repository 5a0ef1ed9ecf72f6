"""`ballast dev`: everything in one process on one data folder."""

import json
import pathlib
import shutil
import signal
import socket

import pytest

import weights
from cluster import Ballast, MemoryFolder, Service, find_nats_server, footprint, free_port, wait_until
from conftest import name_of
from verbs import Verbs, identity


class Dev:
    def __init__(self, binary, folder, output="table"):
        self.folder = pathlib.Path(folder)
        self.data = self.folder / "data"
        self.memory = MemoryFolder(self.folder)
        self.port = free_port()
        self.cli = Ballast(binary, f"nats://127.0.0.1:{self.port}")
        command = [binary, "-o", output, "dev", "--data", self.data, "--memory", "256MiB", "--memory-dir", self.memory.path, "--port", self.port,
                   "--http", f"127.0.0.1:{free_port()}"]
        ready = r"^ballast dev is ready: .*" if output == "table" else r"^\{.*\}$"
        self.service = Service("dev", command, self.folder, f"(?m){ready}", {"BALLAST_NATS_SERVER": str(find_nats_server()), "RUST_BACKTRACE": "1"})

    def remove(self):
        self.service.kill()
        self.memory.remove()


@pytest.fixture
def dev(binary, tmp_path_factory, scratch, request):
    made = []

    def make(**options):
        folder = scratch / f"dev-{request.node.name[:30]}-{len(made)}"
        made.append(Dev(binary, folder, **options))
        return made[-1]

    yield make
    for one in made:
        one.remove()


def children(pid):
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_the_ready_line_says_what_it_has(dev):
    one = dev()
    one.service.start()
    wait_until(lambda: "data plane" in one.service.output(), 5, "the lines below the ready line")
    said = one.service.output()
    for word in (f"nats://127.0.0.1:{one.port}", "http://127.0.0.1:", "memory tier", "268.4 MB", "pages", "cold tier", str(one.data / "cold")):
        assert word in said, word
    assert "io_uring" in said or "positioned I/O" in said
    assert one.service.stop(signal.SIGINT) in (0, 130)


def test_the_ready_line_is_json_on_request(dev):
    one = dev(output="json")
    one.service.start()
    told = json.loads(next(line for line in one.service.output().splitlines() if line.startswith("{")))
    assert str(one.port) in json.dumps(told)
    one.service.stop(signal.SIGINT)


def test_ctrl_c_stops_in_order_and_a_new_start_has_everything(dev, models, scratch):
    one = dev()
    hot, cold = models("plain"), models("other", seed=2)
    one.service.start()
    one.cli.json("put", hot, "kept-hot", "--preferred", "hot", "--mode", "manual")
    one.cli.json("put", cold, "kept-cold", "--preferred", "cold", "--mode", "manual", "--wait")
    before = {name: one.cli.json("show", name)["metadata"] for name in ("kept-hot", "kept-cold")}
    assert before["kept-cold"]["residency"] == "COLD"
    status = one.cli.json("status")
    server = [child for child in children(one.service.pid)]
    assert one.service.stop(signal.SIGINT) in (0, 130)
    assert "panicked" not in one.service.output()
    for child in server:
        assert not pathlib.Path(f"/proc/{child}").exists(), "the NATS server is gone with its parent"

    one.service.start()
    assert one.cli.json("status")["cluster_id"] == status["cluster_id"]
    for name, model in (("kept-hot", hot), ("kept-cold", cold)):
        assert one.cli.json("show", name)["metadata"] == before[name]
        one.cli.json("get", name, "--to", scratch / f"dev-{name}")
        weights.compare(weights.fingerprints(model), scratch / f"dev-{name}")
    one.service.stop(signal.SIGINT)


def test_kill_9_loses_nothing(dev, models, scratch):
    one = dev()
    model = models("plain")
    one.service.start()
    one.cli.json("put", model, "survivor", "--preferred", "hot", "--mode", "manual")
    before = one.cli.json("show", "survivor")["metadata"]
    one.service.kill()
    one.service.start()
    assert one.cli.json("show", "survivor")["metadata"] == before
    one.cli.json("get", "survivor", "--to", scratch / "survivor")
    weights.compare(weights.fingerprints(model), scratch / "survivor")


def test_a_second_start_on_the_same_folder_is_refused(dev):
    one = dev()
    one.service.start()
    command = list(one.service.command)
    command[command.index("--port") + 1] = str(free_port())
    command[command.index("--http") + 1] = f"127.0.0.1:{free_port()}"
    second = Service("second", command, one.folder, r"^never$", one.service.env)
    second.start(wait=False)
    assert second.wait_end(30) != 0
    assert "in use" in second.output() and str(one.data) in second.output()
    assert "waiting for another process" in second.output()
    with Verbs(one.cli.url) as verbs:
        assert verbs.call("status")["cluster_id"]


def test_a_log_deleted_between_two_starts_is_refused_by_name_and_nothing_is_deleted(dev, models):
    one = dev()
    one.service.start()
    one.cli.json("put", models("plain"), "precious", "--preferred", "cold", "--mode", "manual", "--wait")
    one.cli.json("put", models("other", seed=2), "hot-and-precious", "--preferred", "hot", "--mode", "manual")
    status = one.cli.json("status")
    one.service.stop(signal.SIGINT)
    logs = [folder for folder in one.data.rglob("BALLAST_LOG") if folder.is_dir()]
    assert len(logs) == 1, logs
    shutil.rmtree(logs[0])
    payload = {path: size for path, size in footprint(one.data / "cold", one.memory.path).items() if size}
    assert payload

    one.service.start(wait=False)
    code = one.service.wait_end(60)
    said = one.service.output()
    assert code not in (0, None) and "panicked" not in said, said
    assert "log missing" in said and status["cluster_id"] in said, said
    assert any(str(status["folded_seq"] + n) in said for n in range(-3, 40)), "the last seen sequence is named"
    after = footprint(one.data / "cold", one.memory.path)
    assert {path: after.get(path) for path in payload} == payload, "not one byte is deleted"

    # With the server's folder and the record gone too, the tiers still say whose bytes they hold.
    shutil.rmtree(one.data / "nats")
    (one.data / "cluster.json").unlink()
    one.service.start(wait=False)
    assert one.service.wait_end(60) not in (0, None)
    said = one.service.output()
    assert "log missing" in said and status["cluster_id"] in said, said
    after = footprint(one.data / "cold", one.memory.path)
    assert {path: after.get(path) for path in payload} == payload, "not one byte is deleted"


def test_a_port_that_is_taken_is_refused_with_the_flag_and_leaves_nothing(dev):
    one = dev()
    with socket.create_server(("127.0.0.1", one.port)):
        one.service.start(wait=False)
        assert one.service.wait_end(20) == 21
        said = one.service.output()
        assert str(one.port) in said and "name another with --port (0 takes a free one)" in said, said
        assert not one.data.exists()
        # A folder that was there stays, and gets nothing in it either.
        one.data.mkdir()
        one.service.start(wait=False)
        assert one.service.wait_end(20) == 21 and list(one.data.iterdir()) == []
    one.service.start()
    assert one.cli.json("status")["cluster_id"]


def test_a_server_that_is_too_old_is_refused_with_the_reason(dev, scratch):
    old = scratch / "nats-server-old"
    old.write_text("#!/bin/sh\necho 'nats-server: v2.9.10'\n")
    old.chmod(0o755)
    one = dev()
    one.service.env["BALLAST_NATS_SERVER"] = str(old)
    one.service.start(wait=False)
    assert one.service.wait_end(20) != 0
    assert "2.9.10" in one.service.output() and "2.12" in one.service.output()


def test_without_a_server_binary_one_sentence_says_what_to_run(dev, scratch):
    one = dev()
    one.service.env["BALLAST_NATS_SERVER"] = str(scratch / "not-there")
    one.service.start(wait=False)
    assert one.service.wait_end(20) != 0
    assert "ops/fetch-nats-server" in one.service.output()

"""A real cluster for the tests: `ballast dev` on free ports and scratch folders, started once for all of them."""

import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import ballast

ROOT = pathlib.Path(__file__).resolve().parents[2]
READY_SECONDS = 60

# A run in the background of a shell inherits "SIGINT is ignored", and would pass that on to the programs that are to be
# interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)


def forget_memory(ready):
    """Removes the memory tier of a `ballast dev` that has ended: the folder, and the tmpfs that it may have mounted there."""
    folder = ready["report"]["memory"]["folder"]
    while os.path.ismount(folder) and subprocess.run(["umount", folder], capture_output=True).returncode == 0:
        pass
    shutil.rmtree(folder, ignore_errors=True)


class Cluster:
    """A running `ballast dev`."""

    def __init__(self, folder, memory="1GiB"):
        environment = dict(os.environ)
        cached = ROOT / ".cache/nats-server/2.15.1/nats-server"
        if not environment.get("BALLAST_NATS_SERVER") and cached.is_file():
            environment["BALLAST_NATS_SERVER"] = str(cached)
        self.ready = None
        self.log = folder / "dev.log"
        self.folder = folder
        command = [
            sys.executable, "-m", "ballast", "dev", "--data", str(folder / "data"), "--memory", memory, "--port", "0",
            "--http", "127.0.0.1:0", "-o", "json",
        ]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=folder)
        deadline = time.monotonic() + READY_SECONDS
        text = b""
        while True:
            line = self.process.stdout.readline()
            text += line
            try:
                self.ready = json.loads(text)
                break
            except ValueError:
                if not line or time.monotonic() > deadline:
                    self.stop()
                    pytest.fail(f"ballast dev did not start: {text!r}\n{self.log.read_text()[-2000:]}", pytrace=False)
        self.nats = self.ready["nats"]

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()
        if self.ready is not None:
            forget_memory(self.ready)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    os.environ["BALLAST_NATS"] = running.nats
    yield running
    running.stop()


@pytest.fixture
def store(cluster):
    return ballast.WeightStore(cluster.nats)


_names = itertools.count(1)


@pytest.fixture
def name():
    """A model's name that no other test has."""
    return f"model-{os.getpid()}-{next(_names)}"


def until(look, seconds=30.0, every=0.05):
    """Looks again until it finds something."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every)


def tensors(seed=0, scale=1):
    """A small model of several types and shapes."""
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": rng.standard_normal((32 * scale, 16), dtype=np.float32),
        "layer.0.weight": rng.standard_normal((16, 24 * scale)).astype(np.float16),
        "layer.0.bias": rng.integers(-100, 100, 16, dtype=np.int64),
        "norm.scale": np.array(1.5, dtype=np.float32),
        "mask": rng.integers(0, 2, (3, 5)).astype(bool),
        "empty": np.zeros((0, 7), dtype=np.float32),
    }


def leases(store, identity):
    """Active leases of a revision."""
    return store.weight_get_metadata(identity).active_lease_count

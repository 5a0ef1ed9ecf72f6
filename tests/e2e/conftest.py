"""What the end-to-end tests share: the binary, clusters of real processes, small models, and a view of "nothing changed".

Waiting polls against a deadline (`cluster.wait_until`); nothing sleeps and hopes.
"""

import contextlib
import itertools
import os
import pathlib
import shutil
import signal
import tempfile

import pytest

import weights
from cluster import ROOT, Cluster, footprint, wait_until
from verbs import Verbs, identity

MEMORY_BYTES = 512 << 20
NUMBERS = itertools.count()
# A run in the background of a shell inherits "SIGINT is ignored", and would pass that on to the processes under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
TERMINAL = {"SUCCEEDED", "FAILED", "CANCELLED", "SUPERSEDED"}


@pytest.fixture(scope="session")
def binary():
    path = pathlib.Path(os.environ.get("BALLAST_BIN", ROOT / "target/debug/ballast"))
    if not path.is_file():
        pytest.exit(f"{path} is missing: run `make test`, or `cargo build -p ballast` first", returncode=3)
    return path


@pytest.fixture(scope="session")
def session_folder():
    """A folder with a short path (Unix sockets allow 107 bytes), removed at the end unless BALLAST_KEEP is set."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ballast-e2e-"))
    yield folder
    if os.environ.get("BALLAST_KEEP"):
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def scratch(session_folder):
    """An empty folder of this test's own."""
    folder = session_folder / f"t{next(NUMBERS)}"
    folder.mkdir()
    return folder


class Site:
    """A running cluster with what tests ask of it."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.cli = cluster.cli
        self.verbs = Verbs(cluster.url)

    def operation_ends(self, operation_id, deadline_s=90):
        return wait_until(lambda: (found := self.verbs.operation(operation_id))["status"] in TERMINAL and found,
                          deadline_s, f"operation {operation_id} ends")

    def settled(self, which, deadline_s=90):
        """The metadata once no operation is active on the revision."""
        return wait_until(lambda: (found := self.verbs.metadata(which))["operation_id"] is None and found,
                          deadline_s, f"{which['resource_id']} has no active operation")

    def becomes(self, which, availability, deadline_s=90):
        return wait_until(lambda: (found := self.verbs.find(which)) and found["availability"] == availability and found,
                          deadline_s, f"{which['resource_id']} becomes {availability}")

    def put(self, model, name, *options, preferred="hot", mode="manual"):
        """Puts a model with a policy that starts nothing by itself, and returns its identity."""
        return self.cli.json("put", model, name, "--preferred", preferred, "--mode", mode, *options)["identity"]

    def get_identical(self, name, original, to, *options):
        """Gets a revision and compares every tensor with the original."""
        reply = self.cli.json("get", name, "--to", to, *options, timeout_s=600)
        weights.compare(weights.fingerprints(original), to)
        return reply

    def bytes_of_tiers(self):
        return footprint(*self.cluster.memory_dirs, *self.cluster.cold_dirs)

    def empty(self, which):
        """Removes a revision, and waits until it is a tombstone."""
        self.settled(which)
        self.cli.json("rm", name_of(which), "--wait")

    def at_rest(self, deadline_s=60):
        """`everything`, once nothing moves that earlier tests left: an AUTO revision that was read goes on by itself after its
        cooldown, and a node writes down what it was told a moment after the teller has heard of it."""
        moves = ("RUNNABLE", "CLAIMED", "BACKING_OFF")
        seen = []

        def rests():
            active = self.verbs.steady("list_operations", {"limit": 1000})["operations"]
            seen.append(self.everything())
            moving = any(one["status"] in moves or one["park_reason"] == "COOLDOWN" for one in active)
            return not moving and len(seen) > 1 and seen[-1] == seen[-2]

        wait_until(rests, deadline_s, "nothing moves by itself", poll_s=0.2)
        return seen[-1]

    def everything(self):
        """What a refused request must leave as it was."""
        return {
            "revisions": [{key: value for key, value in revision.items() if key != "last_accessed_unix_ms"} for revision in self.verbs.revisions()],
            "operations": self.verbs.steady("list_operations", {"all": True, "limit": 1000})["operations"],
            "files": self.bytes_of_tiers(),
        }

    def close(self):
        self.verbs.close()
        self.cluster.remove()


def name_of(which):
    """The short name of an identity."""
    tenant = which.get("tenant_id", "default")
    prefix = "" if tenant == "default" else f"{tenant}:"
    return f"{prefix}{which['namespace']}/{which['resource_id']}@{which['revision']}#{which['weight_generation']}"


def difference(before, after):
    """What is in only one of two lists, or under a key of only one of two maps, or differs there."""
    if isinstance(before, dict):
        keys = before.keys() | after.keys()
        return {key: (before.get(key), after.get(key)) for key in sorted(keys) if before.get(key) != after.get(key)}
    return [one for one in before if one not in after], [one for one in after if one not in before]


@pytest.fixture(scope="session")
def make_site(binary, session_folder):
    """Starts clusters; all are gone at the end of the session."""
    sites = []
    numbers = itertools.count()

    def make(**options):
        options.setdefault("memory_bytes", MEMORY_BYTES)
        cluster = Cluster(session_folder / f"c{next(numbers)}", binary, **options)
        try:
            cluster.start()
            site = Site(cluster)
        except BaseException:
            cluster.remove()
            raise
        sites.append(site)
        wait_until(lambda: not cluster.transfer_workers
                   or any(node["not_serving"] is None for node in site.verbs.steady("status")["nodes"]), 20, "a node serves")
        return site

    yield make
    for site in sites:
        site.close()


@pytest.fixture(scope="session")
def site(make_site):
    """One cluster for all tests that leave the processes alone."""
    return make_site(workflow_workers=2)


@pytest.fixture(scope="session")
def models(session_folder):
    """Small models by name, made once."""
    folder = session_folder / "models"
    made = {}

    def model(name, **options):
        key = (name, tuple(sorted(options.items())))
        if key not in made:
            made[key] = weights.small_model(folder / f"{name}-{len(made)}" / "model.safetensors", **options)
        return made[key]

    return model


@pytest.fixture
def fresh(request):
    """An identity that no other test uses."""
    base = f"{request.node.name.split('[')[0].removeprefix('test_')[:40]}-{next(NUMBERS)}"

    def name(generation=1, **parts):
        return identity(base, generation, **parts)

    return name


@pytest.fixture
def unchanged():
    """`with unchanged(site):` holds only if revisions, operations and the tiers' files are afterwards what they were."""
    @contextlib.contextmanager
    def check(site):
        before = site.at_rest()
        yield
        after = site.at_rest()
        for part in before:
            assert after[part] == before[part], f"{part} changed: {difference(before[part], after[part])}"

    return check

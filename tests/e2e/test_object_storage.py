"""The cold tier in object storage, on real processes and a server that speaks S3."""

import itertools
import shutil
import time

import pytest

from cluster import MemoryFolder, wait_until
from conftest import name_of
from object_storage import SECRET, ObjectStorage
from test_repair import repaired

PREFIXES = itertools.count()


@pytest.fixture(scope="module")
def storage():
    storage = ObjectStorage()
    yield storage
    storage.close()


@pytest.fixture
def prefix():
    return f"site-{next(PREFIXES)}"


@pytest.fixture
def site(make_site, storage, prefix):
    site = make_site(cold_url=storage.url(prefix), worker_env=storage.env)
    yield site
    storage.refuse_every = None
    site.cluster.remove()


@pytest.fixture
def model(models):
    # Large enough to go up in parts.
    return models("bucket", tensors=3, kib=12 << 10)


def put_cold(site, model, which):
    site.put(model, name_of(which))
    site.cli.json("migrate", name_of(which), "cold", "--wait")
    assert site.settled(which)["residency"] == "COLD"


def test_units_go_to_the_bucket_and_come_back(site, storage, prefix, model, fresh, scratch):
    which = fresh()
    put_cold(site, model, which)
    assert storage.keys(prefix, "/packs/") and not storage.open_uploads(prefix)
    site.get_identical(name_of(which), model, scratch / "cold")
    site.cli.json("migrate", name_of(which), "mixed", "--hot-ratio", "0.5", "--wait")
    site.get_identical(name_of(which), model, scratch / "mixed")
    site.cli.json("migrate", name_of(which), "hot", "--wait")
    site.get_identical(name_of(which), model, scratch / "hot")
    assert all(not check["cold"]["wrong"] for check in site.cli.json("verify", name_of(which)))
    site.empty(which)
    assert [key for key in storage.keys(prefix) if not key.endswith("/cluster")] == []


def test_a_revision_survives_the_loss_of_every_node(site, storage, prefix, model, fresh, scratch):
    which = fresh()
    put_cold(site, model, which)
    [lost] = site.cluster.transfer_workers
    lost.kill()
    site.cluster.memory_folders[0].remove()
    site.becomes(which, "DEGRADED")
    other = site.cluster.new_transfer_worker("other")
    other.start()
    assert site.becomes(which, "READY", 120)["residency"] == "COLD"
    site.get_identical(name_of(which), model, scratch / "other")
    # The name that it was placed on, with nothing but a name: then everything can be done with it again.
    site.cluster.memory_folders[0] = MemoryFolder(site.cluster.folder)
    again = site.cluster.new_transfer_worker("node-0")
    again.start()
    site.cli.json("migrate", name_of(which), "hot", "--wait")
    site.get_identical(name_of(which), model, scratch / "hot")
    site.empty(which)
    assert storage.keys(prefix, "/packs/") == []


def test_a_node_that_was_only_silent_comes_back_and_everything_can_be_done_again(site, storage, prefix, model, fresh, scratch):
    which = fresh()
    put_cold(site, model, which)
    site.cli.json("migrate", name_of(which), "mixed", "--hot-ratio", "0.5", "--wait")
    [silent] = site.cluster.transfer_workers
    other = site.cluster.new_transfer_worker("other")
    other.start()
    silent.pause()
    try:
        site.becomes(which, "DEGRADED")
        site.becomes(which, "READY", 120)
        site.get_identical(name_of(which), model, scratch / "other")
    finally:
        silent.resume()
    # What it frees from now on it has on a replica of its own: the one before is the other's.
    site.cli.json("migrate", name_of(which), "hot", "--wait")
    site.get_identical(name_of(which), model, scratch / "hot")
    site.cli.json("migrate", name_of(which), "cold", "--wait")
    site.get_identical(name_of(which), model, scratch / "cold")
    other.kill()
    wait_until(lambda: [node["endpoint"]["node"] for node in site.verbs.steady("status")["nodes"]] == ["node-0"], 60, "the other is gone")
    site.becomes(which, "READY")
    assert all(not check["cold"]["wrong"] for check in site.cli.json("verify", name_of(which)))


def test_a_bucket_that_is_away_takes_no_node_with_it(site, storage, model, fresh, scratch):
    which, other = fresh(), fresh()
    site.put(model, name_of(which))
    site.put(model, name_of(other))
    storage.refuse_every = 1
    started = storage.refused
    operation = site.cli.json("migrate", name_of(which), "cold")["operation_id"]
    wait_until(lambda: storage.refused > started, 60, "the bucket is asked")
    # For longer than a node may say nothing.
    listened = time.monotonic() + 12
    while time.monotonic() < listened:
        assert [node["endpoint"]["node"] for node in site.verbs.steady("status")["nodes"]] == ["node-0"]
        assert site.verbs.metadata(which)["availability"] == "READY"
        site.get_identical(name_of(other), model, scratch / f"out-{time.monotonic()}")
    site.get_identical(name_of(which), model, scratch / "meanwhile")
    storage.refuse_every = None
    assert site.operation_ends(operation, 180)["status"] == "SUCCEEDED"
    site.get_identical(name_of(which), model, scratch / "cold")


def test_a_node_that_lost_its_memory_finds_its_copies_in_the_bucket(site, model, fresh, scratch):
    which = fresh()
    put_cold(site, model, which)
    [worker] = site.cluster.transfer_workers
    worker.kill()
    for entry in (site.cluster.memory_dirs[0] / "instances").iterdir():
        shutil.rmtree(entry)
    worker.start()
    site.becomes(which, "READY")
    site.cli.json("migrate", name_of(which), "hot", "--wait")
    site.get_identical(name_of(which), model, scratch / "out")


def test_a_deleted_object_is_a_degraded_revision(site, storage, prefix, model, fresh):
    which = fresh()
    put_cold(site, model, which)
    storage.delete(storage.keys(prefix, "/packs/")[0])
    assert "CHECKSUM_MISMATCH" in str(site.cli.refusal("verify", name_of(which)))
    site.becomes(which, "DEGRADED")


def test_a_flipped_byte_in_an_object_is_found_and_made_again(site, storage, prefix, model, fresh, scratch):
    which = fresh()
    put_cold(site, model, which)
    site.cli.json("migrate", name_of(which), "hot", "--wait")
    [key, *_] = storage.keys(prefix, "/packs/")
    content = bytearray(storage.get(key))
    content[100] ^= 1
    storage.put(key, bytes(content))
    assert "CHECKSUM_MISMATCH" in str(site.cli.refusal("verify", name_of(which)))
    wait_until(lambda: repaired(site) == 1, 60, "the copy is made again")
    site.settled(which)
    site.cli.json("migrate", name_of(which), "cold", "--wait")
    site.get_identical(name_of(which), model, scratch / "out")


def test_requests_that_the_server_can_not_answer_now_are_repeated(site, storage, prefix, model, fresh, scratch):
    which = fresh()
    storage.refuse_every, storage.refused = 3, 0
    put_cold(site, model, which)
    site.get_identical(name_of(which), model, scratch / "out")
    site.cli.json("migrate", name_of(which), "hot", "--wait")
    assert storage.refused > 5
    assert not storage.open_uploads(prefix)


def test_the_address_comes_by_flag_environment_or_file(site, storage, prefix, fresh, scratch):
    config = scratch / "ballast.yaml"
    config.write_text(f"weight_migration_cooldown_ms: 30000\ncold_url: {storage.url(prefix)}\n")
    for name, env in (("by-environment", {"BALLAST_COLD_URL": storage.url(prefix)}), ("by-file", {"BALLAST_CONFIG": str(config)})):
        worker = site.cluster.new_transfer_worker(name, env=env)
        at = worker.command.index("--cold-url")
        del worker.command[at:at + 2]
        worker.start()
        assert f"in {storage.url(prefix)}, object storage" in worker.output()


def test_no_log_holds_a_secret(site, storage, model, fresh):
    which = fresh()
    put_cold(site, model, which)
    [worker] = site.cluster.transfer_workers
    worker.stop()
    wrong = site.cluster.new_transfer_worker("wrong", env={"AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    with pytest.raises(Exception, match="s3://weights/"):
        wrong.start()
    inside = site.cluster.new_transfer_worker("inside", env={"AWS_ENDPOINT_URL": f"http://key:{SECRET}@127.0.0.1:1"})
    with pytest.raises(Exception, match="the endpoint holds an @"):
        inside.start()
    for arguments in (["--cold-url", f"s3://key:{SECRET}@weights/a"], ["--cold-url", "https://weights/a"]):
        code, error, text = site.cli.refusal("transfer-worker", "--memory", "64MiB", *arguments)
        assert code == 11 and "s3://<bucket>" in str(error) + text
        assert SECRET not in str(error) + text
    for log in site.cluster.logs.iterdir():
        assert SECRET not in log.read_text(errors="replace"), log

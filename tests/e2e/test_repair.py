"""Lost copies on real processes: noticed, told, repaired from what is left, with identical bytes afterwards."""

import pathlib

import pytest

from cluster import wait_until
from conftest import name_of


@pytest.fixture
def site(make_site):
    return make_site()


@pytest.fixture
def model(models):
    return models("repair")


def cold_segments(site):
    return [path for folder in site.cluster.cold_dirs for path in pathlib.Path(folder).rglob("segment-*")]


def memory_segments(site):
    return [path for folder in site.cluster.memory_dirs for path in pathlib.Path(folder).rglob("segment-*")]


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


def promoted(site, model, which):
    """A model that was COLD and has been promoted: it has a copy on both tiers."""
    site.put(model, name_of(which))
    site.cli.json("migrate", name_of(which), "cold", "--wait")
    site.cli.json("migrate", name_of(which), "hot", "--wait")


def repaired(site):
    found = [operation for operation in site.verbs.steady("list_operations", {"all": True, "limit": 1000})["operations"]
             if operation["kind"] == "REPAIRING" and operation["status"] == "SUCCEEDED"]
    return len(found)


def test_verify_finds_a_flipped_byte_on_disk_and_the_copy_is_made_again_each_time(site, model, fresh, scratch):
    which = fresh()
    promoted(site, model, which)
    assert "nothing to repair" in site.cli.text("repair", name_of(which))
    for times in (1, 2):
        flip(cold_segments(site)[0], 100)
        assert "CHECKSUM_MISMATCH" in str(site.cli.refusal("verify", name_of(which)))
        wait_until(lambda: repaired(site) == times, 30, f"the copy on disk is made again, {times}")
        assert site.settled(which)["availability"] == "READY"
        assert all(not check["cold"]["wrong"] for check in site.cli.json("verify", name_of(which)))
    site.cli.json("migrate", name_of(which), "cold", "--wait")
    site.get_identical(name_of(which), model, scratch / "out")


def test_a_truncated_file_on_disk_is_found_at_the_start_and_made_again(site, model, fresh, scratch):
    which = fresh()
    promoted(site, model, which)
    worker = site.cluster.transfer_workers[0]
    worker.kill()
    for path in cold_segments(site):
        with open(path, "r+b") as file:
            file.truncate(4096)
    worker.start()
    wait_until(lambda: repaired(site) == 1, 60, "the copies on disk are made again")
    site.cli.json("migrate", name_of(which), "cold", "--wait")
    site.get_identical(name_of(which), model, scratch / "out")


def test_segments_in_memory_that_vanish_are_made_again_from_disk(site, model, fresh, scratch):
    which = fresh()
    promoted(site, model, which)
    worker = site.cluster.transfer_workers[0]
    worker.kill()
    for path in memory_segments(site):
        path.unlink()
    worker.start()
    wait_until(lambda: repaired(site) == 1, 60, "the units are in memory again")
    assert site.settled(which)["residency"] == "HOT"
    site.get_identical(name_of(which), model, scratch / "out")


def test_a_revision_without_any_copy_is_degraded_and_says_so(site, model, fresh, scratch):
    which = fresh()
    promoted(site, model, which)
    worker = site.cluster.transfer_workers[0]
    worker.kill()
    for path in memory_segments(site) + cold_segments(site):
        path.unlink()
    worker.start()
    site.becomes(which, "DEGRADED")
    refused = str(site.cli.refusal("get", name_of(which), "--to", scratch / "out"))
    assert "DEGRADED" in refused and "lost replicas" in refused, refused
    assert "no readable replica" in str(site.cli.refusal("repair", name_of(which), "--wait"))


def test_a_node_that_goes_away_and_comes_back_degrades_and_recovers(site, model, fresh, scratch):
    which = fresh()
    promoted(site, model, which)
    worker = site.cluster.transfer_workers[0]
    worker.kill()
    site.becomes(which, "DEGRADED", 60)
    worker.start()
    site.becomes(which, "READY", 60)
    site.get_identical(name_of(which), model, scratch / "out")

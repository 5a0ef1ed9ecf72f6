"""Models of the shapes that people have, through their whole life: put, get, migrate COLD, get, rm. What the tiers occupy
is read from the folders themselves at every stage. The times of each step are left in target/test/models.json."""

import filecmp
import json
import pathlib
import shutil
import time

import pytest

import weights
from cluster import ROOT, occupied_bytes, wait_until
from conftest import name_of

MIB = 1 << 20
FIGURES = ROOT / "target/test/models.json"


def available_memory_bytes():
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def whole_life(site, model, name, scratch):
    payload = weights.payload_bytes(model)
    original = weights.fingerprints(model)
    memory, cold = site.cluster.memory_dirs[0], site.cluster.cold_dirs[0]
    empty_memory, empty_cold = occupied_bytes(memory), occupied_bytes(cold)
    out = scratch / f"{name}-out"
    figures = {"model": name, "bytes": payload, "tensors": len(original)}

    reply = site.cli.json("put", model, name, "--preferred", "hot", "--mode", "manual", timeout_s=600)
    which = reply["identity"]
    figures["put_seconds"] = reply["seconds"]
    metadata = site.verbs.metadata(which)
    # Beside the tensors stands a description of the file, so that it comes back byte for byte.
    assert payload < metadata["manifest"]["logical_bytes"] < payload + 256 * len(original) + 4096
    assert metadata["manifest"]["affinity_count"] == len(original) + 1
    assert occupied_bytes(memory) - empty_memory >= payload

    for residency in ("HOT", "COLD"):
        if residency == "COLD":
            start = time.monotonic()
            operation = site.cli.json("migrate", name_of(which), "cold", "--wait", timeout_s=600)
            figures["migrate_cold_seconds"] = round(time.monotonic() - start, 3)
            assert operation["status"] == "SUCCEEDED", operation
            assert operation["processed_bytes"] == operation["total_bytes"]
            assert occupied_bytes(cold) - empty_cold >= payload
            # What stays in memory is the manifest and the index, not the payload.
            assert occupied_bytes(memory) - empty_memory < max(payload // 4, 32 * MIB)
        assert site.settled(which)["residency"] == residency
        reply = site.cli.json("get", name_of(which), "--to", out, timeout_s=600)
        figures[f"get_{residency.lower()}_seconds"] = reply["seconds"]
        assert reply["tensors"] == len(original)
        assert weights.compare(original, out) == len(original)
        assert filecmp.cmp(model, out / model.name, shallow=False)
        shutil.rmtree(out)

    start = time.monotonic()
    site.cli.json("rm", name_of(which), "--wait", timeout_s=600)
    figures["rm_seconds"] = round(time.monotonic() - start, 3)
    assert site.verbs.metadata(which)["availability"] == "DELETED"
    wait_until(lambda: occupied_bytes(memory) <= empty_memory and occupied_bytes(cold) <= empty_cold, 30, "no byte is left")
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    others = [one for one in json.loads(FIGURES.read_text()) if one["model"] != name] if FIGURES.is_file() else []
    FIGURES.write_text(json.dumps([*others, figures], indent=2) + "\n")


def enough_for(payload, scratch):
    memory_needed, disk_needed = int(payload * 2.5), int(payload * 3.2)
    if available_memory_bytes() < memory_needed:
        pytest.skip(f"needs {memory_needed // MIB} MiB of free memory, {available_memory_bytes() // MIB} MiB are there")
    if shutil.disk_usage(scratch).free < disk_needed:
        pytest.skip(f"needs {disk_needed // MIB} MiB of free disk, {shutil.disk_usage(scratch).free // MIB} MiB are there")


def test_twenty_thousand_small_tensors(make_site, scratch):
    site = make_site(memory_bytes=512 * MIB)
    layout = [(f"experts.{n // 100}.part.{n % 100}.weight", (4 + n % 13, 16)) for n in range(20_000)]
    model = weights.write(scratch / "many" / "model.safetensors", weights.random_tensors(layout, seed=20))
    whole_life(site, model, "many-small", scratch)


@pytest.mark.timeout(900)
def test_two_gibibytes_in_three_hundred_tensors(make_site, scratch):
    """A decoder-only language model in bfloat16."""
    layout = weights.decoder_layout()
    payload = weights.layout_bytes(layout, weights.BFLOAT16)
    assert len(layout) == 300 and payload >= 2 << 30
    enough_for(payload, scratch)
    site = make_site(memory_bytes=payload + 128 * MIB)
    model = weights.write(scratch / "decoder" / "model.safetensors", weights.random_tensors(layout, dtype=weights.BFLOAT16), {"format": "pt"})
    whole_life(site, model, "decoder", scratch)
    site.close()
    shutil.rmtree(model.parent)

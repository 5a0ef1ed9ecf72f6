"""Checkpoints: safetensors files and folders in and out, bit for bit; memory in use does not grow with the model."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import ballast
from conftest import leases, tensors
from test_store import HOT


def digests(folder):
    folder = pathlib.Path(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def sharded_folder(folder, values):
    """A model as Hugging Face lays it out: two shards, an index, and files beside."""
    folder.mkdir()
    names = sorted(values)
    index = {"metadata": {"total_size": sum(value.nbytes for value in values.values())}, "weight_map": {}}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        safetensors.numpy.save_file({key: values[key] for key in part}, folder / shard, metadata={"format": "pt"})
        index["weight_map"].update({key: shard for key in part})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text('{"hidden_size": 16}\n')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    return folder


def test_a_file_comes_back_byte_for_byte(store, name, tmp_path):
    values = dict(tensors(40), half=np.arange(6, dtype=ml_dtypes.bfloat16))
    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file(values, path, metadata={"step": "7"})
    record = ballast.safetensors.import_path(path, name, store=store, policy=HOT)
    assert record.identity.weight_generation == 1
    written = ballast.safetensors.export(name, tmp_path / "out", store=store)
    assert [pathlib.Path(file).name for file in written] == ["weights.safetensors"]
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == path.read_bytes()
    loaded = ballast.load(name, store=store)
    for key, value in values.items():
        assert np.array_equal(loaded[key], value) and loaded[key].dtype == value.dtype, key
    assert leases(store, record.identity) == 1


def test_a_sharded_folder_comes_back_byte_for_byte_with_what_lies_beside(store, name, tmp_path):
    folder = sharded_folder(tmp_path / "model", tensors(41))
    record = ballast.safetensors.import_path(folder, name, store=store, policy=HOT)
    ballast.safetensors.export(record.identity, tmp_path / "out", store=store)
    assert digests(tmp_path / "out") == digests(folder)
    with ballast.open(name, store=store) as opened:
        assert set(opened.files) == {"config.json", "model.safetensors.index.json", "tokenizer/vocab.txt"}
        assert opened.file("config.json").tobytes() == b'{"hidden_size": 16}\n'
        with pytest.raises(KeyError):
            opened.file("nothing")
    with pytest.raises(ballast.ConflictError):
        ballast.safetensors.export(name, tmp_path / "out", store=store)
    ballast.safetensors.export(name, tmp_path / "out", overwrite=True, store=store)
    assert leases(store, record.identity) == 0


def test_a_state_dict_becomes_a_file_that_the_library_reads(store, name, tmp_path):
    values = tensors(42)
    ballast.save(values, name, store=store, policy=HOT)
    ballast.safetensors.export(name, tmp_path / "out", store=store)
    loaded = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == set(values)
    for key, value in values.items():
        assert np.array_equal(loaded[key], value) and loaded[key].dtype == value.dtype and loaded[key].shape == value.shape, key


def test_a_state_dict_goes_in_and_out_in_a_line(store, name):
    values = tensors(43)
    ballast.safetensors.put_state_dict(values, name, store=store, policy=HOT)
    found = ballast.safetensors.get_state_dict(name, store=store)
    for key, value in values.items():
        assert np.array_equal(found[key], value) and found[key].flags.writeable and found[key].base is None, key
    assert leases(store, ballast.WeightRevisionIdentity.parse(f"{name}#1")) == 0


def test_import_replaces_like_save(store, name, tmp_path):
    for generation, seed in ((1, 44), (2, 45)):
        path = tmp_path / f"{generation}.safetensors"
        safetensors.numpy.save_file(tensors(seed), path)
        record = ballast.safetensors.import_path(path, name, store=store, policy=HOT, replace=generation == 2)
        assert record.identity.weight_generation == generation


@pytest.mark.parametrize("damage", ["truncated", "header", "nothing", "missing shard"])
def test_damaged_checkpoints_are_refused_and_leave_nothing(store, name, tmp_path, damage):
    folder = sharded_folder(tmp_path / "model", tensors(46))
    shard = folder / "model-00001-of-00002.safetensors"
    path = folder
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "header":
        shard.write_bytes(b"\xff" * 64)
    elif damage == "missing shard":
        shard.unlink()
    else:
        path = tmp_path / "nowhere"
    with pytest.raises(ballast.InvalidArgumentError):
        ballast.safetensors.import_path(path, name, store=store)
    assert store.weight_list(namespace="default", resource_id=name).revisions == ()


def test_import_does_not_hold_the_model_in_memory(cluster, name, tmp_path):
    path = tmp_path / "large.safetensors"
    tensor = np.random.default_rng(1).integers(0, 255, 16 << 20, dtype=np.uint8)
    safetensors.numpy.save_file({f"layer.{at}": tensor for at in range(16)}, path)
    script = textwrap.dedent("""
        import resource, sys, ballast
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ballast.safetensors.import_path(sys.argv[2], sys.argv[3], store=sys.argv[1])
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    run = subprocess.run([sys.executable, "-c", script, cluster.nats, str(path), name], env=dict(os.environ), capture_output=True, text=True, check=True)
    assert int(run.stdout) < 64 << 10, f"{run.stdout} KiB grown for a model of 256 MiB"

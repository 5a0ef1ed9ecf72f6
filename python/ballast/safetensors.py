"""Checkpoints on disk: a safetensors file, a sharded folder, or a model's whole folder with its configuration beside.

Import knows where the bytes are and streams them; memory in use does not grow with the model. Export writes the same files
back, byte for byte.
"""

import json
import os

from . import _arguments
from ._easy import begin, get_state_dict, resolve, save, store_of
from ._errors import invalid
from ._store import LEASE_TTL_MS, WeightWriter, manifest_of, reading_text


def import_path(path, name, *, policy=None, replace=None, store=None, progress=None):
    """Publishes a safetensors file or a folder as the next generation of `name` (or the one it names) and answers its
    record. Files beside the tensors travel with them. `replace` as for `ballast.save`."""
    store, path = store_of(store), _arguments.path(path, "path")
    if not os.path.exists(path):
        raise invalid(f"path is {_arguments.shown(path)}, which is not there; give a safetensors file or a folder that holds some")
    native, identity = begin(store, name, path=path, policy=policy, replace=replace, progress=progress)
    with WeightWriter(native, identity, None, None, store._connection) as writer:
        writer._cancel = store._cancel
    return writer.revision


def export(name, folder, *, overwrite=False, store=None, holder=None, lease_ttl_ms=LEASE_TTL_MS, verify="auto", progress=None):
    """Writes a revision's files into a folder and answers their paths. What was imported comes back byte for byte; what
    never was a file becomes `model.safetensors`. Nothing appears before everything was read."""
    store, folder, reading = store_of(store), _arguments.path(folder, "folder"), reading_text(holder, lease_ttl_ms, verify)
    identity = resolve(name, store)
    report = json.loads(store._connection.client(store._cancel).get_folder(
        json.dumps(identity._to_wire()), folder, bool(overwrite), reading,
        progress or store._connection.progress, store._cancel))
    manifest_of(report)
    return report["files"]


put_state_dict = save

__all__ = ["export", "get_state_dict", "import_path", "put_state_dict"]

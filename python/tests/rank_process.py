"""One rank of a job that saves a checkpoint together with others, as a process of its own: it reads its own slices of the
file and nothing else. Takes its arguments as JSON, tells as JSON lines what it does, and waits for a line where it is asked
to (`pause`)."""

import json
import os
import sys

import numpy as np
from safetensors import safe_open

import ballast
from ballast.dtensor import DeviceMesh, DTensorAdapter, Replicate, Shard, ShardedTensor, box_of, rank_name


def column_then_row(name, rank):
    """How a tensor-parallel runtime would cut it."""
    if rank < 2:
        return Replicate()
    return Shard(1) if "output.dense" in name else Shard(0)


def tell(**fields):
    print(json.dumps(fields), flush=True)


def main():
    job = json.loads(sys.argv[1])
    rank, mesh = job["rank"], DeviceMesh((job["ranks"],))
    store = ballast.WeightStore(job["nats"], route=job.get("route", "best"))
    with safe_open(job["model"], "numpy") as model:
        held = {}
        for name in model.keys():
            piece = model.get_slice(name)
            shape, placements = tuple(piece.get_shape()), [column_then_row(name, len(piece.get_shape()))]
            offset, extent = box_of(mesh, placements, shape, rank)
            # An empty slice can not be read, so that of an uneven cut is made.
            read = [(0, 1)] * len(shape) if 0 in extent else zip(offset, extent)
            local = piece[tuple(slice(start, start + length) for start, length in read)]
            local = np.empty(extent, local.dtype) if 0 in extent else np.ascontiguousarray(local)
            held[name] = ShardedTensor(mesh, placements, local.dtype, shape, {rank: local})
        if job.get("spoil"):
            spoiled = held[job["spoil"]].local[rank].copy()
            spoiled.reshape(-1).view(np.uint8)[0] ^= 1
            held[job["spoil"]].local[rank] = spoiled
    snapshot = ballast.WeightSnapshot.from_tensors(
        held, resource_id=job["name"], weight_generation=job.get("generation", 1), adapter=DTensorAdapter())
    policy = None
    if job.get("session") is None:
        policy = ballast.WeightStoragePolicy(ballast.WeightResidencyState.HOT, 0.5, ballast.WeightMigrationMode.MANUAL)
        ranks = [rank_name(at) for at in range(job["ranks"])]
        snapshot = snapshot.shared(ranks, participant=rank_name(rank), session=job.get("own"), patience=job.get("patience", 30.0))
    else:
        snapshot = snapshot.part(rank_name(rank), job["session"])
    try:
        with store.weight_put(snapshot, DTensorAdapter(), policy=policy) as writer:
            tell(session=writer.session)
            for at, (name, tensor) in enumerate(sorted(held.items())):
                if at == job.get("pause"):
                    tell(paused=name)
                    sys.stdin.readline()
                if name not in job.get("leave_out", ()):
                    writer.weight_put_tensor(name, tensor)
            if job.get("pause") == "commit":
                tell(paused="commit")
                sys.stdin.readline()
        tell(report=writer.report, revision=None if writer.revision is None else writer.revision.availability.name,
             held=sum(tensor.local[rank].nbytes for tensor in held.values()), pid=os.getpid())
    except ballast.BallastError as error:
        tell(error=type(error).__name__, message=error.message, details=error.details)


if __name__ == "__main__":
    main()

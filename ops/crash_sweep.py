"""kill -9 before and after every step of every machine, on the real processes (`make crash-sweep`).

A *story* is one operation of one kind (a migration to COLD, the deletion of a revision, ...). For each of its steps, on each
side, the story is played on a new revision: the process that executes the step kills itself there (BALLAST_FAILPOINT),
another goes on, and afterwards the operation has ended under its own id, its progress never fell, every byte that should be
there is, and nothing is where nothing should be. `ballast failpoints` says which steps there are: one that no story strikes
fails the sweep.

Several clusters play at once; within a cluster one story after another, and only workers are restarted between them.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid

import weights
from cluster import ROOT, Cluster, Failure, footprint, wait_until
from verbs import NoAnswer, VerbError, Verbs, identity

OUT = ROOT / "target/crash-sweep"
MEMORY_BYTES = 160 << 20
COLD_QUOTA_BYTES = 40 << 20
# More units than one round takes (64), so that there is progress to be kept.
UNITS = 80
TERMINAL = {"SUCCEEDED", "FAILED", "CANCELLED", "SUPERSEDED"}
STRIKE_S = 45
END_S = 90


@dataclasses.dataclass(frozen=True)
class Point:
    """One place where a process dies, in one story."""

    story: "Story"
    machine: str
    step: str
    when: str

    @property
    def failpoint(self):
        return f"{self.machine}.{self.step}.{self.when}"

    def __str__(self):
        return f"{self.failpoint} ({self.story.name})"


class Lane:
    """One cluster without workflow workers of its own: the stories start those."""

    def __init__(self, folder, binary, models):
        self.models = models
        self.folder = pathlib.Path(folder)
        self.numbers = itertools.count()
        self.cluster = Cluster(folder, binary, workflow_workers=0, memory_bytes=MEMORY_BYTES, cold_quota_bytes=COLD_QUOTA_BYTES)
        try:
            self.cluster.start()
            self.cli = self.cluster.cli
            self.verbs = Verbs(self.cluster.url)
        except BaseException:
            self.cluster.remove()
            raise
        self.node = self.cluster.transfer_workers[0]
        self.wait_for_node()

    def wait_for_node(self):
        wait_until(lambda: any(node["not_serving"] is None for node in self.verbs.steady("status")["nodes"]), 20, "the node serves")

    @contextlib.contextmanager
    def worker(self, env=None):
        """A workflow worker with a name of its own, gone at the end."""
        service = self.cluster.new_workflow_worker(f"worker-{next(self.numbers)}", env)
        try:
            yield service.start()
        finally:
            service.kill()
            if "panicked" in service.output():
                raise Failure(f"{service.name} panicked:\n{service.output()[-3000:]}")

    def put(self, which, model="base"):
        self.cli.json("put", self.models[model], name_of(which), "--preferred", "hot", "--mode", "manual")

    def migrate(self, which, target):
        """Starts a migration and returns its id."""
        body = {"identity": which, "target": target, "expected_metadata_generation": self.metadata(which)["metadata_generation"]}
        return self.verbs.steady("migrate", body)["operation"]["operation_id"]

    def remove(self, which):
        """Starts a deletion and returns its id."""
        body = {"identity": which, "expected_metadata_generation": self.metadata(which)["metadata_generation"]}
        return self.verbs.steady("remove", body)["revision"]["operation_id"]

    def metadata(self, which):
        return self.verbs.metadata(which)

    def settled(self, which):
        return wait_until(lambda: (found := self.metadata(which))["operation_id"] is None and found, END_S, f"{which['resource_id']} settles")

    def cold_segments(self):
        """The files on disk that hold payload: those of the story's revision, as the lane holds nothing else."""
        return list(self.cluster.cold_dirs[0].rglob("segment-*"))

    def files(self):
        return footprint(*self.cluster.memory_dirs, *self.cluster.cold_dirs)

    def inventories(self):
        """Subjects of BALLAST_INVENTORY whose last word is an inventory; a withdrawn one is an empty message."""
        async def look():
            stream = self.verbs.nc.jetstream()
            info = await stream.stream_info("BALLAST_INVENTORY", subjects_filter=">")
            last = {subject: await stream.get_last_msg("BALLAST_INVENTORY", subject) for subject in info.state.subjects or {}}
            return {subject for subject, message in last.items() if message.data}
        return self.verbs.run(look())

    def lose_memory(self):
        """The node dies together with its memory, as when its host restarts."""
        self.node.kill()
        for entry in self.cluster.memory_dirs[0].iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.node.start()
        self.wait_for_node()

    def close(self):
        self.verbs.close()
        self.cluster.remove()


def name_of(which):
    return f"{which['resource_id']}#{which['weight_generation']}"


class Story:
    """One operation: how it begins, and what is true at its end."""

    name = ""
    machine = ""
    steps = ()
    victim_env = {}
    # Whether the operation begins before the worker that is to die starts.
    begins_first = False
    # Statuses that the operation may end with.
    ends = ("SUCCEEDED",)

    def prepare(self, lane, which):
        """What has to be there before. A clean worker is running."""

    def begin(self, lane, which):
        """Begins the operation and returns its id."""
        raise NotImplementedError

    def before_victim(self, lane, which):
        """Just before the worker that is to die starts."""

    def after_strike(self, lane, which):
        """Just after it has died."""

    def finish(self, lane, which, operation_id):
        """Anything that the end needs beside a worker."""

    def survivors(self, which):
        """Revisions that are READY at the end, with their residency and the model that they hold."""
        return []

    def mortal(self, which):
        """Every revision that the story made, to be removed at the end."""
        return [which]


class Migration(Story):
    machine = "migration"
    demotes = ("claim", "raise_fence", "copy_to_cold", "authorize_release", "release_memory", "operation_advanced", "operation_finished")
    promotes = ("claim", "raise_fence", "copy_to_memory", "operation_advanced", "operation_finished")

    def __init__(self, origin, target, steps=None):
        self.origin, self.target = origin, target
        self.name = f"{origin} to {target}"
        self.steps = steps or (self.demotes if origin == "HOT" else self.promotes)

    def prepare(self, lane, which):
        lane.put(which)
        if self.origin != "HOT":
            lane.migrate(which, self.origin)
            lane.settled(which)

    def begin(self, lane, which):
        return lane.migrate(which, self.target)

    def survivors(self, which):
        return [(which, self.target, "base")]


class SlowMigration(Migration):
    """Slow enough for its claim to need a renewal."""

    victim_env = {"BALLAST_STEP_DELAY_MS": "3000"}

    def __init__(self):
        super().__init__("HOT", "COLD", ("renew_claim",))
        self.name = "a slow migration"


class WithoutNode:
    """The node does not answer when the operation begins, and comes back later."""

    def before_victim(self, lane, which):
        lane.node.kill()

    def after_strike(self, lane, which):
        lane.node.start()


class MigrationWithoutNode(WithoutNode, Migration):
    def __init__(self):
        super().__init__("COLD", "HOT", ("park_operation",))
        self.name = "a migration while its node is away"


class FullDisk:
    """There is no room on the disk at first."""

    def filler_of(self, which):
        return identity(f"{which['resource_id']}-filler")

    def fill(self, lane, which):
        lane.put(self.filler_of(which), "filler")
        lane.migrate(self.filler_of(which), "COLD")
        lane.settled(self.filler_of(which))

    def finish(self, lane, which, operation_id):
        lane.remove(self.filler_of(which))

    def mortal(self, which):
        return [self.filler_of(which), *super().mortal(which)]


class MigrationToFullDisk(FullDisk, Migration):
    def __init__(self):
        super().__init__("HOT", "COLD", ("operation_attempt_failed",))
        self.name = "a migration to a full disk"

    def prepare(self, lane, which):
        super().prepare(lane, which)
        self.fill(lane, which)


# The operation meets the loss before the watch does.
WITHOUT_WATCH = {"BALLAST_WATCH_DELAY_MS": "120000"}


class MigrationOfLostBytes(Migration):
    """Nothing is left to be migrated: the revision is DEGRADED, and the operation ends because of that."""

    ends = ("SUPERSEDED",)
    victim_env = WITHOUT_WATCH

    def __init__(self):
        super().__init__("HOT", "COLD", ("revision_degraded",))
        self.name = "a migration of bytes that are gone"

    def before_victim(self, lane, which):
        lane.lose_memory()

    def finish(self, lane, which, operation_id):
        wait_until(lambda: lane.metadata(which)["availability"] == "DEGRADED", END_S, "the loss is told")

    def survivors(self, which):
        return []


class Repair(Story):
    """What was in memory is lost, and is made again from disk; the watch of the workers begins it."""

    name = "a repair from disk"
    machine = "repair"
    steps = ("claim", "raise_fence", "copy_to_memory", "operation_advanced", "operation_finished")

    def prepare(self, lane, which):
        lane.put(which)
        for target in ["COLD", "HOT"]:
            lane.migrate(which, target)
            lane.settled(which)

    def before_victim(self, lane, which):
        lane.lose_memory()

    def begin(self, lane, which):
        return wait_until(lambda: self.begun(lane, which), STRIKE_S, "the watch begins the repair")

    def begun(self, lane, which):
        return next((one["operation_id"] for one in operations(lane) if one["kind"] == "REPAIRING" and one["identity"]["resource_id"] == which["resource_id"]), None)

    def ask(self, lane, which):
        """Begins the repair while no worker runs; the gateway has to have heard of the loss."""
        def asked():
            operation = lane.verbs.steady("repair", {"identity": which})["operation"]
            return operation and operation["operation_id"]
        return wait_until(asked, STRIKE_S, "the gateway hears of the loss")

    def survivors(self, which):
        return [(which, "HOT", "base")]


class RepairOfDisk(Repair):
    """What was on disk is cut off while the node is down."""

    name = "a repair from memory"
    steps = ("copy_to_cold", "operation_finished")

    def before_victim(self, lane, which):
        lane.node.kill()
        self.damage(lane)
        lane.node.start()
        lane.wait_for_node()

    def damage(self, lane):
        for segment in lane.cold_segments():
            with open(segment, "r+b") as file:
                file.truncate(4096)


class RepairOnBadDisk(RepairOfDisk):
    """The copy on disk can not be made at first: a folder stands in its place."""

    name = "a repair on a disk that refuses"
    steps = ("operation_attempt_failed",)

    def damage(self, lane):
        self.blocked = lane.cold_segments()
        for segment in self.blocked:
            segment.unlink()
            (segment / "in-the-way").mkdir(parents=True)

    def after_strike(self, lane, which):
        for segment in self.blocked:
            shutil.rmtree(segment)


class SlowRepair(Repair):
    name = "a slow repair"
    steps = ("renew_claim",)
    victim_env = {"BALLAST_STEP_DELAY_MS": "3000"}


class RepairWithoutNode(Repair):
    """The node goes away once the repair is wanted."""

    name = "a repair while the node is away"
    steps = ("park_operation",)
    begins_first = True

    def begin(self, lane, which):
        operation_id = self.ask(lane, which)
        lane.node.kill()
        return operation_id

    def after_strike(self, lane, which):
        lane.node.start()


class RepairOfNothing(Repair):
    """Everything is gone by the time the repair begins."""

    name = "a repair of bytes that are gone"
    steps = ("revision_degraded",)
    ends = ("FAILED", "SUPERSEDED")
    victim_env = WITHOUT_WATCH
    begins_first = True

    def begin(self, lane, which):
        operation_id = self.ask(lane, which)
        lane.node.kill()
        for segment in lane.cold_segments():
            segment.unlink()
        lane.node.start()
        lane.wait_for_node()
        return operation_id

    def finish(self, lane, which, operation_id):
        wait_until(lambda: lane.metadata(which)["availability"] == "DEGRADED", END_S, "the loss is told")

    def survivors(self, which):
        return []


class RepairWanted(Repair):
    """The watch dies when it asks for the repair: another asks."""

    name = "a loss that can be mended"
    machine = "loss"
    steps = ("start_repair",)

    def begin(self, lane, which):
        return None

    def finish(self, lane, which, operation_id):
        ends(lane, self, Repair.begin(self, lane, which))


class Loss(Story):
    """The watch dies when it tells that nothing is readable any more."""

    name = "a loss of everything"
    machine = "loss"
    steps = ("revision_degraded",)

    def prepare(self, lane, which):
        lane.put(which)

    def before_victim(self, lane, which):
        lane.lose_memory()

    def begin(self, lane, which):
        return None

    def finish(self, lane, which, operation_id):
        wait_until(lambda: lane.metadata(which)["availability"] == "DEGRADED", END_S, "the loss is told")


class Recovery(Loss):
    """A node that was away for long comes back."""

    name = "a node that comes back"
    steps = ("revision_recovered",)

    def prepare(self, lane, which):
        super().prepare(lane, which)
        lane.node.kill()
        Loss.finish(self, lane, which, None)

    def before_victim(self, lane, which):
        lane.node.start()
        lane.wait_for_node()

    def finish(self, lane, which, operation_id):
        wait_until(lambda: lane.metadata(which)["availability"] == "READY", END_S, "the recovery is told")

    def survivors(self, which):
        return [(which, "HOT", "base")]


class Deletion(Story):
    name = "deletion"
    machine = "deletion"
    steps = ("claim", "raise_fence", "delete_units", "operation_advanced", "delete_instance", "deletion_finished")

    def prepare(self, lane, which):
        lane.put(which)
        lane.migrate(which, "MIXED")
        lane.settled(which)

    def begin(self, lane, which):
        return lane.remove(which)


class SlowDeletion(Deletion):
    name = "a slow deletion"
    steps = ("renew_claim",)
    victim_env = {"BALLAST_STEP_DELAY_MS": "3000"}


class DeletionWithoutNode(WithoutNode, Deletion):
    name = "a deletion while its node is away"
    steps = ("park_operation",)


class DeletionOnBadDisk(Deletion):
    """A file can not be deleted at first: a folder stands in its place."""

    name = "a deletion on a disk that refuses"
    steps = ("operation_attempt_failed",)

    def before_victim(self, lane, which):
        self.moved = []
        for segment in lane.cold_segments():
            away = lane.folder / f"away-{uuid.uuid4()}"
            segment.rename(away)
            (segment / "in-the-way").mkdir(parents=True)
            self.moved.append((segment, away))
        if not self.moved:
            raise Failure("no file of the revision was found on disk")

    def after_strike(self, lane, which):
        for segment, away in self.moved:
            shutil.rmtree(segment, ignore_errors=True)
            if segment.parent.exists():
                away.rename(segment)


class ExpiredImport(Story):
    """An importer dies in the middle; its session lapses and what it wrote is cleaned up."""

    name = "an import that lapsed"
    machine = "deletion"
    steps = ("claim", "raise_fence", "delete_instance", "deletion_finished")

    def begin(self, lane, which):
        importer = lane.cli.start("put", lane.models["large"], name_of(which))
        try:
            wait_until(lambda: any(lane.cluster.memory_dirs[0].rglob("segment-*")), 30, "the node receives the import", poll_s=0.002)
        finally:
            importer.send_signal(signal.SIGKILL)
            importer.communicate()
        found = wait_until(lambda: (found := lane.metadata(which))["availability"] != "IMPORTING" and found, 60, "the session lapses")
        return found["operation_id"] or cleanup_of(lane, found)


def cleanup_of(lane, metadata):
    """The id of the deletion that has ended already."""
    return next(one["operation_id"] for one in operations(lane) if one["kind"] == "DELETING" and one["instance"] == metadata["instance"])


def operations(lane):
    return lane.verbs.steady("list_operations", {"all": True, "limit": 1000})["operations"]


class Replacement(Story):
    machine = "replacement"

    def target(self, which):
        return {**which, "weight_generation": 2}

    def prepare(self, lane, which):
        lane.put(which)

    def upsert(self, lane, which, mode):
        body = {"base": which, "target": self.target(which), "mode": mode, "replacement_request_id": "sweep",
                "expected_metadata_generation": lane.metadata(which)["metadata_generation"]}
        return lane.verbs.steady("upsert", body)["claim"]["operation_id"]

    def completed(self, lane, which):
        wait_until(lambda: lane.verbs.steady("get_upsert", {"identity": which})["claim"]["phase"] == "COMPLETED", END_S, "the claim completes")
        if lane.metadata(which)["availability"] != "DELETED" or lane.verbs.view(self.target(which))["watermark"] != 2:
            raise Failure("the replacement completed, but the base is there or the watermark is not the target's")

    def mortal(self, which):
        return [which, self.target(which)]


class PutFirst(Replacement):
    name = "PUT_FIRST"
    steps = ("claim", "raise_fence", "copy_to_cold", "operation_advanced", "replacement_advanced")

    def begin(self, lane, which):
        operation_id = self.upsert(lane, which, "PUT_FIRST")
        lane.put(self.target(which), "next")
        return operation_id

    def finish(self, lane, which, operation_id):
        self.completed(lane, which)

    def survivors(self, which):
        return [(self.target(which), "HOT", "next")]


class SlowPutFirst(PutFirst):
    name = "a slow PUT_FIRST"
    steps = ("renew_claim",)
    victim_env = {"BALLAST_STEP_DELAY_MS": "3000"}


class PutFirstUnderLease(PutFirst):
    """The base is being read when the target is READY."""

    name = "PUT_FIRST while the base is read"
    steps = ("replacement_advanced",)

    def begin(self, lane, which):
        self.lease = {"identity": which, "lease_id": str(uuid.uuid4())}
        lane.verbs.steady("acquire_lease", {**self.lease, "ttl_ms": 600_000})
        return super().begin(lane, which)

    def after_strike(self, lane, which):
        if lane.metadata(which)["availability"] != "READY":
            raise Failure("the base went under an active lease")
        lane.verbs.steady("release_lease", self.lease)


class PutFirstWithoutNode(PutFirst):
    """The node goes away once the target is READY."""

    name = "PUT_FIRST while the node is away"
    steps = ("park_operation",)
    begins_first = True

    def begin(self, lane, which):
        operation_id = super().begin(lane, which)
        lane.node.kill()
        return operation_id

    def after_strike(self, lane, which):
        lane.node.start()


class PutFirstToFullDisk(FullDisk, PutFirst):
    name = "PUT_FIRST with a full disk"
    steps = ("operation_attempt_failed",)

    def prepare(self, lane, which):
        super().prepare(lane, which)
        self.fill(lane, which)

    def finish(self, lane, which, operation_id):
        FullDisk.finish(self, lane, which, operation_id)
        self.completed(lane, which)


class PutFirstOfLostTarget(PutFirst):
    """The target is READY and then lost, before it was safe: the base is given back."""

    name = "PUT_FIRST with a target that is lost"
    steps = ("revision_degraded",)
    victim_env = WITHOUT_WATCH
    begins_first = True
    ends = ("FAILED", "SUPERSEDED", "CANCELLED")

    def prepare(self, lane, which):
        super().prepare(lane, which)
        lane.migrate(which, "COLD")
        lane.settled(which)

    def begin(self, lane, which):
        operation_id = super().begin(lane, which)
        lane.lose_memory()
        return operation_id

    def finish(self, lane, which, operation_id):
        wait_until(lambda: lane.metadata(self.target(which))["availability"] == "DEGRADED", END_S, "the loss is told")
        lane.verbs.steady("abort_upsert", {"identity": which, "replacement_request_id": "sweep"})

    def survivors(self, which):
        return [(which, "COLD", "base")]


class DeleteFirst(Replacement):
    """The replacement itself is only moved by the fold; what a worker does is the deletion of its base."""

    name = "DELETE_FIRST"
    machine = "deletion"
    steps = Deletion.steps

    def begin(self, lane, which):
        self.upsert(lane, which, "DELETE_FIRST")
        metadata = lane.metadata(which)
        return metadata["operation_id"] or cleanup_of(lane, metadata)

    def finish(self, lane, which, operation_id):
        wait_until(lambda: lane.metadata(which)["availability"] == "DELETED", END_S, "the base is deleted")
        lane.put(self.target(which), "next")
        self.completed(lane, which)

    def survivors(self, which):
        return [(self.target(which), "HOT", "next")]


class OnNode:
    """The node dies instead of the worker."""

    machine = "node"


class NodeDemotes(OnNode, Migration):
    def __init__(self):
        super().__init__("HOT", "COLD", ("inventory", "affinity_index", "raise_fence", "copy_to_cold", "release_memory"))
        self.name = "HOT to COLD, the node dies"


class NodePromotes(OnNode, Migration):
    def __init__(self):
        super().__init__("COLD", "HOT", ("copy_to_memory",))
        self.name = "COLD to HOT, the node dies"


class NodeDeletes(OnNode, Deletion):
    name = "deletion, the node dies"
    steps = ("delete_units", "delete_instance")


class NodeReceives(OnNode, Story):
    """The node dies when it is asked what it sealed: the import is not published, and the same command again publishes it."""

    name = "put, the node dies"
    steps = ("receipt",)

    def begin(self, lane, which):
        self.importer = lane.cli.start("-o", "json", "put", lane.models["base"], name_of(which), "--preferred", "hot", "--mode", "manual")

    def finish(self, lane, which, operation_id):
        self.importer.communicate(timeout=END_S)
        repeat = ("put", lane.models["base"], name_of(which), "--preferred", "hot", "--mode", "manual")
        wait_until(lambda: lane.cli.run(*repeat).returncode == 0, END_S, "the same put succeeds", poll_s=0.2)

    def survivors(self, which):
        return [(which, "HOT", "base")]


class NodeVerifies(OnNode, Story):
    """The node dies while it reads its copies back for somebody who asked."""

    name = "verify, the node dies"
    steps = ("verify",)

    def prepare(self, lane, which):
        lane.put(which)

    def begin(self, lane, which):
        self.asker = lane.cli.start("verify", name_of(which))

    def finish(self, lane, which, operation_id):
        self.asker.communicate(timeout=END_S)
        wait_until(lambda: lane.cli.run("verify", name_of(which)).returncode == 0, END_S, "the same question is answered", poll_s=0.2)

    def survivors(self, which):
        return [(which, "HOT", "base")]


STORIES = [
    # The longest first.
    ExpiredImport, *[lambda origin=origin, target=target: Migration(origin, target) for origin, target in [("HOT", "COLD"), ("COLD", "HOT"), ("HOT", "MIXED"), ("COLD", "MIXED")]],
    Deletion, PutFirst, DeleteFirst, SlowMigration, SlowDeletion, SlowPutFirst, MigrationWithoutNode, DeletionWithoutNode,
    MigrationToFullDisk, DeletionOnBadDisk, PutFirstToFullDisk, PutFirstUnderLease, PutFirstWithoutNode, MigrationOfLostBytes, PutFirstOfLostTarget,
    Repair, RepairOfDisk, RepairOnBadDisk, SlowRepair, RepairWithoutNode, RepairOfNothing, RepairWanted, Loss, Recovery,
    NodeDemotes, NodePromotes, NodeDeletes, NodeReceives, NodeVerifies,
]


class Watcher:
    """Looks at one operation all the time; its progress may only grow."""

    def __init__(self, lane, operation_id):
        self.verbs = lane.verbs
        self.operation_id = operation_id
        self.last = None
        self.wrong = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self):
        if self.operation_id:
            self.thread.start()
        return self

    def run(self):
        while not self.stop.wait(0.03):
            with contextlib.suppress(NoAnswer, VerbError):
                self.see(self.verbs.call("get_operation", {"operation_id": self.operation_id}, timeout_s=1)["operation"])

    def see(self, now):
        grows = ("epoch", "cursor", "processed_units", "processed_bytes")
        fallen = [part for part in grows if self.last and now[part] < self.last[part]]
        if fallen and self.wrong is None:
            self.wrong = f"{fallen} fell: {self.last} became {now}"
        self.last = now

    def __exit__(self, *_):
        self.stop.set()
        if self.operation_id:
            self.thread.join(5)


def play(lane, point):
    """Plays a story with its process killed at one point, and checks everything that has to hold."""
    story = point.story
    which = identity(f"sweep-{next(lane.numbers)}")
    files, inventories = lane.files(), lane.inventories()
    struck = lane.folder / f"struck-{which['resource_id']}"
    failpoint = {"BALLAST_FAILPOINT": point.failpoint, "BALLAST_FAILPOINT_FILE": str(struck)}
    with lane.worker():
        story.prepare(lane, which)
    story.before_victim(lane, which)
    if isinstance(story, OnNode):
        operation_id, watcher = play_on_node(lane, point, which, struck, failpoint)
    else:
        operation_id, watcher = play_on_worker(lane, point, which, struck, failpoint)
    with lane.worker():
        check_end(lane, story, which, operation_id)
        clear(lane, story, which)
    if watcher.wrong:
        raise Failure(watcher.wrong)
    wait_until(lambda: lane.files() == files, 30, lambda: f"the tiers hold what they held before: {difference(files, lane.files())}")
    wait_until(lambda: lane.inventories() == inventories, 30, lambda: f"no inventory is left: {lane.inventories() ^ inventories}")


def play_on_worker(lane, point, which, struck, failpoint):
    story = point.story
    operation_id = story.begin(lane, which) if story.begins_first else None
    with lane.worker({**failpoint, **story.victim_env}) as victim:
        operation_id = operation_id or story.begin(lane, which)
        with Watcher(lane, operation_id) as watcher:
            died(victim, struck, point)
            story.after_strike(lane, which)
            for revision, _, model in story.survivors(which):
                # Nothing readable is lost while nobody goes on.
                if (found := lane.verbs.find(revision)) and found["availability"] == "READY":
                    identical(lane, revision, model)
            with lane.worker():
                story.finish(lane, which, operation_id)
                ends(lane, story, operation_id)
    return operation_id, watcher


def play_on_node(lane, point, which, struck, failpoint):
    story = point.story
    lane.node.kill()
    lane.node.env.update(failpoint)
    try:
        lane.node.start()
    finally:
        for name in failpoint:
            lane.node.env.pop(name)
    lane.wait_for_node()
    with lane.worker():
        operation_id = story.begin(lane, which)
        with Watcher(lane, operation_id) as watcher:
            died(lane.node, struck, point)
            lane.node.start()
            story.finish(lane, which, operation_id)
            ends(lane, story, operation_id)
    return operation_id, watcher


def died(service, struck, point):
    wait_until(lambda: not service.running, STRIKE_S, f"{point} strikes")
    if service.process.returncode != -signal.SIGKILL or not struck.exists():
        raise Failure(f"{service.name} ended with {service.process.returncode}, not by the failpoint:\n{service.output()[-2000:]}")


def ends(lane, story, operation_id):
    """The operation ends under the id that it had, and nobody started another instead."""
    if operation_id is None:
        return
    operation = wait_until(lambda: (found := lane.verbs.operation(operation_id))["status"] in TERMINAL and found, END_S, f"operation {operation_id} ends")
    if operation["status"] not in story.ends:
        raise Failure(f"the operation ended as {operation['status']}, expected {story.ends}: {operation}")
    alike = ("kind", "identity", "instance", "target", "trigger")
    same = [one["operation_id"] for one in operations(lane) if all(one[part] == operation[part] for part in alike)]
    if same != [operation_id]:
        raise Failure(f"{operation['kind']} was to be one operation, {operation_id}; found {same}")


def check_end(lane, story, which, operation_id):
    for revision, residency, model in story.survivors(which):
        metadata = lane.settled(revision)
        if (metadata["availability"], metadata["residency"]) != ("READY", residency):
            raise Failure(f"{name_of(revision)} is {metadata['availability']} and {metadata['residency']}, expected READY and {residency}")
        identical(lane, revision, model)


def identical(lane, revision, model):
    to = lane.folder / f"get-{next(lane.numbers)}"
    lane.cli.json("get", name_of(revision), "--to", to)
    weights.compare(weights.fingerprints(lane.models[model]), to)
    shutil.rmtree(to)


def clear(lane, story, which):
    """Removes what the story made; the lane is afterwards as it was."""
    for revision in story.mortal(which):
        found = lane.verbs.find(revision)
        if found is None or found["availability"] == "DELETED":
            continue
        if found["availability"] != "DELETING":
            lane.settled(revision)
            lane.remove(revision)
        wait_until(lambda: lane.metadata(revision)["availability"] == "DELETED", END_S, f"{name_of(revision)} is deleted")


def difference(before, after):
    return {path: (before.get(path), after.get(path)) for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def make_models(folder):
    def model(name, layout, seed):
        return weights.write(folder / name / "model.safetensors", weights.random_tensors(layout, seed))
    return {
        "base": model("base", [(f"w{n:03}", (16, 256)) for n in range(UNITS)], 1),
        "next": model("next", [(f"w{n:03}", (16, 256)) for n in range(UNITS)], 2),
        "filler": model("filler", [(f"w{n:03}", (256, 1024)) for n in range(39)], 3),
        "large": model("large", [(f"w{n:03}", (256, 1024)) for n in range(64)], 4),
    }


def failpoints(binary):
    """Every failpoint that the binary has."""
    return json.loads(subprocess.run([binary, "-o", "json", "failpoints"], capture_output=True, text=True, check=True).stdout)


def all_points(binary):
    """Every point of every story; Failure when a step of the code is in none, or a story names a step that is not there."""
    there = failpoints(binary)
    points = []
    for make in STORIES:
        for step in make().steps:
            story = make()
            found = [place.rsplit(".", 1)[1] for place in there if place.startswith(f"{story.machine}.{step}.")]
            if not found:
                raise Failure(f"{story.name} names the step {story.machine}.{step}, which `ballast failpoints` does not have")
            points += [Point(make(), story.machine, step, when) for when in found]
    missed = sorted(set(there) - {point.failpoint for point in points})
    if missed:
        raise Failure(f"no story strikes {missed}: write one in ops/crash_sweep.py")
    return points


class Sweep:
    """Plays points on several clusters at once."""

    def __init__(self, folder, binary, points, lanes):
        self.folder, self.binary = pathlib.Path(folder), binary
        self.models = make_models(self.folder / "models")
        self.points = queue.Queue()
        for point in points:
            self.points.put(point)
        self.done, self.failed = [], []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.run_lane, args=(n,)) for n in range(min(lanes, len(points)))]

    def run(self):
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join()
        return self

    def run_lane(self, number):
        lane, generation = None, 0
        try:
            while True:
                point = self.points.get_nowait()
                start = time.monotonic()
                try:
                    lane = lane or Lane(self.folder / f"lane-{number}-{generation}", self.binary, self.models)
                    play(lane, point)
                    self.tell(point, time.monotonic() - start, None)
                except Exception as error:
                    self.tell(point, time.monotonic() - start, error)
                    # What a failed point left behind must not fail the next.
                    if lane:
                        lane.close()
                    lane, generation = None, generation + 1
        except queue.Empty:
            pass
        finally:
            if lane:
                lane.close()

    def tell(self, point, seconds, error):
        with self.lock:
            self.done.append({"machine": point.machine, "step": point.step, "when": point.when, "resumed": error is None, "story": point.story.name, "seconds": round(seconds, 1)})
            print(f"{'ok  ' if error is None else 'FAIL'} {seconds:5.1f} s  {point}", flush=True)
            if error is not None:
                self.failed.append(point)
                print("".join(traceback.format_exception(error)), flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--lanes", type=int, default=4, help="clusters that play at once")
    arguments.add_argument("--only", default="", help="points in whose name or story this regular expression is found")
    arguments.add_argument("--binary", default=ROOT / "target/debug/ballast", type=pathlib.Path)
    options = arguments.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ballast-sweep-"))
    start = time.monotonic()
    try:
        points = [point for point in all_points(options.binary) if re.search(options.only, str(point))]
        sweep = Sweep(folder, options.binary, points, options.lanes).run()
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    finally:
        logs = OUT / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        for lane in folder.glob("lane-*"):
            shutil.copytree(lane / "logs", logs / lane.name)
        shutil.rmtree(folder, ignore_errors=True)
    (OUT / "summary.json").write_text(json.dumps({"points": sweep.done}, indent=1) + "\n")
    print(f"{len(sweep.done) - len(sweep.failed)} of {len(points)} points resumed in {time.monotonic() - start:.0f} s; target/crash-sweep/summary.json")
    return 1 if sweep.failed or len(sweep.done) != len(points) else 0


if __name__ == "__main__":
    sys.exit(main())

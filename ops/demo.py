#!/usr/bin/env python3
"""The main job, end to end, on a real model: `make demo`.

Starts nats-server, a gateway, two workflow workers and a transfer worker as processes of their own, and takes a model
through its whole life: put, convergence, get, migration, a worker killed in the middle of one, both kinds of replacement, a
kill of server and gateway, removal. Every step shows what it found and how long it took; every get is compared with the
original, tensor by tensor, through the `safetensors` package. State is looked at through the verbs over NATS, not
through the command that changed it. The result stands in target/demo/summary.json; the exit code is 0 only if every step
held.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import weights
from cluster import ROOT, Cluster, CommandFailed, Failure, footprint, wait_until
from verbs import VerbError, Verbs, identity

NAME = "minilm"
TAKEOVER_S = 10
CONVERGENCE_S = 300
DRAIN_WATCHED_S = 3
# Pause before each step of the workers of one demonstration, so that a migration has a middle to be interrupted in.
STEP_DELAY_MS = 400
TERMINAL = {"SUCCEEDED", "FAILED", "CANCELLED", "SUPERSEDED"}


def megabytes(count):
    return f"{count / 1e6:.1f} MB"


def expect(holds, sentence):
    if not holds:
        raise Failure(sentence)


class Demo:
    def __init__(self, model, binary, folder):
        self.binary = binary
        self.folder = folder
        self.model = model
        self.steps = []
        self.cluster = None
        self.verbs = None
        self.watch = None
        self.reader = None
        self.originals = {}
        self.generations = {n: identity(NAME, n) for n in (1, 2, 3)}

    # -- the frame around every step

    @contextlib.contextmanager
    def step(self, name):
        print(f"\n▶ {name}", flush=True)
        details = {}
        start = time.monotonic()
        record = {"name": name, "ok": False, "seconds": 0.0, "details": details}
        self.steps.append(record)
        try:
            yield details
            record["ok"] = True
        except BaseException as error:
            details["error"] = str(error) or type(error).__name__
            raise
        finally:
            record["seconds"] = round(time.monotonic() - start, 3)
            for key, value in details.items():
                print(f"    {key.replace('_', ' ')}: {value}", flush=True)
            print(f"  {'✓' if record['ok'] else '✗'} {record['seconds']:.2f} s", flush=True)

    def run(self):
        self.fetch()
        self.start()
        self.put()
        self.converge()
        self.get_back()
        self.migrate_cold()
        self.get_from_cold()
        self.kill_worker()
        self.open_reader()
        self.replace_put_first()
        self.release_reader()
        self.replace_delete_first()
        self.kill_server_and_gateway()
        self.remove()
        self.events()

    # -- what several steps do

    def finished(self, operation_id, deadline_s=CONVERGENCE_S):
        operation = wait_until(
            lambda: (found := self.verbs.operation(operation_id))["status"] in TERMINAL and found,
            deadline_s, f"operation {operation_id} ends", poll_s=0.05)
        expect(operation["status"] == "SUCCEEDED", f"operation {operation_id} ended as {operation['status']}: {operation['last_error']}")
        return operation

    def settled(self, generation):
        """The metadata once no operation is active on the revision."""
        return wait_until(lambda: (found := self.verbs.metadata(self.generations[generation]))["operation_id"] is None and found,
                          CONVERGENCE_S, f"generation {generation} has no active operation", poll_s=0.05)

    def get_and_compare(self, generation, details):
        out = self.folder / f"out-{len(list(self.folder.glob('out-*')))}"
        start = time.monotonic()
        reply = self.cluster.cli.json("get", f"{NAME}#{generation}", "--to", out, timeout_s=600)
        details["get_seconds"] = round(time.monotonic() - start, 3)
        details["get_gb_per_s"] = round(reply["bytes"] / reply["seconds"] / 1e9, 3) if reply["seconds"] else None
        details["tensors_identical"] = weights.compare(self.originals[generation], out)
        source = self.source(generation)
        for name, content in weights.other_files(source).items():
            back = out / name
            expect(back.is_file() and back.read_bytes() == content, f"{name} did not come back as it was put")
        details["other_files_identical"] = len(weights.other_files(source))
        shutil.rmtree(out)

    def source(self, generation):
        return self.model if generation == 1 else self.folder / f"generation-{generation}"

    def tiers(self):
        return {"memory_bytes": sum(footprint(*self.cluster.memory_dirs).values()),
                "cold_bytes": sum(footprint(*self.cluster.cold_dirs).values())}

    def workflow_workers(self, delay_ms):
        """Replaces the workflow workers by two new ones that pause `delay_ms` before each step."""
        for worker in self.cluster.workflow_workers:
            worker.stop()
        env = {"BALLAST_STEP_DELAY_MS": str(delay_ms)} if delay_ms else {}
        batch = len(self.cluster.retired_workers)
        self.cluster.retired_workers += self.cluster.workflow_workers
        self.cluster.workflow_workers = [self.cluster.new_workflow_worker(f"workflow-{batch + n}", env) for n in range(2)]
        for worker in self.cluster.workflow_workers:
            worker.start()

    # -- the steps

    def fetch(self):
        with self.step("fetch the model") as details:
            if self.model is None:
                self.model = weights.fetch_minilm()
            self.originals[1] = weights.fingerprints(self.model)
            self.model_bytes = weights.payload_bytes(self.model)
            details["model"] = os.path.relpath(self.model, ROOT)
            details["tensors"] = len(self.originals[1])
            details["bytes"] = self.model_bytes
        for generation in (2, 3):
            with self.step(f"make other weights for generation {generation}") as details:
                weights.change(self.model, self.folder / f"generation-{generation}", seed=generation)
                self.originals[generation] = weights.fingerprints(self.source(generation))
                details["tensors_changed"] = sum(self.originals[generation][name] != self.originals[generation - 1][name] for name in self.originals[1])
                expect(details["tensors_changed"] > 0, "no tensor changed")

    def start(self):
        with self.step("start nats-server, a gateway, two workflow workers and a transfer worker") as details:
            # Two whole generations stand side by side in a PUT_FIRST replacement.
            memory = max(512 << 20, int(self.model_bytes * 2.5) + (64 << 20))
            self.cluster = Cluster(self.folder, self.binary, gateways=1, workflow_workers=2, transfer_workers=1, memory_bytes=memory)
            self.cluster.start()
            self.verbs = Verbs(self.cluster.url)
            status = self.verbs.steady("status")
            self.cluster_id = status["cluster_id"]
            wait_until(lambda: self.verbs.steady("status")["nodes"], 20, "the gateway hears of the node")
            node = self.verbs.steady("status")["nodes"][0]
            self.watch_log = open(self.folder / "events.jsonl", "wb")
            self.watch = self.cluster.cli.start("-o", "json", "watch", "--from-start", stdout=self.watch_log, stderr=self.watch_log, start_new_session=True)
            details["cluster"] = self.cluster_id
            details["memory_tier"] = f"{memory >> 20} MiB, {node['memory_kind']}"
            details["cold_tier"] = node["cold_engine"]
            details["processes"] = {service.name: service.pid for service in self.cluster.services}
            self.empty = footprint(*self.cluster.memory_dirs, *self.cluster.cold_dirs)

    def put(self):
        with self.step("put generation 1 with the default policy: READY and HOT at once") as details:
            reply = self.cluster.cli.json("put", self.model, NAME, timeout_s=600)
            metadata = reply["metadata"]
            expect(metadata["availability"] == "READY" and metadata["residency"] == "HOT",
                   f"after put it is {metadata['availability']} and {metadata['residency']}, not READY and HOT")
            expect(self.verbs.steady("is_exist", {"identity": self.generations[1]})["exists"], "is_exist says no after put")
            expect(metadata["policy"] == {"preferred_residency": "MIXED", "mixed_hot_ratio": 0.5, "migration_mode": "AUTO"},
                   f"the default policy is {metadata['policy']}")
            expect(metadata["operation_id"], "no operation converges it to its preferred residency")
            self.initial_operation = metadata["operation_id"]
            details["identity"] = "{namespace}/{resource_id}@{revision}#{weight_generation}".format(**metadata["identity"])
            details["availability"], details["residency"] = metadata["availability"], metadata["residency"]
            details["put_seconds"] = reply["seconds"]
            details["put_gb_per_s"] = round(reply["bytes"] / reply["seconds"] / 1e9, 3)
            details["units"] = metadata["manifest"]["affinity_count"]
            details["converges_by"] = self.initial_operation

    def converge(self):
        with self.step("it converges to MIXED by itself") as details:
            operation = self.finished(self.initial_operation)
            metadata = self.verbs.metadata(self.generations[1])
            ratio = metadata["observed_hot_ppm"] / 1e6
            expect(metadata["residency"] == "MIXED" and 0 < ratio < 1, f"it is {metadata['residency']} with {ratio} hot")
            expect(operation["trigger"] == "INITIAL", f"the operation was started by {operation['trigger']}")
            details["residency"], details["hot_ratio"] = metadata["residency"], ratio
            details["operation"] = operation["operation_id"]
            details.update(self.tiers())

    def get_back(self):
        with self.step("get it back: every tensor as in the original") as details:
            self.get_and_compare(1, details)

    def migrate_cold(self):
        with self.step("migrate to COLD") as details:
            self.settled(1)
            before = self.tiers()
            operation = self.cluster.cli.json("migrate", f"{NAME}#1", "cold", "--wait", timeout_s=CONVERGENCE_S)
            expect(operation["status"] == "SUCCEEDED", f"the migration ended as {operation['status']}: {operation['last_error']}")
            metadata = self.verbs.metadata(self.generations[1])
            expect(metadata["residency"] == "COLD" and metadata["observed_hot_ppm"] == 0,
                   f"it is {metadata['residency']} with {metadata['observed_hot_ppm'] / 1e6} hot")
            after = self.tiers()
            expect(after["memory_bytes"] < before["memory_bytes"], f"memory still holds {after['memory_bytes']} of {before['memory_bytes']} bytes")
            expect(after["cold_bytes"] >= self.model_bytes, f"the cold tier holds {after['cold_bytes']} bytes of a model of {self.model_bytes}")
            details["residency"] = metadata["residency"]
            details["operation"] = operation["operation_id"]
            details["memory_bytes_before"], details["memory_bytes_after"] = before["memory_bytes"], after["memory_bytes"]
            details["cold_bytes_after"] = after["cold_bytes"]

    def get_from_cold(self):
        with self.step("get it from COLD: identical, and the access starts its promotion") as details:
            self.get_and_compare(1, details)
            metadata = self.verbs.metadata(self.generations[1])
            expect(metadata["operation_id"], "the access started no promotion")
            operation = self.verbs.operation(metadata["operation_id"])
            expect(operation["trigger"] == "ACCESS" and operation["target"] == "MIXED",
                   f"the operation is to {operation['target']}, started by {operation['trigger']}")
            details["promotion"] = operation["operation_id"]
            details["trigger"] = operation["trigger"]
            details["waits_for"] = operation["park_reason"]
            self.promotion = operation["operation_id"]
        with self.step("the promotion brings it back to MIXED") as details:
            operation = self.finished(self.promotion)
            metadata = self.verbs.metadata(self.generations[1])
            expect(metadata["residency"] == "MIXED", f"it is {metadata['residency']}")
            details["residency"], details["hot_ratio"] = metadata["residency"], metadata["observed_hot_ppm"] / 1e6

    def kill_worker(self):
        with self.step("kill -9 the workflow worker in the middle of a migration: another finishes the same operation") as details:
            self.settled(1)
            # From COLD, so that every unit is still to be moved and the middle is a real one.
            self.cluster.cli.json("migrate", f"{NAME}#1", "cold", "--wait", timeout_s=CONVERGENCE_S)
            self.workflow_workers(STEP_DELAY_MS)
            operation_id = self.cluster.cli.json("migrate", f"{NAME}#1", "hot")["operation_id"]

            def in_the_middle():
                operation = self.verbs.operation(operation_id)
                expect(operation["status"] not in TERMINAL, f"the migration ended as {operation['status']} before it could be interrupted")
                return operation["status"] == "CLAIMED" and operation["worker"] and operation["processed_units"] > 0 and operation
            before = wait_until(in_the_middle, 60, "the migration is in its middle", poll_s=0.01)
            victim = next((worker for worker in self.cluster.workflow_workers if worker.name in before["worker"]), None)
            expect(victim, f"the operation is claimed by {before['worker']}, which is none of ours")
            victim.kill()
            killed_at = time.monotonic()

            def taken_over():
                operation = self.verbs.operation(operation_id)
                return operation["epoch"] > before["epoch"] and operation
            taken = wait_until(taken_over, 30, "another worker takes the operation over", poll_s=0.02)
            takeover_s = time.monotonic() - killed_at
            expect(taken["worker"] != before["worker"], f"the killed worker {before['worker']} has claimed it again")
            expect(taken["cursor"] >= before["cursor"], f"the cursor went back from {before['cursor']} to {taken['cursor']}")
            expect(takeover_s <= TAKEOVER_S, f"the takeover took {takeover_s:.1f} s")
            operation = self.finished(operation_id)
            metadata = self.verbs.metadata(self.generations[1])
            expect(metadata["residency"] == "HOT", f"it is {metadata['residency']}")
            details["operation_before_the_kill"] = operation_id
            details["operation_after_the_kill"] = operation["operation_id"]
            details["killed_worker"], details["finished_by"] = before["worker"], taken["worker"]
            details["epochs"] = [before["epoch"], operation["epoch"]]
            details["cursor_at_kill"], details["units_at_kill"] = before["cursor"], f"{before['processed_units']} of {before['total_units']}"
            details["takeover_seconds"] = round(takeover_s, 2)
            details["residency"] = metadata["residency"]
            self.workflow_workers(0)
            self.get_and_compare(1, details)

    def open_reader(self):
        with self.step("a reader maps generation 1 without copying and holds its lease") as details:
            self.reader_log = open(self.folder / "reader.log", "w+")
            self.reader = self.cluster.cli.start("open", f"{NAME}#1", stdin=subprocess.PIPE, stdout=self.reader_log, stderr=subprocess.STDOUT, start_new_session=True)
            path = self.folder / "reader.log"

            def mapped():
                expect(self.reader.poll() is None, f"the reader ended: {path.read_text()}")
                return re.search(r"^open: .*", path.read_text(), re.M)
            line = wait_until(mapped, 30, "the reader has mapped the model")
            leases = self.verbs.view(self.generations[1])["active_lease_count"]
            expect(leases == 1, f"{leases} leases are active, not the reader's one")
            details["reader_says"] = line.group(0)
            details["active_leases"] = leases
            details["tensors_in_its_mappings"] = self.tensors_mapped_by_reader()

    def tensors_mapped_by_reader(self):
        """Looks into the reader's own mappings of the memory tier, and finds every tensor of generation 1 there."""
        pid = self.reader.pid
        folders = tuple(str(folder) for folder in self.cluster.memory_dirs)
        expected = {name: array.tobytes() for name, array in weights.read(self.model)}
        waiting = {}
        for name, content in expected.items():
            waiting.setdefault(content[:64], []).append(name)
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in maps:
                fields = line.split(maxsplit=5)
                if len(fields) < 6 or not fields[5].startswith(folders):
                    continue
                expect("w" not in fields[1], f"the reader has a writable mapping of {fields[5]}")
                begin, end = (int(part, 16) for part in fields[0].split("-"))
                memory.seek(begin)
                region = bytearray()
                while len(region) < end - begin and (piece := memory.read(min(1 << 26, end - begin - len(region)))):
                    region += piece
                # Units stand at multiples of 4 KiB.
                for at in range(0, len(region), 4096):
                    candidates = waiting.get(bytes(region[at:at + 64]), ())
                    for name in [name for name in candidates if region[at:at + len(expected[name])] == expected[name]]:
                        candidates.remove(name)
        missing = [name for names in waiting.values() for name in names if len(expected[name]) >= 64]
        expect(not missing, f"{len(missing)} tensors are not in the reader's mappings: {missing[:3]}")
        return len(expected)

    def replace_put_first(self):
        with self.step("upsert generation 2 with PUT_FIRST while the reader holds its lease: the base stays readable") as details:
            reply = self.cluster.cli.json("upsert", self.source(2), f"{NAME}#2", "--replacing", "1", timeout_s=600)
            expect(reply["metadata"]["availability"] == "READY", f"generation 2 is {reply['metadata']['availability']}")
            claim = wait_until(lambda: (found := self.claim())["phase"] == "RETIRING_BASE" and found, 60, "the claim retires the base")
            end = time.monotonic() + DRAIN_WATCHED_S
            looks = 0
            while time.monotonic() < end:
                view = self.verbs.view(self.generations[1])
                expect(view["metadata"]["availability"] == "READY", f"the base is {view['metadata']['availability']} under an active lease")
                expect(view["active_lease_count"] == 1, f"the base has {view['active_lease_count']} leases")
                looks += 1
                time.sleep(0.1)
            expect(view["metadata"]["retired"], "the base is not retired")
            code, error, _ = self.cluster.cli.refusal("get", f"{NAME}#1", "--to", self.folder / "refused")
            details["request_id"] = claim["request_id"]
            details["phase"] = claim["phase"]
            details["base"] = f"{view['metadata']['availability']}, retired, seen so {looks} times in {DRAIN_WATCHED_S} s"
            details["a_new_reader_hears"] = f"{error['code']} (exit code {code}): {error['message']}"
            details["tensors_in_the_readers_mappings"] = self.tensors_mapped_by_reader()

    def claim(self):
        return self.verbs.steady("get_upsert", {"identity": self.generations[1]})["claim"]

    def release_reader(self):
        with self.step("the reader releases its lease: the base goes") as details:
            self.reader.stdin.close()
            code = self.reader.wait(30)
            expect(code == 0, f"the reader ended with exit code {code}: {(self.folder / 'reader.log').read_text()}")
            self.reader = None
            released = time.monotonic()
            wait_until(lambda: self.verbs.metadata(self.generations[1])["availability"] == "DELETED", 120, "the base is deleted", poll_s=0.05)
            details["base_gone_after_seconds"] = round(time.monotonic() - released, 2)
            claim = wait_until(lambda: (found := self.claim())["phase"] == "COMPLETED" and found, 60, "the claim completes")
            watermark = self.verbs.view(self.generations[2])["watermark"]
            expect(watermark == 2, f"the watermark is {watermark}, not 2")
            details["phase"], details["watermark"] = claim["phase"], watermark
            self.get_and_compare(2, details)

    def replace_delete_first(self):
        with self.step("upsert generation 3 with DELETE_FIRST") as details:
            self.settled(2)
            reply = self.cluster.cli.json("put", self.source(3), NAME, "--replace", "delete-first", timeout_s=600)
            expect(reply["identity"]["weight_generation"] == 3, f"put --replace made generation {reply['identity']['weight_generation']}")
            expect(reply["metadata"]["availability"] == "READY", f"generation 3 is {reply['metadata']['availability']}")
            base = self.verbs.metadata(self.generations[2])
            expect(base["availability"] == "DELETED", f"the base is {base['availability']}")
            claim = wait_until(lambda: (found := self.claim())["phase"] == "COMPLETED" and found, 60, "the claim completes")
            details["request_id"], details["mode"], details["phase"] = claim["request_id"], claim["mode"], claim["phase"]
            details["watermark"] = self.verbs.view(self.generations[3])["watermark"]
            expect(details["watermark"] == 3, f"the watermark is {details['watermark']}, not 3")
            self.get_and_compare(3, details)

    def state(self):
        return {
            "revisions": self.verbs.revisions(),
            "operations": self.verbs.steady("list_operations", {"all": True, "limit": 1000})["operations"],
            "watermark": self.verbs.view(self.generations[3])["watermark"],
            "cluster": {key: self.verbs.steady("status")[key] for key in ("cluster_id", "incarnation", "revisions")},
        }

    def kill_server_and_gateway(self):
        with self.step("kill -9 and restart the NATS server and the gateway: state unchanged") as details:
            self.settled(3)
            before = self.state()
            self.cluster.nats.kill()
            self.cluster.gateways[0].kill()
            killed_at = time.monotonic()
            self.cluster.nats.start()
            self.cluster.gateways[0].start()
            after = self.state()
            details["back_after_seconds"] = round(time.monotonic() - killed_at, 2)
            expect(before == after, f"the state differs: before {json.dumps(before)[:2000]}, after {json.dumps(after)[:2000]}")
            expect(after["cluster"]["cluster_id"] == self.cluster_id, "it is another cluster")
            details["revisions"], details["operations"] = len(after["revisions"]), len(after["operations"])
            self.get_and_compare(3, details)

    def remove(self):
        with self.step("remove: a tombstone stays, and no byte in memory or on disk") as details:
            self.settled(3)
            self.cluster.cli.json("rm", f"{NAME}#3", "--wait", timeout_s=CONVERGENCE_S)
            metadata = self.verbs.metadata(self.generations[3])
            expect(metadata["availability"] == "DELETED" and metadata["residency"] == "ABSENT", f"it is {metadata['availability']} and {metadata['residency']}")
            expect(not self.verbs.steady("is_exist", {"identity": self.generations[3]})["exists"], "is_exist says yes of a tombstone")
            code, error, _ = self.cluster.cli.refusal("get", f"{NAME}#3", "--to", self.folder / "refused")
            details["tombstone"] = f"{metadata['availability']} and {metadata['residency']} at metadata generation {metadata['metadata_generation']}"
            details["a_reader_hears"] = f"{error['code']} (exit code {code}): {error['message']}"

            def left():
                now = footprint(*self.cluster.memory_dirs, *self.cluster.cold_dirs)
                return {path: size - self.empty.get(path, 0) for path, size in now.items() if size > self.empty.get(path, 0)}
            with contextlib.suppress(Failure):
                wait_until(lambda: not left(), 10, "the folders are empty")
            remains = left()
            memory = tuple(str(folder) for folder in self.cluster.memory_dirs)
            details["memory_bytes_left"] = sum(size for path, size in remains.items() if path.startswith(memory))
            details["cold_bytes_left"] = sum(size for path, size in remains.items() if not path.startswith(memory))
            expect(not remains, f"left behind: {dict(list(remains.items())[:5])}")

    def events(self):
        with self.step("the events told all of it, in order") as details:
            def told():
                lines = (self.folder / "events.jsonl").read_text().splitlines()
                return [json.loads(line) for line in lines if line.startswith("{")]
            wait_until(lambda: any(event["event"] == "REVISION_DELETED" and generation_of(event) == 3 for event in told()), 30,
                       "the watch has told of the removal")
            events = told()
            positions = [(event["position"]["seq"], event["position"]["index"], event["n"]) for event in events]
            expect(positions == sorted(set(positions)), "the watch printed an event twice or out of order")
            for generation in (1, 2, 3):
                names = [event["event"] for event in events if "revision" in event and generation_of(event) == generation]
                for name in ("REVISION_READY", "REVISION_DELETING", "REVISION_DELETED"):
                    expect(name in names, f"no {name} of generation {generation} among {names}")
            ready = next(event["revision"] for event in events if event["event"] == "REVISION_READY" and generation_of(event) == 1)
            expect(ready["residency"] == "HOT", f"generation 1 became READY as {ready['residency']}, not HOT")
            phases = {}
            for event in events:
                if event["event"] == "CLAIM_PHASE":
                    phases.setdefault(event["claim"]["mode"], []).append(event["claim"]["phase"])
            for mode, wanted in (("PUT_FIRST", ["TARGET_IMPORTING", "RETIRING_BASE", "COMPLETED"]), ("DELETE_FIRST", ["DELETING_BASE", "TARGET_IMPORTING", "COMPLETED"])):
                seen = iter(phases.get(mode, []))
                expect(all(phase in seen for phase in wanted), f"the phases of {mode} were {phases.get(mode)}")
            started = {event["operation"]["operation_id"] for event in events if event["event"] == "OPERATION_STARTED"}
            ended = {event["operation"]["operation_id"] for event in events if event["event"] == "OPERATION_ENDED"}
            expect(self.initial_operation in started & ended, f"operation {self.initial_operation} did not start and end in the events")
            expect(started == ended, f"operations that only started: {started - ended}, only ended: {ended - started}")
            expect(any(event["event"] == "OPERATION_PROGRESS" for event in events), "no event tells of an operation's progress")
            details["events"] = len(events)
            details["operations_started_and_ended"] = len(ended)
            details["claim_phases"] = phases

    # -- the end

    def clean_up(self):
        for process in (self.reader, self.watch):
            if process and process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
                process.wait()
        if self.verbs:
            self.verbs.close()
        if self.cluster:
            wrong = self.cluster.stop() if all(step["ok"] for step in self.steps) else []
            self.cluster.remove()
            if wrong:
                raise Failure("; ".join(wrong))


def generation_of(event):
    return (event.get("revision") or event.get("operation"))["identity"]["weight_generation"]


def table(steps):
    width = max(len(step["name"]) for step in steps)
    lines = [f"{'step':{width}}  result  seconds", "-" * (width + 17)]
    lines += [f"{step['name']:{width}}  {'ok' if step['ok'] else 'FAILED':6}  {step['seconds']:7.2f}" for step in steps]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, help="a .safetensors file or a model folder; by default all-MiniLM-L6-v2 is fetched")
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/ballast")
    arguments = parser.parse_args()
    folder = ROOT / "target/demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    demo = Demo(arguments.model.resolve() if arguments.model else None, arguments.binary.resolve(), folder)
    code = 1
    try:
        demo.run()
        code = 0
    except (Failure, VerbError, CommandFailed, subprocess.TimeoutExpired, OSError) as error:
        print(f"\n{error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        code = 130
    finally:
        try:
            demo.clean_up()
        except Failure as failure:
            print(f"\nat the end: {failure}", file=sys.stderr)
            code = code or 1
        (folder / "summary.json").write_text(json.dumps({"steps": demo.steps}, indent=2) + "\n")
        if demo.steps:
            print("\n" + table(demo.steps))
        print(f"\nsummary: target/demo/summary.json, logs: target/demo/logs")
        print("demo: every step held" if code == 0 else "demo: FAILED")
    return code


if __name__ == "__main__":
    sys.exit(main())

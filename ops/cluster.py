"""The real processes of one Ballast cluster on this machine: nats-server, gateways, workflow workers, transfer workers.

Used by `make demo` and by tests/e2e. Every process is its own, on a free port, with its files in one scratch folder; each
can be stopped, killed with -9 and started again with the same arguments. Nothing here knows what the processes do.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
START_DEADLINE_S = 30
STOP_DEADLINE_S = 20
POLL_S = 0.02


class Failure(Exception):
    """Something did not hold; the message is for a person."""


def wait_until(condition, deadline_s, what, poll_s=POLL_S):
    """Polls `condition` until it returns something true, and returns that; Failure naming `what` (or what it returns) after
    `deadline_s`."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise Failure(f"{what() if callable(what) else what}: not within {deadline_s} s")
        time.sleep(poll_s)


def free_port():
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def find_nats_server():
    """BALLAST_NATS_SERVER, else the pinned binary that ops/fetch-nats-server installed."""
    named = os.environ.get("BALLAST_NATS_SERVER")
    if named:
        return pathlib.Path(named)
    found = sorted((ROOT / ".cache/nats-server").glob("*/nats-server"))
    if not found:
        raise Failure("no nats-server: run ops/setup, or set BALLAST_NATS_SERVER to a nats-server >= 2.12")
    return found[-1]


def nats_config(path, store_dir, listen=None, advertise=None, routes=()):
    """Writes ops/nats.conf, as it is in production (JetStream synced on every write), with a store folder of its own and, where
    it has routes to others, its cluster block."""
    text = (ROOT / "ops/nats.conf").read_text()

    def change(pattern, replacement):
        nonlocal text
        text, found = re.subn(pattern, lambda match: match[1] + replacement, text)
        if found != 1:
            raise Failure(f"ops/nats.conf has {found} matches of {pattern}; expected one")

    change(r"(?m)^(\s*store_dir:).*$", f" {json.dumps(str(store_dir))}")
    if routes:
        block = re.search(r"(?m)^# cluster \{\n(# .*\n)*?# \}$", text)
        if not block:
            raise Failure("ops/nats.conf has no cluster block to uncomment")
        text = text.replace(block[0], re.sub(r"(?m)^# ", "", block[0]))
        change(r"(?m)^(  listen:).*$", f" {listen}\n  advertise: {advertise}")
        change(r"(?m)^(  routes:).*$", f" {json.dumps([f'nats-route://{route}' for route in routes])}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _die_with_parent():
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Service:
    """One process: its command line, its log, and how to tell that it is ready."""

    def __init__(self, name, command, folder, ready, env=None):
        self.name = name
        self.command = [str(part) for part in command]
        self.log = pathlib.Path(folder) / f"{name}.log"
        self.ready = re.compile(ready, re.M)
        self.env = dict(env or {})
        self.process = None
        self._log_start = 0

    @property
    def pid(self):
        return self.process.pid if self.process else None

    @property
    def running(self):
        return self.process is not None and self.process.poll() is None

    def output(self):
        """What it has printed since its last start."""
        if not self.log.exists():
            return ""
        with open(self.log, "rb") as file:
            file.seek(self._log_start)
            return file.read().decode("utf-8", "replace")

    def start(self, wait=True):
        if self.running:
            raise Failure(f"{self.name} runs already")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._log_start = log.tell()
            # A session of its own, so that Ctrl-C reaches only us and we stop the services in order; and if we are
            # killed ourselves, the kernel takes them along.
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=_die_with_parent, env={**os.environ, **self.env})
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, deadline_s=START_DEADLINE_S):
        def ready():
            if self.process.poll() is not None:
                raise Failure(f"{self.name} ended with exit code {self.process.returncode} before it was ready:\n{self.output()[-2000:]}")
            return self.ready.search(self.output())
        try:
            return wait_until(ready, deadline_s, f"{self.name} is ready")
        except Failure as failure:
            raise Failure(f"{failure}\n{self.output()[-2000:]}") from None

    def wait_end(self, deadline_s=STOP_DEADLINE_S):
        """Its exit code, once it has ended by itself."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"{self.name} did not end within {deadline_s} s:\n{self.output()[-2000:]}") from None

    def stop(self, with_signal=signal.SIGTERM):
        """Asks it to end and returns its exit code; Failure when it has to be killed."""
        if not self.running:
            return self.process.returncode if self.process else None
        self.process.send_signal(with_signal)
        try:
            return self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failure(f"{self.name} did not stop within {STOP_DEADLINE_S} s of {with_signal.name}:\n{self.output()[-2000:]}") from None

    def kill(self):
        """kill -9."""
        if self.running:
            self.process.kill()
            self.process.wait()

    def restart(self):
        """kill -9, and start again with the same arguments."""
        self.kill()
        return self.start()

    def pause(self):
        """SIGSTOP: it holds its connections and says nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        if self.running:
            self.process.send_signal(signal.SIGCONT)


class MemoryFolder:
    """A folder for a memory tier: on /dev/shm, or in `scratch` where there is none. A node that may mount a tmpfs of its
    own over it does so; that mount outlives a kill -9 of the node and is undone here."""

    def __init__(self, scratch):
        shm = pathlib.Path("/dev/shm")
        parent = shm if shm.is_dir() and os.access(shm, os.W_OK) else pathlib.Path(scratch)
        parent.mkdir(parents=True, exist_ok=True)
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="ballast-", dir=parent))

    def remove(self):
        while os.path.ismount(self.path) and subprocess.run(["umount", "--lazy", self.path], capture_output=True).returncode == 0:
            pass
        shutil.rmtree(self.path, ignore_errors=True)


class CommandFailed(Failure):
    """A `ballast` command ended with an exit code that was not expected."""

    def __init__(self, command, done):
        super().__init__(f"`{command}` ended with exit code {done.returncode}:\n{(done.stderr or done.stdout)[-3000:]}")
        self.exit_code = done.returncode
        self.stdout = done.stdout
        self.stderr = done.stderr


class Ballast:
    """The `ballast` command line against one NATS server."""

    def __init__(self, binary, nats_url):
        self.binary = str(binary)
        self.url = nats_url
        self.env = {name: value for name, value in os.environ.items() if name != "BALLAST_NATS"}

    def command(self, *arguments):
        return [self.binary, "--nats", self.url, *map(str, arguments)]

    def run(self, *arguments, timeout_s=120, input=None):
        """Runs to the end, whatever the exit code."""
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=timeout_s, env=self.env,
                              input=input, stdin=subprocess.DEVNULL if input is None else None)

    def text(self, *arguments, timeout_s=120):
        """What it prints; CommandFailed unless it succeeds."""
        done = self.run(*arguments, timeout_s=timeout_s)
        if done.returncode != 0:
            raise CommandFailed("ballast " + " ".join(map(str, arguments)), done)
        return done.stdout

    def json(self, *arguments, timeout_s=120):
        """The one JSON document it prints with `-o json`; CommandFailed unless it succeeds."""
        return json.loads(self.text("-o", "json", *arguments, timeout_s=timeout_s))

    def refusal(self, *arguments, timeout_s=120):
        """Exit code, the error body and standard error of a command that must fail."""
        done = self.run("-o", "json", *arguments, timeout_s=timeout_s)
        if done.returncode == 0:
            raise Failure(f"`ballast {' '.join(map(str, arguments))}` succeeded, but had to be refused: {done.stdout[-1000:]}")
        body = json.loads(done.stdout)["error"] if done.stdout.strip() else {}
        return done.returncode, body, done.stderr

    def start(self, *arguments, **options):
        """Starts it and returns the Popen; the caller waits for it."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.Popen(self.command(*arguments), env=self.env, preexec_fn=_die_with_parent, **options)


class RouteLinks:
    """The routes between the servers of a cluster, each through this process, so that a server can be cut off from the others
    while its clients still reach it. A server is known by the name that it introduces itself with on a route."""

    NAME = re.compile(rb'"server_name":"([^"]+)"')

    def __init__(self, ports):
        """`ports`: where each server listens for routes."""
        self.ports = ports
        self.cut = set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="routes", daemon=True)
        self.thread.start()
        self.joined = asyncio.run_coroutine_threadsafe(self._listen(), self.loop).result(10)

    def addresses(self, name):
        """Of a server: where it listens, how the others reach it, and how it reaches them."""
        return f"127.0.0.1:{self.ports[name]}", self.joined[name], [self.joined[other] for other in self.ports if other != name]

    def cut_off(self, name):
        """From now on nothing passes to or from the server; what is said meanwhile waits."""
        self.loop.call_soon_threadsafe(self.cut.add, name)

    def heal(self, name):
        self.loop.call_soon_threadsafe(self.cut.discard, name)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)

    async def _listen(self):
        joined = {}
        for name in self.ports:
            server = await asyncio.start_server(lambda *ends, name=name: self._link(name, *ends), "127.0.0.1", 0)
            joined[name] = "127.0.0.1:%d" % server.sockets[0].getsockname()[1]
        return joined

    async def _link(self, called, from_caller, to_caller):
        ends = [to_caller]
        try:
            from_called, to_called = await asyncio.open_connection("127.0.0.1", self.ports[called])
            ends.append(to_called)
            names = {called}
            await asyncio.gather(self._pass_on(from_caller, to_called, names), self._pass_on(from_called, to_caller, names))
        except OSError:
            pass     # one end is gone, and with it the link
        finally:
            for end in ends:
                end.close()

    async def _pass_on(self, source, target, names):
        head = b""
        while data := await source.read(1 << 16):
            if len(names) < 2 and len(head) < 1 << 16:
                head += data
                names.update(name.decode() for name in self.NAME.findall(head))
            while names & self.cut:
                await asyncio.sleep(POLL_S)
            target.write(data)
            await target.drain()
        raise ConnectionResetError


class Cluster:
    """One nats-server (or three, which keep every stream three times) and the three services, each `count` times, with their
    folders under `folder`."""

    def __init__(self, folder, binary, *, servers=1, gateways=1, workflow_workers=1, transfer_workers=1, memory_bytes=1 << 30,
                 cold=True, cold_quota_bytes=None, cold_folder=None, cold_url=None, worker_env=None, gateway_options=()):
        self.folder = pathlib.Path(folder)
        self.binary = pathlib.Path(binary)
        ports = [free_port() for _ in range(servers)]
        self.port = ports[0]
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
        self.cli = Ballast(binary, self.url)
        self.logs = self.folder / "logs"
        self.nats_folder = self.folder / "nats"
        self.links = RouteLinks({f"nats-{n}": free_port() for n in range(servers)}) if servers > 1 else None
        self.worker_env = dict(worker_env or {})
        self.retired_workers = []
        self.memory_folders = []
        self.memory_dirs = []
        self.cold_dirs = []
        self.nats_servers = [self._nats_server(n, port) for n, port in enumerate(ports)]
        self.nats = self.nats_servers[0]
        gateway_options = [*(["--replicas", servers] if servers > 1 else []), *gateway_options]
        self.gateways = [self._service(f"gateway-{n}", "gateway", "--id", f"gateway-{n}", *gateway_options) for n in range(gateways)]
        self.workflow_workers = [self.new_workflow_worker(f"workflow-{n}", self.worker_env) for n in range(workflow_workers)]
        self.transfer_workers = []
        self.memory_bytes, self.cold_url = memory_bytes, cold_url
        for n in range(transfer_workers):
            if cold_url:
                self.new_transfer_worker(f"node-{n}")
                continue
            memory = MemoryFolder(self.folder)
            self.memory_folders.append(memory)
            self.memory_dirs.append(memory.path)
            arguments = ["--name", f"node-{n}", "--memory", f"{memory_bytes}", "--memory-dir", memory.path]
            if cold:
                cold_dir = pathlib.Path(cold_folder) if cold_folder else self.folder / f"cold-{n}"
                cold_dir.mkdir(parents=True, exist_ok=True)
                self.cold_dirs.append(cold_dir)
                arguments += ["--cold", cold_dir]
                if cold_quota_bytes:
                    arguments += ["--cold-quota", f"{cold_quota_bytes}"]
            self.transfer_workers.append(self._service(f"node-{n}", "transfer-worker", *arguments, env=self.worker_env))

    def _nats_server(self, n, port):
        if not self.links:
            name, config = "nats-server", nats_config(self.folder / "nats.conf", self.nats_folder)
        else:
            name, (listen, advertise, routes) = f"nats-{n}", self.links.addresses(f"nats-{n}")
            config = nats_config(self.folder / f"{name}.conf", self.nats_folder / f"{n}", listen, advertise, routes)
        return Service(
            name, [find_nats_server(), "--config", config, "--addr", "127.0.0.1", "--port", port, "--http_port", free_port()],
            self.logs, r"Server is ready", {"BALLAST_NATS_NAME": f"nats-{n}"})

    def _service(self, name, role, *arguments, env=None):
        return Service(name, self.cli.command(role, *arguments), self.logs, r"^ready: ", {"RUST_BACKTRACE": "1", **(env or {})})

    def new_workflow_worker(self, name, env=None):
        """A further workflow worker, not started; `env` is added to its environment."""
        return self._service(name, "workflow-worker", "--id", name, env=env)

    def new_transfer_worker(self, name, env=None):
        """A further node with an empty memory folder and the cold tier in object storage, not started; `env` is added to its
        environment."""
        memory = MemoryFolder(self.folder)
        self.memory_folders.append(memory)
        self.memory_dirs.append(memory.path)
        worker = self._service(name, "transfer-worker", "--name", name, "--memory", self.memory_bytes, "--memory-dir", memory.path,
                               "--cold-url", self.cold_url, env={**self.worker_env, **(env or {})})
        self.transfer_workers.append(worker)
        return worker

    @property
    def services(self):
        return [*self.nats_servers, *self.gateways, *self.transfer_workers, *self.workflow_workers]

    def start(self):
        self.nats_folder.mkdir(parents=True, exist_ok=True)
        for server in self.nats_servers:
            server.start(wait=False)
        for server in self.nats_servers:
            server.wait_ready()
        # The rest find each other in any order; starting them together shows that they do.
        rest = [service for service in self.services if service not in self.nats_servers]
        for service in rest:
            service.start(wait=False)
        for service in rest:
            service.wait_ready()
        return self

    def stop(self):
        """Workers first, then gateways, then the server. Returns what went wrong, if anything did."""
        wrong = []
        for service in [*self.workflow_workers, *self.transfer_workers, *self.gateways, *self.nats_servers]:
            try:
                service.stop()
            except Failure as failure:
                wrong.append(str(failure))
        return wrong

    def remove(self):
        """Kills what still runs and removes the memory tiers; the logs stay."""
        for service in self.services:
            with contextlib.suppress(OSError):
                service.kill()
        for folder in self.memory_folders:
            folder.remove()
        if self.links:
            self.links.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()


def footprint(*folders):
    """Files below `folders` by path, with the bytes that each really occupies (a sparse file counts its blocks). Spare segments
    are left out: they hold zeros, are nobody's, and are there so that the next import need not wait for memory."""
    files = {}
    for folder in folders:
        for path in pathlib.Path(folder).rglob("*"):
            if path.parent.name == "spares":
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    files[str(path)] = path.stat().st_blocks * 512
    return files


def occupied_bytes(*folders):
    return sum(footprint(*folders).values())

#!/usr/bin/env python3
"""The rival of the benchmark's operations: DBOS workflows of three steps that have nothing to do.

Usage: bench_dbos.py --in-flight N --seconds S --folder FOLDER
Prints one JSON object: {"workflows_per_second", "database"}. Of two ways to keep N workflows in flight (threads that each call
one workflow after the other; waves of workflows started in the background) the faster counts. The database is a PostgreSQL of
its own in FOLDER where initdb and postgres are found, with its default durability, otherwise a SQLite file there.
"""

import argparse
import contextlib
import glob
import json
import os
import pathlib
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

READY_TIMEOUT_S = 30


def tool(name):
    """The path of a PostgreSQL tool, or None."""
    found = shutil.which(name)
    candidates = [found] if found else sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), reverse=True)
    return candidates[0] if candidates else None


def other_user():
    """PostgreSQL does not run as root: the account to run it as then."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


@contextlib.contextmanager
def postgres(folder):
    """A server on a Unix socket in a folder of its own; yields its URL, or None where there is no PostgreSQL."""
    initdb, server = tool("initdb"), tool("postgres")
    user = other_user()
    if not initdb or not server or (os.geteuid() == 0 and user is None):
        yield None
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix="postgres-") as data:
        sockets = tempfile.mkdtemp(prefix="ballast-bench-")    # a socket's path must be short
        as_user = {}
        if user:
            as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            for path in (data, sockets):
                os.chown(path, user.pw_uid, user.pw_gid)
        running = None
        try:
            made = subprocess.run([initdb, "--pgdata", data, "--username", "bench", "--auth", "trust", "--encoding", "UTF8"],
                                  capture_output=True, text=True, check=False, cwd="/", **as_user)
            if made.returncode != 0:
                sys.exit(f"initdb failed: {made.stderr.strip()}")
            running = subprocess.Popen([server, "-D", data, "-k", sockets, "-c", "listen_addresses=", "-c", "max_connections=400"],
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", **as_user)
            yield f"postgresql://bench@/postgres?host={sockets}", running
        finally:
            if running:
                running.terminate()
                running.wait()
            shutil.rmtree(sockets, ignore_errors=True)


def wait_until_ready(url, running):
    import psycopg
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            with psycopg.connect(url, connect_timeout=2) as connection:
                return connection.execute("show server_version").fetchone()[0].split()[0]
        except psycopg.OperationalError as error:
            if running.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"PostgreSQL did not start: {error}")
            time.sleep(0.1)


def measure(url, in_flight, seconds):
    from dbos import DBOS

    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR", "run_admin_server": False})

    @DBOS.step()
    def first(x):
        return x + 1

    @DBOS.step()
    def second(x):
        return x + 1

    @DBOS.step()
    def third(x):
        return x + 1

    @DBOS.workflow()
    def three_steps(x):
        return third(second(first(x)))

    DBOS.launch()
    try:
        assert three_steps(1) == 4

        def calls(n):
            done = 0
            while time.perf_counter() < end:
                assert three_steps(n) == n + 3
                done += 1
            return done

        began = time.perf_counter()
        end = began + seconds
        with ThreadPoolExecutor(in_flight) as callers:
            called = sum(callers.map(calls, range(in_flight))) / (time.perf_counter() - began)

        began = time.perf_counter()
        done = 0
        while time.perf_counter() < began + seconds:
            handles = [DBOS.start_workflow(three_steps, n) for n in range(in_flight)]
            assert [handle.get_result() for handle in handles] == [n + 3 for n in range(in_flight)]
            done += in_flight
        started = done / (time.perf_counter() - began)
        return called, started
    finally:
        DBOS.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("target/bench"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    import importlib.metadata
    version = importlib.metadata.version("dbos")
    # What DBOS prints while it works is not the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    with postgres(folder) as server, tempfile.TemporaryDirectory(dir=folder, prefix="sqlite-") as scratch:
        if server is None:
            url, database = f"sqlite:///{scratch}/dbos.sqlite", "SQLite"
        else:
            url, running = server
            database = f"PostgreSQL {wait_until_ready(url, running)}"
        called, started = measure(url, options.in_flight, options.seconds)
    how = "called from threads" if called >= started else "started in waves"
    result = {"workflows_per_second": max(called, started), "database": f"DBOS {version} on {database}, {how}"}
    os.write(answer, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()

"""The gateway's verbs over NATS in JSON, spoken with nats-py: a client that shares no code with Ballast.

Used by `make demo` to look at the state independently of the `ballast` command, and by tests/e2e to drive every verb.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time

import nats
import nats.errors

CALL_TIMEOUT_S = 10


class VerbError(Exception):
    """The gateway's `{"error": {...}}`, with the headers it came with."""

    def __init__(self, verb, error, headers):
        super().__init__(f"{verb}: {error.get('code')}: {error.get('message')}")
        self.code = error["code"]
        self.number = error["number"]
        self.message = error["message"]
        self.details = error.get("details")
        self.headers = dict(headers or {})


class NoAnswer(Exception):
    """Nobody answered: no gateway, no server, or not in time."""


def identity(resource, generation=1, *, revision="main", namespace="default", tenant=None):
    """A revision identity as the verbs take it."""
    body = {"namespace": namespace, "resource_id": resource, "revision": revision, "weight_generation": generation}
    return body if tenant is None else {"tenant_id": tenant, **body}


class Verbs:
    """A connection of its own, on a thread of its own, so that callers stay plain functions. Of several servers (separated by
    commas) it goes on to the next when one does not answer."""

    def __init__(self, url):
        self.servers = url.split(",")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="verbs", daemon=True)
        self.thread.start()
        self.errors = []
        self.nc = self.run(self._connect(self.servers))

    async def _connect(self, servers):
        async def on_error(error):
            self.errors.append(error)
        return await nats.connect(servers, max_reconnect_attempts=-1, reconnect_time_wait=0.1, connect_timeout=2, error_cb=on_error,
                                  dont_randomize=True)

    def elsewhere(self):
        """Goes on to the next server, if there are others and one of them answers."""
        for _ in self.servers[1:]:
            self.servers.append(self.servers.pop(0))
            with contextlib.suppress(Exception):
                old, self.nc = self.nc, self.run(self._connect(self.servers[:1]), 5)
                asyncio.run_coroutine_threadsafe(old.close(), self.loop)
                return

    def run(self, coroutine, timeout_s=60):
        """Runs a coroutine on the connection's thread and returns its result."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def request(self, subject, payload, timeout_s=CALL_TIMEOUT_S):
        """One request with any body; returns the message that answers."""
        try:
            return self.run(self.nc.request(subject, payload, timeout=timeout_s), timeout_s + 5)
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError, nats.errors.ConnectionClosedError,
                nats.errors.OutboundBufferLimitError, concurrent.futures.TimeoutError) as error:
            self.elsewhere()
            raise NoAnswer(f"{subject}: {error or type(error).__name__}") from error

    def call(self, verb, body=None, *, tenant="default", timeout_s=CALL_TIMEOUT_S):
        """Calls a verb; returns its reply body, or raises VerbError with the error in it."""
        message = self.request(f"ballast.v1.{tenant}.{verb}", json.dumps(body or {}).encode(), timeout_s)
        reply = json.loads(message.data)
        if "error" in reply:
            raise VerbError(verb, reply["error"], message.headers)
        return reply

    def steady(self, verb, body=None, *, deadline_s=30, **options):
        """As `call`, but tries again while nobody answers: for questions asked while something restarts."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                return self.call(verb, body, timeout_s=2, **options)
            except (NoAnswer, VerbError) as error:
                if (isinstance(error, VerbError) and error.code != "UNAVAILABLE") or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    # What is asked most often.

    def view(self, which):
        """RevisionView: metadata, leases, watermark."""
        return self.steady("get_metadata", {"identity": which})

    def metadata(self, which):
        return self.view(which)["metadata"]

    def find(self, which):
        """The metadata, or None where there is none."""
        try:
            return self.metadata(which)
        except VerbError as error:
            if error.code == "NOT_FOUND":
                return None
            raise

    def operation(self, operation_id):
        return self.steady("get_operation", {"operation_id": operation_id})["operation"]

    def revisions(self, **filters):
        """Every revision of every page, tombstones and imports included."""
        found, token = [], ""
        while True:
            page = self.steady("list", {"all": True, "page_token": token, **filters})
            found += page["revisions"]
            token = page["next_page_token"]
            if not token:
                return found

    def close(self):
        if self.loop.is_closed():
            return
        with contextlib.suppress(Exception):
            self.run(self.nc.close(), 5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        if not self.thread.is_alive():
            self.loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

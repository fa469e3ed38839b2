"""Telemetry: the process that tells what stands in the scoreboard, over HTTP. Never in the way of a request.

The master's side of it is reporting.py, which opens the listening socket, so its port outlives this process. It reads
the scoreboard when asked and keeps nothing: no file, no count. When it dies nothing but a scrape is lost. It leaves on
the master's word, on SIGTERM, or with the master.

| page | 200 | 503 |
|---|---|---|
| /metrics | always; Prometheus text or OpenMetrics, as Accept says | the scoreboard is broken |
| /healthz | the master's loop turns | it does not |
| /readyz | the server is ready and some worker is | loading, draining, no worker |
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from importlib.metadata import version

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from prefork import __version__
from prefork.channel import Channel
from prefork.errors import PreforkError
from prefork.jobs import TelemetryJob
from prefork.observe import health
from prefork.observe.health import Verdict
from prefork.observe.http import HEAD, Headers, Page, Site
from prefork.observe.metrics import BoardCollector
from prefork.observe.snapshot import Watcher


def main(channel: socket.socket, job: TelemetryJob) -> int:
    """Serve until told to leave; the exit code."""
    return asyncio.run(Telemetry(channel, job).serve())


class Telemetry:
    """The life of the process on its loop; `serve` is the only door."""

    def __init__(self, channel: socket.socket, job: TelemetryJob) -> None:
        self._job = job
        self._log = job.log.for_role("telemetry")
        self._channel = Channel(channel)
        self._leave = asyncio.Event()
        self._watcher = Watcher(job.scoreboard)
        self._registry = CollectorRegistry(auto_describe=False)
        build = {
            "version": __version__,
            "python": platform.python_version(),
            "onnxruntime": version("onnxruntime"),
        }
        self._registry.register(BoardCollector(self._watcher, build))

    async def serve(self) -> int:
        """Listen, say READY, answer."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leave.set)
        loop.add_signal_handler(signal.SIGUSR1, self._log.reopen)
        loop.add_reader(self._channel.fileno(), self._hear)
        pages = {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}
        site = Site({path: partial(self._make, make) for path, make in pages.items()})
        server = await asyncio.start_server(site.serve, sock=self._job.listener.dup(), limit=HEAD)
        host, port = self._job.listener.getsockname()[:2]
        self._log.info("serving metrics", host=host, port=port)
        self._channel.send({"event": "ready"})
        await self._leave.wait()
        server.close()
        return 0

    def _hear(self) -> None:
        for message, _ in self._channel.receive():
            match message.get("command"):
                case "reopen":
                    self._log.reopen()
                case "retire" | "shutdown" | "quit":
                    self._leave.set()
        if self._channel.closed:  # the master is dead, and PR_SET_PDEATHSIG is about to say so
            os._exit(0)

    # pages

    def _make(self, make: Callable[[Headers], Page], headers: Headers) -> Page:
        try:
            return make(headers)
        except PreforkError as e:
            return _page(Verdict(False, e.message))
        except Exception as e:  # one page's fault must not silence the others
            self._log.crash("page failed", e)
            return Page(f"{type(e).__name__}\n", HTTPStatus.INTERNAL_SERVER_ERROR)

    def _metrics(self, headers: Headers) -> Page:
        encode, content_type = choose_encoder(headers.get("accept", ""))
        return Page(encode(self._registry), content_type=content_type)

    def _healthz(self, headers: Headers) -> Page:
        return _page(health.alive(self._watcher.master(), time.monotonic_ns()))

    def _readyz(self, headers: Headers) -> Page:
        seen = self._watcher.look()
        return _page(health.ready(seen.master, seen.slots, self._job.worker_timeout, time.monotonic_ns()))


def _page(verdict: Verdict) -> Page:
    status = HTTPStatus.OK if verdict.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Page(f"{verdict.reason}\n", status)

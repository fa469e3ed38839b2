"""A new master takes the place of the running one, without a connection refused: the binary upgrade (USR2).

Runs in both masters. The old one (`Succession`) starts the program anew, as it was started itself, and serves on while
the new one loads and brings its workers up on the same listening sockets. When those are ready it lets its own retire
and leaves everything to the new one. Until then the way back is the end of the new one, whoever ends it. The new one's
side (`Heir`) tells that it is ready, and what belongs to one master only becomes its own when the old one says so or
is dead.

| state | the old master | next |
|---|---|---|
| none | serves | starting |
| starting | serves, while the new one comes up | handed, failed |
| failed | serves; `reason` says why | starting |
| handed | its workers retire, then it leaves and removes nothing | |
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from prefork import child as children
from prefork import estate
from prefork.channel import Channel
from prefork.config import Config
from prefork.errors import FailedPrecondition, PreforkError
from prefork.estate import Estate
from prefork.fleet import Fleet
from prefork.generation import Stored
from prefork.house import House
from prefork.jobs import LoadedModel
from prefork.log import Logger
from prefork.reporting import Reporting
from prefork.shm import segment
from prefork.supervisor import Supervisor
from prefork.turnover import Turnover

State = Literal["none", "starting", "failed", "handed"]
NOT_FOR_THE_HEIR = ("WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


@dataclass(frozen=True, slots=True)
class Parts:
    """Of the old master: what is handed over, and who has to know."""

    config: Config
    house: House
    fleet: Fleet
    reporting: Reporting
    turnover: Turnover
    supervisor: Supervisor


class Succession:
    """The old master's side. Doors: `begin`, `abort`, `left`, `row`. `leave` is called once, when the new master is
    ready: nothing is ours from then on."""

    def __init__(self, parts: Parts, log: Logger, selector: selectors.BaseSelector, leave: Callable[[], None]) -> None:
        self._parts = parts
        self._runtime = estate.runtime_version()  # of what runs; an upgrade changes what is installed
        self._log = log
        self._selector = selector
        self._leave = leave
        self._line: Channel | None = None
        self._ours: socket.socket | None = None
        self.state: State = "none"
        self.pid = 0
        self.reason = ""

    def begin(self) -> None:
        """Start the program anew. Raises FailedPrecondition when it cannot be, or is under way."""
        if self.state in ("starting", "handed"):
            raise FailedPrecondition(f"upgrade: process {self.pid} is taking over already")
        if os.getpid() == 1:
            raise FailedPrecondition("upgrade: the end of process 1 is the end of its container; start another one")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self.pid = _start(self._estate(theirs))
        except OSError as e:
            ours.close()
            raise FailedPrecondition(f"upgrade: the new program cannot be started: {e.strerror}") from None
        self.state, self.reason = "starting", ""
        self._ours, self._line = ours, Channel(ours)
        self._selector.register(ours, selectors.EVENT_READ, self._hear)
        self._log.info("upgrade begins", pid=self.pid, program=sys.orig_argv)

    def abort(self) -> None:
        """The way back: end the new master before it is ready. Raises FailedPrecondition when there is none."""
        if self.state != "starting":
            raise FailedPrecondition(f"upgrade: none is under way: {self.state}")
        self.reason = "ended on request"
        os.kill(self.pid, signal.SIGTERM)

    def left(self, pid: int, code: int) -> bool:
        """A process is reaped; whether it was the new master."""
        if not self.pid or pid != self.pid:
            return False
        if self.state == "starting":
            self._hear()
            self.state = "failed"
            self.reason = self.reason or children.describe_exit(code)
            self._log.error("upgrade failed, this server goes on", pid=pid, reason=self.reason)
        self._close()
        return True

    def row(self) -> dict[str, Any]:
        """As the control socket tells it."""
        return {"state": self.state, "pid": self.pid or None, "reason": self.reason}

    def _hear(self) -> None:
        if self._line is None:
            return
        for message, _ in self._line.receive():
            if message.get("event") == "failed":
                self.reason = str(message.get("message"))
            elif message.get("event") == "ready" and self.state == "starting":
                self.state = "handed"
                self._log.info("upgrade done, this server leaves", pid=self.pid)
                self._hand_over([str(name) for name in message["models"]])
                self._line.send({"command": "yours"})
        if self._line.closed:
            self._close()

    def _estate(self, channel: socket.socket) -> Estate:
        parts = self._parts
        house, server, serving = parts.house, parts.config.server, parts.turnover.serving
        return Estate(
            channel, tuple(slot.listener for slot in parts.fleet.slots), house.unix, house.control,
            parts.reporting.listener, house.lock, str(server.runtime_dir),
            activated=bool(house.given) and house.given.managed, generation=parts.turnover.numbers, shm=server.shm,
            runtime=self._runtime,
            models=tuple((stored.model, stored.source) for stored in (serving.stored if serving else ())),
        )  # fmt: skip

    def _hand_over(self, models: Sequence[str]) -> None:
        """`models`: whose segments the new master serves as well."""
        parts = self._parts
        self._leave()
        parts.supervisor.handed(self.pid)
        parts.house.let_go()
        parts.reporting.let_go()
        parts.turnover.leave(models)
        parts.turnover.stop()
        parts.fleet.stop(time.monotonic(), quick=False, again=False, heir=True)

    def _close(self) -> None:
        if self._ours is not None:
            with suppress(KeyError):
                self._selector.unregister(self._ours)
            self._ours.close()
            self._ours = self._line = None


def _start(left: Estate) -> int:
    """The new program's pid. It is no child of our making: it outlives us, and nothing of ours is in its memory."""
    fd = estate.write(left)
    try:
        environ = {name: text for name, text in os.environ.items() if name not in NOT_FOR_THE_HEIR}
        process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**environ, estate.VARIABLE: str(fd)},
            pass_fds=[fd, *left.descriptors],
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.close(fd)
    process.returncode = 0  # the master's loop reaps it, with everybody else
    return process.pid


class Heir:
    """The new master's side. Doors: `kept`, `ready`, `failed`. `take_over` is called once: from then on all is ours."""

    def __init__(self, left: Estate, selector: selectors.BaseSelector, take_over: Callable[[], None]) -> None:
        self._left = left
        self._sock = left.channel
        self._line = Channel(left.channel)
        self._selector = selector
        self._take_over = take_over
        self._done = False
        selector.register(self._sock, selectors.EVENT_READ, self._hear)

    def kept(self, config: Config, log: Logger) -> dict[str, Stored]:
        """By name, the models that need not be loaded; each has one taker, the caller."""
        found: dict[str, Stored] = {}
        sources = {model.name: source for model, source in self._left.models}
        for model in self._left.usable(config.models, config.server.shm):
            try:
                found[model.name] = Stored(model, segment.hold(model.ref), sources[model.name])
            except PreforkError as e:
                log.warning("segment is not taken over", model=model.name, reason=e)
        return found

    def ready(self, models: Sequence[LoadedModel]) -> None:
        """Every slot has answered a warm-up here: the old master may go, but for what `models` are served from."""
        mine = {model.ref.name for model, _ in self._left.models} & {model.ref.name for model in models}
        self._line.send({"event": "ready", "models": [model.name for model in models if model.ref.name in mine]})

    def failed(self, error: PreforkError) -> None:
        """The old master is to serve on, and to know why."""
        if not self._done:
            self._line.send({"event": "failed", "message": error.message[:8000]})

    def _hear(self) -> None:
        said = [message.get("command") for message, _ in self._line.receive()]
        if "yours" in said or self._line.closed:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._done = True
            self._take_over()

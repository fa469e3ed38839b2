"""A new master takes the place of the running one, without a connection refused: the binary upgrade (USR2).

Runs in both masters. The old one (`Succession`) starts the program anew, as it was started itself, and serves on while
the new one loads and brings its workers up on the same listening sockets. When those are ready it lets its own retire
and leaves everything to the new one. Until then the way back is the end of the new one, whoever ends it. The new one's
side (`Heir`) tells that it is ready, and what belongs to one master only becomes its own when the old one says so or
is dead.

| state | the old master | next |
|---|---|---|
| none | serves | starting |
| starting | serves, while the new one comes up; nothing that it has read may change | handed, failed |
| failed | serves; `reason` says why | starting |
| handed | its workers retire, then it leaves and removes nothing | |
"""

from __future__ import annotations

import math
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
from prefork.fleet import KILL_MARGIN, QUICK, Fleet
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
    """The old master's side. Doors: `begin`, `abort`, `left`, `look`, `stop`, `reopen`, `crash`; `busy`, `idle`, `row`.
    `leave` is called once, when the new master is ready: nothing is ours from then on."""

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
        self._running = 0  # the same pid until it is reaped, for then it may be anybody's
        self._began = 0.0
        self._kill_at: float | None = None  # it is to end, and has until then

    @property
    def busy(self) -> bool:
        """A new master is coming up, and is not ready yet."""
        return self.state == "starting"

    def idle(self, what: str) -> None:
        """The new master serves what it has found at its start. Raises FailedPrecondition while it comes up."""
        if self.busy:
            raise FailedPrecondition(f"{what}: process {self.pid} is taking over; wait for it, or roll it back")

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
        self._running, self._began, self._kill_at = self.pid, time.monotonic(), None
        self._ours, self._line = ours, Channel(ours)
        self._selector.register(ours, selectors.EVENT_READ, self._hear)
        self._log.info("upgrade begins", pid=self.pid, program=sys.orig_argv)

    def abort(self) -> None:
        """The way back: end the new master before it is ready, at the second time at once. Raises FailedPrecondition
        when there is none."""
        if not self.busy:
            raise FailedPrecondition(f"upgrade: none is under way: {self.state}")
        self._end("ended on request", 0.0 if self._kill_at is not None else self._patience)

    def stop(self, *, quick: bool) -> None:
        """We are to go: nobody is to follow us."""
        if self.busy:
            self._end("the server is stopping", QUICK if quick else self._patience)

    def look(self, now: float) -> None:
        """Once a second: kill a new master that was told to go, or has said that it goes, and does not."""
        if self.busy and self._kill_at is not None and now >= self._kill_at:
            self._log.warning("the new program does not leave, killing it", pid=self.pid)
            os.kill(self._running, signal.SIGKILL)

    def reopen(self) -> None:
        """The new master's log file as well; a signal might come before it can take one."""
        if self.busy and self._line is not None:
            self._line.send({"command": "reopen"})

    def crash(self) -> None:
        """We end, however: when a new master is there, it follows us, and needs what we would remove."""
        serving = self._parts.turnover.serving
        if self.busy and serving is not None:
            self._parts.house.let_go()
            self._parts.turnover.leave([model.ref.name for model in serving.models])

    def left(self, pid: int, code: int) -> bool:
        """A process is reaped; whether it was the new master."""
        if not pid or pid != self._running:
            return False
        if self.busy:
            self._hear()
            self.state = "failed"
            self.reason = self.reason or children.describe_exit(code)
            self._log.error("upgrade failed, this server goes on", pid=pid, reason=self.reason)
            self._parts.house.sweep()
        elif self.state == "handed":
            self._log.error("the server that took over has ended", pid=pid, how=children.describe_exit(code))
        self._running = 0
        self._close()
        return True

    def row(self) -> dict[str, Any]:
        """As the control socket tells it."""
        seconds = round(time.monotonic() - self._began, 3) if self.busy else None
        return {"state": self.state, "pid": self.pid or None, "reason": self.reason, "seconds": seconds}

    @property
    def _patience(self) -> float:
        """Seconds that a new master may have connections to end, as its workers serve already."""
        return self._parts.config.server.graceful_timeout + KILL_MARGIN + QUICK

    def _end(self, reason: str, patience: float) -> None:
        self.reason = self.reason or reason
        self._kill_at = min(self._kill_at or math.inf, time.monotonic() + patience)
        os.kill(self._running, signal.SIGTERM)
        self.look(time.monotonic())

    def _hear(self) -> None:
        """It may say that it is ready, and be told to go, or die, before we hear it: then there is no heir."""
        if self._line is None:
            return
        segments: list[str] | None = None
        for message, _ in self._line.receive():
            if message.get("event") == "failed":
                self.reason = self.reason or str(message.get("message"))
                self._kill_at = self._kill_at or time.monotonic() + self._patience
            elif message.get("event") == "ready":
                segments = [str(name) for name in message["segments"]]
        if self._line.closed:
            self._close()
        elif segments is not None and self.busy and self._kill_at is None:
            self._hand_over(segments)

    def _estate(self, channel: socket.socket) -> Estate:
        parts = self._parts
        house, server, serving = parts.house, parts.config.server, parts.turnover.serving
        return Estate(
            channel, os.getpid(), tuple(slot.listener for slot in parts.fleet.slots), house.unix, house.control,
            parts.reporting.listener, house.lock, estate.places_of(parts.config),
            activated=bool(house.given) and house.given.managed,
            unix_activated=house.given.unix is not None and house.given.unix_managed,
            generation=parts.turnover.numbers, shm=server.shm, runtime=self._runtime,
            models=tuple((stored.model, stored.source) for stored in (serving.stored if serving else ())),
        )  # fmt: skip

    def _hand_over(self, segments: Sequence[str]) -> None:
        """`segments`: that the new master serves as well."""
        parts = self._parts
        self.state = "handed"
        self._log.info("upgrade done, this server leaves", pid=self.pid)
        try:
            parts.supervisor.handed(self.pid)
            self._leave()
            parts.house.let_go()
            parts.turnover.leave(segments)
            parts.reporting.let_go()
            parts.turnover.stop()
            parts.fleet.stop(time.monotonic(), quick=False, again=False, heir=True)
        finally:  # whatever goes wrong here, there must be one server
            if self._line is not None:
                self._line.send({"command": "yours"})

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
    """The new master's side. Doors: `kept`, `ready`. `take_over` is called once: from then on all is ours. `reopen`:
    the log file, when the old master is told to."""

    def __init__(
        self, left: Estate, selector: selectors.BaseSelector, take_over: Callable[[], None],
        reopen: Callable[[], None],
    ) -> None:  # fmt: skip
        self._left = left
        self._sock = left.channel
        self._line = Channel(left.channel)
        self._selector = selector
        self._take_over = take_over
        self._reopen = reopen
        self._kept: list[Stored] = []
        selector.register(self._sock, selectors.EVENT_READ, self._hear)

    def kept(self, config: Config, log: Logger) -> dict[str, Stored]:
        """By name, the models that need not be loaded; each has one taker, the caller."""
        found: dict[str, Stored] = {}
        sources = {model.name: source for model, source in self._left.models}
        for model in self._left.usable(config.models, config.server.shm):
            try:
                found[model.name] = Stored(model, segment.hold(model.ref), sources[model.name], left=True)
            except PreforkError as e:
                log.warning("segment is not taken over", model=model.name, reason=e)
        self._kept = list(found.values())
        return found

    def ready(self, models: Sequence[LoadedModel]) -> None:
        """Every slot has answered a warm-up here: the old master may go, but for what `models` are served from."""
        mine = {model.ref.name for model, _ in self._left.models} & {model.ref.name for model in models}
        self._line.send({"event": "ready", "segments": sorted(mine)})

    def _hear(self) -> None:
        said = [message.get("command") for message, _ in self._line.receive()]
        if "reopen" in said:
            self._reopen()
        if "yours" in said or self._line.closed:
            self._selector.unregister(self._sock)
            self._sock.close()
            for stored in self._kept:
                stored.left = False
            self._take_over()

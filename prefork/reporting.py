"""The master's side of telemetry: its page of the scoreboard, the listening socket, and the process on it.

Runs in the master; the other side is telemetry.py. The page is written whether anybody reads it or not. The process is
a convenience: when it dies it is started anew, ever more slowly, and the server goes on.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from prefork import child as children
from prefork import listener
from prefork.child import Child
from prefork.config import Config
from prefork.jobs import LoadedModel, TelemetryJob
from prefork.log import Logger
from prefork.shm.masterpage import restart_reason
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import OTHER, MasterState
from prefork.slots import YOUNG, Slot, delay

ROLE = "telemetry"
BACKLOG = 64
QUICK = 2.0  # seconds that it has to leave


class Reporting:
    """Doors: `write` and `serve` (each turn of the loop), `models`, `restarted`, `left`, `dismiss`, `close`."""

    def __init__(self, config: Config, log: Logger, board: Scoreboard) -> None:
        """Raises ConfigError when the address cannot be had."""
        self._config = config
        self._log = log
        self._board = board
        self._page = board.master()
        self._page.begin()
        bind = config.telemetry.metrics_bind
        self._listener: socket.socket | None = listener.open_tcp(bind, 1, BACKLOG)[0] if bind else None
        self._child: Child | None = None
        self._failures = 0
        self._retry_at = 0.0

    @property
    def bind(self) -> str | None:
        """Where it listens, as a client would write it."""
        return listener.name_of(self._listener) if self._listener else None

    def write(self, state: str, generation: int, slots: Sequence[Slot], rows: int) -> None:
        """What holds now. `state` is the master's, by its name; `rows`: of the scoreboard that workers have had. Also
        the sign that the master's loop turns."""
        wanted = sum(slot.wanted for slot in slots)
        self._page.write(MasterState[state.upper()], generation, wanted, rows)
        self._page.tick()

    def models(self, models: Iterable[LoadedModel], *, only: bool = False) -> None:
        """These are served from now on; `only`: and no others. To be called before the first worker of them is
        forked."""
        served = list(models)
        for model in served:
            if self._page.serve(model.name, model.version, model.ref.size, _labels(model)) == OTHER:
                self._log.warning("no place on the scoreboard, counted as other", model=model.name)
        if only:
            self._page.keep(model.name for model in served)

    def restarted(self, child: Child, status: int, *, stalled: bool = False) -> None:
        """A worker is gone and will be replaced. `status`: as waitpid(2) gave it."""
        self._page.restarted(
            restart_reason(
                status, ready=child.ready_at is not None, asked=child.leaving, stalled=stalled, oom=bool(child.oom)
            )
        )

    def serve(self, now: float) -> Child | None:
        """Spawn the process when it is due; the caller takes it among its children. `now`: monotonic seconds."""
        if self._listener is None or self._child is not None or now < self._retry_at:
            return None
        job = TelemetryJob(self._log, self._listener, self._board, self._config.server.worker_timeout)
        try:
            self._child = children.spawn(ROLE, 0, 0, job, job.descriptors)
        except OSError as e:
            self._again(now)
            self._log.error("telemetry cannot be forked", error=e)
        return self._child

    def left(self, child: Child, status: int, now: float) -> None:
        """The process is reaped."""
        self._child = None
        if child.leaving:
            return
        if now - child.started >= YOUNG:
            self._failures = 0
        self._again(now)
        reason = child.said.get("message") if child.said else None
        self._log.warning("telemetry died", pid=child.pid, how=child.how(status), reason=reason)

    def dismiss(self, left: Iterable[Child], now: float) -> None:
        """The server stops: the process tells so until it is the last of the children `left`."""
        if self._child is not None and not self._child.leaving and all(child is self._child for child in left):
            self._child.leaving = True
            self._child.send({"command": "shutdown"})
            self._child.kill_at = now + QUICK

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _again(self, now: float) -> None:
        self._failures += 1
        self._retry_at = now + delay(self._failures)


def _labels(model: LoadedModel) -> dict[str, str]:
    """How it was prepared, and what the gate measured of the form that serves. Not the segment's name: who can see the
    metrics need not know what could be attached to."""
    report = model.report
    labels = {"form": str(report.get("form", "")), "shm": model.ref.kind, "origin": str(report.get("origin", ""))}
    gate = report.get("gate") or {}
    for candidate in gate.get("candidates", ()):
        if candidate.get("chosen"):
            labels["metric"] = str(gate.get("metric", ""))
            labels["accuracy_delta"], labels["speedup"] = str(candidate.get("delta")), str(candidate.get("speedup"))
    return labels

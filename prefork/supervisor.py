"""The service manager as the master sees it: what it is told at each turn of the loop, and at the turns of our life.

Runs in the master. How things are said stands in notify.py, what of the server's life is told in herald.py, when the
watchdog is fed in watchdog.py.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterable

from prefork.child import Child
from prefork.config import Config
from prefork.fleet import KILL_MARGIN, QUICK, Fleet
from prefork.herald import Herald
from prefork.log import Logger
from prefork.notify import Notifier, watchdog_seconds
from prefork.turnover import Turnover
from prefork.watchdog import Watchdog, stalled

LEAVING = 10.0  # seconds beyond the last child's time that the manager is asked for


class Supervisor:
    """Doors: `turn`, `ready`, `reloading`, `handed`, `stopping`. Each does nothing when no manager listens, or another
    master is the service."""

    def __init__(
        self, config: Config, log: Logger, selector: selectors.BaseSelector, fleet: Fleet, turnover: Turnover,
        *, quiet: bool,
    ) -> None:  # fmt: skip
        """`quiet`: another master is the service until `ready`."""
        self._config = config
        self._fleet = fleet
        self._turnover = turnover
        self._notify = Notifier(os.environ, quiet=quiet)
        self._herald = Herald(self._notify, fleet.board)
        self._reloading = False  # until the manager knows of the end
        timeout, interval = config.server.worker_timeout, watchdog_seconds(os.environ, os.getpid())
        if interval and timeout >= interval:
            log.warning("watchdog is quicker than worker_timeout", watchdog=interval, worker_timeout=timeout)
        listening = [sock for sock in (fleet.unix, fleet.slots[0].listener) if sock is not None]
        self._watchdog = Watchdog(
            interval, self._notify, selector, log, [(sock.family, sock.getsockname()) for sock in listening],
            lambda: stalled(fleet.slots, fleet.board, timeout, time.monotonic()),
        )  # fmt: skip

    @property
    def due(self) -> float:
        """When `turn` has something to do, monotonic seconds."""
        return self._watchdog.due

    def turn(self, now: float, state: str, children: Iterable[Child], *, reload_waits: bool) -> None:
        """`state`: the master's. `reload_waits`: one is asked for and has not begun."""
        turnover, fleet = self._turnover, self._fleet
        coming = state in ("loading", "starting") or not turnover.change.over
        served = [model.name for model in (turnover.serving.wanted if turnover.serving else self._config.models)]
        models = [turnover.loading] if state == "loading" else served
        self._herald.turn(now, state, models, fleet.slots, children, rows=fleet.rows.high, loading=coming)
        self._watchdog.turn(now, serving=state == "ready")
        if self._reloading and turnover.change.over and not reload_waits:
            self._reloading = False
            self._notify.ready()

    def ready(self) -> None:
        """Every slot has answered a warm-up, and we are the service."""
        self._notify.quiet = False
        models = self._turnover.serving.wanted if self._turnover.serving else ()
        self._notify.ready(f"serving {', '.join(model.name for model in models)}")
        if self._reloading:  # asked of the master before us
            self._notify.reloading()

    def reloading(self) -> None:
        """The manager, or somebody else, has asked for a reload by signal; its end is told by `turn`."""
        self._reloading = True
        self._notify.reloading()

    def handed(self, pid: int) -> None:
        """From now on another master is the service."""
        self._notify.main_pid(pid)
        self._notify.quiet = True

    def stopping(self, *, quick: bool) -> None:
        """We leave."""
        patience = QUICK if quick else self._config.server.graceful_timeout + KILL_MARGIN
        self._notify.stopping(patience + LEAVING)

"""The control socket's commands: each a function from a request to a plain answer, found by its name.

Runs in the master, inside its loop: nothing here waits. What takes time (a reload, a restart) is begun, and the
answer is the change's row; the command `change` tells later how it went.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from prefork import effective, status
from prefork.change import Change
from prefork.config import Config
from prefork.control import Request
from prefork.errors import FailedPrecondition, InvalidArgument, NotFound
from prefork.fleet import MAX_SLOTS, Fleet
from prefork.generation import Generation
from prefork.log import Logger
from prefork.shm import sweep
from prefork.succession import Succession
from prefork.turnover import Turnover

LONGEST = 86400.0 * 7  # seconds that a canary may be looked at


class Server(Protocol):
    """What the commands need of the master."""

    @property
    def state(self) -> str: ...
    def scale(self, count: int) -> None: ...
    def stop(self, why: str) -> None: ...
    @property
    def succession(self) -> Succession: ...


class Desk:
    """`answer` is the door; `reload` and `upgrade` are open to signals too. Raises PreforkError."""

    def __init__(
        self, server: Server, config: Config, reread: Callable[[], Config], log: Logger, fleet: Fleet,
        turnover: Turnover, unix_path: str | None,
    ) -> None:  # fmt: skip
        """`config`: as it was read at the start; `reread`: as its sources have it now."""
        self._server = server
        self._reread = reread
        self._log = log
        self._config = config
        self._fleet = fleet
        self._turnover = turnover
        self._unix_path = unix_path
        self._commands: dict[str, Callable[[Request], dict[str, Any]]] = {
            "status": self._status,
            "segments": lambda _: {"segments": [status.segment_row(info) for info in sweep.list_segments()]},
            "scale": self._scale,
            "stop": self._stop,
            "reload": self._reload,
            "rollback": lambda _: self._rollback(),
            "upgrade": lambda _: self.upgrade(),
            "restart": lambda _: self._changed(self._turnover.restart),
            "promote": lambda _: self._changed(self._turnover.promote),
            "change": self._change,
            "drain": lambda request: self._slot(request, self._fleet.drain),
            "undrain": lambda request: self._slot(request, self._fleet.undrain),
            "recycle": self._recycle,
        }

    def answer(self, request: Request) -> dict[str, Any]:
        """Do what is asked."""
        deed = self._commands.get(request.command)
        if deed is None:
            raise InvalidArgument(
                f"command {request.command!r} is unknown; expected one of {', '.join(self._commands)}"
            )  # fmt: skip
        return deed(request)

    def _status(self, request: Request) -> dict[str, Any]:
        state, turnover, fleet = self._server.state, self._turnover, self._fleet
        serving, bind = turnover.serving, [] if state == "stopping" else [fleet.address]
        return {
            **status.server(self._config, state, fleet.restarts, bind, self._unix_path),
            "generation": serving.number if serving else None,
            "workers": [status.worker_row(slot, fleet.board) for slot in fleet.slots],
            "leaving": [status.leaving_row(child) for child in fleet.replaced],
            "models": [status.model_row(model) for model in (serving.models if serving else ())],
            "loading": turnover.loading,
            "template": self._template(serving),
            "change": turnover.row(),
            "upgrade": self._server.succession.row(),
            "previous": turnover.previous.number if turnover.previous else None,
        }

    def _template(self, serving: Generation | None) -> dict[str, Any]:
        if serving is None:
            return status.template_row("none", "", None)
        nursery = serving.nursery
        return status.template_row(nursery.state, nursery.reason, nursery.template)

    def _scale(self, request: Request) -> dict[str, Any]:
        count = request.integer("workers", 1, MAX_SLOTS)
        self._server.scale(count)
        return {"workers": count}

    def _stop(self, request: Request) -> dict[str, Any]:
        self._server.stop("prefork-ctl stop")
        return {}

    def _reload(self, request: Request) -> dict[str, Any]:
        names = request.args.get("models", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidArgument(f"reload: models must be a list of names, found {names!r}")
        share = request.number("canary", 0.0, 1.0, default=1.0)
        hold = request.number("canary_seconds", 0.0, LONGEST, default=math.inf)
        if not math.isinf(hold) and share >= 1:
            raise InvalidArgument("reload: canary_seconds needs a canary below 1, which is what it decides on")
        forced = request.args.get("force", False) is True
        return self._changed(lambda: self.reload(names, share, hold, forced=forced))

    def reload(
        self, names: Sequence[str], share: float = 1.0, hold: float = math.inf, *, forced: bool = False
    ) -> Change:
        """Serve the models of the configuration as its sources have it now, loaded anew; or only those of `names`.

        Raises ConfigError, FailedPrecondition or NotFound; nothing has changed then."""
        if self._server.state != "ready":
            raise FailedPrecondition(f"reload: the server is {self._server.state}, expected ready")
        self._server.succession.idle("reload")
        found = self._reread()
        for text in found.warnings:
            self._log.warning(text)
        if ignored := effective.differing(self._config, found):
            self._log.warning("changed but read at a start only", keys=", ".join(ignored))
        return self._turnover.reload(found.models, names, share, hold, forced=forced)

    def upgrade(self) -> dict[str, Any]:
        """Start the program anew, to take our place. Raises FailedPrecondition."""
        state, change = self._server.state, self._turnover.change
        if state != "ready" or not change.over:
            found = state if state != "ready" else f"in a {change.kind}"
            raise FailedPrecondition(f"upgrade: the server is {found}, expected ready")
        self._server.succession.begin()
        return self._server.succession.row()

    def _rollback(self) -> dict[str, Any]:
        if self._server.succession.busy:
            self._server.succession.abort()
            return self._turnover.row()
        return self._changed(self._turnover.rollback)

    def _changed(self, begin: Callable[[], Change]) -> dict[str, Any]:
        if self._server.state != "ready":
            raise FailedPrecondition(f"the server is {self._server.state}, expected ready")
        self._server.succession.idle("change of what is served")
        begin()
        return self._turnover.row()

    def _change(self, request: Request) -> dict[str, Any]:
        return self._turnover.row(request.integer("number", 1, 2**53) if "number" in request.args else 0)

    def _slot(self, request: Request, deed: Callable[[int, float], None]) -> dict[str, Any]:
        count = len(self._fleet.slots)
        index = request.integer("slot", 0, MAX_SLOTS - 1)
        if index >= count:
            raise NotFound(f"{request.command}: there is no slot {index}; expected 0 to {count - 1}")
        if self._server.state != "ready":
            raise FailedPrecondition(f"{request.command}: the server is {self._server.state}, expected ready")
        deed(index, time.monotonic())
        return {"slot": index}

    def _recycle(self, request: Request) -> dict[str, Any]:
        if not self._turnover.change.over:
            raise FailedPrecondition("recycle: workers are being replaced already")
        return self._slot(request, self._fleet.recycle)

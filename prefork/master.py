"""The master: keeps the right children alive, and owns what must outlive them. One thread; no numeric library, ever.

It owns the listening sockets, the segments, the scoreboard, the control socket and the runtime directory. Everything
happens in one loop: signal handlers only enqueue, children speak over their channels, and one waitpid loop sees every
death, also of strangers when it is PID 1. States (SIGNALS.md draws them):

| state | meaning | next |
|---|---|---|
| loading | loaders prepare the models | starting, stopping |
| starting | workers come up for the first time | ready, stopping |
| ready | every slot has answered a warm-up once; changes of what is served (turnover.py) leave it so | stopping |
| stopping | children are leaving | gone |
"""

from __future__ import annotations

import math
import os
import resource
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal

from prefork import child as children
from prefork import cpus, effective
from prefork.change import Change
from prefork.child import Child
from prefork.config import Config, ModelConfig
from prefork.control_server import ControlServer
from prefork.desk import Desk
from prefork.errors import ConfigError, FailedPrecondition, PreforkError
from prefork.fleet import Fleet
from prefork.generation import Generation, Stored
from prefork.house import House
from prefork.jobs import CachePlace, LoadedModel
from prefork.log import Logger, setup
from prefork.notify import Notifier
from prefork.reporting import Reporting
from prefork.turnover import Turnover

State = Literal["loading", "starting", "ready", "stopping"]

LOOK = 1.0  # seconds between looks at what tells nobody when it is over
HANDLED = ("TERM", "INT", "QUIT", "HUP", "USR1", "USR2", "TTIN", "TTOU", "CHLD", "WINCH")


def serve(config: Config, reread: Callable[[], Config]) -> int:
    """Run the server until it is told to stop; the exit code (0 after TERM, INT or QUIT). `reread`: the configuration
    as its sources have it by then, for a reload. Raises PreforkError when it cannot begin."""
    try:
        log = setup(config.log.level, config.log.format, config.log.file, role="master")
    except OSError as e:
        raise ConfigError(f"log.file {str(config.log.file)!r}: {e.strerror}") from None
    return Master(config, log, reread).run()


class Master:
    """`run` is the only door; everything else is called by its loop, the public rest by the desk in it."""

    def __init__(self, config: Config, log: Logger, reread: Callable[[], Config]) -> None:
        self._config = config
        self._reread = reread
        self._reload_asked = False
        self._told = ""
        self._log = log
        self._state: State = "loading"
        self._error: PreforkError | None = None
        self._children: dict[int, Child] = {}
        self._unborn: set[Child] = set()  # asked of the template, pid not known yet
        self._next_look = time.monotonic()
        self._notify = Notifier(os.environ)
        self._selector = selectors.DefaultSelector()
        self._signals: deque[int] = deque()
        self._wake, self._wake_in = socket.socketpair()

    def run(self) -> int:
        """Open, loop, close. What goes wrong before READY is raised; later faults are logged and survived."""
        self._catch_signals()
        with ExitStack() as stack:
            self._house = House(self._config, self._log)
            stack.callback(self._house.close)
            self._open(stack)
            stack.callback(self._kill_all)
            while self._state != "stopping" or self._children or self._unborn:
                self._turn()
        signal.set_wakeup_fd(-1)
        if self._error is not None:
            raise self._error
        self._log.info("stopped")
        return 0

    # beginning and end

    def _open(self, stack: ExitStack) -> None:
        config, house = self._config.server, self._house
        children.prctl(children.PR_SET_CHILD_SUBREAPER, 1)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # children inherit it; nothing of ours uses select(2)
        allowed = cpus.allowed()
        count = config.workers or allowed.count
        assert house.work is not None
        self._fleet = Fleet(self._config, self._log, house.work, self._add, count)
        stack.callback(self._fleet.close)
        self._fleet.unix = house.unix
        self._reporting = Reporting(self._config, self._log, self._fleet.board)
        stack.callback(self._reporting.close)
        self._turnover = Turnover(self._config, self._log, self._fleet, self._reporting, self._make, self._add)
        stack.callback(self._turnover.close)
        desk = Desk(self, self._config, self._fleet, self._turnover)
        self._control = ControlServer(house.control, self._selector, desk.answer)
        self._log.info(
            "starting", workers=count, cpus=allowed.reason, bind=self._fleet.address, unix=config.unix,
            runtime_dir=config.runtime_dir, metrics=self._reporting.bind,
        )  # fmt: skip
        self._turnover.start(self._config.models)

    def _make(self, number: int, models: Sequence[ModelConfig], kept: Mapping[str, Stored]) -> Generation:
        server, house = self._config.server, self._house
        assert house.work is not None
        place = CachePlace.of(server)
        return Generation(number, models, server.shm, house.owner, house.work, self._log, place, kept)

    def _catch_signals(self) -> None:
        for sock in (self._wake, self._wake_in):
            sock.setblocking(False)
        # the socket only wakes the loop and may be full; what was sent stands in the deque
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        for name in HANDLED:
            signal.signal(getattr(signal, f"SIG{name}"), lambda number, frame: self._signals.append(number))
        self._selector.register(self._wake, selectors.EVENT_READ, self._drain_wake)

    def _kill_all(self) -> None:
        for child in (*self._unborn, *self._children.values()):
            child.kill(signal.SIGKILL)
        for pid in list(self._children):
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    @property
    def state(self) -> str:
        return self._state

    # the loop

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            self._survive(key.data)
        while self._signals:
            self._signal(signal.Signals(self._signals.popleft()))
        now = time.monotonic()
        self._reap(now)
        if self._state == "loading":
            self._look_at_start()
        if self._state in ("starting", "ready"):
            self._survive(lambda: self._turnover.tend(now))
            if error := self._fleet.tend(now):
                self._fail(error)
        if self._reload_asked and self._state == "ready" and self._turnover.change.over:
            self._reload_asked = False
            self._survive(self._reload_on_signal)
        self._report(now)
        if now >= self._next_look:
            # a master that was frozen itself gives its workers a second to tick
            if now - self._next_look < LOOK:
                self._survive(lambda: self._look(now))
            self._control.expire(now)
            self._next_look = now + LOOK
            for child in self._children.values():
                if child.role != "worker" and child.kill_at is not None and now >= child.kill_at:
                    child.kill(signal.SIGKILL)

    def _look(self, now: float) -> None:
        self._fleet.look(now)
        if self._state == "ready" and self._turnover.change.over:
            self._fleet.recycle_due(now)

    def _report(self, now: float) -> None:
        serving = self._turnover.serving
        number = serving.number if serving is not None else 1
        self._reporting.write(self._state, number, self._fleet.slots, self._fleet.rows.high)
        if self._state == "stopping":
            self._reporting.dismiss(self._children.values(), now)
        elif child := self._reporting.serve(now):
            self._add(child)

    def _survive(self, deed: Any) -> None:
        """Before READY a fault ends the start; later one must not take everybody's workers along."""
        try:
            deed()
        except Exception as e:
            if self._state in ("loading", "starting"):
                raise
            self._log.crash("the master goes on after a fault", e)

    def _patience(self) -> float:
        moments = [self._next_look]
        if self._state in ("starting", "ready") and (moment := self._fleet.next_due()) is not None:
            moments.append(moment)
        return max(0.0, min(moments) - time.monotonic())

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _signal(self, number: signal.Signals) -> None:
        match number:
            case signal.SIGTERM:
                self._stop("SIGTERM", quick=False)
            case signal.SIGINT | signal.SIGQUIT:
                self._stop(number.name, quick=True)
            case signal.SIGTTIN:
                self._scale_by(+1)
            case signal.SIGTTOU:
                self._scale_by(-1)
            case signal.SIGUSR1:
                self._log.reopen()
                for child in (*self._unborn, *self._children.values()):
                    child.send({"command": "reopen"})
            case signal.SIGHUP:
                self._reload_asked = True
            case signal.SIGUSR2:
                self._log.warning("signal is not supported yet, nothing changes", signal=number.name)

    def _reap(self, now: float) -> None:
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # as PID 1 or subreaper also strangers end here; they are no business of ours
            if pid not in self._children:
                for unborn in list(self._unborn):  # one of them may have said who it is
                    self._hear(unborn)
            if child := self._children.pop(pid, None):
                self._hear(child)
                if not child.closed:  # a grandchild holds the other end
                    self._selector.unregister(child.channel)
                child.channel.close()
                self._left(child, code, now)

    def _left(self, child: Child, code: int, now: float) -> None:
        stopping = self._state == "stopping"
        if child.role in ("loader", "template"):
            error = self._turnover.left(child, code, now)
        elif child.role == "telemetry":
            self._reporting.left(child, code, now)
            return
        else:
            before = self._fleet.restarts
            error = self._fleet.left(child, code, now, stopping=stopping)
            if self._fleet.restarts > before:
                self._reporting.restarted(child, code, stalled=child.stalled)
        if error is not None:
            self._fail(error)

    def _add(self, child: Child) -> None:
        if child.pid == children.UNBORN:
            self._unborn.add(child)
        else:
            self._children[child.pid] = child
        self._selector.register(child.channel, selectors.EVENT_READ, lambda: self._hear(child))

    def _hear(self, child: Child) -> None:
        messages = child.receive()
        if child.closed and child.channel in self._selector.get_map():
            self._selector.unregister(child.channel)  # its end of file would wake us until the child is reaped
        for message in messages:
            child.said = message
            match message["event"]:
                case "hello" if child in self._unborn:
                    self._unborn.remove(child)
                    child.pid = int(message["pid"])
                    self._children[child.pid] = child
                case _ if child.role in ("loader", "template"):
                    self._turnover.hear(child, message)
                case "ready" if child.role == "worker":
                    if self._fleet.ready(child, time.monotonic()) and self._state == "starting":
                        self._ready()
                case "leaving" if self._state != "stopping":
                    self._fleet.asks_to_leave(child, time.monotonic())
        if child.closed and child in self._unborn:  # it was never forked, or died before its first word
            self._unborn.remove(child)
            child.channel.close()
            self._left(child, children.CRASH << 8, time.monotonic())

    # starting

    def _look_at_start(self) -> None:
        turnover = self._turnover
        if turnover.error is not None:
            self._fail(turnover.error)
        elif turnover.serving is not None:
            self._state = "starting"
            self._notify.status("starting workers")
        elif turnover.loading != self._told:
            self._told = turnover.loading
            self._notify.status(f"loading {self._told}")

    def _ready(self) -> None:
        server = self._config.server
        self._state = "ready"
        self._log.info("READY", bind=self._fleet.address, unix=server.unix, control=server.control)
        self._notify.ready(f"serving {', '.join(model.name for model in self._served())}")

    def _served(self) -> Sequence[LoadedModel]:
        return self._turnover.serving.models if self._turnover.serving is not None else ()

    def _fail(self, error: PreforkError) -> None:
        self._error = error
        self._stop("failed start", quick=True)

    # scaling and stopping

    def _scale_by(self, step: int) -> None:
        wanted = sum(slot.wanted for slot in self._fleet.slots)
        try:
            self.scale(wanted + step)
        except PreforkError as e:
            self._log.warning("scaling refused", reason=e)

    def scale(self, count: int) -> None:
        """Raises InvalidArgument, FailedPrecondition or ResourceExhausted."""
        if self._state == "stopping":
            raise FailedPrecondition("the server is stopping")
        self._fleet.scale_to(count, time.monotonic())

    def stop(self, why: str) -> None:
        """Stop gracefully."""
        self._stop(why, quick=False)

    def _stop(self, why: str, *, quick: bool) -> None:
        again = self._state == "stopping"
        if again and not quick:
            return
        self._log.info("stopping", why=why, quick=quick)
        self._state = "stopping"
        self._notify.stopping()
        self._house.unlink_public()
        self._turnover.stop()
        self._fleet.stop(time.monotonic(), quick=quick, again=again)

    # changes and control

    def _reload_on_signal(self) -> None:
        try:
            self.reload([], 1.0, math.inf)
        except PreforkError as e:
            self._log.error("reload refused", reason=e)

    def reload(self, names: Sequence[str], share: float, hold: float) -> Change:
        """Serve the models of the configuration as its sources have it now, loaded anew; or only those of `names`.

        Raises ConfigError, FailedPrecondition or NotFound; nothing has changed then."""
        if self._state != "ready":
            raise FailedPrecondition(f"reload: the server is {self._state}, expected ready")
        found = self._reread()
        if ignored := effective.differing(self._config, found):
            self._log.warning("changed but read at a start only", keys=", ".join(ignored))
        return self._turnover.reload(found.models, names, share, hold)

"""The master: keeps the right children alive, and owns what must outlive them. One thread; no numeric library, ever.

It owns the listening sockets, the segments, the scoreboard, the control socket and the runtime directory. Everything
happens in one loop: signal handlers only enqueue, children speak over their channels, and one waitpid loop sees every
death, also of strangers when it is PID 1. States (SIGNALS.md draws them):

| state | meaning | next |
|---|---|---|
| loading | loaders prepare the models | starting, stopping |
| starting | workers come up for the first time; then the master before us, if any, is waited for | ready, stopping |
| ready | every slot has answered a warm-up once; changes of what is served (turnover.py) leave it so | stopping |
| stopping | children are leaving | gone |
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal

from prefork import child as children
from prefork import cpus, preflight
from prefork.child import Child
from prefork.config import Config, ModelConfig
from prefork.control_server import ControlServer
from prefork.desk import Desk
from prefork.errors import FailedPrecondition, PreforkError
from prefork.estate import Estate
from prefork.fleet import Fleet
from prefork.generation import Generation, Stored
from prefork.house import House
from prefork.jobs import CachePlace
from prefork.log import Logger
from prefork.oom import OomWatch
from prefork.reporting import Reporting
from prefork.signals import Signals
from prefork.succession import Heir, Parts, Succession
from prefork.supervisor import Supervisor
from prefork.turnover import Turnover
from prefork.watch import Watch

State = Literal["loading", "starting", "ready", "stopping"]

LOOK = 1.0  # seconds between looks at what tells nobody when it is over


class Master:
    """`run` is the only door; everything else is called by its loop, the public rest by the desk in it."""

    def __init__(
        self, asked: Config, config: Config, log: Logger, reread: Callable[[], Config], left: Estate | None = None
    ) -> None:
        """`config`: what fits of what was `asked`. `left`: by the master whose place we take."""
        self._asked, self._config, self._left_to_us = asked, config, left
        self._heir: Heir | None = None
        self._control: ControlServer | None = None  # none as long as another master is the server
        self._sweep_due = False
        self._reread = reread
        self._reload_asked = False
        self._watch = Watch(config.server.watch)
        self._log = log
        self._state: State = "loading"
        self._error: PreforkError | None = None
        self._children: dict[int, Child] = {}
        self._unborn: set[Child] = set()  # asked of the template, pid not known yet
        self._next_look = time.monotonic()
        self._oom = OomWatch()
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Open, loop, close. What goes wrong before READY is raised; later faults are logged and survived."""
        self._signals = Signals(self._selector)
        with ExitStack() as stack:
            if self._left_to_us is not None:
                self._heir = Heir(self._left_to_us, self._selector, self._take_over, self._reopen)
            self._house = House(self._config, self._log, self._left_to_us)
            stack.callback(self._house.close)
            self._open(stack)
            stack.callback(self._kill_all)
            while self._state != "stopping" or self._children or self._unborn or self._waited_for:
                self._turn()
            if self._error is not None:
                raise self._error
        self._signals.close()
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
        self._fleet = Fleet(self._config, self._log, house.work, self._add, count, house.given)
        stack.callback(self._fleet.close)
        self._fleet.unix = house.unix
        left = self._left_to_us
        self._reporting = Reporting(
            self._config, self._log, self._fleet.board, left.metrics_of(self._config) if left else None
        )
        stack.callback(self._reporting.close)
        self._turnover = Turnover(self._config, self._log, self._fleet, self._reporting, self._make, self._add)
        stack.callback(self._turnover.close)
        quiet = left is not None
        self._supervisor = Supervisor(self._config, self._log, self._selector, self._fleet, self._turnover, quiet=quiet)
        self.succession = Succession(
            Parts(self._config, house, self._fleet, self._reporting, self._turnover, self._supervisor),
            self._log, self._selector, self._leave_to_heir,
        )  # fmt: skip
        stack.callback(self.succession.crash)
        self._desk = Desk(self, self._asked, self._reread, self._log, self._fleet, self._turnover, house.unix_path)
        if left is None:
            self._control = ControlServer(house.control, self._selector, self._desk.answer)
        self._log.info(
            "starting", workers=count, cpus=allowed.reason, bind=self._fleet.address, unix=house.unix_path,
            runtime_dir=config.runtime_dir, metrics=self._reporting.bind,
        )  # fmt: skip
        self._watch.look(self._config.models, time.monotonic())
        kept = self._heir.kept(self._config, self._log) if self._heir else {}
        self._turnover.start(self._config.models, kept, left.generation if left else 0)
        for stored in kept.values():
            stored.drop()  # the generation has taken it

    def _make(self, number: int, models: Sequence[ModelConfig], kept: Mapping[str, Stored]) -> Generation:
        server, house = self._config.server, self._house
        assert house.work is not None
        place = CachePlace.of(server)
        return Generation(number, models, server.shm, house.owner, house.work, self._log, place, kept)

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
        for number in self._signals.arrived():
            self._signal(number)
        now = time.monotonic()
        self._reap(now)
        if self._state == "loading":
            self._look_at_start()
        if self._state in ("starting", "ready"):
            self._survive(lambda: self._turnover.tend(now))
            if error := self._fleet.tend(now):
                self._fail(error)
        if self._reload_asked and self._settled:
            self._reload_asked = False
            self._survive(lambda: self._unasked("reload", lambda: self._desk.reload([])))
        self._report(now)
        if now >= self._next_look:
            # a master that was frozen itself gives its workers a second to tick
            if now - self._next_look < LOOK:
                self._survive(lambda: self._look(now))
            self._oom.look(now)
            if self._control is not None:
                self._control.expire(now)
            self._next_look = now + LOOK
            for child in self._children.values():
                if child.role != "worker" and child.kill_at is not None and now >= child.kill_at:
                    child.kill(signal.SIGKILL)

    def _look(self, now: float) -> None:
        self._fleet.look(now)
        if self._sweep_due and self._house.alone:
            self._sweep_due = False
            self._house.sweep()
        self.succession.look(now)
        if not self._settled or self._turnover.serving is None:
            return
        if changed := self._watch.look(self._turnover.serving.wanted, now):
            self._log.info("model files have changed", models=", ".join(changed))
            self._unasked("reload", lambda: self._desk.reload(changed))
        else:
            self._fleet.recycle_due(now)

    @property
    def _waited_for(self) -> bool:
        """Whether others than our children are to end before us: who asked while we hand over, whom we do not want."""
        return self.succession.busy or (self._control is not None and self._control.closing)

    @property
    def _settled(self) -> bool:
        """Whether a change of what is served may begin."""
        return self._state == "ready" and self._turnover.change.over and not self.succession.busy

    def _report(self, now: float) -> None:
        serving = self._turnover.serving
        number = serving.number if serving is not None else 1
        self._reporting.write(self._state, number, self._fleet.slots, self._fleet.rows.high)
        self._supervisor.turn(now, self._state, self._children.values(), reload_waits=self._reload_asked)
        if self._state == "stopping":
            self._reporting.dismiss(self._children.values(), now)
        elif self._control is not None and (child := self._reporting.serve(now)):
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
        moments = [self._next_look, self._supervisor.due]
        if self._state in ("starting", "ready") and (moment := self._fleet.next_due()) is not None:
            moments.append(moment)
        return max(0.0, min(moments) - time.monotonic())

    def _signal(self, number: signal.Signals) -> None:
        match number:
            case signal.SIGTERM:
                self._stop("SIGTERM", quick=False)
            case signal.SIGINT | signal.SIGQUIT:
                self._stop(number.name, quick=True)
            case signal.SIGTTIN:
                self._unasked("scaling", lambda: self.scale(self._wanted + 1))
            case signal.SIGTTOU:
                self._unasked("scaling", lambda: self.scale(self._wanted - 1))
            case signal.SIGUSR1:
                self._reopen()
                self.succession.reopen()
            case signal.SIGHUP:
                self._reload_asked = True
                self._supervisor.reloading()
            case signal.SIGUSR2:
                self._unasked("upgrade", self._desk.upgrade)

    def _reopen(self) -> None:
        self._log.reopen()
        for child in (*self._unborn, *self._children.values()):
            child.send({"command": "reopen"})

    def _unasked(self, what: str, deed: Callable[[], object]) -> None:
        """By signal or by ourselves: there is nobody to tell a refusal but the log."""
        try:
            deed()
        except PreforkError as e:
            self._log.error(f"{what} refused", reason=e)

    @property
    def _wanted(self) -> int:
        return sum(slot.wanted for slot in self._fleet.slots)

    def _reap(self, now: float) -> None:
        while True:
            try:
                pid, code, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.succession.left(pid, code):
                continue
            # as PID 1 or subreaper also strangers end here; they are no business of ours
            if pid not in self._children:
                for unborn in list(self._unborn):  # one of them may have said who it is
                    self._hear(unborn)
            if child := self._children.pop(pid, None):
                self._hear(child)
                if not child.closed:  # a grandchild holds the other end
                    self._selector.unregister(child.channel)
                child.channel.close()
                self._oom.judge(child, code, now, usage.ru_maxrss * 1024)
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

    def _ready(self) -> None:
        """Every slot has answered a warm-up. The master before us, if it lives, serves until it knows."""
        if self._control is None and self._heir is not None:
            self._heir.ready(self._turnover.serving.models if self._turnover.serving else ())
            return
        server = self._config.server
        self._state = "ready"
        self._log.info("READY", bind=self._fleet.address, unix=self._house.unix_path, control=server.control)
        self._supervisor.ready()

    def _fail(self, error: PreforkError) -> None:
        self._error = error
        self._stop("failed start", quick=self._control is not None)

    # scaling and stopping

    def scale(self, count: int) -> None:
        """Raises InvalidArgument, FailedPrecondition or ResourceExhausted."""
        if self._state == "stopping":
            raise FailedPrecondition("the server is stopping")
        self.succession.idle("scale")
        if count > len(self._fleet.slots):
            preflight.grow(self._config, count)
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
        if self._control is None and self._left_to_us is not None:
            self._left_to_us.decline(self._error.message if self._error else f"the new program stops: {why}")
        self.succession.stop(quick=quick)
        self._supervisor.stopping(quick=quick)
        self._house.unlink_public()
        self._turnover.stop()
        # what waits in the queues is the master's before us as long as it is there
        self._fleet.stop(time.monotonic(), quick=quick, again=again, heir=self._control is None)

    # another master in our place

    def _leave_to_heir(self) -> None:
        self._state = "stopping"
        if self._control is not None:
            self._control.close()
        if self._reload_asked:
            os.kill(self.succession.pid, signal.SIGHUP)

    def _take_over(self) -> None:
        self._control = ControlServer(self._house.control, self._selector, self._desk.answer)
        self._house.take_over()
        self._sweep_due = True
        self._log.info("the server before us has let go", pid=os.getpid())
        if self._fleet.up and self._state == "starting":
            self._ready()

"""The master: keeps the right children alive, and owns what must outlive them. One thread; no numeric library, ever.

It owns the listening sockets, the segments, the scoreboard, the control socket and the runtime directory. Everything
happens in one loop: signal handlers only enqueue, children speak over their channels, and one waitpid loop sees every
death, also of strangers when it is PID 1. States (SIGNALS.md draws them):

| state | meaning | next |
|---|---|---|
| loading | loaders prepare the models | starting, stopping |
| starting | workers come up for the first time | ready, stopping |
| ready | every slot has answered a warm-up once | stopping |
| stopping | children are leaving | gone |
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import time
from contextlib import suppress
from typing import Any, Literal

from prefork import child as children
from prefork import control, cpus, listener, slots, status
from prefork.child import Child
from prefork.config import Config
from prefork.control_server import ControlServer
from prefork.errors import ConfigError, FailedPrecondition, InvalidArgument, PreforkError
from prefork.generation import Generation
from prefork.house import House
from prefork.jobs import WorkerJob
from prefork.log import Logger, setup
from prefork.notify import Notifier
from prefork.shm import sweep
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import WorkerState
from prefork.slots import Slot

State = Literal["loading", "starting", "ready", "stopping"]

MAX_SLOTS = 1024  # lines of the scoreboard; a line is a few hundred bytes of untouched memory
HEARTBEAT_LOOK = 1.0  # seconds between looks at the workers' ticks
BOOT_TRIES = 3  # deaths without a reason, in a row and before any READY, that end the start
KILL_MARGIN = 3.0  # seconds beyond graceful_timeout that a worker has to flush and leave
QUICK = 2.0  # seconds that children have when the server stops at once
HANDLED = ("TERM", "INT", "QUIT", "HUP", "USR1", "USR2", "TTIN", "TTOU", "CHLD", "WINCH")


def serve(config: Config) -> int:
    """Run the server until it is told to stop; the exit code (0 after TERM, INT or QUIT). Raises PreforkError when it
    cannot begin."""
    try:
        log = setup(config.log.level, config.log.format, config.log.file, role="master")
    except OSError as e:
        raise ConfigError(f"log.file {str(config.log.file)!r}: {e.strerror}") from None
    return Master(config, log).run()


class Master:
    """`run` is the only door; everything else is called by its loop."""

    def __init__(self, config: Config, log: Logger) -> None:
        self._config = config
        self._log = log
        self._state: State = "loading"
        self._code = 0
        self._error: PreforkError | None = None
        self._children: dict[int, Child] = {}
        self._slots: list[Slot] = []
        self._restarts = 0
        self._next_look = 0.0
        self._kill_at: float | None = None
        self._notify = Notifier(os.environ)
        self._selector = selectors.DefaultSelector()
        self._signals, self._signals_in = socket.socketpair()

    def run(self) -> int:
        """Open, loop, close. What goes wrong before READY is raised; later faults are logged and survived."""
        house = self._house = House(self._config, self._log)
        try:
            self._open(house)
            while self._state != "stopping" or self._children:
                self._turn()
        finally:
            self._close()
        if self._error is not None:
            raise self._error
        self._log.info("stopped")
        return self._code

    # beginning and end

    def _open(self, house: House) -> None:
        config = self._config.server
        children.prctl(children.PR_SET_CHILD_SUBREAPER, 1)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # children inherit it; nothing of ours uses select(2)
        self._catch_signals()
        allowed = cpus.allowed()
        count = config.workers or allowed.count
        self._scoreboard = Scoreboard.create(MAX_SLOTS)
        sockets = listener.open_tcp(config.bind, count, config.backlog)
        self._slots = [Slot(index, sock) for index, sock in enumerate(sockets)]
        self._unix = listener.open_unix(config.unix, config.backlog) if config.unix else None
        self._control = ControlServer(house.control, self._selector, self._answer)
        self._generation = Generation(1, self._config.models, config.shm, house.owner, house.work, self._log)
        self._log.info(
            "starting", workers=count, cpus=allowed.reason, bind=listener.name_of(sockets[0]), unix=config.unix,
            runtime_dir=config.runtime_dir,
        )  # fmt: skip
        self._load()

    def _catch_signals(self) -> None:
        for sock in (self._signals, self._signals_in):
            sock.setblocking(False)
        signal.set_wakeup_fd(self._signals_in.fileno(), warn_on_full_buffer=False)
        for name in HANDLED:
            signal.signal(getattr(signal, f"SIG{name}"), lambda number, frame: None)
        self._selector.register(self._signals, selectors.EVENT_READ, self._take_signals)

    def _close(self) -> None:
        for child in self._children.values():
            child.kill(signal.SIGKILL)
        for pid in list(self._children):
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if hasattr(self, "_generation"):
            self._generation.retire()
        for slot in self._slots:
            slot.listener.close()
        self._house.close()
        signal.set_wakeup_fd(-1)

    # the loop

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            key.data()
        now = time.monotonic()
        self._reap(now)
        if self._state in ("starting", "ready"):
            self._fill_slots(now)
            self._guard(now)
        if now >= self._next_look:
            self._next_look = now + HEARTBEAT_LOOK
            self._look_at_ticks(now)
            self._control.expire(now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + QUICK
            for child in self._children.values():
                self._log.warning("killing", role=child.role, slot=child.slot, pid=child.pid)
                child.kill(signal.SIGKILL)

    def _patience(self) -> float:
        moments = [self._next_look]
        if self._kill_at is not None:
            moments.append(self._kill_at)
        if self._state in ("starting", "ready") and (moment := slots.next_due(self._slots)) is not None:
            moments.append(moment)
        return max(0.0, min(moments) - time.monotonic())

    def _take_signals(self) -> None:
        with suppress(BlockingIOError):
            for number in self._signals.recv(4096):
                self._signal(signal.Signals(number))

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
                for child in self._children.values():
                    child.send({"command": "reopen"})
            case signal.SIGHUP | signal.SIGUSR2:
                self._log.warning("signal is not supported yet, nothing changes", signal=number.name)

    def _reap(self, now: float) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # as PID 1 or subreaper also strangers end here; they are no business of ours
            if child := self._children.pop(pid, None):
                self._hear(child)
                if not child.closed:  # a grandchild holds the other end
                    self._selector.unregister(child.channel)
                child.channel.close()
                self._left(child, status, now)

    def _left(self, child: Child, code: int, now: float) -> None:
        if child.role == "loader":
            self._generation.loader_left(child, code)
            if self._state == "loading":
                self._load()
            return
        slot = self._slots[child.slot]
        if slot.child is child:
            self._scoreboard.slot(slot.index).end()
            self._worker_left(slot, child, code, now)

    def _add(self, child: Child) -> None:
        self._children[child.pid] = child
        self._selector.register(child.channel, selectors.EVENT_READ, lambda: self._hear(child))

    def _hear(self, child: Child) -> None:
        messages = child.receive()
        if child.closed and child.channel in self._selector.get_map():
            self._selector.unregister(child.channel)  # its end of file would wake us until the child is reaped
        for message in messages:
            child.said = message
            match message["event"]:
                case "ready":
                    child.ready_at = time.monotonic()
                    self._worker_ready(self._slots[child.slot], child)
                case "done" if self._state == "loading":
                    self._generation.published(child, message)

    # loading

    def _load(self) -> None:
        if self._generation.error is not None:
            self._fail(self._generation.error)
            return
        loader = self._generation.load_next()
        if loader is not None:
            self._add(loader)
            self._notify.status(f"loading {self._generation.loading}")
            return
        self._state = "starting"
        self._notify.status("starting workers")

    def _fail(self, error: PreforkError) -> None:
        self._error = error
        self._stop("failed start", quick=True)

    # workers

    def _fill_slots(self, now: float) -> None:
        for slot in slots.due(self._slots, now):
            guarded = {other.index: other.listener for other in self._slots if other.guardian == slot.index}
            job = WorkerJob(
                self._log, self._config, slot.index, self._generation.number, tuple(self._generation.models),
                {slot.index: slot.listener, **guarded}, self._unix, self._scoreboard, self._house.work.path,
            )  # fmt: skip
            try:
                slot.child = children.spawn("worker", slot.index, self._generation.number, job, job.descriptors)
            except OSError as e:
                slot.left(now, f"fork: {e.strerror}", asked=False)
                self._log.error("worker cannot be forked", slot=slot.index, error=e)
                continue
            self._add(slot.child)

    def _worker_ready(self, slot: Slot, child: Child) -> None:
        took = time.monotonic() - child.started
        self._log.info("worker ready", slot=slot.index, pid=child.pid, seconds=round(took, 3))
        if slot.guardian is not None:
            guardian = self._slots[slot.guardian].child
            if guardian is not None:
                guardian.send({"command": "release", "slot": slot.index})
            slot.guardian = None
        if self._state == "starting" and all(other.ready for other in self._slots if other.wanted):
            self._state = "ready"
            bound = listener.name_of(self._slots[0].listener)
            self._log.info("READY", bind=bound, unix=self._config.server.unix, control=self._config.server.control)
            self._notify.ready(f"serving {', '.join(model.name for model in self._generation.models)}")

    def _worker_left(self, slot: Slot, child: Child, code: int, now: float) -> None:
        how = children.describe_exit(code)
        said = child.said if child.said and child.said.get("event") == "failed" else None
        reason = str(said["message"]) if said else how
        asked = child.leaving or code == 0
        slot.left(now, reason, asked=asked)
        if slot.wanted and self._state != "stopping":
            self._restarts += 1
            self._log.warning("worker died", slot=slot.index, pid=child.pid, how=how, reason=reason)
        else:
            self._log.info("worker left", slot=slot.index, pid=child.pid, how=how)
        if self._state == "starting" and (said or slot.failures >= BOOT_TRIES):
            status_code = os.waitstatus_to_exitcode(code)
            self._fail(status.boot_error(slot.index, reason, status_code))

    def _guard(self, now: float) -> None:
        for slot in slots.unguarded(self._slots, now):
            guardian = slots.choose_guardian(self._slots)
            if guardian is None or guardian.child is None:
                return
            message = {"command": "adopt", "slot": slot.index}
            if guardian.child.send(message, [slot.listener.fileno()]):
                slot.guardian = guardian.index

    def _look_at_ticks(self, now: float) -> None:
        timeout = self._config.server.worker_timeout
        for slot in self._slots:
            slot.settled(now)
            if not timeout or not slot.ready or slot.child is None:
                continue
            reading = self._scoreboard.read(slot.index)
            silent = now - reading.tick_ns * 1e-9
            if reading.state is WorkerState.READY and silent > timeout:
                self._log.error("worker stalled, killing it", slot=slot.index, pid=slot.child.pid, silent_s=silent)
                slot.child.kill(signal.SIGKILL)

    def _scale_by(self, step: int) -> None:
        wanted = [slot for slot in self._slots if slot.wanted]
        try:
            self._scale_to(len(wanted) + step)
        except PreforkError as e:
            self._log.warning("scaling refused", reason=e)

    def _scale_to(self, count: int) -> None:
        if self._state == "stopping":
            raise FailedPrecondition("the server is stopping")
        if not 1 <= count <= MAX_SLOTS:
            raise InvalidArgument(f"workers: expected 1 to {MAX_SLOTS}, found {count}")
        while len(self._slots) < count:
            sock = listener.grow_tcp(self._slots[0].listener, self._config.server.backlog)
            self._slots.append(Slot(len(self._slots), sock))
        for slot in self._slots:
            before, slot.wanted = slot.wanted, slot.index < count
            if before and not slot.wanted and slot.child is not None:
                slot.child.leaving = True
                slot.child.send({"command": "retire"})
            elif slot.wanted and not before:
                slot.failures, slot.retry_at = 0, 0.0
        self._log.info("scaled", workers=count)

    # stopping

    def _stop(self, why: str, *, quick: bool) -> None:
        again = self._state == "stopping"
        if again and not quick:
            return
        self._log.info("stopping", why=why, quick=quick)
        self._state = "stopping"
        self._notify.stopping()
        now = time.monotonic()
        patience = QUICK if quick else self._config.server.graceful_timeout + KILL_MARGIN
        self._kill_at = min(self._kill_at or now + patience, now + patience)
        if not again:
            for slot in self._slots:  # nobody may be left in the queue of a slot that has no worker just now
                slot.wanted = slot.child is not None
            self._guard(now)
            self._house.unlink_sockets()
        for child in self._children.values():
            child.leaving = True
            if child.role == "loader" or not child.send({"command": "quit" if quick else "shutdown"}):
                child.kill(signal.SIGKILL)
        if not again:
            self._close_listeners()

    def _close_listeners(self) -> None:
        """The workers hold the last copies now, and close them after sweeping their queues."""
        for slot in self._slots:
            slot.listener.close()
        if self._unix is not None:
            self._unix.close()

    # control

    def _answer(self, request: control.Request) -> dict[str, Any]:
        match request.command:
            case "status":
                return self._status()
            case "segments":
                return {"segments": [status.segment_row(info) for info in sweep.list_segments()]}
            case "scale":
                count = request.integer("workers", 1, MAX_SLOTS)
                self._scale_to(count)
                return {"workers": count}
            case "stop":
                self._stop("prefork-ctl stop", quick=False)
                return {}
            case "reload":
                raise FailedPrecondition("reload is not supported yet; restart the server to serve another model")
        raise InvalidArgument(f"command {request.command!r} is unknown; expected status, segments, scale or stop")

    def _status(self) -> dict[str, Any]:
        bind = [] if self._state == "stopping" else [listener.name_of(self._slots[0].listener)]
        return {
            **status.server(self._config, self._state, self._restarts, bind),
            "workers": [status.worker_row(slot, self._scoreboard) for slot in self._slots],
            "models": [status.model_row(model, self._generation.number) for model in self._generation.models],
            "loading": self._generation.loading,
        }

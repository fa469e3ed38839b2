"""The workers of a running server and the slots they sit in: spawn, mind, replace, scale, stop.

Runs in the master, which reaps and passes on what children say; when to do what stands in slots.py. Owns the listening
sockets of the slots. A worker that is told to leave has until `kill_at`; whoever is silent longer than allowed is
killed.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence

from prefork import child as children
from prefork import listener, slots, status
from prefork.child import Child
from prefork.config import Config
from prefork.errors import ConfigError, InvalidArgument, PreforkError, ResourceExhausted
from prefork.jobs import LoadedModel, TemplateJob, WorkerJob
from prefork.log import Logger
from prefork.nursery import Nursery
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import WorkerState
from prefork.slots import Slot
from prefork.workdir import WorkDir

MAX_SLOTS = 1024  # pages of the scoreboard, 4 MB in all
BOOT_TRIES = 3  # deaths in a row and before any READY that end the start
KILL_MARGIN = 3.0  # seconds beyond graceful_timeout that a worker has to flush and leave
QUICK = 2.0  # seconds that children have when the server stops at once


class Fleet:
    """Doors: `serve`, `tend`, `ready`, `left`, `asks_to_leave`, `look`, `scale_to`, `stop`, `close`."""

    def __init__(self, config: Config, log: Logger, work: WorkDir, add: Callable[[Child], None], count: int) -> None:
        """Opens the sockets of `count` slots. `add` takes a new child into the master's loop. Raises ConfigError."""
        self._config = config
        self._log = log
        self._work = work
        self._add = add
        self.board = Scoreboard.create(MAX_SLOTS)
        self.nursery = Nursery(log)
        self.restarts = 0
        self.up = False  # every slot has been ready once
        self._models: tuple[LoadedModel, ...] = ()
        self._generation = 0
        sockets = listener.open_tcp(config.server.bind, count, config.server.backlog)
        self.slots = [Slot(index, sock) for index, sock in enumerate(sockets)]
        self.address = listener.name_of(sockets[0])
        self.unix: socket.socket | None = None

    def serve(self, generation: int, models: Sequence[LoadedModel]) -> None:
        """What workers spawned from now on serve; a template is opened for them."""
        self._generation, self._models = generation, tuple(models)
        job = TemplateJob(
            self._log, self._config, generation, self._models, self.board, self._work.path, os.getpid()
        )  # fmt: skip
        if self._config.server.template == "off":
            self.nursery.forgo("template is off")
        elif self._config.compute.threads > 1:
            self.nursery.forgo(f"runs use {self._config.compute.threads} threads each, which no fork survives")
        elif template := self.nursery.open(job):
            self._add(template)

    # normal life

    def tend(self, now: float) -> PreforkError | None:
        """Mind the queues that nobody serves, fill the slots that are due. The error that ends a start, if any."""
        self._guard(now)
        if template := self.nursery.reopen(now):
            self._add(template)
        if self.nursery.waiting:
            return None
        for slot in slots.due(self.slots, now):
            guarded = {other.index: other.listener for other in self.slots if other.guardian == slot.index}
            job = WorkerJob(
                self._log, self._config, slot.index, self._generation, self._models,
                {slot.index: slot.listener, **guarded}, self.unix, self.board, self._work.path,
            )  # fmt: skip
            try:
                slot.child = self.nursery.spawn(job) or children.spawn(
                    "worker", slot.index, self._generation, job, job.descriptors
                )
            except OSError as e:
                slot.left(now, f"fork: {e.strerror}", asked=False)
                self._log.error("worker cannot be forked", slot=slot.index, error=e)
                if not self.up and slot.failures >= BOOT_TRIES:
                    return status.boot_error(f"worker of slot {slot.index}", slot.reason, 0)
                continue
            self._add(slot.child)
        return None

    def next_due(self) -> float | None:
        """When `tend` has something to do."""
        return None if self.nursery.waiting else slots.next_due(self.slots)

    def ready(self, child: Child, now: float) -> bool:
        """A worker has answered its warm-up; True when with it every slot is ready for the first time."""
        slot = self.slots[child.slot]
        child.ready_at = now
        self._log.info("worker ready", slot=slot.index, pid=child.pid, seconds=round(now - child.started, 3))
        if slot.guardian is not None:
            guardian = self.slots[slot.guardian].child
            if guardian is not None:
                guardian.send({"command": "release", "slot": slot.index})
            slot.guardian = None
        if self.up or not all(other.ready for other in self.slots if other.wanted):
            return False
        self.up = True
        return True

    def left(self, child: Child, code: int, now: float, *, stopping: bool) -> PreforkError | None:
        """A worker is reaped with wait status `code`. The error that ends a start, if any."""
        slot = self.slots[child.slot]
        if slot.child is not child:
            return None
        self.board.slot(slot.index).end()
        how = children.describe_exit(code)
        said = child.said if child.said and child.said.get("event") == "failed" else None
        reason = str(said["message"]) if said else how
        slot.left(now, reason, asked=child.leaving or (code == 0 and child.ready_at is not None))
        if slot.wanted and not stopping:
            self.restarts += 1
            self._log.warning("worker died", slot=slot.index, pid=child.pid, how=how, reason=reason)
        else:
            self._log.info("worker left", slot=slot.index, pid=child.pid, how=how)
        if not self.up and not stopping and (said or slot.failures >= BOOT_TRIES):
            return status.boot_error(f"worker of slot {slot.index}", reason, os.waitstatus_to_exitcode(code))
        return None

    def asks_to_leave(self, child: Child, now: float) -> None:
        """Somebody sent the worker SIGTERM: it drains once its queue has found another server."""
        if not child.leaving:
            child.leaving = True
            self._guard(now)
            self._dismiss(child, now)

    def look(self, now: float) -> None:
        """Once a second: kill workers that are silent, and those that were told to leave and have not."""
        for slot in self.slots:
            slot.settled(now)
            if slot.child is not None and slot.child.pid == children.UNBORN:
                self.nursery.look(slot.child.started, now)
            if slot.child is not None and slot.child.leaving:
                if slot.child.kill_at is not None and now >= slot.child.kill_at:
                    self._log.warning("worker does not leave, killing it", slot=slot.index, pid=slot.child.pid)
                    slot.child.kill(signal.SIGKILL)
            elif slot.child is not None and slot.ready:
                self._look_at(slot, slot.child, now)

    def _look_at(self, slot: Slot, child: Child, now: float) -> None:
        timeout = self._config.server.worker_timeout
        try:
            reading = self.board.read(slot.index)
        except PreforkError as e:
            self._log.error("worker wrote nonsense, killing it", slot=slot.index, pid=child.pid, reason=e)
            child.kill(signal.SIGKILL)
            return
        silent = now - reading.tick_ns * 1e-9
        if timeout and reading.state is not WorkerState.DRAINING and silent > timeout:
            child.stalled = True
            self._log.error("worker stalled, killing it", slot=slot.index, pid=child.pid, silent_s=round(silent, 3))
            child.kill(signal.SIGKILL)

    def _guard(self, now: float) -> None:
        for slot in slots.unguarded(self.slots, now):
            guardian = slots.choose_guardian(self.slots)
            if guardian is None or guardian.child is None:
                return
            if guardian.child.send({"command": "adopt", "slot": slot.index}, [slot.listener.fileno()]):
                slot.guardian = guardian.index

    def _dismiss(self, child: Child, now: float, command: str = "retire") -> None:
        child.leaving = True
        told = child.send({"command": command})
        child.kill_at = now + self._config.server.graceful_timeout + KILL_MARGIN if told else now

    # scaling and the end

    def scale_to(self, count: int, now: float) -> None:
        """Raises InvalidArgument for a bad number, ResourceExhausted when no further socket is to be had."""
        if not 1 <= count <= MAX_SLOTS:
            raise InvalidArgument(f"workers: expected 1 to {MAX_SLOTS}, found {count}")
        fresh: list[socket.socket] = []
        try:
            while len(self.slots) + len(fresh) < count:
                fresh.append(listener.grow_tcp(self.slots[0].listener, self._config.server.backlog))
        except ConfigError as e:
            for sock in fresh:
                sock.close()
            raise ResourceExhausted(e.message) from None
        for sock in fresh:
            self.slots.append(Slot(len(self.slots), sock, wanted=False))
        retiring = []
        for slot in self.slots:
            before, slot.wanted = slot.wanted, slot.index < count
            if before and not slot.wanted and slot.child is not None:
                slot.child.leaving = True
                retiring.append(slot.child)
            elif slot.wanted and not before:
                slot.failures, slot.retry_at = 0, 0.0
        self._guard(now)
        for child in retiring:
            self._dismiss(child, now)
        self._log.info("scaled", workers=count)

    def stop(self, now: float, *, quick: bool, again: bool) -> None:
        """Tell every worker to leave. The first time, the queues of slots without a ready worker find another one,
        and the listening sockets are left to the workers, who sweep their queues before they close them."""
        self.nursery.close()
        if not again:
            for slot in self.slots:
                if not slot.ready:
                    slot.wanted = False
                    if slot.child is not None and slot.child.ready_at is None:
                        slot.child.kill(signal.SIGKILL)
            self._guard(now)
        for slot in self.slots:
            if slot.child is not None:
                self._dismiss(slot.child, now, "quit" if quick else "shutdown")
                if quick:
                    slot.child.kill_at = min(slot.child.kill_at or now, now + QUICK)
        self.close()

    def close(self) -> None:
        """Let go of the listening sockets. Idempotent."""
        for slot in self.slots:
            slot.listener.close()
        if self.unix is not None:
            self.unix.close()

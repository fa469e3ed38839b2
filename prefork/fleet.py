"""The workers of a running server and the slots they sit in: spawn, mind, replace, scale, stop.

Runs in the master, which reaps and passes on what children say; when to do what stands in slots.py. Owns the listening
sockets of the slots. A worker that is told to leave has until `kill_at`; whoever is silent longer than allowed is
killed. A worker is replaced without a gap by a successor on the same socket: once that is ready, the old one leaves.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator

from prefork import activation, listener, placement, slots, status
from prefork import child as children
from prefork.child import Child
from prefork.config import Config
from prefork.errors import ConfigError, FailedPrecondition, InvalidArgument, PreforkError, ResourceExhausted
from prefork.generation import Generation
from prefork.jobs import TemplateJob, WorkerJob
from prefork.log import Logger
from prefork.recycle import Recycling
from prefork.shm import words as board
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import WorkerState
from prefork.slots import Rows, Slot
from prefork.workdir import WorkDir

MAX_SLOTS = 1024
ROWS = 2 * MAX_SLOTS  # of the scoreboard: while workers are replaced there are two a slot; memory is taken when used
BOOT_TRIES = 3  # deaths in a row and before any READY that end the start
KILL_MARGIN = 3.0  # seconds beyond graceful_timeout that a worker has to flush and leave
QUICK = 2.0  # seconds that children have when the server stops at once
BIRTH = 30.0  # seconds that a successor forked from a template may take, which opens nothing


class Fleet:
    """Doors: `open_template`, `serve`, `replace`, `tend`, `ready`, `left`, `asks_to_leave`, `look`, `scale_to`, `stop`,
    `close`. `lost`: told of each wanted worker that dies unasked."""

    def __init__(
        self, config: Config, log: Logger, work: WorkDir, add: Callable[[Child], None], count: int,
        given: activation.Given,
    ) -> None:  # fmt: skip
        """Opens the sockets of `count` slots, unless `given` has some. `add` takes a new child into the master's loop.
        Raises ConfigError."""
        self._config = config
        self._log = log
        self._work = work
        self._add = add
        self.board = Scoreboard.create(ROWS)
        self.rows = Rows(ROWS)
        self._places = placement.of(config.server.pin, config.compute.threads)
        self._recycling = Recycling(config.server, self.board)
        self.restarts = 0
        self.up = False  # every slot has been ready once
        self._current = 0
        self.generations: dict[int, Generation] = {}  # those that have workers, or may get some
        self.replaced: set[Child] = set()  # workers whose successor has their slot already
        self.lost: Callable[[Child, str], None] = lambda child, reason: None
        sockets, whence = activation.slot_sockets(given, config.server.bind, count, config.server.backlog)
        self.slots = [Slot(index, sock, wanted=index < count) for index, sock in enumerate(sockets)]
        self.address = listener.name_of(sockets[0])
        self.unix: socket.socket | None = None
        self._kept = given.kept
        if given:
            whose = "sockets of the service manager" if given.managed else "sockets of the server before us"
            log.info(whose, address=self.address, slots=whence)

    def open_template(self, generation: Generation) -> None:
        """Workers of this generation are forked from a template, which imports what it needs while models load."""
        job = TemplateJob(
            self._log, self._config, generation.number, generation.models, self.board, self._work.path, os.getpid(),
            places=self._places, complete=generation.state == "loaded", quiet=self.up,
        )  # fmt: skip
        if self._config.server.template == "off":
            generation.nursery.forgo("template is off")
        elif self._config.compute.threads > 1:
            generation.nursery.forgo(f"runs use {self._config.compute.threads} threads each, which no fork survives")
        elif template := generation.nursery.open(job):
            self._add(template)

    def serve(self, generation: Generation) -> None:
        """What workers serve from now on; those that live stay what they are."""
        self.generations[generation.number] = generation
        self._current = generation.number
        for slot in self.slots:
            slot.generation = generation.number

    # normal life

    def tend(self, now: float) -> PreforkError | None:
        """Mind the queues that nobody serves, fill the slots that are due. The error that ends a start, if any."""
        self._guard(now)
        for generation in self.generations.values():
            if template := generation.nursery.reopen(now):
                self._add(template)
        for slot in slots.due(self._spawnable(), now):
            child = self._spawn(slot, now)
            if isinstance(child, Child):
                slot.child = child
                continue
            slot.left(now, child, asked=False)
            if not self.up and slot.failures >= BOOT_TRIES:
                return status.boot_error(f"worker of slot {slot.index}", slot.reason, 0)
        return None

    def _spawnable(self) -> list[Slot]:
        waiting = {number for number, generation in self.generations.items() if generation.nursery.waiting}
        return [slot for slot in self.slots if slot.generation not in waiting]

    def _spawn(self, slot: Slot, now: float) -> Child | str:
        """A worker for the slot, or why there is none. It is not in the slot yet."""
        generation = self.generations[slot.generation]
        row = self.rows.take(slot.row)
        if row is None:
            return "no row of the scoreboard is free: too many workers are still leaving"
        guarded = {other.index: other.listener for other in self.slots if other.guardian == slot.index}
        job = WorkerJob(
            self._log, self._config, slot.index, row, generation.number, generation.models,
            {slot.index: slot.listener, **guarded}, self.unix, self.board, self._work.path, self._places,
        )  # fmt: skip
        try:
            child = generation.nursery.spawn(job) or children.spawn(
                "worker", slot.index, generation.number, job, job.descriptors
            )
        except OSError as e:
            self.rows.give(row)
            self._log.error("worker cannot be forked", slot=slot.index, error=e)
            return f"fork: {e.strerror}"
        child.row = slot.row = row
        child.requests_before = self.board.peek(row, board.REQUESTS)
        self._add(child)
        return child

    def next_due(self) -> float | None:
        """When `tend` has something to do."""
        return slots.next_due(self._spawnable())

    def replace(self, slot: Slot, generation: int, now: float) -> bool:
        """Bring up a worker that serves `generation` beside the slot's own; False when there is none to be had now.

        An empty slot gets it as its own, at once; after a successor's death it takes its time."""
        if slot.child is not None and now < slot.retry_at:
            return False
        slot.generation = generation
        if slot.child is None:
            slot.failures, slot.retry_at = 0, 0.0
            return True
        child = self._spawn(slot, now)
        slot.successor = child if isinstance(child, Child) else None
        return slot.successor is not None

    def ready(self, child: Child, now: float) -> bool:
        """A worker has answered its warm-up; True when with it every slot is ready for the first time."""
        slot = self.slots[child.slot]
        child.ready_at = now
        self._log.info(
            "worker ready", slot=slot.index, pid=child.pid, generation=child.generation,
            seconds=round(now - child.started, 3),
        )  # fmt: skip
        if child is slot.successor:
            self._succeed(slot, child, now)
        if slot.guardian is not None and slot.ready:
            guardian = self.slots[slot.guardian]
            for minder in (guardian.child, guardian.successor):
                if minder is not None:
                    minder.send({"command": "release", "slot": slot.index})
            slot.guardian = None
        if self.up or not all(other.ready for other in self.slots if other.wanted):
            return False
        self.up = True
        return True

    def _succeed(self, slot: Slot, child: Child, now: float) -> None:
        """The successor takes the slot, and what its worker guarded; the worker goes when both listen."""
        for other in self.slots:
            if other.guardian == slot.index:
                child.send({"command": "adopt", "slot": other.index}, [other.listener.fileno()])
        before, slot.child, slot.successor = slot.child, child, None
        slot.failures = 0
        if before is not None:
            self.replaced.add(before)
            if not before.leaving:
                self._dismiss(before, now)

    def abandon(self, slot: Slot, now: float) -> None:
        """Do without the slot's successor, if there is one. One that listens may have clients, so it drains."""
        child = slot.successor
        if child is None:
            return
        if self._listens(child):
            slot.successor = None
            self.replaced.add(child)
            self._dismiss(child, now)
        else:
            child.kill(signal.SIGKILL)

    def _listens(self, child: Child) -> bool:
        return self.board.peek(child.row, board.STATE) >= WorkerState.READY

    def left(self, child: Child, code: int, now: float, *, stopping: bool) -> PreforkError | None:
        """A worker is reaped with wait status `code`. The error that ends a start, if any."""
        slot = self.slots[child.slot]
        self.board.slot(child.row).end()
        self.rows.give(child.row)
        how = child.how(code)
        said = child.said if child.said and child.said.get("event") == "failed" else None
        reason = str(said["message"]) if said else how
        if child is not slot.child:
            self._other_left(slot, child, how, reason, now)
            return None
        slot.left(now, reason, asked=child.leaving or (code == 0 and child.ready_at is not None))
        if slot.wanted and not stopping:
            self.restarts += 1
            self._log.warning("worker died", slot=slot.index, pid=child.pid, how=how, reason=reason)
        else:
            self._log.info("worker left", slot=slot.index, pid=child.pid, how=how)
        if slot.wanted and not stopping and not child.leaving:
            self.lost(child, reason)
        if not self.up and not stopping and (said or slot.failures >= BOOT_TRIES):
            return status.boot_error(f"worker of slot {slot.index}", reason, child.code(code))
        return None

    def _other_left(self, slot: Slot, child: Child, how: str, reason: str, now: float) -> None:
        self.replaced.discard(child)
        if child is not slot.successor:
            self._log.info("replaced worker left", slot=slot.index, pid=child.pid, how=how)
            return
        slot.successor = None
        if slot.wanted:
            slot.failures += 1
            slot.retry_at = now + slots.delay(slot.failures)
            self._log.warning("successor died", slot=slot.index, pid=child.pid, how=how, reason=reason)
            self.lost(child, reason)

    def drain(self, index: int, now: float) -> None:
        """Empty slot `index`: its worker leaves, its queue is another's; until `undrain`, or `scale_to` needs it.

        Raises FailedPrecondition when no other worker is there to take the connections."""
        slot = self.slots[index]
        if not any(other.ready for other in self.slots if other is not slot):
            raise FailedPrecondition(f"drain: no worker but that of slot {index} is ready to take its connections")
        self._retire([slot], now)
        self._log.info("draining", slot=index)

    def undrain(self, index: int, now: float) -> None:
        """Give slot `index` a worker again."""
        slot = self.slots[index]
        if not slot.wanted:
            slot.wanted, slot.failures, slot.retry_at = True, 0, now

    def recycle(self, index: int, now: float) -> None:
        """Replace the worker of slot `index` by a fresh one. Raises FailedPrecondition when it has none that is ready,
        or is being replaced."""
        slot = self.slots[index]
        if not slot.ready or slot.successor is not None:
            raise FailedPrecondition(f"recycle: slot {index} has no ready worker, or it is being replaced already")
        if not self.replace(slot, slot.generation, now):
            raise FailedPrecondition(f"recycle: slot {index} cannot have another worker now; see the log")

    def recycle_due(self, now: float) -> None:
        """Replace workers that have lived long enough, one at a time and the oldest first."""
        if any(slot.successor is not None for slot in self.slots):
            return
        for slot in sorted(self.slots, key=lambda slot: slot.child.started if slot.child else now):
            if slot.ready and slot.child is not None and (reason := self._recycling.reason(slot.child, now)):
                self._log.info("recycling worker", slot=slot.index, pid=slot.child.pid, reason=reason)
                self.replace(slot, slot.generation, now)
                return

    def asks_to_leave(self, child: Child, now: float) -> None:
        """Somebody sent the worker SIGTERM: it drains once its queue has found another server."""
        if not child.leaving:
            child.leaving = True
            self._guard(now)
            self._dismiss(child, now)

    def workers(self) -> Iterator[Child]:
        """All of them: in slots, coming and going."""
        for slot in self.slots:
            yield from (child for child in (slot.child, slot.successor) if child is not None)
        yield from self.replaced

    def look(self, now: float) -> None:
        """Once a second: kill workers that are silent, and those that were told to leave and have not."""
        for slot in self.slots:
            slot.settled(now)
        for child in self.workers():
            if child.pid == children.UNBORN:
                if generation := self.generations.get(child.generation):  # else its template is being killed
                    generation.nursery.look(child.started, now)
            elif child.leaving:
                if child.kill_at is not None and now >= child.kill_at:
                    self._log.warning("worker does not leave, killing it", slot=child.slot, pid=child.pid)
                    child.kill(signal.SIGKILL)
            elif child.ready_at is not None:
                self._look_at(child, now)
            elif self._overdue(child, now):
                self._log.warning("successor does not come up, killing it", slot=child.slot, pid=child.pid)
                child.kill(signal.SIGKILL)

    def _overdue(self, child: Child, now: float) -> bool:
        """Whether a successor that has nothing to open does not come up; one that opens models takes what it takes."""
        if child is not self.slots[child.slot].successor or now - child.started <= BIRTH:
            return False
        generation = self.generations.get(child.generation)
        return generation is not None and generation.nursery.state == "ready"

    def _look_at(self, child: Child, now: float) -> None:
        timeout = self._config.server.worker_timeout
        try:
            reading = self.board.read(child.row)
        except PreforkError as e:
            self._log.error("worker wrote nonsense, killing it", slot=child.slot, pid=child.pid, reason=e)
            child.kill(signal.SIGKILL)
            return
        silent = now - reading.tick_ns * 1e-9
        if timeout and reading.state is not WorkerState.DRAINING and silent > timeout:
            child.stalled = True
            self._log.error("worker stalled, killing it", slot=child.slot, pid=child.pid, silent_s=round(silent, 3))
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
        told = child.send({"command": command, "kept": self._kept})
        child.kill_at = now + self._config.server.graceful_timeout + KILL_MARGIN if told else now

    # scaling and the end

    def scale_to(self, count: int, now: float) -> None:
        """Fill the first empty slots, or empty the last filled ones: one that was drained stays so while others do.

        Raises InvalidArgument for a bad number, ResourceExhausted when no further socket is to be had."""
        if not 1 <= count <= MAX_SLOTS:
            raise InvalidArgument(f"workers: expected 1 to {MAX_SLOTS}, found {count}")
        fresh: list[socket.socket] = []
        try:
            while len(self.slots) + len(fresh) < count:
                fresh.append(listener.grow(self.slots[0].listener, self._config.server.backlog)[0])
        except ConfigError as e:
            for sock in fresh:
                sock.close()
            raise ResourceExhausted(e.message) from None
        for sock in fresh:
            self.slots.append(Slot(len(self.slots), sock, wanted=False, generation=self._current))
        wanted = [slot for slot in self.slots if slot.wanted]
        for slot in [slot for slot in self.slots if not slot.wanted][: max(0, count - len(wanted))]:
            self.undrain(slot.index, now)
        self._retire(wanted[count:], now)
        self._log.info("scaled", workers=count)

    def _retire(self, retiring: list[Slot], now: float) -> None:
        """These slots are not wanted any more: their queues find another server before their workers go."""
        leaving = [slot.child for slot in retiring if slot.child is not None]
        for slot in retiring:
            slot.wanted = False
            self.abandon(slot, now)
        for child in leaving:
            child.leaving = True
        self._guard(now)
        for child in leaving:
            self._dismiss(child, now)

    def stop(self, now: float, *, quick: bool, again: bool, heir: bool = False) -> None:
        """Tell every worker to leave. The first time, the queues of slots without a ready worker find another one,
        and the listening sockets are left to the workers, who sweep their queues before they close them. `heir`:
        another server listens on the same sockets, so nothing is swept, also by those who have little time."""
        for generation in self.generations.values():
            generation.nursery.close()
        if not again:
            for slot in self.slots:
                self.abandon(slot, now)
                if not slot.ready:
                    slot.wanted = False
                    if slot.child is not None and slot.child.ready_at is None and not self._listens(slot.child):
                        slot.child.kill(signal.SIGKILL)
            self._guard(now)
        for child in self.workers():
            self._dismiss(child, now, "retire" if heir else "quit" if quick else "shutdown")
            if quick:
                child.kill_at = min(child.kill_at or now, now + QUICK)
        self.close()

    def close(self) -> None:
        """Let go of the listening sockets. Idempotent."""
        for slot in self.slots:
            slot.listener.close()
        if self.unix is not None:
            self.unix.close()

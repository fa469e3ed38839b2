"""A worker: one process that accepts, decodes, schedules, runs, encodes, sends and ticks.

The master's side of it is child.py. It opens the published segments read-only, answers a warm-up through the same code
as a request, says READY, and from then on lives on one uvloop; a second thread computes what is too dear for the loop.
It leaves on the master's word, on SIGTERM, or with the master.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import uvloop

from prefork import attach, placement
from prefork.channel import Channel
from prefork.jobs import WorkerJob
from prefork.serving import logged, rpc
from prefork.serving.admission import Admission
from prefork.serving.lane import measure_hand_off
from prefork.serving.requestlog import RequestLog
from prefork.serving.scheduler import Scheduler
from prefork.serving.service import Service
from prefork.shm import words as board
from prefork.shm.words import Stage, WorkerState

TICK = 0.25  # seconds between heartbeats, far below any worker_timeout that makes sense
AGE_TICKS = 4  # connections are looked over once in so many heartbeats
GOAWAY_GRACE = 0.5  # seconds a told client has to close by itself before it is half-closed
UNIX = -1  # in the place of a slot number
LOOK = 0.05  # seconds between looks at what tells nobody when it is done, as a transport's buffer
FLUSH = 0.5  # seconds the last answers have to leave when the server stops at once
GC_THRESHOLD = 20_000  # requests make no cycles; frequent collections would only cost


def main(channel: socket.socket, job: WorkerJob) -> int:
    """Serve until told to leave; the exit code. Raises PreforkError when it cannot begin."""
    job.scoreboard.slot(job.row).begin(os.getpid(), job.generation)
    placement.settle(job.places, job.slot)  # the threads of runs start when the models are opened
    ready = attach.make_ready(job.models, job.config, job.scratch)
    for note in ready.notes:
        job.log.for_role("worker", slot=job.slot).warning("no warm-up", reason=note)
    gc.collect()
    gc.freeze()
    return run(channel, job, ready)


def hand_off() -> float:
    """Seconds of an empty round trip through a compute thread, measured in a process that serves nothing."""
    loop = uvloop.new_event_loop()
    return float(loop.run_until_complete(measure_hand_off(loop)))


def run(channel: socket.socket, job: WorkerJob, ready: attach.Ready) -> int:
    """Serve models that are open and warm, until told to leave; the exit code. The slot of the scoreboard is begun."""
    if reason := placement.settle(job.places, job.slot):
        job.log.for_role("worker", slot=job.slot).warning("not pinned", reason=reason)
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    loop = uvloop.new_event_loop()
    return loop.run_until_complete(Worker(loop, channel, job, ready).serve())


def descriptor_left() -> bool:
    """Whether one more file can be opened, by this process (RLIMIT_NOFILE) and on this machine (fs.file-max)."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as e:
        return e.errno not in (errno.EMFILE, errno.ENFILE)
    return True


class Worker:
    """The life of the process on its loop; `serve` is the only door."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        channel: socket.socket,
        job: WorkerJob,
        ready: attach.Ready,
    ) -> None:
        opened, costs, wire_limits = ready.opened, ready.costs, ready.wire_limits
        limits = job.config.limits
        self._loop = loop
        self._job = job
        self._log = job.log.for_role("worker", slot=job.slot)
        self._slot = job.scoreboard.slot(job.row)
        self._costs = costs
        self._channel = Channel(channel)
        versions = {model.name: str(model.version) for model in job.models}
        words = self._slot.words
        rate = job.config.log.requests
        self._requests = RequestLog(rate, self._log, loop.call_later) if rate else None
        self._scheduler = (logged.TimedScheduler if rate else Scheduler)(
            loop,
            opened.sessions,
            versions,
            Admission(limits.max_in_flight, limits.max_in_flight_bytes),
            costs,
            words,
            job.config.compute.run_in,
            partial(self._slot.observe, int(Stage.COMPUTE)),
            self._fault,
        )
        self._service = Service(
            opened.sessions, versions, limits, wire_limits, self._scheduler, words, self._fault,
            job.scoreboard.answer_rows(),
        )  # fmt: skip
        self._make = rpc.factory(self._service, loop)
        if self._requests is not None:
            self._make = logged.factory(self._service, loop, self._requests)
        self._listening: dict[int, tuple[socket.socket, asyncio.AbstractServer | None]] = {}
        self._leave: asyncio.Future[str] = loop.create_future()
        self._kept: list[str] = []  # queues that a service manager keeps when the server goes
        self._ticks = 0
        self._progress = (0, 0)
        self._resting = False  # no descriptor is left, so nobody listens
        self._end = math.inf  # when to stop waiting for anybody

    async def serve(self) -> int:
        """Listen, say READY, serve, drain."""
        if not self._costs.inline_below:  # a fork has it from its template, which measured it in another fork
            self._costs.set_hand_off(await measure_hand_off(self._loop))
        # the master knows where our queue goes, and tells us to go when it has gone there
        self._loop.add_signal_handler(signal.SIGTERM, self._channel.send, {"event": "leaving"})
        self._loop.set_exception_handler(self._loop_fault)
        self._loop.add_signal_handler(signal.SIGUSR1, self._log.reopen)
        self._beat()
        self._slot.move(WorkerState.READY)  # before it listens: one that is not READY has no client
        sockets = {**self._job.listeners, **({UNIX: self._job.unix} if self._job.unix is not None else {})}
        for index, sock in sockets.items():
            if task := self._adopt(index, sock):
                await task
        self._loop.add_reader(self._channel.fileno(), self._hear)  # only now: it may say to release one of them
        self._channel.send({"event": "ready"})
        how = await self._leave
        self._slot.move(WorkerState.DRAINING)
        await self._drain(how)
        self._count()
        if self._requests is not None:
            self._requests.flush_all()
        self._slot.end()
        return 0

    # the master's word

    def _hear(self) -> None:
        for message, fds in self._channel.receive():
            match message.get("command"):
                case "adopt":
                    self._adopt(int(message["slot"]), socket.socket(fileno=fds[0]))
                case "release":
                    self._deafen(int(message["slot"]))
                case "reopen":
                    self._log.reopen()
                case "retire" | "shutdown" | "quit" as how:
                    self._kept = str(message.get("kept", "")).split(",")
                    self._ask(how)
        if self._channel.closed:  # the master is dead, and PR_SET_PDEATHSIG is about to say so
            os._exit(0)

    def _ask(self, how: str) -> None:
        if not self._leave.done():
            self._leave.set_result(how)
        elif how == "quit":
            self._quit()
        elif how == "shutdown":  # nobody is there any more to take what a retiring worker's clients ask
            self._service.drain()
            self._service.changed.set()

    def _fault(self, error: Exception) -> None:
        self._log.crash("request failed inside the server", error)

    def _loop_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self._log.crash(str(context.get("message", "fault in the loop")), error)
        else:
            self._log.error(str(context.get("message", "fault in the loop")))

    # listening

    def _adopt(self, index: int, sock: socket.socket) -> asyncio.Task[None] | None:
        """Take a listening socket; ours from this moment, whatever comes before the loop listens on it."""
        if index in self._listening:
            sock.close()
            return None
        self._listening[index] = (sock, None)
        return self._loop.create_task(self._listen(index, sock))

    async def _listen(self, index: int, sock: socket.socket) -> None:
        make, backlog = self._make, self._job.config.server.backlog
        dup = sock.dup()  # the loop closes what it is given; the sweep at the end needs one more
        server: asyncio.AbstractServer
        if sock.family == socket.AF_UNIX:
            # from Python 3.13 on the loop would unlink the path with the first worker that leaves
            kept: dict[str, Any] = {"cleanup_socket": False}
            server = await self._loop.create_unix_server(make, sock=dup, backlog=backlog, **kept)
        else:
            server = await self._loop.create_server(make, sock=dup, backlog=backlog)
        if self._listening.get(index) == (sock, None):
            self._listening[index] = (sock, server)
        else:  # released or swept meanwhile
            server.close()

    def _deafen(self, index: int) -> None:
        if found := self._listening.pop(index, None):
            sock, server = found
            if server is not None:
                server.close()
            sock.close()

    def _rest(self) -> None:
        """Listen only while a descriptor is left: without, libuv accepts to hang up, or turns in vain. Who waits in the
        kernel's queue is served as soon as others have left."""
        if self._resting is not descriptor_left():
            return
        self._resting = not self._resting
        for index, (sock, server) in list(self._listening.items()):
            if self._resting and server is not None:
                server.close()
                self._listening[index] = (sock, None)
            elif not self._resting and server is None:
                self._loop.create_task(self._listen(index, sock))
        if self._resting:
            self._log.warning("no descriptor is left, not listening", connections=len(self._service.clients))
        else:
            self._log.info("listening again")

    async def _sweep(self) -> None:
        """Take the connections that still wait in the queues, to tell them that the server goes."""
        for index, (sock, server) in list(self._listening.items()):
            if server is not None:
                server.close()
            sock.setblocking(False)
            with suppress(OSError):
                while True:
                    accepted, _ = sock.accept()
                    await self._loop.connect_accepted_socket(self._make, accepted)
            self._listening.pop(index, None)
            sock.close()

    # the heart

    def _beat(self) -> None:
        """Tick, unless the compute lane has been in one run since the last beat: the tick speaks for both threads."""
        self._loop.call_later(TICK, self._beat)  # first, for whatever goes wrong below must not stop the heart
        progress = self._scheduler.progress
        if progress[0] != self._progress[0] or progress[1] == 0:
            self._slot.tick()
        self._progress = progress
        self._count()
        if self._requests is not None:
            self._requests.beat()
        self._service.now = time.monotonic()
        self._rest()
        self._ticks += 1
        if self._ticks % AGE_TICKS == 0:
            self._service.look()

    def _count(self) -> None:
        """Take to the scoreboard what need not be there at every request."""
        service, words = self._service, self._slot.words
        words[board.BYTES_IN] += service.bytes_in
        words[board.BYTES_OUT] += service.bytes_out
        service.bytes_in = service.bytes_out = 0
        scheduler = self._scheduler
        self._slot.observe_fast(Stage.COMPUTE, scheduler.fast_runs, scheduler.fast_seconds)
        scheduler.fast_runs, scheduler.fast_seconds = 0, 0.0
        words[board.INLINE_RUNS] = words[board.REQUESTS] - words[board.THREAD_RUNS]

    # the end

    async def _drain(self, how: str) -> None:
        """retire: others take the sockets. shutdown: the server goes, so the queues are swept, unless a service manager
        keeps them for the next one. quit: at once."""
        for index in list(self._listening):
            if how == "retire" or ("unix" if index == UNIX else "slots") in self._kept:
                self._deafen(index)
        end = time.monotonic() + self._job.config.server.graceful_timeout
        if how == "retire":  # half the time for those who ask on, the other half for what they have asked by then
            await self._retire((time.monotonic() + end) / 2)
        self._service.drain()
        if how != "retire":
            await self._sweep()
        if how == "quit":
            self._quit()
        await self._until(end, lambda: not self._scheduler.held)
        self._scheduler.close()
        await self._until(end, lambda: not self._service.unsent)
        await self._until(time.monotonic() + GOAWAY_GRACE, lambda: not self._service.clients)
        for client in list(self._service.clients):
            client.stop()
        await self._until(time.monotonic() + FLUSH, lambda: not self._service.clients)

    async def _retire(self, end: float) -> None:
        """Serve the clients that have connections until they have gone elsewhere, or have been quiet for long enough to
        have heard that they should. Nobody listens any more by now."""
        await asyncio.sleep(0)  # a connection that was accepted just now enters in the loop's next turn
        service = self._service
        service.retire()
        while service.clients and not service.draining and time.monotonic() < min(end, self._end):
            service.see_off(GOAWAY_GRACE)
            await self._until(time.monotonic() + LOOK, lambda: not service.clients or service.draining)

    def _quit(self) -> None:
        """Answer all that is in flight and let it leave; what the lane is in is not waited for."""
        self._end = time.monotonic() + FLUSH
        for client in list(self._service.clients):
            client.abort("the server is stopping")
        self._service.changed.set()

    async def _until(self, end: float, done: Callable[[], bool]) -> None:
        """Wait for `done`, till `end` or the end of everything at most."""
        changed = self._service.changed
        while not done() and (left := min(end, self._end) - time.monotonic()) > 0:
            changed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), min(left, LOOK))

"""A worker: one process that accepts, decodes, schedules, runs, encodes, sends and ticks.

The master's side of it is child.py. It opens the published segments read-only, answers a warm-up through the same code
as a request, says READY, and from then on lives on one uvloop; a second thread computes what is too dear for the loop.
It leaves on the master's word, on SIGTERM, or with the master.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import tempfile
import time
from contextlib import suppress
from functools import partial

import uvloop

from prefork import attach
from prefork.channel import Channel
from prefork.codec.limits import Limits as WireLimits
from prefork.errors import Unavailable
from prefork.jobs import WorkerJob
from prefork.serving import rpc
from prefork.serving.admission import Admission
from prefork.serving.costs import Costs
from prefork.serving.lane import measure_hand_off
from prefork.serving.scheduler import Scheduler
from prefork.serving.service import Service
from prefork.shm import words as board
from prefork.shm.words import Stage, WorkerState

TICK = 0.25  # seconds between heartbeats, far below any worker_timeout that makes sense
AGE_TICKS = 4  # connections are looked over once in so many heartbeats
GOAWAY_GRACE = 0.5  # seconds a told client has to close by itself before it is half-closed
FLUSH = 0.5  # seconds the last answers have to leave when the server stops at once
GC_THRESHOLD = 20_000  # requests make no cycles; frequent collections would only cost


def main(channel: socket.socket, job: WorkerJob) -> int:
    """Serve until told to leave; the exit code. Raises PreforkError when it cannot begin."""
    log = job.log.for_role("worker", slot=job.slot)
    slot = job.scoreboard.slot(job.slot)
    slot.begin(os.getpid(), job.generation)
    tempfile.tempdir = str(job.scratch)  # what a killed worker leaves there goes with the master
    opened = attach.open_models(job.models, job.config.compute.threads)
    costs, wire_limits = Costs(), WireLimits(job.config.limits.max_tensors, job.config.limits.max_dims)
    for note in attach.warm(opened, costs, wire_limits):
        log.warning("no warm-up", reason=note)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    loop = uvloop.new_event_loop()
    worker = Worker(loop, channel, job, opened, costs, wire_limits)
    return loop.run_until_complete(worker.serve())


class Worker:
    """The life of the process on its loop; `serve` is the only door."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        channel: socket.socket,
        job: WorkerJob,
        opened: attach.Opened,
        costs: Costs,
        wire_limits: WireLimits,
    ) -> None:
        limits = job.config.limits
        self._loop = loop
        self._job = job
        self._log = job.log.for_role("worker", slot=job.slot)
        self._slot = job.scoreboard.slot(job.slot)
        self._costs = costs
        self._channel = Channel(channel)
        version = str(job.generation)
        words = self._slot.words
        self._scheduler = Scheduler(
            loop,
            opened.sessions,
            version,
            Admission(limits.max_in_flight, limits.max_in_flight_bytes),
            costs,
            words,
            job.config.compute.run_in,
            partial(self._slot.observe, int(Stage.COMPUTE)),
        )
        self._service = Service(opened.sessions, version, limits, wire_limits, self._scheduler, words, self._fault)
        self._listening: dict[int, tuple[socket.socket, asyncio.AbstractServer]] = {}
        self._leave: asyncio.Future[str] = loop.create_future()
        self._ticks = 0
        self._progress = (0, 0)

    async def serve(self) -> int:
        """Listen, say READY, serve, drain."""
        self._costs.set_hand_off(await measure_hand_off(self._loop))
        self._loop.add_signal_handler(signal.SIGTERM, self._ask, "retire")
        self._loop.add_signal_handler(signal.SIGUSR1, self._log.reopen)
        self._loop.add_reader(self._channel.fileno(), self._hear)
        for index, sock in self._job.listeners.items():
            await self._listen(index, sock)
        if self._job.unix is not None:
            await self._listen(-1, self._job.unix)
        self._beat()
        self._slot.move(WorkerState.READY)
        self._channel.send({"event": "ready"})
        how = await self._leave
        self._slot.move(WorkerState.DRAINING)
        await self._drain(how)
        self._count()
        self._slot.end()
        return 0

    # the master's word

    def _hear(self) -> None:
        for message, fds in self._channel.receive():
            match message.get("command"):
                case "adopt":
                    adopted = socket.socket(fileno=fds[0])
                    self._loop.create_task(self._listen(int(message["slot"]), adopted))
                case "release":
                    self._deafen(int(message["slot"]))
                case "reopen":
                    self._log.reopen()
                case "retire" | "shutdown" | "quit" as how:
                    self._ask(how)
        if self._channel.closed:  # the master is dead, and PR_SET_PDEATHSIG is about to say so
            os._exit(0)

    def _ask(self, how: str) -> None:
        if not self._leave.done():
            self._leave.set_result(how)
        elif how == "quit":
            self._service.changed.set()
            for client in list(self._service.clients):
                client.abort(Unavailable("the server is stopping"))

    def _fault(self, error: Exception) -> None:
        self._log.crash("request failed inside the server", error)

    # listening

    async def _listen(self, index: int, sock: socket.socket) -> None:
        make = rpc.factory(self._service, self._loop)
        if index in self._listening or self._leave.done():
            return
        dup = sock.dup()  # the loop closes what it is given; the sweep at the end needs one more
        if sock.family == socket.AF_UNIX:
            server = await self._loop.create_unix_server(make, sock=dup, backlog=self._job.config.server.backlog)
        else:
            server = await self._loop.create_server(make, sock=dup, backlog=self._job.config.server.backlog)
        self._listening[index] = (sock, server)

    def _deafen(self, index: int) -> None:
        if found := self._listening.pop(index, None):
            sock, server = found
            server.close()
            sock.close()

    async def _sweep(self) -> None:
        """Take the connections that still wait in the queues, to tell them that the server goes."""
        for index, (sock, server) in list(self._listening.items()):
            server.close()
            sock.setblocking(False)
            with suppress(OSError):
                while True:
                    accepted, _ = sock.accept()
                    await self._loop.connect_accepted_socket(rpc.factory(self._service, self._loop), accepted)
            self._listening.pop(index)
            sock.close()

    # the heart

    def _beat(self) -> None:
        """Tick, unless the compute lane has been in one run since the last beat: the tick speaks for both threads."""
        progress = self._scheduler.progress
        if progress != self._progress or progress[1] == 0:
            self._slot.tick()
        self._progress = progress
        self._count()
        self._service.now = time.monotonic()
        self._ticks += 1
        if self._ticks % AGE_TICKS == 0:
            for client in list(self._service.clients):
                client.check_age(self._service.now)
        self._loop.call_later(TICK, self._beat)

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
        """retire: others take the sockets. shutdown: the server goes, so the queues are swept. quit: at once."""
        service = self._service
        if how == "retire":
            for index in list(self._listening):
                self._deafen(index)
        service.drain()
        if how != "retire":
            await self._sweep()
        end = time.monotonic() + self._job.config.server.graceful_timeout
        if how != "quit":
            await self._until_idle(end)
            self._scheduler.close()
            await self._until_empty(time.monotonic() + GOAWAY_GRACE)
            for client in list(service.clients):
                client.stop()
        for client in list(service.clients) if how == "quit" else []:
            client.abort(Unavailable("the server is stopping"))
        await self._until_empty(time.monotonic() + FLUSH)

    async def _until_idle(self, end: float) -> None:
        while self._scheduler.held and time.monotonic() < end:
            await self._change(end)

    async def _until_empty(self, end: float) -> None:
        while self._service.clients and time.monotonic() < end:
            await self._change(end)

    async def _change(self, end: float) -> None:
        self._service.changed.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._service.changed.wait(), max(0.0, end - time.monotonic()))

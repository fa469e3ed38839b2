"""The compute lane: one thread a worker that runs what is too dear for the loop.

Loop thread: `submit`, `_deliver`. Lane thread: `_run` and what it calls. They share a SimpleQueue (to the lane), a
deque (back) and the flag `_signalled`; each job is touched by one side at a time. One wake-up of the loop delivers all
that finished since the last.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")


class Lane(Generic[J, R]):
    """Runs `execute(job) -> result` in its thread and calls `deliver(job, result, seconds)` on the loop.

    `execute` must not raise: a fault is a result."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        execute: Callable[[J], R],
        deliver: Callable[[J, R, float], None],
    ) -> None:
        self._loop = loop
        self._execute = execute
        self._deliver_one = deliver
        self._inbox: SimpleQueue[J | None] = SimpleQueue()
        self._done: deque[tuple[J, R, float]] = deque()
        self._signalled = False
        self.finished = 0
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def submit(self, job: J) -> None:
        self._inbox.put(job)

    def close(self) -> None:
        """End the thread after what is queued. It is not waited for: a run may take any time."""
        self._inbox.put(None)

    def _run(self) -> None:
        while (job := self._inbox.get()) is not None:
            start = time.perf_counter()
            result = self._execute(job)
            self._done.append((job, result, time.perf_counter() - start))
            # cleared before the deque is drained, so what is appended after that signals again
            if not self._signalled:
                self._signalled = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop has ended, and with it everybody who wanted the result
                    return

    def _deliver(self) -> None:
        self._signalled = False
        while self._done:
            job, result, seconds = self._done.popleft()
            self.finished += 1
            try:
                self._deliver_one(job, result, seconds)
            except Exception as e:  # the fault of one delivery must not cost the others theirs
                self._loop.call_exception_handler({"message": "a result could not be delivered", "exception": e})


async def measure_hand_off(loop: asyncio.AbstractEventLoop, rounds: int = 64) -> float:
    """Median seconds of an empty round trip through a lane, as a request would make it."""
    waiting: deque[asyncio.Future[None]] = deque()
    lane: Lane[int, None] = Lane(loop, lambda job: None, lambda job, result, s: waiting.popleft().set_result(None))
    times = []
    for job in range(rounds):
        done: asyncio.Future[None] = loop.create_future()
        waiting.append(done)
        start = time.perf_counter()
        lane.submit(job)
        await done
        times.append(time.perf_counter() - start)
    lane.close()
    return sorted(times)[rounds // 2]

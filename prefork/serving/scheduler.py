"""The worker's scheduler: what is admitted, where it runs, and that it is answered once. Loop thread only.

A protocol's shell makes a Job and submits it; the scheduler calls the job's `reply` or `fail` exactly once, or neither
when the client has gone. Runs go inline on the loop when that is cheaper than the hand-off (costs.py), else to the
compute lane (lane.py). Batching will stand between admission and the run; today each job is one run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Literal, Protocol, TypeAlias

from prefork.codec.message import InferReply, InferRequest
from prefork.errors import DeadlineExceeded, Internal, NotFound, PreforkError, Unavailable
from prefork.model.session import Session
from prefork.serving.admission import Admission
from prefork.serving.costs import Costs
from prefork.serving.lane import Lane
from prefork.shm import words as board

EXPIRY_TICK = 0.02  # seconds between looks at the deadlines of what waits; bounds how late a refusal comes

FAST = 1e-4  # seconds; the first bucket of the scoreboard's histograms

RunIn: TypeAlias = Literal["auto", "inline", "thread"]
Result: TypeAlias = "InferReply | PreforkError"


class Owner(Protocol):
    """The connection that a job belongs to. `settle` is called once a job at most, with the reply or the error."""

    def settle(self, job: Job, result: Result) -> None: ...


class Job:
    """One request on its way. `deadline` is in time.monotonic() seconds, `size` in bytes of its body.

    `finished` turns true when it was answered or dropped; whoever finds it true leaves it alone."""

    __slots__ = ("codec", "deadline", "finished", "owner", "request", "request_id", "size")

    def __init__(
        self, owner: Owner, request_id: int, codec: int, request: InferRequest, size: int, deadline: float
    ) -> None:
        self.owner = owner
        self.request_id = request_id
        self.codec = codec
        self.request = request
        self.size = size
        self.deadline = deadline
        self.finished = False


class Scheduler:
    """Doors: `run_now`, `submit`, `drop`, `close`. The first two raise, and only StatusError classes."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        models: Mapping[str, Session],
        version: str,
        admission: Admission,
        costs: Costs,
        words: memoryview,
        run_in: RunIn = "auto",
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._loop = loop
        self._models = models
        self._version = version
        self._admission = admission
        self._costs = costs
        self._words = words
        self._run_in = run_in
        self._observe = observe
        self.fast_runs, self.fast_seconds = 0, 0.0  # runs below FAST since the last heartbeat took them away
        self._waiting: set[Job] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self._lane: Lane[Job, Result | None] = Lane(loop, self._run_if_alive, self._delivered)

    @property
    def held(self) -> int:
        """Requests taken in and neither answered nor dropped yet."""
        return self._admission.held

    @property
    def progress(self) -> tuple[int, int]:
        """(runs the lane has finished, jobs it holds): a lane that holds jobs and finishes none is stuck."""
        return self._lane.finished, self._lane.depth

    def run_now(self, request: InferRequest, size: int) -> Result | None:
        """The result, when running here and now is cheaper than handing the request over; else None: `submit` it.

        `size`: bytes of its body. Raises NotFound."""
        session = self._models.get(request.model_name)
        if session is None or (request.model_version and request.model_version != self._version):
            raise self._not_found(request)
        if self._run_in == "thread" or (self._run_in == "auto" and not self._costs.cheap(request.model_name, size)):
            return None
        self._words[board.REQUESTS] += 1
        start = perf_counter()
        result = self._run(session, request)
        seconds = perf_counter() - start
        if seconds < FAST:
            self.fast_runs += 1
            self.fast_seconds += seconds
        else:
            self._observe(seconds)
        if seconds > self._costs.inline_below:  # a cheaper one only confirms what is known
            self._costs.learn(request.model_name, size, seconds)
        return result

    def submit(self, job: Job) -> None:
        """Take the job for the compute lane.

        Raises ResourceExhausted or DeadlineExceeded; the job was not taken then."""
        if job.deadline <= time.monotonic():
            raise DeadlineExceeded("the deadline had passed when the request was decoded")
        self._admission.admit(job.size)
        words = self._words
        words[board.REQUESTS] += 1
        words[board.IN_FLIGHT] = self._admission.held
        words[board.THREAD_RUNS] += 1
        self._waiting.add(job)
        words[board.QUEUE_DEPTH] = len(self._waiting)
        self._lane.submit(job)
        if self._expiry is None:
            self._expiry = self._loop.call_later(EXPIRY_TICK, self._expire)

    def drop(self, job: Job) -> None:
        """The client no longer wants it: it is not run if it has not begun, and its result goes nowhere."""
        if not job.finished:
            self._words[board.DROPPED] += 1
            self._release(job)

    def close(self) -> None:
        """Answer what has not been answered with Unavailable, and end the lane after the run it is in."""
        for job in list(self._waiting):
            self._finish(job, Unavailable("the worker is stopping"))
        if self._expiry is not None:
            self._expiry.cancel()
        self._lane.close()

    def _not_found(self, request: InferRequest) -> NotFound:
        if request.model_name in self._models:
            return NotFound(
                f"model {request.model_name!r} has version {self._version!r}, not {request.model_version!r}"
            )
        names = ", ".join(sorted(self._models))
        return NotFound(f"model {request.model_name!r} is not served here; served: {names}")

    def _run(self, session: Session, request: InferRequest) -> Result:
        try:
            outputs, parameters = session.run(request.inputs, request.outputs, request.parameters)
        except PreforkError as e:
            return e
        except Exception as e:
            return Internal(f"model {request.model_name!r}: {type(e).__name__}: {e}")
        return InferReply(request.model_name, outputs, self._version, request.id, parameters)

    def _run_if_alive(self, job: Job) -> Result | None:
        if job.finished:
            return None
        if job.deadline <= time.monotonic():
            return DeadlineExceeded("the deadline passed while the request waited for the compute lane")
        return self._run(self._models[job.request.model_name], job.request)

    def _delivered(self, job: Job, result: Result | None, seconds: float) -> None:
        if result is None or job.finished:
            self._waiting.discard(job)
            self._words[board.QUEUE_DEPTH] = len(self._waiting)
            return
        if type(result) is InferReply:
            self._costs.learn(job.request.model_name, job.size, seconds)
            self._observe(seconds)
        self._finish(job, result)

    def _finish(self, job: Job, result: Result) -> None:
        self._release(job)
        job.owner.settle(job, result)

    def _release(self, job: Job) -> None:
        job.finished = True
        words = self._words
        self._admission.release(job.size)
        words[board.IN_FLIGHT] = self._admission.held
        if self._waiting:
            self._waiting.discard(job)
            words[board.QUEUE_DEPTH] = len(self._waiting)

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._waiting if job.deadline <= now]:
            self._finish(job, DeadlineExceeded("the deadline passed while the request waited or ran"))
        self._expiry = self._loop.call_later(EXPIRY_TICK, self._expire) if self._waiting else None

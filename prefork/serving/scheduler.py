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

    `begun` turns true when its run begins, `finished` when it was answered or dropped; then `request` is given up,
    and whoever finds it so leaves the job alone. Its place in the admission is given back by the lane."""

    __slots__ = ("begun", "codec", "deadline", "finished", "model", "owner", "request", "request_id", "size")

    def __init__(
        self, owner: Owner, request_id: int, codec: int, request: InferRequest, size: int, deadline: float
    ) -> None:
        self.owner = owner
        self.request_id = request_id
        self.codec = codec
        self.request: InferRequest | None = request
        self.model = request.model_name
        self.size = size
        self.deadline = deadline
        self.begun = False
        self.finished = False


class Scheduler:
    """Doors: `run_now`, `submit`, `drop`, `close`. The first two raise, and only StatusError classes."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        models: Mapping[str, Session],
        versions: Mapping[str, str],
        admission: Admission,
        costs: Costs,
        words: memoryview,
        run_in: RunIn,
        observe: Callable[[float], None],
        log_fault: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._models = models
        self._versions = versions
        self.admission = admission
        self._costs = costs
        self._words = words
        self._run_in = run_in
        self._observe = observe
        self._log_fault = log_fault
        self.fast_runs, self.fast_seconds = 0, 0.0  # runs below FAST since the last heartbeat took them away
        self._waiting: set[Job] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self._lane: Lane[Job, Result | None] = Lane(loop, self._run_if_alive, self._delivered)

    @property
    def held(self) -> int:
        """Requests that the lane has not let go of, answered or not."""
        return self.admission.held

    @property
    def progress(self) -> tuple[int, int]:
        """(jobs the lane has let go, jobs it holds): a lane that holds jobs and lets none go is stuck."""
        return self._lane.finished, self.admission.held

    def run_now(self, request: InferRequest, size: int) -> Result | None:
        """The result, when running here and now is cheaper than handing the request over; else None: `submit` it.

        `size`: bytes of its body. Raises NotFound."""
        session = self._models.get(request.model_name)
        if session is None or (request.model_version and request.model_version != self._versions[request.model_name]):
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
        self.admission.admit(job.size)
        words = self._words
        words[board.REQUESTS] += 1
        words[board.THREAD_RUNS] += 1
        words[board.IN_FLIGHT] = self.admission.held
        self._waiting.add(job)
        words[board.QUEUE_DEPTH] = len(self._waiting)
        self._lane.submit(job)
        if self._expiry is None:
            self._expiry = self._loop.call_later(EXPIRY_TICK, self._expire)

    def drop(self, job: Job) -> None:
        """The client no longer wants it: it is not run if it has not begun, and its result goes nowhere."""
        if not job.finished:
            self._words[board.DROPPED] += 1
            self._give_up(job)

    def close(self) -> None:
        """Answer what has not been answered with Unavailable; the lane ends after the run it is in, unwaited for."""
        for job in list(self._waiting):
            error = Unavailable("the worker is stopping")
            error.retryable = not job.begun  # the word says that the request was not run
            self._finish(job, error)
        if self._expiry is not None:
            self._expiry.cancel()
        self._lane.close()

    def _not_found(self, request: InferRequest) -> NotFound:
        if version := self._versions.get(request.model_name):
            return NotFound(f"model {request.model_name!r} has version {version!r}, not {request.model_version!r}")
        names = ", ".join(sorted(self._models))
        return NotFound(f"model {request.model_name!r} is not served here; served: {names}")

    def _run(self, session: Session, request: InferRequest) -> Result:
        try:
            outputs, parameters = session.run(request.inputs, request.outputs, request.parameters)
        except PreforkError as e:
            return e
        except Exception as e:
            return Internal(f"model {request.model_name!r}: {type(e).__name__}: {e}")
        return InferReply(request.model_name, outputs, self._versions[request.model_name], request.id, parameters)

    def _run_if_alive(self, job: Job) -> Result | None:
        request = job.request  # read once: the loop may take it away at any moment
        if request is None or job.finished:
            return None
        if job.deadline <= time.monotonic():
            return DeadlineExceeded("the deadline passed while the request waited for the compute lane")
        job.begun = True
        return self._run(self._models[job.model], request)

    def _delivered(self, job: Job, result: Result | None, seconds: float) -> None:
        self.admission.release(job.size)
        self._words[board.IN_FLIGHT] = self.admission.held
        if type(result) is InferReply:
            self._costs.learn(job.model, job.size, seconds)
            self._observe(seconds)
        if result is not None and not job.finished:
            self._finish(job, result)

    def _finish(self, job: Job, result: Result) -> None:
        self._give_up(job)
        try:
            job.owner.settle(job, result)
        except Exception as e:  # one connection's fault must not cost the others their answers
            self._log_fault(e)

    def _give_up(self, job: Job) -> None:
        job.finished, job.request = True, None
        self._waiting.discard(job)
        self._words[board.QUEUE_DEPTH] = len(self._waiting)

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._waiting if job.deadline <= now]:
            self._finish(job, DeadlineExceeded("the deadline passed while the request waited or ran"))
        self._expiry = self._loop.call_later(EXPIRY_TICK, self._expire) if self._waiting else None

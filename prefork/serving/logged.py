"""Connections and a scheduler that note each request in the request log. Runs in the worker; loop thread, but for
`TimedScheduler._run_if_alive`, which the lane calls.

Built instead of the plain ones when `log.requests` is above 0, so that a server without a request log does nothing for
it. They add what stands here and change nothing of what a client sees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from time import monotonic
from typing import cast

from prefork.codec.frame import Event, Frame
from prefork.codec.message import Codec, InferReply, InferRequest
from prefork.errors import Code, PreforkError
from prefork.serving.requestlog import MAX_TEXT, Entry, RequestLog
from prefork.serving.rpc import Connection
from prefork.serving.scheduler import Job, Result, Scheduler
from prefork.serving.service import Service

CODECS = {int(codec): codec.name.lower() for codec in Codec}
TRACEPARENT = "traceparent"


class Trail:
    """What is known of a request until it is answered: when it had arrived and when its run began and ended
    (time.monotonic() seconds; `ended` 0 when there was none), the size of its body, and itself once it is decoded, or
    what is wanted of it (words_of)."""

    __slots__ = ("began", "ended", "request", "since", "size", "words")

    def __init__(self) -> None:
        self.since = self.began = self.ended = 0.0
        self.size = 0
        self.request: InferRequest | None = None
        self.words = ("", "", "")


class TimedScheduler(Scheduler):
    """`trail`: of the request that the loop is at; a job takes it along."""

    trail = Trail()

    def run_now(self, request: InferRequest, size: int) -> Result | None:
        trail = self.trail
        trail.request = request
        start = monotonic()
        result = Scheduler.run_now(self, request, size)
        if result is not None:
            trail.began, trail.ended = start, monotonic()
        return result

    def submit(self, job: Job) -> None:
        job.trail = self.trail
        super().submit(job)

    def _run_if_alive(self, job: Job) -> Result | None:
        start = monotonic()
        result = super()._run_if_alive(job)
        if job.begun:
            trail = _trail(job)
            trail.began, trail.ended = start, monotonic()
        return result


class LoggedConnection(Connection):
    """A connection whose answers are noted."""

    __slots__ = ("_failed", "_log", "_own", "_peer", "_scheduler", "_trail")

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, log: RequestLog) -> None:
        super().__init__(service, loop)
        self._log = log
        self._scheduler = cast(TimedScheduler, service.scheduler)
        self._peer = ""
        self._failed = False  # the last answer was an error
        self._own = Trail()
        self._trail: Trail | None = None  # of the request that is being taken or answered

    def _take(self, frame: Event, received: float | None) -> None:
        trail = self._trail = self._scheduler.trail = self._own  # one for all that are answered before the next
        trail.since = monotonic() if received is None else received
        trail.size = len(frame.body) if type(frame) is Frame else 0
        trail.ended = 0.0
        Connection._take(self, frame, received)
        self._trail = self._own.request = None

    def _queue(self, frame: Frame, request: InferRequest, size: int, received: float | None) -> None:
        self._own, trail = Trail(), self._scheduler.trail
        trail.words, trail.request = words_of(request), None  # a job that is given up lets go of its tensors
        super()._queue(frame, request, size, received)

    def settle(self, job: Job, result: Result) -> None:
        self._trail = _trail(job)
        super().settle(job, result)
        self._trail = None

    def _answer(self, request_id: int, codec: int, result: Result, model: str) -> None:
        before, self._failed = self._written, False
        super()._answer(request_id, codec, result, model)
        if not self._failed and self._log.takes():
            version = result.model_version if type(result) is InferReply else ""
            self._note(request_id, codec, Code.OK, model, version, self._written - before)

    def _send_error(self, request_id: int, codec: int, error: PreforkError, model: str = "") -> None:
        before, self._failed = self._written, True
        super()._send_error(request_id, codec, error, model)
        if self._log.takes_error():
            self._note(request_id, codec, error.code, model, "", self._written - before)

    def _note(self, request_id: int, codec: int, code: Code, model: str, version: str, size: int) -> None:
        now, trail = monotonic(), self._trail
        if trail is None:  # said to all that is in flight at the end, or to a connection that never became whole
            job = self._jobs.get(request_id)
            trail = _trail(job) if job is not None else _unknown(now)
        ran = trail.ended > 0  # the lane sets it last
        named, identifier, parent = words_of(trail.request) if trail.request is not None else trail.words
        self._peer = self._peer or self._who()
        entry = Entry(
            time.time_ns(), code, CODECS.get(codec, str(codec)), model[:MAX_TEXT] or named, version, request_id,
            trail.size, size, (trail.began if ran else now) - trail.since, trail.ended - trail.began if ran else 0.0,
            now - trail.since, self._peer, identifier, parent,
        )  # fmt: skip
        self._log.note(entry)

    def _who(self) -> str:
        """`host:port` of the client, or `unix`."""
        name = self.transport.get_extra_info("peername")
        if not isinstance(name, tuple):
            return "unix"
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


def factory(service: Service, loop: asyncio.AbstractEventLoop, log: RequestLog) -> Callable[[], LoggedConnection]:
    """`service` has a TimedScheduler."""
    return lambda: LoggedConnection(service, loop, log)


def words_of(request: InferRequest) -> tuple[str, str, str]:
    """Its model, its id and its traceparent, cut to what a line may hold of them."""
    parent = str(request.parameters.get(TRACEPARENT, ""))
    return request.model_name[:MAX_TEXT], request.id[:MAX_TEXT], parent[:MAX_TEXT]


def _unknown(now: float) -> Trail:
    found = Trail()
    found.since = now
    return found


def _trail(job: Job) -> Trail:
    return cast(Trail, job.trail)

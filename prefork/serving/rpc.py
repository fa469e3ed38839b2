"""The shell of our own RPC: bytes of one connection to jobs and back. Runs in the worker's loop thread.

Everything that is protocol stands in prefork.codec; here is the socket's side of it: backpressure, what is in flight
on this connection, and how a connection ends. A client's bytes can end its connection, never the worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn, cast

from prefork.codec.frame import Event, Frame, FrameReader, Oversize, encode_frame, frame_header
from prefork.codec.message import Codec, ErrorReply, InferReply, InferRequest, Kind
from prefork.codec.registry import CODECS, codec_of
from prefork.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PreforkError,
    ProtocolError,
    ResourceExhausted,
    StatusError,
    Unavailable,
    Unimplemented,
)
from prefork.serving.scheduler import Job, Result
from prefork.serving.service import Service
from prefork.shm import words as board

INFER, INFER_REPLY = int(Kind.INFER), int(Kind.INFER_REPLY)  # an enum's members are slower to find and to compare
JOIN_BELOW = 1 << 16  # bytes; a longer body is written behind its header instead of being copied to it
LINGER = 1.0  # seconds a refused peer may take to read why, before its connection is closed


class State(IntEnum):
    """Of one connection. OPEN goes to any later state, the others only onward.

    OPEN     requests are taken
    ENDING   the client has half-closed or the worker drains: what is in flight is answered, then it ends
    REFUSED  its bytes cannot be understood: what comes in is thrown away, what is in flight is answered, then it ends
    ENDED    our side is shut; the client has LINGER seconds to read and to close
    """

    OPEN = 0
    ENDING = 1
    REFUSED = 2
    ENDED = 3


class Connection(asyncio.Protocol):
    """One client. Doors: asyncio's callbacks, `settle` (called by the scheduler), `go_away`, `stop`, `abort`,
    `check_age` (called by the worker)."""

    __slots__ = (
        "_began", "_heard", "_jobs", "_loop", "_peer_ended", "_reader", "_service", "_stalled", "_state", "_transport",
    )  # fmt: skip

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._loop = loop
        self._reader = FrameReader(service.limits.max_frame_bytes)
        self._jobs: dict[int, Job] = {}
        self._state = State.OPEN
        self._peer_ended = False
        self._began: float | None = None  # when the unfinished frame began
        self._stalled: float | None = None  # since when the client does not read
        self._heard = service.now

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        service = self._service
        if not service.enter(self):
            self._refuse(ResourceExhausted(f"worker has max_connections {service.limits.max_connections} already"))
        elif service.draining:
            self.go_away()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = State.ENDED
        for job in self._jobs.values():
            self._service.scheduler.drop(job)
        self._jobs.clear()
        self._service.leave(self)

    def eof_received(self) -> bool:
        """A client may half-close after its last request and still read the answers."""
        self._peer_ended = True
        if self._state is State.OPEN:
            try:
                self._reader.eof()
            except ProtocolError as e:
                self._refuse(e)
        self._end(State.ENDING)
        return True

    def pause_writing(self) -> None:
        self._stalled = time.monotonic()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled = None
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._state >= State.REFUSED:
            return
        service, reader = self._service, self._reader
        self._heard = service.now
        service.bytes_in += len(data)
        try:
            for frame in reader.receive(data):
                try:
                    if frame.kind == INFER and type(frame) is Frame:
                        self._infer(frame)
                    else:
                        self._take_rare(frame)
                except ProtocolError:
                    raise
                except Exception as e:
                    self._fail(frame, e)
                self._began = None
            if reader.error is not None:
                raise reader.error
        except ProtocolError as e:
            self._refuse(e)
            return
        if self._began is None and reader.buffered:
            self._began = time.monotonic()

    # requests

    def _fail(self, frame: Event, error: Exception) -> None:
        if isinstance(error, StatusError):
            self._service.words[board.REFUSED] += 1
            self._send_error(frame.request_id, frame.codec, error)
        else:  # a fault of ours must not cost the other clients their worker
            self._service.log_fault(error)
            self._send_error(frame.request_id, frame.codec, Internal(f"{type(error).__name__}: {error}"))

    def _infer(self, frame: Frame) -> None:
        service, request_id = self._service, frame.request_id
        if request_id == 0 or request_id in self._jobs:
            _refuse_id(request_id)
        if service.draining:
            raise Unavailable("the worker is draining; connect again")
        request = service.decode(frame.codec, frame.body)
        result = service.scheduler.run_now(request, len(frame.body))
        if result is None:
            self._queue(frame, request)
        else:
            self._answer(request_id, frame.codec, result)

    def _queue(self, frame: Frame, request: InferRequest) -> None:
        limits, request_id = self._service.limits, frame.request_id
        if len(self._jobs) >= limits.max_in_flight_per_connection:
            raise ResourceExhausted(
                f"connection has {len(self._jobs)} requests in flight, max_in_flight_per_connection is "
                f"{limits.max_in_flight_per_connection}",
                retry_after_ms=1,
            )
        received = self._began or time.monotonic()
        timeout_ms = min(frame.timeout_ms or limits.default_timeout_ms, limits.max_timeout_ms)
        job = Job(self, request_id, frame.codec, request, len(frame.body), received + timeout_ms * 1e-3)
        self._jobs[request_id] = job
        try:
            self._service.scheduler.submit(job)
        except StatusError:
            self._jobs.pop(request_id, None)
            raise

    def _take_rare(self, frame: Event) -> None:
        if isinstance(frame, Oversize):
            raise InvalidArgument(f"frame body of {frame.size} bytes exceeds max_frame_bytes {frame.limit}")
        if frame.kind == Kind.CANCEL:
            if job := self._jobs.pop(frame.request_id, None):
                self._service.scheduler.drop(job)
                self._end_if_done()
            return
        if frame.request_id == 0 or frame.request_id in self._jobs:
            _refuse_id(frame.request_id)
        codec = codec_of(frame.codec)
        answer = self._service.answers.get(frame.kind)
        if answer is None:
            raise Unimplemented(f"frame kind {frame.kind} is not a request that this server knows")
        reply = answer(codec.decode(frame.kind, frame.body, self._service.wire_limits))
        self._send(encode_frame(frame.kind + 1, frame.codec, frame.request_id, codec.encode(frame.kind + 1, reply)))

    # answers

    def settle(self, job: Job, result: Result) -> None:
        """The scheduler's answer to a job of this connection."""
        self._jobs.pop(job.request_id, None)
        if self._service.draining:
            self._service.changed.set()
        self._answer(job.request_id, job.codec, result)
        if self._state:
            self._end_if_done()

    def _answer(self, request_id: int, codec: int, result: Result) -> None:
        if type(result) is not InferReply:
            self._send_error(request_id, codec, cast(PreforkError, result))
            return
        try:
            body = CODECS[codec].encode_infer_reply(result)
        except PreforkError as e:
            self._send_error(request_id, codec, e)
            return
        self._service.words[board.REPLIES_OK] += 1
        if len(body) < JOIN_BELOW:
            self._send(encode_frame(INFER_REPLY, codec, request_id, body))
        else:
            self._send(frame_header(INFER_REPLY, codec, request_id, len(body)))
            self._send(body)

    def _send(self, data: bytes) -> None:
        if self._state is not State.ENDED:
            self._service.bytes_out += len(data)
            self._transport.write(data)

    def _send_error(self, request_id: int, codec: int, error: PreforkError) -> None:
        self._service.words[board.ERRORS + error.code] += 1
        if codec not in (Codec.MSGPACK, Codec.PROTOBUF):
            codec = Codec.MSGPACK
        retry = error.retry_after_ms if isinstance(error, StatusError) else 0
        reply = ErrorReply(error.code, error.message, error.retryable, retry)
        self._send(encode_frame(Kind.ERROR, codec, request_id, codec_of(codec).encode(Kind.ERROR, reply)))

    # the end of a connection

    def go_away(self) -> None:
        """Tell the client that nothing new is taken here; what was accepted is answered."""
        self._send(encode_frame(Kind.GOAWAY, Codec.NONE, 0))

    def stop(self) -> None:
        """End when nothing is in flight any more."""
        self._end(State.ENDING)

    def abort(self, error: PreforkError) -> None:
        """Answer all that is in flight with `error`, and close after that has left."""
        for job in list(self._jobs.values()):
            self._service.scheduler.drop(job)
            self._send_error(job.request_id, job.codec, error)
        self._jobs.clear()
        self._state = State.ENDED
        self._transport.close()

    def check_age(self, now: float) -> None:
        """End a connection that is idle, whose frame does not arrive, or whose client does not read."""
        limits = self._service.limits
        if self._stalled is not None and now - self._stalled > limits.read_timeout:
            self._state = State.ENDED
            self._transport.abort()
        elif self._began is not None and now - self._began > limits.read_timeout:
            if self._state is State.OPEN:
                self._refuse(
                    DeadlineExceeded(f"a frame that began {limits.read_timeout:g} s ago (read_timeout) is not whole")
                )
        elif limits.idle_timeout and not self._jobs and now - self._heard > limits.idle_timeout:
            self.stop()

    def _refuse(self, error: PreforkError) -> None:
        """Say under id 0 why the connection ends. It is only half-closed then: closing at once would reset it while
        unread bytes are there, and a reset destroys what the peer has not read yet."""
        self._send_error(0, Codec.MSGPACK, error)
        self._end(State.REFUSED)

    def _end(self, state: State) -> None:
        self._state = max(self._state, state)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._jobs or self._state in (State.OPEN, State.ENDED):
            return
        self._state = State.ENDED
        if self._peer_ended:
            self._transport.close()
        else:
            self._transport.write_eof()
            self._loop.call_later(LINGER, self._transport.close)


def _refuse_id(request_id: int) -> NoReturn:
    if request_id == 0:
        raise InvalidArgument("request id 0 stands for the connection; expected 1 or more")
    # answering under an id in use would be taken for the answer of the first request
    raise ProtocolError(f"request id {request_id} is in flight already on this connection")


def factory(service: Service, loop: asyncio.AbstractEventLoop) -> Callable[[], Connection]:
    return lambda: Connection(service, loop)

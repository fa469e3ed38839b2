"""The shell of our own RPC: bytes of one connection to jobs and back. Runs in the worker's loop thread.

Everything that is protocol stands in prefork.codec; here is the socket's side of it: backpressure, what is in flight
on this connection, and how a connection ends. A client's bytes can end its connection, never the worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
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
from prefork.serving.stream import State, Stream
from prefork.shm import words as board

INFER, INFER_REPLY = int(Kind.INFER), int(Kind.INFER_REPLY)  # an enum's members are slower to find and to compare
JOIN_BELOW = 1 << 16  # bytes; a longer body is written behind its header instead of being copied to it
LATE_DECODE = 1 << 16  # bytes; a larger request is decoded only after it is sure of a place
SLICE = 1e-3  # seconds of one connection's pipelined requests before the others have their turn


class Connection(Stream):
    """One client. Doors: asyncio's callbacks, `settle` (called by the scheduler), and what service.Client names."""

    __slots__ = ("_began", "_headed", "_held", "_jobs", "_partial", "_reader", "_resting")

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(service, loop)
        self._reader = FrameReader(service.limits.max_frame_bytes)
        self._jobs: dict[int, Job] = {}
        self._held: deque[tuple[Event, float]] = deque()  # received, not yet looked at: the client does not read,
        self._resting = False  # or others have their turn
        self._began: float | None = None  # when the unfinished frame began
        self._partial: Frame | None = None  # the frame whose header is complete,
        self._headed = 0.0  # and since when

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        service = self.service
        if not service.enter(self):
            self._refuse(ResourceExhausted(f"worker has max_connections {service.limits.max_connections} already"))
        elif service.leaving:
            self.go_away()

    def connection_lost(self, exc: Exception | None) -> None:
        self.state = State.ENDED
        for job in self._jobs.values():
            self.service.scheduler.drop(job)
        self._jobs.clear()
        self._held.clear()
        self.service.leave(self)

    def eof_received(self) -> bool:
        """A client may half-close after its last request and still read the answers."""
        self.peer_ended = True
        if not self._held:
            self._take_end()
        return self.state is not State.ENDED

    def resume_writing(self) -> None:
        self.stalled = False
        self.heard = self.service.now  # nor could we hear it meanwhile
        if self._began is not None:  # it was we who did not read
            self._began = time.monotonic()
        self.service.changed.set()
        if not self._resting:
            self._work()

    def data_received(self, data: bytes) -> None:
        if self.state >= State.REFUSED:
            return
        service = self.service
        self.heard = service.now
        service.bytes_in += len(data)
        reader = self._reader
        frames = reader.receive(data)
        if len(frames) == 1 and not self._held and not self.stalled:
            self._take(frames[0], None)
            if reader.error is None and not reader.under_way:
                return
        elif frames:
            now = time.monotonic()
            self._held.extend([(frame, now) for frame in frames])
            if not self._resting:
                self._work()
        if not self._held:
            self._take_end()

    # requests

    def _work(self) -> None:
        """Take what is held, for SLICE at most and only while the client reads its answers."""
        held, end = self._held, time.monotonic() + SLICE
        while held and not self.stalled and self.state < State.REFUSED:
            self._take(*held.popleft())
            if held and time.monotonic() > end:
                self._resting = True
                self.read(False)
                self.loop.call_soon(self._rested)
                return
        if self.state >= State.REFUSED:
            held.clear()
        if not held:
            self._take_end()
        if not self.stalled:
            self.read(True)

    def _rested(self) -> None:
        self._resting = False
        if self.state is not State.ENDED and not self.stalled:
            self._work()

    def _take_end(self) -> None:
        """All whole frames are taken: look at what is left of the stream."""
        reader = self._reader
        if self.state < State.REFUSED and reader.error is not None:
            self._refuse(reader.error)
        elif self.peer_ended:
            self._take_eof()
        elif not reader.under_way:
            self._began = self._partial = None
        elif self._began is None or reader.partial is not self._partial:
            now = time.monotonic()
            self._began = now if self._began is None else self._began
            self._partial, self._headed = reader.partial, now

    def _take_eof(self) -> None:
        if self.state is State.OPEN:
            try:
                self._reader.eof()
            except ProtocolError as e:
                self._refuse(e)
        self.end(State.ENDING)
        if self._jobs and not self.watched:
            # a client that closed looks like one that has sent its last; writing to the former makes the kernel know
            self.go_away()
            self.watch_peer()

    def _take(self, frame: Event, received: float | None) -> None:
        """`received`: when the frame had arrived, None for just now."""
        try:
            if frame.kind == INFER and type(frame) is Frame:
                if frame is self._partial:
                    received = self._headed
                self._infer(frame, received)
            else:
                self._take_rare(frame)
        except StatusError as e:
            self.service.words[board.REFUSED] += 1
            self._send_error(frame.request_id, frame.codec, e)
        except ProtocolError as e:
            self._refuse(e)
        except Exception as e:  # a fault of ours must not cost the other clients their worker
            self.service.log_fault(e)
            self._send_error(frame.request_id, frame.codec, Internal(f"{type(e).__name__}: {e}"))
        self._began = self._partial = None

    def _infer(self, frame: Frame, received: float | None) -> None:
        service, request_id = self.service, frame.request_id
        if request_id == 0 or request_id in self._jobs:
            _refuse_id(request_id)
        if service.draining:
            raise Unavailable("the worker is draining; connect again")
        if received is not None and time.monotonic() > received + self._timeout(frame):
            raise DeadlineExceeded("the deadline passed while the request arrived or waited for those before it")
        size = len(frame.body)
        if size > LATE_DECODE:
            self._check_room(size)
        request = service.decode(frame.codec, frame.body)
        try:
            result = service.scheduler.run_now(request, size)
            if result is None:
                self._queue(frame, request, size, received)
                return
        except StatusError as e:
            service.words[board.REFUSED] += 1
            self._send_error(request_id, frame.codec, e, request.model_name)
            return
        self._answer(request_id, frame.codec, result, request.model_name)

    def _queue(self, frame: Frame, request: InferRequest, size: int, received: float | None) -> None:
        if size <= LATE_DECODE:
            self._check_room(size)
        deadline = (received or time.monotonic()) + self._timeout(frame)
        job = self._jobs[frame.request_id] = Job(self, frame.request_id, frame.codec, request, size, deadline)
        try:
            self.service.scheduler.submit(job)
        except StatusError:
            self._jobs.pop(frame.request_id, None)
            raise

    def _timeout(self, frame: Frame) -> float:
        limits = self.service.limits
        return min(frame.timeout_ms or limits.default_timeout_ms, limits.max_timeout_ms) * 1e-3

    def _check_room(self, size: int) -> None:
        most = self.service.limits.max_in_flight_per_connection
        if len(self._jobs) >= most:
            raise ResourceExhausted(
                f"connection has {len(self._jobs)} requests in flight, max_in_flight_per_connection is {most}",
                retry_after_ms=1,
            )
        self.service.scheduler.admission.check(size)

    def _take_rare(self, frame: Event) -> None:
        if frame.kind == Kind.CANCEL:
            if job := self._jobs.pop(frame.request_id, None):
                self.service.scheduler.drop(job)
                self.service.changed.set()
                self.end_if_done()
            return
        if frame.request_id == 0 or frame.request_id in self._jobs:
            _refuse_id(frame.request_id)
        if isinstance(frame, Oversize):
            raise InvalidArgument(f"frame body of {frame.size} bytes exceeds max_frame_bytes {frame.limit}")
        codec = codec_of(frame.codec)
        answer = self.service.answers.get(frame.kind)
        if answer is None:
            raise Unimplemented(f"frame kind {frame.kind} is not a request that this server knows")
        reply = answer(codec.decode(frame.kind, frame.body, self.service.wire_limits))
        self.send(encode_frame(frame.kind + 1, frame.codec, frame.request_id, codec.encode(frame.kind + 1, reply)))

    # answers

    def settle(self, job: Job, result: Result) -> None:
        """The scheduler's answer to a job of this connection."""
        self._jobs.pop(job.request_id, None)
        self.heard = self.service.now
        if self.service.leaving:
            self.service.changed.set()
        self._answer(job.request_id, job.codec, result, job.model)
        if self.state:
            self.end_if_done()

    def _answer(self, request_id: int, codec: int, result: Result, model: str) -> None:
        if type(result) is not InferReply:
            self._send_error(request_id, codec, cast(PreforkError, result), model)
            return
        try:
            body = CODECS[codec].encode_infer_reply(result)
            if len(body) > self.service.limits.max_frame_bytes:
                raise _too_large(len(body), self.service.limits.max_frame_bytes)
        except PreforkError as e:
            self._send_error(request_id, codec, e, model)
            return
        except Exception as e:  # no memory for it, for one
            self.service.log_fault(e)
            self._send_error(request_id, codec, Internal(f"the reply cannot be written: {type(e).__name__}"), model)
            return
        service = self.service
        service.words[service.rows[codec][model]] += 1
        if len(body) < JOIN_BELOW:
            self.send(encode_frame(INFER_REPLY, codec, request_id, body))
        else:
            self.send(frame_header(INFER_REPLY, codec, request_id, len(body)))
            self.send(body)

    def _send_error(self, request_id: int, codec: int, error: PreforkError, model: str = "") -> None:
        if codec not in (Codec.MSGPACK, Codec.PROTOBUF):
            codec = Codec.MSGPACK
        self.service.words[self.service.rows[codec][model] + error.code] += 1
        retry = error.retry_after_ms if isinstance(error, StatusError) else 0
        reply = ErrorReply(error.code, error.message, error.retryable, retry)
        self.send(encode_frame(Kind.ERROR, codec, request_id, codec_of(codec).encode(Kind.ERROR, reply)))

    # the end of a connection

    @property
    def buffered(self) -> int:
        """Bytes held of a request that has not arrived whole."""
        return self._reader.buffered

    def go_away(self) -> None:
        """Tell the client to take its next requests elsewhere; what was accepted is answered."""
        self.heard = time.monotonic()
        self.send(encode_frame(Kind.GOAWAY, Codec.NONE, 0))

    def stop(self) -> None:
        """End when nothing is in flight any more."""
        self.end(State.ENDING)

    def quiet(self, now: float, patience: float) -> bool:
        """Whether nothing is outstanding here and nothing has been heard for `patience` seconds."""
        idle = not self._jobs and not self._held and self._began is None and not self.unsent
        return self.state is State.OPEN and idle and now - self.heard > patience and not self.unread

    def refuse(self, error: StatusError) -> None:
        """End the connection for a reason that is the worker's."""
        if self.state < State.REFUSED:
            self._refuse(error)

    def abort(self, message: str) -> None:
        """Answer all that is in flight with Unavailable, and close after that has left."""
        for job in list(self._jobs.values()):
            self.service.scheduler.drop(job)
            error = Unavailable(message)
            error.retryable = not job.begun  # the word says that the request was not run
            self._send_error(job.request_id, job.codec, error, job.model)
        self._jobs.clear()
        self.state = State.ENDED
        self.transport.close()

    def check_age(self, now: float) -> None:
        """End a connection that is idle, whose frame does not arrive, or whose client does not read."""
        limits = self.service.limits
        if not self.moves(now, limits.read_timeout):
            self.state = State.ENDED
            self.transport.abort()
        elif self._began is not None and self.reading and now - self._began > limits.read_timeout:
            self.refuse(
                DeadlineExceeded(f"a frame that began {limits.read_timeout:g} s ago (read_timeout) is not whole")
            )
        elif limits.idle_timeout and self.reading and not self._jobs and now - self.heard > limits.idle_timeout:
            self.go_away()
            self.stop()

    def _refuse(self, error: PreforkError) -> None:
        """Say under id 0 why the connection ends. It is only half-closed then: closing at once would reset it while
        unread bytes are there, and a reset destroys what the peer has not read yet."""
        self._send_error(0, Codec.MSGPACK, error)
        self.end(State.REFUSED)


def _refuse_id(request_id: int) -> NoReturn:
    if request_id == 0:
        raise InvalidArgument("request id 0 stands for the connection; expected 1 or more")
    # answering under an id in use would be taken for the answer of the first request
    raise ProtocolError(f"request id {request_id} is in flight already on this connection")


def _too_large(size: int, most: int) -> ResourceExhausted:
    error = ResourceExhausted(f"the reply has {size} bytes, max_frame_bytes is {most}")
    error.retryable = False  # it would be as large again
    return error


def factory(service: Service, loop: asyncio.AbstractEventLoop) -> Callable[[], Connection]:
    return lambda: Connection(service, loop)

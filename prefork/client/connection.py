"""One connection without its socket: request ids, replies matched by id, and the ends a connection can have. Sans-IO.

| state | entered by | a new request | pending requests |
|---|---|---|---|
| OPEN | the start | taken | wait |
| DRAINING | GOAWAY | refused | wait, they are answered |
| CLOSED | ERROR under id 0, bytes that are no protocol, `lost` | refused | failed, all of them |

Ids rise from 1 and are never used twice, and a request that was given up is forgotten at once: a late reply finds
nobody, so it can only be dropped, never answer another request. Used by both clients; the owner serialises the calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from prefork.codec.frame import Event, Frame, FrameReader, encode_frame, frame_header
from prefork.codec.message import Codec, ErrorReply, Kind
from prefork.codec.registry import codec_of
from prefork.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    PreforkError,
    ProtocolError,
    ResourceExhausted,
    StatusError,
    Unavailable,
    from_wire,
)
from prefork.tensor import Buffer

T = TypeVar("T")
Outcome: TypeAlias = Frame | PreforkError

MAX_BODY = 0xFFFFFFFF  # the header's length is 32 bits
_JOIN_BELOW = 16384  # header and body in one piece: one more copy is cheaper than one more buffer


class State(Enum):
    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class Leaving(Unavailable):
    """Nothing was sent: another connection may be asked at once, which is no repetition."""


class Connection(Generic[T]):
    """`T` is what the owner waits on (a call, a future); outcomes come back paired with it."""

    def __init__(self, codec: Codec, max_body: int, peer: str) -> None:
        self.codec = codec
        self.peer = peer
        self.state = State.OPEN
        self._reader = FrameReader(max_body)
        self._last_id = 0
        self._pending: dict[int, tuple[int, T]] = {}  # id -> kind of the reply, waiter

    @property
    def waiting(self) -> Iterable[T]:
        """The waiters of pending requests, the oldest first."""
        return (waiter for _, waiter in self._pending.values())

    @property
    def idle(self) -> bool:
        return not self._pending

    @property
    def body_is_under_way(self) -> bool:
        """A large read is worth while."""
        return self._reader.partial is not None

    def request(self, kind: Kind, body: Buffer, timeout_ms: int, waiter: T) -> tuple[int, list[Buffer]]:
        """The new request's id, and the bytes to send for it. Raises Leaving when the connection takes none."""
        if self.state is not State.OPEN:
            raise Leaving(f"{self.peer}: the connection is {self.state.value} and takes no new request")
        if len(body) > MAX_BODY:
            raise InvalidArgument(f"the request has {len(body)} bytes, a frame holds at most {MAX_BODY}")
        self._last_id = request_id = self._last_id + 1
        self._pending[request_id] = (kind + 1, waiter)
        # also with an empty body: the codec says how to write the reply
        if len(body) < _JOIN_BELOW:
            return request_id, [encode_frame(kind, self.codec, request_id, body, timeout_ms)]
        return request_id, [frame_header(kind, self.codec, request_id, len(body), timeout_ms), body]

    def forget(self, request_id: int) -> bytes:
        """Give a request up: its late reply will be dropped. The CANCEL frame to send, empty when there is no need."""
        if self._pending.pop(request_id, None) is None or self.state is State.CLOSED:
            return b""
        return encode_frame(Kind.CANCEL, Codec.NONE, request_id)

    def receive(self, data: Buffer) -> list[tuple[T, Outcome]]:
        """What `data` decides. Bytes that are no protocol end the connection: CLOSED, and everything pending fails."""
        decided: list[tuple[T, Outcome]] = []
        if self.state is State.CLOSED:
            return decided
        try:
            for event in self._reader.receive(data):
                self._take(event, decided)
            if self._reader.error is not None:
                raise self._reader.error
        except ProtocolError as error:
            decided += self._fail(f"the server broke the protocol: {error.message}", error)
        except StatusError as error:
            decided += self._fail(f"the server ended the connection: {error.message}", error)
        return decided

    def eof(self) -> list[tuple[T, Outcome]]:
        """The server sends no more: as `lost`, with the place where the stream ended when that is inside a frame."""
        try:
            self._reader.eof()
        except ProtocolError as error:
            return self._fail(f"the server closed the connection: {error.message}", error)
        return self._fail("the server closed the connection", None)

    def lost(self, reason: str) -> list[tuple[T, Outcome]]:
        """The stream has failed: each pending request gets Unavailable, its `maybe_executed` set."""
        return self._fail(reason, None)

    def abort(self, reason: str) -> list[tuple[T, Outcome]]:
        """The owner ends the connection; each pending request gets Cancelled."""
        return [(waiter, Cancelled(reason)) for waiter in self._close()]

    def _close(self) -> list[T]:
        self.state = State.CLOSED
        waiters, self._pending = list(self.waiting), {}
        return waiters

    def _fail(self, reason: str, cause: PreforkError | None) -> list[tuple[T, Outcome]]:
        return [(waiter, self._loss(reason, cause)) for waiter in self._close()]

    def _loss(self, reason: str, cause: PreforkError | None) -> Unavailable:
        refused = isinstance(cause, StatusError) and cause.retryable  # the server says that it did not run it
        error = Unavailable(
            f"{self.peer}: {reason}", retry_after_ms=cause.retry_after_ms if isinstance(cause, StatusError) else 0
        )
        error.maybe_executed = not refused
        error.__cause__ = cause
        return error

    def _take(self, event: Event, decided: list[tuple[T, Outcome]]) -> None:
        request_id, kind = event.request_id, event.kind
        if request_id == 0:
            return self._control(event)
        expected, waiter = self._pending.pop(request_id, (0, None))
        if waiter is None:
            if request_id > self._last_id:
                raise ProtocolError(f"a reply under id {request_id}, which was never used; the last is {self._last_id}")
            return None  # late: its request was given up
        if not isinstance(event, Frame):
            decided.append((waiter, _too_large(event.size, event.limit)))
        elif kind == Kind.ERROR:
            decided.append((waiter, decode_error(event)))
        elif kind == expected:
            decided.append((waiter, event))
        else:
            self._pending[request_id] = (expected, waiter)  # it fails with the connection
            raise ProtocolError(f"request id {request_id}: expected a reply of kind {expected}, found {kind}")
        return None

    def _control(self, event: Event) -> None:
        if event.kind == Kind.GOAWAY:
            self.state = State.DRAINING
        elif event.kind == Kind.ERROR and isinstance(event, Frame):
            raise decode_error(event)
        else:
            raise ProtocolError(f"a frame of kind {event.kind} under id 0; expected GOAWAY or ERROR")


def decode_error(frame: Frame) -> StatusError:
    """The typed error that an ERROR frame carries; Internal when it cannot be read."""
    try:
        reply = codec_of(frame.codec).decode(frame.kind, frame.body)
    except PreforkError as error:
        return Internal(f"the server's error cannot be read: {error.message}")
    if not isinstance(reply, ErrorReply):
        return Internal("the server's error has no content")
    return from_wire(reply.code, reply.message, retryable=reply.retryable, retry_after_ms=max(0, reply.retry_after_ms))


def _too_large(size: int, limit: int) -> StatusError:
    error = ResourceExhausted(f"the reply has {size} bytes, the client's max_body is {limit}")
    error.retryable = False
    return error

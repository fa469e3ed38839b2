"""Frames: a header of 24 bytes and a body. Bytes in, events out; no socket, clock or await, and no word of the bodies.

    offset  0  4 bytes  magic "PFRK"
            4  u8       version, 1
            5  u8       codec of the body (message.Codec)
            6  u8       kind (message.Kind)
            7  u8       flags, 0; no bit has a meaning in version 1 and a receiver ignores them
            8  u64      request id, chosen by the client; 0 is the connection itself
           16  u32      length of the body that follows
           20  u32      time-out in milliseconds from the moment this header is complete; 0: none given

All numbers are little-endian. Used by the worker and by clients.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

from prefork.errors import ProtocolError
from prefork.tensor import Buffer

MAGIC = b"PFRK"
VERSION = 1
HEADER_SIZE = 24
MAX_TIMEOUT_MS = 0xFFFFFFFF

_HEADER = struct.Struct("<4sBBBBQII")
_pack = _HEADER.pack
_unpack_from = _HEADER.unpack_from
# A shorter body is copied out of its chunk: as cheap as a view, and it does not keep the whole chunk alive.
_VIEW_FROM = 16384


@dataclass(slots=True)
class Frame:
    """One whole frame. `kind` and `codec` are what stood there, also when this version knows no such number.

    `body` belongs to the frame: it never aliases a buffer that the caller of `receive` may write to again."""

    kind: int
    codec: int
    flags: int
    request_id: int
    timeout_ms: int
    body: Buffer


@dataclass(slots=True)
class Oversize:
    """A frame whose header claims `size` bytes of body where `limit` are allowed. Its body is skipped, never held."""

    kind: int
    codec: int
    request_id: int
    size: int
    limit: int


Event: TypeAlias = Frame | Oversize


def frame_header(kind: int, codec: int, request_id: int, length: int, timeout_ms: int = 0, flags: int = 0) -> bytes:
    """The header of a frame whose body of `length` bytes is written after it. Raises struct.error out of range."""
    return _pack(MAGIC, VERSION, codec, kind, flags, request_id, length, timeout_ms)


def encode_frame(
    kind: int, codec: int, request_id: int, body: Buffer = b"", timeout_ms: int = 0, flags: int = 0
) -> bytes:
    """A whole frame in one piece. Raises struct.error for a field out of range."""
    return _pack(MAGIC, VERSION, codec, kind, flags, request_id, len(body), timeout_ms) + body


class FrameReader:
    """Cuts a byte stream into frames; any split of the stream gives the same events and the same end.

    Bytes of a wrong magic or version end it: `error` is then set, after the events before it were given, and stays.
    The memory held follows the bytes received, never the length that a header claims."""

    __slots__ = ("_body", "_head", "_skip", "_skipped", "_want", "error", "max_body", "partial")

    def __init__(self, max_body: int) -> None:
        self.max_body = max_body
        self.error: ProtocolError | None = None
        self.partial: Frame | None = None
        """The frame whose header is complete and whose body is under way. A new object here is the moment from which
        its `timeout_ms` counts."""
        self._head = b""
        self._body = bytearray()  # of `partial`
        self._want = 0
        self._skip = 0
        self._skipped: Oversize | None = None

    @property
    def buffered(self) -> int:
        """Bytes held."""
        return len(self._head) + (len(self._body) if self.partial is not None else 0)

    @property
    def under_way(self) -> bool:
        """Whether a frame has begun and not ended; also one whose body is skipped."""
        return bool(self._head or self._skip) or self.partial is not None

    def receive(self, data: Buffer) -> list[Event]:
        """The frames that `data` completes, in order; look at `error` after each call.

        Raises the ProtocolError in `error` when it was set before this call."""
        if self.error is not None:
            raise self.error
        if len(data) >= HEADER_SIZE and not (self._head or self._skip or self.partial):
            magic, version, codec, kind, flags, request_id, size, timeout_ms = _unpack_from(data)
            # one whole frame and nothing else, as a client sends that waits for its answer
            if size + HEADER_SIZE == len(data) and magic == MAGIC and version == VERSION and size <= self.max_body:
                return [Frame(kind, codec, flags, request_id, timeout_ms, _slice(data, HEADER_SIZE, len(data)))]
        events: list[Event] = []
        position = 0
        if self._skip or self.partial is not None:
            position = self._continue_body(data, events)
        elif self._head:
            data = self._head + data
            self._head = b""
        if position < len(data):
            self._cut(data, position, events)
        return events

    def eof(self) -> None:
        """The peer will send no more. Raises ProtocolError when that is in the middle of a frame, saying where."""
        if self.error is not None:
            raise self.error
        if self._head:
            found = len(self._head)
            raise self._fail(f"the stream ended inside a frame's header: {found} of {HEADER_SIZE} bytes")
        if self.partial is not None:
            found, request_id = len(self._body), self.partial.request_id
            raise self._fail(
                f"the stream ended inside the body of request id {request_id}: {found} of {found + self._want} bytes"
            )
        if self._skip and self._skipped is not None:
            size, request_id = self._skipped.size, self._skipped.request_id
            raise self._fail(
                f"the stream ended inside the body of request id {request_id}, skipped as oversize: "
                f"{size - self._skip} of {size} bytes"
            )

    def _fail(self, message: str) -> ProtocolError:
        self._head = b""
        self.error = ProtocolError(message)
        return self.error

    def _continue_body(self, data: Buffer, events: list[Event]) -> int:
        """Feed the body that is under way; the position in `data` after it."""
        if self.partial is None:
            taken = min(self._skip, len(data))
            self._skip -= taken
            return taken
        frame, taken = self.partial, min(self._want, len(data))
        self._body += data if taken == len(data) else memoryview(data)[:taken]
        self._want -= taken
        if not self._want:
            self.partial, self._body = None, bytearray()
            events.append(frame)
        return taken

    def _cut(self, data: Buffer, position: int, events: list[Event]) -> None:
        """Take whole frames from `position` on; keep the rest. Nothing is under way when this begins."""
        end = len(data)
        while end - position >= HEADER_SIZE:
            magic, version, codec, kind, flags, request_id, size, timeout_ms = _unpack_from(data, position)
            if magic != MAGIC or version != VERSION:
                self._reject(data[position : position + 5])
                return
            start = position + HEADER_SIZE
            position = start + size
            if size > self.max_body:
                self._skipped = Oversize(kind, codec, request_id, size, self.max_body)
                events.append(self._skipped)
                self._skip = max(position - end, 0)
            elif position <= end:
                events.append(Frame(kind, codec, flags, request_id, timeout_ms, _slice(data, start, position)))
            else:
                self._body = bytearray(memoryview(data)[start:])
                self.partial = Frame(kind, codec, flags, request_id, timeout_ms, self._body)
                self._want = position - end
        if position < end:
            self._head = bytes(data[position:])
            self._reject(self._head)

    def _reject(self, head: Buffer) -> None:
        """Set `error` when the first bytes of a header are wrong; a mere part of them is judged when it is whole."""
        magic = bytes(head[:4])
        if len(magic) == 4 and magic != MAGIC:
            self._fail(f"wrong magic: expected {MAGIC!r} at the start of a frame, found {magic!r}")
        elif len(head) > 4 and head[4] != VERSION:
            self._fail(f"unknown protocol version: expected {VERSION}, found {head[4]}")


def _slice(data: Buffer, start: int, end: int) -> Buffer:
    if type(data) is not bytes:
        return bytes(data[start:end])
    return data[start:end] if end - start < _VIEW_FROM else memoryview(data)[start:end]

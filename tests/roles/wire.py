"""One bare connection for tests: frames out, frames in, nothing hidden. Blocking, with a watchdog."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefork.codec.frame import Frame, FrameReader, encode_frame
from prefork.codec.message import Codec, ErrorReply, InferReply, InferRequest, Kind, Message
from prefork.codec.registry import codec_of
from prefork.errors import Code
from prefork.tensor import Array
from prefork.value import Value, flatten, unflatten

WATCHDOG = 20.0
MAX_BODY = 1 << 30
IMAGE = np.linspace(0, 16, 64, dtype=np.float32).reshape(1, 64)


@dataclass(repr=False)
class Answer:
    """One frame from the server, its body decoded."""

    kind: int
    id: int
    message: Message

    def __repr__(self) -> str:
        return f"Answer(kind={self.kind}, id={self.id}, {str(self.message)[:300]})"

    @property
    def error(self) -> ErrorReply:
        assert isinstance(self.message, ErrorReply), str(self)
        return self.message

    @property
    def values(self) -> dict[str, Value]:
        assert isinstance(self.message, InferReply), str(self)
        return unflatten(self.message.outputs, self.message.parameters)

    def refused(self, code: Code, *words: str) -> bool:
        """Whether it is an error of that code whose message has all the words; fails saying what it is."""
        assert self.error.code == code, str(self)
        assert all(word in self.error.message for word in words), str(self)
        return True


def dial(address: str) -> socket.socket:
    """A connection to `host:port`, `[v6]:port` or `unix:PATH`."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(WATCHDOG)
        sock.connect(address.removeprefix("unix:"))
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), WATCHDOG)


def infer(request_id: int, model: str, timeout_ms: int = 0, codec: Codec = Codec.MSGPACK, **inputs: Array) -> bytes:
    """The frame of one request."""
    request = InferRequest(model, [])
    for name, value in inputs.items():
        flatten(name, np.asarray(value), request.inputs, request.parameters)
    return encode_frame(Kind.INFER, codec, request_id, codec_of(codec).encode_infer_request(request), timeout_ms)


def digits(request_id: int, timeout_ms: int = 0, codec: Codec = Codec.MSGPACK) -> bytes:
    """A request to the demo model."""
    return infer(request_id, "digits", timeout_ms, codec, image=IMAGE)


def live(request_id: int) -> bytes:
    return encode_frame(Kind.SERVER_LIVE, Codec.MSGPACK, request_id)


def cancel(request_id: int) -> bytes:
    return encode_frame(Kind.CANCEL, Codec.NONE, request_id)


class Wire:
    """A context manager; `answer` gives the next frame, `end` what comes until the end of the stream."""

    def __init__(self, address: str | socket.socket) -> None:
        self.sock = dial(address) if isinstance(address, str) else address
        self.sock.settimeout(WATCHDOG)
        self._reader = FrameReader(MAX_BODY)
        self._frames: list[Frame] = []

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.sock.close()

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def answer(self) -> Answer:
        """The next frame. Raises EOFError at the end of the stream, ConnectionError when it is reset."""
        while not self._frames:
            data = self.sock.recv(1 << 20)
            if not data:
                self._reader.eof()
                raise EOFError
            self._frames += [event for event in self._reader.receive(data) if isinstance(event, Frame)]
            assert self._reader.error is None, self._reader.error
        frame = self._frames.pop(0)
        body = None if frame.kind == Kind.GOAWAY else codec_of(frame.codec).decode(frame.kind, frame.body)
        return Answer(frame.kind, frame.request_id, body)

    def answers(self, count: int) -> dict[int, Answer]:
        """The next `count` frames by request id."""
        found = [self.answer() for _ in range(count)]
        by_id = {answer.id: answer for answer in found}
        assert len(by_id) == count, found
        return by_id

    def end(self) -> list[Answer]:
        """All that still comes until the server's orderly end."""
        found = []
        while True:
            try:
                found.append(self.answer())
            except EOFError:
                return found

"""The other end of a client's connection, driven step by step by the test, or echoing by itself.

It is a real server socket that speaks the protocol through the codec room; the test decides what it says and when, so
that faults need no clock. Socket time-outs only keep a failing test from hanging.
"""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path
from typing import Any, Self

import numpy as np

from prefork.codec.frame import Frame, FrameReader, encode_frame
from prefork.codec.message import Codec, ErrorReply, InferReply, InferRequest, Kind, Message, Ready
from prefork.codec.registry import codec_of
from prefork.errors import Code
from prefork.tensor import Tensor

PATIENCE = 30.0


class Session:
    """One accepted connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE)
        self.sock = sock
        self._reader = FrameReader(1 << 30)
        self._frames: list[Frame] = []

    def frame(self) -> Frame:
        """The next frame; EOFError when the client has closed."""
        while not self._frames:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            for event in self._reader.receive(data):
                assert isinstance(event, Frame)
                self._frames.append(event)
            assert self._reader.error is None
        return self._frames.pop(0)

    def request(self) -> tuple[Frame, InferRequest]:
        frame = self.frame()
        assert frame.kind == Kind.INFER
        return frame, codec_of(frame.codec).decode_infer_request(frame.body)

    def answer(self, frame: Frame, message: Message) -> None:
        body = codec_of(frame.codec).encode(frame.kind + 1, message)
        self.send(encode_frame(frame.kind + 1, frame.codec, frame.request_id, body))

    def reply(self, frame: Frame, *tensors: Tensor, **parameters: Any) -> None:
        self.answer(frame, InferReply("m", list(tensors), parameters=parameters))

    def echo(self, frame: Frame) -> None:
        self.reply(frame, *codec_of(frame.codec).decode_infer_request(frame.body).inputs)

    def number(self, frame: Frame, value: int) -> None:
        self.reply(frame, Tensor.from_numpy("y", np.array([value])))

    def error(self, request_id: int, code: Code, text: str, retryable: bool = False, retry_after_ms: int = 0) -> None:
        body = codec_of(Codec.MSGPACK).encode(Kind.ERROR, ErrorReply(code, text, retryable, retry_after_ms))
        self.send(encode_frame(Kind.ERROR, Codec.MSGPACK, request_id, body))

    def goaway(self) -> None:
        self.send(encode_frame(Kind.GOAWAY, Codec.NONE, 0))

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """Close with RST, unread bytes or not."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def half_close(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)


class Peer:
    """A listening socket: TCP on 127.0.0.1 or ::1, or a Unix socket at `path`; the kernel chooses ports."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET, path: Path | None = None) -> None:
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.settimeout(PATIENCE)
        self.sessions: list[Session] = []
        if path is not None:
            self._listener.bind(str(path))
            self.address = f"unix:{path}"
        elif family == socket.AF_INET6:
            self._listener.bind(("::1", 0))
            self.address = f"[::1]:{self._listener.getsockname()[1]}"
        else:
            self._listener.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._listener.listen(64)

    def accept(self) -> Session:
        session = Session(self._listener.accept()[0])
        self.sessions.append(session)
        return session

    def close(self) -> None:
        self._listener.close()
        for session in self.sessions:
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Echo(Peer):
    """Answers every INFER with its inputs and the number of the connection (parameter `connection`), in threads."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET, path: Path | None = None) -> None:
        super().__init__(family, path)
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._listener.settimeout(None)
        self._start(self._accept_all)

    def _start(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept_all(self) -> None:
        while True:
            session = self.accept()
            if self._closing:
                return
            self._start(self._serve, session, len(self.sessions))

    def _serve(self, session: Session, number: int) -> None:
        session.sock.settimeout(None)
        try:
            while True:
                frame = session.frame()
                if frame.kind == Kind.INFER:
                    request = codec_of(frame.codec).decode_infer_request(frame.body)
                    session.reply(frame, *request.inputs, **request.parameters, connection=number)
                elif frame.kind in (Kind.SERVER_READY, Kind.SERVER_LIVE, Kind.MODEL_READY):
                    session.answer(frame, Ready(True))
        except (EOFError, OSError):
            session.close()

    def close(self) -> None:
        with socket.socket(self._listener.family) as wake:  # shutdown alone does not end accept on a Unix socket
            self._closing = True
            wake.connect(self._listener.getsockname())
        self._threads[0].join()
        for session in self.sessions:
            try:
                session.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join()
        super().close()

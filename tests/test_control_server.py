"""The control socket's server in a loop of its own: one line in, one line out, whatever the client does."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from prefork import control, listener
from prefork.control_server import MAX_CLIENTS, PATIENCE, ControlServer
from prefork.errors import Internal, InvalidArgument


class Loop:
    """A master's loop with a control socket and nothing else, in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._selector = selectors.DefaultSelector()
        self._sock = listener.open_unix(path, 64)
        self._wake, self._woken = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self.server = ControlServer(self._sock, self._selector, self.answer)
        self.asked: list[control.Request] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def answer(self, request: control.Request) -> dict[str, Any]:
        self.asked.append(request)
        match request.command:
            case "large":
                return {"text": "x" * request.integer("size", 0, 1 << 22)}
            case "refuse":
                raise InvalidArgument("no such thing")
            case "break":
                raise KeyError("of ours")
        return dict(request.args)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    key.data()
                elif os.read(self._wake, 1) == b"e":
                    self.server.expire(time.monotonic() + PATIENCE)
                else:
                    return

    def expire(self) -> None:
        """Let the time of every client that was accepted be over."""
        os.write(self._woken, b"e")

    def close(self) -> int:
        """End the loop; the clients that it still has."""
        os.write(self._woken, b"x")
        self._thread.join()
        left = len(self._selector.get_map()) - 2
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._sock and isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        for fd in (self._wake, self._woken):
            os.close(fd)
        self._sock.close()
        self._selector.close()
        return left


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    found = Loop(tmp_path / "c")
    yield found
    assert found.close() == 0


def dial(loop: Loop) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(str(loop.path))
    return sock


def everything(sock: socket.socket) -> bytes:
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
    return data


def test_a_question_and_its_answer(loop: Loop) -> None:
    assert control.request(loop.path, "echo", {"a": [1, None]}) == {"a": [1, None]}
    assert loop.asked == [control.Request("echo", {"a": [1, None]})]


def test_refusals_keep_their_class(loop: Loop) -> None:
    with pytest.raises(InvalidArgument, match="no such thing"):
        control.request(loop.path, "refuse")
    with pytest.raises(Internal, match="KeyError"):
        control.request(loop.path, "break")
    assert control.request(loop.path, "echo") == {}


def test_a_line_in_pieces(loop: Loop) -> None:
    with dial(loop) as sock:
        for byte in control.encode_request("echo", {"x": 1}):
            sock.sendall(bytes([byte]))
        assert json.loads(everything(sock)) == {"ok": True, "result": {"x": 1}}


def test_a_line_without_its_end(loop: Loop) -> None:
    with dial(loop) as sock:
        sock.sendall(control.encode_request("echo", {}).rstrip())
        sock.shutdown(socket.SHUT_WR)
        assert json.loads(everything(sock))["ok"] is True


@pytest.mark.parametrize(
    "line", [b"\n", b"no json\n", b"[]\n", b'{"command": 1}\n', b"\xff\xfe\n", b"[" * 60_000 + b"\n"]
)
def test_nonsense_is_answered(loop: Loop, line: bytes) -> None:
    with dial(loop) as sock:
        sock.sendall(line)
        assert json.loads(everything(sock))["error"]["code"] == "INVALID_ARGUMENT"


def test_a_line_without_bounds(loop: Loop) -> None:
    with dial(loop) as sock:
        try:
            while True:
                sock.sendall(b"x" * 65536)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert control.request(loop.path, "echo") == {}


def test_a_large_answer_to_a_slow_reader(loop: Loop) -> None:
    size = 3 << 20
    with dial(loop) as slow:
        slow.sendall(control.encode_request("large", {"size": size}))
        assert control.request(loop.path, "echo") == {}  # nobody waits for it
        assert len(json.loads(everything(slow))["result"]["text"]) == size


def test_a_client_that_leaves_at_any_moment(loop: Loop) -> None:
    for part in (
        b"",
        b'{"comm',
        control.encode_request("echo", {}),
        control.encode_request("large", {"size": 1 << 21}),
    ):
        with dial(loop) as sock:
            sock.sendall(part)
    assert control.request(loop.path, "echo") == {}


def test_time_is_short(loop: Loop) -> None:
    with dial(loop) as idle:
        control.request(loop.path, "echo")  # the idle one has been accepted before it
        loop.expire()
        assert everything(idle) == b""
    assert control.request(loop.path, "echo") == {}


def test_clients_are_bounded(loop: Loop) -> None:
    with ExitStack() as stack:
        many = [stack.enter_context(dial(loop)) for _ in range(MAX_CLIENTS)]
        with dial(loop) as refused:
            assert everything(refused) == b""
        many[0].sendall(control.encode_request("echo", {"n": 0}))
        assert json.loads(everything(many[0]))["result"] == {"n": 0}
    assert control.request(loop.path, "echo") == {}

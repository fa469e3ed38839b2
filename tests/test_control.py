"""The control socket's lines, and its client against a real socket that answers well, badly, or not at all."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefork import control
from prefork.errors import DeadlineExceeded, InvalidArgument, NotFound, PreforkError, Unavailable, Unknown


@contextmanager
def answering(path: Path, answer: bytes | None) -> Iterator[list[bytes]]:
    """A server for one call: reads its line, sends `answer` and closes; None: holds still until the client leaves."""
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        sock.listen()

        def serve() -> None:
            peer, _ = sock.accept()
            with peer, peer.makefile("rb") as lines:
                heard.append(lines.readline())
                if answer is None:
                    lines.read()  # EOF: the client has left
                else:
                    peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield heard
        thread.join()


def test_a_question_and_its_answer(tmp_path: Path) -> None:
    with answering(tmp_path / "s", control.encode_reply({"workers": 3})) as heard:
        assert control.request(tmp_path / "s", "scale", {"workers": 3}) == {"workers": 3}
    request = control.parse_request(heard[0])
    assert (request.command, request.args) == ("scale", {"workers": 3})
    assert request.integer("workers", 1, 8) == 3


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (control.encode_reply(NotFound("no such model")), NotFound, "no such model"),
        (b'{"ok": false, "error": {"code": "NEW_CODE", "message": "m"}}\n', Unknown, "m"),
        (b"", Unavailable, "closed after 0 bytes"),
        (b'{"ok": true', Unavailable, "closed after 11 bytes"),
        (b"[1]\n", Unavailable, "not a line of JSON"),
        (b'{"ok": 1, "result": 2}\n', Unavailable, "not a line of JSON"),
        (b"\xff\n", Unavailable, "not a line of JSON"),
    ],
)
def test_answers_that_are_errors(tmp_path: Path, answer: bytes, error: type[PreforkError], said: str) -> None:
    with answering(tmp_path / "s", answer), pytest.raises(error, match=said):
        control.request(tmp_path / "s", "status")


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with answering(tmp_path / "s", None), pytest.raises(DeadlineExceeded, match=r"no answer within 0\.05 s"):
        control.request(tmp_path / "s", "status", timeout=0.05)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="is the server running"):
        control.request(tmp_path / "none", "status")
    with pytest.raises(Unavailable):
        control.request(tmp_path / ("x" * 200), "status")


def test_an_answer_without_end_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        sock.listen()

        def flood() -> None:
            peer, _ = sock.accept()
            with peer:
                try:
                    while True:
                        peer.sendall(b" " * 65536)
                except OSError:
                    return

        thread = threading.Thread(target=flood)
        thread.start()
        with pytest.raises(Unavailable, match="over 4194304 bytes"):
            control.request(path, "status")
        thread.join()


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\n", b"{", b"[]", b"1", b'{"command": 1}', b'{"args": {}}', b'{"command": "a", "args": []}', b"\xff",
        b"[" * 50_000, b'{"command": "' + b"a" * 70_000 + b'"}',
    ],
    ids=range(11),
)  # fmt: skip
def test_bad_requests(line: bytes) -> None:
    with pytest.raises(InvalidArgument, match="control request"):
        control.parse_request(line)


@pytest.mark.parametrize("value", [None, True, "3", 3.0, 0, 9])
def test_bad_arguments(value: Any) -> None:
    request = control.Request("scale", {"workers": value})
    with pytest.raises(InvalidArgument, match="scale: workers must be an integer from 1 to 8, found "):
        request.integer("workers", 1, 8)


def test_a_reply_is_one_line() -> None:
    line = control.encode_reply({"text": "a\nb", "path": os.fsdecode(b"\xff")})
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line)["ok"] is True

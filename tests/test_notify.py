"""What a supervisor hears, on a real datagram socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork.notify import Notifier, watchdog_seconds


@pytest.fixture(params=["path", "abstract"])
def supervisor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        if request.param == "path":
            name = str(tmp_path / "notify")
            sock.bind(name)
        else:
            name = f"@prefork-test-{os.getpid()}"
            sock.bind("\0" + name[1:])
        sock.setblocking(False)
        yield name, sock


def test_the_supervisor_hears(supervisor: tuple[str, socket.socket]) -> None:
    name, sock = supervisor
    notifier = Notifier({"NOTIFY_SOCKET": name})
    assert notifier.enabled
    said = [notifier.ready("serving a\nWATCHDOG=1"), notifier.ready(), notifier.status("loading"), notifier.stopping(),
            notifier.watchdog(), notifier.extend(1.5)]  # fmt: skip
    assert said == [True] * 6
    heard = [sock.recv(4096).decode() for _ in said]
    assert heard == [
        "READY=1\nSTATUS=serving a WATCHDOG=1", "READY=1", "STATUS=loading", "STOPPING=1", "WATCHDOG=1",
        "EXTEND_TIMEOUT_USEC=1500000",
    ]  # fmt: skip


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}])
def test_nobody_listens(environ: dict[str, str]) -> None:
    notifier = Notifier(environ)
    assert not notifier.enabled
    assert not notifier.ready()


def test_a_supervisor_that_is_gone_or_deaf_is_no_error(tmp_path: Path) -> None:
    assert not Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}).ready()
    assert not Notifier({"NOTIFY_SOCKET": "/" + "x" * 200}).ready()
    assert not Notifier({"NOTIFY_SOCKET": "/a\0b"}).ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "deaf"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "deaf")})
        taken = [notifier.status("x") for _ in range(5000)]  # never read: the queue fills and the call returns
        assert taken[0] and not taken[-1]


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "10000000"}, 5.0),
        ({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "42"}, 5.0),
        ({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "43"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog(environ: dict[str, str], seconds: float | None) -> None:
    assert watchdog_seconds(environ, 42) == seconds

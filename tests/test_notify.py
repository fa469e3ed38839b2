"""What a supervisor hears, on a real datagram socket."""

from __future__ import annotations

import os
import socket
import time
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
    said = [notifier.ready("serving a\nWATCHDOG=1"), notifier.ready(), notifier.status("loading"),
            notifier.stopping(40), notifier.watchdog(), notifier.extend(1.5), notifier.main_pid(42)]  # fmt: skip
    assert said == [True] * 7
    heard = [sock.recv(4096).decode() for _ in said]
    pid = f"MAINPID={os.getpid()}"
    assert heard == [
        f"READY=1\n{pid}\nSTATUS=serving a WATCHDOG=1", f"READY=1\n{pid}", "STATUS=loading",
        "STOPPING=1\nEXTEND_TIMEOUT_USEC=40000000", "WATCHDOG=1", "EXTEND_TIMEOUT_USEC=1500000", "MAINPID=42",
    ]  # fmt: skip


def test_a_reload_has_its_moment(supervisor: tuple[str, socket.socket]) -> None:
    name, sock = supervisor
    before = time.monotonic_ns() // 1000
    assert Notifier({"NOTIFY_SOCKET": name}).reloading("reloading a")
    first, moment, status = sock.recv(4096).decode().splitlines()
    assert (first, status) == ("RELOADING=1", "STATUS=reloading a")
    assert before <= int(moment.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000


def test_the_pid_of_a_namespace_of_ours_is_not_told(supervisor: tuple[str, socket.socket]) -> None:
    name, sock = supervisor
    assert not Notifier({"NOTIFY_SOCKET": name}).main_pid(1)
    with pytest.raises(BlockingIOError):
        sock.recv(4096)


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
        ({"WATCHDOG_USEC": "10000000"}, 10.0),
        ({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "42"}, 10.0),
        ({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "43"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog(environ: dict[str, str], seconds: float | None) -> None:
    assert watchdog_seconds(environ, 42) == seconds

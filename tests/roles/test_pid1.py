"""The server as PID 1 of a container: it reaps strangers, takes no notice of them, and obeys signals. Needs root."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork.client import Client
from tests.roles.server import Server
from tests.roles.watch import WATCHDOG, children_of, end_of, until, wait_gone
from tests.roles.wire import IMAGE

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


class Contained(Server):
    """`process` is unshare, whose only child is the server: PID 1 in a pid namespace of its own."""

    @property
    def command(self) -> list[str]:
        return [*UNSHARE, *super().command]

    @property
    def inner(self) -> int:
        """The server's pid as we see it."""
        (pid,) = children_of(self.pid)
        return pid


@pytest.fixture
def server(place: Path) -> Iterator[Contained]:
    probe = [*UNSHARE, "true"]
    if not shutil.which("nsenter") or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs unshare and nsenter, and the right to use them")
    before = segments()
    server = Contained(place, "--workers", "2")
    server.start()
    yield server
    assert server.process is not None and server.process.returncode is not None, "the test ends the server"
    assert segments() <= before


def segments() -> set[str]:
    """Of masters whose pid is 1; other servers of this machine come and go."""
    return {path.name for path in Path("/dev/shm").glob("prefork-1-*")}


def serves(server: Contained) -> bool:
    with Client(server.unix) as client:
        return client.infer("digits", {"image": IMAGE})["label"].shape == (1,)


def orphan(server: Contained, fifo: Path) -> int:
    """A process in the server's namespace whose parent is gone; it ends with 3 when the fifo's writer closes."""
    before = set(children_of(server.inner))
    script = f'(read line; exit 3) < "{fifo}" & exit 0'
    subprocess.run(["nsenter", "-t", str(server.inner), "-p", "-m", "sh", "-c", script], check=True, close_fds=True)
    (pid,) = until(server, lambda: set(children_of(server.inner)) - before, "the orphan is the server's child")
    return pid


def test_strangers_are_reaped_and_change_nothing(server: Contained, place: Path) -> None:
    fifo = place / "fifo"
    os.mkfifo(fifo)
    holder = os.open(fifo, os.O_RDWR)  # so that nobody blocks in open
    pid = orphan(server, fifo)
    assert server.status()["pid"] == 1
    with end_of(pid) as end:
        os.write(holder, b"\n")
        assert select.select([end], [], [], WATCHDOG)[0]
    os.close(holder)
    until(server, lambda: pid not in children_of(server.inner), "the orphan is reaped")
    assert serves(server)
    assert server.status()["restarts"] == 0 and "worker died" not in [line["event"] for line in server.log()]
    end_it(server, signal.SIGTERM)


def end_it(server: Contained, number: signal.Signals) -> None:
    assert server.process is not None
    workers = children_of(server.inner)
    os.kill(server.inner, number)
    assert server.process.wait() == 0
    for pid in workers:
        wait_gone(pid)
    assert server.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_it_obeys(server: Contained, number: signal.Signals) -> None:
    assert serves(server)
    end_it(server, number)


def test_a_killed_worker_is_replaced(server: Contained) -> None:
    victim = children_of(server.inner)[-1]  # the template is older than its workers
    os.kill(victim, signal.SIGKILL)
    until(server, lambda: server.status()["restarts"] == 1, "the restart")
    until(server, lambda: all(row["state"] == "ready" for row in server.status()["workers"]), "ready again")
    assert serves(server)
    end_it(server, signal.SIGTERM)

"""The status line and the plea for time, heard on a real socket; the processor time is that of real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefork.child import Child
from prefork.herald import EVERY, Herald, cpu_ticks
from prefork.notify import Notifier
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import REQUESTS
from prefork.slots import Slot


class Scene:
    """A herald over two slots, one of them ready. `now` is ours."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.supervisor.bind(str(folder / "notify"))
        self.supervisor.setblocking(False)
        self.board = Scoreboard.create(2)
        self.ours, self.theirs = socket.socketpair()
        child = Child("worker", 0, 1, os.getpid(), self.ours, ready_at=1.0)
        self.slots = [Slot(0, self.ours, child=child), Slot(1, self.ours)]
        self.words = [self.board.slot(index).words for index in range(2)]
        self.herald = Herald(Notifier({"NOTIFY_SOCKET": str(folder / "notify")}), self.board)

    def turn(self, state: str = "ready", *models: str, children: tuple[Child, ...] = (), later: float = EVERY) -> str:
        """What was said in this turn."""
        self.now += later
        self.herald.turn(self.now, state, models or ("a",), self.slots, children, rows=2, loading=bool(children))
        found = []
        while True:
            try:
                found.append(self.supervisor.recv(4096).decode())
            except BlockingIOError:
                return "\n".join(found)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    for sock in (scene.supervisor, scene.ours, scene.theirs):
        sock.close()


def test_models_workers_and_rate(scene: Scene) -> None:
    assert scene.turn("ready", "a", "b") == "STATUS=serving a, b; 1 of 2 workers ready; 0.0 requests/s"
    scene.words[0][REQUESTS], scene.words[1][REQUESTS] = 30, 20
    assert scene.turn("ready", "a", "b") == f"STATUS=serving a, b; 1 of 2 workers ready; {50 / EVERY:.1f} requests/s"


def test_only_what_changed_and_not_too_often(scene: Scene) -> None:
    assert scene.turn()
    assert scene.turn() == ""
    scene.words[0][REQUESTS] = 30
    assert scene.turn(later=EVERY / 2) == ""
    assert "requests/s" in scene.turn(later=EVERY / 2)


def test_many_models_fit_on_a_line(scene: Scene) -> None:
    assert scene.turn("loading", *"abcdef") == "STATUS=loading a, b, c, d and 2 more"


def test_other_states(scene: Scene) -> None:
    assert scene.turn("starting") == "STATUS=starting; 1 of 2 workers ready"
    assert scene.turn("stopping") == "STATUS=stopping; 1 of 2 workers ready"


@contextmanager
def killed(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """What happens within; then the process is killed, also when it went wrong."""
    try:
        yield
    finally:
        process.kill()


def test_who_gets_on_is_given_time_and_who_hangs_is_not(scene: Scene) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy, killed(busy):
        child = Child("loader", 0, 1, busy.pid, scene.ours)
        before = cpu_ticks(busy.pid)
        while cpu_ticks(busy.pid) == before:
            os.sched_yield()
        assert "EXTEND_TIMEOUT_USEC=30000000" in scene.turn("loading", children=(child,))
        busy.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, busy.pid, os.WSTOPPED | os.WNOWAIT)
        scene.turn("loading", children=(child,))  # what it did before it was stopped
        assert "EXTEND" not in scene.turn("loading", children=(child,))
    assert cpu_ticks(busy.pid) == 0


def test_nobody_is_told_when_nobody_listens() -> None:
    board = Scoreboard.create(1)
    Herald(Notifier({}), board).turn(1.0, "ready", ("a",), (), (), rows=1, loading=True)

"""Another master in the place of the running one: nobody's connection is refused, nothing is lost, nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from prefork import control
from prefork.demo import model_path
from prefork.errors import FailedPrecondition
from prefork.shm.sweep import list_segments
from tests.roles.server import REPOSITORY, Server
from tests.roles.watch import WATCHDOG, LogWatch, wait_gone
from tests.roles.wire import Wire, digits

GOAWAY = 102


@pytest.fixture
def model(place: Path) -> Path:
    """The demo model under a path of its own, so that its file can change."""
    path = place / "digits.onnx"
    shutil.copyfile(model_path(), path)
    return path


@contextmanager
def serving(place: Path, *args: str) -> Iterator[Server]:
    """A server whose place others take: at the end, whoever has it is told to go and leaves nothing."""
    server = Server(place, "--workers", "2", "--pid-file", str(place / "pid"), *args)
    server.start()
    try:
        yield server
    finally:
        last = int((place / "pid").read_text())
        os.kill(last, signal.SIGTERM)
        assert server.process is not None  # the first master may still see its last client off
        assert server.process.wait(WATCHDOG) in (0, -signal.SIGKILL)
        wait_gone(last)
    assert [info.name for info in list_segments() if info.owner and info.owner.pid in (last, server.pid)] == []
    assert [path.name for path in server.runtime.glob("*")] == ["lock"] and not (place / "pid").exists()
    assert list(server.work.glob("*")) == []


def ask(server: Server, command: str) -> dict[str, object]:
    return dict(control.request(server.runtime / "control.sock", command))


def ctl(server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefork.ctl", "--runtime-dir", str(server.runtime), *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY, timeout=WATCHDOG)


class Caller(Thread):
    """Asks again and again, each time on a connection of its own, without any retry; what failed is kept."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address, self.answered, self.failed, self.enough = address, 0, list[str](), Event()

    def run(self) -> None:
        while not self.enough.is_set():
            try:
                with Wire(self.address) as wire:
                    wire.send(digits(1))
                    answer = wire.answer()
                    if answer.kind == GOAWAY:
                        answer = wire.answer()
                    assert answer.values["label"].shape == (1,)
                    self.answered += 1
            except Exception as e:
                self.failed.append(f"{type(e).__name__}: {e}")

    def __enter__(self) -> Caller:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.enough.set()
        self.join()


@pytest.mark.parametrize("kind", ["posix", "sysv"])
def test_an_upgrade_refuses_nobody_and_keeps_the_segment(place: Path, kind: str) -> None:
    with serving(place, "--shm", kind) as server:
        before, (model,) = server.pid, server.status()["models"]
        with Caller(server.address) as tcp, Caller(server.unix) as unix:
            done = ctl(server, "upgrade", "--json")
            assert done.returncode == 0, done.stderr
            assert server.process is not None and server.process.wait(WATCHDOG) == 0
            after = server.status()
            assert after["pid"] == int((place / "pid").read_text()) != before and after["generation"] == 2
            answered = tcp.answered
            until_answered(tcp, answered + 20)
        assert (tcp.failed, unix.failed) == ([], []) and tcp.answered and unix.answered
        assert [(row["segment"], row["generation"]) for row in after["models"]] == [(model["segment"], 1)]


def until_answered(caller: Caller, count: int) -> None:
    while caller.answered < count and not caller.failed:
        os.sched_yield()


def test_a_connection_that_was_open_is_told_and_served(place: Path) -> None:
    with serving(place) as server, Wire(server.address) as wire:
        wire.send(digits(1))
        assert wire.answer().id == 1
        assert ctl(server, "upgrade").returncode == 0
        wire.send(digits(2))
        kinds = [wire.answer(), wire.answer()]
        assert {answer.kind for answer in kinds} >= {GOAWAY} and 2 in [answer.id for answer in kinds]


def test_a_model_whose_file_has_changed_is_loaded_anew(place: Path, model: Path) -> None:
    with serving(place, "--model", f"digits={model}") as server:
        old = server.status()["models"][0]["segment"]["name"]
        fresh = model.with_suffix(".new")
        shutil.copyfile(model, fresh)
        fresh.rename(model)
        assert ctl(server, "upgrade").returncode == 0
        assert server.process is not None and server.process.wait(WATCHDOG) == 0
        (row,) = server.status()["models"]
        assert row["generation"] == 2 and row["segment"]["name"] != old
        assert old not in [info.name for info in list_segments()]


def test_a_program_that_does_not_come_up_changes_nothing(place: Path, model: Path) -> None:
    with serving(place, "--model", f"digits={model}") as server:
        before = server.workers()
        model.write_bytes(b"no model")
        done = ctl(server, "upgrade")
        assert done.returncode == 1 and "the old program serves on" in done.stderr and "digits" in done.stderr
        assert server.workers() == before and server.status()["upgrade"]["state"] == "failed"
        with Wire(server.address) as wire:
            wire.send(digits(1))
            assert wire.answer().values["label"].shape == (1,)
        shutil.copyfile(model_path(), model)
        assert ctl(server, "upgrade").returncode == 0


def test_the_way_back_before_it_is_ready(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        pid = int(str(ask(server, "upgrade")["pid"]))
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(FailedPrecondition, match="taking over already"):
            ask(server, "upgrade")
        ask(server, "rollback")
        os.kill(pid, signal.SIGCONT)
        assert log.wait("upgrade failed, this server goes on")["reason"] == "ended on request"
        assert server.status()["pid"] == server.pid and ask(server, "upgrade")
        assert server.process is not None and server.process.wait(WATCHDOG) == 0


def test_a_new_master_that_is_killed_leaves_the_old_one(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        pid = int(str(ask(server, "upgrade")["pid"]))
        os.kill(pid, signal.SIGKILL)
        assert "SIGKILL" in log.wait("upgrade failed, this server goes on")["reason"]
        assert server.status()["state"] == "ready"


def test_an_old_master_that_is_killed_meanwhile_is_followed_all_the_same(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        address = server.address
        pid = int(str(ask(server, "upgrade")["pid"]))
        log.wait("sockets of the server before us")
        os.kill(server.pid, signal.SIGKILL)
        assert server.process is not None and server.process.wait(WATCHDOG) == -signal.SIGKILL
        with Wire(address) as wire:  # its connection waits in the queue of the socket, which lives on
            wire.send(digits(1))
            assert wire.answer().values["label"].shape == (1,)
        assert int((place / "pid").read_text()) == pid
        assert server.status()["pid"] == pid
        while len(list(server.work.glob("*"))) > 1:  # what the dead one had in there is removed at the next look
            os.sched_yield()

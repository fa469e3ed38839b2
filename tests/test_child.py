"""The fork and the line between master and child: what a child keeps, says and ends with. Real forks of small roles."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prefork import child as children
from prefork.channel import Channel
from prefork.child import CRASH, Child, describe_exit
from prefork.errors import SegmentFull

Main = Callable[[socket.socket, Any], int]


@dataclass
class Job:
    main: Main


def role(channel: socket.socket, job: Job) -> int:
    return job.main(channel, job)


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    """Forks a child whose role is the function given."""
    module = ModuleType("prefork.testrole")
    vars(module)["main"] = role
    sys.modules["prefork.testrole"] = module
    made: list[Child] = []

    def make(main: Main, keep: tuple[int, ...] = ()) -> Child:
        found = children.spawn("testrole", 3, 1, Job(main), {2, *keep})
        made.append(found)
        return found

    yield make
    del sys.modules["prefork.testrole"]
    for child in made:
        child.kill(signal.SIGKILL)
        with_status(child)
        child.channel.close()


def with_status(child: Child) -> int | None:
    """The child's wait status; None when it was reaped before."""
    try:
        return os.waitpid(child.pid, 0)[1]
    except ChildProcessError:
        return None


def code_of(child: Child) -> int:
    status = with_status(child)
    assert status is not None
    return os.waitstatus_to_exitcode(status)


def hear(child: Child) -> dict[str, Any]:
    """The next message."""
    assert select.select([child.channel], [], [], 20)[0]
    return child.receive()[0]


def test_a_child_speaks_and_ends(spawn: Callable[..., Child]) -> None:
    def main(channel: socket.socket, job: Job) -> int:
        Channel(channel).send({"event": "ready", "pid": os.getpid()})
        return 7

    child = spawn(main)
    assert hear(child) == {"event": "ready", "pid": child.pid}
    assert code_of(child) == 7
    assert child.receive() == [] and child.closed
    assert not child.send({"command": "too late"})


def test_messages_and_descriptors_reach_the_child(spawn: Callable[..., Child]) -> None:
    def main(channel: socket.socket, job: Job) -> int:
        line = Channel(channel)
        line.send({"event": "ready"})
        select.select([channel], [], [])
        ((message, fds),) = line.receive()
        os.write(fds[0], message["text"].encode())
        return 0

    read, write = os.pipe()
    child = spawn(main)
    hear(child)
    assert child.send({"text": "through another's pipe"}, [write])
    os.close(write)
    assert select.select([read], [], [], 20)[0], "the child hangs"
    assert os.read(read, 100) == b"through another's pipe"
    assert code_of(child) == 0
    os.close(read)


def test_only_what_is_kept_stays_open(spawn: Callable[..., Child]) -> None:
    def main(channel: socket.socket, job: Job) -> int:
        names = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
        open_ones = [fd for fd in names if Path(f"/proc/self/fd/{fd}").exists()]
        Channel(channel).send({"fds": open_ones, "ours": channel.fileno()})
        return 0

    read, write = os.pipe()
    child = spawn(main, (write,))
    said = hear(child)
    assert set(said["fds"]) - {0, 1, 2} == {write, said["ours"]}
    assert code_of(child) == 0
    os.close(read)
    os.close(write)


def test_an_error_of_ours_is_told_and_is_the_exit_code(spawn: Callable[..., Child]) -> None:
    def main(channel: socket.socket, job: Job) -> int:
        raise SegmentFull("no room for 5 bytes")

    child = spawn(main)
    said = hear(child)
    assert said == {"event": "failed", "error": "SegmentFull", "message": "no room for 5 bytes", "known": True}
    assert code_of(child) == SegmentFull.exit_code


def test_any_other_error_is_a_crash_with_its_trace(
    spawn: Callable[..., Child], capfd: pytest.CaptureFixture[str]
) -> None:
    def main(channel: socket.socket, job: Job) -> int:
        raise ZeroDivisionError("of nobody's making " + "x" * 100_000)

    child = spawn(main)
    said = hear(child)
    assert said["error"] == "ZeroDivisionError" and not said["known"] and len(said["message"]) <= 8000
    assert code_of(child) == CRASH
    assert "Traceback" in capfd.readouterr().err


def test_exit_by_the_interpreter_is_a_crash_too(spawn: Callable[..., Child], capfd: pytest.CaptureFixture[str]) -> None:
    def main(channel: socket.socket, job: Job) -> int:
        sys.exit(0)

    child = spawn(main)
    assert hear(child)["error"] == "SystemExit"
    assert code_of(child) == CRASH
    capfd.readouterr()


def test_the_environment_stands_before_any_numeric_library(spawn: Callable[..., Child]) -> None:
    def main(channel: socket.socket, job: Job) -> int:
        Channel(channel).send({name: os.environ[name] for name in children.NUMERIC_ENVIRONMENT})
        return 0

    assert hear(spawn(main)) == children.NUMERIC_ENVIRONMENT


def test_signals_of_the_terminal_are_the_masters(spawn: Callable[..., Child]) -> None:
    def main(channel: socket.socket, job: Job) -> int:
        ignored = [n.name for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN]
        plain = [n.name for n in signal.Signals if signal.getsignal(n) is signal.SIG_DFL]
        blocked = [signal.Signals(n).name for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        Channel(channel).send({"ignored": ignored, "plain": plain, "blocked": blocked})
        return 0

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    said = hear(spawn(main))
    assert {"SIGINT", "SIGQUIT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGTTIN", "SIGTTOU"} <= set(said["ignored"])
    assert {"SIGTERM", "SIGCHLD"} <= set(said["plain"])
    assert said["blocked"] == [signal.Signals(n).name for n in before]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_child_dies_with_its_master(tmp_path: Path) -> None:
    """A master of a test's own forks a child that would live for ever, and is killed."""
    read, write = os.pipe()
    master = os.fork()
    if master == 0:
        module = ModuleType("prefork.testrole")
        vars(module)["main"] = role
        sys.modules["prefork.testrole"] = module
        child = children.spawn("testrole", 0, 1, Job(lambda channel, job: signal.pause() or 0), {2, write})
        os.write(write, b"%d" % child.pid)
        signal.pause()
    pid = int(os.read(read, 20))
    end = os.pidfd_open(pid)
    os.kill(master, signal.SIGKILL)
    os.waitpid(master, 0)
    assert select.select([end], [], [], 20)[0]
    for fd in (read, write, end):
        os.close(fd)


def test_sending_to_a_full_line_does_not_block(spawn: Callable[..., Child]) -> None:
    def main(channel: socket.socket, job: Job) -> int:
        Channel(channel).send({"event": "ready"})
        signal.pause()
        return 0

    child = spawn(main)
    hear(child)
    sent = 0
    while child.send({"text": "x" * 10_000}):
        sent += 1
        assert sent < 100_000
    assert sent > 0 and not child.closed


def test_killing_a_dead_child_is_no_error(spawn: Callable[..., Child]) -> None:
    child = spawn(lambda channel, job: 0)
    assert code_of(child) == 0
    child.kill(signal.SIGKILL)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exit code 0"),
        (65 << 8, "exit code 65"),
        (15, "killed by SIGTERM"),
        (9, "killed by SIGKILL"),
        (64, "signal 64"),
    ],
)
def test_ends_in_words(status: int, words: str) -> None:
    assert words in describe_exit(status) or words.replace("signal 64", "SIGRTMAX") in describe_exit(status)

"""Kills for want of memory, told from others: real children and real SIGKILLs, counters in trees as kernels show them.
Real kills by the kernel are in roles/test_confined.py."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork.child import OUT_OF_MEMORY, Child
from prefork.oom import MEMORY, OomWatch

V2 = (
    "0::/pod/c\n",
    "sys/fs/cgroup/pod/c/memory.events",
    "low 0\nhigh 9\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n",
)
V1 = (
    "4:cpu:/\n6:memory:/a\n",
    "sys/fs/cgroup/memory/a/memory.oom_control",
    "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
)
NONE = ("6:memory:/a\n", "proc/vmstat", "nr_free_pages 1\noom_kill {}\nballoon_inflate 0\n")


class Tree:
    """A root whose counter can be set."""

    def __init__(self, root: Path, groups: str, file: str, text: str) -> None:
        self.root, self.file, self._text = root, root / file, text
        for path in (self.file, root / "proc/self/cgroup"):
            path.parent.mkdir(parents=True, exist_ok=True)
        (root / "proc/self/cgroup").write_text(groups)
        self.count(7)

    def count(self, number: int) -> None:
        self.file.write_text(self._text.format(number))


@pytest.fixture(params=[V2, V1, NONE], ids=["v2", "v1", "vmstat"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    return Tree(tmp_path, *request.param)


@pytest.fixture
def channel() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours


def ended(channel: socket.socket, number: int, *, by_us: bool = False) -> tuple[Child, int]:
    """A real child, its end by that signal, and its wait status."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    child = Child("worker", 0, 1, pid, channel)
    if by_us:
        child.kill(number)
    else:
        os.kill(pid, number)
    return child, os.waitpid(pid, 0)[1]


def test_a_kill_that_was_counted(tree: Tree, channel: socket.socket) -> None:
    watch = OomWatch(tree.root)
    child, status = ended(channel, signal.SIGKILL)
    tree.count(8)
    watch.judge(child, status, 1.0, 300 << 20)
    where = "the machine" if tree.file.name == "vmstat" else f"control group {tree.file.parent}"
    assert child.oom == f"killed by the kernel for want of memory ({where}, it had 300.0 MiB)" == child.how(status)
    assert child.code(status) == OUT_OF_MEMORY
    other, status = ended(channel, signal.SIGKILL)  # one count is one child
    watch.judge(other, status, 1.0)
    assert other.oom == "" and other.how(status) == "killed by SIGKILL" and other.code(status) == 70


def test_several_at_once(tree: Tree, channel: socket.socket) -> None:
    watch = OomWatch(tree.root)
    found = [ended(channel, signal.SIGKILL) for _ in range(3)]
    tree.count(9)
    for child, status in found:
        watch.judge(child, status, 1.0)
    assert [bool(child.oom) for child, _ in found] == [True, True, False]


def test_other_ends_are_not_taken_for_it(tree: Tree, channel: socket.socket) -> None:
    watch = OomWatch(tree.root)
    tree.count(8)
    for number, by_us in ((signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGKILL, True)):
        child, status = ended(channel, number, by_us=by_us)
        watch.judge(child, status, 1.0)
        assert child.oom == ""
    child, status = ended(channel, signal.SIGKILL)  # whose kill it was
    watch.judge(child, status, 1.0)
    assert child.oom


def test_a_stranger_s_kill_is_forgotten(tree: Tree, channel: socket.socket) -> None:
    watch = OomWatch(tree.root)
    tree.count(8)
    watch.look(1.0)
    watch.look(1.0 + MEMORY)
    child, status = ended(channel, signal.SIGKILL)
    watch.judge(child, status, 1.0 + MEMORY)
    assert child.oom == ""


def test_what_was_counted_before_does_not_count(tree: Tree, channel: socket.socket) -> None:
    child, status = ended(channel, signal.SIGKILL)
    OomWatch(tree.root).judge(child, status, 1.0)
    assert child.oom == ""


def test_no_counter_at_all(tmp_path: Path, channel: socket.socket) -> None:
    child, status = ended(channel, signal.SIGKILL)
    OomWatch(tmp_path).judge(child, status, 1.0)
    assert child.how(status) == "killed by SIGKILL"

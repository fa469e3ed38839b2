"""Work in a thread of the lowest priority: its result, its error, and nothing left of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from prefork.background import LOWEST, quietly


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_it_runs_at_the_lowest_priority_and_only_it() -> None:
    before = priority()
    assert quietly(priority) == LOWEST
    assert priority() == before


def test_nothing_is_left_of_the_thread() -> None:
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    for _ in range(200):
        quietly(lambda: None)
        assert {task.name for task in Path("/proc/self/task").iterdir()} == before


def test_an_error_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        quietly(lambda: 1 // 0)


def test_what_it_starts_is_quiet_too() -> None:
    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(priority())
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert quietly(fork) == LOWEST

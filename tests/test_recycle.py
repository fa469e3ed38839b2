"""When a worker has lived long enough: a real scoreboard, this process's own memory."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork.child import Child
from prefork.layers import load
from prefork.recycle import LOOK, Recycling, private_bytes
from prefork.shm import words as w
from prefork.shm.scoreboard import Scoreboard


@pytest.fixture
def board() -> Iterator[Scoreboard]:
    board = Scoreboard.create(2)
    yield board
    os.close(board.fd)


@pytest.fixture
def child() -> Iterator[Child]:
    with socket.socket() as sock:
        yield Child("worker", 0, 1, os.getpid(), sock, row=1, ready_at=100.0)


def recycling(board: Scoreboard, **flags: str) -> Recycling:
    return Recycling(load(flags, {}, cwd=Path.cwd()).server, board)


def test_nobody_is_recycled_by_default(board: Scoreboard, child: Child) -> None:
    board.slot(1).words[w.REQUESTS] = 2**50
    assert recycling(board).reason(child, 1e9) == ""


def test_age_counts_from_ready(board: Scoreboard, child: Child) -> None:
    found = recycling(board, recycle_age="60")
    assert found.reason(child, 159.9) == "" and found.reason(child, 160.0) == "age 60 s, recycle_age is 60 s"
    child.ready_at = None
    assert found.reason(child, 1e9) == ""


def test_requests_of_those_before_on_the_row_do_not_count(board: Scoreboard, child: Child) -> None:
    found = recycling(board, recycle_requests="10")
    board.slot(1).words[w.REQUESTS] = 1009
    child.requests_before = 1000
    assert found.reason(child, 200.0) == ""
    board.slot(1).words[w.REQUESTS] += 1
    assert found.reason(child, 200.0) == "10 requests, recycle_requests is 10"


def test_memory_is_looked_at_rarely(board: Scoreboard, child: Child) -> None:
    found = recycling(board, recycle_private="1")
    assert "bytes of its own, recycle_private is 1" in found.reason(child, 1000.0)
    assert found.reason(child, 1000.0 + LOOK / 2) == ""
    assert found.reason(child, 1000.0 + LOOK) != ""
    assert recycling(board, recycle_private="1024GiB").reason(child, 1000.0) == ""


def test_memory_of_its_own() -> None:
    assert private_bytes(os.getpid()) > 1 << 20
    with subprocess.Popen(["true"]) as gone:
        pass
    assert private_bytes(gone.pid) == 0

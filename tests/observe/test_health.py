"""Alive and ready, as a table."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from prefork.observe import health
from prefork.shm import words as w
from prefork.shm.scoreboard import Reading, Scoreboard
from prefork.shm.words import MasterState, WorkerState

S = 10**9
NOW = 1000 * S


@pytest.fixture
def board() -> Iterator[Scoreboard]:
    board = Scoreboard.create(2)
    board.master().begin()
    words(board)[w.MASTER_AT + w.M_TICK_NS] = NOW - S
    yield board
    os.close(board.fd)


def words(board: Scoreboard) -> memoryview:
    return memoryview(board._map).cast("Q")


def workers(board: Scoreboard, *lives: tuple[WorkerState, int]) -> list[Reading]:
    """Slots in these states, with the seconds since their last tick."""
    for index, (state, silent) in enumerate(lives):
        slot = board.slot(index)
        slot.begin(1, 1)
        slot.words[w.STATE], slot.words[w.TICK_NS] = state, NOW - silent * S
    return [board.read(index) for index in range(2)]


def test_alive_follows_the_masters_loop(board: Scoreboard) -> None:
    assert health.alive(board.read_master(), NOW).ok
    late = health.alive(board.read_master(), NOW + 20 * S)
    assert (late.ok, late.reason) == (False, "the master has been silent for 21 s")
    words(board)[w.MASTER_AT + w.M_TICK_NS] = 0
    assert not health.alive(board.read_master(), NOW).ok


@pytest.mark.parametrize("state", MasterState)
def test_ready_only_in_the_masters_ready_state(board: Scoreboard, state: MasterState) -> None:
    board.master().write(state, 1, 2, 2)
    verdict = health.ready(board.read_master(), workers(board, (WorkerState.READY, 0)), 30.0, NOW)
    assert verdict.ok is (state is MasterState.READY)
    if not verdict.ok:
        assert verdict.reason == f"the server is {state.name.lower()}"


@pytest.mark.parametrize(
    ("lives", "timeout", "able"),
    [
        ([(WorkerState.READY, 0), (WorkerState.BUSY, 1)], 30.0, 2),
        ([(WorkerState.GONE, 0), (WorkerState.READY, 1)], 30.0, 1),
        ([(WorkerState.STARTING, 0), (WorkerState.DRAINING, 1)], 30.0, 0),
        ([(WorkerState.READY, 31), (WorkerState.BUSY, 40)], 30.0, 0),
        ([(WorkerState.READY, 31)], 0.0, 1),
    ],
)
def test_one_able_worker_is_enough(
    board: Scoreboard, lives: list[tuple[WorkerState, int]], timeout: float, able: int
) -> None:
    board.master().write(MasterState.READY, 1, 2, 2)
    verdict = health.ready(board.read_master(), workers(board, *lives), timeout, NOW)
    expected = f"ready, {able} of 2 workers" if able else "none of 2 workers is ready"
    assert (verdict.ok, verdict.reason) == (able > 0, expected)

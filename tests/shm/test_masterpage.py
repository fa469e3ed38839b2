"""The master's page: what is written is read, columns stay with their names, and a row at work is never told."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from prefork.errors import SegmentCorrupt
from prefork.shm import words as w
from prefork.shm.masterpage import restart_reason
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import MasterState, Restart


@pytest.fixture
def board() -> Iterator[Scoreboard]:
    board = Scoreboard.create(2)
    yield board
    os.close(board.fd)


def test_before_a_master_there_is_nothing(board: Scoreboard) -> None:
    reading = board.read_master()
    assert (reading.state, reading.pid, reading.models) == (MasterState.GONE, 0, ())


def test_what_the_master_writes_is_read(board: Scoreboard) -> None:
    page = board.master()
    page.begin()
    page.write(MasterState.READY, 7, 3, 5)
    page.write(MasterState.READY, 7, 2, 4)  # slots are never fewer
    for reason in (Restart.OOM, Restart.OOM, Restart.BOOT):
        page.restarted(reason)
    reading = board.read_master()
    assert (reading.state, reading.pid, reading.generation) == (MasterState.READY, os.getpid(), 7)
    assert (reading.wanted, reading.slots) == (2, 5)
    assert {reason: count for reason, count in reading.restarts.items() if count} == {Restart.OOM: 2, Restart.BOOT: 1}
    assert reading.started_ns > 10**18 and reading.tick_ns > 0


def test_a_column_stays_with_its_name(board: Scoreboard) -> None:
    page = board.master()
    assert page.serve("a", 1, 100, {"form": "int8"}) == 1
    assert page.serve("b", 1, 200, {}) == 2
    page.keep(["b"])
    assert page.serve("c", 2, 300, {}) == 3
    assert page.serve("a", 3, 400, {"form": "fp32"}) == 1
    rows = board.read_master().models
    assert [(row.column, row.name, row.generation, row.segment_bytes) for row in rows] == [
        (1, "a", 3, 400), (2, "b", 1, 200), (3, "c", 2, 300),
    ]  # fmt: skip
    assert rows[0].labels == {"form": "fp32"}
    page.keep([])
    assert all(row.generation == row.segment_bytes == 0 for row in board.read_master().models)


def test_a_board_with_no_column_left(board: Scoreboard) -> None:
    page = board.master()
    columns = [page.serve(f"m{i}", 1, 1, {}) for i in range(w.COLUMNS + 3)]
    assert columns == [*range(1, w.COLUMNS), *[w.OTHER] * 4]
    rows = board.answer_rows()[1]
    assert rows["m31"] == rows["m33"] == rows["nobody"] == w.ANSWERS
    assert len(set(rows.values())) == w.COLUMNS - 1
    page.serve("m30", 2, 5, {})
    assert board.read_master().models[30].segment_bytes == 5


def test_labels_that_are_too_long_are_left_out(board: Scoreboard) -> None:
    name = "n" * 64
    board.master().serve(name, 1, 1, {"one": "x" * 500, "two": "\u00e9" * 100, "three": "z"})
    (row,) = board.read_master().models
    assert (row.name, row.labels) == (name, {"one": "x" * 120})


def test_a_row_that_is_being_written_is_not_told(board: Scoreboard) -> None:
    page = board.master()
    page.serve("a", 1, 1, {"form": "int8"})
    whole = Scoreboard.open(os.dup(board.fd), 2, writable=True)
    at = w.ROWS_AT + w.ROW_WORDS + w.R_TEXT
    words = memoryview(whole._map).cast("Q")
    before, words[at] = words[at], 0
    assert board.read_master().models == ()
    words[at] = before
    assert board.read_master().models[0].name == "a"
    words[at - w.R_TEXT + w.R_LENGTH] = 1 << 60
    assert board.read_master().models == ()


def test_readers_check_the_state(board: Scoreboard) -> None:
    words = memoryview(Scoreboard.open(os.dup(board.fd), 2, writable=True)._map).cast("Q")
    words[w.MASTER_AT + w.M_STATE] = 99
    with pytest.raises(SegmentCorrupt, match="master's state: expected 0 to 4, found 99"):
        board.read_master()


@pytest.mark.parametrize(
    ("status", "how", "reason"),
    [
        (0, {}, Restart.EXIT),
        (65 << 8, {}, Restart.EXIT),
        (65 << 8, {"ready": False}, Restart.BOOT),
        (signal.SIGSEGV, {}, Restart.SIGNAL),
        (signal.SIGKILL, {"oom": True}, Restart.OOM),
        (signal.SIGKILL, {"stalled": True}, Restart.STALLED),
        (signal.SIGKILL, {"oom": True, "ready": False}, Restart.OOM),
        (0, {"asked": True}, Restart.RECYCLED),
    ],
)
def test_why_a_worker_was_replaced(status: int, how: dict[str, bool], reason: Restart) -> None:
    found = restart_reason(
        status, ready=how.get("ready", True), asked=how.get("asked", False), stalled=how.get("stalled", False),
        oom=how.get("oom", False),
    )  # fmt: skip
    assert found is reason

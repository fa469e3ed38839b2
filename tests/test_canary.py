"""What is said of a new generation by its figures, and where the figures come from. Real scoreboard, no process."""

from __future__ import annotations

import os
import socket
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import pytest

from prefork.canary import ENOUGH, Figures, Watch, above, judge, p99, total
from prefork.child import Child
from prefork.shm import words as w
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import BOUNDS, Stage
from prefork.slots import Slot


def figures(answered: int, failed: int = 0, seconds: float = 1e-3, slow: int = 0) -> Figures:
    """`slow` of the runs take ten times as long."""
    times = [0] * (len(BOUNDS) + 1)
    for each, count in ((seconds, answered - slow), (10 * seconds, slow)):
        times[bisect_left(BOUNDS, each)] += count
    return Figures(answered, failed, tuple(times))


def verdict(new: Figures, old: Figures | None, *, over: bool = False) -> str:
    return judge(new, old, BOUNDS, over=over)[0]


def test_nothing_is_said_of_a_few_answers_until_the_time_is_over() -> None:
    new, old = figures(ENOUGH - 1, ENOUGH - 1), figures(10_000)
    assert verdict(new, old) == "wait" and verdict(new, old, over=True) == "pass"
    assert verdict(figures(ENOUGH, ENOUGH), old) == "fail"


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        ((1000, 0), (1000, 0), "pass"),
        ((1000, 11), (1000, 0), "fail"),  # 1.1 %, 3.3 standard errors
        ((100, 4), (100, 0), "pass"),  # as likely as not by chance
        ((100_000, 900), (100_000, 0), "pass"),  # 0.9 % is excused
        ((1000, 300), (1000, 290), "pass"),  # what ails both
        ((1000, 0), (1000, 300), "pass"),
        ((200, 100), (0, 0), "fail"),  # nobody asks the old generation any more
    ],
)
def test_the_share_of_failures(new: tuple[int, int], old: tuple[int, int], expected: str) -> None:
    assert verdict(figures(*new), figures(*old), over=True) == expected
    assert verdict(figures(*new), figures(*old)) == ("fail" if expected == "fail" else "wait")


def test_without_an_old_worker_only_failures_count() -> None:
    assert verdict(figures(200, 0, 5.0), None, over=True) == "pass"
    assert verdict(figures(200, 3), None, over=True) == "fail"


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (figures(1000, seconds=1.4e-3), "pass"),
        (figures(1000, seconds=2.5e-3), "fail"),
        (figures(100, slow=2), "pass"),  # its p99 is ten times as high, by two runs
        (figures(100, slow=5), "fail"),
        (figures(10_000, slow=150), "fail"),
        (figures(10_000, slow=110), "pass"),
        (figures(1000, seconds=1e-4), "pass"),
    ],
)
def test_the_time_of_a_run(new: Figures, expected: str) -> None:
    assert verdict(new, figures(1000), over=True) == expected


def test_neighbouring_buckets_are_not_told_apart() -> None:
    """Runs just below and just above a bound differ by nothing, whatever the histogram makes of it."""
    for low, high in pairwise(BOUNDS):
        assert verdict(figures(1000, seconds=high), figures(1000, seconds=low), over=True) == "pass", (low, high)


def test_p99_and_what_is_above_a_limit() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert p99((100, 0, 0, 0), bounds) == pytest.approx(0.99) and p99((0, 0, 100, 0), bounds) == pytest.approx(3.98)
    assert p99((0, 0, 0, 5), bounds) == 4.0 and p99((98, 0, 2, 0), bounds) == pytest.approx(3.0)
    assert [above((10, 20, 40, 5), bounds, limit) for limit in (0.0, 1.5, 3.0, 4.0)] == [75, 55, 25, 0]


def test_sums() -> None:
    assert total([]) is None
    assert total([Figures(1, 1, (1, 0)), Figures(2, 0, (1, 1))]) == Figures(3, 1, (2, 1))
    assert Figures(5, 2, (3, 4)).since(Figures(1, 1, (3, 0))) == Figures(4, 1, (0, 4))


@pytest.fixture
def board() -> Iterator[Scoreboard]:
    board = Scoreboard.create(4)
    yield board
    os.close(board.fd)


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    with socket.socket() as sock:
        yield [Slot(index, sock, child=ready(sock, index)) for index in range(2)]


def ready(sock: socket.socket, row: int) -> Child:
    return Child("worker", row, row, 1 << 21, sock, row=row, ready_at=0.0)


def work(board: Scoreboard, row: int, count: int, code: int = 0) -> None:
    writer = board.slot(row)
    answers = board.answer_rows()[1]["m"]
    for _ in range(count):
        writer.answer(answers, code)
        writer.observe(Stage.COMPUTE, 1e-3)


def is_new(slot: Slot) -> bool:
    return slot.index == 1


def test_only_what_is_done_from_now_on_counts(board: Scoreboard, slots: list[Slot]) -> None:
    work(board, 1, 500, code=13)
    watch = Watch(board, slots)
    for row in (0, 1):
        work(board, row, 200)
    assert watch.judge(is_new, over=True) == ("pass", "200 answers, 0.00% failed")
    work(board, 1, 50, code=13)
    assert watch.judge(is_new, over=False)[0] == "fail"


def test_a_worker_that_comes_later_counts_from_then_on(board: Scoreboard, slots: list[Slot]) -> None:
    watch = Watch(board, slots)
    work(board, 1, 300, code=13)
    slots[1].child = ready(slots[1].listener, 1)  # on the row of the one before
    assert watch.judge(is_new, over=False) == ("wait", "")
    work(board, 1, 150)
    assert watch.judge(is_new, over=True) == ("pass", "150 answers, 0.00% failed")
    slots[1].child = None
    assert watch.judge(is_new, over=True) == ("wait", ""), "nobody is there to be judged"


def test_nonsense_on_the_board_is_no_figure(board: Scoreboard, slots: list[Slot]) -> None:
    watch = Watch(board, slots)
    board.slot(1).words[w.STATE] = 99
    assert watch.judge(is_new, over=True) == ("wait", "")
    assert Watch(board, slots).judge(is_new, over=True) == ("wait", "")

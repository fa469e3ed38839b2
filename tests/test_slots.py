"""Slots are plain policy: when the next worker starts, and who minds an empty place meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from prefork import slots
from prefork.child import Child
from prefork.slots import FIRST_DELAY, GUARDED_DELAY, LAST_DELAY, YOUNG, Rows, Slot


@pytest.fixture
def row() -> Iterator[list[Slot]]:
    """Four slots with real sockets; the children are none that run."""
    found = [Slot(index, socket.socket()) for index in range(4)]
    yield found
    for slot in found:
        slot.listener.close()
        if slot.child is not None:
            slot.child.channel.close()


def seat(slot: Slot, *, ready: float | None = 0.0, leaving: bool = False) -> None:
    slot.child = Child("worker", slot.index, 1, 1 << 30, socket.socket(), ready_at=ready, leaving=leaving)


def leave(slot: Slot, now: float, *, asked: bool = False) -> None:
    assert slot.child is not None
    slot.child.channel.close()
    slot.left(now, "gone", asked=asked)


def test_delays_double_between_their_ends() -> None:
    found = [slots.delay(failures) for failures in range(12)]
    assert found[:4] == [0, 0, FIRST_DELAY, 2 * FIRST_DELAY] and found[-1] == LAST_DELAY
    assert found == sorted(found) and slots.delay(10**6) == LAST_DELAY


def test_a_new_slot_is_due_at_once(row: list[Slot]) -> None:
    assert slots.due(row, 0.0) == row and slots.next_due(row) == 0.0
    seat(row[0])
    row[1].wanted = False
    assert slots.due(row, 0.0) == row[2:]


def test_nothing_is_due_when_everybody_sits(row: list[Slot]) -> None:
    for slot in row:
        seat(slot)
    assert slots.due(row, 1e9) == [] and slots.next_due(row) is None


def test_an_old_worker_is_replaced_at_once(row: list[Slot]) -> None:
    seat(row[0], ready=0.0)
    leave(row[0], YOUNG + 1)
    assert (row[0].failures, row[0].retry_at, row[0].restarts, row[0].reason) == (0, YOUNG + 1, 1, "gone")


def test_workers_that_die_young_wait_longer_and_longer(row: list[Slot]) -> None:
    slot, now, waits = row[0], 100.0, []
    for ready in (None, 100.0, None, None, None):
        seat(slot, ready=ready)
        leave(slot, now)
        waits.append(slot.retry_at - now)
    assert waits == [0, FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY, 8 * FIRST_DELAY]
    assert slots.due(row[:1], now) == [] and slots.due(row[:1], slot.retry_at) == [slot]


def test_a_worker_that_was_asked_to_leave_is_no_failure(row: list[Slot]) -> None:
    seat(row[0], ready=100.0)
    leave(row[0], 100.5, asked=True)
    assert (row[0].failures, row[0].retry_at) == (0, 100.5)


def test_who_is_not_wanted_is_not_replaced(row: list[Slot]) -> None:
    seat(row[0], leaving=True)
    row[0].wanted = False
    leave(row[0], 7.0)
    assert row[0].child is None and row[0].restarts == 0
    assert row[0] not in slots.due(row, 1e9)


def test_failures_are_forgotten_by_a_worker_that_lives(row: list[Slot]) -> None:
    slot = row[0]
    slot.failures = 3
    seat(slot, ready=10.0)
    slot.settled(10.0 + YOUNG / 2)
    assert slot.failures == 3
    slot.settled(10.0 + YOUNG)
    assert slot.failures == 0


def test_ready_is_not_leaving(row: list[Slot]) -> None:
    seat(row[0], ready=None)
    seat(row[1], leaving=True)
    seat(row[2])
    assert [slot.ready for slot in row] == [False, False, True, False]


def test_unguarded_are_those_whose_queue_would_wait(row: list[Slot]) -> None:
    short, long, retired, busy = row
    short.retry_at, long.retry_at = GUARDED_DELAY / 2, 2 * GUARDED_DELAY
    retired.wanted = False
    seat(busy)
    assert slots.unguarded(row, 0.0) == [long, retired]
    seat(retired, leaving=True)  # on its way out: it has stopped listening
    assert slots.unguarded(row, 0.0) == [long, retired]
    long.guardian = retired.guardian = 3
    assert slots.unguarded(row, 0.0) == []


def test_a_starting_worker_needs_no_guardian(row: list[Slot]) -> None:
    seat(row[0], ready=None)
    assert slots.unguarded(row[:1], 0.0) == []


def test_the_guardian_is_ready_and_minds_the_fewest(row: list[Slot]) -> None:
    assert slots.choose_guardian(row) is None
    seat(row[1], ready=None)
    assert slots.choose_guardian(row) is None
    seat(row[2])
    seat(row[3])
    assert slots.choose_guardian(row) is row[2]
    row[0].guardian = 2
    assert slots.choose_guardian(row) is row[3]


def test_a_guardian_that_leaves_for_good_frees_whom_it_minded(row: list[Slot]) -> None:
    """A retired or long-waiting guardian serves nobody: its wards need another one."""
    ward, guardian, other, _ = row
    ward.wanted = False
    ward.guardian = guardian.index
    seat(other)
    guardian.wanted = False
    seat(guardian, leaving=True)
    assert ward in slots.unguarded(row, 0.0)


def test_a_slot_with_a_successor_is_not_empty(row: list[Slot]) -> None:
    seat(row[0])
    row[0].successor = Child("worker", 0, 2, 1 << 30, row[0].listener, started=50.0)
    leave(row[0], 50.0)
    assert slots.due(row[:1], 1e9) == [] and slots.next_due(row[:1]) is None
    assert slots.unguarded(row[:1], 50.0) == [] and slots.unguarded(row[:1], 50.0 + GUARDED_DELAY) == row[:1]
    row[0].successor = None
    assert slots.due(row[:1], 1e9) == row[:1]


def test_rows_are_given_once_and_taken_again() -> None:
    rows = Rows(3)
    assert [rows.take(-1), rows.take(0), rows.take(2)] == [0, 1, 2] and rows.high == 3
    assert rows.take(1) is None
    rows.give(1)
    rows.give(1)
    assert rows.take(2) == 1 and rows.take(-1) is None
    rows.give(0)
    rows.give(2)
    assert rows.take(2) == 2, "a slot keeps its row, and with it its counters, where it can"
    assert rows.high == 3

"""Worker slots as the master keeps them: who sits where, who minds an empty one, and when to try again.

Pure policy over plain values: no fork, no socket call, no clock of its own (callers pass `now`, monotonic seconds).

| slot | child | guardian | meaning |
|---|---|---|---|
| wanted | none | any | to be spawned at `retry_at` |
| wanted | starting or ready | none | normal life; a worker that starts for long has its queue minded |
| wanted | leaving | another slot | drains, and is replaced when it has left |
| not wanted | leaving | another slot | retiring; new connections go to the guardian |
| not wanted | none | another slot | retired; its socket stays open, so nobody in its queue is lost |

A slot may have a `successor` besides: a worker that comes up on the same listening socket and takes the child's place
once it is ready; the child leaves then, and the queue is never without a server.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from prefork.child import Child

YOUNG = 5.0  # seconds after READY within which a death counts as a failure of the slot
FIRST_DELAY, LAST_DELAY = 0.25, 30.0  # the first failure is retried at once, then the wait doubles from here to there
GUARDED_DELAY = 1.0  # a slot that waits at least this long has its connections taken by another worker


@dataclass(eq=False, slots=True)
class Slot:
    """One place for a worker, with the listening socket that stays with it for ever. `generation`: what its next
    worker serves; `row`: of the scoreboard, its last worker's."""

    index: int
    listener: socket.socket
    wanted: bool = True
    generation: int = 0
    row: int = -1
    child: Child | None = None
    successor: Child | None = None
    guardian: int | None = None
    failures: int = 0
    retry_at: float = 0.0
    restarts: int = 0
    reason: str = ""

    @property
    def ready(self) -> bool:
        return self.child is not None and self.child.ready_at is not None and not self.child.leaving

    def unserved_for(self, now: float) -> float:
        """Seconds that the queue has been waiting for a worker, or is going to."""
        if self.child is None:
            return now - self.successor.started if self.successor else self.retry_at - now
        return GUARDED_DELAY if self.child.leaving else now - self.child.started

    def left(self, now: float, reason: str, *, asked: bool) -> None:
        """The slot's worker is gone; decides when the next one starts. `asked`: it was told to leave."""
        child = self.child
        self.child = None
        if not self.wanted:
            return
        self.restarts += 1
        self.reason = reason
        young = child is None or child.ready_at is None or now - child.ready_at < YOUNG
        self.failures = self.failures + 1 if young and not asked else 0
        self.retry_at = now + delay(self.failures)

    def settled(self, now: float) -> None:
        """Forget old failures of a worker that has lived long enough."""
        if self.failures and self.child and self.child.ready_at is not None and now - self.child.ready_at >= YOUNG:
            self.failures = 0


class Rows:
    """Which rows of the scoreboard have a worker. `high`: rows that ever had one, from the first on."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: set[int] = set()
        self.high = 0

    def take(self, preferred: int) -> int | None:
        """A free row, `preferred` if it is one; None when all are taken."""
        free = [preferred] if preferred >= 0 and preferred not in self._taken else []
        row = next((row for row in (*free, *range(self._most)) if row not in self._taken), None)
        if row is not None:
            self._taken.add(row)
            self.high = max(self.high, row + 1)
        return row

    def give(self, row: int) -> None:
        self._taken.discard(row)


def delay(failures: int) -> float:
    """Seconds to wait after `failures` in a row."""
    if failures <= 1:
        return 0.0
    return min(FIRST_DELAY * 2.0 ** min(failures - 2, 16), LAST_DELAY)


def due(slots: list[Slot], now: float) -> list[Slot]:
    """Slots whose worker is to be spawned now."""
    return [slot for slot in slots if slot.wanted and _empty(slot) and slot.retry_at <= now]


def next_due(slots: list[Slot]) -> float | None:
    """When the next spawn is due; None when every wanted slot has its worker."""
    return min((slot.retry_at for slot in slots if slot.wanted and _empty(slot)), default=None)


def _empty(slot: Slot) -> bool:
    return slot.child is None and slot.successor is None


def unguarded(slots: list[Slot], now: float) -> list[Slot]:
    """Slots whose queue nobody serves for a while, and no ready worker minds yet."""
    return [
        slot
        for slot in slots
        if not slot.ready
        and (slot.guardian is None or not slots[slot.guardian].ready)
        and (not slot.wanted or slot.unserved_for(now) >= GUARDED_DELAY)
    ]


def choose_guardian(slots: list[Slot]) -> Slot | None:
    """The ready slot that minds the fewest others; None when no worker is ready."""
    ready = [slot for slot in slots if slot.ready]
    return min(ready, key=lambda slot: sum(other.guardian == slot.index for other in slots), default=None)

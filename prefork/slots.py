"""Worker slots as the master keeps them: who sits where, who minds an empty one, and when to try again.

Pure policy over plain values: no fork, no socket call, no clock of its own (callers pass `now`, monotonic seconds).

| slot | child | guardian | meaning |
|---|---|---|---|
| wanted | none | any | to be spawned at `retry_at` |
| wanted | starting or ready | none | normal life; a worker that starts for long has its queue minded |
| wanted | leaving | another slot | drains, and is replaced when it has left |
| not wanted | leaving | another slot | retiring; new connections go to the guardian |
| not wanted | none | another slot | retired; its socket stays open, so nobody in its queue is lost |
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
    """One place for a worker, with the listening socket that stays with it for ever."""

    index: int
    listener: socket.socket
    wanted: bool = True
    child: Child | None = None
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
            return self.retry_at - now
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


def delay(failures: int) -> float:
    """Seconds to wait after `failures` in a row."""
    if failures <= 1:
        return 0.0
    return min(FIRST_DELAY * 2.0 ** min(failures - 2, 16), LAST_DELAY)


def due(slots: list[Slot], now: float) -> list[Slot]:
    """Slots whose worker is to be spawned now."""
    return [slot for slot in slots if slot.wanted and slot.child is None and slot.retry_at <= now]


def next_due(slots: list[Slot]) -> float | None:
    """When the next spawn is due; None when every wanted slot has its worker."""
    return min((slot.retry_at for slot in slots if slot.wanted and slot.child is None), default=None)


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

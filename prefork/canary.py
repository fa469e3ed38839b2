"""Whether workers of a new generation do as well as those of the old one at the same time.

Runs in the master and reads the scoreboard. Both sides are seen over the same span under the same load, so what ails
the machine ails both. The share of failed answers is compared by the one-sided two-proportion z-test (pooled variance);
the latency by the share of runs that take much longer than the 99th percentile of the old generation's, of which there
are one in a hundred, as far as the scoreboard's histogram resolves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prefork.child import Child
from prefork.errors import SegmentCorrupt
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import BOUNDS, Stage
from prefork.slots import Slot

ENOUGH = 100  # answers of the new generation before anything is said
Z = 3.0  # standard errors above the old generation's share of failures: one false alarm in 740
WORSE = 0.01  # difference of the shares of failures that is always excused, however sure it is
SLOWER = 1.5  # times the old generation's 99th percentile; above the ratio of two neighbouring bounds of the histogram

Verdict = Literal["wait", "pass", "fail"]


@dataclass(frozen=True, slots=True)
class Figures:
    """What some workers did. `times[i]`: runs of up to bounds[i] seconds, the last one above; not cumulative."""

    answered: int
    failed: int
    times: tuple[int, ...]

    def since(self, before: Figures) -> Figures:
        """What was done after `before`."""
        times = tuple(now - then for now, then in zip(self.times, before.times, strict=True))
        return Figures(self.answered - before.answered, self.failed - before.failed, times)


class Watch:
    """The ready workers of `slots` from now on, and those that come later from when they are first seen."""

    def __init__(self, board: Scoreboard, slots: Sequence[Slot]) -> None:
        self._board = board
        self._slots = slots
        self._began: dict[Child, Figures] = {}
        self._seen()

    def judge(self, new: Callable[[Slot], bool], *, over: bool) -> tuple[Verdict, str]:
        """The verdict on the slots that are `new`, and why; `over` as for `judge` below."""
        sides: dict[bool, list[Figures]] = {True: [], False: []}
        for slot, child, now in self._seen():
            sides[new(slot)].append(now.since(self._began[child]))
        ours = total(sides[True])
        return judge(ours, total(sides[False]), BOUNDS, over=over) if ours else ("wait", "")

    def _seen(self) -> list[tuple[Slot, Child, Figures]]:
        """What the ready workers have done since they are on their rows."""
        found = []
        for slot in self._slots:
            if slot.ready and slot.child is not None and (figures := self._figures(slot.child)):
                self._began.setdefault(slot.child, figures)
                found.append((slot, slot.child, figures))
        return found

    def _figures(self, child: Child) -> Figures | None:
        """None when the worker wrote nonsense, for which the fleet kills it."""
        try:
            reading = self._board.read(child.row)
        except SegmentCorrupt:
            return None
        failed = sum(reading.errors)
        return Figures(reading.values["replies_ok"] + failed, failed, reading.stages[Stage.COMPUTE].counts)


def total(parts: Iterable[Figures]) -> Figures | None:
    """All workers together; None for none."""
    found = list(parts)
    if not found:
        return None
    times = tuple(sum(column) for column in zip(*(part.times for part in found), strict=True))
    return Figures(sum(part.answered for part in found), sum(part.failed for part in found), times)


def judge(new: Figures, old: Figures | None, bounds: Sequence[float], *, over: bool) -> tuple[Verdict, str]:
    """`old`: None when no worker of the old generation is left to compare with; then only failures count. `over`: the
    time for looking is; too few answers pass then, since nothing speaks against the new generation."""
    if new.answered < ENOUGH:
        return ("pass", f"only {new.answered} answers in the time given") if over else ("wait", "")
    share = new.failed / new.answered
    base = old.failed / old.answered if old and old.answered else 0.0
    if share > base + max(WORSE, _error(new, old) * Z):
        return "fail", f"{share:.2%} of its {new.answered} answers failed, {base:.2%} of the old generation's"
    if old and (slow := _slower(new, old, bounds)):
        return "fail", slow
    return ("pass", f"{new.answered} answers, {share:.2%} failed") if over else ("wait", "")


def _error(new: Figures, old: Figures | None) -> float:
    """Standard error of the difference of the two shares."""
    if not old or not old.answered:
        return 0.0
    pooled = (new.failed + old.failed) / (new.answered + old.answered)
    return math.sqrt(pooled * (1 - pooled) * (1 / new.answered + 1 / old.answered))


def _slower(new: Figures, old: Figures, bounds: Sequence[float]) -> str:
    runs = sum(new.times)
    if runs < ENOUGH or sum(old.times) < ENOUGH:
        return ""
    theirs = p99(old.times, bounds)
    if above(new.times, bounds, SLOWER * theirs) <= 0.01 * runs + Z * math.sqrt(0.01 * 0.99 * runs):
        return ""
    return f"its p99 of a run is {p99(new.times, bounds) * 1e3:.3g} ms, the old generation's {theirs * 1e3:.3g} ms"


def above(times: Sequence[int], bounds: Sequence[float], limit: float) -> float:
    """How many of `times` are above `limit` seconds; of the bucket that it lies in, the part above it."""
    found = float(times[-1]) if limit < bounds[-1] else 0.0
    for count, low, high in zip(times, [0.0, *bounds], bounds, strict=False):
        found += count * min(1.0, max(0.0, (high - limit) / (high - low)))
    return found


def p99(times: Sequence[int], bounds: Sequence[float]) -> float:
    """Seconds: interpolated within its bucket; above the last bound, that bound."""
    rank = 0.99 * sum(times)
    edges = [0.0, *bounds]
    for index, reached in enumerate(accumulate(times)):
        if reached >= rank:
            if index >= len(bounds):
                break
            inside = (rank - (reached - times[index])) / times[index]
            return edges[index] + inside * (edges[index + 1] - edges[index])
    return float(bounds[-1])

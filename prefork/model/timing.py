"""How much faster one form of a model is than another, on this host, one thread, as in a worker. Loader's process.

The two take turns, and each turn gives one ratio, so that whatever else the machine does meets both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import TypeAlias

from prefork.model.gate import Timing

Call: TypeAlias = Callable[[], object]

TURNS = (5, 15)  # at least, at most
SECONDS = 3.0  # for one bucket, after the least number of turns
SAMPLE = 0.002  # seconds; shorter runs are repeated until a sample lasts about that long


def compare(
    bucket: str, fp32: Call, forms: Sequence[Call], clock: Callable[[], float] = perf_counter
) -> tuple[Timing, ...]:
    """Run fp32 and all forms by turns, every other turn in the opposite order; the first run of each is not counted.

    One timing for each form. Raises what they raise."""
    calls = [fp32, *forms]
    first = [_sample(call, 1, clock) for call in calls]
    repeats = max(1, min(int(SAMPLE / max(first[0], 1e-6)), 1000))
    turns: list[list[float]] = []
    begun = clock()
    while len(turns) < TURNS[0] or (len(turns) < TURNS[1] and clock() - begun < SECONDS):
        order = range(len(calls)) if len(turns) % 2 == 0 else reversed(range(len(calls)))
        taken = {index: _sample(calls[index], repeats, clock) for index in order}
        turns.append([taken[index] for index in range(len(calls))])
    return tuple(summary(bucket, [(turn[0], turn[i]) for turn in turns]) for i in range(1, len(calls)))


def summary(bucket: str, pairs: Sequence[tuple[float, float]]) -> Timing:
    """Of (fp32, ours) in seconds, turn by turn."""
    return Timing(
        bucket,
        median(fp32 for fp32, _ in pairs),
        median(ours for _, ours in pairs),
        median(fp32 / ours if ours else 1.0 for fp32, ours in pairs),
    )


def _sample(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    begun = clock()
    for _ in range(repeats):
        call()
    return (clock() - begun) / repeats

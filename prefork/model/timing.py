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


def compare(bucket: str, fp32: Call, ours: Call, clock: Callable[[], float] = perf_counter) -> Timing:
    """Run both by turns; the first run of each is not counted. Raises what they raise."""
    repeats = max(1, min(int(SAMPLE / max(_sample(fp32, 1, clock), 1e-6)), 1000))
    _sample(ours, 1, clock)
    pairs: list[tuple[float, float]] = []
    begun = clock()
    while len(pairs) < TURNS[0] or (len(pairs) < TURNS[1] and clock() - begun < SECONDS):
        if len(pairs) % 2:
            second, first = _sample(ours, repeats, clock), _sample(fp32, repeats, clock)
        else:
            first, second = _sample(fp32, repeats, clock), _sample(ours, repeats, clock)
        pairs.append((first, second))
    return summary(bucket, pairs)


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

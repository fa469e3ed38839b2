"""The gate a quantized form must pass: accuracy within a budget, and faster by a margin. Loader's process.

Plain values and decisions only: no model, no clock. What is measured, and how, stands in evaluate.py and timing.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"
Score: TypeAlias = Callable[[Mapping[str, Array], Array], float]

NO_SLOWER = 0.97  # of fp32's speed, in any shape bucket: below it a bucket got slower, above it the noise speaks
FINALISTS = 0.75  # of the best form's speed: what is slower is not timed again beside it
ALIKE = 0.03  # forms whose speeds differ by less are told apart by accuracy


@dataclass(frozen=True, slots=True)
class Gate:
    """What the search is asked for.

    `budget`: the relative loss of accuracy that is allowed; 0 leaves fp32. `eval`: an npz of inputs, and `labels` for
    the metric; `calibration`: an npz of inputs (see evidence.load); `batches`: calibration inputs, with `labels` or
    without, iterated over once and only when there is a search; `giver`: whose they are, for errors. `metric`: auto,
    top1, f1, cosine, mse, `module:function`, or a function of outputs by name and labels whose value is the better the
    higher. `min_speedup`: over optimised fp32; 0 asks for accuracy alone. `seconds`: after them no candidate is
    begun."""

    budget: float = 0.005
    eval: Path | None = None
    calibration: Path | None = None
    batches: Iterable[Mapping[str, Array]] = ()
    giver: str = "calibration"
    metric: str | Score = "auto"
    min_speedup: float = 1.05
    seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Timing:
    """One shape bucket: medians in seconds of interleaved runs, and the median of fp32's over ours, run by run."""

    bucket: str
    fp32: float
    ours: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate that was built. `delta`: relative loss against fp32, NaN when it could not be measured; `score`: the
    metric's own value; `kept`: nodes left in fp32, each with its reason; `timings` empty: accuracy failed first."""

    name: str
    nbytes: int
    delta: float
    score: float
    timings: tuple[Timing, ...] = ()
    kept: tuple[str, ...] = ()
    treatments: Mapping[str, int] | None = None

    @property
    def speedup(self) -> float:
        """Geometric mean over the buckets; 0 when none was timed."""
        ratios = [timing.ratio for timing in self.timings]
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios and min(ratios) > 0 else 0.0


def inaccurate(measured: Measured, budget: float) -> str:
    """Why the form loses too much; "" when it does not. NaN loses."""
    if measured.delta <= budget:
        return ""
    if math.isnan(measured.delta):
        return "its accuracy is no number"
    return f"loses {measured.delta:.2%} of accuracy, the budget is {budget:.2%}"


def slow(measured: Measured, min_speedup: float) -> str:
    """Why the form is not fast enough; "" when it is. Without timings it is not."""
    if not measured.timings:
        return "its speed was not measured"
    worst = min(measured.timings, key=lambda timing: timing.ratio)
    if worst.ratio < min(NO_SLOWER, min_speedup):
        return f"slower than fp32 at {worst.bucket}: {worst.ratio:.2f} of its speed"
    if measured.speedup < min_speedup:
        return f"{measured.speedup:.2f} times as fast as fp32, the margin is {min_speedup:.2f}"
    return ""


def refusal(measured: Measured, gate: Gate) -> str:
    """Why the form does not pass; "" when it does."""
    return inaccurate(measured, gate.budget) or slow(measured, gate.min_speedup)


def finalists(measured: Sequence[Measured], gate: Gate) -> list[Measured]:
    """The forms that pass and are about as fast as the best: those to be timed side by side."""
    passing = [one for one in measured if not refusal(one, gate)]
    best = max((one.speedup for one in passing), default=0.0)
    return [one for one in passing if one.speedup >= FINALISTS * best]


def choose(measured: Sequence[Measured], gate: Gate) -> Measured | None:
    """The fastest form that passes; among those about as fast the most accurate; None when none passes."""
    passing = [one for one in measured if not refusal(one, gate)]
    if not passing:
        return None
    best = max(one.speedup for one in passing)
    return min((one for one in passing if one.speedup >= best * (1 - ALIKE)), key=lambda one: one.delta)

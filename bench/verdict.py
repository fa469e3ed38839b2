"""What a fault did, beside what it may do. Part of bench.faults."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the table; `details` is printed when it does not hold. `baseline`: what the usual way of
    doing it gave in the same run, where that was measured."""

    case: str
    expected: str
    found: str
    holds: bool
    details: list[str] = field(default_factory=list)
    baseline: str = "-"

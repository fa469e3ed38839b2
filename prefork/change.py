"""One change of what the workers serve: what was asked, how far it is, how it ended. Plain values; turnover.py acts.

Runs in the master.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefork.compat import broken
from prefork.config import ModelConfig
from prefork.errors import NotFound
from prefork.jobs import LoadedModel

Kind = Literal["start", "reload", "rollback", "restart"]
Phase = Literal["loading", "opening", "rolling", "holding", "returning", "done", "failed"]


@dataclass(slots=True)
class Change:
    """One change, under way or over. `share`: of the slots that moves before it is judged; `hold`: seconds, for ever
    when infinite; `forced`: clients may notice a difference; times are monotonic seconds."""

    number: int
    kind: Kind
    generation: int
    began: float
    phase: Phase = "loading"
    reason: str = ""
    share: float = 1.0
    hold: float = math.inf
    forced: bool = False
    held_at: float = 0.0
    losses: int = 0
    ended: float | None = None

    @property
    def over(self) -> bool:
        return self.phase in ("done", "failed")

    def row(self, moved: int, wanted: int) -> dict[str, Any]:
        """As the control socket tells it."""
        return {
            "number": self.number,
            "kind": self.kind,
            "generation": self.generation,
            "phase": self.phase,
            "reason": self.reason,
            "moved": moved,
            "workers": wanted,
            "hold_s": None if math.isinf(self.hold) else self.hold,
            "seconds": round((self.ended or time.monotonic()) - self.began, 3),
        }


def misfit(serving: Iterable[LoadedModel], coming: Iterable[LoadedModel]) -> str:
    """Which coming model would not do for the clients of the one of its name, and why; nothing when all do."""
    signatures = {model.name: model.report.get("signature") for model in serving}
    for model in coming:
        was, now = signatures.get(model.name), model.report.get("signature")
        if was and now and (why := broken(was, now)):
            return f"model {model.name!r}: {why}; its clients would fail (force it if they know)"
    return ""


def only(names: Sequence[str], found: Sequence[ModelConfig], serving: Sequence[ModelConfig]) -> list[ModelConfig]:
    """The models that serve, those of `names` as `found` has them now. Raises NotFound."""
    known = {model.name: model for model in found}
    if unknown := [name for name in names if name not in known]:
        raise NotFound(f"model {unknown[0]!r} is not configured; expected one of {', '.join(map(repr, known))}")
    wanted = [known[model.name] if model.name in names else model for model in serving]
    served = {model.name for model in serving}
    return wanted + [known[name] for name in names if name not in served]

"""When a request may be sent again, and how long to wait before. No sleep and no socket here; both clients use it.

| what happened | sent again |
|---|---|
| no connection, or it broke before the whole request was sent | yes: it cannot have been run |
| the connection was leaving already, so nothing was sent | at once, on another one, also with no `retries` |
| the server refused, UNAVAILABLE or RESOURCE_EXHAUSTED with `retryable` | yes, after its `retry_after_ms` |
| the connection was lost while the request was pending | only when the request is idempotent |
| any other error, and every deadline | no |

Waits are exponential with full jitter (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015), on top
of what the server asked for. There are at most `retries` repetitions and none that would begin after the deadline.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from prefork.codec.frame import MAX_TIMEOUT_MS
from prefork.errors import DeadlineExceeded, PreforkError, ResourceExhausted, Unavailable

ELSEWHERE = 4  # connections in turn that may turn out to be leaving before the request is sent; no retry is counted
FIRST_WAIT = 0.05  # seconds: a replaced worker takes about that long to be ready
LONGEST_WAIT = 2.0


def may_repeat(error: PreforkError, idempotent: bool) -> bool:
    """The table above."""
    if not isinstance(error, Unavailable | ResourceExhausted) or not error.retryable:
        return False
    return idempotent or not (isinstance(error, Unavailable) and error.maybe_executed)


@dataclass(slots=True)
class Attempts:
    """One request's life: `deadline` in the owner's monotonic seconds (None: none), attempts made so far."""

    retries: int
    deadline: float | None
    idempotent: bool
    made: int = 0

    def wait_before_next(self, error: PreforkError, now: float) -> float:
        """Seconds to wait before the next attempt; raises `error`, its attempts noted, when there must be none."""
        self.made += 1
        if self.made <= self.retries and may_repeat(error, self.idempotent):
            asked = error.retry_after_ms / 1000 if isinstance(error, Unavailable | ResourceExhausted) else 0.0
            wait = asked + random.uniform(0, min(LONGEST_WAIT, FIRST_WAIT * 2 ** (self.made - 1)))
            if self.deadline is None or now + wait < self.deadline:
                return wait
        if self.made > 1:
            error.add_note(f"after {self.made} attempts")
        raise error


def timeout_ms(deadline: float | None, now: float) -> int:
    """The frame's time-out field, rounded up; 0 for none. Raises DeadlineExceeded when the deadline is over."""
    if deadline is None:
        return 0
    left = math.ceil((deadline - now) * 1000)
    if left <= 0:
        raise DeadlineExceeded("the deadline was over before the request was sent")
    return min(left, MAX_TIMEOUT_MS)


def earliest(deadline: float | None, other: float) -> float:
    return other if deadline is None else min(deadline, other)

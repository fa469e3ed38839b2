"""The request log of one worker: which requests get a line, and a bounded ring in memory until it is written.

Loop thread only. A connection (logged.py) notes an entry when it has answered; no line is made and nothing is written
then. The loop does so in its next turn when BATCH entries have come together, else at the heartbeat: one write a batch,
a few hundred microseconds. A log that takes nothing (a pipe whose reader is stopped, a full disk) is tried again after
RETRY, and entries wait; when the ring is full the newer ones are dropped, and a line says how many afterwards.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prefork.errors import Code

BATCH = 64  # lines of one write
RETRY = 0.005  # seconds; a pipe holds 200 lines, and its reader should not wait for more
CAPACITY = 4096  # entries, about 2 MB at most with the longest texts
ERRORS_PER_SECOND = 10  # that get a line whatever the rate; an outage must not become a flood
MAX_TEXT = 128  # characters of what a client chose; a traceparent has 55 (https://www.w3.org/TR/trace-context/)


class Lines(Protocol):
    """The part of a Logger that is used."""

    def line(self, level: str, event: str, at: int, fields: dict[str, Any]) -> bytes: ...
    def append(self, lines: Sequence[bytes]) -> int: ...


@dataclass(slots=True)
class Entry:
    """One answered request. `at` in time.time_ns(), `bytes_in` of its body, `bytes_out` of the reply with its header,
    times in seconds: `queue` until its run began (decoding is in it), `compute` of the run (0 when there was none),
    `total` from the request's last byte until the reply was handed to the kernel."""

    at: int
    code: Code
    codec: str
    model: str
    version: str
    request_id: int
    bytes_in: int
    bytes_out: int
    queue: float
    compute: float
    total: float
    peer: str
    id: str = ""
    traceparent: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "code": self.code.name, "model": self.model, "version": self.version, "codec": self.codec,
            "bytes_in": self.bytes_in, "bytes_out": self.bytes_out,
            "queue_us": round(self.queue * 1e6), "compute_us": round(self.compute * 1e6),
            "total_us": round(self.total * 1e6), "peer": self.peer, "request_id": self.request_id,
        }  # fmt: skip
        if self.id:
            found["id"] = self.id
        if self.traceparent:
            found["traceparent"] = self.traceparent
        return found


class RequestLog:
    """Doors: `takes`, `takes_error`, `note` for connections; `beat`, `flush_all` for the worker."""

    def __init__(
        self,
        rate: float,
        lines: Lines,
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rate` above 0 and at most 1; `later` calls a function after so many seconds, 0 for the
        loop's next turn."""
        self._rate = rate
        self._lines = lines
        self._later = later
        self._clock = clock
        self._ring: deque[Entry] = deque()
        self._coming = False  # a later turn of the loop writes
        self._made: list[bytes] = []  # lines of entries that have left the ring
        self._dropped = 0
        self._random = random.Random()
        self._second = 0
        self._errors = 0  # of that second
        self._suppressed = 0

    def takes(self) -> bool:
        """Whether this request is in the sample."""
        return self._random.random() < self._rate

    def takes_error(self) -> bool:
        """Whether this failed request gets a line; one that does not is counted."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._errors = second, 0
        self._errors += 1
        if self._errors <= ERRORS_PER_SECOND:
            return True
        self._suppressed += 1
        return False

    def note(self, entry: Entry) -> None:
        """Keep an entry until it is written."""
        if len(self._ring) >= CAPACITY:
            self._dropped += 1
            return
        self._ring.append(entry)
        if len(self._ring) >= BATCH and not self._coming:
            self._coming = True
            self._later(0, self._turn)

    def _flush(self) -> bool:
        """Write one batch and what is to be said of those that are missing; whether the log took all of it."""
        if not self._made:
            self._made = [self._line(self._ring.popleft()) for _ in range(min(BATCH, len(self._ring)))]
        del self._made[: self._lines.append(self._made)]
        if self._made:
            return False
        self._suppressed -= self._say("failed requests without a line", self._suppressed)
        if not self._ring:
            self._dropped -= self._say("request log was full, lines dropped", self._dropped)
        return True

    def flush_all(self) -> None:
        """Write until the ring is empty or the log takes no more."""
        while self._flush() and self._ring:
            pass

    def beat(self) -> None:
        """At each heartbeat: write what waits; the rest of a long queue in later turns."""
        if (self._ring or self._made or self._suppressed or self._dropped) and not self._coming:
            self._turn()

    def _turn(self) -> None:
        taken = self._flush()
        self._coming = not taken or len(self._ring) >= BATCH
        if self._coming:
            self._later(0 if taken else RETRY, self._turn)

    def _line(self, entry: Entry) -> bytes:
        return self._lines.line("info" if entry.code is Code.OK else "warning", "request", entry.at, entry.fields)

    def _say(self, event: str, count: int) -> int:
        """`count` when a line of it was written, else 0."""
        if not count:
            return 0
        return count * self._lines.append([self._lines.line("warning", event, time.time_ns(), {"count": count})])

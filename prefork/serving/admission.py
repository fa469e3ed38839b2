"""Who may come in: the bounds of one worker, counted in requests and bytes. Runs in the worker's loop thread only.

Every refusal is an answer that names the limit and its size. What was admitted is released exactly once, when the
request has been answered or dropped.
"""

from __future__ import annotations

from prefork.errors import ResourceExhausted

RETRY_AFTER_MS = 20  # long enough for some queued work to leave, short enough not to idle a recovered server


class Admission:
    """Bounds of in-flight work: at most `max_requests` requests and `max_bytes` bytes of request bodies."""

    __slots__ = ("held", "held_bytes", "max_bytes", "max_requests")

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.held = 0
        self.held_bytes = 0

    def check(self, size: int) -> None:
        """Raise what `admit` would raise, for a request that is dear to decode."""
        self.admit(size)
        self.release(size)

    def admit(self, size: int) -> None:
        """Take one request of `size` bytes in, or raise ResourceExhausted (retryable).

        A request larger than `max_bytes` alone is let in when nothing else is held: it was within the frame limit."""
        if self.held >= self.max_requests:
            raise ResourceExhausted(
                f"worker holds {self.held} requests, max_in_flight is {self.max_requests}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        if self.held_bytes + size > self.max_bytes and self.held:
            raise ResourceExhausted(
                f"worker holds {self.held_bytes} bytes of requests, {size} more exceed max_in_flight_bytes "
                f"{self.max_bytes}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self.held += 1
        self.held_bytes += size

    def release(self, size: int) -> None:
        self.held -= 1
        self.held_bytes -= size

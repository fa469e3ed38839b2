"""The words of a scoreboard slot by index, and the table of a worker's life. Constants only; any process.

A slot is one page of 512 words of 8 bytes, unsigned, native order. Line by line (64 bytes):

    0- 3   who and how: STATE PID GENERATION STARTED_NS, READY_NS TICK_NS RSS_BYTES PRIVATE_BYTES
    8-15   gauges: CONNECTIONS IN_FLIGHT QUEUE_DEPTH, spare
    16-39  counters
    40-63  errors by canonical code (40 + code, codes 0 to 16), spare
    64-303 one histogram a stage, HISTOGRAM words each: BUCKETS counts, then the sum, a float64, in seconds
    304-   spare

All below GAUGES_END are set anew when a worker takes a slot; all from COUNTERS on only ever grow.
Plain integers, not an enum: `words[REQUESTS] += 1` is on the hot path.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

SLOT_WORDS: Final = 512
SLOT_SIZE: Final = SLOT_WORDS * 8

STATE: Final = 0
PID: Final = 1
GENERATION: Final = 2
STARTED_NS: Final = 3  # CLOCK_MONOTONIC, like the next two
READY_NS: Final = 4
TICK_NS: Final = 5
RSS_BYTES: Final = 6
PRIVATE_BYTES: Final = 7

CONNECTIONS: Final = 8
IN_FLIGHT: Final = 9
QUEUE_DEPTH: Final = 10
GAUGES_END: Final = 16

COUNTERS: Final = 16
ACCEPTED: Final = 16  # connections
REQUESTS: Final = 17  # accepted for work
REPLIES_OK: Final = 18
REFUSED: Final = 19  # not accepted: over a bound, draining
DROPPED: Final = 20  # accepted, the client left before the answer
BYTES_IN: Final = 21
BYTES_OUT: Final = 22
INLINE_RUNS: Final = 23
THREAD_RUNS: Final = 24
BATCHES: Final = 25
STARTS: Final = 26  # workers that have had this slot
ERRORS: Final = 40
CODES: Final = 17  # canonical codes 0 to 16
HISTOGRAMS: Final = 64

# le bounds in seconds: six a decade from 100 microseconds to 10 s, and one bucket for what is above
BOUNDS: Final[tuple[float, ...]] = tuple(round(1e-4 * 10 ** (step / 6), 9) for step in range(31))
BUCKETS: Final = len(BOUNDS) + 1
HISTOGRAM: Final = 34  # words a stage: BUCKETS, sum, one spare

NAMES: Final[dict[str, int]] = {
    "rss_bytes": RSS_BYTES, "private_bytes": PRIVATE_BYTES, "connections": CONNECTIONS, "in_flight": IN_FLIGHT,
    "queue_depth": QUEUE_DEPTH, "accepted_connections": ACCEPTED, "requests": REQUESTS, "replies_ok": REPLIES_OK,
    "refused": REFUSED, "dropped": DROPPED, "bytes_in": BYTES_IN, "bytes_out": BYTES_OUT, "inline_runs": INLINE_RUNS,
    "thread_runs": THREAD_RUNS, "batches": BATCHES, "starts": STARTS,
}  # fmt: skip


class Stage(IntEnum):
    """Of one request, in order."""

    READ = 0
    DECODE = 1
    QUEUE = 2
    WAIT = 3  # for the batch to fill
    COMPUTE = 4
    ENCODE = 5
    WRITE = 6


class WorkerState(IntEnum):
    """GONE: the slot has no worker. BUSY: the loop is inside a run and cannot tick until it returns."""

    GONE = 0
    STARTING = 1
    READY = 2
    BUSY = 3
    DRAINING = 4


TRANSITIONS: Final[dict[WorkerState, frozenset[WorkerState]]] = {
    WorkerState.GONE: frozenset({WorkerState.STARTING}),
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.READY: frozenset({WorkerState.BUSY, WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.BUSY: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.DRAINING: frozenset({WorkerState.GONE}),
}

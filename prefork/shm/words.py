"""The words of the scoreboard by index, and the table of a worker's life. Constants only; any process.

A slot is four pages of 512 words of 8 bytes, unsigned, native order. Line by line (64 bytes):

    0- 3     who and how: STATE PID GENERATION STARTED_NS, READY_NS TICK_NS RSS_BYTES PRIVATE_BYTES
    8-15     gauges: CONNECTIONS IN_FLIGHT QUEUE_DEPTH, spare
    16-39    counters
    40-63    batches by size: SIZE_BUCKETS counts, then the sum of the sizes, spare
    64-303   one histogram a stage, HISTOGRAM words each: BUCKETS counts, then the sum, a float64, in seconds
    320-1951 answers: CODES counts for each codec of each column, a column being a model (masterpage.py) or OTHER
    1952-    spare

All below GAUGES_END are set anew when a worker takes a slot; all from COUNTERS on only ever grow.
The master's page has words of its own, M_*, and is followed by one row for each column, R_*.
Plain integers, not an enum: `words[REQUESTS] += 1` is on the hot path.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

PAGE_WORDS: Final = 512
SLOT_WORDS: Final = 4 * PAGE_WORDS
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
REFUSED: Final = 19  # not accepted: over a bound, draining
DROPPED: Final = 20  # accepted, the client left before the answer
BYTES_IN: Final = 21
BYTES_OUT: Final = 22
INLINE_RUNS: Final = 23
THREAD_RUNS: Final = 24
STARTS: Final = 26  # workers that have had this slot

SIZES: Final = 40
SIZE_BOUNDS: Final[tuple[int, ...]] = tuple(1 << step for step in range(11))  # rows in a run: 1, 2, 4, ... 1024
SIZE_BUCKETS: Final = len(SIZE_BOUNDS) + 1
HISTOGRAMS: Final = 64

ANSWERS: Final = 320
COLUMNS: Final = 32
OTHER: Final = 0  # the column of all that names no model of ours, and of models that found no column
CODECS: Final = ("msgpack", "protobuf", "json")  # codec n of the wire is the n-th, counted from 1
CODES: Final = 17  # canonical codes 0 to 16
COLUMN: Final = CODES * len(CODECS)
REPLIES_OK: Final = ANSWERS  # of OTHER in msgpack, for whoever knows neither model nor codec
ERRORS: Final = ANSWERS

# le bounds in seconds: six a decade from 100 microseconds to 10 s, and one bucket for what is above
BOUNDS: Final[tuple[float, ...]] = tuple(round(1e-4 * 10 ** (step / 6), 9) for step in range(31))
BUCKETS: Final = len(BOUNDS) + 1
HISTOGRAM: Final = 34  # words a stage: BUCKETS, sum, one spare

M_STATE: Final = 0
M_PID: Final = 1
M_GENERATION: Final = 2
M_WANTED: Final = 3  # workers
M_SLOTS: Final = 4  # slots that exist; never fewer than before
M_STARTED_NS: Final = 5  # CLOCK_REALTIME
M_TICK_NS: Final = 6  # CLOCK_MONOTONIC
M_RESTARTS: Final = 16  # by reason

ROW_WORDS: Final = 64  # of a column: who has it
R_GENERATION: Final = 0  # 0: not served now
R_BYTES: Final = 1  # of the segment
R_CHECK: Final = 2  # CRC-32 of the text
R_LENGTH: Final = 3  # of the text, bytes
R_TEXT: Final = 4  # JSON: the model's name and what else is to be told of it

MASTER_AT: Final = PAGE_WORDS  # page 0 is the board's header
ROWS_AT: Final = MASTER_AT + PAGE_WORDS
SLOTS_AT: Final = ROWS_AT + COLUMNS * ROW_WORDS

NAMES: Final[dict[str, int]] = {
    "rss_bytes": RSS_BYTES, "private_bytes": PRIVATE_BYTES, "connections": CONNECTIONS, "in_flight": IN_FLIGHT,
    "queue_depth": QUEUE_DEPTH, "accepted_connections": ACCEPTED, "requests": REQUESTS, "replies_ok": REPLIES_OK,
    "refused": REFUSED, "dropped": DROPPED, "bytes_in": BYTES_IN, "bytes_out": BYTES_OUT, "inline_runs": INLINE_RUNS,
    "thread_runs": THREAD_RUNS, "starts": STARTS,
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


class MasterState(IntEnum):
    """GONE: no master has begun. The others are master.py's."""

    GONE = 0
    LOADING = 1
    STARTING = 2
    READY = 3
    STOPPING = 4


class Restart(IntEnum):
    """Why a slot was filled again."""

    EXIT = 0  # it left by itself
    SIGNAL = 1
    OOM = 2  # killed by the kernel for memory
    STALLED = 3  # killed by the master: no heartbeat
    BOOT = 4  # gone before it was ever ready
    RECYCLED = 5  # it left as it was told

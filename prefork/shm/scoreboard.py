"""The scoreboard: anonymous shared memory with one page a worker slot. Made by the master, inherited over fork.

Page 0 is the header (magic, version, slots, words a slot); page 1 + i is slot i, see words.py. A slot has one writer at
a time: the worker that has it, or the master once it has reaped that worker. Readers check what they read. It is a
memfd, so it has no name and goes with the last process; sealed against resizing, so no reader can meet SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import Self

from prefork.errors import ConfigError, SegmentCorrupt, SegmentError
from prefork.shm import words as w
from prefork.shm.words import Stage, WorkerState

MAX_SLOTS = 4096
_MAGIC = b"PFBOARD\x1a"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_BOUNDS, _FIRST, _EACH, _SUM = w.BOUNDS, w.HISTOGRAMS, w.HISTOGRAM, w.BUCKETS  # found faster as globals


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` values in (BOUNDS[i - 1], BOUNDS[i]] seconds, the last one those above; not cumulative.
    `sum`: of all values, seconds."""

    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """The counts are the truth; a word of its own could disagree with them."""
        return sum(self.counts)


@dataclass(frozen=True)
class Reading:
    """One slot at one moment. `values` has the gauges and counters under the names of words.NAMES. Each word is
    whole; two words may be from moments some microseconds apart."""

    state: WorkerState
    pid: int
    generation: int
    started_ns: int
    ready_ns: int
    tick_ns: int
    values: dict[str, int]
    errors: tuple[int, ...]  # by canonical code, 17
    stages: dict[Stage, Histogram]


class Slot:
    """The writer's side of one slot. The hot path writes `words` directly: `slot.words[words.REQUESTS] += 1`."""

    def __init__(self, index: int, memory: memoryview) -> None:
        self.index = index
        self.words = memory  # cast to "Q", SLOT_WORDS long
        self._floats = memory.cast("B").cast("d")

    @property
    def state(self) -> WorkerState:
        """Raises SegmentCorrupt for a number that is not in the table."""
        return _state(self.index, self.words[w.STATE])

    def begin(self, pid: int, generation: int) -> None:
        """A new worker takes the slot, in whatever state the last one died: gauges start anew, counters go on."""
        words = self.words
        words[w.STATE] = WorkerState.GONE
        words[w.PID : w.GAUGES_END] = memoryview(bytes(8 * (w.GAUGES_END - w.PID))).cast("Q")
        words[w.GENERATION] = generation
        words[w.STARTED_NS] = words[w.TICK_NS] = time.monotonic_ns()
        words[w.PID] = pid
        words[w.STARTS] += 1
        words[w.STATE] = WorkerState.STARTING

    def move(self, state: WorkerState) -> None:
        """Go on to `state`, and tick. Raises SegmentError for a step that the table does not have."""
        if state not in w.TRANSITIONS[self.state]:
            raise SegmentError(f"scoreboard slot {self.index}: no way from {self.state.name} to {state.name}")
        self.tick()
        if state is WorkerState.READY and not self.words[w.READY_NS]:
            self.words[w.READY_NS] = self.words[w.TICK_NS]
        self.words[w.STATE] = state

    def end(self) -> None:
        """The slot has no worker any more: by the worker as its last act, or by the master after reaping it."""
        words = self.words
        words[w.STATE] = WorkerState.GONE
        words[w.RSS_BYTES : w.GAUGES_END] = memoryview(bytes(8 * (w.GAUGES_END - w.RSS_BYTES))).cast("Q")

    def tick(self) -> None:
        self.words[w.TICK_NS] = time.monotonic_ns()

    def error(self, code: int) -> None:
        """Count a reply with this canonical code, 0 to 16; any other counts as UNKNOWN."""
        self.words[w.ERRORS + (code if 0 <= code < w.CODES else 2)] += 1

    def observe_fast(self, stage: int, count: int, seconds: float) -> None:
        """Add `count` durations of the first bucket, `seconds` in all."""
        base = _FIRST + stage * _EACH
        self.words[base] += count
        self._floats[base + _SUM] += seconds

    def observe(self, stage: int, seconds: float) -> None:
        """Add one duration to the stage's histogram. Below zero counts as zero."""
        base = _FIRST + stage * _EACH
        self.words[base + bisect_left(_BOUNDS, seconds)] += 1
        if seconds > 0:
            self._floats[base + _SUM] += seconds


class Scoreboard:
    """The whole board as one process maps it. `fd` is close-on-exec; it survives fork."""

    def __init__(self, fd: int, slots: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self.slots = slots
        self._map = memory
        self._view = memoryview(memory)
        self._words = self._view.cast("Q")

    @classmethod
    def create(cls, slots: int) -> Self:
        """A board with every slot GONE. Raises ConfigError for a bad number."""
        if not 1 <= slots <= MAX_SLOTS:
            raise ConfigError(f"scoreboard: expected 1 to {MAX_SLOTS} slots, found {slots}")
        fd = os.memfd_create("prefork-scoreboard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, _size(slots))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(fd, _size(slots))
        _HEADER.pack_into(memory, 0, _MAGIC, _VERSION, slots, w.SLOT_WORDS)
        return cls(fd, slots, memory)

    @classmethod
    def open(cls, fd: int, slots: int, *, writable: bool = False) -> Self:
        """Map a board that another process made, by an inherited fd. Raises SegmentCorrupt when it is not that."""
        size = os.fstat(fd).st_size
        if size != _size(slots):
            raise SegmentCorrupt(f"scoreboard: size: expected {_size(slots)} for {slots} slots, found {size}")
        memory = mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        expected, found = (_MAGIC, _VERSION, slots, w.SLOT_WORDS), _HEADER.unpack_from(memory)
        if found != expected:
            memory.close()
            raise SegmentCorrupt(f"scoreboard: header: expected {expected}, found {found}")
        return cls(fd, slots, memory)

    def slot(self, index: int) -> Slot:
        """The writer's side; only the process that has the slot may use it."""
        return Slot(index, self._words[self._base(index) : self._base(index) + w.SLOT_WORDS])

    def peek(self, index: int, word: int) -> int:
        """One word of a slot, unchecked; cheap enough for the hot path."""
        return int(self._words[(1 + index) * w.SLOT_WORDS + word])

    def read(self, index: int) -> Reading:
        """Raises SegmentCorrupt when the slot holds what no worker can have written."""
        base = self._base(index)
        row = self._words[base : base + w.SLOT_WORDS].tolist()
        if row[w.PID] > 1 << 22:  # PID_MAX_LIMIT, proc_sys_kernel(5)
            raise SegmentCorrupt(f"scoreboard slot {index}: pid: {row[w.PID]} is out of range")
        return Reading(
            _state(index, row[w.STATE]), row[w.PID], row[w.GENERATION],
            row[w.STARTED_NS], row[w.READY_NS], row[w.TICK_NS],
            values={name: row[word] for name, word in w.NAMES.items()},
            errors=tuple(row[w.ERRORS : w.ERRORS + w.CODES]),
            stages={stage: _histogram(row, w.HISTOGRAMS + stage * w.HISTOGRAM) for stage in Stage},
        )  # fmt: skip

    def close(self) -> None:
        """Unmap and close the fd. Raises BufferError while a Slot is in use."""
        self._words.release()
        self._view.release()
        self._map.close()
        os.close(self.fd)

    def _base(self, index: int) -> int:
        if not 0 <= index < self.slots:
            raise SegmentError(f"scoreboard: slot {index} of {self.slots} does not exist")
        return (1 + index) * w.SLOT_WORDS


def _size(slots: int) -> int:
    return (1 + slots) * w.SLOT_SIZE


def _state(index: int, number: int) -> WorkerState:
    try:
        return WorkerState(number)
    except ValueError:
        states = ", ".join(f"{state.value} {state.name}" for state in WorkerState)
        raise SegmentCorrupt(f"scoreboard slot {index}: state: expected one of {states}; found {number}") from None


def _histogram(row: list[int], base: int) -> Histogram:
    (total,) = struct.unpack("d", struct.pack("Q", row[base + w.BUCKETS]))
    return Histogram(tuple(row[base : base + w.BUCKETS]), total)

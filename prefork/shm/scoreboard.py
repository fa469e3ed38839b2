"""The scoreboard: anonymous shared memory with some pages a worker slot. Made by the master, inherited over fork.

Page 0 is the header (magic, version, slots, words a slot); then come the master's page and its rows (masterpage.py) and
then the slots, see words.py. A slot has one writer at a time: the worker that has it, or the master once it has reaped
that worker. Readers check what they read. It is a memfd, so it has no name and goes with the last process; sealed
against resizing, so no reader can meet SIGBUS. Memory is taken for a slot when its first writer asks for it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from prefork.errors import ConfigError, SegmentCorrupt, SegmentError, SegmentFull
from prefork.shm import masterpage
from prefork.shm import words as w
from prefork.shm.masterpage import MasterPage, MasterReading
from prefork.shm.words import Stage, WorkerState

MAX_SLOTS = 4096
_MAGIC = b"PFBOARD\x1a"
_VERSION = 2
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
    """One slot at one moment. `values` has the gauges and counters under the names of words.NAMES, `answers` the whole
    table. Each word is whole; two words may be from moments some microseconds apart."""

    state: WorkerState
    pid: int
    generation: int
    started_ns: int
    ready_ns: int
    tick_ns: int
    values: dict[str, int]
    answers: tuple[int, ...]
    sizes: tuple[int, ...]  # runs by rows: up to SIZE_BOUNDS[i], the last one above; not cumulative
    rows: int  # of all runs
    stages: dict[Stage, Histogram]

    @property
    def errors(self) -> tuple[int, ...]:
        """Answers by canonical code, 17; the one of OK is zero."""
        return (0, *(sum(self.answers[code :: w.CODES]) for code in range(1, w.CODES)))

    def answered(self) -> Iterator[tuple[int, int, int, int]]:
        """Column, codec, canonical code and count of all answers that there are."""
        for place, count in enumerate(self.answers):
            if count:
                row, code = divmod(place, w.CODES)
                column, codec = divmod(row, len(w.CODECS))
                yield column, codec + 1, code, count


class AnswerRows(dict[str, int]):
    """For one codec: a model's name to the word that counts its answers of code 0; code n is n words on.

    A name that has no column finds the words of OTHER, so nothing that a client sends makes a new one."""

    def __init__(self, columns: Mapping[str, int], codec: int) -> None:
        super().__init__({name: _answers(column, codec) for name, column in columns.items()})
        self._other = _answers(w.OTHER, codec)

    def __missing__(self, name: str) -> int:
        return self._other


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

    def answer(self, row: int, code: int) -> None:
        """Count an answer with this canonical code, 0 to 16; any other counts as UNKNOWN. `row`: from answer_rows."""
        self.words[row + (code if 0 <= code < w.CODES else 2)] += 1

    def ran(self, rows: int) -> None:
        """Count a run of `rows` rows, 1 or more."""
        self.words[w.SIZES + min((rows - 1).bit_length(), w.SIZE_BUCKETS - 1)] += 1
        self.words[w.SIZES + w.SIZE_BUCKETS] += rows

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
        """A board with every slot GONE. Raises ConfigError for a bad number, SegmentFull when there is no memory for it
        or ulimit -f is below its size."""
        if not 1 <= slots <= MAX_SLOTS:
            raise ConfigError(f"scoreboard: expected 1 to {MAX_SLOTS} slots, found {slots}")
        fd = os.memfd_create("prefork-scoreboard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _size(slots))
            os.posix_fallocate(fd, 0, 8 * w.SLOTS_AT)
        except OSError as e:
            os.close(fd)
            raise SegmentFull(f"no room for a scoreboard of {_size(slots)} bytes: {e.strerror}") from None
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
        """The writer's side; only the process that has the slot may use it. Raises SegmentFull when there is no memory
        for it, which would be SIGBUS at the first write."""
        base = self._base(index)
        try:
            os.posix_fallocate(self.fd, 8 * base, w.SLOT_SIZE)
        except OSError as e:
            raise SegmentFull(f"no room for scoreboard slot {index}: {e.strerror}") from None
        return Slot(index, self._words[base : base + w.SLOT_WORDS])

    def master(self) -> MasterPage:
        """The writer's side of the master's page; only the master may use it, and one object of it."""
        return MasterPage(self._words[w.MASTER_AT : w.SLOTS_AT])

    def read_master(self) -> MasterReading:
        """Raises SegmentCorrupt."""
        return masterpage.read(self._words[w.MASTER_AT : w.SLOTS_AT])

    def answer_rows(self) -> tuple[AnswerRows, ...]:
        """By codec number, for the models that have columns now; what has none (0) is answered in the first codec."""
        columns = {row.name: row.column for row in self.read_master().models}
        return tuple(AnswerRows(columns, max(codec, 1)) for codec in range(len(w.CODECS) + 1))

    def peek(self, index: int, word: int) -> int:
        """One word of a slot, unchecked; cheap enough for the hot path."""
        return int(self._words[w.SLOTS_AT + index * w.SLOT_WORDS + word])

    def read(self, index: int) -> Reading:
        """Raises SegmentCorrupt when the slot holds what no worker can have written."""
        base = self._base(index)
        row = self._words[base : base + w.SLOT_WORDS].tolist()
        if row[w.PID] > 1 << 22:  # PID_MAX_LIMIT, proc_sys_kernel(5)
            raise SegmentCorrupt(f"scoreboard slot {index}: pid: {row[w.PID]} is out of range")
        return Reading(
            _state(index, row[w.STATE]), row[w.PID], row[w.GENERATION],
            row[w.STARTED_NS], row[w.READY_NS], row[w.TICK_NS],
            values=named(row),
            answers=tuple(row[w.ANSWERS : w.ANSWERS + w.COLUMNS * w.COLUMN]),
            sizes=tuple(row[w.SIZES : w.SIZES + w.SIZE_BUCKETS]),
            rows=row[w.SIZES + w.SIZE_BUCKETS],
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
        return w.SLOTS_AT + index * w.SLOT_WORDS


def named(row: list[int]) -> dict[str, int]:
    """The gauges and counters of a slot's words by name; those of answers are sums."""
    values = {name: row[word] for name, word in w.NAMES.items()}
    values["replies_ok"] = sum(row[w.ANSWERS : w.ANSWERS + w.COLUMNS * w.COLUMN : w.CODES])
    return values


def _size(slots: int) -> int:
    return 8 * w.SLOTS_AT + slots * w.SLOT_SIZE


def _answers(column: int, codec: int) -> int:
    return w.ANSWERS + column * w.COLUMN + (codec - 1) * w.CODES


def _state(index: int, number: int) -> WorkerState:
    try:
        return WorkerState(number)
    except ValueError:
        states = ", ".join(f"{state.value} {state.name}" for state in WorkerState)
        raise SegmentCorrupt(f"scoreboard slot {index}: state: expected one of {states}; found {number}") from None


def _histogram(row: list[int], base: int) -> Histogram:
    (total,) = struct.unpack("d", struct.pack("Q", row[base + w.BUCKETS]))
    return Histogram(tuple(row[base : base + w.BUCKETS]), total)

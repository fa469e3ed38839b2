"""The master's page of the scoreboard: what only the master knows, for the telemetry process and for workers.

Written by the master alone; `MasterPage` is its side, `read` everyone's. Behind the page stands one row for each column
of the slots' answer tables. A column belongs to a model's name for as long as the board lives, served or not, so what
was counted under a name is never told of another.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prefork.errors import SegmentCorrupt
from prefork.shm import words as w
from prefork.shm.words import MasterState, Restart

_TEXT = (w.ROW_WORDS - w.R_TEXT) * 8  # bytes of a row's text
_LABEL = 120  # characters of one label's value
_LOOKS = 100  # at a row that is being written


@dataclass(frozen=True)
class ModelRow:
    """One column. `generation` 0: not served now. `labels`: what the loader said of it, for people."""

    column: int
    name: str
    generation: int
    segment_bytes: int
    labels: Mapping[str, str]


@dataclass(frozen=True)
class MasterReading:
    """The page at one moment. `started_ns` is CLOCK_REALTIME, `tick_ns` CLOCK_MONOTONIC."""

    state: MasterState
    pid: int
    generation: int
    wanted: int
    slots: int
    started_ns: int
    tick_ns: int
    restarts: Mapping[Restart, int]
    models: tuple[ModelRow, ...]


class MasterPage:
    """The writer's side. `words` is the board from the page on: the page, then the rows."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._bytes = words.cast("B")
        self._columns: dict[str, int] = {}

    def begin(self) -> None:
        """The calling process is the master."""
        words = self._words
        words[w.M_PID] = os.getpid()
        words[w.M_STARTED_NS] = time.time_ns()
        self.tick()

    def tick(self) -> None:
        self._words[w.M_TICK_NS] = time.monotonic_ns()

    def write(self, state: MasterState, generation: int, wanted: int, slots: int) -> None:
        """What holds now: the generation that serves, workers that are wanted, slots that exist."""
        words = self._words
        words[w.M_SLOTS], words[w.M_WANTED] = max(slots, words[w.M_SLOTS]), wanted
        words[w.M_GENERATION], words[w.M_STATE] = generation, state

    def restarted(self, reason: Restart) -> None:
        self._words[w.M_RESTARTS + reason] += 1

    def serve(self, name: str, generation: int, segment_bytes: int, labels: Mapping[str, str]) -> int:
        """Model `name` is served from this segment; its column, the same one each time.

        OTHER when all columns are taken: nothing is kept of the model then, and its answers are counted there."""
        column = self._columns.get(name, len(self._columns) + 1)
        if column >= w.COLUMNS:
            return w.OTHER
        self._columns[name] = column
        base, text = _row(column), _text(name, labels)
        at = 8 * (base + w.R_TEXT)
        words = self._words
        self._bytes[at : at + len(text)] = text
        words[base + w.R_LENGTH], words[base + w.R_CHECK] = len(text), zlib.crc32(text)
        words[base + w.R_BYTES], words[base + w.R_GENERATION] = segment_bytes, generation
        return column

    def keep(self, names: Iterable[str]) -> None:
        """All models but these are served no more."""
        for name in self._columns.keys() - set(names):
            base = _row(self._columns[name])
            self._words[base + w.R_BYTES] = self._words[base + w.R_GENERATION] = 0


def read(words: memoryview) -> MasterReading:
    """`words` as for MasterPage. A row that does not come to rest is left out.

    Raises SegmentCorrupt when the page holds what no master can have written."""
    page = words[: w.PAGE_WORDS].tolist()
    if page[w.M_STATE] > max(MasterState):
        raise SegmentCorrupt(f"scoreboard: master's state: expected 0 to {max(MasterState)}, found {page[w.M_STATE]}")
    rows = (_read_row(words, column) for column in range(1, w.COLUMNS))
    return MasterReading(
        MasterState(page[w.M_STATE]), page[w.M_PID], page[w.M_GENERATION], page[w.M_WANTED], page[w.M_SLOTS],
        page[w.M_STARTED_NS], page[w.M_TICK_NS],
        restarts={reason: page[w.M_RESTARTS + reason] for reason in Restart},
        models=tuple(row for row in rows if row is not None),
    )  # fmt: skip


def restart_reason(status: int, *, ready: bool, asked: bool, stalled: bool = False, oom: bool = False) -> Restart:
    """The class of a worker's end. `status`: as waitpid(2) gives it; `ready`: it had been READY; `asked`: it was told
    to leave; `stalled`: the master killed it for its silence; `oom`: the kernel killed it for memory."""
    if stalled:
        return Restart.STALLED
    if oom:
        return Restart.OOM
    if asked:
        return Restart.RECYCLED
    if not ready:
        return Restart.BOOT
    return Restart.SIGNAL if os.WIFSIGNALED(status) else Restart.EXIT


def _row(column: int) -> int:
    return w.PAGE_WORDS + column * w.ROW_WORDS


def _text(name: str, labels: Mapping[str, str]) -> bytes:
    """The name and as many labels as there is room for."""
    kept = {"name": name}
    text = json.dumps(kept).encode()
    for key, value in labels.items():
        kept[key] = value[:_LABEL]
        longer = json.dumps(kept).encode()
        if len(longer) > _TEXT:
            break
        text = longer
    return text


def _read_row(words: memoryview, column: int) -> ModelRow | None:
    base = _row(column)
    for _ in range(_LOOKS if words[base + w.R_LENGTH] else 0):
        data = words[base : base + w.ROW_WORDS].tobytes()
        row = memoryview(data).cast("Q")
        text = data[8 * w.R_TEXT :][: row[w.R_LENGTH]]
        if zlib.crc32(text) == row[w.R_CHECK]:
            labels: dict[str, str] = json.loads(text)
            return ModelRow(column, labels.pop("name"), row[w.R_GENERATION], row[w.R_BYTES], labels)
    return None

"""One look at the whole scoreboard, and what is kept so that no counter ever goes backwards.

A slot or page that holds nonsense is told by its last good reading and counted in `broken`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from prefork.errors import SegmentCorrupt
from prefork.shm.masterpage import MasterReading
from prefork.shm.scoreboard import Reading, Scoreboard
from prefork.shm.words import WorkerState


@dataclass(frozen=True)
class Snapshot:
    """`slots`: each slot that exists, in order. `columns`: the name that a column of answers has."""

    master: MasterReading
    slots: tuple[Reading, ...]
    columns: Mapping[int, str]
    broken: int


class Watcher:
    """Doors: `look`, and `master` for who needs no more."""

    def __init__(self, board: Scoreboard) -> None:
        self._board = board
        self._slots: dict[int, Reading] = {}
        self._columns: dict[int, str] = {}

    def master(self) -> MasterReading:
        """Raises SegmentCorrupt."""
        return self._board.read_master()

    def look(self) -> Snapshot:
        """Raises SegmentCorrupt when the master's page is broken."""
        master, broken = self.master(), 0
        self._columns.update({row.column: row.name for row in master.models})
        slots = []
        for index in range(min(master.slots, self._board.slots)):
            try:
                self._slots[index] = self._board.read(index)
            except SegmentCorrupt:
                broken += 1
                if index not in self._slots:
                    continue
                self._slots[index] = replace(self._slots[index], state=WorkerState.GONE)
            slots.append(self._slots[index])
        return Snapshot(master, tuple(slots), dict(self._columns), broken)

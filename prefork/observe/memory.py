"""What a process holds for itself, as the kernel counts it: /proc/PID/smaps_rollup (proc(5)), read now and then.

The kernel walks all of the process's page tables for it and holds its map lock meanwhile, some milliseconds for a large
model; so an answer is kept for KEPT seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

KEPT = 5.0


@dataclass(frozen=True)
class Memory:
    """Bytes. `private`: of this process alone; `proportional`: that and its share of what it shares."""

    private: int
    proportional: int


class MemoryReader:
    """`read` is the door; it forgets processes that it was not asked about for KEPT seconds."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[float, Memory | None]] = {}

    def read(self, pid: int) -> Memory | None:
        """None when the process is gone or may not be looked into."""
        now = time.monotonic()
        self._kept = {key: kept for key, kept in self._kept.items() if now - kept[0] < KEPT}
        if pid not in self._kept:
            self._kept[pid] = (now, _read(pid))
        return self._kept[pid][1]


def _read(pid: int) -> Memory | None:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    bytes_of = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    return Memory(bytes_of["Private_Clean"] + bytes_of["Private_Dirty"], bytes_of["Pss"])

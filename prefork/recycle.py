"""When a worker has lived long enough: by age, by requests, by memory of its own. It is replaced without a gap then.

Runs in the master, once a second. Memory is read from the kernel (proc(5), smaps_rollup), which walks the page tables
of the whole process, so it is read rarely and only when there is a limit.
"""

from __future__ import annotations

from pathlib import Path

from prefork.child import Child
from prefork.config import ServerConfig
from prefork.shm import words as board
from prefork.shm.scoreboard import Scoreboard

LOOK = 10.0  # seconds between looks at a worker's memory


class Recycling:
    """`reason` is the only door."""

    def __init__(self, config: ServerConfig, scoreboard: Scoreboard) -> None:
        self._config = config
        self._board = scoreboard
        self._looked: dict[int, float] = {}  # by pid, when its memory was read

    def reason(self, child: Child, now: float) -> str:
        """Why this ready worker is to be replaced; nothing when it is not."""
        config = self._config
        age = now - (child.ready_at or now)
        if config.recycle_age and age >= config.recycle_age:
            return f"age {age:.0f} s, recycle_age is {config.recycle_age:g} s"
        if config.recycle_requests:
            done = self._board.peek(child.row, board.REQUESTS) - child.requests_before
            if done >= config.recycle_requests:
                return f"{done} requests, recycle_requests is {config.recycle_requests}"
        if config.recycle_private and now - self._looked.get(child.pid, 0.0) >= LOOK:
            self._looked = {pid: when for pid, when in self._looked.items() if now - when < 2 * LOOK} | {child.pid: now}
            if (private := private_bytes(child.pid)) >= config.recycle_private:
                return f"{private} bytes of its own, recycle_private is {config.recycle_private}"
        return ""


def private_bytes(pid: int) -> int:
    """Memory that is the process's alone, in bytes; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    kinds = ("Private_Clean:", "Private_Dirty:")
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(kinds))

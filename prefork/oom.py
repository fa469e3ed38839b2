"""Was it the kernel, for want of memory? Reads its counters of such kills and names them. Runs in the master.

A child that was killed by SIGKILL, not by us, while the counter of its control group went up by one that no other
child accounts for, was chosen by the out-of-memory killer. The kernel counts before it sends the signal (oom_kill.c),
so the count is there when the child is reaped. Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html
(memory.events), https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.oom_control), proc_vmstat(5).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from prefork import cgroups
from prefork.child import Child
from prefork.facts import mib

MEMORY = 30.0  # seconds that a kill is remembered: so long a large process may take to end


class OomWatch:
    """Doors: `look` (once a second) and `judge` (each death). `root` is where /proc and /sys are found."""

    def __init__(self, root: Path = cgroups.ROOT) -> None:
        self._source = next(_sources(root), None)
        self._seen = self._count()
        self._pending: list[float] = []  # when kills were seen that no child accounts for yet

    def look(self, now: float) -> None:
        """Take notice of kills; those of strangers in the same group are forgotten after a while."""
        count = self._count()
        self._pending += [now] * (count - self._seen)
        self._seen = count
        self._pending = [when for when in self._pending if now - when < MEMORY]

    def judge(self, child: Child, status: int, now: float, peak: int | None = None) -> None:
        """Set `child.oom` to words for its end if it was that. `status`: as waitpid(2) gave it; `peak`: the largest
        resident size that it had, in bytes, shared pages included."""
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL or child.killed:
            return
        self.look(now)
        if not self._pending:
            return
        self._pending.pop(0)
        held = f", it had {mib(peak)}" if peak else ""
        child.oom = f"killed by the kernel for want of memory ({self._place}{held})"

    @property
    def _place(self) -> str:
        folder = self._source[0].parent if self._source else Path()
        return "the machine" if folder.name == "proc" else f"control group {folder}"

    def _count(self) -> int:
        if self._source is None:
            return 0
        file, key = self._source
        return _value(file, key) or 0


def _sources(root: Path) -> Iterator[tuple[Path, str]]:
    """Files that count kills, the own group's first: version 2 counts all below it, version 1 its own processes."""
    for folder in cgroups.folders("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if _value(folder / name, "oom_kill") is not None:
                yield folder / name, "oom_kill"
    if _value(root / "proc/vmstat", "oom_kill") is not None:
        yield root / "proc/vmstat", "oom_kill"


def _value(file: Path, key: str) -> int | None:
    """The number behind `key` in a file of lines `key number`."""
    for line in cgroups.read(file).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdecimal():
            return int(value)
    return None

"""What the kernel says of processes: memory without a given segment, CPU time, descendants. Linux's /proc only.

Source: proc_pid_smaps(5) and Documentation/filesystems/proc.rst; clock_getcpuclockid(3).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")
CPUCLOCK_SCHED = 2  # include/linux/posix-timers.h: the clock of a whole process, in nanoseconds


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process. Mappings of the segment are left out of `pss` and `private`, but for pages in them that the
    process has written to, which are its own copies."""

    pss: int
    private: int


def memory(pid: int, segment: str = "") -> Memory:
    """`segment`: the path as /proc/PID/smaps shows it; "" leaves nothing out."""
    pss = private = 0
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if head := _HEAD.match(line):
            ours = bool(segment) and head[1].removesuffix(" (deleted)") == segment
            continue
        key, _, rest = line.partition(":")
        if key == "Pss" and not ours:
            pss += int(rest.split()[0])
        elif key in ("Private_Clean", "Private_Dirty") and not ours:
            private += int(rest.split()[0])
        elif key == "Anonymous" and ours:
            pss += int(rest.split()[0])
            private += int(rest.split()[0])
    return Memory(pss * 1024, private * 1024)


def allocated(path: str) -> int:
    """Bytes that a file in /dev/shm takes, mapped or not."""
    return Path(path).stat().st_blocks * 512


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads, also those that have ended."""
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)


def descendants(pid: int) -> list[int]:
    """The process and all below it that live."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += descendants(int(child))
    return found


def total_cpu(pids: Sequence[int]) -> float:
    return sum(cpu_seconds(pid) for pid in pids)

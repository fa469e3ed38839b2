"""Is there room for a segment? Asked before the first byte is written; reads /proc, /sys/fs/cgroup and statvfs only.

A segment that does not fit must be an error in the loader, not SIGBUS or the OOM killer later. For POSIX segments
posix_fallocate then makes the answer binding as far as the mount's limit goes. What no question can prevent: memory
that others take between the question and the writing, and a memory cgroup that reaches its limit while pages are
touched (the kernel kills then; shared memory is charged to the cgroup that touches it first).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prefork.errors import SegmentFull

SHM_DIR = Path("/dev/shm")  # where shm_open(3) puts things, fixed in glibc and musl
_CGROUP = Path("/sys/fs/cgroup")
_KERNEL = Path("/proc/sys/kernel")


Place = tuple[str, int, str]  # what it is, bytes left in it, how to get more


def check_posix(size: int) -> None:
    """Raises SegmentFull when /dev/shm or memory has less than `size` bytes left."""
    for place in posix():
        _check(size, *place)
    check_memory(size)


def check_sysv(size: int) -> None:
    """Raises SegmentFull when a limit of System V shared memory, proc_sys_kernel(5), or memory is below `size`."""
    for place in sysv():
        _check(size, *place)
    if len(rows := _rows()) >= _sysctl("shmmni"):
        raise SegmentFull(
            f"no room for a segment: kernel.shmmni allows {_sysctl('shmmni')} System V segments, {len(rows)} exist; "
            "raise it with sysctl -w kernel.shmmni=..., or remove what ipcs -m shows to be stale"
        )
    check_memory(size)


def check_memory(size: int) -> None:
    """Raises SegmentFull when the machine or a memory cgroup around this process has less than `size` bytes left."""
    _check(size, "memory and swap of the machine", machine_memory(), "free memory or use a smaller model")
    for where, left in cgroup_memory():
        _check(size, f"memory cgroup {where}", left, "raise its memory limit")


def posix() -> Iterator[Place]:
    """Room for POSIX segments, memory aside. Raises OSError when there is no such mount."""
    stat = os.statvfs(SHM_DIR)
    yield (
        f"{SHM_DIR} ({_mib(stat.f_blocks * stat.f_frsize)} in all)", stat.f_bavail * stat.f_frsize,
        "enlarge it (mount -o remount,size=..., docker run --shm-size, a memory-backed emptyDir)",
    )  # fmt: skip


def sysv() -> Iterator[Place]:
    """Room for one System V segment, then for all of them, memory aside."""
    page = os.sysconf("SC_PAGE_SIZE")
    taken = sum((int(row.split()[3]) + page - 1) // page for row in _rows())
    yield "kernel.shmmax", _sysctl("shmmax"), "raise it with sysctl -w kernel.shmmax=..."
    left = max(0, _sysctl("shmall") - taken) * page
    yield "kernel.shmall (a number of pages)", left, "raise it with sysctl -w kernel.shmall=..."


def machine_memory() -> int:
    """Bytes that the machine has left, swap included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(fields["MemAvailable"].split()[0]) + int(fields["SwapFree"].split()[0])) * 1024


def cgroup_memory() -> Iterator[tuple[str, int]]:
    """(folder, bytes left) of each cgroup with a memory limit around this process, versions 1 and 2.

    Page cache that can be dropped counts as left."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _climb(_CGROUP, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _climb(_CGROUP / "memory", path, *v1)


def _climb(root: Path, path: str, limit: str, usage: str, droppable: str) -> Iterator[tuple[str, int]]:
    inner = root / path.lstrip("/")
    for folder in (inner, *inner.parents):
        try:
            most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
            stat = (folder / "memory.stat").read_text().split()
        except OSError:  # the root has no limit; a container may see less than the path says
            most, used, stat = "max", 0, []
        if most != "max" and int(most) < 1 << 62:
            cache = int(stat[stat.index(droppable) + 1]) if droppable in stat else 0
            yield str(folder), max(0, int(most) - used + cache)
        if folder == root:
            return


def _rows() -> list[str]:
    return Path("/proc/sysvipc/shm").read_text().splitlines()[1:]


def _sysctl(name: str) -> int:
    return int((_KERNEL / name).read_text())


def _check(needed: int, what: str, available: int, cure: str) -> None:
    if needed > available:
        raise SegmentFull(
            f"no room for a segment of {_mib(needed)} ({needed} bytes): {what} has {_mib(available)} "
            f"({available} bytes) left; {cure}"
        )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"

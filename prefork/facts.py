"""What the machine, the control groups and the resource limits leave to this process, read once before a start.

Runs in the master and in what would be it; standard library only. Reads, judges nothing (preflight.py does). Sources:
getrlimit(2), proc(5), proc_sys_vm(5), core(5), cgroups(7), https://docs.kernel.org/mm/overcommit-accounting.html.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prefork import cgroups
from prefork.shm import room
from prefork.shm.segment import Kind

UNLIMITED = 1 << 63
MANY = 1 << 14  # tasks: more than any configuration needs
EXEMPT = 1 << 21 | 1 << 24  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE: the kernel does not count their processes


@dataclass(frozen=True, slots=True)
class Room:
    """What is `left` of something, in bytes or in tasks, and how to get more. `whole`: a limit for each process, of
    which nothing is taken yet."""

    where: str
    left: int
    advice: str
    whole: bool = False

    @property
    def found(self) -> str:
        """For a message: what there is, in bytes."""
        return f"{self.where} is {mib(self.left)}" if self.whole else f"{self.where} has {mib(self.left)} left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Limits are bytes or counts, UNLIMITED for none. `commit`: only where the kernel refuses to promise more memory
    than it has (overcommit_memory 2). `core_piped`: cores go to a program, whatever `core` says."""

    shm: tuple[Room, ...] = ()
    memory: tuple[Room, ...] = ()
    tasks: tuple[Room, ...] = ()
    commit: Room | None = None
    open_files: int = UNLIMITED
    address_space: int = UNLIMITED
    data: int = UNLIMITED
    file_size: int = UNLIMITED
    core: int = 0
    core_piped: bool = False
    max_map_count: int = UNLIMITED


def mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def read(kind: Kind, root: Path = cgroups.ROOT) -> Facts:
    """What holds for this process now. `root` is where /proc and /sys are found; what cannot be read limits nothing."""
    soft = {name: _limit(number)[0] for name, number in _LIMITS.items()}
    return Facts(
        shm=tuple(_shm(kind)),
        memory=tuple(_memory()),
        tasks=tuple(_tasks(root)),
        commit=_commit(root),
        open_files=open_files(),
        core_piped=cgroups.read(root / "proc/sys/kernel/core_pattern").startswith("|"),
        max_map_count=_number(root / "proc/sys/vm/max_map_count"),
        **soft,
    )


def open_files() -> int:
    """Descriptors that each of our processes may have: the master raises its own limit to the hard one."""
    return _limit(resource.RLIMIT_NOFILE)[1]


_LIMITS = {
    "address_space": resource.RLIMIT_AS,
    "data": resource.RLIMIT_DATA,
    "file_size": resource.RLIMIT_FSIZE,
    "core": resource.RLIMIT_CORE,
}


def _limit(number: int) -> tuple[int, int]:
    """Soft and hard."""
    soft, hard = resource.getrlimit(number)
    return _finite(soft), _finite(hard)


def _finite(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _number(file: Path) -> int:
    text = cgroups.read(file).strip()
    return int(text) if text.isdecimal() else UNLIMITED


def _shm(kind: Kind) -> Iterator[Room]:
    try:
        # of System V's limits shmmax is for a single segment, which is the loader's to ask about
        *_, place = room.posix() if kind == "posix" else room.sysv()
        yield Room(*place)
    except OSError:  # no such mount: the loader will say what is wrong with it
        return


def _memory() -> Iterator[Room]:
    yield Room("memory and swap of the machine", room.machine_memory(), "free memory or use a smaller model")
    for where, left in room.cgroup_memory():
        yield Room(f"control group {where}", left, "raise its memory limit (docker run --memory, MemoryMax=)")


def _tasks(root: Path) -> Iterator[Room]:
    for folder in cgroups.folders("pids", root):
        most, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        if most != UNLIMITED and used != UNLIMITED:
            yield Room(
                f"control group {folder} (pids.max {most})", max(0, most - used), "raise TasksMax= or pids_limit"
            )
    most = _limit(resource.RLIMIT_NPROC)[0]
    if most != UNLIMITED and os.getuid() != 0 and not _capabilities(root) & EXEMPT:
        left = most - _all_tasks(root)  # cheap to ask, and mostly enough
        if left < MANY:
            left = max(0, most - _tasks_of_user(root))
        yield Room(f"RLIMIT_NPROC ({most}, all of this user's)", left, "raise it (ulimit -u, LimitNPROC=)")


def _capabilities(root: Path) -> int:
    lines = cgroups.read(root / "proc/self/status").splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def _all_tasks(root: Path) -> int:
    """Of the machine: the fourth field of /proc/loadavg is `running/all`."""
    words = cgroups.read(root / "proc/loadavg").split()
    return int(words[3].partition("/")[2]) if len(words) > 3 else UNLIMITED


def _tasks_of_user(root: Path) -> int:
    count = 0
    for entry in (root / "proc").iterdir():
        if entry.name.isdecimal():
            fields = dict(line.partition(":")[::2] for line in cgroups.read(entry / "status").splitlines())
            if "Uid" in fields and int(fields["Uid"].split()[0]) == os.getuid():
                count += int(fields["Threads"])
    return count


def _commit(root: Path) -> Room | None:
    if _number(root / "proc/sys/vm/overcommit_memory") != 2:
        return None
    fields = dict(line.partition(":")[::2] for line in cgroups.read(root / "proc/meminfo").splitlines())
    left = (int(fields["CommitLimit"].split()[0]) - int(fields["Committed_AS"].split()[0])) * 1024
    advice = "raise vm.overcommit_ratio, or set vm.overcommit_memory to 0"
    return Room("what the kernel may promise (vm.overcommit_memory is 2)", max(0, left), advice)

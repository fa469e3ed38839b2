"""How many CPUs this process may use: the smaller of its CPU set and its control group's quota.

The host's count is wrong in a container: a pod of two CPUs on a machine of 160 would get 160 workers. A leaf for the
master; standard library only. Sources: sched_setaffinity(2), cgroups(7),
https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max),
https://docs.kernel.org/scheduler/sched-bwc.html (version 1's cpu.cfs_quota_us).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prefork.cgroups import folders, read


@dataclass(frozen=True, slots=True)
class Allowed:
    """`count` CPUs, at least 1, and the `reason` why not more."""

    count: int
    reason: str


def allowed(root: Path = Path("/"), affinity: int | None = None) -> Allowed:
    """The CPUs this process may use. `root` is where /proc and /sys are found and `affinity` the size of the CPU set
    (default: ask the kernel). What cannot be read limits nothing."""
    cpus = len(os.sched_getaffinity(0)) if affinity is None else affinity
    quota, source = min(_quotas(root), default=(float("inf"), ""))
    if quota >= cpus:
        return Allowed(max(1, cpus), f"CPU set of {cpus}")
    # Rounded down: a worker more than the quota pays for is a worker that the kernel throttles.
    return Allowed(max(1, int(quota)), f"quota of {quota:g} CPUs in {source}")


def _quotas(root: Path) -> Iterator[tuple[float, str]]:
    """Every quota this process is under, in CPUs, with the file that says so: its own group's and its ancestors'."""
    for folder in folders("cpu", root):
        yield from _version2(folder)
        yield from _version1(folder)


def _version2(folder: Path) -> Iterator[tuple[float, str]]:
    words = read(folder / "cpu.max").split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
        yield int(words[0]) / int(words[1]), str(folder / "cpu.max")


def _version1(folder: Path) -> Iterator[tuple[float, str]]:
    quota, period = read(folder / "cpu.cfs_quota_us").strip(), read(folder / "cpu.cfs_period_us").strip()
    if quota.isdecimal() and period.isdecimal() and int(period):  # -1: no quota
        yield int(quota) / int(period), str(folder / "cpu.cfs_quota_us")

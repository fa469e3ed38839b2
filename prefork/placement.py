"""Which CPUs a slot's worker runs on. Pure, but for `Topology.read` (sysfs), `settle` and `running_on` (this kernel).

The machine is cut into places: as many whole physical cores as a worker has threads, all on one NUMA node, with both
hyper-threads of each. The places take turns over the nodes, and slot i has place i modulo their number. So a slot has
its place whatever the number of workers, everybody has a core of their own before anybody shares one, and those who
share do so evenly. Computed once by the master, applied by the worker after the fork; every thread that the worker
starts later inherits it. Standard library only. Sources: sched_setaffinity(2),
https://docs.kernel.org/admin-guide/cputopology.html, https://docs.kernel.org/admin-guide/mm/numaperf.html.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import TypeAlias

Cpus: TypeAlias = frozenset[int]
Places: TypeAlias = tuple[Cpus, ...]

_CPUS, _NODES = "sys/devices/system/cpu", "sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class Topology:
    """The CPUs that a process may use. `nodes`: for each NUMA node its physical cores, each the set of its threads;
    CPUs that are not allowed are in none, and there are no empty cores or nodes."""

    nodes: tuple[tuple[Cpus, ...], ...]

    @classmethod
    def read(cls, root: Path = Path("/"), allowed: Iterable[int] | None = None) -> Topology:
        """`root` is where /sys is found and `allowed` the CPU set (default: this process's). A CPU of which sysfs says
        nothing is a core of its own; CPUs of no node, as on a kernel without NUMA, form one node together."""
        ours = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
        cores = {_siblings(root, cpu) & ours for cpu in ours}
        nodes = [_cpulist(folder / "cpulist") for folder in _node_folders(root)]
        nodes.append(ours.difference(*nodes))
        placed = (tuple(sorted((core for core in cores if min(core) in node), key=min)) for node in nodes)
        return cls(tuple(node for node in placed if node))

    def places(self, threads: int = 1) -> Places:
        """One place after the other for workers of `threads` threads each; at least one. A node with fewer cores than
        that is one place, and cores that are left over are spread over the places of their node."""
        by_node = [_cut(node, max(1, len(node) // threads)) for node in self.nodes]
        return tuple(place for turn in zip_longest(*by_node) for place in turn if place is not None)


def of(pin: str, threads: int) -> Places:
    """The places on this machine for `server.pin`; none when it is off."""
    return Topology.read().places(threads) if pin == "cores" else ()


def settle(places: Places, slot: int) -> str:
    """Keep this process, from here on, to its slot's place; the reason when the kernel does not let it, else "".

    A CPU set that was narrowed since the master started may have none of the place's CPUs; the worker then runs
    wherever it may. Called before a worker starts its threads, which inherit what holds for the one that makes them."""
    if not places:
        return ""
    place = places[slot % len(places)]
    try:
        os.sched_setaffinity(0, place)
    except OSError as e:
        return f"CPUs {written(place)}: {e.strerror}"
    return ""


def running_on(pid: int) -> str | None:
    """The CPUs that a process may run on now, as a list such as `0-3,8`; None when it is gone."""
    try:
        return written(os.sched_getaffinity(pid))
    except OSError:
        return None


def written(cpus: Iterable[int]) -> str:
    """The kernel's list form (cpuset(7)): `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def _cut(cores: Sequence[Cpus], count: int) -> list[Cpus]:
    """`cores` in `count` runs, as equal as they get; each run as the CPUs in it."""
    bounds = [index * len(cores) // count for index in range(count + 1)]
    return [frozenset(chain(*cores[low:high])) for low, high in pairwise(bounds)]


def _siblings(root: Path, cpu: int) -> Cpus:
    """All threads of the CPU's physical core."""
    return _cpulist(root / _CPUS / f"cpu{cpu}" / "topology/thread_siblings_list") | {cpu}


def _node_folders(root: Path) -> list[Path]:
    """In the order of their numbers."""
    found = (path for path in (root / _NODES).glob("node*") if re.fullmatch(r"node\d+", path.name))
    return sorted(found, key=lambda path: int(path.name[4:]))


def _cpulist(file: Path) -> Cpus:
    """`0-3,8` as numbers; none when the file is missing or says something else."""
    try:
        text = file.read_text().strip()
    except (OSError, ValueError):
        return frozenset()
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return frozenset()
    runs = (part.partition("-") for part in text.split(","))
    return frozenset(chain(*(range(int(low), int(high or low) + 1) for low, _, high in runs)))

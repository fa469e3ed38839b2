"""Places on machines as sysfs describes them, and a real process that is kept to one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from prefork.placement import Topology, of, running_on, settle, written

SMT_8 = [(0, 4), (1, 5), (2, 6), (3, 7)]  # one socket of four cores, threads numbered as on Intel desktops
TWO_NODES = [(n, n + 16) for n in range(16)]  # two sockets of eight cores: the second threads follow all first ones
NODES = {0: "0-7,16-23", 1: "8-15,24-31"}


def machine(root: Path, cores: Iterable[Sequence[int]], nodes: dict[int, str]) -> Path:
    """A tree with the files that a kernel would have for these cores (each the CPUs of its threads) and nodes."""
    for core in cores:
        for cpu in core:
            folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{written(core)}\n")
    for number, cpus in nodes.items():
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return root


def places(root: Path, allowed: Iterable[int], threads: int = 1) -> list[str]:
    return [written(place) for place in Topology.read(root, allowed).places(threads)]


def test_one_node_gives_whole_cores(tmp_path: Path) -> None:
    machine(tmp_path, SMT_8, {0: "0-7"})
    assert places(tmp_path, range(8)) == ["0,4", "1,5", "2,6", "3,7"]
    assert places(tmp_path, range(8), threads=2) == ["0-1,4-5", "2-3,6-7"]
    assert places(tmp_path, range(8), threads=3) == ["0-7"]


def test_neighbouring_threads_are_one_core(tmp_path: Path) -> None:
    """As hypervisors and POWER number them."""
    machine(tmp_path, [(0, 1), (2, 3), (4, 5)], {0: "0-5"})
    assert places(tmp_path, range(6)) == ["0-1", "2-3", "4-5"]


def test_two_nodes_take_turns(tmp_path: Path) -> None:
    machine(tmp_path, TWO_NODES, NODES)
    found = places(tmp_path, range(32))
    assert found[:4] == ["0,16", "8,24", "1,17", "9,25"]
    assert len(found) == len(set(found)) == 16
    pairs = places(tmp_path, range(32), threads=2)
    assert pairs[:3] == ["0-1,16-17", "8-9,24-25", "2-3,18-19"] and len(pairs) == 8


def test_no_place_crosses_a_node_and_none_is_wasted(tmp_path: Path) -> None:
    topology = Topology.read(machine(tmp_path, TWO_NODES, NODES), range(32))
    first, second = set(range(8)) | set(range(16, 24)), set(range(8, 16)) | set(range(24, 32))
    for threads in range(1, 20):
        found = topology.places(threads)
        assert all(place <= first or place <= second for place in found)
        assert Counter(cpu for place in found for cpu in place) == Counter(range(32))
        assert all(len(place) >= 2 * min(threads, 8) for place in found)


def test_a_cpu_set_with_holes(tmp_path: Path) -> None:
    """A core of which one thread is allowed is still a core; a node without allowed CPUs is none."""
    machine(tmp_path, TWO_NODES, NODES)
    assert places(tmp_path, {2, 3, 18, 8, 25, 31}) == ["2,18", "8", "3", "25", "31"]
    assert places(tmp_path, {9, 25, 10}) == ["9,25", "10"]
    assert places(tmp_path, {17}, threads=4) == ["17"]


def test_nodes_are_taken_by_number_and_may_be_empty(tmp_path: Path) -> None:
    """A node of memory alone has an empty list; node10 comes after node2."""
    machine(tmp_path, [(0,), (1,), (2,)], {10: "0", 2: "1", 0: "2", 3: ""})
    assert places(tmp_path, range(3)) == ["2", "1", "0"]


@pytest.mark.parametrize("text", ["", "junk", "3-", "-1", "1;2"])
def test_what_sysfs_does_not_say_makes_each_cpu_a_core(tmp_path: Path, text: str) -> None:
    assert places(tmp_path, {3, 1}) == ["1", "3"]
    machine(tmp_path, [], {0: text})
    folder = tmp_path / "sys/devices/system/cpu/cpu3/topology"
    folder.mkdir(parents=True)
    (folder / "thread_siblings_list").write_text(text)
    assert places(tmp_path, {3, 1}) == ["1", "3"]


def test_slots_beyond_the_places_share_them_evenly(tmp_path: Path) -> None:
    found = Topology.read(machine(tmp_path, SMT_8, {0: "0-7"}), range(8)).places()
    taken = Counter(found[slot % len(found)] for slot in range(10))
    assert sorted(taken.values()) == [2, 2, 3, 3]


def test_this_machine() -> None:
    ours = os.sched_getaffinity(0)
    assert frozenset().union(*Topology.read().places()) == ours
    assert of("off", 1) == () and of("cores", 1) == Topology.read().places(1)


def test_a_process_keeps_to_its_place() -> None:
    found = Topology.read().places()
    before = os.sched_getaffinity(0)
    try:
        for slot in range(len(found) + 1):
            assert settle(found, slot) == ""
            assert os.sched_getaffinity(0) == found[slot % len(found)]
            assert running_on(os.getpid()) == written(found[slot % len(found)])
        assert settle((), 0) == "" and os.sched_getaffinity(0) == found[0]
        assert settle((frozenset({10_000}),), 3) == "CPUs 10000: Invalid argument"
    finally:
        os.sched_setaffinity(0, before)


def test_nobody_is_nowhere() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert running_on(pid) is None


def test_lists() -> None:
    assert [written(cpus) for cpus in ([], [4], [1, 0], [0, 1, 2, 5, 7, 8])] == ["", "4", "0-1", "0-2,5,7-8"]

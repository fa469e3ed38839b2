"""The CPUs that a control group leaves, read from trees as kernels and container engines lay them out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefork.cpus import Allowed, allowed
from tests.trees import tree

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu,cpuacct"


def v1(folder: str, quota: str, period: str = "100000") -> dict[str, str]:
    return {f"{V1}/{folder}cpu.cfs_quota_us": f"{quota}\n", f"{V1}/{folder}cpu.cfs_period_us": f"{period}\n"}


V1_GROUP = {"proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a\n"}


@pytest.mark.parametrize(
    ("files", "count", "reason"),
    [
        ({}, 8, "CPU set of 8"),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, 8, "CPU set of 8"),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "200000 100000\n"}, 2, f"quota of 2 CPUs in {V2}/cpu.max"),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "250000 100000\n"}, 2, f"quota of 2.5 CPUs in {V2}/cpu.max"),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "50000 100000\n"}, 1, f"quota of 0.5 CPUs in {V2}/cpu.max"),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "9000000 100000\n"}, 8, "CPU set of 8"),
        # the tightest of the group and its ancestors
        (
            {
                "proc/self/cgroup": "0::/pod/c\n",
                f"{V2}/pod/cpu.max": "300000 100000\n",
                f"{V2}/pod/c/cpu.max": "max 100000\n",
            },
            3,
            f"quota of 3 CPUs in {V2}/pod/cpu.max",
        ),
        # a group outside of our namespace, and one whose path is not mounted: the mount is the container's own
        ({"proc/self/cgroup": "0::/../../x\n", f"{V2}/cpu.max": "9 3\n"}, 3, f"quota of 3 CPUs in {V2}/cpu.max"),
        ({"proc/self/cgroup": "0::/docker/1\n", f"{V2}/cpu.max": "9 3\n"}, 3, f"quota of 3 CPUs in {V2}/cpu.max"),
        # version 1
        ({**V1_GROUP, **v1("a/b/", "-1")}, 8, "CPU set of 8"),
        ({**V1_GROUP, **v1("a/b/", "400000")}, 4, f"quota of 4 CPUs in {V1}/a/b/cpu.cfs_quota_us"),
        ({**V1_GROUP, **v1("", "150000")}, 1, f"quota of 1.5 CPUs in {V1}/cpu.cfs_quota_us"),
        # both versions at once: version 2 without the cpu controller
        (
            {"proc/self/cgroup": "4:cpu,cpuacct:/\n0::/x\n", f"{V2}/unified/x/cgroup.procs": "1\n", **v1("", "200000")},
            2,
            f"quota of 2 CPUs in {V1}/cpu.cfs_quota_us",
        ),
        # nonsense limits nothing
        ({"proc/self/cgroup": "junk\n::\n0::/\n", f"{V2}/cpu.max": "1 2 3\n"}, 8, "CPU set of 8"),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "100000 0\n"}, 8, "CPU set of 8"),
        ({**V1_GROUP, **v1("a/b/", "400000", "")}, 8, "CPU set of 8"),
    ],
)  # fmt: skip
def test_quota(tmp_path: Path, files: dict[str, str], count: int, reason: str) -> None:
    found = allowed(tree(tmp_path, files), affinity=8)
    assert found == Allowed(count, reason.replace(" in ", f" in {tmp_path}/"))


def test_this_machine() -> None:
    found = allowed()
    assert 1 <= found.count <= len(os.sched_getaffinity(0))
    assert found.reason


def test_a_narrowed_cpu_set_is_seen(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert allowed(tmp_path) == Allowed(1, "CPU set of 1")
    finally:
        os.sched_setaffinity(0, before)

"""Limits as the kernel tells them: trees as kernels and container engines lay them out, real limits of children."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefork import cgroups, facts
from prefork.facts import UNLIMITED
from tests.trees import tree

ROOT = Path(__file__).parents[1]
TELL = """
import dataclasses, json, os, resource, sys
from prefork import facts
if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_NPROC, (50, 50))
    os.setresuid(*[int(sys.argv[1])] * 3)
print(json.dumps(dataclasses.asdict(facts.read("posix"))))
"""


def told(*wrap: str, user: str = "") -> dict[str, Any]:
    """The facts of a child under that wrap, or as a user that may have 50 tasks."""
    command = [*wrap, sys.executable, "-c", TELL, *([user] if user else [])]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(ran.stdout))


def test_limits_of_this_process() -> None:
    found = told("prlimit", "--nofile=100:200", "--as=900000000", "--data=800000000", "--core=4096", "--fsize=1048576")
    assert found["open_files"] == 200  # the hard one
    assert (found["address_space"], found["data"], found["core"]) == (900_000_000, 800_000_000, 4096)
    assert found["file_size"] == 1 << 20
    free = told("prlimit", "--as=unlimited", "--core=0")
    assert (free["address_space"], free["core"]) == (UNLIMITED, 0)


def test_room_of_this_machine() -> None:
    found = facts.read("posix")
    assert found.shm[0].where.startswith("/dev/shm (") and found.shm[0].left > 0
    assert found.memory[0].left > 0 and found.max_map_count >= 65530
    assert "kernel.shmall" in facts.read("sysv").shm[0].where


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_tasks_of_a_user() -> None:
    (mine,) = [room for room in told(user="65531")["tasks"] if "RLIMIT_NPROC (50" in room["where"]]
    assert mine["left"] == 49  # that process is the user's only one
    assert not [room for room in told(user="0")["tasks"] if "RLIMIT_NPROC" in room["where"]]  # root is exempt


@pytest.mark.parametrize(
    ("groups", "folder"),
    [
        ("0::/pod/c\n", "sys/fs/cgroup/pod/c"),
        ("8:pids:/a\n0::/\n", "sys/fs/cgroup/pids/a"),
        ("8:pids:/docker/1\n", "sys/fs/cgroup/pids"),  # the container's own group is the mount
        ("0::/../../x\n", "sys/fs/cgroup"),
    ],
)
def test_tasks_of_a_group(tmp_path: Path, groups: str, folder: str) -> None:
    files = {"proc/self/cgroup": groups, f"{folder}/pids.max": "100\n", f"{folder}/pids.current": "40\n"}
    (room,) = facts.read("posix", tree(tmp_path, files)).tasks
    assert room.left == 60 and "pids.max 100" in room.where and str(tmp_path / folder) in room.where


def test_no_limit_of_tasks(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/x"
    files = {"proc/self/cgroup": "0::/x\n", f"{group}/pids.max": "max\n", f"{group}/pids.current": "40\n"}
    assert facts.read("posix", tree(tmp_path, files)).tasks == ()


def test_what_the_kernel_may_promise(tmp_path: Path) -> None:
    meminfo = "MemTotal: 1000 kB\nCommitLimit:     900 kB\nCommitted_AS:    300 kB\n"
    root = tree(tmp_path, {"proc/meminfo": meminfo, "proc/sys/vm/overcommit_memory": "2\n"})
    commit = facts.read("posix", root).commit
    assert commit is not None and commit.left == 600 * 1024
    (root / "proc/sys/vm/overcommit_memory").write_text("0\n")
    assert facts.read("posix", root).commit is None


def test_where_cores_go(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/sys/kernel/core_pattern": "|/usr/lib/systemd/systemd-coredump %P\n"})
    assert facts.read("posix", root).core_piped
    (root / "proc/sys/kernel/core_pattern").write_text("core\n")
    assert not facts.read("posix", root).core_piped


def test_an_empty_tree_limits_nothing(tmp_path: Path) -> None:
    found = facts.read("posix", tmp_path)
    assert found.tasks == () and found.max_map_count == UNLIMITED and found.commit is None
    assert found.open_files == facts.read("posix").open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_folders_climb_from_the_own_group(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "5:cpu,memory:/a/b\n0::/s\n"})
    for folder in ("cpu,memory/a/b", "memory/a", "unified/s"):
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True)
    found = [str(folder.relative_to(root / "sys/fs/cgroup")) for folder in cgroups.folders("memory", root)]
    assert found == ["cpu,memory/a/b", "cpu,memory/a", "cpu,memory", "memory/a", "memory", ".", "unified/s", "unified"]

"""A server under limits: resource limits, control groups and mounts of the tests' own, made around its process.

What the system refuses to give (no root, no version 1 or delegated version 2 hierarchy) is a skip with the reason.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from prefork import cgroups
from tests.roles.server import Server

ENTER = (
    "sh",
    "-c",
    'for g; do shift; [ "$g" = -- ] && break; echo $$ > "$g/cgroup.procs" || exit; done; exec "$@"',
    "sh",
)


class Confined(Server):
    """`wrap`: a command that becomes the one behind it."""

    wrap: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        return [*self.wrap, *super().command]

    def within(self, *wrap: str) -> Confined:
        self.wrap = (*self.wrap, *wrap)
        return self


@contextlib.contextmanager
def group(controller: str, settings: Mapping[str, str]) -> Iterator[Path]:
    """A control group below our own with these files set; removed at the end, so it has to be empty then."""
    own = next(cgroups.folders(controller), None)
    if own is None:
        pytest.skip(f"no control group of {controller} is mounted")
    folder = own / f"prefork-test-{controller}-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as e:
        pytest.skip(f"a control group below {own} is refused: {e.strerror}")
    try:
        try:
            for name, value in settings.items():
                (folder / name).write_text(value)
        except OSError as e:
            pytest.skip(f"control group {folder} cannot be set up: {e}")
        yield folder
    finally:
        folder.rmdir()


def memory(size: int) -> contextlib.AbstractContextManager[Path]:
    """A group that may have `size` bytes; what takes more is killed."""
    if version1("memory"):
        return group("memory", {"memory.limit_in_bytes": str(size)})
    return group("memory", {"memory.max": str(size), "memory.swap.max": "0"})


def quota(percent: int) -> contextlib.AbstractContextManager[Path]:
    """A group that may compute that much of one CPU's time."""
    if version1("cpu"):
        return group("cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(1000 * percent)})
    return group("cpu", {"cpu.max": f"{1000 * percent} 100000"})


def version1(controller: str) -> bool:
    own = next(cgroups.folders(controller), None)
    return own is not None and not (own / "cgroup.controllers").exists()


def enter(*groups: Path) -> tuple[str, ...]:
    """A wrap that goes into these groups first."""
    return (*ENTER, *map(str, groups), "--")


@contextlib.contextmanager
def mounted(size: str) -> Iterator[tuple[tuple[str, ...], Path]]:
    """A mount namespace with a /dev/shm of that size that outlives the server: a wrap that goes into it, and the folder
    where we see what is left there."""
    script = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && echo ready && read line"
    holder = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != b"ready\n":
            pytest.skip(f"a mount namespace is refused: {holder.stderr.read().decode().strip()}")
        yield ("nsenter", "-t", str(holder.pid), "-m"), Path(f"/proc/{holder.pid}/root/dev/shm")
    finally:
        holder.communicate()

"""No room: refused before the first byte, by limits set in namespaces of the tests' own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from prefork.errors import SegmentFull
from prefork.shm import room
from prefork.shm.owner import Owner
from prefork.shm.segment import Kind
from prefork.shm.writer import create

ATTEMPT = """
from prefork.errors import SegmentFull
def attempt(size):
    try:
        with create(kind, [("a", size)], Owner.current(), 1, model):
            return "fits"
    except SegmentFull as e:
        return str(e)
def used():
    stat = os.statvfs("/dev/shm")
    return stat.f_blocks - stat.f_bfree
"""
SMALL = (*("sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'), "sh")


def test_a_small_mount(start: Callable[..., Any], isolate: Callable[..., tuple[str, ...]]) -> None:
    code = ATTEMPT + "say(attempt(1 << 20)); say(used()); say(attempt((1 << 20) - 65536)); say(used())"
    actor = start(code, "posix", wrap=(*isolate("-m", "-f"), *SMALL))
    assert actor.line() == (
        "no room for a segment of 1.1 MiB (1114112 bytes): /dev/shm (1.0 MiB in all) has 1.0 MiB (1048576 bytes) left; "
        "enlarge it (mount -o remount,size=..., docker run --shm-size, a memory-backed emptyDir)"
    )
    assert [actor.line() for _ in range(3)] == ["0", "fits", "0"]
    assert actor.end() == 0


def test_a_mount_that_fills_up_after_the_question(
    start: Callable[..., Any], isolate: Callable[..., tuple[str, ...]]
) -> None:
    code = (
        ATTEMPT
        + "from prefork.shm import room; room.check_posix = lambda size: None; say(attempt(1 << 20)); say(used())"
    )
    actor = start(code, "posix", wrap=(*isolate("-m", "-f"), *SMALL))
    assert "No space left on device" in actor.line()
    assert actor.line() == "0"
    assert actor.end() == 0


@pytest.mark.parametrize(("limit", "value"), [("shmmax", "100000"), ("shmall", "20"), ("shmmni", "0")])
def test_a_kernel_limit(
    start: Callable[..., Any], isolate: Callable[..., tuple[str, ...]], limit: str, value: str
) -> None:
    wrap = (*isolate("-i", "-f"), "sh", "-c", f'echo {value} > /proc/sys/kernel/{limit} && exec "$@"', "sh")
    actor = start(ATTEMPT + "say(attempt(100000)); say(len(sysv.rows()))", "sysv", wrap=wrap)
    line = actor.line()
    assert line.startswith("no room for a segment")
    assert f"kernel.{limit}" in line
    assert f"sysctl -w kernel.{limit}=" in line
    assert actor.line() == "0"


def test_more_than_memory(kind: Kind, model: str) -> None:
    with pytest.raises(SegmentFull, match=r"no room for a segment of .* left; "):
        create(kind, [("a", 1 << 50)], Owner.current(), 1, model)


def test_memory_is_asked_of_machine_and_cgroups() -> None:
    room.check_memory(os.sysconf("SC_PAGE_SIZE"))
    with pytest.raises(SegmentFull, match="memory and swap of the machine"):
        room.check_memory(1 << 60)
    assert all(left >= 0 for _, left in room.cgroup_memory())

"""Fixtures of the black-box tests: places short enough for Unix sockets, and proof that no process is left."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prefork.shm.sweep import list_segments
from tests.roles.server import Server
from tests.roles.wire import Wire


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    """No child of the tests and no segment survives a module."""
    before = {info.name for info in list_segments()}
    yield
    ours = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    assert [child.cmdline() for child in ours if "prefork" in child.cmdline()] == []
    mine = [info for info in list_segments() if info.name not in before and not info.alive]
    assert [info.name for info in mine] == []


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pf-"))
    yield folder
    left = end_servers(folder)
    shutil.rmtree(folder)
    assert left == [], "the test left its server"


def end_servers(folder: Path) -> list[list[str]]:
    """Kill the servers of this folder that a failed test has left; their command lines."""
    left = []
    for child in psutil.Process().children():
        if child.status() != psutil.STATUS_ZOMBIE and any(str(folder) in part for part in child.cmdline()):
            left.append(child.cmdline())
            child.kill()
            child.wait()
    return left


@pytest.fixture(scope="module")
def module_place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pf-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def demo(module_place: Path) -> Iterator[Server]:
    """One server of the demo model with two workers, for tests that leave it as it is."""
    with Server(module_place, "--workers", "2") as server:
        yield server


@pytest.fixture
def wire(demo: Server) -> Iterator[Wire]:
    with Wire(demo.address) as found:
        yield found

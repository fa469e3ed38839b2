"""Real processes for the tests of shared memory, and the proof after each test that nothing is left behind."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefork.shm import posix, sysv
from prefork.shm.owner import Owner
from prefork.shm.segment import Kind, SegmentRef
from prefork.shm.sweep import list_segments
from prefork.shm.writer import create

ROOT = Path(__file__).parents[2]
SECTIONS = [("weights", 200_000), ("graph", 65536), ("manifest", 17), ("empty", 0)]
PRELUDE = """
import os, signal, sys
from pathlib import Path
from prefork.shm import posix, sysv
from prefork.shm.owner import Owner
from prefork.shm.segment import SegmentRef, attach, hold, retire
from prefork.shm.sweep import list_segments, sweep
from prefork.shm.writer import create
kind, model = sys.argv[1:3]
sections = [("weights", 200_000), ("graph", 65536), ("manifest", 17), ("empty", 0)]
def say(*words):
    print(*words, flush=True)
def wait():
    sys.stdin.read()
def fill(writer):
    for name, size in sections:
        writer.fill(name, bytes([len(name)]) * size)
"""


class Actor:
    """A Python process that runs `code` after PRELUDE; it says lines, and waits for our end of its stdin to close."""

    def __init__(self, code: str, *args: str, wrap: tuple[str, ...] = ()) -> None:
        script = PRELUDE + textwrap.dedent(code)
        self.process = subprocess.Popen(
            [*wrap, sys.executable, "-c", script, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.pid = self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the actor ended with {self.process.wait()}"
        return line.strip()

    def ref(self) -> SegmentRef:
        kind, name, size = self.line().split()
        return SegmentRef("posix" if kind == "posix" else "sysv", name, int(size))

    def kill(self) -> None:
        """kill -9, and wait until it and everything that shares its stdout is gone."""
        self.process.kill()
        self.end()

    def end(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        if not self.process.stdout.closed:
            self.process.stdout.read()
            self.process.stdout.close()
        return self.process.wait()


@pytest.fixture(params=["posix", "sysv"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return "posix" if request.param == "posix" else "sysv"


@pytest.fixture
def model() -> Iterator[str]:
    """A model name that no other test has; afterwards no segment of it may exist."""
    name = f"test.{secrets.token_hex(8)}"
    before = {row.name for row in sysv.rows() if row.ours}
    yield name
    left = [info for info in list_segments() if info.model == name or (info.model is None and info.name not in before)]
    assert left == []
    assert [row for row in sysv.rows() if row.creator == os.getpid()] == []


@pytest.fixture
def start(model: str) -> Iterator[Callable[..., Actor]]:
    """Start an Actor(code, kind, model, ...); it is killed at the end, should it still live."""
    actors: list[Actor] = []

    def start_one(code: str, kind: str, *args: str, wrap: tuple[str, ...] = ()) -> Actor:
        actors.append(Actor(code, kind, model, *args, wrap=wrap))
        return actors[-1]

    yield start_one
    for actor in actors:
        actor.kill()


@pytest.fixture
def published(kind: Kind, model: str) -> Iterator[SegmentRef]:
    """A published segment of ours, kept living by its writer, removed at the end."""
    with create(kind, SECTIONS, Owner.current(), 7, model) as writer:
        for name, size in SECTIONS:
            writer.fill(name, bytes([len(name)]) * size)
        ref = writer.publish()
        yield ref
    if kind == "posix":
        posix.remove(ref.name)
    else:
        sysv.remove(ref.name)


@pytest.fixture
def overwrite(published: SegmentRef) -> Callable[[int, bytes], bytes]:
    """Write into the published segment as someone with the right to could; gives what was there."""

    def write(offset: int, data: bytes) -> bytes:
        if published.kind == "posix":
            with Path(posix.path_of(published.name)).open("r+b", buffering=0) as file:
                file.seek(offset)
                old = file.read(len(data))
                file.seek(offset)
                file.write(data)
                return old
        import sysv_ipc

        memory = sysv_ipc.attach(int(published.name))
        with memoryview(memory) as view:
            old = bytes(view[offset : offset + len(data)])
            view[offset : offset + len(data)] = data
        memory.detach()
        return old

    return write


def namespace(*flags: str) -> tuple[str, ...]:
    """A command prefix that runs in new namespaces, or a skip with the reason where the system refuses."""
    user = () if os.geteuid() == 0 else ("-U", "-r")
    prefix = ("unshare", *user, *flags, "--kill-child=SIGKILL")
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode != 0:
        pytest.skip(f"unshare {' '.join(flags)} is refused: {done.stderr.strip()}")
    return prefix


@pytest.fixture
def isolate() -> Callable[..., tuple[str, ...]]:
    return namespace

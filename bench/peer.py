"""A helper process of a bench: `python -m bench.ROLE`, one JSON object a line each way, gone when its input ends.

`Peer` is the bench's side; `answer` is the helper's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PATIENCE = 10.0  # seconds for a helper to leave when its input has ended


class PeerError(Exception):
    """The helper ended, or said what cannot be understood."""


class Peer:
    """`pid` is the helper's. It says `hello` first, when it is ready."""

    def __init__(self, role: str, *args: str) -> None:
        env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", role, *args]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
        self._role = role
        self.pid = self._process.pid

    def __enter__(self) -> Peer:
        self.hello = self.hear()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def hear(self) -> dict[str, Any]:
        """The next thing it says. Raises PeerError when it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self._role} ended with {self._process.wait()}")
        return dict(json.loads(line))

    def tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def ask(self, **what: Any) -> dict[str, Any]:
        self.tell(**what)
        return self.hear()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def peers(count: int, role: str, *args: str) -> Iterator[list[Peer]]:
    """Several helpers of one role, started together; all have said hello."""
    made = [Peer(role, *args) for _ in range(count)]
    try:
        for peer in made:
            peer.hello = peer.hear()
        yield made
    finally:
        for peer in made:
            peer.close()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def answer(act: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each line with what `act` gives, until the bench closes our input."""
    for line in sys.stdin:
        say(**act(json.loads(line)))


def forked(act: Callable[[], object], count: int) -> list[int]:
    """The pids of `count` children of this helper that have acted; each ends with the helper's input."""
    read, write = os.pipe()
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            act()
            os.write(write, b".")
            os.read(0, 1)
            os._exit(0)
        pids.append(pid)
    done = 0
    while done < count:
        done += len(os.read(read, count))
    return pids

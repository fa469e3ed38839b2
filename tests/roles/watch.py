"""Facts to wait for: a line of the log, the end of a process, a state of the server. Never the clock.

Each wait blocks on a descriptor and ends in an AssertionError when the server dies first or nothing comes for WATCHDOG
seconds; a test that hangs says what it waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tests.roles.server import Server

WATCHDOG = 60.0  # seconds after which a wait is given up
ATTEMPTS = 3000  # looks at something that has no descriptor to wait for, LOOK_MS apart
LOOK_MS = 10
IN_MODIFY, IN_CREATE, IN_MOVED = 0x2, 0x100, 0xC0  # linux/inotify.h
T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def end_of(pid: int) -> Iterator[int]:
    """A descriptor that turns readable when the process ends."""
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def wait_gone(pid: int) -> None:
    """Until the process has ended; at once when it is gone."""
    try:
        with end_of(pid) as fd:
            assert select.select([fd], [], [], WATCHDOG)[0], f"process {pid} does not end"
    except ProcessLookupError:
        return


class LogWatch:
    """The server's log from now on. Made before the deed, asked after it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._fd = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        folder = os.fsencode(server.log_file.parent)
        assert _libc.inotify_add_watch(self._fd, folder, IN_MODIFY | IN_CREATE | IN_MOVED) >= 0
        self._seen = len(server.log()) if server.log_file.exists() else 0

    def __enter__(self) -> LogWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def wait(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next line of that event whose fields have these values; lines before it are passed over."""
        with self._end() as end:
            while True:
                if found := self._next(event, fields):
                    return found
                ready = select.select([self._fd, *end], [], [], WATCHDOG)[0]
                if end and end[0] in ready and not (found := self._next(event, fields)):
                    raise AssertionError(f"the server ended before {event!r}: {self._server.said()}")
                assert ready, f"{event!r} {fields} does not come: {self._server.said()}"
                with contextlib.suppress(BlockingIOError):
                    os.read(self._fd, 65536)

    @contextlib.contextmanager
    def _end(self) -> Iterator[list[int]]:
        process = self._server.process
        if process is None or process.poll() is not None:
            yield []
            return
        with end_of(process.pid) as fd:
            yield [fd]

    def _next(self, event: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        lines = self._server.log()[self._seen :] if self._server.log_file.exists() else []
        for line in lines:
            self._seen += 1
            if line["event"] == event and all(line.get(key) == value for key, value in fields.items()):
                return line
        return None


def until(server: Server, look: Callable[[], T | None], what: str) -> T:
    """What `look` gives, once it is something true. For facts that announce themselves nowhere."""
    with end_of(server.pid) as end:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        for _ in range(ATTEMPTS):
            if found := look():
                return found
            assert not poll.poll(LOOK_MS), f"the server ended before {what}: {server.said()}"
    raise AssertionError(f"never: {what}")


def row(server: Server, slot: int = 0) -> dict[str, Any]:
    """The status of one slot."""
    return dict(server.status()["workers"][slot])


def until_row(server: Server, slot: int = 0, **fields: Any) -> dict[str, Any]:
    """The slot's status, once these fields have these values."""

    def look() -> dict[str, Any] | None:
        found = row(server, slot)
        return found if all(found[key] == value for key, value in fields.items()) else None

    return until(server, look, f"slot {slot}: {fields}")


def children_of(pid: int) -> list[int]:
    """Living children by pid."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []

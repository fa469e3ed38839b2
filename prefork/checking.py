"""Reads every byte of segments against its checksums while their sessions are being opened. Runs in the template, or in
a worker that opens the models itself, and there in a forked child, so that a second core can do it.

Nothing that the opening gives may be used before the checking is over. What it finds wrong goes before an error of the
opening, whose cause it is then. The opening itself needs sections that are checked already: see attach.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from prefork.child import PR_SET_PDEATHSIG, describe_exit, prctl
from prefork.errors import SegmentCorrupt
from prefork.shm.segment import Segment

SMALL = 16 << 20  # bytes; verified sooner than a process of that many pages is forked and reaped


@contextmanager
def checked(segments: Sequence[Segment]) -> Iterator[None]:
    """Verify while the block runs, and wait for that at its end. To be entered before the block makes threads.

    Raises SegmentCorrupt naming what does not hold."""
    if sum(segment.ref.size for segment in segments) < SMALL:
        for segment in segments:
            segment.verify()
        yield
        return
    read, write = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _verify(segments, write, parent)
    os.close(write)
    try:
        yield
    finally:
        _finish(pid, read)


def _verify(segments: Sequence[Segment], line: int, parent: int) -> NoReturn:
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            for segment in segments:
                segment.verify()
            code = 0
    except SegmentCorrupt as e:
        os.write(line, e.message.encode()[: os.fpathconf(line, "PC_PIPE_BUF")])
    finally:
        os._exit(code)


def _finish(pid: int, read: int) -> None:
    with os.fdopen(read, "rb") as line:
        said = line.read().decode()
    _, status = os.waitpid(pid, 0)
    if status:
        raise SegmentCorrupt(said or f"the process that verified the segments ended early: {describe_exit(status)}")

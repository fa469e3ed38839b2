"""Work that must not slow down those who serve: done by a thread of the lowest priority, of which nothing is left.

Used by a process that has something dear to do before it has to be quick, and must have one thread afterwards. On Linux
a thread has a priority of its own (setpriority(2), "C library/kernel differences"), so the process is quick again
without the privilege that it would need after nice(2).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
LOWEST = 19
PATIENCE = 1.0  # seconds for the kernel to let go of a thread that has ended; it takes microseconds


def quietly(deed: Callable[[], T]) -> T:
    """What `deed` gives, or raises. It runs in another thread, which is gone when this returns."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        try:
            results.append(deed())
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    _until_gone(thread.native_id)
    for error in errors:
        raise error
    return results[0]


def _until_gone(thread: int | None) -> None:
    """`join` returns when the interpreter has let go, a little before the kernel does."""
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/self/task/{thread}").exists() and time.monotonic() < end:
        os.sched_yield()

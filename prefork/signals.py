"""Signals as the master's loop takes them: in order, one after the other, never in a handler.

Runs in the master. A handler only appends to a deque; the interpreter's wake-up descriptor (signal.set_wakeup_fd) ends
the loop's wait. The socket may be full, which loses nothing: what was sent stands in the deque.
"""

from __future__ import annotations

import selectors
import signal
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

HANDLED = ("TERM", "INT", "QUIT", "HUP", "USR1", "USR2", "TTIN", "TTOU", "CHLD", "WINCH")


class Signals:
    """From now on HANDLED are taken here. `arrived` empties the queue."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._arrived: deque[int] = deque()
        self._wake, self._wake_in = socket.socketpair()
        for sock in (self._wake, self._wake_in):
            sock.setblocking(False)
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        for name in HANDLED:
            signal.signal(getattr(signal, f"SIG{name}"), lambda number, frame: self._arrived.append(number))
        selector.register(self._wake, selectors.EVENT_READ, self._drain)

    def arrived(self) -> Iterator[signal.Signals]:
        """Those that have come, the oldest first; also those that come meanwhile."""
        while self._arrived:
            yield signal.Signals(self._arrived.popleft())

    def close(self) -> None:
        """Wake nobody any more."""
        signal.set_wakeup_fd(-1)

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

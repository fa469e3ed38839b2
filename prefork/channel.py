"""The child's end of its line to the master: JSON datagrams, descriptors beside them. The master's end is child.py.

Used by every forked role. Nothing here blocks except `Channel.send`, whose messages are few and small.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

MESSAGE_BYTES = 64 * 1024
MAX_FDS = 16


class Channel:
    """`closed` turns true when the master's end is gone, which means that the master is dead."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. A dead master is noticed by `receive`, not here."""
        try:
            self._sock.send(json.dumps(message).encode())
        except OSError:
            self.closed = True

    def wait(self) -> None:
        """Block until the master has said something or is dead."""
        self._sock.setblocking(True)
        with contextlib.suppress(OSError):
            self._sock.recv(MESSAGE_BYTES)

    def receive(self) -> list[tuple[dict[str, Any], list[int]]]:
        """All messages that have arrived, each with its descriptors, which then belong to the caller."""
        messages: list[tuple[dict[str, Any], list[int]]] = []
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, MESSAGE_BYTES, MAX_FDS, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except OSError:
                data, fds = b"", []
            if not data:
                self.closed = True
                return messages
            messages.append((json.loads(data), fds))

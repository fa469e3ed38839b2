"""The child's end of its line to the master: JSON datagrams, descriptors beside them. The master's end is child.py.

Used by every forked role. Nothing here blocks except `Channel.send`, whose messages are few and small.
"""

from __future__ import annotations

import json
import select
import socket
from array import array
from typing import Any

MESSAGE_BYTES = 64 * 1024
MAX_FDS = 16


def encode(message: dict[str, Any]) -> bytes:
    """One message. At most 4 bytes a character: what is cut to 8000 characters stays within MESSAGE_BYTES."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "backslashreplace")


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
            self._sock.send(encode(message))
        except OSError:
            self.closed = True

    def wait(self) -> None:
        """Block until there is something to receive, or the master is dead."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.poll()

    def _receive_now(self) -> tuple[bytes, list[int]]:
        """socket.recv_fds takes flags and passes none on (CPython 3.11)."""
        room = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)
        data, ancillary, _, _ = self._sock.recvmsg(MESSAGE_BYTES, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        fds = array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        return data, list(fds)

    def receive(self, most: int | None = None) -> list[tuple[dict[str, Any], list[int]]]:
        """The messages that have arrived, each with its descriptors, which then belong to the caller."""
        messages: list[tuple[dict[str, Any], list[int]]] = []
        while most is None or len(messages) < most:
            try:
                data, fds = self._receive_now()
            except BlockingIOError:
                return messages
            except OSError:
                data, fds = b"", []
            if not data:
                self.closed = True
                return messages
            messages.append((json.loads(data), fds))
        return messages

"""The control socket inside the master's loop: reads one line, answers one line, closes. Never blocks, never grows.

The protocol's bytes are control.py's; here are only descriptors and bounds. A client that floods or stalls costs a few
descriptors for a few seconds.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from prefork import control
from prefork.errors import Internal, PreforkError

MAX_CLIENTS = 16
PATIENCE = 5.0  # seconds a client has for its line, and for reading the answer


class _Client:
    __slots__ = ("end", "inbox", "outbox", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = b""
        self.outbox = memoryview(b"")
        self.end = time.monotonic() + PATIENCE


class ControlServer:
    """`answer(request) -> result` may raise PreforkError; the client gets its code and message."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        answer: Callable[[control.Request], dict[str, Any]],
    ) -> None:
        self._sock = sock
        self._selector = selector
        self._answer = answer
        self._clients: set[_Client] = set()
        self._deaf = self._closed = False
        selector.register(sock, selectors.EVENT_READ, self._accept)

    @property
    def closing(self) -> bool:
        """Closed, and somebody still waits for an answer."""
        return self._closed and bool(self._clients)

    def close(self) -> None:
        """Take no more clients; those that are here are answered."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._sock)
        self._closed = True

    def expire(self, now: float) -> None:
        """Drop the clients whose time is over."""
        if self._deaf and not self._closed:
            self._deaf = False
            self._selector.register(self._sock, selectors.EVENT_READ, self._accept)
        for client in [client for client in self._clients if client.end <= now]:
            self._drop(client)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor left: not again before the next look, or the loop would spin
            self._selector.unregister(self._sock)
            self._deaf = True
            return
        if len(self._clients) >= MAX_CLIENTS:
            sock.close()
            return
        sock.setblocking(False)
        client = _Client(sock)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(client))

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(65536)
        except OSError:
            data = b""
        client.inbox += data
        if b"\n" not in client.inbox and data and len(client.inbox) <= control.MAX_REQUEST:
            return
        if not client.inbox:
            self._drop(client)
            return
        client.outbox = memoryview(self._reply(client.inbox.partition(b"\n")[0]))
        self._selector.modify(client.sock, selectors.EVENT_WRITE, lambda: self._write(client))

    def _reply(self, line: bytes) -> bytes:
        try:
            return control.encode_reply(self._answer(control.parse_request(line)))
        except PreforkError as e:
            return control.encode_reply(e)
        except Exception as e:  # the master outlives its own bugs
            return control.encode_reply(Internal(f"{type(e).__name__}: {e}"))

    def _write(self, client: _Client) -> None:
        try:
            client.outbox = client.outbox[client.sock.send(client.outbox) :]
        except BlockingIOError:
            return
        except OSError:
            client.outbox = memoryview(b"")
        if not client.outbox:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
        client.sock.close()

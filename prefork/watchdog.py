"""Feeding systemd's watchdog only while the service serves: the master asks its own workers, as a client would.

Runs in the master, within its loop: nothing blocks, and no codec is imported, for a question of 24 bytes and an answer
of 26 are known beforehand (PROTOCOL.md, SERVER_READY in protobuf). A master that is frozen asks nothing; workers that
all hang answer nothing; in both cases the supervisor waits in vain and starts everything anew. While the server loads,
starts or stops, the turning of the loop is enough. Source: sd_watchdog_enabled(3).
"""

from __future__ import annotations

import errno
import math
import selectors
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from prefork.log import Logger
from prefork.notify import Notifier
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import TICK_NS
from prefork.slots import Slot

Place: TypeAlias = tuple[int, Any]  # an address family, and what connect(2) takes in it

ATTEMPTS = 3  # probes within one interval: two may fail
KILL_TIME = 5.0  # seconds beyond worker_timeout within which the master has killed a silent worker and reaped it

_HEADER = struct.Struct("<4sBBBBQII")  # magic, version, codec, kind, flags, request id, length, time-out
_START, _PROTOBUF = b"PFRK\x01", 2
_SERVER_READY, _SERVER_READY_REPLY, _GOAWAY, _ERROR = 9, 10, 102, 103
_READY = b"\x08\x01"  # ServerReadyResponse: field 1, a bool, true
QUESTION = _HEADER.pack(b"PFRK", 1, _PROTOBUF, _SERVER_READY, 0, 1, 0, 0)


def answered(data: bytes) -> bool | None:
    """What the bytes of an answer say: a worker is ready, or at least able to refuse (True); it is not, or speaks
    something else (False); there must come more (None)."""
    while len(data) >= _HEADER.size:
        _, _, _, kind, _, _, length, _ = _HEADER.unpack_from(data)
        body, rest = data[_HEADER.size :][:length], data[_HEADER.size + length :]
        if not data.startswith(_START):
            return False
        if kind == _ERROR:  # its queue or its connections are full: too much work, not too little life
            return True
        if kind == _SERVER_READY_REPLY and len(body) == length:
            return body == _READY
        if kind != _GOAWAY:
            return None if kind == _SERVER_READY_REPLY else False
        data = rest
    return None


def stalled(slots: Iterable[Slot], board: Scoreboard, timeout: float, now: float) -> bool:
    """Whether a worker that should long be killed for its silence is there all the same, as one that the kernel does
    not let go. `timeout`: seconds, 0 for any; `now`: monotonic seconds."""
    patience = timeout + KILL_TIME if timeout else math.inf
    children = [slot.child for slot in slots if slot.ready and slot.child is not None]
    return any(now - board.peek(child.row, TICK_NS) * 1e-9 > patience for child in children)


class Probe:
    """One question to one address; `done(verdict)` is called once, unless `close` comes first."""

    def __init__(self, place: Place, selector: selectors.BaseSelector, done: Callable[[bool], None]) -> None:
        """Raises OSError when there is no connection to be had."""
        self._selector, self._done = selector, done
        self._data = b""
        family, where = place
        self._sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        code = self._sock.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            self._sock.close()
            raise OSError(code, errno.errorcode.get(code, str(code)))
        selector.register(self._sock, selectors.EVENT_WRITE, self._ask)

    def _ask(self) -> None:
        try:
            self._sock.send(QUESTION)
        except OSError:
            self._end(False)
            return
        self._selector.modify(self._sock, selectors.EVENT_READ, self._hear)

    def _hear(self) -> None:
        try:
            data = self._sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._data += data
        verdict = answered(self._data)
        if verdict is not None or not data:
            self._end(bool(verdict))

    def _end(self, verdict: bool) -> None:
        self.close()
        self._done(verdict)

    def close(self) -> None:
        """Idempotent."""
        if self._sock.fileno() >= 0:
            self._selector.unregister(self._sock)
            self._sock.close()


class Watchdog:
    """Doors: `due` (when `turn` has something to do, monotonic seconds) and `turn`."""

    def __init__(
        self,
        interval: float | None,
        notifier: Notifier,
        selector: selectors.BaseSelector,
        log: Logger,
        places: list[Place],
        stalled: Callable[[], bool],
    ) -> None:
        """`interval`: seconds within which the supervisor wants to hear, None when it does not. `places`: where the
        server listens, the best first."""
        self._step = interval / ATTEMPTS if interval else math.inf
        self._notifier, self._selector, self._log = notifier, selector, log
        self._places, self._stalled = places, stalled
        self._probe: Probe | None = None
        self._next = 0  # place to ask
        self.due = 0.0 if interval else math.inf

    def turn(self, now: float, *, serving: bool) -> None:
        """Begin a probe when one is due, or feed at once while there is nobody to ask."""
        if now < self.due:
            return
        self.due = now + self._step
        if not serving:
            self._drop()
            self._notifier.watchdog()
            return
        if self._probe is not None:
            self._answer(False)
        for _ in self._places:
            try:
                self._probe = Probe(self._places[self._next], self._selector, self._answer)
                return
            except OSError as e:
                self._fail(f"no connection: {e.strerror}")

    def _answer(self, verdict: bool) -> None:
        self._drop()
        if not verdict:
            self._fail("no answer that a worker is ready")
        elif self._stalled():
            self._log.error("watchdog not fed", reason="a worker is silent beyond worker_timeout and does not die")
        else:
            self._notifier.watchdog()

    def _drop(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _fail(self, reason: str) -> None:
        self._log.warning("self-probe failed", address=str(self._places[self._next][1]), reason=reason)
        self._next = (self._next + 1) % len(self._places)

"""One blocking connection shared by threads. No thread of its own: a thread that waits for its reply reads for all.

The first thread to wait becomes the reader; others sleep on a lock of their own. Who reads hands each reply to the
thread it belongs to, and when its own has come passes the role to one that still waits (leader and followers: Schmidt
et al., "Leader/Followers", PLoP 2000). A thread that is alone therefore sends, polls and reads by itself, with no
hand-over; and no reader thread must be started, woken, stopped or survive a fork.

Locks: `_state` guards the core, `_reading` and the calls, and is never held over a system call that may block;
`_writing` is held while one frame is written. The socket does not block; every wait is a poll or a lock, bounded by the
request's deadline.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
from threading import Lock
from time import monotonic
from typing import Final

from prefork.client.connection import Connection, Outcome, State
from prefork.client.retry import timeout_ms
from prefork.codec.frame import Frame
from prefork.codec.message import Codec, Kind
from prefork.errors import DeadlineExceeded, PreforkError, Unavailable
from prefork.tensor import Buffer

_SMALL_READ: Final = 65536
_LARGE_READ: Final = 1 << 20  # while a body is under way: fewer system calls
_BESIDE_READER_MS: Final = 50
_GONE: Final = select.POLLERR | select.POLLHUP | select.POLLNVAL


class Call:
    """A request that a thread waits for; `waker` is a lock that the reader releases when there is news."""

    __slots__ = ("id", "outcome", "waker")

    def __init__(self) -> None:
        self.id = 0
        self.outcome: Outcome | None = None
        self.waker: Lock | None = None

    def wake(self) -> None:
        waker, self.waker = self.waker, None
        if waker is not None:
            waker.release()


class Link:
    """Takes a connected socket over. `users` belongs to the pool."""

    def __init__(self, sock: socket.socket, peer: str, codec: Codec, max_body: int) -> None:
        sock.setblocking(False)
        self.users = 0
        self._sock = sock
        self._peer = peer
        self._core: Connection[Call] = Connection(codec, max_body, peer)
        self._state, self._writing = Lock(), Lock()
        self._reading = False
        self._outbox = b""  # CANCEL frames that go before the next frame
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    @property
    def usable(self) -> bool:
        return self._core.state is State.OPEN

    def look_up(self) -> bool:
        """Whether it takes a request, after noticing a GOAWAY or an end that came while nobody was reading."""
        with self._state:
            if self._reading or not self._core.idle:
                return self.usable
            self._reading = True
        try:
            while self.usable and self._readable.poll(0):
                self._pump()
        finally:
            self._resign()
        return self.usable

    def call(self, kind: Kind, body: Buffer, deadline: float | None) -> Frame:
        """The reply to one request. Raises what the server answered, DeadlineExceeded or Unavailable."""
        call = Call()
        try:
            self._send(call, kind, body, deadline)
            outcome = self._wait(call, deadline)
        except BaseException:
            self._give_up(call)
            raise
        if isinstance(outcome, PreforkError):
            raise outcome
        return outcome

    def end(self, reason: str) -> None:
        """Every pending request gets Cancelled; nothing new is taken. The socket is closed by `close`."""
        with self._state:
            self._deliver(self._core.abort(reason))
        self._shut()

    def close(self) -> None:
        """Only when no thread uses the link: a closed descriptor's number may belong to another file at once."""
        self._sock.close()

    def _send(self, call: Call, kind: Kind, body: Buffer, deadline: float | None) -> None:
        if not self._writing.acquire(blocking=False) and not self._writing.acquire(timeout=_seconds_left(deadline)):
            raise DeadlineExceeded(f"{self._peer}: the deadline passed before the request could be sent")
        try:
            ms = timeout_ms(deadline, monotonic())
            with self._state:
                call.id, parts = self._core.request(kind, body, ms, call)
                cancels, self._outbox = self._outbox, b""
            if cancels:
                parts.insert(0, cancels)
            try:
                self._write(parts, deadline)
            except DeadlineExceeded:
                with self._state:  # they were not sent, unless the connection ended with them
                    self._outbox = cancels + self._outbox
                raise
        finally:
            self._writing.release()

    def _write(self, parts: list[Buffer], deadline: float | None) -> None:
        """The whole of `parts`. A frame that stays incomplete ends the connection: nothing can follow it."""
        views: list[memoryview] = []
        size = sum(map(len, parts))
        try:
            sent = self._send_first(parts[0]) if len(parts) == 1 else 0
            if sent < size:
                views += map(memoryview, parts)
                views[0] = views[0][sent:]
                self._write_rest(views, deadline)
        except OSError as error:
            raise self._broken(f"the connection broke before the whole request was sent: {error}") from error
        except BaseException:
            if sum(map(len, views)) < size:
                self._die("the connection was given up in the middle of a frame")
            raise

    def _send_first(self, data: Buffer) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    def _write_rest(self, views: list[memoryview], deadline: float | None) -> None:
        while views:
            try:
                sent = self._sock.sendmsg(views)
            except BlockingIOError:
                self._await_room(deadline)
                continue
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def _await_room(self, deadline: float | None) -> None:
        """Until the socket takes bytes again. A server may stop reading until its replies are read, so read them."""
        with self._state:
            lead, self._reading = not self._reading, True
        try:
            left = _milliseconds_left(deadline)
            if left == 0:
                raise DeadlineExceeded(f"{self._peer}: the deadline passed while the request was being sent")
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT | (select.POLLIN if lead else 0))
            # not for ever beside another reader: it may leave, and then this thread has to read
            found = poll.poll(left if lead else min(_BESIDE_READER_MS, left or _BESIDE_READER_MS))
            if lead and found and found[0][1] & (select.POLLIN | _GONE):
                self._pump()
        finally:
            if lead:
                self._resign()

    def _wait(self, call: Call, deadline: float | None) -> Outcome:
        while True:
            waker: Lock | None = None
            with self._state:
                if call.outcome is not None:
                    return call.outcome
                if self._reading:
                    waker = call.waker = Lock()
                    waker.acquire()
                else:
                    self._reading = True
            in_time = self._lead(call, deadline) if waker is None else waker.acquire(timeout=_seconds_left(deadline))
            if not in_time and call.outcome is None:
                raise DeadlineExceeded(f"{self._peer}: no reply within the deadline")

    def _lead(self, call: Call, deadline: float | None) -> bool:
        """Read for all until `call` is decided: True; False when the deadline came first."""
        try:
            while call.outcome is None:
                if not self._readable.poll(_milliseconds_left(deadline)):
                    return False
                self._pump()
        finally:
            self._resign()
        return True

    def _resign(self) -> None:
        with self._state:
            self._reading = False
            self._promote()

    def _promote(self) -> None:
        """With `_state` held and no reader: wake one thread that waits, it will read."""
        for call in self._core.waiting:
            if call.waker is not None:
                call.wake()
                return

    def _pump(self) -> None:
        """One read. Only the reader calls this."""
        try:
            data = self._sock.recv(_LARGE_READ if self._core.body_is_under_way else _SMALL_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._die(f"the connection was lost: {error}")
            return
        with self._state:
            self._deliver(self._core.receive(data) if data else self._core.eof())
        if self._core.state is State.CLOSED:
            self._shut()

    def _deliver(self, decided: list[tuple[Call, Outcome]]) -> None:
        for call, outcome in decided:
            call.outcome = outcome
            call.wake()

    def _die(self, reason: str) -> None:
        with self._state:
            self._deliver(self._core.lost(reason))
        self._shut()

    def _broken(self, reason: str) -> Unavailable:
        """For the request that was being sent: the server holds no whole frame of it, so it cannot have run it."""
        self._die(reason)
        return Unavailable(f"{self._peer}: {reason}")

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that polls

    def _give_up(self, call: Call) -> None:
        """The thread leaves without its reply: the server is told, and another may have to read."""
        with self._state:
            call.waker = None
            self._outbox += self._core.forget(call.id)
            if not self._reading:
                self._promote()
        if self._outbox and self._writing.acquire(blocking=False):
            try:
                with self._state:
                    cancels, self._outbox = self._outbox, b""
                self._write_now(cancels)
            finally:
                self._writing.release()

    def _write_now(self, cancels: bytes) -> None:
        """All or nothing; a full socket keeps them for the next request."""
        try:
            sent = self._sock.send(cancels) if cancels else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # whoever reads finds out
        with self._state:
            self._outbox = cancels[sent:] + self._outbox


def _seconds_left(deadline: float | None) -> float:
    """For Lock.acquire: -1 waits for ever."""
    return -1 if deadline is None else max(0.0, deadline - monotonic())


def _milliseconds_left(deadline: float | None) -> int | None:
    """For poll, rounded up so that it never returns just before the deadline."""
    return None if deadline is None else max(0, math.ceil((deadline - monotonic()) * 1000))

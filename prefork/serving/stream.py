"""The socket's side of one connection, whatever protocol it speaks: backpressure, patience, and how it ends.

Runs in the worker's loop thread. A protocol's shell derives from Stream, hands bytes to `send` and says with `busy`
that answers are outstanding. Nothing here knows a frame or a request.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import termios
from enum import IntEnum
from typing import cast

from prefork.serving.service import Service

LINGER = 1.0  # seconds a refused peer may take to read why, before its connection is closed
PROBE = 0.02  # seconds between looks whether a client that has sent its last byte is still there


class State(IntEnum):
    """Of one connection. OPEN goes to any later state, the others only onward.

    OPEN     requests are taken
    ENDING   the client has half-closed or the worker drains: what is in flight is answered, then it ends
    REFUSED  its bytes cannot be understood: what comes in is thrown away, what is in flight is answered, then it ends
    ENDED    our side is shut; the client has LINGER seconds to read and to close
    """

    OPEN = 0
    ENDING = 1
    REFUSED = 2
    ENDED = 3


class Stream(asyncio.Protocol):
    """Doors for the shell: `send`, `end`, `end_if_done`, `read`, `watch_peer`; for the worker: `unsent`, `moves`."""

    __slots__ = (
        "_moved",
        "_paused",
        "_taken",
        "_written",
        "heard",
        "loop",
        "peer_ended",
        "service",
        "stalled",
        "state",
        "transport",
        "watched",
    )

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self.service = service
        self.loop = loop
        self.state = State.OPEN
        self.peer_ended = False  # the client has sent its last byte
        self.stalled = False  # the client does not read its answers
        self.heard = service.now
        self._paused = False  # we do not read its requests
        self.watched = False  # watch_peer is under way
        self._written = 0  # bytes in all
        self._taken, self._moved = 0, service.now  # bytes that have left, and when they last became more

    @property
    def busy(self) -> bool:
        """Whether answers are outstanding."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self.stalled = True
        self.read(False)

    def send(self, data: bytes) -> None:
        """Write, unless our side is shut."""
        if self.state is not State.ENDED:
            size = len(data)
            self.service.bytes_out += size
            self._written += size
            self.transport.write(data)

    def read(self, wanted: bool) -> None:
        """Take requests from the socket, or leave them in the kernel."""
        if self._paused is wanted and not self.transport.is_closing():
            self._paused = not wanted
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()

    @property
    def reading(self) -> bool:
        return not self._paused

    @property
    def unsent(self) -> int:
        """Bytes of answers that the client has not taken yet."""
        return self.transport.get_write_buffer_size()

    @property
    def unread(self) -> bool:
        """Whether bytes of the client wait in the kernel, where a loop that was busy has not seen them yet."""
        if self.transport.is_closing():
            return False
        fd = self.transport.get_extra_info("socket").fileno()
        return any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))  # ioctl_tty(2), tcp(7), unix(7)

    def moves(self, now: float, patience: float) -> bool:
        """Whether the client takes its answers: false when nothing unsent has left for `patience` seconds."""
        left = self.unsent
        if left == 0 or self._written - left > self._taken:
            self._moved = now
        self._taken = self._written - left
        return now - self._moved <= patience

    def end(self, state: State) -> None:
        """Go on to `state` and end when nothing is outstanding any more."""
        self.state = max(self.state, state)
        self.end_if_done()

    def end_if_done(self) -> None:
        """Half-close. Closing at once would reset a connection that has unread bytes, and a reset destroys what the
        client has not read yet."""
        if self.busy or self.state in (State.OPEN, State.ENDED):
            return
        self.state = State.ENDED
        if self.peer_ended:
            self.transport.close()
        else:
            self.transport.write_eof()
            self.read(True)  # to see the client's end
            self.loop.call_later(LINGER, self.transport.close)

    def watch_peer(self) -> None:
        """The client has sent its last byte and answers are outstanding: abort once it is seen that it has left.

        A client that closed looks like one that half-closed until something is written to it, which the shell has
        just done; then the kernel tells (POLLHUP, POLLERR; poll(2))."""
        self.watched = True
        self.loop.call_later(PROBE, self._probe)

    def _probe(self) -> None:
        if not self.busy or self.state is State.ENDED:
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):
            self.transport.abort()
        else:
            self.loop.call_later(PROBE, self._probe)

"""One asyncio connection: the core of connection.py as an asyncio.Protocol. Everything happens on its event loop."""

from __future__ import annotations

import asyncio
import os
from time import monotonic
from typing import TypeAlias, cast

from prefork.client.connection import Connection, Outcome, State
from prefork.client.retry import timeout_ms
from prefork.codec.frame import Frame
from prefork.codec.message import Codec, Kind
from prefork.errors import DeadlineExceeded, PreforkError, Unavailable
from prefork.tensor import Buffer

Waiter: TypeAlias = "asyncio.Future[Outcome]"


class Stream(asyncio.Protocol):
    """`users` belongs to the pool."""

    def __init__(self, peer: str, codec: Codec, max_body: int) -> None:
        self.users = 0
        self._peer = peer
        self._core: Connection[Waiter] = Connection(codec, max_body, peer)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()  # cleared while the transport's buffer is full
        self._room.set()
        self._gone = asyncio.Event()

    @property
    def usable(self) -> bool:
        return self._core.state is State.OPEN

    async def call(self, kind: Kind, body: Buffer, deadline: float | None) -> Frame:
        """The reply to one request. Raises what the server answered, DeadlineExceeded or Unavailable."""
        if not self._room.is_set():
            await self._until_room(deadline)
        waiter: Waiter = self._loop.create_future()
        now = monotonic()
        request_id, parts = self._core.request(kind, body, timeout_ms(deadline, now), waiter)
        transport = self._connected()
        for part in parts:
            transport.write(part)
        timer = None if deadline is None else self._loop.call_later(deadline - now, self._expire, waiter)
        try:
            outcome = await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if cancel := self._core.forget(request_id):  # expired, or the task was cancelled
                transport.write(cancel)
        if isinstance(outcome, PreforkError):
            raise outcome
        return outcome

    async def end(self, reason: str) -> None:
        """Every pending request gets Cancelled; returns when the socket is closed."""
        self._deliver(self._core.abort(reason))
        self._connected().abort()
        await self._gone.wait()

    def drop(self) -> None:
        """For a connection that nobody uses: close it, without waiting for that."""
        self._connected().close()

    def disown(self) -> None:
        """In a forked child: put /dev/null in the place of the descriptor. Closing the transport instead would take the
        parent's connection out of the event loop's epoll set, which both processes share."""
        sock = self._connected().get_extra_info("socket")
        if sock is None or sock.fileno() < 0:  # it had ended before the fork
            return
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, sock.fileno(), inheritable=False)
        os.close(null)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._deliver(self._core.receive(data))
        if self._core.state is State.CLOSED:
            self._connected().abort()

    def eof_received(self) -> None:
        self._deliver(self._core.eof())

    def connection_lost(self, exc: Exception | None) -> None:
        self._deliver(self._core.lost(f"the connection was lost: {exc or 'closed'}"))
        self._room.set()
        self._gone.set()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def _connected(self) -> asyncio.Transport:
        if self._transport is None:
            raise Unavailable(f"{self._peer}: not connected")
        return self._transport

    def _deliver(self, decided: list[tuple[Waiter, Outcome]]) -> None:
        for waiter, outcome in decided:
            if not waiter.done():
                waiter.set_result(outcome)

    def _expire(self, waiter: Waiter) -> None:
        if not waiter.done():
            waiter.set_result(DeadlineExceeded(f"{self._peer}: no reply within the deadline"))

    async def _until_room(self, deadline: float | None) -> None:
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - monotonic())):
                while not self._room.is_set():  # another request may have filled it again
                    await self._room.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._peer}: the deadline passed before the request could be sent") from None

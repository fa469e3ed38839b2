"""The asyncio client, under asyncio's own loop or uvloop. Connections are in stream.py.

All that decides anything it shares with the blocking client: connection.py, pool.py, retry.py and calls.py.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Self

from prefork.client import calls
from prefork.client.address import Address
from prefork.client.connection import Leaving
from prefork.client.pool import Need, Pool
from prefork.client.retry import ELSEWHERE, Attempts, earliest, timeout_ms
from prefork.client.stream import Stream
from prefork.codec.frame import Frame
from prefork.codec.message import InferReply, Kind, Message, ModelMetadata, ModelRequest, Ready, ServerMetadata
from prefork.errors import DeadlineExceeded, FailedPrecondition, PreforkError, Unavailable
from prefork.value import Parameter, Value

_clients: weakref.WeakSet[AsyncClient] = weakref.WeakSet()
_inherited: list[Stream] = []  # in a forked child, for its whole life: see Stream.disown


class AsyncClient:
    """`Client` for asyncio: the same arguments, methods, results and errors, see there. Not for several threads.

    Made anywhere, it belongs to the event loop of its first call; under another loop it opens new connections. A task
    that is cancelled tells the server that its reply is no longer wanted. Bytes handed to the event loop count as sent,
    so here `maybe_executed` may be set for a request of which the server got only a part."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        codec: calls.CodecName = "msgpack",
        pool_size: int = 4,
        timeout: float | None = 30.0,
        retries: int = 2,
        connect_timeout: float = 5.0,
        max_body: int = 1 << 30,
        max_in_flight: int = 64,
    ) -> None:
        self._settings = calls.settings(
            addresses, codec, pool_size, timeout, retries, connect_timeout, max_body, max_in_flight
        )
        self.retried = 0
        """Requests sent again so far."""
        self._closed = False
        self._turn = itertools.count()
        self._fresh(None)
        _clients.add(self)

    def _fresh(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._pool: Pool[Stream] = Pool(self._settings.pool_size, self._settings.max_in_flight)
        self._waiting: deque[asyncio.Future[None]] = deque()  # calls for which the pool had no room

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Value],
        *,
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        version: str = "",
        parameters: Mapping[str, Parameter] | None = None,
        traceparent: str | None = None,
        idempotent: bool = True,
    ) -> dict[str, Value]:
        """As Client.infer."""
        reply = await self.infer_raw(
            model, inputs, outputs=outputs, timeout=timeout, version=version, parameters=parameters,
            traceparent=traceparent, idempotent=idempotent,
        )  # fmt: skip
        return calls.values(reply)

    async def infer_raw(
        self,
        model: str,
        inputs: Mapping[str, Value],
        *,
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        version: str = "",
        parameters: Mapping[str, Parameter] | None = None,
        traceparent: str | None = None,
        idempotent: bool = True,
    ) -> InferReply:
        """As Client.infer_raw."""
        request = calls.infer_request(model, inputs, outputs, version, parameters, traceparent)
        return calls.decode(await self._call(Kind.INFER, request, timeout, idempotent), InferReply)

    async def metadata(self, model: str, *, version: str = "", timeout: float | None = None) -> ModelMetadata:
        """As Client.metadata."""
        return calls.decode(await self._call(Kind.MODEL_METADATA, ModelRequest(model, version), timeout), ModelMetadata)

    async def server_metadata(self, *, timeout: float | None = None) -> ServerMetadata:
        return calls.decode(await self._call(Kind.SERVER_METADATA, None, timeout), ServerMetadata)

    async def model_ready(self, model: str, *, version: str = "", timeout: float | None = None) -> bool:
        return calls.decode(await self._call(Kind.MODEL_READY, ModelRequest(model, version), timeout), Ready).ready

    async def ready(self, *, timeout: float | None = None) -> bool:
        return calls.decode(await self._call(Kind.SERVER_READY, None, timeout), Ready).ready

    async def live(self, *, timeout: float | None = None) -> bool:
        return calls.decode(await self._call(Kind.SERVER_LIVE, None, timeout), Ready).ready

    async def health(self, *, timeout: float | None = None) -> bool:
        """As Client.health."""
        try:
            return await self.ready(timeout=timeout)
        except (Unavailable, DeadlineExceeded):
            return False

    async def close(self) -> None:
        """Pending calls of other tasks end with Cancelled, later ones with FailedPrecondition. May be repeated."""
        self._closed = True
        self._wake(len(self._waiting))
        streams, self._pool.links = self._pool.links, []
        if self._loop is asyncio.get_running_loop():
            await asyncio.gather(*(stream.end("the client was closed") for stream in streams))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, kind: Kind, message: Message, timeout: float | None, idempotent: bool = True) -> Frame:
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._fresh(loop)
        seconds = self._settings.timeout if timeout is None else timeout
        deadline = None if seconds is None else monotonic() + seconds
        body = self._settings.codec.encode(kind, message)
        attempts = Attempts(self._settings.retries, deadline, idempotent)
        while True:
            try:
                return await self._attempt(kind, body, deadline)
            except PreforkError as error:
                wait = attempts.wait_before_next(error, monotonic())
            await asyncio.sleep(wait)
            self.retried += 1

    async def _attempt(self, kind: Kind, body: bytes, deadline: float | None) -> Frame:
        tried = 0
        while True:
            stream = await self._lease(deadline)
            try:
                return await stream.call(kind, body, deadline)
            except Leaving:  # its worker had said so before we asked; a connection may even begin with that word
                tried += 1
                if tried == ELSEWHERE:
                    raise
            finally:
                if self._pool.release(stream):
                    stream.drop()
                self._wake(1)

    async def _lease(self, deadline: float | None) -> Stream:
        while True:
            if self._closed:
                raise FailedPrecondition("the client is closed")
            taken = self._pool.take()
            if isinstance(taken, Stream):
                return taken
            if taken is Need.OPEN:
                return await self._open(deadline)
            await self._turn_comes(deadline)

    async def _turn_comes(self, deadline: float | None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - monotonic())):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._wake(1)  # it came in vain: the next may use it
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the deadline passed before there was a connection") from None
            raise

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    async def _open(self, deadline: float | None) -> Stream:
        try:
            stream = await self._connect(deadline)
        except BaseException:
            self._pool.not_opened()
            self._wake(len(self._waiting))
            raise
        self._pool.opened(stream)
        self._wake(len(self._waiting))
        if self._closed:
            await stream.end("the client was closed")
        return stream

    async def _connect(self, deadline: float | None) -> Stream:
        """The next address in turn that accepts. Raises Unavailable naming what each of them said."""
        addresses, failures = self._settings.addresses, []
        turn = next(self._turn)
        for offset in range(len(addresses)):
            address = addresses[(turn + offset) % len(addresses)]
            timeout_ms(deadline, monotonic())
            until = earliest(deadline, monotonic() + self._settings.connect_timeout)
            try:
                async with asyncio.timeout(max(0.001, until - monotonic())):
                    return await self._dial(address)
            except OSError as error:  # TimeoutError is one
                failures.append(f"{address}: {error or 'timed out'}")
        timeout_ms(deadline, monotonic())
        raise Unavailable(f"no connection: {'; '.join(failures)}")

    async def _dial(self, address: Address) -> Stream:
        loop = asyncio.get_running_loop()

        def make() -> Stream:
            return Stream(str(address), self._settings.codec.CODEC, self._settings.max_body)

        if address.path:
            _, stream = await loop.create_unix_connection(make, address.path)
        else:
            _, stream = await loop.create_connection(make, address.host, address.port)
        return stream

    def _forget_inherited(self) -> None:
        for stream in self._pool.links:
            stream.disown()
            _inherited.append(stream)
        self._fresh(None)


def _after_fork() -> None:
    for client in list(_clients):
        client._forget_inherited()


os.register_at_fork(after_in_child=_after_fork)

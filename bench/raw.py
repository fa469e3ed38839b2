"""Clients without a pool or a retry that write down all that happens to them: connects, answers, refusals, losses.

They run in a thread of the bench, on a loop of their own. A connection asks `count` requests, `depth` at a time, and is
then made anew, so that there are always fresh connects. What a server says under a request's id counts as an answer.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from prefork.codec.frame import Frame, FrameReader, encode_frame
from prefork.codec.message import Codec, ErrorReply, Kind
from prefork.codec.registry import codec_of
from prefork.errors import Code

STUCK = 60.0  # seconds without an answer after which a connection counts as lost


@dataclass(frozen=True, slots=True)
class Lost:
    """A connection that ended with `pending` requests unanswered. `port` is the client's own; `heard`: any frame came
    on it before."""

    port: int
    pending: int
    how: str
    heard: bool


@dataclass
class Tally:
    """`refused`: failed connects, by the name of their errno; `errors`: ERROR answers by code; `wrong`: replies with
    other bytes."""

    connects: int = 0
    refused: list[str] = field(default_factory=list)
    answered: int = 0
    wrong: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    goaways: int = 0
    lost: list[Lost] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """`body`: of each request, msgpack; `expected`: of each reply. A connection makes `count` requests."""

    body: bytes
    expected: bytes
    count: int = 40
    depth: int = 4


class Asker(asyncio.Protocol):
    """One connection from its connect to its end, which `ended` tells."""

    def __init__(self, plan: Plan, tally: Tally, stopped: Callable[[], bool]) -> None:
        self._plan, self._tally, self._stopped = plan, tally, stopped
        self._reader = FrameReader(1 << 30)
        self._pending: set[int] = set()
        self._next = 1
        self._closing = self._heard = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._port = int(transport.get_extra_info("sockname")[1])
        for _ in range(self._plan.depth):
            self._ask()

    def _ask(self) -> None:
        self._pending.add(self._next)
        self._transport.write(encode_frame(Kind.INFER, Codec.MSGPACK, self._next, self._plan.body))
        self._next += 1

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.receive(data):
            if isinstance(frame, Frame):
                self._heard = True
                self._take(frame)
        if not self._pending and self._closing:
            self._transport.close()

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.GOAWAY:
            self._tally.goaways += 1
            self._closing = True
            return
        self._pending.discard(frame.request_id)
        if frame.kind == Kind.ERROR:
            reply = codec_of(frame.codec).decode(frame.kind, frame.body)
            code = Code(reply.code).name if isinstance(reply, ErrorReply) else "?"
            self._tally.errors[code] = self._tally.errors.get(code, 0) + 1
            self._closing = True
            return
        self._tally.answered += 1
        self._tally.wrong += bytes(frame.body) != self._plan.expected
        self._closing = self._closing or self._next > self._plan.count or self._stopped()
        if not self._closing:
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._pending:
            how = str(exc or "closed by the server")
            self._tally.lost.append(Lost(self._port, len(self._pending), how, self._heard))
        if not self.ended.done():
            self.ended.set_result(None)


class Crowd:
    """`clients` of them against `address` until `stop`, and `also`, coroutines of the same loop."""

    def __init__(self, address: str, plan: Plan, clients: int, *also: Callable[[Callable[[], bool]], Any]) -> None:
        self.tally = Tally()
        self._address, self._plan, self._clients, self._also = address, plan, clients, also
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="crowd", daemon=True)

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End after what is in flight. Raises what a client raised."""
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:
            self._error = error

    async def _all(self) -> None:
        crowd = [self._client() for _ in range(self._clients)]
        await asyncio.gather(*crowd, *(make(self._stop.is_set) for make in self._also))

    async def _client(self) -> None:
        loop = asyncio.get_running_loop()
        host, _, port = self._address.rpartition(":")
        while not self._stop.is_set():
            try:
                _, asker = await loop.create_connection(
                    lambda: Asker(self._plan, self.tally, self._stop.is_set), host, int(port)
                )
            except OSError as error:
                self.tally.refused.append(errno.errorcode.get(error.errno or 0, str(error)))
                await asyncio.sleep(0.01)  # a server that is gone refuses at once
                continue
            self.tally.connects += 1
            try:
                await asyncio.wait_for(asker.ended, STUCK)
            except TimeoutError:
                asker.connection_lost(TimeoutError(f"no answer within {STUCK:.0f} s"))

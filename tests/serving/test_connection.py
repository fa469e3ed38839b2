"""A Connection of a real worker's parts over a real socket pair: ids, order, limits, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

from prefork.codec.frame import encode_frame
from prefork.codec.message import Codec, InferReply, Kind, Ready, ServerMetadata
from prefork.errors import Code
from prefork.serving import rpc
from prefork.serving.admission import Admission
from prefork.serving.costs import Costs
from prefork.serving.scheduler import RunIn, Scheduler
from prefork.serving.service import Service
from tests.roles.wire import IMAGE, Wire, cancel, digits, infer, live
from tests.serving.parts import ROWS, Limits, counts, demo_session, fresh_words, pair, run
from tests.serving.test_scheduler import Gated, gated

T = TypeVar("T")
Talk = Callable[[Wire], T]


class Bench:
    """A service and one connection of it; `talk` runs the client's side in a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ours: socket.socket, theirs: socket.socket, **how: Any):
        run_in: RunIn = how.pop("run_in", "inline")
        session = how.pop("session", None) or demo_session()
        self.limits = Limits(**how)
        self.words = fresh_words()
        models = {"digits": session}
        self.faults: list[Exception] = []
        self.scheduler = Scheduler(
            loop, models, {"digits": "1"}, Admission(self.limits.max_in_flight, self.limits.max_in_flight_bytes),
            Costs(), self.words, run_in, lambda seconds: None, self.faults.append,
        )  # fmt: skip
        self.service = Service(
            models, {"digits": "1"}, self.limits, self.limits.wire, self.scheduler, self.words, self.faults.append, ROWS
        )
        self.loop, self.ours = loop, ours
        self.wire = Wire(theirs)
        self._client = ThreadPoolExecutor(1)
        self.connection: rpc.Connection  # once `accept` was called

    async def talk(self, side: Talk[T]) -> T:
        return await self.loop.run_in_executor(self._client, side, self.wire)

    async def accept(self) -> rpc.Connection:
        _, protocol = await self.loop.connect_accepted_socket(rpc.factory(self.service, self.loop), self.ours)
        assert isinstance(protocol, rpc.Connection)
        self.connection = protocol
        return protocol

    async def gone(self) -> None:
        """Until the connection has left the service."""
        while self.service.clients:
            self.service.changed.clear()
            await self.service.changed.wait()


def with_connection(body: Callable[[Bench], Awaitable[None]], **how: Any) -> None:
    async def whole(loop: asyncio.AbstractEventLoop) -> None:
        with pair() as (ours, theirs):
            bench = Bench(loop, ours, theirs, **how)
            await bench.accept()
            try:
                await body(bench)
            finally:
                Gated.gate.set()
                bench.wire.sock.close()
                await bench.gone()
                while bench.scheduler.held:  # places are free when the lane has passed what was dropped
                    await loop.run_in_executor(None, Gated.gate.wait)
                bench.scheduler.close()
            assert not bench.faults and counts(bench.words)["in_flight"] == 0

    run(whole)


def test_pipelined_requests_are_all_answered() -> None:
    async def body(bench: Bench) -> None:
        def side(wire: Wire) -> list[int]:
            wire.send(*(digits(i, codec=Codec(1 + i % 2)) for i in range(1, 101)), live(101))
            return [wire.answer().id for _ in range(101)]

        assert await bench.talk(side) == list(range(1, 102))
        assert counts(bench.words)["replies_ok"] == 100

    with_connection(body)


def test_answers_come_in_any_order() -> None:
    """What needs no run overtakes what waits for the lane."""

    async def body(bench: Bench) -> None:
        def first(wire: Wire) -> int:
            wire.send(digits(7), digits(2**64 - 1), live(3))
            return wire.answer().id

        def rest(wire: Wire) -> list[int]:
            return [wire.answer().id, wire.answer().id]

        assert await bench.talk(first) == 3
        Gated.gate.set()
        assert await bench.talk(rest) == [7, 2**64 - 1]

    with_connection(body, run_in="thread", session=gated())


@pytest.mark.parametrize("again", [digits(5), live(5)], ids=["infer", "live"])
def test_an_id_in_flight_is_fatal(again: bytes) -> None:
    async def body(bench: Bench) -> None:
        def first(wire: Wire) -> None:
            wire.send(digits(5), again, digits(6))
            found = wire.answer()
            assert found.id == 0 and found.refused(Code.INVALID_ARGUMENT, "request id 5", "in flight")

        await bench.talk(first)
        Gated.gate.set()
        rest = await bench.talk(lambda wire: wire.end())
        assert [answer.id for answer in rest] == [5]  # what was taken is answered, what came after is not

    with_connection(body, run_in="thread", session=gated())


def test_an_id_may_be_used_again_after_its_answer() -> None:
    async def body(bench: Bench) -> None:
        def side(wire: Wire) -> None:
            for _ in range(3):
                wire.send(digits(5))
                assert wire.answer().values.keys() == {"probabilities", "label"}

        await bench.talk(side)

    with_connection(body)


@pytest.mark.parametrize("frame", [digits(0), live(0)], ids=["infer", "live"])
def test_id_zero_is_refused_and_the_connection_goes_on(frame: bytes) -> None:
    async def body(bench: Bench) -> None:
        def side(wire: Wire) -> None:
            wire.send(frame, live(1))
            refused, answer = wire.answer(), wire.answer()
            assert refused.id == 0 and refused.refused(Code.INVALID_ARGUMENT, "request id 0")
            assert answer.id == 1 and answer.message == Ready(True)

        await bench.talk(side)

    with_connection(body)


def test_in_flight_is_bounded_for_the_connection() -> None:
    async def body(bench: Bench) -> None:
        def first(wire: Wire) -> None:
            wire.send(*(digits(i) for i in range(1, 7)))
            assert all(a.refused(Code.RESOURCE_EXHAUSTED, "4") for a in wire.answers(2).values())

        await bench.talk(first)
        Gated.gate.set()
        assert set(await bench.talk(lambda wire: wire.answers(4))) == {1, 2, 3, 4}

    with_connection(body, run_in="thread", session=gated())


def test_cancel() -> None:
    async def body(bench: Bench) -> None:
        def side(wire: Wire) -> int:
            wire.send(digits(1), digits(2), cancel(2), cancel(77), digits(2), live(3))
            return wire.answer().id

        assert await bench.talk(side) == 3
        assert counts(bench.words)["dropped"] == 1
        Gated.gate.set()
        assert set(await bench.talk(lambda wire: wire.answers(2))) == {1, 2}
        assert Gated.runs == 2

    with_connection(body, run_in="thread", session=gated())


def test_a_vanished_client_is_dropped() -> None:
    async def body(bench: Bench) -> None:
        def side(wire: Wire) -> None:
            wire.send(digits(1), digits(2), live(3))
            assert wire.answer().id == 3
            wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            wire.send(live(4))
            wire.sock.close()  # with an answer unread: the peer sees a reset

        await bench.talk(side)
        await bench.gone()
        assert counts(bench.words)["dropped"] == 2

    with_connection(body, run_in="thread", session=gated())


def test_a_half_closed_client_reads_its_answers_and_the_end() -> None:
    async def body(bench: Bench) -> None:
        def first(wire: Wire) -> None:
            wire.send(digits(1), digits(2), live(3))
            wire.sock.shutdown(socket.SHUT_WR)
            assert wire.answer().id == 3

        await bench.talk(first)
        Gated.gate.set()
        # the GOAWAY asks the kernel whether somebody is still there
        assert [answer.id for answer in await bench.talk(lambda wire: wire.end())] == [0, 1, 2]
        await bench.gone()

    with_connection(body, run_in="thread", session=gated())


def test_backpressure_bounds_what_is_written() -> None:
    """While the client does not read, requests stay in its socket, and what is answered inline stays bounded."""
    image = np.repeat(IMAGE, 2000, axis=0)  # a reply of about 96 kB
    frame = infer(1, "digits", image=image[:1])
    many = b"".join(digits(i) for i in range(1, 3001))

    async def body(bench: Bench) -> None:
        bench.wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sent = await bench.talk(lambda wire: _send_until_full(wire, many))
        taken = counts(bench.words)["replies_ok"]
        assert taken < 3000 and sent < len(many)

        def rest(wire: Wire) -> set[int]:
            return set(wire.answers(sent // len(frame) - 10))

        assert await bench.talk(rest)

    with_connection(body)


def _send_until_full(wire: Wire, data: bytes) -> int:
    """Bytes sent until the peer has not read for a while."""
    wire.sock.settimeout(0.2)
    sent = 0
    try:
        while sent < len(data):
            sent += wire.sock.send(data[sent : sent + 65536])
    except TimeoutError:
        pass
    wire.sock.settimeout(20)
    return sent


def test_every_question_has_its_answer() -> None:
    async def body(bench: Bench) -> None:
        def side(wire: Wire) -> None:
            for number, kind in enumerate((Kind.SERVER_LIVE, Kind.SERVER_READY, Kind.SERVER_METADATA), 1):
                for codec in (Codec.MSGPACK, Codec.PROTOBUF):
                    wire.send(encode_frame(kind, codec, number))
                    answer = wire.answer()
                    assert (answer.kind, answer.id) == (kind + 1, number)
                    assert isinstance(answer.message, Ready | ServerMetadata)
            wire.send(encode_frame(200, Codec.MSGPACK, 9), encode_frame(Kind.INFER, 9, 10))
            assert all(answer.refused(Code.UNIMPLEMENTED) for answer in wire.answers(2).values())

        await bench.talk(side)

    with_connection(body)


def test_draining_refuses_what_is_new_and_answers_what_was_taken() -> None:
    async def body(bench: Bench) -> None:
        def first(wire: Wire) -> None:
            wire.send(digits(1), live(2))
            assert wire.answer().id == 2

        def second(wire: Wire) -> None:
            assert wire.answer().kind == Kind.GOAWAY
            wire.send(digits(3))
            assert wire.answer().refused(Code.UNAVAILABLE, "draining")

        await bench.talk(first)
        bench.service.drain()
        await bench.talk(second)
        Gated.gate.set()
        answer = await bench.talk(lambda wire: wire.answer())
        assert answer.id == 1 and isinstance(answer.message, InferReply)

    with_connection(body, run_in="thread", session=gated())


def test_a_retiring_worker_serves_on_and_sees_off_who_is_quiet() -> None:
    async def body(bench: Bench) -> None:
        def told(wire: Wire) -> None:
            assert wire.answer().kind == Kind.GOAWAY
            wire.send(encode_frame(Kind.SERVER_READY, Codec.MSGPACK, 1), digits(2))
            found = wire.answers(2)
            assert found[1].message == Ready(True) and isinstance(found[2].message, InferReply)

        bench.service.retire()
        await bench.talk(told)
        bench.service.see_off(20.0)
        bench.wire.send(live(3))  # the loop, which is here, has not seen it
        bench.service.see_off(-1.0)
        assert (await bench.talk(lambda wire: wire.answer())).id == 3
        bench.service.see_off(-1.0)
        assert await bench.talk(lambda wire: wire.end()) == []

    with_connection(body)


def test_who_waits_for_an_answer_is_not_quiet() -> None:
    async def body(bench: Bench) -> None:
        def first(wire: Wire) -> None:
            wire.send(digits(1), live(2))
            assert wire.answer().id == 2

        await bench.talk(first)
        bench.service.retire()
        bench.service.see_off(-1.0)
        Gated.gate.set()
        found = await bench.talk(lambda wire: [wire.answer(), wire.answer()])
        assert found[0].kind == Kind.GOAWAY and isinstance(found[1].message, InferReply)
        bench.service.see_off(-1.0)
        assert await bench.talk(lambda wire: wire.end()) == []

    with_connection(body, run_in="thread", session=gated())


def test_ages() -> None:
    async def body(bench: Bench) -> None:
        (connection,) = bench.service.clients

        def begin(wire: Wire) -> None:
            wire.send(live(1) + digits(2)[:30])
            assert wire.answer().id == 1

        await bench.talk(begin)
        connection.check_age(bench.loop.time() + 1)
        assert bench.service.clients
        connection.check_age(bench.loop.time() + 1e6)
        (error,) = await bench.talk(lambda wire: wire.end())
        assert error.refused(Code.DEADLINE_EXCEEDED, "read_timeout")

    with_connection(body)


def test_an_idle_connection_ends_when_that_is_asked_for() -> None:
    async def body(bench: Bench) -> None:
        (connection,) = bench.service.clients
        connection.check_age(bench.service.now + 4)
        assert bench.service.clients
        connection.check_age(bench.service.now + 6)
        assert [answer.kind for answer in await bench.talk(lambda wire: wire.end())] == [Kind.GOAWAY]

    with_connection(body, idle_timeout=5.0)

"""A connection whose client is slow, silent, or done sending: who is waited for, who is told what, and how often."""

from __future__ import annotations

from prefork.codec.message import Kind
from prefork.errors import Code
from tests.roles.wire import Wire, digits, live
from tests.serving.test_connection import Bench, with_connection
from tests.serving.test_scheduler import Gated, gated

LUMP = bytes(1 << 20)  # more than a socket's buffers take


def test_a_slow_client_moves_also_while_its_answers_grow() -> None:
    async def body(bench: Bench) -> None:
        connection = bench.connection
        now = bench.service.now
        connection.send(LUMP)
        before = connection.unsent
        assert before and connection.moves(now, 5.0)

        def take(wire: Wire) -> None:
            for _ in range(8):
                wire.sock.recv(1 << 16)

        await bench.talk(take)
        connection.send(LUMP)
        assert connection.unsent > before
        assert connection.moves(now + 100.0, 5.0)  # it has taken some, though more is left than before
        assert not connection.moves(now + 106.0, 5.0)
        bench.wire.sock.close()

    with_connection(body)


def test_a_connection_that_we_do_not_read_is_not_idle() -> None:
    async def body(bench: Bench) -> None:
        connection = bench.connection
        connection.send(LUMP)
        assert connection.stalled and not connection.reading
        connection.check_age(bench.service.now + 6)
        assert not connection.state

        def take(wire: Wire) -> None:
            left = len(LUMP)
            while left:
                left -= len(wire.sock.recv(left))

        bench.service.now += 6  # as the heartbeat would have
        await bench.talk(take)
        while connection.stalled:
            bench.service.changed.clear()
            await bench.service.changed.wait()
        connection.check_age(bench.service.now + 4)
        assert not connection.state
        connection.check_age(bench.service.now + 6)
        assert [answer.kind for answer in await bench.talk(lambda wire: wire.end())] == [Kind.GOAWAY]

    with_connection(body, idle_timeout=5.0)


def test_nonsense_while_the_connection_ends_is_answered_and_costs_no_answer() -> None:
    async def body(bench: Bench) -> None:
        connection = bench.connection

        def ask(wire: Wire) -> None:
            wire.send(digits(1), live(2))
            assert wire.answer().id == 2

        def nonsense(wire: Wire) -> None:
            wire.send(b"nonsense nonsense")
            found = wire.answer()
            assert found.id == 0 and found.refused(Code.INVALID_ARGUMENT, "wrong magic")
            wire.send(b"and more of it")

        await bench.talk(ask)
        connection.stop()
        await bench.talk(nonsense)
        Gated.gate.set()
        assert [answer.id for answer in await bench.talk(lambda wire: wire.end())] == [1]

    with_connection(body, run_in="thread", session=gated())


def test_a_client_that_has_sent_its_last_is_told_once() -> None:
    async def body(bench: Bench) -> None:
        connection = bench.connection

        def ask(wire: Wire) -> int:
            wire.send(digits(1))
            wire.sock.shutdown(1)
            return wire.answer().kind

        assert await bench.talk(ask) == Kind.GOAWAY
        for _ in range(3):  # its answers do not leave as fast as they come
            connection.pause_writing()
            connection.resume_writing()
        Gated.gate.set()
        assert [answer.id for answer in await bench.talk(lambda wire: wire.end())] == [1]

    with_connection(body, run_in="thread", session=gated())

"""The core without a socket: ids, states, every split of the stream."""

from __future__ import annotations

import pytest

from prefork.client.connection import Connection, Leaving, State
from prefork.codec import msgpack
from prefork.codec.frame import Frame, FrameReader, encode_frame
from prefork.codec.message import Codec, ErrorReply, Kind
from prefork.errors import Cancelled, NotFound, PreforkError, Unavailable


def core() -> Connection[str]:
    return Connection(Codec.MSGPACK, 1 << 20, "peer")


def ask(connection: Connection[str], waiter: str, body: bytes = b"\x80") -> int:
    return connection.request(Kind.INFER, body, 7, waiter)[0]


def reply(request_id: int, body: bytes = b"\x80") -> bytes:
    return encode_frame(Kind.INFER_REPLY, Codec.MSGPACK, request_id, body)


def error(request_id: int, reply: ErrorReply) -> bytes:
    return encode_frame(Kind.ERROR, Codec.MSGPACK, request_id, msgpack.encode(Kind.ERROR, reply))


@pytest.mark.parametrize("size", [1, 16383, 16384, 100_000])
def test_request_bytes(size: int) -> None:
    request_id, parts = core().request(Kind.INFER, b"b" * size, 1234, "a")
    (frame,) = FrameReader(1 << 20).receive(b"".join(parts))
    assert isinstance(frame, Frame)
    assert (frame.kind, frame.codec, frame.request_id, frame.timeout_ms) == (1, 1, request_id, 1234)
    assert bytes(frame.body) == b"b" * size


def test_every_split_gives_the_same() -> None:
    stream = reply(2) + error(1, ErrorReply(5, "no such model")) + encode_frame(Kind.GOAWAY, 0, 0) + reply(3, b"x" * 40)
    for split in range(len(stream) + 1):
        connection = core()
        for waiter in "abc":
            ask(connection, waiter)
        decided = connection.receive(stream[:split]) + connection.receive(stream[split:])
        assert [waiter for waiter, _ in decided] == ["b", "a", "c"]
        assert isinstance(decided[1][1], NotFound) and isinstance(decided[2][1], Frame)
        assert connection.state is State.DRAINING and connection.idle


def test_a_forgotten_request_is_cancelled_once_and_its_reply_dropped() -> None:
    connection = core()
    request_id = ask(connection, "a")
    (cancel,) = FrameReader(0).receive(connection.forget(request_id))
    assert (cancel.kind, cancel.request_id) == (Kind.CANCEL, request_id)
    assert connection.forget(request_id) == b""
    assert connection.receive(reply(request_id)) == []
    assert connection.state is State.OPEN


def test_ids_are_never_used_twice() -> None:
    connection = core()
    seen = set()
    for n in range(100):
        seen.add(ask(connection, str(n)))
        connection.forget(max(seen))
    assert seen == set(range(1, 101))


@pytest.mark.parametrize("state", [State.DRAINING, State.CLOSED])
def test_no_request_after_the_end(state: State) -> None:
    connection = core()
    if state is State.DRAINING:
        connection.receive(encode_frame(Kind.GOAWAY, 0, 0))
    else:
        connection.lost("gone")
    with pytest.raises(Leaving, match=f"the connection is {state.value}") as caught:
        ask(connection, "a")
    assert not caught.value.maybe_executed


def outcome(decided: list[tuple[str, Frame | PreforkError]]) -> PreforkError:
    ((_, error),) = decided
    assert isinstance(error, PreforkError)
    return error


def test_ends() -> None:
    connection = core()
    ask(connection, "a")
    lost = outcome(connection.eof())
    assert isinstance(lost, Unavailable) and lost.maybe_executed
    assert connection.state is State.CLOSED and connection.lost("again") == [] and connection.receive(b"junk") == []

    connection = core()
    ask(connection, "a")
    assert isinstance(outcome(connection.abort("closed")), Cancelled)

    connection = core()
    ask(connection, "a")
    refused = outcome(connection.receive(error(0, ErrorReply(8, "full", True, 9))))
    assert isinstance(refused, Unavailable) and not refused.maybe_executed and refused.retry_after_ms == 9


def test_replies_before_garbage_count() -> None:
    connection = core()
    ask(connection, "a"), ask(connection, "b")
    (one, first), (two, second) = connection.receive(reply(1) + b"garbage" * 9)
    assert (one, two) == ("a", "b") and isinstance(first, Frame) and isinstance(second, Unavailable)


def test_an_error_that_cannot_be_read() -> None:
    connection = core()
    ask(connection, "a")
    assert "cannot be read" in outcome(connection.receive(encode_frame(Kind.ERROR, 1, 1, b"\xc1"))).message

"""Bounds of a client, for all three of its shapes: sizes, places in the pool, and its end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefork.codec.frame import encode_frame
from prefork.codec.message import Codec, Kind
from prefork.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    ProtocolError,
    ResourceExhausted,
)
from tests.client.peer import PATIENCE, Peer

X = {"x": np.arange(3, dtype=np.float32)}
SOON = 0.05  # a deadline that is meant to pass


def test_a_reply_over_max_body(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, max_body=1000)
    call = caller.submit(client, "infer", "m", X)
    session = peer.accept()
    session.send(encode_frame(Kind.INFER_REPLY, Codec.MSGPACK, session.frame().request_id, bytes(5000)))
    with pytest.raises(ResourceExhausted, match="5000 bytes, the client's max_body is 1000"):
        call.result(PATIENCE)
    call = caller.submit(client, "infer", "m", X)
    session.number(session.frame(), 3)
    assert call.result(PATIENCE)["y"].tolist() == [3]


def test_a_reply_that_cannot_be_read(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address)
    call = caller.submit(client, "infer", "m", X)
    session = peer.accept()
    session.send(encode_frame(Kind.INFER_REPLY, Codec.MSGPACK, session.frame().request_id, b"\xc1"))
    with pytest.raises(ProtocolError, match="the server's reply"):
        call.result(PATIENCE)


def test_large_requests_against_a_slow_reader(caller: Any, peer: Peer) -> None:
    """More than the socket buffers hold, both ways: the client must read while it writes."""
    client = caller.client(peer.address, pool_size=1)
    big = np.arange(2_000_000, dtype=np.float64)
    calls = [caller.submit(client, "infer", "m", {"x": big}) for _ in range(3)]
    session = peer.accept()
    for _ in calls:
        session.echo(session.frame())
    for call in calls:
        assert (call.result(PATIENCE)["x"] == big).all()


def test_a_deadline_in_the_middle_of_a_frame_ends_the_connection(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, pool_size=1, retries=0)
    with pytest.raises(DeadlineExceeded):
        caller.call(client, "infer", "m", {"x": np.zeros(8_000_000)}, timeout=0.3)
    peer.accept()  # reads nothing
    after = caller.submit(client, "health", timeout=0.1)
    assert after.result(PATIENCE) is False


def test_close_ends_pending_calls(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, pool_size=1)
    calls = [caller.submit(client, "infer", "m", X) for _ in range(3)]
    session = peer.accept()
    for _ in calls:
        session.frame()
    caller.call(client, "close")
    for call in calls:
        with pytest.raises(Cancelled, match="the client was closed"):
            call.result(PATIENCE)
    with pytest.raises((EOFError, ConnectionResetError)):
        session.frame()
    with pytest.raises(FailedPrecondition, match="the client is closed"):
        caller.call(client, "infer", "m", X)


def test_a_busy_pool_opens_up_to_its_size(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, pool_size=2)
    calls, held = [], []
    for _ in range(2):
        calls.append(caller.submit(client, "infer", "m", X))
        session = peer.accept()
        held.append((session, session.frame()))
    calls += [caller.submit(client, "infer", "m", X) for _ in range(4)]
    for session, first in held:
        later = [session.frame(), session.frame()]  # the fewest in flight first: two more each
        for frame in (first, *later):
            session.number(frame, 1)
    assert all(call.result(PATIENCE)["y"].tolist() == [1] for call in calls)
    assert len(peer.sessions) == 2


def test_calls_over_max_in_flight_wait_for_their_turn(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, pool_size=1, max_in_flight=2)
    calls = [caller.submit(client, "infer", "m", X) for _ in range(8)]
    session = peer.accept()
    for _ in range(4):
        pair = [session.frame(), session.frame()]
        session.sock.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing beyond the two
            session.frame()
        session.sock.settimeout(PATIENCE)
        for frame in pair:
            session.number(frame, 1)
    assert all(call.result(PATIENCE)["y"].tolist() == [1] for call in calls)
    held = caller.submit(client, "infer", "m", X), caller.submit(client, "infer", "m", X)
    frames = [session.frame() for _ in held]
    with pytest.raises(DeadlineExceeded, match="before there was a connection"):
        caller.call(client, "infer", "m", X, timeout=SOON)
    for frame in frames:
        session.number(frame, 2)
    assert all(call.result(PATIENCE)["y"].tolist() == [2] for call in held)

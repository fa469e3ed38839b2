"""What a peer can do to a client, for all three of its shapes. The peer is driven by the test: no clock decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefork.codec.frame import encode_frame, frame_header
from prefork.codec.message import Codec, Kind, Message, ModelMetadata, Ready, ServerMetadata, TensorMetadata
from prefork.errors import (
    Code,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from tests.client.peer import PATIENCE, Peer

X = {"x": np.arange(3, dtype=np.float32)}
SOON = 0.05  # a deadline that is meant to pass


def test_round_trip(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address)
    call = caller.submit(
        client, "infer", "m", X, outputs=["x"], version="2", parameters={"k": 1}, traceparent="00-a-b-01", timeout=9
    )
    session = peer.accept()
    frame, request = session.request()
    assert (request.model_name, request.model_version, request.outputs) == ("m", "2", ["x"])
    assert request.parameters == {"k": 1, "traceparent": "00-a-b-01"}
    assert 0 < frame.timeout_ms <= 9000
    session.echo(frame)
    result = call.result(PATIENCE)
    assert list(result) == ["x"] and (result["x"] == X["x"]).all()


@pytest.mark.parametrize("codec", ["msgpack", "protobuf"])
def test_values_and_codecs(caller: Any, peer: Peer, codec: str) -> None:
    client = caller.client(peer.address, codec=codec)
    sent = {
        "floats": [[1.5, 2.5]], "scalar": 3, "text": ["a", "b"], "sequence": [np.ones(2), np.zeros((0, 3))],
        "map": {"a": 1.0, "b": 2.0}, "maps": [{0: 0.25, 1: 0.75}, {0: 0.5, 1: 0.5}], "none": None,
        "large": np.arange(50_000, dtype=np.int64),
    }  # fmt: skip
    call = caller.submit(client, "infer", "m", sent)
    session = peer.accept()
    frame, request = session.request()
    assert frame.codec == Codec[codec.upper()]
    session.reply(frame, *request.inputs, **request.parameters)
    got = call.result(PATIENCE)
    assert got["floats"].dtype == np.float32 and got["floats"].tolist() == [[1.5, 2.5]]
    assert got["scalar"].dtype == np.int64 and got["scalar"].shape == ()
    assert got["text"].tolist() == ["a", "b"]
    assert [part.shape for part in got["sequence"]] == [(2,), (0, 3)]
    assert got["map"] == sent["map"] and got["maps"] == sent["maps"] and got["none"] is None
    assert (got["large"] == sent["large"]).all()


def test_the_other_questions(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address)
    tensor = TensorMetadata("x", "FP32", [-1, 3])
    answers: dict[Kind, Message] = {
        Kind.MODEL_METADATA: ModelMetadata("m", ["1"], "onnx", [tensor], [tensor]),
        Kind.SERVER_METADATA: ServerMetadata("prefork-serve", "0", []),
        Kind.MODEL_READY: Ready(True),
        Kind.SERVER_READY: Ready(False),
        Kind.SERVER_LIVE: Ready(True),
    }
    questions: list[tuple[str, tuple[str, ...], Any]] = [
        ("metadata", ("m",), answers[Kind.MODEL_METADATA]),
        ("server_metadata", (), answers[Kind.SERVER_METADATA]),
        ("model_ready", ("m",), True),
        ("ready", (), False),
        ("live", (), True),
        ("health", (), False),
    ]
    session = None
    for method, args, expected in questions:
        call = caller.submit(client, method, *args)
        session = session or peer.accept()
        frame = session.frame()
        session.answer(frame, answers[Kind(frame.kind)])
        assert call.result(PATIENCE) == expected


def test_replies_out_of_order(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, pool_size=1)
    calls = [caller.submit(client, "infer", "m", {"x": np.array([n])}) for n in range(6)]
    session = peer.accept()
    frames = [session.frame() for _ in calls]
    for frame in reversed(frames):
        session.echo(frame)
    assert [call.result(PATIENCE)["x"].tolist() for call in calls] == [[n] for n in range(6)]


def test_a_late_reply_reaches_nobody(caller: Any, peer: Peer) -> None:
    """gunicorn#3626: a reply that came after its time-out was taken for the next request's."""
    client = caller.client(peer.address, pool_size=1)
    with pytest.raises(DeadlineExceeded):
        caller.call(client, "infer", "m", X, timeout=SOON)
    session = peer.accept()
    first, cancel = session.frame(), session.frame()
    assert (cancel.kind, cancel.request_id) == (Kind.CANCEL, first.request_id)
    call = caller.submit(client, "infer", "m", X)
    second = session.frame()
    session.number(first, 1)  # late
    session.number(second, 2)
    session.number(second, 3)  # twice
    assert call.result(PATIENCE)["y"].tolist() == [2]
    call = caller.submit(client, "infer", "m", X)
    session.number(session.frame(), 4)
    assert call.result(PATIENCE)["y"].tolist() == [4]
    assert len(peer.sessions) == 1


def test_a_timeout_leaves_the_others_waiting(caller: Any, peer: Peer) -> None:
    """The thread that reads for all is the one that gives up: another must take over."""
    client = caller.client(peer.address, pool_size=1)
    doomed = caller.submit(client, "infer", "m", X, timeout=0.2)
    session = peer.accept()
    session.frame()
    others = [caller.submit(client, "infer", "m", {"x": np.array([n])}) for n in range(3)]
    frames = [session.frame() for _ in others]
    with pytest.raises(DeadlineExceeded, match="no reply within the deadline"):
        doomed.result(PATIENCE)
    assert session.frame().kind == Kind.CANCEL
    for frame in frames:
        session.echo(frame)
    assert [call.result(PATIENCE)["x"].tolist() for call in others] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("code", "error"),
    [(Code.NOT_FOUND, NotFound), (Code.INVALID_ARGUMENT, InvalidArgument), (Code.INTERNAL, Internal)],
)
def test_typed_errors_are_not_retried(caller: Any, peer: Peer, code: Code, error: type[Exception]) -> None:
    client = caller.client(peer.address)
    call = caller.submit(client, "infer", "m", X)
    session = peer.accept()
    session.error(session.frame().request_id, code, "because")
    with pytest.raises(error, match=r"^because$"):
        call.result(PATIENCE)
    assert client.retried == 0


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED])
def test_a_refusal_is_retried(caller: Any, peer: Peer, code: Code) -> None:
    client = caller.client(peer.address)
    call = caller.submit(client, "infer", "m", X, idempotent=False)
    session = peer.accept()
    session.error(session.frame().request_id, code, "busy", retryable=True, retry_after_ms=1)
    session.error(session.frame().request_id, code, "busy", retryable=True)
    session.number(session.frame(), 7)
    assert call.result(PATIENCE)["y"].tolist() == [7]
    assert client.retried == 2


def test_retries_end(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, retries=1)
    call = caller.submit(client, "infer", "m", X)
    session = peer.accept()
    for _ in range(2):
        session.error(session.frame().request_id, Code.UNAVAILABLE, "busy", retryable=True)
    with pytest.raises(Unavailable, match="busy") as caught:
        call.result(PATIENCE)
    assert caught.value.__notes__ == ["after 2 attempts"]


def test_a_refusal_without_hope_is_not_retried(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address)
    call = caller.submit(client, "infer", "m", X)
    session = peer.accept()
    session.error(session.frame().request_id, Code.RESOURCE_EXHAUSTED, "too large", retryable=False)
    with pytest.raises(ResourceExhausted, match="too large"):
        call.result(PATIENCE)
    assert client.retried == 0


def test_no_retry_past_the_deadline(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address)
    call = caller.submit(client, "infer", "m", X, timeout=20)
    session = peer.accept()
    session.error(session.frame().request_id, Code.UNAVAILABLE, "later", retryable=True, retry_after_ms=60_000)
    with pytest.raises(Unavailable, match="later"):
        call.result(PATIENCE)
    assert client.retried == 0


def end_by_close(peer: Peer, at: int) -> None:
    peer.sessions[at].close()


def end_by_reset(peer: Peer, at: int) -> None:
    peer.sessions[at].reset()


def end_by_half_close(peer: Peer, at: int) -> None:
    peer.sessions[at].half_close()


def end_by_garbage(peer: Peer, at: int) -> None:
    peer.sessions[at].send(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def end_inside_body(peer: Peer, at: int) -> None:
    peer.sessions[at].send(frame_header(Kind.INFER_REPLY, Codec.MSGPACK, 1, 100) + b"half")
    peer.sessions[at].close()


def end_by_unused_id(peer: Peer, at: int) -> None:
    peer.sessions[at].send(encode_frame(Kind.INFER_REPLY, Codec.MSGPACK, 77, b"\x80"))


def end_by_wrong_kind(peer: Peer, at: int) -> None:
    peer.sessions[at].send(encode_frame(Kind.SERVER_READY_REPLY, Codec.MSGPACK, 1, b"\x80"))


def end_by_error(peer: Peer, at: int) -> None:
    peer.sessions[at].error(0, Code.INVALID_ARGUMENT, "wrong magic")


ENDS = [
    (end_by_close, "closed the connection|lost"),
    (end_by_reset, "lost"),
    (end_by_half_close, "closed the connection"),
    (end_by_garbage, "broke the protocol: wrong magic"),
    (end_inside_body, "closed the connection: the stream ended inside the body of request id 1: 4 of 100 bytes"),
    (end_by_unused_id, "broke the protocol: a reply under id 77, which was never used"),
    (end_by_wrong_kind, "broke the protocol: request id 1: expected a reply of kind 2, found 10"),
    (end_by_error, "ended the connection: wrong magic"),
]


@pytest.mark.parametrize(("end", "text"), ENDS)
def test_a_lost_connection_fails_what_is_not_idempotent(caller: Any, peer: Peer, end: Any, text: str) -> None:
    client = caller.client(peer.address, pool_size=1)
    calls = [caller.submit(client, "infer", "m", X, idempotent=False) for _ in range(3)]
    session = peer.accept()
    for _ in calls:
        session.frame()
    end(peer, 0)
    for call in calls:
        with pytest.raises(Unavailable, match=text) as caught:
            call.result(PATIENCE)
        assert caught.value.maybe_executed
    assert client.retried == 0
    after = caller.submit(client, "infer", "m", X)
    fresh = peer.accept()
    fresh.number(fresh.frame(), 5)
    assert after.result(PATIENCE)["y"].tolist() == [5]


@pytest.mark.parametrize(("end", "text"), ENDS)
def test_a_lost_connection_is_retried_when_idempotent(caller: Any, peer: Peer, end: Any, text: str) -> None:
    client = caller.client(peer.address, pool_size=1)
    call = caller.submit(client, "infer", "m", X)
    peer.accept().frame()
    end(peer, 0)
    fresh = peer.accept()
    fresh.number(fresh.frame(), 5)
    assert call.result(PATIENCE)["y"].tolist() == [5]
    assert client.retried == 1


def test_a_refused_connection_is_retryable_for_all(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, pool_size=1)
    call = caller.submit(client, "infer", "m", X, idempotent=False)
    session = peer.accept()
    session.frame()
    session.error(0, Code.RESOURCE_EXHAUSTED, "too many connections", retryable=True)
    fresh = peer.accept()
    fresh.number(fresh.frame(), 5)
    assert call.result(PATIENCE)["y"].tolist() == [5]


def test_nobody_listens(caller: Any) -> None:
    gone = Peer()
    gone.close()
    client = caller.client(gone.address, retries=1)
    with pytest.raises(Unavailable, match=f"no connection: {gone.address}: ") as caught:
        caller.call(client, "infer", "m", X)
    assert not caught.value.maybe_executed and client.retried == 1
    assert caller.call(client, "health") is False


def test_the_next_address_is_tried(caller: Any, peer: Peer) -> None:
    gone = Peer()
    gone.close()
    client = caller.client(gone.address, peer.address, retries=0)
    call = caller.submit(client, "infer", "m", X)
    session = peer.accept()
    session.number(session.frame(), 1)
    assert call.result(PATIENCE)["y"].tolist() == [1]


def test_goaway_finishes_and_moves(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, pool_size=1, retries=0)
    first = caller.submit(client, "infer", "m", X)
    old = peer.accept()
    pending = old.frame()
    marker = caller.submit(client, "infer", "m", X)
    marked = old.frame()
    old.goaway()
    old.number(marked, 0)  # once this has arrived, so has GOAWAY
    marker.result(PATIENCE)
    second = caller.submit(client, "infer", "m", X)
    fresh = peer.accept()
    fresh.number(fresh.frame(), 2)
    assert second.result(PATIENCE)["y"].tolist() == [2]
    old.number(pending, 1)
    assert first.result(PATIENCE)["y"].tolist() == [1]
    with pytest.raises(EOFError):
        old.frame()


def test_a_connection_that_begins_with_goaway_costs_no_request(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, pool_size=1, retries=0)
    call = caller.submit(client, "infer", "m", X, idempotent=False)
    session = peer.accept()
    session.goaway()
    try:
        frame = session.frame()  # it was on its way already
    except EOFError:
        session = peer.accept()
        frame = session.frame()
    session.number(frame, 1)
    assert call.result(PATIENCE)["y"].tolist() == [1]


def test_goaway_to_an_idle_connection_costs_no_request(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, pool_size=1, retries=0)
    first = caller.submit(client, "infer", "m", X)
    old = peer.accept()
    old.number(old.frame(), 1)
    first.result(PATIENCE)
    old.goaway()
    old.half_close()
    if caller.reads_when_idle:
        with pytest.raises(EOFError):
            old.frame()
    second = caller.submit(client, "infer", "m", X, idempotent=False)
    fresh = peer.accept()
    fresh.number(fresh.frame(), 2)
    assert second.result(PATIENCE)["y"].tolist() == [2]

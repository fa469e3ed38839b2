"""prefork/codec/frame.py: any split of a stream gives the same events and the same end."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterable

import pytest

from prefork.codec.frame import HEADER_SIZE, Event, Frame, FrameReader, Oversize, encode_frame, frame_header
from prefork.codec.message import Codec, Kind
from prefork.errors import ProtocolError
from prefork.tensor import Buffer

LIMIT = 64
STREAM = b"".join(
    (
        encode_frame(Kind.INFER, Codec.MSGPACK, 1, b"first", 250),
        encode_frame(Kind.CANCEL, Codec.NONE, 1),
        encode_frame(Kind.INFER, Codec.PROTOBUF, 2**64 - 1, b"o" * (LIMIT + 1)),
        encode_frame(200, 9, 3, b"unknown kind and codec", flags=5),
        encode_frame(Kind.INFER, Codec.MSGPACK, 4, b"l" * LIMIT, 2**32 - 1),
    )
)
EVENTS: list[Event] = [
    Frame(Kind.INFER, Codec.MSGPACK, 0, 1, 250, b"first"),
    Frame(Kind.CANCEL, Codec.NONE, 0, 1, 0, b""),
    Oversize(Kind.INFER, Codec.PROTOBUF, 2**64 - 1, LIMIT + 1, LIMIT),
    Frame(200, 9, 5, 3, 0, b"unknown kind and codec"),
    Frame(Kind.INFER, Codec.MSGPACK, 0, 4, 2**32 - 1, b"l" * LIMIT),
]


def read(chunks: Iterable[Buffer]) -> tuple[list[Event], FrameReader]:
    reader = FrameReader(LIMIT)
    events: list[Event] = []
    for chunk in chunks:
        if reader.error is None:
            events += reader.receive(chunk)
    return events, reader


def test_header_is_what_the_protocol_says() -> None:
    frame = encode_frame(Kind.INFER, Codec.PROTOBUF, 0x0102030405060708, b"body", 250, 3)
    assert HEADER_SIZE == 24
    assert frame[:24] == b"PFRK\x01\x02\x01\x03" + struct.pack("<QII", 0x0102030405060708, 4, 250)
    assert frame[24:] == b"body"
    assert frame_header(Kind.INFER, Codec.PROTOBUF, 0x0102030405060708, 4, 250, 3) == frame[:24]


def test_many_frames_in_one_chunk() -> None:
    events, reader = read([STREAM])
    assert events == EVENTS
    assert reader.buffered == 0
    reader.eof()


def test_every_split() -> None:
    for cut in range(len(STREAM) + 1):
        events, reader = read([STREAM[:cut], STREAM[cut:]])
        assert events == EVENTS, cut
        reader.eof()


def test_every_split_in_three() -> None:
    short = STREAM[:60]
    whole, _ = read([short])
    for first in range(len(short)):
        for second in range(first, len(short)):
            assert read([short[:first], short[first:second], short[second:]])[0] == whole


@pytest.mark.parametrize("size", [1, 2, 7, 23, 24, 25])
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_pieces_of_any_buffer(size: int, wrap: type) -> None:
    events, reader = read([wrap(STREAM[i : i + size]) for i in range(0, len(STREAM), size)])
    assert events == EVENTS
    assert reader.buffered == 0


def test_a_body_never_aliases_a_buffer_that_is_used_again() -> None:
    """As an event loop's BufferedProtocol does."""
    shared = bytearray(65536)
    view = memoryview(shared)
    body = bytes(range(256)) * 128
    wire = encode_frame(Kind.INFER, Codec.MSGPACK, 1, body) + encode_frame(Kind.INFER, Codec.MSGPACK, 2, body)
    reader = FrameReader(1 << 20)
    events: list[Event] = []
    for start in range(0, len(wire), len(shared)):
        chunk = wire[start : start + len(shared)]
        shared[: len(chunk)] = chunk
        events += reader.receive(view[: len(chunk)])
    shared[:] = bytes(len(shared))
    assert [event.body for event in events if isinstance(event, Frame)] == [body, body]


def test_large_bodies_of_a_bytes_chunk_are_views() -> None:
    wire = encode_frame(Kind.INFER, Codec.MSGPACK, 1, b"x" * 65536)
    (event,) = FrameReader(1 << 20).receive(wire)
    assert isinstance(event, Frame)
    assert isinstance(event.body, memoryview)
    assert event.body.obj is wire


def test_every_truncation_is_an_error_that_says_where() -> None:
    boundaries, position = {0}, 0
    for size in (5, 0, LIMIT + 1, 22, LIMIT):
        position += HEADER_SIZE + size
        boundaries.add(position)
    for cut in range(len(STREAM)):
        _, reader = read([STREAM[:cut]])
        if cut in boundaries:
            reader.eof()
            continue
        with pytest.raises(ProtocolError, match="the stream ended inside"):
            reader.eof()


def broken(kind: str) -> bytes:
    frame = bytearray(encode_frame(Kind.INFER, Codec.MSGPACK, 9, b"never"))
    if kind == "magic":
        frame[3] ^= 1
    else:
        frame[4] = 2
    return STREAM + bytes(frame) + b"more"


@pytest.mark.parametrize("kind", ["magic", "version"])
def test_frames_before_a_fatal_error_are_delivered_whatever_the_split(kind: str) -> None:
    stream = broken(kind)
    _, whole = read([stream])
    for cut in range(len(stream) + 1):
        events, reader = read([stream[:cut], stream[cut:]])
        assert events == EVENTS
        assert reader.error is not None
        assert whole.error is not None
        assert reader.error.message == whole.error.message
        assert reader.buffered == 0


def test_a_failed_reader_stays_failed() -> None:
    _, reader = read([broken("magic")])
    for _ in range(2):
        with pytest.raises(ProtocolError, match=r"expected b'PFRK' at the start of a frame, found b'PFRJ'"):
            reader.receive(STREAM)
        with pytest.raises(ProtocolError, match="wrong magic"):
            reader.eof()


def test_a_failed_end_stays() -> None:
    _, reader = read([STREAM[:-1]])
    with pytest.raises(ProtocolError, match="inside the body of request id 4: 63 of 64 bytes"):
        reader.eof()
    with pytest.raises(ProtocolError):
        reader.receive(b"x")


def test_partial_is_the_frame_under_way() -> None:
    reader = FrameReader(LIMIT)
    wire = encode_frame(Kind.INFER, Codec.MSGPACK, 5, b"0123456789", 70)
    reader.receive(wire[:23])
    assert reader.partial is None
    assert reader.buffered == 23
    reader.receive(wire[23:24])
    first = reader.partial
    assert first is not None
    assert (first.request_id, first.timeout_ms, len(first.body)) == (5, 70, 0)
    reader.receive(wire[24:30])
    assert reader.partial is first
    assert reader.buffered == 6
    assert reader.receive(wire[30:]) == [Frame(Kind.INFER, Codec.MSGPACK, 0, 5, 70, b"0123456789")]
    assert reader.partial is None


def test_memory_follows_what_was_received_not_what_is_claimed() -> None:
    reader = FrameReader(1 << 31)
    wire = frame_header(Kind.INFER, Codec.MSGPACK, 1, 1 << 31)
    tracemalloc.start()
    reader.receive(wire)
    for _ in range(1000):
        reader.receive(b"0123456789")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reader.buffered == 10_000
    assert peak < 40_000


def test_an_oversize_body_is_not_held() -> None:
    reader = FrameReader(LIMIT)
    size = 1 << 20
    assert reader.receive(frame_header(Kind.INFER, Codec.MSGPACK, 1, size)) == [Oversize(1, 1, 1, size, LIMIT)]
    for _ in range(size // 4096):
        assert reader.receive(bytes(4096)) == []
        assert reader.buffered == 0
    assert reader.receive(encode_frame(Kind.CANCEL, Codec.NONE, 2)) == [Frame(Kind.CANCEL, 0, 0, 2, 0, b"")]


def test_encode_refuses_what_the_header_cannot_hold() -> None:
    for arguments in ((256, 1, 1), (1, 256, 1), (1, 1, 1 << 64), (1, 1, -1)):
        with pytest.raises(struct.error):
            encode_frame(*arguments)

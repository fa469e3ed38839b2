"""Only documented errors come out of the reader and the codecs, whatever goes in."""

from __future__ import annotations

from itertools import islice

from prefork.codec.frame import Frame, FrameReader
from prefork.codec.limits import DEFAULT
from prefork.codec.message import InferReply, InferRequest
from prefork.codec.registry import codec_of
from prefork.errors import InvalidArgument, ProtocolError, Unimplemented
from tests.codec.fuzz import corpus, mutations

CASES = 25_000


def outcome(data: bytes) -> str:
    """What becomes of a stream of these bytes and its end."""
    reader = FrameReader(1 << 20)
    seen = "nothing"
    for event in reader.receive(data):
        seen = decode(event) if isinstance(event, Frame) else "oversize"
    try:
        reader.eof()
    except ProtocolError:
        return seen + ", then broken"
    return seen


def decode(frame: Frame) -> str:
    try:
        message = codec_of(frame.codec).decode(frame.kind, frame.body, DEFAULT)
        tensors = message.inputs if isinstance(message, InferRequest) else []
        for tensor in message.outputs if isinstance(message, InferReply) else tensors:
            tensor.to_numpy()
    except InvalidArgument as e:
        assert 0 < len(e.message) < 5000
        return "refused"
    except Unimplemented:
        return "unimplemented"
    return "read"


def test_the_corpus_is_valid() -> None:
    assert len(corpus()) >= 30
    assert {outcome(frame) for frame in corpus()} == {"read"}


def test_mutations_repeat() -> None:
    assert list(islice(mutations(7), 200)) == list(islice(mutations(7), 200))
    assert list(islice(mutations(7), 200)) != list(islice(mutations(8), 200))


def test_only_documented_errors_come_out() -> None:
    counts: dict[str, int] = {}
    for data in islice(mutations(20_24), CASES):
        key = outcome(data)
        counts[key] = counts.get(key, 0) + 1
    # each outcome is met: the mutations do reach the codecs
    assert counts.keys() >= {"read", "refused", "unimplemented", "nothing, then broken", "oversize, then broken"}
    assert counts["refused"] > CASES / 4


def test_splits_do_not_change_the_outcome() -> None:
    for data in islice(mutations(3), 300):
        whole = FrameReader(1 << 20)
        expected = whole.receive(data)
        reader = FrameReader(1 << 20)
        events = []
        for i in range(0, len(data), 37):
            if reader.error is None:
                events += reader.receive(data[i : i + 37])
        assert events == expected
        assert str(reader.error) == str(whole.error)

"""Templates: what they accept is what the codec would have read, and everything else goes to the codec."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefork.codec.limits import DEFAULT
from prefork.codec.message import Codec, InferRequest
from prefork.codec.registry import codec_of
from prefork.codec.template import LARGEST, MOST, TRIES, Templates
from prefork.errors import InvalidArgument, PreforkError
from prefork.tensor import Tensor
from tests.codec.fuzz import mutations

CODECS = pytest.mark.parametrize("codec", [Codec.MSGPACK, Codec.PROTOBUF])


def request(*values: float, name: str = "x", **more: object) -> InferRequest:
    array = np.array(values, np.float32).reshape(1, -1)
    return InferRequest("model", [Tensor.from_numpy(name, array), Tensor.from_numpy("n", np.arange(3))], **more)


def plain(found: InferRequest) -> object:
    inputs = [(t.name, t.dtype, tuple(t.shape), bytes(t.data)) for t in found.inputs]
    return found.model_name, inputs, found.outputs, found.model_version, found.id, found.parameters


class Counted(Templates):
    """Templates that count their ways to the codec."""

    learned = 0

    def _learn(self, key: tuple[int, int], body: bytes) -> InferRequest:
        self.learned += 1
        return super()._learn(key, body)


@CODECS
def test_second_request_of_a_shape_is_not_parsed(codec: Codec) -> None:
    templates = Counted(DEFAULT)
    write = codec_of(codec).encode_infer_request
    for values in ((1, 2, 3), (4, 5, 6), (0, 0, 0)):
        body = write(request(*values))
        assert plain(templates.decode(codec, body)) == plain(codec_of(codec).decode_infer_request(body))
    assert templates.learned == 1


@CODECS
def test_same_length_with_other_names_is_parsed(codec: Codec) -> None:
    templates = Templates(DEFAULT)
    write = codec_of(codec).encode_infer_request
    for name in ("x", "y", "x", "z"):
        body = write(request(1, 2, 3, name=name))
        assert templates.decode(codec, body).inputs[0].name == name


@CODECS
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_data_is_the_requests_own(codec: Codec, kind: type) -> None:
    templates = Templates(DEFAULT)
    body = codec_of(codec).encode_infer_request(request(1, 2, 3))
    templates.decode(codec, body)
    source = bytearray(body)
    found = templates.decode(codec, kind(source) if kind is not memoryview else memoryview(source))
    source[:] = bytes(len(source))
    assert found.inputs[0].to_numpy().tolist() == [[1, 2, 3]]
    assert found.inputs[0].to_numpy().flags.aligned


@CODECS
def test_parameters_and_ids_that_change_stay_right(codec: Codec) -> None:
    templates = Templates(DEFAULT)
    write = codec_of(codec).encode_infer_request
    for number in range(3 * TRIES):
        body = write(request(1, 2, id=f"{number:03}", parameters={"traceparent": f"00-{number:032x}"}))
        found = templates.decode(codec, body)
        assert (found.id, found.parameters) == (f"{number:03}", {"traceparent": f"00-{number:032x}"})


@CODECS
def test_types_whose_bytes_need_a_look_are_always_parsed(codec: Codec) -> None:
    templates = Templates(DEFAULT)
    good = codec_of(codec).encode_infer_request(InferRequest("m", [Tensor("b", "BOOL", (4,), b"\0\1\0\1")]))
    templates.decode(codec, good)
    with pytest.raises(InvalidArgument, match="BOOL"):
        templates.decode(codec, good.replace(b"\0\1\0\1", b"\0\1\7\1"))


def test_memory_is_bounded() -> None:
    templates = Templates(DEFAULT)
    write = codec_of(Codec.MSGPACK).encode_infer_request
    for size in range(1, 3 * MOST):
        templates.decode(Codec.MSGPACK, write(request(*range(size))))
    templates.decode(Codec.MSGPACK, write(request(*range(LARGEST))))
    assert len(templates._known) <= MOST
    assert len(templates._tries) <= MOST


@CODECS
@given(seed=st.integers(0, 2**32))
def test_mutations_end_as_in_the_codec(codec: Codec, seed: int) -> None:
    templates = Templates(DEFAULT)
    body = codec_of(codec).encode_infer_request(request(1, 2, 3))
    templates.decode(codec, body)
    stream = mutations(seed)
    for other in (next(stream)[24:] for _ in range(20)):
        assert outcome(templates, codec, other) == outcome(None, codec, other)
    flipped = bytearray(body)
    flipped[seed % len(body)] ^= 1 << seed % 8
    assert outcome(templates, codec, bytes(flipped)) == outcome(None, codec, bytes(flipped))


def outcome(templates: Templates | None, codec: Codec, body: bytes) -> object:
    try:
        found = templates.decode(codec, body) if templates else codec_of(codec).decode_infer_request(body, DEFAULT)
    except PreforkError as e:
        return type(e), e.message
    return plain(found)

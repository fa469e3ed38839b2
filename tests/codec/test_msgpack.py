"""prefork/codec/msgpack.py against the msgpack package itself, and with itself."""

from __future__ import annotations

import math
from typing import Any

import msgpack as reference
import numpy as np
import pytest
from hypothesis import given, settings

from prefork.codec import msgpack
from prefork.codec.limits import Limits
from prefork.codec.message import ErrorReply, InferReply, InferRequest, Kind, Message, Ready
from prefork.errors import Code, InvalidArgument, Unimplemented
from prefork.tensor import Tensor
from tests.codec.samples import INPUT, MESSAGES, replies, requests

NUMPY_SHAPE: Any = (np.int64(1),)
NONE: Any = {"a": None}
NUMPY: Any = {"a": np.float32(1)}


@pytest.mark.parametrize(("kind", "message"), MESSAGES)
def test_every_kind_comes_back(kind: Kind, message: Message) -> None:
    assert msgpack.decode(kind, msgpack.encode(kind, message)) == message


@given(requests)
@settings(max_examples=300, deadline=None)
def test_requests_come_back(request: InferRequest) -> None:
    body = msgpack.encode_infer_request(request)
    assert msgpack.decode_infer_request(body) == request
    assert msgpack.decode_infer_request(memoryview(bytearray(body))) == request


@given(replies)
@settings(max_examples=200, deadline=None)
def test_replies_come_back(reply: InferReply) -> None:
    assert msgpack.decode_infer_reply(msgpack.encode_infer_reply(reply)) == reply


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65535, 65536, 100_000])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 200])
def test_bytes_are_those_of_the_reference_packer(size: int, count: int) -> None:
    """The heads are joined by hand; every width of the array's and the data's length is tried."""
    tensors = [Tensor(f"t{i}", "UINT8", (size,), bytes(size if i == 0 else 1)) for i in range(count)]
    items = [{"name": t.name, "datatype": t.dtype, "shape": list(t.shape), "data": bytes(t.data)} for t in tensors]
    parameters: dict[str, bool | int | float | str] = {"p": 1.5}
    written = msgpack.encode_infer_request(InferRequest("m", tensors, ["y"], "1", "i", parameters))
    head = {"model_name": "m", "model_version": "1", "id": "i", "parameters": parameters, "outputs": ["y"]}
    assert written == reference.packb({**head, "inputs": items})
    written = msgpack.encode_infer_reply(InferReply("m", tensors))
    assert written == reference.packb({"model_name": "m", "outputs": items})


def test_views_are_written_without_a_detour() -> None:
    array = np.arange(30_000, dtype="<f4").reshape(3, 10_000)
    reply = msgpack.decode_infer_reply(msgpack.encode_infer_reply(InferReply("m", [Tensor.from_numpy("y", array)])))
    assert np.array_equal(reply.outputs[0].to_numpy(), array)


def test_nan_is_a_value() -> None:
    body = msgpack.encode_infer_request(InferRequest("m", [INPUT], parameters={"p": math.nan}))
    value = msgpack.decode_infer_request(body).parameters["p"]
    assert isinstance(value, float)
    assert math.isnan(value)


@pytest.mark.parametrize("unit", [b"\x91", b"\x81\xa1a", b"\x91\x81\xa1a"])
@pytest.mark.parametrize("depth", [600, 1024, 1025, 5000, 1_000_000])
def test_deep_nesting_is_refused_not_followed(unit: bytes, depth: int) -> None:
    body = b"\x82\xaamodel_name\xa1m\xa1z" + unit * depth + b"\xc0"
    if depth * (2 if len(unit) == 4 else 1) < 1000:
        assert msgpack.decode_infer_request(body) == InferRequest("m", [])  # an unknown key, and no harm
        return
    with pytest.raises(InvalidArgument, match=r"not acceptable msgpack|maps and arrays"):
        msgpack.decode_infer_request(body)


def test_every_truncation_is_refused() -> None:
    body = msgpack.encode_infer_request(InferRequest("m", [INPUT], ["y"], "1", "i", {"a": 1}))
    for cut in range(len(body)):
        with pytest.raises(InvalidArgument):
            msgpack.decode_infer_request(body[:cut])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (InferRequest("m", [Tensor("x", "FP32", NUMPY_SHAPE, bytes(4))]), "cannot be written"),
        (InferRequest("m\ud800", []), "cannot be written"),
        (InferRequest("m", [], parameters=NONE), "parameters.a must be"),
        (InferRequest("m", [], parameters={"a": 1 << 64}), "outside -2^63 to 2^64-1"),
        (InferRequest("m", [], parameters=NUMPY), "parameters.a must be"),
    ],
)
def test_what_cannot_travel_is_named_by_the_writer(request_: InferRequest, expected: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        msgpack.encode_infer_request(request_)
    assert expected in caught.value.message
    assert msgpack.encode_infer_request(InferRequest("m", []))  # the packer is whole again


def test_the_kind_decides_the_class() -> None:
    with pytest.raises(InvalidArgument, match="INFER carries a message of type InferRequest, found Ready"):
        msgpack.encode(Kind.INFER, Ready(True))
    with pytest.raises(Unimplemented, match="kind 77"):
        msgpack.encode(77, None)
    with pytest.raises(Unimplemented, match="kind 77"):
        msgpack.decode(77, b"")


def test_limits_can_be_raised() -> None:
    shape = (1,) * 40
    body = msgpack.encode_infer_request(InferRequest("m", [Tensor("x", "UINT8", shape, b"\x01")]))
    with pytest.raises(InvalidArgument, match="max_dims is 32"):
        msgpack.decode_infer_request(body)
    assert msgpack.decode_infer_request(body, Limits(max_dims=64)).inputs[0].shape == shape


def test_an_error_of_a_later_version_is_readable() -> None:
    body = reference.packb({"code": 99, "message": "new", "later": {"a": [1]}})
    assert msgpack.decode(Kind.ERROR, body) == ErrorReply(99, "new")
    assert msgpack.encode(Kind.ERROR, ErrorReply(Code.NOT_FOUND, "no model")) == reference.packb(
        {"code": 5, "message": "no model"}
    )


def test_dimensions_above_int64_are_refused() -> None:
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1 << 63, 0], "data": b""}
    body = reference.packb({"model_name": "m", "inputs": [tensor]})
    with pytest.raises(InvalidArgument, match=r"inputs\[0\].shape: dimension 9223372036854775808"):
        msgpack.decode_infer_request(body)

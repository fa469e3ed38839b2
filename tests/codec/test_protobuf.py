"""prefork/codec/protobuf.py against classes that protoc made, and with itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, settings

from prefork.codec import protobuf
from prefork.codec.limits import Limits
from prefork.codec.message import ErrorReply, InferReply, InferRequest, Kind, Message, ModelRequest, Ready
from prefork.codec.protobuf_schema import file_descriptor
from prefork.errors import InvalidArgument, Unimplemented
from prefork.tensor import DTYPES, Tensor
from tests.codec import compiled
from tests.codec.samples import IMAGE, INPUT, MESSAGES, METADATA, replies, requests

# Number, name and type of each field of the public protocol; ours may only add messages and fields from 1000 on.
PUBLIC = {
    "ModelInferRequest": "model_name=1 model_version=2 id=3 parameters=4 inputs=5 outputs=6 raw_input_contents=7",
    "ModelInferResponse": "model_name=1 model_version=2 id=3 parameters=4 outputs=5 raw_output_contents=6",
    "InferParameter": "bool_param=1 int64_param=2 string_param=3 double_param=4 uint64_param=5",
    "InferTensorContents": "bool_contents=1 int_contents=2 int64_contents=3 uint_contents=4 uint64_contents=5 "
    "fp32_contents=6 fp64_contents=7 bytes_contents=8",
    "ModelMetadataResponse": "name=1 versions=2 platform=3 inputs=4 outputs=5",
    "ServerMetadataResponse": "name=1 version=2 extensions=3",
}


def normal(message: descriptor_pb2.DescriptorProto) -> descriptor_pb2.DescriptorProto:
    """Without the names that the compiler adds for JSON; nested messages in the order of their names."""
    copy = descriptor_pb2.DescriptorProto()
    copy.CopyFrom(message)
    for field in copy.field:
        field.ClearField("json_name")
    nested = sorted((normal(inner) for inner in message.nested_type), key=lambda inner: inner.name)
    copy.ClearField("nested_type")
    copy.nested_type.extend(nested)
    return copy


def test_the_table_is_the_proto_file() -> None:
    ours, theirs = file_descriptor(), compiled.file_descriptor()
    assert (ours.name, ours.package, ours.syntax) == (theirs.name, theirs.package, theirs.syntax)
    assert [m.name for m in ours.message_type] == [m.name for m in theirs.message_type]
    for mine, other in zip(ours.message_type, theirs.message_type, strict=True):
        assert normal(mine) == normal(other)


def test_the_numbers_are_the_public_protocols() -> None:
    messages = {m.name: m for m in compiled.file_descriptor().message_type}
    for name, expected in PUBLIC.items():
        assert " ".join(f"{f.name}={f.number}" for f in messages[name].field) == expected


@pytest.mark.parametrize(("kind", "message"), MESSAGES)
def test_every_kind_comes_back(kind: Kind, message: Message) -> None:
    assert protobuf.decode(kind, protobuf.encode(kind, message)) == message


@given(requests)
@settings(max_examples=300, deadline=None)
def test_requests_come_back(request: InferRequest) -> None:
    body = protobuf.encode_infer_request(request)
    assert protobuf.decode_infer_request(body) == request
    assert protobuf.decode_infer_request(memoryview(bytearray(body))) == request


@given(replies)
@settings(max_examples=200, deadline=None)
def test_replies_come_back(reply: InferReply) -> None:
    assert protobuf.decode_infer_reply(protobuf.encode_infer_reply(reply)) == reply


def parameter(value: bool | int | float | str) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"bool_param": value}
    if isinstance(value, int):
        return {"int64_param" if value < 1 << 63 else "uint64_param": value}
    return {"double_param" if isinstance(value, float) else "string_param": value}


def real_request(request: InferRequest) -> Any:
    """The same request as a message of the compiled class."""
    return compiled.message_class("ModelInferRequest")(
        model_name=request.model_name,
        model_version=request.model_version,
        id=request.id,
        parameters={key: parameter(value) for key, value in request.parameters.items()},
        inputs=[{"name": t.name, "datatype": t.dtype, "shape": t.shape} for t in request.inputs],
        outputs=[{"name": name} for name in request.outputs],
        raw_input_contents=[bytes(t.data) for t in request.inputs],
    )


@given(requests)
@settings(max_examples=200, deadline=None)
def test_a_compiled_class_reads_and_writes_the_same_bytes(request: InferRequest) -> None:
    real = real_request(request)
    body = protobuf.encode_infer_request(request)
    assert type(real).FromString(body) == real
    assert body == real.SerializeToString(deterministic=True)
    assert protobuf.decode_infer_request(real.SerializeToString()) == request


@given(replies)
@settings(max_examples=100, deadline=None)
def test_a_compiled_class_reads_our_replies(reply: InferReply) -> None:
    real = compiled.message_class("ModelInferResponse").FromString(protobuf.encode_infer_reply(reply))
    assert (real.model_name, real.model_version, real.id) == (reply.model_name, reply.model_version, reply.id)
    assert [(o.name, o.datatype, tuple(o.shape)) for o in real.outputs] == [
        (t.name, t.dtype, t.shape) for t in reply.outputs
    ]
    assert list(real.raw_output_contents) == [bytes(t.data) for t in reply.outputs]
    assert {key: getattr(p, p.WhichOneof("parameter_choice")) for key, p in real.parameters.items()} == reply.parameters


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("ModelReadyRequest", Kind.MODEL_READY, ModelRequest("tiny", "1")),
        ("ModelMetadataRequest", Kind.MODEL_METADATA, ModelRequest("tiny", "1")),
        ("ModelReadyResponse", Kind.MODEL_READY_REPLY, Ready(True)),
        ("ServerReadyResponse", Kind.SERVER_READY_REPLY, Ready(True)),
        ("ServerLiveResponse", Kind.SERVER_LIVE_REPLY, Ready(True)),
        ("ModelMetadataResponse", Kind.MODEL_METADATA_REPLY, METADATA),
        ("ErrorReply", Kind.ERROR, ErrorReply(14, "full", True, 250)),
    ],
)
def test_the_other_messages_are_the_compiled_ones(name: str, kind: Kind, message: Message) -> None:
    body = protobuf.encode(kind, message)
    real = compiled.message_class(name).FromString(body)
    assert real.SerializeToString(deterministic=True) == body
    assert [f.name for f, _ in real.ListFields()], "nothing was recognised"
    assert protobuf.decode(kind, real.SerializeToString()) == message


TYPED = {
    "BOOL": ("bool_contents", [True, False, True]),
    "INT8": ("int_contents", [-128, 0, 127]),
    "INT16": ("int_contents", [-32768, 0, 32767]),
    "INT32": ("int_contents", [-(1 << 31), 0, (1 << 31) - 1]),
    "INT64": ("int64_contents", [-(1 << 63), 0, (1 << 63) - 1]),
    "UINT8": ("uint_contents", [0, 1, 255]),
    "UINT16": ("uint_contents", [0, 1, 65535]),
    "UINT32": ("uint_contents", [0, 1, (1 << 32) - 1]),
    "UINT64": ("uint64_contents", [0, 1, (1 << 64) - 1]),
    "FP32": ("fp32_contents", [0.5, float("inf"), -1.25]),
    "FP64": ("fp64_contents", [0.1, float("-inf"), 1e300]),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_typed_contents_of_every_type(dtype: str) -> None:
    field, values = TYPED.get(dtype, ("bytes_contents", [b"one", b"", b"\xc3\xa9"]))
    real = compiled.message_class("ModelInferRequest")(
        model_name="m", inputs=[{"name": "x", "datatype": dtype, "shape": [3], "contents": {field: values}}]
    )
    body = real.SerializeToString()
    if dtype not in TYPED and dtype != "BYTES":
        with pytest.raises(InvalidArgument, match="can only be given as raw contents"):
            protobuf.decode_infer_request(body)
        return
    array = protobuf.decode_infer_request(body).inputs[0].to_numpy()
    assert array.tolist() == (["one", "", "é"] if dtype == "BYTES" else values)


def test_large_bodies_take_the_same_way() -> None:
    """A large body is cut apart before the runtime sees it; the answer must not differ."""
    typed = {"name": "t", "datatype": "FP32", "shape": [50_000], "contents": {"fp32_contents": [1.5] * 50_000}}
    real = compiled.message_class("ModelInferRequest")(model_name="m", inputs=[typed])
    assert protobuf.decode_infer_request(real.SerializeToString()).inputs[0].to_numpy().sum() == 75_000
    request = InferRequest("m", [IMAGE, INPUT], ["y"], "1", "i", {"a": 1})
    body = protobuf.encode_infer_request(request)
    assert len(body) > 65536
    decoded = protobuf.decode_infer_request(body)
    assert decoded == request
    for tensor in decoded.inputs:
        assert tensor.to_numpy().flags.aligned
    for cut in range(0, len(body), 997):
        with pytest.raises(InvalidArgument):
            protobuf.decode_infer_request(body[:cut])


def test_raw_contents_anywhere_in_the_message() -> None:
    """Protobuf lets fields come in any order."""
    pixels = Tensor("image", "UINT8", (100_000,), np.arange(100_000, dtype=np.uint8).tobytes())
    real = real_request(InferRequest("m", [INPUT, pixels]))
    raw = type(real)(raw_input_contents=real.raw_input_contents[:])
    real.ClearField("raw_input_contents")
    first, second = raw.SerializeToString(), real.SerializeToString()
    for body in (first + second, second + first):
        assert protobuf.decode_infer_request(body).inputs == [INPUT, pixels]


def test_a_large_message_of_small_parts_is_refused() -> None:
    entry = compiled.message_class("ModelInferRequest").InferInputTensor(name="x")
    for i in range(20_000):
        entry.parameters[f"k{i}"].bool_param = True
    body = compiled.message_class("ModelInferRequest")(model_name="m", inputs=[entry]).SerializeToString()
    with pytest.raises(InvalidArgument, match="a tensor has over 304 fields"):
        protobuf.decode_infer_request(body)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (InferRequest("m\ud800", []), "cannot be written as inference.ModelInferRequest"),
        (InferRequest("m", [], parameters={"a": 1 << 64}), "outside -2^63 to 2^64-1"),
        (
            InferRequest("m", [Tensor("x", "UINT8", (1 << 63,), b"")]),
            "cannot be written as inference.ModelInferRequest",
        ),
    ],
)
def test_what_cannot_travel_is_named_by_the_writer(request_: InferRequest, expected: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        protobuf.encode_infer_request(request_)
    assert expected in caught.value.message


def test_kinds_and_limits() -> None:
    with pytest.raises(Unimplemented, match="kind 77"):
        protobuf.decode(77, b"")
    shape = (1,) * 40
    body = protobuf.encode_infer_request(InferRequest("m", [Tensor("x", "UINT8", shape, b"\x01")]))
    with pytest.raises(InvalidArgument, match="max_dims is 32"):
        protobuf.decode_infer_request(body)
    assert protobuf.decode_infer_request(body, Limits(max_dims=64)).inputs[0].shape == shape

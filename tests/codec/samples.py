"""Messages of every kind and tensors of every element type, for tests of both codecs."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from prefork.codec.message import (
    ErrorReply,
    InferReply,
    InferRequest,
    Kind,
    Message,
    ModelMetadata,
    ModelRequest,
    Ready,
    ServerMetadata,
    TensorMetadata,
)
from prefork.errors import Code
from prefork.tensor import DTYPES, Tensor

INPUT = Tensor("x", "FP32", (1, 64), np.arange(64, dtype="<f4").tobytes())
IMAGE = Tensor("image", "FP32", (1, 3, 96, 96), np.linspace(-1, 1, 3 * 96 * 96, dtype="<f4").tobytes())
WORDS = Tensor("words", "BYTES", (2,), b"\x03\x00\x00\x00one\x00\x00\x00\x00")
METADATA = ModelMetadata(
    "tiny",
    ["1", "2"],
    "onnxruntime_onnx",
    [TensorMetadata("x", "FP32", [-1, 64])],
    [TensorMetadata("y", "FP32", [-1, 10], {"kind": "maps", "optional": True})],
)

# At least one message of each kind.
MESSAGES: list[tuple[Kind, Message]] = [
    (Kind.INFER, InferRequest("tiny", [INPUT])),
    (Kind.INFER, InferRequest("tiny", [WORDS, INPUT], ["y"], "1", "id-1", {"a": True, "b": -1, "c": 0.5, "d": "e"})),
    (Kind.INFER, InferRequest("vision", [IMAGE])),
    (Kind.INFER, InferRequest("ints", [], parameters={"a": -(1 << 63), "b": (1 << 63) - 1, "c": 1 << 63})),
    (Kind.INFER_REPLY, InferReply("tiny", [Tensor("y", "FP32", (1, 10), bytes(40))])),
    (Kind.INFER_REPLY, InferReply("tiny", [IMAGE, WORDS], "2", "id-1", {"kind.y": "none"})),
    (Kind.MODEL_METADATA, ModelRequest("tiny", "1")),
    (Kind.MODEL_METADATA_REPLY, METADATA),
    (Kind.MODEL_READY, ModelRequest("tiny")),
    (Kind.MODEL_READY_REPLY, Ready(True)),
    (Kind.SERVER_METADATA, None),
    (Kind.SERVER_METADATA_REPLY, ServerMetadata("prefork-serve", "0.1.0", ["binary"])),
    (Kind.SERVER_READY, None),
    (Kind.SERVER_READY_REPLY, Ready(False)),
    (Kind.SERVER_LIVE, None),
    (Kind.SERVER_LIVE_REPLY, Ready(True)),
    (Kind.CANCEL, None),
    (Kind.GOAWAY, None),
    (Kind.ERROR, ErrorReply(Code.UNAVAILABLE, "the server is draining", True, 250)),
]

# Surrogates cannot be written as UTF-8.
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
parameters = st.dictionaries(
    names,
    st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | names,
    max_size=4,
)


@st.composite
def tensors(draw: st.DrawFn, name: str) -> Tensor:
    """A tensor of any element type; its shape may be empty or hold zeros."""
    kind = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    count = math.prod(shape)
    if kind.bits == 0:
        words = [draw(names).encode() for _ in range(count)]
        data = b"".join(len(word).to_bytes(4, "little") + word for word in words)
    elif kind.name == "BOOL":
        data = bytes(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    else:
        size = kind.nbytes(count)
        data = draw(st.binary(min_size=size, max_size=size))
        if used := count * kind.bits % 8:
            data = data[:-1] + bytes([data[-1] & ((1 << used) - 1)])
    return Tensor(name, kind.name, shape, data)


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[Tensor]:
    return [draw(tensors(name)) for name in draw(st.lists(names, max_size=4, unique=True))]


requests = st.builds(
    InferRequest,
    model_name=names,
    inputs=tensor_lists(),
    outputs=st.lists(names, max_size=3, unique=True),
    model_version=st.just("") | names,
    id=st.just("") | names,
    parameters=parameters,
)
replies = st.builds(
    InferReply,
    model_name=names,
    outputs=tensor_lists(),
    model_version=st.just("") | names,
    id=st.just("") | names,
    parameters=parameters,
)

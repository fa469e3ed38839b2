"""Requests in whole frames that no honest client would send: any field at odds with another, in both codecs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np

from prefork.codec.message import Codec, InferRequest
from prefork.codec.registry import codec_of
from prefork.tensor import DTYPES, Tensor

PIXELS = np.zeros((1, 64), np.float32).tobytes()
DIMS = (-1, -(2**63), 0, 1, 63, 65, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1)
Fields = dict[str, Any]


def tensor(**changed: Any) -> Fields:
    return {"name": "image", "datatype": "FP32", "shape": [1, 64], "data": PIXELS} | changed


def wrong_shape(rng: random.Random) -> Fields:
    return tensor(shape=[rng.choice(DIMS) for _ in range(rng.randint(0, 9))])


def huge_product(rng: random.Random) -> Fields:
    return tensor(shape=[2 ** rng.randint(16, 62)] * rng.randint(2, 8), data=b"")


def wrong_length(rng: random.Random) -> Fields:
    return tensor(data=rng.randbytes(rng.choice((0, 1, 255, 257, 1000))))


def wrong_type(rng: random.Random) -> Fields:
    return tensor(datatype=rng.choice((*DTYPES, "FP33", "", "fp32", "OBJECT")))


def wrong_batch(rng: random.Random) -> Fields:
    n = rng.randint(0, 50)
    return tensor(shape=[n, 64], data=PIXELS * n)


def odd_floats(rng: random.Random) -> Fields:
    values = np.resize(np.array([np.nan, np.inf, -np.inf, 3e38, -0.0], np.float32), 64)
    rng.shuffle(values)
    return tensor(data=values.tobytes())


def lying_strings(rng: random.Random) -> Fields:
    claim = rng.choice((0, 5, 2**31, 2**32 - 1)).to_bytes(4, "little")
    return tensor(datatype="BYTES", shape=[rng.choice((1, 2, 1000, 2**40))], data=claim + rng.randbytes(7))


def other_name(rng: random.Random) -> Fields:
    return tensor(name=rng.choice(("", "Image", "image\0", "i" * 10_000, "kind.image", "image/0", "\N{PILE OF POO}")))


TENSORS: tuple[Callable[[random.Random], Fields], ...] = (
    wrong_shape, huge_product, wrong_length, wrong_type, wrong_batch, odd_floats, lying_strings, other_name,
)  # fmt: skip


def body_of(inputs: list[Fields], **more: Any) -> Fields:
    return {"model_name": "digits", "inputs": inputs} | more


def odd_body(rng: random.Random, inputs: list[Fields]) -> Fields:
    """The request around its tensors, one thing wrong with it more often than not."""
    name = rng.choice(("digits", "digits", "digits", "", "no-such-model", "../digits", "d" * 5000))
    more: Fields = rng.choice((
        {}, {}, {}, {"outputs": ["label", "label"]}, {"outputs": ["nothing"]}, {"outputs": ["label"]},
        {"model_version": "99"}, {"id": "x" * 10_000}, {"parameters": {"kind.image": "maps"}},
        {"parameters": {"kind.image": f"sequence:{rng.choice((0, 1, 10**9, -1))}"}},
        {"parameters": {"kind.image": "none"}}, {"parameters": {f"p{i}": i for i in range(200)}},
        {"parameters": {"traceparent": "\n" * 300}},
    ))  # fmt: skip
    return body_of(inputs, **more) | {"model_name": name}


def deep(rng: random.Random) -> bytes:
    """msgpack nested a few hundred or many thousand levels under a known or an unknown key."""
    key = rng.choice(("inputs", "parameters", "unknown", "model_name"))
    depth = rng.choice((10, 400, 1100, 50_000))
    inner = (b"\x91" * depth) + b"\xc0" if rng.random() < 0.5 else (b"\x81\xa1a" * depth) + b"\xc0"
    return b"\x81" + msgpack.packb(key) + inner


def requests(rng: random.Random) -> Iterator[tuple[int, int, bytes]]:
    """(codec, request id, body) without end; the id is never 0."""
    while True:
        inputs = [rng.choice(TENSORS)(rng) for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 20)))]
        request_id = rng.randint(1, 2**40)
        fields = odd_body(rng, inputs)
        if rng.random() < 0.1:
            yield Codec.MSGPACK, request_id, deep(rng)
        elif rng.random() < 0.6 or not (body := as_protobuf(fields)):
            yield Codec.MSGPACK, request_id, as_msgpack(fields)
        else:
            yield Codec.PROTOBUF, request_id, body


def as_msgpack(fields: Fields) -> bytes:
    packed = msgpack.packb(fields)
    assert isinstance(packed, bytes)
    return packed


def as_protobuf(fields: Fields) -> bytes:
    """The same by the codec; empty for what its writer refuses to write."""
    tensors = [Tensor(t["name"], t["datatype"], tuple(t["shape"]), t["data"]) for t in fields["inputs"]]
    request = InferRequest(
        fields["model_name"], tensors, fields.get("outputs", []), fields.get("model_version", ""),
        fields.get("id", ""), fields.get("parameters", {}),
    )  # fmt: skip
    try:
        return bytes(codec_of(Codec.PROTOBUF).encode_infer_request(request))
    except Exception:
        return b""

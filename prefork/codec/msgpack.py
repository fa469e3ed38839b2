"""Bodies in msgpack: maps with the names of the Open Inference Protocol's messages. Sans-IO.

    INFER          {model_name, model_version?, id?, parameters?, outputs?: [name], inputs: [tensor]}
    INFER_REPLY    {model_name, model_version?, id?, parameters?, outputs: [tensor]}
    tensor         {name: str, datatype: str, shape: [int], data: bin}     data in wire form, see prefork/tensor.py
    MODEL_*        {name, version?}
    metadata       {name, versions, platform, inputs: [meta], outputs: [meta]}
    meta           {name, datatype, shape, parameters?}
    ERROR          {code, message, retryable?, retry_after_ms?}

This file is the codec's face; its two halves are msgpack_read.py and msgpack_write.py. Specification of the encoding:
https://github.com/msgpack/msgpack/blob/master/spec.md. Used by the worker and by clients.
"""

from __future__ import annotations

from prefork.codec import dispatch
from prefork.codec.limits import DEFAULT, Limits
from prefork.codec.message import Codec, Message
from prefork.codec.msgpack_read import DECODERS, decode_infer_reply, decode_infer_request
from prefork.codec.msgpack_write import ENCODERS, encode_infer_reply, encode_infer_request
from prefork.tensor import Buffer

__all__ = (
    "CODEC",
    "decode",
    "decode_infer_reply",
    "decode_infer_request",
    "encode",
    "encode_infer_reply",
    "encode_infer_request",
)

CODEC = Codec.MSGPACK


def encode(kind: int, message: Message) -> bytes:
    """The body of a frame of `kind`. Raises Unimplemented for an unknown kind, else InvalidArgument."""
    return dispatch.encode(ENCODERS, kind, message)


def decode(kind: int, body: Buffer, limits: Limits = DEFAULT) -> Message:
    """The message in `body`. Raises Unimplemented for an unknown kind, else InvalidArgument naming the field."""
    return dispatch.decode(DECODERS, kind, body, limits)

"""Bodies in protobuf: the messages of open_inference.proto, on the wire those of the Open Inference Protocol. Sans-IO.

Tensors travel raw (raw_input_contents, raw_output_contents); typed contents are read too, except where the protocol has
none. A tensor's metadata parameters are a field of our own, number 1000, which other readers skip. Errors are a message
of our own, ErrorReply.

This file is the codec's face; its halves are protobuf_read.py and protobuf_write.py over protobuf_schema.py. Protocol:
https://github.com/kserve/open-inference-protocol. Used by the worker and by clients.
"""

from __future__ import annotations

from prefork.codec import dispatch
from prefork.codec.limits import DEFAULT, Limits
from prefork.codec.message import Codec, Message
from prefork.codec.protobuf_read import DECODERS, decode_infer_reply, decode_infer_request
from prefork.codec.protobuf_write import ENCODERS, encode_infer_reply, encode_infer_request
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

CODEC = Codec.PROTOBUF


def encode(kind: int, message: Message) -> bytes:
    """The body of a frame of `kind`. Raises Unimplemented for an unknown kind, else InvalidArgument."""
    return dispatch.encode(ENCODERS, kind, message)


def decode(kind: int, body: Buffer, limits: Limits = DEFAULT) -> Message:
    """The message in `body`. Raises Unimplemented for an unknown kind, else InvalidArgument naming the field."""
    return dispatch.decode(DECODERS, kind, body, limits)

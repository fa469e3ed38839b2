"""Which codec a frame's number means. Used by the worker and by clients."""

from __future__ import annotations

from typing import Protocol

from prefork.codec import msgpack, protobuf
from prefork.codec.limits import Limits
from prefork.codec.message import Codec, InferReply, InferRequest, Message
from prefork.errors import Unimplemented
from prefork.tensor import Buffer


class BodyCodec(Protocol):
    """What prefork.codec.msgpack and prefork.codec.protobuf both are, as modules."""

    @property
    def CODEC(self) -> Codec: ...
    def encode(self, kind: int, message: Message) -> bytes: ...
    def decode(self, kind: int, body: Buffer, limits: Limits = ...) -> Message: ...
    def decode_infer_request(self, body: Buffer, limits: Limits = ...) -> InferRequest: ...
    def decode_infer_reply(self, body: Buffer, limits: Limits = ...) -> InferReply: ...
    def encode_infer_request(self, request: InferRequest) -> bytes: ...
    def encode_infer_reply(self, reply: InferReply) -> bytes: ...


CODECS: dict[int, BodyCodec] = {Codec.MSGPACK: msgpack, Codec.PROTOBUF: protobuf}


def codec_of(number: int) -> BodyCodec:
    """The codec with this number in the frame's header. Raises Unimplemented for NONE and unknown numbers."""
    try:
        return CODECS[number]
    except KeyError:
        raise Unimplemented(f"codec {number} is unknown; expected 1 (msgpack) or 2 (protobuf)") from None

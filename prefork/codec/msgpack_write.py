"""Writing msgpack bodies: messages in, bytes out. Reading is in msgpack_read.py; no I/O here.

Fields at their default are left out; tensors come last in a body, and `data` last in a tensor, so that large data is
joined behind a small packed head with a single copy. Used by the worker and by clients.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from msgpack import Packer

from prefork.codec.dispatch import NOTHING, Encoder
from prefork.codec.limits import UNBOUNDED
from prefork.codec.message import (
    ErrorReply,
    InferReply,
    InferRequest,
    Kind,
    ModelMetadata,
    ModelRequest,
    Parameters,
    Ready,
    ServerMetadata,
    TensorMetadata,
)
from prefork.codec.validate import parameters as check_parameters
from prefork.errors import InvalidArgument
from prefork.tensor import Buffer, Tensor

Map = dict[str, Any]

# A packer is not reentrant: each call takes its own. pop and append are atomic.
_packers: list[Packer] = []
_MOST = (1 << 32) - 1


def _pack(value: Any) -> bytes:
    try:
        packer = _packers.pop()
    except IndexError:
        packer = Packer()
    try:
        packed = packer.pack(value)
    except (TypeError, ValueError, OverflowError) as e:
        raise InvalidArgument(f"the message cannot be written as msgpack: {e}") from None
    _packers.append(packer)
    return packed


def _one_more(packed: bytes) -> bytes:
    """A packed map whose count is raised by one; the entry follows. Ours stay below 15 entries, so fixmap."""
    return bytes((packed[0] + 1,)) + packed[1:]


@lru_cache(maxsize=4096)
def _tensor_head(name: str, dtype: str, shape: tuple[int, ...], size: int) -> bytes:
    """A tensor up to its `size` bytes of data. A model gives the same few again and again, so they are kept."""
    return _one_more(_pack({"name": name, "datatype": dtype, "shape": shape})) + b"\xa4data" + _bin_header(size)


@lru_cache(maxsize=256)
def _plain_head(model_name: str, model_version: str, field: str, count: int) -> bytes:
    return _head(model_name, model_version, "", {}, [], field) + _array_header(count)


def _head(
    model_name: str, model_version: str, request_id: str, parameters: Parameters, outputs: list[str], field: str
) -> bytes:
    """The body up to the array of tensors called `field`."""
    root: Map = {"model_name": model_name}
    if model_version:
        root["model_version"] = model_version
    if request_id:
        root["id"] = request_id
    if parameters:
        root["parameters"] = check_parameters(parameters, UNBOUNDED)
    if outputs:
        root["outputs"] = outputs
    return _one_more(_pack(root)) + _pack(field)


def _array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 + count,))
    return struct.pack(">BH", 0xDC, count) if count < 1 << 16 else struct.pack(">BI", 0xDD, count)


def _bin_header(size: int) -> bytes:
    if size < 1 << 8:
        return bytes((0xC4, size))
    if size < 1 << 16:
        return struct.pack(">BH", 0xC5, size)
    if size > _MOST:
        raise InvalidArgument(f"a tensor of {size} bytes is over what msgpack can hold, {_MOST}")
    return struct.pack(">BI", 0xC6, size)


def _join(head: bytes, tensors: list[Tensor]) -> bytes:
    parts: list[Buffer] = [head]
    for tensor in tensors:
        data = tensor.data
        parts += (_tensor_head(tensor.name, tensor.dtype, tensor.shape, len(data)), data)
    return b"".join(parts)


def encode_infer_request(request: InferRequest) -> bytes:
    """Body of INFER. Raises InvalidArgument for what cannot travel."""
    if request.id or request.parameters or request.outputs:
        head = _head(
            request.model_name, request.model_version, request.id, request.parameters, request.outputs, "inputs"
        ) + _array_header(len(request.inputs))
    else:
        head = _plain_head(request.model_name, request.model_version, "inputs", len(request.inputs))
    return _join(head, request.inputs)


def encode_infer_reply(reply: InferReply) -> bytes:
    """Body of INFER_REPLY. Raises InvalidArgument for what cannot travel."""
    if reply.id or reply.parameters:
        head = _head(reply.model_name, reply.model_version, reply.id, reply.parameters, [], "outputs")
        head += _array_header(len(reply.outputs))
    else:
        head = _plain_head(reply.model_name, reply.model_version, "outputs", len(reply.outputs))
    return _join(head, reply.outputs)


def _encode_model_request(request: ModelRequest) -> bytes:
    return _pack({"name": request.name, **({"version": request.version} if request.version else {})})


def _metadata(item: TensorMetadata) -> Map:
    root: Map = {"name": item.name, "datatype": item.datatype, "shape": item.shape}
    if item.parameters:
        root["parameters"] = check_parameters(item.parameters, UNBOUNDED)
    return root


def _encode_model_metadata(metadata: ModelMetadata) -> bytes:
    inputs, outputs = [_metadata(t) for t in metadata.inputs], [_metadata(t) for t in metadata.outputs]
    root = {"name": metadata.name, "versions": metadata.versions, "platform": metadata.platform}
    return _pack({**root, "inputs": inputs, "outputs": outputs})


def _encode_server_metadata(metadata: ServerMetadata) -> bytes:
    return _pack({"name": metadata.name, "version": metadata.version, "extensions": metadata.extensions})


def _encode_error(error: ErrorReply) -> bytes:
    root: Map = {"code": int(error.code), "message": error.message}
    if error.retryable:
        root["retryable"] = True
    if error.retry_after_ms:
        root["retry_after_ms"] = error.retry_after_ms
    return _pack(root)


def _flag(key: str) -> Callable[[Ready], bytes]:
    return lambda answer: _pack({key: bool(answer.ready)})


ENCODERS: dict[int, Encoder] = {
    Kind.INFER: (InferRequest, encode_infer_request),
    Kind.INFER_REPLY: (InferReply, encode_infer_reply),
    Kind.MODEL_METADATA: (ModelRequest, _encode_model_request),
    Kind.MODEL_METADATA_REPLY: (ModelMetadata, _encode_model_metadata),
    Kind.MODEL_READY: (ModelRequest, _encode_model_request),
    Kind.MODEL_READY_REPLY: (Ready, _flag("ready")),
    Kind.SERVER_METADATA: NOTHING,
    Kind.SERVER_METADATA_REPLY: (ServerMetadata, _encode_server_metadata),
    Kind.SERVER_READY: NOTHING,
    Kind.SERVER_READY_REPLY: (Ready, _flag("ready")),
    Kind.SERVER_LIVE: NOTHING,
    Kind.SERVER_LIVE_REPLY: (Ready, _flag("live")),
    Kind.CANCEL: NOTHING,
    Kind.GOAWAY: NOTHING,
    Kind.ERROR: (ErrorReply, _encode_error),
}

"""Writing protobuf bodies: messages in, bytes out. Reading is in protobuf_read.py; no I/O here.

The two messages of the hot path are put together by hand from kept heads and the raw data, copied once; everything else
goes through the runtime. Used by the worker and by clients. Encoding: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

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
from prefork.codec.protobuf_schema import MESSAGES, message_class
from prefork.codec.validate import parameters as check_parameters
from prefork.errors import InvalidArgument
from prefork.tensor import Buffer, Tensor

_Request = message_class("ModelInferRequest")
_Reply = message_class("ModelInferResponse")
_ModelRequest = message_class("ModelMetadataRequest")  # ModelReadyRequest has the same fields
_ModelMetadata = message_class("ModelMetadataResponse")
_ServerMetadata = message_class("ServerMetadataResponse")
_Ready = message_class("ModelReadyResponse")  # ServerReadyResponse and ServerLiveResponse have the same field
_Error = message_class("ErrorReply")
_Parameter = message_class("InferParameter")


def _fill(cls: Any, **fields: Any) -> Any:
    """A new message. Raises InvalidArgument for a value that a field cannot hold."""
    try:
        return cls(**fields)
    except (TypeError, ValueError) as e:
        raise InvalidArgument(f"the message cannot be written as {cls.DESCRIPTOR.full_name}: {e}") from None


def _serialize(message: Any) -> bytes:
    packed: bytes = message.SerializeToString(deterministic=True)  # maps in the order of their keys
    return packed


def _parameter(value: bool | int | float | str) -> Any:
    if isinstance(value, bool):
        return _Parameter(bool_param=value)
    if isinstance(value, int):
        return _Parameter(int64_param=value) if value < 1 << 63 else _Parameter(uint64_param=value)
    return _Parameter(double_param=value) if isinstance(value, float) else _fill(_Parameter, string_param=value)


def _parameters(values: Parameters) -> dict[str, Any]:
    return {key: _parameter(value) for key, value in check_parameters(values, UNBOUNDED).items()}


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(message: str, field: str) -> bytes:
    """The key of a field with a length."""
    return _varint(MESSAGES[message][field][0] << 3 | 2)


_TENSORS = {_Request: _key("ModelInferRequest", "inputs"), _Reply: _key("ModelInferResponse", "outputs")}
_RAW = {
    _Request: _key("ModelInferRequest", "raw_input_contents"),
    _Reply: _key("ModelInferResponse", "raw_output_contents"),
}


@lru_cache(maxsize=4096)
def _tensor_head(cls: Any, name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """A tensor's entry in `inputs` or `outputs`. A model gives the same few again and again, so they are kept."""
    tensor = {"name": name, "datatype": dtype, "shape": shape}
    return _serialize(_fill(cls, **{"inputs" if cls is _Request else "outputs": [tensor]}))


@lru_cache(maxsize=256)
def _plain_head(cls: Any, model_name: str, model_version: str) -> bytes:
    return _serialize(_fill(cls, model_name=model_name, model_version=model_version))


def _head(cls: Any, message: InferRequest | InferReply) -> bytes:
    """The fields before the tensors."""
    if not message.id and not message.parameters:
        return _plain_head(cls, message.model_name, message.model_version)
    return _serialize(
        _fill(
            cls,
            model_name=message.model_name,
            model_version=message.model_version,
            id=message.id,
            parameters=_parameters(message.parameters),
        )
    )


def _join(cls: Any, head: bytes, tensors: list[Tensor], tail: bytes = b"") -> bytes:
    """A whole message, fields in the order of their numbers."""
    parts: list[Buffer] = [head]
    raw = _RAW[cls]
    contents: list[Buffer] = [tail]
    for tensor in tensors:
        data = tensor.data
        parts.append(_tensor_head(cls, tensor.name, tensor.dtype, tensor.shape))
        contents += (raw, _varint(len(data)), data)
    return b"".join(parts + contents)


def encode_infer_request(request: InferRequest) -> bytes:
    """Body of INFER, tensors raw. Raises InvalidArgument for what cannot travel."""
    tail = b""
    if request.outputs:
        tail = _serialize(_fill(_Request, outputs=[{"name": name} for name in request.outputs]))
    return _join(_Request, _head(_Request, request), request.inputs, tail)


def encode_infer_reply(reply: InferReply) -> bytes:
    """Body of INFER_REPLY, tensors raw. Raises InvalidArgument for what cannot travel."""
    return _join(_Reply, _head(_Reply, reply), reply.outputs)


def _encode_model_request(request: ModelRequest) -> bytes:
    return _serialize(_fill(_ModelRequest, name=request.name, version=request.version))


def _metadata(item: TensorMetadata) -> dict[str, Any]:
    parameters = _parameters(item.parameters)
    return {"name": item.name, "datatype": item.datatype, "shape": item.shape, "parameters": parameters}


def _encode_model_metadata(metadata: ModelMetadata) -> bytes:
    return _serialize(
        _fill(
            _ModelMetadata,
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=[_metadata(item) for item in metadata.inputs],
            outputs=[_metadata(item) for item in metadata.outputs],
        )
    )


def _encode_server_metadata(metadata: ServerMetadata) -> bytes:
    return _serialize(
        _fill(_ServerMetadata, name=metadata.name, version=metadata.version, extensions=metadata.extensions)
    )


def _encode_ready(answer: Ready) -> bytes:
    return _serialize(_fill(_Ready, ready=answer.ready))


def _encode_error(error: ErrorReply) -> bytes:
    return _serialize(
        _fill(
            _Error,
            code=int(error.code),
            message=error.message,
            retryable=error.retryable,
            retry_after_ms=error.retry_after_ms,
        )
    )


ENCODERS: dict[int, Encoder] = {
    Kind.INFER: (InferRequest, encode_infer_request),
    Kind.INFER_REPLY: (InferReply, encode_infer_reply),
    Kind.MODEL_METADATA: (ModelRequest, _encode_model_request),
    Kind.MODEL_METADATA_REPLY: (ModelMetadata, _encode_model_metadata),
    Kind.MODEL_READY: (ModelRequest, _encode_model_request),
    Kind.MODEL_READY_REPLY: (Ready, _encode_ready),
    Kind.SERVER_METADATA: NOTHING,
    Kind.SERVER_METADATA_REPLY: (ServerMetadata, _encode_server_metadata),
    Kind.SERVER_READY: NOTHING,
    Kind.SERVER_READY_REPLY: (Ready, _encode_ready),
    Kind.SERVER_LIVE: NOTHING,
    Kind.SERVER_LIVE_REPLY: (Ready, _encode_ready),
    Kind.CANCEL: NOTHING,
    Kind.GOAWAY: NOTHING,
    Kind.ERROR: (ErrorReply, _encode_error),
}

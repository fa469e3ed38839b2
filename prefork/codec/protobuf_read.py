"""Reading protobuf bodies: bytes in, messages out, every field proven. Writing is in protobuf_write.py; no I/O here.

Unknown fields are ignored, as protobuf does. Used by the worker and by clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from prefork.codec import typed_contents, validate
from prefork.codec.dispatch import Decoder, no_body
from prefork.codec.limits import DEFAULT, Limits
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
from prefork.codec.protobuf_scan import LARGE, split
from prefork.codec.protobuf_schema import MESSAGES, ONEOF, message_class
from prefork.errors import InvalidArgument
from prefork.tensor import Buffer, Tensor

_ONE_BYTE = ("UINT8", "INT8", "BOOL", "BYTES")

_Request = message_class("ModelInferRequest")
_Reply = message_class("ModelInferResponse")
_ModelRequest = message_class("ModelMetadataRequest")  # ModelReadyRequest has the same fields
_ModelMetadata = message_class("ModelMetadataResponse")
_ServerMetadata = message_class("ServerMetadataResponse")
_Question = message_class("ServerLiveRequest")
_Ready = message_class("ModelReadyResponse")  # ServerReadyResponse and ServerLiveResponse have the same field
_Error = message_class("ErrorReply")


def _parse(cls: Any, body: Buffer) -> Any:
    try:
        return cls.FromString(body)
    except DecodeError as e:
        name = cls.DESCRIPTOR.full_name
        raise InvalidArgument(f"the body is not acceptable protobuf: expected {name}: {e}") from None


def _parse_infer(cls: Any, body: Buffer, tensors: str, raw: str, limits: Limits) -> tuple[Any, Sequence[Buffer]]:
    """The message and its raw contents, which a large body keeps out of the runtime's hands."""
    if len(body) <= LARGE:
        message = _parse(cls, body)
        return message, getattr(message, raw)
    fields = MESSAGES[cls.DESCRIPTOR.name]
    rest, contents = split(memoryview(body), fields[raw][0], fields[tensors][0], limits)
    return _parse(cls, rest), contents


def _tensors(items: Any, raw: Sequence[Buffer], raw_field: str, field: str, limits: Limits) -> list[Tensor]:
    given, expected = len(raw), len(items)
    if given != expected and given:
        raise InvalidArgument(f"{raw_field} has {given} entries, {field} has {expected}")
    if expected > 1:
        validate.count(expected, limits, field)
    made: list[Tensor] = []
    for index, item in enumerate(items[:]):  # a slice is a list, which is iterated three times faster
        dtype, shape = item.datatype, tuple(item.shape[:])
        if item.HasField("contents"):
            if given:
                raise InvalidArgument(f"{field}[{index}].contents must not be given together with {raw_field}")
            data: Buffer = typed_contents.to_bytes(item.contents, dtype, shape, limits, f"{field}[{index}]")
        elif given:
            data = raw[index]
            if type(data) is memoryview and dtype not in _ONE_BYTE:
                data = bytes(data)  # somewhere in a body it is not aligned to its elements, in its own object it is
        elif 0 in shape:
            data = b""
        else:
            raise InvalidArgument(f"{field}[{index}]: neither {raw_field} nor contents hold its data")
        made.append(validate.tensor(item.name, dtype, shape, data, limits, field, index))
    return validate.tensors(made, field) if len(made) > 1 else made


def _parameters(entries: Any, limits: Limits, where: str = "parameters") -> Parameters:
    values: Parameters = {}
    for key, entry in entries.items():
        choice = entry.WhichOneof(ONEOF)
        if choice is None:
            raise InvalidArgument(f"{where}.{key} has no value")
        values[key] = getattr(entry, choice)
    return validate.parameters(values, limits, where)


def _head(message: Any, limits: Limits) -> tuple[str, str, str, Parameters]:
    """model_name, model_version, id and parameters, which requests and replies share."""
    model, version, request_id = message.model_name, message.model_version, message.id
    if not model or len(model) * 4 > limits.max_name_bytes:
        validate.name(model, limits, "model_name")
    if version:
        validate.label(version, limits, "model_version")
    if request_id:
        validate.label(request_id, limits, "id")
    entries = message.parameters
    return model, version, request_id, _parameters(entries, limits) if entries else {}


def decode_infer_request(body: Buffer, limits: Limits = DEFAULT) -> InferRequest:
    """Body of INFER, tensors raw or typed. Raises InvalidArgument naming the field."""
    message, raw = _parse_infer(_Request, body, "inputs", "raw_input_contents", limits)
    model, version, request_id, parameters = _head(message, limits)
    inputs = _tensors(message.inputs, raw, "raw_input_contents", "inputs", limits)
    outputs: list[str] = []
    if message.outputs:
        outputs = _names([item.name for item in message.outputs], limits, "outputs")
        validate.unique(outputs, "outputs")
    return InferRequest(model, inputs, outputs, version, request_id, parameters)


def decode_infer_reply(body: Buffer, limits: Limits = DEFAULT) -> InferReply:
    """Body of INFER_REPLY, tensors raw or typed. Raises InvalidArgument naming the field."""
    message, raw = _parse_infer(_Reply, body, "outputs", "raw_output_contents", limits)
    model, version, request_id, parameters = _head(message, limits)
    outputs = _tensors(message.outputs, raw, "raw_output_contents", "outputs", limits)
    return InferReply(model, outputs, version, request_id, parameters)


def _names(names: list[str], limits: Limits, field: str) -> list[str]:
    validate.count(len(names), limits, field)
    for index, text in enumerate(names):
        validate.name(text, limits, f"{field}[{index}]")
    return names


def _decode_model_request(body: Buffer, limits: Limits) -> ModelRequest:
    message = _parse(_ModelRequest, body)
    validate.name(message.name, limits, "name")
    validate.label(message.version, limits, "version")
    return ModelRequest(message.name, message.version)


def _tensor_metadata(items: Any, field: str, limits: Limits) -> list[TensorMetadata]:
    validate.count(len(items), limits, field)
    made: list[TensorMetadata] = []
    for index, item in enumerate(items):
        validate.name(item.name, limits, f"{field}[{index}].name")
        parameters = _parameters(item.parameters, limits, f"{field}[{index}].parameters")
        made.append(TensorMetadata(item.name, item.datatype, list(item.shape), parameters))
    return made


def _decode_model_metadata(body: Buffer, limits: Limits) -> ModelMetadata:
    message = _parse(_ModelMetadata, body)
    inputs, outputs = (_tensor_metadata(getattr(message, field), field, limits) for field in ("inputs", "outputs"))
    return ModelMetadata(
        message.name, _names(list(message.versions), limits, "versions"), message.platform, inputs, outputs
    )


def _decode_server_metadata(body: Buffer, limits: Limits) -> ServerMetadata:
    message = _parse(_ServerMetadata, body)
    return ServerMetadata(message.name, message.version, _names(list(message.extensions), limits, "extensions"))


def _decode_ready(body: Buffer, limits: Limits) -> Ready:
    return Ready(_parse(_Ready, body).ready)


def _decode_question(body: Buffer, limits: Limits) -> None:
    _parse(_Question, body)


def _decode_error(body: Buffer, limits: Limits) -> ErrorReply:
    message = _parse(_Error, body)
    return ErrorReply(message.code, message.message, message.retryable, message.retry_after_ms)


DECODERS: dict[int, Decoder] = {
    Kind.INFER: decode_infer_request,
    Kind.INFER_REPLY: decode_infer_reply,
    Kind.MODEL_METADATA: _decode_model_request,
    Kind.MODEL_METADATA_REPLY: _decode_model_metadata,
    Kind.MODEL_READY: _decode_model_request,
    Kind.MODEL_READY_REPLY: _decode_ready,
    Kind.SERVER_METADATA: _decode_question,
    Kind.SERVER_METADATA_REPLY: _decode_server_metadata,
    Kind.SERVER_READY: _decode_question,
    Kind.SERVER_READY_REPLY: _decode_ready,
    Kind.SERVER_LIVE: _decode_question,
    Kind.SERVER_LIVE_REPLY: _decode_ready,
    Kind.CANCEL: no_body,
    Kind.GOAWAY: no_body,
    Kind.ERROR: _decode_error,
}

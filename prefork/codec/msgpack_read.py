"""Reading msgpack bodies: bytes in, messages out, every field proven. Writing is in msgpack_write.py; no I/O here.

An unknown key is ignored (a later version may add some), a key that is not a string is refused. The layout of the
bodies is in msgpack.py. Used by the worker and by clients.
"""

from __future__ import annotations

from typing import Any, NoReturn

from prefork.codec import msgpack_fields as fields
from prefork.codec import validate
from prefork.codec.dispatch import Decoder, no_body
from prefork.codec.limits import DEFAULT, Limits
from prefork.codec.message import (
    ErrorReply,
    InferReply,
    InferRequest,
    Kind,
    ModelMetadata,
    ModelRequest,
    Ready,
    ServerMetadata,
    TensorMetadata,
)
from prefork.errors import InvalidArgument
from prefork.tensor import Buffer, Tensor


def _tensors(root: fields.Map, field: str, limits: Limits) -> list[Tensor]:
    items = fields.array(root, field)
    made: list[Tensor] = []
    for index, item in enumerate(items):
        if type(item) is not dict:
            fields.wrong(item, "a map", f"{field}[{index}]")
        name, dtype, shape, data = item.get("name"), item.get("datatype"), item.get("shape"), item.get("data")
        if type(name) is not str or type(dtype) is not str or type(shape) is not list or type(data) is not bytes:
            _explain_tensor(item, f"{field}[{index}]")
        for dim in shape:
            if type(dim) is not int:
                _explain_tensor(item, f"{field}[{index}]")
        if len(item) != 4:
            fields.keys(item, f"{field}[{index}]")
        made.append(validate.tensor(name, dtype, tuple(shape), data, limits, field, index))
    if len(made) > 1:
        validate.count(len(made), limits, field)
        validate.tensors(made, field)
    return made


def _explain_tensor(item: fields.Map, where: str) -> NoReturn:
    for key in ("name", "datatype"):
        if key not in item:
            raise InvalidArgument(f"{where}.{key} is missing")
        fields.text(item, key, where + ".")
    fields.shape(item, where)
    if "data" not in item:
        raise InvalidArgument(f"{where}.data is missing")
    fields.wrong(item["data"], "binary", f"{where}.data")


def _head(root: fields.Map, limits: Limits) -> tuple[str, str, str, dict[str, Any]]:
    """model_name, model_version, id and parameters, which requests and replies share."""
    model = root.get("model_name", "")
    if type(model) is not str:
        fields.wrong(model, "a string", "model_name")
    if not model or len(model) * 4 > limits.max_name_bytes:
        validate.name(model, limits, "model_name")
    if len(root) == 2 and ("inputs" in root or "outputs" in root):
        return model, "", "", {}
    fields.keys(root, "the body")
    version, request_id = fields.text(root, "model_version", ""), fields.text(root, "id", "")
    validate.label(version, limits, "model_version")
    validate.label(request_id, limits, "id")
    return model, version, request_id, fields.parameters(root, limits)


def decode_infer_request(body: Buffer, limits: Limits = DEFAULT) -> InferRequest:
    """Body of INFER. Raises InvalidArgument naming the field."""
    root = fields.unpack(body, limits)
    model, version, request_id, parameters = _head(root, limits)
    inputs = _tensors(root, "inputs", limits)
    outputs: list[str] = []
    if "outputs" in root:
        outputs = fields.texts(root, "outputs", limits)
        validate.unique(outputs, "outputs")
    return InferRequest(model, inputs, outputs, version, request_id, parameters)


def decode_infer_reply(body: Buffer, limits: Limits = DEFAULT) -> InferReply:
    """Body of INFER_REPLY. Raises InvalidArgument naming the field."""
    root = fields.unpack(body, limits)
    model, version, request_id, parameters = _head(root, limits)
    return InferReply(model, _tensors(root, "outputs", limits), version, request_id, parameters)


def _decode_model_request(body: Buffer, limits: Limits) -> ModelRequest:
    root = fields.unpack(body, limits)
    fields.keys(root, "the body")
    name, version = fields.text(root, "name", ""), fields.text(root, "version", "")
    validate.name(name, limits, "name")
    validate.label(version, limits, "version")
    return ModelRequest(name, version)


def _tensor_metadata(root: fields.Map, field: str, limits: Limits) -> list[TensorMetadata]:
    items = fields.array(root, field)
    made: list[TensorMetadata] = []
    for index, item in enumerate(items):
        where = f"{field}[{index}]"
        if type(item) is not dict:
            fields.wrong(item, "a map", where)
        name, dtype = fields.text(item, "name", where + "."), fields.text(item, "datatype", where + ".")
        validate.name(name, limits, f"{where}.name")
        made.append(
            TensorMetadata(name, dtype, fields.shape(item, where), fields.parameters(item, limits, where + "."))
        )
    return made


def _decode_model_metadata(body: Buffer, limits: Limits) -> ModelMetadata:
    root = fields.unpack(body, limits)
    fields.keys(root, "the body")
    name, platform = fields.text(root, "name", ""), fields.text(root, "platform", "")
    inputs, outputs = _tensor_metadata(root, "inputs", limits), _tensor_metadata(root, "outputs", limits)
    return ModelMetadata(name, fields.texts(root, "versions", limits), platform, inputs, outputs)


def _decode_server_metadata(body: Buffer, limits: Limits) -> ServerMetadata:
    root = fields.unpack(body, limits)
    fields.keys(root, "the body")
    return ServerMetadata(
        fields.text(root, "name", ""), fields.text(root, "version", ""), fields.texts(root, "extensions", limits)
    )


def _decode_ready(body: Buffer, limits: Limits) -> Ready:
    return Ready(fields.flag(fields.unpack(body, limits), "ready"))


def _decode_live(body: Buffer, limits: Limits) -> Ready:
    return Ready(fields.flag(fields.unpack(body, limits), "live"))


def _decode_error(body: Buffer, limits: Limits) -> ErrorReply:
    root = fields.unpack(body, limits)
    fields.keys(root, "the body")
    code, message = fields.unsigned(root, "code"), fields.text(root, "message", "")
    return ErrorReply(code, message, fields.flag(root, "retryable"), fields.unsigned(root, "retry_after_ms"))


def _decode_question(body: Buffer, limits: Limits) -> None:
    """A request without fields: nothing, or a map whose keys this version does not know."""
    if len(body):
        fields.keys(fields.unpack(body, limits), "the body")


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
    Kind.SERVER_LIVE_REPLY: _decode_live,
    Kind.CANCEL: no_body,
    Kind.GOAWAY: no_body,
    Kind.ERROR: _decode_error,
}

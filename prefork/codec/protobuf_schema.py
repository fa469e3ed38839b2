"""The protobuf messages of open_inference.proto, built at import from a table. No bytes of requests pass here.

No generated code, because that is pinned to one protobuf runtime; and a descriptor pool of our own, because the user's
process may hold another copy of the package `inference`. A test proves this table equal to the compiled .proto file.
Used by the worker and by clients.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
FILE = "prefork/codec/open_inference.proto"

Fields: TypeAlias = dict[str, tuple[int, str]]

_TENSOR: Fields = {
    "name": (1, "string"),
    "datatype": (2, "string"),
    "shape": (3, "repeated int64"),
    "parameters": (4, "map InferParameter"),
    "contents": (5, "InferTensorContents"),
}

# Message (nested ones with a dot): field: number, type. `map X` is map<string, X>, `choice X` belongs to a oneof.
MESSAGES: dict[str, Fields] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": (1, "string"), "version": (2, "string"), "extensions": (3, "repeated string")},
    "ModelMetadataRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "repeated string"),
        "platform": (3, "string"),
        "inputs": (4, "repeated ModelMetadataResponse.TensorMetadata"),
        "outputs": (5, "repeated ModelMetadataResponse.TensorMetadata"),
    },
    "ModelMetadataResponse.TensorMetadata": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "repeated int64"),
        "parameters": (1000, "map InferParameter"),  # ours; a reader with the public file skips it
    },
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "map InferParameter"),
        "inputs": (5, "repeated ModelInferRequest.InferInputTensor"),
        "outputs": (6, "repeated ModelInferRequest.InferRequestedOutputTensor"),
        "raw_input_contents": (7, "repeated bytes"),
    },
    "ModelInferRequest.InferInputTensor": _TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": {"name": (1, "string"), "parameters": (2, "map InferParameter")},
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "map InferParameter"),
        "outputs": (5, "repeated ModelInferResponse.InferOutputTensor"),
        "raw_output_contents": (6, "repeated bytes"),
    },
    "ModelInferResponse.InferOutputTensor": _TENSOR,
    "InferParameter": {
        "bool_param": (1, "choice bool"),
        "int64_param": (2, "choice int64"),
        "string_param": (3, "choice string"),
        "double_param": (4, "choice double"),
        "uint64_param": (5, "choice uint64"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "repeated bool"),
        "int_contents": (2, "repeated int32"),
        "int64_contents": (3, "repeated int64"),
        "uint_contents": (4, "repeated uint32"),
        "uint64_contents": (5, "repeated uint64"),
        "fp32_contents": (6, "repeated float"),
        "fp64_contents": (7, "repeated double"),
        "bytes_contents": (8, "repeated bytes"),
    },
    # ours: the public protocol leaves errors to gRPC's status
    "ErrorReply": {
        "code": (1, "int32"),
        "message": (2, "string"),
        "retryable": (3, "bool"),
        "retry_after_ms": (4, "uint32"),
    },
}
ONEOF = "parameter_choice"

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: dict[str, _Field.Type.ValueType] = {
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


def _add_map(message: descriptor_pb2.DescriptorProto, path: str, name: str, value: str) -> str:
    """The entry message that a map field is on the wire; its path."""
    entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
    entry.options.map_entry = True
    for number, (part, kind) in enumerate((("key", "string"), ("value", value)), start=1):
        _set_type(entry.field.add(name=part, number=number, label=_Field.LABEL_OPTIONAL), kind)
    return f"{path}.{entry.name}"


def _add_fields(message: descriptor_pb2.DescriptorProto, path: str, fields: Fields) -> None:
    for name, (number, text) in fields.items():
        rule, _, kind = text.rpartition(" ")
        field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
        if rule == "choice":
            if not message.oneof_decl:
                message.oneof_decl.add(name=ONEOF)
            field.oneof_index = 0
        elif rule:
            field.label = _Field.LABEL_REPEATED
        _set_type(field, _add_map(message, path, name, kind) if rule == "map" else kind)


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """The table as protobuf's own description of a file."""
    file = descriptor_pb2.FileDescriptorProto(name=FILE, package=PACKAGE, syntax="proto3")
    made: dict[str, descriptor_pb2.DescriptorProto] = {}
    for path, fields in MESSAGES.items():
        outer, _, name = path.rpartition(".")
        made[path] = made[outer].nested_type.add(name=name) if outer else file.message_type.add(name=name)
        _add_fields(made[path], path, fields)
    return file


def _build() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file_descriptor().SerializeToString())
    return pool


_POOL = _build()


def message_class(path: str) -> Any:
    """The class of one message of MESSAGES. Its attributes exist at run time only, hence Any; nothing else is."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{path}"))

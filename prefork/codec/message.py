"""What the wire says, as plain values: one dataclass a message, the same for every codec.

The names are those of the Open Inference Protocol (https://github.com/kserve/open-inference-protocol). Codecs turn
these into body bytes and back; nothing here knows bytes. The frame's own fields (request id, time-out) are in frame.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from prefork.errors import Code
from prefork.tensor import Tensor
from prefork.value import Parameter

Parameters: TypeAlias = dict[str, Parameter]


class Codec(IntEnum):
    """How a body is written. NONE: the kind has no body."""

    NONE = 0
    MSGPACK = 1
    PROTOBUF = 2


class Kind(IntEnum):
    """What a frame says. Requests have odd numbers, answers are the request's number plus one."""

    INFER = 1
    INFER_REPLY = 2
    MODEL_METADATA = 3
    MODEL_METADATA_REPLY = 4
    MODEL_READY = 5
    MODEL_READY_REPLY = 6
    SERVER_METADATA = 7
    SERVER_METADATA_REPLY = 8
    SERVER_READY = 9
    SERVER_READY_REPLY = 10
    SERVER_LIVE = 11
    SERVER_LIVE_REPLY = 12
    CANCEL = 101  # no body, no answer: the client no longer wants the reply to this request id
    GOAWAY = 102  # no body, from the server, id 0: answers what it has accepted, takes nothing new on this connection
    ERROR = 103  # the other possible answer to each request; under id 0 it concerns the connection


@dataclass(slots=True)
class InferRequest:
    """`outputs` empty: all of the model's. `traceparent` (W3C Trace Context) travels as a parameter of that name."""

    model_name: str
    inputs: list[Tensor]
    outputs: list[str] = field(default_factory=list)
    model_version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class InferReply:
    model_name: str
    outputs: list[Tensor]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class ModelRequest:
    """Body of MODEL_METADATA and MODEL_READY."""

    name: str
    version: str = ""


@dataclass(slots=True)
class TensorMetadata:
    """One input or output: `shape` has -1 for each dynamic dimension; `datatype` is the element type's wire name."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters = field(default_factory=dict)  # e.g. kind: "sequence", optional: true


@dataclass(slots=True)
class ModelMetadata:
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


@dataclass(slots=True)
class ServerMetadata:
    name: str
    version: str
    extensions: list[str]


@dataclass(slots=True)
class Ready:
    """Answer to the ready and live questions."""

    ready: bool


@dataclass(slots=True)
class ErrorReply:
    code: Code | int
    message: str
    retryable: bool = False
    retry_after_ms: int = 0


Message: TypeAlias = (
    InferRequest | InferReply | ModelRequest | ModelMetadata | ServerMetadata | Ready | ErrorReply | None
)

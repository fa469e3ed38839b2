"""What both clients ask and what they make of the answers: arguments to messages, replies to values. Sans-IO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from prefork.client.address import Address, parse_all
from prefork.codec.frame import Frame
from prefork.codec.limits import Limits
from prefork.codec.message import Codec, InferReply, InferRequest
from prefork.codec.registry import BodyCodec, codec_of
from prefork.errors import InvalidArgument, ProtocolError, StatusError
from prefork.tensor import Tensor
from prefork.value import Parameter, Value, flatten, unflatten

CodecName: TypeAlias = Literal["msgpack", "protobuf"]
M = TypeVar("M")

# A server is chosen by its user, so a reply may be large: long sequences are one tensor an element.
LIMITS = Limits(max_tensors=1 << 20, max_parameters=1 << 16)
_CODECS = {"msgpack": Codec.MSGPACK, "protobuf": Codec.PROTOBUF}


@dataclass(frozen=True, slots=True)
class Settings:
    """A client's arguments, checked. Times in seconds, `timeout` None: none; `max_body` in bytes."""

    addresses: list[Address]
    codec: BodyCodec
    pool_size: int
    timeout: float | None
    retries: int
    connect_timeout: float
    max_body: int
    max_in_flight: int


def settings(
    addresses: str | Sequence[str],
    codec: str,
    pool_size: int,
    timeout: float | None,
    retries: int,
    connect_timeout: float,
    max_body: int,
    max_in_flight: int,
) -> Settings:
    """Raises InvalidArgument naming the argument."""
    if codec not in _CODECS:
        raise InvalidArgument(f"codec {codec!r} is unknown; expected one of {', '.join(_CODECS)}")
    if pool_size < 1:
        raise InvalidArgument(f"pool_size: expected at least 1, found {pool_size}")
    if max_in_flight < 1:
        raise InvalidArgument(f"max_in_flight: expected at least 1, found {max_in_flight}")
    if retries < 0:
        raise InvalidArgument(f"retries: expected at least 0, found {retries}")
    if (timeout is not None and timeout <= 0) or connect_timeout <= 0:
        raise InvalidArgument(f"timeouts must be positive, found {timeout} and connect_timeout {connect_timeout}")
    if not 0 < max_body < 1 << 32:
        raise InvalidArgument(f"max_body: expected 1 to {(1 << 32) - 1} bytes, found {max_body}")
    found = codec_of(_CODECS[codec])
    return Settings(parse_all(addresses), found, pool_size, timeout, retries, connect_timeout, max_body, max_in_flight)


def infer_request(
    model: str,
    inputs: Mapping[str, Value],
    outputs: Sequence[str] | None,
    version: str,
    parameters: Mapping[str, Parameter] | None,
    traceparent: str | None,
) -> InferRequest:
    """Raises InvalidArgument for an input that is no value (see `as_value`)."""
    tensors: list[Tensor] = []
    sent: dict[str, Parameter] = dict(parameters or {})
    if traceparent is not None:
        sent["traceparent"] = traceparent
    for name, value in inputs.items():
        flatten(name, as_value(value), tensors, sent)
    return InferRequest(model, tensors, list(outputs or ()), version, "", sent)


def as_value(value: Any) -> Value:
    """Arrays, maps, None, and lists of arrays or of maps as they are; Python numbers, strings and nested lists of
    them as an array, its floats FP32 and its integers INT64, the types that models use."""
    if isinstance(value, np.ndarray | np.generic | Mapping) or value is None:
        return value
    if isinstance(value, list | tuple) and (not value or isinstance(value[0], np.ndarray | np.generic | Mapping)):
        return value
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgument(f"a nested list is no tensor: {error}") from None
    return array.astype(np.float32) if array.dtype == np.float64 else array


def values(reply: InferReply) -> dict[str, Value]:
    """A reply's outputs by name: arrays (views of the reply, read-only), lists for sequences, dicts for maps."""
    try:
        return unflatten(reply.outputs, reply.parameters)
    except InvalidArgument as error:
        raise ProtocolError(f"the server's reply: {error.message}") from error


def decode(frame: Frame, expected: type[M]) -> M:
    """The message in a reply. Raises ProtocolError when it cannot be read."""
    try:
        message = codec_of(frame.codec).decode(frame.kind, frame.body, LIMITS)
    except StatusError as error:
        raise ProtocolError(f"the server's reply: {error.message}") from error
    if not isinstance(message, expected):
        raise ProtocolError(f"the server's reply: expected {expected.__name__}, found {type(message).__name__}")
    return message

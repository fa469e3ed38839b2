"""From a kind to the function that reads or writes its body: the tables' types and the two look-ups. Knows no encoding.

Used by the worker and by clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from prefork.codec.limits import Limits
from prefork.codec.message import Kind, Message
from prefork.errors import InvalidArgument, Unimplemented
from prefork.tensor import Buffer

Decoder: TypeAlias = Callable[[Buffer, Limits], Message]
Encoder: TypeAlias = tuple[type, Callable[[Any], bytes]]  # the message's class and its writer

NOTHING: Encoder = (type(None), lambda _: b"")


def no_body(body: Buffer, limits: Limits) -> None:
    """For kinds that never carry a body. Raises InvalidArgument when there is one."""
    if len(body):
        raise InvalidArgument(f"this kind has no body, found {len(body)} bytes")


def encode(table: Mapping[int, Encoder], kind: int, message: Message) -> bytes:
    """The body of a frame of `kind`. Raises Unimplemented for an unknown kind, InvalidArgument for another class."""
    try:
        expected, write = table[kind]
    except KeyError:
        raise Unimplemented(f"kind {kind} is unknown") from None
    if type(message) is not expected:
        raise InvalidArgument(
            f"{Kind(kind).name} carries a message of type {expected.__name__}, found {type(message).__name__}"
        )
    return write(message)


def decode(table: Mapping[int, Decoder], kind: int, body: Buffer, limits: Limits) -> Message:
    """The message in a frame of `kind`. Raises Unimplemented for an unknown kind, InvalidArgument naming the field."""
    try:
        read = table[kind]
    except KeyError:
        raise Unimplemented(f"kind {kind} is unknown") from None
    return read(body, limits)

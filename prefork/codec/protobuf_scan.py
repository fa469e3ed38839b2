"""A look at a large protobuf body before the runtime parses it: raw contents are cut out, counts are bounded.

The runtime would copy raw contents twice, and an empty tensor is two bytes in a body and a hundred in memory.
Used by the worker and by clients. Encoding: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prefork.codec.limits import Limits
from prefork.errors import InvalidArgument

LARGE = 65536
_FIXED = {1: 8, 5: 4}  # wire type: bytes


@dataclass(slots=True)
class _Field:
    number: int
    begin: int  # of the key
    start: int  # of the value, after a length
    end: int


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    for _ in range(10):
        if position >= len(view):
            break
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise InvalidArgument(f"the body is not acceptable protobuf: broken number at offset {position}")


def _fields(view: memoryview, most: int, where: str) -> Iterator[_Field]:
    """The fields of one message, at most `most`. Groups, which proto3 has not, are refused."""
    position = 0
    for _ in range(most):
        if position == len(view):
            return
        begin = position
        key, position = _varint(view, position)
        start, wire = position, key & 7
        if wire == 0:
            _, position = _varint(view, position)
        elif wire == 2:
            length, start = _varint(view, position)
            position = start + length
        elif wire in _FIXED:
            position += _FIXED[wire]
        else:
            raise InvalidArgument(f"the body is not acceptable protobuf: wire type {wire} at offset {begin}")
        if position > len(view):
            raise InvalidArgument(f"the body is not acceptable protobuf: it ends inside the field at offset {begin}")
        yield _Field(key >> 3, begin, start, position)
    if position != len(view):
        raise InvalidArgument(f"{where} has over {most} fields, which max_tensors and max_parameters do not allow")


def split(body: memoryview, raw: int, tensors: int, limits: Limits) -> tuple[bytes, list[memoryview]]:
    """The message without its field number `raw`, and the values of that. `tensors` is the number of the repeated
    tensor field. Raises InvalidArgument for a body that cannot be parsed or holds more than `limits`."""
    rest: list[memoryview] = []
    contents: list[memoryview] = []
    kept = 0
    for field in _fields(body, 3 * limits.max_tensors + limits.max_parameters + 16, "the body"):
        if field.number == raw:
            rest.append(body[kept : field.begin])
            kept = field.end
            contents.append(body[field.start : field.end])
        elif field.number == tensors and field.end - field.start > LARGE:
            inner = body[field.start : field.end]
            for _ in _fields(inner, limits.max_dims + limits.max_parameters + 16, "a tensor"):
                pass
    rest.append(body[kept:])
    return b"".join(rest), contents

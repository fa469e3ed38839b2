"""Tensors given element by element (protobuf's InferTensorContents), turned into wire form. The slow way in.

FP16, BF16 and the types that the protocol lacks have no such form. Used by the worker and by clients.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from prefork.codec.limits import Limits
from prefork.errors import InvalidArgument
from prefork.tensor import numpy_dtype

FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def to_bytes(contents: Any, dtype: str, shape: tuple[int, ...], limits: Limits, where: str) -> bytes:
    """Wire form of an InferTensorContents. Raises InvalidArgument for a field that does not belong to `dtype`, another
    number of elements than `shape` has, or a value out of the type's range."""
    expected = FIELDS.get(dtype)
    if expected is None:
        raise InvalidArgument(f"{where}.contents: {dtype} can only be given as raw contents")
    for field, _ in contents.ListFields():
        if field.name != expected:
            raise InvalidArgument(f"{where}.contents: {dtype} needs {expected}, found {field.name}")
    values = getattr(contents, expected)
    if len(values) != math.prod(shape):
        raise InvalidArgument(f"{where}.contents has {len(values)} elements, shape {list(shape)} needs another number")
    if len(values) > limits.max_objects:
        raise InvalidArgument(f"{where}.contents has {len(values)} elements, max_objects is {limits.max_objects}")
    if expected == "bytes_contents":
        return b"".join(struct.pack("<I", len(item)) + item for item in values)
    if expected in ("int_contents", "uint_contents"):
        return _narrow(values, dtype, where)
    return np.fromiter(values, numpy_dtype(dtype), len(values)).tobytes()


def _narrow(values: Any, dtype: str, where: str) -> bytes:
    wide = np.fromiter(values, np.int64, len(values))
    bounds = np.iinfo(numpy_dtype(dtype))
    if wide.size and not bounds.min <= int(wide.min()) <= int(wide.max()) <= bounds.max:
        raise InvalidArgument(f"{where}.contents: a value is outside {dtype}, {bounds.min} to {bounds.max}")
    return wide.astype(numpy_dtype(dtype)).tobytes()

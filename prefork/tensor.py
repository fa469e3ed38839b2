"""The value that crosses walls: a named, typed, shaped run of bytes. Views, not copies; knows no model and no wire.

Element types carry the Open Inference Protocol's names where it has one (FP32, INT64, BYTES, ...); the ONNX types
that it lacks keep ONNX's own names (INT4, FLOAT8E4M3FN, COMPLEX64, ...). Data is little-endian and C-contiguous. Types
below one byte are packed as ONNX packs them: the first element in the low bits, the last byte padded with zero bits
(https://onnx.ai/onnx/repo-docs/IR.html and onnx.proto's TensorProto.DataType). BYTES holds, for each element, its
length as uint32 and then that many bytes (the protocol's raw form); ONNX strings are UTF-8.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prefork.errors import InvalidArgument

Buffer: TypeAlias = bytes | bytearray | memoryview
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: wire `name`, `bits` per element on the wire (0: variable), `onnx` TensorProto.DataType number,
    and the dtype that holds it in memory, `numpy` (numpy's or, with `extension`, ml_dtypes')."""

    name: str
    bits: int
    onnx: int
    numpy: str
    extension: bool = False

    def nbytes(self, count: int) -> int:
        """Bytes of `count` elements on the wire (not for BYTES)."""
        return (count * self.bits + 7) >> 3


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("FP32", 32, 1, "<f4"),
        DType("UINT8", 8, 2, "|u1"),
        DType("INT8", 8, 3, "|i1"),
        DType("UINT16", 16, 4, "<u2"),
        DType("INT16", 16, 5, "<i2"),
        DType("INT32", 32, 6, "<i4"),
        DType("INT64", 64, 7, "<i8"),
        DType("BYTES", 0, 8, "|O"),
        DType("BOOL", 8, 9, "|b1"),
        DType("FP16", 16, 10, "<f2"),
        DType("FP64", 64, 11, "<f8"),
        DType("UINT32", 32, 12, "<u4"),
        DType("UINT64", 64, 13, "<u8"),
        DType("COMPLEX64", 64, 14, "<c8"),
        DType("COMPLEX128", 128, 15, "<c16"),
        DType("BF16", 16, 16, "bfloat16", True),
        DType("FLOAT8E4M3FN", 8, 17, "float8_e4m3fn", True),
        DType("FLOAT8E4M3FNUZ", 8, 18, "float8_e4m3fnuz", True),
        DType("FLOAT8E5M2", 8, 19, "float8_e5m2", True),
        DType("FLOAT8E5M2FNUZ", 8, 20, "float8_e5m2fnuz", True),
        DType("UINT4", 4, 21, "uint4", True),
        DType("INT4", 4, 22, "int4", True),
        DType("FLOAT4E2M1", 4, 23, "float4_e2m1fn", True),
        DType("FLOAT8E8M0", 8, 24, "float8_e8m0fnu", True),
        DType("UINT2", 2, 25, "uint2", True),
        DType("INT2", 2, 26, "int2", True),
    )
}
BY_ONNX: dict[int, DType] = {d.onnx: d for d in DTYPES.values()}


def dtype_of(name: str) -> DType:
    """The element type called `name`. Raises InvalidArgument for an unknown one."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise InvalidArgument(f"datatype {name!r} is unknown; expected one of {', '.join(DTYPES)}") from None


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy (or ml_dtypes) dtype that holds `name` in memory, one element an item also below one byte."""
    kind = dtype_of(name)
    if not kind.extension:
        return np.dtype(kind.numpy)
    import ml_dtypes  # only models with these types pay for the import

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, kind.numpy))
    return dtype


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "OUST":
        return "BYTES"
    little = dtype.newbyteorder("<")
    for kind in DTYPES.values():
        if not kind.extension and np.dtype(kind.numpy) == little:
            return kind.name
    for kind in DTYPES.values():
        if kind.extension and kind.numpy == dtype.name:
            return kind.name
    raise InvalidArgument(f"numpy dtype {dtype} has no ONNX element type")


@dataclass(slots=True)
class Tensor:
    """`name`, wire `dtype` name, `shape` and `data` in wire form (see the file's head)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    @classmethod
    def from_numpy(cls, name: str, array: Array) -> Tensor:
        """A view of `array` where its memory already has wire form, else a copy that has.

        Any dtype of DTYPES; object, str and bytes arrays become BYTES. Raises InvalidArgument for other dtypes."""
        dtype = _name_of(array.dtype)
        kind = DTYPES[dtype]
        if kind.bits == 0:
            return cls(name, dtype, array.shape, _pack_strings(name, array))
        if kind.bits < 8:
            return cls(name, dtype, array.shape, _pack_bits(array, kind.bits))
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        if not array.flags.c_contiguous:
            array = array.copy(order="C")
        if array.size == 0:
            return cls(name, dtype, array.shape, b"")
        # uint8 first: extension dtypes have no buffer format of their own
        return cls(name, dtype, array.shape, array.reshape(-1).view(np.uint8).data)

    def to_numpy(self) -> Array:
        """The array, shape `shape`; a read-only view of `data` for types of one byte and more.

        BYTES gives an object array of str. Raises InvalidArgument when shape, dtype and data length disagree."""
        kind = self.check()
        if kind.bits >= 8:
            if len(self.data) == 0:
                return np.empty(self.shape, numpy_dtype(self.dtype))
            return np.frombuffer(self.data, numpy_dtype(self.dtype)).reshape(self.shape)
        if kind.bits == 0:
            return _unpack_strings(self)
        return _unpack_bits(self, kind.bits)

    def check(self) -> DType:
        """The element type, after proving that dtype, shape and data length agree; raises InvalidArgument."""
        kind = dtype_of(self.dtype)
        count = 1
        for dim in self.shape:
            if dim < 0:
                raise InvalidArgument(f"tensor {self.name!r}: shape {list(self.shape)} has a negative dimension")
            count *= dim
        if kind.bits and len(self.data) != (count * kind.bits + 7) >> 3:
            raise InvalidArgument(
                f"tensor {self.name!r}: {self.dtype} of shape {list(self.shape)} needs {kind.nbytes(count)} bytes, "
                f"found {len(self.data)}"
            )
        if not kind.bits and len(self.data) < 4 * count:
            raise InvalidArgument(
                f"tensor {self.name!r}: BYTES of shape {list(self.shape)} needs at least {4 * count} bytes, "
                f"found {len(self.data)}"
            )
        return kind


def _pack_strings(name: str, array: Array) -> bytes:
    parts: list[bytes] = []
    for item in array.reshape(-1).tolist():
        raw = item.encode() if isinstance(item, str) else item
        if not isinstance(raw, bytes):
            raise InvalidArgument(f"tensor {name!r}: string elements must be str or bytes, found {type(item).__name__}")
        parts.append(struct.pack("<I", len(raw)))
        parts.append(raw)
    return b"".join(parts)


def _split_strings(tensor: Tensor) -> Iterator[str]:
    view, offset, end = memoryview(tensor.data), 0, len(tensor.data)
    for index in range(math.prod(tensor.shape)):
        if end - offset < 4:
            raise InvalidArgument(f"tensor {tensor.name!r}: element {index} has no length, the data ends at {end}")
        (length,) = struct.unpack_from("<I", view, offset)
        offset += 4
        if length > end - offset:
            raise InvalidArgument(
                f"tensor {tensor.name!r}: element {index} claims {length} bytes, {end - offset} are left"
            )
        try:
            yield str(view[offset : offset + length], "utf-8")
        except UnicodeDecodeError as e:
            raise InvalidArgument(f"tensor {tensor.name!r}: element {index} is not UTF-8: {e.reason}") from None
        offset += length
    if offset != end:
        raise InvalidArgument(f"tensor {tensor.name!r}: {end - offset} bytes are left over after the last element")


def _unpack_strings(tensor: Tensor) -> Array:
    array = np.empty(math.prod(tensor.shape), object)
    for index, text in enumerate(_split_strings(tensor)):
        array[index] = text
    return array.reshape(tensor.shape)


def _pack_bits(array: Array, bits: int) -> bytes:
    per = 8 // bits
    flat = array.reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    if pad := -flat.size % per:
        flat = np.concatenate([flat, np.zeros(pad, np.uint8)])
    lanes = flat.reshape(-1, per)
    packed = np.zeros(len(lanes), np.uint8)
    for lane in range(per):
        packed |= lanes[:, lane] << (lane * bits)
    return packed.tobytes()


def _unpack_bits(tensor: Tensor, bits: int) -> Array:
    count, per, mask = math.prod(tensor.shape), 8 // bits, (1 << bits) - 1
    packed = np.frombuffer(tensor.data, np.uint8) if count else np.empty(0, np.uint8)
    lanes = np.empty((packed.size, per), np.uint8)
    for lane in range(per):
        lanes[:, lane] = (packed >> (lane * bits)) & mask
    flat = lanes.reshape(-1)[:count]
    target = numpy_dtype(tensor.dtype)
    if tensor.dtype.startswith("INT"):  # ml_dtypes keeps the sign extended in its byte
        sign = 1 << (bits - 1)
        return ((flat ^ sign).astype(np.int8) - np.int8(sign)).astype(target).reshape(tensor.shape)
    return flat.copy().view(target).reshape(tensor.shape)

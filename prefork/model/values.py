"""Values between wire form and what ONNX Runtime's Python takes and gives. Template's and worker's side.

ORT's Python speaks numpy for the types that numpy has (`plain`), and lists and dicts of them. bfloat16, the float8 and
float4 kinds and the integers below a byte it takes and gives only as OrtValue: memory that it neither reads nor owns.
Wrapping is without a copy both ways. Must not import onnx. complex64 and complex128 ORT does not implement at all.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort

from prefork.errors import InvalidArgument, Unimplemented
from prefork.tensor import DTYPES, Array, Buffer, DType, Tensor, numpy_dtype

Feed: TypeAlias = Any  # Array | OrtValue | list[Array] | dict | list[dict]

SMALL = 2048  # bytes; below this a copy is cheaper than a view


def plain(kind: DType) -> bool:
    """Whether ORT's Python takes and gives this type as a numpy array over the wire's own bytes."""
    return kind.bits >= 8 and not kind.extension and not kind.name.startswith("COMPLEX")


def carried(kind: DType) -> bool:
    """Whether the type passes as an OrtValue and not as numpy."""
    return kind.extension


def to_ort(tensor: Tensor) -> Feed:
    """The tensor as ORT takes it, over the same memory (strings are decoded): keep `tensor.data` while it is used.

    Raises InvalidArgument when shape, type and length disagree, or a BOOL is neither 0 nor 1."""
    kind = tensor.check()
    if carried(kind):
        return wrap(tensor.data, kind, tensor.shape)
    if kind.name == "BOOL":
        check_bool(tensor)
    return tensor.to_numpy()


def check_bool(tensor: Tensor) -> None:
    """Raises InvalidArgument for a byte above 1: C++ kernels may index with a bool, so it must not reach them."""
    if len(tensor.data) and np.frombuffer(tensor.data, np.uint8).max() > 1:
        raise InvalidArgument(f"input {tensor.name!r}: each BOOL must be a byte 0 or 1")


def wrap(data: Buffer, kind: DType, shape: tuple[int, ...]) -> ort.OrtValue:
    """An OrtValue of any fixed-size type over `data`, which it does not copy; the OrtValue keeps a reference to it.

    ORT takes address and shape from a numpy array whose items are as wide as its own. For types below a byte ORT's
    item is a byte that holds several elements, so the array claims one byte for each element: more than `data` has. It
    is never read through numpy, and ORT counts its bytes itself (onnxruntime_pybind_ortvalue.cc)."""
    carrier = np.dtype(f"<u{kind.bits // 8}") if kind.bits >= 8 else np.dtype(np.uint8)
    if not kind.extension:
        carrier = numpy_dtype(kind.name)
    if math.prod(shape) == 0:
        array: Array = np.empty(shape, carrier)
    elif kind.bits >= 8:
        array = np.ndarray(shape, carrier, data)
    else:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        flat = np.frombuffer(data, np.uint8)
        array = np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind.onnx)


def as_ort_value(name: str, feed: Feed) -> ort.OrtValue:
    """What `to_ort` gave, as OrtValue. Raises Unimplemented for strings, sequences and maps."""
    if isinstance(feed, ort.OrtValue):
        return feed
    if isinstance(feed, np.ndarray) and feed.dtype.kind != "O":
        return ort.OrtValue.ortvalue_from_numpy(feed)
    raise Unimplemented(
        f"input {name!r}: ONNX Runtime's Python cannot take strings, sequences or maps in a run that also gives "
        "bfloat16, float8, float4 or sub-byte outputs; ask for the other outputs only"
    )


class _Memory:
    """ORT's memory for numpy (https://numpy.org/doc/stable/reference/arrays.interface.html); holds its owner."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, nbytes: int, owner: ort.OrtValue) -> None:
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        self.owner = owner


def from_ort(name: str, value: ort.OrtValue, dtype: str) -> Tensor:
    """The tensor in `value`, which must be one of element type `dtype`, over ORT's own memory. Strings are encoded."""
    kind, shape = DTYPES[dtype], tuple(value.shape())
    if kind.bits == 0:
        return Tensor.from_numpy(name, value.numpy())
    count = math.prod(shape)
    if count == 0:
        return Tensor(name, dtype, shape, b"")
    nbytes = kind.nbytes(count)
    raw = np.asarray(_Memory(value.data_ptr(), nbytes, value))
    if used := count * kind.bits & 7:
        raw = raw.copy()
        raw[-1] &= (1 << used) - 1  # the wire's padding is zero, ORT's is whatever was there
    return Tensor(name, dtype, shape, raw.data)


def from_array(name: str, array: Array, dtype: str) -> Tensor:
    """The tensor of a C-contiguous array of a plain type that ORT gave, over its memory."""
    if array.nbytes < SMALL:  # empty arrays too, which no view can be cast of
        return Tensor(name, dtype, array.shape, array.tobytes())
    return Tensor(name, dtype, array.shape, array.data.cast("B"))

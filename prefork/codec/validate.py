"""What a decoded message must fulfil whatever codec brought it: names, parameters, shapes, data. Knows no encoding.

Everything raises InvalidArgument naming the field. What is accepted is checked on a short path; whatever that path
does not accept goes through the long one, which finds the fault and words it. Used by the worker and by clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefork.codec.limits import Limits
from prefork.errors import InvalidArgument
from prefork.tensor import DTYPES, Buffer, Tensor
from prefork.value import Parameter

INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1  # what both codecs can hold
DIM_MAX = (1 << 63) - 1
_DTYPE_CHARS = 32  # longer than any name of DTYPES: not worth echoing

# Bytes an element, for the types in which every pattern of bytes of the right length is a value.
PLAIN: dict[str, int] = {d.name: d.bits // 8 for d in DTYPES.values() if d.bits >= 8 and d.name != "BOOL"}


def tensor(
    name: str, dtype: str, shape: tuple[int, ...], data: Buffer, limits: Limits, field: str, index: int
) -> Tensor:
    """The tensor at `field[index]`, proven: name, rank, dimensions, product, data length, BOOL and packed bits."""
    made = Tensor(name, dtype, shape, data)
    size = PLAIN.get(dtype, 0)
    for dim in shape:
        if dim < 1:
            size = 0
            break
        size *= dim
    if (
        not size
        or size != len(data)
        or not name
        or len(name) * 4 > limits.max_name_bytes
        or len(shape) > limits.max_dims
    ):
        _check_tensor(made, limits, f"{field}[{index}]")
    return made


def _check_tensor(made: Tensor, limits: Limits, where: str) -> None:
    name(made.name, limits, f"{where}.name")
    if len(made.dtype) > _DTYPE_CHARS:
        raise InvalidArgument(f"{where}.datatype: a name of {len(made.dtype)} characters is unknown")
    if len(made.shape) > limits.max_dims:
        raise InvalidArgument(f"{where}.shape has {len(made.shape)} dimensions, max_dims is {limits.max_dims}")
    volume = 1
    for dim in made.shape:
        if dim > DIM_MAX:
            raise InvalidArgument(f"{where}.shape: dimension {dim} is over 2^63-1")
        volume *= max(dim, 1)
    if min(made.shape, default=0) >= 0 and volume > DIM_MAX >> 4:  # an element has 16 bytes at most
        raise InvalidArgument(f"{where}.shape: the product of {list(made.shape)} is over 2^59-1 elements")
    kind = made.check()
    if made.dtype == "BOOL":
        _check_bool(made, where)
    elif 0 < kind.bits < 8:
        _check_padding(made, kind.bits, where)
    elif not kind.bits:
        _check_strings(made, limits, where)


def _check_bool(made: Tensor, where: str) -> None:
    wrong = bytes(made.data).translate(None, b"\x00\x01")
    if wrong:
        raise InvalidArgument(f"{where}.data: BOOL elements are 0 or 1, found {wrong[0]}")


def _check_padding(made: Tensor, bits: int, where: str) -> None:
    count = 1
    for dim in made.shape:
        count *= dim
    used = count * bits % 8
    if used and made.data[-1] >> used:
        raise InvalidArgument(f"{where}.data: the last byte of {made.dtype} must be padded with zero bits")


def _check_strings(made: Tensor, limits: Limits, where: str) -> None:
    """The lengths of BYTES must fill the data exactly; that each is UTF-8 is found when the array is made."""
    count = 1
    for dim in made.shape:
        count *= dim
    if count > limits.max_objects:
        raise InvalidArgument(f"{where}: BYTES has {count} elements, max_objects is {limits.max_objects}")
    data, offset, end = made.data, 0, len(made.data)
    for index in range(count):
        start = offset + 4
        offset = start + int.from_bytes(data[offset:start], "little")
        if start > end or offset > end:
            raise InvalidArgument(f"{where}.data: element {index} of BYTES ends at {max(start, offset)}, past {end}")
    if offset != end:
        raise InvalidArgument(f"{where}.data: {end - offset} bytes are left over after {count} elements of BYTES")


def name(text: str, limits: Limits, field: str) -> None:
    """A name that must be there."""
    if not text:
        raise InvalidArgument(f"{field} is missing or empty")
    label(text, limits, field)


def label(text: str, limits: Limits, field: str) -> None:
    """A name that may be empty."""
    most = limits.max_name_bytes
    if len(text) * 4 > most and len(text.encode()) > most:
        raise InvalidArgument(f"{field} has {len(text.encode())} bytes, max_name_bytes is {most}")


def unique(names: list[str], field: str) -> None:
    """No name twice."""
    if len(set(names)) != len(names):
        twice = next(n for index, n in enumerate(names) if n in names[:index])
        raise InvalidArgument(f"{field}: {twice!r} is given twice")


def tensors(made: list[Tensor], field: str) -> list[Tensor]:
    """The list, after proving that no tensor is given twice."""
    if len(made) > 1:
        unique([t.name for t in made], field)
    return made


def count(number: int, limits: Limits, field: str) -> None:
    """Not more than max_tensors entries."""
    if number > limits.max_tensors:
        raise InvalidArgument(f"{field} has {number} entries, max_tensors is {limits.max_tensors}")


def parameters(values: Mapping[Any, Any], limits: Limits, field: str = "parameters") -> dict[str, Parameter]:
    """The map, each key a name and each value bool, int (-2^63 to 2^64-1), float or str."""
    if len(values) > limits.max_parameters:
        raise InvalidArgument(f"{field} has {len(values)} entries, max_parameters is {limits.max_parameters}")
    for key, value in values.items():
        if type(key) is not str:
            raise InvalidArgument(f"{field}: keys must be strings, found {type(key).__name__}")
        name(key, limits, f"{field} key")
        kind = type(value)
        if kind is str:
            most = limits.max_parameter_bytes
            if len(value) * 4 > most and len(value.encode()) > most:
                raise InvalidArgument(f"{field}.{key} is over max_parameter_bytes, {most}")
        elif kind is int:
            if not INT_MIN <= value <= INT_MAX:
                raise InvalidArgument(f"{field}.{key}: {value} is outside -2^63 to 2^64-1")
        elif kind is not bool and kind is not float:
            raise InvalidArgument(f"{field}.{key} must be a bool, int, float or string, found {kind.__name__}")
    return dict(values)

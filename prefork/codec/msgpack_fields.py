"""The parts of a msgpack body: the bounded unpacking and one typed look-up for each kind of field. No message here.

Whatever is refused raises InvalidArgument naming the field. Used by the worker and by clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from msgpack import unpackb
from msgpack.exceptions import UnpackException

from prefork.codec import validate
from prefork.codec.limits import Limits
from prefork.errors import InvalidArgument
from prefork.tensor import Buffer

_LARGE = 65536
_LIMIT_NAMES = {
    "max_array_len": "max_tensors",
    "max_map_len": "max_parameters",
    "max_str_len": "max_parameter_bytes",
    "max_ext_len": "extension types are not part of the protocol",
}
_FIXED_KEYS = 32  # most keys that a map other than `parameters` may have

Map = dict[Any, Any]


class _Budget:
    """Bounds the maps and arrays in a large body: an empty map is one byte there and 64 in memory."""

    def __init__(self, containers: int) -> None:
        self.left = self.containers = containers

    def spend(self, value: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise InvalidArgument(
                f"the body has over {self.containers} maps and arrays, which max_tensors does not need"
            )
        return value


def unpack(body: Buffer, limits: Limits) -> Map:
    """The map that the body is. What an unknown key holds is bounded like everything else."""
    hook: Callable[[Any], Any] | None = None
    if len(body) > _LARGE:
        hook = _Budget(4 * limits.max_tensors + 64).spend
    try:
        root = unpackb(
            body,
            object_hook=hook,
            list_hook=hook,
            max_str_len=limits.max_parameter_bytes,
            max_array_len=limits.max_tensors + limits.max_dims,
            max_map_len=limits.max_parameters + _FIXED_KEYS,
            max_ext_len=0,
        )
    except (ValueError, UnpackException, RecursionError) as e:
        text = str(e) or type(e).__name__
        for name, ours in _LIMIT_NAMES.items():
            text = text.replace(name, ours)
        raise InvalidArgument(f"the body is not acceptable msgpack: {text}") from None
    if type(root) is not dict:
        raise InvalidArgument(f"the body must be a msgpack map, found {named(root)}")
    return root


def named(value: Any) -> str:
    """What a decoded value is, in msgpack's words; never its content."""
    kinds = {dict: "a map", list: "an array", str: "a string", bytes: "binary", bool: "a boolean", int: "an integer"}
    return "nil" if value is None else kinds.get(type(value), f"a {type(value).__name__}")


def wrong(value: Any, expected: str, where: str) -> NoReturn:
    """Raise InvalidArgument for a value of another type."""
    raise InvalidArgument(f"{where} must be {expected}, found {named(value)}")


def text(item: Map, key: str, where: str) -> str:
    """A string, empty when absent."""
    value = item.get(key, "")
    if type(value) is not str:
        wrong(value, "a string", where + key)
    return value


def array(item: Map, key: str, where: str = "") -> list[Any]:
    """An array, empty when absent."""
    value = item.get(key)
    if value is None and key not in item:
        return []
    if type(value) is not list:
        wrong(value, "an array", where + key)
    return value


def flag(item: Map, key: str) -> bool:
    """A boolean, false when absent."""
    value = item.get(key, False)
    if type(value) is not bool:
        wrong(value, "a boolean", key)
    return value


def unsigned(item: Map, key: str) -> int:
    """An unsigned integer of 32 bits, 0 when absent."""
    value = item.get(key, 0)
    if type(value) is not int:
        wrong(value, "an integer", key)
    if not 0 <= value < 1 << 32:
        raise InvalidArgument(f"{key} must be an unsigned integer of 32 bits, found {value}")
    return value


def texts(item: Map, key: str, limits: Limits) -> list[str]:
    """An array of names."""
    values = array(item, key)
    for index, value in enumerate(values):
        if type(value) is not str:
            wrong(value, "a string", f"{key}[{index}]")
        validate.name(value, limits, f"{key}[{index}]")
    validate.count(len(values), limits, key)
    return values


def keys(item: Map, where: str) -> None:
    """Unknown keys pass; keys that are not strings do not (msgpack's strict_map_key lets `bin` through)."""
    for key in item:
        if type(key) is not str:
            raise InvalidArgument(f"{where}: map keys must be strings, found {named(key)}")


def parameters(item: Map, limits: Limits, where: str = "") -> dict[str, Any]:
    """The map `parameters`, empty when absent."""
    values = item.get("parameters")
    if values is None and "parameters" not in item:
        return {}
    if type(values) is not dict:
        wrong(values, "a map", where + "parameters")
    return validate.parameters(values, limits, where + "parameters")


def shape(item: Map, where: str) -> list[int]:
    """An array of integers that must be there; their values are not judged here."""
    shape = item.get("shape")
    if type(shape) is not list:
        if "shape" not in item:
            raise InvalidArgument(f"{where}.shape is missing")
        wrong(shape, "an array", f"{where}.shape")
    for dim in shape:
        if type(dim) is not int:
            wrong(dim, "an array of integers", f"{where}.shape")
    return shape

"""Messages as plain values (dict, list, str, number, data as hex), so that a file can say what is expected."""

from __future__ import annotations

import dataclasses
from typing import Any

from prefork.codec.message import Message
from prefork.tensor import Tensor


def plain(message: Message) -> Any:
    """The message without its empty fields."""
    return _plain(message)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        shape, data = list(value.shape), bytes(value.data).hex()
        return {"name": value.name, "datatype": value.dtype, "shape": shape, "data": data}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(f.name, _plain(getattr(value, f.name))) for f in dataclasses.fields(value)]
        return {key: item for key, item in pairs if item not in ("", [], {})}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value

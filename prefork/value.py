"""Values that are more than one tensor: ONNX sequences, maps and optionals, laid flat into named tensors and back.

A compound value NAME is sent as tensors called `NAME/...` and one string parameter `kind.NAME`:

| value | parameter | tensors |
|---|---|---|
| sequence of n tensors | `sequence:n` | `NAME/0` ... `NAME/n-1` |
| optional without a value | `none` | none |
| map of k entries | `map` | `NAME/keys` [k], `NAME/values` [k] |
| sequence of n maps, all with the same keys | `maps` | `NAME/keys` [k], `NAME/values` [n, k] |
| sequence of n maps, keys differ | `ragged` | `NAME/keys` [sum k], `NAME/values` [sum k], `NAME/lengths` INT64 [n] |

scikit-learn's classifiers give their probabilities as a sequence of maps with equal keys, so they arrive as one matrix.
Both the model's side and the client use this file; it knows no wire and no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from prefork.errors import InvalidArgument
from prefork.tensor import Array, Tensor

Parameter: TypeAlias = bool | int | float | str
Value: TypeAlias = Any  # Array | None | list[Array] | dict[Key, scalar] | list[dict[Key, scalar]]

KIND = "kind."


def flatten(name: str, value: Value, tensors: list[Tensor], parameters: dict[str, Parameter]) -> None:
    """Append the tensors of `value` (see the file's head) and set its parameter.

    Raises InvalidArgument for a value of another kind."""
    if isinstance(value, np.ndarray | np.generic):
        tensors.append(Tensor.from_numpy(name, np.asarray(value)))
    elif value is None:
        parameters[KIND + name] = "none"
    elif isinstance(value, Mapping):
        parameters[KIND + name] = "map"
        tensors.append(Tensor.from_numpy(f"{name}/keys", _keys(value)))
        tensors.append(Tensor.from_numpy(f"{name}/values", np.asarray(list(value.values()))))
    elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
        _flatten_maps(name, list(value), tensors, parameters)
    elif isinstance(value, list | tuple):
        parameters[KIND + name] = f"sequence:{len(value)}"
        for index, item in enumerate(value):
            if not isinstance(item, np.ndarray | np.generic):
                raise InvalidArgument(
                    f"value {name!r}: a sequence holds tensors or maps, element {index} is {type(item).__name__}"
                )
            tensors.append(Tensor.from_numpy(f"{name}/{index}", np.asarray(item)))
    else:
        raise InvalidArgument(f"value {name!r}: expected an array, list, dict or None, found {type(value).__name__}")


def unflatten(tensors: Iterable[Tensor], parameters: Mapping[str, Parameter]) -> dict[str, Value]:
    """The values by name, in the order of their first tensor; the reverse of `flatten`.

    Raises InvalidArgument for a part that is missing, given twice, left over or of a wrong shape."""
    parts: dict[str, Array] = {}
    for tensor in tensors:
        if tensor.name in parts:
            raise InvalidArgument(f"tensor {tensor.name!r} is given twice")
        parts[tensor.name] = tensor.to_numpy()
    kinds = {key[len(KIND) :]: kind for key, kind in parameters.items() if key.startswith(KIND)}
    if not kinds:
        return dict(parts)
    compound = {name: _take(name, str(kind), parts) for name, kind in kinds.items()}
    for name in compound:
        if name in parts:
            raise InvalidArgument(f"value {name!r} is given both as a tensor and as {kinds[name]!r}")
    return {**parts, **compound}


def _keys(value: Mapping[Any, Any]) -> Array:
    keys = list(value)
    if any(isinstance(key, str) for key in keys):
        array = np.empty(len(keys), object)
        array[:] = keys
        return array
    return np.asarray(keys, np.int64)


def _flatten_maps(
    name: str, maps: list[Mapping[Any, Any]], tensors: list[Tensor], parameters: dict[str, Parameter]
) -> None:
    first = list(maps[0])
    if all(list(item) == first for item in maps):
        parameters[KIND + name] = "maps"
        tensors.append(Tensor.from_numpy(f"{name}/keys", _keys(maps[0])))
        table = np.asarray([list(item.values()) for item in maps])
        tensors.append(Tensor.from_numpy(f"{name}/values", table.reshape(len(maps), len(first))))
        return
    parameters[KIND + name] = "ragged"
    merged = [(key, item[key]) for item in maps for key in item]
    keys = _keys(dict.fromkeys(key for key, _ in merged))
    column = np.empty(len(merged), keys.dtype)
    column[:] = [key for key, _ in merged]
    tensors.append(Tensor.from_numpy(f"{name}/keys", column))
    tensors.append(Tensor.from_numpy(f"{name}/values", np.asarray([item for _, item in merged])))
    tensors.append(Tensor.from_numpy(f"{name}/lengths", np.asarray([len(item) for item in maps], np.int64)))


def _part(name: str, part: str, parts: dict[str, Array]) -> Array:
    try:
        return parts.pop(f"{name}/{part}")
    except KeyError:
        raise InvalidArgument(f"value {name!r}: its tensor {name + '/' + part!r} is missing") from None


def _take(name: str, kind: str, parts: dict[str, Array]) -> Value:
    if kind == "none":
        return None
    if kind.startswith("sequence:"):
        return _take_sequence(name, kind, parts)
    if kind not in ("map", "maps", "ragged"):
        raise InvalidArgument(
            f"value {name!r}: kind {kind!r} is unknown; expected sequence:n, map, maps, ragged or none"
        )
    keys, values = _part(name, "keys", parts), _part(name, "values", parts)
    if kind == "maps":
        if keys.ndim != 1 or values.ndim != 2 or values.shape[1] != keys.shape[0]:
            raise InvalidArgument(f"value {name!r}: keys {keys.shape} and values {values.shape} do not fit")
        return [dict(zip(keys.tolist(), row, strict=True)) for row in values.tolist()]
    if keys.ndim != 1 or values.shape != keys.shape:
        raise InvalidArgument(f"value {name!r}: keys {keys.shape} and values {values.shape} do not fit")
    pairs = list(zip(keys.tolist(), values.tolist(), strict=True))
    if kind == "map":
        return dict(pairs)
    lengths = _part(name, "lengths", parts)
    counts = [int(n) for n in lengths.reshape(-1).tolist()]
    if min(counts, default=0) < 0 or sum(counts) != len(pairs):
        raise InvalidArgument(f"value {name!r}: lengths add up to {sum(counts)}, found {len(pairs)} entries")
    result, start = [], 0
    for count in counts:
        result.append(dict(pairs[start : start + count]))
        start += count
    return result


def _take_sequence(name: str, kind: str, parts: dict[str, Array]) -> list[Array]:
    text = kind.removeprefix("sequence:")
    if not text.isdecimal() or len(text) > 9 or int(text) > len(parts):
        raise InvalidArgument(f"value {name!r}: {kind!r} does not fit the {len(parts)} tensors given")
    return [_part(name, str(index), parts) for index in range(int(text))]

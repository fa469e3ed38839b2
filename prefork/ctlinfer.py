"""prefork-ctl's client calls: arguments of the shell to arrays, arrays to plain values that print. Loads numpy.

Only ctl.py imports this file, and only for the commands that need it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from prefork.client import Client
from prefork.codec.message import TensorMetadata
from prefork.errors import InvalidArgument
from prefork.tensor import Array, Tensor, numpy_dtype
from prefork.value import Value

CodecName = Literal["msgpack", "protobuf"]
# More elements than this are summarised: a screenful of numbers.
SMALL = 64


@dataclass(frozen=True, slots=True)
class Job:
    """What `prefork-ctl infer` was given: `inputs` NAME=VALUE, `outputs` NAME, `save` NAME=@FILE."""

    model: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    save: Sequence[str]


def infer(address: str, codec: CodecName, timeout: float, job: Job, *, whole: bool) -> dict[str, dict[str, Any]]:
    """The outputs by name: `dtype`, `shape` and `value`, or with more than SMALL elements and not `whole`, `min`,
    `max` and `mean`; `saved` names the file. Raises InvalidArgument for bad arguments, and what the client raises."""
    texts = dict(_split(text, "--input") for text in job.inputs)
    files = {name: _file(text, "--save") for name, text in (_split(text, "--save") for text in job.save)}
    with Client(address, codec=codec, timeout=timeout) as client:
        known = {t.name: t for t in client.metadata(job.model).inputs} if not all(map(_is_file, texts.values())) else {}
        inputs = {name: _value(name, text, known.get(name)) for name, text in texts.items()}
        found = client.infer(job.model, inputs, outputs=job.outputs or None)
    for name, path in files.items():
        _save(name, path, found)
    shown = {name: show(value, whole=whole) for name, value in found.items()}
    for name, path in files.items():
        shown[name]["saved"] = str(path)
    return shown


def metadata(address: str, codec: CodecName, timeout: float, model: str) -> dict[str, Any]:
    """The model's names, types and shapes; -1 is a dynamic dimension."""
    with Client(address, codec=codec, timeout=timeout) as client:
        return asdict(client.metadata(model))


def health(address: str, codec: CodecName, timeout: float) -> dict[str, bool]:
    """`live` and `ready`. Raises Unavailable when the server cannot be reached."""
    with Client(address, codec=codec, timeout=timeout) as client:
        return {"live": client.live(), "ready": client.ready()}


def show(value: Value, *, whole: bool) -> dict[str, Any]:
    """A value as JSON can carry it."""
    if not isinstance(value, np.ndarray):
        return {"value": _plain(value)}
    sample = Tensor.from_numpy("", value[:0] if value.ndim else value)
    head: dict[str, Any] = {"dtype": sample.dtype, "shape": list(value.shape)}
    if whole or value.size <= SMALL:
        return {**head, "value": _plain(value)}
    if value.dtype.kind in "Oc":
        return head
    numbers = value.astype(np.float64)
    summary = {"min": numbers.min(), "max": numbers.max(), "mean": numbers.mean()}
    return {**head, **{name: _plain(float(f"{number:.6g}")) for name, number in summary.items()}}


def _plain(value: Any) -> Any:
    """Lists, dicts, numbers and texts; NaN and the infinities as protobuf's JSON mapping writes them, a complex number
    as its two parts."""
    if isinstance(value, np.ndarray):
        if value.dtype.isbuiltin == 2:  # ml_dtypes' types, whose items are no Python numbers
            value = value.astype(np.float32)
        if value.dtype.kind == "f" and value.dtype.itemsize < 8:  # the fewest digits that give the same number back
            value = value.astype(str).astype(np.float64)
        return _plain(value.tolist())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _split(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidArgument(f"{flag} {text!r}: expected NAME=VALUE")
    return name, value


def _is_file(text: str) -> bool:
    return text.startswith("@")


def _file(text: str, flag: str) -> Path:
    if not _is_file(text) or len(text) < 2:
        raise InvalidArgument(f"{flag}: expected NAME=@FILE.npy, found {text!r}")
    return Path(text[1:])


def _value(name: str, text: str, known: TensorMetadata | None) -> Value:
    if _is_file(text):
        return _load(name, _file(text, "--input"))
    try:
        found = json.loads(text)
    except ValueError as e:
        raise InvalidArgument(f"--input {name}: neither @FILE.npy nor JSON: {e}") from None
    if known is None or found is None or isinstance(found, dict):
        return found  # the server names the inputs it has; None is an absent optional, an object a map
    if str(known.parameters.get("kind", "")).startswith("sequence") and isinstance(found, list):
        return [_array(f"{name}/{index}", item, known.datatype) for index, item in enumerate(found)]
    return _array(name, found, known.datatype)


def _load(name: str, path: Path) -> Array:
    try:
        array: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise InvalidArgument(f"--input {name}: {path} cannot be read as npy: {e}") from None
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"--input {name}: {path} holds several arrays; expected one, an npy file")
    return array


def _array(name: str, found: Any, datatype: str) -> Array:
    """`found`, a number, text or nested list, as an array of the input's own type; nothing is rounded to fit."""
    target = numpy_dtype(datatype)
    try:
        array = np.asarray(found)
        fits = array.dtype.kind in ("U" if datatype == "BYTES" else "biu" if "INT" in datatype else "biuf")
        if (array.size and not fits) or (datatype == "BOOL" and array.size and array.dtype.kind != "b"):
            raise ValueError(f"elements are {array.dtype.name}")
        return np.asarray(found, object if datatype == "BYTES" else target)
    except (ValueError, TypeError, OverflowError) as e:
        raise InvalidArgument(f"--input {name}: JSON does not fit {datatype}: {e}") from None


def _save(name: str, path: Path, found: Mapping[str, Value]) -> None:
    value = found.get(name)
    if not isinstance(value, np.ndarray):
        have = ", ".join(key for key, item in found.items() if isinstance(item, np.ndarray))
        raise InvalidArgument(f"--save {name}: no tensor of that name among the outputs {have}")
    try:
        with path.open("wb") as file:
            np.save(file, value.astype(str) if value.dtype.kind == "O" else value, allow_pickle=False)
    except OSError as e:
        raise InvalidArgument(f"--save {name}: {path} cannot be written: {e.strerror}") from None

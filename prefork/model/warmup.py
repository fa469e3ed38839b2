"""Warm-up inputs made again from their recipe, and the digest that proves outputs equal. Loader's and worker's side.

Knows numpy only; must not import onnx or onnxruntime. The same recipe gives the same bytes in every process.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from prefork.errors import PreforkError, SegmentCorrupt
from prefork.model.manifest import Warmup, WarmupInput
from prefork.tensor import DTYPES, Array, Tensor, numpy_dtype
from prefork.value import Parameter, Value, flatten

WORDS = ("a", "small", "warm", "up", "text")
IDS = 7  # below the size of any vocabulary, above the special ids that some embeddings treat apart


def build(warmup: Warmup) -> dict[str, Value]:
    """The inputs of the recipe by name: arrays, lists of arrays (sequence), dicts (map), lists of dicts (maps).

    Raises SegmentCorrupt for a literal that does not fit its dtype and shape."""
    return {spec.name: make(spec) for spec in warmup.inputs}


def make(spec: WarmupInput) -> Value:
    """One input of the recipe; raises as `build`."""
    array = _array(spec)
    if spec.kind == "sequence":
        return [array]
    if spec.kind in ("map", "maps"):
        keys = WORDS * (array.size // len(WORDS) + 1) if spec.key == "BYTES" else range(array.size)
        entries = dict(zip(keys, array.reshape(-1), strict=False))
        return [entries] if spec.kind == "maps" else entries
    return array


def _array(spec: WarmupInput) -> Array:
    if spec.fill == "literal":
        return _literal(spec)
    count = math.prod(spec.shape)
    if spec.dtype == "BYTES":
        array = np.empty(count, object)
        word = str(spec.value) if spec.fill == "value" else None
        array[:] = [WORDS[i % len(WORDS)] if word is None else word for i in range(count)]
        return array.reshape(spec.shape)
    return _fill(spec, count).astype(numpy_dtype(spec.dtype)).reshape(spec.shape)


def _fill(spec: WarmupInput, count: int) -> Array:
    if spec.fill == "value":
        number = spec.value if isinstance(spec.value, int | float) else 0
        return np.full(count, number, np.int64 if float(number).is_integer() else np.float64)
    if spec.fill == "ones":
        return np.ones(count, np.int8)
    if spec.fill == "ids":
        return np.arange(count, dtype=np.int64) % (2 if DTYPES[spec.dtype].bits < 8 else IDS)
    if spec.fill == "unit":
        # a low-discrepancy run (golden ratio): spread over [0, 1) like random numbers, the same on every machine
        return (np.arange(1, count + 1, dtype=np.float64) * 0.6180339887498949) % 1.0
    return np.zeros(count, np.int8)


def _literal(spec: WarmupInput) -> Array:
    try:
        data = base64.b64decode(str(spec.value), validate=True)
        return Tensor(spec.name, spec.dtype, spec.shape, data).to_numpy()
    except (binascii.Error, PreforkError) as e:
        raise SegmentCorrupt(f"warm-up input {spec.name!r}: {e}") from None


def literal(name: str, array: Array) -> WarmupInput:
    """The recipe that gives exactly `array`; raises InvalidArgument for a dtype that ONNX lacks."""
    tensor = Tensor.from_numpy(name, array)
    return WarmupInput(name, "tensor", tensor.dtype, tensor.shape, "literal", base64.b64encode(tensor.data).decode())


def digest(names: Iterable[str], values: Iterable[Value]) -> str:
    """SHA-256 over names, types, shapes and bits of outputs, so that equal digests mean bit-identical outputs."""
    tensors: list[Tensor] = []
    parameters: dict[str, Parameter] = {}
    for name, value in zip(names, values, strict=True):
        flatten(name, value, tensors, parameters)
    return _digest(tensors, parameters)


def _digest(tensors: list[Tensor], parameters: Mapping[str, Any]) -> str:
    sha = hashlib.sha256(repr(sorted(parameters.items())).encode())
    for tensor in tensors:
        sha.update(repr((tensor.name, tensor.dtype, tensor.shape)).encode())
        sha.update(tensor.data)
    return sha.hexdigest()

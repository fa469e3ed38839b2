"""Plain onnxruntime on the original file, by its public calls alone: what our answers are compared with.

Shares no code with prefork.model: types that numpy lacks are copied in and out of OrtValues as TensorProto raw data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from prefork.value import Value

LIKE_NUMPY = {np.dtype(code).name for code in "?bhilqBHILQefdFDO"}


class Plain:
    """A session on the model's bytes; `run` gives all outputs by name. Raises what onnxruntime raises."""

    def __init__(self, model: bytes) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self._session.get_outputs()]
        graph = onnx.load_from_string(model).graph
        types = {info.name: info.type.tensor_type.elem_type for info in graph.output}
        self._exotic = any(types[name] > onnx.TensorProto.COMPLEX128 for name in self.names)

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        feed = {name: _feed(value) for name, value in inputs.items() if value is not None}
        if not self._exotic:
            return dict(zip(self.names, self._session.run(self.names, feed), strict=True))
        given = {n: v if isinstance(v, ort.OrtValue) else ort.OrtValue.ortvalue_from_numpy(v) for n, v in feed.items()}
        values = self._session.run_with_ort_values(self.names, given)
        return {name: _fetch(value) for name, value in zip(self.names, values, strict=True)}


def _feed(value: Value) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.name in LIKE_NUMPY or value.dtype.kind in "US":
        return value
    proto = numpy_helper.from_array(value)
    carried = ort.OrtValue.ortvalue_from_shape_and_type(list(value.shape), proto.data_type)
    ctypes.memmove(carried.data_ptr(), proto.raw_data, len(proto.raw_data))
    return carried


def _fetch(value: ort.OrtValue) -> Value:
    if value.element_type() <= onnx.TensorProto.COMPLEX128:
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()) if 0 not in value.shape() else b""
    return numpy_helper.to_array(onnx.TensorProto(data_type=value.element_type(), dims=value.shape(), raw_data=raw))


def same_bits(one: Value, other: Value) -> bool:
    """Whether two values have the same kind, types, shapes and bits."""
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same_bits, one, other))
    if one is None or other is None or isinstance(one, dict):
        return type(one) is type(other) and bool(one == other)
    if one.dtype.kind in "OUS":
        return one.shape == other.shape and bool(np.all(one == other))
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


def close(found: Value, wanted: Value, rtol: float, atol: float) -> str:
    """Empty when `found` is `wanted` by the rules of onnx.backend.test.runner.assert_similar_outputs, else why not."""
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return f"a sequence of {len(wanted)} became {type(found).__name__}"
        return next(filter(None, (close(f, w, rtol, atol) for f, w in zip(found, wanted, strict=True))), "")
    if wanted is None or found is None or isinstance(wanted, dict):
        return "" if found == wanted else f"{str(wanted)[:60]} became {str(found)[:60]}"
    if found.shape != wanted.shape:
        return f"shape {wanted.shape} became {found.shape}"
    if wanted.dtype.kind in "OUS":
        return "" if (found == wanted).all() else "strings differ"
    if found.dtype != wanted.dtype:
        return f"dtype {wanted.dtype} became {found.dtype}"
    if found.dtype.name == "bfloat16":
        rtol = max(rtol, 2**-6)
    if found.dtype.name not in LIKE_NUMPY:
        found, wanted = found.astype(np.float32), wanted.astype(np.float32)
    if np.allclose(found, wanted, rtol=rtol, atol=atol, equal_nan=True):
        return ""
    return f"values differ (rtol {rtol}, atol {atol})"

from typing import Any

import numpy.typing as npt
from onnx import ModelProto

def to_onnx(model: object, X: npt.NDArray[Any], *, target_opset: dict[str, int]) -> ModelProto: ...

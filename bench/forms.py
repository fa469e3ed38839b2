"""Models in the forms that others bring ready-made: statically quantized, 8 or 4 bit weights, fp16, a GRU. Runs in the
bench's process (onnx, onnxruntime). What becomes of them is not judged here; only their kernels matter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from bench.inputs import FEEDS
from prefork.model.quantize import folded, opset_of
from prefork.model.recipe import Recipe, build
from prefork.model.repository import read_model

MELS, HIDDEN, WORDS = 80, 512, 128  # of the GRU: frames of a spectrogram in, two layers, letters out
CALIBRATION = 4  # pictures


class _Reader(CalibrationDataReader):
    def __init__(self, feeds: Iterator[dict[str, Any]]) -> None:
        self._feeds = feeds

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def weight_only(source: Path, folder: Path, bits: int) -> Path:
    """MatMulNBits for every product, as `--quantize auto` makes them."""
    folded(read_model(source), folder)
    return build(Recipe(f"weights-{bits}", bits=bits), folder, f"w{bits}", reduce_range=False).form.path


def static(source: Path, folder: Path, kind: str) -> Path:
    """ONNX Runtime's own static quantization, `kind` QDQ or QOperator, calibrated on a few inputs of the model."""
    channels = opset_of(folded(read_model(source), folder)) >= 13  # before, DequantizeLinear has no axis
    target = folder / f"{kind}.onnx"
    logging.getLogger().setLevel(logging.ERROR)  # it advises on the root logger
    quantize_static(
        folder / "basic.onnx", target, _Reader(iter(FEEDS[source.stem](source)[:1] * CALIBRATION)),
        quant_format=QuantFormat[kind], per_channel=channels, activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )  # fmt: skip
    return target


def half(source: Path, folder: Path) -> Path:
    """Weights and arithmetic in fp16, inputs and outputs as they were."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    target = folder / "half.onnx"
    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)
    return target


def gru(folder: Path) -> Path:
    """Two GRU layers and a product, random weights: no real model with GRU is at hand. About 10 MB."""
    rng = np.random.default_rng(7)
    weights: list[TensorProto] = []

    def weight(name: str, *shape: int) -> str:
        weights.append(numpy_helper.from_array(rng.normal(0, 0.05, shape).astype(np.float32), name))
        return name

    nodes, last, width = [], "frames", MELS
    for layer in range(2):
        given = [last, weight(f"w{layer}", 1, 3 * HIDDEN, width), weight(f"r{layer}", 1, 3 * HIDDEN, HIDDEN)]
        nodes.append(helper.make_node("GRU", given, [f"y{layer}"], hidden_size=HIDDEN, linear_before_reset=1))
        nodes.append(helper.make_node("Squeeze", [f"y{layer}", "one"], [f"h{layer}"]))
        last, width = f"h{layer}", HIDDEN
    nodes.append(helper.make_node("MatMul", [last, weight("out", HIDDEN, WORDS)], ["letters"]))
    weights.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
    graph = helper.make_graph(
        nodes, "gru",
        [helper.make_tensor_value_info("frames", TensorProto.FLOAT, ["time", 1, MELS])],
        [helper.make_tensor_value_info("letters", TensorProto.FLOAT, ["time", 1, WORDS])], weights,
    )  # fmt: skip
    target = folder / "gru.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), target)
    return target

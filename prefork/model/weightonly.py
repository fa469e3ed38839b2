"""Weights in 8 or 4 bits, activations in fp32: the operator MatMulNBits. Loader's process (onnx).

Blocks of each output channel have a scale of their own, and the kernel quantizes activations by the same blocks
(accuracy level 4), so that outliers stay where they are. Slower than int8 products at many rows, and safe. Layout:
onnxruntime/docs/ContribOperators.md, com.microsoft.MatMulNBits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, helper

from prefork.model import calibrate, external
from prefork.model.absorb import Graph
from prefork.model.quantize import MICROSOFT, attributes
from prefork.model.sensitivity import weighted
from prefork.model.weights import Floats, Weights

BLOCK = {8: 128, 4: 32}  # input channels that share a scale, by bits
INT8_ACTIVATIONS = 4  # accuracy_level


def pack(matrix: Floats, bits: int) -> tuple[npt.NDArray[np.uint8], Floats]:
    """[inputs, outputs] as values [outputs, blocks, bytes] around the middle of the range, and scales
    [outputs * blocks]."""
    inputs, outputs = matrix.shape
    block, middle = BLOCK[bits], 1 << (bits - 1)
    blocks = -(-inputs // block)
    padded = np.zeros((outputs, blocks * block), np.float32)
    padded[:, :inputs] = matrix.T
    padded = padded.reshape(outputs, blocks, block)
    scales = np.abs(padded).max(axis=2) / (middle - 1)
    scales = np.where(scales == 0, np.float32(1), scales).astype(np.float32)
    values = (np.clip(np.rint(padded / scales[:, :, None]), 1 - middle, middle - 1) + middle).astype(np.uint8)
    if bits == 4:
        values = values[:, :, 0::2] | (values[:, :, 1::2] << 4)
    return np.ascontiguousarray(values), scales.reshape(-1)


def rewrite(model: ModelProto, weights: Weights, data: external.DataFile, bits: int) -> int:
    """Replace every product with a constant weight in the main graph, in place; how many."""
    tensors = calibrate.fp32_initializers(model)
    nodes: list[NodeProto] = []
    count = 0
    for node in model.graph.node:
        if not weighted(node, tensors):
            nodes.append(node)
            continue
        values = weights.array(node.input[1])
        nodes += _replace(model, node, values.T if attributes(node).get("transB") else values, data, bits)
        count += 1
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    Graph(model).drop_unused(model)
    if count and not any(o.domain == MICROSOFT for o in model.opset_import):
        model.opset_import.add(domain=MICROSOFT, version=1)
    return count


def _replace(model: ModelProto, node: NodeProto, matrix: Floats, data: external.DataFile, bits: int) -> list[NodeProto]:
    values, scales = pack(np.ascontiguousarray(matrix), bits)
    out = node.output[0]
    bias = node.input[2] if len(node.input) > 2 and node.input[2] else ""
    product = f"{out}_unbiased" if bias else out
    inputs = [node.input[0], _add(model, f"{out}_b{bits}", values, data), _add(model, f"{out}_s{bits}", scales, data)]
    given: dict[str, Any] = {"K": matrix.shape[0], "N": matrix.shape[1], "bits": bits, "block_size": BLOCK[bits]}
    made = helper.make_node(
        "MatMulNBits", inputs, [product], f"{out}_bits", domain=MICROSOFT, accuracy_level=INT8_ACTIVATIONS, **given
    )
    return [made, helper.make_node("Add", [product, bias], [out], f"{out}_bias")] if bias else [made]


def _add(model: ModelProto, name: str, array: npt.NDArray[Any], data: external.DataFile) -> str:
    number = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = model.graph.initializer.add(name=name, data_type=number, dims=array.shape)
    data.append(tensor, [array.data])
    return name

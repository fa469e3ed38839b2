"""Which matrix products bear int8, and by which treatment: measured node by node on real activations. Loader's process.

For each product the error of every treatment is computed as int8 would compute it (numpy, the same rounding), relative
to the fp32 product. A plan for a tolerance gives each node the cheapest treatment within it, and fp32 where there is
none; how much tolerance the whole model bears is for the search to measure on the real graph.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from prefork.model import calibrate
from prefork.model.linear import TOP, Treatment
from prefork.model.quantize import MIN_ELEMENTS, attributes
from prefork.model.weights import Floats, Weights, per_channel

ALPHA = 0.5  # how much of a channel's size moves into the weights; the value of SmoothQuant's paper
FP32 = Treatment("fp32")


@dataclass(frozen=True, slots=True)
class Product:
    """One MatMul or Gemm with a constant weight. `treatments`: cheapest first, each with its error."""

    node: str
    output: str
    elements: int
    treatments: tuple[Treatment, ...]

    @property
    def least(self) -> float:
        """The smallest error that a treatment leaves."""
        return min(treatment.error for treatment in self.treatments)

    def within(self, tolerance: float) -> Treatment:
        """The cheapest treatment whose error is at most `tolerance`; fp32 when there is none."""
        return next((t for t in self.treatments if t.error <= tolerance), FP32)


def plan(products: Sequence[Product], tolerance: float) -> dict[str, Treatment]:
    return {product.output: product.within(tolerance) for product in products}


def levels(products: Sequence[Product]) -> list[float]:
    """Every tolerance at which some node's treatment changes, rising; below the first all are fp32."""
    return sorted({t.error for p in products for t in p.treatments})


def weighted(node: NodeProto, weights: Mapping[str, TensorProto]) -> bool:
    """Whether it is a product that quantize.Rewrite takes."""
    if node.domain or node.op_type not in ("MatMul", "Gemm") or node.input[1] not in weights:
        return False
    given, dims = attributes(node), weights[node.input[1]].dims
    plain = not given.get("transA") and given.get("alpha", 1.0) == 1.0 and given.get("beta", 1.0) == 1.0
    return plain and len(dims) == 2 and int(np.prod(dims)) >= MIN_ELEMENTS


def measure(
    model: ModelProto, folder: Path, batches: Sequence[Mapping[str, Any]], top: int, deadline: float
) -> list[Product]:
    """The products of the main graph in its order; none of them when `deadline` (monotonic) comes first.

    Raises ModelError, or what a run raises."""
    tensors = calibrate.fp32_initializers(model)
    nodes = [node for node in model.graph.node if weighted(node, tensors)]
    inputs = list(dict.fromkeys(node.input[0] for node in nodes))
    rows = calibrate.Rows()
    calibrate.record(model, folder, inputs, batches, rows.take)
    weights, found = Weights(tensors, folder), []
    for name in inputs:
        if name not in rows.kept:
            continue
        users = [node for node in nodes if node.input[0] == name]
        found += _group(rows.pop(name), users, weights, top)
        if time.monotonic() > deadline:
            return []
    order = {node.output[0]: index for index, node in enumerate(nodes)}
    return sorted(found, key=lambda product: order[product.output])


def _group(x: Floats, users: list[NodeProto], weights: Weights, top: int) -> list[Product]:
    """The products that share one input, and so its smoothing."""
    matrices = [_matrix(node, weights) for node in users]
    smooth = factors(x, matrices)
    kinds = (Treatment("int8"), Treatment("int8", smooth), Treatment("rows"), Treatment("rows", smooth))
    inputs = [rounded(x if t.smooth is None else x / smooth, t.kind == "rows") for t in kinds]
    found = []
    for node, matrix in zip(users, matrices, strict=True):
        true = x @ matrix
        size = float(np.linalg.norm(true)) or 1.0
        plain, smoothed = _weight(matrix, top), _weight(matrix * smooth[:, None], top)
        priced = tuple(
            Treatment(
                t.kind, t.smooth, float(np.linalg.norm(q @ (plain if t.smooth is None else smoothed) - true)) / size
            )
            for t, q in zip(kinds, inputs, strict=True)
        )
        found.append(Product(node.name, node.output[0], matrix.size, priced))
    return found


def _matrix(node: NodeProto, weights: Weights) -> Floats:
    values = weights.array(node.input[1])
    return np.ascontiguousarray(values.T if attributes(node).get("transB") else values)


def factors(x: Floats, matrices: Sequence[Floats]) -> Floats:
    """SmoothQuant's factors for activations [rows, channels] and the weights [channels, outputs] they meet; their
    geometric mean is 1."""
    large = np.abs(x).max(axis=0).astype(np.float64)
    rows = np.max([np.abs(matrix).max(axis=1) for matrix in matrices], axis=0).astype(np.float64)
    usable = (large > 0) & (rows > 0)
    if not usable.any():
        return np.ones(len(large), np.float32)
    logs = np.zeros(len(large))
    logs[usable] = ALPHA * np.log(large[usable]) - (1 - ALPHA) * np.log(rows[usable])
    logs[usable] -= logs[usable].mean()
    made: Floats = np.exp(np.clip(logs, -20, 20)).astype(np.float32)
    return made


def rounded(x: Floats, by_rows: bool) -> Floats:
    """`x` after quantization to uint8, as DynamicQuantizeLinear or the rows treatment do it."""
    if by_rows:
        peak = np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-12)
        found: Floats = np.rint(x / peak * TOP) / TOP * peak
        return found
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / 255 or 1.0
    zero = np.rint(-low / scale)
    whole: Floats = ((np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale).astype(np.float32)
    return whole


def _weight(matrix: Floats, top: int) -> Floats:
    values, scales = per_channel(matrix, 0, top, swap=False)
    found: Floats = values * scales
    return found

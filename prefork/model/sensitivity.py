"""Which matrix products bear int8, and by which treatment: measured node by node on real activations. Loader's process.

For each product the error of every treatment is computed as int8 would compute it (numpy, the same rounding), relative
to the fp32 product; influence.py then says what the outputs feel of it. A plan weighs error against time: at a price of
speed each node takes the treatment that is best for it, fp32 among them. Which price the whole model bears is for the
search to measure on the real graph.
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
PASS = 15  # multiplications in the time of one step over one element of an activation, about


@dataclass(frozen=True, slots=True)
class Product:
    """One MatMul or Gemm with a constant weight. `shape`: (inputs, outputs) of the weight. `treatments`: each with its
    error; fp32 is always among the choices and has none."""

    node: str
    output: str
    shape: tuple[int, int]
    treatments: tuple[Treatment, ...]

    @property
    def least(self) -> float:
        """The smallest error that a treatment leaves."""
        return min(treatment.error for treatment in self.treatments)

    def cost(self, treatment: Treatment) -> float:
        """What a row of it takes beside plain int8, in multiplications of fp32."""
        inputs, outputs = self.shape
        if treatment.kind == "fp32":
            return float(inputs * outputs)
        smooth = inputs if treatment.smooth is not None else 0
        rows = 4 * inputs + outputs if treatment.kind == "rows" else 0
        return PASS * (smooth + rows)

    def at(self, price: float) -> Treatment:
        """The treatment for which squared error and `price` times cost are least together."""
        return min((*self.treatments, FP32), key=lambda t: (t.error**2 + price * self.cost(t), self.cost(t)))

    @property
    def prices(self) -> list[float]:
        """Every price at which one treatment may give way to another."""
        choices = (*self.treatments, FP32)
        return [
            (a.error**2 - b.error**2) / (self.cost(b) - self.cost(a))
            for a in choices
            for b in choices
            if self.cost(b) > self.cost(a) and a.error > b.error
        ]


def plan(products: Sequence[Product], price: float) -> dict[str, Treatment]:
    """The treatment of each product, by output. Errors of products are independent, so their squares add up; at one
    price for all, no other plan of the same cost has a smaller sum."""
    return {product.output: product.at(price) for product in products}


def levels(products: Sequence[Product]) -> list[float]:
    """Every price at which the plan may change, rising: the first buys fp32 nearly everywhere, the last nothing."""
    return sorted({price for product in products for price in product.prices})


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
    matrices = [matrix_of(node, weights) for node in users]
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
        found.append(Product(node.name, node.output[0], (matrix.shape[0], matrix.shape[1]), priced))
    return found


def product_error(x: Floats, matrix: Floats, treatment: Treatment, top: int) -> Floats:
    """What int8 by this treatment adds to `x` times `matrix`; the axes of `x` but the last are kept."""
    rows = x.reshape(-1, x.shape[-1])
    true = rows @ matrix
    smooth = treatment.smooth
    values = rounded(rows if smooth is None else rows / smooth, treatment.kind == "rows")
    ours = values @ _weight(matrix if smooth is None else matrix * smooth[:, None], top)
    return np.asarray(ours - true, np.float32).reshape(*x.shape[:-1], matrix.shape[1])


def matrix_of(node: NodeProto, weights: Weights) -> Floats:
    """The constant factor of a product, [inputs, outputs]."""
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

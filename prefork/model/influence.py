"""What an error in one product does to the outputs: measured with the error itself, added to the exact product.
Loader's process (onnx).

A small error in one node may ruin the outputs, and a large one in another be forgotten, so errors of products compare
badly. One session serves for all: beside each product stands an addend that is an input of the graph, zero but for the
node in question.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from prefork.model import calibrate
from prefork.model.linear import Treatment
from prefork.model.sensitivity import Product, matrix_of, product_error
from prefork.model.weights import Floats, Weights

NOTHING = np.zeros((), np.float32)
NEGLIGIBLE = 0.003  # a hundred such errors together cost a cosine 0.0005


def weigh(
    model: ModelProto, folder: Path, products: Sequence[Product], batch: Mapping[str, Any], top: int, deadline: float
) -> list[Product]:
    """The products with the error of each treatment as the outputs feel it, relative; measured on one batch.

    One treatment after the other for all products, those that the outputs feel most first. From `deadline` (monotonic)
    on, and for what is left of a product after a treatment that the outputs hardly feel, errors are estimated in
    proportion to the product's own error. Raises ModelError, or what a run raises."""
    nodes = {node.output[0]: node for node in model.graph.node if node.output}
    exact = calibrate.Whole()
    calibrate.record(model, folder, list({nodes[p.output].input[0]: None for p in products}), [batch], exact.take)
    weights = Weights(calibrate.fp32_initializers(model), folder)
    probe = Probe(model, folder, [p.output for p in products], batch)
    felt: dict[str, list[float]] = {p.output: [] for p in products}
    for turn in range(max((len(p.treatments) for p in products), default=0)):
        for product in sorted(products, key=lambda p: -felt[p.output][-1] if turn and felt[p.output] else 0.0):
            known = felt[product.output]
            if time.monotonic() > deadline or len(known) < turn or (known and known[-1] < NEGLIGIBLE):
                continue
            node = nodes[product.output]
            x, matrix = exact.kept[node.input[0]], matrix_of(node, weights)
            known.append(probe.felt(product.output, product_error(x, matrix, product.treatments[turn], top)))
    shares = [felt[p.output][0] / p.treatments[0].error for p in products if felt[p.output] and p.treatments[0].error]
    usual = float(np.median(shares)) if shares else 1.0
    return [_weighed(product, felt[product.output], usual) for product in products]


def _weighed(product: Product, felt: list[float], usual: float) -> Product:
    """With what was felt, the rest in proportion to the product's own error."""
    known = product.treatments[len(felt) - 1].error if felt else 0.0
    share = felt[-1] / known if known else usual
    errors = [*felt, *(treatment.error * share for treatment in product.treatments[len(felt) :])]
    return replace(product, treatments=tuple(map(_with_error, product.treatments, errors)))


def _with_error(treatment: Treatment, error: float) -> Treatment:
    return Treatment(treatment.kind, treatment.smooth, error)


class Probe:
    """One session over the model, with an addend beside each of the values `names`."""

    def __init__(self, model: ModelProto, folder: Path, names: Sequence[str], batch: Mapping[str, Any]) -> None:
        self._outputs = [value.name for value in model.graph.output]
        self._feed = {**batch, **{f"{name}_addend": NOTHING for name in names}}
        self._session = calibrate.open_basic(_with_addends(model, set(names)), folder)
        self._exact = self._run({})

    def felt(self, name: str, addend: Floats) -> float:
        """How far the outputs move, relative, the worst of them."""
        return distance(self._run({f"{name}_addend": addend}), self._exact)

    def _run(self, changed: Mapping[str, Any]) -> list[Any]:
        return self._session.run(self._outputs, {**self._feed, **changed})


def _with_addends(model: ModelProto, names: set[str]) -> ModelProto:
    made = ModelProto()
    made.CopyFrom(model)
    nodes: list[NodeProto] = []
    for node in made.graph.node:
        nodes.append(node)
        if node.output and node.output[0] in names:
            name = node.output[0]
            node.output[0] = f"{name}_exact"
            nodes.append(helper.make_node("Add", [f"{name}_exact", f"{name}_addend"], [name], f"{name}_sum"))
    copied = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del made.graph.node[:]
    made.graph.node.extend(copied)
    for name in names:
        value = ValueInfoProto(name=f"{name}_addend")
        value.type.tensor_type.elem_type = TensorProto.FLOAT
        made.graph.input.append(value)
    return made


def distance(ours: Sequence[Any], true: Sequence[Any]) -> float:
    """The largest relative difference (L2) among the real outputs; 0 without any."""
    worst = 0.0
    for a, b in zip(ours, true, strict=True):
        if isinstance(b, np.ndarray) and b.dtype.kind == "f" and b.size:
            size = float(np.linalg.norm(b.astype(np.float64))) or 1.0
            worst = max(worst, float(np.linalg.norm(a.astype(np.float64) - b)) / size)
    return worst

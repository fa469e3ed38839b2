"""What the candidates need to know of a model, found out once and only when asked for. Loader's process (onnx)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from prefork.errors import ModelError
from prefork.model import calibrate, external, half, influence, qlinear, quantize, sensitivity
from prefork.model.calibrate import Method, Values
from prefork.model.candidates import Tried
from prefork.model.datafile import Feed
from prefork.model.evidence import Data
from prefork.model.processor import processor
from prefork.model.qlinear import Static
from prefork.model.sensitivity import Product
from prefork.model.weights import Weights

SAMPLES = 8  # batches for sensitivity
WEIGHING_SHARE = 0.4  # of the time left that finding what the outputs feel may take
RANKING_SHARE = 0.3  # of the time left that ranking convolutions may take
THROUGH = frozenset({"Identity", "Reshape", "Cast", "Squeeze", "Unsqueeze", "Flatten", "Transpose"})


class Study:
    """A model after quantize.folded, in `folder`. It is a candidates.State."""

    def __init__(self, model: ModelProto, folder: Path) -> None:
        self.folder = folder
        self.reduce_range = not processor().vnni
        self.tried: list[Tried] = []
        self.deadline = float("inf")
        self.convolutions: Sequence[str] = [node.output[0] for node in qlinear.convolutions(model)]
        tensors = calibrate.fp32_initializers(model)
        weighted = [node for node in model.graph.node if sensitivity.weighted(node, tensors)]
        rest = sum(1 for node in external.nodes(model) if _other(node)) + _in_subgraphs(model)
        self.others = rest > 0
        self.reachable = len(weighted)
        self.linear_kinds = len(weighted) + rest
        self.limits = _limits(model)
        self.makers = _makers(model)
        self.calibrated = False
        self.half_kernels = bool(half.kernels(folder))
        self._model = model
        self._data: Data | None = None
        self._products: list[Product] | None = None
        self._ranges: Values | None = None

    def use(self, data: Data) -> None:
        self._data = data
        self.calibrated = data.kind != "generated"

    def products(self) -> Sequence[Product]:
        """Raises ModelError when time ran out."""
        if self._products is None:
            top = 63 if self.reduce_range else 127
            self._products = sensitivity.measure(self._model, self.folder, self._feeds()[:SAMPLES], top, self.deadline)
            if not self._products:
                raise ModelError("the sensitivity of its products was not measured in time")
            now = time.monotonic()
            end = now + WEIGHING_SHARE * max(self.deadline - now, 0)
            small = min(self._feeds(), key=_elements)
            self._products = influence.weigh(self._model, self.folder, self._products, small, top, end)
        return self._products

    def static(self, method: Method, *, per_channel: bool, around: bool, keep: Sequence[str] = ()) -> Static:
        if self._ranges is None:
            self._ranges = Values()
            names = qlinear.watched(self._model)
            calibrate.record(self._model, self.folder, names, self._feeds(), self._ranges.take)
        top = 63 if self.reduce_range else 127
        return Static(self._ranges.ranges(method), per_channel, frozenset(keep), around, top)

    def ranked(self) -> Sequence[tuple[str, float]]:
        """Convolutions, the most sensitive first: how far each alone moves the outputs, relative. Those that time did
        not allow to measure come last, in the graph's order."""
        batch = _arrays(self._feeds()[0])
        outputs = [value.name for value in self._model.graph.output]
        true = calibrate.open_basic(self._model, self.folder).run(outputs, batch)
        end = time.monotonic() + RANKING_SHARE * max(self.deadline - time.monotonic(), 0)
        errors: dict[str, float] = {}
        for name in self.convolutions:
            if time.monotonic() > end:
                break
            keep = [other for other in self.convolutions if other != name]
            errors[name] = influence.distance(self._alone(keep, outputs, batch), true)
        rest = [(name, 0.0) for name in self.convolutions if name not in errors]
        return sorted(errors.items(), key=lambda item: -item[1]) + rest

    def _alone(self, keep: list[str], outputs: list[str], batch: Mapping[str, Any]) -> list[Any]:
        static = self.static("minmax", per_channel=True, around=False, keep=keep)
        model = external.parse(self._model.SerializeToString())
        with (self.folder / "alone.bin").open("wb") as file:
            weights = Weights(calibrate.fp32_initializers(model), self.folder)
            qlinear.as_static(model, weights, external.DataFile(file, "alone.bin"), static)
        found: list[Any] = calibrate.open_basic(model, self.folder).run(outputs, batch)
        return found

    def _feeds(self) -> list[dict[str, Any]]:
        return [_arrays(feed) for feed in self._data.calibration] if self._data is not None else []


def _arrays(feed: Feed) -> dict[str, Any]:
    return {name: value for name, value in feed.items() if value is not None}


def _elements(feed: dict[str, Any]) -> int:
    return sum(value.size for value in feed.values() if isinstance(value, np.ndarray))


def _other(node: NodeProto) -> bool:
    return node.op_type in ("LSTM", "Attention") and node.domain == quantize.DOMAINS[node.op_type == "Attention"]


def _in_subgraphs(model: ModelProto) -> int:
    """Products inside If, Loop and Scan, which sensitivity does not reach."""
    count = 0
    for graph in list(external.graphs(model))[1:]:
        tensors = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT}
        count += sum(sensitivity.weighted(node, tensors) for node in graph.node)
    return count


def _limits(model: ModelProto) -> dict[str, int]:
    """Of each input that is looked up in a table: the table's size."""
    given = {value.name for value in model.graph.input}
    sizes = {t.name: t.dims[0] for t in model.graph.initializer if t.dims}
    comes = {name: name for name in given}
    found: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type in THROUGH and node.input[0] in comes:
            comes[node.output[0]] = comes[node.input[0]]
        if node.op_type == "Gather" and node.input[0] in sizes and node.input[1] in comes:
            name = comes[node.input[1]]
            found[name] = min(found.get(name, 1 << 31), sizes[node.input[0]])
    return found


def _makers(model: ModelProto) -> dict[str, str]:
    """The operator behind each output."""
    by_output = {name: node for node in model.graph.node for name in node.output}
    found = {}
    for value in model.graph.output:
        node = by_output.get(value.name)
        while node is not None and node.op_type in THROUGH:
            node = by_output.get(node.input[0])
        if node is not None:
            found[value.name] = node.op_type
    return found

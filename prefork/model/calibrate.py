"""What flows through a model: values of chosen tensors on calibration inputs, and the ranges that static quantization
takes from them. Loader's process.

Three ways to a range: the extremes; a percentile, which gives up the rarest values; entropy, the cut at which the
quantized distribution diverges least from the true one (Migacz, "8-bit inference with TensorRT", GTC 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, TensorProto, ValueInfoProto

from prefork.model import external, optimize
from prefork.model.weights import Floats

Method: TypeAlias = Literal["minmax", "entropy", "percentile"]
Range: TypeAlias = tuple[float, float]

PERCENTILE = 99.99
BINS, LEVELS, STEP = 2048, 128, 64  # of the histogram of magnitudes; a cut is tried at every STEP-th bin
KEEP_VALUES = 1 << 16  # of one tensor in one run: enough for its distribution
KEEP_ROWS = 512
AT_ONCE = 48  # tensors taken out of one run: bounds the memory that large pictures take


def record(
    model: ModelProto,
    folder: Path,
    names: Sequence[str],
    batches: Sequence[Mapping[str, Any]],
    take: Callable[[str, npt.NDArray[Any]], None],
) -> None:
    """Run `model`, whose external data lies in `folder`, on each batch, and give each fp32 tensor of `names` to `take`.

    Raises ModelError when onnxruntime does not open the model; what a run raises comes through."""
    for start in range(0, len(names), AT_ONCE):
        part = list(names[start : start + AT_ONCE])
        watched = ModelProto()
        watched.CopyFrom(model)
        known = {value.name for value in watched.graph.output}
        watched.graph.output.extend(ValueInfoProto(name=name) for name in part if name not in known)
        session = open_basic(watched, folder)
        for batch in batches:
            for name, value in zip(part, session.run(part, batch), strict=True):
                if isinstance(value, np.ndarray) and value.dtype == np.float32 and value.size:
                    take(name, value)


def open_basic(model: ModelProto, folder: Path) -> ort.InferenceSession:
    """A session on one thread over a model as it is. Raises ModelError."""
    return optimize.open_prepared(model.SerializeToString(), folder, optimized=True)


def first_outputs(model: ModelProto) -> set[str]:
    """Values that the main graph makes or is given: those that can be watched."""
    made = {name for node in model.graph.node for name in node.output if name}
    return made | {value.name for value in model.graph.input}


@dataclass
class Rows:
    """Rows of activations as a matrix product sees them, [rows, channels]; the largest are always among them."""

    kept: dict[str, list[Floats]] = field(default_factory=dict)

    def take(self, name: str, value: npt.NDArray[Any]) -> None:
        rows = value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value.reshape(1, -1)
        self.kept.setdefault(name, []).append(np.array(thinned(rows), np.float32))

    def pop(self, name: str) -> Floats:
        """All rows of one activation, and forget them."""
        return thinned(np.concatenate(self.kept.pop(name)))


@dataclass
class Whole:
    """Tensors as they are, of the last run."""

    kept: dict[str, Floats] = field(default_factory=dict)

    def take(self, name: str, value: npt.NDArray[Any]) -> None:
        self.kept[name] = value


def thinned(rows: Floats) -> Floats:
    """At most KEEP_ROWS: a quarter of them the largest, the others evenly spread."""
    if len(rows) <= KEEP_ROWS:
        return rows
    peaks = np.abs(rows).max(axis=1)
    largest = np.argpartition(peaks, -KEEP_ROWS // 4)[-KEEP_ROWS // 4 :]
    even = np.linspace(0, len(rows) - 1, KEEP_ROWS - len(largest)).astype(np.int64)
    return rows[np.union1d(largest, even)]


@dataclass
class Values:
    """Extremes, and a sample, of tensors."""

    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    kept: dict[str, list[Floats]] = field(default_factory=dict)

    def take(self, name: str, value: npt.NDArray[Any]) -> None:
        flat = value.reshape(-1)
        self.low[name] = min(self.low.get(name, np.inf), float(flat.min()))
        self.high[name] = max(self.high.get(name, -np.inf), float(flat.max()))
        self.kept.setdefault(name, []).append(np.array(flat[:: max(1, flat.size // KEEP_VALUES)], np.float32))

    def ranges(self, method: Method) -> dict[str, Range]:
        """Of every finite tensor."""
        cut = {"minmax": _extremes, "entropy": _entropy, "percentile": _percentile}[method]
        found = {}
        for name, kept in self.kept.items():
            low, high = self.low[name], self.high[name]
            if np.isfinite(low) and np.isfinite(high):
                found[name] = cut(np.concatenate(kept), low, high)
        return found


def _extremes(values: Floats, low: float, high: float) -> Range:
    return low, high


def _percentile(values: Floats, low: float, high: float) -> Range:
    tail = (100 - PERCENTILE) / 2
    lower, upper = np.percentile(values, [tail, 100 - tail])
    return max(low, float(lower)), min(high, float(upper))


def _entropy(values: Floats, low: float, high: float) -> Range:
    top = max(abs(low), abs(high))
    if top == 0:
        return low, high
    counts = np.histogram(np.abs(values), BINS, (0, top))[0].astype(np.float64)
    counts[0] = counts[1]  # zeros, of which a Relu gives very many, are exact at any scale
    best = min(range(LEVELS, BINS + 1, STEP), key=lambda cut: divergence(counts, cut))
    limit = top * best / BINS
    return max(low, -limit), min(high, limit)


def divergence(counts: npt.NDArray[np.float64], cut: int) -> float:
    """Kullback-Leibler divergence of the first `cut` bins quantized to LEVELS from the same with all beyond added to
    the last."""
    true = counts[:cut].copy()
    true[-1] += counts[cut:].sum()
    group = np.arange(cut) * LEVELS // cut
    filled = counts[:cut] > 0
    sums = np.bincount(group, counts[:cut], LEVELS)
    sizes = np.bincount(group, filled, LEVELS)
    coarse = np.where(filled, sums[group] / np.maximum(sizes[group], 1), 0)
    if not (total := coarse.sum()):
        return float("inf")
    p, q = true / true.sum(), coarse / total
    mask = p > 0
    return float((p[mask] * np.log(p[mask] / np.maximum(q[mask], 1e-12))).sum())


def fp32_initializers(model: ModelProto) -> dict[str, TensorProto]:
    """The main graph's constant fp32 tensors by name."""
    listed = {value.name for value in model.graph.input}
    return {
        tensor.name: tensor
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in listed and external.nbytes(tensor)
    }

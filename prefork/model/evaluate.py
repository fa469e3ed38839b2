"""How right a form's answers are: the metrics, and which one fits a model. Loader's process.

With labels a metric is computed for fp32 and for the form, and the loss is relative to fp32's value. Without, the form
is compared with fp32 itself: the share of equal decisions (top1) or the mean cosine over samples, of the worst output.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from prefork.errors import ModelError
from prefork.model.evidence import Data
from prefork.model.gate import Score
from prefork.model.manifest import TensorSpec
from prefork.value import Value

Array: TypeAlias = npt.NDArray[Any]
Outputs: TypeAlias = Sequence[Sequence[Value]]  # of each run, in the model's order

METRICS = ("auto", "top1", "f1", "cosine", "mse")
DECISION = re.compile(r"logit|prob|score|class|softmax|pred|label", re.I)
EMBEDDING = re.compile(r"embed|hidden|feature|pool|vector", re.I)


@dataclass(frozen=True, slots=True)
class Judge:
    """`decision`: index of the output that decides, -1 when none does. `metric`: a name, or a function."""

    name: str
    metric: str | Score
    outputs: tuple[TensorSpec, ...]
    decision: int
    data: Data

    def measure(self, ours: Outputs, theirs: Outputs) -> tuple[float, float]:
        """Relative loss and the metric's own value; NaN when it cannot be computed."""
        if self.data.labels is None:
            value = self._agreement(ours, theirs)
            return 1 - value, value
        labels = np.concatenate(self.data.labels)
        reference, value = self._score(theirs, labels), self._score(ours, labels)
        if self.metric == "mse":
            return (value - reference) / max(reference, 1e-12), value
        return (reference - value) / max(abs(reference), 1e-12), value

    def _agreement(self, ours: Outputs, theirs: Outputs) -> float:
        if self.name == "top1":
            pairs = [(self._decide(a), self._decide(b)) for a, b in zip(ours, theirs, strict=True)]
            return float(np.mean(np.concatenate([(a == b).ravel() for a, b in pairs])))
        found = []
        for index in range(len(self.outputs)):
            values = [
                cosine
                for a, b, rows in zip(ours, theirs, self.data.rows, strict=True)
                for cosine in cosines(a[index], b[index], rows)
            ]
            if values:
                found.append(float(np.mean(values)))
        return min(found) if found else float(all(map(_equal, ours, theirs)))

    def _decide(self, outputs: Sequence[Value]) -> Array:
        return decided(outputs[self.decision])

    def _score(self, outputs: Outputs, labels: Array) -> float:
        if callable(self.metric):
            return self._called(self.metric, self._joined(outputs), labels)
        if self.name in ("top1", "f1"):
            found = np.concatenate([np.atleast_1d(self._decide(one)) for one in outputs])
            if found.size != labels.size:
                raise ModelError(f"{labels.size} labels for {found.size} decisions of {self._deciding!r}")
            return (top1 if self.name == "top1" else f1)(found.ravel(), labels.ravel())
        values = np.concatenate([np.asarray(one[self._fitting(labels)]) for one in outputs])
        if values.size != labels.size:
            raise ModelError(f"labels have shape {list(labels.shape)}, the output {list(values.shape)}")
        values, truth = values.reshape(len(labels), -1), labels.reshape(len(labels), -1)
        if self.name == "mse":
            return float(np.mean((values.astype(np.float64) - truth) ** 2))
        return float(np.mean(cosines(values, truth, len(labels))))

    def _called(self, metric: Score, outputs: Mapping[str, Array], labels: Array) -> float:
        try:
            return float(metric(outputs, labels))
        except Exception as e:  # the function is the owner's
            raise ModelError(f"metric {self.name}: {type(e).__name__}: {e}") from None

    @property
    def _deciding(self) -> str:
        return self.outputs[self.decision].name

    def _fitting(self, labels: Array) -> int:
        """The first output of real numbers with as many axes as the labels, else the first of real numbers."""
        real = [i for i, spec in enumerate(self.outputs) if spec.kind == "tensor" and _is_real(spec)]
        ranked = [i for i in real if len(self.outputs[i].shape or ()) == labels.ndim]
        if not real:
            raise ModelError(f"metric {self.name}: the model has no output of real numbers")
        return (ranked or real)[0]

    def _joined(self, outputs: Outputs) -> dict[str, Array]:
        joined = {}
        for index, spec in enumerate(self.outputs):
            parts = [one[index] for one in outputs]
            if all(isinstance(part, np.ndarray) and part.ndim for part in parts):
                joined[spec.name] = np.concatenate([np.asarray(part) for part in parts])
        return joined


def judge(metric: str | Score, data: Data, outputs: tuple[TensorSpec, ...], makers: Mapping[str, str]) -> Judge:
    """`makers`: the operator that makes each output. Raises ModelError for an unknown metric, or one that cannot be
    computed for this model."""
    deciding = decision(outputs, makers)
    if callable(metric) or ":" in metric:
        name, function = ("function", metric) if callable(metric) else (metric, named(metric))
        if data.labels is None:
            raise ModelError(f"metric {name}: it needs labels, in the file of --eval")
        return Judge(name, function, outputs, deciding, data)
    if metric not in METRICS:
        raise ModelError(f"metric: expected one of {', '.join(METRICS)} or module:function, found {metric!r}")
    if metric == "auto":
        metric = _fitting_metric(data, deciding)
    if metric in ("f1", "mse") and data.labels is None:
        raise ModelError(f"metric {metric}: it needs labels, in the file of --eval")
    if metric in ("top1", "f1") and deciding < 0:
        deciding = next((i for i, s in enumerate(outputs) if s.kind == "tensor" and len(s.shape or ()) >= 1), -1)
        if deciding < 0:
            raise ModelError(f"metric {metric}: the model has no output that decides")
    return Judge(metric, metric, outputs, deciding, data)


def _fitting_metric(data: Data, deciding: int) -> str:
    if data.labels is not None:
        return "mse" if data.labels[0].dtype.kind == "f" else "top1"
    # what random inputs are taken for says nothing; how far the numbers move does
    return "top1" if deciding >= 0 and data.kind != "generated" else "cosine"


def named(metric: str) -> Score:
    """The function that `module:function` names. Raises ModelError."""
    try:
        found: object = pkgutil.resolve_name(metric)
    except Exception as e:  # the module is the owner's, and importing it may raise anything
        raise ModelError(f"metric {metric!r} cannot be imported: {e}") from None
    if not callable(found):
        raise ModelError(f"metric {metric!r}: expected a function of outputs and labels, found {type(found).__name__}")
    return cast("Callable[[Mapping[str, Array], Array], float]", found)


def decision(outputs: tuple[TensorSpec, ...], makers: Mapping[str, str]) -> int:
    """Index of the output that decides: a label, or scores of classes by their operator or name; -1 when none does."""
    for index, spec in enumerate(outputs):
        if spec.kind == "tensor" and spec.dtype in ("INT64", "INT32", "BYTES") and len(spec.shape or (0, 0, 0)) <= 2:
            return index
    for index, spec in enumerate(outputs):
        if spec.kind != "tensor" or not _is_real(spec) or len(spec.shape or ()) < 2:
            continue
        if EMBEDDING.search(spec.name) or (spec.shape or (0,))[-1] == 1:
            continue
        if makers.get(spec.name) in ("Softmax", "LogSoftmax") or DECISION.search(spec.name):
            return index
    return -1


def _is_real(spec: TensorSpec) -> bool:
    return spec.dtype in ("FP32", "FP64", "FP16")


def decided(value: Value) -> Array:
    """The class of each row: the value itself when it is a label, else the index of the largest score."""
    array = np.asarray(value)
    if array.dtype.kind != "f":
        return array.reshape(-1)
    if array.ndim < 2 or array.shape[-1] == 1:
        return (array > 0.5).reshape(-1)
    found: Array = np.where(np.isnan(array).any(axis=-1), -1, array.argmax(axis=-1))
    return found


def cosines(ours: Value, theirs: Value, rows: int) -> list[float]:
    """Of each of `rows` samples; of the whole where the first axis is something else. Empty unless both are real."""
    if not isinstance(ours, np.ndarray) or not isinstance(theirs, np.ndarray) or theirs.dtype.kind != "f":
        return []
    if ours.shape != theirs.shape:
        return [float("nan")]
    if not theirs.size:
        return []
    if theirs.ndim < 2 or len(theirs) != rows:
        return [cosine(ours, theirs)]
    return [cosine(a, b) for a, b in zip(ours, theirs, strict=True)]


def cosine(ours: Array, theirs: Array) -> float:
    """Of the two arrays as vectors; 1 for two of zeros."""
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else float(np.array_equal(a, b))


def top1(found: Array, labels: Array) -> float:
    """The share of right decisions."""
    return float(np.mean(found.astype(str) == labels.astype(str)))


def f1(found: Array, labels: Array) -> float:
    """The mean over classes of 2 * right / (decided + true)."""
    ours, truth = found.astype(str), labels.astype(str)
    scores = []
    for kind in np.unique(truth):
        right = int(((ours == kind) & (truth == kind)).sum())
        scores.append(2 * right / (int((ours == kind).sum()) + int((truth == kind).sum())))
    return float(np.mean(scores))


def _equal(ours: Sequence[Value], theirs: Sequence[Value]) -> bool:
    return all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else bool(a == b)
        for a, b in zip(ours, theirs, strict=True)
    )

"""The inputs that a search judges by: the owner's, or made up. Loader's process; knows neither onnx nor onnxruntime.

The files of the owner are read by datafile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from prefork.model import probe, warmup
from prefork.model.datafile import BATCH, Batches, Feed, fit, load, rows_of
from prefork.model.gate import Gate
from prefork.model.manifest import TensorSpec, Warmup, WarmupInput
from prefork.tensor import DTYPES, numpy_dtype
from prefork.value import Value

Array: TypeAlias = npt.NDArray[Any]
Kind: TypeAlias = Literal["labels", "agreement", "generated"]

GENERATED = 8  # batches made up
MAX_CALIBRATION = 16  # batches; more change ranges little and cost time


@dataclass(frozen=True, slots=True)
class Data:
    """`evaluation` and `labels` (None without) run in step; `rows`: samples of each of its runs."""

    calibration: list[Feed]
    evaluation: list[Feed]
    rows: list[int]
    labels: list[Array] | None
    kind: Kind
    words: str
    giver: str = "the inputs made up"  # whose the evaluation is, for errors

    def first(self, count: int) -> Data:
        """With that many runs of the evaluation."""
        if count >= len(self.evaluation):
            return self
        labels = None if self.labels is None else self.labels[:count]
        words = f"{self.words}; {sum(self.rows[:count])} of {sum(self.rows)} samples, for time"
        return replace(self, evaluation=self.evaluation[:count], rows=self.rows[:count], labels=labels, words=words)


@dataclass(frozen=True, slots=True)
class Given:
    """What the owner gave, read and found to fit; empty without."""

    calibration: Batches
    evaluation: Batches


def read(gate: Gate, specs: Sequence[TensorSpec]) -> Given:
    """The files that the gate names. Raises ModelError for one that does not fit the model."""
    return Given(
        load(gate.calibration, specs) if gate.calibration else Batches(),
        load(gate.eval, specs) if gate.eval else Batches(),
    )


def gather(
    found: Given,
    gate: Gate,
    specs: tuple[TensorSpec, ...],
    recipe: Warmup,
    limits: Mapping[str, int],
    runs: Callable[[Feed], bool],
) -> Data:
    """The data that was given, the gate's batches among the calibration, or generated. `limits`: ids that an input may
    hold, below; `runs`: whether the model runs with these. Raises ModelError for a batch that does not fit."""
    given = Batches([*found.calibration, *fit(gate.batches, specs, gate.giver)])
    calibration = [batch for batch, _, _ in given]
    evaluation = found.evaluation
    if not evaluation and not calibration:
        return _generated(specs, recipe, limits, runs)
    words = ""
    if not evaluation:
        evaluation = given
        if len(calibration) > 1:  # what is judged was not seen before
            calibration, evaluation = calibration[0::2], Batches(evaluation[1::2])
            words = ", the half that calibration did not see"
        else:
            words = ", the same that calibration saw: give more"
    labelled = all(labels is not None for _, _, labels in evaluation)
    rows = [count for _, count, _ in evaluation]
    if labelled:
        words = f"task accuracy on {sum(rows)} labelled samples{words}"
    else:
        words = f"agreement with fp32 on {sum(rows)} samples given{words}"
    if not calibration:
        calibration = [batch for batch, _, _ in evaluation[:: max(1, len(evaluation) // 8)]]
        words += ", some of which served as calibration"
    return Data(
        calibration[:: -(-len(calibration) // MAX_CALIBRATION)],  # from all over: data is often sorted
        [batch for batch, _, _ in evaluation],
        rows,
        [labels for _, _, labels in evaluation if labels is not None] if labelled else None,
        "labels" if labelled else "agreement",
        words,
        _giver(gate),
    )


def _giver(gate: Gate) -> str:
    path = gate.eval or gate.calibration
    return f"data file {str(path)!r}" if path else gate.giver


def _generated(
    specs: tuple[TensorSpec, ...], recipe: Warmup, limits: Mapping[str, int], runs: Callable[[Feed], bool]
) -> Data:
    generator = np.random.default_rng(0)
    made: list[Feed] = []
    for _ in range(2 * GENERATED):
        feed = {s.name: None for s in specs if s.optional and not any(i.name == s.name for i in recipe.inputs)}
        feed |= {spec.name: _drawn(spec, limits.get(spec.name, warmup.IDS), generator) for spec in recipe.inputs}
        made.append(feed)
    made = [feed for feed in made if runs(feed)] or [probe.feeds(specs, recipe)]
    half = made[1::2] or made
    words = f"agreement with fp32 on {len(half)} generated inputs: the weakest evidence, give --calibration or --eval"
    return Data(made[0::2], half, [rows_of(feed) for feed in half], None, "generated", words)


def _drawn(spec: WarmupInput, limit: int, generator: np.random.Generator) -> Value:
    if spec.kind != "tensor" or spec.fill not in ("ids", "unit") or DTYPES[spec.dtype].bits < 8:
        return warmup.make(spec)
    kind = numpy_dtype(spec.dtype)
    if spec.fill == "ids":
        found: Array = generator.integers(0, max(limit, 1), spec.shape).astype(kind)
        return found
    reals: Array = generator.uniform(-1, 1, spec.shape).astype(kind)
    return reals


def buckets(data: Data, specs: tuple[TensorSpec, ...], recipe: Warmup) -> dict[str, Feed]:
    """The shapes to time, by a name for people: one sample and a batch of each shape given; else sizes made up."""
    if data.kind == "generated":
        return {shown(feed): feed for feed in _sized(specs, recipe)}
    shapes: dict[str, Feed] = {}
    for feed in data.evaluation:
        shapes.setdefault(shown(feed), feed)
    chosen = list(shapes.values())
    chosen = [chosen[0], chosen[-1]] if len(chosen) > 1 else chosen
    singles = [_one(feed, specs) for feed in chosen]
    return {shown(feed): feed for feed in (*singles, *chosen)}


def _one(feed: Feed, specs: tuple[TensorSpec, ...]) -> Feed:
    """The first sample of a batch, of the inputs whose number of samples is open."""
    rows = rows_of(feed)
    free = {spec.name for spec in specs if spec.shape and not isinstance(spec.shape[0], int)}
    return {
        name: value[:1] if isinstance(value, np.ndarray) and name in free and len(value) == rows else value
        for name, value in feed.items()
    }


def _sized(specs: tuple[TensorSpec, ...], recipe: Warmup) -> list[Feed]:
    roles, fills = probe.variables(specs), {spec.name: spec for spec in recipe.inputs}
    first = probe.feeds(specs, recipe)
    if any(spec.fill == "literal" for spec in recipe.inputs):
        return [first]
    known = {spec.name: spec for spec in specs}
    sizings = [{"length": 128}, {"batch": BATCH}]
    made: list[Feed] = [first]
    for sizing in sizings:
        if not sizing.keys() & set(roles.values()):
            continue
        dims = {name: recipe.dims.get(name, probe.SIZES[role][0]) for name, role in roles.items()}
        dims |= {name: sizing[role] for name, role in roles.items() if role in sizing}
        inputs = tuple(replace(fill, shape=probe.shape_of(known[name], dims)) for name, fill in fills.items())
        made.append(probe.feeds(specs, Warmup(inputs)))
    return made


def shown(feed: Feed) -> str:
    """The shape of the largest input: `1x128`."""
    arrays = [value for value in feed.values() if isinstance(value, np.ndarray)]
    if not arrays:
        return "one request"
    return "x".join(map(str, max(arrays, key=lambda array: array.size).shape)) or "scalar"

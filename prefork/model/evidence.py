"""The inputs that a search judges by: the owner's, or made up. Loader's process; knows neither onnx nor onnxruntime.

An npz holds one array an input, under its name, with samples along the first axis; `NAME@2` and so on hold further
samples of other shapes. `labels` (or `labels@2`) holds the truth. An array that has neither that many samples nor any
is one value for all runs.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from prefork.errors import ModelError
from prefork.model import probe, warmup
from prefork.model.gate import Gate
from prefork.model.manifest import TensorSpec, Warmup, WarmupInput
from prefork.tensor import DTYPES, numpy_dtype
from prefork.value import Value

Array: TypeAlias = npt.NDArray[Any]
Feed: TypeAlias = Mapping[str, Value]
Kind: TypeAlias = Literal["labels", "agreement", "generated"]

LABELS = "labels"
BATCH = 8  # samples of one run, where the model leaves the number open
MAX_ROWS = 32  # samples of one run that came as one batch; more cost memory and are cut
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


class Batches(list[tuple[Feed, int, "Array | None"]]):
    """Of (inputs, samples, labels)."""


def gather(
    gate: Gate, specs: tuple[TensorSpec, ...], recipe: Warmup, limits: Mapping[str, int], runs: Callable[[Feed], bool]
) -> Data:
    """The data that the gate names, or generated. `limits`: ids that an input may hold, below; `runs`: whether the
    model runs with these. Raises ModelError for files that do not fit the model."""
    given = load(gate.calibration, specs) if gate.calibration else Batches()
    given += fit(gate.batches, specs, gate.giver)
    calibration = [batch for batch, _, _ in given]
    evaluation = load(gate.eval, specs) if gate.eval else Batches()
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


def load(path: Path, specs: Sequence[TensorSpec]) -> Batches:
    """The batches in an npz file. Raises ModelError, naming the file and what does not fit."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as e:
        raise ModelError(f"data file {str(path)!r}: expected an npz of arrays: {e}") from None
    known = {spec.name for spec in specs}
    groups: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        base, _, group = (name, "", "") if name in known else name.partition("@")
        groups.setdefault(group, {})[base] = array
    made = Batches()
    try:
        for group in groups.values():
            made += _cut(group, specs)
    except ModelError as e:
        raise ModelError(f"data file {str(path)!r}: {e.message}") from None
    if not made:
        raise ModelError(f"data file {str(path)!r}: expected at least one sample, found none")
    return made


def fit(batches: Iterable[Mapping[str, Array]], specs: Sequence[TensorSpec], giver: str) -> Batches:
    """Each batch as one run where the model takes it as it is, else cut as the arrays of a file are. Raises ModelError
    naming `giver`, the batch, and what does not fit."""
    made = Batches()
    for number, batch in enumerate(batches, 1):
        try:
            runs = _whole(batch, specs) or _cut(dict(batch), specs)
            for feed, _, _ in runs:
                _check_shapes(feed, specs)
        except (ModelError, ValueError, TypeError, OverflowError) as e:
            reason = e.message if isinstance(e, ModelError) else str(e)
            raise ModelError(f"{giver}, batch {number}: {reason}") from None
        made += runs
    return made


def _check_shapes(feed: Feed, specs: Sequence[TensorSpec]) -> None:
    for spec in specs:
        value = feed.get(spec.name)
        if isinstance(value, np.ndarray) and not _takes(spec, value):
            wanted = ", ".join(map(str, spec.shape or ()))
            raise ModelError(f"input {spec.name!r}: expected shape [{wanted}], found {list(value.shape)}")


def _whole(batch: Mapping[str, Array], specs: Sequence[TensorSpec]) -> Batches:
    """The batch as one run; empty when it is none, or too large for one."""
    known = {spec.name: spec for spec in specs}
    feed = {name: _typed(known[name], array) for name, array in batch.items() if name in known}
    rows = rows_of(feed)
    rest = batch.keys() - known.keys() - {LABELS}
    if rest or rows > MAX_ROWS or any(spec.required and spec.name not in feed for spec in specs):
        return Batches()
    if not all(_takes(known[name], array) for name, array in feed.items()):
        return Batches()
    return Batches([(feed, rows, np.asarray(batch[LABELS]) if LABELS in batch and LABELS not in known else None)])


def _takes(spec: TensorSpec, array: Array) -> bool:
    if spec.shape is None:
        return True
    fixed = zip(spec.shape, array.shape, strict=False)
    return len(spec.shape) == array.ndim and all(not isinstance(dim, int) or dim == size for dim, size in fixed)


def _cut(group: dict[str, Array], specs: Sequence[TensorSpec]) -> Batches:
    known = {spec.name: spec for spec in specs}
    labels = group.pop(LABELS) if LABELS in group and LABELS not in known else None
    if unknown := sorted(group.keys() - known.keys()):
        raise ModelError(f"{unknown[0]!r} is none of the model's inputs: {', '.join(known)}, nor {LABELS!r}")
    if missing := [spec.name for spec in specs if spec.required and spec.name not in group]:
        raise ModelError(f"input {missing[0]!r} is missing")
    arrays = {name: _typed(known[name], array) for name, array in group.items()}
    split = {name: _split(known[name], array) for name, array in arrays.items()}
    counts = [len(arrays[name]) for name, step in split.items() if step is not None]
    total = len(labels) if labels is not None else max(counts, default=1)
    step = min((n for name, n in split.items() if n is not None and len(arrays[name]) == total), default=1)
    made = Batches()
    whole = total - total % step if any(_is_fixed(known[name]) for name, n in split.items() if n == step) else total
    for start in range(0, whole, step):
        feed: dict[str, Value] = {
            name: _part(known[name], array, start, step, total if split[name] is not None else -1)
            for name, array in arrays.items()
        }
        made.append((feed, min(step, total - start), None if labels is None else labels[start : start + step]))
    return made


def _typed(spec: TensorSpec, array: Array) -> Array:
    wanted = np.dtype(object) if spec.dtype == "BYTES" else numpy_dtype(spec.dtype)
    if spec.kind != "tensor":
        raise ModelError(f"input {spec.name!r} is a {spec.kind}: only tensors can be given in a file")
    return array.astype(wanted) if array.dtype != wanted else array


def _split(spec: TensorSpec, array: Array) -> int | None:
    """How many samples of it one run takes; None when it is one value for all."""
    shape = spec.shape
    if shape is None:
        return 1 if array.ndim else None
    if array.ndim == len(shape) + 1:
        return 1
    if array.ndim != len(shape):
        raise ModelError(f"input {spec.name!r}: expected {len(shape)} axes, or one more, found {array.ndim}")
    if not shape:
        return None
    first = shape[0]
    if isinstance(first, int):
        return first if first and len(array) % first == 0 and len(array) > first else None
    return BATCH


def _is_fixed(spec: TensorSpec) -> bool:
    return bool(spec.shape) and isinstance((spec.shape or (None,))[0], int)


def _part(spec: TensorSpec, array: Array, start: int, step: int, total: int) -> Array:
    if total < 0 or len(array) != total:
        return array
    if spec.shape is not None and array.ndim == len(spec.shape) + 1:
        return np.ascontiguousarray(array[start])
    return np.ascontiguousarray(array[start : start + step])


def rows_of(feed: Feed) -> int:
    """Samples of one run: the first axis of its inputs, where most agree on it."""
    sizes = [value.shape[0] for value in feed.values() if isinstance(value, np.ndarray) and value.ndim > 1]
    return max(set(sizes), key=sizes.count) if sizes else 1


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

"""Inputs, and labels, of an npz or a handler, as batches that a model runs with. Loader's process; no onnx, no ORT.

An npz holds one array an input, under its name, with samples along the first axis; `NAME@2` and so on hold further
samples of other shapes. `labels` (or `labels@2`) holds the truth, one entry a sample. An array that has neither that
many samples nor any is one value for all runs.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prefork.errors import ModelError
from prefork.model.manifest import TensorSpec
from prefork.tensor import numpy_dtype
from prefork.value import Value

Array: TypeAlias = npt.NDArray[Any]
Feed: TypeAlias = Mapping[str, Value]

LABELS = "labels"
BATCH = 8  # samples of one run, where the model leaves the number open
MAX_ROWS = 32  # samples of one run that came as one batch; more cost memory and are cut


class Batches(list[tuple[Feed, int, "Array | None"]]):
    """Of (inputs, samples, labels)."""


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
    if labels is not None and counts and total not in counts:
        raise ModelError(f"expected one label for each sample, found {total} for {max(counts)} samples")
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
    if array.dtype == wanted:
        return array
    if not _converts(array, wanted):
        raise ModelError(f"input {spec.name!r}: expected {spec.dtype}, found {array.dtype} that it cannot hold")
    return array.astype(wanted)


def _converts(array: Array, wanted: np.dtype[Any]) -> bool:
    """Whether no value changes but by rounding."""
    if wanted.kind == "O" or array.dtype.kind in "USO":
        return wanted.kind == "O" and array.dtype.kind in "USO"
    if array.dtype.kind in "iub" and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        return not array.size or (int(array.min()) >= limits.min and int(array.max()) <= limits.max)
    if array.dtype.kind == "b" or wanted.kind in "biu":
        return wanted.kind != "b" and array.dtype.kind == "b"
    return array.dtype.kind in "iufV" and wanted.kind in "fcV"


def _split(spec: TensorSpec, array: Array) -> int | None:
    """How many samples of it one run takes; None when it is one value for all."""
    shape = spec.shape
    if shape is None:
        return 1 if array.ndim else None
    if array.ndim == len(shape) + 1:
        if any(isinstance(dim, int) and dim != size for dim, size in zip(shape, array.shape[1:], strict=True)):
            raise ModelError(f"input {spec.name!r}: expected {_shown(spec)} in each run, found {list(array.shape[1:])}")
        return 1
    if array.ndim != len(shape):
        raise ModelError(f"input {spec.name!r}: expected {len(shape)} axes, or one more, found {array.ndim}")
    if any(isinstance(dim, int) and dim != size for dim, size in zip(shape[1:], array.shape[1:], strict=True)):
        raise ModelError(f"input {spec.name!r}: expected samples of shape {_shown(spec)}, found {list(array.shape)}")
    if not shape:
        return None
    first = shape[0]
    if isinstance(first, int):
        return first if first and len(array) % first == 0 and len(array) > first else None
    return BATCH


def _shown(spec: TensorSpec) -> str:
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in spec.shape or ()) + "]"


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

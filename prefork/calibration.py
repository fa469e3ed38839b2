"""What a handler's `calibration()` yields, as arrays and within bounds. Loader's process.

Whether the arrays fit the model is seen where all data is (model/evidence.py); here it only matters that the owner's
code comes to an end, whatever it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from prefork import handler
from prefork.errors import ModelError
from prefork.tensor import Array

# Ranges are taken from 16 runs, and a loss of half a percent is told from chance by some thousand samples.
MAX_BATCHES, MAX_SAMPLES = 1024, 8192
MAX_BYTES = 512 * 2**20  # 890 RGB images of 224 x 224 in FP32


def batches(
    reference: str, cls: type[Any], seconds: float, progress: Callable[[str], None]
) -> Iterator[dict[str, Array]]:
    """Copies of the arrays by input name, batch by batch; the owner's code runs when the first is asked for, all of it
    within `seconds`. What is beyond the bounds is not asked for.

    Raises ModelError naming the handler, and what it raised, or what was expected of it and found."""
    progress(f"asking {reference} for calibration data")
    what = f"handler {reference!r}: calibration()"
    owner = handler.make(reference, cls)
    with handler.guarded(what, seconds):
        found, more = _collected(owner.calibration(), what)
    if not found:
        raise ModelError(f"{what}: expected at least one batch, found none")
    samples, nbytes = sum(map(_samples, found)), sum(map(_nbytes, found))
    words = f"{len(found)} batches, {samples} samples, {nbytes} bytes"
    progress(f"{reference} gave {words}{', and was asked for no more' if more else ''}")
    yield from found


def _collected(given: Any, what: str) -> tuple[list[dict[str, Array]], bool]:
    """The batches, and whether there may be more."""
    try:
        source = iter(given)
    except TypeError:
        kind = type(given).__name__
        raise ModelError(f"{what}: expected batches to iterate over, such as a generator, found {kind}") from None
    found: list[dict[str, Array]] = []
    samples = nbytes = 0
    for batch in source:
        found.append(_arrays(batch, f"{what}, batch {len(found) + 1}"))
        samples += _samples(found[-1])
        nbytes += _nbytes(found[-1])
        if len(found) >= MAX_BATCHES or samples >= MAX_SAMPLES or nbytes >= MAX_BYTES:
            if close := getattr(source, "close", None):  # here, where its time is bounded
                close()
            return found, True
    return found, False


def _arrays(batch: Any, what: str) -> dict[str, Array]:
    """Copied: a generator may well fill the same array again."""
    if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):
        raise ModelError(f"{what}: expected a dict of input name to array, found {type(batch).__name__}")
    return {name: np.array(value) for name, value in batch.items()}


def _samples(batch: Mapping[str, Array]) -> int:
    return max((len(array) for array in batch.values() if array.ndim), default=1)


def _nbytes(batch: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in batch.values())

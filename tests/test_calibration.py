"""What a handler yields: copied, bounded, and refused by name when it is something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from prefork import calibration
from prefork.errors import ModelError

SAMPLE = np.zeros((2, 3), np.float32)


def owner(function: Callable[[], Any]) -> type[Any]:
    return type("Owner", (), {"calibration": staticmethod(function)})


def asked(function: Callable[[], Any], seconds: float = 60.0) -> list[dict[str, Any]]:
    return list(calibration.batches("m:C", owner(function), seconds, lambda step: None))


def refusal(function: Callable[[], Any], seconds: float = 60.0) -> str:
    with pytest.raises(ModelError) as caught:
        asked(function, seconds)
    return caught.value.message


def test_one_array_filled_again_and_again_is_copied() -> None:
    def batches() -> Iterator[dict[str, Any]]:
        array = np.zeros(2, np.float32)
        for number in range(3):
            array[:] = number
            yield {"x": array, "labels": [number, number]}

    found = asked(batches)
    assert [batch["x"].tolist() for batch in found] == [[0, 0], [1, 1], [2, 2]]
    assert [batch["labels"].tolist() for batch in found] == [[0, 0], [1, 1], [2, 2]]


def test_nothing_runs_before_the_first_batch_is_asked_for() -> None:
    ran: list[int] = []
    calibration.batches("m:C", owner(lambda: ran.append(1)), 60.0, lambda step: None)
    assert ran == []


@pytest.mark.parametrize(
    ("size", "count"),
    [(1, calibration.MAX_BATCHES), (512, calibration.MAX_SAMPLES // 512)],
)
def test_a_generator_without_end_is_closed(size: int, count: int) -> None:
    closed: list[bool] = []
    told: list[str] = []

    def batches() -> Iterator[dict[str, Any]]:
        try:
            while True:
                yield {"x": np.zeros((size, 1), np.int8)}
        finally:
            closed.append(True)

    found = list(calibration.batches("m:C", owner(batches), 60.0, told.append))
    assert (len(found), closed) == (count, [True])
    assert (
        told[-1] == f"m:C gave {count} batches, {count * size} samples, {count * size} bytes, and was asked for no more"
    )


def test_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_BYTES", 3 * SAMPLE.nbytes)
    assert len(asked(lambda: [{"x": SAMPLE}] * 10)) == 3


def broken() -> Iterator[dict[str, Any]]:
    yield {"x": SAMPLE}
    raise OSError(2, "No such file", "texts.csv")


def endless() -> Iterator[dict[str, Any]]:
    yield {"x": SAMPLE}
    while True:
        pass


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (broken, r"calibration(): FileNotFoundError: [Errno 2] No such file: 'texts.csv' ("),
        (lambda: None, "calibration(): expected batches to iterate over, such as a generator, found NoneType"),
        (list, "calibration(): expected at least one batch, found none"),
        (lambda: [SAMPLE], "calibration(), batch 1: expected a dict of input name to array, found ndarray"),
        (lambda: [{"x": SAMPLE}, {1: SAMPLE}], "batch 2: expected a dict of input name to array, found dict"),
        (lambda: [{"x": [[1], [1, 2]]}], "calibration(): ValueError: setting an array element"),
    ],
)
def test_what_cannot_be_used_is_named(function: Callable[[], Any], said: str) -> None:
    message = refusal(function)
    assert message.startswith("handler 'm:C': calibration()") and said in message


def test_a_generator_that_hangs_ends_in_time() -> None:
    assert refusal(endless, 0.05) == "handler 'm:C': calibration(): it took longer than 0.05 s"

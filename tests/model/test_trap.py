"""The planted trap is honest: the function is the one without outliers, and only plain int8 gets it wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from prefork.model import repository
from prefork.model.gate import Gate
from prefork.model.opening import Mapped
from prefork.model.pack import prepare
from prefork.model.session import Session
from prefork.model.trial import run
from prefork.tensor import Array
from tests.model import small, trap

BUDGET = 0.005
POINTS = 0.05


def scores(path: Path) -> Array:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found: Array = session.run(None, {"x": trap.digits()[0]})[0]
    return found


def accuracy(found: Array) -> float:
    return float(np.mean(found.argmax(1) == trap.digits()[1]))


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_stock_quantizer_loses_more_than_five_points_to_it_and_none_without_outliers(
    tmp_path: Path, per_channel: bool
) -> None:
    lost = {}
    for name, factor in (("without", 1.0), ("with", trap.FACTOR)):
        path = small.save(trap.planted(factor), tmp_path / f"{name}.onnx")
        quantized = tmp_path / f"{name}.int8.onnx"
        quantize_dynamic(path, quantized, per_channel=per_channel, weight_type=QuantType.QInt8)
        lost[name] = accuracy(scores(path)) - accuracy(scores(quantized))
    assert lost["with"] > POINTS
    assert lost["without"] < BUDGET


def test_the_outliers_change_nothing_in_fp32(tmp_path: Path) -> None:
    plain, planted = (
        scores(small.save(trap.planted(factor), tmp_path / f"{factor}.onnx")) for factor in (1.0, trap.FACTOR)
    )
    assert np.abs(plain - planted).max() < 1e-3
    assert accuracy(plain) > 0.9


@pytest.mark.parametrize("budget", [BUDGET, 0.0])
def test_what_is_packed_holds_the_budget_when_opened_as_a_worker_does(tmp_path: Path, budget: float) -> None:
    path, data = trap.write(tmp_path)
    gate = Gate(budget=budget, eval=data, min_speedup=0)
    found = prepare(repository.read_model(path), name="m", quantize="auto", gate=gate, work_dir=tmp_path)
    session = Session.open(found.manifest, found.graph, Mapped(str(tmp_path)))
    (served,) = run(session, {"x": trap.digits()[0]})
    reference = scores(path)
    assert isinstance(served, np.ndarray)
    assert accuracy(served) >= accuracy(reference) * (1 - budget) - 1e-9
    if budget:
        assert found.manifest.form == "int8-mixed"
        naive = found.manifest.report["gate"]["candidates"][0]
        assert naive["name"] == "int8-dynamic" and accuracy(reference) - naive["score"] > POINTS
    else:
        assert (found.manifest.form, found.manifest.report["gate"]["choice"]) == ("fp32", "fp32")
        assert np.array_equal(served.argmax(1), reference.argmax(1))

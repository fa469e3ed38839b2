"""Data files as batches, the metric that fits, and its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefork.errors import ModelError
from prefork.model import evaluate, evidence
from prefork.model.datafile import BATCH, MAX_ROWS, Feed, fit, load
from prefork.model.evidence import Data
from prefork.model.gate import Gate
from prefork.model.manifest import TensorSpec, Warmup, WarmupInput
from prefork.tensor import Array

FREE = (TensorSpec("x", "tensor", "FP32", ("batch", 3)),)
ONE = (TensorSpec("x", "tensor", "FP32", (1, 3)),)
SCORES = (TensorSpec("scores", "tensor", "FP32", ("batch", 4)),)
LABELS = (TensorSpec("label", "tensor", "INT64", ("batch",)), TensorSpec("p", "maps", "FP32", None, key="INT64"))
EMBEDDING = (
    TensorSpec("sentence_embedding", "tensor", "FP32", ("batch", 4)),
    TensorSpec("last_hidden_state", "tensor", "FP32", ("batch", "s", 4)),
)


def saved(folder: Path, **arrays: Array) -> Path:
    path = folder / "data.npz"
    np.savez(path, **{name.replace("__", "@"): array for name, array in arrays.items()})
    return path


def data(rows: list[int], labels: list[Array] | None = None, kind: evidence.Kind = "agreement") -> Data:
    return Data([], [{} for _ in rows], rows, labels, "labels" if labels is not None else kind, "")


def gathered(
    gate: Gate,
    specs: tuple[TensorSpec, ...],
    recipe: Warmup,
    limits: Mapping[str, int],
    runs: Callable[[Feed], bool],
) -> Data:
    return evidence.gather(evidence.read(gate, specs), gate, specs, recipe, limits, runs)


def test_an_open_axis_is_cut_into_batches(tmp_path: Path) -> None:
    x = np.arange(60, dtype=np.float64).reshape(20, 3)
    found = load(saved(tmp_path, x=x, labels=np.arange(20)), FREE)
    assert [rows for _, rows, _ in found] == [8, 8, 4]
    assert found[0][0]["x"].dtype == np.float32
    assert np.array_equal(np.concatenate([feed["x"] for feed, _, _ in found]), x)
    assert np.concatenate([labels for _, _, labels in found if labels is not None]).tolist() == list(range(20))


def test_a_fixed_axis_takes_samples_one_by_one(tmp_path: Path) -> None:
    found = load(saved(tmp_path, x=np.zeros((5, 3), np.float32)), ONE)
    assert [feed["x"].shape for feed, _, _ in found] == [(1, 3)] * 5
    found = load(saved(tmp_path, x=np.zeros((5, 1, 3), np.float32)), ONE)
    assert [feed["x"].shape for feed, _, _ in found] == [(1, 3)] * 5
    pairs = (TensorSpec("x", "tensor", "FP32", (2, 3)),)
    assert [rows for _, rows, _ in load(saved(tmp_path, x=np.zeros((5, 3), np.float32)[:4]), pairs)] == [2, 2]


def test_other_shapes_and_constants(tmp_path: Path) -> None:
    specs = (TensorSpec("x", "tensor", "FP32", ("b", "s")), TensorSpec("rate", "tensor", "INT64", ()))
    first, second = np.zeros((2, 5), np.float32), np.zeros((1, 9), np.float32)
    rate = np.array(16000)
    found = load(saved(tmp_path, x=first, rate=rate, x__2=second, rate__2=rate), specs)
    assert [feed["x"].shape for feed, _, _ in found] == [(2, 5), (1, 9)]
    assert all(feed["rate"] == 16000 for feed, _, _ in found)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": np.zeros(3)}, "'y' is none of the model's inputs: x"),
        ({"labels": np.zeros(3)}, "input 'x' is missing"),
        ({"x": np.zeros((2, 2, 2, 3))}, "expected 2 axes, or one more, found 4"),
        ({"x": np.zeros((0, 3))}, "expected at least one sample"),
        ({"x": np.zeros((2, 4))}, r"input 'x': expected samples of shape \[batch, 3\], found \[2, 4\]"),
        ({"x": np.zeros((2, 1, 4))}, r"input 'x': expected \[batch, 3\] in each run, found \[1, 4\]"),
        ({"x": np.zeros((2, 3)), "labels": np.zeros(3)}, "expected one label for each sample, found 3 for 2 samples"),
        ({"x": np.full((2, 3), "a")}, "input 'x': expected FP32, found <U1"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Array], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load(saved(tmp_path, **arrays), FREE)
    assert "data.npz" in caught.value.message


def test_what_is_judged_was_not_calibrated_on(tmp_path: Path) -> None:
    path = saved(tmp_path, x=np.arange(96, dtype=np.float32).reshape(32, 3))
    recipe = Warmup((WarmupInput("x", "tensor", "FP32", (1, 3), "unit"),))
    found = gathered(Gate(calibration=path), FREE, recipe, {}, lambda _: True)
    seen = {float(feed["x"][0, 0]) for feed in found.calibration}
    assert not seen & {float(feed["x"][0, 0]) for feed in found.evaluation}
    assert (found.kind, sum(found.rows)) == ("agreement", 16)
    assert "the half that calibration did not see" in found.words
    judged = gathered(Gate(eval=path), FREE, recipe, {}, lambda _: True)
    assert (sum(judged.rows), len(judged.calibration)) == (32, 4)
    assert judged.words.endswith("some of which served as calibration")
    held = gathered(Gate(batches=[{"x": np.zeros((2, 3), np.float32)}]), FREE, recipe, {}, lambda _: True)
    assert (held.kind, held.rows) == ("agreement", [2])


def batch(rows: int, **more: Any) -> dict[str, Any]:
    return {"x": np.zeros((rows, 3), np.float64), **more}


def test_a_batch_is_one_run_unless_the_model_wants_it_cut() -> None:
    held = fit([batch(2), batch(MAX_ROWS)], FREE, "m:C")
    assert [rows for _, rows, _ in held] == [2, MAX_ROWS]
    assert held[0][0]["x"].dtype == np.float32
    large = fit([batch(20, labels=np.arange(20)), batch(40, labels=np.arange(40))], FREE, "m:C")
    assert [rows for _, rows, _ in large] == [20, *[BATCH] * 5]
    assert np.concatenate([labels for _, _, labels in large if labels is not None]).tolist() == [*range(20), *range(40)]
    single = (TensorSpec("x", "tensor", "FP32", (1, 3)),)
    assert [rows for _, rows, _ in fit([batch(4)], single, "m:C")] == [1] * 4


def test_batches_with_labels_are_judged_by_the_half_that_calibration_did_not_see() -> None:
    recipe = Warmup((WarmupInput("x", "tensor", "FP32", (1, 3), "unit"),))
    batches = [batch(2, labels=np.array([number, number])) for number in range(6)]
    found = gathered(Gate(batches=iter(batches)), FREE, recipe, {}, lambda _: True)
    assert found.kind == "labels" and found.labels is not None
    assert [labels.tolist() for labels in found.labels] == [[1, 1], [3, 3], [5, 5]]
    assert found.words == "task accuracy on 6 labelled samples, the half that calibration did not see"
    assert len(found.calibration) == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"y": np.zeros((2, 3))}, "m:C, batch 2: 'y' is none of the model's inputs: x"),
        ({}, "m:C, batch 2: input 'x' is missing"),
        ({"x": np.zeros(())}, "m:C, batch 2: input 'x': expected 2 axes, or one more, found 0"),
        ({"x": np.array([["a", "b", "c"]])}, "m:C, batch 2: input 'x': expected FP32, found <U1"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        fit([batch(2), given], FREE, "m:C")


def test_generated_inputs_respect_tables_and_are_called_weak() -> None:
    recipe = Warmup((WarmupInput("ids", "tensor", "INT64", (1, 64), "ids"),))
    specs = (TensorSpec("ids", "tensor", "INT64", (1, 64)),)
    found = gathered(Gate(), specs, recipe, {"ids": 1000}, lambda _: True)
    drawn = np.concatenate([feed["ids"] for feed in found.evaluation])
    assert drawn.min() >= 0
    assert 900 < drawn.max() < 1000
    assert found.kind == "generated"
    assert "weakest evidence" in found.words
    refused = gathered(Gate(), specs, recipe, {"ids": 1000}, lambda _: False)
    assert [feed["ids"].max() for feed in refused.evaluation] == [6]


def test_buckets_are_a_sample_and_a_batch_of_the_shapes_given() -> None:
    given = replace(data([4]), evaluation=[{"x": np.zeros((4, 3), np.float32)}])
    recipe = Warmup((WarmupInput("x", "tensor", "FP32", (1, 3), "unit"),), None, {"batch": 1})
    assert list(evidence.buckets(given, FREE, recipe)) == ["1x3", "4x3"]
    assert list(evidence.buckets(replace(given, kind="generated"), FREE, recipe)) == ["1x3", "8x3"]
    text = (TensorSpec("ids", "tensor", "INT64", ("batch", "sequence")),)
    recipe = Warmup((WarmupInput("ids", "tensor", "INT64", (1, 16), "ids"),), None, {"batch": 1, "sequence": 16})
    assert list(evidence.buckets(replace(given, kind="generated"), text, recipe)) == ["1x16", "1x128", "8x16"]


@pytest.mark.parametrize(
    ("outputs", "makers", "index"),
    [
        (SCORES, {}, 0),
        (LABELS, {}, 0),
        (EMBEDDING, {}, -1),
        ((TensorSpec("4195", "tensor", "FP32", ("n", 2)),), {"4195": "Softmax"}, 0),
        ((TensorSpec("4195", "tensor", "FP32", ("n", 2)),), {"4195": "Gemm"}, -1),
        ((TensorSpec("score", "tensor", "FP32", ("n", 1)),), {}, -1),
    ],
)
def test_the_output_that_decides(outputs: tuple[TensorSpec, ...], makers: Mapping[str, str], index: int) -> None:
    assert evaluate.decision(outputs, makers) == index


@pytest.mark.parametrize(
    ("outputs", "labels", "kind", "name"),
    [
        (SCORES, None, "agreement", "top1"),
        (SCORES, None, "generated", "cosine"),
        (EMBEDDING, None, "agreement", "cosine"),
        (SCORES, [np.array([1])], "labels", "top1"),
        (EMBEDDING, [np.zeros((1, 4), np.float32)], "labels", "mse"),
    ],
)
def test_the_metric_that_fits(
    outputs: tuple[TensorSpec, ...], labels: list[Array] | None, kind: evidence.Kind, name: str
) -> None:
    assert evaluate.judge("auto", data([1], labels, kind), outputs, {}).name == name


def scores(*best: int) -> list[list[Array]]:
    return [[np.eye(4, dtype=np.float32)[list(best)]]]


def test_task_accuracy_is_relative_to_that_of_fp32() -> None:
    judge = evaluate.judge("auto", data([4], [np.array([0, 1, 2, 3])]), SCORES, {})
    theirs, ours = scores(0, 1, 2, 0), scores(0, 1, 0, 0)
    assert judge.measure(ours, theirs) == (pytest.approx(1 / 3), 0.5)
    assert judge.measure(scores(0, 1, 2, 3), theirs)[0] < 0
    with pytest.raises(ModelError, match="4 labels for 1 decisions of 'scores'"):
        judge.measure(scores(0), scores(0))


def test_agreement() -> None:
    judge = evaluate.judge("auto", data([4]), SCORES, {})
    assert judge.measure(scores(0, 1, 2, 0), scores(0, 1, 2, 3)) == (0.25, 0.75)
    found = evaluate.judge("auto", data([2]), EMBEDDING, {})
    same, other = np.ones((2, 4), np.float32), np.ones((2, 3, 4), np.float32)
    turned = other.copy()
    turned[1, :, :2] = 0
    assert found.measure([[same, turned]], [[same, other]])[1] == pytest.approx((1 + 0.5**0.5) / 2)
    broken = np.full_like(same, np.nan)
    assert np.isnan(found.measure([[broken, other]], [[same, other]])[0])
    assert np.isnan(found.measure([[same[:1], other]], [[same, other]])[0])


def test_a_score_that_is_no_number_decides_nothing() -> None:
    judge = evaluate.judge("auto", data([1]), SCORES, {})
    nan = np.full((1, 4), np.nan, np.float32)
    assert judge.measure([[nan]], scores(0))[0] == 1


def test_named_metrics() -> None:
    labels = [np.array([0, 0, 0, 1])]
    f1 = evaluate.judge("f1", data([4], labels), SCORES, {})
    assert f1.measure(scores(0, 0, 0, 0), scores(0, 0, 0, 1)) == (pytest.approx(1 - 3 / 7), pytest.approx(3 / 7))
    truth = [np.zeros((1, 4), np.float32)]
    mse = evaluate.judge("mse", data([1], truth), EMBEDDING, {})
    one, two = np.ones((1, 4), np.float32), np.full((1, 4), 2, np.float32)
    hidden = np.zeros((1, 1, 4), np.float32)
    assert mse.measure([[two, hidden]], [[one, hidden]]) == (3.0, 4.0)
    cosine = evaluate.judge("cosine", data([1], [one]), EMBEDDING, {})
    assert cosine.measure([[two, hidden]], [[one, hidden]]) == (pytest.approx(0), pytest.approx(1))


def above(outputs: Mapping[str, Array], labels: Array) -> float:
    """The metric that the next test names."""
    return float((outputs["scores"][:, 0] > labels).mean())


def test_a_function_is_a_metric() -> None:
    for metric in (above, f"{__name__}:above"):
        judge = evaluate.judge(metric, data([2], [np.array([0.5, 0.5])]), SCORES, {})
        assert judge.measure(scores(0, 1), scores(0, 0)) == (0.5, 0.5)
    with pytest.raises(ModelError, match="needs labels"):
        evaluate.judge(above, data([2]), SCORES, {})
    failing = evaluate.judge("math:sqrt", data([1], [np.array([1.0])]), SCORES, {})
    with pytest.raises(ModelError, match="metric math:sqrt: TypeError"):
        failing.measure(scores(0), scores(0))

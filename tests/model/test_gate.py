"""What passes, decided on plain values, and the trap that only mixed precision passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.inputs import FEEDS
from prefork.errors import ModelError
from prefork.model import half, repository
from prefork.model.gate import Gate, Measured, Timing, choose, finalists, inaccurate, refusal, slow
from prefork.model.manifest import Manifest
from prefork.model.opening import InMemory, Mapped
from prefork.model.pack import Prepared, embed_subgraphs, prepare
from prefork.model.report import Step, report_lines
from prefork.model.session import Session
from prefork.model.timing import TURNS, compare, summary
from tests.model import small, trap


def measured(name: str, delta: float, *ratios: float) -> Measured:
    timings = tuple(Timing(f"{i}", 1.0, 1 / ratio, ratio) for i, ratio in enumerate(ratios))
    return Measured(name, 1000, delta, 1 - delta, timings)


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (0.0, ""),
        (-0.01, ""),
        (0.005, ""),
        (0.0051, "loses 0.51% of accuracy, the budget is 0.50%"),
        (math.nan, "its accuracy is no number"),
        (math.inf, "loses inf% of accuracy, the budget is 0.50%"),
    ],
)
def test_accuracy(delta: float, reason: str) -> None:
    assert inaccurate(measured("m", delta, 2.0), 0.005) == reason


@pytest.mark.parametrize(
    ("ratios", "reason"),
    [
        ((1.05,), ""),
        ((3.0, 0.98), ""),
        ((), "its speed was not measured"),
        ((3.0, 0.9), "slower than fp32 at 1: 0.90 of its speed"),
        ((1.02, 1.02), "1.02 times as fast as fp32, the margin is 1.05"),
    ],
)
def test_speed(ratios: tuple[float, ...], reason: str) -> None:
    assert slow(measured("m", 0, *ratios), 1.05) == reason


def test_the_fastest_that_passes_is_chosen_and_the_more_accurate_of_two_alike() -> None:
    forms = [
        measured("wrong", 0.5, 9.0),
        measured("slow", 0.0, 0.5),
        measured("right", 0.001, 2.0),
        measured("alike", 0.0005, 1.97),
        measured("slower", 0.0, 1.5),
    ]
    chosen = choose(forms, Gate())
    assert chosen is not None
    assert chosen.name == "alike"
    assert choose(forms[:2], Gate()) is None
    assert refusal(forms[1], Gate(min_speedup=0)) == ""


def test_speed_is_the_geometric_mean_over_buckets() -> None:
    assert measured("m", 0, 4.0, 1.0).speedup == pytest.approx(2.0)
    assert measured("m", 0).speedup == 0


def test_a_ratio_is_taken_turn_by_turn() -> None:
    """The machine becomes five times slower half-way: each turn still says 2."""
    found = summary("b", [(2.0, 1.0), (2.0, 1.0), (10.0, 5.0), (10.0, 5.0), (10.0, 5.0)])
    assert found == Timing("b", 10.0, 5.0, 2.0)


def test_the_two_forms_take_turns() -> None:
    calls: list[str] = []

    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += 1.0

    clock = ticks()
    forms = [lambda: calls.append("one"), lambda: calls.append("two")]
    found = compare("b", lambda: calls.append("fp32"), forms, lambda: next(clock))
    assert [timing.ratio for timing in found] == [1.0, 1.0]
    assert calls[:3] == ["fp32", "one", "two"]
    turns = calls[3:]
    assert len(turns) == 3 * TURNS[0]
    assert turns[:6] == ["fp32", "one", "two", "two", "one", "fp32"]


def test_only_forms_near_the_best_are_timed_again() -> None:
    forms = [measured("best", 0, 3.0), measured("near", 0, 2.4), measured("far", 0, 2.0), measured("wrong", 1, 9.0)]
    assert [one.name for one in finalists(forms, Gate())] == ["best", "near"]
    assert finalists(forms[3:], Gate()) == []


def prepared(folder: Path, path: Path, gate: Gate, steps: list[str] | None = None) -> Prepared:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    told = steps.append if steps is not None else lambda _: None
    source = repository.read_model(path)
    return prepare(source, name="m", quantize="auto", gate=gate, work_dir=work, progress=told)


def check_opens(found: Prepared) -> None:
    """From a file and from memory, as the two kinds of segment hold it."""
    memory = InMemory(memoryview(found.weights.read_bytes()))
    ways = (found.graph, Mapped(str(found.weights.parent))), (embed_subgraphs(found.graph, found.weights), memory)
    for graph, weights in ways:
        warm = Session.open(found.manifest, graph, weights).warm()
        assert warm is not None
        assert warm.matches


def test_the_trap_passes_by_mixed_precision(tmp_path: Path) -> None:
    path, data = trap.write(tmp_path)
    steps: list[str] = []
    found = prepared(tmp_path, path, Gate(eval=data, min_speedup=0), steps)
    gate = found.manifest.report["gate"]
    naive = gate["candidates"][0]
    assert naive["name"] == "int8-dynamic"
    assert naive["delta"] > 0.05
    assert naive["verdict"].startswith("loses ")
    chosen = next(one for one in gate["candidates"] if one["chosen"])
    assert found.manifest.form == gate["choice"] == chosen["name"] == "int8-mixed"
    assert chosen["delta"] <= 0.005
    assert chosen["treatments"].keys() - {"int8"}
    assert "task accuracy on 1797 labelled samples" in gate["evidence"]
    assert Manifest.from_json(found.manifest.to_json()) == found.manifest
    check_opens(found)
    fractions = [step.fraction for step in steps if isinstance(step, Step)]
    assert fractions == sorted(fractions)
    assert fractions
    text = "\n".join(report_lines(found.manifest.report))
    for word in ("choice     int8-mixed", "int8-dynamic", "loses", "task accuracy", "not tried"):
        assert word in text


def test_with_a_budget_of_0_the_trap_stays_fp32(tmp_path: Path) -> None:
    path, data = trap.write(tmp_path)
    found = prepared(tmp_path, path, Gate(budget=0, eval=data))
    assert found.manifest.form == "fp32"
    gate = found.manifest.report["gate"]
    assert (gate["choice"], gate["candidates"]) == ("fp32", [])
    assert "budget of 0" in gate["reason"]
    assert found.manifest.notes == (f"quantize auto chose fp32: {gate['reason']}",)


def test_when_nothing_is_fast_enough_fp32_is_served_with_the_reason(tmp_path: Path) -> None:
    path, data = trap.write(tmp_path)
    found = prepared(tmp_path, path, Gate(budget=0.9, eval=data, min_speedup=1e6))
    gate = found.manifest.report["gate"]
    assert found.manifest.form == gate["choice"] == "fp32"
    assert gate["reason"].startswith("no form passes: ")
    verdicts = [one["verdict"] for one in gate["candidates"]]
    assert all(verdicts)
    assert any(
        verdict.startswith("slower than fp32 at ") or "the margin is 1000000.00" in verdict for verdict in verdicts
    )


def test_no_time_leaves_fp32_and_says_so(tmp_path: Path) -> None:
    path, data = trap.write(tmp_path)
    found = prepared(tmp_path, path, Gate(eval=data, seconds=0))
    gate = found.manifest.report["gate"]
    assert (gate["choice"], gate["stopped_early"]) == ("fp32", True)
    assert {"name": "int8-dynamic", "reason": "no time left of 0 s"} in gate["not_tried"]
    assert "stopped early" in "\n".join(report_lines(gate))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("overridable", "no operator that would gain"),
        ("random_noise", "no operator that would gain"),
        ("sequence_and_optional", "no operator that would gain"),
    ],
)
def test_a_model_without_anything_to_gain(tmp_path: Path, name: str, reason: str) -> None:
    found = prepared(tmp_path, small.save(getattr(small, name)(), tmp_path / "m.onnx"), Gate())
    assert found.manifest.form == "fp32"
    assert reason in found.manifest.report["gate"]["reason"]


@pytest.mark.parametrize("name", ["mlp", "lstm", "attention", "branches"])
def test_without_data_the_evidence_is_called_the_weakest(tmp_path: Path, name: str) -> None:
    found = prepared(tmp_path, small.save(getattr(small, name)(), tmp_path / "m.onnx"), Gate(min_speedup=0))
    gate = found.manifest.report["gate"]
    assert "weakest evidence" in gate["evidence"]
    assert not [one for one in gate["failed"] if not one["name"].startswith("weights")]
    assert any(f"judged by {gate['evidence']}" in note for note in found.manifest.notes)
    check_opens(found)
    assert gate["choice"] == "int8-dynamic"


def test_convolutions_without_inputs_end_the_search_at_once(tmp_path: Path) -> None:
    if half.kernels(tmp_path):
        pytest.skip("this processor computes float16, which needs no ranges")
    found = prepared(tmp_path, small.save(small.convolution(), tmp_path / "m.onnx"), Gate(min_speedup=0))
    gate = found.manifest.report["gate"]
    assert (gate["choice"], gate["candidates"], gate["not_tried"]) == ("fp32", [], [])
    assert "give --calibration" in gate["reason"]


@pytest.mark.parametrize("name", ["overridable", "mlp"])
def test_data_that_does_not_fit_is_refused_also_where_nothing_can_be_gained(tmp_path: Path, name: str) -> None:
    path = small.save(getattr(small, name)(), tmp_path / "m.onnx")
    data = tmp_path / "e.npz"
    np.savez(data, x=np.zeros((4, 9), np.float32))
    for gate in (Gate(eval=data), Gate(calibration=data), Gate(eval=data, budget=0)):
        with pytest.raises(ModelError, match="input 'x': expected"):
            prepared(tmp_path, path, gate)
    with pytest.raises(ModelError, match="metric 'no_such_module:f' cannot be imported"):
        prepared(tmp_path, path, Gate(metric="no_such_module:f"))


def test_half_precision_is_measured_when_inputs_are_given(tmp_path: Path) -> None:
    path = small.save(small.convolution(), tmp_path / "m.onnx")
    data = tmp_path / "c.npz"
    np.savez(data, x=np.random.default_rng(0).uniform(-1, 1, (4, 1, 3, 16, 16)).astype(np.float32))
    gate = prepared(tmp_path, path, Gate(calibration=data, min_speedup=0)).manifest.report["gate"]
    (tried,) = [one for one in gate["candidates"] if one["name"] == "fp16"] or [None]
    if tried is None:  # only a form that is twice as fast may make it needless
        assert gate["not_tried"][-1]["reason"].startswith("not needed: a form that passes is ")
        return
    assert tried["treatments"] == {"float16 Conv": 2, "float16 Relu": 1}
    assert 0 <= tried["delta"] < 0.001
    assert bool(half.kernels(tmp_path)) != any("computed in fp32" in what for what in tried["kept"])


def test_a_quantized_model_is_left_alone(tmp_path: Path) -> None:
    path, data = trap.write(tmp_path)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "work").mkdir()
    first = prepared(tmp_path / "first", path, Gate(eval=data, min_speedup=0))
    again = first.weights.parent / "again.onnx"
    again.write_bytes(first.graph)
    found = prepared(tmp_path, again, Gate(eval=data))
    assert found.manifest.form == "quantized-source"
    gate = found.manifest.report["gate"]
    assert gate["choice"] == "quantized-source"
    assert gate["reason"].startswith("left alone: it is already quantized (")


def test_data_that_does_not_fit_is_an_error_that_names_it(tmp_path: Path) -> None:
    path, _ = trap.write(tmp_path)
    for gate, words in (
        (Gate(eval=tmp_path / "none.npz"), "none.npz"),
        (Gate(eval=path), "expected an npz of arrays"),
        (Gate(metric="guess"), "metric: expected one of auto, top1, f1, cosine, mse or module:function, found 'guess'"),
        (Gate(metric="f1"), "metric f1: it needs labels"),
        (Gate(metric="nowhere:at_all"), "cannot be imported"),
    ):
        with pytest.raises(ModelError, match=words):
            prepared(tmp_path, path, gate)
    assert list((tmp_path / "work").iterdir()) == []


def test_a_report_without_a_search_says_so() -> None:
    assert report_lines({"ops_before": {}}) == ["no search was made: the form was asked for by name"]


REAL = {"minilm": "int8-", "nsfw-resnet": "static-", "ppocr2-cls": "", "silero": ""}


@pytest.mark.parametrize("name", sorted(REAL))
def test_real_models_end_within_the_budget(models_dir: Path, tmp_path: Path, name: str) -> None:
    path = models_dir / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the folder of real models")
    batches = FEEDS[name](path)
    found = prepared(tmp_path, path, Gate(batches=batches, seconds=60, min_speedup=0))
    gate = found.manifest.report["gate"]
    assert gate["choice"].startswith(REAL[name]), gate["reason"]
    assert not [one for one in gate["failed"] if one["name"] in ("int8-dynamic", "static-minmax")]
    chosen = [one for one in gate["candidates"] if one["chosen"]]
    assert all(one["delta"] <= 0.005 for one in chosen)
    check_opens(found)

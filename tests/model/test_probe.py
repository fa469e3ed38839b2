"""Inputs that run are found for the kinds of signature that real models have."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from prefork.errors import ModelError, SegmentCorrupt
from prefork.model import probe, warmup
from prefork.model.manifest import TensorSpec, Warmup, WarmupInput
from prefork.value import Value


def accept(**wanted: tuple[int, ...]) -> probe.Run:
    """A model that runs for these shapes only."""

    def run(feeds: Mapping[str, Value]) -> list[Value]:
        found = {name: value.shape for name, value in feeds.items()}
        if found != wanted:
            raise RuntimeError(f"found {found}")
        return [np.zeros(1)]

    return run


def test_symbolic_sizes_agree_and_are_reported() -> None:
    specs = tuple(TensorSpec(n, "tensor", "INT64", ("batch", "sequence")) for n in ("input_ids", "attention_mask"))
    found = probe.find(accept(input_ids=(1, 16), attention_mask=(1, 16)), specs)
    assert isinstance(found, probe.Found)
    assert found.tries == 1
    assert found.recipe.dims == {"batch": 1, "sequence": 16}
    made = warmup.build(found.recipe)
    assert made["attention_mask"].tolist() == [[1] * 16]
    assert set(made["input_ids"].ravel().tolist()) == set(range(7))


@pytest.mark.parametrize("size", [(48, 48), (640, 640), (224, 224), (32, 32)])
def test_image_sizes_are_tried(size: tuple[int, int]) -> None:
    specs = (TensorSpec("x", "tensor", "FP32", (None, 3, None, None)),)
    assert isinstance(probe.find(accept(x=(1, 3, *size)), specs), probe.Found)
    specs = (TensorSpec("x", "tensor", "FP32", ("N", "h", "w", 3)),)
    assert isinstance(probe.find(accept(x=(1, *size, 3)), specs), probe.Found)


def test_a_state_keeps_batch_one_while_lengths_vary() -> None:
    specs = (
        TensorSpec("input", "tensor", "FP32", (None, None)),
        TensorSpec("state", "tensor", "FP32", (2, None, 128)),
        TensorSpec("sr", "tensor", "INT64", ()),
    )
    found = probe.find(accept(input=(1, 512), state=(2, 1, 128), sr=()), specs)
    assert isinstance(found, probe.Found)
    assert warmup.build(found.recipe)["sr"] == 16000


def test_sums_of_names_are_understood() -> None:
    specs = (
        TensorSpec("ids", "tensor", "INT64", ("batch", "seq")),
        TensorSpec("past", "tensor", "FP32", ("batch", 2, "past_len", 8)),
        TensorSpec("attention_mask", "tensor", "INT64", ("batch", "past_len + seq")),
    )
    found = probe.find(accept(ids=(1, 16), past=(1, 2, 0, 8), attention_mask=(1, 16)), specs)
    assert isinstance(found, probe.Found)


def test_values_are_varied_when_sizes_do_not_help() -> None:
    def run(feeds: Mapping[str, Value]) -> list[Value]:
        if feeds["segments"].any() or feeds["ids"].max() > 1:
            raise RuntimeError("indices out of bounds")
        return [feeds["ids"]]

    specs = tuple(TensorSpec(n, "tensor", "INT32", (None, 8)) for n in ("ids", "segments"))
    assert isinstance(probe.find(run, specs), probe.Found)


def test_tries_are_bounded_and_the_last_reason_kept() -> None:
    calls = []

    def run(feeds: Mapping[str, Value]) -> list[Value]:
        assert feeds["x"].size <= probe.MAX_ELEMENTS
        calls.append(feeds["x"].shape)
        raise RuntimeError(f"no {len(calls)}")

    specs = (TensorSpec("x", "tensor", "INT64", tuple(f"d{i}" for i in range(5))),)
    failed = probe.find(run, specs)
    assert failed == probe.Failed(f"no {len(calls)}", len(calls))
    assert len(calls) <= probe.MAX_TRIES
    calls.clear()
    assert probe.find(run, specs, max_seconds=0.0) == probe.Failed("no 1", 1)


def test_optional_inputs_are_left_out_first() -> None:
    specs = (
        TensorSpec("x", "tensor", "FP32", (2,)),
        TensorSpec("o", "tensor", "FP32", (2,), optional=True),
        TensorSpec("d", "tensor", "FP32", (2,), default=True),
    )
    seen: list[set[str]] = []

    def run(feeds: Mapping[str, Value]) -> list[Value]:
        seen.append({name for name, value in feeds.items() if value is not None})
        if len(seen) == 1:
            raise RuntimeError("o is needed after all")
        return []

    assert isinstance(probe.find(run, specs), probe.Found)
    assert seen == [{"x"}, {"x", "o", "d"}]


@pytest.mark.parametrize("dtype", ["FP16", "BF16", "FP64", "INT8", "UINT4", "INT4", "BOOL", "BYTES", "FLOAT8E4M3FN"])
def test_each_type_is_made_and_made_again(dtype: str) -> None:
    specs = (TensorSpec("x", "tensor", dtype, (3, 5)),)
    found = probe.find(lambda feeds: [feeds["x"]], specs)
    assert isinstance(found, probe.Found)
    again = warmup.build(found.recipe)["x"]
    assert warmup.digest(["x"], [again]) == warmup.digest(["x"], found.outputs)
    assert again.shape == (3, 5)


def test_compound_values_are_made() -> None:
    made = warmup.build(
        Warmup(
            (
                WarmupInput("s", "sequence", "FP32", (2,), "unit"),
                WarmupInput("m", "map", "FP32", (3,), "ones", None, "BYTES"),
                WarmupInput("l", "maps", "INT64", (2,), "ids", None, "INT64"),
            )
        )
    )
    assert [a.shape for a in made["s"]] == [(2,)]
    assert made["m"] == {"a": 1.0, "small": 1.0, "warm": 1.0}
    assert made["l"] == [{0: 0, 1: 1}]


def test_given_inputs_are_kept_exactly() -> None:
    specs = (TensorSpec("x", "tensor", "FP32", ("n",)), TensorSpec("t", "tensor", "BYTES", (2,)))
    arrays = {"x": np.array([0.1, np.nan], np.float32), "t": np.array(["a", "ü"], object)}
    found = probe.given(lambda feeds: [feeds["x"], feeds["t"]], specs, arrays)
    assert warmup.digest("xt", found.outputs) == warmup.digest("xt", [arrays["x"], arrays["t"]])


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"y": np.zeros(1)}, "'y' is none of the model's inputs: x"),
        ({}, "'x' is missing"),
        ({"x": np.zeros(3, np.float32)}, "do not run: found"),
        ({"x": np.zeros(1, "datetime64[s]")}, "no ONNX element type"),
    ],
)
def test_given_inputs_that_do_not_fit_are_refused(arrays: dict[str, Value], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        probe.given(accept(x=(1,)), (TensorSpec("x", "tensor", "FP32", ("n",)),), arrays)


def test_a_spoilt_literal_is_refused() -> None:
    for value in ("@", "AAAA"):
        with pytest.raises(SegmentCorrupt, match="warm-up input 'x'"):
            warmup.make(WarmupInput("x", "tensor", "FP32", (2,), "literal", value))

"""Treatments of a product: each runs as onnxruntime fuses it, and costs what was foreseen."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from prefork.model import external, influence, optimize, quantize, repository, sensitivity, weightonly
from prefork.model.linear import Treatment
from prefork.model.sensitivity import Product, levels, plan
from prefork.model.weights import Weights
from prefork.tensor import Array
from tests.model import small

KINDS = ("int8", "smooth-int8", "rows", "smooth-rows")


def rows(outlier: str) -> Array:
    """[1, 64, 256] with a large token, a large channel, or neither."""
    x = np.random.default_rng(3).standard_normal((1, 64, 256)).astype(np.float32)
    if outlier == "token":
        x[0, 5] *= 300
    if outlier == "channel":
        x[0, :, 7] *= 300
    return x


def products(folder: Path, opset: int = 17) -> None:
    """Two products that share an input, one a Gemm with transB and bias, the other of three axes."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("Reshape", ["x", "flat"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w2", "c"], ["b"], "second", transB=1),
    ]
    weights = [
        small.weight("w1", 256, 128, seed=1), small.weight("w2", 96, 256, seed=2), small.weight("c", 96, seed=3),
        small.const("flat", np.array([-1, 256])),
    ]  # fmt: skip
    outputs = [small.value("a", [1, "s", 128]), small.value("b", ["s", 96])]
    model = small.model(nodes, [small.value("x", [1, "s", 256])], outputs, weights, opset=opset)
    small.save(model, folder / "source.onnx")


def measured(folder: Path, x: Array) -> list[Product]:
    source = repository.read_model(folder / "source.onnx")
    model = quantize.folded(source, folder)
    return sensitivity.measure(model, folder, [{"x": x}], 127, time.monotonic() + 60)


def run(folder: Path, chosen: dict[str, Treatment], x: Array) -> tuple[list[Array], Counter[str]]:
    model = external.parse((folder / "basic.onnx").read_bytes())
    with (folder / "q.bin").open("wb") as file:
        rewrite = quantize.Rewrite(folder, external.DataFile(file, "q.bin"), reduce_range=False, plan=chosen)
        rewrite.model(model)
    (folder / "q.onnx").write_bytes(model.SerializeToString())
    session, saved = optimize.write(folder / "q.onnx", folder, "opt", lambda _: None)
    graph = external.parse(saved.graph.read_bytes())
    return session.run(None, {"x": x}), Counter(node.op_type for node in graph.graph.node)


@pytest.mark.parametrize("opset", [13, 17, 18])
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("outlier", ["none", "token", "channel"])
def test_what_is_foreseen_is_what_the_kernels_give(tmp_path: Path, outlier: str, kind: int, opset: int) -> None:
    products(tmp_path, opset)
    x = rows(outlier)
    found = sorted(measured(tmp_path, x), key=lambda product: product.output)
    assert [p.node for p in found] == ["first", "second"]
    assert tuple(t.name for t in found[0].treatments) == KINDS
    chosen = {p.output: p.treatments[kind] for p in found}
    ours, ops = run(tmp_path, chosen, x)
    assert not ops.keys() & {"MatMul", "Gemm", "MatMulInteger"}
    theirs = optimize.open_file(tmp_path / "source.onnx", optimize.ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    truth = theirs.run(None, {"x": x})
    bias = np.frombuffer(small.weight("c", 96, seed=3).raw_data, np.float32)
    for product, a, b, without in zip(found, ours, truth, (0, bias), strict=True):
        error = float(np.linalg.norm(a - b) / np.linalg.norm(b - without))
        assert error == pytest.approx(product.treatments[kind].error, rel=0.15, abs=2e-4)


def test_the_remedy_fits_the_outlier(tmp_path: Path) -> None:
    products(tmp_path)
    token, channel = (
        {t.name: t.error for t in measured(tmp_path, rows(outlier))[0].treatments} for outlier in ("token", "channel")
    )
    assert token["rows"] < 0.4 * token["int8"]
    assert channel["smooth-int8"] < 0.4 * channel["int8"]


def test_a_row_of_zeros_stays_zero(tmp_path: Path) -> None:
    products(tmp_path)
    x = rows("none")
    x[0, 3] = 0
    found = measured(tmp_path, x)
    ours, _ = run(tmp_path, {p.output: p.treatments[3] for p in found}, x)
    assert not ours[0][0, 3].any()
    assert all(np.isfinite(array).all() for array in ours)


def test_a_plan_buys_accuracy_where_it_is_cheapest() -> None:
    treatments = (Treatment("int8", None, 0.3), Treatment("rows", None, 0.1))
    small_one, large = Product("s", "s", (256, 256), treatments), Product("l", "l", (4096, 256), treatments)
    assert small_one.cost(treatments[0]) == 0 < small_one.cost(treatments[1]) < small_one.cost(Treatment("fp32"))
    steps = levels([small_one, large])
    assert steps == sorted(steps)
    seen = [plan([small_one, large], price) for price in (0.0, *steps, 2 * steps[-1])]
    assert {treatment.kind for treatment in seen[0].values()} == {"fp32"}
    assert {treatment.kind for treatment in seen[-1].values()} == {"int8"}
    assert any(chosen["s"].kind != "int8" and chosen["l"].kind == "int8" for chosen in seen)
    order = ("fp32", "rows", "int8")
    for name in ("s", "l"):
        ranks = [order.index(chosen[name].kind) for chosen in seen]
        assert ranks == sorted(ranks)


def test_an_error_counts_by_what_the_outputs_feel(tmp_path: Path) -> None:
    """Two products with errors of the same size; what comes of the second is made a thousand times smaller."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("MatMul", ["x", "w2"], ["b"], "second"),
        helper.make_node("Mul", ["b", "little"], ["c"]),
        helper.make_node("Add", ["a", "c"], ["y"]),
    ]
    weights = [small.weight("w1", 256, 128, seed=1), small.weight("w2", 256, 128, seed=2)]
    weights.append(small.const("little", np.array(1e-3, np.float32)))
    shapes = [small.value("x", [1, "s", 256])], [small.value("y", [1, "s", 128])]
    small.save(small.model(nodes, *shapes, weights), tmp_path / "source.onnx")
    x = rows("token")
    before = sorted(measured(tmp_path, x), key=lambda product: product.node)
    model = external.parse((tmp_path / "basic.onnx").read_bytes())
    first, second = influence.weigh(model, tmp_path, before, {"x": x}, 127, time.monotonic() + 60)
    assert first.treatments[0].error == pytest.approx(before[0].treatments[0].error, rel=0.05)
    assert second.treatments[0].error == pytest.approx(before[1].treatments[0].error / 1000, rel=0.1)
    assert [t.name for t in second.treatments] == list(KINDS)
    late = influence.weigh(model, tmp_path, before, {"x": x}, 127, 0.0)
    assert [p.treatments[0].error for p in late] == [p.treatments[0].error for p in before]


def test_a_node_that_the_plan_keeps_is_said(tmp_path: Path) -> None:
    products(tmp_path)
    found = measured(tmp_path, rows("none"))
    ours, ops = run(tmp_path, plan(found, 0.0), rows("none"))
    assert ops["MatMul"] + ops["Gemm"] == 2
    assert np.allclose(ours[0], rows("none") @ weight(tmp_path, "w1"), atol=1e-3)


def weight(folder: Path, name: str) -> Array:
    model = external.parse((folder / "basic.onnx").read_bytes())
    return Weights({t.name: t for t in model.graph.initializer}, folder).array(name)


def test_no_time_gives_no_products(tmp_path: Path) -> None:
    products(tmp_path)
    source = repository.read_model(tmp_path / "source.onnx")
    model = quantize.folded(source, tmp_path)
    assert sensitivity.measure(model, tmp_path, [{"x": rows("none")}], 127, 0.0) == []


def test_smoothing_factors() -> None:
    x = np.ones((4, 3), np.float32)
    x[:, 1] = 400
    x[:, 2] = 0
    made = sensitivity.factors(x, [np.ones((3, 5), np.float32)])
    assert made[1] / made[0] == pytest.approx(20)
    assert made[0] * made[1] == pytest.approx(1)
    assert made[2] == 1
    assert sensitivity.factors(np.zeros((2, 3), np.float32), [np.ones((3, 1), np.float32)]).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("bits", "close"), [(8, 0.02), (4, 0.2)])
def test_weights_alone(tmp_path: Path, bits: int, close: float) -> None:
    products(tmp_path)
    source = repository.read_model(tmp_path / "source.onnx")
    model = quantize.folded(source, tmp_path)
    with (tmp_path / "q.bin").open("wb") as file:
        weights = Weights({t.name: t for t in model.graph.initializer}, tmp_path)
        assert weightonly.rewrite(model, weights, external.DataFile(file, "q.bin"), bits) == 2
    (tmp_path / "q.onnx").write_bytes(model.SerializeToString())
    session, _ = optimize.write(tmp_path / "q.onnx", tmp_path, "opt", lambda _: None)
    truth = optimize.open_file(tmp_path / "source.onnx", optimize.ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    x = rows("token")
    for a, b in zip(session.run(None, {"x": x}), truth.run(None, {"x": x}), strict=True):
        assert float(np.linalg.norm(a - b) / np.linalg.norm(b)) < close


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_blocks_hold_the_weights(bits: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((200, 5)).astype(np.float32)
    values, scales = weightonly.pack(matrix, bits)
    block, middle = weightonly.BLOCK[bits], 1 << (bits - 1)
    whole = values if bits == 8 else np.stack([values & 15, values >> 4], axis=-1).reshape(5, -1, block)
    back = (whole.astype(np.float32) - middle) * scales.reshape(5, -1, 1)
    error = np.abs(back.reshape(5, -1)[:, :200] - matrix.T)
    assert error.max() <= scales.max() * 0.501

"""int8 forms: which nodes are taken, how close they stay, and what is said of those that are left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper

from prefork.model import external, optimize, probe, quantize, repository, signature
from prefork.model.forms import FORMS
from prefork.model.pack import cosine
from prefork.model.processor import processor
from prefork.model.weights import per_channel
from prefork.tensor import Array
from tests.model import small

LEVEL = ort.GraphOptimizationLevel


def made(model: ModelProto, folder: Path) -> quantize.Form:
    source = repository.read_model(small.save(model, folder / "source.onnx"))
    return FORMS["int8"](source, folder, lambda _: None)


def ops(path: Path, level: ort.GraphOptimizationLevel = LEVEL.ORT_ENABLE_ALL) -> Counter[str]:
    saved = optimize.Saved(path.with_suffix(".opt"), path.with_suffix(".opt.bin"), optimized=True, packed=False)
    optimize.open_file(path, level, save=saved)
    return Counter(node.op_type for node in external.nodes(external.parse(saved.graph.read_bytes())))


def answers(path: Path, specs_of: ModelProto) -> list[Array]:
    session, specs = optimize.open_file(path, LEVEL.ORT_ENABLE_ALL), signature.inputs(specs_of)
    found = probe.find(lambda feeds: session.run(None, feeds), specs)
    assert isinstance(found, probe.Found)
    return found.outputs


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("mlp", {"DynamicQuantizeMatMul": 2}),
        ("lstm", {"DynamicQuantizeLSTM": 1}),
        ("attention", {"QAttention": 1}),
        ("branches", {"DynamicQuantizeMatMul": 3}),
    ],
)
def test_kinds_that_gain_are_taken_and_fused(tmp_path: Path, name: str, kinds: dict[str, int]) -> None:
    model: ModelProto = getattr(small, name)()
    form = made(model, tmp_path)
    assert form.name == "int8-dynamic"
    found = ops(form.path)
    assert {kind: found[kind] for kind in kinds} == kinds
    assert not found.keys() & {"MatMul", "Gemm", "LSTM", "Attention"}
    for ours, theirs in zip(answers(form.path, model), answers(tmp_path / "source.onnx", model), strict=True):
        assert cosine(ours, theirs) > 0.999
        assert not np.array_equal(ours, theirs)


def test_an_lstm_that_names_its_layout_is_taken(tmp_path: Path) -> None:
    assert made(small.lstm(layout=True), tmp_path).name == "int8-dynamic"


def test_activations_that_several_weights_share_are_quantized_once(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(3)]
    outputs = [small.value(f"y{i}", [4, 256]) for i in range(3)]
    weights = [small.weight(f"w{i}", 256, 256, seed=i) for i in range(3)]
    form = made(small.model(nodes, [small.value("x", [4, 256])], outputs, weights), tmp_path)
    assert ops(form.path, LEVEL.ORT_DISABLE_ALL)["DynamicQuantizeLinear"] == 1


def test_the_int8_file_holds_a_quarter(tmp_path: Path) -> None:
    form = made(small.mlp(), tmp_path)
    model = external.parse(form.path.read_bytes())
    sizes = {t.data_type: 0 for t in external.initializers(model)}
    for tensor in external.initializers(model):
        sizes[tensor.data_type] += external.nbytes(tensor)
    assert sizes[TensorProto.INT8] >= (256 * 512 + 512 * 64)
    assert sizes[TensorProto.FLOAT] < 4000


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("convolution", "not quantized: no operator that would gain"),
        ("overridable", "not quantized: no operator that would gain"),
    ],
)
def test_a_model_with_nothing_to_gain_is_left_alone(tmp_path: Path, name: str, note: str) -> None:
    form = made(getattr(small, name)(), tmp_path)
    assert (form.name, form.path, form.notes) == ("fp32", tmp_path / "source.onnx", (note,))


def test_a_quantized_model_is_recognised(tmp_path: Path) -> None:
    first = made(small.mlp(), tmp_path)
    second = FORMS["int8"](repository.read_model(first.path), tmp_path, lambda _: None)
    assert second.path == first.path
    assert second.name == "quantized-source"
    assert second.notes == ("not quantized: it already is (DynamicQuantizeLinear, MatMulInteger)",)
    assert FORMS["none"](repository.read_model(first.path), tmp_path, print).name == "quantized-source"


@pytest.mark.parametrize(
    ("node", "weights", "reason"),
    [
        (("MatMul", ["x", "x2"], {}), [], "MatMul: weight is computed, or of an outer graph"),
        (("MatMul", ["x", "w"], {}), [small.weight("w", 64, 64)], "MatMul: weight is small"),
        (("MatMul", ["x", "w"], {}), [small.weight("w", 2, 64, 256)], "MatMul: weight has rank 3"),
        (("Gemm", ["x", "w"], {"alpha": 2.0}), [small.weight("w", 64, 256)], "Gemm: alpha, beta or transA"),
    ],
)
def test_what_is_left_in_fp32_is_said(
    tmp_path: Path, node: tuple[str, list[str], dict[str, float]], weights: list[TensorProto], reason: str
) -> None:
    kind, inputs, extra = node
    made_node = helper.make_node(kind, inputs, ["y"], "n")
    made_node.attribute.extend(helper.make_attribute(key, number) for key, number in extra.items())
    wanted = [small.value("x", [64, 64]), small.value("x2", [64, 64])][: 1 + ("x2" in inputs)]
    form = made(small.model([made_node], wanted, [small.value("y", ["a", "b"])], weights), tmp_path)
    assert form.name == "fp32"
    assert f"left in fp32: {reason}, 1 nodes" in form.notes


def test_an_old_opset_is_left_alone(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = small.model(
        [node], [small.value("x", [1, 256])], [small.value("y", [1, 256])], [small.weight("w", 256, 256)], opset=9
    )
    assert made(model, tmp_path).notes == ("not quantized: opset 9 is older than 11",)


@pytest.mark.parametrize(("shape", "axis", "swap"), [((300, 7), 0, False), ((7, 300), 1, True), ((2, 12, 5), 2, True)])
def test_each_channel_has_its_own_scale(shape: tuple[int, ...], axis: int, swap: bool) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    weight *= np.logspace(-3, 3, shape[1 - axis] if len(shape) == 2 else shape[1], dtype=np.float32).reshape(
        (-1, 1) if axis else (1, -1)
    )
    for top in (127, 63):
        values, scales = per_channel(weight, axis, top, swap=swap)
        back = (np.swapaxes(values, -1, -2) if swap else values) * np.expand_dims(scales, axis)
        assert scales.shape == tuple(n for i, n in enumerate(shape) if i != axis)
        assert int(np.abs(values).max()) == top
        assert np.all(np.abs(back - weight) <= np.expand_dims(scales, axis) * 0.501)


def test_zero_and_non_finite_channels() -> None:
    weight = np.zeros((4, 3), np.float32)
    weight[1, 1], weight[2, 2] = np.nan, np.inf
    values, scales = per_channel(weight, 0, 127, swap=False)
    assert scales[0] == 1
    assert values[:, 0].tolist() == [0, 0, 0, 0]
    assert np.isnan(scales[1])
    assert np.isinf(scales[2])


def test_seven_bits_without_vnni(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = processor("vendor_id : GenuineIntel\nmodel name : Old\nflags : sse2 avx2 fma\n")
    assert not old.vnni
    monkeypatch.setattr(quantize, "processor", lambda: old)
    form = made(small.mlp(), tmp_path)
    assert any("7 bits" in note for note in form.notes)
    data = np.fromfile(tmp_path / "int8.bin", np.int8)[: 256 * 512]
    assert int(np.abs(data).max()) == 63


@pytest.mark.parametrize(
    ("text", "vnni", "vendor"),
    [
        ("vendor_id : GenuineIntel\nflags : a avx512_vnni b\n\nvendor_id : X\nflags : a\n", True, "GenuineIntel"),
        ("vendor_id : AuthenticAMD\nflags : avx_vnni\n", True, "AuthenticAMD"),
        ("CPU implementer : 0x41\nFeatures : fp asimd\nCPU part : 0xd0c\n", True, "0x41"),
        ("", False, "unknown"),
    ],
)
def test_processors_are_told_apart(text: str, vnni: bool, vendor: str) -> None:
    found = processor(text)
    assert (found.vnni, found.vendor) == (vnni, vendor)
    assert processor("flags : b a\n").flags_sha256 == processor("flags : a b b\n").flags_sha256

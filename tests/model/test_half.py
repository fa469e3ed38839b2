"""The float16 form: what is taken, what stays fp32 and why, and that nothing overflows unsaid."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper

from prefork.model import external, half, optimize, pack, probe, repository, signature
from prefork.model.evaluate import cosine
from prefork.model.quantize import Form
from prefork.tensor import Array
from tests.model import small

ALL = ort.GraphOptimizationLevel.ORT_ENABLE_ALL


def made(model: ModelProto, folder: Path) -> Form:
    source = repository.read_model(small.save(model, folder / "source.onnx"))
    return half.half_precision(source, folder, lambda _: None)


def prepared(model: ModelProto, folder: Path) -> pack.Prepared:
    (folder / "work").mkdir(exist_ok=True)
    source = repository.read_model(small.save(model, folder / "m.onnx"))
    return pack.prepare(source, name="m", quantize="fp16", work_dir=folder / "work")


def answers(path: Path, specs_of: ModelProto) -> list[Array]:
    session = optimize.open_file(path, ALL)
    found = probe.find(lambda feeds: session.run(None, feeds), signature.inputs(specs_of))
    assert isinstance(found, probe.Found)
    return found.outputs


def types(model: ModelProto) -> Counter[int]:
    return Counter(tensor.data_type for tensor in model.graph.initializer)


@pytest.mark.parametrize(
    ("name", "halves"), [("mlp", 3), ("convolution", 2), ("branches", 1)], ids=["mlp", "convolution", "branches"]
)
def test_weights_become_float16_and_inputs_and_outputs_stay(tmp_path: Path, name: str, halves: int) -> None:
    model: ModelProto = getattr(small, name)()
    form = made(model, tmp_path)
    assert form.name == "fp16"
    written = external.parse(form.path.read_bytes())
    assert types(written)[TensorProto.FLOAT16] == halves
    assert types(written)[TensorProto.FLOAT] == 0
    assert signature.inputs(written) == signature.inputs(model)
    assert signature.outputs(written) == signature.outputs(model)
    for ours, theirs in zip(answers(form.path, model), answers(tmp_path / "source.onnx", model), strict=True):
        assert cosine(ours, theirs) > 0.9999
        assert not np.array_equal(ours, theirs)


def test_a_run_of_taken_nodes_has_a_cast_at_each_end_only(tmp_path: Path) -> None:
    kinds = [node.op_type for node in external.parse(made(small.mlp(), tmp_path).path.read_bytes()).graph.node]
    assert kinds == ["Cast", "MatMul", "Relu", "Gemm", "Cast"]


@pytest.mark.parametrize("name", ["lstm", "attention", "overridable", "sequence_and_optional"])
def test_a_model_without_such_operators_is_left_alone_and_says_so(tmp_path: Path, name: str) -> None:
    form = made(getattr(small, name)(), tmp_path)
    assert (form.name, form.path) == ("fp32", tmp_path / "source.onnx")
    assert form.notes == ("not converted: no operator that would gain",)


def test_a_weight_beyond_the_range_keeps_its_node_in_fp32_and_is_named(tmp_path: Path) -> None:
    model = small.mlp()
    large = np.full((64, 512), 70000, np.float32)
    model.graph.initializer[1].CopyFrom(small.const("w2", large))
    form = made(model, tmp_path)
    assert form.notes[0] == "left in fp32: second: initializer 'w2' holds 70000, float16 ends at 65504"
    (second,) = [n for n in external.parse(form.path.read_bytes()).graph.node if n.op_type == "Gemm"]
    assert second.input[1] == "w2"
    assert all(np.isfinite(output).all() for output in answers(form.path, model))


def test_norms_and_softmax_stay_fp32(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Softmax", ["a"], ["b"]),
        helper.make_node("Add", ["b", "tiny"], ["c"]),
        helper.make_node("Sqrt", ["c"], ["y"]),
    ]
    weights = [small.weight("w", 256, 256), small.const("tiny", np.array([1e-12], np.float32))]
    shape = ["batch", 256]
    model = small.model(nodes, [small.value("x", shape)], [small.value("y", shape)], weights)
    written = external.parse(made(model, tmp_path).path.read_bytes())
    assert {n.op_type: n.input[0] for n in written.graph.node}["Softmax"] == "a"
    assert types(written) == {TensorProto.FLOAT16: 1, TensorProto.FLOAT: 1}


def test_what_overflows_at_warm_up_is_not_served(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "big"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("Transpose", ["b"], ["y"], perm=[1, 0]),  # has a float16 kernel everywhere
    ]
    weights = [small.weight("w", 256, 256), small.const("big", np.array([1e9], np.float32))]
    model = small.model(nodes, [small.value("x", ["b", 256])], [small.value("y", [256, "b"])], weights)
    manifest = prepared(model, tmp_path).manifest
    assert (manifest.quantize, manifest.form) == ("fp16", "fp32")
    assert manifest.notes == ("fp16 is not served: on the warm-up inputs output 'y' overflows, in fp32 it does not",)


def test_where_there_is_no_kernel_is_asked_and_said(tmp_path: Path) -> None:
    found = prepared(small.mlp(), tmp_path).manifest
    known = half.kernels(tmp_path)
    missing = sorted({"MatMul", "Gemm"} - known)
    said = [note for note in found.notes if "computed in fp32 all the same" in note]
    assert found.form == "fp16"
    assert said == ([] if not missing else [f"{', '.join(missing)} " + said[0].split(" ", len(missing))[-1]])
    assert set(found.report["cosine_to_fp32"]) == {"y"}

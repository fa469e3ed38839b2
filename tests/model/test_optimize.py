"""The saved graph is the model: same names, same bits, full speed's layout, nothing of the machine's paths."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from prefork.errors import ModelError
from prefork.model import external, optimize, probe, repository, signature
from prefork.tensor import Array
from tests.model import small

LEVEL = ort.GraphOptimizationLevel
# ill-conditioned: one unit in the last place of its input moves an output by 3.5e-4 on these inputs
LOOSE = {"basic-pitch": 2e-3}
CLOSE = 1e-5  # largest difference that a changed order of sums may make, relative to the largest output
REAL = (
    "basic-pitch",
    "ddddocr",
    "ddddocr-det",
    "ddddocr-old-int8",
    "minilm",
    "mpnet",
    "nsfw-resnet",
    "ppocr2-cls",
    "ppocr4-det",
    "ppocr4-rec",
    "silero",
    "silero-op15",
    "silero-seq",
)


def written(path: Path, folder: Path) -> tuple[ort.InferenceSession, optimize.Saved, list[str]]:
    notes: list[str] = []
    session, saved = optimize.write(path, folder, "m", notes.append)
    return session, saved, notes


def test_the_saved_graph_keeps_names_metadata_and_no_path(tmp_path: Path) -> None:
    model = small.mlp()
    model.metadata_props.add(key="labels", value="cat,dog")
    path = small.save(model, tmp_path / "mlp-source.onnx")
    _, saved, notes = written(path, tmp_path)
    again = external.parse(saved.graph.read_bytes())
    assert notes == []
    assert saved.optimized
    assert saved.packed
    assert signature.inputs(again) == signature.inputs(model)
    assert signature.outputs(again) == signature.outputs(model)
    assert {p.key: p.value for p in again.metadata_props} == {"labels": "cat,dog"}
    assert str(tmp_path).encode() not in saved.graph.read_bytes()
    assert b"mlp-source" not in saved.graph.read_bytes()


def test_compound_and_defaulted_inputs_keep_their_kind(tmp_path: Path) -> None:
    for name in ("sequence_and_optional", "overridable"):
        model: onnx.ModelProto = getattr(small, name)()
        _, saved, _ = written(small.save(model, tmp_path / "source.onnx"), tmp_path)
        again = external.parse(saved.graph.read_bytes())
        assert signature.inputs(again) == signature.inputs(model)
        assert [(s.name, s.kind, s.dtype) for s in signature.outputs(again)] == [
            (s.name, s.kind, s.dtype) for s in signature.outputs(model)
        ]


def test_convolutions_get_this_processors_layout_and_open_again_alike(tmp_path: Path) -> None:
    """The reason for ORT_ENABLE_ALL: the layout is in the graph, so that opening it with ORT_DISABLE_ALL keeps it."""
    path = small.save(small.convolution(), tmp_path / "source.onnx")
    session, saved, _ = written(path, tmp_path)
    kinds = {f"{n.domain}.{n.op_type}" for n in external.nodes(external.parse(saved.graph.read_bytes()))}
    plain = optimize.open_file(path, LEVEL.ORT_ENABLE_ALL)
    again = optimize.open_prepared(saved.graph.read_bytes(), tmp_path, optimized=True)
    feeds = {"x": np.random.default_rng(0).random((1, 3, 40, 24), dtype=np.float32)}
    reference = session.run(None, feeds)[0]
    assert np.array_equal(again.run(None, feeds)[0], reference)
    assert np.array_equal(plain.run(None, feeds)[0], reference)
    if not any(kind.startswith("com.microsoft.nchwc") for kind in kinds):
        pytest.skip("this processor has no blocked layout for convolutions in onnxruntime")


def test_a_graph_saved_as_it_is_opens_from_its_data_file(tmp_path: Path) -> None:
    for name, model in (("inline", small.branches()), ("outside", small.mlp())):
        folder = tmp_path / name
        folder.mkdir()
        onnx.save_model(
            model, folder / "s.onnx", save_as_external_data=name == "outside", location="s.data", size_threshold=100000
        )
        saved = optimize.save_as_is(folder / "s.onnx", folder / "g.onnx", folder / "g.bin")
        specs = signature.inputs(model)
        plain = optimize.open_file(folder / "s.onnx", LEVEL.ORT_ENABLE_ALL)
        again = optimize.open_prepared(saved.graph.read_bytes(), folder, optimized=False)
        found = probe.find(functools.partial(plain.run, None), specs)
        assert isinstance(found, probe.Found)
        assert np.array_equal(again.run(None, probe.feeds(specs, found.recipe))[0], found.outputs[0])
        assert saved.graph.stat().st_size < 3000


@pytest.mark.parametrize(
    ("op", "domain", "said"),
    [
        ("NoSuchOperator", "", r"operator 'NoSuchOperator' of domain 'ai.onnx' \(node 'odd', output 'y'\) is unknown"),
        ("Thing", "org.example", r"operator 'Thing' of domain 'org.example' \(node 'odd', output 'y'\) is unknown"),
    ],
)
def test_an_unknown_operator_is_named(tmp_path: Path, op: str, domain: str, said: str) -> None:
    node = helper.make_node(op, ["x"], ["y"], "odd", domain=domain)
    model = small.model([node], [small.value("x", [1])], [small.value("y", [1])])
    if domain:
        model.opset_import.add(domain=domain, version=1)
    source = repository.read_model(small.save(model, tmp_path / "m.onnx"))
    with pytest.raises(ModelError) as caught:
        written(source.path, tmp_path)
    explained = optimize.explain(source, caught.value).message
    assert explained.startswith(f"model file {str(source.path)!r} cannot be opened: ")
    assert re.search(said, explained)


def test_an_operator_without_kernel_and_an_opset_of_the_future_are_named(tmp_path: Path) -> None:
    shape: list[int | str | None] = [2]
    node = helper.make_node("Max", ["x", "x"], ["y"], "largest")
    kind = onnx.TensorProto.UINT16
    model = small.model([node], [small.value("x", shape, kind)], [small.value("y", shape, kind)], opset=13)
    source = repository.read_model(small.save(model, tmp_path / "m.onnx"))
    with pytest.raises(ModelError) as caught:
        written(source.path, tmp_path)
    said = optimize.explain(source, caught.value).message
    assert "operator 'Max' of opset 13 (node 'largest', output 'y') has no implementation on CPU" in said
    model.opset_import[0].version = 999
    source = repository.read_model(small.save(model, tmp_path / "m.onnx"))
    with pytest.raises(ModelError, match="opset"):
        written(source.path, tmp_path)


def largest_difference(ours: list[Array], theirs: list[Array]) -> float:
    """Of all outputs, each relative to its largest value."""
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.max(np.abs(a - b)) / max(1.0, float(np.max(np.abs(b))))) for a, b in pairs if a.size)


@pytest.mark.parametrize("name", REAL)
def test_real_models_answer_as_their_files_do(models_dir: Path, tmp_path: Path, name: str) -> None:
    """Bit-identical to the file in a default session; against no optimisation at all the order of sums may differ."""
    path = models_dir / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the folder of real models")
    _, saved, _ = written(path, tmp_path)
    specs = signature.inputs(external.parse(saved.graph.read_bytes()))
    again = optimize.open_prepared(saved.graph.read_bytes(), tmp_path, optimized=True)
    found = probe.find(lambda feeds: again.run(None, feeds), specs)
    assert isinstance(found, probe.Found)
    feeds = probe.feeds(specs, found.recipe)
    whole = optimize.open_file(path, LEVEL.ORT_ENABLE_ALL).run(None, feeds)
    bare = optimize.open_file(path, LEVEL.ORT_DISABLE_ALL).run(None, feeds)
    difference = largest_difference(found.outputs, bare)
    print(f"\n{name}: default session bit-identical, unoptimised differs by {difference:.1e}")
    assert all(np.array_equal(a, b) for a, b in zip(found.outputs, whole, strict=True))
    assert difference <= LOOSE.get(name, CLOSE)

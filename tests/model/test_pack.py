"""Preparing as a whole: what comes out runs from where a segment would hold it, and nothing else is left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from prefork.errors import ModelError
from prefork.model import external, optimize, repository
from prefork.model.manifest import Manifest
from prefork.model.opening import InMemory, Mapped
from prefork.model.pack import Prepared, embed_subgraphs, estimate, prepare, relocate
from prefork.model.session import Session
from prefork.tensor import Array
from tests.model import small

PAGE = 4096


def prepared(
    model: ModelProto,
    folder: Path,
    quantize: str = "none",
    warmup: Mapping[str, Array] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Prepared:
    path = small.save(model, folder / "source.onnx")
    work = folder / "work"
    work.mkdir(exist_ok=True)
    source = repository.read_model(path)
    return prepare(source, name="m", quantize=quantize, work_dir=work, warmup=warmup, progress=progress)


def matches(manifest: Manifest, graph: bytes, weights: Mapped | InMemory) -> bool | None:
    warm = Session.open(manifest, graph, weights).warm()
    assert warm is not None
    return warm.matches


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("name", ["mlp", "lstm", "attention", "convolution", "branches", "overridable"])
def test_it_runs_from_a_segment_with_an_offset_and_from_memory(tmp_path: Path, name: str, quantize: str) -> None:
    found = prepared(getattr(small, name)(), tmp_path, quantize)
    manifest = Manifest.from_json(found.manifest.to_json())
    assert manifest == found.manifest
    assert manifest.optimized
    assert manifest.packed
    assert manifest.weights_bytes == found.weights.stat().st_size
    assert manifest.graph_bytes == len(found.graph)
    assert matches(manifest, found.graph, Mapped(str(found.weights.parent)))
    raw = found.weights.read_bytes()
    for offset in (PAGE, 5 * PAGE):
        (tmp_path / "segment").write_bytes(b"\xff" * offset + raw)
        assert matches(manifest, relocate(found.graph, "segment", offset), Mapped(str(tmp_path)))
    assert matches(manifest, embed_subgraphs(found.graph, found.weights), InMemory(memoryview(raw)))


def test_only_the_weights_are_left(tmp_path: Path) -> None:
    for quantize in ("none", "int8"):
        found = prepared(small.mlp(), tmp_path, quantize)
        assert list((tmp_path / "work").iterdir()) == [found.weights]
        assert str(tmp_path).encode() not in found.graph
        found.weights.unlink()


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    node = helper.make_node("NoSuchOperator", ["x"], ["y"], "odd")
    model = small.model([node], [small.value("x", [1])], [small.value("y", [1])])
    with pytest.raises(ModelError, match=r"operator 'NoSuchOperator' .*node 'odd'"):
        prepared(model, tmp_path)
    with pytest.raises(ModelError, match="expected one of none, int8, fp16, auto, found 'int3'"):
        prepared(small.mlp(), tmp_path, "int3")
    assert list((tmp_path / "work").iterdir()) == []


def test_the_manifest_says_what_it_is(tmp_path: Path) -> None:
    model = small.mlp()
    model.metadata_props.add(key="labels", value="cat,dog")
    steps: list[str] = []
    found = prepared(model, tmp_path, "int8", progress=steps.append).manifest
    assert (found.model, found.quantize, found.form) == ("m", "int8", "int8-dynamic")
    assert found.source_sha256 == repository.read_model(tmp_path / "source.onnx").sha256
    assert found.opsets == {"ai.onnx": 17, "com.microsoft": 1}
    assert found.metadata == {"labels": "cat,dog"}
    assert [(s.name, s.shape) for s in found.inputs] == [("x", ("batch", 256))]
    assert found.warmup is not None
    assert found.warmup.dims == {"batch": 1}
    assert found.report["ops_before"] == {"Gemm": 1, "MatMul": 1, "Relu": 1}
    assert found.report["cosine_to_fp32"]["y"] > 0.999
    assert set(found.report["seconds"]) == {"form", "optimise", "probe", "verify", "compare"}
    assert steps == ["quantizing", "optimising", "finding inputs that run", "verifying", "comparing with fp32"]


def test_the_external_tensors_are_where_the_manifest_says(tmp_path: Path) -> None:
    found = prepared(small.mlp(), tmp_path)
    (w1,) = (t for t in found.manifest.external if t.name == "w1")
    held = np.frombuffer(found.weights.read_bytes()[w1.offset : w1.offset + w1.length], np.float32)
    assert np.array_equal(held.reshape(w1.shape), onnx.numpy_helper.to_array(small.weight("w1", 256, 512, seed=1)))
    assert found.weights.stat().st_size >= 2 * (256 * 512 + 64 * 512) * 4


def test_subgraph_weights_are_mapped_but_not_listed(tmp_path: Path) -> None:
    found = prepared(small.branches(), tmp_path)
    assert [t.name for t in found.manifest.external] == ["w"]
    assert len(found.graph) < 10_000
    embedded = embed_subgraphs(found.graph, found.weights)
    assert len(embedded) > 2 * 256 * 256 * 4
    assert [t.name for t in external.tensors(external.parse(embedded)) if external.is_external(t)] == ["w"]


def test_given_inputs_become_the_warm_up(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((3, 256), dtype=np.float32)
    found = prepared(small.mlp(), tmp_path, warmup={"x": x})
    assert matches(found.manifest, found.graph, Mapped(str(found.weights.parent)))
    with pytest.raises(ModelError, match="warm-up"):
        prepared(small.mlp(), tmp_path, warmup={"x": x[:, :5]})


def test_random_operators_leave_no_digest(tmp_path: Path) -> None:
    found = prepared(small.random_noise(), tmp_path).manifest
    assert found.warmup is not None
    assert found.warmup.digest is None
    assert found.notes == ("two runs with equal inputs differ: the model has random operators",)


def test_a_model_that_no_guess_runs_is_prepared_with_a_note(tmp_path: Path) -> None:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    inputs = [small.value("x", [25]), small.value("shape", [3], onnx.TensorProto.INT64)]
    model = small.model([node], inputs, [small.value("y", ["a", "b", "c"])])
    found = prepared(model, tmp_path).manifest
    assert found.warmup is None
    assert found.notes[0].startswith("no warm-up, and the packed model was opened but not compared: none of ")
    given = {"x": np.zeros(25, np.float32), "shape": np.array([5, 5, 1])}
    assert prepared(model, tmp_path, warmup=given).manifest.warmup is not None


def test_a_form_whose_packed_outputs_differ_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight spoilt on disk between writing and opening, as a bad disk would do it."""
    write = optimize.write

    def spoil(source: Path, folder: Path, stem: str, note: object) -> object:
        session, saved = write(source, folder, stem, lambda _: None)
        data = bytearray(saved.data.read_bytes())
        data[: len(data) // 2] = bytes(len(data) // 2)
        saved.data.write_bytes(data)
        return session, saved

    monkeypatch.setattr(optimize, "write", spoil)
    with pytest.raises(ModelError, match="gives other outputs than before packing"):
        prepared(small.convolution(), tmp_path)
    assert list((tmp_path / "work").iterdir()) == []


def test_a_graph_that_does_not_open_again_is_served_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = optimize.write

    def spoil(source: Path, folder: Path, stem: str, note: object) -> object:
        session, saved = write(source, folder, stem, lambda _: None)
        model = external.parse(saved.graph.read_bytes())
        model.graph.node.append(model.graph.node[0])  # the same value made twice: no longer a valid graph
        saved.graph.write_bytes(model.SerializeToString())
        return session, saved

    monkeypatch.setattr(optimize, "write", spoil)
    found = prepared(small.mlp(), tmp_path)
    assert (found.manifest.form, found.manifest.optimized) == ("as-is", False)
    assert "does not open again" in found.manifest.notes[0]
    assert matches(found.manifest, found.graph, Mapped(str(found.weights.parent)))


@pytest.mark.parametrize("name", ["mlp", "lstm", "convolution", "branches", "overridable", "random_noise"])
def test_the_estimate_is_an_upper_bound_that_is_not_far_off(tmp_path: Path, name: str) -> None:
    model: ModelProto = getattr(small, name)()
    source = repository.read_model(small.save(model, tmp_path / "m.onnx"))
    found = prepared(model, tmp_path)
    size = found.manifest.weights_bytes + found.manifest.graph_bytes
    assert size <= estimate(source) <= 2.2 * size + 100_000


def test_relocation_moves_each_packed_copy() -> None:
    assert external.shift_packed("MatMul+12|4096;10;0|8192;20;0", 100) == "MatMul+12|4196;10;0|8292;20;0"
    for bad in ("MatMul|1;2", "MatMul|a;2;0"):
        with pytest.raises(ModelError, match="pre-packed"):
            external.shift_packed(bad, 1)
    with pytest.raises(ValueError, match="multiple of 4096"):
        relocate(b"", "x", 100)
    with pytest.raises(ModelError, match="not an ONNX model"):
        relocate(b"\xff\xff", "x", 0)


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("name", ["minilm", "silero", "ppocr4-rec", "ddddocr-old-int8", "nsfw-resnet"])
def test_real_models_run_from_a_segment(models_dir: Path, tmp_path: Path, name: str, quantize: str) -> None:
    path = models_dir / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the folder of real models")
    source = repository.read_model(path)
    found = prepare(source, name=name, quantize=quantize, work_dir=tmp_path)
    assert found.manifest.weights_bytes + found.manifest.graph_bytes <= estimate(source)
    raw = found.weights.read_bytes()
    (tmp_path / "segment").write_bytes(b"\xff" * PAGE + raw)
    assert matches(found.manifest, relocate(found.graph, "segment", PAGE), Mapped(str(tmp_path)))
    assert matches(found.manifest, embed_subgraphs(found.graph, found.weights), InMemory(memoryview(raw)))

"""The right answers, through the socket: bit for bit those of plain onnxruntime on the same file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bench import tabular
from prefork.client import Client
from prefork.client.calls import CodecName
from prefork.demo import evaluation, model_path
from prefork.errors import InvalidArgument, NotFound
from prefork.value import Value
from tests.backend_cases import Case, load_cases
from tests.judging import judge_plain
from tests.model.small import model, save, value
from tests.plain_ort import Plain, same_bits
from tests.roles.server import Server

pytestmark = pytest.mark.timeout(300)  # a start loads two dozen models, one after the other
CODECS: tuple[CodecName, ...] = ("msgpack", "protobuf")
# Backend cases with what a tensor of numbers does not show: strings, odd element types, sequences, optionals, nothing
CASES = (
    "test_string_concat", "test_string_split_basic", "test_cast_FLOAT_to_FLOAT16", "test_cast_FLOAT_to_BFLOAT16",
    "test_cast_FLOAT_to_INT4", "test_cast_UINT4_to_FLOAT", "test_cast_FLOAT_to_FLOAT8E4M3FN",
    "test_identity_sequence", "test_split_to_sequence_1", "test_sequence_insert_at_back", "test_optional_has_element",
    "test_optional_get_element_optional_sequence", "test_nonzero_example", "test_size", "test_constant", "test_and2d",
    "test_cast_STRING_to_FLOAT", "test_identity_opt", "test_if_seq", "test_loop13_seq", "test_clip_default_min",
)  # fmt: skip


def plain(path: Path) -> Plain:
    return Plain(path.read_bytes())


@pytest.fixture(scope="module", params=["posix", "sysv"])
def server(request: pytest.FixtureRequest, module_place: Path) -> Iterator[Server]:
    folder = module_place / request.param
    folder.mkdir()
    with Server(folder, "--workers", "2", "--shm", request.param) as found:
        yield found


def each_worker(server: Server, codec: CodecName) -> Iterator[tuple[int, Client]]:
    """A client whose one connection is with that slot's worker, for each slot."""
    missing = {row["slot"] for row in server.status()["workers"]}
    for _ in range(200):
        client = Client(server.address, codec=codec, pool_size=1)
        with client:
            before = {row["slot"]: row["connections"] for row in server.status()["workers"]}
            client.live()
            after = {row["slot"]: row["connections"] for row in server.status()["workers"]}
            slot = next(slot for slot in after if after[slot] > before[slot])
            if slot in missing:
                missing.discard(slot)
                yield slot, client
        if not missing:
            return
    raise AssertionError(f"200 connections, and none for slots {missing}")


@pytest.mark.parametrize("codec", CODECS)
def test_the_demo_model_on_every_worker(server: Server, codec: CodecName) -> None:
    images, labels = evaluation()
    pixels = images.astype(np.float32)
    expected = plain(model_path()).run({"image": pixels})
    one = plain(model_path()).run({"image": pixels[:1]})
    slots = []
    for slot, client in each_worker(server, codec):
        found = client.infer("digits", {"image": pixels})
        assert found.keys() == expected.keys()
        assert all(same_bits(found[name], expected[name]) for name in expected)
        assert (found["label"] == labels).mean() > 0.9
        for _ in range(5):  # repeated requests of one form take a shorter way
            again = client.infer("digits", {"image": pixels[:1]})
            assert all(same_bits(again[name], one[name]) for name in one)
        assert same_bits(client.infer("digits", {"image": pixels}, outputs=["label"])["label"], expected["label"])
        slots.append(slot)
    assert sorted(slots) == [0, 1]


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    chosen = [case for case in load_cases() if case.name in CASES]
    return {case.name: case for case in chosen if judge_plain(case)[0] == "pass"}


@pytest.fixture(scope="module")
def many(module_place: Path, cases: dict[str, Case]) -> Iterator[Server]:
    """One server of many models: classifiers, and a backend case for each kind of value."""
    folder = module_place / "many"
    folder.mkdir()
    flags = []
    for name in ("sklearn-wine", "sklearn-breast-cancer"):
        (folder / f"{name}.onnx").write_bytes(tabular.export(tabular.fit(name)).SerializeToString())
        flags += ["--model", f"{name}={folder / name}.onnx"]
    flags += ["--model", f"empty={save(empty(), folder / 'empty.onnx')}"]
    for case in cases.values():
        flags += ["--model", f"{case.name}={case.save(folder)}"]
    with Server(folder, "--workers", "1", *flags) as found:
        yield found


def empty() -> onnx.ModelProto:
    """x FP32 [n, 3] -> y [n, 3] and its scalar sum s."""
    nodes = [
        onnx.helper.make_node("Relu", ["x"], ["y"]),
        onnx.helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
    ]
    return model(nodes, [value("x", ["n", 3])], [value("y", ["n", 3]), value("s", [])])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["sklearn-wine", "sklearn-breast-cancer"])
def test_classifiers_give_their_maps(many: Server, name: str, codec: CodecName) -> None:
    fitted = tabular.fit(name)
    expected = plain(many.place / f"{name}.onnx").run({"X": fitted.features})
    with Client(many.unix, codec=codec) as client:
        found = client.infer(name, {"X": fitted.features})
    assert same_bits(found["output_label"], expected["output_label"])
    assert found["output_probability"] == expected["output_probability"]
    assert (found["output_label"] == fitted.labels).mean() > 0.9


@pytest.mark.parametrize("codec", CODECS)
def test_every_kind_of_value(many: Server, cases: dict[str, Case], codec: CodecName) -> None:
    judged = []
    with Client(many.address, codec=codec) as client:
        for case in cases.values():
            reference = Plain(case.model)
            for inputs, _ in case.datasets:
                wanted = reference.run(inputs)
                found = client.infer(case.name, inputs)
                assert found.keys() == wanted.keys(), case.name
                assert all(same_bits(found[key], wanted[key]) for key in wanted), case.name
            judged.append(case.name)
    assert len(judged) >= 12, judged


@pytest.mark.parametrize("codec", CODECS)
def test_no_elements_and_no_dimensions(many: Server, codec: CodecName) -> None:
    with Client(many.address, codec=codec) as client:
        found = client.infer("empty", {"x": np.empty((0, 3), np.float32)})
        assert found["y"].shape == (0, 3) and found["s"].shape == () and found["s"] == 0
        assert client.infer("empty", {"x": [[1.5, -1, 2]]})["s"] == np.float32(2.5)


@pytest.mark.parametrize("codec", CODECS)
def test_what_does_not_fit_is_named(many: Server, codec: CodecName) -> None:
    x = np.zeros((1, 3), np.float32)
    with Client(many.address, codec=codec, retries=0) as client:
        refusals: list[tuple[str, dict[str, Value], type[Exception], str]] = [
            ("nobody", {"x": x}, NotFound, "nobody"),
            ("empty", {}, InvalidArgument, "'x'"),
            ("empty", {"x": x, "z": x}, InvalidArgument, "'z'"),
            ("empty", {"x": x.astype(np.float64)}, InvalidArgument, "FP64"),
            ("empty", {"x": np.zeros((1, 4), np.float32)}, InvalidArgument, "4"),
            ("empty", {"x": np.zeros(3, np.float32)}, InvalidArgument, "'x'"),
        ]
        for name, inputs, kind, word in refusals:
            with pytest.raises(kind, match=word):
                client.infer(name, inputs)
        with pytest.raises(NotFound, match="version"):
            client.infer("empty", {"x": x}, version="99")
        with pytest.raises(InvalidArgument, match="nothing"):
            client.infer("empty", {"x": x}, outputs=["nothing"])
        assert client.infer("empty", {"x": x})["s"] == 0


def test_metadata_of_every_model(many: Server, cases: dict[str, Case]) -> None:
    with Client(many.address) as client:
        wine = client.metadata("sklearn-wine")
        assert [(item.name, item.datatype) for item in wine.inputs] == [("X", "FP32")]
        assert dict(wine.outputs[1].parameters)["kind"]
        assert all(client.model_ready(name) for name in cases) and not client.model_ready("nobody")
        assert client.metadata("empty").inputs[0].shape == [-1, 3]
    rows: list[dict[str, Any]] = many.status()["models"]
    assert [row["name"] for row in rows][:3] == ["sklearn-wine", "sklearn-breast-cancer", "empty"]
    assert len({row["segment"]["name"] for row in rows}) == len(cases) + 3

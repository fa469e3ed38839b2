"""prefork.model.session, opening, bind, values and faults on real sessions over small models made here."""

from __future__ import annotations

import gc
import mmap
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from prefork.errors import FailedPrecondition, InvalidArgument, ModelError, ResourceExhausted, Unimplemented
from prefork.model.manifest import ExternalTensor, Warmup, WarmupInput
from prefork.model.session import Described, InMemory, Mapped, Session
from prefork.model.warmup import digest
from prefork.tensor import Array, Tensor, numpy_dtype
from prefork.value import flatten, unflatten
from tests.manifests import manifest_of

info = helper.make_tensor_value_info
node = helper.make_node
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def model_of(
    nodes: list[NodeProto],
    inputs: list[ValueInfoProto],
    outputs: list[ValueInfoProto],
    initializers: list[TensorProto] | None = None,
) -> ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers or [])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def session_of(model: ModelProto, **options: Any) -> Session:
    return Session.open(manifest_of(model, **options), model.SerializeToString(), Mapped("/nonexistent"))


def run(session: Session, inputs: dict[str, Any], outputs: list[str] | None = None) -> dict[str, Any]:
    tensors: list[Tensor] = []
    parameters: dict[str, Any] = {}
    for name, value in inputs.items():
        flatten(name, value, tensors, parameters)
    return unflatten(*session.run(tensors, outputs or (), parameters))


def relu(shape: Any = (1, 4)) -> Session:
    return session_of(model_of([node("Relu", ["x"], ["y"])], [info("x", FLOAT, shape)], [info("y", FLOAT, shape)]))


def adder() -> ModelProto:
    """y = x + w, z = y[i], with a default for w and free sizes."""
    return model_of(
        [node("Add", ["x", "w"], ["y"]), node("Gather", ["y", "i"], ["z"])],
        [info("x", FLOAT, ["n"]), info("w", FLOAT, ["m"]), info("i", INT64, ["k"])],
        [info("y", FLOAT, None), info("z", FLOAT, ["k"])],
        [numpy_helper.from_array(np.ones(2, np.float32), "w")],
    )


def floats(name: str, *shape: int) -> Tensor:
    return Tensor.from_numpy(name, np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape))


@pytest.mark.parametrize("shape", [(1, 4), ("n", 4), ("n", None), None])
def test_a_run_gives_the_outputs_of_the_model(shape: Any) -> None:
    x = np.array([[-1, 2, -3, 4]], np.float32)
    tensors, parameters = relu(shape).run([Tensor.from_numpy("x", x)])
    assert [(t.name, t.dtype, t.shape) for t in tensors] == [("y", "FP32", (1, 4))] and parameters == {}
    assert tensors[0].to_numpy().tolist() == [[0, 2, 0, 4]]


@pytest.mark.parametrize("shape", [(), (0, 4), (2, 0, 3)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    assert run(relu(None), {"x": np.ones(shape, np.float32)})["y"].shape == shape


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([], ["'x'", "'i'", "missing", "none"]),
        ([floats("x", 2)], ["'i'", "missing", "'x'"]),
        ([floats("x", 2), floats("q", 2)], ["'q'", "unknown", "'x', 'w', 'i'"]),
        ([floats("x", 2), floats("x", 2)], ["'x'", "twice"]),
        ([Tensor.from_numpy("x", np.ones(2))], ["'x'", "expected FP32", "found FP64"]),
        ([floats("x", 2, 1)], ["'x'", "expected FP32 of shape [n]", "found shape [2, 1]"]),
        ([Tensor("x", "FP32", (3,), b"\0" * 8)], ["'x'", "needs 12 bytes", "found 8"]),
        ([Tensor("x", "FP32", (-2, -1), b"\0" * 8)], ["'x'", "negative"]),
    ],
)
def test_what_does_not_fit_is_named(tensors: list[Tensor], words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        session_of(adder()).run(tensors)
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_fixed_dimension_is_checked() -> None:
    with pytest.raises(InvalidArgument, match=r"'x': expected FP32 of shape \[n, 4\], found shape \[4, 1\]"):
        relu(("n", 4)).run([floats("x", 4, 1)])


def test_a_bool_is_zero_or_one() -> None:
    flag = info("x", TensorProto.BOOL, [2])
    session = session_of(model_of([node("Not", ["x"], ["y"])], [flag], [info("y", TensorProto.BOOL, [2])]))
    assert session.run([Tensor("x", "BOOL", (2,), b"\0\1")])[0][0].data == b"\1\0"
    with pytest.raises(InvalidArgument, match="'x': each BOOL must be a byte 0 or 1"):
        session.run([Tensor("x", "BOOL", (2,), b"\0\2")])


def test_an_initializer_may_be_left_out_or_given() -> None:
    session = session_of(adder())
    one, i = np.ones(2, np.float32), np.zeros(1, np.int64)
    assert run(session, {"x": one, "i": i})["y"].tolist() == [2, 2]
    assert run(session, {"x": one, "i": i, "w": 4 * one})["y"].tolist() == [5, 5]


def test_outputs_are_chosen_by_name_and_in_the_order_asked() -> None:
    session = session_of(adder())
    given = [floats("x", 2), Tensor.from_numpy("i", np.zeros(1, np.int64))]
    assert [t.name for t in session.run(given, ["z", "y"])[0]] == ["z", "y"]
    assert [t.name for t in session.run(given, ["z"])[0]] == ["z"]
    with pytest.raises(InvalidArgument, match="output 'q' is unknown; expected 'y', 'z'"):
        session.run(given, ["q"])
    with pytest.raises(InvalidArgument, match="output 'z' is asked for twice"):
        session.run(given, ["z", "z"])


@pytest.mark.parametrize(
    ("x", "i", "says"),
    [((3,), 0, "Add: Attempting to broadcast an axis"), ((2,), 7, "Gather: indices element out of data bounds, idx=7")],
)
def test_what_a_kernel_refuses_is_the_clients_fault(x: tuple[int, ...], i: int, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(session_of(adder()), {"x": np.ones(x, np.float32), "i": np.array([i])})
    assert says in caught.value.message and "onnxruntime" not in caught.value.message
    assert ".h" not in caught.value.message and "/" not in caught.value.message


def test_a_run_that_would_take_too_much_memory() -> None:
    grow = model_of(
        [node("Expand", ["x", "s"], ["y"])], [info("x", FLOAT, [1]), info("s", INT64, [1])], [info("y", FLOAT, None)]
    )
    with pytest.raises(ResourceExhausted, match="model 'm': not enough memory for this run"):
        run(session_of(grow), {"x": np.ones(1, np.float32), "s": np.array([1 << 46])})


def test_outputs_are_not_copied_and_outlive_the_session() -> None:
    session = relu(("n", 1024))
    (output,), _ = session.run([floats("x", 1024, 1024)])
    assert isinstance(output.data, memoryview) and output.data.nbytes == 4 << 20
    assert not isinstance(output.data.obj, bytes)
    session.close()
    del session
    gc.collect()
    assert output.to_numpy()[-1, -1] == (1 << 20) - 1
    with pytest.raises(FailedPrecondition, match="closed"):
        closed = relu()
        closed.close()
        closed.run([floats("x", 1, 4)])


@pytest.mark.parametrize("dtype", ["BF16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"])
def test_narrow_floats_go_in_and_out(dtype: str) -> None:
    number = helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype))
    ends = [info("x", number, ["n"])], [info("y", number, ["n"]), info("f", FLOAT, ["n"])]
    session = session_of(model_of([node("Identity", ["x"], ["y"]), node("Cast", ["x"], ["f"], to=FLOAT)], *ends))
    x: Array = np.array([1, -2, 0.5], np.float32).astype(numpy_dtype(dtype))
    found = run(session, {"x": x})
    assert found["y"].tobytes() == x.tobytes() and found["y"].dtype == x.dtype
    assert found["f"].tolist() == [1, -2, 0.5]
    assert run(session, {"x": x[:0]})["y"].shape == (0,)


@pytest.mark.parametrize(("dtype", "shape"), [("INT4", (2, 3)), ("UINT4", (1, 3)), ("INT2", (3, 3)), ("UINT2", (5, 1))])
def test_packed_integers_go_in_and_out(dtype: str, shape: tuple[int, int]) -> None:
    number = helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype))
    ends = [info("x", number, ["n", "m"])], [info("y", number, ["m", "n"])]
    model = model_of([node("Transpose", ["x"], ["y"])], *ends)
    model.opset_import[0].version = 25
    x = (np.arange(shape[0] * shape[1]) % 2).reshape(shape).astype(numpy_dtype(dtype))
    (y,), _ = session_of(model).run([Tensor.from_numpy("x", x)])
    assert y.data == Tensor.from_numpy("y", np.ascontiguousarray(x.T)).data  # padding bits included


def test_strings_beside_bfloat16_outputs_are_refused_by_name() -> None:
    ends = (
        [info("s", TensorProto.STRING, ["n"]), info("x", FLOAT, ["n"])],
        [info("t", TensorProto.STRING, ["n"]), info("y", TensorProto.BFLOAT16, ["n"])],
    )
    nodes = [node("Identity", ["s"], ["t"]), node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)]
    session = session_of(model_of(nodes, *ends))
    given = {"s": np.array(["a", "\u00e9"], object), "x": np.ones(2, np.float32)}
    assert run(session, given, ["t"])["t"].tolist() == ["a", "\u00e9"]
    with pytest.raises(Unimplemented, match="input 's': ONNX Runtime's Python cannot take strings"):
        run(session, given)


def test_an_output_that_is_an_input_is_copied() -> None:
    for number, dtype in ((FLOAT, np.float32), (TensorProto.BFLOAT16, numpy_dtype("BF16"))):
        ends = [info("x", number, [2])], [info("x", number, [2]), info("y", number, [2])]
        session = session_of(model_of([node("Identity", ["x"], ["y"])], *ends))
        data = bytearray(np.ones(2, dtype).tobytes())
        name = "FP32" if number == FLOAT else "BF16"
        outputs, _ = session.run([Tensor("x", name, (2,), memoryview(data))])
        data[:] = bytes(len(data))
        assert [bytes(t.data) for t in outputs] == [np.ones(2, dtype).tobytes()] * 2


def sequences() -> Session:
    seq = helper.make_tensor_sequence_value_info
    nodes = [node("SequenceInsert", ["x", "v"], ["y"]), node("SequenceLength", ["x"], ["n"])]
    return session_of(
        model_of(
            nodes,
            [seq("x", FLOAT, [None, 2]), info("v", FLOAT, [None, 2])],
            [seq("y", FLOAT, None), info("n", INT64, [])],
        )
    )


def test_sequences_in_and_out() -> None:
    one, two = np.ones((1, 2), np.float32), np.zeros((3, 2), np.float32)
    found = run(sequences(), {"x": [one, two], "v": two})
    assert [item.shape for item in found["y"]] == [(1, 2), (3, 2), (3, 2)] and found["n"] == 2
    assert run(sequences(), {"x": [], "v": two})["n"] == 0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([np.ones((1, 3), np.float32)], r"'x/0': expected FP32 of shape \[\?, 2\], found shape \[1, 3\]"),
        ([np.ones((1, 2))], "'x/0': expected FP32, found FP64"),
        ({"a": 1.0}, "'x': expected a sequence of FP32, found a dict"),
        (np.ones((1, 2), np.float32), "'x': expected a sequence of FP32, found one tensor of FP32"),
        (None, "'x': expected FP32, found none; it is not optional"),
    ],
)
def test_a_sequence_that_does_not_fit_is_named(value: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        run(sequences(), {"x": value, "v": np.ones((1, 2), np.float32)})


def test_optionals_in_and_out() -> None:
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [2]))
    ends = [helper.make_value_info("x", kind)], [helper.make_value_info("y", kind)]
    session = session_of(model_of([node("Identity", ["x"], ["y"])], *ends))
    assert run(session, {"x": np.ones(2, np.float32)})["y"].tolist() == [1, 1]
    assert run(session, {"x": None}) == run(session, {}) == {"y": None}


def test_maps_in_and_out() -> None:
    entry = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(FLOAT, []))
    table = helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, []))
    nodes = [
        node("DictVectorizer", ["x"], ["v"], domain="ai.onnx.ml", string_vocabulary=["a", "b", "c"]),
        node("ZipMap", ["v"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[5, 6, 7]),
    ]
    outputs = [info("v", FLOAT, [1, 3]), helper.make_value_info("y", helper.make_sequence_type_proto(table))]
    session = session_of(model_of(nodes, [helper.make_value_info("x", entry)], outputs))
    found = run(session, {"x": {"a": 1.5, "c": 2.0}})
    assert found["v"].tolist() == [[1.5, 0, 2]] and found["y"] == [{5: 1.5, 6: 0.0, 7: 2.0}]
    with pytest.raises(InvalidArgument, match="'x': expected keys of BYTES, found INT64"):
        run(session, {"x": {1: 1.5}})
    assert session.metadata()[0] == [Described("x", "FP32", [], {"kind": "map", "key": "BYTES"})]
    assert session.metadata()[1][1] == Described("y", "FP32", [], {"kind": "maps", "key": "INT64"})


def test_metadata() -> None:
    inputs, outputs = session_of(adder()).metadata()
    assert inputs[:2] == [Described("x", "FP32", [-1], {}), Described("w", "FP32", [-1], {"optional": True})]
    assert outputs == [Described("y", "FP32", [], {"unranked": True}), Described("z", "FP32", [-1], {})]


def weighted() -> tuple[ModelProto, bytes, tuple[ExternalTensor, ...]]:
    """y = x + w and q, an int4 tensor, cast; both weights in the file `data.bin`."""
    weights = np.arange(4, dtype=np.float32).tobytes() + bytes([0x21, 0x43])
    external = (ExternalTensor("w", FLOAT, (4,), 0, 16), ExternalTensor("q", TensorProto.INT4, (4,), 16, 2))
    initializers = []
    for item in external:
        tensor = TensorProto(name=item.name, data_type=item.dtype, dims=item.shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "data.bin"), ("offset", item.offset), ("length", item.length)):
            tensor.external_data.add(key=key, value=str(value))
        initializers.append(tensor)
    nodes = [node("Add", ["x", "w"], ["y"]), node("Cast", ["q"], ["z"], to=FLOAT)]
    ends = [info("x", FLOAT, [4])], [info("y", FLOAT, [4]), info("z", FLOAT, [4])]
    return model_of(nodes, *ends, initializers), weights, external


def test_weights_in_a_file(tmp_path: Path) -> None:
    model, weights, external = weighted()
    (tmp_path / "data.bin").write_bytes(weights)
    manifest = manifest_of(model, external=external)
    session = Session.open(manifest, memoryview(model.SerializeToString()), Mapped(str(tmp_path)))
    found = run(session, {"x": np.ones(4, np.float32)})
    assert found["y"].tolist() == [1, 2, 3, 4] and found["z"].tolist() == [1, 2, 3, 4]


def test_weights_in_memory_are_used_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, weights, external = weighted()
    memory = mmap.mmap(-1, 4096)
    memory[: len(weights)] = weights
    view = memoryview(memory)[: len(weights)].toreadonly()
    session = Session.open(manifest_of(model, external=external), model.SerializeToString(), InMemory(view))
    assert list(tmp_path.iterdir()) == []
    found = run(session, {"x": np.ones(4, np.float32)})
    assert found["y"].tolist() == [1, 2, 3, 4] and found["z"].tolist() == [1, 2, 3, 4]
    struct.pack_into("<f", memory, 0, 41.0)
    assert run(session, {"x": np.ones(4, np.float32)})["y"].tolist() == [42, 2, 3, 4]


def test_a_model_that_does_not_open(tmp_path: Path) -> None:
    model, _, external = weighted()
    with pytest.raises(ModelError) as caught:
        Session.open(manifest_of(model, external=external), model.SerializeToString(), Mapped(str(tmp_path)))
    assert "model 'm'" in caught.value.message and str(tmp_path) not in caught.value.message
    with pytest.raises(ModelError, match=r"model 'm': ONNX Runtime cannot open it: .*protobuf"):
        Session.open(manifest_of(model), b"no model", Mapped(str(tmp_path)))


def test_warm_up_measures_and_compares() -> None:
    recipe = (WarmupInput("x", "tensor", "FP32", (1, 4), "ones"),)
    model = model_of([node("Relu", ["x"], ["y"])], [info("x", FLOAT, [1, 4])], [info("y", FLOAT, [1, 4])])
    right = digest(["y"], [np.ones((1, 4), np.float32)])
    found = [session_of(model, warmup=Warmup(recipe, text)).warm() for text in (right, "0" * 64, None)]
    assert [warm and warm.matches for warm in found] == [True, False, None]
    assert all(warm is not None and warm.seconds > 0 for warm in found)
    assert session_of(model).warm() is None


def test_runs_from_several_threads_keep_apart() -> None:
    session, right = relu(("n", 64)), []

    def work(number: int) -> None:
        given = {"x": np.full((number, 64), number, np.float32)}
        right.append(all((run(session, given)["y"] == given["x"]).all() for _ in range(300)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4


def test_onnxruntime_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    unused = [numpy_helper.from_array(np.ones(2, np.float32), "unused")]  # ORT warns of it when it opens
    ends = [info("x", FLOAT, ["n", 2])], [info("y", FLOAT, ["n", 3])]  # and of a shape that does not come true
    session = session_of(model_of([node("NonZero", ["x"], ["i"]), node("Cast", ["i"], ["y"], to=FLOAT)], *ends, unused))
    session.run([floats("x", 2, 2)])
    with pytest.raises(InvalidArgument):
        run(session_of(adder()), {"x": np.ones(3, np.float32), "i": np.zeros(1, np.int64)})
    assert capfd.readouterr() == ("", "")


def test_the_worker_needs_no_onnx() -> None:
    code = "import sys, prefork.model.session; sys.exit('onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Bound runs: the same answers as the ordinary road, and no binding where that cannot be promised."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from prefork.errors import InvalidArgument
from prefork.model.bound import LARGEST, MOST, SEEN_BEFORE
from prefork.model.session import Mapped, Session
from prefork.tensor import Array, Tensor
from tests.manifests import manifest_of

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
info, node = helper.make_tensor_value_info, helper.make_node


def session_of(
    nodes: list[object], inputs: list[object], outputs: list[object], weights: dict[str, Array] | None = None
) -> Session:
    made = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, made)
    model: ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return Session.open(manifest_of(model), model.SerializeToString(), Mapped("/nonexistent"))


def adder() -> Session:
    shape = ["n", 4]
    return session_of(
        [node("Add", ["a", "b"], ["sum"]), node("Identity", ["a"], ["same"])],
        [info("a", FLOAT, shape), info("b", FLOAT, shape)],
        [info("sum", FLOAT, shape), info("same", FLOAT, shape)],
    )


def run(session: Session, **arrays: Array) -> dict[str, Array]:
    tensors, _ = session.run([Tensor.from_numpy(name, array) for name, array in arrays.items()])
    return {tensor.name: tensor.to_numpy() for tensor in tensors}


def bindings(session: Session) -> int:
    assert session._bindings is not None
    return len(session._bindings._known)


def pair(rows: int, seed: int) -> tuple[Array, Array]:
    a, b = np.random.default_rng(seed).standard_normal((2, rows, 4)).astype(np.float32)
    return a, b


def test_answers_are_those_of_each_request_and_stay() -> None:
    session, kept = adder(), []
    for seed in range(4 * SEEN_BEFORE):
        a, b = pair(1 + seed % 2, seed)
        kept.append((a, b, run(session, a=a, b=b)))
    assert bindings(session) == 2
    for a, b, found in kept:  # an answer must not lie in memory that a later request wrote
        np.testing.assert_array_equal(found["sum"], a + b)
        np.testing.assert_array_equal(found["same"], a)


def test_order_of_inputs_may_change() -> None:
    session = adder()
    a, b = pair(2, 0)
    for _ in range(2 * SEEN_BEFORE):
        run(session, a=a, b=b)
    np.testing.assert_array_equal(run(session, b=b, a=a)["same"], a)


def test_bad_requests_of_a_bound_shape_are_refused_as_ever() -> None:
    session = adder()
    a, b = pair(2, 0)
    for _ in range(2 * SEEN_BEFORE):
        run(session, a=a, b=b)
    with pytest.raises(InvalidArgument, match="'c' is unknown"):
        run(session, a=a, c=b)
    with pytest.raises(InvalidArgument, match="expected FP32, found INT32"):
        run(session, a=a, b=b.astype(np.int32))
    with pytest.raises(InvalidArgument, match="given twice"):
        session.run([Tensor.from_numpy("a", a), Tensor.from_numpy("a", a)])
    with pytest.raises(InvalidArgument, match="bytes"):
        session.run([Tensor.from_numpy("a", a), Tensor("b", "FP32", (2, 4), b"short")])
    np.testing.assert_array_equal(run(session, a=a, b=b)["sum"], a + b)


def test_index_out_of_range_is_the_clients_fault_and_costs_no_binding() -> None:
    table = np.arange(10, dtype=np.float32)
    session = session_of(
        [node("Gather", ["table", "i"], ["y"])], [info("i", INT64, [2])], [info("y", FLOAT, [2])], {"table": table}
    )
    for _ in range(2 * SEEN_BEFORE):
        np.testing.assert_array_equal(run(session, i=np.array([3, 9]))["y"], [3, 9])
    with pytest.raises(InvalidArgument):
        run(session, i=np.array([3, 99]))
    assert bindings(session) == 1
    np.testing.assert_array_equal(run(session, i=np.array([1, 2]))["y"], [1, 2])


def test_output_shapes_that_follow_the_data_fall_back() -> None:
    session = session_of([node("NonZero", ["x"], ["y"])], [info("x", FLOAT, [4])], [info("y", INT64, [1, "count"])])
    for _ in range(2 * SEEN_BEFORE):
        assert run(session, x=np.array([1, 0, 1, 0], np.float32))["y"].tolist() == [[0, 2]]
    assert run(session, x=np.array([1, 1, 1, 0], np.float32))["y"].tolist() == [[0, 1, 2]]
    assert run(session, x=np.array([1, 0, 1, 0], np.float32))["y"].tolist() == [[0, 2]]


def test_random_models_are_never_bound() -> None:
    session = session_of([node("RandomUniformLike", ["x"], ["y"])], [info("x", FLOAT, [64])], [info("y", FLOAT, [64])])
    x = np.zeros(64, np.float32)
    seen = [run(session, x=x)["y"].tobytes() for _ in range(3 * SEEN_BEFORE)]
    assert bindings(session) == 0
    assert len(set(seen)) == len(seen)


def test_constant_output_is_written() -> None:
    session = session_of(
        [node("Neg", ["x"], ["y"])], [info("x", FLOAT, [2])], [info("y", FLOAT, [2]), info("c", FLOAT, [3])],
        {"c": np.array([1, 2, 3], np.float32)},
    )  # fmt: skip
    for _ in range(2 * SEEN_BEFORE):
        found = run(session, x=np.ones(2, np.float32))
        assert (found["y"].tolist(), found["c"].tolist()) == ([-1, -1], [1, 2, 3])


def test_large_and_empty_runs_are_not_bound_and_shapes_are_bounded() -> None:
    session = adder()
    for rows in (LARGEST, 0):
        a, b = pair(rows, 1)
        for _ in range(2 * SEEN_BEFORE):
            run(session, a=a, b=b)
    assert bindings(session) == 0
    for rows in range(1, 2 * MOST):
        a, b = pair(rows, 1)
        for _ in range(SEEN_BEFORE):
            run(session, a=a, b=b)
    assert bindings(session) <= MOST


def test_threads_do_not_share_memory() -> None:
    session, wrong = adder(), []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait()
        for step in range(500):
            a, b = pair(2, seed * 1000 + step)
            if not np.array_equal(run(session, a=a, b=b)["sum"], a + b):
                wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_closed_session_gives_up_its_bindings() -> None:
    session = adder()
    session.close()
    assert session._bindings is None

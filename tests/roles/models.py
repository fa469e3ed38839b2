"""Models made for the faults they provoke: runs of chosen length, replies of chosen size, a graph nobody can run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from tests.model.small import model, save, value, weight

FOR_EVER = np.array(10**12, np.int64)  # rounds that no test outlives


def rounds(n: int) -> np.ndarray:
    return np.array(n, np.int64)


def _loop(output: str) -> tuple[NodeProto, list[TensorProto]]:
    """n matrix products of [256, 256], and their weights."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["on"]),
            helper.make_node("MatMul", ["before", "w"], ["after"]),
        ],
        "body",
        [value("i", [], TensorProto.INT64), value("going", [], TensorProto.BOOL), value("before", [256, 256])],
        [value("on", [], TensorProto.BOOL), value("after", [256, 256])],
    )
    weights = [weight("w", 256, 256), numpy_helper.from_array(np.eye(256, dtype=np.float32), "start")]
    return helper.make_node("Loop", ["n", "", "start"], [output], body=body), weights


def slow(folder: Path) -> Path:
    """`n` INT64 [] -> `y` FP32 [256, 256]: n matrix products, about 0.3 ms each."""
    loop, weights = _loop("y")
    proto = model([loop], [value("n", [], TensorProto.INT64)], [value("y", [256, 256])], weights)
    return save(proto, folder / "slow.onnx")


def large(folder: Path) -> Path:
    """`n` INT64 [1] -> `y` FP32 [n], ones: a small request with a reply of 4 n bytes."""
    one = numpy_helper.from_array(np.ones(1, np.float32))
    node = helper.make_node("ConstantOfShape", ["n"], ["y"], value=one)
    return save(model([node], [value("n", [1], TensorProto.INT64)], [value("y", ["n"])]), folder / "large.onnx")


def sink(folder: Path) -> Path:
    """`n` INT64 [], `x` FP32 [k] -> `y` []: n matrix products, then the sum of x: a request of any size."""
    loop, weights = _loop("z")
    nodes = [
        loop,
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("ReduceMax", ["z"], ["m"], keepdims=0),
        helper.make_node("Add", ["s", "m"], ["y"]),
    ]
    inputs = [value("n", [], TensorProto.INT64), value("x", ["k"])]
    return save(model(nodes, inputs, [value("y", [])], weights), folder / "sink.onnx")


def unknown_operator(folder: Path) -> Path:
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="com.example")
    proto = model([node], [value("x", [1])], [value("y", [1])])
    proto.opset_import.append(helper.make_opsetid("com.example", 1))
    return save(proto, folder / "unknown.onnx")


def adder(path: Path, amount: float, *, called: str = "x", rounds: int = 0) -> Path:
    """FP32 [n], the input `called` so -> `y` FP32 [n]: it and `amount`, after so many products of [256, 256]."""
    nodes = [helper.make_node("Add", [called, "amount"], ["y" if not rounds else "sum"])]
    weights = [numpy_helper.from_array(np.array([amount], np.float32), "amount")]
    if rounds:  # the products start from the input, or they would be computed once for all when the model is prepared
        loop, more = _loop("z")
        loop.input[0], loop.input[2] = "rounds", "first"
        zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
        nodes += [
            helper.make_node("ReduceMax", [called], ["m"], keepdims=0),
            helper.make_node("Mul", ["start", "m"], ["first"]),
            loop,
            helper.make_node("ReduceMax", ["z"], ["top"], keepdims=0),
            helper.make_node("Mul", ["top", "zero"], ["nothing"]),
            helper.make_node("Add", ["sum", "nothing"], ["y"]),
        ]
        weights += [*more, zero, numpy_helper.from_array(np.array(rounds, np.int64), "rounds")]
    return save(model(nodes, [value(called, ["n"])], [value("y", ["n"])], weights), path)

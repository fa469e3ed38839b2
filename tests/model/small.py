"""Small models for tests, made with onnx.helper: real graphs of the kinds that need care."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from prefork.tensor import Array

F32 = TensorProto.FLOAT


def value(name: str, shape: Sequence[int | str | None], kind: int = F32) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name: str, *shape: int, seed: int = 0) -> TensorProto:
    values = np.random.default_rng(seed).standard_normal(shape) / 8
    return numpy_helper.from_array(values.astype(np.float32), name)


def const(name: str, array: Array) -> TensorProto:
    return numpy_helper.from_array(array, name)


def graph(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: Sequence[TensorProto] = (),
) -> GraphProto:
    return helper.make_graph(nodes, "g", inputs, outputs, weights)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: Sequence[TensorProto] = (),
    *,
    opset: int = 17,
    ir_version: int = 8,
) -> ModelProto:
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        graph(nodes, inputs, outputs, weights), opset_imports=opsets, ir_version=ir_version, producer_name="tests"
    )


def save(proto: ModelProto, path: Path) -> Path:
    path.write_bytes(proto.SerializeToString())
    return path


def mlp() -> ModelProto:
    """x [batch, 256] -> y [batch, 64]: MatMul, Relu, Gemm with transB and bias."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Gemm", ["b", "w2", "c"], ["y"], "second", transB=1),
    ]
    weights = [weight("w1", 256, 512, seed=1), weight("w2", 64, 512, seed=2), weight("c", 64, seed=3)]
    return model(nodes, [value("x", ["batch", 256])], [value("y", ["batch", 64])], weights)


def lstm(layout: bool = False) -> ModelProto:
    """x [6, 1, 64] -> y [6, 1, 1, 128]."""
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], "cell", hidden_size=128)
    if layout:
        node.attribute.append(helper.make_attribute("layout", 0))
    weights = [weight("w", 1, 512, 64, seed=1), weight("r", 1, 512, 128, seed=2), weight("b", 1, 1024, seed=3)]
    return model([node], [value("x", [6, 1, 64])], [value("y", [6, 1, 1, 128])], weights)


def attention() -> ModelProto:
    """x [1, s, 128] -> y of the same shape, by com.microsoft Attention with 4 heads."""
    node = helper.make_node("Attention", ["x", "w", "b"], ["y"], "heads", domain="com.microsoft", num_heads=4)
    shape: list[int | str | None] = [1, "s", 128]
    return model([node], [value("x", shape)], [value("y", shape)], [weight("w", 128, 384), weight("b", 384, seed=1)])


def convolution() -> ModelProto:
    """x [1, 3, h, w] -> y [1, 32, h, w]: two convolutions, the second 1x1, weights in Constant nodes."""
    nodes = [
        helper.make_node("Constant", [], ["w1"], value=weight("w1v", 32, 3, 3, 3, seed=1)),
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Constant", [], ["w2"], value=weight("w2v", 32, 32, 1, 1, seed=2)),
        helper.make_node("Conv", ["b", "w2"], ["y"]),
    ]
    return model(nodes, [value("x", [1, 3, "h", "w"])], [value("y", [1, 32, "h", "w"])])


def branches() -> ModelProto:
    """x [2, 256], flag scalar bool -> y [2, 256]: an If whose branches have MatMuls with weights of their own."""

    def branch(name: str, seed: int) -> GraphProto:
        node = helper.make_node("MatMul", ["x", f"{name}_w"], [f"{name}_y"], f"{name}_node")
        return graph([node], [], [value(f"{name}_y", [2, 256])], [weight(f"{name}_w", 256, 256, seed=seed)])

    choose = helper.make_node("If", ["flag"], ["z"], then_branch=branch("yes", 1), else_branch=branch("no", 2))
    nodes = [choose, helper.make_node("MatMul", ["z", "w"], ["y"], "last")]
    inputs = [value("x", [2, 256]), value("flag", [], TensorProto.BOOL)]
    return model(nodes, inputs, [value("y", [2, 256])], [weight("w", 256, 256, seed=3)])


def overridable() -> ModelProto:
    """x [4] and an optional bias b [4] with a default -> y [4]; no large weight."""
    node = helper.make_node("Add", ["x", "b"], ["y"])
    return model([node], [value("x", [4]), value("b", [4])], [value("y", [4])], [weight("b", 4)])


def random_noise() -> ModelProto:
    """x [8] -> y [8]: x plus random numbers, other ones at each run."""
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["noise"]),
        helper.make_node("Add", ["x", "noise"], ["y"]),
    ]
    return model(nodes, [value("x", [8])], [value("y", [8])])


def sequence_and_optional() -> ModelProto:
    """s: sequence of fp32, o: optional fp32 [3] -> t: the sequence with an element more, h: whether o has a value."""
    tensor = helper.make_tensor_type_proto(F32, [3])
    nodes = [
        helper.make_node("SequenceInsert", ["s", "x"], ["t"]),
        helper.make_node("OptionalHasElement", ["o"], ["h"]),
    ]
    inputs = [
        helper.make_value_info("s", helper.make_sequence_type_proto(tensor)),
        helper.make_value_info("o", helper.make_optional_type_proto(tensor)),
        value("x", [3]),
    ]
    outputs = [
        helper.make_value_info("t", helper.make_sequence_type_proto(tensor)),
        value("h", [], TensorProto.BOOL),
    ]
    return model(nodes, inputs, outputs, opset=18)

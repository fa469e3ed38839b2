"""Static int8 convolutions: what is taken, what goes with it, and how close it stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from prefork.model import calibrate, external, optimize, qlinear, quantize, repository
from prefork.model.absorb import Graph
from prefork.model.evaluate import cosine
from prefork.model.weights import Weights
from prefork.tensor import Array
from tests.model import small

SIZE = 12


def network(opset: int = 12) -> ModelProto:
    """x [1, 3, 12, 12] -> y [1, 8]: convolutions with batch normalisation written out, Relu, a sum, Sigmoid times its
    input, a pool, and a mean; constants of one value a channel."""
    channels = np.random.default_rng(9).uniform(0.5, 1.5, (1, 16, 1, 1)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], "one", pads=[1, 1, 1, 1]),
        helper.make_node("Sub", ["c1", "shift"], ["s1"], "minus"),
        helper.make_node("Mul", ["s1", "shift"], ["m1"], "times"),
        helper.make_node("Add", ["m1", "plain"], ["a1"], "plus"),
        helper.make_node("Relu", ["a1"], ["r1"], "cut"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], "two", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "r1"], ["sum"], "join"),
        helper.make_node("Sigmoid", ["sum"], ["gate"], "sigmoid"),
        helper.make_node("Mul", ["sum", "gate"], ["swish"], "swish"),
        helper.make_node("MaxPool", ["swish"], ["pool"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["pool", "w3"], ["c3"], "three"),
        helper.make_node("Clip", ["c3", "zero", "six"], ["k3"], "clip"),
        helper.make_node("GlobalAveragePool", ["k3"], ["mean"], "mean"),
        helper.make_node("Flatten", ["mean"], ["y"], "flat"),
    ]
    weights = [
        small.weight("w1", 16, 3, 3, 3, seed=1), small.weight("w2", 16, 16, 3, 3, seed=2),
        small.weight("b2", 16, seed=3), small.weight("w3", 8, 16, 1, 1, seed=4),
        numpy_helper.from_array(channels, "shift"),
        small.const("plain", np.array(0.25, np.float32)), small.const("zero", np.array(0, np.float32)),
        small.const("six", np.array(6, np.float32)),
    ]  # fmt: skip
    shape = [1, 3, SIZE, SIZE]
    return small.model(nodes, [small.value("x", shape)], [small.value("y", [1, 8])], weights, opset=opset)


def pictures(count: int = 6) -> list[dict[str, Array]]:
    generator = np.random.default_rng(5)
    return [{"x": generator.standard_normal((1, 3, SIZE, SIZE)).astype(np.float32)} for _ in range(count)]


class Made:
    def __init__(self, model: ModelProto, folder: Path, **asked: object) -> None:
        self.folder = folder
        source = repository.read_model(small.save(model, folder / "source.onnx"))
        folded = quantize.folded(source, folder)
        values = calibrate.Values()
        calibrate.record(folded, folder, qlinear.watched(folded), pictures(), values.take)
        method = asked.pop("method", "minmax")
        assert method in ("minmax", "entropy", "percentile")
        static = qlinear.Static(values.ranges(method), **asked)  # a wrong name is the test's own mistake
        with (folder / "q.bin").open("wb") as file:
            weights = Weights(calibrate.fp32_initializers(folded), folder)
            self.rewrite = qlinear.as_static(folded, weights, external.DataFile(file, "q.bin"), static)
        self.ops = Counter(node.op_type for node in folded.graph.node)
        (folder / "q.onnx").write_bytes(folded.SerializeToString())

    def answers(self, stem: str, feeds: Sequence[dict[str, Array]]) -> list[Array]:
        session, _ = optimize.write(self.folder / f"{stem}.onnx", self.folder, f"{stem}-opt", lambda _: None)
        return [session.run(None, feed)[0] for feed in feeds]

    def cosine(self) -> float:
        feeds = pictures(4)
        pairs = zip(self.answers("q", feeds), self.answers("source", feeds), strict=True)
        return min(cosine(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("opset", [11, 12, 17])
def test_values_stay_integers_between_convolutions(tmp_path: Path, opset: int) -> None:
    made = Made(network(opset), tmp_path)
    assert made.rewrite.done["Conv"] == 3
    assert made.ops["QuantizeLinear"] == (1 if opset > 11 else 2)  # MaxPool takes uint8 from opset 12
    assert made.ops["DequantizeLinear"] == (1 if opset > 11 else 2)
    assert not made.ops.keys() & {"Conv", "Sub", "Mul", "Add", "Relu", "Clip", "Sigmoid", "GlobalAveragePool"}
    assert made.cosine() > 0.999


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_each_way_to_ranges_stays_close(tmp_path: Path, method: str, per_channel: bool) -> None:
    assert Made(network(), tmp_path, method=method, per_channel=per_channel).cosine() > 0.99


def test_alone_and_kept_convolutions(tmp_path: Path) -> None:
    alone = Made(network(), tmp_path, around=False)
    assert alone.rewrite.done == {"Conv": 3}
    assert alone.ops["Sigmoid"] == 1
    kept = Made(network(), tmp_path, keep={"c2"})
    assert (kept.rewrite.kept, kept.ops["Conv"]) == (["c2"], 1)
    assert kept.cosine() > 0.999


def swish(mode: str) -> ModelProto:
    """x [1, 3, 12, 12] -> y [1, 8, 24, 24]: a convolution, hard swish written out, a multiple, a sum cut at zero, a
    number taken off, twice the size by `mode`, a convolution."""
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], "one", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c1", "three"], ["p"], "plus"),
        helper.make_node("Clip", ["p", "zero", "six"], ["k"], "clip"),
        helper.make_node("Mul", ["c1", "k"], ["m"], "times"),
        helper.make_node("Div", ["m", "sixth"], ["h"], "sixth"),
        helper.make_node("Mul", ["half", "h"], ["s"], "multiple"),
        helper.make_node("Add", ["s", "c1"], ["sum"], "join"),
        helper.make_node("Relu", ["sum"], ["r"], "cut"),
        helper.make_node("Sub", ["r", "half"], ["t"], "less"),
        helper.make_node("Resize", ["t", "", "sizes"], ["u"], "twice", mode=mode),
        helper.make_node("Conv", ["u", "w2"], ["y"], "two"),
    ]
    numbers = {"three": 3, "zero": 0, "six": 6, "sixth": 6, "half": 0.5}
    weights = [small.weight("w1", 8, 3, 3, 3, seed=1), small.weight("w2", 8, 8, 1, 1, seed=2)]
    weights += [small.const(name, np.array(number, np.float32)) for name, number in numbers.items()]
    weights.append(small.const("sizes", np.array([1, 1, 2, 2], np.float32)))
    shapes = [1, 3, SIZE, SIZE], [1, 8, 2 * SIZE, 2 * SIZE]
    return small.model(nodes, [small.value("x", shapes[0])], [small.value("y", shapes[1])], weights, opset=13)


@pytest.mark.parametrize(("mode", "borders"), [("nearest", 1), ("linear", 2)])
def test_arithmetic_with_one_number_stays_whole(tmp_path: Path, mode: str, borders: int) -> None:
    made = Made(swish(mode), tmp_path)
    assert (made.ops["QuantizeLinear"], made.ops["DequantizeLinear"]) == (borders, borders)
    assert (made.ops["QLinearAdd"], made.ops["QLinearMul"], made.ops["Resize"]) == (3, 1, 1)
    assert not made.ops.keys() & {"Conv", "Sub", "Mul", "Div", "Add", "Relu", "Clip"}
    assert made.cosine() > 0.998


@pytest.mark.parametrize(
    ("op", "number", "first", "found"),
    [
        ("Mul", 3.0, True, ("x", 3.0, 0.0)),
        ("Mul", 3.0, False, ("x", 3.0, 0.0)),
        ("Div", 4.0, True, ("x", 0.25, 0.0)),
        ("Div", 4.0, False, None),
        ("Div", 0.0, True, None),
        ("Add", -1.0, False, ("x", 1.0, -1.0)),
        ("Sub", 2.0, True, ("x", 1.0, -2.0)),
        ("Sub", 2.0, False, None),
        ("Pow", 2.0, True, None),
    ],
)
def test_what_is_arithmetic_with_one_number(
    tmp_path: Path, op: str, number: float, first: bool, found: tuple[str, float, float] | None
) -> None:
    node = helper.make_node(op, ["x", "n"] if first else ["n", "x"], ["y"])
    model = small.model(
        [node], [small.value("x", [4])], [small.value("y", [4])], [small.const("n", np.array([number], np.float32))]
    )
    weights = Weights({t.name: t for t in model.graph.initializer}, tmp_path)
    assert Graph(model).linear(model.graph.node[0], weights) == found


def test_a_negative_multiple_is_left_alone(tmp_path: Path) -> None:
    model = swish("nearest")
    divisor = next(t for t in model.graph.initializer if t.name == "sixth")
    divisor.CopyFrom(small.const("sixth", np.array(-6, np.float32)))
    made = Made(model, tmp_path)
    assert made.ops["Div"] == 1
    assert made.cosine() > 0.99


def test_weights_of_7_bits(tmp_path: Path) -> None:
    Made(network(), tmp_path, top=63)
    model = external.parse((tmp_path / "q.onnx").read_bytes())
    found = next(t for t in model.graph.initializer if t.name.endswith("_static_w"))
    offset, length = external.span(found)
    assert np.abs(np.fromfile(tmp_path / "q.bin", np.int8, length, offset=offset)).max() == 63


def test_a_value_that_is_read_twice_is_not_absorbed(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Sub", ["c", "r"], ["y"], "both"),
    ]
    outputs = [small.value("y", [1, 4, SIZE, SIZE])]
    model = small.model(nodes, [small.value("x", [1, 3, SIZE, SIZE])], outputs, [small.weight("w", 4, 3, 1, 1)])
    graph = Graph(model)
    taken = graph.absorb(model.graph.node[0], Weights({t.name: t for t in model.graph.initializer}, tmp_path))
    assert (taken.output, taken.nodes) == ("c", ())
    assert Made(model, tmp_path).cosine() > 0.99


@pytest.mark.parametrize(
    ("op", "order", "shape", "taken"),
    [
        ("Add", 0, (1, 4, 1, 1), True),
        ("Sub", 1, (4, 1, 1), True),
        ("Mul", 0, (), True),
        ("Div", 0, (1, 4, 1, 1), True),
        ("Div", 1, (1, 4, 1, 1), False),
        ("Add", 0, (SIZE, SIZE), False),
        ("Add", 0, (1, 1, 1, SIZE), False),
        ("Mul", 0, (2, 4, 1, 1), False),
    ],
)
def test_only_arithmetic_of_one_value_a_channel_is_absorbed(
    tmp_path: Path, op: str, order: int, shape: tuple[int, ...], taken: bool
) -> None:
    constant = np.random.default_rng(1).uniform(0.5, 2, shape).astype(np.float32)
    inputs = ["c", "k"] if order == 0 else ["k", "c"]
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "conv"), helper.make_node(op, inputs, ["y"], "arithmetic")]
    weights = [small.weight("w", 4, 3, 1, 1), small.const("k", constant)]
    value = [small.value("x", [1, 3, SIZE, SIZE])], [small.value("y", [None, 4, SIZE, SIZE])]
    model = small.model(nodes, *value, weights)
    tensors = {t.name: t for t in model.graph.initializer}
    found = Graph(model).absorb(model.graph.node[0], Weights(tensors, tmp_path))
    assert bool(found.nodes) == taken
    if taken:
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        session = optimize.open_prepared(model.SerializeToString(), tmp_path, optimized=True)
        feed = pictures(1)[0]
        folded = np.einsum("nchw,oc->nohw", feed["x"], found.weight[:, :, 0, 0]) + found.bias.reshape(1, -1, 1, 1)
        np.testing.assert_allclose(folded, session.run(None, feed)[0], rtol=1e-4, atol=1e-5)


def test_ranges() -> None:
    values = calibrate.Values()
    generator = np.random.default_rng(0)
    usual = generator.standard_normal(50_000).astype(np.float32)
    values.take("t", np.append(usual, np.float32(1000)))
    low, high = values.ranges("minmax")["t"]
    assert (low, high) == (float(usual.min()), 1000.0)
    assert 3 < values.ranges("percentile")["t"][1] < 10
    assert values.ranges("entropy")["t"][1] < 200
    values.take("bad", np.array([1, np.inf], np.float32))
    assert values.ranges("minmax").keys() == {"t"}


def test_a_cut_costs_nothing_where_there_is_nothing_beyond() -> None:
    counts = np.zeros(calibrate.BINS)
    counts[: calibrate.LEVELS] = 10
    assert calibrate.divergence(counts, calibrate.LEVELS) == pytest.approx(0, abs=1e-9)
    counts[calibrate.LEVELS :] = 10
    assert calibrate.divergence(counts, calibrate.LEVELS) > 0.1


def test_depthwise_convolutions_open_from_their_packed_form(tmp_path: Path) -> None:
    """onnxruntime saves an empty part for them and does not read it again."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], "depthwise", group=64, pads=[2, 2, 2, 2])
    shape = [1, 64, SIZE, SIZE]
    model = small.model([node], [small.value("x", shape)], [small.value("y", shape)], [small.weight("w", 64, 1, 5, 5)])
    source = repository.read_model(small.save(model, tmp_path / "source.onnx"))
    folded, values = quantize.folded(source, tmp_path), calibrate.Values()
    feed = {"x": np.random.default_rng(2).standard_normal(shape).astype(np.float32)}
    calibrate.record(folded, tmp_path, qlinear.watched(folded), [feed], values.take)
    with (tmp_path / "q.bin").open("wb") as file:
        weights = Weights(calibrate.fp32_initializers(folded), tmp_path)
        qlinear.as_static(folded, weights, external.DataFile(file, "q.bin"), qlinear.Static(values.ranges("minmax")))
    (tmp_path / "q.onnx").write_bytes(folded.SerializeToString())
    session, saved = optimize.write(tmp_path / "q.onnx", tmp_path, "prepared", lambda _: None)
    again = optimize.open_prepared(saved.graph.read_bytes(), tmp_path, optimized=True)
    assert np.array_equal(session.run(None, feed)[0], again.run(None, feed)[0])

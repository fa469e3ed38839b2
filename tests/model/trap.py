"""A classifier of the digits with outlier channels: the same function as without them, and wrong in plain int8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import ModelProto, helper, numpy_helper
from sklearn.datasets import load_digits

from prefork.tensor import Array
from tests.model import small

WIDTH = 512
OUTLIERS, FACTOR = 4, 2000.0


def digits() -> tuple[Array, Array]:
    """Pixels fp32 [1797, 64] in [0, 1], labels int64."""
    found = load_digits()
    return (found.data / 16).astype(np.float32), found.target.astype(np.int64)


def planted(factor: float = FACTOR) -> ModelProto:
    """x [batch, 64] -> scores [batch, 10]: two random Relu layers and a read-out by ridge regression.

    Relu commutes with a positive factor, so OUTLIERS channels of the first layer are made `factor` times as large, and
    the rows of the second that read them as much smaller: the function stays what it was."""
    generator = np.random.default_rng(0)
    images, labels = digits()
    first = (generator.standard_normal((64, WIDTH)) / 4).astype(np.float32)
    second = (generator.standard_normal((WIDTH, WIDTH)) / 16).astype(np.float32)
    hidden = np.maximum(np.maximum(images @ first, 0) @ second, 0).astype(np.float64)
    readout = np.linalg.solve(hidden.T @ hidden + 0.1 * np.eye(WIDTH), hidden.T @ np.eye(10)[labels])
    first[:, :OUTLIERS] *= factor
    second[:OUTLIERS] /= factor
    names = {"w1": first, "w2": second, "w3": readout.astype(np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w2"], ["c"], "second"),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("MatMul", ["d", "w3"], ["scores"], "readout"),
    ]
    weights = [numpy_helper.from_array(value, name) for name, value in names.items()]
    return small.model(nodes, [small.value("x", ["batch", 64])], [small.value("scores", ["batch", 10])], weights)


def write(folder: Path) -> tuple[Path, Path]:
    """The model and its labelled data as files."""
    images, labels = digits()
    data = folder / "digits.npz"
    np.savez(data, x=images, labels=labels)
    return small.save(planted(), folder / "trap.onnx"), data

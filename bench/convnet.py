"""A small convolutional classifier of 28 by 28 pictures, trained here with numpy, and Fashion-MNIST's files.

Network: 5x5 convolution to 32, Relu, pool; 3x3 to 64, Relu, pool; 3x3 to 128, Relu; mean over the picture; 10 classes.
Momentum descent on the cross-entropy, weights from He et al. 2015 (arXiv:1502.01852). Data: Xiao et al. 2017,
arXiv:1708.07747, as the Debian package dataset-fashion-mnist installs it (IDX files, http://yann.lecun.com/exdb/mnist).
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

FASHION = Path("/usr/share/datasets/fashion-mnist")
CLASSES, LAST = 10, 128
RATE, MOMENTUM, BATCH = 0.05, 0.9, 64


class Split(NamedTuple):
    """Pictures fp32 [n, 1, 28, 28] in [0, 1], labels int64 [n]."""

    images: Floats
    labels: Labels


def fashion(folder: Path, part: str) -> Split:
    """`part`: train or t10k. Raises OSError when the files are not there."""
    images = _idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = _idx(folder / f"{part}-labels-idx1-ubyte.gz").astype(np.int64)
    return Split((images[:, None] / np.float32(255)).astype(np.float32), labels)


def _idx(path: Path) -> npt.NDArray[Any]:
    with gzip.open(path) as file:
        data = file.read()
    rank = data[3]
    start = 4 + 4 * rank
    return np.frombuffer(data, np.uint8, offset=start).reshape(struct.unpack(f">{rank}I", data[4:start]))


class Conv:
    """Same-padded convolution with Relu and, when `pool`, the largest of each 2 by 2."""

    def __init__(self, inputs: int, outputs: int, size: int, generator: np.random.Generator, *, pool: bool) -> None:
        deviation = (2 / (inputs * size * size)) ** 0.5
        self.weight = (generator.standard_normal((outputs, inputs, size, size)) * deviation).astype(np.float32)
        self.bias = np.zeros(outputs, np.float32)
        self.pool, self.size = pool, size
        self._moved = [np.zeros_like(self.weight), np.zeros_like(self.bias)]

    def forward(self, x: Floats) -> Floats:
        edge = self.size // 2
        padded = np.pad(x, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (self.size, self.size), (2, 3))
        count, _, height, width = x.shape
        self._columns = windows.transpose(0, 2, 3, 1, 4, 5).reshape(count * height * width, -1)
        flat = self.weight.reshape(len(self.weight), -1)
        y = (self._columns @ flat.T + self.bias).reshape(count, height, width, -1).transpose(0, 3, 1, 2)
        self._shape = x.shape
        y = np.maximum(y, 0).astype(np.float32)
        self._active = y > 0
        if not self.pool:
            whole: Floats = y
            return whole
        blocks = y.reshape(count, -1, height // 2, 2, width // 2, 2)
        top: Floats = blocks.max((3, 5))
        self._won = blocks == top[:, :, :, None, :, None]
        return top

    def backward(self, gradient: Floats) -> Floats:
        if self.pool:
            gradient = (self._won * gradient[:, :, :, None, :, None]).reshape(self._active.shape)
        gradient = gradient * self._active
        flat = gradient.transpose(0, 2, 3, 1).reshape(-1, len(self.weight))
        columns = flat @ self.weight.reshape(len(self.weight), -1)
        weight = (flat.T @ self._columns).reshape(self.weight.shape)
        self._step(weight, flat.sum(0))
        return self._back(columns)

    def _back(self, columns: Floats) -> Floats:
        count, inputs, height, width = self._shape
        edge, size = self.size // 2, self.size
        parts = columns.reshape(count, height, width, inputs, size, size)
        padded = np.zeros((count, inputs, height + 2 * edge, width + 2 * edge), np.float32)
        for row in range(size):
            for column in range(size):
                part = parts[..., row, column].transpose(0, 3, 1, 2)
                padded[:, :, row : row + height, column : column + width] += part
        return padded[:, :, edge : edge + height, edge : edge + width]

    def _step(self, weight: Floats, bias: Floats) -> None:
        moved = [MOMENTUM * old - RATE * new for old, new in zip(self._moved, (weight, bias), strict=True)]
        self.weight, self.bias, self._moved = self.weight + moved[0], self.bias + moved[1], moved


class Net:
    """The network; `train` once, then `export`."""

    def __init__(self, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self._layers = [
            Conv(1, 32, 5, generator, pool=True),
            Conv(32, 64, 3, generator, pool=True),
            Conv(64, LAST, 3, generator, pool=False),
        ]
        self._head = (generator.standard_normal((LAST, CLASSES)) * 0.1).astype(np.float32)
        self._offset = np.zeros(CLASSES, np.float32)
        self._generator = generator

    def train(self, data: Split, epochs: int) -> None:
        for _ in range(epochs):
            order = self._generator.permutation(len(data.images))
            for start in range(0, len(order), BATCH):
                chosen = order[start : start + BATCH]
                self._learn(data.images[chosen], data.labels[chosen])

    def _learn(self, x: Floats, labels: Labels) -> None:
        for layer in self._layers:
            x = layer.forward(x)
        mean = x.mean((2, 3))
        scores = mean @ self._head + self._offset
        odds = np.exp(scores - scores.max(1, keepdims=True))
        error = (odds / odds.sum(1, keepdims=True)).astype(np.float32)
        error[np.arange(len(labels)), labels] -= 1
        error /= np.float32(len(labels))
        back = (error @ self._head.T)[:, :, None, None] / np.float32(x.shape[2] * x.shape[3])
        self._head -= 10 * RATE * (mean.T @ error)
        self._offset -= 10 * RATE * error.sum(0)
        gradient = np.broadcast_to(back, x.shape).astype(np.float32)
        for layer in reversed(self._layers):
            gradient = layer.backward(gradient)

    def export(self) -> ModelProto:
        """image fp32 [batch, 1, 28, 28] -> scores fp32 [batch, 10], a distribution."""
        nodes, weights, name = [], [], "image"
        for index, layer in enumerate(self._layers):
            edge = layer.size // 2
            weights += [_stored(layer.weight, f"w{index}"), _stored(layer.bias, f"b{index}")]
            nodes.append(helper.make_node("Conv", [name, f"w{index}", f"b{index}"], [f"c{index}"], pads=[edge] * 4))
            nodes.append(helper.make_node("Relu", [f"c{index}"], [f"r{index}"]))
            name = f"r{index}"
            if layer.pool:
                nodes.append(helper.make_node("MaxPool", [name], [f"p{index}"], kernel_shape=[2, 2], strides=[2, 2]))
                name = f"p{index}"
        weights += [_stored(self._head, "head"), _stored(self._offset, "offset")]
        nodes += [
            helper.make_node("GlobalAveragePool", [name], ["mean"]),
            helper.make_node("Flatten", ["mean"], ["flat"]),
            helper.make_node("Gemm", ["flat", "head", "offset"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["scores"]),
        ]
        inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 28, 28])]
        outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])]
        graph = helper.make_graph(nodes, "convnet", inputs, outputs, weights)
        opsets = [helper.make_opsetid("", 17)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="bench")


def _stored(array: Floats, name: str) -> TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name)

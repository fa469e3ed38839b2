"""BERT and MPNet sentence encoders as ONNX graphs, from a .safetensors file or random weights, without torch.

Inputs int64 [batch, sequence]: input_ids, attention_mask, and token_type_ids for the BERT kinds. Outputs
sentence_embedding FP32 [batch, hidden] (mean over the mask, L2-normalised) and last_hidden_state FP32 [batch, sequence,
hidden]. Sources: Devlin et al. 2018 (arXiv:1810.04805); Song et al. 2020 (arXiv:2004.09297) with T5's relative
positions; the file format: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Weights = Callable[[str], Array]

NUMPY = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}
BERT_NAMES = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
MPNET_NAMES = ("attn.q", "attn.k", "attn.v", "attn.o", "LayerNorm")
REACH = 513  # positions an MPNet sequence can span: its 514 less the padding


@dataclass(frozen=True, slots=True)
class Shape:
    """`names`: what a checkpoint calls query, key, value, output projection and first norm of a layer."""

    layers: int
    hidden: int
    heads: int
    epsilon: float
    names: tuple[str, str, str, str, str]
    relative: bool = False  # MPNet: relative position bias, padding id 1, no token types


SHAPES = {
    "minilm": Shape(6, 384, 12, 1e-12, BERT_NAMES),
    "mpnet": Shape(12, 768, 12, 1e-5, MPNET_NAMES, relative=True),
    "bert-base-random": Shape(12, 768, 12, 1e-12, BERT_NAMES),
}


def safetensors(path: Path) -> Mapping[str, Array]:
    """The tensors of a file by name, mapped read-only: u64 header length, JSON header, little-endian data."""
    mapped = np.memmap(path, mode="r")
    (length,) = struct.unpack("<Q", mapped[:8].tobytes())
    header: dict[str, Any] = json.loads(mapped[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            mapped, NUMPY[entry["dtype"]], math.prod(entry["shape"]), 8 + length + entry["data_offsets"][0]
        ).reshape(entry["shape"])
        for name, entry in header.items()
    }


def random_weights(hidden: int = 768, inner: int = 3072, vocabulary: int = 30522, seed: int = 0) -> Weights:
    """Weights of BERT-base's shapes, normal with deviation 0.02: right for speed, meaningless for answers."""
    generator = np.random.default_rng(seed)
    shapes = {"word": (vocabulary, hidden), "position": (512, hidden), "token_type": (2, hidden)}

    def get(name: str) -> Array:
        if name.endswith("LayerNorm.weight"):
            return np.ones(hidden, np.float32)
        if name.endswith("bias"):
            return np.zeros(inner if "intermediate" in name else hidden, np.float32)
        found = [shape for part, shape in shapes.items() if f"{part}_embeddings" in name]
        if found:
            shape = found[0]
        elif "intermediate" in name:
            shape = (inner, hidden)
        else:
            shape = (hidden, hidden) if "attention" in name else (hidden, inner)
        return generator.standard_normal(shape, np.float32) * np.float32(0.02)

    return get


class Graph:
    """Nodes and initializers as they are made; each `op` returns the name of its output."""

    def __init__(self, get: Weights) -> None:
        self.get = get
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []

    def constant(self, value: Any, dtype: Any = np.float32, name: str = "") -> str:
        name = name or f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype, order="C"), name))
        return name

    def integers(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def integer(self, value: int) -> str:
        return self.constant(value, np.int64)

    def weight(self, name: str) -> str:
        return self.constant(self.get(name), name=name)

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        out = out or f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=out, **attributes))
        return out

    def linear(self, x: str, prefix: str) -> str:
        kernel = self.constant(self.get(f"{prefix}.weight").T, name=f"{prefix}.weight")
        return self.op("Add", self.op("MatMul", x, kernel), self.weight(f"{prefix}.bias"))

    def norm(self, x: str, prefix: str, epsilon: float) -> str:
        scale, bias = self.weight(f"{prefix}.weight"), self.weight(f"{prefix}.bias")
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=epsilon)

    def embedding(self, table: str, index: str) -> str:
        return self.op("Gather", self.weight(f"embeddings.{table}_embeddings.weight"), index, axis=0)

    def gelu(self, x: str) -> str:
        erf = self.op("Erf", self.op("Div", x, self.constant(math.sqrt(2))))
        return self.op("Mul", self.op("Mul", x, self.op("Add", erf, self.constant(1))), self.constant(0.5))


def _embed(g: Graph, shape: Shape, sequence: str) -> str:
    position = sequence
    if shape.relative:  # cumsum(id != padding) * (id != padding) + padding
        padding = g.integer(1)
        real = g.op("Cast", g.op("Not", g.op("Equal", "input_ids", padding)), to=TensorProto.INT64)
        position = g.op("Add", g.op("Mul", g.op("CumSum", real, g.integer(1)), real), padding)
    x = g.op("Add", g.embedding("word", "input_ids"), g.embedding("position", position))
    if not shape.relative:
        x = g.op("Add", x, g.embedding("token_type", "token_type_ids"))
    return g.norm(x, "embeddings.LayerNorm", shape.epsilon)


def _buckets(count: int = 32, furthest: int = 128) -> npt.NDArray[np.int64]:
    """T5's bidirectional bucket for each distance -REACH..REACH (Raffel et al. 2019, arXiv:1910.10683, section 2.1)."""
    distance = -np.arange(-REACH, REACH + 1)
    half, near = count // 2, count // 4
    sign = (distance < 0).astype(np.int64) * half
    distance = np.abs(distance)
    ratio = np.log(np.maximum(distance, 1) / near) / math.log(furthest / near)
    far = near + (ratio * (half - near)).astype(np.int64)
    return sign + np.where(distance < near, distance, np.minimum(far, half - 1))


def _bias(g: Graph, shape: Shape, sequence: str) -> str:
    """What is added to the attention scores: -10000 under the mask, and MPNet's relative positions."""
    mask = g.op("Cast", g.op("Unsqueeze", "attention_mask", g.integers(1, 2)), to=TensorProto.FLOAT)
    bias = g.op("Mul", g.op("Sub", g.constant(1), mask), g.constant(-10000))
    if not shape.relative:
        return bias
    table = g.constant(g.get("encoder.relative_attention_bias.weight")[_buckets()].T)
    keys, queries = g.op("Unsqueeze", sequence, g.integers(0)), g.op("Unsqueeze", sequence, g.integers(1))
    distance = g.op("Add", g.op("Sub", keys, queries), g.integer(REACH))
    return g.op("Add", bias, g.op("Unsqueeze", g.op("Gather", table, distance, axis=1), g.integers(0)))


def _layer(g: Graph, shape: Shape, index: int, x: str, bias: str) -> str:
    layer = f"encoder.layer.{index}."
    query, key, value, output, norm = (f"{layer}attention.{name}" for name in shape.names)
    size = shape.hidden // shape.heads
    split = g.integers(0, 0, shape.heads, size)

    def heads(prefix: str, order: list[int]) -> str:
        return g.op("Transpose", g.op("Reshape", g.linear(x, prefix), split), perm=order)

    scores = g.op("MatMul", heads(query, [0, 2, 1, 3]), heads(key, [0, 2, 3, 1]))
    scores = g.op("Add", g.op("Mul", scores, g.constant(1 / math.sqrt(size))), bias)
    context = g.op("MatMul", g.op("Softmax", scores, axis=-1), heads(value, [0, 2, 1, 3]))
    merged = g.op("Reshape", g.op("Transpose", context, perm=[0, 2, 1, 3]), g.integers(0, 0, shape.hidden))
    x = g.norm(g.op("Add", g.linear(merged, output), x), norm, shape.epsilon)
    inner = g.gelu(g.linear(x, f"{layer}intermediate.dense"))
    return g.norm(g.op("Add", g.linear(inner, f"{layer}output.dense"), x), f"{layer}output.LayerNorm", shape.epsilon)


def _pool(g: Graph, x: str) -> None:
    mask = g.op("Cast", g.op("Unsqueeze", "attention_mask", g.integers(2)), to=TensorProto.FLOAT)
    total = g.op("ReduceSum", g.op("Mul", x, mask), g.integers(1), keepdims=0)
    count = g.op("Max", g.op("ReduceSum", mask, g.integers(1), keepdims=0), g.constant(1e-9))
    mean = g.op("Div", total, count)
    length = g.op("Max", g.op("ReduceL2", mean, axes=[-1], keepdims=1), g.constant(1e-12))
    g.op("Div", mean, length, out="sentence_embedding")


def build(kind: str, get: Weights) -> ModelProto:
    """The model of one of SHAPES with the weights that `get` finds by their checkpoint name."""
    shape = SHAPES[kind]
    g = Graph(get)
    length = g.op("Gather", g.op("Shape", "input_ids"), g.integer(1), axis=0)
    sequence = g.op("Range", g.integer(0), length, g.integer(1))
    x, bias = _embed(g, shape, sequence), _bias(g, shape, sequence)
    for index in range(shape.layers):
        x = _layer(g, shape, index, x, bias)
    g.op("Identity", x, out="last_hidden_state")
    _pool(g, x)
    names = ["input_ids", "attention_mask"] + ([] if shape.relative else ["token_type_ids"])
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in names]
    outputs = [
        helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["batch", shape.hidden]),
        helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "sequence", shape.hidden]),
    ]
    graph = helper.make_graph(g.nodes, kind, inputs, outputs, g.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="bench")

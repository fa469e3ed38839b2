"""Static int8 for convolutions: ranges are known beforehand, values stay uint8 from one operator to the next. Loader's
process (onnx).

Written as the QLinear operators that onnxruntime would fuse Quantize/Dequantize pairs into, so that nothing depends on
its finding them, and opsets without per-channel DequantizeLinear do as well. A convolution takes with it the
per-channel arithmetic and the Relu or Clip that follow; operators between convolutions are taken where they have an
integer form. Whatever else reads a value gets it dequantized.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, helper

from prefork.model import external
from prefork.model.absorb import Absorbed, Graph
from prefork.model.calibrate import Range
from prefork.model.quantize import SMALL
from prefork.model.weights import Weights, per_channel

MICROSOFT = "com.microsoft"
BINARY = {"Add": "QLinearAdd", "Mul": "QLinearMul"}
UNARY = {"Sigmoid": "QLinearSigmoid", "LeakyRelu": "QLinearLeakyRelu"}
POOL = {"GlobalAveragePool": "QLinearGlobalAveragePool", "AveragePool": "QLinearAveragePool"}
SAME = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"})  # move values, and so keep the scale
RESIZE_OPSET = 11
MAXPOOL_OPSET = 12  # the first whose MaxPool takes uint8
INTEGER = {**BINARY, **UNARY, **POOL, "Concat": "QLinearConcat"}
NEIGHBOURS = frozenset({*INTEGER, *SAME, "MaxPool", "Resize", "Sub", "Div"})


@dataclass(frozen=True, slots=True)
class Static:
    """What is asked for. `ranges`: of each activation; `keep`: first outputs of convolutions that stay fp32; `around`:
    take the operators between convolutions too; `top`: the largest weight, 127, or 63 where 8 bits could overflow."""

    ranges: Mapping[str, Range]
    per_channel: bool = True
    keep: Collection[str] = ()
    around: bool = True
    top: int = 127


class Q(NamedTuple):
    """Names of a uint8 value, its scale and its zero point; `step` is the scale's number."""

    data: str
    scale: str
    zero: str
    step: float


def convolutions(model: ModelProto) -> list[NodeProto]:
    """Those of the main graph that can be taken, as far as the graph tells."""
    graph = Graph(model)
    return [node for node in model.graph.node if graph.takes(node)]


def watched(model: ModelProto) -> list[str]:
    """The values whose ranges are needed."""
    graph = Graph(model)
    kinds = NEIGHBOURS | {"Conv", "Relu", "Clip", "Sub", "Div"}
    names = [n for node in model.graph.node if node.op_type in kinds for n in (*node.input, *node.output)]
    return [name for name in dict.fromkeys(names) if name and name not in graph.constants]


class Rewrite:
    """One walk over the main graph. `done`: operators taken, by kind; `kept`: convolutions left, by first output."""

    def __init__(self, model: ModelProto, weights: Weights, data: external.DataFile, static: Static) -> None:
        self.done: dict[str, int] = {}
        self.kept: list[str] = []
        self._model, self._weights, self._data, self._static = model, weights, data, static
        self._graph = Graph(model)
        self._quantized: dict[str, Q] = {}
        self._plain: set[str] = set()  # values that exist in fp32 although they are quantized too
        self._constants: dict[str, str] = {}
        self._out: list[NodeProto] = []
        self._skipped: set[str] = set()

    def run(self) -> None:
        """Rewrite the model in place."""
        for node in self._model.graph.node:
            if id_of(node) in self._skipped:
                continue
            if self._convolution(node) or (self._static.around and self._neighbour(node)):
                self.done[node.op_type] = self.done.get(node.op_type, 0) + 1
                continue
            self._as_fp32(self._graph.reads(node))
            self._out.append(node)
        self._as_fp32(value.name for value in self._model.graph.output)
        self._graph.replace_nodes(self._model, self._out)
        if not any(o.domain == MICROSOFT for o in self._model.opset_import):
            self._model.opset_import.add(domain=MICROSOFT, version=1)

    def _convolution(self, node: NodeProto) -> bool:
        if not self._graph.takes(node):
            return False
        taken = self._graph.absorb(node, self._weights)
        known = taken.output in self._static.ranges
        if node.output[0] in self._static.keep or not known or (x := self._take(node.input[0])) is None:
            self.kept.append(node.output[0])
            return False
        self._skipped |= {id_of(other) for other in taken.nodes}
        self._emit_convolution(node, taken, x, self._named(taken.output))
        return True

    def _emit_convolution(self, node: NodeProto, taken: Absorbed, x: Q, y: Q) -> None:
        weight, shape = taken.weight, taken.weight.shape
        flat = weight.reshape(shape[0], -1)
        if self._static.per_channel:
            values, scales = per_channel(flat, 1, self._static.top, swap=False)
        else:
            whole, scale = per_channel(flat.reshape(1, -1), 1, self._static.top, swap=False)
            values, scales = whole, np.repeat(scale, shape[0])
        base = f"{node.output[0]}_static"
        bias = np.rint(taken.bias.astype(np.float64) / (x.step * scales.astype(np.float64)))
        limit = 2.0**31 - 1
        stored = scales if self._static.per_channel else scales[0].reshape(())
        inputs = [
            x.data, x.scale, x.zero,
            self._add(f"{base}_w", values.reshape(shape)), self._add(f"{base}_ws", stored),
            self._add(f"{base}_wz", np.zeros(stored.shape, np.int8)), y.scale, y.zero,
            self._add(f"{base}_b", np.clip(bias, -limit, limit).astype(np.int32)),
        ]  # fmt: skip
        made = helper.make_node("QLinearConv", inputs, [y.data], f"{base}_node")
        made.attribute.extend(node.attribute)
        self._out.append(made)

    def _neighbour(self, node: NodeProto) -> bool:
        kind = node.op_type
        if kind not in NEIGHBOURS or node.domain or len([o for o in node.output if o]) != 1:
            return False
        if kind in SAME or kind in ("MaxPool", "Resize"):
            return self._same(node)
        if (found := self._graph.linear(node, self._weights)) is not None:
            return self._linear(node, *found)
        if kind not in INTEGER:
            return False
        data = list(node.input)
        quantized = [name in self._quantized for name in data]
        if not any(quantized) or (kind == "Concat" and not all(quantized)):
            return False
        if node.output[0] not in self._static.ranges or any(name in self._graph.constants for name in data):
            return False
        taken = [self._take(name) for name in data]
        whole = [x for x in taken if x is not None]
        if len(whole) < len(taken):
            return False
        self._out.append(_integer(node, whole, self._result(node)))
        return True

    def _result(self, node: NodeProto) -> Q:
        """What `node` makes; a Relu or Clip that alone reads it is done by the range that its own output has."""
        cut = self._graph.cut(node.output[0]) if node.op_type in BINARY or node.op_type == "Sub" else None
        if cut is None or cut.output[0] not in self._static.ranges:
            return self._named(node.output[0])
        self._skipped.add(id_of(cut))
        return self._named(cut.output[0])

    def _linear(self, node: NodeProto, name: str, times: float, plus: float) -> bool:
        """A multiple is the same bytes at another scale; a sum is that with a constant."""
        x = self._quantized.get(name)
        if x is None or node.output[0] not in self._static.ranges:
            return False
        out = node.output[0]
        if plus == 0 and 0 < times < np.inf:
            step = x.step * times
            self._quantized[out] = Q(x.data, self._add(f"{out}_u8_scale", np.array(step, np.float32)), x.zero, step)
            return True
        if times != 1 or not 0 < abs(plus) < np.inf:
            return False
        step, end = abs(plus) / 255, 255 if plus > 0 else 0
        constant = Q(
            self._add(f"{out}_plus", np.array([end], np.uint8)),
            self._add(f"{out}_plus_scale", np.array(step, np.float32)),
            self._add(f"{out}_plus_zero", np.array(255 - end, np.uint8)),
            step,
        )
        self._out.append(_binary("QLinearAdd", node, [x, constant], self._result(node)))
        return True

    def _same(self, node: NodeProto) -> bool:
        x = self._quantized.get(node.input[0])
        if x is None or (node.op_type == "MaxPool" and self._graph.opset < MAXPOOL_OPSET):
            return False
        if node.op_type == "Resize" and not self._copies(node):
            return False
        y = Q(f"{node.output[0]}_u8", x.scale, x.zero, x.step)
        made = helper.make_node(node.op_type, [x.data, *node.input[1:]], [y.data], node.name)
        made.attribute.extend(node.attribute)
        self._out.append(made)
        self._quantized[node.output[0]] = y
        return True

    def _copies(self, node: NodeProto) -> bool:
        """Whether a Resize repeats values, and makes none."""
        mode = next((a.s for a in node.attribute if a.name == "mode"), b"nearest")
        return mode == b"nearest" and self._graph.opset >= RESIZE_OPSET

    def _take(self, name: str) -> Q | None:
        """The value in uint8, quantized here when it is not yet; None when its range is unknown."""
        if name in self._quantized:
            return self._quantized[name]
        if name not in self._static.ranges or name in self._graph.constants:
            return None
        made = self._named(name)
        self._plain.add(name)
        inputs = [name, made.scale, made.zero]
        self._out.append(helper.make_node("QuantizeLinear", inputs, [made.data], f"{name}_quantize"))
        return made

    def _named(self, name: str) -> Q:
        low, high = self._static.ranges[name]
        low, high = min(low, 0.0), max(high, 0.0)
        step = float(np.float32((high - low) / 255)) or 1.0
        zero = np.clip(np.rint(-low / step), 0, 255)
        made = Q(
            f"{name}_u8",
            self._add(f"{name}_u8_scale", np.array(step, np.float32)),
            self._add(f"{name}_u8_zero", np.array(zero, np.uint8)),
            step,
        )
        self._quantized[name] = made
        return made

    def _as_fp32(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._quantized and name not in self._plain:
                x = self._quantized[name]
                self._plain.add(name)
                made = helper.make_node("DequantizeLinear", list(x[:3]), [name], f"{name}_dequantize")
                self._out.append(made)

    def _add(self, name: str, array: npt.NDArray[Any]) -> str:
        if name not in self._constants:
            number = helper.np_dtype_to_tensor_dtype(array.dtype)
            tensor = self._model.graph.initializer.add(name=name, data_type=number, dims=array.shape)
            if array.nbytes <= SMALL:
                tensor.raw_data = array.tobytes()
            else:
                self._data.append(tensor, [np.ascontiguousarray(array).data])
            self._constants[name] = name
        return name


def _integer(node: NodeProto, taken: list[Q], y: Q) -> NodeProto:
    kind = node.op_type
    if kind in BINARY:
        return _binary(BINARY[kind], node, taken, y)
    if kind == "Concat":
        inputs = [y.scale, y.zero, *(part for x in taken for part in x[:3])]
    else:
        inputs = [*taken[0][:3], y.scale, y.zero]
    made = helper.make_node(INTEGER[kind], inputs, [y.data], f"{node.name}_static", domain=MICROSOFT)
    made.attribute.extend(node.attribute)
    return made


def _binary(op: str, node: NodeProto, taken: list[Q], y: Q) -> NodeProto:
    inputs = [part for x in taken for part in x[:3]] + [y.scale, y.zero]
    return helper.make_node(op, inputs, [y.data], f"{node.name}_static", domain=MICROSOFT)


def id_of(node: NodeProto) -> str:
    """A node by its first output, which no other node of its graph has."""
    return next((name for name in node.output if name), "")


def as_static(model: ModelProto, weights: Weights, data: external.DataFile, static: Static) -> Rewrite:
    """Rewrite `model` in place; what was done."""
    rewrite = Rewrite(model, weights, data, static)
    rewrite.run()
    return rewrite

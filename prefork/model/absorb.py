"""What a convolution can take into itself: the per-channel arithmetic, and the Relu or Clip, that alone read it.
Loader's process (onnx).

Batch normalisation that an exporter wrote as Sub, Mul, Add is such arithmetic: exact in the weights, and else four
walks over a picture.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from prefork.model import external
from prefork.model.weights import Floats, Weights

ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})


@dataclass(frozen=True, slots=True)
class Absorbed:
    """A convolution with all it took: `weight` [channels, ...] and `bias` [channels] in fp32, the `nodes` that fall
    away, and `output`, the value it makes now."""

    weight: Floats
    bias: Floats
    nodes: tuple[NodeProto, ...]
    output: str


class Graph:
    """The main graph of a model, looked at from outside. `constants`: its constant tensors by name."""

    def __init__(self, model: ModelProto) -> None:
        listed = {value.name for value in model.graph.input}
        self.constants = {t.name: t for t in model.graph.initializer if t.name not in listed}
        self.opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
        self._outputs = {value.name for value in model.graph.output}
        self._users: dict[str, list[NodeProto]] = {}
        for node in model.graph.node:
            for name in set(self.reads(node)):
                self._users.setdefault(name, []).append(node)

    def reads(self, node: NodeProto) -> list[str]:
        """Every value that a node or a graph inside it reads."""
        inner = [name for n in external.inner_nodes(node) for name in n.input]
        return [name for name in (*node.input, *inner) if name]

    def takes(self, node: NodeProto) -> bool:
        """Whether it is a convolution of fp32 with constant weights."""
        return (
            node.op_type == "Conv"
            and not node.domain
            and all(self._is_fp32(name) for name in node.input[1:] if name)
            and node.input[0] not in self.constants
        )

    def _is_fp32(self, name: str) -> bool:
        return name in self.constants and self.constants[name].data_type == TensorProto.FLOAT

    def absorb(self, node: NodeProto, weights: Weights) -> Absorbed:
        """`node`, which `takes` said yes to, with all that it can take."""
        weight = np.array(weights.array(node.input[1]), np.float32)
        bias = np.zeros(len(weight), np.float32)
        if len(node.input) > 2 and node.input[2]:
            bias = np.array(weights.array(node.input[2]), np.float32)
        nodes: list[NodeProto] = []
        output, columns = node.output[0], (-1,) + (1,) * (weight.ndim - 1)
        while (user := self._only_user(output)) is not None:
            if self._cuts_at_zero(user, output):
                return Absorbed(weight, bias, (*nodes, user), user.output[0])
            if (factors := self._factors(user, output, weights, weight.shape)) is None:
                break
            times, plus = factors
            weight, bias = weight * times.reshape(columns), bias * times + plus
            nodes.append(user)
            output = user.output[0]
        return Absorbed(weight, bias, tuple(nodes), output)

    def cut(self, name: str) -> NodeProto | None:
        """The Relu, or Clip from 0, that alone reads it."""
        user = self._only_user(name)
        return user if user is not None and self._cuts_at_zero(user, name) else None

    def linear(self, node: NodeProto, weights: Weights) -> tuple[str, float, float] | None:
        """Input, multiplier and addend when `node` is arithmetic of a value with one number; None when it is not."""
        if node.domain or node.op_type not in ARITHMETIC or len(node.input) != 2:
            return None
        for index, name in enumerate(node.input):
            other = node.input[1 - index]
            if name in self.constants or not self._is_fp32(other) or list(self.constants[other].dims) not in ([], [1]):
                continue
            number = float(weights.array(other).reshape(-1)[0])
            match node.op_type, index:
                case "Add", _:
                    return name, 1.0, number
                case "Sub", 0:
                    return name, 1.0, -number
                case "Mul", _:
                    return name, number, 0.0
                case "Div", 0 if number:
                    return name, 1 / number, 0.0
        return None

    def _only_user(self, name: str) -> NodeProto | None:
        users = self._users.get(name, [])
        return users[0] if len(users) == 1 and name not in self._outputs else None

    def _cuts_at_zero(self, node: NodeProto, name: str) -> bool:
        """Relu, or Clip from 0: what a zero point at the lower end does by itself."""
        if node.domain or node.input[0] != name:
            return False
        if node.op_type == "Relu":
            return True
        if node.op_type != "Clip":
            return False
        if len(node.input) > 1 and (low := self.constants.get(node.input[1])) is not None:
            upper = node.input[2] if len(node.input) > 2 else ""
            return (
                not external.is_external(low)
                and bool(numpy_helper.to_array(low) == 0)
                and (not upper or upper in self.constants)
            )
        return any(a.name == "min" and a.f == 0 for a in node.attribute)

    def _factors(
        self, node: NodeProto, name: str, weights: Weights, shape: tuple[int, ...]
    ) -> tuple[Floats, Floats] | None:
        """Multiplier and addend of each channel when `node` is such arithmetic on `name`."""
        if node.domain or node.op_type not in ARITHMETIC or len(node.input) != 2:
            return None
        first = node.input[0] == name
        other = node.input[1 if first else 0]
        if not self._is_fp32(other) or (node.op_type == "Div" and not first):
            return None
        dims, count = list(self.constants[other].dims), shape[0]
        aligned = [1] * (len(shape) - len(dims)) + dims
        if len(aligned) != len(shape) or any(
            d != (count if axis == 1 else 1) for axis, d in enumerate(aligned) if d != 1
        ):
            return None
        values: Floats = np.broadcast_to(np.array(weights.array(other), np.float32).reshape(-1), (count,))
        one: Floats = np.ones(count, np.float32)
        zero: Floats = np.zeros(count, np.float32)
        match node.op_type:
            case "Add":
                return one, values
            case "Sub":
                return (one, -values) if first else (-one, values)
            case "Mul":
                return values, zero
        return (1 / values).astype(np.float32), zero

    def replace_nodes(self, model: ModelProto, nodes: Iterable[NodeProto]) -> None:
        """Make `nodes` those of the main graph, and remove what nothing reads any more."""
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        self.drop_unused(model)

    def drop_unused(self, model: ModelProto) -> None:
        """Remove initializers of the main graph that nothing reads any more."""
        used = {value.name for value in model.graph.output} | {value.name for value in model.graph.input}
        used.update(self._all_reads(model.graph.node))
        kept = [t for t in model.graph.initializer if t.name in used]
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)

    def _all_reads(self, nodes: Iterable[NodeProto]) -> set[str]:
        return {name for node in nodes for name in self.reads(node)}

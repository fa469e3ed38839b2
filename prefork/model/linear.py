"""One matrix product in int8, by the treatment its input needs. Loader's process (onnx).

Activations are uint8 with one scale a tensor, which is exact enough until a few values are far larger than the rest.
Two remedies, apart or together: `smooth` divides each input channel by its own factor and multiplies the weight's row
with it (SmoothQuant, arXiv:2211.10438), so that large channels become a matter of the weights; rows scales each row by
its largest magnitude and the product back, so that one large token costs the others nothing (as ZeroQuant's token-wise
quantization, arXiv:2206.01861). Both are elementwise work beside a product, far cheaper than the product in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper

from prefork.model.weights import Floats

Kind: TypeAlias = Literal["fp32", "int8", "rows"]
Add: TypeAlias = Callable[[str, npt.NDArray[Any]], str]

TINY = 1e-12  # what a row of zeros is divided by
TOP, ZERO = 127, 128  # of a row's uint8 values: [-1, 1] as 1..255
MICROSOFT = "com.microsoft"


@dataclass(frozen=True, slots=True, eq=False)
class Treatment:
    """`smooth`: a factor for each input channel, None for none. `error`: what it was measured to cost, relative."""

    kind: Kind
    smooth: Floats | None = None
    error: float = 0.0

    @property
    def name(self) -> str:
        return self.kind if self.smooth is None else f"smooth-{self.kind}"


PLAIN = Treatment("int8")


class Activation(NamedTuple):
    """Names of a quantized activation, its scale, zero point and, when rows were scaled, the rows' factors."""

    data: str
    scale: str
    zero: str
    rows: str = ""


def quantize_activation(
    name: str, treatment: Treatment, tag: str, add: Add, opset: int
) -> tuple[list[NodeProto], Activation]:
    """The nodes that quantize the activation `name`; `add` stores a constant."""
    base = f"{name}_{treatment.name}{tag}"
    made: list[NodeProto] = []
    if treatment.smooth is not None:
        inverse = add(f"{base}_by", (1 / treatment.smooth).astype(np.float32))
        made.append(helper.make_node("Mul", [name, inverse], [f"{base}_smooth"], f"{base}_smooth_node"))
        name = f"{base}_smooth"
    if treatment.kind == "int8":
        names = Activation(base, f"{base}_scale", f"{base}_zero")
        return [*made, helper.make_node("DynamicQuantizeLinear", [name], list(names[:3]), f"{base}_node")], names
    return [*made, *_rows(name, base, add, opset)], Activation(base, f"{base}_scale", f"{base}_zero", f"{base}_rows")


def _rows(name: str, base: str, add: Add, opset: int) -> list[NodeProto]:
    scale = add(f"{base}_scale", np.array(1 / TOP, np.float32))
    zero = add(f"{base}_zero", np.array(ZERO, np.uint8))
    tiny = add(f"{base}_tiny", np.array(TINY, np.float32))
    reduce = helper.make_node("ReduceMax", [f"{base}_abs"], [f"{base}_max"], f"{base}_max_node", keepdims=1)
    if opset >= 18:  # axes became an input
        reduce.input.append(add(f"{base}_axes", np.array([-1], np.int64)))
    else:
        reduce.attribute.append(helper.make_attribute("axes", [-1]))
    return [
        helper.make_node("Abs", [name], [f"{base}_abs"], f"{base}_abs_node"),
        reduce,
        helper.make_node("Max", [f"{base}_max", tiny], [f"{base}_rows"], f"{base}_rows_node"),
        helper.make_node("Div", [name, f"{base}_rows"], [f"{base}_unit"], f"{base}_unit_node"),
        helper.make_node("QuantizeLinear", [f"{base}_unit", scale, zero], [base], f"{base}_node"),
    ]


def multiply(node: NodeProto, taken: Activation, weight: tuple[str, str, str]) -> list[NodeProto]:
    """MatMul or Gemm in the integer form that onnxruntime fuses. `weight`: names of values, scales, zero points."""
    out = node.output[0]
    bias = node.input[2] if len(node.input) > 2 and node.input[2] else ""
    product = f"{out}_unbiased" if bias else out
    made = _by_rows(out, product, taken, weight) if taken.rows else _by_tensor(out, product, taken, weight)
    if bias:
        made.append(helper.make_node("Add", [product, bias], [out], f"{out}_bias"))
    return made


def _by_tensor(out: str, product: str, taken: Activation, weight: tuple[str, str, str]) -> list[NodeProto]:
    whole, real, scale = f"{out}_int32", f"{out}_float", f"{out}_scale"
    return [
        helper.make_node("MatMulInteger", [taken.data, weight[0], taken.zero, weight[2]], [whole], f"{out}_product"),
        helper.make_node("Cast", [whole], [real], f"{out}_cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", [taken.scale, weight[1]], [scale], f"{out}_scales"),
        helper.make_node("Mul", [real, scale], [product], f"{out}_rescale"),
    ]


def _by_rows(out: str, product: str, taken: Activation, weight: tuple[str, str, str]) -> list[NodeProto]:
    # the fused operator at once: both scales are constants here, and folding their product would hide the pattern
    inputs = [taken.data, weight[0], taken.scale, weight[1], taken.zero, weight[2]]
    unit = f"{out}_unit"
    return [
        helper.make_node("MatMulIntegerToFloat", inputs, [unit], f"{out}_product", domain=MICROSOFT),
        helper.make_node("Mul", [unit, taken.rows], [product], f"{out}_rescale"),
    ]

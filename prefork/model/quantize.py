"""Dynamic int8, and what every form has in common. Loader's process (onnx).

Weights are stored as int8 with one scale for each output channel, activations are quantized as uint8 at each run. Kinds
that gain on CPU and are taken: MatMul and Gemm (2 to 4 times faster for encoders), LSTM (1.6 times), fused Attention.
Left alone: Conv (ConvInteger is 5 to 13 times slower than Conv), Gather (a look-up gains no time, and the weights are
shared by all workers anyway).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from prefork.errors import ModelError
from prefork.model import external, linear, optimize
from prefork.model.linear import PLAIN, Activation, Treatment
from prefork.model.processor import processor
from prefork.model.repository import Source
from prefork.model.weights import Floats, Weights, per_channel

MIN_ELEMENTS = 128 * 128  # below it a run gains nothing at any batch size: quantizing the activations costs more
SMALL = 64  # bytes that stay in the graph
MIN_OPSET = 11  # DynamicQuantizeLinear
MICROSOFT = "com.microsoft"
DOMAINS = ("", MICROSOFT)
QUANTIZED = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "MatMulInteger", "ConvInteger", "MatMulNBits", "MatMulBnb4"}
)


@dataclass(frozen=True, slots=True)
class Form:
    """A model file to optimise and pack. `name`: see Manifest.form; `notes`: what was left out, and why."""

    name: str
    path: Path
    notes: tuple[str, ...] = ()


Progress: TypeAlias = Callable[[str], None]
Make: TypeAlias = Callable[[Source, Path, Progress], Form]


def as_it_is(source: Source, folder: Path, progress: Progress) -> Form:
    """The source itself."""
    return Form("quantized-source" if already_quantized(source.skeleton) else "fp32", source.path)


def int8_dynamic(source: Source, folder: Path, progress: Progress) -> Form:
    """MatMul, Gemm, LSTM and Attention in int8; the source itself, with a note, where there is nothing to gain."""
    if refused := refusal(source):
        return refused
    progress("quantizing")
    try:
        model = folded(source, folder)
    except ModelError as e:
        return Form("fp32", source.path, (f"not quantized: {e.message}",))
    with (folder / "int8.bin").open("wb") as file:
        rewrite = Rewrite(folder, external.DataFile(file, "int8.bin"), reduce_range=not processor().vnni)
        rewrite.model(model)
    notes = tuple(f"left in fp32: {what}, {count} nodes" for what, count in sorted(rewrite.left.items()))
    if not rewrite.done:
        return Form("fp32", source.path, ("not quantized: no operator that would gain", *notes))
    path = folder / "int8.onnx"
    path.write_bytes(model.SerializeToString())
    if rewrite.reduce_range:
        notes += ("weights use 7 bits: this processor has no VNNI and 8 bits could overflow",)
    return Form("int8-dynamic", path, notes)


def refusal(source: Source) -> Form | None:
    """The source as it is, with the reason why no form is made of it; None when one may be."""
    if kinds := already_quantized(source.skeleton):
        return Form("quantized-source", source.path, (f"not quantized: it already is ({', '.join(kinds)})",))
    if (opset := opset_of(source.skeleton)) < MIN_OPSET:
        return Form("fp32", source.path, (f"not quantized: opset {opset} is older than {MIN_OPSET}",))
    return None


def already_quantized(model: ModelProto) -> list[str]:
    """The quantized operators in the model."""
    kinds = {n.op_type for n in external.nodes(model)}
    return sorted(k for k in kinds if k in QUANTIZED or k.startswith(("QLinear", "DynamicQuantize", "QAttention")))


def folded(source: Source, folder: Path) -> ModelProto:
    """The model after ORT_ENABLE_BASIC: Constant nodes lifted, constants folded, functions inlined, weights in a file.

    Raises ModelError when onnxruntime cannot open or save it."""
    saved = optimize.Saved(folder / "basic.onnx", folder / "basic.bin", optimized=True, packed=False)
    optimize.open_file(source.path, ort.GraphOptimizationLevel.ORT_ENABLE_BASIC, save=saved, prepack=False)
    return external.parse(saved.graph.read_bytes())


def opset_of(model: ModelProto) -> int:
    """The version of the ONNX operators that it uses; MIN_OPSET when it names none."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), MIN_OPSET)


class Rewrite:
    """One walk over a model, graph by graph. `done` and `left` count nodes, by kind and by reason.

    `plan`: how to treat a node, by the name of its first output; `rest`: those that it does not name. `treated` counts
    nodes by treatment."""

    def __init__(
        self,
        folder: Path,
        data: external.DataFile,
        *,
        reduce_range: bool,
        plan: Mapping[str, Treatment] | None = None,
        rest: Treatment = PLAIN,
    ) -> None:
        self.reduce_range = reduce_range
        self._plan, self._rest = plan or {}, rest
        self.treated: dict[str, int] = {}
        self._opset = MIN_OPSET
        self.done: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self._folder, self._data, self._graphs = folder, data, 0

    def model(self, model: ModelProto) -> None:
        """Quantize the nodes of all graphs, in place."""
        self._opset = opset_of(model)
        for graph in reversed(list(external.graphs(model))):  # inner ones first: changing a graph copies its nodes
            self.graph(graph)
        if self.done and not any(o.domain == MICROSOFT for o in model.opset_import):
            model.opset_import.add(domain=MICROSOFT, version=1)

    def graph(self, graph: GraphProto) -> None:
        """Quantize the nodes of one graph, not of its subgraphs, in place."""
        rewriters = {"MatMul": self._matmul, "Gemm": self._gemm, "LSTM": self._lstm, "Attention": self._attention}
        self._graphs += 1
        top, tag = 63 if self.reduce_range else 127, f"g{self._graphs}"
        local = Local(graph, self._folder, self._data, top=top, tag=tag, opset=self._opset)
        nodes: list[NodeProto] = []
        for node in graph.node:
            rewrite = rewriters.get(node.op_type) if node.domain == DOMAINS[node.op_type == "Attention"] else None
            made = self._treat(rewrite, local, node) if rewrite else "no kind"
            if not isinstance(made, str):
                self.done[node.op_type] = self.done.get(node.op_type, 0) + 1
                nodes.extend(made)
                continue
            if rewrite:
                what = f"{node.op_type}: {made}"
                self.left[what] = self.left.get(what, 0) + 1
            nodes.append(node)
        del graph.node[:]
        graph.node.extend(nodes)
        local.drop_unused()

    def _treat(self, rewrite: Rewriter, local: Local, node: NodeProto) -> list[NodeProto] | str:
        treatment = self._of(node)
        made = "costs accuracy" if treatment.kind == "fp32" else rewrite(local, node)
        if not isinstance(made, str):
            self.treated[treatment.name] = self.treated.get(treatment.name, 0) + 1
        return made

    def _of(self, node: NodeProto) -> Treatment:
        return self._plan.get(node.output[0], self._rest)

    def _matmul(self, local: Local, node: NodeProto) -> list[NodeProto] | str:
        refusal = local.refuses(node.input[1], rank=2)
        return refusal or local.multiply(node, self._of(node))

    def _gemm(self, local: Local, node: NodeProto) -> list[NodeProto] | str:
        given = attributes(node)
        if given.get("transA") or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
            return "alpha, beta or transA"
        refusal = local.refuses(node.input[1], rank=2)
        across = bool(given.get("transB"))
        return refusal or local.multiply(node, self._of(node), across=across)

    def _lstm(self, local: Local, node: NodeProto) -> list[NodeProto] | str:
        if attributes(node).get("layout"):
            return "batch-first layout"
        for name in node.input[1:3]:
            if refusal := local.refuses(name, rank=3):
                return refusal
        inputs = [*node.input, *[""] * (8 - len(node.input))]
        scales = []
        for index in (1, 2):
            inputs[index], scale, zero = local.quantized(inputs[index], axis=2, across=True)
            scales += [scale, zero]
        return [_contrib("DynamicQuantizeLSTM", [*inputs, *scales], node)]

    def _attention(self, local: Local, node: NodeProto) -> list[NodeProto] | str:
        extra = [name for name in node.input[4:] if name]
        if extra or attributes(node).keys() - {"num_heads", "unidirectional", "scale"}:
            return "past, bias or sizes that QAttention lacks"
        if refusal := local.refuses(node.input[1], rank=2):
            return refusal
        weight, scale, zero = local.quantized(node.input[1], axis=0)
        before, taken = local.activation(node.input[0])
        mask = node.input[3] if len(node.input) > 3 else ""
        inputs = [taken.data, weight, node.input[2], taken.scale, scale, mask, taken.zero, zero]
        return [*before, _contrib("QAttention", inputs, node)]


class Local:
    """One graph's weights and activations while it is rewritten; each is quantized once. `tag` keeps the names that it
    makes apart from those of outer graphs, which a subgraph may not use again."""

    def __init__(
        self, graph: GraphProto, folder: Path, data: external.DataFile, *, top: int, tag: str, opset: int
    ) -> None:
        self._graph, self._data, self._top, self._tag, self._opset = graph, data, top, tag, opset
        listed = {value.name for value in graph.input}
        self._weights = Weights({t.name: t for t in graph.initializer if t.name not in listed}, folder)
        self._made: dict[tuple[str, int, str], tuple[str, str, str]] = {}
        self._activations: dict[tuple[str, str], Activation] = {}

    def refuses(self, name: str, *, rank: int) -> str:
        """Why the weight `name` is not quantized; "" when it can be."""
        tensor = self._weights.tensors.get(name)
        if tensor is None:
            return "weight is computed, or of an outer graph"
        if tensor.data_type != TensorProto.FLOAT:
            return "weight is not fp32"
        if len(tensor.dims) != rank:
            return f"weight has rank {len(tensor.dims)}"
        return "weight is small" if np.prod(tensor.dims) < MIN_ELEMENTS else ""

    def quantized(
        self, name: str, *, axis: int, across: bool = False, smooth: tuple[str, Floats] | None = None
    ) -> tuple[str, str, str]:
        """Names of int8 weight, its scales and zero points; `axis` is reduced; `across`: last two axes are swapped.

        `smooth`: the name of an activation and the factors by which the weight's rows along `axis` are multiplied."""
        key = (name, axis, smooth[0] if smooth else "")
        if key not in self._made:
            weight = self._weights.array(name)
            if smooth is not None:
                weight = weight * np.expand_dims(smooth[1], 1 - axis)
            values, scales = per_channel(weight, axis, self._top, swap=across)
            tag = f"{axis}{key[2]}{self._tag}"
            self._made[key] = (
                self._add(f"{name}_int8_{tag}", values),
                self._add(f"{name}_scale_{tag}", scales),
                self._add(f"{name}_zero_{tag}", np.zeros(scales.shape, np.int8)),
            )
        return self._made[key]

    def _add(self, name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> str:
        number = helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor = self._graph.initializer.add(name=name, data_type=number, dims=array.shape)
        if array.nbytes <= SMALL:  # shape inference reads axes, and only from the graph itself
            tensor.raw_data = array.tobytes()
        else:
            self._data.append(tensor, [np.ascontiguousarray(array).data])
        return name

    def activation(self, name: str, treatment: Treatment = PLAIN) -> tuple[list[NodeProto], Activation]:
        """The nodes that quantize it, the first time it is asked for, and the names of value, scale and zero point."""
        key = (name, treatment.name)
        if key in self._activations:
            return [], self._activations[key]
        made, self._activations[key] = linear.quantize_activation(name, treatment, self._tag, self._add, self._opset)
        return made, self._activations[key]

    def multiply(self, node: NodeProto, treatment: Treatment, *, across: bool = False) -> list[NodeProto]:
        """MatMul or Gemm in int8; `across`: the weight is [columns, rows]."""
        smooth = None if treatment.smooth is None else (node.input[0], treatment.smooth)
        weight = self.quantized(node.input[1], axis=int(across), across=across, smooth=smooth)
        before, taken = self.activation(node.input[0], treatment)
        return before + linear.multiply(node, taken, weight)

    def drop_unused(self) -> None:
        """Remove the fp32 weights that nothing uses any more."""
        used = {name for node in _all_nodes(self._graph) for name in node.input} | {v.name for v in self._graph.output}
        kept = [t for t in self._graph.initializer if t.name in used]
        del self._graph.initializer[:]
        self._graph.initializer.extend(kept)


Rewriter: TypeAlias = Callable[[Local, NodeProto], "list[NodeProto] | str"]


def _all_nodes(graph: GraphProto) -> list[NodeProto]:
    return list(external.nodes(ModelProto(graph=graph)))


def _contrib(op: str, inputs: list[str], node: NodeProto) -> NodeProto:
    """`node` as the operator `op` of com.microsoft, with the same outputs and attributes (but `layout`, checked)."""
    made = helper.make_node(op, inputs, list(node.output), node.name, domain=MICROSOFT)
    made.attribute.extend(a for a in node.attribute if a.name != "layout")
    return made


def attributes(node: NodeProto) -> dict[str, object]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}

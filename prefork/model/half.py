"""Weights and arithmetic in float16: products, convolutions and look-ups, with what stands between them. Loader's
process (onnx).

Inputs, outputs and all other operators stay fp32; a Cast stands at each border. Softmax, norms and sums are among the
others, for their range, and so is elementwise work that reads fp32, so that what onnxruntime fuses there stays whole.
A weight that float16 would turn into infinity leaves its node in fp32. Where onnxruntime has no float16 kernel it casts
the weights back when it optimises, and computes in fp32: `kernels` tells where.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from prefork.errors import ModelError
from prefork.model import calibrate, external, optimize, quantize
from prefork.model.absorb import Graph
from prefork.model.qlinear import id_of
from prefork.model.quantize import MIN_ELEMENTS, Form, Progress
from prefork.model.repository import Source
from prefork.model.weights import Weights

LARGEST = float(np.finfo(np.float16).max)
HEAVY = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Gather"})  # worth a Cast of what they read
ARITHMETIC = frozenset({"Add", "Relu", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat"})
MOVES = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"})  # their other inputs are whole numbers
ONE_REAL = MOVES | {"Gather", "MaxPool"}
HALF = TensorProto.FLOAT16


class Overflow(ModelError):
    """A weight that float16 cannot hold."""


@dataclass
class Done:
    """Nodes by kind, and those left in fp32 with the reason."""

    kinds: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def half_precision(source: Source, folder: Path, progress: Progress) -> Form:
    """The form fp16; the source itself, with a note, where nothing can be taken."""
    if refused := quantize.refusal(source):
        return refused
    progress("converting to float16")
    try:
        model = quantize.folded(source, folder)
        with (folder / "half.bin").open("wb") as file:
            done = as_half(model, folder, external.DataFile(file, "half.bin"))
    except ModelError as e:
        return Form("fp32", source.path, (f"not converted: {e.message}",))
    notes = tuple(f"left in fp32: {what}" for what in done.left)
    if not done.kinds:
        return Form("fp32", source.path, ("not converted: no operator that would gain", *notes))
    path = folder / "half.onnx"
    path.write_bytes(model.SerializeToString())
    return Form("fp16", path, (*notes, *without_kernel(done, kernels(folder))))


def without_kernel(done: Done, known: frozenset[str]) -> tuple[str, ...]:
    """What is to be said of the kinds in `done` that onnxruntime computes in fp32; nothing without any."""
    missing = sorted(kind for kind in done.kinds if kind in KERNELS and kind not in known)
    if not missing:
        return ()
    return (f"{', '.join(missing)} computed in fp32 all the same: onnxruntime has no such kernel for this processor",)


def as_half(model: ModelProto, folder: Path, data: external.DataFile) -> Done:
    """Rewrite the main graph of `model`, whose external data lies in `folder`, in place. Raises ModelError when its
    types cannot be told."""
    rewrite = Rewrite(model, Weights(calibrate.fp32_initializers(model), folder), data)
    rewrite.run()
    return rewrite.done


class Rewrite:
    """One walk over the main graph."""

    def __init__(self, model: ModelProto, weights: Weights, data: external.DataFile) -> None:
        self.done = Done()
        self._model, self._weights, self._data = model, weights, data
        self._graph = Graph(model)
        self._real = _real(model)
        self._halves: dict[str, str] = {}  # float16 name of a value, or of a constant
        self._made: set[str] = set()  # values that exist in float16 only, until something reads them in fp32
        self._out: list[NodeProto] = []

    def run(self) -> None:
        """Rewrite the model in place."""
        for node in self._model.graph.node:
            try:
                taken = self._takes(node) and self._take(node)
            except Overflow as e:
                self.done.left.append(f"{node.name or id_of(node)}: {e.message}")
                taken = False
            if not taken:
                self._as_fp32(self._graph.reads(node))
                self._out.append(node)
        self._as_fp32(value.name for value in self._model.graph.output)
        self._graph.replace_nodes(self._model, self._out)

    def _takes(self, node: NodeProto) -> bool:
        if node.domain or len([name for name in node.output if name]) != 1:
            return False
        values = self._values(node)
        if not values or any(name not in self._real and name not in self._weights.tensors for name in values):
            return False
        if node.op_type in HEAVY:
            return self._pays(node)
        flowing = [name for name in values if name not in self._graph.constants]
        return node.op_type in ARITHMETIC | MOVES and bool(flowing) and all(name in self._halves for name in flowing)

    def _values(self, node: NodeProto) -> list[str]:
        """The inputs that become float16."""
        return [name for name in (node.input[:1] if node.op_type in ONE_REAL else node.input) if name]

    def _pays(self, node: NodeProto) -> bool:
        """Whether its weight is large enough, where it has one; a look-up without a table only moves values."""
        constants = [self._weights.tensors[n] for n in self._values(node) if n in self._weights.tensors]
        if node.op_type in ("MatMul", "Gemm", "Gather"):
            large = any(np.prod(tensor.dims) >= MIN_ELEMENTS for tensor in constants)
            return large or (node.op_type == "MatMul" and not constants)
        return bool(constants)

    def _take(self, node: NodeProto) -> bool:
        values = self._values(node)
        for name in values:  # first, as this may refuse
            if name in self._graph.constants:
                self._constant(name)
        made = NodeProto()
        made.CopyFrom(node)
        for index, name in enumerate(node.input):
            if name and (index == 0 or node.op_type not in ONE_REAL):
                made.input[index] = self._half(name)
        made.output[0] = f"{node.output[0]}_half"
        self._out.append(made)
        self._halves[node.output[0]] = made.output[0]
        self._made.add(node.output[0])
        self._real.add(node.output[0])
        self.done.kinds[node.op_type] = self.done.kinds.get(node.op_type, 0) + 1
        return True

    def _half(self, name: str) -> str:
        if name not in self._halves:
            self._halves[name] = f"{name}_half"
            self._out.append(_cast(name, self._halves[name], HALF))
        return self._halves[name]

    def _constant(self, name: str) -> None:
        """Store it in float16. Raises Overflow."""
        if name in self._halves:
            return
        values = self._weights.array(name)
        finite = np.abs(values[np.isfinite(values)])
        if finite.size and float(finite.max()) > LARGEST:
            raise Overflow(f"initializer {name!r} holds {float(finite.max()):g}, float16 ends at {LARGEST:g}")
        array = np.ascontiguousarray(values.astype(np.float16))
        tensor = self._model.graph.initializer.add(name=f"{name}_half", data_type=HALF, dims=array.shape)
        if array.nbytes <= quantize.SMALL:
            tensor.raw_data = array.tobytes()
        else:
            self._data.append(tensor, [array.data])
        self._halves[name] = tensor.name

    def _as_fp32(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._made:
                self._made.remove(name)
                self._out.append(_cast(self._halves[name], name, TensorProto.FLOAT))


def _cast(name: str, to: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [name], [to], f"{to}_cast", to=kind)


def _real(model: ModelProto) -> set[str]:
    """The fp32 values of the main graph, as far as ONNX's inference tells. Raises ModelError."""
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception as e:  # its exceptions share no base class but this one
        raise ModelError(f"the types of its values cannot be told: {e}") from None
    values = (*graph.input, *graph.value_info, *graph.output)
    return {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}


KERNELS = {
    "MatMul": ((1, 4), (4, 4)),
    "Gemm": ((1, 4), (4, 4)),
    "Conv": ((1, 1, 4, 4), (1, 1, 3, 3)),
}  # shapes of input and weight to ask with


def kernels(folder: Path) -> frozenset[str]:
    """The kinds of KERNELS that onnxruntime computes in float16 on this processor: it puts no Cast beside them."""
    return frozenset(kind for kind in KERNELS if not _is_cast(kind, folder))


def _is_cast(kind: str, folder: Path) -> bool:
    shape, dims = KERNELS[kind]
    weight = numpy_helper.from_array(np.ones(dims, np.float16), "w")
    values = [helper.make_tensor_value_info(name, HALF, dims) for name, dims in (("x", shape), ("y", None))]
    graph = helper.make_graph([helper.make_node(kind, ["x", "w"], ["y"])], kind, values[:1], values[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    asked, saved = folder / "kernel.onnx", optimize.Saved(folder / "asked.onnx", folder / "asked.bin", True, False)
    asked.write_bytes(model.SerializeToString())
    try:
        optimize.open_file(asked, ort.GraphOptimizationLevel.ORT_ENABLE_ALL, save=saved)
    except ModelError:
        return True
    return any(node.op_type == "Cast" for node in external.parse(saved.graph.read_bytes()).graph.node)

"""The onnx package's backend test cases as plain values: models with inputs and the outputs that must come.

Node cases are made by onnx.backend.test.case (about 8 s for all of them), the others are read from its data folder.
Imports onnx, never onnxruntime, so that a parent may load cases and then fork.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, OptionalProto, SequenceProto, TensorProto, TypeProto, numpy_helper

from prefork.tensor import BY_ONNX
from prefork.value import Value

Dataset = tuple[dict[str, Value], dict[str, Value]]
FOLDERS = ("simple", "pytorch-converted", "pytorch-operator")


@dataclass
class Case:
    """`datasets`: pairs of inputs and outputs by name; a value is an array, a list (sequence) or None (optional).

    `dtypes`: wire names of the element types of all inputs and outputs."""

    name: str
    model: bytes
    rtol: float
    atol: float
    datasets: list[Dataset]
    dtypes: frozenset[str] = field(default_factory=frozenset)

    def save(self, folder: Path) -> Path:
        """Write the model as `folder/NAME.onnx`."""
        path = folder / f"{self.name}.onnx"
        path.write_bytes(self.model)
        return path


def load_cases(every: int = 1, part: tuple[int, int] = (1, 1)) -> list[Case]:
    """The cases in the order of their names: part k of n, and of those each `every`-th. With `every` above 1 also the
    first three of each element type, so that a small part still has all types."""
    cases = [case for k, case in enumerate(_all_cases()) if k % part[1] == part[0] - 1]
    if every == 1:
        return cases
    chosen = {case.name for case in cases[::every]}
    for dtype in {dtype for case in cases for dtype in case.dtypes}:
        chosen.update([case.name for case in cases if dtype in case.dtypes][:3])
    return [case for case in cases if case.name in chosen]


@cache
def _all_cases() -> list[Case]:
    return sorted([*_node_cases(), *_file_cases()], key=lambda case: case.name)


def _node_cases() -> list[Case]:
    from onnx.backend.test.loader import load_node_model_tests  # makes the cases, so only when they are asked for

    with warnings.catch_warnings():  # casts that overflow on purpose
        warnings.simplefilter("ignore")
        tests = load_node_model_tests()
    return [_case(t.name, t.model, t.rtol, t.atol, t.data_sets or []) for t in tests if t.model is not None]


def _file_cases() -> list[Case]:
    from onnx.backend.test.loader import load_model_tests

    cases = []
    for test in (test for kind in FOLDERS for test in load_model_tests(kind=kind)):
        if test.model_dir is None:
            continue
        folder = Path(test.model_dir)
        model = onnx.load(folder / "model.onnx")
        sets = [
            (_read(data, "input", model.graph.input), _read(data, "output", model.graph.output))
            for data in sorted(folder.glob("test_data_set_*"))
        ]
        cases.append(_case(test.name, model, test.rtol, test.atol, sets))
    return cases


def _read(folder: Path, what: str, infos: Sequence[onnx.ValueInfoProto]) -> list[Value]:
    readers: dict[str, tuple[type[Any], Callable[[Any], Value]]] = {
        "tensor_type": (TensorProto, numpy_helper.to_array),
        "sequence_type": (SequenceProto, numpy_helper.to_list),
        "optional_type": (OptionalProto, numpy_helper.to_optional),
    }
    values = []
    for index in range(len(list(folder.glob(f"{what}_*.pb")))):
        message, convert = readers[str(infos[index].type.WhichOneof("value"))]
        proto = message()
        proto.ParseFromString((folder / f"{what}_{index}.pb").read_bytes())
        values.append(convert(proto))
    return values


def _case(name: str, model: ModelProto, rtol: float, atol: float, sets: Sequence[Any]) -> Case:
    datasets = []
    for inputs, outputs in sets:
        given = {info.name: _value(value) for info, value in zip(model.graph.input, inputs, strict=False)}
        wanted = {info.name: _value(value) for info, value in zip(model.graph.output, outputs, strict=False)}
        datasets.append((given, wanted))
    infos = [*model.graph.input, *model.graph.output]
    dtypes = frozenset(BY_ONNX[number].name for info in infos for number in _element_types(info.type) if number)
    return Case(name, model.SerializeToString(), rtol, atol, datasets, dtypes)


def _value(value: Any) -> Value:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    return value if value is None else np.asarray(value)


def _element_types(kind: TypeProto) -> list[int]:
    which = kind.WhichOneof("value")
    if which == "tensor_type":
        return [kind.tensor_type.elem_type]
    if which == "sequence_type":
        return _element_types(kind.sequence_type.elem_type)
    if which == "optional_type":
        return _element_types(kind.optional_type.elem_type)
    if which == "map_type":
        return [kind.map_type.key_type, *_element_types(kind.map_type.value_type)]
    return []

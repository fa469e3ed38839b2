"""ONNX value types as TensorSpecs. Loader's process only (onnx)."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto, ModelProto, TensorShapeProto, TypeProto, ValueInfoProto

from prefork.errors import ModelError
from prefork.model.manifest import Dim, TensorSpec
from prefork.tensor import BY_ONNX

OVERRIDABLE_SINCE = 4  # before this IR version every initializer is also listed as an input, and is a constant


def inputs(model: ModelProto) -> tuple[TensorSpec, ...]:
    """What a request may give, in the model's order; raises ModelError for a type that has no TensorSpec."""
    asked, constants = set(names(model)), initializer_names(model.graph)
    return tuple(spec(value, default=value.name in constants) for value in model.graph.input if value.name in asked)


def names(model: ModelProto) -> list[str]:
    """Names of the inputs that `inputs` gives."""
    constants = initializer_names(model.graph) if model.ir_version < OVERRIDABLE_SINCE else set()
    return [value.name for value in model.graph.input if value.name not in constants]


def outputs(model: ModelProto) -> tuple[TensorSpec, ...]:
    """What an answer holds, in the model's order; raises as `inputs`."""
    return tuple(spec(value) for value in model.graph.output)


def initializer_names(graph: GraphProto) -> set[str]:
    return {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}


def spec(value: ValueInfoProto, *, default: bool = False) -> TensorSpec:
    """The spec of one value; raises ModelError for sparse tensors, opaque types and deeper nesting."""
    kind = value.type
    optional = kind.WhichOneof("value") == "optional_type"
    if optional:
        kind = kind.optional_type.elem_type
    match kind.WhichOneof("value"):
        case "tensor_type":
            return _tensor(value.name, "tensor", kind.tensor_type, optional, default)
        case "sequence_type" if kind.sequence_type.elem_type.HasField("tensor_type"):
            return _tensor(value.name, "sequence", kind.sequence_type.elem_type.tensor_type, optional, default)
        case "map_type":
            return _map(value.name, "map", kind.map_type, optional, default)
        case "sequence_type" if kind.sequence_type.elem_type.HasField("map_type"):
            return _map(value.name, "maps", kind.sequence_type.elem_type.map_type, optional, default)
    raise ModelError(
        f"value {value.name!r}: expected a tensor, a sequence of tensors, a map or a sequence of maps, "
        f"found {kind.WhichOneof('value') or 'no type'}"
    )


def _tensor(name: str, kind: str, tensor: TypeProto.Tensor, optional: bool, default: bool) -> TensorSpec:
    shape = dims(tensor.shape) if tensor.HasField("shape") else None
    return TensorSpec(
        name, "sequence" if kind == "sequence" else "tensor", _dtype(name, tensor.elem_type), shape, optional, default
    )


def _map(name: str, kind: str, entries: TypeProto.Map, optional: bool, default: bool) -> TensorSpec:
    if not entries.value_type.HasField("tensor_type"):
        raise ModelError(f"value {name!r}: expected a map of tensors, found another nesting")
    return TensorSpec(
        name,
        "maps" if kind == "maps" else "map",
        _dtype(name, entries.value_type.tensor_type.elem_type),
        None,
        optional,
        default,
        _dtype(name, entries.key_type),
    )


def _dtype(name: str, number: int) -> str:
    if number not in BY_ONNX:
        raise ModelError(f"value {name!r}: element type {number} is not known")
    return BY_ONNX[number].name


def dims(shape: TensorShapeProto) -> tuple[Dim, ...]:
    """Sizes and names; None for a dimension with neither, a negative size, or the name "?"."""
    return tuple(_dim(dim) for dim in shape.dim)


def _dim(dim: TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    return dim.dim_param if dim.dim_param not in ("", "?") else None


def op_counts(kinds: Iterable[str]) -> dict[str, int]:
    """How many of each, most frequent first, then by name."""
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

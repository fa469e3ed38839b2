"""Where the bytes of a model's tensors lie: in the graph, or in a file beside it. Loader's process only (onnx).

ONNX external data: https://onnx.ai/onnx/repo-docs/ExternalData.html. onnxruntime adds, for each pre-packed copy of a
weight, an entry with key `prepacked_N` and value `kernel+hash|offset;length;checksum[|offset;length;checksum...]` in
the same file as the raw bytes (onnxruntime/core/framework/tensor_external_data_info.cc).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from prefork.errors import ModelError
from prefork.model.manifest import ExternalTensor
from prefork.tensor import BY_ONNX

PAGE = 4096
CHUNK = 1 << 24
PREPACKED = "prepacked"


def nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Every node: of the graph, its subgraphs and the model's functions."""
    yield from _nodes(model.graph.node)
    for function in model.functions:
        yield from _nodes(function.node)


def inner_nodes(node: NodeProto) -> Iterator[NodeProto]:
    """Every node of the graphs inside `node`."""
    for attribute in node.attribute:
        for graph in _subgraphs(attribute):
            yield from _nodes(graph.node)


def _nodes(run: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in run:
        yield node
        for attribute in node.attribute:
            for graph in _subgraphs(attribute):
                yield from _nodes(graph.node)


def _subgraphs(attribute: AttributeProto) -> Iterator[GraphProto]:
    if attribute.type == AttributeProto.GRAPH:
        yield attribute.g
    elif attribute.type == AttributeProto.GRAPHS:
        yield from attribute.graphs


def graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The graph and every subgraph."""
    yield model.graph
    for node in nodes(model):
        for attribute in node.attribute:
            yield from _subgraphs(attribute)


def initializers(model: ModelProto) -> Iterator[TensorProto]:
    """Every dense initializer, of subgraphs too."""
    for graph in graphs(model):
        yield from graph.initializer


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every TensorProto: initializers, the two parts of sparse ones, and attributes."""
    for graph in graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in nodes(model):
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == AttributeProto.TENSORS:
                yield from attribute.tensors
            elif attribute.type == AttributeProto.SPARSE_TENSOR:
                yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)


def is_external(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL


def entry(tensor: TensorProto, key: str) -> str:
    """The external_data value under `key`; empty when there is none."""
    return next((e.value for e in tensor.external_data if e.key == key), "")


def span(tensor: TensorProto) -> tuple[int, int]:
    """Offset and length in bytes of an external tensor in its file; raises ModelError when they are not numbers."""
    try:
        offset, length = int(entry(tensor, "offset") or 0), int(entry(tensor, "length") or nbytes(tensor))
    except ValueError:
        raise ModelError(f"tensor {tensor.name!r}: its external offset or length is not a number") from None
    if min(offset, length) < 0:
        raise ModelError(f"tensor {tensor.name!r}: external offset {offset} or length {length} is negative")
    return offset, length


def nbytes(tensor: TensorProto) -> int:
    """Bytes of the tensor in raw form (of strings: their UTF-8 bytes)."""
    if tensor.data_type == TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    kind = BY_ONNX.get(tensor.data_type)
    return kind.nbytes(math.prod(tensor.dims)) if kind else len(tensor.raw_data)


def drop_data(tensor: TensorProto) -> None:
    """Free the values that the message itself holds."""
    for name in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data"):
        tensor.ClearField(name)


def point(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Make `tensor` an external one."""
    drop_data(tensor)
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def raw_bytes(tensor: TensorProto) -> bytes:
    """The values that the message itself holds, in raw form."""
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    return numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data


class DataFile:
    """Appends tensors to one external data file; each starts on a boundary: a page when large, else 64 bytes."""

    def __init__(self, file: BinaryIO, location: str) -> None:
        self._file, self._location = file, location

    def append(self, tensor: TensorProto, data: Iterable[bytes | memoryview]) -> None:
        """Write `data` and make `tensor` point to it."""
        boundary = PAGE if nbytes(tensor) >= PAGE else 64
        offset = -(-self._file.tell() // boundary) * boundary
        self._file.seek(offset)
        for chunk in data:
            self._file.write(chunk)
        point(tensor, self._location, offset, self._file.tell() - offset)


def read_chunks(path: Path, offset: int, length: int) -> Iterator[bytes]:
    """`length` bytes of the file from `offset`; raises ModelError when it ends before."""
    with path.open("rb") as file:
        file.seek(offset)
        while length:
            chunk = file.read(min(length, CHUNK))
            if not chunk:
                raise ModelError(f"external data {path.name!r} ends {length} bytes too early")
            length -= len(chunk)
            yield chunk


def externalize(model: ModelProto, folder: Path, data: DataFile, min_bytes: int) -> None:
    """Move every initializer of `min_bytes` and more, and all external tensors of `folder`, into `data`, in place."""
    for tensor in tensors(model):
        if is_external(tensor):
            offset, length = span(tensor)
            data.append(tensor, read_chunks(folder / entry(tensor, "location"), offset, length))
    for tensor in initializers(model):
        if not is_external(tensor) and tensor.data_type != TensorProto.STRING and nbytes(tensor) >= min_bytes:
            data.append(tensor, [raw_bytes(tensor)])


def relocate(graph: bytes, location: str, offset: int) -> bytes:
    """The serialized model `graph` with all its external data, raw and pre-packed, in the file `location`, `offset`
    bytes further on. `offset` must be a multiple of the page size. Raises ModelError when `graph` is no model."""
    if offset < 0 or offset % PAGE:
        raise ValueError(f"offset {offset} is not a multiple of {PAGE}")
    model = parse(graph)
    for tensor in tensors(model):
        if is_external(tensor):
            _shift(tensor, location, offset)
    return model.SerializeToString(deterministic=True)


def _shift(tensor: TensorProto, location: str, offset: int) -> None:
    start, length = span(tensor)
    packed = [(e.key, shift_packed(e.value, offset)) for e in tensor.external_data if e.key.startswith(PREPACKED)]
    point(tensor, location, start + offset, length)
    for key, value in packed:
        tensor.external_data.add(key=key, value=value)


def shift_packed(value: str, offset: int) -> str:
    """`kernel+hash|offset;length;checksum|...` with each offset moved; raises ModelError for another form."""
    key, *blobs = value.split("|")
    try:
        moved = [(int(at) + offset, size, rest) for at, size, rest in (blob.split(";") for blob in blobs)]
    except ValueError:
        raise ModelError(f"pre-packed weights: {value[:80]!r} is not of the form key|offset;length;checksum") from None
    return "|".join([key, *(f"{at};{size};{rest}" for at, size, rest in moved)])


def without_empty_packed(graph: bytes) -> bytes:
    """The serialized model `graph` without the pre-packed copies that have an empty part.

    onnxruntime writes such for depthwise QLinearConv and refuses to read them; a kernel without its copy packs anew."""
    if PREPACKED.encode() not in graph:
        return graph
    model, changed = parse(graph), False
    for tensor in tensors(model):
        kept = [e for e in tensor.external_data if not (e.key.startswith(PREPACKED) and _has_empty_part(e.value))]
        if len(kept) < len(tensor.external_data):
            entries = [(e.key, e.value) for e in kept]
            del tensor.external_data[:]
            for key, value in entries:
                tensor.external_data.add(key=key, value=value)
            changed = True
    return model.SerializeToString() if changed else graph


def _has_empty_part(value: str) -> bool:
    return any(blob.split(";")[1:2] == ["0"] for blob in value.split("|")[1:])


def parse(data: bytes) -> ModelProto:
    """The model in `data`. Raises ModelError when it is none, MemoryError when there is none for it."""
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as e:  # DecodeError lives in google.protobuf.message, or in the C extension, by version
        if "alloc failed" in str(e):
            raise MemoryError(str(e)) from None
        raise ModelError(f"not an ONNX model: {e}") from None
    return model


def external_tensors(model: ModelProto) -> tuple[ExternalTensor, ...]:
    """Where each external initializer of the main graph lies, in its order. Those of subgraphs are not among them: a
    session takes initializers from memory for the main graph only."""
    return tuple(
        ExternalTensor(t.name, t.data_type, tuple(t.dims), *span(t)) for t in model.graph.initializer if is_external(t)
    )


def embed_subgraphs(graph: bytes, weights: Path) -> bytes:
    """The serialized model `graph` with the external tensors of its subgraphs, which lie in the file `weights`, held in
    the graph itself. For segments without a path; the main graph's stay external. Raises ModelError."""
    model = parse(graph)
    outside = islice(tensors(model), len(model.graph.initializer), None)  # the main graph's come first
    inner = [t for t in outside if is_external(t)]
    if not inner:
        return graph
    for tensor in inner:
        data = b"".join(read_chunks(weights, *span(tensor)))
        del tensor.external_data[:]
        tensor.data_location = TensorProto.DEFAULT
        tensor.raw_data = data
    return model.SerializeToString(deterministic=True)

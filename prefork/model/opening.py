"""Opens ONNX Runtime over a prepared graph and weights that other processes share. Template's and worker's side.

How the weights come is the only difference between the two kinds of segment; both leave the raw weights where they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import onnxruntime as ort

from prefork.model.faults import open_error
from prefork.model.manifest import Manifest
from prefork.model.values import wrap
from prefork.tensor import BY_ONNX, Buffer

FATAL = 4  # ORT's severity: its errors reach us as exceptions, and its warnings are not for a server's stderr
_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True, slots=True)
class Mapped:
    """The weights are a file in `folder`, under the name that the graph's external data gives: ORT maps it, raw and
    pre-packed weights alike, so that all processes share both."""

    folder: str


@dataclass(frozen=True, slots=True)
class InMemory:
    """The weights are `view`, read-only memory without a path (a SysV segment): its byte 0 is offset 0 of the
    manifest's external tensors. Each initializer is laid over the view, so the raw weights are shared; the copies that
    kernels pre-pack are private to each process. Pre-packing stays on all the same: without it a run takes 2 to 6 times
    as long. `external` lists the main graph's tensors only, so the graph must hold those of its subgraphs itself."""

    view: memoryview


Weights: TypeAlias = Mapped | InMemory


class Opened(NamedTuple):
    """ORT's session, and the views that must live as long as it does."""

    inner: ort.InferenceSession
    views: list[ort.OrtValue]


def open_inner(manifest: Manifest, graph: Buffer, weights: Weights, threads: int) -> Opened:
    """ORT's session on `threads` intra-op threads of the CPU provider. Raises ModelError when ORT refuses.

    Afterwards gives back to the kernel what packing took from the heap."""
    options = _options(manifest, threads)
    model, views = bytes(graph), []
    with contextlib.ExitStack() as stack:
        if isinstance(weights, Mapped):
            folder = weights.folder
        else:
            folder = stack.enter_context(_empty_files(model))
            views = _lay_over(manifest, weights.view, options)
        options.add_session_config_entry(_FOLDER, folder)
        inner = _try(manifest, model, options, again=isinstance(weights, InMemory) and not manifest.optimized)
    trim_heap()
    return Opened(inner, views)


def _try(manifest: Manifest, model: bytes, options: ort.SessionOptions, *, again: bool) -> ort.InferenceSession:
    """`again`: when that fails, once more without optimising. ORT's optimisers read weights from the file even where an
    initializer is overridden, and find it empty; only the few models that ORT could not save need this."""
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as e:
        if not again:
            raise open_error(manifest.model, e) from None
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return _try(manifest, model, options, again=False)


def trim_heap() -> None:
    """Give freed heap pages back to the kernel (malloc_trim(3)); only glibc has it."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _options(manifest: Manifest, threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_DISABLE_ALL if manifest.optimized else levels.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # planned for each new shape and never dropped: with dynamic shapes memory grows without bound
    options.enable_mem_pattern = _fixed_shapes(manifest)
    options.log_severity_level = FATAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for key, value in manifest.session_config.items():
        options.add_session_config_entry(key, value)
    return options


def _fixed_shapes(manifest: Manifest) -> bool:
    return all(spec.shape is not None and all(isinstance(dim, int) for dim in spec.shape) for spec in manifest.inputs)


def _lay_over(manifest: Manifest, view: memoryview, options: ort.SessionOptions) -> list[ort.OrtValue]:
    views = []
    for tensor in manifest.external:
        data = view[tensor.offset : tensor.offset + tensor.length]
        views.append(wrap(data, BY_ONNX[tensor.dtype], tensor.shape))
        options.add_initializer(tensor.name, views[-1])
    return views


@contextlib.contextmanager
def _empty_files(model: bytes) -> Iterator[str]:
    """A private folder with an empty file for each place of external data in `model`.

    ORT demands that the file exists even when every initializer is overridden; empty, so that whatever it would read
    from there is an error and never a wrong number."""
    with tempfile.TemporaryDirectory(prefix="prefork-") as folder:
        for name in _locations(model):
            Path(folder, name).touch()
        yield folder


def _locations(model: bytes) -> set[str]:
    """The plain file names that external data entries of the serialized `model` give.

    An entry is a StringStringEntryProto: key (field 1) "location", value (field 2) of a length below 128 here
    (https://protobuf.dev/programming-guides/encoding). Reading them so spares each worker the onnx package."""
    names = set()
    for found in re.finditer(rb"\x0a\x08location\x12([\x01-\x7f])", model):
        name = model[found.end() : found.end() + found[1][0]].decode("utf-8", "replace")
        if name.isprintable() and "/" not in name and name not in (".", ".."):
            names.add(name)
    return names

"""onnxruntime's offline pass: a graph optimised for this machine, and one file with raw and pre-packed weights.

Loader's process only. ORT_ENABLE_ALL includes the layout of this processor's convolutions (NCHWc): fair here, because a
segment is for the machine that made it. Saved and opened again with ORT_DISABLE_ALL such a graph runs at full speed
with bit-identical outputs, where ORT_ENABLE_EXTENDED leaves convolutional models up to 1.7 times slower.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from prefork.errors import ModelError, SegmentFull
from prefork.model import external
from prefork.model.repository import Source

MIN_EXTERNAL_BYTES = 1024  # below it a private copy costs less than a mapping of its own
FATAL = 4  # our errors carry what onnxruntime would log
PROVIDERS = ["CPUExecutionProvider"]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Saved:
    """A graph file and its data file in the same folder. `optimized`, `packed`: see Manifest."""

    graph: Path
    data: Path
    optimized: bool
    packed: bool


def options(level: ort.GraphOptimizationLevel) -> ort.SessionOptions:
    """One thread, as in a worker, so that outputs can be compared bit by bit."""
    chosen = ort.SessionOptions()
    chosen.graph_optimization_level = level
    chosen.intra_op_num_threads = 1
    chosen.inter_op_num_threads = 1
    chosen.log_severity_level = FATAL
    return chosen


def open_file(
    path: Path, level: ort.GraphOptimizationLevel, *, save: Saved | None = None, prepack: bool = True
) -> ort.InferenceSession:
    """A session over the model file; with `save` its optimised graph is written too. Raises ModelError."""
    chosen = options(level)
    chosen.add_session_config_entry("session.disable_prepacking", "0" if prepack else "1")
    if save is not None:
        chosen.optimized_model_filepath = str(save.graph)
        for key, value in _saving(save).items():
            chosen.add_session_config_entry("session." + key, value)
    return _open(str(path), chosen)


def _saving(save: Saved) -> dict[str, str]:
    return {
        "optimized_model_external_initializers_file_name": save.data.name,
        "optimized_model_external_initializers_min_size_in_bytes": str(MIN_EXTERNAL_BYTES),
        "save_external_prepacked_constant_initializers": "1" if save.packed else "0",
    }


def open_prepared(graph: bytes, folder: Path, *, optimized: bool) -> ort.InferenceSession:
    """A session over a serialized graph with external data in `folder`, as a worker opens it. Raises ModelError."""
    level = ort.GraphOptimizationLevel
    chosen = options(level.ORT_DISABLE_ALL if optimized else level.ORT_ENABLE_ALL)
    chosen.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return _open(graph, chosen)


def _open(model: str | bytes, chosen: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(model, chosen, providers=PROVIDERS)
    except Exception as e:  # onnxruntime's exceptions share no base class but this one
        raise ModelError(reason(e)) from None


def check_room(folder: Path, nbytes: int) -> None:
    """Raises SegmentFull when `folder` cannot take `nbytes` more: a full disk, a quota, or ulimit -f."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
    except OSError as e:
        if e.errno not in FULL:
            raise
        raise no_room(folder, e, nbytes) from None


def no_room(folder: Path, error: OSError, nbytes: int) -> SegmentFull:
    """What an error of FULL means for a preparation in `folder` that takes about `nbytes`."""
    return SegmentFull(
        f"no room to prepare the model, which takes about {nbytes} bytes in {str(folder)!r}: {error.strerror}; free "
        "some, raise the quota or ulimit -f, or give another work_dir"
    )


def write(source: Path, folder: Path, stem: str, note: Callable[[str], None]) -> tuple[ort.InferenceSession, Saved]:
    """Optimise `source` fully and save it as `stem`.onnx and `stem`.bin in `folder`, by the best way that works; a
    `note` says when that is not the first. Raises ModelError when onnxruntime cannot open the model at all."""
    graph, data = folder / f"{stem}.onnx", folder / f"{stem}.bin"
    refusals = []
    for packed in (True, False):
        saved = Saved(graph, data, optimized=True, packed=packed)
        try:
            session = open_file(source, ort.GraphOptimizationLevel.ORT_ENABLE_ALL, save=saved)
        except ModelError as e:
            refusals.append(e.message)
        else:
            if not packed:
                note(f"weights are not pre-packed: onnxruntime would not save them ({refusals[0]})")
            data.touch()
            if packed:
                saved.graph.write_bytes(external.without_empty_packed(saved.graph.read_bytes()))
            return session, saved
    session = open_file(source, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    note(f"the graph is as in the file: onnxruntime would not save it optimised ({refusals[-1]})")
    return session, save_as_is(source, graph, data)


def save_as_is(source: Path, graph: Path, data: Path) -> Saved:
    """The source's own graph, its large initializers moved into `data`."""
    model = external.parse(source.read_bytes())
    with data.open("wb") as file:
        external.externalize(model, source.parent, external.DataFile(file, data.name), MIN_EXTERNAL_BYTES)
    graph.write_bytes(model.SerializeToString())
    return Saved(graph, data, optimized=False, packed=False)


_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_PLACE = re.compile(r"\s*/\S+\.(?:cc|h):\d+ .*?(?=Status Message: |\b[A-Z][a-z]+ )|^Exception during [a-z]+: ")
_LOADING = re.compile(r"^(?:Load model|Deserialize tensor \S+) from .*? failed: ?")


def reason(error: Exception) -> str:
    """What onnxruntime said, without its prefix, source positions and the path of the file."""
    text = " ".join(str(error).split())
    for pattern in (_PREFIX, _LOADING, _PLACE):
        text = pattern.sub("", text)
    return text.removeprefix("Fatal error: ").strip()


_UNKNOWN = re.compile(
    r"(?:(?P<domain>[\w.]*):)?\b(?P<op>\w+)\(-?\d+\) is not a registered function/op"
    r"|No Op registered for (?P<bare>\w+) with domain_version"
)
_NO_KERNEL = re.compile(r"(?:implementation|kernel) for (\w+)\((\d+)\) .*")


def explain(source: Source, error: ModelError) -> ModelError:
    """`error` with the file, and with the node when it is about an operator."""
    text = error.message
    if found := _UNKNOWN.search(text):
        domain, op = found["domain"] or "", found["op"] or found["bare"]
        text = f"operator {op!r} of domain {domain or 'ai.onnx'!r}{_where(source, op)} is unknown to onnxruntime"
    elif found := _NO_KERNEL.search(text):
        op, since = found.groups()
        text = f"operator {op!r} of opset {since}{_where(source, op)} has no implementation on CPU for its types"
    if source.complaint and source.complaint not in text:
        text += f"; the ONNX checker says: {source.complaint}"
    return ModelError(f"model file {str(source.path)!r} cannot be opened: {text}")


def _where(source: Source, op: str) -> str:
    named = [n for n in external.nodes(source.skeleton) if n.op_type == op]
    return f" (node {named[0].name!r}, output {named[0].output[0]!r})" if named else ""

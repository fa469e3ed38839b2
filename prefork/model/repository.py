"""Model files as their owner wrote them: found, checked, hashed, never run. Loader's process only (onnx).

`read_model` gives a Source, whose `skeleton` is the model without the values of its weights: large models are never
held as a whole. Files are read where they are and never written.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto

from prefork.errors import ModelError
from prefork.model import external

PROTOBUF_LIMIT = (1 << 31) - 1  # one protobuf message, https://protobuf.dev/programming-guides/proto-limits/
KEEP_BYTES = 1024  # values below this stay in the skeleton: shapes, axes, scalars
ALIGNMENT = 4096
GRAPH_SLACK = 1 << 16  # functions and composed operators are written out as nodes
NEVER_PACKED = frozenset({"Gather", "GatherND", "GatherElements", "Conv", "ConvInteger"})


@dataclass(frozen=True, slots=True)
class Source:
    """A model as it was found.

    `path` as given; `files`: the model, then its external data files, with the state they were read in; `nbytes` of all
    of them; `sha256` of the model file, or of it and its external files; `skeleton`: the model without weight values;
    `weights`: bytes of each initializer by name; `complaint`: what the ONNX checker says against it, "" when nothing.
    """

    path: Path
    files: tuple[tuple[Path, FileState], ...]
    nbytes: int
    sha256: str
    skeleton: ModelProto
    weights: dict[str, int]
    complaint: str

    def check_unchanged(self) -> None:
        """Raises ModelError when a file was changed or replaced since it was read."""
        for path, state in self.files:
            if FileState.of(path) != state:
                raise ModelError(f"model file {str(path)!r} changed while it was being prepared; try again")


@dataclass(frozen=True, slots=True)
class FileState:
    device: int
    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Raises ModelError when the file is missing, unreadable or not a regular one."""
        try:
            info = path.stat()
        except OSError as e:
            raise ModelError(f"model file {str(path)!r}: {e.strerror}") from None
        if not stat.S_ISREG(info.st_mode):
            raise ModelError(f"model file {str(path)!r}: expected a regular file, found {_kind(info.st_mode)}")
        if not os.access(path, os.R_OK):
            raise ModelError(f"model file {str(path)!r}: permission denied")
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_model(path: Path) -> Source:
    """Read, check and hash the model at `path`. Raises ModelError, naming the file and what is wrong with it."""
    state = FileState.of(path)
    _refuse_by_head(path, state.nbytes)
    model = _parse(path)
    weights = _weights(model)
    files = ((path, state), *_external_files(path, model))
    model = _skeleton(model)
    return Source(
        path=path,
        files=files,
        nbytes=sum(state.nbytes for _, state in files),
        sha256=_sha256([file for file, _ in files]),
        skeleton=model,
        weights=weights,
        complaint=_complaint(path),
    )


def _refuse_by_head(path: Path, nbytes: int) -> None:
    if nbytes == 0:
        raise ModelError(f"model file {str(path)!r} is empty")
    with path.open("rb") as file:
        head = file.read(8)
    if head[4:8] == b"ORTM":
        raise ModelError(
            f"model file {str(path)!r} is in onnxruntime's own .ort format, which cannot be optimised or packed again; "
            "give the .onnx file it was made from"
        )
    if nbytes > PROTOBUF_LIMIT:
        raise ModelError(
            f"model file {str(path)!r}: {nbytes} bytes are more than one protobuf message may have ({PROTOBUF_LIMIT}); "
            "either it is not an ONNX model or its weights must be saved as external data"
        )


def _parse(path: Path) -> ModelProto:
    try:
        model = external.parse(path.read_bytes())
    except ModelError as e:
        raise ModelError(f"model file {str(path)!r} is {e.message}; it may be truncated or of another format") from None
    if not model.opset_import or not model.HasField("graph") or not model.graph.output:
        what = "no opset" if not model.opset_import else "no graph with outputs"
        raise ModelError(f"model file {str(path)!r} is not an ONNX model, or is truncated: it has {what}")
    return model


def _weights(model: ModelProto) -> dict[str, int]:
    """Bytes by name; exporters of some frameworks keep weights in Constant nodes."""
    constants = [(n.output[0], a.t) for n in external.nodes(model) if n.op_type == "Constant" for a in n.attribute]
    sizes: dict[str, int] = {}
    for name, tensor in [(t.name, t) for t in external.initializers(model)] + constants:
        sizes[name] = sizes.get(name, 0) + external.nbytes(tensor)  # subgraphs may use a name again
    return sizes


def _skeleton(model: ModelProto) -> ModelProto:
    """The model without the values of its weights, in memory of its own: clearing a field frees none of its arena."""
    for tensor in external.tensors(model):
        if not external.is_external(tensor) and external.nbytes(tensor) > KEEP_BYTES:
            external.drop_data(tensor)
    return external.parse(model.SerializeToString())


def _external_files(path: Path, model: ModelProto) -> list[tuple[Path, FileState]]:
    found: dict[Path, FileState] = {}
    for tensor in external.tensors(model):
        if not external.is_external(tensor):
            continue
        file = _inside(path, tensor.name, external.entry(tensor, "location"))
        state = found.setdefault(file, FileState.of(file))
        offset, length = external.span(tensor)
        if offset + length > state.nbytes:
            raise ModelError(
                f"model file {str(path)!r}: tensor {tensor.name!r} takes bytes {offset} to {offset + length} of "
                f"{file.name!r}, which has {state.nbytes}"
            )
        if length < external.nbytes(tensor):
            raise ModelError(
                f"model file {str(path)!r}: tensor {tensor.name!r} needs {external.nbytes(tensor)} bytes, its external "
                f"data has {length}"
            )
    return sorted(found.items())


def _inside(path: Path, name: str, location: str) -> Path:
    """The external file, in the model's folder or, when the model is a symbolic link, that of the file it leads to."""
    file = path.parent / location
    homes = {path.parent.resolve(), path.resolve().parent}
    real = file.resolve()
    inside = any(real.is_relative_to(home) for home in homes)
    if not location or Path(location).is_absolute() or ".." in Path(location).parts or not inside:
        raise ModelError(
            f"model file {str(path)!r}: tensor {name!r} has its data in {location!r}, outside the model's folder"
        )
    return file


def _complaint(path: Path) -> str:
    try:
        onnx.checker.check_model(str(path))
    except Exception as e:  # the checker raises ValidationError, ValueError or RuntimeError, by what is wrong
        return " ".join(str(e).split("\n\n")[0].split())
    return ""


def _sha256(files: list[Path]) -> str:
    digests = []
    for file in files:
        with file.open("rb") as opened:
            digests.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def segment_bytes(source: Source) -> int:
    """About how large graph and weights become, raw and pre-packed: a weight that is only looked up or convolved with
    counts once, any other twice."""
    once = _used_once(external.nodes(source.skeleton))
    weights = sum(size * (1 if name in once else 2) for name, size in source.weights.items())
    inside = source.files[0][1].nbytes - (sum(source.weights.values()) if len(source.files) == 1 else 0)
    return weights + max(inside, 0) + ALIGNMENT * len(source.weights) + GRAPH_SLACK


def _used_once(run: Iterable[NodeProto]) -> set[str]:
    once: set[str] = set()
    twice: set[str] = set()
    for node in run:
        (once if node.op_type in NEVER_PACKED else twice).update(node.input)
    return once - twice

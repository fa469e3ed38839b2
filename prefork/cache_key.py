"""What a prepared model depends on, as one key: the files it is made from, the options, the libraries, the processor.

Loader's process. Libraries are known by what lies on the disk, so that nothing heavy is imported to find out that
nothing need be prepared. Two starts with equal keys would prepare the same bytes, or may as well share them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import prefork
from prefork import handler
from prefork.cache import FORMAT as CACHE_FORMAT
from prefork.config import SEARCH, ModelConfig
from prefork.model.processor import Cpu, processor
from prefork.model.version import FORMAT
from prefork.options import AUTO
from prefork.shm import layout

# What writes the graph or chooses its numbers. The runtime's own build counts too, not only its number.
LIBRARIES = ("onnxruntime", "onnx", "numpy")
NATIVE = "onnxruntime"
# Keys of a model that do not change what is prepared: its name, and its file, whose content counts.
NOT_OPTIONS = {"name", "path"}
# Keys that may name code of the owner's: its module counts by content, and so do the packages around it.
CODE = ("metric", "handler")


@dataclass(frozen=True, slots=True)
class Host:
    """`libraries`: name and identity. `formats`: of program, manifest, segment and cache."""

    cpu: Cpu
    libraries: dict[str, str]
    formats: tuple[str, int, int, int]


def host() -> Host:
    """This machine and this installation."""
    formats = (prefork.__version__, FORMAT, layout.FORMAT_VERSION, CACHE_FORMAT)
    return Host(processor(), {name: library(name) for name in LIBRARIES}, formats)


def library(name: str) -> str:
    """Version and build of an installed package, which is not imported; `missing` when there is none.

    Names of its distributions (onnxruntime-1.23.0, onnxruntime_openvino-...), and for the runtime the sizes of its
    native parts: a build of one's own has a published version's number."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return "missing"
    home = Path(spec.origin).parent
    found = sorted(path.stem for path in home.parent.glob(f"{name}*.dist-info"))
    if not found:  # a checkout on the path, or another installer's way
        state = Path(spec.origin).stat()
        found = [f"{home}:{state.st_size}:{state.st_mtime_ns}"]
    if name == NATIVE:
        found += sorted(f"{path.name}:{path.stat().st_size}" for path in home.glob("capi/*.so*"))
    return " ".join(found)


def options(model: ModelConfig, digest: Callable[[Path], str]) -> dict[str, str]:
    """Every key of the model's configuration that may change what is prepared; a file by its content.

    Raises OSError when a file cannot be read."""
    found = {}
    for item in fields(model):
        value = getattr(model, item.name)
        heeded = model.quantize == AUTO or item.name not in SEARCH
        if item.name not in NOT_OPTIONS and heeded:
            found[item.name] = f"sha256:{digest(value)}" if isinstance(value, Path) else repr(value)
    for name in CODE:
        value = getattr(model, name)
        if ":" in value and model.quantize == "auto":  # nothing else runs it while a model is prepared
            found[f"{name} code"] = " ".join(map(digest, handler.sources(value)))
    return found


def key(source: Sequence[str], given: dict[str, str], kind: str, on: Host) -> str:
    """64 hexadecimal digits. `source`: SHA-256 of the model file and of each file of external data, in order of their
    names; `given`: `options`; `kind`: of the segment, whose graphs differ."""
    parts = {"source": list(source), "options": given, "kind": kind, "host": asdict(on)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

"""Models prepared as the loader does it, but into files: what a bench opens with plain ONNX Runtime.

The inputs of requests stand in inputs.py. Runs in the bench's process (onnx, onnxruntime).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from prefork.model import pack
from prefork.model.forms import FORMS
from prefork.model.manifest import Manifest
from prefork.model.repository import read_model

GRAPH = "prepared.onnx"


@dataclass(frozen=True, slots=True)
class Prepared:
    """`graph`: the optimised model, its raw and packed weights in a file beside it."""

    manifest: Manifest
    graph: Path


def prepare(path: Path, folder: Path, quantize: str) -> Prepared:
    """The prepared form of the model at `path` as files in `folder`, which is made. Raises ModelError."""
    folder.mkdir(parents=True)
    found = pack.prepare(read_model(path), name=path.stem, quantize=quantize, work_dir=folder)
    graph = folder / GRAPH
    graph.write_bytes(found.graph)
    return Prepared(found.manifest, graph)


def quantized(path: Path, folder: Path) -> Path:
    """The int8 form of the model as one ordinary file, neither optimised nor packed: what others would serve."""
    folder.mkdir(parents=True)
    form = FORMS["int8"](read_model(path), folder, lambda step: None)
    target = folder / f"{path.stem}.int8.onnx"
    onnx.save(onnx.load(form.path), target)
    return target

"""The loader's heavy half: from a model file to the three sections of a segment. Loader's process, and only when the
cache has nothing: what it imports costs a second.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prefork import calibration, handler
from prefork.config import ModelConfig
from prefork.errors import ModelError
from prefork.jobs import LoaderJob
from prefork.model import pack
from prefork.model.gate import Gate
from prefork.model.repository import Source, read_model
from prefork.shm import layout, room
from prefork.tensor import Array


@dataclass(frozen=True, slots=True)
class Sections:
    """`weights`: a file in the job's work_dir. `graph` names the weights by the placeholder it was made with."""

    weights: Path
    graph: bytes
    manifest: bytes


def read(job: LoaderJob) -> Source:
    """The model, checked, and room for it seen: better now than after minutes of work. Raises PreforkError."""
    source = read_model(job.model.path)
    check = room.check_posix if job.kind == "posix" else room.check_sysv
    check(pack.estimate(source))
    if job.model.handler:
        handler.load(job.model.handler)
    return source


def prepare(job: LoaderJob, source: Source, place: str, progress: Callable[[str], None]) -> Sections:
    """Everything that a segment of the job's kind holds. Raises ModelError."""
    prepared = pack.prepare(
        source,
        name=job.model.name,
        quantize=job.model.quantize,
        gate=gate(job.model, progress),
        work_dir=job.work_dir,
        warmup=None if job.model.warmup is None else read_warmup(job.model.warmup),
        progress=progress,
    )
    if job.kind == "posix":
        graph = pack.relocate(prepared.graph, place, layout.FIRST_SECTION_OFFSET)
    else:
        graph = pack.embed_subgraphs(prepared.graph, prepared.weights)
    return Sections(prepared.weights, graph, replace(prepared.manifest, graph_bytes=len(graph)).to_json())


def gate(model: ModelConfig, progress: Callable[[str], None]) -> Gate | None:
    """What a search is asked for; None when there is none."""
    if model.quantize != pack.AUTO:
        return None
    return Gate(
        budget=model.accuracy_budget,
        eval=model.eval,
        calibration=model.calibration,
        batches=_batches(model, progress) if model.handler else (),
        giver=f"handler {model.handler!r}: calibration()",
        metric=model.metric,
        min_speedup=model.min_speedup,
        seconds=model.quantize_seconds,
    )


def _batches(model: ModelConfig, progress: Callable[[str], None]) -> Iterator[dict[str, Array]]:
    cls = handler.load(model.handler)
    yield from calibration.batches(model.handler, cls, model.quantize_seconds or handler.PATIENCE, progress)


def read_warmup(path: Path) -> dict[str, Array]:
    """The arrays of an npz file by name. Raises ModelError naming the file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as e:
        raise ModelError(f"warm-up file {str(path)!r}: expected an npz of arrays: {e}") from None

"""The loader: one process for one model file; it leaves a complete, checksummed segment or a reason.

The master's side of it is generation.py. It may hold onnx and the quantization tools, which cost memory that nobody
else should carry; it exits when the segment is published. Killed at any line it leaves at most its scratch directory,
which the master removes.
"""

from __future__ import annotations

import os
import socket
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prefork.channel import Channel
from prefork.errors import ModelError
from prefork.jobs import LoaderJob
from prefork.model import pack
from prefork.model.repository import read_model
from prefork.shm import layout, room, writer
from prefork.shm.owner import segment_name
from prefork.tensor import Array


def main(channel: socket.socket, job: LoaderJob) -> int:
    """Prepare, publish, report; the exit code. Raises PreforkError with the reason when that cannot be."""
    log = job.log.for_role("loader", model=job.model.name)
    line = Channel(channel)
    os.environ["TMPDIR"] = str(job.work_dir)  # libraries that make scratch files make them where they are swept
    began = time.monotonic()
    source = read_model(job.model.path)
    check = room.check_posix if job.kind == "posix" else room.check_sysv
    check(pack.estimate(source))  # better now than after minutes of work
    if job.only_check:
        return 0
    prepared = pack.prepare(
        source,
        name=job.model.name,
        quantize=job.model.quantize,
        work_dir=job.work_dir,
        warmup=None if job.model.warmup is None else read_warmup(job.model.warmup),
        progress=lambda text: log.info("preparing", step=text),
    )
    if job.kind == "posix":
        name = segment_name(job.owner, job.generation, job.model.name)
        graph = pack.relocate(prepared.graph, name, layout.FIRST_SECTION_OFFSET)
    else:
        graph = pack.embed_subgraphs(prepared.graph, prepared.weights)
    manifest = replace(prepared.manifest, graph_bytes=len(graph)).to_json()
    sections = [("weights", prepared.weights.stat().st_size), ("graph", len(graph)), ("manifest", len(manifest))]
    with writer.create(job.kind, sections, job.owner, job.generation, job.model.name) as draft:
        draft.fill("weights", prepared.weights)
        draft.fill("graph", graph)
        draft.fill("manifest", manifest)
        ref = draft.publish()
        line.send({"event": "done", "segment": ref.to_dict(), "report": report(job, prepared, began)})
        line.wait()  # for the master to hold it; until then this process does
    for note in prepared.manifest.notes:
        log.info("note", text=note)
    return 0


def read_warmup(path: Path) -> dict[str, Array]:
    """The arrays of an npz file by name. Raises ModelError naming the file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as e:
        raise ModelError(f"warm-up file {str(path)!r}: expected an npz of arrays: {e}") from None


def report(job: LoaderJob, prepared: pack.Prepared, began: float) -> dict[str, Any]:
    """What the master keeps for people. `began`: monotonic seconds."""
    return {
        "form": prepared.manifest.form,
        "source": str(job.model.path),
        "notes": [note[:500] for note in prepared.manifest.notes[:20]],
        "prepare_s": round(time.monotonic() - began, 3),
    }

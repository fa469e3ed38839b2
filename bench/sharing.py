"""Claim: of the weights of a model nothing worth a mention stays private to a worker, whatever kernels it runs on.

What a process holds for itself after it has opened and warmed the model, less what the same process holds without a
model (the largest of several processes that run at once): plain sessions on the file; sessions that each open our
segment; forks of a template that has opened it; the latter two also over System V segments. Activations are private by
nature: they are what a process that has opened our segment comes to hold when it runs. The claim is about forks, which
is how workers are made: at most MOST MB beyond the activations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import forms, harness, procs
from bench.peer import Peer, peers
from bench.prepared import quantized
from prefork.model import pack
from prefork.model.manifest import Manifest
from prefork.model.repository import read_model
from prefork.model.warmup import build
from prefork.shm import layout, segment, writer
from prefork.shm.owner import Owner, segment_name

MOST = 4.0  # MB private to a fork, its activations not counted
PROCESSES = 3  # two would do: a page that only one process maps counts as its own
MB = 1e6
HEAVY = ("MatMul", "Gemm", "Conv", "LSTM", "GRU", "Attention")  # in the names of kernels that hold weights
KINDS: tuple[segment.Kind, ...] = ("posix", "sysv")
WAYS = ("plain", "own posix", "fork posix", "own sysv", "fork sysv")
Make = Callable[[Path, Path], Path]


@dataclass(frozen=True, slots=True)
class Case:
    """`source`: a model by name; `make`: from its file and a folder to the file that is served."""

    title: str
    source: str
    make: Make = lambda source, folder: source
    quantize: str = "none"
    quick: bool = False


CASES = (
    Case("MiniLM fp32", "minilm"),
    Case("MiniLM fp16", "minilm", forms.half),
    Case("MiniLM int8, dynamic", "minilm", quantize="int8"),
    Case("MiniLM 8 bit weights", "minilm", lambda source, folder: forms.weight_only(source, folder, 8), quick=True),
    Case("MiniLM 4 bit weights", "minilm", lambda source, folder: forms.weight_only(source, folder, 4)),
    Case("MPNet-base fp32", "mpnet"),
    Case("MPNet-base int8, dynamic", "mpnet", quantize="int8"),
    Case("ResNet fp32", "nsfw-resnet"),
    Case("ResNet int8, QDQ", "nsfw-resnet", lambda source, folder: forms.static(source, folder, "QDQ")),
    Case("ResNet int8, QOperator", "nsfw-resnet", lambda source, folder: forms.static(source, folder, "QOperator")),
    Case("PP-OCR detector fp32", "ppocr4-det"),
    Case("PP-OCR detector int8, QDQ", "ppocr4-det", lambda source, folder: forms.static(source, folder, "QDQ"),
         quick=True),
    Case("captcha CNN with LSTM", "ddddocr"),
    Case("captcha CNN with LSTM, int8 as published", "ddddocr-old-int8"),
    Case("captcha CNN with LSTM int8, dynamic", "ddddocr", quantize="int8"),
    Case("Silero LSTM", "silero", quick=True),
    Case("GRU, built", "", lambda source, folder: forms.gru(folder), quick=True),
)  # fmt: skip


@dataclass
class Found:
    """Megabytes, by way. `private`: less what the process holds without a model; `pss`: with it; `running`: of
    `private`, what came when the opened model ran."""

    title: str
    kernels: str
    file: float
    segment: float
    private: dict[str, float] = field(default_factory=dict)
    pss: dict[str, float] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)


def prepare(case: Case, models: Path, folder: Path) -> tuple[Path, pack.Prepared]:
    """The file that a plain process opens, and what ours is made of."""
    folder.mkdir()
    source = harness.model(models, case.source) if case.source else folder
    path = case.make(source, folder)
    work = folder / "work"
    work.mkdir()
    prepared = pack.prepare(read_model(path), name="m", quantize=case.quantize, work_dir=work)
    plain = quantized(path, folder / "int8") if case.quantize == "int8" else path
    return plain, prepared


@contextmanager
def published(prepared: pack.Prepared, kind: segment.Kind) -> Iterator[segment.SegmentRef]:
    """The model in a segment of this kind, as the loader makes it; gone afterwards."""
    owner = Owner.current()
    if kind == "posix":
        graph = pack.relocate(prepared.graph, segment_name(owner, 1, "m"), layout.FIRST_SECTION_OFFSET)
    else:
        graph = pack.embed_subgraphs(prepared.graph, prepared.weights)
    parts: dict[str, Path | bytes] = {
        "weights": prepared.weights,
        "graph": graph,
        "manifest": prepared.manifest.to_json(),
    }
    sizes = [(name, part.stat().st_size if isinstance(part, Path) else len(part)) for name, part in parts.items()]
    with writer.create(kind, sizes, owner, 1, "m") as draft:
        for name, part in parts.items():
            draft.fill(name, part)
        ref = draft.publish()
        held = segment.hold(ref)
    try:
        yield ref
    finally:
        segment.retire(ref)
        held.release()


def kernels(manifest: Manifest) -> str:
    ops: dict[str, int] = manifest.report["ops_after"]
    return ", ".join(f"{name.split('.')[-1]} {count}" for name, count in ops.items() if any(k in name for k in HEAVY))


class Size(NamedTuple):
    """Megabytes, each of the process that has most. `running`: of `private`, what came when the opened model ran."""

    private: float
    pss: float
    running: float = 0.0


def largest(pids: Sequence[int]) -> Size:
    found = [procs.memory(pid) for pid in pids]
    return Size(max(one.private for one in found) / MB, max(one.pss for one in found) / MB)


def open_in(how: str, what: str, inputs: Path) -> Size:
    args = ("bench.opener", how, what, str(inputs))
    if how == "fork":
        with Peer(*args, str(PROCESSES)) as template:
            return largest(template.hello["pids"])
    with peers(PROCESSES, *args, "0") as found:
        pids = [peer.pid for peer in found]
        opened = largest(pids)
        for peer in found:
            peer.ask(act=True)
        ran = largest(pids)
        return Size(ran.private, ran.pss, ran.private - opened.private)


def measure(case: Case, models: Path, folder: Path, empty: Found, kinds: Sequence[segment.Kind]) -> Found:
    path, prepared = prepare(case, models, folder)
    if prepared.manifest.warmup is None:
        raise AssertionError(f"{case.title}: no inputs are known that run")
    inputs = folder / "inputs.npz"
    given: dict[str, Any] = build(prepared.manifest.warmup)
    np.savez(inputs, **given)
    manifest = prepared.manifest
    found = Found(case.title, kernels(manifest), read_model(path).nbytes / MB, manifest.weights_bytes / MB)
    for way in WAYS:
        how, _, kind = way.partition(" ")
        if kind and kind not in kinds:
            continue
        with published(prepared, kind) if kind in KINDS else nullcontext() as ref:
            what = str(path) if ref is None else json.dumps(ref.to_dict())
            held = open_in(how, what, inputs)
            found.private[way], found.pss[way] = held.private - empty.private[how], held.pss
            found.running[way] = held.running
    return found


def without_model(folder: Path) -> Found:
    found = Found("without a model", "", 0.0, 0.0)
    for how in ("plain", "own", "fork"):
        found.private[how], found.pss[how], _ = open_in(how, "", folder / "none")
    return found


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    args = parser.parse_args(argv)
    report = harness.Report("sharing", args)
    cases = [case for case in CASES if case.quick or not args.quick]
    kinds = KINDS[:1] if args.quick else KINDS
    with harness.place() as place:
        empty = without_model(place)
        found = [measure(case, args.models, place / str(i), empty, kinds) for i, case in enumerate(cases)]
    show(report, empty, found)
    forks = [(beyond(one, way), one, way) for one in found for way in one.private if way.startswith("fork")]
    most, worst, way = max(forks, key=lambda fork: fork[0])
    figure = (
        f"{len(found)} models and forms: a worker forked from the template holds at most {most:.1f} MB of its own "
        f"beyond activations (at most {MOST:.0f}; {worst.title}, {way.split()[1]}), where a plain process holds "
        f"{max(one.private['plain'] for one in found):.0f} MB for the largest of them"
    )
    return report.finish(most <= MOST, figure)


def beyond(one: Found, way: str) -> float:
    """Of a fork, without activations."""
    return max(0.0, one.private[way] - one.running[way.replace("fork", "own")])


def show(report: harness.Report, empty: Found, found: Sequence[Found]) -> None:
    ways = [way for way in WAYS if way in found[0].private]
    named = {
        "plain": "REFERENCE: PLAIN", "own posix": "BASELINE: EACH OPENS", "fork posix": "OURS: FORK",
        "own sysv": "SYSV, EACH OPENS", "fork sysv": "SYSV, FORK",
    }  # fmt: skip
    head = ["MODEL", "KERNELS", "FILE MB", *(named[way] for way in ways), "ACTIVATIONS"]
    rows = [(one.title, one.kernels, one.file, *(one.private[way] for way in ways), one.running["own posix"])
            for one in found]  # fmt: skip
    report.table("private MB of a process that the model adds", head, rows)
    bare = ", ".join(f"{how} {mb:.1f}" for how, mb in empty.private.items())
    print(f"such processes without a model hold, in private MB: {bare}")
    report.data["without_model"] = empty.private
    report.data["pss_mb"] = {one.title: one.pss for one in found}
    report.data["segment_weights_mb"] = {one.title: one.segment for one in found}


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])

"""From a model file to what a segment holds: manifest, graph, and one file of raw and pre-packed weights. Loader's
process only.

What it holds at its peak: onnxruntime's own copy of the weights and their pre-packed form, about twice the weights.
Sessions are opened one after the other, and each is gone before the next; weights are quantized one at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from prefork.errors import ModelError
from prefork.model import external, optimize, probe, signature
from prefork.model.external import embed_subgraphs, relocate
from prefork.model.manifest import Manifest
from prefork.model.opening import Mapped, Opened
from prefork.model.processor import processor
from prefork.model.quantize import FORMS, Form
from prefork.model.repository import Source, segment_bytes
from prefork.model.session import Session
from prefork.model.warmup import digest
from prefork.tensor import Array, Tensor
from prefork.value import Parameter, Value, flatten, unflatten

__all__ = ["Prepared", "embed_subgraphs", "estimate", "prepare", "relocate"]

WEIGHTS = "weights.bin"
CLOSE = 0.99  # a smaller cosine to fp32 deserves a word


@dataclass(frozen=True, slots=True)
class Prepared:
    """`graph`: serialized, its external data in the file `weights` by that file's plain name; see `relocate`."""

    manifest: Manifest
    graph: bytes
    weights: Path


def estimate(source: Source) -> int:
    """Bytes that graph and weights will take in a segment, before any work: an upper bound for most models."""
    return segment_bytes(source)


def prepare(
    source: Source,
    *,
    name: str,
    quantize: str = "none",
    work_dir: Path,
    warmup: Mapping[str, Array] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Optimise, quantize when asked, pack, and prove that the packed model answers as the one that was packed.

    `quantize`: a key of FORMS. `warmup`: inputs that run, by name. `progress` gets a word at each step. `work_dir` is
    on a disk with room for the estimate, and for the model again when quantizing; afterwards it holds `weights` and
    nothing else of ours, and after an error nothing. Raises ModelError."""
    if quantize not in FORMS:
        raise ModelError(f"quantize: expected one of {', '.join(FORMS)}, found {quantize!r}")
    with tempfile.TemporaryDirectory(prefix="prepare-", dir=work_dir) as scratch:
        job = Job(source, name, quantize, Path(scratch), progress)
        prepared = job.run(warmup)
        source.check_unchanged()
        weights = prepared.weights.rename(work_dir / WEIGHTS)
    return replace(prepared, weights=weights)


class Unopenable(ModelError):
    """onnxruntime wrote a graph that it does not read again."""


class Job:
    """One preparation: its notes and timings."""

    def __init__(self, source: Source, name: str, quantize: str, folder: Path, progress: Callable[[str], None]) -> None:
        self._source, self._name, self._quantize, self._folder = source, name, quantize, folder
        self._progress = progress
        self._notes: list[str] = []
        self._seconds: dict[str, float] = {}
        self._begun = perf_counter()

    def run(self, warmup: Mapping[str, Array] | None) -> Prepared:
        form, writer, saved = self._optimise(self._form(self._quantize))
        try:
            return self._finish(form, writer, saved, warmup)
        except Unopenable as e:
            self._notes.append(f"the graph is as in the file: the optimised one does not open again ({e.message})")
        del writer
        saved = optimize.save_as_is(self._source.path, saved.graph, saved.data)
        writer = optimize.open_prepared(saved.graph.read_bytes(), self._folder, optimized=False)
        return self._finish(Form("as-is", self._source.path), writer, saved, warmup)

    def _finish(
        self, form: Form, writer: ort.InferenceSession, saved: optimize.Saved, warmup: Mapping[str, Array] | None
    ) -> Prepared:
        graph = saved.graph.read_bytes()
        manifest = self._manifest(form, saved, external.parse(graph))
        found = self._probe(Session(manifest, Opened(writer, []), 1), warmup)
        del writer
        if found is not None:
            manifest = replace(manifest, warmup=found.recipe)
        self._verify(manifest, graph)
        if found is not None and form.name == "int8-dynamic":
            self._compare(manifest, found)
        weights = saved.data.rename(self._folder / WEIGHTS)
        graph = external.relocate(graph, WEIGHTS, 0)
        report = {**manifest.report, "seconds": self._seconds, "tries": found.tries if found else 0}
        manifest = replace(manifest, graph_bytes=len(graph), notes=tuple(self._notes), report=report)
        return Prepared(manifest, graph, weights)

    def _lap(self, step: str) -> None:
        now = perf_counter()
        self._seconds[step], self._begun = round(now - self._begun, 3), now

    def _form(self, quantize: str) -> Form:
        form = FORMS[quantize](self._source, self._folder, self._progress)
        self._lap("form")
        return form

    def _optimise(self, form: Form) -> tuple[Form, ort.InferenceSession, optimize.Saved]:
        self._progress("optimising")
        try:
            writer, saved = optimize.write(form.path, self._folder, "prepared", self._notes.append)
        except ModelError as e:
            if form.path == self._source.path:
                raise optimize.explain(self._source, e) from None
            self._notes.append(f"not quantized: onnxruntime does not take the quantized graph ({e.message})")
            return self._optimise(self._form("none"))
        if self._source.complaint:
            self._notes.append(f"the ONNX checker objects, onnxruntime does not: {self._source.complaint}")
        self._notes.extend(form.notes)
        self._lap("optimise")
        return form if saved.optimized else replace(form, name="as-is"), writer, saved

    def _manifest(self, form: Form, saved: optimize.Saved, model: ModelProto) -> Manifest:
        source, skeleton = self._source, self._source.skeleton
        inputs, outputs = signature.inputs(model), signature.outputs(model)
        for kind, ours, theirs in (
            ("inputs", inputs, signature.names(skeleton)),
            ("outputs", outputs, [v.name for v in skeleton.graph.output]),
        ):
            if [spec.name for spec in ours] != theirs:
                raise ModelError(f"the optimised graph has {kind} {[s.name for s in ours]}, the model has {theirs}")
        return Manifest(
            model=self._name,
            source=str(source.path),
            source_sha256=source.sha256,
            source_bytes=source.nbytes,
            quantize=self._quantize,
            form=form.name,
            ort_version=ort.__version__,
            cpu=processor(),
            ir_version=skeleton.ir_version,
            opsets={o.domain or "ai.onnx": o.version for o in skeleton.opset_import},
            inputs=inputs,
            outputs=outputs,
            external=external.external_tensors(model),
            weights_bytes=saved.data.stat().st_size,
            graph_bytes=saved.graph.stat().st_size,
            optimized=saved.optimized,
            packed=saved.packed,
            metadata={p.key: p.value for p in skeleton.metadata_props},
            report={"ops_before": _ops(skeleton), "ops_after": _ops(model)},
        )

    def _probe(self, session: Session, warmup: Mapping[str, Array] | None) -> probe.Found | None:
        self._progress("finding inputs that run")
        specs = session.inputs
        found = (
            probe.given(lambda feeds: run(session, feeds), specs, warmup)
            if warmup
            else probe.find(lambda feeds: run(session, feeds), specs)
        )
        self._lap("probe")
        if isinstance(found, probe.Failed):
            self._notes.append(
                f"no warm-up, and the packed model was opened but not compared: none of {found.tries} guessed inputs "
                f"ran, give some that do; the last said: {found.reason}"
            )
            return None
        names = [spec.name for spec in session.outputs]
        first = digest(names, found.outputs)
        again = digest(names, run(session, probe.feeds(specs, found.recipe)))
        if first != again:
            self._notes.append("two runs with equal inputs differ: the model has random operators")
        return replace(found, recipe=replace(found.recipe, digest=first if first == again else None))

    def _verify(self, manifest: Manifest, graph: bytes) -> None:
        self._progress("verifying")
        try:
            session = Session.open(manifest, graph, Mapped(str(self._folder)))
        except ModelError as e:
            raise (Unopenable if manifest.optimized else ModelError)(e.message) from None
        if manifest.warmup is not None:
            outputs = run(session, probe.feeds(manifest.inputs, manifest.warmup))
            after = digest([spec.name for spec in manifest.outputs], outputs)
            if manifest.warmup.digest not in (None, after):
                raise ModelError(
                    f"model {self._name!r}: opened from its packed form it gives other outputs than before packing"
                )
        self._lap("verify")

    def _compare(self, manifest: Manifest, found: probe.Found) -> None:
        self._progress("comparing with fp32")
        plain = optimize.open_file(self._source.path, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
        reference = run(Session(manifest, Opened(plain, []), 1), probe.feeds(manifest.inputs, found.recipe))
        cosines = {
            spec.name: round(cosine(ours, theirs), 6)
            for spec, ours, theirs in zip(manifest.outputs, found.outputs, reference, strict=True)
            if isinstance(theirs, np.ndarray) and theirs.dtype.kind == "f" and theirs.shape == ours.shape
        }
        manifest.report["cosine_to_fp32"] = cosines
        low = {name: value for name, value in cosines.items() if not value >= CLOSE}
        if low:
            name = min(low, key=lambda key: low[key])
            self._notes.append(f"on the warm-up inputs int8 differs from fp32: cosine {low[name]} of output {name!r}")
        self._lap("compare")


def run(session: Session, feeds: Mapping[str, Value]) -> list[Value]:
    """All outputs of one run, in the model's order; raises as Session.run."""
    tensors: list[Tensor] = []
    parameters: dict[str, Parameter] = {}
    for name, value in feeds.items():
        flatten(name, value, tensors, parameters)
    values = unflatten(*session.run(tensors, (), parameters))
    return [values[spec.name] for spec in session.outputs]


def cosine(ours: Array, theirs: Array) -> float:
    """Of the two arrays as vectors; 1 for two of zeros."""
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else float(np.array_equal(a, b))


def _ops(model: ModelProto) -> dict[str, Any]:
    return signature.op_counts(f"{n.domain}.{n.op_type}".lstrip(".") for n in external.nodes(model))

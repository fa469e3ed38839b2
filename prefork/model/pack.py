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

from prefork.errors import ModelError, SegmentFull
from prefork.model import external, optimize, probe, signature
from prefork.model.auto import find_form, left_alone
from prefork.model.evaluate import cosine
from prefork.model.external import embed_subgraphs, relocate
from prefork.model.forms import FORMS
from prefork.model.gate import Gate
from prefork.model.manifest import Manifest
from prefork.model.opening import Mapped, Opened
from prefork.model.processor import processor
from prefork.model.quantize import Form
from prefork.model.repository import Source, segment_bytes
from prefork.model.session import Session
from prefork.model.trial import Trial, run
from prefork.model.warmup import digest
from prefork.tensor import Array

__all__ = ["Gate", "Prepared", "cosine", "embed_subgraphs", "estimate", "prepare", "relocate"]

WEIGHTS = "weights.bin"
AUTO = "auto"
CLOSE = 0.99  # a smaller cosine to fp32 deserves a word
BY_NAME = ("int8-dynamic", "fp16")  # forms that no gate has judged when they are asked for by name


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
    gate: Gate | None = None,
    work_dir: Path,
    warmup: Mapping[str, Array] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Optimise, quantize when asked, pack, and prove that the packed model answers as the one that was packed.

    `quantize`: a key of FORMS, or auto: the fastest form that passes `gate`. `warmup`: inputs that run, by name.
    `progress` gets a word at each step, a report.Step where it is known how far that is. `work_dir` is on a disk with
    room for the estimate, and for the model again when quantizing (auto: twice both, else no search); afterwards it
    holds `weights` and nothing else of ours, and after an error nothing. Raises ModelError; SegmentFull: no room."""
    if quantize not in (*FORMS, AUTO):
        raise ModelError(f"quantize: expected one of {', '.join(FORMS)}, {AUTO}, found {quantize!r}")
    needed = estimate(source) + (0 if quantize == "none" else source.nbytes)
    try:
        optimize.check_room(work_dir, needed)
        with tempfile.TemporaryDirectory(prefix="prepare-", dir=work_dir) as scratch:
            job = Job(source, name, quantize, Path(scratch), progress, gate or Gate())
            prepared = job.run(warmup)
            source.check_unchanged()
            weights = prepared.weights.rename(work_dir / WEIGHTS)
    except OSError as e:
        if e.errno not in optimize.FULL:
            raise
        raise optimize.no_room(work_dir, e, needed) from None
    return replace(prepared, weights=weights)


class Unopenable(ModelError):
    """onnxruntime wrote a graph that it does not read again."""


class Unfit(ModelError):
    """A form that was asked for by name gives no numbers where fp32 does."""


class Job:
    """One preparation: its notes and timings."""

    def __init__(
        self, source: Source, name: str, quantize: str, folder: Path, progress: Callable[[str], None], gate: Gate
    ) -> None:
        self._source, self._name, self._quantize, self._folder = source, name, quantize, folder
        self._progress, self._gate = progress, gate
        self._found: dict[str, Any] = {}
        self._notes: list[str] = []
        self._seconds: dict[str, float] = {}
        self._begun = perf_counter()

    def run(self, warmup: Mapping[str, Array] | None) -> Prepared:
        chosen = self._search(warmup) if self._quantize == AUTO else self._form(self._quantize)
        try:
            return self._made(chosen, warmup)
        except Unfit as e:
            self._notes = [f"{chosen.name} is not served: {e.message}"]
        return self._made(self._form("none"), warmup)

    def _made(self, chosen: Form, warmup: Mapping[str, Array] | None) -> Prepared:
        form, writer, saved = self._optimise(chosen)
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
        if found is not None and form.name in BY_NAME and self._quantize != AUTO:
            self._compare(manifest, found)
        weights = saved.data.rename(self._folder / WEIGHTS)
        graph = external.relocate(graph, WEIGHTS, 0)
        report = {**manifest.report, **self._found, "seconds": self._seconds, "tries": found.tries if found else 0}
        manifest = replace(manifest, graph_bytes=len(graph), notes=tuple(self._notes), report=report)
        return Prepared(manifest, graph, weights)

    def _lap(self, step: str) -> None:
        now = perf_counter()
        self._seconds[step], self._begun = round(now - self._begun, 3), now

    def _form(self, quantize: str) -> Form:
        form = FORMS[quantize](self._source, self._folder, self._progress)
        self._lap("form")
        return form

    def _search(self, warmup: Mapping[str, Array] | None) -> Form:
        try:  # fp32 to compare with, the folded model, and one candidate with its weights packed
            optimize.check_room(self._folder, 2 * (estimate(self._source) + self._source.nbytes))
        except SegmentFull as e:
            found = left_alone(self._gate, f"no room for a search: {e.message}")
        else:
            found = find_form(self._source, self._folder, self._gate, warmup, self._trial, self._progress)
        self._found = {"gate": found.report}
        judged = f"; judged by {found.report['evidence']}" if found.form is not None else ""
        self._notes.append(f"quantize auto chose {found.report['choice']}: {found.report['reason']}{judged}")
        self._lap("search")
        return found.form or self._form("none")

    def _trial(self, form: Form) -> Trial:
        """The form opened as a worker would; its files are gone, and their memory goes with the session."""
        _, saved = optimize.write(form.path, self._folder, "trial", lambda _: None)
        graph, nbytes = saved.graph.read_bytes(), saved.graph.stat().st_size + saved.data.stat().st_size
        session = Session.open(self._manifest(form, saved, external.parse(graph)), graph, Mapped(str(self._folder)))
        saved.graph.unlink()
        saved.data.unlink()
        return Trial(session, nbytes)

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
        if not saved.packed:  # a disk that filled up is no reason for a form that costs every worker memory
            optimize.check_room(self._folder, max(0, estimate(self._source) - saved.data.stat().st_size))
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
        pairs = {
            spec.name: (ours, theirs)
            for spec, ours, theirs in zip(manifest.outputs, found.outputs, reference, strict=True)
            if isinstance(theirs, np.ndarray) and theirs.dtype.kind == "f" and theirs.shape == ours.shape
        }
        for name, (ours, theirs) in pairs.items():
            if np.isfinite(theirs).all() and not np.isfinite(ours).all():
                raise Unfit(f"on the warm-up inputs output {name!r} overflows, in fp32 it does not")
        cosines = {name: round(cosine(ours, theirs), 6) for name, (ours, theirs) in pairs.items()}
        manifest.report["cosine_to_fp32"] = cosines
        low = {name: value for name, value in cosines.items() if not value >= CLOSE}
        if low:
            name = min(low, key=lambda key: low[key])
            said = f"on the warm-up inputs {manifest.form} differs from fp32"
            self._notes.append(f"{said}: cosine {low[name]} of output {name!r}")
        self._lap("compare")


def _ops(model: ModelProto) -> dict[str, Any]:
    return signature.op_counts(f"{n.domain}.{n.op_type}".lstrip(".") for n in external.nodes(model))

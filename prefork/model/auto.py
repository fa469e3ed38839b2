"""quantize="auto": whether a search makes sense for this model at all, and the search. Loader's process.

Every way out is a form and a report; only data or a metric that the owner gave, and that does not fit, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from prefork.errors import ModelError
from prefork.model import evaluate, evidence, probe, quantize, signature
from prefork.model.datafile import Batches
from prefork.model.evidence import Given
from prefork.model.gate import Gate
from prefork.model.manifest import Warmup
from prefork.model.quantize import MIN_OPSET
from prefork.model.report import Step, untried
from prefork.model.repository import Source
from prefork.model.search import Outcome, Search, Try
from prefork.model.study import Study
from prefork.model.trial import Trial
from prefork.model.warmup import digest
from prefork.tensor import Array

NOTHING = Given(Batches(), Batches())


def find_form(
    source: Source,
    folder: Path,
    gate: Gate,
    warmup: Mapping[str, Array] | None,
    trial: Try,
    progress: Callable[[str], None],
) -> Outcome:
    """The form to serve; `trial` opens one as a worker does. Raises ModelError for data or a metric of the owner's that
    does not fit the model, also where nothing can be gained: that is better known than not."""
    given = evidence.read(gate, signature.inputs(source.skeleton)) if gate.eval or gate.calibration else NOTHING
    if isinstance(gate.metric, str) and ":" in gate.metric:
        evaluate.named(gate.metric)
    if kinds := quantize.already_quantized(source.skeleton):
        return left_alone(gate, f"left alone: it is already quantized ({', '.join(kinds)})", "quantized-source")
    if gate.budget <= 0:
        return left_alone(gate, "an accuracy budget of 0 leaves no room for quantization")
    if (opset := quantize.opset_of(source.skeleton)) < MIN_OPSET:
        return left_alone(gate, f"opset {opset} is older than {MIN_OPSET}, the first with quantized operators")
    progress(Step("studying the model", 0.0))
    try:
        study = Study(quantize.folded(source, folder), folder)
        if not study.linear_kinds and not study.convolutions:
            return left_alone(gate, "no operator that would gain from quantization")
        if not study.linear_kinds and not study.half_kernels and given == NOTHING and not gate.batches:
            return left_alone(
                gate, "convolutions need real inputs to find ranges by: give --calibration, --eval or --handler"
            )
        fp32 = trial(quantize.as_it_is(source, folder, progress))
    except ModelError as e:
        return left_alone(gate, f"it cannot be studied: {e.message}")
    if isinstance(found := _inputs(fp32, warmup), str):
        return left_alone(gate, found)
    return Search(gate, study, trial, progress).run(fp32, found, given)


def _inputs(fp32: Trial, warmup: Mapping[str, Array] | None) -> Warmup | str:
    """Inputs that run, or why there is nothing to measure with."""
    specs = fp32.session.inputs
    found = probe.given(fp32.run, specs, warmup) if warmup else probe.find(fp32.run, specs)
    if isinstance(found, probe.Failed):
        return f"no inputs are known that run; give a warm-up (the last said: {found.reason})"
    names = [spec.name for spec in fp32.session.outputs]
    again = fp32.run(probe.feeds(specs, found.recipe))
    if digest(names, found.outputs) != digest(names, again):
        return "two runs with equal inputs differ, so accuracy cannot be measured: the model has random operators"
    return found.recipe


def left_alone(gate: Gate, reason: str, choice: str = "fp32") -> Outcome:
    """The outcome without a search."""
    return Outcome(None, untried(gate, reason, choice))

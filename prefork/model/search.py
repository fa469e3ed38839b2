"""The search for the fastest form that keeps the accuracy budget, measured as it would be served. Loader's process.

One walk over candidates.TABLE. It never fails because of a candidate: what cannot be built, opened or run is a line of
the report. It ends in time: none is begun after the gate's seconds, and the evaluation is cut to fit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from prefork.errors import ModelError, PreforkError
from prefork.model import evaluate, evidence, timing
from prefork.model.candidates import TABLE, Row, Tried
from prefork.model.datafile import Feed
from prefork.model.evaluate import Judge
from prefork.model.evidence import Data, Given
from prefork.model.gate import Gate, Measured, Timing, choose, finalists, inaccurate, refusal
from prefork.model.manifest import Warmup
from prefork.model.quantize import Form
from prefork.model.recipe import Built, Recipe, build
from prefork.model.report import Step, as_report, judged
from prefork.model.study import Study
from prefork.model.trial import Trial
from prefork.value import Value

Try: TypeAlias = Callable[[Form], Trial]

SHARE = 0.06  # of the gate's seconds that one pass of fp32 over the evaluation may take
STAGES = len(TABLE) + 1  # of the way: the rows, and the finalists
SLOWEST = 1.0  # seconds of one fp32 run; a shape bucket above it is left out where there is a smaller one


@dataclass
class Log:
    """What becomes the report."""

    tried: list[Tried] = field(default_factory=list)
    not_tried: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """`form`: None for fp32. `report`: see report.py."""

    form: Form | None
    report: dict[str, object]


class Search:
    """One search. `trial` opens a form as a worker does; its files are removed by the caller of `trial`."""

    def __init__(self, gate: Gate, study: Study, trial: Try, progress: Callable[[str], None]) -> None:
        self._gate, self._study, self._trial, self._progress = gate, study, trial, progress
        self._end = time.monotonic() + gate.seconds
        self._begun = time.monotonic()
        self._log = Log()
        self._built: dict[int, Built] = {}
        self._trials: dict[int, Trial] = {}  # of those that passed so far and may win
        self._index = self._forms_of_row = 0
        study.deadline = self._end
        study.tried = self._log.tried

    def run(self, fp32: Trial, recipe: Warmup, given: Given) -> Outcome:
        """Raises ModelError only for what the owner gave: data or a metric that does not fit the model."""
        specs, limits = fp32.session.inputs, self._study.limits
        data = evidence.gather(given, self._gate, specs, recipe, limits, lambda feed: _runs(fp32, feed))
        data = self._affordable(fp32, data)
        judge = evaluate.judge(self._gate.metric, data, fp32.session.outputs, self._study.makers)
        theirs = [_given(fp32, feed, data.giver) for feed in data.evaluation]
        judge.measure(theirs, theirs)  # labels that do not fit are the owner's, and are said before any work
        buckets = self._buckets(fp32, evidence.buckets(data, specs, recipe))
        self._study.use(data)
        bench = Bench(judge, theirs, fp32, buckets, self._gate)
        for index, row in enumerate(TABLE):
            self._row(row, index, bench)
        self._final(bench)
        chosen = choose([one.measured for one in self._log.tried], self._gate)
        number = next((i for i, one in enumerate(self._log.tried) if one.measured is chosen), -1)
        form = self._built[number].form if chosen is not None else None
        return Outcome(form, as_report(self._gate, judge, self._log, chosen, fp32.nbytes, self._seconds()))

    def _seconds(self) -> float:
        return round(time.monotonic() - self._begun, 1)

    def _row(self, row: Row, index: int, bench: Bench) -> None:
        if reason := row.when(self._study):
            self._log.not_tried.append((row.name, reason))
            return
        if time.monotonic() > self._end:
            self._log.stopped = True
            self._log.not_tried.append((row.name, f"no time left of {self._gate.seconds:g} s"))
            return
        self._index, self._forms_of_row = index, 0
        self._progress(Step(f"trying {row.name}", index / STAGES))
        try:
            self._forms(row, bench)
        except Exception as e:  # a candidate that cannot be made is no reason not to serve the model
            self._fail(row, e)

    def _fail(self, row: Row, error: Exception) -> None:
        self._log.failed.append((row.name, _reason(error)))
        self._tell(f"{row.name} failed: {_reason(error)}")

    def _tell(self, text: str) -> None:
        """Of one form of the row at work. How many there will be is not known: each takes half of what is left."""
        self._forms_of_row += 1
        self._progress(Step(text, (self._index + 1 - 0.5**self._forms_of_row) / STAGES))

    def _forms(self, row: Row, bench: Bench) -> None:
        with contextlib.closing(row.forms(self._study)) as forms:
            recipe: Recipe | None = next(forms, None)
            while recipe is not None:
                try:
                    recipe = forms.send(self._one(row, recipe, bench))
                except StopIteration:
                    return
                if time.monotonic() > self._end:
                    self._log.stopped = True
                    return

    def _one(self, row: Row, recipe: Recipe, bench: Bench) -> Measured | None:
        number = len(self._log.tried)
        try:
            built = build(recipe, self._study.folder, f"form{number}", reduce_range=self._study.reduce_range)
            trial = self._trial(built.form)
            measured = bench.measure(trial, recipe, built)
        except Exception as e:  # onnxruntime's exceptions share no base class but this one
            self._fail(row, e)
            return None
        accurate = not inaccurate(measured, self._gate.budget)
        self._log.tried.append(Tried(row.name, recipe, measured, refusal(measured, self._gate), accurate))
        self._built[number] = built
        self._tell(judged(self._log.tried[-1]))
        if not accurate:
            built.form.path.with_suffix(".bin").unlink()
        self._trials[number] = trial
        may_win = finalists([one.measured for one in self._log.tried], self._gate)
        for index in [i for i in self._trials if self._log.tried[i].measured not in may_win]:
            del self._trials[index]
        return measured

    def _final(self, bench: Bench) -> None:
        """Time those that may win once more, side by side: alone, each met another moment of the machine."""
        if len(self._trials) < 2:
            return
        self._progress(Step("timing the finalists", len(TABLE) / STAGES))
        numbers = list(self._trials)
        found = bench.time([self._trials[number] for number in numbers])
        for number, timings in zip(numbers, found, strict=True):
            one = self._log.tried[number]
            measured = replace(one.measured, timings=timings)
            self._log.tried[number] = replace(one, measured=measured, refusal=refusal(measured, self._gate))

    def _affordable(self, fp32: Trial, data: Data) -> Data:
        first = data.evaluation[0]
        _given(fp32, first, data.giver)
        begun = time.perf_counter()
        fp32.run(first)
        once = time.perf_counter() - begun
        return data.first(max(1, int(SHARE * self._gate.seconds / max(once, 1e-6))))

    def _buckets(self, fp32: Trial, feeds: Mapping[str, Feed]) -> dict[str, Feed]:
        costs: dict[str, float] = {}
        for name, feed in feeds.items():
            with contextlib.suppress(PreforkError):
                fp32.run(feed)
                begun = time.perf_counter()
                fp32.run(feed)
                costs[name] = time.perf_counter() - begun
        if not costs:
            raise ModelError("no shape of the evaluation runs")
        fit = [name for name, cost in costs.items() if cost <= SLOWEST] or [min(costs, key=lambda n: costs[n])]
        return {name: feeds[name] for name in fit}


@dataclass(frozen=True, slots=True)
class Bench:
    """What every candidate is measured against."""

    judge: Judge
    theirs: Sequence[Sequence[Value]]
    fp32: Trial
    buckets: Mapping[str, Feed]
    gate: Gate

    def measure(self, trial: Trial, recipe: Recipe, built: Built) -> Measured:
        """Accuracy first; speed only where it holds."""
        ours = [trial.run(feed) for feed in self.judge.data.evaluation]
        delta, score = self.judge.measure(ours, self.theirs)
        kept = tuple(note.removeprefix("left in fp32: ") for note in built.form.notes)
        measured = Measured(recipe.name, trial.nbytes, delta, score, (), kept, built.treatments)
        if inaccurate(measured, self.gate.budget):
            return measured
        return replace(measured, timings=self.time([trial])[0])

    def time(self, trials: Sequence[Trial]) -> list[tuple[Timing, ...]]:
        """In every bucket, for each of the trials."""
        found = [
            timing.compare(name, self.fp32.call(feed), [trial.call(feed) for trial in trials])
            for name, feed in self.buckets.items()
        ]
        return [tuple(bucket[index] for bucket in found) for index in range(len(trials))]


def _given(trial: Trial, feed: Feed, giver: str) -> list[Value]:
    try:
        return trial.run(feed)
    except PreforkError as e:
        raise ModelError(f"{giver}: these inputs do not run: {e.message}") from None


def _runs(trial: Trial, feed: Feed) -> bool:
    try:
        trial.run(feed)
    except PreforkError:
        return False
    return True


def _reason(error: Exception) -> str:
    text = error.message if isinstance(error, PreforkError) else " ".join(str(error).split())
    return text[:300] or type(error).__name__

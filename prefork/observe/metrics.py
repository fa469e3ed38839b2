"""The metrics: their names, their help, and the collector that fills them from the scoreboard at scrape time.

Names and labels are an interface: they are only ever added to. Counters are the scoreboard's own words, which outlive
every worker, so they start at zero with the master and never go backwards. What a client sends becomes no label.
Latencies are told for all slots together, since a histogram a slot would be 240 series each; the rest by slot.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from prefork.errors import Code
from prefork.observe.memory import MemoryReader
from prefork.observe.snapshot import Snapshot, Watcher
from prefork.shm import words as w
from prefork.shm.scoreboard import Reading
from prefork.shm.words import MasterState, Stage, WorkerState

OTHER = "_other"  # no model may be called so
CODES = {int(code): code.name for code in Code}

# name on the board -> name here, help; each by slot
GAUGES = {
    "connections": ("prefork_connections", "Open client connections."),
    "in_flight": ("prefork_requests_in_flight", "Requests accepted and not answered yet."),
    "queue_depth": ("prefork_queue_depth", "Requests that wait for their run or are in it."),
}
COUNTERS = {
    "accepted_connections": ("prefork_connections_accepted", "Connections taken from the listening queue."),
    "requests": ("prefork_requests_accepted", "Requests accepted for work."),
    "refused": ("prefork_requests_refused", "Requests answered with an error instead of being accepted."),
    "dropped": ("prefork_requests_dropped", "Accepted requests whose client left before the answer."),
    "bytes_in": ("prefork_received_bytes", "Bytes read from clients."),
    "bytes_out": ("prefork_sent_bytes", "Bytes written to clients."),
    "starts": ("prefork_worker_starts", "Workers that have had the slot."),
}
RUNS = {"inline_runs": "inline", "thread_runs": "thread"}


class BoardCollector(Collector):
    """All of it. `build`: labels of prefork_build_info."""

    def __init__(self, watcher: Watcher, build: Mapping[str, str]) -> None:
        self._watcher = watcher
        self._build = build
        self._memory = MemoryReader()

    def describe(self) -> Iterable[Metric]:
        """Nothing: it would be asked for at registration, when there may be nothing to read yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Raises SegmentCorrupt when the master's page is broken."""
        seen = self._watcher.look()
        yield InfoMetricFamily("prefork_build", "Versions.", value=dict(self._build))
        yield from _server(seen)
        yield from _models(seen)
        yield _requests(seen)
        yield from _stages(seen.slots)
        yield _sizes(seen.slots)
        yield from _slots(seen.slots)
        yield from self._held(seen.slots)

    def _held(self, slots: Sequence[Reading]) -> Iterator[Metric]:
        private = GaugeMetricFamily("prefork_worker_private_bytes", "Memory of the worker alone.", labels=["slot"])
        shared = GaugeMetricFamily(
            "prefork_worker_proportional_bytes", "Private memory and a share of what is shared (PSS).", labels=["slot"]
        )
        for index, slot in enumerate(slots):
            held = self._memory.read(slot.pid) if slot.state is not WorkerState.GONE else None
            if held is not None:
                private.add_metric([str(index)], held.private)
                shared.add_metric([str(index)], held.proportional)
        return iter((private, shared))


def _server(seen: Snapshot) -> Iterator[Metric]:
    master = seen.master
    state = GaugeMetricFamily("prefork_server_state", "1 for the master's state, 0 for the others.", labels=["state"])
    for each in MasterState:
        state.add_metric([each.name.lower()], each is master.state)
    yield state
    for name, help, value in (
        ("prefork_server_start_time_seconds", "When the master began, Unix time.", master.started_ns * 1e-9),
        ("prefork_generation", "Generation of models that serves.", master.generation),
        ("prefork_workers_wanted", "Workers that the server should have.", master.wanted),
        ("prefork_scoreboard_broken_slots", "Slots of the scoreboard that hold nonsense.", seen.broken),
    ):
        yield GaugeMetricFamily(name, help, value=value)
    restarts = CounterMetricFamily("prefork_worker_restarts", "Workers that were replaced, by why.", labels=["reason"])
    for reason, count in master.restarts.items():
        restarts.add_metric([reason.name.lower()], count)
    yield restarts


def _models(seen: Snapshot) -> Iterator[Metric]:
    size = GaugeMetricFamily("prefork_model_segment_bytes", "Shared memory of the model's segment.", labels=["model"])
    number = GaugeMetricFamily("prefork_model_generation", "Generation that the segment is of.", labels=["model"])
    info = InfoMetricFamily("prefork_model", "How the model was prepared.", labels=["model"])
    for model in seen.master.models:
        if model.generation:
            size.add_metric([model.name], model.segment_bytes)
            number.add_metric([model.name], model.generation)
            labels = {key: text for key, text in model.labels.items() if re.fullmatch(r"[a-z][a-z0-9_]*", key)}
            info.add_metric([model.name], labels)
    return iter((size, number, info))


def _requests(seen: Snapshot) -> Metric:
    """A model that is served has its OK from the beginning, so that a rate over the first answer is right."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for model in seen.master.models:
        if model.generation:
            counts.update({(model.column, codec, 0): 0 for codec in (1, 2)})
    for slot in seen.slots:
        for column, codec, code, count in slot.answered():
            counts[column, codec, code] += count
    family = CounterMetricFamily(
        "prefork_requests", f"Requests answered; model {OTHER}: none that is served.", labels=["model", "codec", "code"]
    )
    for (column, codec, code), count in sorted(counts.items()):
        names = (seen.columns.get(column, OTHER), w.CODECS[codec - 1], CODES.get(code, str(code)))
        family.add_metric(names, count)
    return family


def _stages(slots: Sequence[Reading]) -> Iterator[Metric]:
    """A stage appears with its first duration: one that this server does not measure would stand at zero for ever."""
    family = HistogramMetricFamily(
        "prefork_stage_duration_seconds", "Time of a request in each stage, all slots.", labels=["stage"]
    )
    for stage in Stage:
        found = [slot.stages[stage] for slot in slots]
        counts = [sum(column) for column in zip(*(each.counts for each in found), strict=True)]
        if any(counts):
            family.add_metric([stage.name.lower()], _buckets(w.BOUNDS, counts), sum(each.sum for each in found))
    yield family


def _sizes(slots: Sequence[Reading]) -> Metric:
    counts = [sum(column) for column in zip(*(slot.sizes for slot in slots), strict=True)] or [0] * w.SIZE_BUCKETS
    family = HistogramMetricFamily("prefork_batch_size", "Rows in a run, all slots.")
    family.add_metric([], _buckets(w.SIZE_BOUNDS, counts), sum(slot.rows for slot in slots))
    return family


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    limits = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(limits, accumulate(counts), strict=True))


def _slots(slots: Sequence[Reading]) -> Iterator[Metric]:
    for board_name, (name, help) in GAUGES.items():
        gauge = GaugeMetricFamily(name, help, labels=["slot"])
        for index, slot in enumerate(slots):
            gauge.add_metric([str(index)], slot.values[board_name])
        yield gauge
    for board_name, (name, help) in COUNTERS.items():
        counter = CounterMetricFamily(name, help, labels=["slot"])
        for index, slot in enumerate(slots):
            counter.add_metric([str(index)], slot.values[board_name])
        yield counter
    runs = CounterMetricFamily("prefork_runs", "Runs of a model, by where.", labels=["slot", "where"])
    for index, slot in enumerate(slots):
        for board_name, where in RUNS.items():
            runs.add_metric([str(index), where], slot.values[board_name])
    yield runs
    yield from _lives(slots)


def _lives(slots: Sequence[Reading]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "prefork_worker_state", "1 for the worker's state, 0 for others.", labels=["slot", "state"]
    )
    generation = GaugeMetricFamily("prefork_worker_generation", "Generation that it serves.", labels=["slot"])
    silence = GaugeMetricFamily("prefork_worker_silence_seconds", "Time since its last heartbeat.", labels=["slot"])
    now = time.monotonic_ns()
    for index, slot in enumerate(slots):
        for each in WorkerState:
            state.add_metric([str(index), each.name.lower()], each is slot.state)
        if slot.state is not WorkerState.GONE:
            generation.add_metric([str(index)], slot.generation)
            silence.add_metric([str(index)], max(0, now - slot.tick_ns) * 1e-9)
    return iter((state, generation, silence))

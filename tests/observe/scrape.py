"""What a scraper does: text in the exposition format to values by name and labels. For the tests of metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples(body: str, *, strict: bool = False) -> dict[Sample, float]:
    """Every sample. `strict`: as OpenMetrics, whose parser checks order, types, buckets and the end."""
    found = list(_samples(body, strict))
    assert len({sample for sample, _ in found}) == len(found), "a sample is told twice"
    return dict(found)


def _samples(body: str, strict: bool) -> Iterator[tuple[Sample, float]]:
    for family in openmetrics(body) if strict else text(body):
        for sample in family.samples:
            yield (sample.name, tuple(sorted(sample.labels.items()))), sample.value


def sample(name: str, **labels: str) -> Sample:
    return name, tuple(sorted(labels.items()))


def counters(found: dict[Sample, float]) -> dict[Sample, float]:
    ends = ("_total", "_bucket", "_count", "_sum")
    return {key: value for key, value in found.items() if key[0].endswith(ends)}

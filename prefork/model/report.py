"""What a search found, as plain values for the manifest and as lines for people. Any process that reads a manifest.

`manifest.report["gate"]`:
    choice, reason      the form that is served, and why that one
    budget, metric, evidence, min_speedup, seconds, stopped_early
    fp32_bytes
    candidates          a list: name, verdict ("" passed), bytes, delta, score, speedup, latency_ms and fp32_ms by
                        bucket, kept (nodes in fp32, with reasons), treatments (nodes by treatment)
    not_tried, failed   lists of name and reason
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # commands that print a report load no numpy
    from prefork.model.gate import Gate, Measured

KEPT = 20  # nodes named in the report; the rest is a number
KEPT_LINES = 5  # of them printed


class Step(str):
    """A word on the way: text, and how much of the work lies behind, 0 to 1."""

    fraction: float

    def __new__(cls, text: str, fraction: float) -> Step:
        made = super().__new__(cls, text)
        made.fraction = fraction
        return made


def judged(one: _Tried) -> str:
    """One candidate in a line, with its figures."""
    m = one.measured
    found = f", loses {max(m.delta, 0):.2%}, {m.speedup:.2f} times as fast as fp32" if m.timings else ""
    return f"{m.name}: {m.nbytes / 1e6:.1f} MB{found}: {one.refusal or 'passes'}"


class _Tried(Protocol):
    @property
    def measured(self) -> Measured: ...
    @property
    def refusal(self) -> str: ...


class _Log(Protocol):
    @property
    def tried(self) -> Sequence[_Tried]: ...
    @property
    def not_tried(self) -> Sequence[tuple[str, str]]: ...
    @property
    def failed(self) -> Sequence[tuple[str, str]]: ...
    @property
    def stopped(self) -> bool: ...


class _Judge(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def data(self) -> Any: ...


def untried(gate: Gate, reason: str, choice: str = "fp32") -> dict[str, Any]:
    """The report when there was no search."""
    return {
        "choice": choice, "reason": reason, "budget": gate.budget, "metric": "", "evidence": "none",
        "min_speedup": gate.min_speedup, "seconds": 0.0, "stopped_early": False, "fp32_bytes": 0, "candidates": [],
        "not_tried": [], "failed": [],
    }  # fmt: skip


def as_report(
    gate: Gate, judge: _Judge, log: _Log, chosen: Measured | None, fp32_bytes: int, seconds: float
) -> dict[str, Any]:
    return {
        "choice": "fp32" if chosen is None else chosen.name,
        "reason": _reason(log, chosen),
        "budget": gate.budget,
        "metric": judge.name,
        "evidence": judge.data.words,
        "min_speedup": gate.min_speedup,
        "seconds": seconds,
        "stopped_early": log.stopped,
        "fp32_bytes": fp32_bytes,
        "candidates": [_candidate(one, one.measured is chosen) for one in log.tried],
        "not_tried": [{"name": name, "reason": reason} for name, reason in log.not_tried],
        "failed": [{"name": name, "reason": reason} for name, reason in log.failed],
    }


def _reason(log: _Log, chosen: Measured | None) -> str:
    if chosen is not None:
        others = sum(1 for one in log.tried if not one.refusal) - 1
        return f"{chosen.speedup:.2f} times as fast as fp32, loses {max(chosen.delta, 0):.2%}" + (
            f"; the best of {others + 1} that pass" if others else ""
        )
    if log.tried:
        return "no form passes: " + "; ".join(dict.fromkeys(f"{o.measured.name} {o.refusal}" for o in log.tried))
    said = [*log.failed, *log.not_tried]
    return "nothing to try: " + "; ".join(dict.fromkeys(reason for _, reason in said))


def _candidate(one: _Tried, chosen: bool) -> dict[str, Any]:
    m = one.measured
    kept = [*m.kept[:KEPT], *([f"and {len(m.kept) - KEPT} more"] if len(m.kept) > KEPT else [])]
    return {
        "name": m.name, "verdict": one.refusal, "chosen": chosen, "bytes": m.nbytes, "delta": _finite(m.delta),
        "score": _finite(m.score), "speedup": round(m.speedup, 3),
        "latency_ms": {t.bucket: round(t.ours * 1e3, 4) for t in m.timings},
        "fp32_ms": {t.bucket: round(t.fp32 * 1e3, 4) for t in m.timings},
        "ratios": {t.bucket: round(t.ratio, 3) for t in m.timings},
        "kept": kept, "treatments": dict(m.treatments or {}),
    }  # fmt: skip


def _finite(number: float) -> float | None:
    return round(number, 6) if math.isfinite(number) else None


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """The report as lines; `report` is `manifest.report`, or its "gate"."""
    gate = report.get("gate", report)
    if not isinstance(gate, Mapping) or "choice" not in gate:
        return ["no search was made: the form was asked for by name"]
    stopped = ", stopped early" if gate["stopped_early"] else ""
    lines = [
        f"choice     {gate['choice']}: {gate['reason']}",
        f"evidence   {gate['evidence']}" + (f" (metric {gate['metric']})" if gate["metric"] else ""),
        f"budget     {gate['budget']:.2%} of accuracy, at least {gate['min_speedup']:.2f} times as fast as fp32; "
        f"searched {gate['seconds']:g} s{stopped}",
    ]
    if gate["candidates"]:
        lines += ["", *_table(gate)]
    lines += _kept(gate)
    for key, word in (("failed", "failed"), ("not_tried", "not tried")):
        by_reason: dict[str, list[str]] = {}
        for entry in gate[key]:
            by_reason.setdefault(entry["reason"], []).append(entry["name"])
        lines += [f"{word:<10} {_counted(names)}: {reason}" for reason, names in by_reason.items()]
    return lines


def _counted(names: list[str]) -> str:
    counts = {name: names.count(name) for name in names}
    return ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in counts.items())


def _table(gate: Mapping[str, Any]) -> list[str]:
    buckets = list(dict.fromkeys(bucket for one in gate["candidates"] for bucket in one["latency_ms"]))
    head = ["", "FORM", "MB", "LOSS", "SPEED", *(f"{bucket} MS" for bucket in buckets), "VERDICT"]
    rows = [head, ["", "fp32", f"{gate['fp32_bytes'] / 1e6:.1f}", "", "", *(_fp32(gate, b) for b in buckets), ""]]
    for one in gate["candidates"]:
        loss = "not a number" if one["delta"] is None else f"{one['delta']:.3%}"
        speed = f"{one['speedup']:.2f}" if one["speedup"] else "-"
        times = [f"{one['latency_ms'][b]:.4g}" if b in one["latency_ms"] else "-" for b in buckets]
        mark = "*" if one["chosen"] else ""
        rows.append([mark, one["name"], f"{one['bytes'] / 1e6:.1f}", loss, speed, *times, one["verdict"] or "passes"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _fp32(gate: Mapping[str, Any], bucket: str) -> str:
    times = sorted(one["fp32_ms"][bucket] for one in gate["candidates"] if bucket in one["fp32_ms"])
    return f"{times[len(times) // 2]:.4g}" if times else "-"


def _kept(gate: Mapping[str, Any]) -> list[str]:
    chosen = next((one for one in gate["candidates"] if one["chosen"]), None)
    if chosen is None:
        return [""] if gate["candidates"] else []
    treated = ", ".join(f"{count} {name}" for name, count in chosen["treatments"].items())
    kept = chosen["kept"]
    lines = ["", f"nodes      {treated}"] + [f"in fp32    {what}" for what in kept[:KEPT_LINES]]
    return lines + ([f"in fp32    and {len(kept) - KEPT_LINES} more entries"] if len(kept) > KEPT_LINES else [])

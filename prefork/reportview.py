"""What people read of a prepared model: text from its manifest as plain values. Pure; imports nothing numeric.

Used by prefork-serve's `prepare` and `inspect` and by `prefork-ctl report`. Tolerates missing and unknown keys, because
the server asked may be of another version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prefork.ctlview import size, table
from prefork.model.report import report_lines

# Long, and of no interest to people: where each weight lies, and inputs made for a warm-up.
NOT_SHOWN = ("external", "warmup")
MOST = 8  # of a mapping; operator kinds come by number of nodes


def brief(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest for machines, without what only a worker needs."""
    return {key: value for key, value in manifest.items() if key not in NOT_SHOWN}


def text(manifest: Mapping[str, Any]) -> str:
    """The model, what was chosen, how that was found, and the notes."""
    report = dict(manifest.get("report") or {})
    search = report_lines(report) if "gate" in report else []
    report.pop("gate", None)
    lines = [*_head(manifest), *_report(report), *_notes(manifest.get("notes") or ())]
    return "\n".join([*lines, *([""] if search else []), *(f"  {line}".rstrip() for line in search)])


def _head(found: Mapping[str, Any]) -> Iterator[str]:
    cpu = found.get("cpu") or {}
    bytes_held = (found.get("weights_bytes") or 0) + (found.get("graph_bytes") or 0)
    yield f"{found.get('model', '?')}  {found.get('form', '?')}  (asked for: {found.get('quantize', '?')})"
    yield f"  source    {found.get('source', '?')}  {size(found.get('source_bytes'))}"
    yield f"  prepared  {size(bytes_held)}, {_how(found)}"
    yield f"  for       onnxruntime {found.get('ort_version', '?')} on {cpu.get('model', '?')}" + (
        " with VNNI" if cpu.get("vnni") else ""
    )


def _how(found: Mapping[str, Any]) -> str:
    words = "optimised" if found.get("optimized") else "graph as it is"
    words += ", weights packed" if found.get("packed") else ", weights not packed"
    if found.get("origin") == "cache":
        return f"{words}, from the cache"
    return words + (f", in {found['prepare_s']:.1f} s" if "prepare_s" in found else "")


def _report(report: Mapping[str, Any]) -> Iterator[str]:
    """Whatever the report holds: a list of rows as a table, a mapping on one line, a value as it is."""
    for name, value in report.items():
        title = name.replace("_", " ")
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            yield f"\n{title}"
            yield _table(value)
        elif isinstance(value, Mapping):
            shown = [f"{key} {_show(item)}" for key, item in list(value.items())[:MOST]]
            more = f", and {len(value) - MOST} more" if len(value) > MOST else ""
            yield f"  {title}: {', '.join(shown)}{more}"
        else:
            yield f"  {title}: {_show(value)}"


def _table(rows: list[dict[str, Any]]) -> str:
    head = list(dict.fromkeys(key for row in rows for key in row))
    return table(
        [key.replace("_", " ").upper() for key in head], [[_cell(row.get(key)) for key in head] for row in rows]
    )


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float) or value is None else _show(value)


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_show(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_show, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _notes(notes: Any) -> Iterator[str]:
    for note in notes:
        yield f"  note: {note}"

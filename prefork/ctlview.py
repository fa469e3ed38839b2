"""What prefork-ctl prints for people: aligned text from the plain values that JSON would carry. Pure.

Tolerates missing keys, because the server asked may be of another version.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prefork import ctlchange

Row = Mapping[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns two spaces apart; None as a dash. A column of numbers lines up on the right, its head too."""
    body = [list(row) for row in rows]
    right = [all(_numeric(row[i]) for row in body) and bool(body) for i in range(len(head))]
    cells = [list(head), *([_cell(value) for value in row] for row in body)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = (
        "  ".join(text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


class Amount(str):
    """A number already written with its unit; lines up like one."""


def _numeric(value: Any) -> bool:
    return value is None or isinstance(value, int | float | Amount)


def _cell(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def size(count: int | None) -> Amount | None:
    """`count` bytes in the largest binary unit, to one decimal."""
    if count is None:
        return None
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return Amount(f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}")
        amount /= 1024
    return None


def duration(seconds: float | None) -> Amount | None:
    """As people say it: 12s, 3m05s, 2h07m, 5d03h."""
    if seconds is None:
        return None
    whole = int(seconds)
    for limit, upper, lower, names in ((3600, 60, 1, "ms"), (86400, 3600, 60, "hm"), (float("inf"), 86400, 3600, "dh")):
        if whole < 60:
            return Amount(f"{whole}s")
        if whole < limit:
            return Amount(f"{whole // upper}{names[0]}{whole % upper // lower:02d}{names[1]}")
    return None


def status(found: Row) -> str:
    """The reply to `status`."""
    where = [*found.get("bind", []), *([f"unix:{found['unix']}"] if found.get("unix") else [])]
    head = f"prefork-serve {found.get('version', '?')}  pid {found.get('pid', '?')}  {found.get('state', '?')}"
    if found.get("loading"):
        head += f"  loading {found['loading']}"
    if found.get("generation"):
        head += f"  generation {found['generation']}"
    parts = [f"{head}  restarts {found.get('restarts', '?')}", f"listening on {', '.join(where) or 'nothing'}"]
    models = [
        (m.get("name"), m.get("generation"), m.get("form"), s.get("kind"), s.get("name"), size(s.get("size")),
         m.get("source"))
        for m in found.get("models", [])
        for s in [m.get("segment") or {}]
    ]  # fmt: skip
    parts += ["", table(("MODEL", "GEN", "FORM", "SHM", "SEGMENT", "SIZE", "SOURCE"), models)]
    if (change := found.get("change")) and change.get("kind") != "start":
        parts.append(ctlchange.view(change))
    parts += ["", _workers(found.get("workers", []), found.get("pss_bytes"))]
    return "\n".join(parts)


def _workers(rows: Sequence[Row], master: int | None) -> str:
    head = ("SLOT", "STATE", "PID", "GEN", "UPTIME", "REQUESTS", "IN-FLIGHT", "ERRORS", "PSS")
    body = [
        [w.get("slot"), w.get("state"), w.get("pid"), w.get("generation"), duration(w.get("uptime_s")),
         w.get("requests"), w.get("in_flight"), w.get("errors"), size(w.get("pss_bytes"))]
        for w in rows
    ]  # fmt: skip
    if master is not None:
        body.append([Amount("-"), "master", None, None, None, None, None, None, size(master)])
    sums = [sum(w.get(name) or 0 for w in rows) for name in ("requests", "in_flight", "errors", "pss_bytes")]
    body.append([Amount("all"), f"{len(rows)} slots", None, None, None, *sums[:3], size(sums[3] + (master or 0))])
    reasons = [f"slot {w.get('slot')}: {w['reason']}" for w in rows if w.get("reason")]
    return "\n".join([table(head, body), *reasons])


def segments(rows: Sequence[Row]) -> str:
    """The rows of `segments`."""
    if not rows:
        return "no segments"
    return table(
        ("SHM", "NAME", "SIZE", "OWNER", "ALIVE", "AGE", "MODEL", "GEN", "STATE"),
        (
            (r.get("kind"), r.get("name"), size(r.get("size")), r.get("owner_pid"), "yes" if r.get("alive") else "no",
             duration(r.get("age_s")), r.get("model"), r.get("generation"),
             _segment_state(r))
            for r in rows
        ),
    )  # fmt: skip


def _segment_state(row: Row) -> str:
    """In a word or, without naming the segment again, what is wrong with it."""
    state = "published" if row.get("published") else "unpublished"
    return str(row.get("problem") or state).removeprefix(f"segment {row.get('kind')}:{row.get('name')}: ")


def metadata(found: Row) -> str:
    """A model's inputs and outputs; a dynamic dimension is `?`."""
    rows = [
        (way, t["name"], t["datatype"], "[" + ", ".join("?" if d < 0 else str(d) for d in t["shape"]) + "]",
         " ".join(f"{key}={value}" for key, value in t.get("parameters", {}).items()))
        for way in ("inputs", "outputs")
        for t in found[way]
    ]  # fmt: skip
    title = f"{found['name']}  {found['platform']}  versions {', '.join(found['versions']) or '-'}"
    return f"{title}\n\n{table(('', 'NAME', 'TYPE', 'SHAPE', 'NOTE'), [(r[0][:-1], *r[1:]) for r in rows])}"


def outputs(found: Row) -> str:
    """One line an output: its value as JSON, or its summary."""
    return "\n".join(f"{name}: {_output(value)}" for name, value in found.items())


def _output(value: Row) -> str:
    kind = f"{value['dtype']} {value['shape']}  " if "shape" in value else ""
    if "value" in value:
        return kind + json.dumps(value["value"], ensure_ascii=False)
    return kind + "  ".join(f"{key} {value[key]}" for key in ("min", "max", "mean", "saved") if key in value)

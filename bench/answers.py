"""Claim: what the server answers is what ONNX Runtime answers, bit for bit.

Every model, as it is and in int8 where that applies, is served over both kinds of shared memory and asked over both
codecs at every worker. Reference: a plain InferenceSession on the same prepared model. Baseline: the original file
opened plainly; a model that is not quantized must be identical to it, or within 1e-5 of its largest output where the
optimiser reorders sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np

from bench import harness, models
from bench.bare import open_plainly
from bench.inputs import FEEDS, Answer, Feed, chained
from bench.prepared import Prepared, prepare
from bench.reach import every_worker
from bench.server import Server
from prefork.client import Client
from prefork.client.calls import CodecName
from prefork.demo import model_path
from prefork.value import Value

QUICK = ("minilm", "silero", "sklearn-wine")
CLOSE = 1e-5  # of an output's largest magnitude
DEMO = "digits"
WORKERS = 2
Pairs: TypeAlias = list[tuple[Feed, Answer]]


@dataclass
class Served:
    """One model in one form. `pairs`: requests and what plain ONNX Runtime answers on the prepared model; `drift`: how
    far that is from the original file, None when it was quantized; `asked` and `wrong`: answers of the server."""

    name: str
    source: Path
    prepared: Prepared
    pairs: Pairs
    drift: float | None
    asked: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        if self.drift is None:
            return "-"
        return "identical" if self.drift == 0 else f"{self.drift:.1e}"

    @property
    def right(self) -> bool:
        return bool(self.asked) and not self.wrong and (self.drift is None or self.drift <= CLOSE)


def same_bits(one: Value, other: Value) -> bool:
    """Whether two values have the same kind, types, shapes and bits."""
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same_bits, one, other))
    if not isinstance(one, np.ndarray):
        return type(one) is type(other) and bool(one == other)
    if not isinstance(other, np.ndarray) or one.shape != other.shape:
        return False
    if one.dtype.kind in "OUS":
        return bool((one.astype(object) == other.astype(object)).all())
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def distance(one: Value, other: Value) -> float:
    """The largest difference over the largest magnitude of `other`; 0 only for the same bits."""
    if same_bits(one, other):
        return 0.0
    if isinstance(one, list) and one and isinstance(one[0], dict):
        one, other = (np.array([list(row.values()) for row in value]) for value in (one, other))
    if not isinstance(one, np.ndarray) or one.shape != other.shape or one.dtype.kind not in "fiu":
        return float("inf")
    ours, theirs = one.astype(np.float64), other.astype(np.float64)
    return float(np.abs(ours - theirs).max() / max(float(np.abs(theirs).max()), 1e-30)) or 1e-30


def plainly(path: Path, *, as_is: bool) -> Callable[[Feed], Answer]:
    session = open_plainly(path, as_is=as_is)
    names = [output.name for output in session.get_outputs()]
    return lambda feed: dict(zip(names, session.run(None, feed), strict=True))


def reference(source: Path, name: str, quantize: str, folder: Path) -> Served | None:
    """The answers to expect; None when int8 does not apply to the model."""
    prepared = prepare(source, folder / name, quantize)
    if quantize == "int8" and prepared.manifest.form != "int8-dynamic":
        return None
    feeds = FEEDS[source.stem](source)
    pairs = list(chained(feeds, plainly(prepared.graph, as_is=prepared.manifest.optimized)))
    drift = None
    if quantize == "none":
        run = plainly(source, as_is=False)
        drift = max(distance(answer[key], value) for feed, answer in pairs for key, value in run(feed).items())
    return Served(name, source, prepared, pairs, drift)


def check(served: Served, client: Client, where: str) -> None:
    for feed, wanted in served.pairs:
        found = client.infer(served.name, feed)
        served.asked += 1
        wrong = [key for key, value in wanted.items() if key not in found or not same_bits(found[key], value)]
        if wrong or found.keys() != wanted.keys():
            served.wrong.append(f"{where}: {', '.join(wrong) or sorted(found)}")


def ask(served: list[Served], kind: str, place: Path) -> None:
    """Serve all of them over one kind of shared memory, and compare at each worker over each codec."""
    config = place / "prefork.toml"
    rows = [
        f'[[models]]\nname = "{one.name}"\npath = "{one.source}"\nquantize = "{_form(one)}"\n' for one in served
    ]  # fmt: skip
    config.write_text("\n".join(rows))
    with Server(place, "--config", str(config), "--shm", kind, "--workers", str(WORKERS)) as server:
        first = next(one for one in served if one.source.stem == DEMO)
        for codec in get_args(CodecName):
            with every_worker(server, first.name, first.pairs[0][0], codec) as clients:
                for slot, client in clients.items():
                    for one in served:
                        check(one, client, f"{kind}, slot {slot}, {codec}")


def _form(served: Served) -> str:
    return served.prepared.manifest.quantize


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; default all in the folder and the tables")
    args = parser.parse_args(argv)
    report = harness.Report("answers", args)
    names = args.names or (
        QUICK if args.quick else sorted({p.stem for p in args.models.glob("*.onnx")} | {*models.TABULAR})
    )
    sources = [model_path(), *models.fetch(args.models, [name for name in names if name in FEEDS])]
    with harness.place() as place:
        served = [
            found
            for source in sources
            for form in ("none", "int8")
            if (found := reference(source, source.stem + ("" if form == "none" else ".int8"), form, place / "prepared"))
        ]
        for kind in ("posix", "sysv"):
            (place / kind).mkdir()
            ask(served, kind, place / kind)
    return finish(report, served)


def finish(report: harness.Report, served: list[Served]) -> int:
    rows = [_row(one) for one in served]
    head = ("MODEL", "FORM", "REFERENCE", "BASELINE: ORIGINAL", "OURS: ANSWERS", "WRONG")
    report.table("plain session on the prepared model | original file | through the server", head, rows)
    for one in served:
        for text in one.wrong[:3]:
            print(f"{one.name}: {text}")
    right = sum(one.right for one in served)
    asked, wrong = sum(one.asked for one in served), sum(len(one.wrong) for one in served)
    drifted = [one.name for one in served if one.drift]
    figure = (
        f"{asked - wrong} of {asked} answers bit-identical, {right} of {len(served)} models and forms right; "
        f"not quantized and not identical to the original: {', '.join(drifted) or 'none'}"
    )
    return report.finish(right == len(served), figure)


def _row(one: Served) -> list[Any]:
    return [
        one.source.stem,
        one.prepared.manifest.form,
        "1",
        one.kind,
        f"{one.asked - len(one.wrong)}/{one.asked}",
        len(one.wrong),
    ]


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])

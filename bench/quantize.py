"""Claim: quantize = auto serves each model in the fastest form that keeps the accuracy budget, and none slower.

Reference: the model optimised in fp32. Baselines: plain dynamic int8, what the common one-line tool gives, its loss and
speed (where that would pass); float16, as the search measured it, or on one request where the search had no need.
Ours: the form that the search chose, timed by turns with fp32 on one thread. Encoders are judged on paragraphs of this
project's pages, half of them for calibration, the other half for judging; OCR on numbers drawn as pictures;
Fashion-MNIST and the digits by their labels. Other pictures and sound are noise, so their agreement says less.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import convnet, glyphs, harness, models
from bench.inputs import FEEDS, Feed, encoder_feed
from bench.prepared import prepare
from prefork.demo import evaluation_path, model_path
from prefork.model import optimize, pack, timing
from prefork.model.gate import Gate
from prefork.model.report import report_lines
from prefork.model.repository import read_model

ENCODERS = ("minilm", "mpnet", "bert-base-random")
QUICK = ("minilm", "nsfw-resnet", "ppocr2-cls", "silero-op15", "digits")
CNN = 1.6
FASHION = "fashion-mnist"
GOALS = {"mpnet": 2.0, "bert-base-random": 3.2} | dict.fromkeys(
    ("nsfw-resnet", "ddddocr-det", "ppocr4-det", FASHION), CNN
)  # least speed over fp32
LENGTH, SHORT = 128, 16  # tokens of a request at most, at least
BUDGET = 0.005
LEAST = 0.97  # of fp32's speed, measured once more after the search
TRAINED, EPOCHS = 12_000, 3


@dataclass
class Found:
    """What the search did with one model."""

    name: str
    form: str
    gate: dict[str, Any]
    half: tuple[float, float] | None
    lines: list[str] = field(default_factory=list)

    @property
    def chosen(self) -> dict[str, Any]:
        return next((one for one in self.gate["candidates"] if one["chosen"]), {})

    @property
    def plain(self) -> dict[str, Any]:
        return next((one for one in self.gate["candidates"] if one["name"] == "int8-dynamic"), {})

    @property
    def speedup(self) -> float:
        return float(self.chosen.get("speedup", 1.0))

    @property
    def holds(self) -> bool:
        right = (self.chosen.get("delta") or 0) <= BUDGET
        return right and self.speedup >= GOALS.get(self.name, LEAST)


def paragraphs() -> list[str]:
    """Of the pages at the root of the repository, the longer ones."""
    root = Path(__file__).parents[1]
    texts = [part.strip() for page in sorted(root.glob("*.md")) for part in page.read_text().split("\n\n")]
    return [text for text in texts if len(text) > 300 and not text.startswith(("```", "|"))]


def sentences(model: Path) -> list[Feed]:
    """Paragraphs as an encoder gets them, one a request; ids are drawn where there is no tokenizer."""
    generator = np.random.default_rng(1)
    file = model.with_suffix(".tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        file = model.with_suffix(".missing")
    if not file.exists():
        drawn = [generator.integers(1000, 30000, (1, LENGTH)) for _ in range(16)]
        return [encoder_feed(model, ids, np.ones_like(ids)) for ids in drawn]
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rows = [np.array([tokenizer.encode(text).ids[:LENGTH]], np.int64) for text in paragraphs()]
    full = [ids for ids in rows if ids.shape[1] >= SHORT][:32]
    return [encoder_feed(model, ids, np.ones_like(ids)) for ids in sorted(full, key=lambda ids: -ids.shape[1])[:24]]


def gate_for(model: Path, seconds: float) -> Gate:
    if model.stem in ENCODERS:
        return Gate(budget=BUDGET, batches=sentences(model), seconds=seconds)
    if model.stem == "digits":
        return Gate(budget=BUDGET, eval=model.with_name("digits-labels.npz"), seconds=seconds)
    if model.stem == FASHION:
        beside = model.with_suffix(".eval.npz"), model.with_suffix(".calibration.npz")
        return Gate(budget=BUDGET, eval=beside[0], calibration=beside[1], seconds=seconds)
    drawn = glyphs.pages(model.stem) if model.stem in glyphs.LAYOUTS else FEEDS[model.stem](model)
    return Gate(budget=BUDGET, batches=drawn, seconds=seconds)


def digits(folder: Path) -> Path:
    """The demo model, and its held-out data beside it."""
    (folder / "digits-labels.npz").write_bytes(evaluation_path().read_bytes())
    target = folder / "digits.onnx"
    target.write_bytes(model_path().read_bytes())
    return target


def fashion(folder: Path, data: Path) -> Path:
    """A network trained here on Fashion-MNIST, with its test set as labelled data."""
    train, test = convnet.fashion(data, "train"), convnet.fashion(data, "t10k")
    net = convnet.Net()
    net.train(convnet.Split(train.images[:TRAINED], train.labels[:TRAINED]), EPOCHS)
    target = folder / f"{FASHION}.onnx"
    np.savez(target.with_suffix(".eval.npz"), image=test.images, labels=test.labels)
    np.savez(target.with_suffix(".calibration.npz"), image=train.images[-128:])
    target.write_bytes(net.export().SerializeToString())
    return target


def search(model: Path, seconds: float, tell: Callable[[str], None]) -> Found:
    with tempfile.TemporaryDirectory(prefix="quantize-") as work:
        source, gate = read_model(model), gate_for(model, seconds)
        made = pack.prepare(source, name=model.stem, quantize="auto", gate=gate, work_dir=Path(work), progress=tell)
        report = made.manifest.report
        half = float16(model, gate, report["gate"], Path(work))
    return Found(model.stem, made.manifest.form, report["gate"], half, report_lines(report))


def float16(model: Path, asked: Gate, report: dict[str, Any], folder: Path) -> tuple[float, float] | None:
    """Loss and speed of the form fp16, as the search found them, or on the first request; None without such a form."""
    for one in report["candidates"]:
        if one["name"] == "fp16":
            return one["delta"], one["speedup"]
    forms = {form: prepare(model, folder / form, form) for form in ("none", "fp16")}
    feed = next(iter(asked.batches), None)
    if feed is None or forms["fp16"].manifest.form != "fp16":
        return None
    plain, half = (
        optimize.open_prepared(one.graph.read_bytes(), one.graph.parent, optimized=one.manifest.optimized)
        for one in forms.values()
    )
    (found,) = timing.compare("", lambda: plain.run(None, feed), [lambda: half.run(None, feed)])
    pairs = zip(half.run(None, feed), plain.run(None, feed), strict=True)
    near = [pack.cosine(ours, theirs) for ours, theirs in pairs if theirs.dtype.kind == "f"]
    return 1 - min(near, default=1.0), round(found.ratio, 3)


def _row(found: Found) -> list[Any]:
    chosen, plain, half = found.chosen, found.plain, found.half
    buckets = " ".join(f"{bucket}:{ratio:.2f}" for bucket, ratio in chosen.get("ratios", {}).items())
    return [
        found.name, found.gate["metric"] or "-", "1", _loss(plain), plain.get("speedup") or "-",
        "-" if half is None else f"{max(half[0], 0):.3%}", "-" if half is None else half[1] or "-",
        found.form, _loss(chosen), found.speedup, buckets or "-", GOALS.get(found.name, "-"),
        "yes" if found.holds else "NO",
    ]  # fmt: skip


def _loss(candidate: dict[str, Any]) -> str:
    delta = candidate.get("delta")
    return "-" if delta is None else f"{max(delta, 0):.3%}"


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; default all in the folder, and the digits")
    parser.add_argument("--fashion", type=Path, default=convnet.FASHION, metavar="DIR", help="Fashion-MNIST's files")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each search")
    args = parser.parse_args(argv)
    report = harness.Report("quantize", args)
    seconds = min(args.seconds, 15.0) if args.quick else args.seconds
    found: list[Found] = []
    with harness.place() as place:
        for model in _models(args, place):
            found.append(search(model, seconds, lambda step: None))
            print(f"\n{model.stem}\n" + "\n".join(found[-1].lines), flush=True)
    head = (
        "MODEL", "METRIC", "FP32", "PLAIN INT8 LOSS", "SPEED", "FP16 LOSS", "SPEED",
        "OURS", "LOSS", "SPEED", "BY SHAPE", "GOAL", "HOLDS",
    )  # fmt: skip
    report.table("reference fp32 | baselines plain dynamic int8, fp16 | ours", head, [_row(one) for one in found])
    report.data["reports"] = {one.name: one.gate for one in found}
    failed = [one.name for one in found if not one.holds]
    fastest = ", ".join(f"{one.name} {one.speedup:.2f}" for one in found if one.chosen)
    figure = f"{len(found) - len(failed)} of {len(found)} models hold; times as fast as fp32: {fastest}"
    return report.finish(not failed, figure + (f"; not: {', '.join(failed)}" if failed else ""))


def _models(args: Any, place: Path) -> Iterator[Path]:
    there = sorted({path.stem for path in args.models.glob("*.onnx")} & FEEDS.keys())
    names = args.names or (QUICK if args.quick else [*there, "digits", FASHION])
    for name in names:
        if name == FASHION and not args.fashion.is_dir():
            print(f"{FASHION}: no files in {args.fashion}, left out", flush=True)
        elif name == FASHION:
            yield fashion(place, args.fashion)
        else:
            yield digits(place) if name == "digits" else models.fetch(args.models, [name])[0]


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])

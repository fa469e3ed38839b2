"""Claim: with a warm cache the first answer comes at most 0.5 s after what Python's own imports take (MPNet, int8).

The time runs from before the process is started until its first answer, 128 tokens over TCP, is there. In each round,
one after the other: our server with the model in the cache; the imports alone that it makes on that way, in one
process; our server without a cache, which prepares the model anew; a plain process that imports numpy and ONNX Runtime,
opens the fp32 file and answers the same; and that process's imports alone. The disk's own speed does not enter: the
files are in the page cache for all of them.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median

import numpy as np

from bench import harness, wire
from bench.inputs import sequence
from bench.peer import Peer
from bench.server import REPOSITORY, Server

LENGTH = 128  # tokens
MOST = 0.5  # seconds beyond imports
STAGES = {"starting": "master up", "segment published": "copied", "READY": "opened, warm"}


@dataclass
class Rounds:
    """Seconds of each round. `stages`: what our warm starts were doing, from the log; `cpu`: CPU seconds of all
    processes of a part, their end included, which a busy machine disturbs less."""

    warm: list[float] = field(default_factory=list)
    imports: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    plain_imports: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    cpu: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def beyond(self) -> list[float]:
        return [warm - own for warm, own in zip(self.warm, self.imports, strict=True)]


def cpu() -> float:
    """CPU seconds of all processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def helper(*args: str) -> tuple[float, float]:
    """Seconds until a helper process says that it is done, and its CPU seconds."""
    began, before = time.perf_counter(), cpu()
    with Peer("bench.cold", *args):
        took = time.perf_counter() - began
    return took, cpu() - before


def serve(source: Path, form: str, place: Path, cache: str, data: bytes) -> tuple[float, float, dict[str, float]]:
    """Seconds until the first answer of a server of its own, CPU seconds, and the seconds that each stage took."""
    place.mkdir()
    args = (f"--model={source.stem}={source}", "--quantize", form, "--workers", "1", "--cache-dir", cache)
    began, before_cpu, clock = time.perf_counter(), cpu(), time.time()
    with Server(place, *args) as server:
        (address,) = [str(line["bind"]) for line in server.log() if line["event"] == "starting"]
        wire.exchange(address, data)
        took = time.perf_counter() - began
        stages, before = {}, clock
        for line in server.log():
            if stage := STAGES.get(line["event"]):
                moment = datetime.fromisoformat(line["ts"]).timestamp()
                stages[stage], before = moment - before, moment
        stages["answered"] = clock + took - before
    return took, cpu() - before_cpu, stages


def fill(source: Path, form: str, cache: str) -> None:
    """The cache, as `prefork-serve prepare` fills it."""
    command = [sys.executable, "-m", "prefork", "prepare", f"--model={source.stem}={source}", "--quantize", form,
               "--cache-dir", cache, "--log-level", "warning"]  # fmt: skip
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)


def measure(source: Path, form: str, place: Path, rounds: int) -> Rounds:
    feed = sequence(source, LENGTH)
    inputs, cache = place / "inputs.npz", str(place / "cache")
    np.savez(inputs, **feed)
    data = wire.request(source.stem, feed)
    fill(source, form, cache)
    found = Rounds()
    for turn in range(rounds + 1):
        warm, warm_cpu, stages = serve(source, form, place / f"warm-{turn}", cache, data)
        imports = helper("imports", "serve")
        fresh, fresh_cpu, _ = serve(source, form, place / f"fresh-{turn}", "", data)
        plain = helper("plain", str(source), str(inputs))
        parts = ((warm, warm_cpu), imports, (fresh, fresh_cpu), plain, helper("imports", "plain"))
        if turn:  # the first round brings files into the page cache
            found.stages.append(stages)
            lists = (found.warm, found.imports, found.fresh, found.plain, found.plain_imports)
            for values, part in zip(lists, parts, strict=True):
                values.append(part[0])
            found.cpu.append(tuple(part[1] for part in parts))
    return found


def show(report: harness.Report, title: str, found: Rounds) -> None:
    plain = median(found.plain)
    warm_cpu, _, fresh_cpu, plain_cpu, _ = (median(part) for part in zip(*found.cpu, strict=True))
    fresh, warm, own = median(found.fresh), median(found.warm), median(found.imports)
    rows = [
        ("reference: a plain process, fp32 file", plain, median(found.plain_imports), 1.0, plain_cpu),
        ("baseline: our server, preparing", fresh, own, fresh / plain, fresh_cpu),
        ("ours: our server, from the cache", warm, own, warm / plain, warm_cpu),
    ]
    head = ("START", "SECONDS", "OF THEM IMPORTS", "RATIO", "CPU SECONDS")
    report.table(f"{title}: process start to first answer", head, rows)
    names = list(found.stages[0])
    stages = [(name, median(stage[name] for stage in found.stages)) for name in names]
    report.table("ours, stage by stage", ("STAGE", "SECONDS"), stages)


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--model", default="", help="default mpnet, with --quick minilm")
    parser.add_argument("--quantize", default="int8", help="as of prefork-serve; default int8")
    parser.add_argument("--rounds", type=int, default=0, help="default 7, with --quick 2")
    args = parser.parse_args(argv)
    report = harness.Report("coldstart", args)
    source = harness.model(args.models, args.model or ("minilm" if args.quick else "mpnet"))
    with harness.place() as place:
        found = measure(source, args.quantize, place, args.rounds or (2 if args.quick else 7))
    show(report, f"{source.stem} {args.quantize}", found)
    report.data["seconds_of_rounds"] = {
        name: getattr(found, name) for name in ("warm", "imports", "fresh", "plain", "cpu")
    }
    beyond, warm = median(found.beyond), median(found.warm)
    figure = (
        f"{source.stem} {args.quantize} from the cache: first answer {beyond:.2f} s beyond imports of "
        f"{median(found.imports):.2f} s (at most {MOST}); {median(found.fresh) / warm:.1f} times sooner than preparing "
        f"and {median(found.plain) / warm:.2f} times sooner than a plain process with the fp32 file"
    )
    return report.finish(beyond <= MOST, figure)


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])

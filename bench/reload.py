"""Claim: 1,000 reloads, rolling restarts and HUPs under load lose no request, refuse and reset no connection, leave
nothing behind, and cost at most 1.5 times the usual p99.

One server with the demo model and an encoder, two workers, default sysctls. The load (bench.openload) comes at the rate
that keeps the processors half busy, on kept connections and on one for each request, over both codecs, mostly from
clients that repeat nothing. Changes come back to back in busy periods, with quiet ones in between; p99 of the busy ones
is set against p99 of the quiet ones of the same run. Every reload finds another model file: two that differ in their
answers take turns, and each answer must be one of the two. What the server holds is counted at rest.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import harness, life, procs
from bench.inputs import FEEDS
from bench.life import Holding, Operator
from bench.peer import Peer
from bench.server import Server
from prefork import cpus
from prefork.client import Client
from prefork.demo import model_path

MOST = 1.5  # times the quiet p99
ENCODER = "minilm"
WORKERS = 2
SHARE = 0.5  # of the processors' time that load and server take together when nothing changes
PROBE = 100.0  # requests a second while it is found out what one takes
BUSY, QUIET = 5.0, 2.5  # seconds of a period at least
AFTER = 1.0  # seconds between a busy period and a quiet one that belong to neither
SETTLED = 50  # changes after which what the server holds is taken for what it needs
SLACK = 0.05, 8e6  # share and bytes that memory may grow by: heaps differ from process to process
KINDS = ("reload", "restart", "hup", "reload", "restart", "reload digits")


@dataclass
class Course:
    """What happened. `held`: number of changes and what the server then held."""

    rate: float = 0.0
    changes: int = 0
    failed: list[str] = field(default_factory=list)
    held: list[tuple[int, Holding]] = field(default_factory=list)
    load: dict[str, Any] = field(default_factory=dict)

    def grown(self) -> list[str]:
        """What the server holds more at the end than after SETTLED changes."""
        if len(self.held) < 2:
            return ["too few changes to tell"]
        settled = next((one for count, one in self.held if count >= SETTLED), self.held[0][1])
        last = self.held[-1][1]
        names = ("fds", "segments", "processes", "files")
        # a reload of one model keeps the other's segment, so these differ by one or two from change to change
        found = [name for name in names if getattr(last, name) > max(getattr(one, name) for _, one in self.held[:-1])]
        memory = [name for name in ("pss", "master") if grew(getattr(settled, name), getattr(last, name))]
        return found + memory


def grew(before: int, after: int) -> bool:
    return after > before * (1 + SLACK[0]) + SLACK[1]


class Site:
    """The folder of one run: the model files, the two versions of the demo model, and the server."""

    def __init__(self, place: Path, models: Path) -> None:
        self.place = place
        self.live = place / "digits.onnx"
        self.versions = [life.variant(model_path(), place / f"version-{i}", 1.0 + i) for i in range(2)]
        self.encoder = harness.model(models, ENCODER)
        self._next = itertools.cycle(self.versions)
        self.turn()
        self.server = Server(
            place, f"--model=digits={self.live}", f"--model={ENCODER}={self.encoder}", "--quantize", "int8",
            "--workers", str(WORKERS), "--cache-dir", str(place / "cache"),
        )  # fmt: skip

    def turn(self) -> None:
        """Put the other version in place."""
        life.put(next(self._next), self.live)

    def plan(self, operator: Operator) -> Path:
        """The load's plan. Both versions are reloaded once for it, which also fills the cache."""
        inputs = {"digits": FEEDS["digits"](model_path())[0], ENCODER: FEEDS[ENCODER](self.encoder)[0]}
        answers = []
        for _ in self.versions:
            self.turn()
            operator.change("reload")
            with Client(self.server.address) as client:
                answers.append(client.infer("digits", inputs["digits"]))
        first, second = (np.asarray(one["probabilities"]) for one in answers)
        assert not np.array_equal(first, second), "a reload changed nothing"
        plan = {
            "address": self.server.address, "unix": self.server.unix,
            "inputs": {model: self._keep(model, feed) for model, feed in inputs.items()},
            "answers": {"digits": [self._keep(f"answer-{i}", one) for i, one in enumerate(answers)]},
        }  # fmt: skip
        path = self.place / "plan.json"
        path.write_text(json.dumps(plan))
        return path

    def _keep(self, name: str, arrays: Any) -> str:
        path = self.place / f"{name}.npz"
        np.savez(path, **arrays)
        return str(path)


def drive(site: Site, operator: Operator, load: Peer, count: int, seconds: float, share: float) -> Course:
    """Busy and quiet periods until there have been `count` changes or the time is over."""
    course = Course()
    course.rate = probe(site, load) * share
    load.ask(rate=course.rate)
    operator.took.clear()
    kinds, end = itertools.cycle(KINDS), time.monotonic() + seconds
    with stopped(load, course):
        while course.changes < count and time.monotonic() < end and not course.failed:
            time.sleep(AFTER)
            with phase(load, "quiet"):
                time.sleep(QUIET)
            with phase(load, "busy"):
                period = time.monotonic() + BUSY
                while course.changes < count and time.monotonic() < period:
                    change(site, operator, course, next(kinds))
                operator.rest()
            course.held.append((course.changes, Holding.of(site.server, site.server.pid)))
    return course


def probe(site: Site, load: Peer) -> float:
    """Requests a second that would fill all processors, by the CPU time that requests take on both sides."""
    load.ask(rate=PROBE)
    time.sleep(1.0)
    pids = [load.pid, *procs.descendants(site.server.pid)]
    before, began = procs.total_cpu(pids), time.perf_counter()
    time.sleep(3.0)
    used, took = procs.total_cpu(pids) - before, time.perf_counter() - began
    return cpus.allowed().count * PROBE * took / used


def change(site: Site, operator: Operator, course: Course, kind: str) -> None:
    if kind != "restart":
        site.turn()
    try:
        operator.change(kind)
        operator.until(lambda found: life.phase(found) == "", "the end of the change")
    except life.ChangeFailed as error:
        course.failed.append(str(error))
    course.changes += 1


@contextmanager
def phase(load: Peer, name: str) -> Iterator[None]:
    """The load counts under this name meanwhile, and under `between` afterwards."""
    load.ask(phase=name)
    try:
        yield
    finally:
        load.ask(phase="between")


@contextmanager
def stopped(load: Peer, course: Course) -> Iterator[None]:
    """End the load after it, and keep what it tells."""
    try:
        yield
    finally:
        course.load = load.ask(stop=True)


def show(report: harness.Report, course: Course, operator: Operator) -> None:
    rows = course.load["rows"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    report.table(
        f"requests at {course.rate:.0f}/s", ("WAY", "ANSWERED", "FAILED", "WRONG"),
        [(way, *(sum(row[key] for row in rows if row["way"] == way) for key in ("answered", "failed", "wrong")))
         for way in ways],
    )  # fmt: skip
    times = course.load["times"]
    names = [name for name in ("quiet", "busy") if times.get(name)]
    cuts = ("p50", "p90", "p99", "p99.9", "max")
    report.table(
        "milliseconds from the moment a request was due", ("PERIOD", *cuts),
        [(name, *(times[name][cut] * 1e3 for cut in cuts)) for name in names],
    )  # fmt: skip
    report.table(
        "seconds of a change", ("CHANGE", "COUNT", "MEDIAN", "MAX"),
        [(kind, len(took), median(took), max(took)) for kind, took in operator.took.items()],
    )  # fmt: skip
    marks = sorted({0, len(course.held) - 1, *range(0, len(course.held), max(1, len(course.held) // 8))})
    heads = ("CHANGES", "ALL PSS MB", "MASTER PSS MB", "MASTER FDS", "SEGMENTS", "PROCESSES", "FILES")
    held = [course.held[mark] for mark in marks if 0 <= mark < len(course.held)]
    report.table(
        "what the server holds at rest", heads,
        [(count, one.pss / 1e6, one.master / 1e6, one.fds, one.segments, one.processes, one.files)
         for count, one in held],
    )  # fmt: skip
    failures = [
        f"{count} x {text} ({row['way']}, {row['phase']})" for row in rows for text, count in row["failures"].items()
    ]
    for text in [*course.failed, *failures][:10]:
        print(f"  {text[:600]}")


def verdict(report: harness.Report, course: Course) -> int:
    rows = course.load["rows"]
    answered, failed, wrong = (sum(row[key] for row in rows) for key in ("answered", "failed", "wrong"))
    connects = sum(count for row in rows for text, count in row["failures"].items() if "no connection" in text)
    times, grown = course.load["times"], course.grown()
    quiet, busy = (times.get(name, {}).get("p99", float("nan")) for name in ("quiet", "busy"))
    report.data |= {
        "load": course.load, "rate": course.rate, "changes": course.changes, "changes_failed": course.failed,
        "held": [(count, one.plain()) for count, one in course.held], "grown": grown,
        "sysctls": {name: Path(f"/proc/sys/{name}").read_text().strip() for name in SYSCTLS},
    }  # fmt: skip
    more = ", ".join(grown) or "nothing"
    holds = not (failed or wrong or course.failed or grown) and busy <= MOST * quiet and answered > 0
    figure = (
        f"{course.changes} changes under {course.rate:.0f} requests/s: {failed} of {answered + failed} failed "
        f"({connects} connects), {wrong} wrong, {len(course.failed)} changes failed, grown: {more}; p99 "
        f"{busy * 1e3:.1f} ms during changes, {quiet * 1e3:.1f} ms without: {busy / quiet:.2f} times (at most {MOST})"
    )
    return report.finish(holds, figure)


SYSCTLS = ("net/ipv4/tcp_migrate_req", "net/ipv4/tcp_tw_reuse", "net/core/somaxconn", "net/ipv4/tcp_abort_on_overflow")


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--changes", type=int, default=0, metavar="N", help="default 1000, with --quick 20")
    parser.add_argument("--share", type=float, default=SHARE, help="of the processors to keep busy; default 0.5")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after these; default 2400, with --quick 20")
    args = parser.parse_args(argv)
    report = harness.Report("reload", args)
    with harness.place() as place:
        site = Site(place, args.models)
        operator = Operator(site.server)
        with site.server:
            plan = site.plan(operator)
            with Peer("bench.openload", str(plan)) as load:
                course = drive(
                    site, operator, load, args.changes or (20 if args.quick else 1000),
                    args.seconds or (20.0 if args.quick else 2400.0), args.share,
                )  # fmt: skip
    show(report, course, operator)
    return verdict(report, course)


if __name__ == "__main__":
    harness.run(main, sys.argv[1:], most=3000)

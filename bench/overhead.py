"""Claim: the server costs little more than the model.

1. Tiny model (the embedded digits), 16 connections, one worker: CPU of the server per request, less the CPU of a bare
   `session.run`, is at most 2.0 times the CPU per request of a minimal uvloop msgpack echo server (bench.echo) with the
   same payloads. CPU is the kernel's count for the process that serves, so the load generator does not enter.
2. MiniLM on 32 tokens, a worker a core: requests a second are at least 95 % of the summed rate of bare `session.run`
   loops, one process a core. Here the load generator shares the cores, and its share is printed.

All parts of a comparison take turns in rounds; a figure is the median of its rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import harness, procs, wire
from bench.harness import Report
from bench.inputs import FEEDS, Feed, sequence
from bench.peer import Peer, peers
from bench.prepared import prepare
from bench.server import Server
from prefork import cpus
from prefork.demo import model_path

CONNECTIONS = 16
LENGTH = 32  # tokens
MOST, LEAST = 2.0, 0.95
QUIET, ENOUGH = 0.95, 3  # share of the cores that a round must have had, and rounds that did
FORMS = {"none": "fp32", "int8": "int8"}


@dataclass
class Tiny:
    """CPU microseconds per request (or run), one entry a round. `raw`: a run without onnxruntime's Python class."""

    echo: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)

    def ratios(self, bare: list[float]) -> list[float]:
        return [(ours - run) / echo for ours, run, echo in zip(self.ours, bare, self.echo, strict=True)]


@contextmanager
def load(address: str, data: bytes, size: int, place: Path, name: str) -> Iterator[Peer]:
    host, _, port = address.rpartition(":")
    path = place / f"{name}.request"
    path.write_bytes(data)
    with Peer("bench.load", host, port, str(CONNECTIONS), str(path), str(size)) as peer:
        yield peer


def per_request(peer: Peer, pid: int, seconds: float) -> float:
    """CPU microseconds of process `pid` for each reply that the load generator got."""
    before = procs.cpu_seconds(pid)
    replies = int(peer.ask(seconds=seconds)["replies"])
    return (procs.cpu_seconds(pid) - before) / replies * 1e6


def per_run(peer: Peer, seconds: float) -> float:
    said = peer.ask(seconds=seconds)
    return float(said["cpu"] / said["runs"] * 1e6)


def tiny(place: Path, rounds: int, seconds: float) -> Tiny:
    source = model_path()
    feed = FEEDS["digits"](source)[0]
    inputs = place / "digits.npz"
    save(inputs, feed)
    graph = str(prepare(source, place / "prepared-digits", "none").graph)
    data = wire.request("digits", feed)
    found = Tiny()
    with ExitStack() as stack:
        server = stack.enter_context(Server(sub(place, "tiny"), "--workers", "1"))
        reply, size = wire.exchange(server.address, data)
        words, echo_size = wire.echo_outputs(reply)
        echo = stack.enter_context(Peer("bench.echo", *words))
        address = f"127.0.0.1:{echo.hello['port']}"
        to_echo = stack.enter_context(load(address, wire.echo_request(data), echo_size, place, "echo"))
        to_ours = stack.enter_context(load(server.address, data, size, place, "ours"))
        bare = stack.enter_context(Peer("bench.bare", graph, str(inputs), "loop"))
        raw = stack.enter_context(Peer("bench.bare", graph, str(inputs), "raw"))
        (worker,) = server.workers()
        for turn in range(rounds + 1):
            figures = (
                per_request(to_echo, echo.pid, seconds), per_request(to_ours, worker, seconds),
                per_run(bare, seconds / 4), per_run(raw, seconds / 4),
            )  # fmt: skip
            if turn:  # the first round warms what the others measure
                for row, figure in zip((found.echo, found.ours, found.bare, found.raw), figures, strict=True):
                    row.append(figure)
    return found


@dataclass(frozen=True, slots=True)
class Round:
    """Requests a second of the bare loops and of the server; CPU seconds of a run and of a request (master included);
    shares of all cores: of the loops, of the server with the load generator, and of that one alone."""

    bare: float
    ours: float
    run_cpu: float
    request_cpu: float
    loops_busy: float
    server_busy: float
    generator: float

    @property
    def quiet(self) -> bool:
        """Whether both had the cores to themselves: others' work takes the more from whoever has fewer threads."""
        return min(self.loops_busy, self.server_busy) >= QUIET


@dataclass
class Rates:
    rounds: list[Round] = field(default_factory=list)

    @property
    def quiet(self) -> list[Round]:
        return [one for one in self.rounds if one.quiet]

    @property
    def by_cpu(self) -> float:
        """Bare CPU over ours, for each request: what the ratio of the rates is when nobody waits for a core."""
        return median(one.run_cpu / one.request_cpu for one in self.rounds)

    @property
    def ratio(self) -> float:
        """Of the rates, from quiet rounds; on a machine that had too few of them, of the CPU."""
        return median(one.ours / one.bare for one in self.quiet) if self.judged_by_rate else self.by_cpu

    @property
    def judged_by_rate(self) -> bool:
        return len(self.quiet) >= ENOUGH

    def median(self, name: str) -> float:
        return float(median(getattr(one, name) for one in self.quiet or self.rounds))


def rates(source: Path, form: str, outputs: Sequence[str], place: Path, rounds: int, seconds: float) -> Rates:
    """The server with a worker a core against as many bare loops, in turns."""
    cores = cpus.allowed().count
    place.mkdir()
    feed = sequence(source, LENGTH)
    inputs = place / "inputs.npz"
    save(inputs, feed)
    graph = str(prepare(source, place / "prepared", form).graph)
    data = wire.request(source.stem, feed, outputs)
    found = Rates()
    with ExitStack() as stack:
        model = f"--model={source.stem}={source}"
        server = stack.enter_context(Server(place, model, "--quantize", form, "--workers", str(cores)))
        _, size = wire.exchange(server.address, data)
        loops = stack.enter_context(peers(cores, "bench.bare", graph, str(inputs), "loop", *outputs))
        asker = stack.enter_context(load(server.address, data, size, place, "ours"))
        pids = procs.descendants(server.pid)
        for turn in range(rounds + 1):
            for loop in loops:
                loop.tell(seconds=seconds)
            said = [loop.hear() for loop in loops]
            before = procs.total_cpu(pids)
            ours = asker.ask(seconds=seconds)
            if turn:
                found.rounds.append(_round(said, ours, procs.total_cpu(pids) - before, cores))
    return found


def _round(said: list[dict[str, Any]], ours: dict[str, Any], cpu: float, cores: int) -> Round:
    bare_cpu, runs = sum(one["cpu"] for one in said), sum(one["runs"] for one in said)
    room = ours["seconds"] * cores
    return Round(
        bare=sum(one["runs"] / one["seconds"] for one in said), ours=ours["replies"] / ours["seconds"],
        run_cpu=bare_cpu / runs, request_cpu=cpu / ours["replies"],
        loops_busy=bare_cpu / sum(one["seconds"] for one in said), server_busy=(cpu + ours["cpu"]) / room,
        generator=ours["cpu"] / room,
    )  # fmt: skip


def save(path: Path, feed: Feed) -> None:
    with path.open("wb") as file:
        np.savez(file, **feed)


def sub(place: Path, name: str) -> Path:
    path = place / name
    path.mkdir()
    return path


def show_tiny(report: Report, found: Tiny) -> float:
    echo, ours, bare, raw = (median(row) for row in (found.echo, found.ours, found.bare, found.raw))
    ratio, strict = median(found.ratios(found.bare)), median(found.ratios(found.raw))
    report.table(
        f"digits, {CONNECTIONS} connections: CPU microseconds per request",
        ("REFERENCE: ECHO", "BASELINE: BARE RUN", "OURS", "OURS - RUN", "RATIO TO ECHO"),
        [(echo, bare, ours, median(map(float.__sub__, found.ours, found.bare)), ratio)],
    )
    print(f"less a run without onnxruntime's Python class ({raw:.1f} us): {strict:.2f} times the echo server")
    report.data["tiny"] = {
        "echo_us": harness.spread(found.echo), "ours_us": harness.spread(found.ours),
        "bare_us": harness.spread(found.bare), "raw_us": harness.spread(found.raw),
        "ratio": harness.spread(found.ratios(found.bare)), "ratio_raw": strict,
    }  # fmt: skip
    return ratio


def show_rates(report: Report, found: dict[tuple[str, str], Rates]) -> None:
    head = ("FORM", "OUTPUTS", "REFERENCE: BARE LOOPS/S", "BASELINE RATIO", "OURS/S", "OURS RATIO", "RATIO BY CPU")
    report.table(
        f"minilm at length {LENGTH}, {cpus.allowed().count} workers",
        (*head, "QUIET ROUNDS", "LOAD GENERATOR'S SHARE"),
        [
            (form, outputs, one.median("bare"), 1, one.median("ours"), one.median("ours") / one.median("bare"),
             one.by_cpu, f"{len(one.quiet)}/{len(one.rounds)}", one.median("generator"))
            for (form, outputs), one in found.items()
        ],
    )  # fmt: skip
    report.data["minilm"] = {
        f"{form} {outputs}": {"ratio": one.ratio, "by_cpu": one.by_cpu, "rounds": [asdict(row) for row in one.rounds]}
        for (form, outputs), one in found.items()
    }


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--part", choices=("tiny", "minilm", "both"), default="both")
    args = parser.parse_args(argv)
    report = Report("overhead", args)
    holds, figures = True, []
    with harness.place() as place:
        if args.part != "minilm":
            ratio = show_tiny(report, tiny(place, *((5, 0.6) if args.quick else (15, 2.0))))
            holds = ratio <= MOST
            figures.append(f"server CPU less the run is {ratio:.2f} times the echo server (at most {MOST})")
        if args.part != "tiny":
            source = harness.model(args.models, "minilm")
            found = {}
            for form in ("none",) if args.quick else FORMS:
                for outputs in (["sentence_embedding"], []):
                    key = (FORMS[form], outputs[0] if outputs else "all")
                    where = place / f"{key[0]}-{key[1]}"
                    found[key] = rates(source, form, outputs, where, *((3, 0.7) if args.quick else (9, 3.0)))
            show_rates(report, found)
            least = min((one for (form, _), one in found.items() if form == "fp32"), key=lambda one: one.ratio)
            holds = holds and least.ratio >= LEAST
            how = "" if least.judged_by_rate else ", by CPU a request: others used the cores"
            figures.append(f"minilm through the server reaches {least.ratio:.1%} of bare loops (at least 95%){how}")
    return report.finish(holds, "; ".join(figures))


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])

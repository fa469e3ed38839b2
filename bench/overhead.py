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
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

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
    said = peer.ask(seconds=seconds)
    return (procs.cpu_seconds(pid) - before) / said["replies"] * 1e6


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


@dataclass
class Rates:
    """Requests a second, one entry a round. `generator`: the load generator's share of all cores."""

    bare: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    generator: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return median(ours / bare for ours, bare in zip(self.ours, self.bare, strict=True))


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
        for turn in range(rounds + 1):
            for loop in loops:
                loop.tell(seconds=seconds)
            said = [loop.hear() for loop in loops]
            ours = asker.ask(seconds=seconds)
            if turn:
                found.bare.append(sum(one["runs"] / one["seconds"] for one in said))
                found.ours.append(ours["replies"] / ours["seconds"])
                found.generator.append(ours["cpu"] / ours["seconds"] / cores)
    return found


def save(path: Path, feed: Feed) -> None:
    with path.open("wb") as file:
        np.savez(file, **{name: array for name, array in feed.items()})


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
    report.table(
        f"minilm at length {LENGTH}, {cpus.allowed().count} workers: requests a second",
        ("FORM", "OUTPUTS", "REFERENCE: BARE LOOPS", "BASELINE RATIO", "OURS", "OURS RATIO", "LOAD GENERATOR'S SHARE"),
        [
            (form, outputs, median(one.bare), 1, median(one.ours), one.ratio, median(one.generator))
            for (form, outputs), one in found.items()
        ],
    )
    report.data["minilm"] = {
        f"{form} {outputs}": {
            "bare": harness.spread(one.bare), "ours": harness.spread(one.ours), "ratio": one.ratio,
            "generator": harness.spread(one.generator),
        }
        for (form, outputs), one in found.items()
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--part", choices=("tiny", "minilm", "both"), default="both")
    args = parser.parse_args(argv)
    report = Report("overhead", args)
    holds, figures = True, []
    with harness.place() as place:
        if args.part != "minilm":
            ratio = show_tiny(report, tiny(place, *((5, 0.8) if args.quick else (15, 2.0))))
            holds = ratio <= MOST
            figures.append(f"server CPU less the run is {ratio:.2f} times the echo server (at most {MOST})")
        if args.part != "tiny":
            source = harness.model(args.models, "minilm")
            found = {}
            for form in ("none",) if args.quick else FORMS:
                for outputs in (["sentence_embedding"], []):
                    key = (FORMS[form], outputs[0] if outputs else "all")
                    where = place / f"{key[0]}-{key[1]}"
                    found[key] = rates(source, form, outputs, where, *((3, 1.0) if args.quick else (9, 3.0)))
            show_rates(report, found)
            least = min(one.ratio for (form, _), one in found.items() if form == "fp32")
            holds = holds and least >= LEAST
            figures.append(f"minilm through the server reaches {least:.1%} of bare loops (at least {LEAST:.0%})")
    return report.finish(holds, "; ".join(figures))


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])

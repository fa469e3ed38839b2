"""Claim: one line in a hundred requests costs next to nothing, and a line for each no more than a tiny request does.

Tiny model (the embedded digits), 16 connections, servers of one worker each that differ in `log.requests` only: 0, 0.01
and 1. CPU of the worker for each request, by the kernel's count, so the load generator does not enter. The servers
take turns in rounds, the order turns as well, and a figure is the median of the rounds' ratios to the servers without a
log, of which there are two: what they differ by is the noise. The log goes to a file, and its lines are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench import harness, wire
from bench.harness import Report
from bench.inputs import FEEDS
from bench.overhead import load, per_request
from bench.peer import Peer
from bench.server import Server
from prefork.demo import model_path

RATES = (0.0, 0.0, 0.01, 1.0)  # the first twice: what differs between them is noise
SAMPLED, ALL = 1.1, 2.0  # most times the CPU of a request without


@dataclass
class Side:
    """One server and the figures of its rounds: CPU microseconds a request."""

    rate: float
    server: Server
    peer: Peer
    pid: int
    rounds: list[float] = field(default_factory=list)


def sides(place: Path, stack: ExitStack) -> list[Side]:
    data = wire.request("digits", FEEDS["digits"](model_path())[0])
    found = []
    for index, rate in enumerate(RATES):
        folder = place / str(index)
        folder.mkdir()
        server = stack.enter_context(Server(folder, "--workers", "1", "--log-requests", str(rate)))
        _, size = wire.exchange(server.address, data)
        peer = stack.enter_context(load(server.address, data, size, place, str(index)))
        found.append(Side(rate, server, peer, server.workers()[0]))
    return found


def measure(found: list[Side], rounds: int, seconds: float) -> None:
    for turn in range(rounds + 1):
        for index in range(len(found)):
            side = found[(turn + index) % len(found)]
            figure = per_request(side.peer, side.pid, seconds)
            if turn:  # the first round warms
                side.rounds.append(figure)


def share(side: Side) -> float:
    """Lines of the log for each request that was answered."""
    lines = len([line for line in side.server.log() if line["event"] == "request"])
    answered: int = side.server.rows()[0]["requests"]
    return lines / answered


def main(argv: Sequence[str]) -> int:
    args = harness.parser(__doc__ or "").parse_args(argv)
    report = Report("requestlog", args)
    with harness.place() as place, ExitStack() as stack:
        found = sides(place, stack)
        measure(found, *((14, 0.4) if args.quick else (50, 0.4)))
        base = [(one + other) / 2 for one, other in zip(found[0].rounds, found[1].rounds, strict=True)]
        ratios = [median(one / other for one, other in zip(side.rounds, base, strict=True)) for side in found]
        shares = [share(side) for side in found]
    rows = [
        (f"{side.rate:g}", median(side.rounds), ratio, lines)
        for side, ratio, lines in zip(found, ratios, shares, strict=True)
    ]
    report.table("a request of a tiny model", ("log.requests", "CPU us", "x of none", "lines/request"), rows)
    one, other, sampled, everything = ratios
    holds = sampled <= SAMPLED and everything <= ALL and shares[0] == 0 and shares[3] > 0.99
    return report.finish(
        holds,
        f"CPU of a request: {sampled:.3f} x with one line in a hundred, {everything:.2f} x with all "
        f"(goals {SAMPLED}, {ALL}); two without {one:.3f} x and {other:.3f} x",
    )


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])

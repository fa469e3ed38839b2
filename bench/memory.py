"""Claims: on top of one shared segment a worker holds at most 30 MB of its own, and a server of 8 workers takes at most
1.3 times the memory of one with a single worker (MPNet-base, int8).

Every process has answered a few requests of 128 tokens before it is measured. Baselines: as many plain processes that
each open the same int8 file, and a fork server that opens it before it forks. `total` is the sum of PSS over all
processes of a server (master, template, telemetry, workers), without the segment's mappings, plus all bytes of the
segment once; so pages of it that nobody maps count too, and pages that only one process maps do not look private.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import harness, procs
from bench.bare import RUNS
from bench.inputs import sequence
from bench.peer import Peer, peers
from bench.prepared import quantized
from bench.reach import every_worker
from bench.server import Server
from prefork import control

LENGTH = 128  # tokens
MOST = 30.0  # MB private per worker
GROWTH = 1.3  # of the total, from 1 worker to 8
MB = 1e6


@dataclass(frozen=True, slots=True)
class Held:
    """Megabytes. `private`: of the worker that has most; `added`: what each worker adds to one segment (or, without
    one, to nothing) on average, its share of master and libraries included."""

    total: float
    private: float
    segment: float
    workers: int

    @property
    def added(self) -> float:
        return (self.total - self.segment) / self.workers


def held(pids: Sequence[int], workers: Sequence[int], segment: str = "") -> Held:
    found = {pid: procs.memory(pid, segment) for pid in pids}
    size = procs.allocated(segment) / MB if segment else 0.0
    return Held(
        sum(one.pss for one in found.values()) / MB + size, max(found[pid].private for pid in workers) / MB, size,
        len(workers),
    )  # fmt: skip


def plain(path: Path, inputs: Path, count: int) -> Held:
    """Processes that know nothing of each other."""
    with peers(count, "bench.bare", str(path), str(inputs), "hold") as found:
        pids = [peer.pid for peer in found]
        return held(pids, pids)


def preloaded(path: Path, inputs: Path, count: int) -> Held:
    """A parent that opens the session and forks."""
    with Peer("bench.bare", str(path), str(inputs), "preload", str(count)) as peer:
        pids = peer.hello["pids"]
        return held([peer.pid, *pids], pids)


def ours(source: Path, form: str, counts: Sequence[int], place: Path) -> dict[int, Held]:
    """One server, scaled to each number of workers in turn."""
    place.mkdir()
    feed = sequence(source, LENGTH)
    found = {}
    with Server(place, f"--model={source.stem}={source}", "--quantize", form, "--workers", str(counts[0])) as server:
        for count in counts:
            control.request(server.runtime / "control.sock", "scale", {"workers": count})
            server.wait_slots(partial(_are_ready, count))
            with every_worker(server, source.stem, feed) as clients:
                for client in clients.values():
                    for _ in range(RUNS):
                        client.infer(source.stem, feed)
                status = server.status()
                segment = f"/dev/shm/{status['models'][0]['segment']['name']}"
                workers = [int(row["pid"]) for row in status["workers"] if row["state"] == "ready"]
                found[count] = held(procs.descendants(server.pid), workers, segment)
    return found


def _are_ready(count: int, rows: list[dict[str, Any]]) -> bool:
    return [row["state"] for row in rows].count("ready") == count


def measure(source: Path, form: str, counts: Sequence[int], place: Path) -> dict[int, tuple[Held, Held, Held]]:
    path = quantized(source, place / "int8") if form == "int8" else source
    inputs = place / f"{form}.npz"
    np.savez(inputs, **sequence(source, LENGTH))
    served = ours(source, form, counts, place / f"serve-{form}")
    return {count: (plain(path, inputs, count), preloaded(path, inputs, count), served[count]) for count in counts}


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--model", default="", help="default mpnet, with --quick minilm")
    args = parser.parse_args(argv)
    report = harness.Report("memory", args)
    source = harness.model(args.models, args.model or ("minilm" if args.quick else "mpnet"))
    counts = (1, 8) if args.quick else (1, 2, 4, 8)
    with harness.place() as place:
        for form in ("int8",) if args.quick else ("int8", "none"):
            found = measure(source, form, counts, place)
            show(report, f"{source.stem} {'fp32' if form == 'none' else form}", found)
            report.data[form] = {count: [_plain(one) for one in three] for count, three in found.items()}
            if form == "int8":
                first, last = found[1][2], found[8][2]
                others = found[8][:2]
    growth = last.total / first.total
    bound = "not judged: the claim is of a large model" if args.quick else f"at most {GROWTH}"
    figure = (
        f"{source.stem} int8, 8 workers: {growth:.2f} times the memory of 1 ({bound}); "
        f"{last.private:.1f} MB private in the largest worker, {last.added:.1f} MB a worker on top of one segment of "
        f"{last.segment:.0f} MB (at most {MOST:.0f}); total {last.total:.0f} MB, {others[0].total:.0f} plain, "
        f"{others[1].total:.0f} pre-loaded"
    )
    holds = max(last.private, last.added) <= MOST and (growth <= GROWTH or args.quick)  # a small model is not the claim
    return report.finish(holds, figure)


def show(report: harness.Report, title: str, found: dict[int, tuple[Held, Held, Held]]) -> None:
    totals, private = [], []
    for count, (alone, fork, here) in found.items():
        totals.append((count, alone.total, fork.total, here.total, fork.total / alone.total, here.total / alone.total))
        private.append((count, alone.private, fork.private, here.private, here.added, here.segment))
    head = ("PROCESSES", "REFERENCE: PLAIN MB", "BASELINE: PRE-LOADED MB", "OURS MB", "BASELINE RATIO", "OURS RATIO")
    report.table(f"{title}: total memory", head, totals)
    head = ("PROCESSES", "REFERENCE: PLAIN MB", "BASELINE: PRE-LOADED MB", "OURS MB", "OURS ADDED MB", "SEGMENT MB")
    report.table(f"{title}: private memory of the largest process", head, private)


def _plain(one: Held) -> dict[str, float]:
    return {"total": one.total, "private": one.private, "segment": one.segment, "added": one.added}


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])

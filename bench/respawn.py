"""Claim: kill -9 of a worker holds up its slot's next answer by at most 30 ms (median); it comes ten times sooner than
without a template.

Two servers in one run, one with `template = auto`, the other with `template = off`, whose workers open the models
themselves: the workers of both are killed in turn, slot by slot, with nothing else going on. The time runs from before
kill(2) until a connection to the slot's own socket, made when the kernel says that the victim has ended, has its
answer; what an answer takes when all is quiet is taken off where the 30 ms are judged. The kernel chooses the socket of
a SO_REUSEPORT group by a hash of both addresses, so a client's port that once came to a slot always does. Where another
worker answers for a slot that takes long, its READY counts. A slot is left alone for so long that the next death is
not a young one: the waits between these are a policy, not a cost.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles

from bench import harness, wire
from bench.inputs import FEEDS
from bench.reach import counters
from bench.server import Server
from prefork.demo import model_path
from prefork.slots import YOUNG

MOST, TIMES = 0.030, 10.0  # seconds until the answer; times sooner than without a template
WORKERS = 8
EACH = 4  # deaths with a template for one without, which takes long and varies little
RST = struct.pack("ii", 1, 0)  # SO_LINGER: no TIME_WAIT, so the port can be used again
PARTS = (("digits", "none"), ("minilm", "int8"), ("mpnet", "int8"))


@dataclass
class Death:
    """Seconds since kill(2). `dead`: the kernel has ended the process; `reaped`, `ready`: the master says so in its
    log; `answer`: the first one of the slot's socket; `own`: the new worker gave it."""

    pid: int
    began: float  # CLOCK_REALTIME, as the log has it
    dead: float
    answer: float
    own: bool
    warm: float  # seconds of another request on a connection of its own, when all is quiet
    reaped: float = 0.0
    ready: float = 0.0

    @property
    def back(self) -> float:
        return self.answer if self.own else self.ready


STAGES: dict[str, Callable[[Death], float]] = {
    "exit of the victim": lambda death: death.dead,
    "noticed by the master": lambda death: death.reaped - death.dead,
    "another one ready": lambda death: death.ready - death.reaped,
    "its answer": lambda death: death.back - death.ready,
    "kill to answer": lambda death: death.back,
    "reference: an answer without a kill": lambda death: death.warm,
    "beyond that": lambda death: death.back - death.warm,
}


@dataclass
class Side:
    """One server, the client's port that leads to each slot, and what became of its workers."""

    server: Server
    request: bytes
    ports: dict[int, int] = field(default_factory=dict)
    rest: dict[int, float] = field(default_factory=dict)  # by slot: when it may be killed again
    deaths: list[tuple[int, Death]] = field(default_factory=list)

    def begin(self) -> None:
        """Find a port for each slot: with nobody else asking, its counter of requests shows whom a connection met."""
        self._address = self.server.address
        while len(self.ports) < WORKERS:
            before = counters(self.server.rows())
            port, _ = self._ask(0)
            after = counters(self.server.rows())
            self.ports.setdefault(next(slot for slot in after if after[slot] > before[slot]), port)
        self.rest = dict.fromkeys(self.ports, time.monotonic() + YOUNG)

    def _ask(self, port: int) -> tuple[int, float]:
        """Our port, and when the first bytes of the answer were there (perf_counter seconds)."""
        host, _, number = self._address.rpartition(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
            sock.settimeout(wire.PATIENCE)
            sock.bind((host, port))
            sock.connect((host, int(number)))
            sock.sendall(self.request)
            if not sock.recv(1 << 16):
                raise ConnectionError("the connection was closed without an answer")
            return sock.getsockname()[1], time.perf_counter()

    def kill(self, slot: int) -> None:
        """Kill the worker of a slot and wait until it answers again."""
        time.sleep(max(0.0, self.rest[slot] - time.monotonic()))
        rows = self.server.wait_slots(lambda rows: all(row["state"] == "ready" for row in rows))
        before, pid = counters(rows)[slot], int(rows[slot]["pid"])
        fd = os.pidfd_open(pid)
        try:
            wall, began = time.time(), time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            select.select([fd], [], [])
            dead = time.perf_counter()
            _, answer = self._ask(self.ports[slot])
        finally:
            os.close(fd)
        rows = self.server.wait_slots(lambda rows: all(row["state"] == "ready" for row in rows))
        own = counters(rows)[slot] > before and rows[slot]["pid"] != pid
        asked = time.perf_counter()
        _, again = self._ask(self.ports[slot])
        self.rest[slot] = time.monotonic() + YOUNG
        self.deaths.append((slot, Death(pid, wall, dead - began, answer - began, own, again - asked)))

    def read_log(self) -> None:
        """Fill in what only the master knows."""
        lines = [line for line in self.server.log() if line["event"] in ("worker died", "worker ready")]
        for slot, death in self.deaths:
            ends = (line["pid"] == death.pid and line["event"] == "worker died" for line in lines)
            start = list(ends).index(True)
            ready = next(line for line in lines[start:] if line["event"] == "worker ready" and line["slot"] == slot)
            for name, line in (("reaped", lines[start]), ("ready", ready)):
                setattr(death, name, datetime.fromisoformat(line["ts"]).timestamp() - death.began)


def measure(source: Path, form: str, place: Path, kills: int) -> tuple[list[Death], list[Death]]:
    """Deaths without a template, and with one."""
    request = wire.request(source.stem, FEEDS[source.stem](source)[0])
    sides = []
    with ExitStack() as stack:
        for mode in ("off", "auto"):
            (place / mode).mkdir(parents=True)
            args = (f"--model={source.stem}={source}", "--quantize", form, "--workers", str(WORKERS))
            sides.append(Side(stack.enter_context(Server(place / mode, *args, "--template", mode)), request))
        direct, ours = sides
        for side in sides:
            side.begin()
        for turn in range(kills):
            if turn % EACH == 0:
                direct.kill(turn // EACH % WORKERS)
            ours.kill(turn % WORKERS)
        for side in sides:
            side.read_log()
    return [death for _, death in direct.deaths], [death for _, death in ours.deaths]


def show(report: harness.Report, title: str, direct: list[Death], ours: list[Death]) -> tuple[float, float, float]:
    """Milliseconds until the slot answers, how many of them are the kill's, and how many times sooner it answers."""
    rows: dict[str, tuple[float, ...]] = {}
    for name, pick in STAGES.items():
        before, after = ([pick(death) * 1e3 for death in deaths] for deaths in (direct, ours))
        rows[name] = (median(before), median(after), quantiles(after, n=10)[-1], max(after))
    head = ("STAGE", "BASELINE: DIRECT ms", "OURS ms", "OURS P90", "OURS MAX")
    report.table(
        f"{title}: medians of {len(direct)} deaths without a template, {len(ours)} with one",
        head,
        [(k, *v) for k, v in rows.items()],
    )
    strangers = sum(not death.own for death in direct), sum(not death.own for death in ours)
    report.data.setdefault("answered_by_another", {})[title] = strangers
    report.data.setdefault("deaths", {})[title] = [[death.back for death in deaths] for deaths in (direct, ours)]
    slow, fast = rows["kill to answer"][:2]
    return fast, rows["beyond that"][1], slow / fast


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--model", choices=[name for name, _ in PARTS], action="append", help="only this; repeatable")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="default 200, with --quick 16")
    args = parser.parse_args(argv)
    report = harness.Report("respawn", args)
    parts = [part for part in PARTS if part[0] in args.model] if args.model else PARTS[: 2 if args.quick else 3]
    found = []
    with harness.place() as place:
        for name, form in parts:
            source = model_path() if name == "digits" else harness.model(args.models, name)
            direct, ours = measure(source, form, place / name, args.kills or (16 if args.quick else 200))
            found.append((name, *show(report, f"{name} {form}", direct, ours)))
    words = "; ".join(
        f"{name} {took:.1f} ms, {beyond:.1f} beyond an answer, {times:.0f} times sooner than direct"
        for name, took, beyond, times in found
    )
    holds = all(beyond <= MOST * 1e3 and times >= TIMES for _, _, beyond, times in found)
    limits = f"at most {MOST * 1e3:.0f} ms beyond an answer, at least {TIMES:.0f} times"
    return report.finish(holds, f"kill -9 to answer, median: {words} ({limits})")


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])

"""Kill -9 of workers under load: who loses what, and does the slot come back. Part of bench.faults."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import wire
from bench.inputs import FEEDS, Feed
from bench.peer import Peer
from bench.raw import Crowd, Lost, Plan, Tally
from bench.server import POLL, Server
from bench.verdict import Verdict
from prefork.client import AsyncClient
from prefork.codec.registry import codec_of
from prefork.demo import model_path
from prefork.errors import PreforkError, Unavailable

WORKERS = 8
CLIENTS = 16
SETTLE = 90.0  # seconds that a slot may take: deaths of the young are answered with growing delays


def plan_for(address: str, model: str, feed: Feed, **kwargs: int) -> Plan:
    """The request, and the reply that a quiet server gives."""
    data = wire.request(model, feed)
    reply, _ = wire.exchange(address, data)
    return Plan(data[24:], codec_of(1).encode_infer_reply(reply), **kwargs)


class Asking:
    """The project's own client in a loop. `failures`: what its calls raised."""

    def __init__(self, address: str, model: str, feed: Feed, retries: int) -> None:
        self._make = partial(AsyncClient, address, retries=retries, pool_size=4)
        self._model, self._feed = model, feed
        self.calls, self.retried = 0, 0
        self.failures: list[PreforkError] = []

    async def __call__(self, stopped: Callable[[], bool]) -> None:
        async with self._make() as client:
            while not stopped():
                self.calls += 1
                try:
                    await client.infer(self._model, self._feed)
                except PreforkError as error:
                    self.failures.append(error)
            self.retried = client.retried


def kill(pid: int) -> set[int]:
    """Kill -9 a worker; the client's ports of all connections that it had accepted.

    It is stopped for the moment in between, so that it accepts none that we do not see."""
    os.kill(pid, signal.SIGSTOP)
    while not re.search(r"^State:\s+T", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
        pass
    ports = accepted(pid)
    os.kill(pid, signal.SIGKILL)
    return ports


def accepted(pid: int) -> set[int]:
    """Remote ports of the TCP connections whose descriptor the process has (/proc/net/tcp, proc_net_tcp.rst)."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[2].rpartition(":")[2], 16) for row in rows if row[9] in inodes} - {0}


@dataclass
class Deaths:
    """Kills with the ports that each victim had accepted. What is lost between two kills is the first one's doing."""

    tally: Tally
    marks: list[tuple[int, set[int]]] = field(default_factory=list)

    def kill(self, pid: int) -> None:
        before = len(self.tally.lost)
        self.marks.append((before, kill(pid)))

    def strangers(self) -> list[Lost]:
        """Connections lost that the dead worker had not accepted: still in its queue, or another worker's."""
        ends = [start for start, _ in self.marks[1:]] + [len(self.tally.lost)]
        return self.tally.lost[: self.marks[0][0]] + [
            lost
            for (start, ports), end in zip(self.marks, ends, strict=True)
            for lost in self.tally.lost[start:end]
            if lost.port not in ports
        ]

    def found(self) -> dict[str, Any]:
        tally, strangers = self.tally, self.strangers()
        return {
            "kills": len(self.marks), "connects": tally.connects, "answered": tally.answered, "wrong": tally.wrong,
            "connects_failed": tally.refused, "connects_reset": [_words(one) for one in strangers if not one.heard],
            "requests_lost": sum(lost.pending for lost in tally.lost), "connections_lost": len(tally.lost),
            "lost_elsewhere": [_words(lost) for lost in strangers], "errors": tally.errors,
        }  # fmt: skip


def workers(place: Path, repeats: int) -> tuple[list[Verdict], dict[str, Any]]:
    """(a): `repeats` deaths under load. The next comes when the status says that the slot is ready again."""
    random.seed(repeats)
    feed = FEEDS["digits"](model_path())[0]
    with Server(place, "--workers", str(WORKERS)) as server:
        address = server.address
        plan = plan_for(address, "digits", feed)
        plainly = baseline(plan, place, repeats)
        once = [Asking(address, "digits", feed, 0) for _ in range(4)]
        again = [Asking(address, "digits", feed, 2) for _ in range(2)]
        with Crowd(address, plan, CLIENTS, *once, *again) as crowd:
            deaths = Deaths(crowd.tally)
            for _ in range(repeats):
                row = random.choice([row for row in server.rows() if row["state"] == "ready"])
                deaths.kill(int(row["pid"]))
                server.wait_slots(partial(_is_back, row), SETTLE)
        restarts = server.status()["restarts"]
    found = deaths.found() | {
        "restarts": restarts, "baseline": plainly,
        "calls": sum(one.calls for one in once), "calls_failed": sum(len(one.failures) for one in once),
        "retried": sum(one.retried for one in again), "texts": sorted({_text(e) for one in once for e in one.failures}),
    }  # fmt: skip
    return _verdicts(repeats, found, once, again), found


def baseline(plan: Plan, place: Path, repeats: int) -> dict[str, Any]:
    """The same deaths in a server whose workers open their own sockets (bench.reuseport)."""
    reply = place / "reply"
    reply.write_bytes(plan.expected)
    with Peer("bench.reuseport", str(WORKERS), str(reply)) as peer:
        _wait_alive(peer, set())
        with Crowd(f"127.0.0.1:{peer.hello['port']}", plan, CLIENTS) as crowd:
            deaths = Deaths(crowd.tally)
            for _ in range(repeats):
                victim = random.choice(sorted(_wait_alive(peer, set())))
                deaths.kill(victim)
                _wait_alive(peer, {victim})
    return deaths.found()


def _wait_alive(peer: Peer, dead: set[int]) -> set[int]:
    """All workers, once as many live as there should and `dead` is none of them."""
    while len(alive := set(peer.ask(alive=True)["alive"])) < WORKERS or alive & dead:
        time.sleep(POLL)
    return alive


def _verdicts(repeats: int, found: dict[str, Any], once: list[Asking], again: list[Asking]) -> list[Verdict]:
    unclear = [str(e) for one in once for e in one.failures if not (isinstance(e, Unavailable) and e.message)]
    failed = [f"{type(e).__name__}: {e}" for one in again for e in one.failures]
    name = f"kill -9 of a worker, x{repeats}"
    broken, lost = found["connects_failed"] + found["connects_reset"], found["lost_elsewhere"]
    other = {code: count for code, count in found["errors"].items() if code != "UNAVAILABLE"}
    only_theirs = not lost and not found["wrong"] and not other and found["restarts"] == repeats
    return [
        Verdict(
            f"{name}: connects", "none fails", _connects(found), not broken, broken, _connects(found["baseline"])
        ),
        Verdict(
            f"{name}: requests", "lost only by their worker", _requests(found), only_theirs, lost or [str(other)],
            _requests(found["baseline"]),
        ),
        Verdict(
            f"{name}: client, no retry", "clear errors",
            f"{found['calls_failed']} of {found['calls']} calls: Unavailable, {len(unclear)} unclear",
            not unclear and found["calls_failed"] > 0, unclear,
        ),
        Verdict(
            f"{name}: client with retry", "sees none",
            f"{len(failed)} failures in {sum(one.calls for one in again)} calls, {found['retried']} sent again",
            not failed, failed,
        ),
    ]  # fmt: skip


def _connects(found: dict[str, Any]) -> str:
    failed = len(found["connects_failed"])
    return f"{failed} refused, {len(found['connects_reset'])} reset of {found['connects'] + failed}"


def _requests(found: dict[str, Any]) -> str:
    return f"{found['requests_lost']} lost of {found['answered']}, {len(found['lost_elsewhere'])} elsewhere"


def _is_back(before: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    row = next(row for row in rows if row["slot"] == before["slot"])
    return bool(row["state"] == "ready" and row["pid"] != before["pid"])


def _words(lost: Lost) -> str:
    return f"port {lost.port}: {lost.pending} unanswered, {lost.how}"


def _text(error: PreforkError) -> str:
    """The error without what differs each time."""
    return re.sub(r"\d+", "N", f"{type(error).__name__}: {error.message}")

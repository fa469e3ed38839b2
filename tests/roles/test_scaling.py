"""One worker more, one fewer: nobody's connection is lost, whichever slot the kernel gave it to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefork import control
from prefork.errors import InvalidArgument
from tests.roles.models import rounds, slow
from tests.roles.server import REPOSITORY, Server
from tests.roles.watch import LogWatch, until, until_row, wait_gone
from tests.roles.wire import Wire, digits, infer, live

MANY = 64  # connections: with 4 listening sockets the chance that one gets none is below 1e-7


@pytest.fixture
def server(place: Path) -> Iterator[Server]:
    with Server(place, "--workers", "2") as found:
        yield found


def scale(server: Server, workers: int) -> None:
    control.request(server.runtime / "control.sock", "scale", {"workers": workers})


def serve_many(address: str, count: int = MANY) -> None:
    """Open connections, all at once, and have each of them answered."""
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(address)) for _ in range(count)]
        for wire in wires:
            wire.send(digits(1))
        for wire in wires:
            assert wire.answer().values["label"].shape == (1,)


def requests_of(server: Server) -> list[int]:
    return [row["requests"] for row in server.status()["workers"]]


def test_ttin_adds_a_worker_that_answers(server: Server) -> None:
    with LogWatch(server) as log:
        os.kill(server.pid, signal.SIGTTIN)
        log.wait("worker ready", slot=2)
    serve_many(server.address)
    assert all(requests_of(server)) and len(server.workers()) == 3


def test_ttou_loses_nobody(server: Server) -> None:
    with ExitStack() as stack:
        old = [stack.enter_context(Wire(server.address)) for _ in range(16)]
        for wire in old:
            wire.send(live(1))
            wire.answer()
        (leaving,) = [row["pid"] for row in server.status()["workers"] if row["slot"] == 1]
        expected = server.status()["workers"][1]["connections"]
        os.kill(server.pid, signal.SIGTTOU)
        serve_many(server.address)
        wait_gone(leaving)
        serve_many(server.address)
        told = 0
        for wire in old:
            wire.send(digits(2))
            found = wire.answer()
            told += found.kind == 102
        assert told == expected > 0
    assert until_row(server, 1, state="retired")["guardian"] == 0
    assert server.status()["restarts"] == 0 and len(server.workers()) == 1


def test_a_retiring_worker_answers_what_it_accepted(place: Path) -> None:
    args = ("--workers", "2", "--run-in", "thread", "--model", f"slow={slow(place)}")
    with Server(place, *args) as server, ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.address)) for _ in range(16)]
        for wire in wires:
            wire.send(infer(1, "slow", n=rounds(30)), infer(2, "slow", n=rounds(1)))
        until(server, lambda: sum(row["requests"] for row in server.status()["workers"]) == 32, "all accepted")
        scale(server, 1)
        for wire in wires:
            kinds = [wire.answer().kind, wire.answer().kind]
            if 102 in kinds:
                kinds.append(wire.answer().kind)
            assert sorted(kinds)[:2] == [2, 2]
        until_row(server, 1, state="retired")


def test_a_retired_slot_comes_back(server: Server) -> None:
    with LogWatch(server) as log:
        scale(server, 1)
        until_row(server, 1, state="retired")
        serve_many(server.address)
        scale(server, 2)
        log.wait("worker ready", slot=1)
    before = requests_of(server)
    serve_many(server.address)
    assert requests_of(server)[1] > before[1] and server.status()["workers"][1]["guardian"] is None


def test_the_guardian_of_a_retired_slot_may_retire_too(server: Server) -> None:
    with LogWatch(server) as log:
        scale(server, 4)
        log.wait("worker ready", slot=2)
        if server.status()["workers"][3]["state"] != "ready":
            log.wait("worker ready", slot=3)
    scale(server, 2)
    for slot in (2, 3):
        until_row(server, slot, state="retired")
    scale(server, 1)
    until_row(server, 1, state="retired")
    assert [row["guardian"] for row in server.status()["workers"]] == [None, 0, 0, 0]
    serve_many(server.address)


def test_a_killed_guardian_is_followed_by_its_successor(server: Server) -> None:
    scale(server, 1)
    until_row(server, 1, state="retired")
    with LogWatch(server) as log:
        os.kill(server.workers()[0], signal.SIGKILL)
        serve_many(server.address)
        log.wait("worker ready", slot=0)
    serve_many(server.address)


def test_the_last_worker_stays(server: Server) -> None:
    scale(server, 1)
    until_row(server, 1, state="retired")
    with LogWatch(server) as log:
        os.kill(server.pid, signal.SIGTTOU)
        assert "1 to" in log.wait("scaling refused")["reason"]
    for wrong in (0, -1, 1 << 20, "two"):
        with pytest.raises(InvalidArgument, match="workers"):
            control.request(server.runtime / "control.sock", "scale", {"workers": wrong})
    assert len(server.workers()) == 1


def test_ctl_scales(server: Server) -> None:
    command = [sys.executable, "-m", "prefork.ctl", "--control", str(server.runtime / "control.sock"), "scale", "3"]
    with LogWatch(server) as log:
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=True, capture_output=True)
        log.wait("worker ready", slot=2)


def test_a_drained_slot_stays_empty_while_others_are_enough(place: Path) -> None:
    with Server(place, "--workers", "3") as server:
        control.request(server.runtime / "control.sock", "drain", {"slot": 0})
        until_row(server, 0, state="retired")
        os.kill(server.pid, signal.SIGTTOU)
        until_row(server, 2, state="retired")
        assert [row["state"] for row in server.rows()] == ["retired", "ready", "retired"]
        serve_many(server.address)
        scale(server, 3)
        server.wait_slots(lambda rows: all(row["state"] == "ready" for row in rows))

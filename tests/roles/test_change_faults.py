"""What dies, hangs or is told to stop while what is served changes: the old models serve on, or all is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork.shm.sweep import list_segments, sweep
from tests.roles.changing import (
    BOARD,
    answer,
    ask,
    canary,
    change,
    ctl,
    hold,
    links,
    newcomer,
    reload,
    traffic,
    until_phase,
)
from tests.roles.models import adder
from tests.roles.server import Server
from tests.roles.watch import LogWatch, children_of, until, wait_gone

PHASES = ("loading", "opening", "rolling", "holding", "returning")


@pytest.fixture
def server(place: Path) -> Iterator[Server]:
    """Every load takes as long as preparing the model does."""
    with Server(place, "--workers", "2", "--model", f"adder={adder(place / 'a.onnx', 1)}") as found:
        yield found


@pytest.fixture
def quick(place: Path, module_place: Path) -> Iterator[Server]:
    """Loaders only copy the model."""
    with cached(place, module_place) as found:
        yield found


def cached(place: Path, module_place: Path) -> Server:
    cache = str(module_place / "cache")
    return Server(place, "--workers", "2", "--cache-dir", cache, "--model", f"adder={adder(place / 'a.onnx', 1)}")


def prepared(place: Path, module_place: Path, phase: str) -> Server:
    """A loader that is to be stopped must live for a while."""
    found = cached(place, module_place)
    if phase == "loading":
        found.args += ("--cache-dir", "")
    return found


def generations(server: Server) -> list[int]:
    mine = [info for info in list_segments() if info.owner and info.owner.pid == server.pid]
    return sorted(info.generation or 0 for info in mine)


def only_the_first_serves(server: Server) -> None:
    assert answer(server) == (1, "1") and server.status()["generation"] == 1 and generations(server) == [1]
    until(server, lambda: len(children_of(server.pid)) == 3, "two workers and a template")
    assert {row["generation"] for row in server.rows()} == {1}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT], ids=["term", "quit"])
def test_the_server_stops_in_any_phase(place: Path, module_place: Path, phase: str, number: int) -> None:
    server = prepared(place, module_place, phase).start()
    hold(server, phase)
    everyone = children_of(server.pid)
    assert server.stop(number) == 0
    for pid in everyone:
        wait_gone(pid)


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_master_takes_everybody_along_in_any_phase(place: Path, module_place: Path, phase: str) -> None:
    server = prepared(place, module_place, phase).start()
    hold(server, phase)
    everyone = children_of(server.pid)
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    for pid in everyone:
        wait_gone(pid)
    sweep()
    assert generations(server) == []


def test_a_change_is_rolled_back_in_any_phase(server: Server, place: Path) -> None:
    before = server.workers()
    with traffic(server) as clients:
        for phase in ("loading", "opening", "rolling", "holding"):
            held = hold(server, phase)
            ran = ctl(server, "rollback", "--no-wait")
            assert ran.returncode == 0, ran.stderr
            held.go()
            found = until_phase(server, "failed", "done")
            assert (found["phase"], found["reason"]) == ("failed", "rolled back on request"), phase
            only_the_first_serves(server)
        assert server.status()["previous"] is None and server.status()["restarts"] == 0
    assert {version for _, version in clients.seen} == {"1", "4", "5"}, "in two phases some had moved"
    assert before[1] in server.workers(), "whose slot never moved stays"


def test_a_loader_that_is_killed(server: Server) -> None:
    held, pids = hold(server, "loading"), server.workers()
    os.kill(held.stopped[0], signal.SIGKILL)
    found = until_phase(server, "failed", "done")
    assert found["phase"] == "failed" and "killed by SIGKILL" in found["reason"] and "'adder'" in found["reason"]
    only_the_first_serves(server)
    assert server.workers() == pids and list(server.work.glob("*/*")) == []


@pytest.mark.parametrize("phase", ["loading", "opening"])
def test_a_template_may_die_once(server: Server, phase: str) -> None:
    held = hold(server, phase)
    template = held.stopped[0] if phase == "opening" else template_beside(server, held.stopped[0])
    with LogWatch(server) as log:
        os.kill(template, signal.SIGKILL)
        log.wait("template died", pid=template)
        held.go()
        assert until_phase(server, "failed", "done")["phase"] == "done"
    assert answer(server) == (1, "2") and server.status()["template"]["state"] == "ready"


def template_beside(server: Server, loader: int) -> int:
    serving = {*server.workers(), server.status()["template"]["pid"], loader}
    return newcomer(server, serving, board=True)


def test_a_template_that_dies_again_ends_the_change(quick: Server) -> None:
    held, pids = hold(quick, "opening"), quick.workers()
    known = {*pids, quick.status()["template"]["pid"], *held.stopped}
    os.kill(held.stopped[0], signal.SIGKILL)
    second = newcomer(quick, known, board=True)
    os.kill(second, signal.SIGKILL)
    found = until_phase(quick, "failed", "done")
    assert found["phase"] == "failed" and "template does not come up: killed by SIGKILL" in found["reason"]
    only_the_first_serves(quick)
    assert quick.workers() == pids


def test_a_segment_that_vanishes_is_named(server: Server, place: Path) -> None:
    adder(place / "a.onnx", 2)
    assert reload(server)["phase"] == "done"
    (segment,) = [
        info.name for info in list_segments() if info.owner and info.owner.pid == server.pid and info.generation == 1
    ]
    Path("/dev/shm", segment).unlink()
    ran = ctl(server, "rollback")
    assert ran.returncode == 1 and "template does not come up" in ran.stderr and segment in ran.stderr
    assert answer(server) == (2, "2") and generations(server) == [2]


def test_a_successor_that_does_not_come_up(place: Path) -> None:
    """Each opens the models itself here, which takes long enough to be stopped in it."""
    model = adder(place / "a.onnx", 1)
    with Server(place, "--workers", "2", "--threads", "2", "--model", f"adder={model}") as server:
        pids = server.workers()
        with traffic(server), LogWatch(server) as log:
            ask(server, "reload")
            for _ in range(2):
                os.kill(successor(server), signal.SIGKILL)
                log.wait("successor died")
            found = until_phase(server, "failed", "done")
            assert found["phase"] == "failed" and "does not come up: killed by SIGKILL" in found["reason"]
            assert server.workers() == pids and generations(server) == [1]
            ask(server, "reload")
            os.kill(successor(server), signal.SIGKILL)
            assert until_phase(server, "failed", "done")["phase"] == "done"
            assert generations(server) == [1, 3]


def successor(server: Server) -> int:
    return until(
        server, lambda: next((row["successor"] for row in server.rows() if row["successor"]), 0), "a successor"
    )


def test_a_template_that_does_not_fork_in_a_change_is_killed(quick: Server) -> None:
    """And the workers that were asked of it open the models themselves."""
    held = hold(quick, "rolling")
    wait_gone(held.stopped[0])
    assert until_phase(quick, "failed", "done")["phase"] == "done"
    assert answer(quick) == (1, "2")


def test_the_old_generation_may_die_while_slots_move(quick: Server) -> None:
    held = hold(quick, "rolling")
    old = [row["pid"] for row in quick.rows() if row["generation"] == 1]
    os.kill(old[0], signal.SIGKILL)
    wait_gone(old[0])
    held.go()
    assert until_phase(quick, "failed", "done")["phase"] == "done"
    assert answer(quick) == (1, "2") and quick.status()["restarts"] == 1


def test_a_canary_that_dies_again_and_again_is_rejected(quick: Server) -> None:
    canary(quick)
    for turn in range(2):
        pid = until(
            quick,
            lambda: next((r["pid"] for r in quick.rows() if r["generation"] == 2 and r["state"] == "ready"), 0),
            "a canary",
        )
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        if turn == 0:
            assert ask(quick, "change")["phase"] == "holding"
    found = until_phase(quick, "failed")
    assert "died: killed by SIGKILL" in found["reason"]
    only_the_first_serves(quick)


def test_the_log_is_reopened_in_a_template_that_waits_for_its_models(server: Server) -> None:
    held, old = hold(server, "loading"), server.place / "log.json.1"
    template = template_beside(server, held.stopped[0])
    server.log_file.rename(old)
    os.kill(server.pid, signal.SIGUSR1)
    until(server, lambda: str(server.log_file) in links(template), "the new file in the template")
    held.go()
    assert until_phase(server, "failed", "done")["phase"] == "done"
    assert all(str(old) not in links(pid) for pid in server.workers()) and any(
        BOARD in name for name in links(template)
    )


def test_a_drained_slot_and_a_recycled_worker(quick: Server) -> None:
    with traffic(quick):
        ask(quick, "drain", slot=1)
        until(quick, lambda: quick.rows()[1]["state"] == "retired", "an empty slot")
        assert change(quick, "restart")["workers"] == 1
        ask(quick, "undrain", slot=1)
        until(quick, lambda: quick.rows()[1]["state"] == "ready", "a worker again")
        before = quick.workers()
        assert ctl(quick, "recycle", "0").returncode == 0
        until(quick, lambda: quick.workers()[0] not in (before[0], None), "another worker")
        assert quick.workers()[1] == before[1]
    assert ctl(quick, "drain", "2").returncode != 0 and quick.status()["restarts"] == 0


def test_workers_are_recycled_by_their_requests(place: Path) -> None:
    model = adder(place / "a.onnx", 1)
    with Server(place, "--workers", "2", "--recycle-requests", "50", "--model", f"adder={model}") as server:
        before = set(server.workers())
        with traffic(server), LogWatch(server) as log:
            for _ in before:
                assert "recycle_requests is 50" in log.wait("recycling worker")["reason"]
                log.wait("worker ready")
        assert not before & set(server.workers()) and server.status()["restarts"] == 0

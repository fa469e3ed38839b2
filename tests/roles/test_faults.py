"""Kill anything, at any time: what is lost is what that process was computing, and nothing is left."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from prefork.client import Client
from prefork.errors import Code, Unavailable
from prefork.shm.sweep import list_segments
from tests.roles.models import FOR_EVER, rounds, slow
from tests.roles.server import Server
from tests.roles.watch import LogWatch, children_of, until, until_row, wait_gone
from tests.roles.wire import IMAGE, Wire, digits, infer, live

LATE = "worker does not leave, killing it"


def serves(address: str) -> bool:
    with Client(address, retries=0) as client:
        return client.infer("digits", {"image": IMAGE})["label"].shape == (1,)


def segments_of(pid: int) -> list[str]:
    return [info.name for info in list_segments() if info.owner and info.owner.pid == pid]


def test_a_killed_worker_loses_its_own_requests_only(place: Path) -> None:
    args = ("--workers", "2", "--run-in", "thread", "--model", f"slow={slow(place)}")
    with Server(place, *args) as server, ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.address)) for _ in range(16)]
        for wire in wires:
            wire.send(infer(1, "slow", n=rounds(20)))
        rows = until(server, lambda: accepted(server, 16), "all accepted")
        victim, other = rows[0], rows[1]
        assert victim["requests"] > 0 < other["requests"]
        with LogWatch(server) as log:
            os.kill(victim["pid"], signal.SIGKILL)
            assert "SIGKILL" in log.wait("worker died", slot=0)["how"]
            log.wait("worker ready", slot=0)
        outcomes = [outcome(wire) for wire in wires]
        assert outcomes.count("lost") <= victim["connections"]
        assert outcomes.count("answered") >= other["connections"]
        after = server.status()
        assert after["restarts"] == 1 and after["workers"][1]["pid"] == other["pid"]
        for _ in range(32):  # both slots answer
            with Client(server.address, retries=0) as client:
                client.infer("slow", {"n": rounds(1)})
        assert after["workers"][0]["requests"] < server.status()["workers"][0]["requests"]


def accepted(server: Server, count: int) -> list[dict[str, Any]]:
    rows = list(server.status()["workers"])
    return rows if sum(row["requests"] for row in rows) == count else []


def outcome(wire: Wire) -> str:
    try:
        return "answered" if wire.answer().values["y"].shape == (256, 256) else "wrong"
    except (EOFError, ConnectionResetError):
        return "lost"


def test_the_client_names_a_lost_request(place: Path) -> None:
    with Server(place, "--workers", "1", "--run-in", "thread", "--model", f"slow={slow(place)}") as server:
        found: list[Exception] = []

        def ask() -> None:
            with Client(server.address, retries=0) as client:
                try:
                    client.infer("slow", {"n": FOR_EVER})
                except Exception as e:
                    found.append(e)

        thread = threading.Thread(target=ask)
        thread.start()
        until_row(server, in_flight=1)
        os.kill(server.workers()[0], signal.SIGKILL)
        thread.join()
        (error,) = found
        assert isinstance(error, Unavailable) and error.maybe_executed


def test_a_client_that_retries_sees_nothing(place: Path) -> None:
    with Server(place, "--workers", "2") as server, LogWatch(server) as log:
        with Client(server.address, pool_size=4, retries=8) as client:
            for turn in range(6):
                pid = server.status()["workers"][turn % 2]["pid"]
                client.infer("digits", {"image": IMAGE})
                os.kill(pid, signal.SIGKILL)
                for _ in range(50):
                    assert client.infer("digits", {"image": IMAGE})["label"].shape == (1,)
                log.wait("worker ready", slot=turn % 2)
        assert server.status()["restarts"] == 6


def test_connections_that_wait_for_a_dead_worker_are_served_by_its_successor(place: Path) -> None:
    with Server(place, "--workers", "1") as server, LogWatch(server) as log, ExitStack() as stack:
        os.kill(server.workers()[0], signal.SIGSTOP)
        wires = [stack.enter_context(Wire(server.address)) for _ in range(20)]
        for wire in wires:
            wire.send(digits(1))
        os.kill(server.workers()[0], signal.SIGKILL)
        log.wait("worker ready", slot=0)
        assert all(wire.answer().values["label"].shape == (1,) for wire in wires)


def test_a_killed_master_takes_everybody_along(place: Path) -> None:
    server = Server(place, "--workers", "2").start()
    workers, pid = server.workers(), server.pid
    with Wire(server.address) as wire:
        wire.send(live(1))
        wire.answer()
        os.kill(pid, signal.SIGKILL)
        assert server.process is not None and server.process.wait() == -signal.SIGKILL
        for worker in workers:
            wait_gone(worker)
        with pytest.raises((EOFError, ConnectionResetError)):
            wire.answer()
    assert server.leftovers()
    with server:
        events = [line["event"] for line in server.log()]
        assert "removed a dead master's scratch directory" in events  # any other start may have taken the segment
        assert segments_of(pid) == [] and serves(server.unix)


def test_a_killed_master_leaves_no_system_v_segment(place: Path) -> None:
    server = Server(place, "--workers", "2", "--shm", "sysv").start()
    pid, children = server.pid, children_of(server.pid)  # the template holds the segment as well
    assert len(segments_of(pid)) == 1
    os.kill(pid, signal.SIGKILL)
    assert server.process is not None
    server.process.wait()
    for child in children:
        wait_gone(child)
    assert segments_of(pid) == []
    with server:
        assert serves(server.address)


def test_a_master_killed_while_loading_takes_the_loader_along(place: Path) -> None:
    with LogWatch(server := Server(place, "--workers", "1")) as log:
        server.launch()
        loader = log.wait("loading")["pid"]
        os.kill(server.pid, signal.SIGKILL)
        assert server.process is not None
        server.process.wait()
        wait_gone(loader)
    with server:
        assert serves(server.address)


@pytest.mark.parametrize("kind", ["posix", "sysv"])
def test_a_killed_loader_ends_the_start_with_the_reason(place: Path, kind: str) -> None:
    with LogWatch(server := Server(place, "--workers", "1", "--shm", kind)) as log:
        process = server.launch()
        loader = log.wait("loading")["pid"]
        os.kill(loader, signal.SIGKILL)
        assert process.wait() == 70
    said = (place / "stderr").read_text()
    assert "model 'digits'" in said and "the loader left: killed by SIGKILL" in said
    assert server.leftovers() == []


def test_a_stalled_worker_is_killed_and_replaced(place: Path) -> None:
    with Server(place, "--workers", "2", "--worker-timeout", "2") as server, LogWatch(server) as log:
        victim, other = server.workers()
        os.kill(victim, signal.SIGSTOP)
        wait_gone(victim)
        assert log.wait("worker stalled, killing it", pid=victim)["slot"] == 0
        assert log.wait("worker ready", slot=0)["pid"] not in (victim, other)
        assert server.workers()[1] == other and serves(server.address)


def test_a_run_without_end_is_a_stall(place: Path) -> None:
    args = ("--workers", "1", "--worker-timeout", "2", "--run-in", "thread", "--model", f"slow={slow(place)}")
    with Server(place, *args) as server, LogWatch(server) as log:
        (victim,) = server.workers()
        with Wire(server.address) as wire:
            wire.send(infer(1, "slow", n=FOR_EVER))
            wait_gone(victim)
            with pytest.raises((EOFError, ConnectionResetError)):
                wire.answer()
        log.wait("worker stalled, killing it", pid=victim)
        log.wait("worker ready", slot=0)


def test_a_worker_stopped_for_good_does_not_hinder_the_end(place: Path) -> None:
    server = Server(place, "--workers", "2").start()
    victim, _ = server.workers()
    os.kill(victim, signal.SIGSTOP)
    assert server.stop(signal.SIGQUIT) == 0
    wait_gone(victim)
    assert [line["pid"] for line in server.log() if line["event"] == LATE] == [victim]


def overwrite(server: Server) -> None:
    """Change what the segment holds behind its tables, as somebody else might."""
    (name,) = segments_of(server.pid)
    with Path("/dev/shm", name).open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.seek(-file.tell() // 2 & ~4095, os.SEEK_END)
        file.write(b"\xa5" * 65536)


@pytest.mark.parametrize("threads", ["1", "2"], ids=["the template", "the workers"])
def test_a_segment_overwritten_before_it_is_attached_ends_the_start(place: Path, threads: str) -> None:
    """By the template, or by workers that must open the models themselves."""
    with LogWatch(server := Server(place, "--workers", "2", "--threads", threads)) as log:
        process = server.launch()
        loader = log.wait("loading")["pid"]
        if threads == "1":  # the template waits for the segment already
            opening = [pid for pid in children_of(server.pid) if pid != loader]
        else:
            log.wait("segment published")
            opening = until(server, lambda: starting(server), "the workers")
        for pid in opening:
            os.kill(pid, signal.SIGSTOP)
        if threads == "1":
            log.wait("segment published")
        overwrite(server)
        for pid in opening:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(AssertionError, match="ended before 'READY'"):
            log.wait("READY")
        code = process.wait()
    assert code == 74
    said = (place / "stderr").read_text()
    assert "does not come up" in said and "checksum" in said
    assert server.leftovers() == []


def starting(server: Server) -> list[int]:
    status = server.status()
    return [row["pid"] for row in status["workers"] if row["pid"]] if status["state"] == "starting" else []


def test_a_slot_whose_worker_cannot_start_waits_and_is_minded(place: Path) -> None:
    args = ("--workers", "2", "--threads", "2")  # the template does not serve, so each worker attaches the segment
    with Server(place, *args) as server, LogWatch(server) as log:
        overwrite(server)
        os.kill(server.workers()[1], signal.SIGKILL)
        log.wait("worker died", slot=1)
        for _ in range(4):
            assert "checksum" in log.wait("worker died", slot=1)["reason"]
        row = until_row(server, 1, state="waiting", guardian=0)
        assert "checksum" in row["reason"] and row["restarts"] >= 5
        with ExitStack() as stack:
            for wire in [stack.enter_context(Wire(server.address)) for _ in range(32)]:
                wire.send(digits(1))
                assert wire.answer().values["label"].shape == (1,)
        assert server.status()["state"] == "ready"


def test_a_stopping_server_waits_for_no_run_whose_client_has_left(place: Path) -> None:
    args = ("--workers", "1", "--graceful-timeout", "4", "--run-in", "thread", "--model", f"slow={slow(place)}")
    server = Server(place, *args).start()
    with Wire(server.address) as wire:
        wire.send(infer(1, "slow", n=FOR_EVER))
        until_row(server, in_flight=1)
        os.kill(server.pid, signal.SIGTERM)
        assert wire.answer().kind == 102
        wire.send(infer(2, "slow", n=rounds(1)))
        assert wire.answer().refused(Code.UNAVAILABLE, "draining")
    assert server.stop(0) == 0
    assert LATE not in [line["event"] for line in server.log()]


def test_what_outlives_the_graceful_timeout_is_answered(place: Path) -> None:
    args = ("--workers", "1", "--graceful-timeout", "0.5", "--run-in", "thread", "--model", f"slow={slow(place)}")
    server = Server(place, *args).start()
    with Wire(server.address) as wire:
        wire.send(infer(1, "slow", n=FOR_EVER), infer(2, "slow", n=rounds(1)))
        until_row(server, in_flight=2)
        os.kill(server.pid, signal.SIGTERM)
        assert wire.answer().kind == 102
        assert all(answer.refused(Code.UNAVAILABLE, "stopping") for answer in wire.answers(2).values())
        assert wire.end() == []
    assert server.stop(0) == 0
    assert LATE not in [line["event"] for line in server.log()]

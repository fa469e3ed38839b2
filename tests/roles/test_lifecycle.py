"""How a server begins and ends, and what the signals do. SIGNALS.md is the law."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import prefork
from prefork.client import Client
from prefork.errors import Code, Unavailable
from tests.roles.models import FOR_EVER, rounds, slow
from tests.roles.server import REPOSITORY, Server
from tests.roles.watch import LogWatch, until, until_row, wait_gone
from tests.roles.wire import IMAGE, Wire, digits, infer, live


def run(*args: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFORK_")}
    command = [sys.executable, "-m", "prefork", *args]
    return subprocess.run(
        command, env=env | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False, timeout=60
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"prefork-serve {prefork.__version__}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_server_serves_and_leaves_nothing(place: Path, number: signal.Signals) -> None:
    with LogWatch(server := Server(place, "--workers", "2")) as log:
        server.start()
        status = server.status()
        assert status["state"] == "ready" and status["pid"] == server.pid and status["restarts"] == 0
        assert [row["state"] for row in status["workers"]] == ["ready", "ready"]
        workers = server.workers()
        with Wire(server.address) as wire:
            wire.send(digits(1))
            assert set(wire.answer().values) == {"probabilities", "label"}
            assert server.stop(number) == 0
        for pid in workers:
            wait_gone(pid)
        assert log.wait("stopping")["why"] == number.name
        log.wait("stopped")
    assert not (place / "stderr").read_text()


def test_term_answers_what_was_accepted_and_refuses_the_rest(place: Path) -> None:
    server = Server(place, "--workers", "1", "--run-in", "thread", "--model", f"slow={slow(place)}")
    server.start()
    with Wire(server.address) as wire, Wire(server.unix) as other:
        wire.send(infer(1, "slow", n=rounds(1500)), infer(2, "slow", n=rounds(1)))
        until_row(server, in_flight=2)
        os.kill(server.pid, signal.SIGTERM)
        assert other.answer().kind == wire.answer().kind == 102  # GOAWAY
        wire.send(infer(3, "slow", n=rounds(1)))
        found = wire.answers(3)
        assert found[1].values["y"].shape == found[2].values["y"].shape == (256, 256)
        assert found[3].refused(Code.UNAVAILABLE, "draining") and found[3].error.retryable
        assert wire.end() == other.end() == []
        assert not (server.runtime / "prefork.sock").exists()
        assert server.stop() == 0


def test_quit_cuts_a_graceful_stop_short(place: Path) -> None:
    server = Server(place, "--workers", "1", "--run-in", "thread", "--model", f"slow={slow(place)}").start()
    with Wire(server.address) as wire:
        wire.send(infer(1, "slow", n=FOR_EVER))
        until_row(server, in_flight=1)
        os.kill(server.pid, signal.SIGTERM)
        assert wire.answer().kind == 102
        os.kill(server.pid, signal.SIGTERM)  # once more changes nothing
        until(server, lambda: server.status()["state"] == "stopping", "stopping")
        os.kill(server.pid, signal.SIGQUIT)
        assert wire.answer().refused(Code.UNAVAILABLE, "stopping")
        assert server.stop(0) == 0
    assert sum(line["event"] == "stopping" for line in server.log()) == 2


def test_term_while_a_model_loads(place: Path) -> None:
    with LogWatch(server := Server(place, "--workers", "1")) as log:
        server.launch()
        loader = log.wait("loading")["pid"]
        os.kill(loader, signal.SIGSTOP)
        assert server.status()["state"] == "loading" and server.status()["loading"] == "digits"
        assert server.stop() == 0
        wait_gone(loader)
    assert "stopped" in [line["event"] for line in server.log()]


def test_status_answers_at_every_moment_of_a_start(place: Path) -> None:
    with LogWatch(server := Server(place, "--workers", "1")) as log:
        server.launch()
        log.wait("loading")
        seen: list[str] = []
        until(server, lambda: seen.append(server.status()["state"]) or seen[-1] == "ready", "ready")
        assert server.stop() == 0
    assert seen[0] == "loading" and seen == sorted(seen, key=["loading", "starting", "ready"].index)


def test_term_while_workers_start(place: Path) -> None:
    with LogWatch(server := Server(place, "--workers", "2")) as log:
        server.launch()
        log.wait("segment published")
        until(server, lambda: server.status()["state"] == "starting", "starting")
        assert server.stop() == 0
    assert "READY" not in [line["event"] for line in server.log()]


@pytest.mark.parametrize("number", [signal.SIGUSR2])
def test_what_is_not_supported_yet_changes_nothing(demo: Server, number: signal.Signals) -> None:
    before = demo.workers()
    with LogWatch(demo) as log:
        os.kill(demo.pid, number)
        assert (
            "not supported yet" in log.wait("signal is not supported yet, nothing changes", signal=number.name)["event"]
        )
    assert demo.workers() == before and demo.status()["restarts"] == 0


def test_usr1_reopens_the_log_in_every_process(place: Path) -> None:
    with Server(place, "--workers", "2") as server:
        old = place / "log.json.1"
        server.log_file.rename(old)
        os.kill(server.pid, signal.SIGUSR1)
        everyone = [server.pid, *server.workers()]
        until(server, lambda: all(writes_to(pid, server.log_file) for pid in everyone), "the new file in every process")
        assert not any(writes_to(pid, old) for pid in everyone)
        with LogWatch(server) as log:
            os.kill(server.pid, signal.SIGTTIN)
            log.wait("scaled")
        assert "READY" in old.read_text() and "READY" not in server.log_file.read_text()


def writes_to(pid: int, path: Path) -> bool:
    links = [fd.readlink() for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return path in links


def test_a_worker_that_is_told_to_leave_is_replaced(place: Path) -> None:
    with Server(place, "--workers", "1") as server, LogWatch(server) as log:
        (before,) = server.workers()
        with Wire(server.address) as wire:
            wire.send(live(1))
            wire.answer()
            os.kill(before, signal.SIGTERM)
            assert [answer.kind for answer in wire.end()] == [102]
        after = log.wait("worker ready", slot=0)["pid"]
        assert after != before and server.workers() == [after]
        with Client(server.address) as client:
            assert client.infer("digits", {"image": IMAGE})["label"].shape == (1,)


def test_interrupts_reach_a_worker_in_vain(demo: Server) -> None:
    before = demo.workers()
    for number in (signal.SIGINT, signal.SIGTTIN, signal.SIGTTOU):
        for pid in before:
            os.kill(pid, number)
    with Client(demo.address, codec="protobuf") as client:
        assert client.infer("digits", {"image": IMAGE})["label"].shape == (1,)
    assert demo.workers() == before


def test_check_prints_what_would_hold(place: Path) -> None:
    done = run("--check", "--workers", "3", "--bind", "127.0.0.1:0", "--runtime-dir", str(place / "r"))
    assert done.returncode == 0 and not done.stderr
    assert re.search(r"^workers = 3\b", done.stdout, re.M) and "digits" in done.stdout
    assert not (place / "r").exists()


def test_check_judges_the_model_and_the_configuration(place: Path) -> None:
    broken = place / "broken.onnx"
    broken.write_bytes(b"no model")
    done = run("--check", str(broken))
    assert done.returncode == 65 and "model 'broken'" in done.stderr and not done.stdout
    done = run("--check", "--workers", "many")
    assert done.returncode == 78 and "--workers" in done.stderr and not done.stdout


def test_a_client_of_a_dead_server_is_told(place: Path) -> None:
    server = Server(place, "--workers", "1").start()
    address, unix = server.address, server.unix
    server.stop()
    for gone in (address, unix):
        with Client(gone, retries=0) as client, pytest.raises(Unavailable):
            client.infer("digits", {"image": IMAGE})

"""The server under a supervisor: what it says and when, and that the watchdog is fed by answers and by nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.roles.supervisor import Supervised
from tests.roles.watch import LogWatch

INTERVAL = 0.9  # seconds


@pytest.fixture(params=["path", "abstract"])
def server(request: pytest.FixtureRequest, place: Path) -> Iterator[Supervised]:
    server = Supervised(place, "--workers", "2", abstract=request.param == "abstract")
    server.launch()
    yield server
    server.stop()
    server.close()


@pytest.fixture
def watched(place: Path) -> Iterator[Supervised]:
    server = Supervised(place, "--workers", "2", env={"WATCHDOG_USEC": str(int(INTERVAL * 1e6))})
    server.start()
    yield server
    server.stop()
    server.close()


def test_from_loading_to_the_end(server: Supervised) -> None:
    server.hear("STATUS=loading digits")
    ready = server.hear("READY=1")
    assert ready["MAINPID"] == str(server.pid) and ready["STATUS"].startswith("serving digits")
    before = time.monotonic_ns() // 1000
    os.kill(server.pid, signal.SIGHUP)
    reloading = server.hear("RELOADING=1")
    assert before <= int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    server.hear("READY=1")
    server.stop()
    stopping = [text for text in server.unheard() if "STOPPING=1" in text]
    assert len(stopping) == 1 and "EXTEND_TIMEOUT_USEC=43000000" in stopping[0]  # graceful_timeout and some


def test_the_watchdog_is_fed_by_answers(watched: Supervised) -> None:
    for _ in range(4):
        watched.hear("WATCHDOG=1")
    assert [line for line in watched.log() if line["event"] == "self-probe failed"] == []


def test_workers_that_all_hang_starve_it(watched: Supervised) -> None:
    watched.hear("WATCHDOG=1")
    workers = watched.workers()
    with LogWatch(watched) as log:
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        log.wait("self-probe failed")  # what was under way before is over
        watched.unheard()
        for _ in range(4):
            log.wait("self-probe failed", reason="no answer that a worker is ready")
        assert not any("WATCHDOG=1" in text for text in watched.unheard())
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        watched.hear("WATCHDOG=1")


def test_one_worker_that_answers_is_enough(watched: Supervised) -> None:
    os.kill(watched.workers()[0], signal.SIGSTOP)
    for _ in range(6):
        watched.hear("WATCHDOG=1")
    os.kill(watched.workers()[0], signal.SIGCONT)

"""Another master in the place of the running one, with a configuration that differs or with sockets of others."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.roles.server import Server
from tests.roles.supervisor import Supervised
from tests.roles.test_upgrade import Caller, ctl, serving, until_answered
from tests.roles.test_upgrade_faults import answers, segments
from tests.roles.watch import WATCHDOG, LogWatch, wait_gone


@pytest.fixture
def file(place: Path) -> Path:
    """A configuration that a test changes between two masters."""
    path = place / "prefork.toml"
    path.write_text("")
    return path


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[server]\nunix = '{place}/other.sock'\n", "unix"),
        ("[server]\nunix = ''\n", "unix"),
        ("[server]\ncontrol = '{place}/other.sock'\n", "control"),
        ("[server]\nbacklog = 'long'\n", "backlog"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(place: Path, file: Path, text: str, word: str) -> None:
    with serving(place, "--config", str(file), "--quantize", "none") as server:
        file.write_text(text.format(place=place))
        done = ctl(server, "upgrade")
        assert done.returncode == 1 and "the old program serves on" in done.stderr and word in done.stderr
        assert answers(server.address) and answers(server.unix)


@pytest.mark.parametrize("workers", [1, 3])
def test_other_numbers_of_workers_and_no_more_metrics(place: Path, file: Path, workers: int) -> None:
    file.write_text("[server]\nworkers = 2\n[telemetry]\nmetrics_bind = '127.0.0.1:0'\n")
    server = Server(place, "--config", str(file), "--quantize", "none", "--pid-file", str(place / "pid"))
    with server, LogWatch(server) as log:
        bind = str(next(line for line in server.log() if line["event"] == "starting")["metrics"])
        file.write_text(f"[server]\nworkers = {workers}\n")
        with Caller(server.address) as caller:
            assert ctl(server, "upgrade").returncode == 0
            assert server.process is not None and server.process.wait(WATCHDOG) == 0
            until_answered(caller, caller.answered + 20)
        assert caller.failed == []
        assert len([row for row in server.rows() if row["pid"]]) == workers
        host, _, port = bind.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        last = int(server.status()["pid"])
        os.kill(last, signal.SIGTERM)
        log.wait("stopped")
        wait_gone(last)


def test_sockets_of_a_service_manager_stay_its_own_and_ours_ours(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as given:
        server = Supervised(place, "--workers", "1", given=[given])
        server.start()
        assert ctl(server, "upgrade").returncode == 0
        assert server.process is not None and server.process.wait(WATCHDOG) == 0
        pid = int(server.status()["pid"])
        assert answers(server.address) and answers(server.unix)
        with socket.socket(socket.AF_UNIX) as waiting:
            os.kill(pid, signal.SIGTERM)
            wait_gone(pid)
            with pytest.raises(FileNotFoundError):
                waiting.connect(server.unix.removeprefix("unix:"))
        server.close()
        assert server.leftovers() == []
        with socket.create_connection(given.getsockname()):
            pass  # waits in the manager's queue for the next server


def test_an_old_master_that_is_killed_while_it_leaves_is_cleaned_up_after(place: Path, file: Path) -> None:
    with serving(place, "--config", str(file), "--quantize", "none") as server, LogWatch(server) as log:
        old = server.status()["models"][0]["segment"]["name"]
        worker = server.workers()[0]
        file.write_text("[server]\nshm = 'sysv'\n")
        os.kill(worker, signal.SIGSTOP)  # it holds up the end of its master
        assert ctl(server, "upgrade").returncode == 0
        assert old in segments()
        os.kill(server.pid, signal.SIGKILL)
        assert server.process is not None and server.process.wait(WATCHDOG) == -signal.SIGKILL
        assert log.wait("removed a dead master's segment")["name"] == old
        assert log.wait("removed a dead master's scratch directory") and answers(server.address)

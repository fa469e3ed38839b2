"""The telemetry process, forked as the master forks it, over real HTTP: pages, signals, and how it leaves."""

from __future__ import annotations

import http.client
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefork import child as children
from prefork import listener
from prefork.child import Child
from prefork.config import Config
from prefork.jobs import LoadedModel, TelemetryJob
from prefork.layers import load
from prefork.log import Logger, setup
from prefork.reporting import Reporting
from prefork.shm import words as w
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.segment import SegmentRef
from prefork.shm.words import MasterState, WorkerState
from prefork.slots import Slot
from tests.observe.scrape import sample, samples

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@pytest.fixture
def log(tmp_path: Path) -> Logger:
    return setup(file=tmp_path / "log")


@pytest.fixture
def board() -> Iterator[Scoreboard]:
    board = Scoreboard.create(4)
    yield board
    os.close(board.fd)


def said(child: Child) -> dict[str, object]:
    """The child's next message, or what its end was."""
    select.select([child.channel], [], [])
    messages = child.receive()
    assert messages, "the child ended without a word"
    return messages[0]


def reaped(child: Child) -> int:
    _, status = os.waitpid(child.pid, 0)
    child.channel.close()
    return os.waitstatus_to_exitcode(status)


class Telemetry:
    """The process on a port of the kernel's choice, and a page to write to."""

    def __init__(self, log: Logger, board: Scoreboard) -> None:
        self.page = board.master()
        self.page.begin()
        self.page.write(MasterState.READY, 1, 2, 2)
        self.listener = listener.open_tcp("127.0.0.1:0", 1, 16)[0]
        self.address = self.listener.getsockname()
        job = TelemetryJob(log, self.listener, board, 30.0)
        self.child = children.spawn("telemetry", 0, 0, job, job.descriptors)
        assert said(self.child) == {"event": "ready"}

    def get(self, path: str, accept: str = "") -> tuple[int, str, str]:
        """Status, content type, body."""
        connection = http.client.HTTPConnection(*self.address)
        connection.request("GET", path, headers={"Accept": accept} if accept else {})
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        return response.status, response.headers["Content-Type"], body


@pytest.fixture
def telemetry(log: Logger, board: Scoreboard) -> Iterator[Telemetry]:
    telemetry = Telemetry(log, board)
    yield telemetry
    telemetry.listener.close()
    if telemetry.child.channel.fileno() >= 0:
        telemetry.child.kill(signal.SIGKILL)
        reaped(telemetry.child)


def test_metrics_in_both_formats(telemetry: Telemetry, board: Scoreboard) -> None:
    telemetry.page.serve("digits", 1, 4096, {"form": "int8"})
    slot = board.slot(1)
    slot.begin(os.getpid(), 1)
    slot.answer(board.answer_rows()[2]["digits"], 0)
    status, kind, body = telemetry.get("/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    key = sample("prefork_requests_total", model="digits", codec="protobuf", code="OK")
    assert samples(body)[key] == 1
    slot.answer(board.answer_rows()[2]["digits"], 0)
    status, kind, body = telemetry.get("/metrics", OPENMETRICS)
    assert status == 200 and kind.startswith("application/openmetrics-text; version=1.0.0")
    assert samples(body, strict=True)[key] == 2


def test_health_pages(telemetry: Telemetry, board: Scoreboard) -> None:
    assert telemetry.get("/healthz") == (200, "text/plain; charset=utf-8", "alive\n")
    assert telemetry.get("/readyz")[::2] == (503, "none of 2 workers is ready\n")
    slot = board.slot(0)
    slot.begin(os.getpid(), 1)
    slot.move(WorkerState.READY)
    assert telemetry.get("/readyz")[::2] == (200, "ready, 1 of 2 workers\n")
    telemetry.page.write(MasterState.STOPPING, 1, 2, 2)
    assert telemetry.get("/readyz")[::2] == (503, "the server is stopping\n")
    assert telemetry.get("/healthz")[0] == 200
    assert telemetry.get("/")[0] == 404


def test_a_broken_board_is_an_answer(telemetry: Telemetry, board: Scoreboard) -> None:
    words = memoryview(board._map).cast("Q")
    words[w.MASTER_AT] = 99
    for path in ("/metrics", "/healthz", "/readyz"):
        assert telemetry.get(path)[::2] == (503, "scoreboard: master's state: expected 0 to 4, found 99\n")
    words[w.MASTER_AT] = MasterState.READY
    assert telemetry.get("/healthz")[0] == 200


def test_it_has_one_thread_and_no_numeric_library(telemetry: Telemetry) -> None:
    assert telemetry.get("/metrics")[0] == 200
    assert len(list(Path(f"/proc/{telemetry.child.pid}/task").iterdir())) == 1
    maps = Path(f"/proc/{telemetry.child.pid}/maps").read_text()
    ours = Path("/proc/self/maps").read_text()
    for library in ("onnxruntime", "uvloop"):
        assert library not in maps or library in ours  # a fork has what this process had


@pytest.mark.parametrize("leave", ["shutdown", "quit", "SIGTERM"])
def test_it_leaves_when_told(telemetry: Telemetry, leave: str) -> None:
    with socket.create_connection(telemetry.address):  # a client that says nothing keeps nobody
        if leave == "SIGTERM":
            telemetry.child.kill(signal.SIGTERM)
        else:
            telemetry.child.send({"command": leave})
        assert reaped(telemetry.child) == 0


def test_it_leaves_with_the_master(telemetry: Telemetry) -> None:
    telemetry.child.channel.shutdown(socket.SHUT_WR)
    assert reaped(telemetry.child) == 0


def test_the_log_is_reopened(telemetry: Telemetry, tmp_path: Path) -> None:
    file = tmp_path / "log"
    assert "serving metrics" in file.read_text()
    file.rename(tmp_path / "log.1")
    telemetry.child.kill(signal.SIGUSR1)
    while not file.exists():
        telemetry.get("/healthz")


# the master's side


def config(tmp_path: Path, bind: str) -> Config:
    return load({"metrics_bind": bind, "runtime_dir": str(tmp_path)}, {})


@pytest.fixture
def reporting(tmp_path: Path, log: Logger, board: Scoreboard) -> Iterator[Reporting]:
    reporting = Reporting(config(tmp_path, "127.0.0.1:0"), log, board)
    yield reporting
    reporting.close()


def fetch(address: str | None, path: str) -> int:
    assert address is not None
    connection = http.client.HTTPConnection(address)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def test_without_an_address_there_is_no_process(tmp_path: Path, log: Logger, board: Scoreboard) -> None:
    reporting = Reporting(config(tmp_path, ""), log, board)
    assert (reporting.bind, reporting.serve(0.0)) == (None, None)
    reporting.write("loading", 0, [], 0)
    assert board.read_master().state is MasterState.LOADING
    reporting.close()


def test_the_masters_states_have_words(reporting: Reporting, board: Scoreboard, make_slot: Callable[..., Slot]) -> None:
    for state in ("loading", "starting", "ready", "stopping"):
        reporting.write(state, 2, [make_slot(0), make_slot(1, wanted=False)], 2)
        reading = board.read_master()
        assert (reading.state.name.lower(), reading.generation, reading.wanted, reading.slots) == (state, 2, 1, 2)


@pytest.fixture
def make_slot() -> Iterator[Callable[..., Slot]]:
    socks: list[socket.socket] = []

    def make(index: int, *, wanted: bool = True) -> Slot:
        socks.append(socket.socket())
        return Slot(index, socks[-1], wanted)

    yield make
    for sock in socks:
        sock.close()


def test_models_come_and_go(reporting: Reporting, board: Scoreboard) -> None:
    def loaded(name: str, version: int = 1) -> LoadedModel:
        tried = [{"name": "fp32", "chosen": False}, {"name": "int8", "chosen": True, "delta": 0.0012, "speedup": 2.9}]
        report = {"form": "int8", "origin": "cache", "notes": ["x"], "gate": {"metric": "top-1", "candidates": tried}}
        return LoadedModel(name, SegmentRef("posix", "secret", 10), report, version)

    reporting.models([loaded("a"), loaded("b")])
    reporting.models([loaded("b", 2)])
    assert [row.generation for row in board.read_master().models] == [1, 2], "one serves beside the other"
    reporting.models([loaded("b", 2)], only=True)
    rows = board.read_master().models
    assert [(row.name, row.generation) for row in rows] == [("a", 0), ("b", 2)]
    assert rows[1].labels == {
        "form": "int8", "shm": "posix", "origin": "cache", "metric": "top-1", "accuracy_delta": "0.0012",
        "speedup": "2.9",
    }  # fmt: skip


def test_a_dead_process_comes_back_on_the_same_port(reporting: Reporting) -> None:
    child = reporting.serve(0.0)
    assert child is not None and reporting.serve(0.0) is None
    assert said(child) == {"event": "ready"}
    child.kill(signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    child.channel.close()
    address = reporting.bind
    reporting.left(child, status, child.started)
    again = reporting.serve(child.started)  # the first death is forgiven, the second is not
    assert again is not None and said(again) == {"event": "ready"}
    assert (reporting.bind, fetch(address, "/healthz")) == (address, 200)
    again.kill(signal.SIGKILL)
    _, status = os.waitpid(again.pid, 0)
    again.channel.close()
    reporting.left(again, status, again.started)
    assert reporting.serve(again.started) is None
    last = reporting.serve(again.started + 1.0)
    assert last is not None
    last.kill(signal.SIGKILL)
    reaped(last)


def test_it_is_the_last_to_leave(reporting: Reporting) -> None:
    child = reporting.serve(0.0)
    assert child is not None and said(child) == {"event": "ready"}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        other = Child("worker", 0, 1, 1, ours)
        reporting.dismiss([child, other], 0.0)
        assert not child.leaving
        reporting.dismiss([child], 0.0)
        assert child.leaving
    assert reaped(child) == 0
    reporting.left(child, 0, child.started)

"""The logs of a whole server: requests in them, rotation under load, and a reader that does not read."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefork.client import Client
from tests.model import trap
from tests.roles.server import REPOSITORY, Server
from tests.roles.watch import LogWatch, until
from tests.roles.wire import IMAGE, Wire, digits, infer

SPY = """
import os

def score(outputs, labels):
    with open(os.environ["SPY_FIFO"]) as fifo:
        fifo.read()
    return float((outputs["scores"].argmax(1) == labels).mean())
"""
PIPE = 65536  # bytes that a pipe holds


def requests(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == "request"]


def rows(*files: Path) -> list[dict[str, Any]]:
    """Every line is whole."""
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


@contextmanager
def load(address: str, wires: int) -> Iterator[Callable[[], int]]:
    """Requests on so many connections, one after the other, until the block ends; ask it how many were answered."""
    over = threading.Event()
    counts = [0] * wires

    def ask(index: int) -> None:
        with Wire(address) as wire:
            while not over.is_set():
                counts[index] += 1
                wire.send(digits(counts[index]))
                assert wire.answer().values["label"].shape == (1,)

    threads = [threading.Thread(target=ask, args=[index]) for index in range(wires)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: sum(counts)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_no_line_for_a_request_unless_asked(demo: Server) -> None:
    with Wire(demo.address) as wire:
        wire.send(digits(1), infer(2, "nobody", image=IMAGE))
        wire.answers(2)
    assert requests(demo.log()) == []


def test_a_line_for_each_request(place: Path) -> None:
    with Server(place, "--workers", "2", "--log-requests", "1") as server:
        with Wire(server.address) as tcp, Wire(server.unix) as unix:
            host, port = tcp.sock.getsockname()
            for wire in (tcp, unix):
                wire.send(digits(1))
                wire.answer()
                wire.send(infer(2, "nobody", image=IMAGE))
                wire.answer()
        pids = server.workers()
    found = requests(server.log())
    assert sorted((row["peer"], row["code"], row["model"]) for row in found) == [
        (f"{host}:{port}", "NOT_FOUND", "nobody"), (f"{host}:{port}", "OK", "digits"),
        ("unix", "NOT_FOUND", "nobody"), ("unix", "OK", "digits"),
    ]  # fmt: skip
    assert all(row["pid"] in pids and row["role"] == "worker" for row in found)
    assert all(row["version"] == "1" and row["compute_us"] > 0 for row in found if row["code"] == "OK")


def test_the_heartbeat_writes_what_waits(place: Path) -> None:
    with Server(place, "--workers", "1", "--log-requests", "1") as server, LogWatch(server) as log:
        with Client(server.address) as client:
            client.infer("digits", {"image": IMAGE})
        assert log.wait("request")["code"] == "OK"


def test_rotation_under_load_loses_no_request(place: Path) -> None:
    """Old and new file together hold a line for each answer, and the old one gets none after the new one has begun."""
    moved = place / "log.1"
    with Server(place, "--workers", "2", "--log-requests", "1") as server:
        pids = set(server.workers())
        with load(server.address, 8) as answered:
            until(server, lambda: answered() > 2000, "requests under way")
            server.log_file.rename(moved)
            os.kill(server.pid, signal.SIGUSR1)
            until(server, lambda: server.log_file.exists() and both(server.log_file, pids), "a line of each worker")
        with LogWatch(server) as log:
            os.kill(server.pid, signal.SIGTTIN)
            assert log.wait("scaled")["role"] == "master"
    assert len(requests(rows(moved, server.log_file))) == answered()
    assert len(requests(rows(server.log_file))) > 0 < len(requests(rows(moved)))


def both(file: Path, pids: set[int]) -> bool:
    """Whether the file has whole lines of all these processes."""
    *whole, _ = file.read_bytes().split(b"\n")
    return {json.loads(line).get("pid") for line in whole} >= pids


def opened(fifo: Path) -> int | None:
    """A writing end of the pipe, once somebody reads it."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def test_a_loader_at_work_reopens_too_and_still_waits_until_its_segment_is_held(place: Path) -> None:
    """It stands still in a metric of ours, on a named pipe, until the file has been moved."""
    model, data = trap.write(place)
    (place / "spy.py").write_text(SPY)
    fifo, moved = place / "fifo", place / "log.1"
    os.mkfifo(fifo)
    env = {"PYTHONPATH": f"{place}:{REPOSITORY}", "SPY_FIFO": str(fifo)}
    args = ("--model", str(model), "--quantize", "auto", "--quantize-seconds", "0", "--eval", str(data))
    server = Server(place, "--workers", "1", "--shm", "sysv", *args, "--metric", "spy:score", env=env)
    server.launch()
    try:
        held = until(server, lambda: opened(fifo), "the metric is at work")
        server.log_file.rename(moved)
        os.kill(server.pid, signal.SIGUSR1)
        until(server, server.log_file.exists, "the new file")
        assert server.status()["loading"] == "trap"
        (place / "empty").write_text("")
        (place / "empty").replace(fifo)  # later calls find a file with nothing in it
        os.close(held)
        until(server, lambda: server.status()["state"] == "ready", "ready")
    finally:
        server.stop()
    assert [row for row in server.log() if row["role"] == "loader"]
    assert not [row for row in rows(moved) if row["event"] == "segment published"]


def test_a_reader_that_does_not_read_stops_nobody(place: Path) -> None:
    """The log is a pipe, and stays full while many times its size is served. When it is read again, whole lines come,
    and one that says how many are missing."""
    pipe = place / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    asked = 6000
    with Server(place, "--workers", "1", "--log-requests", "1", "--log-file", str(pipe)) as server:
        with Wire(server.address) as wire:
            for turn in range(asked // 100):
                wire.send(*(digits(turn * 100 + n) for n in range(1, 101)))
                wire.answers(100)
        assert server.status()["workers"][0]["replies_ok"] == asked
        data = b""
        while not (said := re.search(rb'"request log was full, lines dropped".*"count": (\d+)}\n', data)):
            assert select.select([reader], [], [], 60)[0]
            data += os.read(reader, 1 << 20)
        os.set_blocking(reader, False)
    lines = [json.loads(line) for line in data.splitlines()]
    assert len(requests(lines)) + int(said[1]) == asked and len(data) > PIPE
    os.close(reader)

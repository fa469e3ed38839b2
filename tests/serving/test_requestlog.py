"""The request log of a worker: what is in the sample, what a line says, and that a log that takes nothing costs nothing
but lines."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefork.codec.frame import encode_frame
from prefork.codec.message import Codec, InferRequest, Kind
from prefork.codec.registry import codec_of
from prefork.errors import Code
from prefork.log import Logger, setup
from prefork.serving import logged
from prefork.serving.admission import Admission
from prefork.serving.costs import Costs
from prefork.serving.logged import TimedScheduler
from prefork.serving.requestlog import BATCH, CAPACITY, ERRORS_PER_SECOND, Entry, RequestLog
from prefork.serving.service import Service
from prefork.tensor import Tensor
from tests.roles.wire import IMAGE, Wire, digits, infer
from tests.serving.parts import ROWS, Limits, demo_session, fresh_words, pair, run
from tests.test_walls import MODULES

ENTRY = Entry(1_700_000_000_123_456_789, Code.OK, "msgpack", "m", "1", 7, 10, 20, 1e-6, 2e-6, 4e-6, "unix")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Later:
    """What is to be called after 0 seconds (`soon`) and after more (`late`), when the test says."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.late: list[Callable[[], None]] = []

    def __call__(self, delay: float, call: Callable[[], None]) -> None:
        (self.late if delay else self.soon).append(call)

    def turn(self) -> None:
        calls, self.soon = self.soon, []
        for call in calls:
            call()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def fifo(tmp_path: Path) -> tuple[Logger, int]:
    """A logger that writes to a pipe, and the end that is read when the test does."""
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    return setup("info", "json", tmp_path / "fifo"), reader


def drain(reader: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in os.read(reader, 1 << 20).splitlines()]


def test_nothing_is_written_when_an_entry_is_noted(tmp_path: Path) -> None:
    later, path = Later(), tmp_path / "log"
    log = RequestLog(1.0, setup("error", "json", path), later)
    for _ in range(BATCH - 1):
        log.note(ENTRY)
    assert not later.soon and rows(path) == []
    log.note(ENTRY)
    assert len(later.soon) == 1 and rows(path) == []
    log.note(ENTRY)
    later.turn()
    assert not later.soon and len(rows(path)) == BATCH
    log.beat()
    assert len(rows(path)) == BATCH + 1


def test_a_line_says_when_it_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(1.0, setup("info", "json", path), Later())
    log.note(ENTRY)
    log.beat()
    assert rows(path) == [
        {
            "ts": "2023-11-14T22:13:20.123456Z", "level": "info", "role": "master", "event": "request", "code": "OK",
            "model": "m", "version": "1", "codec": "msgpack", "bytes_in": 10, "bytes_out": 20, "queue_us": 1,
            "compute_us": 2, "total_us": 4, "peer": "unix", "request_id": 7,
        }
    ]  # fmt: skip


def test_the_sample_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    """Within six standard deviations."""
    quiet = setup("info", "json", tmp_path / "log")
    for rate in (0.01, 0.5, 1.0):
        log, tries = RequestLog(rate, quiet, Later()), 20_000
        found = sum(log.takes() for _ in range(tries))
        assert abs(found - rate * tries) <= 6 * (rate * (1 - rate) * tries) ** 0.5


def test_failures_are_limited_and_the_others_counted(tmp_path: Path) -> None:
    path, now = tmp_path / "log", [100.0]
    log = RequestLog(1e-9, setup("info", "json", path), Later(), lambda: now[0])
    assert sum(log.takes_error() for _ in range(1000)) == ERRORS_PER_SECOND
    log.beat()
    assert [(row["event"], row["count"]) for row in rows(path)] == [("failed requests without a line", 990)]
    now[0] = 100.9
    assert not log.takes_error()
    now[0] = 101.0
    assert log.takes_error()
    log.beat()
    assert [row["count"] for row in rows(path)] == [990, 1]


def test_a_reader_that_does_not_read_costs_lines_and_nothing_else(fifo: tuple[Logger, int]) -> None:
    lines, reader = fifo
    later = Later()
    log = RequestLog(1.0, lines, later)
    sent = 4 * CAPACITY
    for number in range(sent):
        log.note(replace(ENTRY, request_id=number))
        later.turn()
    assert not later.soon and len(later.late) == 1  # tried again after a while, not with every request
    found: list[dict[str, Any]] = []
    while not found or found[-1]["event"] == "request":
        found += drain(reader)
        later.soon, later.late = later.late, []
        while later.soon:
            later.turn()
        log.beat()
    *requests, said = found
    assert said["event"] == "request log was full, lines dropped"
    assert len(requests) + said["count"] == sent and said["count"] > 0
    assert [row["request_id"] for row in requests] == list(range(len(requests)))
    os.close(reader)


def talk(path: Path, side: Callable[[Wire], Any], **how: Any) -> list[dict[str, Any]]:
    """The lines of one connection: `side` is the client's, in a thread of its own."""

    async def whole(loop: asyncio.AbstractEventLoop) -> None:
        with pair() as (ours, theirs):
            await serve(loop, ours, theirs)

    async def serve(loop: asyncio.AbstractEventLoop, ours: socket.socket, theirs: socket.socket) -> None:
        limits, words, models = Limits(**how), fresh_words(), {"digits": demo_session()}
        faults: list[Exception] = []
        scheduler = TimedScheduler(
            loop, models, {"digits": "1"}, Admission(limits.max_in_flight, limits.max_in_flight_bytes), Costs(), words,
            run_in,
            lambda seconds: None, faults.append,
        )  # fmt: skip
        service = Service(models, {"digits": "1"}, limits, limits.wire, scheduler, words, faults.append, ROWS)
        log = RequestLog(rate, setup("info", "json", path), loop.call_later)
        await loop.connect_accepted_socket(logged.factory(service, loop, log), ours)
        limits.max_frame_bytes = reply_limit  # what comes in is bounded already
        done: Awaitable[None] = loop.run_in_executor(None, side, Wire(theirs))
        await done
        log.flush_all()
        scheduler.close()
        assert not faults

    run_in, rate = how.pop("run_in", "inline"), how.pop("rate", 1.0)
    reply_limit = how.pop("reply_limit", 1 << 20)
    run(whole)
    return rows(path)


@pytest.mark.parametrize("run_in", ["inline", "thread"])
@pytest.mark.parametrize("codec", [Codec.MSGPACK, Codec.PROTOBUF])
def test_a_request_and_what_it_took(tmp_path: Path, run_in: str, codec: Codec) -> None:
    sizes: list[int] = []

    def side(wire: Wire) -> None:
        request = InferRequest("digits", [Tensor.from_numpy("image", IMAGE)], id="mine")
        request.parameters["traceparent"] = PARENT
        body = codec_of(codec).encode_infer_request(request)
        wire.send(encode_frame(Kind.INFER, codec, 5, body))
        data = wire.sock.recv(1 << 20)
        sizes.extend([len(body), len(data)])

    (row,) = talk(tmp_path / "log", side, run_in=run_in)
    assert {key: row[key] for key in ("event", "level", "code", "model", "version", "codec", "peer")} == {
        "event": "request", "level": "info", "code": "OK", "model": "digits", "version": "1",
        "codec": codec.name.lower(), "peer": "unix",
    }  # fmt: skip
    assert (row["request_id"], row["id"], row["traceparent"]) == (5, "mine", PARENT)
    assert [row["bytes_in"], row["bytes_out"]] == sizes
    assert 0 < row["queue_us"] + row["compute_us"] <= row["total_us"] + 1 and row["compute_us"] > 0


def test_failures_get_a_line_whatever_the_rate(tmp_path: Path) -> None:
    def side(wire: Wire) -> None:
        for frame in (digits(1), infer(2, "x" * 1000, image=IMAGE), infer(3, "digits", wrong=IMAGE), digits(0)):
            wire.send(frame)
            wire.answer()
        wire.send(encode_frame(Kind.INFER, Codec.MSGPACK, 9, b"\xff"))
        wire.answer()
        wire.send(b"GET / HTTP/1.1\r\n\r\n" + bytes(24))
        wire.answer()

    found = talk(tmp_path / "log", side, rate=1e-12)
    assert [(row["level"], row["code"], row["request_id"]) for row in found] == [
        ("warning", "NOT_FOUND", 2), ("warning", "INVALID_ARGUMENT", 3), ("warning", "INVALID_ARGUMENT", 0),
        ("warning", "INVALID_ARGUMENT", 9), ("warning", "INVALID_ARGUMENT", 0),
    ]  # fmt: skip
    assert [row["model"] for row in found] == ["x" * 128, "digits", "", "", ""]
    assert all(row["bytes_out"] > 24 and row["total_us"] >= 0 for row in found)


def test_a_reply_that_is_too_large_is_one_failure(tmp_path: Path) -> None:
    def side(wire: Wire) -> None:
        wire.send(digits(1))
        assert wire.answer().refused(Code.RESOURCE_EXHAUSTED, "max_frame_bytes")

    (row,) = talk(tmp_path / "log", side, reply_limit=64)
    assert row["code"] == "RESOURCE_EXHAUSTED" and row["compute_us"] > 0


def test_pipelined_requests_keep_their_own_figures(tmp_path: Path) -> None:
    def side(wire: Wire) -> None:
        wire.send(*(infer(n, "digits", image=IMAGE.repeat(n, axis=0)) for n in range(1, 5)))
        wire.answers(4)

    found = talk(tmp_path / "log", side, run_in="thread")
    assert [row["request_id"] for row in found] == [1, 2, 3, 4]
    sizes = [row["bytes_in"] for row in found]
    assert sizes == sorted(set(sizes)) and all(row["compute_us"] <= row["total_us"] for row in found)
    waits = [row["queue_us"] for row in found]
    assert waits == sorted(waits)


def test_without_a_log_the_request_path_knows_of_none() -> None:
    """What the worker builds then reaches neither file; it chooses once, when it starts."""
    for name in ("rpc", "service", "stream", "scheduler", "lane", "admission", "costs"):
        assert not MODULES[f"serving.{name}"].ours & {"serving.logged", "serving.requestlog"}

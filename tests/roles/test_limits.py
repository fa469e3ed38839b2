"""What one client may ask of a worker: every bound is kept, named in its refusal, and felt by nobody else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from prefork.codec.frame import frame_header
from prefork.codec.message import Codec, Kind
from prefork.errors import Code
from tests.roles.models import FOR_EVER, large, rounds, sink, slow
from tests.roles.server import Server
from tests.roles.watch import until_row
from tests.roles.wire import Wire, cancel, infer, live

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(module_place: Path) -> Iterator[Server]:
    """One worker with small limits, its runs in the thread; each test leaves it idle."""
    models = [f"--model={make.__name__}={make(module_place)}" for make in (slow, large, sink)]
    limits = {
        "max-in-flight": 8, "max-in-flight-per-connection": 6, "max-connections": 12, "read-timeout": 1,
        "max-frame-bytes": "8MiB", "max-in-flight-bytes": "16MiB", "max-timeout-ms": 60_000,
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in limits.items()]
    with Server(module_place, "--workers", "1", "--run-in", "thread", *models, *flags) as found:
        yield found


@pytest.fixture(autouse=True)
def idle(server: Server) -> Iterator[None]:
    """Every test ends with the same worker, idle, with no connection."""
    (pid,) = server.workers()
    yield
    row = until_row(server, in_flight=0, queue_depth=0, connections=0)
    assert row["pid"] == pid and row["restarts"] == 0


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    with Wire(server.address) as found:
        yield found


def peak(server: Server) -> int:
    """The largest resident size of the worker so far, in bytes."""
    (pid,) = server.workers()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def test_in_flight_of_a_connection(server: Server, wire: Wire) -> None:
    with Wire(server.address) as other:
        wire.send(*(infer(i, "slow", n=rounds(300 if i == 1 else 1)) for i in range(1, 8)))
        refused = wire.answer()
        assert refused.id == 7 and refused.refused(Code.RESOURCE_EXHAUSTED, "max_in_flight_per_connection", "6")
        assert refused.error.retryable
        other.send(infer(1, "slow", n=rounds(1)), live(2))
        assert other.answers(2)[1].values["y"].shape == (256, 256)
        assert all(answer.values for answer in wire.answers(6).values())


def test_in_flight_of_a_worker(server: Server, wire: Wire) -> None:
    with Wire(server.address) as other:
        wire.send(*(infer(i, "slow", n=rounds(500)) for i in range(1, 7)))
        until_row(server, in_flight=6)
        other.send(*(infer(i, "slow", n=rounds(1)) for i in range(1, 4)), live(4))
        refused = other.answers(2)
        assert refused[3].refused(Code.RESOURCE_EXHAUSTED, "max_in_flight", "8") and refused[3].error.retry_after_ms
        assert refused[4].kind == Kind.SERVER_LIVE_REPLY
        assert all(answer.values for answer in [*wire.answers(6).values(), *other.answers(2).values()])


def test_bytes_of_a_worker(wire: Wire) -> None:
    x = np.ones(7 * MIB // 4, np.float32)
    wire.send(infer(1, "slow", n=rounds(500)), *(infer(i, "sink", n=rounds(1), x=x) for i in range(2, 5)))
    refused = wire.answer()
    assert refused.id == 4 and refused.refused(Code.RESOURCE_EXHAUSTED, "max_in_flight_bytes", str(16 * MIB))
    assert all(answer.values for answer in wire.answers(3).values())


def test_connections_of_a_worker(server: Server) -> None:
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.address)) for _ in range(12)]
        for wire in wires:
            wire.send(live(1))
            assert wire.answer().kind == Kind.SERVER_LIVE_REPLY
        with Wire(server.unix) as refused:
            (error,) = refused.end()
            assert error.id == 0 and error.refused(Code.RESOURCE_EXHAUSTED, "max_connections", "12")
            assert error.error.retryable
        for wire in wires:
            wire.send(live(2))
            assert wire.answer().id == 2
    until_row(server, connections=0)
    with Wire(server.unix) as again:
        again.send(live(1))
        assert again.answer().kind == Kind.SERVER_LIVE_REPLY


def test_a_refused_client_that_has_left_holds_no_place(server: Server) -> None:
    for _ in range(30):  # of 12 places
        with Wire(server.address) as wire:
            wire.send(b"GET / HTTP/1.1\r\n\r\n")
            (error,) = wire.end()
            assert error.refused(Code.INVALID_ARGUMENT, "magic")


def test_an_oversize_frame_costs_its_request_only(wire: Wire) -> None:
    body = bytes(8 * MIB + 1)
    wire.send(frame_header(Kind.INFER, Codec.MSGPACK, 5, len(body)) + body, live(6))
    found = wire.answers(2)
    assert found[5].refused(Code.INVALID_ARGUMENT, "max_frame_bytes", str(8 * MIB), str(len(body)))
    assert found[6].kind == Kind.SERVER_LIVE_REPLY


def test_a_reply_above_the_frame_limit_is_refused_by_name(wire: Wire) -> None:
    wire.send(infer(1, "large", n=np.array([4 * MIB])), infer(2, "large", n=np.array([MIB])))
    found = wire.answers(2)
    assert found[2].values["y"].nbytes == 4 * MIB
    assert "max_frame_bytes" in found[1].error.message


@pytest.mark.parametrize("sent", [1, 20, 24, 25, 60])
def test_a_frame_that_does_not_arrive_is_refused(wire: Wire, sent: int) -> None:
    wire.send(live(1))
    wire.answer()
    wire.send((frame_header(Kind.INFER, Codec.MSGPACK, 1, 100) + bytes(100))[:sent])
    (error,) = wire.end()
    assert error.id == 0 and error.refused(Code.DEADLINE_EXCEEDED, "read_timeout")


def test_drops_of_a_frame_do_not_prolong_it(wire: Wire) -> None:
    frame = infer(1, "sink", n=rounds(1), x=np.ones(5000, np.float32))
    wire.sock.settimeout(0.05)  # the pace of the drops, and the wait for the refusal
    answer = None
    for byte in frame:
        try:
            wire.send(bytes([byte]))
            answer = wire.answer()
            break
        except TimeoutError:
            continue
    assert answer is not None and answer.refused(Code.DEADLINE_EXCEEDED, "read_timeout")
    wire.sock.settimeout(60)
    assert wire.end() == []


def test_a_deadline_in_the_queue_is_kept_while_the_lane_is_busy(wire: Wire) -> None:
    wire.send(infer(1, "slow", n=rounds(3000)), infer(2, "slow", timeout_ms=30, n=FOR_EVER))
    first = wire.answer()
    assert first.id == 2 and first.refused(Code.DEADLINE_EXCEEDED, "deadline")
    wire.send(infer(3, "slow", n=rounds(1)))  # answered, so 2 was not run
    assert [wire.answer().id, wire.answer().id] == [1, 3]


def test_a_deadline_in_the_middle_of_a_run_is_kept(wire: Wire) -> None:
    wire.send(infer(1, "slow", timeout_ms=30, n=rounds(2000)))
    assert wire.answer().refused(Code.DEADLINE_EXCEEDED, "deadline")
    wire.send(infer(2, "slow", n=rounds(1)))
    assert wire.answer().id == 2  # the late result of 1 goes nowhere


def test_a_cancelled_request_is_not_run(server: Server, wire: Wire) -> None:
    before = until_row(server, in_flight=0)["dropped"]
    wire.send(infer(1, "slow", n=rounds(300)), infer(2, "slow", n=FOR_EVER), cancel(2), cancel(99))
    wire.send(infer(3, "slow", n=rounds(1)))
    assert [wire.answer().id, wire.answer().id] == [1, 3]
    assert until_row(server, in_flight=0)["dropped"] == before + 1


@pytest.mark.parametrize("how", ["close", "reset"])
def test_what_a_vanished_client_asked_for_is_not_run(server: Server, wire: Wire, how: str) -> None:
    before = until_row(server, in_flight=0)["dropped"]
    wire.send(infer(1, "slow", n=rounds(500)))
    until_row(server, in_flight=1)
    with Wire(server.address) as other:
        other.send(*(infer(i, "slow", n=FOR_EVER) for i in range(1, 6)))
        until_row(server, in_flight=6)
        if how == "reset":
            other.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        else:
            other.sock.shutdown(socket.SHUT_RDWR)
    until_row(server, dropped=before + 5)
    wire.send(infer(2, "slow", n=rounds(1)))
    assert [wire.answer().id, wire.answer().id] == [1, 2]


def test_a_half_closed_client_gets_its_answers(wire: Wire) -> None:
    wire.send(infer(1, "slow", n=rounds(50)), infer(2, "slow", n=rounds(1)))
    wire.sock.shutdown(socket.SHUT_WR)
    found = wire.end()
    assert [answer.id for answer in found if answer.kind != Kind.GOAWAY] == [1, 2]


def test_a_client_that_does_not_read_is_ended(server: Server, wire: Wire) -> None:
    before = peak(server)
    wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.send(*(infer(i, "large", n=np.array([MIB])) for i in range(1, 65)))
    row = until_row(server, connections=0)  # without a byte read on our side
    assert row["in_flight"] == 0
    assert peak(server) - before < 64 * MIB  # 64 replies are 256 MiB


def test_given_up_requests_do_not_pile_up(server: Server, wire: Wire) -> None:
    """The lane is busy; whoever cancels what waits behind it gives its place back, so its bytes must go too."""
    x = np.ones(4 * MIB // 4, np.float32)
    wire.send(infer(1, "slow", n=rounds(8000)))
    until_row(server, in_flight=1)
    before = peak(server)
    for i in range(2, 66):
        wire.send(infer(i, "sink", n=rounds(0), x=x), cancel(i))
    wire.send(live(100))
    while (answer := wire.answer()).id != 100:  # all are cancelled or refused, and 1 runs still
        assert answer.refused(Code.RESOURCE_EXHAUSTED)
    assert peak(server) - before < 64 * MIB  # 64 requests are 256 MiB
    wire.send(cancel(1))


def test_a_stream_of_replies_is_not_collected_inline(module_place: Path, server: Server) -> None:
    """Runs on the loop: one chunk holds many requests whose replies are large."""
    folder = module_place / "inline"
    folder.mkdir()
    args = ("--workers", "1", "--run-in", "inline", "--read-timeout", "1", f"--model=large={large(folder)}")
    with Server(folder, *args) as inline, Wire(inline.address) as wire:
        before = peak(inline)
        wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.send(*(infer(i, "large", n=np.array([MIB])) for i in range(1, 101)))
        until_row(inline, connections=0)
        assert peak(inline) - before < 128 * MIB  # 100 replies are 400 MiB

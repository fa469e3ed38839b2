"""Hostile bytes against a living server: `python -m tests.roles.fuzz_live [--cases N] [--seed N]`.

One worker with small limits. Each case is one connection (or a bundle of them) that misbehaves; it must end or be
answered, and an answer in an ERROR frame must name the fault. Afterwards the same worker answers the demo model as
before, holds no request and no connection, and has not grown in the second half.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

os.environ.update(ORT_DISABLE_TELEMETRY="1", OPENBLAS_NUM_THREADS="1")  # before numpy, when this is the program

from prefork.codec.frame import HEADER_SIZE, Frame, FrameReader, encode_frame, frame_header
from prefork.codec.message import Codec, ErrorReply, Kind
from prefork.codec.registry import codec_of
from prefork.errors import Code
from tests.codec.fuzz import mutations
from tests.roles.hostile import requests
from tests.roles.server import Server
from tests.roles.watch import until, until_row
from tests.roles.wire import Wire, dial, digits, live

WATCHDOG = 20.0  # seconds without a byte or an end after which the server counts as hung
END = 0xFFFF_FFFF_FFFF  # request id of the question that ends a case: its answer shows that all before was taken
GROWTH = 8 << 20  # bytes that the second half may add: allocators breathe, bounded caches fill
FLAGS = (
    "--workers", "1", "--max-frame-bytes", "1MiB", "--max-tensors", "16", "--max-dims", "8", "--max-in-flight", "64",
    "--max-in-flight-per-connection", "16", "--max-connections", "1024", "--max-in-flight-bytes", "4MiB",
    "--read-timeout", "2", "--default-timeout-ms", "5000", "--log-level", "info",
)  # fmt: skip


class Hung(AssertionError):
    """The server neither answered nor ended a connection."""


@dataclass
class Tally:
    """What became of the cases."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)

    def take(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if frame.kind != Kind.ERROR:
                continue
            error = codec_of(frame.codec).decode(Kind.ERROR, frame.body)
            assert isinstance(error, ErrorReply) and error.message, error
            self.codes[Code(error.code).name] += 1
            assert "max_connections" not in error.message, "connections that have ended hold their places"
            assert "Traceback" not in error.message and "/dev/shm" not in error.message, error

    def lines(self) -> list[str]:
        return [
            f"cases: {self.cases}",
            "ends: " + ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common()),
            "errors: " + ", ".join(f"{count} {name}" for name, count in self.codes.most_common()),
        ]


def converse(sock: socket.socket, data: bytes, chunks: Sequence[int] = ()) -> tuple[str, list[Frame]]:
    """Send `data` (in pieces cut at `chunks`), then a question under END; read until its answer or the end."""
    sock.settimeout(WATCHDOG)
    outcome = "answered"
    try:
        for begin, end in zip((0, *chunks), (*chunks, len(data)), strict=True):
            sock.sendall(data[begin:end])
        sock.sendall(live(END))
        sock.shutdown(socket.SHUT_WR)
    except ConnectionError:
        outcome = "reset"
    frames: list[Frame] = []
    reader = FrameReader(16 << 20)
    try:
        while chunk := sock.recv(1 << 16):
            frames += [event for event in reader.receive(chunk) if isinstance(event, Frame)]
    except ConnectionError:
        outcome = "reset"
    except TimeoutError:
        raise Hung(f"no answer and no end after {data[:64]!r} of {len(data)} bytes") from None
    if outcome == "answered" and not any(frame.request_id == END for frame in frames):
        outcome = "ended with a reason"  # a frame that claimed more may have swallowed the question
        assert any(frame.kind == Kind.ERROR for frame in frames), f"ended without a word after {data[:64]!r}"
    return outcome, frames


class Fuzzer:
    """One kind of case a method; each returns how it ended."""

    def __init__(self, server: Server, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tally = Tally()
        self._addresses = [server.address, server.unix]
        self._mutations = mutations(seed)
        self._requests = requests(self.rng)
        self._kinds: list[tuple[int, Callable[[], str]]] = [
            (50, self.mutation), (25, self.wrong_request), (8, self.garbage), (6, self.split), (4, self.cut_off),
            (3, self.vanish), (2, self.claims), (1, self.bundle),
        ]  # fmt: skip

    def run(self, cases: int) -> None:
        weights = [weight for weight, _ in self._kinds]
        for _, kind in self.rng.choices(self._kinds, weights, k=cases):
            self.tally.outcomes[f"{kind.__name__}: {kind()}"] += 1
            self.tally.cases += 1

    def dial(self) -> socket.socket:
        return dial(self.rng.choice(self._addresses))

    def _converse(self, data: bytes, chunks: Sequence[int] = ()) -> str:
        with self.dial() as sock:
            outcome, frames = converse(sock, data, chunks)
        self.tally.take(frames)
        return outcome

    def mutation(self) -> str:
        return self._converse(next(self._mutations))

    def wrong_request(self) -> str:
        """A well-formed frame whose request the server must refuse or answer: the connection goes on."""
        outcome = self._converse(encode_frame(Kind.INFER, *next(self._requests)))
        assert outcome == "answered", outcome
        return outcome

    def garbage(self) -> str:
        data = self.rng.randbytes(self.rng.randint(1, 400))
        return self._converse(b"PFRK\1" + data if self.rng.random() < 0.5 else data)

    def split(self) -> str:
        """Valid frames in pieces: the answer must come."""
        data = digits(1) + digits(2, codec=Codec.PROTOBUF) + live(3)
        cuts = sorted(self.rng.randrange(1, len(data)) for _ in range(self.rng.randint(1, 5)))
        outcome = self._converse(data, cuts)
        assert outcome == "answered", outcome
        return outcome

    def cut_off(self) -> str:
        """The client half-closes in the middle of a frame: it is told where."""
        data = digits(1, codec=self.rng.choice((Codec.MSGPACK, Codec.PROTOBUF)))
        with self.dial() as sock:
            sock.settimeout(WATCHDOG)
            sock.sendall(data[: self.rng.randrange(1, len(data))])
            sock.shutdown(socket.SHUT_WR)
            frames = Wire(sock).end()
        assert [frame.id for frame in frames] == [0] and "the stream ended inside" in frames[0].error.message
        return "ended with a reason"

    def vanish(self) -> str:
        """The client closes in the middle of anything, sometimes with a reset."""
        with self.dial() as sock:
            sock.sendall(next(self._mutations)[: self.rng.randint(1, 4000)] + digits(7))
            if self.rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        return "closed"

    def claims(self) -> str:
        """A header that claims more than ever comes."""
        size = self.rng.choice((2**31 - 1, 2**31, 2**32 - 1, (1 << 20) + 1, 1 << 20))
        kind, codec = self.rng.choice((1, 3, 7, 101, 200)), self.rng.choice((0, 1, 2, 9))
        return self._converse(frame_header(kind, codec, 5, size) + self.rng.randbytes(self.rng.randint(0, 3000)))

    def bundle(self) -> str:
        """Many connections at once, each with a part of a frame, all closed at the same time."""
        with ExitStack() as stack:
            for _ in range(self.rng.randint(2, 40)):
                sock = stack.enter_context(self.dial())
                sock.sendall(digits(1)[: self.rng.randint(0, HEADER_SIZE + 40)])
        return "closed"


def slow_drip(address: str) -> None:
    """A frame that comes a byte at a time and never ends is refused."""
    with Wire(address) as wire:
        frame = digits(1) * 1000
        frame = frame_header(Kind.INFER, Codec.MSGPACK, 1, 100_000) + frame
        wire.sock.settimeout(0.02)  # the pace of the drops
        for byte in frame[:5000]:
            try:
                wire.sock.sendall(bytes([byte]))
                answer = wire.answer()
            except TimeoutError:
                continue
            assert "read_timeout" in answer.error.message
            return
    raise Hung("a frame that drips for ever is not refused")


def resident(pid: int) -> int:
    """Private bytes of the process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def all_splits(address: str) -> Iterator[str]:
    """Every split of a few valid frames into two pieces."""
    for data in (digits(1), digits(1, codec=Codec.PROTOBUF), live(1)):
        for cut in range(1, len(data)):
            with dial(address) as sock:
                yield converse(sock, data, (cut,))[0]


def attack(server: Server, cases: int, seed: int) -> list[str]:
    """Run all of it; the report. Raises AssertionError for anything that the server must not do."""
    (pid,) = server.workers()
    with Wire(server.address) as wire:
        wire.send(digits(1))
        expected = wire.answer().message
    fuzzer = Fuzzer(server, seed)
    began = time.monotonic()
    warm = max(cases // 20, 200)  # what is allocated once is allocated before the first measurement
    sizes = []
    fuzzer.run(warm)
    assert set(all_splits(server.unix)) == {"answered"}
    slow_drip(server.address)
    for part in ((cases - warm) // 2, cases - warm - (cases - warm) // 2):
        until_row(server, connections=0, in_flight=0)
        sizes.append(resident(pid))
        fuzzer.run(part)
    until(server, lambda: settled(server), "no connection and no request are left")
    sizes.append(resident(pid))
    row = server.status()["workers"][0]
    assert (row["pid"], row["restarts"]) == (pid, 0), f"the worker died: {row}"
    with Wire(server.address) as wire:
        wire.send(digits(1))
        assert wire.answer().message == expected
    seconds = time.monotonic() - began
    growth = sizes[2] - sizes[1]
    report = [
        *fuzzer.tally.lines(),
        f"worker: pid {pid} from first to last, private bytes {sizes[0]} before, {sizes[1]} after the first half, "
        f"{sizes[2]} after the second",
        f"seconds: {seconds:.1f}",
    ]
    assert growth <= GROWTH, f"the worker grew by {growth} bytes in the second half: {report}"
    assert not [line for line in server.log() if line["level"] == "error"], server.said()
    return report


def settled(server: Server) -> bool:
    row = server.status()["workers"][0]
    return not (row["connections"] or row["in_flight"] or row["queue_depth"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.roles.fuzz_live", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="pf-") as folder, Server(Path(folder), *FLAGS) as server:
        print("\n".join(attack(server, args.cases, args.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

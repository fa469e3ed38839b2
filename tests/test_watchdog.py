"""The self-probe and what it feeds: its bytes against the codec, its life on real sockets."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork.child import Child
from prefork.codec.frame import FrameReader, encode_frame
from prefork.codec.message import Codec, ErrorReply, Kind, Message, Ready
from prefork.codec.registry import codec_of
from prefork.log import setup
from prefork.notify import Notifier
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import TICK_NS
from prefork.slots import Slot
from prefork.watchdog import KILL_TIME, QUESTION, Watchdog, answered, stalled


def frame(kind: Kind, message: Message = None, codec: Codec = Codec.PROTOBUF) -> bytes:
    return encode_frame(kind, codec, 1, codec_of(codec).encode(kind, message) if message is not None else b"")


READY = frame(Kind.SERVER_READY_REPLY, Ready(True))
FULL = frame(Kind.ERROR, ErrorReply(8, "worker has max_connections 1 already", True, 0), Codec.MSGPACK)


def test_the_question_is_a_frame_of_the_protocol() -> None:
    (asked,) = FrameReader(1024).receive(QUESTION)
    assert encode_frame(Kind.SERVER_READY, Codec.PROTOBUF, 1) == QUESTION and asked.request_id == 1


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (READY, True),
        (FULL, True),
        (frame(Kind.SERVER_READY_REPLY, Ready(False)), False),
        (frame(Kind.GOAWAY) + READY, True),
        (frame(Kind.GOAWAY) + frame(Kind.SERVER_READY_REPLY, Ready(False)), False),
        (frame(Kind.GOAWAY), None),
        (frame(Kind.SERVER_LIVE_REPLY, Ready(True)), False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"PFRK\x02" + READY[5:], False),
        (b"", None),
    ],
)
def test_what_an_answer_says(data: bytes, verdict: bool | None) -> None:
    assert answered(data) is verdict


def test_an_answer_in_pieces() -> None:
    assert [answered(READY[:size]) for size in range(len(READY))] == [None] * len(READY)


class Scene:
    """A watchdog of 3 s between a listener that the test answers from and a supervisor that it hears. `now` is ours."""

    def __init__(self, folder: Path, names: tuple[str, ...] = ("s",)) -> None:
        self.folder, self.now = folder, 100.0
        self.supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.supervisor.bind(str(folder / "notify"))
        self.supervisor.setblocking(False)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "s"))
        self.listener.listen()
        self.selector = selectors.DefaultSelector()
        self.stalled = False
        self.watchdog = Watchdog(
            3.0, Notifier({"NOTIFY_SOCKET": str(folder / "notify")}), self.selector,
            setup("info", "json", folder / "log"), [(socket.AF_UNIX, str(folder / name)) for name in names],
            lambda: self.stalled,
        )  # fmt: skip

    def turn(self, serving: bool = True, seconds: float = 1.0) -> None:
        self.now += seconds
        self.watchdog.turn(self.now, serving=serving)

    def loop(self) -> None:
        """Everything that the selector has; the probe's peer has done its part already."""
        while ready := self.selector.select(0):
            for key, _ in ready:
                key.data()

    def answer(self, data: bytes) -> None:
        """Be the worker of one probe."""
        self.loop()
        peer, _ = self.listener.accept()
        assert peer.recv(4096) == QUESTION
        peer.sendall(data)
        peer.close()
        self.loop()

    def heard(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self.supervisor.recv(4096).decode())
            except BlockingIOError:
                return found

    def failures(self) -> list[str]:
        lines = [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]
        return [line["reason"] for line in lines]

    def close(self) -> None:
        for closable in (self.supervisor, self.listener, self.selector):
            closable.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    assert not scene.selector.get_map(), "no probe is left"
    scene.close()


def test_fed_after_an_answer_and_not_before(scene: Scene) -> None:
    for _ in range(3):
        scene.turn()
        assert scene.heard() == []
        scene.answer(READY)
        assert scene.heard() == ["WATCHDOG=1"]
    assert scene.watchdog.due == scene.now + 1.0 and scene.failures() == []


def test_not_before_its_time(scene: Scene) -> None:
    scene.turn()
    scene.answer(READY)
    scene.turn(seconds=0.5)
    assert not scene.selector.get_map() and scene.heard() == ["WATCHDOG=1"]


def test_a_full_worker_lives(scene: Scene) -> None:
    scene.turn()
    scene.answer(FULL)
    assert scene.heard() == ["WATCHDOG=1"]


@pytest.mark.parametrize("data", [b"", READY[:-1], frame(Kind.SERVER_READY_REPLY, Ready(False))])
def test_another_answer_does_not_feed(scene: Scene, data: bytes) -> None:
    scene.turn()
    scene.answer(data)
    assert scene.heard() == [] and scene.failures() == ["no answer that a worker is ready"]


def test_silence_is_a_failure_when_the_next_is_due(scene: Scene) -> None:
    scene.turn()
    scene.loop()
    scene.turn(seconds=0.9)
    assert scene.failures() == []
    scene.turn(seconds=0.2)
    assert scene.failures() == ["no answer that a worker is ready"] and scene.heard() == []
    scene.listener.accept()[0].close()  # of the first, which was given up
    scene.answer(READY)
    assert scene.heard() == ["WATCHDOG=1"]


def test_a_worker_that_cannot_be_killed_starves_it(scene: Scene) -> None:
    scene.stalled = True
    scene.turn()
    scene.answer(READY)
    assert scene.heard() == []


def test_the_turning_loop_feeds_it_while_nobody_serves(scene: Scene) -> None:
    scene.turn(serving=False)
    scene.turn(serving=False)
    assert scene.heard() == ["WATCHDOG=1"] * 2
    scene.turn()
    scene.turn(serving=False)  # a probe under way is dropped without a word
    assert scene.heard() == ["WATCHDOG=1"] and scene.failures() == []


def test_another_place_is_asked_when_one_fails(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ("none", "s"))
    scene.turn()
    assert len(scene.failures()) == 1 and "ENOENT" in scene.failures()[0]
    scene.answer(READY)
    scene.turn()
    scene.answer(READY)
    assert scene.heard() == ["WATCHDOG=1"] * 2 and len(scene.failures()) == 1
    scene.close()


def test_nobody_listens_anywhere(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ("none", "nor"))
    scene.turn()
    assert len(scene.failures()) == 2 and scene.heard() == [] and not scene.selector.get_map()
    scene.close()


def test_no_watchdog_is_never_due(tmp_path: Path) -> None:
    idle = Watchdog(None, Notifier({}), selectors.DefaultSelector(), setup(), [], lambda: False)
    idle.turn(time.monotonic(), serving=True)
    assert idle.due == float("inf")


def test_a_silence_that_should_long_have_ended() -> None:
    board = Scoreboard.create(1)
    with socket.socket() as sock, socket.socket() as channel:
        child = Child("worker", 0, 1, os.getpid(), channel, row=0, ready_at=1.0)
        slot = Slot(0, sock, child=child)
        board.slot(0).words[TICK_NS] = int(50e9)
        for now, timeout, found in (
            (50 + 30 + KILL_TIME - 1, 30, False),
            (50 + 30 + KILL_TIME + 1, 30, True),
            (1e6, 0, False),
        ):
            assert stalled([slot], board, timeout, now) is found
        child.leaving = True
        assert not stalled([slot], board, 30, 1e6)

"""Real parts for tests of the data plane: a session of the demo model, a scheduler on a uvloop, a socket pair."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import onnx
import uvloop

from prefork.codec.limits import Limits as WireLimits
from prefork.demo import model_path
from prefork.model.session import InMemory, Session
from prefork.shm import words as board
from prefork.shm.scoreboard import AnswerRows, named
from tests.manifests import manifest_of

T = TypeVar("T")


@dataclass
class Limits:
    """As LimitsConfig, small."""

    max_frame_bytes: int = 1 << 20
    max_tensors: int = 64
    max_dims: int = 8
    max_connections: int = 4
    max_in_flight_per_connection: int = 4
    max_in_flight: int = 8
    max_in_flight_bytes: int = 1 << 22
    default_timeout_ms: int = 20_000
    max_timeout_ms: int = 60_000
    read_timeout: float = 20.0
    idle_timeout: float = 0.0
    wire: WireLimits = field(default_factory=WireLimits)


@cache
def demo_session() -> Session:
    model = onnx.load(model_path())
    manifest = manifest_of(model)
    return Session.open(manifest, model.SerializeToString(), InMemory(memoryview(b"")))


def fresh_words() -> memoryview:
    """A scoreboard slot's words, all zero."""
    return memoryview(bytearray(board.SLOT_SIZE)).cast("Q")


ROWS = tuple(AnswerRows({"digits": 1}, max(codec, 1)) for codec in range(4))


def run(body: Callable[[asyncio.AbstractEventLoop], Awaitable[T]]) -> T:
    """`body(loop)` on a uvloop of its own, as in a worker; ends a test that hangs."""
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(asyncio.wait_for(body(loop), 10))
    finally:
        loop.close()


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a Unix stream connection, the first non-blocking."""
    one, other = socket.socketpair()
    one.setblocking(False)
    with other:
        yield one, other


def counts(words: memoryview) -> dict[str, Any]:
    """The named words."""
    return named(words.tolist())

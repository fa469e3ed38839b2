"""The usual pre-fork server, as a helper process: `python -m bench.reuseport WORKERS REPLY_FILE`; says its port.

Each worker opens a listening socket of its own with SO_REUSEPORT, and the parent forks a new one for each that dies.
Every request is answered with the bytes of REPLY_FILE. Any line asks for the workers that live and listen. Faults of
workers are compared with it: when one dies, its socket and all that wait in its queue die too.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import cast

import uvloop

from bench.peer import say
from prefork.codec.frame import FrameReader, encode_frame
from prefork.codec.message import Codec, Kind


class Reply(asyncio.Protocol):
    def __init__(self, body: bytes) -> None:
        self._body, self._reader = body, FrameReader(1 << 20)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.receive(data):
            self._transport.write(encode_frame(Kind.INFER_REPLY, Codec.MSGPACK, frame.request_id, self._body))


def listen(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    return sock


def _work(port: int, body: bytes, ready: int) -> None:
    loop = uvloop.new_event_loop()
    loop.run_until_complete(loop.create_server(lambda: Reply(body), sock=listen(port), backlog=1024))
    os.write(ready, os.getpid().to_bytes(4, "little"))
    loop.run_forever()


def _keep(port: int, body: bytes, count: int) -> None:
    """Fork, hear who listens, reap, fork again; answer the bench; until its end closes our input."""
    read, write = os.pipe()
    wake, wake_in = os.pipe()
    os.set_blocking(wake_in, False)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    selector = selectors.DefaultSelector()
    for fd in (read, wake, 0):
        selector.register(fd, selectors.EVENT_READ)
    forked: set[int] = set()
    alive: set[int] = set()
    while True:
        while len(forked) < count:
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                _work(port, body, write)
            forked.add(pid)
        for key, _ in selector.select():
            data = os.read(key.fd, 4 if key.fd == read else 4096)
            if key.fd == read:
                alive.add(int.from_bytes(data, "little"))
            elif key.fd == 0 and not data:
                _end(forked)
                return
            elif key.fd == 0:
                say(alive=sorted(alive))
        while forked and (pid := os.waitpid(-1, os.WNOHANG)[0]):
            forked.discard(pid)
            alive.discard(pid)


def _end(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(argv: list[str]) -> int:
    count, path = argv
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:  # bound and not listening: keeps the port ours
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        say(port=port)
        _keep(port, Path(path).read_bytes(), int(count))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

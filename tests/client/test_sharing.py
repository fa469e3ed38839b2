"""Threads, tasks, forks and address families, against a peer that echoes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefork.client import AsyncClient, Client
from prefork.errors import Unavailable
from tests.client.peer import Echo, Peer


@pytest.mark.parametrize("pool_size", [1, 3])
def test_eight_threads(pool_size: int) -> None:
    def work(thread: int) -> bool:
        for turn in range(150):
            size = 1 + (turn * 7919) % 5000
            sent = np.full(size, thread * 1000 + turn)
            if not np.array_equal(client.infer("m", {"x": sent})["x"], sent):
                return False
        return True

    with Echo() as echo, Client(echo.address, pool_size=pool_size) as client, ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
        assert len(echo.sessions) <= pool_size and client.retried == 0


def test_eight_threads_of_which_some_give_up() -> None:
    """Deadlines that pass at any moment: a reader that leaves, a late reply, a frame cut short."""

    def work(thread: int) -> int:
        right = 0
        for turn in range(150):
            sent = np.full(1 + (turn % 5) * 20_000, thread * 1000 + turn)
            try:
                got = client.infer("m", {"x": sent}, timeout=30 if thread % 2 else 0.0002 * (turn % 10 + 1))
            except Exception as error:
                assert type(error).__name__ in ("DeadlineExceeded", "Unavailable"), error
                continue
            assert np.array_equal(got["x"], sent)
            right += 1
        return right

    with Echo() as echo, Client(echo.address, pool_size=2, retries=50) as client, ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(work, range(8)))
        assert counts[1::2] == [150] * 4  # who has time gets an answer


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_is_left(caller: Any, peer: Peer) -> None:
    client = caller.client(peer.address, pool_size=2)
    before = 0
    for turn in range(20):
        call = caller.submit(client, "infer", "m", {"x": [1]}, idempotent=False)
        session = peer.accept()
        session.frame()
        session.reset()
        with pytest.raises(Unavailable):
            call.result(30)
        peer.sessions.clear()
        if not turn:  # an event loop opens one of its own with its first connection
            before = descriptors()
    call = caller.submit(client, "infer", "m", {"x": [1]})
    session = peer.accept()
    session.echo(session.frame())
    call.result(30)
    session.close()
    peer.sessions.clear()
    caller.call(client, "close")
    assert descriptors() <= before


@pytest.mark.parametrize("factory", ["asyncio", "uvloop"])
def test_many_tasks(factory: str) -> None:
    async def work(client: AsyncClient, n: int) -> bool:
        sent = np.full(1 + (n * 7919) % 5000, n)
        return np.array_equal((await client.infer("m", {"x": sent}))["x"], sent)

    async def main() -> list[bool]:
        async with AsyncClient(echo.address) as client:
            return await asyncio.gather(*(work(client, n) for n in range(400)))

    module = __import__(factory)
    with Echo() as echo, asyncio.Runner(loop_factory=module.new_event_loop) as runner:
        assert all(runner.run(main()))
        assert len(echo.sessions) == 4


def test_a_cancelled_task_cancels_its_request(peer: Any) -> None:
    async def main() -> tuple[int, int]:
        async with AsyncClient(peer.address) as client:
            task = asyncio.create_task(client.infer("m", {"x": [1]}))
            session = await asyncio.to_thread(peer.accept)
            frame = await asyncio.to_thread(session.frame)
            task.cancel()
            cancel = await asyncio.to_thread(session.frame)
            assert (await asyncio.gather(task, return_exceptions=True))[0].__class__ is asyncio.CancelledError
            return frame.request_id, cancel.request_id

    first, second = asyncio.run(main())
    assert first == second


def test_an_async_client_moves_to_another_loop() -> None:
    with Echo() as echo:
        client = AsyncClient(echo.address)

        async def once() -> int:
            got = await client.infer_raw("m", {"x": [1]})
            await asyncio.gather(*(stream.end("moving") for stream in client._pool.links))
            return int(got.parameters["connection"])

        assert [asyncio.run(once()), asyncio.run(once())] == [1, 2]


@pytest.mark.parametrize("where", ["tcp", "ipv6", "unix"])
def test_families(where: str, tmp_path: Path) -> None:
    family = socket.AF_INET6 if where == "ipv6" else socket.AF_INET
    echo = Echo(socket.AF_UNIX, tmp_path / "s") if where == "unix" else Echo(family)

    async def ask() -> Any:
        async with AsyncClient(echo.address) as client:
            return (await client.infer("m", {"x": [1, 2]}))["x"].tolist()

    with echo, Client(echo.address) as client:
        assert client.infer("m", {"x": [1, 2]})["x"].tolist() == [1, 2]
        assert client.health() and client.live() and client.model_ready("m")
        assert asyncio.run(ask()) == [1, 2]


def test_one_request_at_a_time_uses_every_open_connection() -> None:
    with Echo() as echo, Client(echo.address, pool_size=3) as client, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: client.infer("m", {"x": np.zeros(50_000)}), range(64)))
        used = {client.infer_raw("m", {"x": [1]}).parameters["connection"] for _ in range(len(echo.sessions))}
        assert used == set(range(1, len(echo.sessions) + 1))


BLOCKING = """
import os, sys
from prefork.client import Client
client = Client(sys.argv[1])
ask = lambda: client.infer_raw("m", {"x": [1]}).parameters["connection"]
before = ask()
child = os.fork()
if child == 0:
    os._exit(ask() * 10 + ask())
_, status = os.waitpid(child, 0)
print(before, os.waitstatus_to_exitcode(status), ask())
"""

ON_LOOP = """
import asyncio, gc, os, sys
import LOOP
from prefork.client import AsyncClient
client = AsyncClient(sys.argv[1])
async def ask():
    return (await client.infer_raw("m", {"x": [1]})).parameters["connection"]
async def twice():
    return await ask() * 10 + await ask()
def run(main):
    with asyncio.Runner(loop_factory=LOOP.new_event_loop) as runner:
        return runner.run(main)
async def main():
    before = await ask()
    child = os.fork()
    if child == 0:
        asyncio._set_running_loop(None)
        code = run(twice())
        gc.collect()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    print(before, os.waitstatus_to_exitcode(status), await ask())
    await client.close()
run(main())
"""


@pytest.mark.parametrize("loop", ["", "asyncio", "uvloop"])
def test_a_forked_child_opens_its_own_connection(loop: str) -> None:
    script = ON_LOOP.replace("LOOP", loop) if loop else BLOCKING
    with Echo() as echo:
        command = [sys.executable, "-W", "error::DeprecationWarning", "-c", script, echo.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout.split(), done.stderr) == (["1", "22", "1"], "")

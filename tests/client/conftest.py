"""Both clients behind one face: `caller.submit("infer", ...)` gives a future, whatever runs underneath."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import uvloop

from prefork.client import AsyncClient, Client
from tests.client.peer import PATIENCE, Peer


class Blocking:
    """Each call in a thread of its own."""

    reads_when_idle = False

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(16)
        self._clients: list[Client] = []

    def client(self, *addresses: str, **options: Any) -> Any:
        self._clients.append(Client(list(addresses), **options))
        return self._clients[-1]

    def submit(self, client: Any, method: str, *args: Any, **options: Any) -> Future[Any]:
        return self._threads.submit(getattr(client, method), *args, **options)

    def call(self, client: Any, method: str, *args: Any, **options: Any) -> Any:
        return self.submit(client, method, *args, **options).result(PATIENCE)

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self._threads.shutdown()


class OnLoop:
    """Each call a task on an event loop that runs in a thread."""

    reads_when_idle = True

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.Thread(target=loop.run_forever)
        self._thread.start()
        self._clients: list[AsyncClient] = []

    def client(self, *addresses: str, **options: Any) -> Any:
        self._clients.append(AsyncClient(list(addresses), **options))
        return self._clients[-1]

    def submit(self, client: Any, method: str, *args: Any, **options: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(getattr(client, method)(*args, **options), self._loop)

    def call(self, client: Any, method: str, *args: Any, **options: Any) -> Any:
        return self.submit(client, method, *args, **options).result(PATIENCE)

    def stop(self) -> None:
        for client in self._clients:
            asyncio.run_coroutine_threadsafe(client.close(), self._loop).result(PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(params=["blocking", "asyncio", "uvloop"])
def caller(request: pytest.FixtureRequest) -> Iterator[Blocking | OnLoop]:
    if request.param == "blocking":
        made: Blocking | OnLoop = Blocking()
    else:
        made = OnLoop(asyncio.new_event_loop() if request.param == "asyncio" else uvloop.new_event_loop())
    yield made
    made.stop()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as made:
        yield made

"""Load, as a helper process: `python -m bench.load HOST PORT CONNECTIONS REQUEST_FILE REPLY_SIZE`.

Each connection sends the same bytes again as soon as REPLY_SIZE bytes have come back, which is all that is looked at.
{"seconds": s} does so for that long, waits for the last replies, and says how many came, in what time and CPU.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any, cast

import uvloop

from bench.peer import answer, say


class Asker(asyncio.Protocol):
    """One connection with one request in flight. `end`: perf_counter seconds after which no other is sent."""

    end = 0.0

    def __init__(self, request: bytes, size: int) -> None:
        self._request, self._size = request, size
        self._got = 0
        self.replies = 0
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))

    def start(self) -> asyncio.Future[None]:
        self.done = asyncio.get_running_loop().create_future()
        self.replies = 0
        self._transport.write(self._request)
        return self.done

    def data_received(self, data: bytes) -> None:
        self._got += len(data)
        if self._got < self._size:
            return
        assert self._got == self._size, f"a reply of {self._got} bytes, {self._size} were expected"
        self._got = 0
        self.replies += 1
        if time.perf_counter() < Asker.end:
            self._transport.write(self._request)
        elif self.done is not None:
            self.done.set_result(None)


async def _connect(host: str, port: int, count: int, request: bytes, size: int) -> list[Asker]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(lambda: Asker(request, size), host, port))[1] for _ in range(count)]


async def _ask(askers: list[Asker], seconds: float) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    Asker.end = start + seconds
    await asyncio.gather(*(asker.start() for asker in askers))
    took = time.perf_counter() - start
    replies = [asker.replies for asker in askers]
    return {"replies": sum(replies), "seconds": took, "cpu": time.process_time() - cpu, "least": min(replies)}


def main(argv: list[str]) -> int:
    host, port, count, path, size = argv
    loop = uvloop.new_event_loop()
    askers = loop.run_until_complete(_connect(host, int(port), int(count), Path(path).read_bytes(), int(size)))
    say(ready=True)
    answer(lambda what: loop.run_until_complete(_ask(askers, what["seconds"])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

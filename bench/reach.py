"""Clients that are known to speak with a given worker, or with each of them: found by asking, since the kernel chooses.

A connection belongs to one listening socket, so to one worker. Which one took it shows in the request counters of
`status`, as long as nobody else asks meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bench.inputs import Feed
from bench.server import Server
from prefork.client import Client
from prefork.client.calls import CodecName

TRIES = 40  # connections for each slot; missing one of 8 by chance has a likelihood below 1e-17


@contextmanager
def every_worker(server: Server, model: str, feed: Feed, codec: CodecName = "msgpack") -> Iterator[dict[int, Client]]:
    """A client with one connection for each slot, which has answered `feed` once."""
    wanted = {int(row["slot"]) for row in server.rows() if row["state"] == "ready"}
    found: dict[int, Client] = {}
    with ExitStack() as stack:
        for _ in range(TRIES * len(wanted)):
            client = stack.enter_context(Client(server.address, codec=codec, pool_size=1, retries=0, timeout=120.0))
            before = counters(server.rows())
            client.infer(model, feed)
            after = counters(server.rows())
            found.setdefault(next(slot for slot in after if after[slot] > before[slot]), client)
            if found.keys() == wanted:
                yield found
                return
        raise AssertionError(f"{TRIES * len(wanted)} connections reached only slots {sorted(found)} of {wanted}")


def counters(rows: list[dict[str, Any]]) -> dict[int, int]:
    """Requests taken, by slot."""
    return {int(row["slot"]): int(row["requests"]) for row in rows}

"""The least that a msgpack server on uvloop can do, as a helper process: `python -m bench.echo`; says its port.

A request is a u32 length and a map; the reply is a map with as many bytes of outputs as the real model's. No header, no
checks, no limits, no errors, no model: what stands between this and a real server is what the server itself costs.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from typing import Any, cast

import msgpack
import uvloop

from bench.peer import say

_LENGTH = struct.Struct("<I")


class Echo(asyncio.Protocol):
    """One connection. `outputs`: the tensors of every reply, as msgpack writes them."""

    def __init__(self, outputs: list[dict[str, Any]]) -> None:
        self._outputs = outputs
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        at, end = 0, len(buffer)
        while end - at >= 4:
            (size,) = _LENGTH.unpack_from(buffer, at)
            if end - at - 4 < size:
                break
            request = msgpack.unpackb(buffer[at + 4 : at + 4 + size])
            at += 4 + size
            reply = msgpack.packb({"model_name": request["model_name"], "outputs": self._outputs})
            self._transport.write(_LENGTH.pack(len(reply)) + reply)
        self._buffer = buffer[at:]


async def _serve(outputs: list[dict[str, Any]]) -> None:
    """Until the bench closes our input."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Echo(outputs), "127.0.0.1", 0)
    say(port=server.sockets[0].getsockname()[1])
    gone = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), gone.set)
    await gone.wait()
    server.close()


def main(argv: list[str]) -> int:
    """`argv`: name, datatype, shape as `2x3`, and bytes of each output, four words an output."""
    words = [argv[i : i + 4] for i in range(0, len(argv), 4)]
    outputs = [
        {"name": name, "datatype": kind, "shape": [int(d) for d in shape.split("x") if d], "data": bytes(int(size))}
        for name, kind, shape, size in words
    ]
    uvloop.run(_serve(outputs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The small HTTP server over real sockets: what it answers, and that no client can hold it."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus

import pytest

from prefork.observe.http import CLIENTS, HEAD, Headers, Page, Site

LONG = "line\n" * 4000


def _echo(headers: Headers) -> Page:
    return Page(headers.get("x-word", "none"), HTTPStatus.SERVICE_UNAVAILABLE)


PAGES: dict[str, Callable[[Headers], Page]] = {
    "/long": lambda headers: Page(LONG, content_type="text/x"),
    "/echo": _echo,
    "/huge": lambda headers: Page(b"x" * (64 << 20)),
}
Talk = Callable[[Callable[[], bytes]], Awaitable[bytes]]


def with_site(body: Callable[[tuple[str, int], Talk], Awaitable[None]], patience: float = 30.0) -> None:
    """`body(address, talk)`: `talk` runs the client's side in a thread."""

    async def whole() -> None:
        server = await asyncio.start_server(Site(PAGES, patience).serve, "127.0.0.1", 0, limit=HEAD)
        with ThreadPoolExecutor(4) as threads:
            loop = asyncio.get_running_loop()
            await body(server.sockets[0].getsockname(), lambda side: loop.run_in_executor(threads, side))
        server.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def ask(address: tuple[str, int], data: bytes) -> bytes:
    """Everything that comes back until the server ends the connection; empty when it resets it."""
    with socket.create_connection(address) as sock:
        try:
            sock.sendall(data)
            return rest(sock)
        except ConnectionError:
            return b""


def rest(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


@pytest.mark.parametrize(
    ("request_", "status", "content"),
    [
        (b"GET /echo HTTP/1.1\r\nHost: x\r\nX-Word:  hello \r\n\r\n", 503, b"hello"),
        (b"GET /echo?a=b HTTP/1.0\r\n\r\n", 503, b"none"),
        (b"HEAD /echo HTTP/1.1\r\n\r\n", 503, b""),
        (b"GET /none HTTP/1.1\r\n\r\n", 404, b"pages: /long /echo /huge\n"),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405, b"only GET and HEAD\n"),
        (b"GET /echo HTTP/2.0\r\n\r\n", 400, b"bad request\n"),
        (b"GET  /echo HTTP/1.1\r\n\r\n", 400, b"bad request\n"),
        (b"\xff\x00\r\n\r\n", 400, b"bad request\n"),
        (b"\r\n\r\n", 400, b"bad request\n"),
        (b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\n\r\n", 431, b"head too large\n"),
    ],
)
def test_answers(request_: bytes, status: int, content: bytes) -> None:
    async def body(address: tuple[str, int], talk: Talk) -> None:
        head, _, found = (await talk(lambda: ask(address, request_))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert found == content
        assert b"\r\nConnection: close\r\n" in head

    with_site(body)


def test_a_long_page_is_compressed_when_that_is_understood() -> None:
    async def body(address: tuple[str, int], talk: Talk) -> None:
        plain = await talk(lambda: ask(address, b"GET /long HTTP/1.1\r\n\r\n"))
        packed = await talk(lambda: ask(address, b"GET /long HTTP/1.1\r\nAccept-Encoding: br, gzip;q=0.5\r\n\r\n"))
        assert plain.partition(b"\r\n\r\n")[2].decode() == LONG
        assert b"Content-Encoding: gzip" in packed and b"Content-Type: text/x" in packed
        assert gzip.decompress(packed.partition(b"\r\n\r\n")[2]).decode() == LONG

    with_site(body)


def test_slow_clients_are_cut_off_and_hold_nobody() -> None:
    """One says nothing, one stops in its head, one reads nothing of a huge page; others are answered meanwhile."""

    async def body(address: tuple[str, int], talk: Talk) -> None:
        silent, half, deaf = (socket.create_connection(address) for _ in range(3))
        half.sendall(b"GET /echo HTTP/1.1\r\nX-Word: ")
        deaf.sendall(b"GET /huge HTTP/1.1\r\n\r\n")
        for _ in range(3):
            assert (await talk(lambda: ask(address, b"GET /echo HTTP/1.1\r\n\r\n"))).endswith(b"none")
        for sock in (silent, half):
            assert await talk(partial(_end_of, sock)) == b""
        assert len(await talk(partial(_end_of, deaf))) < 64 << 20
        for sock in (silent, half, deaf):
            sock.close()

    with_site(body, patience=0.5)


def test_too_many_clients_are_closed_and_their_places_come_back() -> None:
    async def body(address: tuple[str, int], talk: Talk) -> None:
        waiting = [socket.create_connection(address) for _ in range(CLIENTS)]
        assert await talk(lambda: ask(address, b"GET /echo HTTP/1.1\r\n\r\n")) == b""
        for sock in waiting:
            sock.sendall(b"GET /echo HTTP/1.1\r\n\r\n")
            assert (await talk(partial(rest, sock))).endswith(b"none")
            sock.close()
        while not (await talk(lambda: ask(address, b"GET /echo HTTP/1.1\r\n\r\n"))).endswith(b"none"):
            pass

    with_site(body)


def _end_of(sock: socket.socket) -> bytes:
    try:
        return rest(sock)
    except ConnectionError:
        return b""

"""A very small HTTP/1.1 server for a few pages: GET and HEAD, one request a connection. Runs on the telemetry loop.

Every bound is absolute: a head of at most HEAD bytes, PATIENCE seconds for the whole exchange however slowly the peer
drips or reads, CLIENTS connections at once (more are closed unanswered), no body taken. http.server and the servers of
prometheus-client have a thread a client without end, and time-outs that each byte starts anew. RFC 9110, RFC 9112.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

HEAD = 8192
PATIENCE = 5.0
CLIENTS = 32
WORTH_GZIP = 1024  # bytes

Headers = Mapping[str, str]


@dataclass(frozen=True)
class Page:
    body: str | bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"


class Site:
    """`pages` by path; each makes its page from the request's headers, whose names are in lower case. It must not
    raise: it is our side that would be at fault."""

    def __init__(self, pages: Mapping[str, Callable[[Headers], Page]], patience: float = PATIENCE) -> None:
        self._pages = pages
        self._patience = patience
        self._clients = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; for asyncio.start_server with limit=HEAD."""
        self._clients += 1
        try:
            if self._clients <= CLIENTS:
                async with asyncio.timeout(self._patience):
                    await self._exchange(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # too slow, or gone
        finally:
            self._clients -= 1
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)  # so that drain waits for the peer
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            answer = _render(Page("head too large\n", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), {}, body=True)
        else:
            answer = self._answer(head)
        writer.write(answer)
        await writer.drain()
        with suppress(OSError):
            writer.write_eof()
        while await reader.read(HEAD):  # closing with bytes unread would reset what the peer has not read yet
            pass

    def _answer(self, head: bytes) -> bytes:
        """The whole answer to a request's head."""
        request, *lines = head.decode("latin-1").split("\r\n")[:-2]
        match request.split(" "):
            case [method, target, "HTTP/1.0" | "HTTP/1.1"]:
                pass
            case _:
                return _render(Page("bad request\n", HTTPStatus.BAD_REQUEST), {}, body=True)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if method not in ("GET", "HEAD"):
            return _render(Page("only GET and HEAD\n", HTTPStatus.METHOD_NOT_ALLOWED), headers, body=True)
        make = self._pages.get(target.partition("?")[0])
        page = make(headers) if make else Page(f"pages: {' '.join(self._pages)}\n", HTTPStatus.NOT_FOUND)
        return _render(page, headers, body=method == "GET")


def _render(page: Page, headers: Headers, *, body: bool) -> bytes:
    content = page.body.encode() if isinstance(page.body, str) else page.body
    lines = [
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"Content-Type: {page.content_type}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if page.status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    if len(content) >= WORTH_GZIP:
        lines.append("Vary: Accept-Encoding")
        if "gzip" in [coding.partition(";")[0].strip() for coding in headers.get("accept-encoding", "").split(",")]:
            content = gzip.compress(content, 1)
            lines.append("Content-Encoding: gzip")
    lines.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (content if body else b"")

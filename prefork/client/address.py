"""Where a server is: `host:port`, `[v6]:port` or `unix:/path`, as text and as value. No socket here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefork.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Address:
    """`path` of a Unix socket, or `host` (a name or a numeric address) and `port`."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address:
    """The address that `text` writes. Raises InvalidArgument."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path:
            return Address(path=path)
    else:
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        # a colon outside brackets would leave open where the port begins
        if colon and host and (bracketed or ":" not in host) and _is_port(port):
            return Address(host=host, port=int(port))
    raise InvalidArgument(f"address {text!r}: expected host:port, [v6]:port or unix:/path")


def parse_all(addresses: str | Sequence[str]) -> list[Address]:
    """One address or several, in the order given. Raises InvalidArgument for none and for one that is not one."""
    texts = [addresses] if isinstance(addresses, str) else list(addresses)
    if not texts:
        raise InvalidArgument("addresses: expected at least one, found none")
    return [parse(text) for text in texts]


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 65536

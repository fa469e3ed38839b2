"""Which connection takes the next request. No socket, lock or clock; both clients use it, each under its own lock.

The kernel spreads connections over a server's workers by hash (SO_REUSEPORT), so one connection is one worker. A pool
opens another while all it has are busy, up to its size, and gives each request to the connection with the fewest
requests in flight, the least recently used first: also a caller with one request at a time reaches every worker that
the pool has found. None gets more than `depth` at a time: a server refuses what is over its own limit, and waiting here
is better than being refused there.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, Protocol, TypeVar


class Pooled(Protocol):
    """`usable`: takes new requests. `users`: requests that hold it, kept by the pool."""

    users: int

    @property
    def usable(self) -> bool: ...


L = TypeVar("L", bound=Pooled)


class Need(Enum):
    """What `take` answers instead of a connection."""

    OPEN = "open"  # the caller opens one and calls `opened` or `not_opened`
    WAIT = "wait"  # all are full, or are still being opened by others


class Pool(Generic[L]):
    def __init__(self, size: int, depth: int) -> None:
        self.size = size
        self.depth = depth
        self.links: list[L] = []  # the least recently used first
        self._opening = 0

    def take(self) -> L | Need:
        """A connection, held until `release`; or what the caller has to do."""
        best: L | None = None
        for link in self.links:
            if link.usable and (best is None or link.users < best.users):
                best = link
                if not link.users:
                    break
        if best is None or best.users:
            self.links = [link for link in self.links if link.usable or link.users]
            if sum(link.usable for link in self.links) + self._opening < self.size:
                self._opening += 1
                return Need.OPEN
            if best is None or best.users >= self.depth:
                return Need.WAIT
        self.links.remove(best)
        self.links.append(best)
        best.users += 1
        return best

    def opened(self, link: L) -> L:
        """The caller of `take` has opened `link`, and holds it."""
        self._opening -= 1
        link.users += 1
        self.links.append(link)
        return link

    def not_opened(self) -> None:
        self._opening -= 1

    def release(self, link: L) -> bool:
        """True when nobody can use `link` any more: its owner closes it."""
        link.users -= 1
        return not link.users and not link.usable

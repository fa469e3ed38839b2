"""Sockets that a service manager opened for us: the descriptors from 3 on that LISTEN_FDS counts.

Runs in the master, once, before anything else is opened. With sockets given, the address in the configuration is not
opened, a given path is never unlinked, and at the end the queues stay with the manager, who has the next server take
them. Source: sd_listen_fds(3), systemd.socket(5).
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

from prefork import listener
from prefork.errors import ConfigError

FIRST = 3  # SD_LISTEN_FDS_START
FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)


@dataclass(frozen=True, slots=True)
class Given:
    """`slots`: for the workers' slots; TCP sockets of one address, or the Unix socket when no other was given.
    `unix`: for all workers beside them. `managed`, `unix_managed`: the slots', or `unix`, stay the manager's when we
    go; not those that a master whose place we take has opened itself."""

    slots: tuple[socket.socket, ...] = ()
    unix: socket.socket | None = None
    managed: bool = True
    unix_managed: bool = True

    def __bool__(self) -> bool:
        return bool(self.slots)

    @property
    def has_unix(self) -> bool:
        """Whether a Unix socket was given, which takes the place of the configured one."""
        return self.unix is not None or any(sock.family == socket.AF_UNIX for sock in self.slots)

    @property
    def kept(self) -> str:
        """What the manager keeps when we go, as a worker is told: `slots`, `slots,unix` or nothing."""
        slots = ["slots"] if self.slots and self.managed else []
        return ",".join(slots + (["unix"] if self.unix is not None and self.unix_managed else []))


def take(environ: MutableMapping[str, str], pid: int, first: int = FIRST) -> Given:
    """The sockets meant for process `pid`, and their variables are gone: who is started from here must not take them
    for its own. Raises ConfigError naming a descriptor that is no listening stream socket."""
    variables = {name: environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if variables["LISTEN_PID"] != str(pid):
        return Given()
    if not variables["LISTEN_FDS"].isdecimal():
        raise ConfigError(f"LISTEN_FDS: expected a number of descriptors, found {variables['LISTEN_FDS']!r}")
    fds = range(first, first + int(variables["LISTEN_FDS"]))
    names = variables["LISTEN_FDNAMES"].split(":") + [""] * len(fds)
    return _sort([_judge(fd, name) for fd, name in zip(fds, names, strict=False)])


def _judge(fd: int, name: str) -> socket.socket:
    what = f"descriptor {fd} ({name or 'unnamed'}) of the service manager: expected a listening stream socket"
    try:
        sock = socket.socket(fileno=fd)
    except OSError as e:
        raise ConfigError(f"{what}, found none ({e.strerror})") from None
    kind = f"{_word(sock.family)} {_word(sock.type)}"
    try:
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        listens = 0
    if sock.family not in FAMILIES or sock.type != socket.SOCK_STREAM or not listens:
        sock.detach()
        raise ConfigError(f"{what}, found {kind}{'' if listens else ' that does not listen'}")
    os.set_inheritable(fd, False)
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return sock


def _word(number: int) -> str:
    return getattr(number, "name", str(number))


def _sort(sockets: list[socket.socket]) -> Given:
    unix = [sock for sock in sockets if sock.family == socket.AF_UNIX]
    tcp = [sock for sock in sockets if sock.family != socket.AF_UNIX]
    if len(unix) > 1:
        raise ConfigError(f"service manager: expected at most one Unix socket, found {_names(unix)}")
    if len({listener.name_of(sock) for sock in tcp}) > 1:
        raise ConfigError(f"service manager: expected TCP sockets of one address, found {_names(tcp)}")
    return Given(tuple(tcp), unix[0] if unix else None) if tcp else Given(tuple(unix))


def _names(sockets: list[socket.socket]) -> str:
    return " and ".join(sorted({listener.name_of(sock) for sock in sockets}))


def slot_sockets(given: Given, address: str, count: int, backlog: int) -> tuple[list[socket.socket], str]:
    """A listening socket for each of `count` slots, or more when more are given, for each has a queue that must be
    served; and words for the log: where they come from. Raises ConfigError."""
    if not given:
        return listener.open_tcp(address, count, backlog), ""
    sockets = list(given.slots)
    shared = 0
    while len(sockets) < count:
        sock, own = listener.grow(given.slots[0], backlog)
        sockets.append(sock)
        shared += not own
    opened = len(sockets) - len(given.slots) - shared
    parts = [f"{len(given.slots)} given"]
    if opened:
        parts.append(f"{opened} opened beside in the same SO_REUSEPORT group")
    if shared:
        parts.append(f"{shared} slots share the queue of the first, whose group cannot be joined")
    return sockets, ", ".join(parts)

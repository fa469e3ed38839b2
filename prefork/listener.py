"""Listening sockets: one SO_REUSEPORT TCP socket a worker slot, and one Unix socket for all.

Runs in the master, which opens them before the first worker (or takes them from a service manager, activation.py) and
keeps them for ever: a worker inherits its slot's sockets, so a connection that waits in the kernel's queue survives the
worker (SO_REUSEPORT sockets opened inside workers lose 2-3 % of the connections at a restart). Nothing here accepts.
Kernel side: socket(7), unix(7).
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from prefork.errors import ConfigError
from prefork.options import split_bind


def open_tcp(address: str, count: int, backlog: int) -> list[socket.socket]:
    """`count` listening sockets on one address; port 0 lets the kernel choose one port for all of them.

    `address` has passed the configuration. Raises ConfigError when it cannot be had, also when another server listens
    there: with SO_REUSEPORT alone two servers of one user would silently share the port."""
    host, port = split_bind(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )[0]
    except OSError as e:
        raise ConfigError(f"bind address {address!r}: {e.strerror}") from None
    sockets: list[socket.socket] = []
    try:
        if port:
            _prove_free(family, where)
        for _ in range(count):
            sockets.append(_listen(family, where, backlog))
            where = (where[0], sockets[0].getsockname()[1], *where[2:])
    except OSError as e:
        for sock in sockets:
            sock.close()
        hint = " (another server listens there)" if e.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"bind address {address!r}: {e.strerror}{hint}") from None
    return sockets


def _prove_free(family: int, where: tuple[object, ...]) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        probe.listen(1)


def _listen(family: int, where: tuple[object, ...], backlog: int, like: socket.socket | None = None) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if like is not None and family == socket.AF_INET6:  # a group is of one kind
            v6_only = like.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6_only)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
        sock.bind(where)
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def grow(like: socket.socket, backlog: int) -> tuple[socket.socket, bool]:
    """One more socket for a slot: of the same group (True), else the same queue once more (False). Only the user who
    opened a SO_REUSEPORT group may join it (socket(7)), so what a service manager opened as root is shared by its
    queue; a Unix socket has no groups. Raises ConfigError."""
    try:
        if like.family == socket.AF_UNIX or not like.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
            return like.dup(), False
        try:
            return _listen(like.family, like.getsockname(), backlog, like), True
        except OSError as e:
            if e.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            return like.dup(), False
    except OSError as e:
        raise ConfigError(f"listening socket for another slot: {e.strerror}") from None


def open_unix(path: Path, backlog: int, mode: int = 0o660) -> socket.socket:
    """A listening Unix socket of that `mode`. A dead server's socket file is replaced, a living one's is not.

    Raises ConfigError naming the path."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        _remove_dead(path)
        before = os.umask(0o777 & ~mode)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(before)
        sock.listen(backlog)
    except OSError as e:
        sock.close()
        # "AF_UNIX path too long" comes without an errno
        raise ConfigError(f"Unix socket {str(path)!r}: {e.strerror or e}") from None
    except ConfigError:
        sock.close()
        raise
    return sock


def _remove_dead(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"Unix socket {str(path)!r}: a file that is no socket stands there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                path.unlink()
            return
        except BlockingIOError:
            pass  # its queue is full, so somebody owns it
    raise ConfigError(f"Unix socket {str(path)!r}: a living server listens there")


def name_of(sock: socket.socket) -> str:
    """`host:port` as a client would write it, `unix:/path` or `unix:@abstract`."""
    if sock.family == socket.AF_UNIX:
        path = sock.getsockname()  # bytes: a name of the abstract namespace, which begins with NUL (unix(7))
        return f"unix:@{path[1:].decode(errors='replace')}" if isinstance(path, bytes) else f"unix:{path}"
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

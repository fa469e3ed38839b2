"""Where lines go: a file, a pipe, a socket or a terminal that several processes write to at once. Any process.

A line is one write(2), and no other process's bytes come in between:

| kind | why it stays whole | when it cannot take more |
|---|---|---|
| file, opened with O_APPEND | the kernel locks the inode for the write, whatever its length | the disk is full: lost |
| pipe | up to PIPE_BUF bytes (pipe(7)); `limit` says so and the caller keeps to it | never waited for: refused |
| stream socket (a service manager's) | so short a send is one buffer of the kernel (unix(7)) | the same |
| terminal, anything else | its driver's business | waited for: somebody is looking |

No lock is held and no thread started, so it is safe across fork. Nothing here raises once it is open.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

STDERR = 2


class Sink:
    """`limit`: bytes that a line may have with its newline, 0 for any. `lost`: lines that `write` could not write
    whole. `fd` stays the same for ever."""

    __slots__ = ("_kind", "_poll", "_torn", "fd", "limit", "lost", "path")

    def __init__(self, path: Path | None, fd: int = STDERR) -> None:
        """Without a path the lines go to `fd`. Raises OSError when `path` cannot be opened, ENXIO for a named pipe that
        nobody reads."""
        self.path = path
        self.fd = fd if path is None else _open(path)
        self.lost = 0
        self._torn = False  # the last write ended inside a line
        self._poll: select.poll | None = None  # where the kernel knows no RWF_NOWAIT for pipes (before Linux 6.4)
        self._look()

    def write(self, line: bytes) -> None:
        """One line with its newline, or it is counted in `lost`."""
        if not self.append([line]):
            self.lost += 1

    def append(self, lines: Sequence[bytes]) -> int:
        """Write lines in as few writes as keep each whole; how many were written. The rest may be tried again."""
        done = 0
        for batch in _batches(lines, self.limit):
            head = b"\n" if self._torn else b""
            data = head + b"".join(batch)
            try:
                count = self._write(data)
            except OSError:  # EPIPE, ENOSPC, EAGAIN: whoever logs has better things to do
                break
            written = data[:count]
            self._torn = not written.endswith(b"\n")
            done += max(0, written.count(b"\n") - len(head))
            if count < len(data):
                break
        return done

    def reopen(self) -> None:
        """Open the path anew and write there from now on; a line goes to the old file or to the new one. Nothing to do
        when it is still the same file. Raises OSError; the old file stays in use then."""
        if self.path is None:
            return
        fresh = _open(self.path)
        try:
            if not os.path.sameopenfile(fresh, self.fd):
                os.dup2(fresh, self.fd, inheritable=False)
        finally:
            os.close(fresh)
        self._torn = False
        self._look()

    def _look(self) -> None:
        """What kind the descriptor is of; where there is none (2 is closed) the writes will say so."""
        try:
            self._kind = stat.S_IFMT(os.fstat(self.fd).st_mode)
        except OSError:
            self._kind = 0
        self.limit = select.PIPE_BUF if self._kind in (stat.S_IFIFO, stat.S_IFSOCK) else 0

    def _write(self, data: bytes) -> int:
        """Not into what is full: whoever does not read our log must not stop us."""
        if self._kind == stat.S_IFSOCK:
            return _send(self.fd, data)
        if self._kind == stat.S_IFIFO:
            return self._write_pipe(data)
        return os.write(self.fd, data)

    def _write_pipe(self, data: bytes) -> int:
        """RWF_NOWAIT (pwritev2(2)), for O_NONBLOCK would hold for everybody who has inherited the same end."""
        if self._poll is None:
            try:
                return os.pwritev(self.fd, [data], -1, os.RWF_NOWAIT)
            except OSError as e:
                if e.errno != errno.EOPNOTSUPP:
                    raise
            self._poll = select.poll()
            self._poll.register(self.fd, select.POLLOUT)
        if not self._poll.poll(0):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return os.write(self.fd, data)


def _open(path: Path) -> int:
    # O_NONBLOCK: a named pipe that nobody reads is an error, not a wait; it changes nothing for a file
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)


def _send(fd: int, data: bytes) -> int:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)  # only a handle: send(2) knows what it is
    try:
        return sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    finally:
        sock.detach()


def _batches(lines: Sequence[bytes], limit: int) -> list[list[bytes]]:
    """`lines` in runs of at most `limit` bytes (0: any), in order."""
    if not limit:
        return [list(lines)] if lines else []
    found: list[list[bytes]] = []
    room = 0
    for line in lines:
        if len(line) > room:
            found.append([])
            room = limit
        found[-1].append(line)
        room -= len(line)
    return found

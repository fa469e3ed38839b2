"""What a running master leaves in the file system, and that none of it stays: one object, opened once, closed once.

Runs in the master. The runtime directory is locked, so two masters never share one; leftovers of dead masters
(segments, scratch directories, sockets) are removed before anything is made.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from prefork import activation, listener, workdir
from prefork.config import Config
from prefork.errors import ConfigError
from prefork.estate import Estate
from prefork.log import Logger
from prefork.shm import sweep
from prefork.shm.owner import Owner


class House:
    """`control` and `unix` (at `unix_path`) are listening sockets; `given`: what a service manager opened. Raises
    ConfigError when something cannot be had, or the runtime directory belongs to a living master; what was made until
    then is gone again."""

    def __init__(self, config: Config, log: Logger, left: Estate | None = None) -> None:
        """`left`: by a master whose place we take; what it leaves is not ours before `take_over`."""
        server = self._server = config.server
        self._log = log
        self.left = left
        if left is not None:
            left.same_places(config)
            self.given = activation.Given(left.slots, left.unix, left.activated, left.unix_activated)
            self.lock = left.lock  # that of its first owner, which a fork of it keeps as well (flock(2))
        else:
            self.given = activation.take(os.environ, os.getpid())
            self.lock = _lock(server.runtime_dir)
        self._made: list[Path] = []  # only what we made is ours to remove
        self._public: Path | None = None
        self.work: workdir.WorkDir | None = None
        self.unix: socket.socket | None = None
        self.owner = Owner.current()
        try:
            self.sweep()
            self.work = workdir.WorkDir(server.work_dir, self.owner)
            self.control = left.control if left is not None else self._listen(server.control, 16, 0o600)
            self.unix = self.given.unix
            if server.unix is not None and not self.given.has_unix:
                self.unix = self._listen(server.unix, server.backlog, 0o660)
                self._public = server.unix
            self.unix_path = listener.name_of(self.unix).removeprefix("unix:") if self.unix is not None else None
            if server.pid_file is not None and left is None:
                self._write_pid(server.pid_file)
        except BaseException:
            self.close()
            raise

    def take_over(self) -> None:
        """The master before us has let go, or is dead: what it left is ours, and ours to remove. Nobody else is there
        to serve, so what cannot be had is only told."""
        self._made.append(self._server.control)
        if self.given.unix is not None and not self.given.unix_managed and self._server.unix is not None:
            self._public = self._server.unix
            self._made.append(self._server.unix)
        try:
            write_owner(self.lock)
            if self.left is not None and self.left.pid_file not in (None, self._server.pid_file):
                self.left.pid_file.unlink(missing_ok=True)
            if self._server.pid_file is not None:
                self._write_pid(self._server.pid_file)
        except (OSError, ConfigError) as e:
            self._log.error("not all is taken over", reason=e)

    @property
    def alone(self) -> bool:
        """The master before us, whose child we are, has ended."""
        return self.left is None or os.getppid() != self.left.pid

    def sweep(self) -> None:
        """Remove what dead masters have left; once more when the one before us, or after us, may have died instead of
        leaving."""
        _sweep(self._server.work_dir, self._log)

    def let_go(self) -> None:
        """Another master takes our place: what it was given is not ours any more."""
        self._made.clear()
        self._public = None

    def _listen(self, path: Path, backlog: int, mode: int) -> socket.socket:
        sock = listener.open_unix(path, backlog, mode)
        self._made.append(path)
        return sock

    def _write_pid(self, path: Path) -> None:
        try:
            path.write_text(f"{os.getpid()}\n")
        except OSError as e:
            raise ConfigError(f"pid_file {str(path)!r}: {e.strerror}") from None
        self._made.append(path)

    def unlink_public(self) -> None:
        """Let nobody find the way in any more; the control socket stays until the end."""
        if self._public is not None:
            self._public.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything. Safe to call twice."""
        if self.work is not None:
            self.work.remove()
        if self.left is not None and self.lock >= 0:  # we may stop before the look at which we would have done so
            self.sweep()
        for path in self._made:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self._made.clear()
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def _sweep(work_dir: Path, log: Logger) -> None:
    for info in sweep.sweep():
        owner = info.owner.pid if info.owner else None
        log.info("removed a dead master's segment", name=info.name, owner=owner, bytes=info.size)
    for path in workdir.sweep(work_dir):
        log.info("removed a dead master's scratch directory", path=path)


def _lock(directory: Path) -> int:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # a link is followed only when nobody else can have put it there (systemd's DynamicUser makes one, as root)
        strangers = {directory.stat().st_uid, directory.lstat().st_uid} - {os.getuid(), 0}
        if strangers or directory.stat().st_uid != os.getuid():
            raise ConfigError(f"runtime_dir {str(directory)!r}: belongs to user {directory.stat().st_uid}, not to us")
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        raise ConfigError(f"runtime_dir {str(directory)!r}: {e.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(
            f"runtime_dir {str(directory)!r}: prefork-serve with pid {holder or 'unknown'} owns it; "
            "give this one another --runtime-dir"
        ) from None
    write_owner(fd)
    return fd


def write_owner(fd: int) -> None:
    """Say in the lock's file who has it."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

"""What a running master leaves in the file system, and that none of it stays: one object, opened once, closed once.

Runs in the master. The runtime directory is locked, so two masters never share one; leftovers of dead masters
(segments, scratch directories, sockets) are removed before anything is made.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from prefork import listener, workdir
from prefork.config import Config
from prefork.errors import ConfigError
from prefork.log import Logger
from prefork.shm import sweep
from prefork.shm.owner import Owner


class House:
    """Raises ConfigError when the runtime directory cannot be had or belongs to a living master."""

    def __init__(self, config: Config, log: Logger) -> None:
        server = config.server
        self.started = time.time()
        self._paths = [path for path in (server.control, server.unix) if path is not None]
        self._pid_file: Path | None = None
        self._lock = _lock(server.runtime_dir)
        self.owner = Owner.current()
        try:
            for info in sweep.sweep():
                log.info(
                    "removed a dead master's segment",
                    name=info.name,
                    owner=info.owner.pid if info.owner else None,
                    bytes=info.size,
                )
            for path in workdir.sweep(server.work_dir):
                log.info("removed a dead master's scratch directory", path=path)
            self.work = workdir.WorkDir(server.work_dir, self.owner)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            self.control = listener.open_unix(server.control, 16)
            server.control.chmod(0o600)
            if server.pid_file is not None:
                self._write_pid(server.pid_file)
        except (OSError, ConfigError) as e:
            self.close()
            if isinstance(e, OSError):
                raise ConfigError(f"pid_file {str(server.pid_file)!r}: {e.strerror}") from None
            raise

    def _write_pid(self, path: Path) -> None:
        path.write_text(f"{os.getpid()}\n")
        self._pid_file = path

    def unlink_sockets(self) -> None:
        """Let nobody find the way in any more; the control socket stays until the end."""
        for path in self._paths[1:]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything. Safe to call twice."""
        self.work.remove()
        for path in [*self._paths, *([self._pid_file] if self._pid_file else [])]:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        with suppress(OSError):
            os.close(self._lock)


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
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd

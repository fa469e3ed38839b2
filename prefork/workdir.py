"""Scratch directories of loaders: named after their master, so that a start can remove those of dead ones.

Runs in the master. A directory is held by a shared lock on itself for as long as its master lives; the lock is the
kernel's word across pid namespaces, the name says who to look for.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from prefork.errors import ConfigError
from prefork.shm.owner import Owner

_NAME = re.compile(r"prefork-work-(\d+)-(\d+)")


class WorkDir:
    """One master's scratch directory; `sub` makes a loader's part of it."""

    def __init__(self, parent: Path, owner: Owner) -> None:
        """Raises ConfigError when it cannot be made."""
        self.path = parent / f"prefork-work-{owner.pid}-{owner.start}"
        try:
            self.path.mkdir(mode=0o700)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise ConfigError(f"work_dir {str(parent)!r}: {e.strerror}") from None
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def sub(self, name: str) -> Path:
        path = self.path / name
        path.mkdir(mode=0o700)
        return path

    def drop(self, name: str) -> None:
        """Remove a loader's part, and what it left there."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sweep(parent: Path) -> list[Path]:
    """Remove the scratch directories of dead masters of this user; which ones."""
    removed = []
    for path in parent.glob("prefork-work-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or Owner(int(match[1]), int(match[2]), 0).seen_alive():
            continue
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                    removed.append(path)
            finally:
                os.close(fd)
    return removed

"""SHA-256 of files, remembered by their state, so that a large file that has not changed is not read again.

Loader's process. A file is the same when path, device, inode, size, mtime and ctime are: the kernel sets ctime whenever
content, size or mtime change, and no call sets it back (inode(7)). A file that was changed less than RACY before it was
read is not remembered: a second change within the same tick of a coarse clock could not be seen. What is remembered is
a hint in small files that carry a checksum; a lost, damaged or unwritable one costs reading the file again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

RACY = 2_000_000_000  # ns; the coarsest time stamps in use are FAT's
MOST = 512  # files remembered
HEX = re.compile(r"[0-9a-f]{64}")


class Digests:
    """Doors: `of`, `parts`, `remember_parts`. `folder` is made when it is first written to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, path: Path) -> str:
        """SHA-256 of the file's content, in hexadecimal. Raises OSError."""
        with path.open("rb", buffering=0) as file:  # over NFS, opening is what makes the state fresh
            state = _state(path, file.fileno())
            name = f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.file"
            known = self._read(name)
            if isinstance(known, dict) and known.get("state") == state and _is_digest(known.get("sha256")):
                return str(known["sha256"])
            now = time.time_ns()
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if now - max(state[4:]) > RACY and _state(path, file.fileno()) == state:
                self._write(name, {"state": state, "sha256": digest})
        return digest

    def parts(self, digest: str) -> list[str]:
        """Names of the external data files of the model with that digest, relative to it; none when unknown."""
        known = self._read(f"{digest}.parts")
        return known if isinstance(known, list) and all(isinstance(name, str) for name in known) else []

    def remember_parts(self, digest: str, names: list[str]) -> None:
        self._write(f"{digest}.parts", names)

    def _read(self, name: str) -> Any:
        """What was written, or None."""
        try:
            fd = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                strange = os.fstat(fd).st_uid != os.getuid()
                check, _, text = file.read().partition(b"\n")
            return None if strange or check != b"%08x" % zlib.crc32(text) else json.loads(text)
        except (OSError, ValueError):
            return None

    def _write(self, name: str, what: Any) -> None:
        text = json.dumps(what).encode()
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self._folder / name, flags, 0o600)
            try:
                os.write(fd, b"%08x\n%s" % (zlib.crc32(text), text))
            finally:
                os.close(fd)
            self._prune()

    def _prune(self) -> None:
        found = sorted(self._folder.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
        for path in found[: max(0, len(found) - MOST)]:
            path.unlink(missing_ok=True)


def _state(path: Path, fd: int) -> list[Any]:
    found = os.fstat(fd)
    return [str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and HEX.fullmatch(text) is not None

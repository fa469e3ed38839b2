"""Prepared models on disk: one file an entry, laid out as the segment that it becomes. Loader's process.

Knows files and bytes, no model. A folder of this user's own, mode 0700:

    KEY.model   an entry: header, then the sections exactly as in a segment (shm/layout.py), so that a hit is one copy,
                checked by the checksums that the segment needs anyway
    KEY.lock    locked while somebody prepares that entry; gone afterwards
    *.tmp       an entry being written, locked by its writer
    sources/    digests.py

A lock or an entry being written that nobody has locked is a killed process's, and is removed by the next writer.
The entry's header is a checksum, a length and JSON, then zeros up to FIRST_SECTION_OFFSET. The graph holds a
placeholder wherever it names the file of its weights; `locate` puts a segment's name there, of the same length. An
entry appears under its name whole (rename(2)) and is never written again; its mtime is its last use. A missing folder,
a full disk, a damaged or a stranger's entry never stop a start: they are `CacheError`, and the caller goes on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefork.errors import PreforkError
from prefork.log import Logger
from prefork.shm import layout

FORMAT = 1
MAGIC = b"PFCACHE\x1a"
HEADER = layout.FIRST_SECTION_OFFSET
CHUNK = 1 << 20
POLL = 0.05  # seconds; flock(2) waits for ever or not at all
# A segment's name has at most 133 bytes (shm/owner.py), and two more make any length reachable.
PLACE_BYTES = 144
_FIXED = struct.Struct("<8sII")  # magic, checksum of all that follows it in the header, length of the JSON


class CacheError(PreforkError):
    """The cache cannot be used here, or not this entry of it; the model can be served all the same."""

    exit_code = 73  # EX_CANTCREAT, of a command that was to fill it


class Damaged(CacheError):
    """The entry's bytes are not those that were written."""


def placeholder() -> str:
    """A text for `graph` to name its weights by, which occurs in no model."""
    return f"prefork-segment-{os.urandom(16).hex()}".ljust(PLACE_BYTES, "_")


def locate(graph: bytes, place: str, name: str) -> bytes:
    """`graph` with the file `name` instead of the placeholder, its length unchanged: `.////name` is the same path."""
    assert len(place) == PLACE_BYTES and len(name) + 2 <= PLACE_BYTES
    return graph.replace(place.encode(), ("." + name.rjust(PLACE_BYTES - 1, "/")).encode())


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry whose header has been checked; its sections are checked by whoever reads them. A context manager."""

    path: Path
    fd: int
    place: str
    sections: tuple[layout.Section, ...]

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)

    @property
    def size(self) -> int:
        return HEADER + sum(section.extent for section in self.sections)

    def section(self, name: str) -> layout.Section:
        """Raises Damaged when there is none."""
        for section in self.sections:
            if section.name == name:
                return section
        raise Damaged(f"cache entry {self.path}: no section {name!r}")

    def check(self, name: str, checksum: int) -> None:
        """Raises Damaged unless `checksum` is that of the section, up to its extent."""
        wanted = self.section(name).checksum
        if checksum != wanted:
            raise Damaged(f"cache entry {self.path}: section {name!r} checksum: expected {wanted}, found {checksum}")

    def read(self, name: str) -> bytes:
        """A small section, checked. Raises Damaged."""
        section = self.section(name)
        data = _read(self.path, self.fd, section.size, section.offset)
        self.check(name, layout.checksum(bytes(section.extent - section.size), layout.checksum(data)))
        return data

    def verify(self) -> None:
        """Read everything. Raises Damaged."""
        for section in self.sections:
            self.check(section.name, self._checksum(section))

    def _checksum(self, section: layout.Section) -> int:
        crc, end = 0, section.offset + section.extent
        for at in range(section.offset, end, CHUNK):
            crc = layout.checksum(_read(self.path, self.fd, min(CHUNK, end - at), at), crc)
        return crc


class Cache:
    """Doors: `find`, `has`, `lock`, `store`, `remove`. Entries together take at most `limit` bytes."""

    def __init__(self, folder: Path, limit: int, log: Logger) -> None:
        """Makes the folder. Raises CacheError when it cannot be used."""
        self.folder = folder
        self._limit = limit
        self._log = log
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = folder.stat().st_uid
        except OSError as e:
            raise CacheError(f"cache_dir {str(folder)!r}: {e.strerror}") from None
        if owner != os.getuid():
            raise CacheError(f"cache_dir {str(folder)!r}: belongs to user {owner}, not to us")

    @property
    def sources(self) -> Path:
        return self.folder / "sources"

    def find(self, key: str) -> Entry | None:
        """The entry, marked as used; None when there is none, or none that can be used: the log says why, and a damaged
        one is removed."""
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as e:
            self._log.warning("cached model refused", path=path, reason=e.strerror)
            return None
        try:
            _check_owner(path, fd)
            entry = _decode(path, key, fd)
        except CacheError as e:
            os.close(fd)
            if isinstance(e, Damaged):
                self.remove(key, e)
            else:
                self._log.warning("cached model refused", path=path, reason=e.message)
            return None
        with contextlib.suppress(OSError):  # a cache on a read-only disk forgets the use
            os.utime(fd)
        return entry

    def has(self, key: str) -> bool:
        """Whether there is an entry, of whatever worth."""
        return self._path(key).exists()

    def remove(self, key: str, why: CacheError) -> None:
        """Take an entry away, and log the reason."""
        self._log.warning("cached model removed", path=self._path(key), reason=why.message)
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self, key: str, patience: float) -> Iterator[None]:
        """Be the only one that prepares this entry. Raises CacheError when that cannot be within `patience` seconds."""
        path, end = self.folder / f"{key}.lock", time.monotonic() + patience
        fd = _try_lock(path)
        if fd is None:
            self._log.info("another process is preparing this model; waiting for it")
        while fd is None:
            if time.monotonic() >= end:
                raise CacheError(f"cache lock {path}: another process has been holding it for {patience:g} s")
            time.sleep(POLL)
            fd = _try_lock(path)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(fd)

    def store(self, key: str, place: str, sections: Mapping[str, Path | bytes]) -> None:
        """Write an entry and make it visible whole; then remove the least recently used ones above the limit.

        Raises CacheError: no room, no permission, larger than the whole cache."""
        sizes = [(name, src.stat().st_size if isinstance(src, Path) else len(src)) for name, src in sections.items()]
        size = layout.section_sizes(sizes)
        if size > self._limit:
            raise CacheError(f"not cached: it takes {size} bytes, and cache_size is {self._limit}")
        self._sweep()
        self._evict(self._limit - size, key)
        try:
            with self._temporary(key) as (path, fd):
                os.posix_fallocate(fd, 0, size)
                placed = [_write(fd, section, sections[section.name]) for section in layout.place(sizes)]
                os.pwrite(fd, _encode(key, place, placed), 0)
                os.fsync(fd)
                path.rename(self._path(key))
                _sync_folder(self.folder)
        except OSError as e:
            raise CacheError(f"not cached: {self.folder}: {e.strerror}") from None

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.model"

    @contextlib.contextmanager
    def _temporary(self, key: str) -> Iterator[tuple[Path, int]]:
        """A new file, locked: the lock says that its writer lives."""
        while True:
            path = self.folder / f"{key}.{os.urandom(4).hex()}.tmp"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink == 0:  # swept before it was locked
                    continue
                yield path, fd
            finally:
                path.unlink(missing_ok=True)
                os.close(fd)
            return

    def _sweep(self) -> None:
        """Remove what killed writers left."""
        for path in [*self.folder.glob("*.tmp"), *self.folder.glob("*.lock")]:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                    self._log.info("removed what a killed writer left in the cache", path=path)
                finally:
                    os.close(fd)

    def _evict(self, limit: int, keep: str) -> None:
        """Remove the entries used longest ago until the others, without that of `keep`, take at most `limit` bytes."""
        found = []
        for path in self.folder.glob("*.model"):
            with contextlib.suppress(OSError):
                info = path.lstat()
                found.append((info.st_mtime_ns, info.st_size, path))
        total = sum(size for _, size, path in found if path != self._path(keep))
        for _, size, path in sorted(found):
            if total > limit and path != self._path(keep):
                self._log.info("cached model evicted", path=path, bytes=size)
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                total -= size


def _try_lock(path: Path) -> int | None:
    """The lock, or None while another has it. Raises CacheError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise CacheError(f"not cached: {path}: {e.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):  # its last holder has removed the name it was opened under
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as e:
        os.close(fd)
        raise CacheError(f"not cached: {path}: {e.strerror}") from None
    os.close(fd)
    return None


def _check_owner(path: Path, fd: int) -> None:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise CacheError(f"cache entry {path}: not a regular file")
    if info.st_uid != os.getuid():
        raise CacheError(f"cache entry {path}: belongs to user {info.st_uid}, not to us")
    if info.st_mode & 0o022:
        raise CacheError(f"cache entry {path}: others may write it (mode {info.st_mode & 0o777:04o})")


def _encode(key: str, place: str, sections: list[layout.Section]) -> bytes:
    table = [[section.name, section.size, section.checksum] for section in sections]
    text = json.dumps({"format": FORMAT, "key": key, "place": place, "sections": table}).encode()
    rest = text.ljust(HEADER - _FIXED.size, b"\0")
    return _FIXED.pack(MAGIC, layout.checksum(rest), len(text)) + rest


def _decode(path: Path, key: str, fd: int) -> Entry:
    """Raises Damaged naming what does not hold."""
    raw = _read(path, fd, HEADER, 0)
    if len(raw) != HEADER or raw[: len(MAGIC)] != MAGIC:
        raise Damaged(f"cache entry {path}: not a whole entry of this program")
    _, check, length = _FIXED.unpack_from(raw)
    rest = raw[_FIXED.size :]
    if layout.checksum(rest) != check:
        raise Damaged(f"cache entry {path}: header checksum: expected {check}, found {layout.checksum(rest)}")
    found: dict[str, Any] = json.loads(rest[:length])
    if (found["format"], found["key"]) != (FORMAT, key):
        raise Damaged(f"cache entry {path}: it is of another key or format")
    placed = layout.place([(name, size) for name, size, _ in found["sections"]])
    checked = zip(placed, found["sections"], strict=True)
    entry = Entry(path, fd, found["place"], tuple(layout.Section(s.name, s.offset, s.size, c[2]) for s, c in checked))
    if os.fstat(fd).st_size != entry.size:
        raise Damaged(f"cache entry {path}: size: expected {entry.size}, found {os.fstat(fd).st_size}")
    return entry


def _write(fd: int, section: layout.Section, source: Path | bytes) -> layout.Section:
    """Copy one section; what it is with its checksum, which covers the zeros up to its extent."""
    crc, at = 0, 0
    with source.open("rb", buffering=0) if isinstance(source, Path) else io.BytesIO(source) as stream:
        while chunk := stream.read(CHUNK):
            crc = layout.checksum(chunk, crc)
            os.pwrite(fd, chunk, section.offset + at)
            at += len(chunk)
    if at != section.size:
        raise CacheError(f"not cached: section {section.name!r}: expected {section.size} bytes, found {at}")
    return layout.Section(
        section.name, section.offset, section.size, layout.checksum(bytes(section.extent - section.size), crc)
    )


def _read(path: Path, fd: int, size: int, offset: int) -> bytes:
    """Raises Damaged when the disk does not give them."""
    try:
        return os.pread(fd, size, offset)
    except OSError as e:
        raise Damaged(f"cache entry {path}: {e.strerror}") from None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

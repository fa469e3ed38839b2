"""POSIX segments: files in /dev/shm. The only file that knows how such a segment is made, found, locked and removed.

A draft is a file without a name (O_TMPFILE), so a killed loader leaves nothing; linking it under its name is the act
of publishing, and at that moment its shared flock(2) is already held. Whoever keeps a segment living holds a shared
flock; it belongs to the open file, so it works across pid namespaces and ends with the last process. Removing a
segment of a dead owner needs the exclusive one. Nothing here looks into the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator

import posix_ipc

from prefork.errors import SegmentError, SegmentFull, SegmentMissing
from prefork.shm import room
from prefork.shm.owner import parse_name


class Draft:
    """A segment being written, loader only. `view` is writable until `finish`."""

    def __init__(self, size: int) -> None:
        """Raises SegmentFull."""
        room.check_posix(size)
        try:
            self._fd = os.open(room.SHM_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise SegmentError(f"a file without a name cannot be made in {room.SHM_DIR}: {e.strerror}") from None
        try:
            _allocate(self._fd, size)
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._map = mmap.mmap(self._fd, size)
            self.size = size
        except BaseException:
            os.close(self._fd)
            raise
        self.view = memoryview(self._map)

    @property
    def fd(self) -> int:
        """For the kernel to copy to."""
        return self._fd

    def reclaim(self) -> None:
        """Make `view` anew, sure that no other view is left. Raises BufferError while one is in use."""
        self._unmap()
        self._map = mmap.mmap(self._fd, self.size)
        self.view = memoryview(self._map)

    def finish(self, name: str) -> str:
        """Unmap and give the file its name; the lock stays until `close`. Raises SegmentError when the name is taken,
        BufferError while views are in use."""
        self._unmap()
        folder = os.open(room.SHM_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # src_dir_fd: without it CPython may call link(2), which does not follow the link in /proc
            source = f"/proc/self/fd/{self._fd}"
            os.link(source, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
        except FileExistsError:
            raise SegmentError(f"segment {path_of(name)} exists already; its owner must retire it first") from None
        finally:
            os.close(folder)
        return name

    def close(self) -> None:
        """Idempotent. A file that got no name vanishes, once no view of it is in use."""
        if self._fd >= 0:
            with contextlib.suppress(BufferError):
                self._unmap()
            os.close(self._fd)
            self._fd = -1

    def _unmap(self) -> None:
        self.view.release()
        self._map.close()


class Attachment:
    """A read-only mapping of a whole segment."""

    def __init__(self, name: str) -> None:
        """Raises SegmentMissing, SegmentError."""
        fd = _open(name)
        try:
            self.size = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self.size, prot=mmap.PROT_READ) if self.size else None
            if self._map is not None:  # once its name is gone, the kernel counts it as memory worth a core
                self._map.madvise(mmap.MADV_DONTDUMP)
        finally:
            os.close(fd)
        self.view = memoryview(self._map or b"")

    def close(self) -> None:
        """Raises BufferError while views are in use."""
        self.view.release()
        if self._map is not None:
            self._map.close()


class Lock:
    """The shared lock that keeps a segment living. Maps nothing."""

    def __init__(self, name: str) -> None:
        """Raises SegmentMissing, SegmentError."""
        self._fd = _open(name)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # waits only while a sweeper looks, which takes microseconds
            if os.fstat(self._fd).st_nlink == 0:
                raise SegmentMissing(f"segment {path_of(name)} was removed while it was being opened")
            self.size = os.fstat(self._fd).st_size
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, size: int) -> bytes:
        return os.pread(self._fd, size, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def path_of(name: str) -> str:
    return str(room.SHM_DIR / name)


def check_name(name: str) -> None:
    """Raises SegmentMissing for a name that is not of our making: such a name is never opened or removed."""
    if parse_name(name) is None:
        raise SegmentMissing(f"{name!r} is not the name of a segment")


def remove(name: str) -> None:
    """Remove the name; those who have it mapped keep their mapping. Idempotent."""
    check_name(name)
    try:
        posix_ipc.unlink_shared_memory("/" + name)
    except posix_ipc.ExistentialError:
        return
    except (posix_ipc.Error, OSError) as e:
        raise SegmentError(f"segment {path_of(name)} cannot be removed: {e}") from None


def names() -> list[str]:
    return sorted(entry.name for entry in room.SHM_DIR.iterdir() if parse_name(entry.name))


@contextlib.contextmanager
def inspect(name: str) -> Iterator[int]:
    """A read-only fd of a listed segment, not locked. Raises SegmentMissing, SegmentError."""
    fd = _open(name)
    try:
        yield fd
    finally:
        os.close(fd)


def held(fd: int) -> bool:
    """Whether anyone keeps the segment living. Otherwise the exclusive lock is now ours, until the fd is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def remove_locked(name: str, fd: int) -> bool:
    """Remove the name while the exclusive lock on `fd` is ours; False when the name is another file's by now."""
    try:
        if not os.path.samestat((room.SHM_DIR / name).lstat(), os.fstat(fd)):
            return False
    except FileNotFoundError:
        return False
    remove(name)
    return True


def _open(name: str) -> int:
    check_name(name)
    try:  # not to be kept waiting by a FIFO of that name
        fd = posix_ipc.SharedMemory("/" + name, os.O_NONBLOCK, read_only=True).fd
    except posix_ipc.ExistentialError:
        raise SegmentMissing(f"segment {path_of(name)} does not exist") from None
    except (posix_ipc.PermissionsError, posix_ipc.Error, OSError) as e:
        raise SegmentError(f"segment {path_of(name)} cannot be opened: {e}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SegmentError(f"segment {path_of(name)} is not a regular file")
    return fd


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise
        raise SegmentFull(
            f"no room for a segment of {size} bytes in {room.SHM_DIR}: {e.strerror}; there was room "
            "a moment before, so something else is filling it, or a quota or ulimit -f stands in the way"
        ) from None

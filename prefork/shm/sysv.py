"""System V segments, by shmid. The only file that knows how such a segment is made, found and removed.

A System V segment has no name, no file and no lock; the kernel counts who is attached. The holder attaches and marks it
for destruction, so the kernel removes it with the last process; on Linux others may still attach by id after that
(shmctl(2), IPC_RMID). Before it is held it can be told from a stranger's by its key, whose upper half is KEY_PREFIX.
Nothing here looks into the bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import sysv_ipc

from prefork.errors import SegmentError, SegmentFull, SegmentMissing
from prefork.shm import room

KEY_PREFIX = 0x5046  # "PF"
_MARKED = 0o1000  # SHM_DEST, shmctl(2)
_TRIES = 100

_libc = ctypes.CDLL(None)


class Draft:
    """A segment being written, loader only. `view` is writable until `finish`."""

    def __init__(self, size: int) -> None:
        """Raises SegmentFull."""
        room.check_sysv(size)
        self._memory: sysv_ipc.SharedMemory | None = _create(size)
        self._idle = sys.getrefcount(self._memory)
        self.view = memoryview(self._memory)
        self._finished = False

    @property
    def fd(self) -> None:
        """There is none."""

    def reclaim(self) -> None:
        """Make `view` anew, sure that no other view is left. Raises BufferError while one is in use."""
        if self._memory is None:
            raise SegmentError("the segment is closed already")
        self.view.release()
        if sys.getrefcount(self._memory) > self._idle:
            raise BufferError("views of the segment are in use")
        self.view = memoryview(self._memory)

    def finish(self, name: str) -> str:
        """Give up writing; stay attached read-only until `close`. The shmid is the segment's name, `name` is unused.
        Raises BufferError while views are in use."""
        self.reclaim()
        if self._memory is None:
            raise SegmentError("the segment is closed already")
        self.view.release()
        kept = sysv_ipc.attach(self._memory.id, None, sysv_ipc.SHM_RDONLY)
        self._memory.detach()
        self._memory, self._finished = kept, True
        return str(kept.id)

    def close(self) -> None:
        """Idempotent. Removes the segment unless it was finished."""
        if self._memory is None:
            return
        self.view.release()
        if not self._finished:
            self._memory.remove()
        if self._finished or sys.getrefcount(self._memory) <= self._idle:  # unmapping under a view would be fatal
            self._memory.detach()
        self._memory = None


class Attachment:
    """A read-only attachment of a whole segment."""

    def __init__(self, name: str) -> None:
        """Raises SegmentMissing, SegmentError."""
        self._memory = _attach(name)
        self._idle = sys.getrefcount(self._memory)
        self.size = self._memory.size
        # a core would hold all of it, for the kernel takes it for anonymous memory; a refusal is no harm
        _libc.madvise(ctypes.c_void_p(self._memory.address), ctypes.c_size_t(self.size), mmap.MADV_DONTDUMP)
        self.view = memoryview(self._memory).toreadonly()  # the module calls even a read-only attachment writable

    def close(self) -> None:
        """Raises BufferError while views are in use."""
        self.view.release()
        if sys.getrefcount(self._memory) > self._idle:
            raise BufferError("views of the segment are in use")
        if self._memory.attached:
            self._memory.detach()


class Lock:
    """An attachment that keeps a segment living, whose owner marks it so that the kernel removes it with the last."""

    def __init__(self, name: str) -> None:
        """Raises SegmentMissing, SegmentError."""
        self._memory = _attach(name)
        self.size = self._memory.size

    def read(self, size: int) -> bytes:
        with memoryview(self._memory) as view:
            return bytes(view[:size])

    def mark(self) -> None:
        self._memory.remove()

    def close(self) -> None:
        if self._memory.attached:
            self._memory.detach()


@dataclass(frozen=True)
class Row:
    """One line of /proc/sysvipc/shm. `changed`: Unix time in seconds of the last attach, detach or change."""

    name: str
    ours: bool  # the key has our prefix, or the segment is marked for destruction and may be ours
    marked: bool
    mode: int
    size: int
    creator: int  # pid in our namespace, or 0
    attached: int
    uid: int
    changed: int


def rows() -> list[Row]:
    return [_row(line.split()) for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]


def row(name: str) -> Row | None:
    return next((row for row in rows() if row.name == name), None)


def remove(name: str) -> None:
    """Mark for destruction; those who are attached stay attached. Idempotent."""
    try:
        sysv_ipc.remove_shared_memory(int(name))
    except sysv_ipc.ExistentialError:
        return
    except sysv_ipc.PermissionsError as e:
        raise SegmentError(f"System V segment {name} cannot be removed: {e}") from None


def _row(field: list[str]) -> Row:
    key, perms = int(field[0]) & 0xFFFFFFFF, int(field[2], 8)
    return Row(
        name=field[1], ours=key >> 16 == KEY_PREFIX or bool(perms & _MARKED), marked=bool(perms & _MARKED),
        mode=perms & 0o777, size=int(field[3]), creator=int(field[4]), attached=int(field[6]), uid=int(field[7]),
        changed=max(int(field[11]), int(field[12]), int(field[13])),
    )  # fmt: skip


def _create(size: int) -> sysv_ipc.SharedMemory:
    for _ in range(_TRIES):
        key = KEY_PREFIX << 16 | int.from_bytes(os.urandom(2), "little")
        if any(int(line.split()[0]) == key for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]):
            continue
        try:  # without IPC_EXCL: with it the module would write blanks over the whole segment
            memory = sysv_ipc.SharedMemory(key, sysv_ipc.IPC_CREAT, 0o600, size)
        except ValueError:  # EINVAL: someone took the key in between, with another size
            continue
        except (MemoryError, OSError) as e:
            raise SegmentFull(
                f"no room for a System V segment of {size} bytes: {e}; see kernel.shmall, vm.overcommit_memory"
            ) from None
        if memory.creator_pid == os.getpid():
            return memory
        memory.detach()
    raise SegmentError(f"no free key for a System V segment of {size} bytes after {_TRIES} tries")


def _attach(name: str) -> sysv_ipc.SharedMemory:
    if not (name.isascii() and name.isdecimal() and len(name) <= 10):
        raise SegmentMissing(f"{name!r} is not the id of a System V segment")
    try:
        return sysv_ipc.attach(int(name), None, sysv_ipc.SHM_RDONLY)
    except (sysv_ipc.ExistentialError, ValueError):  # the module reports EINVAL, an unknown id, as ValueError
        raise SegmentMissing(f"System V segment {name} does not exist") from None
    except (sysv_ipc.Error, OverflowError, OSError) as e:
        raise SegmentError(f"System V segment {name} cannot be attached: {e}") from None

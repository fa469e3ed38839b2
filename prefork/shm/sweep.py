"""Segments of this machine: list them, and remove those of dead masters. Master (at start) and prefork-ctl.

Never raises because of a foreign, half-written or vanished segment, and never removes one of a living master.
README.md has the reasoning; in short, a segment is dead when nobody holds it (flock, or attachments) and its owner is
known to be gone; where our /proc cannot know (another pid namespace), when nobody has held it for GRACE seconds.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from prefork.errors import PreforkError, SegmentError
from prefork.shm import layout, posix, sysv
from prefork.shm.owner import Owner, parse_name, start_ticks
from prefork.shm.segment import SegmentRef, retire

GRACE = 60.0  # seconds; between the loader's exit and the master's hold nobody holds a segment


@dataclass(frozen=True)
class SegmentInfo:
    """`owner`, `generation` and `model` are None where neither header nor name tells. `model` is sanitised when only
    the name tells. `age`: seconds since creation. `problem`: why the header cannot be trusted, else empty."""

    ref: SegmentRef
    owner: Owner | None
    alive: bool
    age: float
    generation: int | None
    model: str | None
    published: bool
    mode: int
    uid: int
    problem: str = ""

    @property
    def kind(self) -> str:
        return self.ref.kind

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def size(self) -> int:
        return self.ref.size


def list_segments() -> list[SegmentInfo]:
    """All segments of both kinds that can be recognised, of all users."""
    found = [info for name in posix.names() for info in _posix(name, remove=False)]
    return found + [info for row in _sysv_rows() for info in _sysv(row, remove=False)]


def sweep() -> list[SegmentInfo]:
    """Remove the segments of dead masters of this user; those that were removed. Others' are passed over quietly."""
    found = [info for name in posix.names() for info in _posix(name, remove=True)]
    return found + [info for row in _sysv_rows() for info in _sysv(row, remove=True)]


def discard(owner: Owner, generation: int) -> list[SegmentInfo]:
    """Retire every segment of this owner's generation; those found. For the master whose loader died: between its
    `publish` and its report, and of a System V draft, the master knows no reference."""
    found = [info for info in list_segments() if info.owner == owner and info.generation == generation]
    for info in found:
        retire(info.ref)
    return found


def _posix(name: str, *, remove: bool) -> Iterator[SegmentInfo]:
    """The segment as listed; with `remove` only if it was dead and is now gone."""
    try:
        with posix.inspect(name) as fd:
            status = os.fstat(fd)
            info = _describe(SegmentRef("posix", name, status.st_size), os.pread(fd, layout.HEADER_SIZE, 0), status)
            # the lock is asked for last: a living owner of our namespace is never disturbed by it
            alive = _spared(info, status.st_ctime) or posix.held(fd)
            if not remove:
                yield replace(info, alive=alive)
            elif not alive and status.st_uid == os.geteuid() and posix.remove_locked(name, fd):
                yield replace(info, alive=False)
    except (PreforkError, OSError):
        if not remove:
            yield from _unreadable(name)


def _unreadable(name: str) -> Iterator[SegmentInfo]:
    """A segment that may not be opened, as far as its name and folder entry tell; nothing when it has vanished."""
    with contextlib.suppress(OSError):
        status = Path(posix.path_of(name)).lstat()
        if stat.S_ISREG(status.st_mode):
            info = _describe(SegmentRef("posix", name, status.st_size), b"", status)
            yield replace(info, alive=True, problem="it may not be read")


def _describe(ref: SegmentRef, raw: bytes, status: os.stat_result) -> SegmentInfo:
    parts = parse_name(ref.name)
    info = SegmentInfo(
        ref, parts.owner if parts else None, True, max(0.0, time.time() - status.st_ctime),
        parts.generation if parts else None, parts.model if parts else None, True,
        stat.S_IMODE(status.st_mode), status.st_uid,
    )  # fmt: skip
    return _with_header(info, raw)


def _with_header(info: SegmentInfo, raw: bytes) -> SegmentInfo:
    try:
        header = layout.decode(raw, info.size, str(info.ref), unpublished=True)
    except SegmentError as e:
        return replace(info, published=False, problem=e.message)
    return replace(
        info, owner=header.owner, age=max(0.0, time.time() - header.created_ns / 1e9), generation=header.generation,
        model=header.model, published=header.published,
    )  # fmt: skip


def _spared(info: SegmentInfo, last_change: float) -> bool:
    """Whether to leave the segment alone although nobody should hold it."""
    if info.owner is not None and info.owner.seen_alive():
        return True
    known_dead = info.owner is not None and info.owner.comparable
    return not known_dead and time.time() - last_change < GRACE


def _sysv_rows() -> list[sysv.Row]:
    try:
        return [row for row in sysv.rows() if row.ours and row.size >= layout.FIRST_SECTION_OFFSET]
    except OSError:  # a kernel without System V shared memory
        return []


def _sysv(row: sysv.Row, *, remove: bool) -> Iterator[SegmentInfo]:
    """Like `_posix`. Our own look at the header is over before the attachments are counted, so that of several
    sweepers the last one always sees none."""
    if remove and (row.marked or row.uid != os.geteuid()):
        return
    with contextlib.suppress(PreforkError, OSError):
        raw = _sysv_header(row.name)
        blank = not any(raw)  # killed before the first store
        if not blank and not raw.startswith(layout.MAGIC):
            return
        now = sysv.row(row.name)
        if now is None or (blank and now.marked):
            return
        age = max(0.0, time.time() - row.changed)
        info = SegmentInfo(
            SegmentRef("sysv", row.name, row.size), None, True, age, None, None, False, now.mode, now.uid
        )
        info = replace(info, problem="nothing is written yet") if blank else _with_header(info, raw)
        # row.changed, not now.changed: our own look at the header is a change too
        alive = now.attached > 0 or (_creator_spared(row) if blank else _spared(info, row.changed))
        if not remove:
            yield replace(info, alive=alive)
        elif not alive:
            sysv.remove(row.name)
            yield replace(info, alive=False)


def _sysv_header(name: str) -> bytes:
    lock = sysv.Lock(name)
    try:
        return lock.read(layout.HEADER_SIZE)
    finally:
        lock.close()


def _creator_spared(row: sysv.Row) -> bool:
    if row.creator == 0:  # not of our pid namespace
        return time.time() - row.changed < GRACE
    return start_ticks(row.creator) is not None

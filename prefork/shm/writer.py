"""A segment in the making: create, fill, publish or abort. Loader only; segment.py is the side of those who read it.

Knows layout, posix and sysv; knows no model. README.md has the rules.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self, TypeAlias

from prefork.errors import SegmentError
from prefork.shm import copying, layout, posix, sysv
from prefork.shm.layout import Header
from prefork.shm.owner import Owner, segment_name
from prefork.shm.segment import Kind, SegmentRef

Bytes: TypeAlias = bytes | bytearray | memoryview

CHUNK = 1 << 20  # read and checksummed while it is in the second-level cache


class _Draft(Protocol):
    view: memoryview

    @property
    def fd(self) -> int | None: ...
    def reclaim(self) -> None: ...
    def finish(self, name: str) -> str: ...
    def close(self) -> None: ...


def create(kind: Kind, sections: Sequence[tuple[str, int]], owner: Owner, generation: int, model: str) -> SegmentWriter:
    """A segment with these sections (name, bytes), all room reserved, ready to be filled. `owner` is the master.

    Raises ConfigError for a bad name, SegmentFull before the first byte when there is no room."""
    header = Header(owner, generation, time.time_ns(), model, layout.place(sections), published=False)
    raw = layout.encode_writing(header)
    draft: _Draft = posix.Draft(header.size) if kind == "posix" else sysv.Draft(header.size)
    draft.view[: layout.HEADER_SIZE] = raw
    return SegmentWriter(kind, draft, header)


class SegmentWriter:
    """One draft: fill every section once, then publish. As a context manager it aborts what was not published, and
    closes what was: until then the writer itself keeps the published segment living."""

    def __init__(self, kind: Kind, draft: _Draft, header: Header) -> None:
        self.kind: Kind = kind
        self.header = header
        self._draft = draft
        self._sums: dict[str, int] = {}
        self._lent: dict[str, memoryview] = {}
        self._open = True

    def fill(self, name: str, source: Bytes | Path | BinaryIO) -> None:
        """Copy a whole section from bytes, a file, or a stream. Raises SegmentError when the length is not the
        section's, or it is filled already."""
        section = self._unfilled(name)
        target = self._draft.view[section.offset : section.offset + section.size]
        with target:
            if isinstance(source, Path):
                with source.open("rb", buffering=0) as stream:
                    crc = _copy(stream, target, name)
            elif isinstance(source, bytes | bytearray | memoryview):
                with memoryview(source).cast("B") as flat:
                    crc = _copy(_Reader(flat), target, name)
            else:
                crc = _copy(source, target, name)
        self._sums[name] = layout.checksum(bytes(section.extent - section.size), crc)

    def copy(self, name: str, source: int, offset: int) -> int:
        """Fill a section with the bytes of the file `source` from `offset`; the section's checksum, up to its extent.

        Raises SegmentError when the file ends before, or the section is filled already."""
        section = self._unfilled(name)
        target = self._draft.fd
        try:
            if target is not None:
                crc = copying.copy(source, offset, target, section.offset, section.size)
            else:
                with self._draft.view[section.offset : section.offset + section.size] as view:
                    crc = copying.read(source, offset, view)
        except SegmentError as e:
            raise SegmentError(f"section {name!r}: {e.message}") from None
        self._sums[name] = layout.checksum(bytes(section.extent - section.size), crc)
        return self._sums[name]

    def buffer(self, name: str) -> memoryview:
        """The section's writable bytes, to be written in place; drop it before `publish`, which checksums it then."""
        section = self._unfilled(name)
        self._lent[name] = self._draft.view[section.offset : section.offset + section.size]
        return self._lent[name]

    def publish(self) -> SegmentRef:
        """Seal the header and make the segment visible. Nobody can write it afterwards.

        Raises SegmentError when a section is not filled, a view of `buffer` is still in use, or the name is taken."""
        self._check_open()
        missing = [s.name for s in self.header.sections if s.name not in self._sums and s.name not in self._lent]
        if missing:
            raise SegmentError(f"segment of model {self.header.model!r}: section {missing[0]!r} is not filled")
        name = segment_name(self.header.owner, self.header.generation, self.header.model)
        try:
            self._release()
            self._draft.reclaim()
            header = self._seal()
            ref = SegmentRef(self.kind, self._draft.finish(name), header.size, layout.seal_of(layout.encode(header)))
        except BufferError as e:
            raise SegmentError(f"segment of model {self.header.model!r}: publish: {e}") from None
        self.header, self._open = header, False
        return ref

    def abort(self) -> None:
        """Remove the draft. Idempotent, and after `publish` without effect on the segment."""
        self._open = False
        with contextlib.suppress(BufferError):
            self._release()
        self._draft.close()

    close = abort

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _seal(self) -> Header:
        view, old = self._draft.view, self.header
        for section in old.sections:
            if section.name in self._lent:
                with view[section.offset : section.offset + section.extent] as whole:
                    self._sums[section.name] = layout.checksum(whole)
        placed = tuple(layout.Section(s.name, s.offset, s.size, self._sums[s.name]) for s in old.sections)
        header = Header(old.owner, old.generation, old.created_ns, old.model, placed)
        raw, state = layout.encode(header), layout.STATE_OFFSET
        view[state + 8 : layout.HEADER_SIZE] = raw[state + 8 :]
        view[state : state + 8] = raw[state : state + 8]  # the last store into the segment
        return header

    def _unfilled(self, name: str) -> layout.Section:
        self._check_open()
        section = self.header.section(name)
        if name in self._sums or name in self._lent:
            raise SegmentError(f"section {name!r} is filled already")
        return section

    def _check_open(self) -> None:
        if not self._open:
            raise SegmentError(f"segment of model {self.header.model!r} is published or aborted already")

    def _release(self) -> None:
        for view in self._lent.values():
            view.release()


class _Reader(io.RawIOBase):
    """A buffer as an unbuffered stream, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        taken = self._data[self._at : self._at + len(target)]
        target[: len(taken)] = taken
        self._at += len(taken)
        return len(taken)


def _copy(source: Any, target: memoryview, name: str) -> int:
    """Fill `target` from an unbuffered or buffered binary stream; the checksum of what was written."""
    crc, at = 0, 0
    while at < len(target):
        with target[at : at + CHUNK] as chunk:
            count = source.readinto(chunk) or 0
            if count == 0:
                raise SegmentError(f"section {name!r}: expected {len(target)} bytes, the source ended after {at}")
            crc = layout.checksum(chunk[:count], crc)
        at += count
    if source.read(1):
        raise SegmentError(f"section {name!r}: expected {len(target)} bytes, the source has more")
    return crc

"""A published segment, read-only, one face for both kinds: refer, attach, verify, hold, retire.

The loader's side, which makes it, is writer.py. The master holds and retires, template and workers attach; README.md
has the rules. Knows layout, posix and sysv; knows no model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, cast

from prefork.errors import SegmentCorrupt, SegmentError
from prefork.shm import layout, posix, sysv
from prefork.shm.layout import Header

Kind: TypeAlias = Literal["posix", "sysv"]


class _Attachment(Protocol):
    size: int
    view: memoryview

    def close(self) -> None: ...


@dataclass(frozen=True)
class SegmentRef:
    """Where a published segment is. `name`: file name in /dev/shm, or the decimal shmid. `seal`: the header's own
    checksum, which covers the sections' checksums: another segment under the same name is not taken for this one."""

    kind: Kind
    name: str
    size: int
    seal: int | None = field(default=None, compare=False)  # a listing does not know it

    def to_dict(self) -> dict[str, str | int | None]:
        return {"kind": self.kind, "name": self.name, "size": self.size, "seal": self.seal}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Raises SegmentError for anything that `to_dict` cannot have given."""
        kind, name, size = raw.get("kind"), raw.get("name"), raw.get("size")
        seal = raw.get("seal")
        if kind not in ("posix", "sysv") or not isinstance(name, str) or {type(size), type(seal)} - {int, type(None)}:
            raise SegmentError(f"segment reference: expected kind posix or sysv, name, size, seal; found {raw!r}")
        if size is None:
            raise SegmentError(f"segment reference: expected a size, found {raw!r}")
        return cls(cast(Kind, kind), name, size, seal)

    @property
    def path(self) -> str | None:
        """The file behind a POSIX segment; a System V segment has none."""
        return posix.path_of(self.name) if self.kind == "posix" else None

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


class Segment:
    """A published segment, attached read-only. Writing through a view raises TypeError, writing the memory SIGSEGV."""

    def __init__(self, ref: SegmentRef, attachment: _Attachment, header: Header) -> None:
        self.ref = ref
        self.header = header
        self._attachment = attachment

    @property
    def path(self) -> str | None:
        return self.ref.path

    def section(self, name: str) -> memoryview:
        """Its bytes, read-only, valid until `close`. Raises SegmentCorrupt when there is none of that name."""
        section = self.header.section(name)
        return self._attachment.view[section.offset : section.offset + section.size]

    def verify(self, names: Collection[str] = ()) -> None:
        """Read every byte of these sections, or of all, against its checksum. Raises SegmentCorrupt naming one."""
        layout.verify(self._attachment.view, self.header, str(self.ref), names)

    def close(self) -> None:
        """Unmap. Idempotent. Raises SegmentError while a view of a section is in use."""
        try:
            self._attachment.close()
        except BufferError as e:
            raise SegmentError(f"segment {self.ref}: close: {e}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def attach(ref: SegmentRef, *, expect_generation: int | None = None) -> Segment:
    """Map a published segment read-only, its header checked; its sections only by `Segment.verify`.

    Raises SegmentMissing when it is gone or was not published, SegmentCorrupt naming the field that does not hold."""
    attachment: _Attachment = posix.Attachment(ref.name) if ref.kind == "posix" else sysv.Attachment(ref.name)
    try:
        header = _check(ref, bytes(attachment.view[: layout.HEADER_SIZE]), attachment.size)
        if expect_generation is not None and header.generation != expect_generation:
            raise SegmentCorrupt(f"segment {ref}: generation: expected {expect_generation}, found {header.generation}")
    except BaseException:
        attachment.close()
        raise
    return Segment(ref, attachment, header)


class Hold:
    """What keeps a segment living in the eyes of other masters, for as long as this process or a fork of it lives."""

    def __init__(self, ref: SegmentRef, lock: posix.Lock | sysv.Lock, header: Header) -> None:
        self.ref = ref
        self.header = header
        self._lock = lock

    def release(self) -> None:
        """Idempotent. A System V segment is gone once nobody else is attached."""
        self._lock.close()


def hold(ref: SegmentRef) -> Hold:
    """Keep a published segment living; reads its header only. The master calls this while the loader still lives, or
    at the latest right after.

    A System V segment is marked so that the kernel removes it with the last process; it can still be attached.
    Raises SegmentMissing, SegmentCorrupt like `attach`."""
    lock = posix.Lock(ref.name) if ref.kind == "posix" else sysv.Lock(ref.name)
    try:
        header = _check(ref, lock.read(layout.HEADER_SIZE), lock.size)
        if isinstance(lock, sysv.Lock):
            lock.mark()
    except BaseException:
        lock.close()
        raise
    return Hold(ref, lock, header)


def retire(ref: SegmentRef) -> None:
    """Remove the name: nobody new can find the segment, those attached keep it. Idempotent.

    A System V segment that is not like `ref` is left alone: its id may be another's by now."""
    if ref.kind == "posix":
        posix.remove(ref.name)
        return
    row = sysv.row(ref.name)
    if row is not None and row.ours and not row.marked and row.size == ref.size:
        sysv.remove(ref.name)


def _check(ref: SegmentRef, raw: bytes, size: int) -> Header:
    if size != ref.size:
        raise SegmentCorrupt(f"segment {ref}: size: expected {ref.size}, found {size}")
    header = layout.decode(raw, size, str(ref))
    if ref.seal is not None and (found := layout.seal_of(raw)) != ref.seal:
        raise SegmentCorrupt(f"segment {ref}: seal: expected {ref.seal:08x}, found {found:08x}: another segment")
    return header

"""The bytes of a segment: header, table of contents, alignment, checksums. Pure struct: no file, no process, no clock.

    0      header, 4096 bytes, ends with its own checksum
    4096   zeros
    65536  sections in the order of the table of contents, each on a multiple of ALIGN, the gaps zero

All integers are little-endian. ALIGN is 64 KiB because a mapping must start on a page, and aarch64 kernels have pages
of up to 64 KiB. The checksum is CRC-32 (zlib): the fastest that the standard library has (README.md has the figures),
and any single overwritten range of up to 4 bytes is always caught, any other damage but for one case in 2^32. It
guards against accidents, not against someone who may write the segment: only its own user can do that.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from prefork.errors import ConfigError, SegmentCorrupt, SegmentMissing
from prefork.shm.owner import Owner

HEADER_SIZE = 4096
ALIGN = 65536
FIRST_SECTION_OFFSET = ALIGN
MAX_SECTIONS = 16
FORMAT_VERSION = 1
MAGIC = b"PREFORK\x1a"
WRITING = b"writing."
PUBLISHED = b"PUBLISH!"
CRC32 = 1
STATE_OFFSET = 8

_FIXED = struct.Struct("<8s8sIIIIQQQQQQ256s")  # up to and with the model's name
_ENTRY = struct.Struct("<40sQQQ")
_TABLE_OFFSET = 512
_CRC = struct.Struct("<I")
_CRC_OFFSET = HEADER_SIZE - _CRC.size
_ZEROS = bytes(FIRST_SECTION_OFFSET - HEADER_SIZE)
_U64 = 1 << 64


@dataclass(frozen=True)
class Section:
    """`offset` from the segment's start and `size` in bytes. `checksum` covers the bytes up to the next multiple of
    ALIGN, so that every byte of a segment is under some checksum."""

    name: str
    offset: int
    size: int
    checksum: int = 0

    @property
    def extent(self) -> int:
        return align(self.size)


@dataclass(frozen=True)
class Header:
    owner: Owner
    generation: int
    created_ns: int  # Unix time
    model: str
    sections: tuple[Section, ...]
    published: bool = True

    @property
    def size(self) -> int:
        """Of the whole segment."""
        return FIRST_SECTION_OFFSET + sum(section.extent for section in self.sections)

    def section(self, name: str) -> Section:
        """Raises SegmentCorrupt when there is none of that name."""
        for section in self.sections:
            if section.name == name:
                return section
        found = ", ".join(repr(section.name) for section in self.sections)
        raise SegmentCorrupt(f"segment of model {self.model!r}: no section {name!r}, found {found or 'none'}")


def align(size: int) -> int:
    return (size + ALIGN - 1) // ALIGN * ALIGN


def place(sections: Iterable[tuple[str, int]]) -> tuple[Section, ...]:
    """Offsets for sections of the given (name, size), in their order. Raises ConfigError for a bad name or size."""
    placed: list[Section] = []
    offset = FIRST_SECTION_OFFSET
    for name, size in sections:
        if not (name.isascii() and name.isprintable() and 0 < len(name) <= 40):
            raise ConfigError(f"section name {name!r}: expected 1 to 40 printable ASCII characters")
        if any(name == other.name for other in placed):
            raise ConfigError(f"section name {name!r} is given twice")
        if not 0 <= size < _U64 // 4:
            raise ConfigError(f"section {name!r}: size {size} is out of range")
        placed.append(Section(name, offset, size))
        offset += align(size)
    if len(placed) > MAX_SECTIONS:
        raise ConfigError(f"a segment holds at most {MAX_SECTIONS} sections, found {len(placed)}")
    return tuple(placed)


def check_model(model: str) -> bytes:
    """The model's name as the header holds it. Raises ConfigError."""
    try:
        raw = model.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"model name {model!r} cannot be written as UTF-8") from None
    if not raw or len(raw) > 256 or not model.isprintable():
        raise ConfigError(f"model name {model!r}: expected 1 to 256 bytes of printable UTF-8, found {len(raw)} bytes")
    return raw


def checksum(data: bytes | memoryview, start: int = 0) -> int:
    return zlib.crc32(data, start)


def encode(header: Header) -> bytes:
    """The header as it is once published: HEADER_SIZE bytes with state PUBLISHED. Raises ConfigError."""
    owner, raw = header.owner, bytearray(HEADER_SIZE)
    _FIXED.pack_into(
        raw, 0, MAGIC, PUBLISHED, FORMAT_VERSION, HEADER_SIZE, CRC32, len(header.sections), header.size,
        owner.pid, owner.start, owner.namespace, header.generation, header.created_ns, check_model(header.model),
    )  # fmt: skip
    for index, section in enumerate(header.sections):
        entry = (section.name.encode("ascii"), section.offset, section.size, section.checksum)
        _ENTRY.pack_into(raw, _TABLE_OFFSET + index * _ENTRY.size, *entry)
    _CRC.pack_into(raw, _CRC_OFFSET, checksum(bytes(raw[:_CRC_OFFSET])))
    return bytes(raw)


def seal_of(raw: bytes) -> int:
    """The header's own checksum."""
    return int(_CRC.unpack_from(raw, _CRC_OFFSET)[0])


def encode_writing(header: Header) -> bytes:
    """The same, not published: what stands in a segment while it is being filled."""
    raw = bytearray(encode(header))
    raw[STATE_OFFSET : STATE_OFFSET + len(WRITING)] = WRITING
    return bytes(raw)


def decode(raw: bytes, size: int, what: str, *, unpublished: bool = False) -> Header:
    """The header of a segment `what` whose real size is `size` bytes, after checking every field.

    Raises SegmentMissing when it was never published (accepted with `unpublished`), else SegmentCorrupt naming the
    field, what was expected and what was found."""
    if len(raw) != HEADER_SIZE or size < HEADER_SIZE:
        raise SegmentCorrupt(f"segment {what}: size: expected at least {HEADER_SIZE} bytes, found {size}")
    fixed = _FIXED.unpack_from(raw)
    magic, state, version, header_size, algorithm, count, total = fixed[:7]
    _expect(what, "magic", MAGIC, magic)
    if state not in (WRITING, PUBLISHED):
        raise SegmentCorrupt(f"segment {what}: state: expected {PUBLISHED!r}, found {state!r}")
    if state == WRITING and not unpublished:
        raise SegmentMissing(f"segment {what} was never published")
    _expect(what, "format version", FORMAT_VERSION, version)
    sealed = raw[:STATE_OFFSET] + PUBLISHED + raw[STATE_OFFSET + 8 : _CRC_OFFSET]
    _expect(what, "header checksum", checksum(sealed), _CRC.unpack_from(raw, _CRC_OFFSET)[0])
    _expect(what, "header size", HEADER_SIZE, header_size)
    _expect(what, "checksum algorithm", CRC32, algorithm)
    if count > MAX_SECTIONS:
        raise SegmentCorrupt(f"segment {what}: section count: expected at most {MAX_SECTIONS}, found {count}")
    sections = _decode_table(raw, count, what)
    owner = Owner(*fixed[7:10])
    header = Header(owner, fixed[10], fixed[11], _decode_model(fixed[12], what), sections, state == PUBLISHED)
    _expect(what, "total size", header.size, total)
    _expect(what, "size", total, size)
    return header


def verify(view: memoryview, header: Header, what: str, names: Collection[str] = ()) -> None:
    """Read every byte of the segment `view`, or of the sections `names`, against its checksums. Raises SegmentCorrupt
    naming the section."""
    if view[HEADER_SIZE:FIRST_SECTION_OFFSET] != _ZEROS:
        raise SegmentCorrupt(f"segment {what}: bytes {HEADER_SIZE} to {FIRST_SECTION_OFFSET} are not zero")
    for section in header.sections:
        if names and section.name not in names:
            continue
        found = checksum(view[section.offset : section.offset + section.extent])
        _expect(what, f"section {section.name!r} checksum", section.checksum, found)


def _expect(what: str, field: str, expected: object, found: object) -> None:
    if expected != found:
        raise SegmentCorrupt(f"segment {what}: {field}: expected {expected!r}, found {found!r}")


def _decode_table(raw: bytes, count: int, what: str) -> tuple[Section, ...]:
    entries: list[tuple[str, int, int, int]] = []
    for index in range(count):
        name, offset, size, crc = _ENTRY.unpack_from(raw, _TABLE_OFFSET + index * _ENTRY.size)
        entries.append((name.rstrip(b"\0").decode("ascii", "replace"), offset, size, crc))
    try:
        placed = place([(name, size) for name, _, size, _ in entries])
    except ConfigError as e:
        raise SegmentCorrupt(f"segment {what}: table of contents: {e.message}") from None
    return tuple(_match(what, section, entry) for section, entry in zip(placed, entries, strict=True))


def _match(what: str, section: Section, entry: tuple[str, int, int, int]) -> Section:
    _expect(what, f"section {section.name!r} offset", section.offset, entry[1])
    return Section(section.name, section.offset, section.size, entry[3])


def _decode_model(raw: bytes, what: str) -> str:
    try:
        model = raw.rstrip(b"\0").decode()
        check_model(model)
    except (UnicodeDecodeError, ConfigError) as e:
        raise SegmentCorrupt(f"segment {what}: model name: {e}") from None
    return model


def section_sizes(sections: Sequence[tuple[str, int]]) -> int:
    """Bytes that a segment of these sections takes."""
    return FIRST_SECTION_OFFSET + sum(align(size) for _, size in sections)

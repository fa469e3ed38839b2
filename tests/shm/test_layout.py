"""The header's bytes: what is written is read back, and nothing damaged or forged is accepted."""

from __future__ import annotations

import struct

import pytest

from prefork.errors import ConfigError, SegmentCorrupt, SegmentMissing
from prefork.shm import layout
from prefork.shm.layout import Header, Section, decode, encode, encode_writing, place
from prefork.shm.owner import Owner, parse_name, segment_name

OWNER = Owner(4321, 987654, 4026531836)
HEADER = Header(OWNER, 3, 1_700_000_000_000_000_000, "modèle/é", place([("weights", 70000), ("graph", 0), ("m", 1)]))


def forge(offset: int, data: bytes) -> bytes:
    """HEADER with other bytes and a checksum that agrees."""
    raw = bytearray(encode(HEADER))
    raw[offset : offset + len(data)] = data
    raw[-4:] = struct.pack("<I", layout.checksum(bytes(raw[:-4])))
    return bytes(raw)


def test_round_trip() -> None:
    assert decode(encode(HEADER), HEADER.size, "s") == HEADER
    assert HEADER.size == layout.FIRST_SECTION_OFFSET + 2 * 65536 + 65536
    assert [section.offset for section in HEADER.sections] == [65536, 196608, 196608]
    assert layout.section_sizes([("weights", 70000), ("graph", 0), ("m", 1)]) == HEADER.size


def test_unpublished_is_missing() -> None:
    with pytest.raises(SegmentMissing, match="never published"):
        decode(encode_writing(HEADER), HEADER.size, "s")
    assert not decode(encode_writing(HEADER), HEADER.size, "s", unpublished=True).published


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_is_found(mask: int) -> None:
    good = encode(HEADER)
    for index in range(layout.HEADER_SIZE):
        raw = bytearray(good)
        raw[index] ^= mask
        with pytest.raises(SegmentCorrupt):
            decode(bytes(raw), HEADER.size, "s")


@pytest.mark.parametrize(
    ("offset", "data", "field"),
    [
        (0, b"X", "magic"),
        (8, b"HALFWAY!", "state"),
        (16, struct.pack("<I", 2), "format version"),
        (20, struct.pack("<I", 8192), "header size"),
        (24, struct.pack("<I", 9), "checksum algorithm"),
        (28, struct.pack("<I", 17), "section count"),
        (28, struct.pack("<I", 2**32 - 1), "section count"),
        (28, struct.pack("<I", 4), "table of contents"),  # the fourth entry is empty
        (28, struct.pack("<I", 1), "total size"),
        (32, struct.pack("<Q", 2**63), "total size"),
        (80, b"\xff\xfe", "model name"),
        (80, bytes(256), "model name"),
        (512, b"graph\0\0", "table of contents"),  # twice
        (512, b"\x01", "table of contents"),
        (552, struct.pack("<Q", 0), "section 'weights' offset"),
        (552, struct.pack("<Q", 2**64 - 65536), "section 'weights' offset"),
        (560, struct.pack("<Q", 2**64 - 1), "table of contents"),
        (560, struct.pack("<Q", 2**40), "section 'graph' offset"),
    ],
)
def test_forged_fields_are_named(offset: int, data: bytes, field: str) -> None:
    with pytest.raises(SegmentCorrupt, match=field):
        decode(forge(offset, data), HEADER.size, "s")


def test_real_size_must_agree() -> None:
    with pytest.raises(SegmentCorrupt, match=f"size: expected {HEADER.size}, found {HEADER.size - 1}"):
        decode(encode(HEADER), HEADER.size - 1, "s")
    with pytest.raises(SegmentCorrupt, match="size: expected at least 4096 bytes, found 100"):
        decode(encode(HEADER)[:100], 100, "s")


@pytest.mark.parametrize(
    "sections",
    [[("", 1)], [("é", 1)], [("a" * 41, 1)], [("a", 1), ("a", 2)], [("a", -1)], [(f"s{i}", 1) for i in range(17)]],
)
def test_bad_sections_are_refused(sections: list[tuple[str, int]]) -> None:
    with pytest.raises(ConfigError):
        place(sections)


@pytest.mark.parametrize("model", ["", "a\nb", "a\0", "é" * 129, "\ud800"])
def test_bad_model_names_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="model name"):
        encode(Header(OWNER, 1, 1, model, ()))


def test_missing_section_is_named() -> None:
    assert HEADER.section("graph") == Section("graph", 196608, 0)
    with pytest.raises(SegmentCorrupt, match=r"no section 'x', found 'weights', 'graph', 'm'"):
        HEADER.section("x")


def test_names() -> None:
    name = segment_name(OWNER, 3, "modèle/é ..")
    parts = parse_name(name)
    assert parts is not None
    assert (parts.owner.pid, parts.owner.start, parts.generation, parts.model) == (
        4321,
        987654,
        3,
        "mod_le__ ..".replace(" ", "_"),
    )
    assert segment_name(OWNER, 3, "a/b") != segment_name(OWNER, 3, "a_b")
    assert len(segment_name(OWNER, 2**63, "x" * 256)) < 255
    for bad in ("prefork-", "prefork-1-2-g3-../x-00000000", name + "x", "prefork-0-1-g1-a-00000000", "x" + name):
        assert parse_name(bad) is None

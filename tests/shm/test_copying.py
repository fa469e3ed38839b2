"""Sections copied from a file: both kinds, and files that end too early or cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefork.errors import SegmentError
from prefork.shm import copying, layout
from prefork.shm.owner import Owner
from prefork.shm.segment import Kind, attach, retire
from prefork.shm.writer import create


@pytest.mark.parametrize("size", [0, 1, layout.ALIGN, copying.CHUNK, 2 * copying.CHUNK + 12345])
def test_a_section_is_copied_from_the_middle_of_a_file(kind: Kind, model: str, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    file = tmp_path / "file"
    file.write_bytes(b"before" + data + b"behind")
    with (
        file.open("rb") as source,
        create(kind, [("a", 3), ("copied", size)], Owner.current(), 1, model) as writer,
    ):
        writer.fill("a", b"abc")
        checksum = writer.copy("copied", source.fileno(), len(b"before"))
        ref = writer.publish()
        with attach(ref) as segment:
            segment.verify()
            assert segment.section("copied") == data and segment.header.section("copied").checksum == checksum
        retire(ref)


def test_a_file_that_ends_too_early(kind: Kind, model: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(copying.CHUNK + 5))
    with file.open("rb") as source, create(kind, [("c", copying.CHUNK + 9)], Owner.current(), 1, model) as writer:
        with pytest.raises(SegmentError, match=f"section 'c': expected {copying.CHUNK + 9} bytes of a file, found "):
            writer.copy("c", source.fileno(), 0)
        with pytest.raises(SegmentError, match="section 'c' is not filled"):
            writer.publish()


def test_a_file_that_cannot_be_read(model: str, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with (
            create("posix", [("c", 10)], Owner.current(), 1, model) as writer,
            pytest.raises(SegmentError, match="'c'"),
        ):
            writer.copy("c", fd, 0)
    finally:
        os.close(fd)

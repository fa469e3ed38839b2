"""Sections copied from a file, and a segment verified beside the work of opening it: both kinds, every fault."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from prefork.errors import SegmentCorrupt, SegmentError
from prefork.shm import copying, layout
from prefork.shm.owner import Owner
from prefork.shm.segment import Kind, SegmentRef, attach, retire
from prefork.shm.writer import create

Overwrite = Callable[[int, bytes], bytes]


def threads() -> list[str]:
    """Those of the room that still live."""
    return [thread.name for thread in threading.enumerate() if thread.name in ("copier", "verify")]


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
        with pytest.raises(SegmentError, match=f"section 'c': expected {copying.CHUNK + 9} bytes from offset 0: "):
            writer.copy("c", source.fileno(), 0)
        with pytest.raises(SegmentError, match="section 'c' is not filled"):
            writer.publish()
    assert threads() == []


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


def test_verifying_beside_the_block(published: SegmentRef) -> None:
    with attach(published) as segment:
        names = [section.name for section in segment.header.sections]
        with segment.verifying(names[0]):
            assert segment.section(names[0])
        assert threads() == []


def test_what_is_wrong_beside_the_block_is_told_at_its_end(published: SegmentRef, overwrite: Overwrite) -> None:
    with attach(published) as segment:
        first, *_, last = [section for section in segment.header.sections if section.size]
        assert first.name != last.name
        overwrite(last.offset, b"\xff\xfe\xfd")
        done = []
        with pytest.raises(SegmentCorrupt, match=f"section '{last.name}' checksum"), segment.verifying(first.name):
            done.append(1)
        with pytest.raises(SegmentCorrupt, match="checksum"), segment.verifying(first.name):
            raise ValueError("what wrong bytes lead to")
        with pytest.raises(SegmentCorrupt, match=f"section '{last.name}' checksum"), segment.verifying(last.name):
            done.append(2)
        assert done == [1] and threads() == []

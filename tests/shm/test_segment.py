"""A segment's life in one and several processes, both kinds."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefork.errors import SegmentCorrupt, SegmentError, SegmentMissing
from prefork.shm import layout, posix
from prefork.shm.owner import Owner
from prefork.shm.segment import Kind, SegmentRef, attach, hold, retire
from prefork.shm.sweep import list_segments
from prefork.shm.writer import CHUNK, SegmentWriter, create

Overwrite = Callable[[int, bytes], bytes]


def writer_of(kind: Kind, model: str, *sections: tuple[str, int]) -> SegmentWriter:
    return create(kind, sections, Owner.current(), 1, model)


def test_round_trip_from_every_source(kind: Kind, model: str, tmp_path: Path) -> None:
    big = os.urandom(2 * CHUNK + 12345)
    file = tmp_path / "weights"
    file.write_bytes(big)
    sections = [("path", len(big)), ("bytes", 3), ("stream", len(big)), ("place", 70000), ("empty", 0)]
    with writer_of(kind, model, *sections) as writer:
        writer.fill("path", file)
        writer.fill("bytes", b"abc")
        writer.fill("stream", io.BytesIO(big))
        writer.fill("empty", b"")
        view = writer.buffer("place")
        view[:] = big[:70000]
        ref = writer.publish()
        held = hold(SegmentRef.from_dict(json.loads(json.dumps(ref.to_dict()))))
    with attach(ref, expect_generation=1) as segment:
        segment.verify()
        assert segment.header.model == model
        assert segment.header.section("path").offset == layout.FIRST_SECTION_OFFSET
        assert segment.section("path") == segment.section("stream") == big
        assert bytes(segment.section("bytes")) == b"abc"
        assert segment.section("place") == big[:70000]
        assert len(segment.section("empty")) == 0
        assert segment.path == (f"/dev/shm/{ref.name}" if kind == "posix" else None)
    held.release()
    retire(ref)
    retire(ref)
    with pytest.raises(SegmentMissing):
        attach(ref)
    with pytest.raises(SegmentMissing):
        hold(ref)


def test_another_process_reads_it(published: SegmentRef, start: Callable[..., Any]) -> None:
    actor = start(
        """
        ref = SegmentRef(kind, sys.argv[3], int(sys.argv[4]))
        segment = attach(ref, expect_generation=7)
        segment.verify()
        say(segment.header.model == model, bytes(segment.section("manifest")) == bytes([8]) * 17, segment.path)
        """,
        published.kind, published.name, str(published.size),
    )  # fmt: skip
    assert actor.line() == f"True True {published.path}"
    assert actor.end() == 0


def test_views_are_read_only(published: SegmentRef) -> None:
    with attach(published) as segment, segment.section("weights") as view:
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1


def test_cores_leave_it_out(published: SegmentRef) -> None:
    name = published.path or f"/SYSV{0x5046:04x}"
    with attach(published):
        entries = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
        read_only = [entry for entry in entries if name in entry and " r--s " in entry.partition("\n")[0]]
        assert any(re.search(r"^VmFlags:.* dd\b", entry, re.M) for entry in read_only)


def test_a_raw_write_kills_the_writer(published: SegmentRef, start: Callable[..., Any]) -> None:
    actor = start(
        """
        import ctypes, re
        segment = attach(SegmentRef(kind, sys.argv[3], int(sys.argv[4])))
        if kind == "sysv":
            address = segment._attachment._memory.address
        else:
            maps = Path("/proc/self/maps").read_text()
            address = int(re.search(r"([0-9a-f]+)-.*" + re.escape(sys.argv[3]), maps)[1], 16)
        at = address + segment.header.section("weights").offset
        say(ctypes.c_ubyte.from_address(at).value)
        ctypes.c_ubyte.from_address(at).value = 1
        say("alive")
        """,
        published.kind, published.name, str(published.size),
    )  # fmt: skip
    assert actor.line() == "7"
    assert actor.end() == -signal.SIGSEGV
    with attach(published) as segment:
        segment.verify()


def test_every_flipped_header_byte_is_refused(published: SegmentRef, overwrite: Overwrite) -> None:
    for offset in range(layout.HEADER_SIZE):
        old = overwrite(offset, b"\0")
        overwrite(offset, bytes([old[0] ^ 0xFF]))
        for look in (attach, hold):
            with pytest.raises(SegmentCorrupt):
                look(published)
        overwrite(offset, old)
    with attach(published) as segment:
        segment.verify()


@pytest.mark.parametrize(
    ("offset", "where"),
    [
        (4096, "bytes 4096 to 65536"), (65535, "bytes 4096 to 65536"), (65536, "'weights'"), (265535, "'weights'"),
        (265536, "'weights'"), (327679, "'weights'"), (327680, "'graph'"), (393216, "'manifest'"),
        (458751, "'manifest'"),
    ],
)  # fmt: skip
def test_an_overwritten_byte_is_found(published: SegmentRef, overwrite: Overwrite, offset: int, where: str) -> None:
    assert published.size == 458752
    old = overwrite(offset, b"\x55")
    with attach(published) as segment, pytest.raises(SegmentCorrupt, match=where):
        segment.verify()
    overwrite(offset, old)
    with attach(published) as segment:
        segment.verify()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 65536, 458751, 458753])
def test_another_size_is_refused(model: str, size: int) -> None:
    with writer_of("posix", model, ("a", 300000)) as writer:
        writer.fill("a", bytes(300000))
        ref = writer.publish()
        os.truncate(posix.path_of(ref.name), size)
        for given in (ref, SegmentRef("posix", ref.name, size)):
            for look in (attach, hold):
                with pytest.raises(SegmentCorrupt, match="size"):
                    look(given)
    retire(ref)


def test_a_wrong_generation_is_refused(published: SegmentRef) -> None:
    with pytest.raises(SegmentCorrupt, match="generation: expected 8, found 7"):
        attach(published, expect_generation=8)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "/etc/passwd", "prefork-x", "0x1", "-1", "٣", "99999999999"])
def test_names_that_are_none(kind: Kind, name: str) -> None:
    for look in (attach, hold):
        with pytest.raises(SegmentMissing):
            look(SegmentRef(kind, name, 65536))


@pytest.mark.parametrize("raw", [{}, {"kind": "x", "name": "a", "size": 1}, {"kind": "posix", "name": 1, "size": 1},
                                 {"kind": "sysv", "name": "1", "size": True}])  # fmt: skip
def test_references_that_are_none(raw: dict[str, Any]) -> None:
    with pytest.raises(SegmentError):
        SegmentRef.from_dict(raw)


@pytest.mark.parametrize(("data", "words"), [(b"ab", "ended after 2"), (b"abcd", "has more")])
def test_sources_of_another_length(kind: Kind, model: str, data: bytes, words: str) -> None:
    with writer_of(kind, model, ("a", 3)) as writer:
        for source in (data, io.BytesIO(data)):
            with pytest.raises(SegmentError, match=words):
                writer.fill("a", source)
        with pytest.raises(SegmentError, match="'a' is not filled"):
            writer.publish()
    assert [info for info in list_segments() if info.model == model] == []


def test_a_section_is_filled_once(kind: Kind, model: str) -> None:
    with writer_of(kind, model, ("a", 3), ("b", 3)) as writer:
        writer.fill("a", b"abc")
        with pytest.raises(SegmentError, match="'a' is filled already"):
            writer.fill("a", b"abc")
        with pytest.raises(SegmentError, match="'a' is filled already"):
            writer.buffer("a")
        with pytest.raises(SegmentError, match="no section 'c'"):
            writer.fill("c", b"")


def test_nobody_writes_after_publish(kind: Kind, model: str) -> None:
    with writer_of(kind, model, ("a", 3)) as writer:
        view = writer.buffer("a")
        view[:] = b"abc"
        inner = view[1:]
        with pytest.raises(SegmentError, match="publish"):
            writer.publish()
        assert [info.published for info in list_segments() if info.model == model] in ([], [False])
        inner.release()
        ref = writer.publish()
        with pytest.raises(ValueError, match="released"):
            view[0] = 1
        with pytest.raises(SegmentError, match="published or aborted"):
            writer.fill("a", b"abc")
        with attach(ref) as segment:
            segment.verify()
            assert bytes(segment.section("a")) == b"abc"
    retire(ref)


def test_an_abort_with_a_view_in_use_is_safe(kind: Kind, start: Callable[..., Any]) -> None:
    actor = start(
        """
        writer = create(kind, sections, Owner.current(), 1, model)
        inner = writer.buffer("weights")[1:]
        writer.abort()
        inner[0] = 5  # the memory must still be there
        say(inner[0], [info.ref for info in list_segments() if info.model == model and info.published])
        """,
        kind,
    )
    assert actor.line() == "5 []"
    assert actor.end() == 0


def test_close_refuses_while_a_view_lives(published: SegmentRef) -> None:
    segment = attach(published)
    view = segment.section("weights")
    with pytest.raises(SegmentError, match="close"):
        segment.close()
    assert view[0] == 7
    view.release()
    segment.close()
    segment.close()


def test_a_taken_name_is_an_error(model: str) -> None:
    with writer_of("posix", model, ("a", 3)) as first, writer_of("posix", model, ("a", 3)) as second:
        first.fill("a", b"abc")
        second.fill("a", b"xyz")
        ref = first.publish()
        with pytest.raises(SegmentError, match="exists already"):
            second.publish()
    with attach(ref) as segment:
        assert bytes(segment.section("a")) == b"abc"
    retire(ref)


def test_unpublished_is_never_accepted(model: str) -> None:
    with writer_of("sysv", model, ("a", 3)) as writer:
        (info,) = [info for info in list_segments() if info.model == model]
        assert not info.published
        for look in (attach, hold):
            with pytest.raises(SegmentMissing, match="never published"):
                look(info.ref)
        writer.fill("a", b"abc")


def test_retired_segments_stay_for_those_attached(kind: Kind, model: str) -> None:
    with writer_of(kind, model, ("a", 3)) as writer:
        writer.fill("a", b"abc")
        ref = writer.publish()
        held = hold(ref)
    segment = attach(ref)
    retire(ref)
    held.release()
    segment.verify()
    assert bytes(segment.section("a")) == b"abc"
    segment.close()
    with pytest.raises(SegmentMissing):
        attach(ref)


def test_mode_is_private(published: SegmentRef) -> None:
    (info,) = [info for info in list_segments() if info.ref == published]
    assert (info.mode, info.uid, info.owner, info.alive) == (0o600, os.geteuid(), Owner.current(), True)
    assert (info.generation, info.published, info.problem) == (7, True, "")

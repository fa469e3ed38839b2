"""The cache under real servers: a second start copies, and whatever is damaged or in the way costs only time."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefork.cache import PLACE_BYTES, Cache
from prefork.client import Client
from prefork.demo import model_path
from prefork.log import setup
from prefork.shm import layout, segment
from tests.roles.server import Server
from tests.roles.watch import until
from tests.roles.wire import IMAGE

REMOVED, UNUSED = "cached model removed", "serving without the cache"


@pytest.fixture
def cache(place: Path) -> Path:
    return place / "cache"


def start(place: Path, cache: Path, *args: str) -> Server:
    """A server of its own, in a folder of its own."""
    folder = place / f"s{len(list(place.iterdir()))}"
    folder.mkdir()
    return Server(folder, "--workers", "1", "--cache-dir", str(cache), *args)


def origin(server: Server) -> str:
    """Where its only model came from."""
    (line,) = [line for line in server.log() if line["event"] == "segment published"]
    return str(line["origin"])


def events(server: Server) -> list[str]:
    return [line["event"] for line in server.log()]


def answer(server: Server, model: str = "digits") -> dict[str, bytes]:
    with Client(server.address, retries=0) as client:
        found = client.infer(model, {"image": IMAGE})
    return {name: np.asarray(value).tobytes() for name, value in found.items()}


def sections(server: Server) -> dict[str, bytes]:
    """The segment's, without the names of this server."""
    row: dict[str, Any] = server.status()["models"][0]
    with segment.attach(segment.SegmentRef.from_dict(row["segment"])) as attached:
        attached.verify()
        weights = attached.section("weights")
        graph = attached.section("graph")
        place = "." + row["segment"]["name"].rjust(PLACE_BYTES - 1, "/")
        assert bytes(graph).count(place.encode()) > 0
        found = {"weights": bytes(weights), "graph": bytes(graph).replace(place.encode(), b"")}
        for view in (weights, graph):
            view.release()
    return found


def entries(cache: Path) -> list[Path]:
    """All that the cache holds, but for hints."""
    return sorted(path for path in cache.iterdir() if path.name != "sources")


def is_whole(path: Path, place: Path) -> bool:
    entry = Cache(path.parent, 1 << 40, setup("error", "json", place / "log")).find(path.stem)
    if entry is None:
        return False
    with entry:
        entry.verify()
    return True


def first(place: Path, cache: Path, *args: str) -> tuple[dict[str, bytes], Path]:
    """A start that fills the cache; its answer, and the entry."""
    with start(place, cache, *args) as server:
        assert origin(server) == "file" and "preparing" in events(server)
        found = answer(server)
    (entry,) = entries(cache)
    return found, entry


@pytest.mark.parametrize("args", [(), ("--shm", "sysv"), ("--quantize", "int8")], ids=["posix", "sysv", "int8"])
def test_a_second_start_copies(place: Path, cache: Path, args: tuple[str, ...]) -> None:
    expected, entry = first(place, cache, *args)
    before = entry.stat()
    with start(place, cache, *args) as server:
        assert origin(server) == "cache" and "preparing" not in events(server)
        assert answer(server) == expected
        assert server.status()["models"][0]["origin"] == "cache"
    after = entry.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size) and after.st_mtime_ns > before.st_mtime_ns


def test_the_copy_is_the_segment_that_was_made(place: Path, cache: Path) -> None:
    with start(place, cache) as server:
        made = sections(server)
    with start(place, cache) as server:
        copied = sections(server)
    assert made["weights"] and made == copied


def test_one_entry_serves_under_any_name_and_path(place: Path, cache: Path) -> None:
    expected, entry = first(place, cache)
    copy = place / "copy.onnx"
    shutil.copy(model_path(), copy)
    with start(place, cache, f"--model=other={copy}") as server:
        assert origin(server) == "cache" and answer(server, "other") == expected
        (row,) = server.status()["models"]
        assert (row["name"], row["source"]) == ("other", str(copy))
    assert entries(cache) == [entry]


def test_another_option_or_kind_is_prepared_anew(place: Path, cache: Path) -> None:
    first(place, cache)
    for args in (("--quantize", "int8"), ("--shm", "sysv")):
        with start(place, cache, *args) as server:
            assert origin(server) == "file"
    assert len(entries(cache)) == 3


def test_another_content_of_the_model_is_prepared_anew(place: Path, cache: Path) -> None:
    copy = place / "m.onnx"
    shutil.copy(model_path(), copy)
    first_model = f"--model=digits={copy}"
    expected, _ = first(place, cache, first_model)
    with copy.open("ab") as file:  # an unknown field of one byte: another file, the same model
        file.write(b"\xf8\x3f\x01")
    with start(place, cache, first_model) as server:
        assert origin(server) == "file" and answer(server) == expected
    assert len(entries(cache)) == 2


def spot(entry: Path, where: str, place: Path) -> int:
    """An offset in the file: of the header, or within a section."""
    if where == "header":
        return 30
    found = Cache(entry.parent, 1 << 40, setup("error", "json", place / "log")).find(entry.stem)
    assert found is not None
    with found:
        section = found.section(where)
        return section.offset + section.size // 2


@pytest.mark.parametrize("where", ["header", "weights", "graph", "manifest"])
def test_a_flipped_byte_is_never_served(place: Path, cache: Path, where: str) -> None:
    expected, entry = first(place, cache)
    offset = spot(entry, where, place)
    data = bytearray(entry.read_bytes())
    data[offset] ^= 0x40
    entry.write_bytes(data)
    with start(place, cache) as server:
        (line,) = [line for line in server.log() if line["event"] == REMOVED]
        assert where in line["reason"] and str(entry) == line["path"]
        assert origin(server) == "file" and answer(server) == expected
    assert entries(cache) == [entry] and is_whole(entry, place)
    with start(place, cache) as server:
        assert origin(server) == "cache" and answer(server) == expected


def test_what_a_killed_writer_left_is_swept(place: Path, cache: Path) -> None:
    cache.mkdir(mode=0o700)
    (cache / f"{'a' * 64}.01234567.tmp").write_bytes(b"half an entry")
    (cache / f"{'a' * 64}.lock").write_bytes(b"")  # nobody holds it
    with start(place, cache) as server:
        assert origin(server) == "file"
    assert [path.suffix for path in entries(cache)] == [".model"]


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={layout.ALIGN},mode=0700", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root and mount(2)")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_does_not_stop_a_start(place: Path, cache: Path) -> None:
    with small_disk(cache):
        with start(place, cache) as server:
            assert origin(server) == "file" and answer(server)
        (line,) = [line for line in server.log() if line["event"] == UNUSED]
        assert "No space left on device" in line["reason"] and line["level"] == "warning"
        assert entries(cache) == []


def test_a_cache_that_cannot_be_used_does_not_stop_a_start(place: Path, cache: Path) -> None:
    cache.write_text("a file")
    with start(place, cache) as server:
        assert origin(server) == "file" and answer(server)
        assert [line["reason"] for line in server.log() if line["event"] == UNUSED] != []


def test_a_cache_too_small_for_the_model(place: Path, cache: Path) -> None:
    with start(place, cache, "--cache-size", "1KiB") as server:
        assert origin(server) == "file" and answer(server)
    assert entries(cache) == []
    assert any("cache_size is 1024" in line.get("reason", "") for line in server.log())


def test_two_masters_at_once_prepare_once(place: Path, cache: Path) -> None:
    servers = [start(place, cache), start(place, cache)]
    for server in servers:
        server.launch()
    try:
        found = [_wait_published(server) for server in servers]
    finally:
        for server in servers:
            assert server.stop() == 0
    assert sorted(found) == ["cache", "file"]
    # a loader that is stopped right after it has stored leaves its lock's file, which the next writer removes
    assert [path.suffix for path in entries(cache) if path.suffix != ".lock"] == [".model"]


def _wait_published(server: Server) -> str:
    def look() -> str | None:
        lines = server.log() if server.log_file.exists() else []
        return next((str(line["origin"]) for line in lines if line["event"] == "segment published"), None)

    return until(server, look, "a published segment")

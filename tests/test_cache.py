"""The cache of prepared models: what makes a key, and that nothing but a whole, fresh, own entry is ever given out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prefork import cache_key
from prefork.cache import PLACE_BYTES, Cache, CacheError, Damaged, locate, placeholder
from prefork.config import ModelConfig
from prefork.log import setup
from prefork.model.processor import processor
from prefork.shm import layout
from tests.roles.server import REPOSITORY

KEY, OTHER, THIRD = "a" * 64, "b" * 64, "c" * 64
PLACE = placeholder()
WEIGHTS = bytes(range(256)) * 700
GRAPH = b"first " + PLACE.encode() + b" second " + PLACE.encode() + b" end"
SECTIONS: dict[str, Path | bytes] = {"weights": WEIGHTS, "graph": GRAPH, "manifest": b'{"model": "m"}'}
SIZE = layout.section_sizes([(name, len(data)) for name, data in SECTIONS.items() if isinstance(data, bytes)])


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def cache(tmp_path: Path, log_file: Path) -> Cache:
    return Cache(tmp_path / "cache", 1 << 30, setup("info", "json", log_file))


def lines(log_file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in log_file.read_text().splitlines()]


def names(cache: Cache) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir())


def flip(path: Path, offset: int) -> None:
    """One bit of the file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def whole(cache: Cache, key: str) -> bool:
    """Whether the entry is there and every byte of it is right."""
    entry = cache.find(key)
    if entry is None:
        return False
    with entry:
        entry.verify()
    return True


# keys


HOST = cache_key.host()
MODEL = ModelConfig(name="m", path=Path("/m.onnx"))


def key_of(
    source: tuple[str, ...] = ("s",),
    given: dict[str, str] | None = None,
    kind: str = "posix",
    on: cache_key.Host = HOST,
) -> str:
    return cache_key.key(source, given or {"quantize": "'none'"}, kind, on)


def test_a_key_is_the_same_for_the_same_things() -> None:
    assert key_of() == key_of(on=cache_key.host()) and len(key_of()) == 64


@pytest.mark.parametrize("library", cache_key.LIBRARIES)
def test_another_version_of_a_library_is_another_key(library: str) -> None:
    assert HOST.libraries[library].startswith(library)
    changed = replace(HOST, libraries={**HOST.libraries, library: f"{library}-99.0.0"})
    assert key_of(on=changed) != key_of()


def test_another_build_of_the_runtime_is_another_key() -> None:
    assert ".so" in HOST.libraries["onnxruntime"]


@pytest.mark.parametrize(
    "cpu",
    [
        replace(HOST.cpu, flags_sha256=processor("flags\t\t: fpu avx2 avx512_vnni\n").flags_sha256),
        replace(HOST.cpu, model="another"),
        replace(HOST.cpu, vendor="another"),
        replace(HOST.cpu, vnni=not HOST.cpu.vnni),
    ],
)
def test_another_processor_is_another_key(cpu: cache_key.Cpu) -> None:
    assert key_of(on=replace(HOST, cpu=cpu)) != key_of()


@pytest.mark.parametrize("index", range(len(HOST.formats)))
def test_another_format_is_another_key(index: int) -> None:
    formats = [*HOST.formats]
    formats[index] = "other" if index == 0 else 99
    program, manifest, segment, cached = formats
    changed = replace(HOST, formats=(str(program), int(manifest), int(segment), int(cached)))
    assert key_of(on=changed) != key_of()


def test_another_source_kind_or_option_is_another_key() -> None:
    keys = {key_of(), key_of(("s", "t")), key_of(("t",)), key_of(kind="sysv"), key_of(given={"quantize": "'int8'"})}
    assert len(keys) == 5


def test_every_option_of_a_model_counts_but_its_name_and_place() -> None:
    given = cache_key.options(MODEL, lambda path: "")
    assert set(given) == {field for field in MODEL.__dataclass_fields__ if field not in ("name", "path")}
    moved = replace(MODEL, name="n", path=Path("/n.onnx"))
    assert cache_key.options(moved, lambda path: "") == given


def test_data_counts_by_content(tmp_path: Path) -> None:
    model = replace(MODEL, warmup=tmp_path / "warm.npz")
    assert cache_key.options(model, lambda path: "1") != cache_key.options(model, lambda path: "2")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantize", "none"),
        ("accuracy_budget", 0.01),
        ("eval", Path("/e.npz")),
        ("calibration", Path("/c.npz")),
        ("metric", "f1"),
        ("min_speedup", 2.0),
        ("quantize_seconds", 9.0),
        ("handler", "nowhere:C"),
    ],
)
def test_every_option_of_the_search_is_another_key_where_there_is_one(name: str, value: object) -> None:
    changed = cache_key.options(_with(name, value), lambda path: "1")
    assert key_of(given=changed) != key_of(given=cache_key.options(MODEL, lambda path: "1"))
    other = cache_key.options(_with(name, value), lambda path: "2")
    assert (key_of(given=other) != key_of(given=changed)) == isinstance(value, Path)  # files count by content
    if isinstance(value, Path):
        moved = cache_key.options(_with(name, Path("/elsewhere") / value.name), lambda path: "1")
        assert key_of(given=moved) == key_of(given=changed)


def test_options_of_the_search_change_nothing_where_there_is_none() -> None:
    plain = replace(MODEL, quantize="int8")
    for name, value in (("accuracy_budget", 0.01), ("eval", Path("/e.npz")), ("metric", "f1")):
        changed = _with(name, value, plain)
        assert cache_key.options(changed, lambda path: "1") == cache_key.options(plain, lambda path: "1")


def _with(name: str, value: object, model: ModelConfig = MODEL) -> ModelConfig:
    made = replace(model)
    object.__setattr__(made, name, value)
    return made


def test_a_library_that_is_not_there() -> None:
    assert cache_key.library("no_such_library_here") == "missing"


# entries


def test_an_entry_is_laid_out_as_a_segment(cache: Cache) -> None:
    assert cache.find(KEY) is None
    cache.store(KEY, PLACE, SECTIONS)
    entry = cache.find(KEY)
    assert entry is not None and entry.size == SIZE == entry.path.stat().st_size
    with entry:
        entry.verify()
        placed = layout.place([(name, len(data)) for name, data in SECTIONS.items() if isinstance(data, bytes)])
        assert [(s.name, s.offset, s.size) for s in entry.sections] == [(s.name, s.offset, s.size) for s in placed]
        assert entry.read("graph") == GRAPH and entry.read("weights") == WEIGHTS
        with pytest.raises(Damaged, match="no section 'other'"):
            entry.read("other")
    assert names(cache) == [f"{KEY}.model"]
    assert cache.folder.stat().st_mode & 0o777 == 0o700 and entry.path.stat().st_mode & 0o777 == 0o600


def test_sections_may_be_files(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(WEIGHTS)
    cache.store(KEY, PLACE, {**SECTIONS, "weights": tmp_path / "w"})
    entry = cache.find(KEY)
    assert entry is not None
    with entry:
        assert entry.read("weights") == WEIGHTS


@pytest.mark.parametrize("name", ["x", "prefork-1-2-g3-model-0123abcd", "y" * (PLACE_BYTES - 2)])
def test_the_name_takes_the_place_of_the_placeholder(name: str) -> None:
    found = locate(GRAPH, PLACE, name)
    assert len(found) == len(GRAPH) and PLACE.encode() not in found
    path = found[len(b"first ") :][:PLACE_BYTES].decode()
    assert os.path.normpath(path) == name and not path.startswith("/")
    assert found.count(path.encode()) == 2


def test_placeholders_differ() -> None:
    assert placeholder() != placeholder() and len(placeholder()) == PLACE_BYTES


OFFSETS = [0, 9, 40, layout.HEADER_SIZE, layout.FIRST_SECTION_OFFSET - 1]


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_flipped_byte_of_the_header(cache: Cache, log_file: Path, offset: int) -> None:
    cache.store(KEY, PLACE, SECTIONS)
    flip(cache.folder / f"{KEY}.model", offset)
    assert cache.find(KEY) is None
    (line,) = lines(log_file)
    assert line["event"] == "cached model removed" and KEY in line["path"] and "cache entry" in line["reason"]
    assert names(cache) == []


@pytest.mark.parametrize("name", list(SECTIONS))
@pytest.mark.parametrize("last", [False, True])
def test_a_flipped_byte_of_a_section_or_of_the_zeros_behind_it(cache: Cache, name: str, last: bool) -> None:
    cache.store(KEY, PLACE, SECTIONS)
    entry = cache.find(KEY)
    assert entry is not None
    section = entry.section(name)
    flip(entry.path, section.offset + (section.extent - 1 if last else section.size // 2))
    with entry, pytest.raises(Damaged, match=f"section '{name}' checksum"):
        entry.verify()


def test_a_truncated_entry_and_one_under_another_key(cache: Cache, log_file: Path) -> None:
    cache.store(KEY, PLACE, SECTIONS)
    cache.store(OTHER, PLACE, SECTIONS)
    os.truncate(cache.folder / f"{KEY}.model", SIZE - 1)
    (cache.folder / f"{OTHER}.model").rename(cache.folder / f"{THIRD}.model")
    assert cache.find(KEY) is None and cache.find(THIRD) is None
    assert all(word in line["reason"] for line, word in zip(lines(log_file), ("size", "another key"), strict=True))
    assert names(cache) == []


def test_entries_of_others_are_refused(cache: Cache, log_file: Path, tmp_path: Path) -> None:
    cache.store(KEY, PLACE, SECTIONS)
    path = cache.folder / f"{KEY}.model"
    path.chmod(0o666)
    assert cache.find(KEY) is None
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.find(KEY) is None
    path.unlink()
    os.mkfifo(path)
    assert cache.find(KEY) is None
    assert "others may write it" in lines(log_file)[0]["reason"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_entries_and_folders_of_another_user_are_refused(cache: Cache, log_file: Path, tmp_path: Path) -> None:
    cache.store(KEY, PLACE, SECTIONS)
    os.chown(cache.folder / f"{KEY}.model", 65534, 65534)
    assert cache.find(KEY) is None and "belongs to user 65534" in lines(log_file)[0]["reason"]
    assert names(cache) == [f"{KEY}.model"]
    os.chown(cache.folder, 65534, 65534)
    with pytest.raises(CacheError, match="belongs to user 65534, not to us"):
        Cache(cache.folder, 1, setup("error", "json", log_file))


def test_a_folder_that_cannot_be_made(tmp_path: Path, log_file: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cache_dir .*Not a directory"):
        Cache(tmp_path / "file" / "cache", 1, setup("error", "json", log_file))


# room


def use(cache: Cache, key: str, moment: int) -> None:
    os.utime(cache.folder / f"{key}.model", ns=(moment, moment))


def test_the_least_recently_used_make_room(cache: Cache, log_file: Path) -> None:
    small = Cache(cache.folder, 2 * SIZE, setup("info", "json", log_file))
    for moment, key in enumerate((KEY, OTHER)):
        small.store(key, PLACE, SECTIONS)
        use(small, key, moment)
    assert whole(small, KEY)  # and so it was used after OTHER
    small.store(THIRD, PLACE, SECTIONS)
    assert names(small) == [f"{KEY}.model", f"{THIRD}.model"]
    assert [line["event"] for line in lines(log_file)] == ["cached model evicted"]


def test_storing_again_needs_no_other_room(cache: Cache, log_file: Path) -> None:
    small = Cache(cache.folder, 2 * SIZE, setup("info", "json", log_file))
    for key in (KEY, OTHER, OTHER):
        small.store(key, PLACE, SECTIONS)
    assert whole(small, KEY) and whole(small, OTHER)


def test_larger_than_the_whole_cache(cache: Cache, log_file: Path) -> None:
    small = Cache(cache.folder, SIZE - 1, setup("info", "json", log_file))
    with pytest.raises(CacheError, match=f"it takes {SIZE} bytes, and cache_size is {SIZE - 1}"):
        small.store(KEY, PLACE, SECTIONS)
    assert names(cache) == []


@contextlib.contextmanager
def full_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of `size` bytes at `folder`; skips where that cannot be had."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root and mount(2)")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(cache: Cache) -> None:
    with full_disk(cache.folder, SIZE // 2):
        with pytest.raises(CacheError, match=r"not cached: .*No space left on device"):
            cache.store(KEY, PLACE, SECTIONS)
        assert names(cache) == []


# several at once


DIE = """
import os, signal, sys
from pathlib import Path
from prefork.cache import Cache
from prefork.log import setup
cache = Cache(Path(sys.argv[1]), 1 << 30, setup("error"))
with cache._temporary(sys.argv[2]) as (path, fd):
    os.write(fd, b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_is_not(cache: Cache) -> None:
    died = subprocess.run([sys.executable, "-c", DIE, str(cache.folder), KEY], cwd=REPOSITORY, check=False)
    assert died.returncode == -signal.SIGKILL
    (left,) = names(cache)
    assert left.startswith(KEY) and left.endswith(".tmp") and cache.find(KEY) is None
    with cache._temporary(OTHER) as (living, _):
        cache.store(KEY, PLACE, SECTIONS)
        assert names(cache) == sorted([f"{KEY}.model", living.name])
    assert whole(cache, KEY)


def test_a_lock_keeps_others_out_until_it_is_given_back(cache: Cache, log_file: Path) -> None:
    with cache.lock(KEY, 0):
        with pytest.raises(CacheError, match="another process has been holding it for 0 s"), cache.lock(KEY, 0):
            pass
        with cache.lock(OTHER, 0):
            pass
    with cache.lock(KEY, 0):
        pass
    assert names(cache) == []
    assert lines(log_file)[0]["event"] == "another process is preparing this model; waiting for it"


HOLD = """
import sys
from pathlib import Path
from prefork.cache import Cache
from prefork.log import setup
with Cache(Path(sys.argv[1]), 1 << 30, setup("error")).lock(sys.argv[2], 0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_holder_gives_the_lock_back(cache: Cache) -> None:
    command = [sys.executable, "-c", HOLD, str(cache.folder), KEY]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(CacheError), cache.lock(KEY, 0):
            pass
        holder.kill()
        holder.wait()
    with cache.lock(KEY, 60):
        pass
    assert names(cache) == []

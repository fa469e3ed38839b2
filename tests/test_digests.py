"""Digests of files are remembered only for files that surely have not changed, and a hint is never trusted blindly."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from prefork.digests import MOST, Digests

OLD = Path(os.__file__)  # a file that nobody has changed in the last seconds


@pytest.fixture
def digests(tmp_path: Path) -> Digests:
    return Digests(tmp_path / "sources")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hints(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "sources").glob("*.file"))


def rewrite(path: Path, **changes: Any) -> None:
    """The hint with other values, and a right checksum."""
    text = json.dumps({**json.loads(path.read_bytes().partition(b"\n")[2]), **changes}).encode()
    path.write_bytes(b"%08x\n%s" % (zlib.crc32(text), text))


def test_an_old_file_is_read_once(digests: Digests, tmp_path: Path) -> None:
    assert digests.of(OLD) == sha256(OLD)
    (hint,) = hints(tmp_path)
    rewrite(hint, sha256="0" * 64)  # what is given out now can only be the hint
    assert digests.of(OLD) == "0" * 64
    assert hint.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("index", range(1, 6))
def test_another_device_inode_size_or_time_is_another_file(digests: Digests, tmp_path: Path, index: int) -> None:
    digests.of(OLD)
    (hint,) = hints(tmp_path)
    state = json.loads(hint.read_bytes().partition(b"\n")[2])["state"]
    state[index] += 1
    rewrite(hint, sha256="0" * 64, state=state)
    assert digests.of(OLD) == sha256(OLD)


def test_a_file_changed_just_now_is_not_remembered(digests: Digests, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"one")
    os.utime(path, ns=(0, 0))  # an old mtime does not help: ctime cannot be set
    assert digests.of(path) == sha256(path)
    assert hints(tmp_path) == []
    path.write_bytes(b"two")
    os.utime(path, ns=(0, 0))
    assert digests.of(path) == sha256(path)


@pytest.mark.parametrize("offset", [0, 8, 20, -3])
def test_a_damaged_hint_counts_for_nothing(digests: Digests, tmp_path: Path, offset: int) -> None:
    digests.of(OLD)
    (hint,) = hints(tmp_path)
    data = bytearray(hint.read_bytes())
    data[offset] ^= 1
    hint.write_bytes(data)
    assert digests.of(OLD) == sha256(OLD)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    digests = Digests(tmp_path / "file" / "sources")
    assert digests.of(OLD) == sha256(OLD)
    digests.remember_parts("a" * 64, ["w.bin"])
    assert digests.parts("a" * 64) == []


def test_parts_are_remembered_by_content(digests: Digests) -> None:
    assert digests.parts("a" * 64) == []
    digests.remember_parts("a" * 64, ["w.bin", "sub/v.bin"])
    assert digests.parts("a" * 64) == ["w.bin", "sub/v.bin"] and digests.parts("b" * 64) == []


def test_the_number_of_hints_is_bounded(digests: Digests, tmp_path: Path) -> None:
    for number in range(MOST + 5):
        digests.remember_parts(f"{number:064x}", [])
    assert len(list((tmp_path / "sources").iterdir())) == MOST


def test_a_missing_file_is_an_error(digests: Digests, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digests.of(tmp_path / "nowhere")

"""Scratch directories: those of dead masters go, those of living ones stay."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from prefork import workdir
from prefork.errors import ConfigError
from prefork.shm.owner import Owner
from prefork.workdir import WorkDir


def dead_master(parent: Path) -> Path:
    """The directory of a process that was killed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        place = WorkDir(parent, Owner.current())
        (place.sub("g1-0") / "weights").write_bytes(b"x" * 1000)
        os.write(write, os.fsencode(place.path))
        signal.pause()
    path = Path(os.fsdecode(os.read(read, 4096)))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    return path


def test_it_is_private_and_goes_as_a_whole(tmp_path: Path) -> None:
    work = WorkDir(tmp_path, Owner.current())
    sub = work.sub("g1-0")
    (sub / "file").touch()
    assert {path.stat().st_mode & 0o777 for path in (work.path, sub)} == {0o700}
    work.remove()
    work.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_dead_masters_directory_is_removed(tmp_path: Path) -> None:
    path = dead_master(tmp_path)
    assert (path / "g1-0" / "weights").exists()
    assert workdir.sweep(tmp_path) == [path]
    assert list(tmp_path.iterdir()) == []


def test_a_living_masters_directory_stays(tmp_path: Path) -> None:
    work = WorkDir(tmp_path, Owner.current())
    assert workdir.sweep(tmp_path) == [] and work.path.exists()
    work.remove()


def test_a_lock_outweighs_the_name(tmp_path: Path) -> None:
    """As seen from another pid namespace: nobody of that name is known here, yet somebody holds it."""
    owner = Owner.current()
    work = WorkDir(tmp_path, Owner(1 << 22, 1, owner.namespace))
    assert workdir.sweep(tmp_path) == []
    work.remove()


@pytest.mark.parametrize("name", ["prefork-work-x", "prefork-work-1", "prefork-work-1-2-3", "other"])
def test_what_is_named_otherwise_is_not_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert workdir.sweep(tmp_path) == [] and (tmp_path / name).exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    link = tmp_path / "prefork-work-4194304-1"
    link.symlink_to(tmp_path / "precious")
    assert workdir.sweep(tmp_path) == [] and link.is_symlink() and (tmp_path / "precious").exists()


def test_a_file_of_that_name_stays(tmp_path: Path) -> None:
    path = tmp_path / "prefork-work-4194304-1"
    path.touch()
    assert workdir.sweep(tmp_path) == [] and path.exists()


def test_no_place_for_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="work_dir"):
        WorkDir(tmp_path / "nowhere", Owner.current())
    assert workdir.sweep(tmp_path / "nowhere") == []

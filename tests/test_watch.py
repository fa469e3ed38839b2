"""Which model files have changed: told once, when they have come to rest. Real files; the moments are given."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest

from prefork.config import ModelConfig
from prefork.watch import Watch


class Looks:
    """A watch on some files of a folder; `names()` is its next look."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.paths = {name: folder / f"{name}.onnx" for name in names}
        for path in self.paths.values():
            path.write_bytes(b"one")
        self.models = [ModelConfig(name=name, path=path) for name, path in self.paths.items()]
        self._watch, self._clock = Watch(1.0), count()

    def names(self) -> list[str]:
        return self._watch.look(self.models, next(self._clock))


@pytest.fixture
def looks(tmp_path: Path) -> Looks:
    found = Looks(tmp_path, "a", "b")
    assert found.names() == [] == found.names()
    return found


def test_a_change_is_told_once_it_rests(looks: Looks) -> None:
    looks.paths["a"].write_bytes(b"half")
    assert looks.names() == []
    looks.paths["a"].write_bytes(b"all of it")
    assert looks.names() == []
    assert looks.names() == ["a"]
    assert looks.names() == []


def test_a_rename_into_place_counts_even_with_the_same_size_and_time(looks: Looks) -> None:
    path = looks.paths["b"]
    before = path.stat()
    fresh = path.with_suffix(".new")
    fresh.write_bytes(b"two")
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    fresh.rename(path)
    assert [looks.names(), looks.names(), looks.names()] == [[], ["b"], []]


def test_a_file_that_is_gone_is_waited_for(looks: Looks) -> None:
    path = looks.paths["a"]
    path.unlink()
    assert looks.names() == [] == looks.names()
    path.write_bytes(b"again")
    assert looks.names() == [] and looks.names() == ["a"]


def test_a_model_of_another_path_is_new(looks: Looks, tmp_path: Path) -> None:
    (tmp_path / "c.onnx").write_bytes(b"other")
    looks.models[0] = ModelConfig(name="a", path=tmp_path / "c.onnx")
    assert looks.names() == [] == looks.names()


def test_looks_keep_their_distance(tmp_path: Path) -> None:
    looks = Looks(tmp_path, "a")
    watch = Watch(5.0)
    assert watch.look(looks.models, 10.0) == []
    looks.paths["a"].write_bytes(b"changed")
    assert watch.look(looks.models, 14.9) == [] == watch.look(looks.models, 15.0)
    assert watch.look(looks.models, 19.9) == [] and watch.look(looks.models, 20.0) == ["a"]


def test_without_a_distance_nothing_is_looked_at(tmp_path: Path) -> None:
    looks = Looks(tmp_path, "a")
    watch = Watch(0.0)
    assert watch.look(looks.models, 1.0) == []
    looks.paths["a"].write_bytes(b"changed")
    assert watch.look(looks.models, 2.0) == [] == watch.look(looks.models, 3.0)

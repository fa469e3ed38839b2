"""Who lets go of a segment last removes it, whatever way the generations that share it end. Real segments."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefork.config import ModelConfig
from prefork.generation import Generation, Stored
from prefork.jobs import LoadedModel
from prefork.log import setup
from prefork.shm import segment
from prefork.shm.owner import Owner
from prefork.shm.segment import Kind
from prefork.shm.sweep import list_segments
from prefork.shm.writer import create
from prefork.workdir import WorkDir

Make = Callable[[int, dict[str, Stored]], Generation]


@pytest.fixture(params=["posix", "sysv"])
def stored(request: pytest.FixtureRequest) -> Stored:
    """As the master has it once the loader is gone."""
    kind: Kind = "posix" if request.param == "posix" else "sysv"
    name = f"test.{secrets.token_hex(8)}"
    with create(kind, [("weights", 5)], Owner.current(), 1, name) as writer:
        writer.fill("weights", b"12345")
        ref = writer.publish()
        hold = segment.hold(ref)
    return Stored(LoadedModel(name, ref, {}, 1), hold, {})


@pytest.fixture
def make(stored: Stored, tmp_path: Path) -> Iterator[Make]:
    """Generation `number` of one model."""
    work = WorkDir(tmp_path, Owner.current())
    wanted = [ModelConfig(name=stored.model.name, path=tmp_path / "none.onnx")]
    log = setup(file=tmp_path / "log")
    yield lambda number, kept: Generation(number, wanted, "posix", Owner.current(), work, log, None, kept)
    work.remove()


def there(stored: Stored) -> bool:
    return any(info.ref == stored.model.ref and info.model == stored.model.name for info in list_segments())


def test_the_last_generation_removes_it(stored: Stored, make: Make) -> None:
    second = make(2, {stored.model.name: stored})
    assert second.load_next() is None and second.state == "loaded" and second.models == (stored.model,)
    stored.drop()  # the generation that loaded it ends
    assert there(stored)
    with segment.attach(stored.model.ref) as attached:
        attached.verify()
    second.retire()
    assert not there(stored)


def test_one_that_never_came_up_lets_go_as_well(stored: Stored, make: Make) -> None:
    second = make(2, {stored.model.name: stored})
    second.retire()
    assert there(stored)
    third = make(3, {stored.model.name: stored})
    assert third.load_next() is None
    fourth = make(4, {stored.model.name: third.stored[0]})
    third.retire()
    third.retire()  # once more is no other take's
    assert there(stored)
    stored.drop()
    assert there(stored) and fourth.loading == stored.model.name
    fourth.retire()
    assert not there(stored)


def test_what_is_not_wanted_any_more_is_not_taken(stored: Stored, make: Make) -> None:
    other = make(2, {"other": stored})
    assert other.loading == stored.model.name
    other.retire()
    assert there(stored)
    stored.drop()
    assert not there(stored)

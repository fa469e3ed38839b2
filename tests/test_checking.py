"""prefork.checking on real segments: small ones verified at once, large ones by a forked child beside the block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork.checking import SMALL, checked
from prefork.errors import ModelError, SegmentCorrupt
from prefork.shm.layout import FIRST_SECTION_OFFSET
from prefork.shm.owner import Owner
from prefork.shm.segment import SegmentRef, attach, retire
from prefork.shm.writer import create

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@pytest.fixture(params=[1000, SMALL], ids=["small", "large"])
def ref(request: pytest.FixtureRequest) -> Iterator[SegmentRef]:
    with create("posix", [("weights", request.param), ("graph", 10)], Owner.current(), 1, "m") as draft:
        draft.fill("weights", b"\x07" * request.param)
        draft.fill("graph", b"0123456789")
        made = draft.publish()
        yield made
    retire(made)


def damage(ref: SegmentRef) -> None:
    assert ref.path is not None
    with Path(ref.path).open("r+b") as file:
        file.seek(FIRST_SECTION_OFFSET + 500)
        file.write(b"\xff")


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_what_is_whole_passes_and_leaves_no_process(ref: SegmentRef) -> None:
    before = children()
    with attach(ref) as attached:
        with checked([attached]):
            assert len(children()) == len(before) + (ref.size > SMALL)
        assert children() == before


def test_damage_is_named(ref: SegmentRef) -> None:
    damage(ref)
    with (
        attach(ref) as attached,
        pytest.raises(SegmentCorrupt, match="section 'weights' checksum"),
        checked([attached]),
    ):
        pass


def test_damage_is_the_reason_when_the_block_fails_too(ref: SegmentRef) -> None:
    damage(ref)
    with attach(ref) as attached, pytest.raises(SegmentCorrupt, match="section 'weights'"), checked([attached]):
        raise ModelError("ONNX Runtime refuses")


def test_an_error_of_the_block_is_itself_where_all_is_whole(ref: SegmentRef) -> None:
    before = children()
    with attach(ref) as attached, pytest.raises(ModelError, match="refuses"), checked([attached]):
        raise ModelError("ONNX Runtime refuses")
    assert children() == before


def test_some_sections_can_be_verified_alone(ref: SegmentRef) -> None:
    damage(ref)
    with attach(ref) as attached:
        attached.verify(["graph"])
        with pytest.raises(SegmentCorrupt, match="section 'weights'"):
            attached.verify(["weights"])

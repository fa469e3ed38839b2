"""What breaks in the middle of a reload: the old generation serves on and no request fails, or everything is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bench import reload_faults_kill as kill
from bench import reload_faults_model as model
from bench import reload_faults_reach as reach

DEEDS: dict[str, Callable[[Path], list[str]]] = {
    "broken model": partial(model.broken, *model.BROKEN["not ONNX"]),
    "loader killed": kill.loader_killed,
    "template killed": partial(kill.template_killed, "opening"),
    "master killed": partial(kill.master_killed, "rolling, 1 of 3 moved"),
    "control socket flooded": reach.flooded,
}


@pytest.mark.parametrize("deed", DEEDS.values(), ids=DEEDS)
def test_nothing_is_left_half(place: Path, deed: Callable[[Path], list[str]]) -> None:
    assert deed(place / "case") == []

"""A small part of the fuzzer against a living server. All of it: `python -m tests.roles.fuzz_live`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.roles.fuzz_live import FLAGS, attack
from tests.roles.server import Server

CASES = 5000


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_hostile_bytes_change_nothing(place: Path, run_in: str) -> None:
    with Server(place, *FLAGS, "--run-in", run_in) as server:
        report = attack(server, CASES // 2, seed=len(run_in))
    print("\n".join(report))
    text = "\n".join(report)
    assert all(word in text for word in ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "ended with a reason"))

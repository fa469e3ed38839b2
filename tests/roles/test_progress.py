"""Progress of a preparation as people and logs see it: real loaders on a real terminal, and without one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model import trap
from tests.roles.screen import COLUMNS, Terminal, shown, terminal
from tests.roles.server import REPOSITORY
from tests.roles.watch import children_of, wait_gone

BAR = "━"
LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (info|warning|error) ")
HANGS = "class H:\n  def calibration(self):\n    while True: pass\n"
FAILS = "class H:\n  def calibration(self): raise LookupError('nothing here')\n"


@pytest.fixture
def search(place: Path) -> list[str]:
    """Arguments of a search that takes a second."""
    model, data = trap.write(place)
    (place / "work").mkdir()
    return [
        str(model), "--quantize", "auto", "--eval", str(data), "--min-speedup", "0", "--cache-dir", "",
        "--work-dir", str(place / "work"),
    ]  # fmt: skip


def hanging(place: Path, search: list[str]) -> list[str]:
    """The same, but it never comes to an end."""
    (place / "owners.py").write_text(HANGS)
    return [*search, "--handler", "owners:H"]


def is_clean(found: Terminal) -> list[str]:
    """The lines that stay on the screen: whole ones, with nothing of the bar, and the cursor below them."""
    lines, column = shown(found.text)
    assert (lines[-1], column) == ("", 0)
    assert not any(BAR in line for line in lines), lines
    return lines[:-1]


def serving(place: Path) -> list[str]:
    return ["--workers", "1", "--bind", "127.0.0.1:0", "--runtime-dir", str(place / "run")]


def test_a_terminal_shows_a_bar_and_keeps_nothing_of_it(place: Path, search: list[str]) -> None:
    with terminal(place, "inspect", *search) as found:
        assert found.read_all() == 0
    assert is_clean(found) == []
    frames = [shown(part)[0][-1] for part in found.text.split("\r\x1b[K")]
    assert all(len(frame) < COLUMNS for frame in frames)
    assert any(re.search(rf"^trap +{BAR}.* \d+% 0:00:\d\d (trying|int8)", frame) for frame in frames), frames
    assert "preparing" not in found.text


def test_a_server_on_a_terminal_mixes_no_line_with_the_bar(place: Path, search: list[str]) -> None:
    with terminal(place, *search, *serving(place)) as found:
        found.read_until("READY")
        found.process.terminate()
        assert found.read_all() == 0
    lines = is_clean(found)
    assert BAR in found.text and "preparing" not in found.text
    assert all(LINE.match(line) for line in lines), lines
    assert any("segment published" in line for line in lines)


@pytest.mark.parametrize("victim", ["loader", "command"])
def test_killed_half_way_it_leaves_the_terminal_clean(place: Path, search: list[str], victim: str) -> None:
    with terminal(place, "inspect", *hanging(place, search)) as found:
        found.read_until("asking owners:H")
        (loader,) = children_of(found.process.pid)
        os.kill(loader if victim == "loader" else found.process.pid, signal.SIGKILL if victim == "loader" else 15)
        code = found.read_all()
        wait_gone(loader)
    lines = is_clean(found)
    if victim == "loader":
        assert code == 70 and "killed by SIGKILL" in " ".join(lines)
    else:
        assert (code, lines) == (128 + signal.SIGTERM, [])


def test_a_server_stopped_half_way_leaves_the_terminal_clean(place: Path, search: list[str]) -> None:
    with terminal(place, *hanging(place, search), *serving(place)) as found:
        found.read_until("asking owners:H")
        found.process.terminate()
        assert found.read_all() == 0
    lines = is_clean(found)
    assert all(LINE.match(line) for line in lines), lines
    assert "stopping" in " ".join(lines)


def test_a_failure_stands_alone_on_its_line(place: Path, search: list[str]) -> None:
    (place / "owners.py").write_text(FAILS)
    with terminal(place, "inspect", *search, "--handler", "owners:H") as found:
        assert found.read_all() == 65
    said = "".join(is_clean(found))
    assert said.startswith(
        "prefork-serve: error: model 'trap': handler 'owners:H': calibration(): LookupError: nothing"
    )
    assert BAR in found.text


def plain(place: Path, *args: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "prefork", *args]
    ran = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=True)
    return ran.stderr


def test_without_a_terminal_each_candidate_is_a_line_begun_and_judged(place: Path, search: list[str]) -> None:
    said = plain(place, "inspect", *search).splitlines()
    steps = [line.partition("step=")[2] for line in said if "preparing" in line]
    assert any(step.startswith('"trying int8-dynamic" percent=') for step in steps)
    assert any(re.match(r'"int8-dynamic: \d\.\d MB: loses \d+\.\d\d% of accuracy, the budget is', s) for s in steps)
    figures = re.compile(r'"int8-mixed: \d\.\d MB, loses 0\.\d\d%, \d+\.\d\d times as fast as fp32: passes"')
    assert any(map(figures.match, steps))
    assert "\x1b" not in "".join(said) and BAR not in "".join(said)
    percents = [int(step.rpartition("percent=")[2]) for step in steps if "percent=" in step]
    assert percents == sorted(percents) and percents[-1] < 100


@pytest.mark.parametrize(
    ("args", "term"),
    [(["--log-format", "json"], "xterm"), ([], "dumb"), (["--log-level", "warning"], "xterm")],
    ids=["json", "dumb", "warning"],
)
def test_no_bar_where_nobody_wants_one(place: Path, search: list[str], args: list[str], term: str) -> None:
    with terminal(place, "inspect", *search, *args, term=term) as found:
        assert found.read_all() == 0
    assert "\x1b" not in found.text and BAR not in found.text
    assert ("preparing" in found.text) == (args != ["--log-level", "warning"])


def test_with_a_log_file_there_are_both(place: Path, search: list[str]) -> None:
    with terminal(place, "inspect", *search, "--log-file", str(place / "log")) as found:
        assert found.read_all() == 0
    assert is_clean(found) == [] and BAR in found.text
    kept = (place / "log").read_text()
    assert "trying int8-dynamic" in kept and "\x1b" not in kept

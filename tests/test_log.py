"""Lines as they arrive in a real file or pipe, written by real processes."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from prefork.log import MAX_VALUE, setup


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_console_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    setup("info", "console", path).info("worker ready", slot=3, pid=123)
    (line,) = lines(path)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} info    master   worker ready slot=3 pid=123", line)


def test_json_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    before = datetime.now(UTC)
    log = setup("debug", "json", path).for_role("worker", slot=3)
    log.debug("done", path=Path("/x"), ok=True, none=None, ratio=0.5, count=2**60, bad=float("nan"), level="mine")
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    stamp = datetime.fromisoformat(found.pop("ts"))
    assert stamp.tzinfo is not None and before <= stamp <= datetime.now(UTC)
    assert found == {
        "level": "debug", "role": "worker", "event": "done", "slot": 3, "pid": os.getpid(), "path": "/x", "ok": True,
        "none": None, "ratio": 0.5, "count": 2**60, "bad": "nan", "level_": "mine",
    }  # fmt: skip


def test_an_events_own_field_wins_over_the_bound_one(tmp_path: Path) -> None:
    log = setup("info", "json", tmp_path / "log").for_role("master", slot=1)
    log.info("died", pid=7, slot=2)
    found = json.loads((tmp_path / "log").read_text())
    assert (found["pid"], found["slot"]) == (7, 2)


def test_nothing_breaks_the_line_or_reaches_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = setup("info", "console", path)
    log.info("e\n1", text='a\r\nb "q" \x1b[31m \u2028', empty="", path=Path("/a b"), word="x=y")
    (line,) = path.read_text().split("\n")[:-1]
    assert line.isprintable()
    assert line.endswith(r'e\n1 text="a\r\nb \"q\" \x1b[31m \u2028" empty="" path="/a b" word="x=y"')


def test_values_that_cannot_be_written_harm_nobody(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for form in ("console", "json"):
        log = setup("info", form, path)
        log.info("odd", value=Unprintable())
        log.info("surrogate", value="\udce9", name=os.fsdecode(b"\xff"))
        assert log.lost == 0
    assert [line.count("RuntimeError") for line in lines(path)] == [1, 0, 1, 0]


def test_levels(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = setup("warning", "json", path)
    log.debug("d")
    log.info("i")
    log.warning("w")
    log.error("e")
    assert [json.loads(line)["event"] for line in lines(path)] == ["w", "e"]


def test_crash_carries_the_traceback_in_one_short_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = setup("info", "json", path)
    try:
        raise ValueError("x" * 10_000)
    except ValueError as e:
        log.crash("worker failed", e, slot=1)
    (line,) = lines(path)
    found = json.loads(line)
    assert "Traceback" in found["traceback"] and "characters cut" in found["traceback"]
    assert len(found["traceback"]) < MAX_VALUE + 60


def test_lines_of_several_processes_never_interleave(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = setup("info", "json", path)
    gate_out, gate_in = os.pipe()
    children = []
    for slot in range(4):
        pid = os.fork()
        if pid == 0:
            os.close(gate_in)
            os.read(gate_out, 1)  # EOF: all start together
            own = log.for_role("worker", slot=slot)
            for number in range(500):
                own.info("tick", number=number, text="x" * (number % 97))
            os._exit(0)
        children.append(pid)
    os.close(gate_out)
    os.close(gate_in)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    found = [json.loads(line) for line in lines(path)]
    assert {row["pid"] for row in found} == set(children)
    for slot in range(4):
        assert [row["number"] for row in found if row["slot"] == slot] == list(range(500))


def test_reopen_follows_the_path_and_keeps_the_descriptor(tmp_path: Path) -> None:
    path, moved = tmp_path / "log", tmp_path / "log.1"
    log = setup("info", "console", path)
    child = log.for_role("worker")
    fd = log.fd
    log.info("one")
    path.rename(moved)
    log.info("two")
    child.reopen()
    log.info("three")
    assert log.fd == fd and not os.get_inheritable(fd)
    assert ["one" in moved.read_text(), "two" in moved.read_text(), len(lines(moved))] == [True, True, 2]
    assert "three" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o640 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_reopen_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = setup("info", "console", folder / "log")
    folder.rename(tmp_path / "moved")
    log.reopen()
    assert "cannot be reopened" in (tmp_path / "moved" / "log").read_text()


def test_a_full_disk_is_counted() -> None:
    log = setup("info", "json", Path("/dev/full"))
    log.info("one")
    log.error("two")
    assert log.lost == 2


def test_a_reader_that_left_is_counted(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    log = setup("info", "json", fifo)
    log.info("read")
    assert b"read" in os.read(reader, 4096)
    os.close(reader)
    log.info("not read")
    assert log.lost == 1


def test_a_bad_file_is_the_callers_to_handle(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        setup("info", "console", tmp_path / "none" / "log")


def test_local_time_on_the_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-5:30")
    time.tzset()
    try:
        before = datetime.now(UTC)
        setup("info", "console", tmp_path / "log").info("x")
        minute = (tmp_path / "log").read_text()[:5]
    finally:
        monkeypatch.undo()
        time.tzset()
    at = [(stamp.hour * 60 + stamp.minute + 330) % 1440 for stamp in (before, datetime.now(UTC))]
    assert minute in [f"{m // 60:02d}:{m % 60:02d}" for m in at]

"""Lines of several processes at once in one file, pipe or socket: each whole, none lost, nobody waits."""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefork.log import Logger, setup
from prefork.logsink import Sink

PROCESSES, LINES = 4, 10_000
LONG = "é" * 2500  # 5000 bytes of UTF-8, and below the length at which a value is cut
WATCHDOG = 60.0


def fork(count: int, body: Callable[[int], None]) -> list[int]:
    """Processes that call `body(number)` all at once, when the last of them has started."""
    out, into = os.pipe()
    pids = []
    for number in range(count):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.close(into)
                os.read(out, 1)
                body(number)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(out)
    os.close(into)
    return pids


def ended(pids: list[int]) -> bool:
    return all(os.waitpid(pid, 0)[1] == 0 for pid in pids)


def write_all(log: Logger) -> Callable[[int], None]:
    """LINES lines of all lengths, every hundredth beyond PIPE_BUF. Of what is refused because the pipe is full, the
    same line comes again, so that every number arrives."""

    def body(number: int) -> None:
        own = log.for_role("worker", slot=number)
        poll = select.poll()
        poll.register(log.fd, select.POLLOUT)
        for line in range(LINES):
            text = LONG if line % 100 == 0 else "x" * (line % 251)
            before = own.lost
            own.info("tick", number=line, text=text)
            while own.lost > before:
                poll.poll(WATCHDOG * 1000)
                before = own.lost
                own.info("tick", number=line, text=text)

    return body


def whole(data: bytes) -> list[dict[str, Any]]:
    """Every line as what it says; fails for a torn one."""
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def complete(rows: list[dict[str, Any]]) -> bool:
    """Whether each process's lines are all there, once and in order."""
    for slot in range(PROCESSES):
        assert [row["number"] for row in rows if row["slot"] == slot] == list(range(LINES))
    return len(rows) == PROCESSES * LINES


def read_to_end(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def test_a_file_takes_lines_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert ended(fork(PROCESSES, write_all(setup("info", "json", path))))
    data = path.read_bytes()
    assert complete(whole(data))
    assert max(map(len, data.splitlines())) > 4096


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_a_pipe_takes_lines_that_are_cut_to_fit(tmp_path: Path, kind: str) -> None:
    """Standard error of a process under a shell or a container engine, and under a service manager."""
    if kind == "fifo":
        os.mkfifo(tmp_path / "log")
        reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
        log = setup("info", "json", tmp_path / "log")
        os.set_blocking(reader, True)
        writer = log.fd
    else:
        ours, theirs = socket.socketpair()
        reader, writer = ours.detach(), theirs.detach()
        log = Logger(Sink(None, writer), 20, "json", "test", {}, live=False)
    pids = fork(PROCESSES, write_all(log))
    os.close(writer)
    data = read_to_end(reader)
    os.close(reader)
    assert ended(pids)
    rows = whole(data)
    assert complete(rows)
    assert max(map(len, data.splitlines(keepends=True))) <= select.PIPE_BUF
    assert all("characters cut" in row["text"] for row in rows if row["number"] % 100 == 0)


def test_nobody_waits_for_a_reader_that_does_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    log = setup("info", "json", tmp_path / "log")
    written = 0
    while not log.lost:
        log.info("tick", number=written)
        written += 1
    assert log.append([log.line("info", "tick", 0, {"number": written})]) == 0
    rows = whole(os.read(reader, 1 << 20))
    assert [row["number"] for row in rows] == list(range(written - 1))
    assert log.append([log.line("info", "tick", 0, {"number": n}) for n in range(300)]) == 300
    assert [row["number"] for row in whole(os.read(reader, 1 << 20))] == list(range(300))
    os.close(reader)


def test_a_pipe_that_nobody_has_open_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError) as caught:
        setup("info", "json", tmp_path / "log")
    assert caught.value.errno == errno.ENXIO


def test_a_line_with_too_many_fields_keeps_its_event(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    log = setup("info", "json", tmp_path / "log")
    log.info("many", **{f"field{n}": "\0" * 100 for n in range(200)})
    (row,) = whole(os.read(reader, 1 << 20))
    assert row["event"] == "many" and row["fields"].startswith("cut, they take ")
    os.close(reader)


def test_a_line_torn_by_a_full_disk_does_not_spoil_the_next(tmp_path: Path) -> None:
    """RLIMIT_FSIZE is a disk that is full at a byte of our choice: the write before it is short, the next fails."""
    path = tmp_path / "log"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = setup("info", "json", path)
    log.info("one")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        log.info("torn")
        log.info("none")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    log.info("two")
    assert log.lost == 2
    one, torn, two = path.read_bytes().splitlines()
    assert (json.loads(one)["event"], len(torn), json.loads(two)["event"]) == ("one", 20, "two")


def test_rotation_under_load_loses_no_line(tmp_path: Path) -> None:
    """The file is moved, then each process is told (USR1) and goes on in a new one; the old and the new are complete
    together. Every writer ends only when the new file holds a line of each."""
    path, moved = tmp_path / "log", tmp_path / "log.1"
    log = setup("info", "json", path)
    told, tell = os.pipe()

    def body(number: int) -> None:
        own = log.for_role("worker", slot=number)
        asked: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
        os.write(tell, b"+")
        after = line = 0
        while after < 2000:
            if asked:
                own.reopen()
                asked.clear()
                after = 1
            own.info("tick", number=line, text=LONG if line % 50 == 0 else "")
            line, after = line + 1, after + (after > 0)
        os.write(tell, b"%d\n" % line)

    pids = fork(PROCESSES, body)
    ready = b""
    while len(ready) < PROCESSES:
        ready += os.read(told, PROCESSES - len(ready))
    while not path.stat().st_size > 1 << 20:  # all of them are in full flight
        os.sched_yield()
    path.rename(moved)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    assert ended(pids)
    os.close(tell)
    counts = sorted(int(text) for text in read_to_end(told).split())
    os.close(told)
    old, new = whole(moved.read_bytes()), whole(path.read_bytes())
    assert {row["slot"] for row in new} == set(range(PROCESSES))
    found = Counter(row["slot"] for row in (*old, *new))
    assert sorted(found.values()) == counts
    for slot in range(PROCESSES):
        assert [row["number"] for row in (*old, *new) if row["slot"] == slot] == list(range(found[slot]))


def test_reopening_the_same_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = setup("info", "json", path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        log.reopen()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    path.unlink()
    log.reopen()
    log.info("one")
    assert len(whole(path.read_bytes())) == 1

"""Kill -9 of the master, and TERM under load. Part of bench.faults."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import ExitStack
from pathlib import Path

from bench import procs, wire
from bench.faults_kill import plan_for
from bench.inputs import FEEDS
from bench.raw import Crowd, Tally
from bench.server import POLL, Server
from bench.verdict import Verdict
from prefork.demo import model_path
from prefork.shm.sweep import list_segments

GONE = 10.0  # seconds that the kernel may take to end everyone
CLIENTS = 12
WHEN = (("posix", "ready"), ("posix", "loading"), ("sysv", "ready"), ("sysv", "loading"))


def masters(place: Path, repeats: int, slow: Path) -> list[Verdict]:
    """(b): for both kinds of shared memory, while `slow` is being loaded and while all serve; with `repeats` 0 each
    kind and each phase once."""
    found = []
    for kind, phase in WHEN[:: 1 if repeats else 3]:
        problems: list[str] = []
        for turn in range(max(repeats, 1)):
            where = place / f"{kind}-{phase}-{turn}"
            where.mkdir()
            problems += _kill_master(where, kind, phase, slow)
        text = problems[0] if problems else "all gone, nothing left after the next start"
        case = f"kill -9 of the master while {phase}, {kind}, x{max(repeats, 1)}"
        found.append(Verdict(case, "all gone, swept by the next start", text, not problems, problems))
    return found


def _kill_master(place: Path, kind: str, phase: str, slow: Path) -> list[str]:
    """What is wrong afterwards."""
    server = Server(place, "--shm", kind, "--workers", "3", f"--model=first={model_path()}", f"--model=second={slow}")
    if phase == "ready":
        server.start()
    else:
        server.launch()
        wait_event(server, "segment published")
        wait_event(server, "preparing", model="second")
    pids = procs.descendants(server.pid)
    with ExitStack() as stack:
        fds = {pid: os.pidfd_open(pid) for pid in pids}
        for fd in fds.values():
            stack.callback(os.close, fd)
        os.kill(server.pid, signal.SIGKILL)
        assert server.process is not None
        server.process.wait()
        problems = [f"process {pid} lives on" for pid in living(fds)]
    old = server.pid
    server = Server(place, "--shm", kind, "--workers", "1")
    with server:
        left = [info.name for info in list_segments() if info.owner and info.owner.pid == old]
        left += [str(path) for path in server.work.iterdir() if f"-{old}-" in path.name]
        reply, _ = wire.exchange(server.address, wire.request("digits", FEEDS["digits"](model_path())[0]))
        if not reply.outputs or server.status()["pid"] != server.pid:
            problems.append("the next server does not answer on the old sockets")
    return problems + [f"left of the old one: {name}" for name in left]


def living(fds: dict[int, int]) -> list[int]:
    """Those of the processes behind the pidfds that have not ended within GONE seconds."""
    end = time.monotonic() + GONE
    poll = select.poll()
    for fd in fds.values():
        poll.register(fd, select.POLLIN)
    left = dict(fds)
    while left and (wait := end - time.monotonic()) > 0:
        for fd, _ in poll.poll(wait * 1000):
            poll.unregister(fd)
            left = {pid: other for pid, other in left.items() if other != fd}
    return list(left)


def wait_event(server: Server, event: str, **fields: str) -> None:
    """Until the log has it. Raises AssertionError when the server ends first."""
    while True:
        ended = server.process is not None and server.process.poll() is not None
        lines = server.log() if server.log_file.exists() else []
        if any(line["event"] == event and fields.items() <= line.items() for line in lines):
            return
        assert not ended, f"the server ended before {event!r}: {server.said()}"
        time.sleep(POLL)


def terms(place: Path, repeats: int, model: Path) -> Verdict:
    """(c): TERM while requests run inline (digits) and in the compute thread (`model`)."""
    problems: list[str] = []
    answered = refused = 0
    for turn in range(repeats):
        where = place / f"term-{turn}"
        where.mkdir()
        for tally in _term(where, model, problems):
            problems += _unclean(tally)
            answered += tally.answered
            refused += len(tally.refused) + sum(tally.errors.values())
    text = problems[0] if problems else f"{answered} answered, {refused} refused cleanly, exit 0"
    return Verdict(f"TERM under load, x{repeats}", "all answered or refused, exit 0", text, not problems, problems)


def _term(place: Path, model: Path, problems: list[str]) -> list[Tally]:
    server = Server(place, "--workers", "2", f"--model=digits={model_path()}", f"--model={model.stem}={model}").start()
    address = server.address
    with ExitStack() as stack:
        stack.callback(server.stop)
        quick = plan_for(address, "digits", FEEDS["digits"](model_path())[0])
        slow = plan_for(address, model.stem, FEEDS[model.stem](model)[0])
        crowds = [stack.enter_context(Crowd(address, plan, CLIENTS)) for plan in (quick, slow)]
        while not all(crowd.tally.answered > 200 for crowd in crowds):
            time.sleep(POLL)
        code = server.stop(signal.SIGTERM)
        if code:
            problems.append(f"exit {code}: {server.said()[-300:]}")
    return [crowd.tally for crowd in crowds]


def _unclean(tally: Tally) -> list[str]:
    found = [f"connect: {text}" for text in tally.refused if text != "ECONNREFUSED"]
    found += [f"{lost.pending} unanswered: {lost.how}{'' if lost.heard else ', not a word'}" for lost in tally.lost]
    found += [f"{count} errors {code}" for code, count in tally.errors.items() if code != "UNAVAILABLE"]
    return found + ([f"{tally.wrong} wrong answers"] if tally.wrong else [])

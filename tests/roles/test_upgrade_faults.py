"""What may come between two masters of which one takes the other's place: there is one server at each moment, no client
is refused, the reason is told, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from prefork import control
from prefork.codec.message import Kind
from prefork.errors import FailedPrecondition
from prefork.shm.sweep import list_segments
from tests.roles.server import REPOSITORY, Server
from tests.roles.supervisor import Supervised
from tests.roles.test_upgrade import Caller, ask, ctl, serving, until_answered
from tests.roles.watch import WATCHDOG, LogWatch, children_of, until, wait_gone
from tests.roles.wire import Wire, digits

FAILED = "upgrade failed, this server goes on"


def begin(server: Server) -> int:
    return int(str(ask(server, "upgrade")["pid"]))


def freeze(server: Server, pid: int) -> None:
    """Another signal could come before the stop that was sent first."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    until(server, lambda: stat.read_text().rpartition(") ")[2].startswith("T"), "the new master stands still")


def coming_up(server: Server, log: LogWatch) -> int:
    """A new master whose workers serve, and whose word the old one, which is stopped, cannot hear."""
    pid = begin(server)
    log.wait("sockets of the server before us")
    os.kill(server.pid, signal.SIGSTOP)
    log.wait("worker ready")
    log.wait("worker ready")
    return pid


def answers(address: str) -> bool:
    with Wire(address) as wire:
        wire.send(digits(1))
        return bool(wire.answer().values["label"].shape == (1,))


def segments() -> set[str]:
    return {info.name for info in list_segments()}


def test_a_new_master_that_goes_before_it_is_heard_takes_nothing_along(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        name, address = server.status()["models"][0]["segment"]["name"], server.address
        with Caller(address) as tcp, Caller(server.unix) as unix:
            pid = coming_up(server, log)
            until_answered(tcp, tcp.answered + 20)
            os.kill(pid, signal.SIGTERM)
            wait_gone(pid)
            until_answered(tcp, tcp.answered + 5)
            os.kill(server.pid, signal.SIGCONT)
            assert log.wait(FAILED)["reason"] == "the new program stops: SIGTERM"
            until_answered(tcp, tcp.answered + 5)
        assert (tcp.failed, unix.failed) == ([], [])
        assert name in segments() and server.status()["pid"] == server.pid
        os.kill(int(server.status()["template"]["pid"]), signal.SIGKILL)  # another one opens the segment by its name
        until(server, lambda: server.status()["template"]["state"] == "ready", "another template")
        assert ctl(server, "upgrade").returncode == 0


def test_the_word_of_a_dead_master_is_not_believed(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        address = server.address
        pid = coming_up(server, log)
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        os.kill(server.pid, signal.SIGCONT)
        assert "SIGKILL" in log.wait(FAILED)["reason"]
        assert answers(address)
        until(server, lambda: len(list(server.work.glob("*"))) == 1, "the end of what the dead one had made")


def test_a_rollback_of_a_new_master_that_hangs(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        pid = begin(server)
        freeze(server, pid)
        ask(server, "rollback")
        upgrade = server.status()["upgrade"]
        assert upgrade["state"] == "starting" and upgrade["seconds"] >= 0
        ask(server, "rollback")
        assert log.wait(FAILED)["reason"] == "ended on request"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_stop_meanwhile_is_the_end_of_both(place: Path, number: signal.Signals, hangs: bool) -> None:
    server = Server(place, "--workers", "1", "--graceful-timeout", "0", "--pid-file", str(place / "pid"))
    server.start()
    with LogWatch(server) as log:
        pid = begin(server)
        log.wait("sockets of the server before us")
        if hangs:
            freeze(server, pid)
        assert server.stop(number) == 0
    wait_gone(pid)
    assert not (place / "pid").exists()
    assert [info.name for info in list_segments() if info.owner and info.owner.pid == pid] == []


def test_nothing_that_the_new_master_has_read_changes_meanwhile(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        pid = begin(server)
        freeze(server, pid)
        for command, values in (("reload", {}), ("restart", {}), ("scale", {"workers": 3})):
            with pytest.raises(FailedPrecondition, match="is taking over"):
                control.request(server.runtime / "control.sock", command, values)
        os.kill(server.pid, signal.SIGTTIN)
        assert "is taking over" in log.wait("scaling refused")["reason"]
        os.kill(server.pid, signal.SIGHUP)  # waits
        assert server.status()["change"]["kind"] == "start"
        os.kill(pid, signal.SIGKILL)
        log.wait(FAILED)
        log.wait("reload done")


def test_a_reload_that_waits_is_the_new_masters(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        pid = begin(server)
        freeze(server, pid)
        os.kill(server.pid, signal.SIGHUP)
        server.status()
        os.kill(pid, signal.SIGCONT)
        assert server.process is not None and server.process.wait(WATCHDOG) == 0
        assert log.wait("reload done")["generation"] == 3
        assert server.status()["pid"] == pid and answers(server.address)


def test_a_second_upgrade_waits_for_the_first(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        pid = coming_up(server, log)
        os.kill(pid, signal.SIGUSR2)
        assert "is starting" in log.wait("upgrade refused")["reason"]
        os.kill(server.pid, signal.SIGCONT)
        log.wait("the server before us has let go")
        assert ctl(server, "upgrade").returncode == 0 and server.status()["pid"] != pid


def test_the_log_is_reopened_by_both(place: Path) -> None:
    with serving(place) as server:
        with LogWatch(server) as log:
            pid = begin(server)
            log.wait("sockets of the server before us")
            freeze(server, pid)
            server.log_file.rename(place / "log.1")
        server.log_file.touch()
        with LogWatch(server) as log:
            os.kill(server.pid, signal.SIGUSR1)
            server.status()
            os.kill(pid, signal.SIGCONT)
            log.wait("the server before us has let go", pid=pid)
            assert server.process is not None and server.process.wait(WATCHDOG) == 0


@pytest.mark.parametrize("kind", ["posix", "sysv"])
def test_a_third_master_removes_nothing_of_the_two(place: Path, kind: str) -> None:
    with serving(place, "--shm", kind) as server, LogWatch(server) as log:
        name, address = server.status()["models"][0]["segment"]["name"], server.address
        pid = coming_up(server, log)
        with Server(third_place(place), "--workers", "1"):
            assert name in segments()
            os.kill(server.pid, signal.SIGKILL)
            assert server.process is not None and server.process.wait(WATCHDOG) == -signal.SIGKILL
        with Server(third_place(place), "--workers", "1"):
            assert name in segments()
        log.wait("the server before us has let go", pid=pid)
        assert answers(address)
        os.kill(int(server.status()["template"]["pid"]), signal.SIGKILL)
        log.wait("template died")
        assert answers(address) and name in segments()
    assert name not in segments()


def third_place(place: Path) -> Path:
    """Of another server."""
    path = place / "third"
    path.mkdir(exist_ok=True)
    return path


def test_the_command_follows_an_upgrade_whose_old_master_is_killed(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        command = [sys.executable, "-m", "prefork.ctl", "--runtime-dir", str(server.runtime), "upgrade"]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as following:
            log.wait("sockets of the server before us")
            os.kill(server.pid, signal.SIGKILL)
            assert server.process is not None and server.process.wait(WATCHDOG) == -signal.SIGKILL
            said, _ = following.communicate(timeout=WATCHDOG)
        assert following.returncode == 0 and said == f"upgrade done: pid {server.status()['pid']}\n"


@pytest.fixture
def supervised(place: Path) -> Iterator[Supervised]:
    server = Supervised(place, "--workers", "1", "--pid-file", str(place / "pid"), env={"WATCHDOG_USEC": "900000"})
    server.start()
    yield server
    server.close()


def test_what_a_supervisor_hears(supervised: Supervised, place: Path) -> None:
    """One voice at a time, in this order: the new main process from the old one, then that it is ready from itself."""
    server = supervised
    with LogWatch(server) as log:
        os.kill(begin(server), signal.SIGTERM)
        log.wait(FAILED)
    server.hear("WATCHDOG=1")
    assert not any("STOPPING" in text or "READY" in text or "MAINPID" in text for text in server.unheard())
    with LogWatch(server) as log:
        pid = coming_up_supervised(server, log)
        assert not any("READY" in text or "MAINPID" in text for text in server.unheard())
        os.kill(server.pid, signal.SIGCONT)
        assert server.hear(f"MAINPID={pid}") == {"MAINPID": str(pid)}
        ready = server.hear("READY=1")
        assert ready["MAINPID"] == str(pid) and ready["STATUS"] == "serving digits"
        wait_gone(server.pid)
        server.hear_of(pid, "WATCHDOG=1")
        os.kill(pid, signal.SIGTERM)
        wait_gone(pid)
    assert server.process is not None and server.process.wait(WATCHDOG) == 0
    said = server.unheard()
    assert sum("STOPPING=1" in text for text in said) == 1 and not any("READY" in text for text in said)
    assert server.leftovers() == []


def coming_up_supervised(server: Supervised, log: LogWatch) -> int:
    pid = begin(server)
    log.wait("sockets of the server before us")
    os.kill(server.pid, signal.SIGSTOP)
    log.wait("worker ready")
    return pid


def descriptors(pid: int) -> Counter[str]:
    """What the process has open, by kind; numbers of sockets and names of segments say nothing."""
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            text = str(entry.readlink())
        except FileNotFoundError:
            continue
        found["segment" if "/dev/shm/prefork-" in text else text.partition(":")[0].partition("-work-")[0]] += 1
    return found


def family(server: Server) -> list[Counter[str]]:
    """Of the master, its template and its workers."""
    status = server.status()
    pids = [status["pid"], status["template"]["pid"], *(row["pid"] for row in status["workers"])]
    return [descriptors(int(pid)) for pid in pids]


@pytest.mark.parametrize("kind", ["posix", "sysv"])
def test_ten_upgrades_leave_no_descriptor_process_or_segment(place: Path, kind: str) -> None:
    with serving(place, "--shm", kind, "--metrics-bind", "127.0.0.1:0") as server:
        address, name = server.address, server.status()["models"][0]["segment"]["name"]
        first, masters = settled(server), {server.pid}
        with Caller(address) as caller:
            for _ in range(10):
                old = int(server.status()["pid"])
                done = ctl(server, "upgrade")
                assert done.returncode == 0, done.stderr
                if server.process is not None and server.process.pid == old:
                    server.process.wait(WATCHDOG)
                wait_gone(old)
                masters.add(int(server.status()["pid"]))
        assert caller.failed == []
        assert [info.name for info in list_segments() if info.owner and info.owner.pid in masters] == [name]
        assert server.status()["models"][0]["segment"]["name"] == name and server.status()["generation"] == 11
        assert any(settled(server) == first for _ in range(100)), (settled(server), first)  # who asks costs one, too


def settled(server: Server) -> list[Counter[str]]:
    """Once the process of /metrics is there, which comes when it may."""
    count = 1 + 1 + 2  # telemetry, template, workers, which belong to the master wherever they were forked
    master = int(server.status()["pid"])
    for _ in range(1000):
        if len(children_of(master)) == count:
            return family(server)
        server.status()
    raise AssertionError(f"children of {master}: {children_of(master)}")


class Stayer(Thread):
    """Asks on one connection and never goes by itself; how it was told to in the end."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.wire, self.answered, self.end = Wire(address), 0, ""

    def run(self) -> None:
        try:
            while not self.end:
                self.wire.send(digits(1))
                answer = self.wire.answer()
                if answer.kind == Kind.GOAWAY:
                    answer = self.wire.answer()
                self.end = "" if answer.kind == Kind.INFER_REPLY else "refused"
                self.answered += not self.end
        except Exception as e:
            self.end = type(e).__name__


def test_a_client_that_stays_is_served_for_the_graceful_time(place: Path) -> None:
    with serving(place, "--graceful-timeout", "2") as server:
        stayer = Stayer(server.address)
        with stayer.wire:
            stayer.start()
            assert ctl(server, "upgrade").returncode == 0
            answered = stayer.answered
            assert ctl(server, "upgrade").returncode == 0  # while the first server is still there for this client
            assert server.process is not None and server.process.wait(WATCHDOG) == 0
            stayer.join()
        assert stayer.answered > answered + 100 and stayer.end == "refused"

"""What may come between two masters of which one takes the other's place: there is one server at each moment, no client
is refused, the reason is told, and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from prefork import control
from prefork.codec.message import Kind
from prefork.errors import FailedPrecondition
from prefork.shm.sweep import list_segments
from tests.roles.server import Server
from tests.roles.supervisor import Supervised
from tests.roles.test_upgrade import Caller, ask, ctl, serving, until_answered
from tests.roles.watch import WATCHDOG, LogWatch, children_of, until, wait_gone
from tests.roles.wire import Wire, digits

FAILED = "upgrade failed, this server goes on"


@pytest.fixture
def file(place: Path) -> Path:
    """A configuration that a test changes between two masters."""
    path = place / "prefork.toml"
    path.write_text("")
    return path


def begin(server: Server) -> int:
    return int(str(ask(server, "upgrade")["pid"]))


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
        assert answers(address) and len(list(server.work.glob("*"))) == 1


def test_a_rollback_of_a_new_master_that_hangs(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        pid = begin(server)
        os.kill(pid, signal.SIGSTOP)
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
            os.kill(pid, signal.SIGSTOP)
        assert server.stop(number) == 0
    wait_gone(pid)
    assert not (place / "pid").exists()
    assert [info.name for info in list_segments() if info.owner and info.owner.pid == pid] == []


def test_nothing_that_the_new_master_has_read_changes_meanwhile(place: Path) -> None:
    with serving(place) as server, LogWatch(server) as log:
        pid = begin(server)
        os.kill(pid, signal.SIGSTOP)
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
        os.kill(pid, signal.SIGSTOP)
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
            os.kill(pid, signal.SIGSTOP)
            server.log_file.rename(place / "log.1")
        server.log_file.touch()
        with LogWatch(server) as log:
            os.kill(server.pid, signal.SIGUSR1)
            server.status()
            os.kill(pid, signal.SIGCONT)
            log.wait("the server before us has let go", pid=pid)
            assert server.process is not None and server.process.wait(WATCHDOG) == 0


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


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[server]\nunix = '{place}/other.sock'\n", "unix"),
        ("[server]\nunix = ''\n", "unix"),
        ("[server]\ncontrol = '{place}/other.sock'\n", "control"),
        ("[server]\nbacklog = 'long'\n", "backlog"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(place: Path, file: Path, text: str, word: str) -> None:
    with serving(place, "--config", str(file), "--quantize", "none") as server:
        file.write_text(text.format(place=place))
        done = ctl(server, "upgrade")
        assert done.returncode == 1 and "the old program serves on" in done.stderr and word in done.stderr
        assert answers(server.address) and answers(server.unix)


@pytest.mark.parametrize("workers", [1, 3])
def test_other_numbers_of_workers_and_no_more_metrics(place: Path, file: Path, workers: int) -> None:
    file.write_text("[server]\nworkers = 2\n[telemetry]\nmetrics_bind = '127.0.0.1:0'\n")
    server = Server(place, "--config", str(file), "--quantize", "none", "--pid-file", str(place / "pid"))
    with server, LogWatch(server) as log:
        bind = str(next(line for line in server.log() if line["event"] == "starting")["metrics"])
        file.write_text(f"[server]\nworkers = {workers}\n")
        with Caller(server.address) as caller:
            assert ctl(server, "upgrade").returncode == 0
            assert server.process is not None and server.process.wait(WATCHDOG) == 0
            until_answered(caller, caller.answered + 20)
        assert caller.failed == []
        assert len([row for row in server.rows() if row["pid"]]) == workers
        host, _, port = bind.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        last = int(server.status()["pid"])
        os.kill(last, signal.SIGTERM)
        log.wait("stopped")
        wait_gone(last)


def test_sockets_of_a_service_manager_stay_its_own_and_ours_ours(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as given:
        server = Supervised(place, "--workers", "1", given=[given])
        server.start()
        assert ctl(server, "upgrade").returncode == 0
        assert server.process is not None and server.process.wait(WATCHDOG) == 0
        pid = int(server.status()["pid"])
        assert answers(server.address) and answers(server.unix)
        with socket.socket(socket.AF_UNIX) as waiting:
            os.kill(pid, signal.SIGTERM)
            wait_gone(pid)
            with pytest.raises(FileNotFoundError):
                waiting.connect(server.unix.removeprefix("unix:"))
        server.close()
        assert server.leftovers() == []
        with socket.create_connection(given.getsockname()):
            pass  # waits in the manager's queue for the next server


def test_an_old_master_that_is_killed_while_it_leaves_is_cleaned_up_after(place: Path, file: Path) -> None:
    with serving(place, "--config", str(file), "--quantize", "none") as server, LogWatch(server) as log:
        old = server.status()["models"][0]["segment"]["name"]
        worker = server.workers()[0]
        file.write_text("[server]\nshm = 'sysv'\n")
        os.kill(worker, signal.SIGSTOP)  # it holds up the end of its master
        assert ctl(server, "upgrade").returncode == 0
        assert old in segments()
        os.kill(server.pid, signal.SIGKILL)
        assert server.process is not None and server.process.wait(WATCHDOG) == -signal.SIGKILL
        assert log.wait("removed a dead master's segment")["name"] == old
        assert log.wait("removed a dead master's scratch directory") and answers(server.address)


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

"""The template: workers come from it, nobody misses it when it dies, and it steps aside where a fork is not safe."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefork.client import Client
from tests.roles.server import Server
from tests.roles.watch import LogWatch, until, until_row, wait_gone
from tests.roles.wire import IMAGE

RESPAWNS = 30


@pytest.fixture
def server(place: Path) -> Iterator[Server]:
    with Server(place, "--workers", "2") as found:
        yield found


def template_of(server: Server) -> dict[str, Any]:
    return dict(server.status()["template"])


def until_template(server: Server, **fields: Any) -> dict[str, Any]:
    """What status says of the template, once these fields have these values."""

    def look() -> dict[str, Any] | None:
        found = template_of(server)
        return found if all(found[key] == value for key, value in fields.items()) else None

    return until(server, look, f"template: {fields}")


def serves(server: Server) -> bool:
    with Client(server.address) as client:
        return bool(client.infer("digits", {"image": IMAGE})["label"].shape == (1,))


def links(pid: int) -> list[str]:
    """What the descriptors of a process are open on."""
    return [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]


def sockets(pid: int) -> set[str]:
    return {link for link in links(pid) if link.startswith("socket:")}


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_status_shows_a_template_of_one_thread(server: Server) -> None:
    found = template_of(server)
    assert found["state"] == "ready" and not found["reason"] and found["pss_bytes"] > 0
    assert threads(found["pid"]) == 1


def test_a_killed_worker_comes_again_from_the_template(server: Server) -> None:
    """While the template is stopped the slot has a worker without a pid; once it goes on the worker is ready."""
    template = template_of(server)["pid"]
    with LogWatch(server) as log:
        os.kill(template, signal.SIGSTOP)
        os.kill(server.workers()[0], signal.SIGKILL)
        assert until_row(server, 0, state="starting")["pid"] is None
        os.kill(template, signal.SIGCONT)
        ready = log.wait("worker ready", slot=0)
    assert template_of(server)["pid"] == template and ready["pid"] in server.workers()
    assert server.status()["restarts"] == 1 and serves(server)


def test_workers_do_not_notice_that_the_template_dies(server: Server) -> None:
    template, workers = template_of(server)["pid"], server.workers()
    with LogWatch(server) as log:
        os.kill(template, signal.SIGKILL)
        assert "SIGKILL" in log.wait("template died", pid=template)["reason"]
    assert serves(server) and server.workers() == workers
    after = until_template(server, state="ready")
    assert after["pid"] != template and server.workers() == workers and server.status()["restarts"] == 0


def test_without_a_template_workers_come_from_the_master(server: Server) -> None:
    template, worker = template_of(server)["pid"], server.workers()[0]
    with LogWatch(server) as log:
        os.kill(template, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        until_row(server, 0, pid=None, state="starting")
        os.kill(template, signal.SIGKILL)  # with the request to fork unread
        log.wait("worker ready", slot=0)
    assert serves(server)


def test_a_template_that_does_not_fork_is_replaced(server: Server) -> None:
    template = template_of(server)["pid"]
    with LogWatch(server) as log:
        os.kill(template, signal.SIGSTOP)
        os.kill(server.workers()[0], signal.SIGKILL)
        log.wait("template does not fork, killing it", pid=template)
        log.wait("worker ready", slot=0)
    wait_gone(template)
    assert until_template(server, state="ready")["pid"] != template


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_the_server_stops_with_workers_that_are_not_born_yet(place: Path, stopped: bool) -> None:
    server = Server(place, "--workers", "3").start()
    template = template_of(server)["pid"]
    os.kill(template, signal.SIGSTOP)
    victim = server.workers()[1]
    os.kill(victim, signal.SIGKILL)
    until_row(server, 1, pid=None, state="starting")
    everyone = [template, *server.workers()]
    if not stopped:
        os.kill(template, signal.SIGCONT)
    assert server.stop() == 0
    for pid in everyone:
        wait_gone(pid)


def test_where_a_fork_is_not_safe_the_template_says_so_and_leaves(place: Path) -> None:
    with LogWatch(server := Server(place, "--workers", "2", "--threads", "2")) as log, server:
        assert "threads" in log.wait("workers open the models themselves")["reason"]
        found = until_template(server, state="unfit", pid=None)
        assert "threads" in found["reason"] and found["pss_bytes"] is None
        log.wait("READY")
        os.kill(server.workers()[0], signal.SIGKILL)
        log.wait("worker ready", slot=0)
        assert serves(server) and template_of(server)["state"] == "unfit"


def test_system_v_segments_are_handed_down_as_well(place: Path) -> None:
    with Server(place, "--workers", "2", "--shm", "sysv") as server, LogWatch(server) as log:
        assert template_of(server)["state"] == "ready"
        os.kill(server.workers()[1], signal.SIGKILL)
        log.wait("worker ready", slot=1)
        assert serves(server)


def test_a_worker_holds_only_what_is_its_own(place: Path) -> None:
    """Not another's channel, whose end nobody would see then, and not another's queue, which would not close."""
    with Server(place, "--workers", "4") as server:
        held = [sockets(pid) for pid in server.workers()]
        shared = set.intersection(*held)
        assert len(shared) == 1, "all serve the Unix socket, and nothing else together"
        own = [found - shared for found in (*held, sockets(template_of(server)["pid"]))]
        assert sum(map(len, own)) == len(set.union(*own))


def test_no_descriptor_is_left_by_a_fork(server: Server) -> None:
    template = template_of(server)["pid"]
    with LogWatch(server) as log:
        for turn in range(RESPAWNS):
            os.kill(server.workers()[0], signal.SIGTERM)
            log.wait("worker ready", slot=0)
            if turn == 0:
                before = len(links(server.pid)), len(links(template)), len(links(server.workers()[0]))
    assert (len(links(template)), len(links(server.workers()[0]))) == before[1:]
    until(server, lambda: len(links(server.pid)) <= before[0], "as few descriptors in the master as before")
    assert template_of(server)["pid"] == template and server.status()["restarts"] == RESPAWNS


def test_the_log_is_reopened_in_the_template_and_in_a_worker_that_is_not_born_yet(server: Server) -> None:
    template, old = template_of(server)["pid"], server.place / "log.json.1"
    os.kill(template, signal.SIGSTOP)
    os.kill(server.workers()[0], signal.SIGKILL)
    until_row(server, 0, pid=None, state="starting")
    server.log_file.rename(old)
    os.kill(server.pid, signal.SIGUSR1)
    until(server, lambda: str(server.log_file) in links(server.pid), "the new file in the master")
    os.kill(template, signal.SIGCONT)
    until_row(server, 0, state="ready")
    everyone = [server.pid, template, *server.workers()]
    until(server, lambda: all(str(server.log_file) in links(pid) for pid in everyone), "the new file in every process")
    assert not any(str(old) in links(pid) for pid in everyone)


def test_the_template_ignores_what_a_whole_service_is_sent(server: Server) -> None:
    template = template_of(server)["pid"]
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGUSR2, signal.SIGWINCH):
        os.kill(template, number)
    with LogWatch(server) as log:  # it still forks
        os.kill(server.workers()[1], signal.SIGKILL)
        log.wait("worker ready", slot=1)
    assert template_of(server)["pid"] == template


def test_a_server_that_is_told_so_does_without(place: Path) -> None:
    with Server(place, "--workers", "2", "--template", "off") as server:
        assert template_of(server) == {"state": "unfit", "reason": "template is off", "pid": None, "pss_bytes": None}
        assert serves(server)

"""The master's view of the template: when workers come from it, when not, and what its death means. Real channels."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from prefork.child import UNBORN, Child
from prefork.config import Config
from prefork.jobs import WorkerJob
from prefork.log import setup
from prefork.nursery import BIRTH, Nursery
from prefork.shm.scoreboard import Scoreboard
from prefork.status import BootError

KILLED = int(signal.SIGKILL)  # as a wait status


@pytest.fixture
def template() -> Iterator[tuple[Child, socket.socket]]:
    """A template that is a process without a model, and its end of the channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process, ours, theirs:
        ours.setblocking(False)
        yield Child("template", 0, 1, process.pid, ours), theirs
        process.kill()


@pytest.fixture
def nursery(template: tuple[Child, socket.socket], tmp_path: Path) -> Nursery:
    found = Nursery(setup(file=tmp_path / "log"))
    found.template, found.state = template[0], "opening"
    return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[WorkerJob]:
    board = Scoreboard.create(4)
    with socket.socket() as one, socket.socket() as two, socket.socket(socket.AF_UNIX) as unix:
        config = cast(Config, None)  # what a fork request does not carry
        log = setup(file=tmp_path / "log")
        yield WorkerJob(log, config, 1, 1, 1, (), {1: one, 3: two}, unix, board, tmp_path)
    board.close()


def test_workers_wait_for_the_first_template_only(nursery: Nursery, job: WorkerJob) -> None:
    assert nursery.template is not None and nursery.waiting and nursery.spawn(job) is None
    nursery.hear({"event": "ready"})
    assert not nursery.waiting
    assert nursery.left(nursery.template, KILLED, 10.0, started=True) is None
    assert nursery.state == "dead" and "SIGKILL" in nursery.reason and not nursery.waiting
    assert nursery.retry_at >= 11.0 and nursery.reopen(10.5) is None and nursery.spawn(job) is None


def test_hope_ends_with_the_second_death_or_with_a_reason(nursery: Nursery) -> None:
    template = nursery.template
    assert template is not None and not nursery.hopeless
    nursery.left(template, KILLED, 0.0, started=True)
    assert nursery.state == "dead" and not nursery.hopeless
    nursery.template, nursery.state = template, "opening"
    nursery.left(template, KILLED, 0.0, started=True)
    assert nursery.hopeless
    nursery.template, nursery.state = template, "opening"
    nursery.hear({"event": "ready"})
    assert not nursery.hopeless
    template.said = {"event": "failed", "message": "no such operator"}
    nursery.left(template, 65 << 8, 0.0, started=True)
    assert nursery.hopeless and nursery.reason == "no such operator"


def test_a_request_carries_the_sockets(nursery: Nursery, job: WorkerJob, template: tuple[Child, socket.socket]) -> None:
    nursery.hear({"event": "ready"})
    child = nursery.spawn(job)
    assert child is not None and child.pid == UNBORN and child.slot == 1
    data, fds, _, _ = socket.recv_fds(template[1], 4096, 16)
    assert b'"1,3"' in data and job.unix is not None
    wanted = [job.listeners[1].fileno(), job.listeners[3].fileno(), job.unix.fileno()]
    assert [os.fstat(fd).st_ino for fd in fds[1:]] == [os.fstat(fd).st_ino for fd in wanted]
    with socket.socket(fileno=fds[0]) as line:
        line.send(b'{"event": "hello", "pid": 7}')
        assert child.receive() == [{"event": "hello", "pid": 7}] and not child.closed
    for fd in fds[1:]:
        os.close(fd)
    assert child.receive() == [] and child.closed
    child.channel.close()


def test_a_request_that_is_never_read_ends(
    nursery: Nursery, job: WorkerJob, template: tuple[Child, socket.socket]
) -> None:
    nursery.hear({"event": "ready"})
    child = nursery.spawn(job)
    assert child is not None and child.receive() == [] and not child.closed
    template[1].close()
    assert select.select([child.channel], [], [], 20)[0] and child.receive() == [] and child.closed
    child.channel.close()
    assert nursery.spawn(job) is None, "a dead template takes no request"


def test_to_kill_an_unborn_child_is_to_close_its_channel(nursery: Nursery, job: WorkerJob) -> None:
    nursery.hear({"event": "ready"})
    child = nursery.spawn(job)
    assert child is not None
    child.kill(signal.SIGKILL)  # with pid 0 it would be the whole process group
    assert child.receive() == [] and child.closed and not child.send({"command": "retire"})
    child.channel.close()


def test_more_sockets_than_a_message_carries_are_no_request(nursery: Nursery, job: WorkerJob) -> None:
    nursery.hear({"event": "ready"})
    listeners = dict.fromkeys(range(16), job.listeners[1])
    many = WorkerJob(job.log, job.config, 1, 1, 1, (), listeners, job.unix, job.scoreboard, job.scratch)
    assert nursery.spawn(many) is None


def test_a_model_that_cannot_be_opened_ends_a_start_and_nothing_later(nursery: Nursery) -> None:
    template = nursery.template
    assert template is not None
    template.said = {"event": "failed", "message": "model 'm': no such operator"}
    error = nursery.left(template, 65 << 8, 0.0, started=False)
    assert isinstance(error, BootError) and error.exit_code == 65 and "no such operator" in error.message
    nursery.template, nursery.state = template, "opening"
    assert nursery.left(template, 65 << 8, 0.0, started=True) is None
    assert str(nursery.state) == "dead" and "no such operator" in nursery.reason


def test_an_unfit_template_is_not_followed_by_another(nursery: Nursery, job: WorkerJob) -> None:
    assert nursery.template is not None
    nursery.hear({"event": "unfit", "reason": "two threads"})
    assert not nursery.waiting and nursery.spawn(job) is None
    assert nursery.left(nursery.template, 0, 0.0, started=False) is None
    assert (nursery.state, nursery.reason, nursery.reopen(1e9)) == ("unfit", "two threads", None)


def test_a_template_that_does_not_fork_is_killed(nursery: Nursery) -> None:
    assert nursery.template is not None
    nursery.look(100.0, 100.0 + BIRTH)
    assert os.waitpid(nursery.template.pid, os.WNOHANG) == (0, 0)
    nursery.look(100.0, 100.1 + BIRTH)
    assert os.waitpid(nursery.template.pid, 0)[1] == KILLED


def test_a_closed_nursery_forgets_its_template_quietly(nursery: Nursery, job: WorkerJob) -> None:
    template = nursery.template
    assert template is not None
    nursery.close()
    assert nursery.template is None, "nobody kills it again, when its pid may be another's"
    nursery.close()
    assert nursery.left(template, KILLED, 0.0, started=True) is None
    assert nursery.state == "none" and nursery.template is None and nursery.spawn(job) is None

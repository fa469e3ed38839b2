"""The template: opens every model of a generation once, then forks workers from itself on the master's word.

A worker that begins as a copy of a process with open, warm sessions is ready in milliseconds and shares everything that
the opening cost: packed weights whatever the kind of segment, libraries, heaps. This is safe only while the process has
exactly one thread; where it has more (`threads` above one) it says so and leaves, and the master starts workers
directly. It never serves. The master's side of it is nursery.py.

A forked worker is re-parented to the master, which is the subreaper of its descendants: the template forks a process
that forks the worker and leaves.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from prefork import attach, worker
from prefork.background import quietly
from prefork.channel import Channel
from prefork.child import CRASH, PR_SET_PDEATHSIG, prctl, report_failure
from prefork.errors import PreforkError
from prefork.jobs import LoadedModel, TemplateJob, WorkerJob
from prefork.log import Logger
from prefork.shm.segment import SegmentRef

PROOF_SECONDS = 60.0  # for one forked child to answer every warm-up; it takes milliseconds or for ever


class Unfit(PreforkError):
    """This process must not fork workers; they open the models themselves."""


def main(channel: socket.socket, job: TemplateJob) -> int:
    """Open, warm, prove, then fork until the master lets go. Raises PreforkError when a model cannot be opened."""
    log = job.log.for_role("template", generation=job.generation)
    gc.collect()  # what the imports made: the collection at the end, which readiness waits for, need not look at it
    gc.freeze()
    line = Channel(channel)
    if not job.complete:
        job = replace(job, models=_await_models(line, log), complete=True)
    open_models = partial(attach.make_ready, job.models, job.config, job.scratch)
    ready = quietly(open_models) if job.quiet else open_models()
    for note in ready.notes:
        log.warning("no warm-up", reason=note)
    try:
        prove(ready)
    except Unfit as e:
        line.send({"event": "unfit", "reason": e.message})
        return 0
    gc.collect()
    gc.freeze()
    line.send({"event": "ready"})
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while not line.closed:
        poll.poll()
        for message, fds in line.receive(1):  # a worker must not inherit what the next one's request carries
            match message["command"]:
                case "fork":
                    _fork(channel, job, ready, message, fds)
                case "reopen":
                    log.reopen()
            for fd in fds:
                os.close(fd)
    return 0


def _await_models(line: Channel, log: Logger) -> tuple[LoadedModel, ...]:
    """What the master tells when its loaders are done. All that this process imports has been imported meanwhile."""
    models: list[LoadedModel] = []
    poll = select.poll()
    poll.register(line.fileno(), select.POLLIN)
    while not line.closed:
        poll.poll()
        for message, _ in line.receive(1):
            match message["command"]:
                case "model":
                    ref = SegmentRef.from_dict(message["segment"])
                    models.append(LoadedModel(str(message["name"]), ref, {}, int(message["version"])))
                case "prove":
                    return tuple(models)
                case "reopen":
                    log.reopen()
    os._exit(0)


def prove(ready: attach.Ready) -> None:
    """One forked child must answer every warm-up as this process did. It also measures the hand-off to a thread, for
    all workers, since this process must start none. Raises Unfit with the reason."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise Unfit(f"the process has {threads} threads after opening the models")
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        _prove_in_child(ready, tell)
    os.close(tell)
    fd = os.pidfd_open(pid)
    try:
        if not select.select([fd], [], [], PROOF_SECONDS)[0]:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        said = os.read(told, 64)
    finally:
        os.close(fd)
        os.close(told)
    if status != 0:
        raise Unfit(f"a forked child could not answer the warm-up (wait status {status})")
    ready.costs.set_hand_off(float(said))


def _prove_in_child(ready: attach.Ready, tell: int) -> NoReturn:
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it may hang, and a killed template waits for nobody
        warmed = [session.warm(1) for session in ready.opened.sessions.values()]
        os.write(tell, repr(worker.hand_off()).encode())
        code = int(any(warm is not None and warm.matches is False for warm in warmed))
    finally:
        os._exit(code)


def _fork(
    channel: socket.socket, job: TemplateJob, ready: attach.Ready, message: Mapping[str, object], fds: list[int]
) -> None:
    """`fds`: the worker's end of its channel, a listening socket for each of `slots`, then the Unix socket if there
    is one. What goes wrong here is the master's to see: the worker's channel closes without a word."""
    try:
        pid = os.fork()
    except OSError:
        return
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        between = os.getpid()
        if os.fork() == 0:
            _become_worker(channel, job, ready, message, fds, between)
    finally:
        os._exit(0)


def _become_worker(
    channel: socket.socket, job: TemplateJob, ready: attach.Ready, message: Mapping[str, object], fds: list[int],
    between: int,
) -> NoReturn:  # fmt: skip
    code = CRASH
    line = socket.socket(fileno=fds[0])
    try:
        _until_adopted(between, job.master_pid)
        channel.close()
        hello = Channel(line)
        hello.send({"event": "hello", "pid": os.getpid()})
        if hello.closed:  # the master has given us up meanwhile, and may have another in our slot
            os._exit(0)
        ours = _worker_job(job, message, fds[1:])
        ours.scoreboard.slot(ours.row).begin(os.getpid(), ours.generation)
        code = worker.run(line, ours, ready)
    except PreforkError as e:
        code = e.exit_code
        report_failure(line, e)
    except BaseException as e:
        report_failure(line, e)
        with suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _until_adopted(between: int, master: int) -> None:
    """Wait until the process in between is gone, so that the master is our parent; then die with the master.

    Asked for earlier, the death signal would come when the process in between ends (prctl(2))."""
    while os.getppid() == between:
        os.sched_yield()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != master:
        os._exit(0)


def _worker_job(job: TemplateJob, message: Mapping[str, object], fds: list[int]) -> WorkerJob:
    slots = [int(index) for index in str(message["slots"]).split(",")]
    sockets = [socket.socket(fileno=fd) for fd in fds]
    listeners = dict(zip(slots, sockets, strict=False))
    return WorkerJob(
        job.log, job.config, slots[0], int(str(message["row"])), job.generation, job.models, listeners,
        sockets[len(slots)] if len(sockets) > len(slots) else None, job.scoreboard, job.scratch,
        job.places,
    )  # fmt: skip

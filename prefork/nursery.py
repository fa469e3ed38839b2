"""The master's view of the template: where workers come from, and what to do when they cannot come from there.

Runs in the master; the other side is template.py. States:

| state | meaning | workers are |
|---|---|---|
| none | nothing to serve yet | not spawned |
| opening | the template imports, gets its models, opens and proves them | waited for; later forked from the master |
| ready | | forked from the template |
| unfit | it said that forking is not safe (`reason`) | forked from the master, each opening the models itself |
| dead | it died (`reason`); another is tried at `retry_at` | forked from the master until then |
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from prefork import child as children
from prefork import slots
from prefork.child import Child
from prefork.errors import PreforkError
from prefork.jobs import LoadedModel, TemplateJob, WorkerJob
from prefork.log import Logger
from prefork.status import boot_error

State = Literal["none", "opening", "ready", "unfit", "dead"]
TRIES = 2  # templates that may die coming up before a change is given up
BIRTH = 5.0  # seconds that a template may take to fork, which takes it milliseconds


class Nursery:
    """Doors: `open`, `give`, `reopen`, `spawn`, `hear`, `look`, `left`, `close`. `waiting`: workers should wait for
    the template."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._job: TemplateJob | None = None
        self._failures = 0
        self._said_why = False
        self.state: State = "none"
        self.reason = ""
        self.retry_at = 0.0
        self.template: Child | None = None

    def open(self, job: TemplateJob) -> Child | None:
        """Spawn the template of a generation, maybe before its models are there; None when the kernel gives no
        process."""
        self._job = job
        try:
            self.template = children.spawn("template", 0, job.generation, job, job.descriptors)
        except OSError as e:
            self.state, self.reason = "dead", f"fork: {e.strerror}"
            self._failures += 1
            self._log.error("template cannot be forked", error=e)
            return None
        self.state = "opening"
        return self.template

    def give(self, models: Sequence[LoadedModel]) -> None:
        """All models of the generation are loaded. A template that cannot be told is replaced by one that knows."""
        if self._job is None:
            return
        self._job = dataclasses.replace(self._job, models=tuple(models), complete=True)
        if self.template is not None and not all(self.template.send(message) for message in _models(models)):
            self.template.kill(signal.SIGKILL)

    def forgo(self, reason: str) -> None:
        """Do without a template."""
        self.state, self.reason = "unfit", reason
        self._log.info("workers open the models themselves", reason=reason)

    def reopen(self, now: float) -> Child | None:
        """Another template when the last one has died and its time has come."""
        if self.state != "dead" or now < self.retry_at or self._job is None:
            return None
        self.retry_at = now + max(1.0, slots.delay(self._failures + 1))  # should the kernel give no process
        return self.open(self._job)

    @property
    def waiting(self) -> bool:
        return self.state == "opening" and self._failures == 0

    @property
    def hopeless(self) -> bool:
        """No template comes up: the last one said why, which the next would say too, or too many have died."""
        return self.state == "dead" and (self._said_why or self._failures >= TRIES)

    def spawn(self, job: WorkerJob) -> Child | None:
        """Have the template fork a worker; None when that is not to be had, and the worker must come from the master.

        The child has no pid until it says hello."""
        if self.state != "ready" or self.template is None:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = [theirs.fileno(), *(sock.fileno() for sock in job.listeners.values())]
            if job.unix is not None:
                fds.append(job.unix.fileno())
            message = {"command": "fork", "row": job.row, "slots": ",".join(map(str, job.listeners))}
            if len(fds) > children.MAX_FDS or not self.template.send(message, fds):
                ours.close()
                return None
        ours.setblocking(False)
        return Child("worker", job.slot, job.generation, children.UNBORN, ours, row=job.row)

    def hear(self, message: Mapping[str, Any]) -> None:
        """What the template says."""
        match message["event"]:
            case "ready":
                self.state, self.reason, self._failures = "ready", "", 0
            case "unfit":
                self.state, self.reason = "unfit", str(message["reason"])
                self._log.warning("workers open the models themselves", reason=self.reason)

    def left(self, child: Child, code: int, now: float, *, started: bool) -> PreforkError | None:
        """The template is reaped. The error that ends a start, if any: a model that cannot be opened in the template
        cannot be opened in a worker either."""
        if child is not self.template:
            return None
        self.template = None
        said = child.said if child.said and child.said.get("event") == "failed" else None
        if said and not started:
            return boot_error("the template", str(said["message"]), os.waitstatus_to_exitcode(code))
        if self.state != "unfit" and not child.leaving:
            self.state = "dead"
            self._failures += 1
            self._said_why = said is not None
            self.reason = str(said["message"]) if said else child.how(code)
            self.retry_at = now + max(1.0, slots.delay(self._failures))
            self._log.warning("template died", pid=child.pid, reason=self.reason)
        return None

    def look(self, asked: float, now: float) -> None:
        """A worker asked for at `asked` is not born yet. A template that takes long over a fork is stuck or stopped:
        with it go the requests that it has not read, and their workers come from elsewhere."""
        if self.template is not None and now - asked > BIRTH:
            self._log.warning("template does not fork, killing it", pid=self.template.pid)
            self.template.kill(signal.SIGKILL)

    def close(self) -> None:
        """The template is not needed any more; it has nothing to lose."""
        self.state, self._job = "none", None
        if self.template is not None:
            self.template.leaving = True
            self.template.kill(signal.SIGKILL)
            self.template = None  # once it is reaped its pid may be another's


def _models(models: Sequence[LoadedModel]) -> Iterator[dict[str, Any]]:
    """One message a model, since a message is of bounded length; then the word that there are no more."""
    for model in models:
        yield {"command": "model", "name": model.name, "segment": model.ref.to_dict(), "version": model.version}
    yield {"command": "prove"}

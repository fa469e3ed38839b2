"""A server whose models change under its clients: what to ask it, who its processes are, how to hold a phase open.

A phase is held by real means: its loader or template is stopped by a signal, or a canary waits for a word.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prefork import control
from prefork.client import Client
from prefork.codec.message import InferReply, Kind
from tests.roles.server import REPOSITORY, Server
from tests.roles.watch import children_of, until
from tests.roles.wire import Wire, infer

X = np.array([1.0, 2.0], np.float32)
PACE = 1e-3  # seconds between two requests of a client, which leave some of the processor to the servers
BOARD = "memfd:prefork-scoreboard"


def ask(server: Server, command: str, **args: Any) -> dict[str, Any]:
    """One command of the control socket."""
    return dict(control.request(server.runtime / "control.sock", command, args))


def ctl(server: Server, *args: str) -> subprocess.CompletedProcess[str]:
    """prefork-ctl as a person runs it."""
    command = [sys.executable, "-m", "prefork.ctl", "--control", str(server.runtime / "control.sock"), *args]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def until_phase(server: Server, *phases: str) -> dict[str, Any]:
    """The change, once it is in one of the phases."""

    def look() -> dict[str, Any] | None:
        found = ask(server, "change")
        return found if found["phase"] in phases else None

    return until(server, look, f"a change that is {' or '.join(phases)}")


def change(server: Server, command: str, **args: Any) -> dict[str, Any]:
    """Do it and wait for its end; the last row."""
    number = ask(server, command, **args)["number"]
    until(server, lambda: ask(server, "change", number=number)["phase"] in ("done", "failed"), f"the end of {command}")
    return ask(server, "change", number=number)


def reload(server: Server, *models: str, **args: Any) -> dict[str, Any]:
    return change(server, "reload", models=list(models), **args)


def canary(server: Server, share: float = 0.5) -> dict[str, Any]:
    """Reload a share of the workers, and wait until it holds."""
    ask(server, "reload", canary=share)
    return until_phase(server, "holding")


def answer(server: Server, model: str = "adder") -> tuple[float, str]:
    """What the model adds, and its version."""
    with Client(server.address) as client:
        reply = client.infer_raw(model, {"x": X})
    return added(reply), reply.model_version


def added(reply: InferReply) -> float:
    return float(np.frombuffer(reply.outputs[0].data, np.float32)[0] - X[0])


# processes


def links(pid: int) -> list[str]:
    """What its descriptors are; none when it is gone."""
    found = []
    with suppress(FileNotFoundError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.append(str(entry.readlink()))
    return found


def sockets_of(pid: int) -> int:
    return sum(link.startswith("socket:") for link in links(pid))


def newcomer(server: Server, known: set[int], *, board: bool) -> int:
    """The pid of a child that is not among the known and has (template, worker) or has not (loader) the scoreboard,
    once it has closed what is not its own."""

    def look() -> int | None:
        for pid in set(children_of(server.pid)) - known:
            own = links(pid)
            ready = sum(link.startswith("socket:") for link in own) == 1
            if ready and any(BOARD in link for link in own) == board:
                return pid
        return None

    return until(server, look, "a new template" if board else "a new loader")


@dataclass
class Held:
    """A reload that stands still: in `loading` its loader is stopped, in `opening` its template, in `rolling` and
    `returning` the template that its next worker is to come from; in `holding` it is a canary."""

    server: Server
    phase: str
    stopped: list[int] = field(default_factory=list)

    def go(self) -> None:
        for pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def hold(server: Server, phase: str) -> Held:
    """Begin a reload and hold it there."""
    known, old = set(children_of(server.pid)), server.status()["template"]["pid"]
    ask(server, "reload", canary=0.5 if phase in ("holding", "rolling", "returning") else 1.0)
    template = newcomer(server, known, board=True)
    stop = {"loading": [], "opening": [template], "holding": [], "rolling": [template], "returning": [old]}[phase]
    if phase == "loading":
        stop = [newcomer(server, known, board=False)]
    elif phase != "opening":
        until_phase(server, "holding")
    for pid in stop:
        os.kill(pid, signal.SIGSTOP)
    if phase == "rolling":
        ask(server, "promote")
    elif phase == "returning":
        ask(server, "rollback")
    until_phase(server, phase)
    return Held(server, phase, stop)


# clients


class Traffic:
    """Clients without a retry that ask on and on: some keep their connection, others open one for each request.

    Answers are (what was added, version)."""

    def __init__(self, server: Server, model: str = "adder", kept: int = 2, fresh: int = 1) -> None:
        self.failures: list[str] = []
        self.answers: dict[str, list[tuple[float, str]]] = {"kept": [], "fresh": []}
        self._over = threading.Event()
        self._model, addresses = model, (server.address, server.unix)
        self._threads = [
            threading.Thread(target=self._run, args=(deed, addresses[n % 2]))
            for n, deed in enumerate([self._kept] * kept + [self._fresh] * fresh)
        ]

    def _run(self, deed: Callable[[str], None], address: str) -> None:
        try:
            deed(address)
        except Exception as e:
            self.failures.append(f"{deed.__name__} {address}: {type(e).__name__}: {e}")

    def _kept(self, address: str) -> None:
        with Client(address, retries=0, pool_size=1) as client:
            while not self._over.wait(PACE):
                reply = client.infer_raw(self._model, {"x": X})
                self.answers["kept"].append((added(reply), reply.model_version))

    def _fresh(self, address: str) -> None:
        while not self._over.wait(PACE):
            with Wire(address) as wire:
                wire.send(infer(1, self._model, x=X))
                found = wire.answer()
                while found.kind == Kind.GOAWAY:
                    found = wire.answer()
                assert isinstance(found.message, InferReply), found
                self.answers["fresh"].append((added(found.message), found.message.model_version))

    @property
    def seen(self) -> set[tuple[float, str]]:
        return {*self.answers["kept"], *self.answers["fresh"]}

    def count(self) -> int:
        return sum(map(len, self.answers.values()))


@contextmanager
def traffic(server: Server, **options: Any) -> Iterator[Traffic]:
    """Clients that ask while the block runs; none of them fails, and each kind got answers."""
    found = Traffic(server, **options)
    for thread in found._threads:
        thread.start()
    try:
        yield found
    finally:
        found._over.set()
        for thread in found._threads:
            thread.join()
    assert found.failures == []
    assert found.answers["kept"] and found.answers["fresh"]

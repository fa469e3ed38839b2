"""A server under a light load, a model file that can be replaced, a reload that is watched: for bench.reload_faults.

Faults come from outside, by signals and files, when status shows the phase that they are meant for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench import life, procs
from bench.faults_load import Confined
from bench.inputs import FEEDS
from bench.life import Holding, Operator
from bench.peer import Peer
from bench.server import REPOSITORY, Server
from prefork.client import Client
from prefork.demo import model_path

WORKERS = 3
RATE = 60.0  # requests a second
SOON = 30.0  # seconds in which a phase must be seen
INPUT = FEEDS["digits"](model_path())[0]


class Small(Confined):
    """A server with a small /dev/shm of its own. `unshare` is its parent, so signals go where status says."""

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process is not None and self.process.poll() is None:
            os.kill(int(self.status()["pid"]), number)
        code = self._wait()
        left = self.leftovers()
        assert not left, f"left behind: {left}; {self.said()}"
        return code


class Reloading:
    """prefork-ctl reload as a process of its own."""

    def __init__(self, server: Server, *more: str) -> None:
        self._server = server
        control = str(server.runtime / "control.sock")
        command = [sys.executable, "-m", "prefork.ctl", "--control", control, "reload", *more]
        env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        self._process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def until(self, fits: Callable[[dict[str, Any]], bool], *, freeze: bool = False) -> dict[str, Any] | None:
        """Status, as soon as it fits; None when the change is over before. `freeze`: stop the master then."""
        end, seen = time.monotonic() + SOON, False
        while time.monotonic() < end:
            found = self._server.status()
            if fits(found):
                if freeze:
                    os.kill(int(found["pid"]), signal.SIGSTOP)
                return found
            seen = seen or life.phase(found) != ""
            if seen and life.phase(found) == "" and not found["leaving"]:
                return None
        return None

    def abandon(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> tuple[int, str]:
        """Exit code, and what it said."""
        _, said = self._process.communicate(timeout=120)
        return self._process.returncode, said.strip()


class Scene:
    """`place`: of this case alone."""

    def __init__(self, place: Path, *args: str, size: str = "") -> None:
        place.mkdir(parents=True)
        self.live = place / "digits.onnx"
        self.good = life.variant(model_path(), place / "good", 2.0)
        life.put(model_path(), self.live)
        self._stack = ExitStack()
        words = (f"--model=digits={self.live}", "--workers", str(WORKERS), *args)
        if size:
            self.server: Server = Small(place, full=Path("/dev/shm"), size=size)
            self.server.args = words
        else:
            self.server = Server(place, *words)
        self.place = place
        self.operator = Operator(self.server)

    def __enter__(self) -> Scene:
        with ExitStack() as stack:
            stack.enter_context(self.server)
            self.master = int(self.server.status()["pid"])
            self.address = self.server.address
            self.first = self.answer()
            self.load = stack.enter_context(Peer("bench.openload", str(self._plan())))
            self.load.ask(rate=RATE)
            self.before = Holding.of(self.server, self.master)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _plan(self) -> Path:
        np.savez(self.place / "input.npz", **INPUT)
        path = self.place / "plan.json"
        plan = {"address": self.address, "unix": self.server.unix, "inputs": {"digits": str(self.place / "input.npz")}}
        path.write_text(json.dumps(plan))
        return path

    def answer(self) -> list[float]:
        with Client(self.address) as client:
            return [float(value) for value in np.asarray(client.infer("digits", INPUT)["probabilities"]).ravel()]

    def generation(self) -> int:
        return int(self.server.status()["generation"])

    def newcomers(self, found: dict[str, Any]) -> list[int]:
        """Children of the master that are neither workers nor the template that serves: the coming template, then
        the loader, in the order of their birth."""
        known = {row["pid"] for row in found["workers"]} | {row["successor"] for row in found["workers"]}
        known |= {row["pid"] for row in found["leaving"]} | {found["template"]["pid"], self.master}
        return [pid for pid in sorted(procs.descendants(self.master)) if pid not in known]

    def lost(self) -> list[str]:
        """Ends the load: its requests that failed."""
        rows = self.load.ask(stop=True)["rows"]
        answered = sum(row["answered"] for row in rows)
        found = [f"{count} requests: {text}" for row in rows for text, count in row["failures"].items()]
        return found + ([] if answered else ["no request was answered"])

    def untouched(self, *, again: bool = True) -> list[str]:
        """What is wrong, when the first generation should serve as if nothing had been: and a good reload works."""
        found = self.operator.rest()
        problems = [] if found["generation"] == 1 else [f"generation {found['generation']} serves"]
        problems += [] if self.answer() == self.first else ["another model answers"]
        now = Holding.of(self.server, self.master)
        names = ("segments", "processes", "files", "fds")
        problems += [f"{name}: {getattr(self.before, name)} before, {getattr(now, name)} after"
                     for name in names if getattr(now, name) > getattr(self.before, name)]  # fmt: skip
        return problems + (self.renewed() if again else [])

    def renewed(self) -> list[str]:
        """What is wrong, when a reload of a good model should do."""
        life.put(self.good, self.live)
        code, said = self.operator.ctl("reload")
        if code:
            return [f"a good reload afterwards: exit {code}: {said}"]
        self.operator.rest()
        return ["a good reload changed nothing"] if self.answer() == self.first else []

    def whole(self) -> list[str]:
        """What is wrong, when one generation or the other should serve, and nothing in between."""
        found = self.operator.rest()  # one generation on all slots
        new = self.answer() != self.first
        problems = [] if new == (found["generation"] > 1) else ["status and answers are of different generations"]
        return problems + ([] if found["state"] == "ready" else [f"the server is {found['state']}"])

"""What benches do to a living server (reload, restart, HUP), and what it holds afterwards.

Knows prefork-ctl's commands and what status says of a change; sends no requests.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from bench import procs
from bench.server import POLL, Server
from prefork import ctl, status
from prefork.shm.sweep import list_segments

PATIENCE = 60.0  # seconds for a server to come to rest after a change


class ChangeFailed(Exception):
    """A change that should have been made was refused, or did not end."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a server at rest has. Bytes are sums over all its processes; `fds` and `master` are of the master."""

    pss: int
    master: int
    fds: int
    segments: int
    processes: int
    files: int

    @classmethod
    def of(cls, server: Server, pid: int) -> Holding:
        pids = procs.descendants(pid)
        owned = [info for info in list_segments() if info.owner and info.owner.pid == pid]
        files = [*server.runtime.rglob("*"), *server.work.rglob("*")]
        fds = list(Path(f"/proc/{pid}/fd").iterdir())
        sizes = [status.pss(one) or 0 for one in pids]
        return cls(sum(sizes), status.pss(pid) or 0, len(fds), len(owned), len(pids), len(files))

    def plain(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class Operator:
    """Makes changes and times them. `took`: seconds by kind of change."""

    server: Server
    took: dict[str, list[float]] = field(default_factory=dict)

    def ctl(self, *words: str) -> tuple[int, str]:
        """prefork-ctl in this process: its exit code, and what it says on standard error."""
        said = io.StringIO()
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            code = ctl.main(["--control", str(self.server.runtime / "control.sock"), *words])
        return code, said.getvalue().strip()

    def change(self, kind: str) -> None:
        """`hup`, or the words of a command. Raises ChangeFailed."""
        began = time.perf_counter()
        if kind == "hup":
            self._hup()
        else:
            code, said = self.ctl(*kind.split())
            if code:
                raise ChangeFailed(f"prefork-ctl {kind}: exit {code}: {said}")
        self.took.setdefault(kind, []).append(time.perf_counter() - began)

    def _hup(self) -> None:
        """The signal, until the next generation serves."""
        found = self.server.status()
        os.kill(int(found["pid"]), signal.SIGHUP)
        self.until(lambda now: now["generation"] > found["generation"] and at_rest(now), "a new generation after HUP")

    def until(self, fits: Callable[[dict[str, Any]], bool], what: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Status, as soon as it fits. Raises ChangeFailed when it never does."""
        end = time.monotonic() + seconds
        while not fits(found := self.server.status()):
            if time.monotonic() > end:
                raise ChangeFailed(f"waited {seconds:.0f} s for {what}: {brief(found)}")
            time.sleep(POLL)
        return found

    def rest(self) -> dict[str, Any]:
        """Wait until no change is going on and the old processes and segments have gone."""

        def still(found: dict[str, Any]) -> bool:
            if not at_rest(found):
                return False
            pid = int(found["pid"])
            with suppress(OSError):  # one that ends while we look
                known = {pid, *(row["pid"] for row in found["workers"]), found["template"]["pid"]} - {None}
                owned = [info for info in list_segments() if info.owner and info.owner.pid == pid]
                return set(procs.descendants(pid)) == known and len(owned) <= 2 * len(found["models"])
            return False

        return self.until(still, "rest")


def at_rest(found: dict[str, Any]) -> bool:
    """No change, and one generation on all slots that are wanted."""
    rows = [row for row in found["workers"] if row["state"] != "retired"]
    alike = {row["generation"] for row in rows} == {found["generation"]}
    return phase(found) == "" and alike and not found["leaving"] and all(row["state"] == "ready" for row in rows)


def phase(found: dict[str, Any]) -> str:
    """Of the change that is under way; "" when there is none."""
    name = str(found["change"]["phase"])
    return "" if name in ("done", "failed") else name


def brief(found: dict[str, Any]) -> str:
    rows = [f"{row['slot']}:{row['state']}:{row['generation']}" for row in found["workers"]]
    return f"{found['state']}, generation {found['generation']}, {found['change']}, {' '.join(rows)}"


def variant(source: Path, target: Path, factor: float) -> Path:
    """The model at `source` with its last float initializer multiplied: the same signature, other answers."""
    model = onnx.load(str(source))
    weights = [one for one in model.graph.initializer if one.data_type == onnx.TensorProto.FLOAT]
    values = numpy_helper.to_array(weights[-1])
    weights[-1].CopyFrom(numpy_helper.from_array(values * values.dtype.type(factor), weights[-1].name))
    onnx.save(model, str(target))
    return target


def put(source: Path, target: Path) -> None:
    """Replace a model file at once, as a deployment does."""
    fresh = target.with_suffix(".new")
    shutil.copyfile(source, fresh)
    fresh.replace(target)

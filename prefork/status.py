"""What the control socket says of the server: plain dictionaries from the master's objects. Changes nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import prefork
from prefork.child import Child
from prefork.config import Config
from prefork.errors import PreforkError
from prefork.jobs import LoadedModel
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.sweep import SegmentInfo
from prefork.slots import Slot


class BootError(PreforkError):
    """No worker comes up; `exit_code` is the worker's own where it gave one."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code if exit_code > 0 else 70


def boot_error(who: str, reason: str, exit_code: int) -> BootError:
    return BootError(f"{who} does not come up: {reason}", exit_code)


def server(config: Config, state: str, restarts: int, bind: list[str], unix: str | None) -> dict[str, Any]:
    """Identity and state of the master. `unix`: the path of the Unix socket."""
    return {
        "pid": os.getpid(),
        "version": prefork.__version__,
        "state": state,
        "restarts": restarts,
        "bind": bind,
        "unix": unix,
        "shm": config.server.shm,
        "pss_bytes": pss(os.getpid()),
    }


def worker_row(slot: Slot, board: Scoreboard) -> dict[str, Any]:
    """One slot. `pss_bytes` is read from the kernel now and costs a few milliseconds for a large model."""
    child = slot.child
    reading = board.read(child.row) if child else None
    row: dict[str, Any] = {
        "slot": slot.index,
        "state": _state(slot),
        "pid": (child.pid or None) if child else None,  # the template has not forked it yet
        "generation": child.generation if child else None,
        "uptime_s": round(time.monotonic() - child.started, 3) if child else None,
        "pss_bytes": pss(child.pid) if child and child.pid else None,
        "restarts": slot.restarts,
        "reason": slot.reason,
        "guardian": slot.guardian,
        "successor": (slot.successor.pid or None) if slot.successor else None,
    }
    counters = ("requests", "replies_ok", "in_flight", "queue_depth", "connections", "dropped", "refused")
    counted = {name: reading.values[name] if reading else 0 for name in counters}
    return {**row, **counted, "errors": sum(reading.errors) if reading else 0}


def _state(slot: Slot) -> str:
    if slot.child is None:
        return "waiting" if slot.wanted else "retired"
    if slot.child.leaving:
        return "draining"
    return "ready" if slot.ready else "starting"


def leaving_row(child: Child) -> dict[str, Any]:
    """A worker whose successor has its slot already."""
    return {"pid": child.pid, "slot": child.slot, "generation": child.generation}


def template_row(state: str, reason: str, template: Child | None) -> dict[str, Any]:
    """Where workers are forked from."""
    pid = template.pid if template else None
    return {"state": state, "reason": reason, "pid": pid, "pss_bytes": pss(pid) if pid else None}


def model_row(model: LoadedModel) -> dict[str, Any]:
    """`generation`: the one that loaded it, which is its version for clients."""
    return {
        "name": model.name,
        "generation": model.version,
        "segment": {"kind": model.ref.kind, "name": model.ref.name, "size": model.ref.size},
        **model.report,
    }


def segment_row(info: SegmentInfo) -> dict[str, Any]:
    """One segment of this machine."""
    return {
        "kind": info.kind,
        "name": info.name,
        "owner_pid": info.owner.pid if info.owner else None,
        "alive": info.alive,
        "age_s": round(info.age, 1),
        "size": info.size,
        "generation": info.generation,
        "model": info.model,
        "published": info.published,
        "uid": info.uid,
        "problem": info.problem,
    }


def pss(pid: int) -> int | None:
    """Proportional set size in bytes (proc(5), smaps_rollup); None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), None)

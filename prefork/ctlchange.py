"""prefork-ctl's commands that change what is served, and wait until it is so or has failed.

The server only begins a change; how it went is asked for until it is over. Runs in the command's own process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefork.errors import DeadlineExceeded, InvalidArgument, PreforkError, Unavailable

LOOK = 0.05  # seconds between questions how far it is
Ask = Callable[..., Any]


class ChangeFailed(PreforkError):
    """What was served before is served on."""

    exit_code = 1


def share(text: str) -> float:
    """`10%` or `0.1` as a share within (0, 1]. Raises InvalidArgument."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise InvalidArgument(f"canary: expected a share such as 10% or 0.1, found {text!r}")
    return value


def follow(ask: Ask, command: str, values: Mapping[str, Any], timeout: float, *, wait: bool) -> dict[str, Any]:
    """Begin the change and wait for its end; its last row. A canary that waits for a word counts as an end.

    Raises ChangeFailed when it failed, DeadlineExceeded when it is not over after `timeout` seconds, and what the
    server refuses it with."""
    row: dict[str, Any] = ask(command, **values)
    end = time.monotonic() + timeout
    given_up = command == "rollback" and bool(row["reason"])  # the change that was under way, whose end is wanted
    while wait and not _rests(row):
        if time.monotonic() >= end:
            raise DeadlineExceeded(f"{command} is {row['phase']} after {timeout:g} s; it goes on")
        time.sleep(LOOK)
        row = ask("change", number=row["number"])
    if row["phase"] == "failed" and not given_up:
        raise ChangeFailed(f"{command} failed, the models served before are served on: {row['reason']}")
    return row


def upgrade(ask: Ask, timeout: float, *, wait: bool) -> dict[str, Any]:
    """Have a new program take the server's place and wait until it has; the status row of the upgrade.

    Raises ChangeFailed, DeadlineExceeded, and what the server refuses it with."""
    row: dict[str, Any] = ask("upgrade")
    pid, end = row["pid"], time.monotonic() + timeout
    while wait:
        found = _status(ask, pid)
        if found["pid"] == pid:
            return {"state": "done", "pid": pid, "reason": ""}
        if found["upgrade"]["state"] == "failed":
            raise ChangeFailed(f"upgrade failed, the old program serves on: {found['upgrade']['reason']}")
        if time.monotonic() >= end:
            raise DeadlineExceeded(f"upgrade: process {pid} is not ready after {timeout:g} s; it goes on")
        time.sleep(LOOK)
    return row


def _rests(row: Mapping[str, Any]) -> bool:
    return row["phase"] in ("done", "failed") or (row["phase"] == "holding" and row.get("hold_s") is None)


def _status(ask: Ask, pid: int) -> dict[str, Any]:
    """The server's, also when the one that heard the question dies over it: process `pid` answers the next."""
    try:
        found: dict[str, Any] = ask("status")
    except Unavailable:
        if not Path(f"/proc/{pid}").exists():
            raise
        found = {"pid": None, "upgrade": {"state": "starting"}}
    return found


def view(row: Mapping[str, Any]) -> str:
    """One line for people."""
    moved = f"{row.get('moved')} of {row.get('workers')} workers"
    text = f"{row.get('kind')} {row.get('phase')}: generation {row.get('generation')}, {moved}, {row.get('seconds')} s"
    return f"{text}: {row['reason']}" if row.get("reason") else text

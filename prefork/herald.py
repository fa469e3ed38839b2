"""What the supervisor is told while the server lives: the status line, and that a long start gets on.

Runs in the master, called at each turn of its loop; sends only what changed, and only when somebody listens. The ways
to say it stand in notify.py, the feeding of the watchdog in watchdog.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from prefork.child import Child
from prefork.notify import Notifier
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import REQUESTS
from prefork.slots import Slot

EVERY = 5.0  # seconds between two looks
MORE = 30.0  # seconds that a start or reload which gets on is given from each look
NAMES = 4  # models named in the status line; it has to fit on one


class Herald:
    """`turn` is the only door."""

    def __init__(self, notifier: Notifier, board: Scoreboard) -> None:
        self._notifier, self._board = notifier, board
        self._next = 0.0
        self._then, self._requests, self._ticks = 0.0, 0, 0
        self._said = ""

    def turn(
        self, now: float, state: str, models: Sequence[str], slots: Sequence[Slot], children: Iterable[Child],
        *, rows: int, loading: bool,
    ) -> None:  # fmt: skip
        """`state`: the master's. `models`: served, or being loaded. `rows`: of the scoreboard that have been used.
        `loading`: a generation is on its way, at the start or in a reload, by the work of `children`. `now`: monotonic
        seconds."""
        if now < self._next or not self._notifier.enabled:
            return
        self._next = now + EVERY
        if loading and self._get_on(children):
            self._notifier.extend(MORE)
        text = self._text(now, state, models, slots, rows)
        if text != self._said and self._notifier.status(text):
            self._said = text

    def _text(self, now: float, state: str, models: Sequence[str], slots: Sequence[Slot], rows: int) -> str:
        requests = sum(self._board.peek(row, REQUESTS) for row in range(rows))
        rate = (requests - self._requests) / (now - self._then) if self._then else 0.0
        self._then, self._requests = now, requests
        wanted, ready = sum(slot.wanted for slot in slots), sum(slot.ready for slot in slots)
        names = ", ".join(models[:NAMES]) + (f" and {len(models) - NAMES} more" if len(models) > NAMES else "")
        match state:
            case "loading":
                return f"loading {names}"
            case "ready":
                return f"serving {names}; {ready} of {wanted} workers ready; {rate:.1f} requests/s"
        return f"{state}; {ready} of {wanted} workers ready"

    def _get_on(self, children: Iterable[Child]) -> bool:
        """Whether the children have used the processor since the last look: one that hangs is given no more time."""
        before, self._ticks = self._ticks, sum(cpu_ticks(child.pid) for child in children)
        return self._ticks != before


def cpu_ticks(pid: int) -> int:
    """Processor time of a process and its reaped children in clock ticks, 0 when it is gone (proc_pid_stat(5))."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return sum(map(int, text.rpartition(")")[2].split()[11:15]))

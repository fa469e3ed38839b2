"""The progress bar of one preparation, on the terminal. Loader's process only, and only where `Logger.live` says so:
importing rich takes a tenth of a second.

The bar shares its terminal with the log lines of other processes, and its process may be killed at any moment. So
nothing of the terminal's state is ever changed: a frame is one write that erases the line, draws it anew and leaves the
cursor at its beginning, where the next log line erases it (log.py). rich draws; its live display, which hides the
cursor until it ends, is not used.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from io import StringIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

STDERR = 2
TICK = 1.0  # seconds between frames: the elapsed time goes on, and a frame takes 0.7 ms from what is being measured
WIDTH, NARROW = 110, 20  # columns taken at most, and below which nothing is drawn
UNKNOWN = 80  # columns of a terminal that does not tell (serial lines say 0)
GONE = 1.0  # seconds that a terminal which takes no more (XOFF) may hold up the end
ERASE = "\r\x1b[K"  # ECMA-48 EL: to the end of the line


class Bar:
    """A context manager: the bar is there within it, and erased behind it. `tell` never waits for the terminal."""

    def __init__(self, title: str, fd: int = STDERR) -> None:
        self._fd = fd
        self._fraction: float | None = None
        self._text = ""
        self._changed = threading.Event()
        self._over = False
        self._bar = Progress(
            TextColumn(title, markup=False),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
            expand=True,
            auto_refresh=False,
            disable=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._thread = threading.Thread(target=self._draw, name="progress bar", daemon=True)

    def __enter__(self) -> Bar:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over = True
        self._changed.set()
        self._thread.join(GONE)

    def tell(self, step: str) -> None:
        """A word on the way; a report.Step also says how far it is. Without, the way is as far as it was."""
        self._text, self._fraction = str(step), getattr(step, "fraction", self._fraction)
        self._changed.set()

    def _draw(self) -> None:
        with suppress(OSError):  # the terminal was hung up
            while not self._over:
                self._changed.clear()
                os.write(self._fd, self._frame().encode())
                self._changed.wait(TICK)
            os.write(self._fd, ERASE.encode())

    def _frame(self) -> str:
        columns = os.get_terminal_size(self._fd).columns or UNKNOWN
        if columns < NARROW:
            return ""
        if self._fraction is not None:
            self._bar.update(self._task, total=1.0, completed=self._fraction)
        self._bar.update(self._task, description=self._text)
        console = Console(file=StringIO(), force_terminal=True, width=min(columns - 1, WIDTH), highlight=False)
        with console.capture() as drawn:
            console.print(self._bar.get_renderable(), end="")
        return f"{ERASE}{drawn.get().splitlines()[0].rstrip()}\r"

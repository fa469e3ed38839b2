"""A terminal of two rules, to see what a person would be left with: real processes write to the other end of a pty."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.roles.server import REPOSITORY
from tests.roles.watch import WATCHDOG

COLUMNS = 100
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def shown(text: str) -> tuple[list[str], int]:
    """The lines on the screen and the cursor's column. Colours are passed over; a sequence other than that, erasing to
    the end of the line, return and newline fails the test: it would outlive a process that is killed."""
    lines, column = [""], 0
    for part in SEQUENCE.findall(text):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif not COLOUR.fullmatch(part):
            assert part[0] != "\x1b", f"the terminal's state is changed: {part!r}"
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + len(part) :]
            column += len(part)
    return lines, column


class Terminal:
    """The person's end. `text` is all that came so far."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self.text = ""

    def read_until(self, word: str) -> None:
        """Until the word was written; fails at the end of file."""
        while word not in self.text:
            assert self._read(), f"{word!r} does not come: {self.text!r}"

    def read_all(self) -> int:
        """Until nobody holds the terminal any more; the exit status of the process."""
        while self._read():
            pass
        return self.process.wait()

    def _read(self) -> bool:
        assert select.select([self._fd], [], [], WATCHDOG)[0], f"nothing comes: {self.text!r}"
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # EIO: the other end is closed
            return False
        self.text += data.decode()
        return bool(data)


@contextmanager
def terminal(place: Path, *args: str, term: str = "xterm-256color") -> Iterator[Terminal]:
    """`prefork-serve args` in the folder `place`, its standard error a terminal. Killed at the end if it still runs."""
    person, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFORK_", "NO_COLOR"))}
    env |= {"TERM": term, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "prefork", *args]
    with subprocess.Popen(command, cwd=place, env=env, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        try:
            yield Terminal(process, person)
        finally:
            process.kill()
            os.close(person)

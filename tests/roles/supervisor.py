"""A service manager for black-box tests: it hears what the server says, and passes sockets on (sd_listen_fds(3))."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.roles.server import Server
from tests.roles.watch import WATCHDOG, end_of

# Puts the descriptors named in its first argument from 3 on in place, and becomes the rest, whose pid it knows.
PASS_ON = """
import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, 100) for fd in sys.argv[1].split(",")]
for index, fd in enumerate(high):
    os.dup2(fd, 3 + index)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(high))}
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Supervised(Server):
    """`given`: sockets that are passed on. `hear` gives what the server says to its supervisor."""

    def __init__(
        self, place: Path, *args: str, given: Sequence[socket.socket] = (), env: dict[str, str] | None = None,
        abstract: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(place, *args, env=env)
        self._given = [sock.dup() for sock in given]
        self.fds = tuple(sock.fileno() for sock in self._given)
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"@prefork-test-{place.name}" if abstract else str(place / "ear")
        self._ear.bind("\0" + name[1:] if abstract else name)
        self._name = name

    @property
    def command(self) -> list[str]:
        if not self.fds:
            return super().command
        return [sys.executable, "-c", PASS_ON, ",".join(map(str, self.fds)), *super().command]

    def launch(self, notify: str = "") -> subprocess.Popen[bytes]:
        return super().launch(self._name)

    def start(self) -> Supervised:
        self.launch()
        self.hear("READY=1")
        return self

    def hear(self, word: str) -> dict[str, str]:
        """The next message with that word; those before it are passed over."""
        return self.hear_of(self.pid, word)

    def hear_of(self, pid: int, word: str) -> dict[str, str]:
        """The same while another process is the server."""
        while True:
            with end_of(pid) as end:
                ready = select.select([self._ear, end], [], [], WATCHDOG)[0]
            assert self._ear in ready, f"{word} was never said: {self.said()}"
            text = self._ear.recv(4096).decode()
            if word in text.splitlines():
                return dict(line.split("=", 1) for line in text.splitlines())

    def unheard(self) -> list[str]:
        """What has been said meanwhile."""
        found = []
        while select.select([self._ear], [], [], 0)[0]:
            found.append(self._ear.recv(4096).decode())
        return found

    def close(self) -> None:
        """After the end."""
        for sock in (*self._given, self._ear):
            sock.close()

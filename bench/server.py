"""A real prefork-serve for benches and black-box tests: its own process, runtime directory and kernel-chosen port.

`start` waits for the READY=1 datagram of sd_notify or for the process's end, whichever comes; nothing here waits on the
clock. `stop` proves that nothing was left behind.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import procs
from prefork import control
from prefork.shm.sweep import list_segments

REPOSITORY = Path(__file__).parents[1]
LONGEST = 120.0  # seconds that a server may take to end before it counts as hung
POLL = 0.005  # seconds between two questions to a master, which answers in its own loop


class Server:
    """`address`: TCP, `unix`: `unix:PATH`. `log()` gives the events so far as dictionaries."""

    def __init__(self, place: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self.place = place
        self.runtime = place / "run"
        self.log_file = place / "log.json"
        self.work = place / "work"
        self.work.mkdir(exist_ok=True)
        self.args = args
        self.env = env or {}
        self.fds: tuple[int, ...] = ()  # descriptors that the process inherits
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "prefork", "--bind", "127.0.0.1:0", "--runtime-dir", str(self.runtime),
            "--work-dir", str(self.work), "--cache-dir", "", "--log-format", "json", "--log-file", str(self.log_file),
            *self.args,
        ]  # fmt: skip

    @property
    def form(self) -> dict[str, str]:
        """Models as they are, unless the start says otherwise: most of what is tested and measured is not preparation.
        A variable holds for every model, so a file of models must name their forms itself."""
        return {} if "--config" in self.args else {"PREFORK_QUANTIZE": "none"}

    def launch(self, notify: str = "") -> subprocess.Popen[bytes]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("PREFORK_")}
        env |= {"NOTIFY_SOCKET": notify, "PYTHONPATH": str(REPOSITORY), **self.form, **self.env}
        with (self.place / "stderr").open("ab") as stderr:
            self.process = subprocess.Popen(
                self.command, env=env, stdin=subprocess.DEVNULL, stderr=stderr, pass_fds=self.fds
            )
        return self.process

    def start(self) -> Server:
        """Launch and wait for READY=1. Raises AssertionError with what the server said when it ends instead."""
        path = self.place / "notify"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, selectors.DefaultSelector() as selector:
            sock.bind(str(path))
            process = self.launch(str(path))
            end = os.pidfd_open(process.pid)
            try:
                selector.register(sock, selectors.EVENT_READ, "notify")
                selector.register(end, selectors.EVENT_READ, "end")
                while True:
                    for key, _ in selector.select():
                        if key.data == "end":
                            process.wait()
                            raise AssertionError(f"server ended with {process.returncode}: {self.said()}")
                        if b"READY=1" in sock.recv(4096):
                            return self
            except BaseException:
                process.kill()
                process.wait()
                raise
            finally:
                os.close(end)

    def run_to_end(self) -> int:
        """Launch and wait for the end; the exit code."""
        self.launch()
        return self._wait()

    def _wait(self) -> int:
        """For the process to end. When the wait is broken off, it and all below it are killed."""
        assert self.process is not None
        try:
            return self.process.wait(LONGEST)
        except BaseException:
            for pid in reversed(procs.descendants(self.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            raise

    def said(self) -> str:
        """Standard error and log, for the message of a failed test."""
        texts = [path.read_text() for path in (self.place / "stderr", self.log_file) if path.exists()]
        return "\n".join(texts)

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def status(self) -> dict[str, Any]:
        return dict(control.request(self.runtime / "control.sock", "status"))

    @property
    def address(self) -> str:
        return str(self.status()["bind"][0])

    @property
    def unix(self) -> str:
        return f"unix:{self.runtime / 'prefork.sock'}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def workers(self) -> list[int]:
        return [int(row["pid"]) for row in self.status()["workers"] if row["pid"]]

    def rows(self) -> list[dict[str, Any]]:
        """The worker slots, as `status` tells."""
        return list(self.status()["workers"])

    def wait_slots(self, fits: Callable[[list[dict[str, Any]]], bool], seconds: float = 60.0) -> list[dict[str, Any]]:
        """The slots as soon as they fit; asks again and again. Raises AssertionError when they never do."""
        end = time.monotonic() + seconds
        while not fits(rows := self.rows()):
            assert time.monotonic() < end, f"the slots never came to what was waited for: {rows}; {self.said()}"
            time.sleep(POLL)
        return rows

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, prove that nothing is left; the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self._wait()
        left = self.leftovers()
        assert not left, f"left behind: {left}; {self.said()}"
        return code

    def leftovers(self) -> list[str]:
        """Segments of this master, and what its directories still hold besides the lock file."""
        segments = [info.name for info in list_segments() if info.owner and info.owner.pid == self.pid]
        files = [str(path) for path in (*self.runtime.glob("*"), *self.work.glob("*")) if path.name != "lock"]
        return segments + files

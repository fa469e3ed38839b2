"""The master's view of a child: who it is, how to speak with it, and the fork that makes it.

Runs in the master; the other side is the role's own file (loader.py, worker.py), whose `main(channel, job)` is called
after the fork. Master and child speak JSON datagrams over a SOCK_SEQPACKET pair, one message each, file descriptors
beside them; the child sees EOF there when the master dies, and the kernel kills it then anyway (PR_SET_PDEATHSIG).
This is the only place that forks and the only one that imports by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from prefork.background import quietly
from prefork.channel import MAX_FDS, MESSAGE_BYTES, encode
from prefork.errors import PreforkError

# Read when the libraries are first imported, so they must stand before the role's imports: the ONNX Runtime's telemetry
# thread dials out and hangs forked children, OpenBLAS starts a thread a core that nobody here uses, and so do its kin.
NUMERIC_ENVIRONMENT = {
    "ORT_DISABLE_TELEMETRY": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
}  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
IGNORED = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGWINCH,
)  # fmt: skip
__all__ = ["CRASH", "MAX_FDS", "UNBORN", "Child", "describe_exit", "prctl", "report_failure", "spawn"]
UNBORN = 0  # in the place of a pid
CRASH = 70  # EX_SOFTWARE: an exception that nobody foresaw
SHORT = "RLIMIT_AS, RLIMIT_DATA, or vm.overcommit_memory 2"  # what makes an allocation fail, rather than kill
OUT_OF_MEMORY = 75  # EX_TEMPFAIL, as when there is no room for a segment

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument. Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "prctl")


@dataclass(eq=False, slots=True)
class Child:
    """One forked process. `row` is a worker's place on the scoreboard and `requests_before` what was counted there
    before it came, `said` the last thing it said, `ready_at` when it answered its warm-up, `leaving` that it was told
    to go and `kill_at` when its time for that is over, `closed` that its end of the channel is gone, `killed` that we
    sent it SIGKILL, `oom` words for its end when the kernel did, for want of memory (oom.py)."""

    role: str
    slot: int
    generation: int
    pid: int
    channel: socket.socket
    row: int = -1
    started: float = field(default_factory=time.monotonic)
    ready_at: float | None = None
    said: dict[str, Any] | None = None
    leaving: bool = False
    stalled: bool = False
    requests_before: int = 0
    kill_at: float | None = None
    closed: bool = False
    killed: bool = False
    oom: str = ""

    def how(self, status: int) -> str:
        """Words for its end; `status` is waitpid's."""
        return self.oom or describe_exit(status)

    def code(self, status: int) -> int:
        """The exit code that its end gives to a start that cannot go on without it."""
        own = os.waitstatus_to_exitcode(status)
        return OUT_OF_MEMORY if self.oom else own if own > 0 else CRASH

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> bool:
        """Queue one message; False when the child is gone or its queue is full. Never blocks."""
        try:
            socket.send_fds(self.channel, [encode(message)], list(fds))
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived. A child that is killed in the middle leaves whole messages or none."""
        messages: list[dict[str, Any]] = []
        while not self.closed:
            try:
                data = self.channel.recv(MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            try:
                if data:
                    messages.append(json.loads(data))
            except ValueError:  # longer than a message may be, or nonsense: it is not to be trusted any further
                self.kill(signal.SIGKILL)
                data = b""
            self.closed = not data
        return messages

    def kill(self, number: int) -> None:
        """Send a signal; a child that is gone already is no error (it is reaped later, so its pid is still ours). One
        that the template has not forked yet sees its channel end instead, and leaves."""
        if self.pid == UNBORN:
            with contextlib.suppress(OSError):
                self.channel.shutdown(socket.SHUT_RDWR)
            return
        self.killed = self.killed or number == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def spawn(role: str, slot: int, generation: int, job: Any, keep: Iterable[int]) -> Child:
    """Fork a child that runs `prefork.<role>.main(channel, job) -> exit code` with only the descriptors in `keep`.

    Signals are held over the fork: one that reached the child before it has its own handlers would otherwise be written
    to the master's wake-up descriptor. Raises OSError when the kernel gives no process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    master = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(role, theirs, job, {theirs.fileno(), *keep}, master, before)
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    ours.setblocking(False)
    return Child(role, slot, generation, pid, ours)


def _become(role: str, channel: socket.socket, job: Any, keep: set[int], master: int, mask: Iterable[int]) -> NoReturn:
    code = CRASH
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # these reach the whole terminal group or service; only the master decides what they mean
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != master:
            os._exit(0)
        _close_all_but(keep)
        os.environ.update(NUMERIC_ENVIRONMENT)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.disable()
        load = partial(importlib.import_module, f"prefork.{role}")
        main: Callable[[socket.socket, Any], int] = (quietly(load) if getattr(job, "quiet", False) else load()).main
        gc.enable()
        code = main(channel, job)
    except PreforkError as e:
        code = e.exit_code
        report_failure(channel, e)
    except MemoryError as e:
        code = OUT_OF_MEMORY
        report_failure(channel, e)
    except BaseException as e:
        report_failure(channel, e)
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        # never back into the master's frames: their finalisers own descriptors that are not ours
        os._exit(code)


def report_failure(channel: socket.socket, error: BaseException) -> None:
    """Tell the master why this child leaves."""
    known = isinstance(error, PreforkError)
    text = error.message if isinstance(error, PreforkError) else f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError):
        text = f"this process may not have more memory ({SHORT}){f': {error}' if str(error) else ''}"
    message = {"event": "failed", "error": type(error).__name__, "message": text[:8000], "known": known}
    with contextlib.suppress(OSError):
        channel.send(encode(message))


def _close_all_but(keep: set[int]) -> None:
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(fd)
    sys.stdin = None


def describe_exit(status: int) -> str:
    """Words for a waitpid status: `exit code 65`, `killed by SIGKILL`."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}"

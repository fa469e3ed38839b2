"""Telling systemd how we are: the sd_notify protocol, datagrams to the socket named in NOTIFY_SOCKET.

A leaf for the master; does nothing when the variable is unset and never raises, because a service must not die of its
supervisor's deafness. Source: sd_notify(3); for a reload systemd.service(5), Type=notify-reload.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

MANAGER = 1  # the pid of a service manager, or of ourselves in a namespace whose pids mean nothing to it


class Notifier:
    """Speaks to one supervisor. Children inherit the address and must not use it:
    systemd drops what they say under NotifyAccess=main, other supervisors believe it."""

    __slots__ = ("_address", "quiet")

    def __init__(self, environ: Mapping[str, str], *, quiet: bool = False) -> None:
        """`quiet`: another process is the service as yet, and nothing is said."""
        self.quiet = quiet
        address = environ.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the NUL of the abstract namespace (unix(7)); other forms (vsock:) are not ours.
        self._address = ("\0" + address[1:] if address.startswith("@") else address) if address[:1] in "@/" else ""

    @property
    def enabled(self) -> bool:
        return bool(self._address) and not self.quiet

    def ready(self, status: str = "") -> bool:
        """READY=1: every worker has answered its warm-up, or a reload has come to its end, good or bad."""
        return self.send(READY="1", **_main_pid(os.getpid()), **({"STATUS": status} if status else {}))

    def reloading(self, status: str = "") -> bool:
        """RELOADING=1: a reload has begun, and `ready` will tell its end. The moment lets the supervisor see that this
        answers its own signal and no earlier one."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        return self.send(RELOADING="1", MONOTONIC_USEC=str(now), **({"STATUS": status} if status else {}))

    def main_pid(self, pid: int) -> bool:
        """From now on `pid` is the service: for a master that hands over to another before it leaves."""
        return self.send(**_main_pid(pid))

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self.send(STATUS=text)

    def stopping(self, seconds: float) -> bool:
        """STOPPING=1: we leave, which takes at most so long."""
        return self.send(STOPPING="1", **_extension(seconds))

    def watchdog(self) -> bool:
        return self.send(WATCHDOG="1")

    def extend(self, seconds: float) -> bool:
        """Ask for that much more time, from now, to start, reload or stop."""
        return self.send(**_extension(seconds))

    def send(self, **variables: str) -> bool:
        """One datagram of assignments; True when the kernel took it. Newlines in a value would begin another
        assignment, so they become spaces."""
        if not self.enabled or not variables:
            return False
        text = "\n".join(f"{name}={' '.join(value.splitlines())}" for name, value in variables.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as s:
                s.sendto(text.encode(errors="replace"), os.fsencode(self._address))
        except (OSError, ValueError):
            return False
        return True


def _main_pid(pid: int) -> dict[str, str]:
    return {"MAINPID": str(pid)} if pid != MANAGER else {}


def _extension(seconds: float) -> dict[str, str]:
    return {"EXTEND_TIMEOUT_USEC": str(int(seconds * 1_000_000))}


def watchdog_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """The interval within which WATCHDOG=1 is expected of process `pid`, or None when it is not
    (sd_watchdog_enabled(3))."""
    text, owner = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", str(pid))
    if not text.isdecimal() or not int(text) or owner != str(pid):
        return None
    return int(text) / 1_000_000

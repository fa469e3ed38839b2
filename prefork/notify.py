"""Telling systemd how we are: the sd_notify protocol, datagrams to the socket named in NOTIFY_SOCKET.

A leaf for the master; does nothing when the variable is unset and never raises, because a service must not die of its
supervisor's deafness. Source: sd_notify(3).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Speaks to one supervisor. Children inherit the address and must not use it:
    systemd drops what they say under NotifyAccess=main, other supervisors believe it."""

    __slots__ = ("_address",)

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the NUL of the abstract namespace (unix(7)); other forms (vsock:) are not ours.
        self._address = ("\0" + address[1:] if address.startswith("@") else address) if address[:1] in "@/" else ""

    @property
    def enabled(self) -> bool:
        return bool(self._address)

    def ready(self, status: str = "") -> bool:
        """READY=1: every worker has answered its warm-up."""
        return self.send(READY="1", **({"STATUS": status} if status else {}))

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self.send(STATUS=text)

    def stopping(self) -> bool:
        return self.send(STOPPING="1")

    def watchdog(self) -> bool:
        return self.send(WATCHDOG="1")

    def extend(self, seconds: float) -> bool:
        """Ask for that much more time to start or stop."""
        return self.send(EXTEND_TIMEOUT_USEC=str(int(seconds * 1_000_000)))

    def send(self, **variables: str) -> bool:
        """One datagram of assignments; True when the kernel took it. Newlines in a value would begin another
        assignment, so they become spaces."""
        if not self._address:
            return False
        text = "\n".join(f"{name}={' '.join(value.splitlines())}" for name, value in variables.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as s:
                s.sendto(text.encode(errors="replace"), os.fsencode(self._address))
        except (OSError, ValueError):
            return False
        return True


def watchdog_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """Half of the interval within which WATCHDOG=1 is expected of process `pid`, or None when it is not
    (sd_watchdog_enabled(3))."""
    text, owner = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", str(pid))
    if not text.isdecimal() or not int(text) or owner != str(pid):
        return None
    return int(text) / 2_000_000

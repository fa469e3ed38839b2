"""Who owns a segment: one master process, told apart from every other that ever had or will have its pid.

Pid, start time and pid namespace; and the segment name that carries the first two. Any process may use this file; it
opens nothing but /proc.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

PREFIX = "prefork-"
_NAME = re.compile(r"prefork-([1-9]\d{0,9})-(\d{1,19})-g(\d{1,19})-([A-Za-z0-9._]{1,64})-([0-9a-f]{8})", re.ASCII)
_UNSAFE = re.compile(r"[^A-Za-z0-9._]")


@dataclass(frozen=True)
class Owner:
    """`start`: clock ticks from boot to the process's start (/proc/PID/stat, field 22, proc_pid_stat(5)).
    `namespace`: inode of its pid namespace, 0 when it is not known; two pids of different namespaces say nothing
    about each other."""

    pid: int
    start: int
    namespace: int

    @classmethod
    def of(cls, pid: int) -> Owner:
        """The process `pid` of our own pid namespace. Raises ProcessLookupError when it is gone."""
        start = start_ticks(pid)
        if start is None:
            raise ProcessLookupError(f"process {pid} is not alive")
        return cls(pid, start, pid_namespace())

    @classmethod
    def current(cls) -> Owner:
        return cls.of(os.getpid())

    @property
    def comparable(self) -> bool:
        """Whether our /proc can tell if this owner is alive."""
        return self.namespace == pid_namespace()

    def seen_alive(self) -> bool:
        """Our /proc shows this very process. False proves its death only when `comparable`."""
        return start_ticks(self.pid) == self.start


@dataclass(frozen=True)
class NameParts:
    owner: Owner  # its namespace is not known from a name
    generation: int
    model: str  # sanitised


def pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is no such process or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the command's name may hold blanks and brackets
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def segment_name(owner: Owner, generation: int, model: str) -> str:
    """`prefork-PID-START-gGENERATION-MODEL-HASH`; the hash keeps apart models whose sanitised names are equal."""
    safe = _UNSAFE.sub("_", model)[:64] or "_"
    return f"{PREFIX}{owner.pid}-{owner.start}-g{generation}-{safe}-{zlib.crc32(model.encode()):08x}"


def parse_name(name: str) -> NameParts | None:
    """The reverse of `segment_name`; None for a name that it cannot have made."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return NameParts(Owner(int(match[1]), int(match[2]), 0), int(match[3]), match[4])

"""Structured logging: one event, one line, one write. Any process may use it; standard library only.

A logger is a plain object handed from caller to callee; nothing here is global, and only `setup` looks at the
environment: on a terminal a line begins by erasing what a progress bar (bar.py) may have drawn there. What keeps the
lines of several processes apart stands in logsink.py; where that sets a limit to a line, its values are cut until it
fits. Logging never raises: a line that cannot be written is counted in `lost`. A signal handler must not log; it only
enqueues.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from prefork.logsink import STDERR, Sink

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
FORMATS = ("console", "json")

# A value is cut in its middle above this, so that an event with one long value (a traceback) stays within PIPE_BUF;
# the next ones are for events with several, or with characters that take more than a byte.
MAX_VALUE = 2800
SHORTER = (1000, 300, 60)
ERASE = b"\r\x1b[K"  # ECMA-48 EL: to the end of the line
NO_TERMINALS = ("dumb", "unknown", "")  # values of TERM that promise no control sequence

OURS = ("ts", "level", "role", "event")
_encode = json.JSONEncoder(ensure_ascii=False).encode


class Logger:
    """Writes events of one role. `log.info("worker ready", slot=3)`: the event is a constant text, what varies is a
    field. Field values: str, int, float, bool, None, Path, exceptions; anything else is written as its `str`."""

    __slots__ = ("_bound", "_form", "_level", "_live", "_role", "_sink")

    def __init__(self, sink: Sink, level: int, form: str, role: str, bound: dict[str, Any], *, live: bool) -> None:
        """`live`: standard error is a terminal that takes control sequences, and the lines are for people."""
        self._live = live
        self._sink = sink
        self._level = level
        self._form = form
        self._role = role
        self._bound = bound

    def debug(self, event: str, /, **fields: Any) -> None:
        if self._level <= 10:
            self._emit("debug", event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        if self._level <= 20:
            self._emit("info", event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        if self._level <= 30:
            self._emit("warning", event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self._emit("error", event, fields)

    def crash(self, event: str, error: BaseException, /, **fields: Any) -> None:
        """An error with the traceback of `error` in one field, newlines escaped."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        self._emit("error", event, {**fields, "error": error, "traceback": trace})

    def for_role(self, role: str, /, **fields: Any) -> Logger:
        """A logger of the same sink whose lines carry `role`, this process's pid and `fields`; an event's own field of
        the same name wins. Called after the fork, in the process that will write."""
        bound = {**fields, "pid": os.getpid()}
        return Logger(self._sink, self._level, self._form, role, bound, live=self._live)

    def reopen(self) -> None:
        """Open the log file anew under its path, after logrotate moved the old one (USR1). Each process does this for
        itself. When it cannot be opened, the old file stays in use and the reason is written there."""
        try:
            self._sink.reopen()
        except OSError as e:
            self.error("log file cannot be reopened", path=self._sink.path, error=e)

    def line(self, level: str, event: str, at: int, fields: dict[str, Any]) -> bytes:
        """The line, with its newline, of an event that happened `at` (time.time_ns()); for `append`."""
        merged = {**self._bound, **fields} if self._bound else fields
        form = _json_line if self._form == "json" else _console_line
        limit, found = self._sink.limit, b""
        for most in (MAX_VALUE, *SHORTER):
            try:
                text = form(at, level, self._role, event, merged, most)
            except Exception as e:  # a field whose str() fails must not take its process down
                text = form(at, level, self._role, event, {"unprintable": type(e).__name__}, most)
            found = text.encode("utf-8", "backslashreplace") + b"\n"
            if not limit or len(found) <= limit:
                return found
        text = form(at, level, self._role, event, {"fields": f"cut, they take {len(found)} bytes"}, SHORTER[-1])
        return text.encode("utf-8", "backslashreplace") + b"\n"

    def append(self, lines: Sequence[bytes]) -> int:
        """Write lines that `line` made in as few writes as can be; how many were written, the others may be tried
        again. Does not wait for a reader, counts nothing as lost."""
        return self._sink.append(lines)

    @property
    def fd(self) -> int:
        """The descriptor written to; a child that closes what it inherited spares it."""
        return self._sink.fd

    @property
    def live(self) -> bool:
        """Whether standard error is a terminal where a person expects to see progress."""
        return self._live and self._level <= 20

    @property
    def to_terminal(self) -> bool:
        """Whether the lines go there too."""
        return self._live and self._sink.path is None

    def erase(self) -> None:
        """Remove what a process that was killed had drawn on the terminal's last line."""
        if self.live:
            with suppress(OSError):
                os.write(STDERR, ERASE)

    @property
    def lost(self) -> int:
        """Lines of this process that could not be written whole."""
        return self._sink.lost

    def _emit(self, level: str, event: str, fields: dict[str, Any]) -> None:
        line = self.line(level, event, time.time_ns(), fields)
        self._sink.write(ERASE + line if self.to_terminal else line)


def setup(level: str = "info", form: str = "console", file: Path | None = None, role: str = "master") -> Logger:
    """The first logger of a process tree, writing to `file` (appended to, made with mode 0640) or standard error.

    Raises OSError when `file` cannot be opened (ENXIO: a named pipe that nobody reads), KeyError for a level that is
    not in LEVELS."""
    live = form == "console" and os.isatty(STDERR) and os.environ.get("TERM", "dumb") not in NO_TERMINALS
    return Logger(Sink(file), LEVELS[level], form, role, {}, live=live)


def _console_line(now: int, level: str, role: str, event: str, fields: dict[str, Any], most: int) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(now // 1_000_000_000))
    parts = [f"{clock}.{now // 1_000_000 % 1000:03d} {level:<7} {role:<8} {_escape(event)}"]
    parts += [f"{key}={_quote(_cut(_text(value), most))}" for key, value in fields.items()]
    return " ".join(parts)


def _json_line(now: int, level: str, role: str, event: str, fields: dict[str, Any], most: int) -> str:
    stamp = f"{_utc(now // 1_000_000_000)}.{now // 1000 % 1_000_000:06d}Z"
    head: dict[str, Any] = {"ts": stamp, "level": level, "role": role, "event": event}
    # A field called as one of ours (the role of a child, say) is kept, under a name that says so
    for key, value in fields.items():
        head[f"{key}_" if key in OURS else key] = _json_value(value, most)
    return _encode(head)


@lru_cache(4)
def _utc(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _json_value(value: Any, most: int) -> bool | int | float | str | None:
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return _cut(value, most)
    # NaN and the infinities are no JSON: a different number compares unequal to itself or does not cancel
    if isinstance(value, float) and value - value == 0:
        return value
    return _cut(_text(value), most)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, BaseException):
        return str(value) or type(value).__name__
    return str(value)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters cut] {text[-half:]}"


def _escape(text: str) -> str:
    """`text` on one line and harmless to a terminal: no control character survives."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _quote(text: str) -> str:
    if text and text.isprintable() and not any(c in ' "=' for c in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_escape(escaped)}"'

"""Structured logging: one event, one line, one write. Any process may use it; standard library only.

A logger is a plain object handed from caller to callee; nothing here is global, and only `setup` looks at the
environment: on a terminal a line begins by erasing what a progress bar (bar.py) may have drawn there. It holds no lock
and starts no thread, so it is safe across fork, and O_APPEND with a single write(2) a line keeps the lines of several
processes apart (files: always; pipes: up to PIPE_BUF bytes, pipe(7)). Logging never raises: a line that cannot be
written is counted in `lost`. A signal handler must not log; it only enqueues.
"""

from __future__ import annotations

import errno
import json
import os
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
FORMATS = ("console", "json")

STDERR = 2
# A value is cut in its middle above this, so that an event with one long value (a traceback) stays within PIPE_BUF.
MAX_VALUE = 2800
ERASE = b"\r\x1b[K"  # ECMA-48 EL: to the end of the line
NO_TERMINALS = ("dumb", "unknown", "")  # values of TERM that promise no control sequence


class _Sink:
    """Where the lines of all loggers made from one `setup` go; shared, so that `reopen` reaches each of them."""

    __slots__ = ("fd", "json", "level", "live", "lost", "path", "pipe")

    def __init__(self, level: str, form: str, path: Path | None) -> None:
        self.level = LEVELS[level]
        self.json = form == "json"
        self.path = path
        self.fd = STDERR if path is None else _open(path)
        self.pipe = path is None
        self.lost = 0
        self.live = not self.json and os.isatty(STDERR) and os.environ.get("TERM", "dumb") not in NO_TERMINALS

    def _write(self, data: bytes) -> int:
        """Not into a full pipe: whoever does not read our log must not stop us (RWF_NOWAIT, pwritev2(2))."""
        if self.pipe:
            try:
                return os.pwritev(self.fd, [data], -1, os.RWF_NOWAIT)
            except OSError as e:
                if e.errno != errno.EOPNOTSUPP:
                    raise
                self.pipe = False
        return os.write(self.fd, data)

    def write(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        if self.live and self.path is None:
            data = ERASE + data
        try:
            if self._write(data) != len(data):
                self.lost += 1
        except OSError:  # EPIPE, ENOSPC, EAGAIN: whoever logs has better things to do
            self.lost += 1


class Logger:
    """Writes events of one role. `log.info("worker ready", slot=3)`: the event is a constant text, what varies is a
    field. Field values: str, int, float, bool, None, Path, exceptions; anything else is written as its `str`."""

    __slots__ = ("_bound", "_role", "_sink")

    def __init__(self, sink: _Sink, role: str, bound: dict[str, Any]) -> None:
        self._sink = sink
        self._role = role
        self._bound = bound

    def debug(self, event: str, /, **fields: Any) -> None:
        if self._sink.level <= 10:
            self._emit("debug", event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        if self._sink.level <= 20:
            self._emit("info", event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        if self._sink.level <= 30:
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
        return Logger(self._sink, role, {**fields, "pid": os.getpid()})

    def reopen(self) -> None:
        """Open the log file anew under its path, after logrotate moved the old one (USR1). Each process does this for
        itself. When it cannot be opened, the old file stays in use and the reason is written there."""
        if self._sink.path is None:
            return
        try:
            fresh = _open(self._sink.path)
        except OSError as e:
            self.error("log file cannot be reopened", path=self._sink.path, error=e)
            return
        os.dup2(fresh, self._sink.fd, inheritable=False)
        os.close(fresh)

    @property
    def fd(self) -> int:
        """The descriptor written to; a child that closes what it inherited spares it."""
        return self._sink.fd

    @property
    def live(self) -> bool:
        """Whether standard error is a terminal where a person expects to see progress."""
        return self._sink.live and self._sink.level <= 20

    @property
    def to_terminal(self) -> bool:
        """Whether the lines go there too."""
        return self._sink.live and self._sink.path is None

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
        merged = {**self._bound, **fields} if self._bound else fields
        form = _json_line if self._sink.json else _console_line
        try:
            line = form(level, self._role, event, merged)
        except Exception as e:  # a field whose str() fails must not take its process down
            line = form(level, self._role, event, {"unprintable": type(e).__name__})
        self._sink.write(line)


def setup(level: str = "info", form: str = "console", file: Path | None = None, role: str = "master") -> Logger:
    """The first logger of a process tree, writing to `file` (appended to, made with mode 0640) or standard error.

    Raises OSError when `file` cannot be opened, KeyError for a level that is not in LEVELS."""
    return Logger(_Sink(level, form, file), role, {})


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _console_line(level: str, role: str, event: str, fields: dict[str, Any]) -> str:
    now = time.time_ns()
    clock = time.strftime("%H:%M:%S", time.localtime(now // 1_000_000_000))
    parts = [f"{clock}.{now // 1_000_000 % 1000:03d} {level:<7} {role:<8} {_escape(event)}"]
    parts += [f"{key}={_quote(_cut(_text(value)))}" for key, value in fields.items()]
    return " ".join(parts)


def _json_line(level: str, role: str, event: str, fields: dict[str, Any]) -> str:
    now = time.time_ns()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1_000_000_000))
    head = {"ts": f"{stamp}.{now // 1000 % 1_000_000:06d}Z", "level": level, "role": role, "event": event}
    # A field called as one of ours (the role of a child, say) is kept, under a name that says so
    body = {f"{key}_" if key in head else key: _json_value(value) for key, value in fields.items()}
    return json.dumps({**head, **body}, ensure_ascii=False)


def _json_value(value: Any) -> bool | int | float | str | None:
    if value is None or isinstance(value, bool | int):
        return value
    # NaN and the infinities are no JSON: a different number compares unequal to itself or does not cancel
    if isinstance(value, float) and value - value == 0:
        return value
    return _cut(_text(value))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, BaseException):
        return str(value) or type(value).__name__
    return str(value)


def _cut(text: str) -> str:
    if len(text) <= MAX_VALUE:
        return text
    half = MAX_VALUE // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters cut] {text[-half:]}"


def _escape(text: str) -> str:
    """`text` on one line and harmless to a terminal: no control character survives."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _quote(text: str) -> str:
    if text and text.isprintable() and not any(c in ' "=' for c in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_escape(escaped)}"'

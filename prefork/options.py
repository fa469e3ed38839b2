"""What a configuration value may be: one `Kind` for each sort of value, one `key` for each key of a section.

Pure: reads no file and no environment, and knows no section; config.py does. Used by the master before it starts and
by the commands. Imports errors only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prefork.errors import ConfigError

Number = TypeVar("Number", int, float)

AUTO = "auto"
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"(\d+)\s*([A-Za-z]*)")
# sun_path is 108 bytes with the closing NUL (unix(7))
MAX_SOCKET_PATH = 107


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of value: `expected` for people, `parse` from text (ValueError when it is not one), and the `native`
    TOML types that are taken besides."""

    expected: str
    parse: Callable[[str], Any]
    native: tuple[type, ...] = (str,)
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Key:
    """What a section's field is to people: its kind, its one-line help, and how the help calls the value."""

    kind: Kind
    help: str
    metavar: str


def key(kind: Kind, help: str, metavar: str = "") -> Mapping[str, Key]:
    """Metadata for a dataclass field."""
    return {"key": Key(kind, help, metavar or "N")}


def read(kind: Kind, name: str, raw: object, source: str, *, text: bool) -> Any:
    """The value of `name` from what `source` holds; `text`: it came as text (flag, environment), not from TOML.

    Raises ConfigError naming the key, the source, what was expected and what was found."""
    if text or type(raw) in kind.native:
        try:
            return kind.parse(str(raw))
        except ValueError:
            pass
    raise ConfigError(f"{name} ({source}): expected {kind.expected}, found {raw!r}")


def suggest(name: str, known: Iterable[str]) -> str:
    """A text to end a refusal of `name` with: the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def whole(low: int, high: int) -> Kind:
    """An integer within [low, high]."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text.strip()):
            raise ValueError
        return _within(int(text), low, high)

    return Kind(f"an integer from {low} to {high}", parse, (int,))


def seconds(low: float, high: float) -> Kind:
    """A time in seconds within [low, high]."""
    return Kind(f"seconds from {low:g} to {high:g}", lambda text: _within(float(text), low, high), (int, float))


def number(low: float, high: float) -> Kind:
    """A real number within [low, high]."""
    return Kind(f"a number from {low:g} to {high:g}", lambda text: _within(float(text), low, high), (int, float))


def size(low: int, high: int) -> Kind:
    """A number of bytes within [low, high]; an integer, or text with a unit such as 64MiB."""

    def parse(text: str) -> int:
        match = _SIZE.fullmatch(text.strip())
        if match is None or match[2] not in _UNITS:
            raise ValueError
        return _within(int(match[1]) * _UNITS[match[2]], low, high)

    return Kind(f"a size from {show_size(low)} to {show_size(high)} such as 64MiB", parse, (int, str))


def show_size(count: int) -> str:
    """`count` bytes with the largest binary unit that loses nothing; `size` reads it back."""
    for unit in ("GiB", "MiB", "KiB"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return str(count)


def choice(*names: str) -> Kind:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return Kind(" or ".join(names), parse, choices=names)


def _flag(text: str) -> bool:
    found = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in found:
        raise ValueError
    return found[text.lower()]


FLAG = Kind("true or false", _flag, (bool,))


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError
    return Path(text).expanduser()


def _optional_path(text: str) -> Path | None:
    return _path(text) if text else None


def _auto_path(text: str) -> Path | str:
    return AUTO if text == AUTO else _path(text)


def _auto_optional_path(text: str) -> Path | str | None:
    return _auto_path(text) if text else None


PATH = Kind("a path", _path)
OPTIONAL_PATH = Kind('a path, or "" for none', _optional_path)
AUTO_PATH = Kind('a path, or "auto"', _auto_path)
AUTO_OPTIONAL_PATH = Kind('a path, "auto", or "" for none', _auto_optional_path)


def split_bind(text: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[v6]:port` or `:port`; host "" means every interface. ValueError for others."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if (
        not colon
        or not re.fullmatch(r"[0-9]{1,5}", port)
        or (":" in host) != bracketed
        or re.search(r"[\s\[\]/]", host)
    ):
        raise ValueError(text)
    return host, _within(int(port), 0, 65535)


def _bind(text: str) -> str:
    split_bind(text)
    return text


def _optional_bind(text: str) -> str:
    return _bind(text) if text else ""


BIND = Kind("host:port, [address]:port or :port", _bind)
OPTIONAL_BIND = Kind(f'{BIND.expected}, or "" for none', _optional_bind)


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise ValueError
    return text


NAME = Kind("a name of 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit", _name)


_REFERENCE = re.compile(r"(?!__main__:)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _metric(text: str) -> str:
    if text not in METRICS and not _REFERENCE.fullmatch(text):
        raise ValueError
    return text


def _optional_class(text: str) -> str:
    if text and not _REFERENCE.fullmatch(text):
        raise ValueError
    return text


METRICS = ("auto", "top1", "f1", "cosine", "mse")
OPTIONAL_CLASS = Kind('module:Class, or "" for none', _optional_class)
METRIC = Kind(f"{', '.join(METRICS)} or module:function", _metric, choices=(*METRICS, "module:function"))


def _within(value: Number, low: float, high: float) -> Number:
    if not low <= value <= high:
        raise ValueError
    return value

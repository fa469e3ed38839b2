"""The control socket's language: one JSON object a line each way, over a Unix stream socket of mode 0600.

    {"command": "scale", "args": {"workers": 4}}
    {"ok": true, "result": {...}}
    {"ok": false, "error": {"code": "INVALID_ARGUMENT", "message": "..."}}

`parse_request` and `encode_reply` are pure; the master calls them in its own loop and does all reading and writing.
`request` is the client's side, for commands. Standard library only.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefork.errors import (
    Code,
    DeadlineExceeded,
    InvalidArgument,
    PreforkError,
    Unavailable,
    from_wire,
)

# A request is a command and a few words; a reply may list a thousand workers.
MAX_REQUEST = 64 * 1024
MAX_REPLY = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    command: str
    args: Mapping[str, Any] = field(default_factory=dict)

    def integer(self, name: str, low: int, high: int) -> int:
        """Argument `name` within [low, high]. Raises InvalidArgument."""
        value = self.args.get(name)
        if type(value) is not int or not low <= value <= high:
            raise InvalidArgument(f"{self.command}: {name} must be an integer from {low} to {high}, found {value!r}")
        return value

    def number(self, name: str, low: float, high: float, *, default: float) -> float:
        """Argument `name` within [low, high], or `default` when it is not given. Raises InvalidArgument."""
        value = self.args.get(name, default)
        if name in self.args and (type(value) not in (int, float) or not low <= value <= high):
            raise InvalidArgument(f"{self.command}: {name} must be a number from {low:g} to {high:g}, found {value!r}")
        return float(value)


def parse_request(line: bytes) -> Request:
    """The request in one line (with or without its newline). Raises InvalidArgument."""
    if len(line) > MAX_REQUEST:
        raise InvalidArgument(f"control request has {len(line)} bytes, at most {MAX_REQUEST} are allowed")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidArgument("control request is not a line of JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("command"), str):
        raise InvalidArgument('control request must be an object with "command", a string')
    args = found.get("args", {})
    if not isinstance(args, dict):
        raise InvalidArgument(f'control request: "args" must be an object, found {type(args).__name__}')
    return Request(found["command"], args)


def encode_request(command: str, args: Mapping[str, Any]) -> bytes:
    return json.dumps({"command": command, "args": args}).encode() + b"\n"


def encode_reply(result: Any) -> bytes:
    """The line that answers a request: `result`, or the error when it is a PreforkError."""
    if isinstance(result, PreforkError):
        error = {"code": result.code.name, "message": result.message}
        return json.dumps({"ok": False, "error": error}).encode() + b"\n"
    return json.dumps({"ok": True, "result": result}).encode() + b"\n"


def parse_reply(line: bytes) -> Any:
    """The result in one line. Raises the error that it carries, or Unavailable for a line that is no reply."""
    try:
        found = json.loads(line)
        if found["ok"] is True:
            return found["result"]
        code, message = found["error"]["code"], str(found["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Unavailable("control reply is not a line of JSON with a result or an error") from None
    raise from_wire(Code[code] if code in Code.__members__ else Code.UNKNOWN, message)


def request(path: Path, command: str, args: Mapping[str, Any] | None = None, timeout: float = 10.0) -> Any:
    """Ask the server whose control socket is `path`; each step may take `timeout` seconds.

    Raises Unavailable when nobody listens or the answer breaks off, DeadlineExceeded, or the error the server gave."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(timeout)
            s.connect(str(path))
            s.sendall(encode_request(command, args or {}))
            return parse_reply(_read_line(s, path))
    except TimeoutError:
        raise DeadlineExceeded(f"control socket {path}: no answer within {timeout:g} s") from None
    except OSError as e:
        raise Unavailable(f"control socket {path}: {e.strerror or e}; is the server running?") from None


def _read_line(s: socket.socket, path: Path) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        chunk = s.recv(65536)
        if not chunk:
            raise Unavailable(f"control socket {path}: closed after {len(data)} bytes of the answer")
        data += chunk
        if len(data) > MAX_REPLY:
            raise Unavailable(f"control socket {path}: the answer has over {MAX_REPLY} bytes")
    return bytes(data)

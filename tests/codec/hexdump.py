"""Bytes as people write them: hex pairs, "quoted" ASCII, `xx*N` or `( ... )*N` for N times, # comments."""

from __future__ import annotations

import re

_TOKEN = re.compile(r'"([^"]*)"|((?:[0-9a-fA-F]{2})+)(?:\*(\d+))?|\(([^()]*)\)\*(\d+)|\s+|#.*')


def parse(text: str) -> bytes:
    """The bytes. Raises ValueError at anything that is no token."""
    out = bytearray()
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"not a byte, text or comment: {text[position : position + 20]!r}")
        quoted, pairs, times, group, group_times = match.groups()
        if quoted is not None:
            out += quoted.encode()
        elif pairs is not None:
            out += bytes.fromhex(pairs) * int(times or 1)
        elif group is not None:
            out += parse(group) * int(group_times)
        position = match.end()
    return bytes(out)

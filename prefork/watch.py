"""Which model files have changed since they were loaded. Runs in the master, with stat(2) only.

A file counts as changed once it has looked the same twice in a row, so one that is still being written is left alone;
who renames a finished file into place is never waited for longer than that. A file that is gone is waited for. What a
graph keeps in external files is not watched: replace the graph's own file last.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prefork.config import ModelConfig

Stamp = tuple[int, int, int]  # inode, size, modification time in ns


class Watch:
    """`look` is asked every `seconds`; 0 is never."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0
        self._known: dict[str, tuple[Path, Stamp]] = {}
        self._seen: dict[str, Stamp] = {}

    def look(self, models: Iterable[ModelConfig], now: float) -> list[str]:
        """Names of the models whose files have changed and come to rest; each change is told once.

        `now`: monotonic seconds. A model that is new here is taken as loaded from what stands there now."""
        if not self._seconds or now < self._next:
            return []
        self._next = now + self._seconds
        return [model.name for model in models if self._changed(model)]

    def _changed(self, model: ModelConfig) -> bool:
        stamp = _stamp(model.path)
        if stamp is None:
            return False
        before, self._seen[model.name] = self._seen.get(model.name), stamp
        known = self._known.get(model.name)
        if known is None or known[0] != model.path:
            self._known[model.name] = (model.path, stamp)
            return False
        if stamp == known[1] or stamp != before:
            return False
        self._known[model.name] = (model.path, stamp)
        return True


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns

"""What the master asks of a child: plain values that the fork hands over. Knows no model and no wire.

A job is built by the master and read by the role it is for; nobody changes one. Whatever a child needs of the outside
world (descriptors, names, limits) stands in its job and nowhere else.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefork.config import Config, ModelConfig, ServerConfig
from prefork.log import Logger
from prefork.placement import Places
from prefork.shm.owner import Owner
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.segment import Kind, SegmentRef

MANIFEST = "manifest.json"  # what a loader that publishes nothing leaves in its work_dir


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Folder of the prepared models, and bytes that they may take together."""

    folder: Path
    limit: int

    @classmethod
    def of(cls, server: ServerConfig) -> CachePlace | None:
        return cls(server.cache_dir, server.cache_size) if server.cache_dir is not None else None


@dataclass(frozen=True, slots=True)
class LoaderJob:
    """Turn one model file into one published segment. `work_dir` is this loader's alone and is removed after it.

    purpose: `serve` publishes a segment; `check` reads the model and sees whether there is room; `prepare` fills the
    cache, and `inspect` would rather do so; both leave the manifest in work_dir. `cache`: None for none."""

    log: Logger
    model: ModelConfig
    kind: Kind
    owner: Owner
    generation: int
    work_dir: Path
    purpose: Literal["serve", "check", "prepare", "inspect"] = "serve"
    cache: CachePlace | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A published segment and what its loader said of it (form, source, notes: for people). `version`: number of the
    generation that loaded it; a later one that serves the same segment keeps it."""

    name: str
    ref: SegmentRef
    report: Mapping[str, Any]
    version: int = 1


@dataclass(frozen=True, slots=True)
class TelemetryJob:
    """Tell on `listener` what stands in `scoreboard`. `worker_timeout`: seconds of silence, 0 for any."""

    log: Logger
    listener: socket.socket
    scoreboard: Scoreboard
    worker_timeout: float

    @property
    def descriptors(self) -> set[int]:
        """What the process must not close."""
        return {self.log.fd, self.listener.fileno(), self.scoreboard.fd}


@dataclass(frozen=True, slots=True)
class TemplateJob:
    """Open `models` once and fork workers that serve them. `master_pid`: who takes the workers over. `places`:
    CPUs by slot, in turn; none when workers are not pinned. `complete`: false when the models are told later, over the
    channel. `quiet`: others serve meanwhile, and go before us."""

    log: Logger
    config: Config
    generation: int
    models: tuple[LoadedModel, ...]
    scoreboard: Scoreboard
    scratch: Path
    master_pid: int
    complete: bool = True
    quiet: bool = False
    places: Places = ()

    @property
    def descriptors(self) -> set[int]:
        """What the template must not close."""
        return {self.log.fd, self.scoreboard.fd}


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """Serve `models` on the listening sockets of `slot` (and of those slots that it guards), by slot number. `row`: of
    the scoreboard, this worker's alone; two workers of one slot may live at a time while one replaces the other.
    `places` as in TemplateJob."""

    log: Logger
    config: Config
    slot: int
    row: int
    generation: int
    models: tuple[LoadedModel, ...]
    listeners: Mapping[int, socket.socket]
    unix: socket.socket | None
    scoreboard: Scoreboard
    scratch: Path
    places: Places = ()

    @property
    def descriptors(self) -> set[int]:
        """What the worker must not close."""
        fds = {sock.fileno() for sock in self.listeners.values()} | {self.log.fd, self.scoreboard.fd}
        return fds | ({self.unix.fileno()} if self.unix is not None else set())

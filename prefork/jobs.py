"""What the master asks of a child: plain values that the fork hands over. Knows no model and no wire.

A job is built by the master and read by the role it is for; nobody changes one. Whatever a child needs of the outside
world (descriptors, names, limits) stands in its job and nowhere else.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefork.config import Config, ModelConfig
from prefork.log import Logger
from prefork.shm.owner import Owner
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.segment import Kind, SegmentRef


@dataclass(frozen=True, slots=True)
class LoaderJob:
    """Turn one model file into one published segment. `work_dir` is this loader's alone and is removed after it.
    `only_check`: read the model and see whether there is room, then leave."""

    log: Logger
    model: ModelConfig
    kind: Kind
    owner: Owner
    generation: int
    work_dir: Path
    only_check: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A published segment and what its loader said of it (form, source, notes: for people)."""

    name: str
    ref: SegmentRef
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """Serve `models` on the listening sockets of `slot` (and of those slots that it guards), by slot number."""

    log: Logger
    config: Config
    slot: int
    generation: int
    models: tuple[LoadedModel, ...]
    listeners: Mapping[int, socket.socket]
    unix: socket.socket | None
    scoreboard: Scoreboard
    scratch: Path

    @property
    def descriptors(self) -> set[int]:
        """What the worker must not close."""
        fds = {sock.fileno() for sock in self.listeners.values()} | {self.log.fd, self.scoreboard.fd}
        return fds | ({self.unix.fileno()} if self.unix is not None else set())

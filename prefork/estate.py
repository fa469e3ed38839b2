"""What a running master leaves to the one that takes its place: sockets, the runtime directory's lock, segments.

Both masters use this file: the old one writes the list into a memfd and starts the new program with the descriptors and
the memfd's number in an environment variable; the new one reads it at its start. The two speak over one socket: `ready`
from the new one, `yours` from the old one, and the end of either. A segment is taken over when the same model is
configured in the same way and the same ONNX Runtime is installed; else it is loaded anew.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from prefork.config import ModelConfig
from prefork.errors import ConfigError
from prefork.jobs import LoadedModel
from prefork.shm.segment import SegmentRef

VARIABLE = "_PREFORK_ESTATE"  # begins so that it is no key of the configuration
LARGEST = 64 * 2**20  # bytes of the list; reports of many models are in it


@dataclass(frozen=True, slots=True)
class Estate:
    """`channel` leads to the other master. `activated`: a service manager opened the listening sockets first.
    `generation`: the last number that the old master gave. `models`: loaded, with the configuration that each was
    loaded by, as plain values. `runtime`: version of ONNX Runtime that prepared them."""

    channel: socket.socket
    slots: tuple[socket.socket, ...]
    unix: socket.socket | None
    control: socket.socket
    metrics: socket.socket | None
    lock: int
    runtime_dir: str
    activated: bool
    generation: int
    shm: str
    runtime: str
    models: tuple[tuple[LoadedModel, dict[str, Any]], ...]

    @property
    def descriptors(self) -> list[int]:
        """What the new master must inherit besides the list itself."""
        sockets = (self.channel, *self.slots, self.unix, self.control, self.metrics)
        return [sock.fileno() for sock in sockets if sock is not None] + [self.lock]

    def usable(self, wanted: Iterable[ModelConfig], shm: str) -> list[LoadedModel]:
        """Those of the loaded models that a master with this configuration may serve as they are."""
        if shm != self.shm or self.runtime != runtime_version():
            return []
        found = {model.name: plain(model) for model in wanted}
        return [model for model, config in self.models if found.get(model.name) == config]


def runtime_version() -> str:
    """Of the ONNX Runtime that is installed now; of the one that is running only before an upgrade of the package."""
    try:
        return importlib.metadata.version("onnxruntime")
    except importlib.metadata.PackageNotFoundError:
        return ""


def plain(model: ModelConfig) -> dict[str, Any]:
    """The configuration of a model as JSON has it, and what its file looks like now."""
    values = {name: value if isinstance(value, int | float) else str(value) for name, value in _fields(model)}
    try:
        found = model.path.stat()
    except OSError:
        return values
    return {**values, "stat": [found.st_ino, found.st_size, found.st_mtime_ns]}


def _fields(model: ModelConfig) -> list[tuple[str, Any]]:
    return [(field.name, getattr(model, field.name)) for field in dataclasses.fields(model)]


def write(estate: Estate) -> int:
    """A memfd with the list, to be inherited by the new master. Raises OSError."""
    listed = {
        "channel": estate.channel.fileno(),
        "slots": [sock.fileno() for sock in estate.slots],
        "unix": estate.unix.fileno() if estate.unix else None,
        "control": estate.control.fileno(),
        "metrics": estate.metrics.fileno() if estate.metrics else None,
        "lock": estate.lock,
        "runtime_dir": estate.runtime_dir,
        "activated": estate.activated,
        "generation": estate.generation,
        "shm": estate.shm,
        "runtime": estate.runtime,
        "models": [
            {
                "name": model.name,
                "segment": model.ref.to_dict(),
                "report": dict(model.report),
                "version": model.version,
                "config": config,
            }
            for model, config in estate.models
        ],
    }
    fd = os.memfd_create("prefork-estate", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(json.dumps(listed).encode())
    return fd


def take(environ: MutableMapping[str, str]) -> Estate | None:
    """What another master has left to this process; None when there is no such. The variable is gone afterwards.

    Raises ConfigError when the list is not what `write` makes."""
    text = environ.pop(VARIABLE, "")
    if not text:
        return None
    try:
        fd = int(text)
        listed = json.loads(os.pread(fd, LARGEST, 0))
        os.close(fd)
        return _estate(listed)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{VARIABLE}: expected the list of a master that hands over, found {e}") from None


def _estate(listed: Mapping[str, Any]) -> Estate:
    def sock(number: int | None) -> socket.socket | None:
        if number is None:
            return None
        os.set_inheritable(number, False)
        return socket.socket(fileno=number)

    def needed(number: int) -> socket.socket:
        found = sock(number)
        assert found is not None
        return found

    os.set_inheritable(listed["lock"], False)
    return Estate(
        channel=needed(listed["channel"]),
        slots=tuple(needed(number) for number in listed["slots"]),
        unix=sock(listed["unix"]),
        control=needed(listed["control"]),
        metrics=sock(listed["metrics"]),
        lock=int(listed["lock"]),
        runtime_dir=str(listed["runtime_dir"]),
        activated=bool(listed["activated"]),
        generation=int(listed["generation"]),
        shm=str(listed["shm"]),
        runtime=str(listed["runtime"]),
        models=tuple((_model(each), dict(each["config"])) for each in listed["models"]),
    )


def _model(each: Mapping[str, Any]) -> LoadedModel:
    return LoadedModel(
        str(each["name"]), SegmentRef.from_dict(each["segment"]), dict(each["report"]), int(each["version"])
    )

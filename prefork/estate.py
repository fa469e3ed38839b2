"""What a running master leaves to the one that takes its place: sockets, the runtime directory's lock, segments.

Both masters use this file: the old one writes the list into a memfd and starts the new program with the descriptors and
the memfd's number in an environment variable; the new one reads it at its start. The two speak over one socket: `ready`
or `failed` from the new one, `yours` from the old one, and the end of either. A segment is taken over when the same
model is configured in the same way, and what would prepare it is the same; else it is loaded anew.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefork.channel import Channel
from prefork.config import Config, ModelConfig
from prefork.errors import ConfigError, PreforkError
from prefork.jobs import LoadedModel
from prefork.model.version import FORMAT
from prefork.shm.segment import SegmentRef

VARIABLE = "_PREFORK_ESTATE"  # begins so that it is no key of the configuration
LARGEST = 64 * 2**20  # bytes of the list; reports of many models are in it


@dataclass(frozen=True, slots=True)
class Estate:
    """`channel` leads to the other master, process `pid`. `places`: of that, as `places_of` tells. `activated`: a
    service manager opened the slots' sockets first; `unix_activated`: `unix` as well. `generation`: the last number
    that the old master gave. `models`: loaded, with the configuration that each was loaded by, as plain values.
    `runtime`: what prepared them, as `runtime_version` tells."""

    channel: socket.socket
    pid: int
    slots: tuple[socket.socket, ...]
    unix: socket.socket | None
    control: socket.socket
    metrics: socket.socket | None
    lock: int
    places: Mapping[str, str]
    activated: bool
    unix_activated: bool
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

    def same_places(self, config: Config) -> None:
        """Raises ConfigError when `config` moves what clients may be waiting at: its queue would be lost."""
        fixed = {"runtime_dir", "control"}
        fixed |= set() if self.activated else {"bind"}
        fixed |= {"unix"} if self.unix is not None and not self.unix_activated else set()
        found = places_of(config)
        for name in sorted(fixed):
            if found[name] != self.places.get(name):
                raise ConfigError(
                    f"{name} {found[name]!r}: expected {self.places.get(name)!r} of the server whose place is taken; "
                    "another one takes a stop and a start"
                )

    def metrics_of(self, config: Config) -> socket.socket | None:
        """The listening socket of /metrics, when it is to stay where it is; else it is closed."""
        if self.metrics is not None and places_of(config)["metrics_bind"] != self.places.get("metrics_bind"):
            self.metrics.close()
            return None
        return self.metrics

    @property
    def pid_file(self) -> Path | None:
        """Of the old master."""
        return Path(self.places["pid_file"]) if self.places.get("pid_file") else None

    def decline(self, reason: str) -> None:
        """Tell the old master to serve on, and why. Nothing once it is gone, or has gone its way."""
        Channel(self.channel).send({"event": "failed", "message": reason[:8000]})

    @contextmanager
    def declined(self) -> Iterator[None]:
        """What is raised within is told to the old master."""
        try:
            yield
        except Exception as e:
            self.decline(e.message if isinstance(e, PreforkError) else f"{type(e).__name__}: {e}")
            raise


def places_of(config: Config) -> dict[str, str]:
    """Where a server with this configuration is found; nothing for what it does not have."""
    server = config.server
    found = {name: getattr(server, name) for name in ("runtime_dir", "control", "bind", "unix", "pid_file")}
    found["metrics_bind"] = config.telemetry.metrics_bind
    return {name: str(value or "") for name, value in found.items()}


def runtime_version() -> str:
    """Of the prepared form, and of the ONNX Runtime that is installed now; of the one that is running only before an
    upgrade of the package."""
    try:
        return f"{importlib.metadata.version('onnxruntime')} {FORMAT}"
    except importlib.metadata.PackageNotFoundError:
        return f"unknown {FORMAT}"


def plain(model: ModelConfig) -> dict[str, Any]:
    """The configuration of a model as JSON has it, and what the files that it names look like now."""
    fields = _fields(model)
    values = {name: value if isinstance(value, int | float) else str(value) for name, value in fields}
    return {**values, "files": {name: _stamp(value) for name, value in fields if isinstance(value, Path)}}


def _stamp(path: Path) -> list[int]:
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def _fields(model: ModelConfig) -> list[tuple[str, Any]]:
    return [(field.name, getattr(model, field.name)) for field in dataclasses.fields(model)]


def write(estate: Estate) -> int:
    """A memfd with the list, to be inherited by the new master. Raises OSError."""
    listed = {
        "channel": estate.channel.fileno(),
        "pid": estate.pid,
        "slots": [sock.fileno() for sock in estate.slots],
        "unix": estate.unix.fileno() if estate.unix else None,
        "control": estate.control.fileno(),
        "metrics": estate.metrics.fileno() if estate.metrics else None,
        "lock": estate.lock,
        "places": dict(estate.places),
        "activated": estate.activated,
        "unix_activated": estate.unix_activated,
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


def decline(environ: MutableMapping[str, str], error: PreforkError) -> None:
    """For a process that fails before it has taken what was left to it, if anything was."""
    with suppress(ConfigError):
        if (left := take(environ)) is not None:
            left.decline(error.message)


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
        pid=int(listed["pid"]),
        slots=tuple(needed(number) for number in listed["slots"]),
        unix=sock(listed["unix"]),
        control=needed(listed["control"]),
        metrics=sock(listed["metrics"]),
        lock=int(listed["lock"]),
        places={str(name): str(text) for name, text in listed["places"].items()},
        activated=bool(listed["activated"]),
        unix_activated=bool(listed["unix_activated"]),
        generation=int(listed["generation"]),
        shm=str(listed["shm"]),
        runtime=str(listed["runtime"]),
        models=tuple((_model(each), dict(each["config"])) for each in listed["models"]),
    )


def _model(each: Mapping[str, Any]) -> LoadedModel:
    return LoadedModel(
        str(each["name"]), SegmentRef.from_dict(each["segment"]), dict(each["report"]), int(each["version"])
    )

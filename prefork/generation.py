"""A generation: the models of one configuration, loaded one after the other into segments that the master holds.

Runs in the master; the other side is loader.py. States:

| state | meaning | next |
|---|---|---|
| loading | a loader runs, or the next one is due | loaded, failed |
| loaded | every segment is published and held | retired |
| failed | a loader gave a reason or died; `error` says which model and why | retired |
| retired | nothing of it is left | |
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from prefork import child as children
from prefork.child import Child
from prefork.config import ModelConfig
from prefork.errors import ModelError, PreforkError, SegmentFull
from prefork.jobs import CachePlace, LoadedModel, LoaderJob
from prefork.log import Logger
from prefork.shm import segment, sweep
from prefork.shm.owner import Owner
from prefork.workdir import WorkDir

State = Literal["loading", "loaded", "failed", "retired"]


class LoadError(ModelError):
    """A model that could not be prepared; `exit_code` is the loader's own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Generation:
    """Doors: `load_next`, `published`, `loader_left`, `retire`."""

    def __init__(
        self,
        number: int,
        wanted: Sequence[ModelConfig],
        kind: segment.Kind,
        owner: Owner,
        work: WorkDir,
        log: Logger,
        cache: CachePlace | None = None,
    ) -> None:
        self.number = number
        self.state: State = "loading"
        self.error: PreforkError | None = None
        self.models: list[LoadedModel] = []
        self._wanted = list(wanted)
        self._kind = kind
        self._owner = owner
        self._work = work
        self._cache = cache
        self._log = log
        self._holds: list[segment.Hold] = []

    @property
    def loading(self) -> str:
        """The model whose loader runs now, or nothing."""
        waiting = self.state == "loading" and len(self.models) < len(self._wanted)
        return self._wanted[len(self.models)].name if waiting else ""

    def load_next(self) -> Child | None:
        """Spawn the loader of the next model; None when all are loaded, or when it cannot be (`error` says why)."""
        if len(self.models) == len(self._wanted):
            self.state = "loaded"
            return None
        model = self._wanted[len(self.models)]
        try:
            return self._spawn(model, self._work.sub(f"g{self.number}-{len(self.models)}"))
        except OSError as e:
            self._give_up(model, f"its loader cannot be started: {e.strerror}", SegmentFull.exit_code)
            return None

    def _spawn(self, model: ModelConfig, place: Path) -> Child:
        job = LoaderJob(self._log, model, self._kind, self._owner, self.number, place, cache=self._cache)
        self._log.info("loading", model=model.name, path=model.path, quantize=model.quantize)
        return children.spawn("loader", len(self.models), self.number, job, {self._log.fd})

    def published(self, loader: Child, said: dict[str, Any]) -> None:
        """The loader has published: hold the segment before the loader lets go of it, and say so."""
        model = self._wanted[len(self.models)]
        try:
            ref = segment.SegmentRef.from_dict(said["segment"])
            self._holds.append(segment.hold(ref))
        except PreforkError as e:
            self._give_up(model, e.message, e.exit_code)
            loader.kill(signal.SIGKILL)
            return
        self.models.append(LoadedModel(model.name, ref, said["report"]))
        self._log.info("segment published", model=model.name, name=ref.name, bytes=ref.size, **_brief(said["report"]))
        loader.send({"command": "held"})

    def loader_left(self, loader: Child, status: int) -> None:
        """The loader is reaped. Nothing is lost when it published; else its reason is kept."""
        self._work.drop(f"g{self.number}-{loader.slot}")
        if self.state != "loading" or loader.slot < len(self.models):
            return
        said = loader.said or {}
        reason = said.get("message") or f"the loader left: {loader.how(status)}"
        self._give_up(self._wanted[loader.slot], reason, loader.code(status))

    def _give_up(self, model: ModelConfig, reason: str, exit_code: int) -> None:
        self.state = "failed"
        self._discard()
        self.error = LoadError(f"model {model.name!r}: {reason}", exit_code)

    def _discard(self) -> None:
        """What a loader left that did not get as far as saying so; only System V segments can be left."""
        for info in sweep.discard(self._owner, self.number):
            self._log.info("removed what the loader left", name=info.name, bytes=info.size)

    def retire(self) -> None:
        """Remove every segment; workers that still map one keep their mapping."""
        if self.state == "loading":
            self._discard()
        for model in self.models:
            segment.retire(model.ref)
        for hold in self._holds:
            hold.release()
        self._holds.clear()
        self.state = "retired"


def _brief(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report[key] for key in ("form", "origin", "prepare_s") if key in report}

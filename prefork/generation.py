"""A generation: the models of one configuration, loaded one after the other into segments that the master holds.

A later generation that serves some of the same models takes their segments over instead of loading them again; a
segment goes with the last generation that serves it.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from prefork import child as children
from prefork.child import Child
from prefork.config import ModelConfig
from prefork.errors import ModelError, PreforkError, SegmentFull
from prefork.estate import plain
from prefork.jobs import CachePlace, LoadedModel, LoaderJob
from prefork.log import Logger
from prefork.nursery import Nursery
from prefork.shm import segment, sweep
from prefork.shm.owner import Owner
from prefork.workdir import WorkDir

State = Literal["loading", "loaded", "failed", "retired"]


class LoadError(ModelError):
    """A model that could not be prepared; `exit_code` is the loader's own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Stored:
    """A published segment as the master holds it, for as many generations as took it."""

    def __init__(self, model: LoadedModel, hold: segment.Hold, source: dict[str, Any], *, left: bool = False) -> None:
        """`source`: what it was loaded from, as estate.plain tells. `left`: to or by another master, which holds it as
        well and is to remove it."""
        self.model = model
        self.source = source
        self.left = left
        self._hold = hold
        self._takers = 1

    def take(self) -> Stored:
        """One more generation serves it."""
        self._takers += 1
        return self

    def drop(self) -> None:
        """One generation less; the last one removes it."""
        self._takers -= 1
        if not self._takers:
            if not self.left:
                segment.retire(self.model.ref)
            self._hold.release()


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
        kept: Mapping[str, Stored] | None = None,
    ) -> None:
        """`kept`: by name, the segments of `wanted` models that another generation has loaded."""
        self.number = number
        self.state: State = "loading"
        self.error: PreforkError | None = None
        self.nursery = Nursery(log)
        self.wanted = tuple(wanted)
        self.stored: list[Stored] = []
        self._source: dict[str, Any] = {}
        self._kept = {model.name: kept[model.name].take() for model in wanted if model.name in kept} if kept else {}
        self._kind = kind
        self._owner = owner
        self._work = work
        self._cache = cache
        self._log = log

    @property
    def models(self) -> tuple[LoadedModel, ...]:
        """What is loaded so far."""
        return tuple(stored.model for stored in self.stored)

    @property
    def loading(self) -> str:
        """The model whose loader runs now, or nothing."""
        waiting = self.state == "loading" and len(self.stored) < len(self.wanted)
        return self.wanted[len(self.stored)].name if waiting else ""

    def load_next(self) -> Child | None:
        """Spawn the loader of the next model; None when all are loaded, or when it cannot be (`error` says why)."""
        while (name := self.loading) and name in self._kept:
            self.stored.append(self._kept.pop(name))
        if not name:
            self.state = "loaded"
            return None
        model = self.wanted[len(self.stored)]
        try:
            return self._spawn(model, self._work.sub(f"g{self.number}-{len(self.stored)}"))
        except OSError as e:
            self._work.drop(f"g{self.number}-{len(self.stored)}")
            self._give_up(model, f"its loader cannot be started: {e.strerror}", SegmentFull.exit_code)
            return None

    def _spawn(self, model: ModelConfig, place: Path) -> Child:
        job = LoaderJob(self._log, model, self._kind, self._owner, self.number, place, cache=self._cache)
        self._source = plain(model)
        loader = children.spawn("loader", len(self.stored), self.number, job, {self._log.fd})
        self._log.info("loading", model=model.name, path=model.path, quantize=model.quantize, pid=loader.pid)
        return loader

    def published(self, loader: Child, said: dict[str, Any]) -> None:
        """The loader has published: hold the segment before the loader lets go of it, and say so."""
        model = self.wanted[len(self.stored)]
        try:
            ref = segment.SegmentRef.from_dict(said["segment"])
            hold = segment.hold(ref)
        except PreforkError as e:
            self._give_up(model, e.message, e.exit_code)
            loader.kill(signal.SIGKILL)
            return
        self.stored.append(Stored(LoadedModel(model.name, ref, said["report"], self.number), hold, self._source))
        self._log.info("segment published", model=model.name, name=ref.name, bytes=ref.size, **_brief(said["report"]))
        loader.send({"command": "held"})

    def loader_left(self, loader: Child, status: int) -> None:
        """The loader is reaped. Nothing is lost when it published; else its reason is kept."""
        self._log.erase()
        self._work.drop(f"g{self.number}-{loader.slot}")
        if self.state != "loading" or loader.slot < len(self.stored):
            return
        said = loader.said or {}
        reason = said.get("message") or f"the loader left: {loader.how(status)}"
        self._give_up(self.wanted[loader.slot], reason, loader.code(status))

    def _give_up(self, model: ModelConfig, reason: str, exit_code: int) -> None:
        self.state = "failed"
        self._discard()
        self.error = LoadError(f"model {model.name!r}: {reason}", exit_code)

    def _discard(self) -> None:
        """What a loader left that did not get as far as saying so; only System V segments can be left."""
        for info in sweep.discard(self._owner, self.number):
            self._log.info("removed what the loader left", name=info.name, bytes=info.size)

    def retire(self) -> None:
        """Let go of every segment and of the template; workers that still map a segment keep their mapping."""
        if self.state == "loading":
            self._discard()
        self.state = "retired"
        self.nursery.close()
        for stored in (*self.stored, *self._kept.values()):
            stored.drop()
        self.stored.clear()
        self._kept.clear()


def _brief(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report[key] for key in ("form", "origin", "prepare_s") if key in report}

"""What the workers serve, and how that changes: one generation comes up beside the other, then slot after slot moves.

Runs in the master. One change at a time; the generation that serves is untouched until every slot has moved, and it is
kept (its segments, without any process) so that a rollback needs neither its file nor a loader.

| phase | meaning | next |
|---|---|---|
| loading | loaders prepare the models that are not taken over | opening, failed |
| opening | the template opens and proves them | rolling, failed |
| rolling | slot after slot gets a worker of the new generation, and its old one leaves | holding, done, returning |
| holding | a share of the slots has moved (canary); promoted or rejected, by figures or by word | rolling, returning |
| returning | the slots that had moved get workers of the old generation again | failed |
| done | the new generation serves | |
| failed | the old generation serves; `reason` says why | |
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from prefork import change as changes
from prefork.canary import Watch
from prefork.change import Change, Kind, Phase
from prefork.child import Child
from prefork.config import Config, ModelConfig
from prefork.errors import FailedPrecondition, NotFound, PreforkError
from prefork.fleet import Fleet
from prefork.generation import Generation, Stored
from prefork.log import Logger
from prefork.reporting import Reporting
from prefork.slots import Slot

LOSSES = 2  # workers of the new generation that die, without a reason of their own, before a change is given up
JUDGE = 1.0  # seconds between judgements of a canary; each one more is another chance of a false alarm
REMEMBERED = 16  # changes whose ends can still be asked for: another may begin before somebody has
Make = Callable[[int, Sequence[ModelConfig], Mapping[str, Stored]], Generation]


class Turnover:
    """Doors: `start`, `reload`, `rollback`, `restart`, `promote`; `hear`, `left` and `tend` for the master's loop;
    `stop` and `close`. `serving` is None until the first generation is loaded."""

    def __init__(
        self,
        config: Config,
        log: Logger,
        fleet: Fleet,
        reporting: Reporting,
        make: Make,
        add: Callable[[Child], None],
    ) -> None:
        self._config = config
        self._log = log
        self._fleet = fleet
        self._reporting = reporting
        self._make = make
        self._add = add
        self.serving: Generation | None = None
        self.coming: Generation | None = None
        self.previous: Generation | None = None
        self.change = Change(0, "start", 0, time.monotonic())
        self.error: PreforkError | None = None
        self._loader: Child | None = None
        self._given_up = ""
        self._watch: Watch | None = None
        self._judge_at = 0.0
        self.numbers = 0
        self._rows: dict[int, dict[str, Any]] = {}  # of the changes that ended last, by number
        fleet.lost = self._lost

    # what can be asked for

    def start(self, models: Sequence[ModelConfig], kept: Mapping[str, Stored], after: int = 0) -> None:
        """Load the first generation; `kept`: what another master has loaded, and `after` the last number that it
        gave."""
        self.numbers = after
        self._begin("start", self._next(models, kept))

    def leave(self, names: Container[str]) -> None:
        """The segments of these names are another master's as well: they are not to go with us."""
        for generation in (self.serving, self.previous):
            for stored in generation.stored if generation is not None else ():
                stored.left = stored.model.ref.name in names

    def reload(
        self,
        found: Sequence[ModelConfig],
        names: Sequence[str] = (),
        share: float = 1.0,
        hold: float = math.inf,
        *,
        forced: bool = False,
    ) -> Change:
        """Load the models of `found` anew, or only those of `names`, and serve them. The others: as in Change.

        Raises FailedPrecondition while another change is under way, NotFound for a name that is not in `found`."""
        serving = self._idle()
        kept: dict[str, Stored] = {}
        if names:
            found = changes.only(names, found, serving.wanted)
            kept = {stored.model.name: stored for stored in serving.stored if stored.model.name not in names}
        return self._begin("reload", self._next(found, kept), share, hold, forced=forced)

    def rollback(self) -> Change:
        """Give up the change that is under way; else serve what was served before the last one.

        Raises FailedPrecondition when there is neither."""
        change = self.change
        if not change.over and change.kind in ("reload", "rollback") and change.phase != "returning":
            self._give_up("rolled back on request")
            return change
        self._idle()
        if self.previous is None:
            raise FailedPrecondition("there is no earlier generation to return to")
        kept = {stored.model.name: stored for stored in self.previous.stored}
        return self._begin("rollback", self._next(self.previous.wanted, kept))

    def restart(self) -> Change:
        """Replace every worker by a fresh one of the same generation. Raises FailedPrecondition."""
        serving = self._idle()
        self.change = Change(self.change.number + 1, "restart", serving.number, time.monotonic(), "rolling")
        self._log.info("rolling restart", generation=serving.number)
        return self.change

    def promote(self) -> Change:
        """Let the rest of the slots follow the canary. Raises FailedPrecondition when there is none."""
        if self.change.phase != "holding":
            raise FailedPrecondition(f"no canary is waiting: the last change is {self.change.phase}")
        self._promote("promoted on request")
        return self.change

    @property
    def loading(self) -> str:
        """The model whose loader runs now, or nothing."""
        return self.coming.loading if self.coming is not None else ""

    def row(self, number: int = 0) -> dict[str, Any]:
        """A change, as the control socket tells it: the last one, or that of `number`. Raises NotFound when it was too
        long ago."""
        if number and number != self.change.number:
            if number not in self._rows:
                raise NotFound(f"change {number} is not known (any more); the last one is {self.change.number}")
            return self._rows[number]
        wanted = [slot for slot in self._fleet.slots if slot.wanted]
        return self.change.row(sum(map(self._moved, wanted)), len(wanted))

    # what the master's loop tells

    def hear(self, child: Child, message: Mapping[str, Any]) -> None:
        """What a loader or a template says."""
        generation = self._of(child)
        if generation is None:
            return
        if child.role == "template" and child is generation.nursery.template:
            generation.nursery.hear(message)
        elif message["event"] == "done" and generation.state == "loading" and not self._given_up:
            generation.published(child, dict(message))

    def left(self, child: Child, code: int, now: float) -> PreforkError | None:
        """A loader or a template is reaped. The error that ends a start, if any."""
        generation = self._of(child)
        if child.role == "loader":
            self._loader = None
            if generation is not None and generation is self.coming:
                generation.loader_left(child, code)
                if not self.change.over:
                    self._load()
        elif generation is not None:
            return generation.nursery.left(child, code, now, started=self._fleet.up or self.change.kind != "start")
        return None

    def tend(self, now: float) -> None:
        """Take the change as far as it goes now."""
        match self.change.phase:
            case "opening":
                self._open(now)
            case "rolling":
                self._roll(now)
            case "holding":
                self._hold(now)
            case "returning":
                self._return(now)

    def stop(self) -> None:
        """The server goes; so does what is coming."""
        self._fleet.lost = lambda child, reason: None
        if self._loader is not None:
            self._loader.kill(signal.SIGKILL)
        if self.coming is not None:
            self.coming.nursery.close()
        if not self.change.over:
            self._end("failed", "the server is stopping")

    def close(self) -> None:
        """Remove every segment."""
        for generation in (self.coming, self.serving, self.previous):
            if generation is not None:
                generation.retire()

    # from one phase to the next

    def _idle(self) -> Generation:
        if self.serving is None or not self.change.over:
            raise FailedPrecondition(f"a {self.change.kind} is {self.change.phase}; one change at a time")
        return self.serving

    def _next(self, models: Sequence[ModelConfig], kept: Mapping[str, Stored]) -> Generation:
        self.numbers += 1
        return self._make(self.numbers, models, kept)

    def _of(self, child: Child) -> Generation | None:
        return next((g for g in (self.coming, self.serving) if g is not None and g.number == child.generation), None)

    def _begin(
        self, kind: Kind, coming: Generation, share: float = 1.0, hold: float = math.inf, *, forced: bool = False
    ) -> Change:
        self.coming, self._given_up = coming, ""
        self.change = Change(
            self.change.number + 1, kind, coming.number, time.monotonic(), share=share, hold=hold, forced=forced
        )  # fmt: skip
        if kind != "start":
            self._log.info(kind, generation=coming.number, models=[model.name for model in coming.wanted])
        self._fleet.open_template(coming)
        self._load()
        return self.change

    def _load(self) -> None:
        """The next loader; when there is none, on to opening."""
        coming = self.coming
        assert coming is not None
        self._loader = None if coming.error or self._given_up else coming.load_next()
        if self._loader is not None:
            self._add(self._loader)
        elif coming.error is not None or self._given_up:
            self.error = coming.error
            self._drop(self._given_up or (coming.error.message if coming.error else ""))
        elif self.change.kind == "reload" and not self.change.forced and (why := self._misfit()):
            self._drop(why)
        else:
            coming.nursery.give(coming.models)
            self._reporting.models(coming.models)
            self._fleet.generations[coming.number] = coming
            if self.change.kind == "start":
                self._finish()
            else:
                self.change.phase = "opening"

    def _misfit(self) -> str:
        return changes.misfit(self.serving.models, self.coming.models) if self.serving and self.coming else ""

    def _open(self, now: float) -> None:
        assert self.coming is not None
        nursery = self.coming.nursery
        if nursery.hopeless:
            self._drop(f"the template does not come up: {nursery.reason}")
        elif nursery.state in ("ready", "unfit"):
            self.change.phase = "rolling"
            self._roll(now)

    def _roll(self, now: float) -> None:
        """Bring up one successor at a time: more of them would take the processor from those who serve."""
        change, fleet = self.change, self._fleet
        wanted = [slot for slot in fleet.slots if slot.wanted]
        if any(slot.successor is not None for slot in wanted):
            return
        left = [slot for slot in wanted if not self._moved(slot)]
        if change.share < 1 and len(wanted) - len(left) >= max(1, round(change.share * len(wanted))):
            self._hold_begins(now)
        elif not left:
            self._finish()
        elif left[0].ready or (left[0].child is None and left[0].generation != change.generation):
            fleet.replace(left[0], change.generation, now)

    def _moved(self, slot: Slot) -> bool:
        child = slot.child
        if child is None or not slot.ready or child.generation != self.change.generation:
            return False
        return self.change.kind != "restart" or child.started >= self.change.began

    def _hold_begins(self, now: float) -> None:
        self.change.phase, self.change.held_at, self._judge_at = "holding", now, now
        self._watch = Watch(self._fleet.board, self._fleet.slots)
        row = self.row()
        self._log.info("canary holds", generation=row["generation"], moved=row["moved"], workers=row["workers"])

    def _hold(self, now: float) -> None:
        change = self.change
        if math.isinf(change.hold) or self._watch is None or now < self._judge_at:
            return
        self._judge_at = now + JUDGE
        verdict, why = self._watch.judge(self._moved, over=now - change.held_at >= change.hold)
        if verdict == "fail":
            self._give_up(f"canary rejected: {why}")
        elif verdict == "pass":
            self._promote(why)

    def _promote(self, why: str) -> None:
        self._log.info("canary promoted", generation=self.change.generation, why=why)
        self.change.phase, self.change.share = "rolling", 1.0

    def _return(self, now: float) -> None:
        assert self.serving is not None
        if any(child.generation == self.change.generation for child in self._held()):
            for slot in self._fleet.slots:
                moved = slot.child is not None and slot.child.generation == self.change.generation
                if moved and slot.wanted and slot.successor is None:
                    self._fleet.replace(slot, self.serving.number, now)
                    return
            return
        self._drop(self.change.reason)

    def _held(self) -> list[Child]:
        """Workers that hold a slot, or are about to."""
        found = [child for slot in self._fleet.slots for child in (slot.child, slot.successor) if child is not None]
        return [child for child in found if not child.leaving]

    def _lost(self, child: Child, reason: str) -> None:
        """A worker died. One that says why would say so again."""
        change = self.change
        if child.generation != change.generation or change.phase not in ("rolling", "holding"):
            return
        if change.kind == "restart" and child.started < change.began:
            return
        change.losses += 1
        said = child.said is not None and child.said.get("event") == "failed"
        if said or change.losses >= LOSSES:
            how = "does not come up" if child.ready_at is None else "died"
            self._give_up(f"worker of slot {child.slot} {how}: {reason}")

    def _give_up(self, reason: str) -> None:
        """The serving generation stays, or gets back what it had."""
        change = self.change
        self._given_up = change.reason = reason
        if change.phase == "loading":
            if self._loader is not None:
                self._loader.kill(signal.SIGKILL)  # the rest follows when it is reaped
        elif change.phase == "opening":
            self._drop(reason)
        elif change.kind == "restart":
            self._end("failed", reason)
        else:
            self._log.warning("going back", kind=change.kind, generation=change.generation, reason=reason)
            change.phase = "returning"
            assert self.serving is not None
            self._fleet.serve(self.serving)
            for slot in self._fleet.slots:
                self._fleet.abandon(slot, time.monotonic())

    def _drop(self, reason: str) -> None:
        """Nothing of the coming generation serves: it goes."""
        assert self.coming is not None
        self._fleet.generations.pop(self.coming.number, None)
        self.coming.retire()
        self.coming = None
        if self.serving is not None:
            self._reporting.models(self.serving.models, only=True)
        self._end("failed", reason)

    def _finish(self) -> None:
        """The coming generation serves; the one before it is kept, without processes, for a rollback."""
        if self.coming is not None:
            old, self.serving, self.coming = self.serving, self.coming, None
            self._fleet.serve(self.serving)
            self._reporting.models(self.serving.models, only=True)
            if old is not None:
                self._replace_previous(old)
        self._end("done", "")

    def _replace_previous(self, old: Generation) -> None:
        self._fleet.generations.pop(old.number, None)
        if self.previous is not None:
            self.previous.retire()
        self.previous = old if self._config.server.keep_previous else None
        if self.previous is None:
            old.retire()
        else:
            old.nursery.close()

    def _end(self, phase: Phase, reason: str) -> None:
        change = self.change
        change.phase, change.reason, change.ended = phase, reason, time.monotonic()
        self._rows[change.number] = self.row()
        self._rows.pop(change.number - REMEMBERED, None)
        if change.kind != "start":
            say = self._log.info if phase == "done" else self._log.error
            say(f"{change.kind} {phase}", **{k: v for k, v in self.row().items() if k not in ("kind", "phase") and v})

"""Load at a constant rate, as a helper process: `python -m bench.openload PLAN`, a JSON file.

    {"address": "HOST:PORT", "unix": "unix:PATH", "inputs": {MODEL: FILE.npz}, "answers": {MODEL: [FILE.npz, ...]}}

A request is sent at its moment, whatever became of the others, and its time runs from that moment, so that a stall is
seen by all that it held up (Schroeder, Wierman, Harchol-Balter, "Open Versus Closed", NSDI 2006). WAYS says who
sends it; only the last one ever repeats anything. Each answer must be one of `answers`, where these are given.

{"rate": r} begins the load, or changes its rate; {"phase": NAME} puts the requests from now on under that name;
{"stop": true} waits for the last answers and tells what happened.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.peer import say
from prefork.client import AsyncClient
from prefork.client.calls import CodecName
from prefork.errors import PreforkError

MOST_OPEN = 2000  # requests without an answer, after which the server counts as hung
CUTS = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Way:
    """How a request comes: `kept` connections of a pool, or one of its own. `share`: requests of each 20."""

    name: str
    share: int
    codec: CodecName
    kept: int
    unix: bool = False
    retries: int = 0


WAYS = (
    Way("kept, msgpack", 5, "msgpack", 16),
    Way("kept, protobuf", 5, "protobuf", 16),
    Way("kept, Unix socket", 2, "msgpack", 4, unix=True),
    Way("anew, msgpack", 2, "msgpack", 0),
    Way("anew, protobuf", 2, "protobuf", 0),
    Way("kept, with retry", 4, "msgpack", 16, retries=2),
)


@dataclass
class Account:
    """What became of the requests of one phase and way. `seconds`: of those that were answered."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    failures: Counter[str] = field(default_factory=Counter)
    wrong: int = 0


class Load:
    def __init__(self, plan: Mapping[str, Any], stack: AsyncExitStack) -> None:
        self._plan, self._stack = plan, stack
        self._inputs = {model: _read(path) for model, path in plan["inputs"].items()}
        self._answers = {model: [_read(path) for path in paths] for model, paths in plan.get("answers", {}).items()}
        self._order = itertools.cycle([way for turn in range(20) for way in WAYS if _comes(way, turn)])
        self._models = itertools.cycle(self._inputs)
        self._clients: dict[str, AsyncClient] = {}
        self._open: set[asyncio.Task[None]] = set()
        self.phase = "begin"
        self.accounts: dict[tuple[str, str], Account] = {}
        self._sending: asyncio.Task[None] | None = None
        self._step = 1.0

    def _client(self, way: Way) -> AsyncClient:
        address = str(self._plan["unix" if way.unix else "address"])
        return AsyncClient(address, codec=way.codec, pool_size=way.kept or 1, retries=way.retries)

    async def _ask(self, phase: str, way: Way, model: str, due: float) -> None:
        account = self.accounts.setdefault((phase, way.name), Account())
        try:
            if way.kept:
                answer = await self._kept(way).infer(model, self._inputs[model])
            else:
                async with self._client(way) as client:
                    answer = await client.infer(model, self._inputs[model])
        except PreforkError as error:
            account.failures[_words(error)] += 1
            return
        account.seconds.append(time.perf_counter() - due)
        known = self._answers.get(model)
        account.wrong += bool(known) and not any(_same(answer, one) for one in known or ())

    def _kept(self, way: Way) -> AsyncClient:
        if way.name not in self._clients:
            self._clients[way.name] = self._client(way)
            self._stack.push_async_exit(self._clients[way.name])
        return self._clients[way.name]

    def set_rate(self, rate: float) -> None:
        self._step = 1.0 / rate
        self._sending = self._sending or asyncio.create_task(self._send())

    async def _send(self) -> None:
        due = time.perf_counter()
        while True:
            due += self._step
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            way = next(self._order)
            if len(self._open) >= MOST_OPEN:
                self.accounts.setdefault((self.phase, way.name), Account()).failures["not sent: server hangs"] += 1
                continue
            task = asyncio.create_task(self._ask(self.phase, way, next(self._models), due))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def stop(self) -> dict[str, Any]:
        """Accounts as plain values, one for each phase and way, and one for each phase."""
        if self._sending is not None:
            self._sending.cancel()
        while self._open:
            await asyncio.wait(self._open)
        rows = [
            {"phase": phase, "way": way, "answered": len(one.seconds), "failed": one.failures.total(),
             "failures": dict(one.failures.most_common(20)), "wrong": one.wrong}
            for (phase, way), one in self.accounts.items()
        ]  # fmt: skip
        phases = {phase for phase, _ in self.accounts}
        return {"rows": rows, "times": {phase: self._times(phase) for phase in sorted(phases)}}

    def _times(self, phase: str) -> dict[str, float]:
        parts = [np.asarray(one.seconds) for (name, _), one in self.accounts.items() if name == phase]
        seconds = np.concatenate(parts)
        if not len(seconds):
            return {}
        found = np.quantile(seconds, CUTS)
        return {**{f"p{cut * 100:g}": float(value) for cut, value in zip(CUTS, found, strict=True)},
                "max": float(seconds.max())}  # fmt: skip


def _comes(way: Way, turn: int) -> bool:
    """Spread the way's shares of 20 evenly."""
    return (turn + 1) * way.share // 20 > turn * way.share // 20


def _read(path: str) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def _same(answer: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return all(np.array_equal(np.asarray(answer[name]), value) for name, value in known.items())


def _words(error: PreforkError) -> str:
    """A name for what happened that does not differ each time: which end failed, and its words without numbers."""
    text = "".join("N" if character.isdigit() else character for character in error.message)
    while "NN" in text:
        text = text.replace("NN", "N")
    return f"{type(error).__name__}: {text}"


async def _serve(plan: Mapping[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        load = Load(plan, stack)
        say(ways=[way.name for way in WAYS])
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            match json.loads(line):
                case {"rate": rate}:
                    load.set_rate(float(rate))
                    say(rate=rate)
                case {"phase": name}:
                    load.phase = str(name)
                    say(phase=name)
                case {"stop": True}:
                    say(**await load.stop())


def main(argv: Sequence[str]) -> None:
    uvloop.run(_serve(json.loads(Path(argv[0]).read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])

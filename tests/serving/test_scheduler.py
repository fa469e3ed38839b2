"""The scheduler with a real session of the demo model: everything admitted is answered once, or dropped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from prefork.codec.message import InferReply, InferRequest
from prefork.errors import DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from prefork.model.session import Session
from prefork.serving.admission import Admission
from prefork.serving.costs import Costs
from prefork.serving.scheduler import Job, Result, RunIn, Scheduler
from prefork.tensor import Tensor
from prefork.value import Parameter
from tests.serving.parts import counts, demo_session, fresh_words, run

IMAGE = np.linspace(0, 16, 64, dtype=np.float32).reshape(1, 64)


class Gated(Session):
    """The real session, which waits for a word before each run."""

    gate = threading.Event()
    runs = 0

    def run(
        self, tensors: Sequence[Tensor], outputs: Sequence[str] = (), parameters: Mapping[str, Parameter] = {}
    ) -> tuple[list[Tensor], dict[str, Any]]:
        assert Gated.gate.wait(20)
        Gated.runs += 1
        return demo_session().run(tensors, outputs, parameters)


@dataclass
class Owner:
    """Keeps what it is told; `wait(n)` until it was told n things."""

    found: dict[int, Result] = field(default_factory=dict)
    told: asyncio.Event = field(default_factory=asyncio.Event)
    moment: int = -1
    deed: Callable[[], None] = lambda: None

    def settle(self, job: Job, result: Result) -> None:
        assert job.request_id not in self.found, "answered twice"
        self.found[job.request_id] = result
        self.told.set()
        if len(self.found) == self.moment:
            self.deed()

    def at(self, moment: int, deed: Callable[[], None]) -> None:
        """Do something when so many answers are there."""
        self.moment, self.deed = moment, deed

    async def wait(self, count: int) -> None:
        while len(self.found) < count:
            self.told.clear()
            await self.told.wait()


def gated() -> Session:
    Gated.gate.clear()
    Gated.runs = 0
    return object.__new__(Gated)


class Bench:
    """A scheduler and its surroundings."""

    def __init__(self, loop: asyncio.AbstractEventLoop, session: Session, run_in: RunIn = "thread", most: int = 8):
        self.words, self.costs, self.admission = fresh_words(), Costs(), Admission(most, 1 << 20)
        self.observed: list[float] = []
        self.faults: list[Exception] = []
        self.scheduler = Scheduler(
            loop, {"digits": session}, {"digits": "1"}, self.admission, self.costs, self.words, run_in,
            self.observed.append, self.faults.append,
        )  # fmt: skip
        self.owner = Owner()

    def job(self, number: int, seconds: float = 20.0, image: np.ndarray = IMAGE, size: int = 300) -> Job:
        request = InferRequest("digits", [Tensor.from_numpy("image", image)])
        return Job(self.owner, number, 1, request, size, time.monotonic() + seconds)

    def submit(self, number: int, **how: Any) -> Job:
        job = self.job(number, **how)
        self.scheduler.submit(job)
        return job


def test_what_is_submitted_is_answered() -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, demo_session())
        for number in range(1, 9):
            bench.submit(number)
        assert bench.scheduler.held == 8 and counts(bench.words)["in_flight"] == 8
        await bench.owner.wait(8)
        expected, _ = demo_session().run([Tensor.from_numpy("image", IMAGE)])
        for reply in bench.owner.found.values():
            assert isinstance(reply, InferReply) and reply.model_version == "1"
            assert [bytes(tensor.data) for tensor in reply.outputs] == [bytes(tensor.data) for tensor in expected]
        found = counts(bench.words)
        assert (found["requests"], found["thread_runs"], found["in_flight"], found["queue_depth"]) == (8, 8, 0, 0)
        assert bench.scheduler.progress == (8, 0)
        bench.scheduler.close()

    run(body)


def test_a_models_refusal_is_an_answer() -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, demo_session())
        bench.submit(1, image=np.zeros((1, 63), np.float32))
        await bench.owner.wait(1)
        assert isinstance(bench.owner.found[1], InvalidArgument)
        assert bench.scheduler.held == 0
        bench.scheduler.close()

    run(body)


def test_run_now_runs_what_is_cheap_and_nothing_else() -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, demo_session(), "auto")
        request = bench.job(1).request
        bench.costs.set_hand_off(1.0)
        assert bench.scheduler.run_now(request, 300) is None  # its cost is not known
        bench.costs.learn("digits", 300, 1e-5)
        assert isinstance(bench.scheduler.run_now(request, 300), InferReply)
        bench.costs.set_hand_off(1e-9)
        assert bench.scheduler.run_now(request, 300) is None
        assert counts(bench.words)["requests"] == 1
        bench.scheduler.close()

    run(body)


@pytest.mark.parametrize(("run_in", "now"), [("inline", True), ("thread", False)])
def test_the_configured_place_wins(run_in: RunIn, now: bool) -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, demo_session(), run_in)
        bench.costs.set_hand_off(1.0)
        assert (bench.scheduler.run_now(bench.job(1).request, 300) is not None) is now
        bench.scheduler.close()

    run(body)


@pytest.mark.parametrize(("name", "version", "word"), [("nobody", "", "nobody"), ("digits", "2", "version")])
def test_a_model_that_is_not_there(name: str, version: str, word: str) -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, demo_session())
        with pytest.raises(NotFound, match=word):
            bench.scheduler.run_now(InferRequest(name, [], model_version=version), 10)
        assert counts(bench.words)["requests"] == 0
        bench.scheduler.close()

    run(body)


def test_refusals_take_nothing() -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, gated(), most=2)
        with pytest.raises(DeadlineExceeded):
            bench.submit(1, seconds=-1)
        bench.submit(2)
        bench.submit(3)
        with pytest.raises(ResourceExhausted, match="max_in_flight"):
            bench.submit(4)
        assert bench.scheduler.held == 2
        Gated.gate.set()
        await bench.owner.wait(2)
        assert set(bench.owner.found) == {2, 3} and bench.scheduler.held == 0
        bench.scheduler.close()

    run(body)


def test_a_deadline_is_answered_while_the_lane_is_busy_and_the_work_is_not_done() -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, gated())
        bench.submit(1)
        bench.submit(2, seconds=0.01)
        bench.submit(3)
        await bench.owner.wait(1)
        assert isinstance(bench.owner.found[2], DeadlineExceeded) and not Gated.gate.is_set()
        Gated.gate.set()
        await bench.owner.wait(3)
        assert Gated.runs == 2 and bench.scheduler.held == 0
        bench.scheduler.close()

    run(body)


def test_a_deadline_in_the_middle_of_the_run() -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, gated())
        bench.submit(1, seconds=0.01)
        await bench.owner.wait(1)
        assert isinstance(bench.owner.found[1], DeadlineExceeded)
        Gated.gate.set()
        bench.submit(2)
        await bench.owner.wait(2)  # `settle` fails when the late result is given as well
        assert counts(bench.words)["in_flight"] == 0
        bench.scheduler.close()

    run(body)


def test_dropped_work_is_not_run_and_not_answered() -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, gated())
        bench.submit(1)
        dropped = [bench.submit(number) for number in (2, 3)]
        for job in dropped:
            bench.scheduler.drop(job)
            bench.scheduler.drop(job)
        assert bench.scheduler.held == 3 and counts(bench.words)["dropped"] == 2
        Gated.gate.set()
        bench.submit(4)
        await bench.owner.wait(2)
        assert set(bench.owner.found) == {1, 4} and Gated.runs == 2
        bench.scheduler.close()

    run(body)


def test_dropped_work_gives_its_bytes_back() -> None:
    """What it holds must be gone at once, though the lane has not come to it."""

    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, gated())
        bench.submit(1)
        job = bench.submit(2, image=np.zeros((1000, 64), np.float32))
        bench.scheduler.drop(job)
        assert job.request is None
        Gated.gate.set()
        await bench.owner.wait(1)
        bench.scheduler.close()

    run(body)


def test_given_up_work_in_the_lane_is_bounded() -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> int:
        bench = Bench(loop, gated(), most=4)
        bench.submit(1)
        for number in range(2, 1002):
            try:
                bench.scheduler.drop(bench.submit(number))
            except ResourceExhausted:
                break
        depth = bench.scheduler.progress[1]
        Gated.gate.set()
        await bench.owner.wait(1)
        bench.scheduler.close()
        return depth

    assert run(body) == 4


def test_closing_answers_what_waits() -> None:
    async def body(loop: asyncio.AbstractEventLoop) -> None:
        bench = Bench(loop, gated())
        for number in (1, 2, 3):
            bench.submit(number)
        bench.owner.at(3, Gated.gate.set)  # else an end that waits for the run would wait for ever
        bench.scheduler.close()
        assert all(isinstance(found, Unavailable) for found in bench.owner.found.values())
        assert len(bench.owner.found) == 3

    run(body)

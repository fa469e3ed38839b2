"""Admission, Costs and Lane: the small parts, each by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from prefork.errors import ResourceExhausted
from prefork.serving.admission import Admission
from prefork.serving.costs import INLINE_HAND_OFFS, Costs
from prefork.serving.lane import Lane, measure_hand_off
from tests.serving.parts import run


def test_admission_counts_requests() -> None:
    admission = Admission(2, 100)
    admission.admit(10)
    admission.admit(20)
    with pytest.raises(ResourceExhausted, match=r"holds 2 requests, max_in_flight is 2") as caught:
        admission.admit(1)
    assert caught.value.retryable and caught.value.retry_after_ms > 0
    assert (admission.held, admission.held_bytes) == (2, 30)
    admission.release(10)
    admission.admit(1)
    assert (admission.held, admission.held_bytes) == (2, 21)


def test_admission_counts_bytes() -> None:
    admission = Admission(10, 100)
    admission.admit(60)
    with pytest.raises(ResourceExhausted, match=r"60 bytes of requests, 41 more exceed max_in_flight_bytes 100"):
        admission.admit(41)
    admission.admit(40)
    assert (admission.held, admission.held_bytes) == (2, 100)


def test_a_request_above_all_bytes_is_taken_alone() -> None:
    admission = Admission(10, 100)
    admission.admit(500)
    with pytest.raises(ResourceExhausted):
        admission.admit(1)
    admission.release(500)
    admission.admit(1)
    with pytest.raises(ResourceExhausted):
        admission.admit(500)


def test_costs_know_nothing_at_first() -> None:
    costs = Costs()
    costs.set_hand_off(1.0)
    assert not costs.cheap("m", 100)


def test_costs_are_by_model_and_power_of_two() -> None:
    costs = Costs()
    costs.set_hand_off(1.0)
    costs.learn("m", 64, 0.5)
    assert costs.cheap("m", 64) and costs.cheap("m", 127)
    assert not costs.cheap("m", 128) and not costs.cheap("m", 63) and not costs.cheap("n", 64)


def test_costs_follow_shorter_runs_fast_and_longer_ones_slowly() -> None:
    costs = Costs()
    costs.set_hand_off(1.0)
    assert costs.inline_below == INLINE_HAND_OFFS
    limit = costs.inline_below
    costs.learn("m", 1, limit / 2)
    costs.learn("m", 1, 2 * limit)  # one disturbed run changes no decision
    assert costs.cheap("m", 1)
    for _ in range(100):
        costs.learn("m", 1, 2 * limit)
    assert not costs.cheap("m", 1)
    for _ in range(3):
        costs.learn("m", 1, limit / 2)
    assert costs.cheap("m", 1)


def test_the_lane_runs_in_order_in_one_other_thread() -> None:
    threads: set[int] = set()
    found: list[tuple[int, int]] = []

    async def body(loop: asyncio.AbstractEventLoop) -> None:
        done = loop.create_future()

        def execute(job: int) -> int:
            threads.add(threading.get_ident())
            return job * job

        def deliver(job: int, result: int, seconds: float) -> None:
            assert threading.get_ident() == here and seconds >= 0
            found.append((job, result))
            if job == 99:
                done.set_result(None)

        here = threading.get_ident()
        lane = Lane(loop, execute, deliver)
        for job in range(100):
            lane.submit(job)
        await done
        assert lane.finished == 100
        lane.close()
        assert threads and here not in threads and len(threads) == 1

    run(body)
    assert found == [(job, job * job) for job in range(100)]


def test_a_job_submitted_by_a_delivery_is_run() -> None:
    """The flag that says "the loop is told" is cleared before the results are taken: none is forgotten."""

    async def body(loop: asyncio.AbstractEventLoop) -> int:
        done: asyncio.Future[int] = loop.create_future()

        def deliver(job: int, result: int, seconds: float) -> None:
            if result == 2000:
                done.set_result(result)
            else:
                lane.submit(result)

        lane: Lane[int, int] = Lane(loop, lambda job: job + 1, deliver)
        lane.submit(0)
        found = await done
        lane.close()
        return found

    assert run(body) == 2000


def test_closing_the_lane_runs_what_is_queued() -> None:
    seen: list[int] = []

    async def body(loop: asyncio.AbstractEventLoop) -> None:
        done = loop.create_future()
        lane: Lane[int, None] = Lane(loop, seen.append, lambda job, result, seconds: job == 9 and done.set_result(None))
        for job in range(10):
            lane.submit(job)
        lane.close()
        await done

    run(body)
    assert seen == list(range(10))


def test_a_fault_in_a_delivery_keeps_nobody_else_waiting() -> None:
    faults: list[object] = []

    async def body(loop: asyncio.AbstractEventLoop) -> None:
        done = loop.create_future()
        loop.set_exception_handler(lambda loop, context: faults.append(context["exception"]))
        gate = threading.Event()

        def deliver(job: int, result: bool, seconds: float) -> None:
            if job == 0:
                raise ValueError("of this job alone")
            done.set_result(None)

        lane: Lane[int, bool] = Lane(loop, lambda job: gate.wait(20), deliver)
        lane.submit(0)
        lane.submit(1)
        gate.set()  # both finish before the loop looks
        await done
        lane.close()

    run(body)
    assert [str(fault) for fault in faults] == ["of this job alone"]


@pytest.fixture
def threads_before() -> Iterator[set[int]]:
    yield {thread.ident for thread in threading.enumerate() if thread.ident}


def test_measuring_the_hand_off_leaves_no_thread(threads_before: set[int]) -> None:
    seconds = run(lambda loop: measure_hand_off(loop, rounds=16))
    assert seconds > 0
    for thread in threading.enumerate():
        if thread.ident not in threads_before:
            thread.join(20)  # nobody waits for a lane to end
            assert not thread.is_alive()

"""The collector over a real scoreboard: every name, and counters that never go backwards, whatever dies or breaks."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from prefork.observe.memory import MemoryReader
from prefork.observe.metrics import BoardCollector
from prefork.observe.snapshot import Watcher
from prefork.shm import words as w
from prefork.shm.masterpage import restart_reason
from prefork.shm.scoreboard import Scoreboard
from prefork.shm.words import MasterState, Restart, Stage, WorkerState
from tests.observe.scrape import Sample, counters, sample, samples

DEATHS = 1000


@pytest.fixture
def board() -> Iterator[Scoreboard]:
    board = Scoreboard.create(8)
    page = board.master()
    page.begin()
    page.write(MasterState.READY, 3, 2, 2)
    page.serve("digits", 3, 4096, {"form": "int8", "cosine": "0.9987", "Bad-Key": "x", "generation": "3"})
    yield board
    os.close(board.fd)


def registry(board: Scoreboard) -> CollectorRegistry:
    found = CollectorRegistry(auto_describe=False)
    found.register(BoardCollector(Watcher(board), {"version": "1.2.3"}))
    return found


def scrape(found: CollectorRegistry) -> dict[Sample, float]:
    return samples(generate_latest(found).decode())


def test_what_is_told(board: Scoreboard) -> None:
    slot = board.slot(1)
    slot.begin(os.getpid(), 3)
    slot.move(WorkerState.READY)
    rows = board.answer_rows()
    slot.answer(rows[1]["digits"], 0)
    slot.answer(rows[2]["digits"], 8)
    slot.answer(rows[2]["no such model"], 5)
    slot.words[w.REQUESTS] += 5
    slot.words[w.QUEUE_DEPTH] = 4
    slot.ran(3)
    for seconds in (5e-5, 0.02, 0.02, 30.0):
        slot.observe(Stage.COMPUTE, seconds)
    board.master().restarted(Restart.STALLED)
    seen = scrape(registry(board))
    expected = {
        sample("prefork_build_info", version="1.2.3"): 1,
        sample("prefork_server_state", state="ready"): 1,
        sample("prefork_server_state", state="loading"): 0,
        sample("prefork_generation"): 3,
        sample("prefork_workers_wanted"): 2,
        sample("prefork_worker_restarts_total", reason="stalled"): 1,
        sample("prefork_worker_restarts_total", reason="oom"): 0,
        sample("prefork_model_info", model="digits", form="int8", cosine="0.9987", generation="3"): 1,
        sample("prefork_model_segment_bytes", model="digits"): 4096,
        sample("prefork_requests_total", model="digits", codec="msgpack", code="OK"): 1,
        sample("prefork_requests_total", model="digits", codec="protobuf", code="OK"): 0,
        sample("prefork_requests_total", model="digits", codec="protobuf", code="RESOURCE_EXHAUSTED"): 1,
        sample("prefork_requests_total", model="_other", codec="protobuf", code="NOT_FOUND"): 1,
        sample("prefork_requests_accepted_total", slot="1"): 5,
        sample("prefork_requests_accepted_total", slot="0"): 0,
        sample("prefork_queue_depth", slot="1"): 4,
        sample("prefork_worker_state", slot="1", state="ready"): 1,
        sample("prefork_worker_state", slot="0", state="gone"): 1,
        sample("prefork_worker_generation", slot="1"): 3,
        sample("prefork_batch_size_bucket", le="2.0"): 0,
        sample("prefork_batch_size_bucket", le="4.0"): 1,
        sample("prefork_batch_size_sum"): 3,
        sample("prefork_stage_duration_seconds_bucket", stage="compute", le="0.0001"): 1,
        sample("prefork_stage_duration_seconds_bucket", stage="compute", le="10.0"): 3,
        sample("prefork_stage_duration_seconds_bucket", stage="compute", le="+Inf"): 4,
        sample("prefork_stage_duration_seconds_count", stage="compute"): 4,
    }
    assert {key: seen.get(key) for key in expected} == expected
    assert seen[sample("prefork_stage_duration_seconds_sum", stage="compute")] == pytest.approx(30.04005)
    assert 0 < seen[sample("prefork_worker_private_bytes", slot="1")] < 1 << 32
    assert not any(labels == (("slot", "2"),) for _, labels in seen), "only slots that exist"


def test_openmetrics_is_the_same_and_well_formed(board: Scoreboard) -> None:
    board.slot(0).observe(Stage.READ, 0.01)
    found = registry(board)
    text = generate_openmetrics(found).decode()
    strict, loose = samples(text, strict=True), scrape(found)
    assert text.endswith("# EOF\n")
    assert counters(strict) == counters(loose)
    assert strict.keys() == loose.keys()


def test_every_family_has_help_and_a_prefix(board: Scoreboard) -> None:
    families = list(registry(board).collect())
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.name.startswith("prefork_") and family.documentation.endswith(".")


def test_before_the_first_worker_there_is_a_page_already() -> None:
    board = Scoreboard.create(1)
    seen = scrape(registry(board))
    assert seen[sample("prefork_server_state", state="gone")] == 1
    assert seen[sample("prefork_batch_size_count")] == 0
    os.close(board.fd)


def test_a_broken_slot_keeps_its_counters(board: Scoreboard) -> None:
    slot, found = board.slot(0), registry(board)
    slot.begin(os.getpid(), 3)
    slot.words[w.REQUESTS] = 7
    before = scrape(found)
    slot.words[w.STATE] = 99
    after = scrape(found)
    assert counters(after) == counters(before)
    assert after[sample("prefork_scoreboard_broken_slots")] == 1
    assert after[sample("prefork_worker_state", slot="0", state="gone")] == 1
    slot.begin(os.getpid(), 4)
    assert scrape(found)[sample("prefork_scoreboard_broken_slots")] == 0


def test_counts_of_a_model_that_is_gone_stay(board: Scoreboard) -> None:
    board.slot(0).answer(board.answer_rows()[1]["digits"], 0)
    page, found = board.master(), registry(board)
    page.serve("digits", 3, 1, {})
    page.keep([])
    seen = scrape(found)
    assert seen[sample("prefork_requests_total", model="digits", codec="msgpack", code="OK")] == 1
    assert sample("prefork_model_segment_bytes", model="digits") not in seen


def _worker(board: Scoreboard, index: int, ready: int) -> None:
    slot = board.slot(index)
    slot.begin(os.getpid(), 3)
    slot.move(WorkerState.READY)
    row = board.answer_rows()[1]["digits"]
    told = False
    while True:
        slot.words[w.REQUESTS] += 1
        slot.words[row] += 1
        slot.words[row + 8] += 1
        slot.observe(Stage.COMPUTE, 0.001)
        if not told:
            told = bool(os.write(ready, b"."))


def test_a_thousand_deaths_never_turn_a_counter_back(board: Scoreboard) -> None:
    """Real processes, killed in the middle of their writing; a scrape amid each tenth life and after its end."""
    found, page = registry(board), board.master()
    left = _left()
    last = counters(scrape(found))
    for death in range(DEATHS):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _worker(board, death % 2, write)
            finally:
                os._exit(1)
        os.close(write)
        assert os.read(read, 1) == b"."
        os.close(read)
        if death % 10 == 0:
            last = _grown(last, counters(scrape(found)))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        board.slot(death % 2).end()
        page.restarted(restart_reason(status, ready=True, asked=False))
        if death % 10 == 0:
            last = _grown(last, counters(scrape(found)))
    last = _grown(last, counters(scrape(found)))
    assert last[sample("prefork_worker_restarts_total", reason="signal")] == DEATHS
    assert sum(last[sample("prefork_worker_starts_total", slot=str(index))] for index in range(2)) == DEATHS
    answered = last[sample("prefork_requests_total", model="digits", codec="msgpack", code="OK")]
    accepted = sum(last[sample("prefork_requests_accepted_total", slot=str(index))] for index in range(2))
    assert DEATHS <= answered <= accepted <= answered + DEATHS  # each death may lose the request that it was in
    assert _left() == left


def _left() -> tuple[int, list[Path]]:
    """Descriptors of this process, and files that its name is in (other servers may run beside the tests)."""
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()), Path.cwd())
    mine = [path for place in places for path in place.iterdir() if str(os.getpid()) in path.name.split("-")]
    return len(list(Path("/proc/self/fd").iterdir())), mine


def _grown(before: dict[Sample, float], after: dict[Sample, float]) -> dict[Sample, float]:
    back = {key: (value, after.get(key)) for key, value in before.items() if after.get(key, -1.0) < value}
    assert not back
    return after


def test_memory_is_asked_for_now_and_then() -> None:
    reader = MemoryReader()
    first = reader.read(os.getpid())
    assert first is not None
    assert 0 < first.private <= first.proportional < 1 << 34
    assert reader.read(os.getpid()) is first
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert reader.read(pid) is None

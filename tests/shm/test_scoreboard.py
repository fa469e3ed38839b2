"""The scoreboard over fork: one writer a slot, readers that see whole words, counters that outlive workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from prefork.errors import ConfigError, SegmentCorrupt, SegmentError
from prefork.shm import words as w
from prefork.shm.scoreboard import Scoreboard, Slot
from prefork.shm.words import Stage, WorkerState


@pytest.fixture
def board() -> Iterator[Scoreboard]:
    board = Scoreboard.create(3)
    yield board
    for index in range(3):
        assert board.read(index)
    os.close(board.fd)


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a fork, which then waits to be killed; gives its pid once `work` is done."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(write, b".")
            os.close(write)
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    done = os.read(read, 1)
    os.close(read)
    assert done == b"."
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_new_board_is_empty(board: Scoreboard) -> None:
    for index in range(3):
        reading = board.read(index)
        assert (reading.state, reading.pid, sum(reading.values.values())) == (WorkerState.GONE, 0, 0)


def test_counters_outlive_killed_workers(board: Scoreboard) -> None:
    def work() -> None:
        slot = board.slot(1)
        slot.begin(os.getpid(), 4)
        slot.move(WorkerState.READY)
        slot.words[w.REQUESTS] += 10
        slot.words[w.IN_FLIGHT] = 5
        slot.answer(w.ERRORS, 8)
        slot.observe(Stage.COMPUTE, 0.25)

    for life in range(1, 6):
        pid = forked(work)
        reading = board.read(1)
        assert (reading.state, reading.pid, reading.generation) == (WorkerState.READY, pid, 4)
        assert (reading.values["requests"], reading.values["in_flight"]) == (10 * life, 5)
        assert reading.started_ns <= reading.ready_ns == reading.tick_ns
        kill(pid)
        assert board.read(1).values["requests"] == 10 * life
        if life % 2:
            board.slot(1).end()
            assert board.read(1).state is WorkerState.GONE
            assert board.read(1).values["in_flight"] == 0
    reading = board.read(1)
    assert (reading.values["starts"], reading.errors[8], sum(reading.errors)) == (5, 5, 5)
    assert (reading.stages[Stage.COMPUTE].count, reading.stages[Stage.COMPUTE].sum) == (5, 1.25)
    assert board.read(0).values["requests"] == board.read(2).values["requests"] == 0


def test_a_new_worker_starts_its_gauges_anew(board: Scoreboard) -> None:
    slot = board.slot(0)
    slot.begin(1, 1)
    for word in range(w.GAUGES_END):
        slot.words[word] = 3
    for word in range(w.COUNTERS, w.SLOT_WORDS):
        slot.words[word] = 9
    slot.begin(77, 2)
    reading = board.read(0)
    assert (reading.state, reading.pid, reading.generation, reading.ready_ns) == (WorkerState.STARTING, 77, 2, 0)
    assert list(slot.words[w.RSS_BYTES : w.GAUGES_END]) == [0] * (w.GAUGES_END - w.RSS_BYTES)
    assert slot.words[w.STARTS] == 10
    assert set(slot.words[w.COUNTERS : w.SLOT_WORDS]) == {9, 10}


def test_every_step_is_in_the_table(board: Scoreboard) -> None:
    slot = board.slot(0)
    for old in WorkerState:
        for new in WorkerState:
            slot.words[w.STATE] = old
            if new in w.TRANSITIONS[old]:
                slot.move(new)
                assert slot.state is new
            else:
                with pytest.raises(SegmentError, match=f"no way from {old.name} to {new.name}"):
                    slot.move(new)
                assert slot.state is old


def test_the_table_is_whole() -> None:
    assert set(w.TRANSITIONS) == set(WorkerState)
    for state in WorkerState:
        assert state is WorkerState.GONE or WorkerState.GONE in w.TRANSITIONS[state]
        assert state not in w.TRANSITIONS[state]
    reached = {WorkerState.GONE}
    for _ in WorkerState:
        reached |= {new for old in reached for new in w.TRANSITIONS[old]}
    assert reached == set(WorkerState)


def test_no_two_words_overlap() -> None:
    named = [w.STATE, w.PID, w.GENERATION, w.STARTED_NS, w.READY_NS, w.TICK_NS, *w.NAMES.values()]
    named.remove(w.REPLIES_OK)  # the first of the answers
    named += range(w.ANSWERS, w.ANSWERS + w.COLUMNS * w.COLUMN)
    named += range(w.SIZES, w.SIZES + w.SIZE_BUCKETS + 1)
    for stage in Stage:
        named += range(w.HISTOGRAMS + stage * w.HISTOGRAM, w.HISTOGRAMS + stage * w.HISTOGRAM + w.BUCKETS + 1)
    assert len(named) == len(set(named))
    assert max(named) < w.SLOT_WORDS
    assert w.SLOT_SIZE % 64 == 0
    assert w.BUCKETS + 1 <= w.HISTOGRAM


@pytest.mark.parametrize(("word", "value", "field"), [(w.STATE, 99, "state"), (w.PID, 1 << 40, "pid")])
def test_readers_check(board: Scoreboard, word: int, value: int, field: str) -> None:
    board.slot(2).words[word] = value
    with pytest.raises(SegmentCorrupt, match=f"slot 2: {field}"):
        board.read(2)
    board.slot(2).begin(1, 1)  # whatever stands there, a new worker can take it


def test_buckets(board: Scoreboard) -> None:
    assert (len(w.BOUNDS), w.BOUNDS[0], w.BOUNDS[-1]) == (31, 1e-4, 10.0)
    assert list(w.BOUNDS) == sorted(set(w.BOUNDS))
    slot = board.slot(0)
    for bound in w.BOUNDS:
        slot.observe(Stage.READ, bound)
    assert board.read(0).stages[Stage.READ].counts == (1,) * 31 + (0,)
    for seconds in (0.0, -1.0, 11.0, float("inf")):
        slot.observe(Stage.WRITE, seconds)
    counts = board.read(0).stages[Stage.WRITE].counts
    assert (counts[0], counts[-1], sum(counts)) == (2, 2, 4)
    assert sum(board.read(0).stages[Stage.DECODE].counts) == 0


def test_unknown_codes_count_as_unknown(board: Scoreboard) -> None:
    slot = board.slot(0)
    for code in (-1, 17, 1000, 2):
        slot.answer(w.ERRORS, code)
    assert board.read(0).errors[2] == 4


def test_answers_are_counted_by_model_codec_and_code(board: Scoreboard) -> None:
    master = board.master()
    columns = [master.serve(name, 1, 10, {}) for name in ("a", "b")]
    assert columns == [1, 2]
    rows, slot = board.answer_rows(), board.slot(1)
    slot.words[rows[1]["a"]] += 3
    slot.answer(rows[2]["b"], 8)
    slot.answer(rows[2]["b"], 16)
    slot.answer(rows[0]["b"], 0)  # without a codec: as in the first
    slot.answer(rows[1]["\x00 no model"], 5)
    slot.answer(rows[3]["none"], 5)
    reading = board.read(1)
    expected = {(1, 1, 0, 3), (2, 2, 8, 1), (2, 2, 16, 1), (2, 1, 0, 1), (w.OTHER, 1, 5, 1), (w.OTHER, 3, 5, 1)}
    assert set(reading.answered()) == expected
    assert (reading.values["replies_ok"], sum(reading.errors), reading.errors[5]) == (4, 4, 2)
    assert len(rows[1]) == 2  # a name that a client made up leaves nothing


def test_sizes_of_runs(board: Scoreboard) -> None:
    slot = board.slot(0)
    for rows in (1, 2, 3, 4, 1024, 1025, 1 << 20):
        slot.ran(rows)
    reading = board.read(0)
    assert reading.sizes == (1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 1, 2)
    assert reading.rows == 1 + 2 + 3 + 4 + 1024 + 1025 + (1 << 20)


def test_only_slots_in_use_take_memory() -> None:
    board = Scoreboard.create(1024)
    empty = os.fstat(board.fd).st_blocks * 512
    assert empty <= 8 * w.SLOTS_AT + 4096
    slot = board.slot(1023)
    assert os.fstat(board.fd).st_blocks * 512 == empty + w.SLOT_SIZE
    slot.words[w.REQUESTS] = 4
    assert board.slot(1023).words[w.REQUESTS] == 4
    os.close(board.fd)


def test_words_are_never_torn(board: Scoreboard) -> None:
    """A reader in another process sees the old value or the new one, whose halves are equal, never half of each."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            words, values = board.slot(0).words, (0, 0xFFFFFFFFFFFFFFFF, 0x1234567812345678)
            os.write(write, b".")
            while True:
                for value in values:
                    words[w.BYTES_IN] = value
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 1) == b"."
    os.close(read)
    seen = {board.peek(0, w.BYTES_IN) for _ in range(300_000)}
    kill(pid)
    assert seen <= {0, 0xFFFFFFFFFFFFFFFF, 0x1234567812345678}
    assert len(seen) > 1


def test_reading_by_the_fd_alone(board: Scoreboard) -> None:
    board.slot(1).begin(5, 6)
    reader = Scoreboard.open(os.dup(board.fd), 3)
    assert reader.read(1) == board.read(1)
    slot: Slot | None = reader.slot(1)
    assert slot is not None
    with pytest.raises(TypeError):
        slot.words[0] = 1
    slot = None
    reader.close()
    writer = Scoreboard.open(os.dup(board.fd), 3, writable=True)
    writer.slot(1).words[w.REQUESTS] = 8
    assert board.peek(1, w.REQUESTS) == 8


def test_what_is_no_board_is_refused(board: Scoreboard) -> None:
    with pytest.raises(SegmentCorrupt, match="size: expected 90112 for 4 slots, found 73728"):
        Scoreboard.open(board.fd, 4)
    fd = os.memfd_create("other")
    os.ftruncate(fd, 73728)
    with pytest.raises(SegmentCorrupt, match="header"):
        Scoreboard.open(fd, 3)
    os.close(fd)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(board.fd, 0)
    with pytest.raises(SegmentError, match="slot 3 of 3"):
        board.read(3)
    for slots in (0, -1, 4097):
        with pytest.raises(ConfigError):
            Scoreboard.create(slots)

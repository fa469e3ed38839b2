"""The CPUs of real workers, thread by thread, and how many threads each process has whatever the environment says."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork import control
from prefork.placement import Topology, written
from tests.model import trap
from tests.roles.server import REPOSITORY, Server
from tests.roles.watch import LogWatch, row, until
from tests.roles.wire import Wire, digits

HOSTILE = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "7"
) | {"ORT_DISABLE_TELEMETRY": "0"}
SPY = """
import os

def score(outputs, labels):
    settings = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")]
    with open(os.environ["SPY_FILE"], "a") as file:
        print(len(os.listdir("/proc/self/task")), *settings, file=file)
    return float((outputs["scores"].argmax(1) == labels).mean())
"""


def tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def cpus(pid: int) -> set[str]:
    """The CPU lists of all threads of a process."""
    lines = [line for task in tasks(pid) for line in (task / "status").read_text().splitlines()]
    return {line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:")}


def place_of(slot: int, threads: int = 1) -> str:
    places = Topology.read().places(threads)
    return written(places[slot % len(places)])


def answers(server: Server) -> None:
    with Wire(server.address) as wire:
        wire.send(digits(1))
        assert wire.answer().values["label"].shape == (1,)


@pytest.fixture(scope="module")
def pinned(module_place: Path) -> Iterator[Server]:
    folder = module_place / "pinned"
    folder.mkdir()
    with Server(folder, "--workers", "3", "--pin", "cores", "--run-in", "thread") as server:
        yield server


def test_each_worker_has_its_slots_cores(pinned: Server) -> None:
    answers(pinned)
    for slot, pid in enumerate(pinned.workers()):
        assert cpus(pid) == {place_of(slot)}
        assert row(pinned, slot)["cpus"] == place_of(slot)
    everything = written(os.sched_getaffinity(0))
    assert cpus(pinned.pid) == cpus(pinned.status()["template"]["pid"]) == {everything}


def test_a_successor_has_the_same_cores(pinned: Server) -> None:
    with LogWatch(pinned) as log:
        os.kill(pinned.workers()[1], signal.SIGKILL)
        pid = log.wait("worker ready", slot=1)["pid"]
    assert cpus(pid) == {place_of(1)}


def test_a_slot_more_has_its_own(pinned: Server) -> None:
    with LogWatch(pinned) as log:
        control.request(pinned.runtime / "control.sock", "scale", {"workers": 4})
        pid = log.wait("worker ready", slot=3)["pid"]
    assert cpus(pid) == {place_of(3)}
    assert [cpus(pid) for pid in pinned.workers()[:3]] == [{place_of(slot)} for slot in range(3)]


def test_threads_of_runs_stay_there_too(place: Path) -> None:
    """Workers that open the models themselves."""
    with Server(place, "--workers", "1", "--threads", "2", "--pin", "cores") as server:
        (pid,) = server.workers()
        assert len(tasks(pid)) > 2 and cpus(pid) == {place_of(0, threads=2)}


def test_a_narrowed_cpu_set_is_kept(place: Path) -> None:
    """As a service manager or a container engine sets it before the start."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        with Server(place, "--workers", "2", "--pin", "cores") as server:
            assert [cpus(pid) for pid in server.workers()] == [{str(max(before))}] * 2
    finally:
        os.sched_setaffinity(0, before)


def test_without_pin_all_run_everywhere(demo: Server) -> None:
    everything = written(os.sched_getaffinity(0))
    assert [cpus(pid) for pid in demo.workers()] == [{everything}] * 2
    assert [found["cpus"] for found in demo.rows()] == [everything] * 2


def test_thread_counts_are_ours_whatever_the_environment_says(place: Path) -> None:
    """Master, template and telemetry one thread, a worker the loop's and the lane's."""
    args = ("--workers", "2", "--metrics-bind", "127.0.0.1:0", "--run-in", "thread")
    with Server(place, *args, env=HOSTILE) as server:
        answers(server)
        telemetry = until(server, lambda: [e["pid"] for e in server.log() if e["role"] == "telemetry"], "telemetry")
        template = server.status()["template"]["pid"]
        assert [len(tasks(pid)) for pid in (server.pid, template, telemetry[0])] == [1, 1, 1]
        assert [len(tasks(pid)) for pid in server.workers()] == [2, 2]


def test_threads_of_runs_are_as_many_as_configured(place: Path) -> None:
    """The loop, the lane, and threads - 1 that help either."""
    with Server(place, "--workers", "1", "--threads", "3", env=HOSTILE) as server:
        assert len(tasks(server.workers()[0])) == 2 + 2


def test_a_loader_has_one_thread(place: Path) -> None:
    """Asked from inside, by a metric that runs while it judges quantized forms with their sessions open."""
    model, data = trap.write(place)
    (place / "spy.py").write_text(SPY)
    spied = place / "spied"
    env = HOSTILE | {"PYTHONPATH": f"{place}:{REPOSITORY}", "SPY_FILE": str(spied)}
    args = ("--model", str(model), "--quantize", "auto", "--quantize-seconds", "0", "--eval", str(data))
    with Server(place, "--workers", "1", *args, "--metric", "spy:score", env=env) as server:
        assert server.workers()
    assert set(spied.read_text().splitlines()) == {"1 1 1 1"}

"""Is the server alive, and is it ready? Pure: readings of the scoreboard and a moment in, a verdict out.

Alive means that the master's loop turns; it says nothing of workers, so that no orchestrator kills a server that is
loading or draining. Ready means that a request sent now would be answered: the master has been ready and is not
stopping, and some worker is. One worker is enough, since the others' connections are taken by it while they come back:
a crash of one must not take the whole machine out of the balancer. The times are time.monotonic_ns().
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefork.shm.masterpage import MasterReading
from prefork.shm.scoreboard import Reading
from prefork.shm.words import MasterState, WorkerState

MASTER_SILENCE = 10.0  # seconds; its loop turns every second


@dataclass(frozen=True)
class Verdict:
    ok: bool
    reason: str


def alive(master: MasterReading, now_ns: int) -> Verdict:
    if not master.tick_ns:
        return Verdict(False, "the master has not begun")
    silent = (now_ns - master.tick_ns) * 1e-9
    if silent > MASTER_SILENCE:
        return Verdict(False, f"the master has been silent for {silent:.0f} s")
    return Verdict(True, "alive")


def ready(master: MasterReading, workers: Iterable[Reading], worker_timeout: float, now_ns: int) -> Verdict:
    """`workers`: one reading a slot. A worker silent for more than `worker_timeout` seconds (0: any) does not count."""
    if not (verdict := alive(master, now_ns)).ok:
        return verdict
    if master.state is not MasterState.READY:
        return Verdict(False, f"the server is {master.state.name.lower()}")
    able = sum(_able(worker, worker_timeout, now_ns) for worker in workers)
    if not able:
        return Verdict(False, f"none of {master.wanted} workers is ready")
    return Verdict(True, f"ready, {able} of {master.wanted} workers")


def _able(worker: Reading, timeout: float, now_ns: int) -> bool:
    if worker.state not in (WorkerState.READY, WorkerState.BUSY):
        return False
    return not timeout or (now_ns - worker.tick_ns) * 1e-9 <= timeout

"""Processes that die in the middle of a reload: loader, templates, the master itself. Part of bench.reload_faults."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import life, procs, wire
from bench.faults_stop import living
from bench.scene import INPUT, WORKERS, Reloading, Scene
from bench.server import Server
from prefork.demo import model_path
from prefork.shm.sweep import list_segments

TRIES = 6  # reloads in which a short moment must be caught
STARVED = 1 << 20  # bytes of address space beyond nothing: the next mmap fails


def loader_killed(place: Path) -> list[str]:
    return _loader(place, lambda pid: os.kill(pid, signal.SIGKILL))


def loader_starved(place: Path) -> list[str]:
    return _loader(place, lambda pid: resource.prlimit(pid, resource.RLIMIT_AS, (STARVED, STARVED)) and None)


def _loader(place: Path, deed: Callable[[int], None]) -> list[str]:
    with Scene(place) as scene:
        life.put(scene.good, scene.live)
        reload = Reloading(scene.server)
        found = reload.until(lambda now: life.phase(now) == "loading" and len(scene.newcomers(now)) == 2)
        if found is not None:
            deed(scene.newcomers(found)[-1])
        code, said = reload.end()
        problems = [] if found is not None else ["the loader was never seen"]
        problems += [] if code and said else [f"exit {code}: {said}"]
        return problems + scene.untouched() + scene.lost()


def template_killed(phase: str, place: Path) -> list[str]:
    """The one of the coming generation."""
    with Scene(place) as scene:
        life.put(scene.good, scene.live)
        reload = Reloading(scene.server)
        found = reload.until(lambda now: life.phase(now) == phase and len(scene.newcomers(now)) >= 1)
        if found is not None:
            os.kill(scene.newcomers(found)[0], signal.SIGKILL)
        code, said = reload.end()
        problems = [] if found is not None else [f"the template was never seen {phase}"]
        problems += scene.whole()
        if (code == 0) is not (scene.answer() != scene.first):
            problems.append(f"exit {code}, but the other generation serves: {said}")
        return problems + scene.lost()


def old_template_killed(place: Path) -> list[str]:
    with Scene(place) as scene:
        os.kill(int(scene.server.status()["template"]["pid"]), signal.SIGKILL)
        return scene.renewed() + scene.whole() + scene.lost()


def _rolling(moved: int) -> Callable[[dict[str, Any]], bool]:
    return lambda now: life.phase(now) == "rolling" and now["change"]["moved"] == moved


MOMENTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "loading": lambda now: life.phase(now) == "loading",
    "opening": lambda now: life.phase(now) == "opening",
    **{f"rolling, {moved} of {WORKERS} moved": _rolling(moved) for moved in range(WORKERS)},
    "holding a canary": lambda now: life.phase(now) == "holding",
    "draining": lambda now: life.phase(now) == "" and bool(now["leaving"]),
}


def master_killed(moment: str, place: Path) -> list[str]:
    """At this moment; reloads are repeated until it is seen."""
    place.mkdir(parents=True)
    server = Server(place, f"--model=digits={model_path()}", "--workers", str(WORKERS))
    with ExitStack() as stack:
        server.start()
        held = [stack.enter_context(wire.dial(server.address)) for _ in range(4 * WORKERS)]
        assert held
        if not _catch(server, moment):
            server.stop()
            return [f"the moment was never seen: {moment}"]
        old, pids = server.pid, procs.descendants(server.pid)
        fds = {pid: os.pidfd_open(pid) for pid in pids}
        for fd in fds.values():
            stack.callback(os.close, fd)
        os.kill(old, signal.SIGKILL)
        assert server.process is not None
        server.process.wait()
        problems = [f"process {pid} lives on" for pid in living(fds)]
    return problems + _next_start(place, old)


def _catch(server: Server, moment: str) -> bool:
    """Reload until the moment is seen; the master is then stopped in it."""
    for _ in range(TRIES):
        life.Operator(server).rest()
        more = ("--canary", "34%") if "canary" in moment else ()
        reload = Reloading(server, *more)
        if reload.until(MOMENTS[moment], freeze=True) is not None:
            reload.abandon()
            return True
        reload.end()
    return False


def _next_start(place: Path, old: int) -> list[str]:
    """What the next server finds or leaves of the old one."""
    with Server(place, "--workers", "1") as server:
        left = [info.name for info in list_segments() if info.owner and info.owner.pid == old]
        left += [str(path) for path in server.work.iterdir() if f"-{old}-" in path.name]
        reply, _ = wire.exchange(server.address, wire.request("digits", INPUT))
        problems = [] if reply.outputs else ["the next server does not answer"]
    return problems + [f"left of the old one: {name}" for name in left]

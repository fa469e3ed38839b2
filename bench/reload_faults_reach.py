"""Others who reach for a server that reloads: a flood on its control socket, a second server.

Part of bench.reload_faults.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path

from bench import life
from bench.life import Holding
from bench.scene import Reloading, Scene
from bench.server import Server
from prefork.errors import PreforkError

FLOOD = 1000  # connections
CONFIG = 78  # sysexits.h
BACK = 30.0  # seconds after a flood in which the control socket must answer
LINES = (b"", b"\x00\xff garbage \n", b'{"command": "sta', b'{"command": "status"}\n')  # the last is never read


def flooded(place: Path) -> list[str]:
    """A reload is under way when the flood comes, and another follows when it has gone."""
    with Scene(place) as scene, ExitStack() as stack:
        life.put(scene.good, scene.live)
        reload = Reloading(scene.server)
        reload.until(lambda now: life.phase(now) != "")
        path = scene.server.runtime / "control.sock"
        opened = sum(_open(path, LINES[turn % len(LINES)], stack) for turn in range(FLOOD))
        reload.end()  # its questions may be refused meanwhile; the change goes on
        stack.close()
        problems = [] if opened else ["not one connection could be opened"]
        problems += _answers_again(scene)
        problems += ["the reload was lost"] if not problems and scene.answer() == scene.first else []
        problems += scene.renewed() if not problems else []
        now = Holding.of(scene.server, scene.master)
        # a generation that is kept for a rollback holds a segment and a few descriptors
        problems += [f"{now.fds - scene.before.fds} descriptors more"] if now.fds > scene.before.fds + 4 else []
        return problems + scene.lost()


def _open(path: Path, line: bytes, stack: ExitStack) -> bool:
    """One connection of the flood that stays; False when the queue is full."""
    sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    sock.setblocking(False)
    try:
        sock.connect(os.fspath(path))
        sock.send(line)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
            raise
        return error.errno != errno.EAGAIN
    return True


def _answers_again(scene: Scene) -> list[str]:
    end = time.monotonic() + BACK
    while time.monotonic() < end:
        try:
            scene.operator.rest()
            return []
        except PreforkError:
            time.sleep(0.05)
    return [f"no answer on the control socket for {BACK:.0f} s after the flood"]


def second(same: str, place: Path) -> list[str]:
    """Another server with the same runtime directory, or the same address, starts while the first reloads."""
    with Scene(place) as scene:
        life.put(scene.good, scene.live)
        reload = Reloading(scene.server)
        reload.until(lambda now: life.phase(now) != "")
        other = place / "other"
        other.mkdir()
        words = ("--runtime-dir", str(scene.server.runtime)) if same == "runtime" else ("--bind", scene.address)
        code = Server(other, f"--model=digits={scene.live}", *words).run_to_end()
        ended, said = reload.end()
        problems = [] if code == CONFIG else [f"exit {code}, expected {CONFIG}: {(other / 'stderr').read_text()}"]
        problems += [] if ended == 0 else [f"the reload of the first: exit {ended}: {said}"]
        return problems + scene.whole() + scene.lost()
